"""The rows that are written: the same values as Spark and as PostgreSQL expressions, both over a
number `i`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class Column:
    name: str
    type: str
    """In PostgreSQL."""
    spark: str
    postgres: str
    jdbc: str = ""
    """What Spark's JDBC writer needs in place of `spark`, if it cannot write that."""


@dataclass(frozen=True)
class Shape:
    name: str
    columns: tuple[Column, ...]

    def of(self, numbers: DataFrame, *, jdbc: bool = False) -> DataFrame:
        """The rows over a DataFrame whose only column is `i`."""
        return numbers.selectExpr(
            *(f"{(jdbc and c.jdbc) or c.spark} AS {c.name}" for c in self.columns)
        )

    def create_table(self, table: str) -> str:
        return f"CREATE TABLE {table} ({', '.join(f'{c.name} {c.type}' for c in self.columns)})"

    def select(self, start: int, stop: int) -> str:
        """A query for the rows with start <= i < stop."""
        values = ", ".join(f"({c.postgres})::{c.type}" for c in self.columns)
        return f"SELECT {values} FROM generate_series({start}::bigint, {stop - 1}::bigint) AS g (i)"


PLAIN = Shape(
    "plain",
    (
        Column("id", "bigint", "i", "i"),
        Column(
            "name", "text", "concat('user-', lpad(i, 7, '0'))", "'user-' || lpad(i::text, 7, '0')"
        ),
        Column("amount", "double precision", "i + 0.5D", "i + 0.5"),
        Column("qty", "int", "cast(i % 100 AS int)", "i % 100"),
        Column(
            "ts",
            "timestamptz",
            "timestamp_millis(1767225600000 + i)",
            "timestamptz '2026-01-01 00:00:00+00' + i * interval '1 millisecond'",
        ),
    ),
)

_STRUCT = "named_struct('city', concat('city-', i % 50), 'zip', cast(i % 10000 AS int))"

WIDE = Shape(
    "wide",
    (
        *PLAIN.columns,
        Column("price", "numeric(12,2)", "cast(i / 4D AS decimal(12,2))", "i / 4.0"),
        Column("total", "numeric(38,10)", "cast(i * 1000000 AS decimal(38,10))", "i * 1000000"),
        Column(
            "address",
            "jsonb",
            _STRUCT,
            "jsonb_build_object('city', 'city-' || i % 50, 'zip', i % 10000)",
            jdbc=f"to_json({_STRUCT})",
        ),
        Column(
            "tags", "text[]", "array('a', concat('tag-', i % 10))", "ARRAY['a', 'tag-' || i % 10]"
        ),
        Column(
            "scores",
            "int[]",
            "array(cast(i % 7 AS int), cast(i % 11 AS int))",
            "ARRAY[i % 7, i % 11]",
        ),
    ),
)

SHAPES = {shape.name: shape for shape in (PLAIN, WIDE)}
