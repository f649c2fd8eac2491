"""Which types are wider than which, and what a batch needs."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sinks.diagnosis import VARCHAR
from sinks.sql.evolution import Shape, holds, lacking, needed, shape_of


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
        ("int", "tinyint(1)"),
        ("double", "float(7,4)"),
        ("varchar(60) utf8mb4_general_ci", "varchar(5) utf8mb4_bin"),
        ("timestamp(6)", "timestamp(3)"),
    ],
)
def test_what_is_no_wider_type_of_the_same_kind_does_not(now: str, then: str) -> None:
    assert not holds(now, then)


@pytest.mark.parametrize(
    ("declared", "kind", "wider"),
    [
        ("integer", pa.int64(), Shape("integer", 64)),
        ("bigint", pa.int32(), None),
        ("integer", pa.float64(), None),
        ("real", pa.float64(), Shape("float", 64)),
        ("numeric(6,2)", pa.decimal128(10, 0), Shape("decimal", 10, 2)),
        ("numeric(6,2)", pa.decimal128(4, 4), Shape("decimal", 4, 4)),
        ("numeric(6,2)", pa.int64(), None),
        ("varchar(5)", pa.string(), Shape("text", 60)),
        ("varchar(80)", pa.string(), None),
    ],
)
def test_a_column_becomes_as_wide_as_both_need(declared: str, kind: pa.DataType, wider: Shape | None) -> None:
    needs = needed(pa.field("v", kind, metadata={VARCHAR: "varchar(60)"} if pa.types.is_string(kind) else None))
    has = shape_of(declared)
    assert has is not None
    assert needs is not None
    assert has.widened(needs) == wider


def test_a_string_without_a_length_needs_none_and_unsigned_is_left_alone() -> None:
    assert needed(pa.field("v", pa.string())) is None
    assert shape_of("int unsigned") is None


def test_a_column_that_comes_twice_but_for_capitals_is_lacking_once() -> None:
    fields = [pa.field(name, pa.int64()) for name in ("ID", "more", "More")]
    assert [field.name for field in lacking(fields, ["id"])] == ["more"]
