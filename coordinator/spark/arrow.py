"""Rows on their way into Python, in record batches of bounded size, without Spark's own bound.

Before every row Spark sums up the size of the record batch so far (`ArrowWriter.sizeInBytes`), which takes longer than
all else on that way; only with a limit of 2147483647 bytes it does not (`BatchedPythonArrowInput.writeSizedBatch`, 4.0
to 4.3). Here the JVM compares each row by itself with its share of a record batch, which costs next to nothing and
bounds the batch as well. A larger row travels without its contents and without a hash, so that its task refuses it with
`LargeRow`; from then on, as long as the coordinator lives, Spark's bound is used. It is used too after a batch of few
rows: the comparison takes a projection more and twenty questions to the JVM in each batch, however small.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, reduce
from typing import TYPE_CHECKING

from sinks.row_hash import HASH_COLUMN, column, columns_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

    from coordinator.spark.internals import StreamExecution

MAX_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
MAX_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
UNLIMITED = "2147483647"

BATCH_BYTES = 64 * 2**20
"""Of the values in a record batch, as Spark's own limit is since 4.1."""

FEW_ROWS = 10_000
"""Of a batch, after which the next is expected to be as small."""


class RowTransfer:
    """The way of one query's rows into Python."""

    def __init__(self) -> None:
        self.limited_by_spark = False
        """Since there was a large row."""
        self.rows_before: int | None = None
        """Of the batch before, in all sinks, if tasks have written it."""
        self.execution: StreamExecution | None = None
        """That of the batch before, in a classic session."""

    @contextmanager
    def frames(self, hashed: Mapping[str, DataFrame], allowed: bool) -> Iterator[Mapping[str, DataFrame]]:
        """What to collect of each while this lasts. `allowed`: whether Spark's limit may be off meanwhile."""
        session = next(iter(hashed.values())).sparkSession
        few = self.rows_before is not None and self.rows_before <= FEW_ROWS
        limit = _row_limit(session) if allowed and not few and not self.limited_by_spark else None
        if limit is None or not all(can_be_bounded(df, limit) for df in hashed.values()):
            yield hashed
            return
        with setting(session, MAX_BYTES, UNLIMITED):
            yield {name: bounded(df, limit) for name, df in hashed.items()}


def runs_python(plan: str) -> bool:
    """Whether a physical plan hands rows to Python in record batches, which are read in its tasks under the same limit
    (ArrowEvalPython, MapInPandas, FlatMapGroupsInPandas, TransformWithStateInPySpark, …)."""
    return re.search(r"Arrow|Pandas|PySpark", plan) is not None


def _row_limit(session: SparkSession) -> int | None:
    """Bytes that a row may take for `BATCH_BYTES` to hold a record batch. None where users have set the limit."""
    records = int(session.conf.get(MAX_RECORDS) or 0)
    if records <= 0 or session.conf.get(MAX_BYTES, None) is not None:
        return None
    return BATCH_BYTES // records


def can_be_bounded(df: DataFrame, limit: int) -> bool:
    """Whether the size of its rows can be told, and what is the same for all of them leaves half of the limit."""
    kinds = [field.dataType for field in df.schema]
    return all(map(_is_known, kinds)) and sum(map(_fixed, kinds)) <= limit // 2


def bounded(hashed: DataFrame, limit: int) -> DataFrame:
    """Rows larger than `limit` bytes come without contents, and with NULL as their hash."""
    columns = _bounded(hashed.schema, limit, columns_of(hashed))
    return hashed.select(*columns) if columns else hashed


@lru_cache
def _bounded(schema: StructType, limit: int, used_with: object) -> Sequence[Column]:
    """None where all rows have the same size."""
    from pyspark.sql import functions

    *fields, _ = schema
    columns = {field.name: column(field.name) for field in fields}
    sizes = [size for f in fields for size in _sizes(columns[f.name], f.dataType)]
    if not sizes:
        return ()
    fits = reduce(operator.add, sizes) <= limit - sum(_fixed(f.dataType) for f in fields)
    for field in fields:
        if _is_variable(field.dataType):
            full = columns[field.name]
            columns[field.name] = functions.when(fits, full).otherwise(_emptied(full, field.dataType))
    hashes = functions.when(fits, functions.col(HASH_COLUMN))
    return [*(c.alias(name) for name, c in columns.items()), hashes.alias(HASH_COLUMN)]


