"""Access to the columns of a DataFrame, whatever their names are.

Spark's API treats a name as an expression: a dot in it leads to a field of a struct, `*` means all
columns, and capitals count only if `spark.sql.caseSensitive` says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

RecordBatches = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def are_distinct(names: Sequence[str]) -> bool:
    """Tell whether Spark tells the columns apart by their names, even if capitals do not count."""
    return len({name.upper().lower() for name in names}) == len(names)


def quoted(name: str) -> str:
    """Return the name as an expression that means the column."""
    return f"`{name.replace('`', '``')}`"


def by_place(df: DataFrame) -> DataFrame:
    """Rename the columns of `df` to `_0`, `_1`, …, which are names that no expression mistakes.

    This takes Spark some time, so it is for DataFrames that need it.
    """
    return df.toDF(*map(place, range(len(df.columns))))


def place(number: int) -> str:
    """Return the name that `by_place` gives a column."""
    return f"_{number}"


def columns_of(df: DataFrame) -> tuple[DataFrame, list[Column]]:
    """Return a DataFrame to select from, and all columns of `df` by their names.

    The DataFrame is `df` itself, unless Spark cannot tell its columns apart by their names.
    """
    from pyspark.sql import functions

    names = df.columns
    if are_distinct(names):
        return df, [functions.col(quoted(name)) for name in names]
    return by_place(df), [
        functions.col(place(number)).alias(name) for number, name in enumerate(names)
    ]


def map_in_arrow(df: DataFrame, function: RecordBatches, schema: StructType | str) -> DataFrame:
    """Call `df.mapInArrow`, whatever the names of the columns are.

    Up to Spark 4.3, `mapInArrow` takes no column whose name is not a plain one, because it quotes
    no name.
    """
    names = df.columns
    if are_distinct(names) and not any(re.search(r"[.`]|^\*$", name) for name in names):
        return df.mapInArrow(function, schema)
    return by_place(df).mapInArrow(_Named(function, tuple(names)), schema)


@dataclass(frozen=True)
class _Named:
    """A function for a task that gives record batches the names of their columns.

    `function` gets the record batches with these names.
    """

    function: RecordBatches
    names: tuple[str, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return self.function(batch.rename_columns(list(self.names)) for batch in batches)
