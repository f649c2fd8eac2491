"""Which types are wider than which, and what a table lacks for a batch."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sinks.sql.evolution import lacking
from sinks.sql.target import holds


@pytest.mark.parametrize(
    ("now", "then"),
    [
        ("bigint", "integer"),
        ("bigint(20)", "int(11)"),
        ("integer", "smallint"),
        ("double precision", "real"),
        ("double", "float"),
        ("numeric(12,2)", "numeric(6,2)"),
        ("NUMERIC(12, 4)", "NUMERIC(6, 2)"),
        ("character varying(60)", "character varying(5)"),
        ("varchar(60) utf8mb4_bin", "varchar(5) utf8mb4_bin"),
        ("bigint unsigned", "int unsigned"),
        ("int", "tinyint(1)"),
        ("xml", "xml"),
    ],
)
def test_what_was_written_for_a_narrower_type_fits(now: str, then: str) -> None:
    assert holds(now, then)
    assert now == then or not holds(then, now)


@pytest.mark.parametrize(
    ("now", "then"),
    [
        ("numeric(12,4)", "numeric(10,0)"),  # fewer digits before the point
        ("numeric(12,0)", "numeric(6,2)"),
        ("numeric", "numeric(6,2)"),
        ("double precision", "integer"),
        ("numeric(20,0)", "bigint"),
        ("bigint unsigned", "int"),
        ("bigint", "int unsigned"),
        ("text", "character varying(5)"),
        ("bigint[]", "integer[]"),
        ("double", "float(7,4)"),
        ("varchar(60) utf8mb4_general_ci", "varchar(5) utf8mb4_bin"),
        ("timestamp(6)", "timestamp(3)"),
    ],
)
def test_what_is_no_wider_type_of_the_same_kind_does_not(now: str, then: str) -> None:
    assert not holds(now, then)


def test_a_column_that_comes_twice_but_for_capitals_is_lacking_once() -> None:
    fields = [pa.field(name, pa.int64()) for name in ("ID", "more", "More")]
    assert [field.name for field in lacking(fields, ["id"])] == ["more"]