@contextmanager
def setting(session: SparkSession, key: str, value: str) -> Iterator[None]:
    """`value` in the block, then what was there before. The session keeps that too: with Spark Connect (up to 4.2) it
    is the user's own, and outlives a worker that is killed in the block."""
    conf, saved = session.conf, f"spark.coordinator.before.{key}"
    before = conf.get(saved, None)
    if before is None:
        before = conf.get(key, None) or ""
        conf.set(saved, before)
    conf.set(key, value)
    try:
        yield
    finally:
        if before:
            conf.set(key, before)
        else:
            conf.unset(key)
        conf.unset(saved)


# ---------------------------------------------------------------------- by type
_WIDTHS = {
    "void": 1,
    "boolean": 1,
    "byte": 1,
    "short": 2,
    "integer": 4,
    "long": 8,
    "float": 4,
    "double": 8,
    "date": 4,
    "time": 8,
    "timestamp": 8,
    "timestamp_ntz": 8,
    "decimal": 16,
    "daytimeinterval": 8,
    "yearmonthinterval": 4,
}
"""Bytes of a value in Arrow, by the name of its type."""


def _fixed(kind: DataType) -> int:
    """Bytes that each value takes at least: its own, or an offset."""
    from pyspark.sql.types import StructType

    if isinstance(kind, StructType):
        return sum(_fixed(field.dataType) for field in kind)
    return _WIDTHS.get(type(kind).typeName(), 4)


def _is_known(kind: DataType) -> bool:
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StringType, StructType

    if isinstance(kind, StructType):
        return all(_is_known(field.dataType) for field in kind)
    if isinstance(kind, ArrayType):
        return _is_known(kind.elementType)
    if isinstance(kind, MapType):
        return _is_known(kind.keyType) and _is_known(kind.valueType)
    return isinstance(kind, (StringType, BinaryType)) or type(kind).typeName() in _WIDTHS


def _sizes(column: Column, kind: DataType) -> Iterator[Column]:
    """The bytes beyond `_fixed`, as one or more terms that are never NULL."""
    from pyspark.sql import functions
    from pyspark.sql.types import ArrayType, MapType, StringType, StructType

    none = functions.lit(0).cast("long")
    if isinstance(kind, StructType):
        for field in kind:
            yield from _sizes(column.getField(field.name), field.dataType)
    elif isinstance(kind, MapType):
        yield from _sizes(functions.map_keys(column), ArrayType(kind.keyType))
        yield from _sizes(functions.map_values(column), ArrayType(kind.valueType))
    elif isinstance(kind, ArrayType):
        each = kind.elementType
        yield functions.coalesce(functions.array_size(column).cast("long") * _fixed(each), none)
        if isinstance(each, StringType):
            yield from _sizes(functions.array_join(column, ""), each)
        elif _is_variable(each):
            all_of = functions.aggregate(column, none, lambda sum, e: reduce(operator.add, _sizes(e, each), sum))
            yield functions.coalesce(all_of, none)
    elif _is_variable(kind):
        yield functions.coalesce(functions.octet_length(column).cast("long"), none)


def _is_variable(kind: DataType) -> bool:
    from pyspark.sql.types import StructType

    if isinstance(kind, StructType):
        return any(_is_variable(field.dataType) for field in kind)
    return type(kind).typeName() not in _WIDTHS


def _emptied(column: Column, kind: DataType) -> Column:
    """A small value of the same type, NULL only where the column is."""
    from pyspark.sql import functions
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(kind, StructType):
        return functions.struct(*(_emptied(column.getField(f.name), f.dataType).alias(f.name) for f in kind))
    if isinstance(kind, MapType):
        return functions.map_from_entries(functions.slice(functions.map_entries(column), 1, 0))
    if isinstance(kind, ArrayType):
        return functions.slice(column, 1, 0)
    return functions.substring(column, 1, 0) if _is_variable(kind) else column
