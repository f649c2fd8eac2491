from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest

from sinks.sql.catalog import order_by_foreign_keys
from sinks.sql.table import ForeignKey, Target


def tables(referred: Mapping[str, Sequence[str]]) -> list[Target]:
    """Return tables of one schema, each with the tables that it refers to."""
    return [
        Target("shop", name, (), foreign_keys=tuple(ForeignKey(f"to_{other}", "shop", other) for other in others))
        for name, others in referred.items()
    ]


@pytest.mark.parametrize(
    ("referred", "order"),
    [
        ({"child": ["parent"], "parent": []}, ["parent", "child"]),
        ({"a": ["b"], "b": ["c"], "c": []}, ["c", "b", "a"]),
        ({"a": ["d"], "b": ["a"], "c": ["a", "b"], "d": []}, ["d", "a", "b", "c"]),
        ({"z": [], "a": []}, ["a", "z"]),  # of which none refers to the other
        ({"emp": ["emp"], "dept": []}, ["dept", "emp"]),
        ({"child": ["elsewhere"]}, ["child"]),
        # a circle, and a table that refers to one of its tables
        ({"a": ["b"], "b": ["c"], "c": ["b"]}, ["c", "b", "a"]),
    ],
)
def test_each_table_comes_after_those_that_it_refers_to(
    referred: Mapping[str, Sequence[str]], order: Sequence[str]
) -> None:
    """In whatever order the tables are given, so that two drivers choose the same."""
    for given in itertools.permutations(tables(referred)):
        assert [target.name for target in order_by_foreign_keys(given, lambda target: target)] == order


def test_tables_of_one_name_in_two_schemas_and_a_table_that_comes_twice() -> None:
    parent = Target("shop", "t", ())
    child = Target("a", "t", (), foreign_keys=(ForeignKey("up", "shop", "t"),))
    items = [(child, 1), (parent, 2), (child, 3)]
    assert order_by_foreign_keys(items, lambda item: item[0]) == [(parent, 2), (child, 1), (child, 3)]
