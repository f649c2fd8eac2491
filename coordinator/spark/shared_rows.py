"""The rows of a batch that several sinks share, so that Spark computes and transfers each row once.

Sinks without a transform get the batch's columns. Each other projection adds one column, a struct
of what its sinks get. The struct is NULL in rows that the projection leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from coordinator.protocol.ports import Sink
from coordinator.task.row_hash import HASH_COLUMN, hash_of_struct, with_row_hash
from coordinator.task.task import Share
from sinks._util.column_names import are_distinct, quoted
from sinks.errors import ConfigurationError
from sinks.projection import Projection, named

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_PROJECTED = "__tpc_projected_"


def may_share(sink: Sink) -> bool:
    """Tell whether a sink takes each row by itself, in a task with others."""
    by_row = sink.transform is None or isinstance(sink.transform, Projection)
    return by_row and not sink.writes_alone


@dataclass(frozen=True)
class SharedRows:
    """The rows of several sinks in one DataFrame, and how each sink's task gets its own of them."""

    rows: DataFrame
    shares: Mapping[str, Share]

    @classmethod
    def of(cls, df: DataFrame, sinks: Mapping[str, Sink]) -> SharedRows | None:
        """Return the rows that these sinks share of a batch.

        Returns None if the names of its columns do not tell them apart. Raises ConfigurationError
        for a projection that does not take each row by itself.
        """
        if not are_distinct(df.columns):
            return None
        transforms = {name: sink.transform for name, sink in sinks.items()}
        projections: list[Projection] = []
        for transform in transforms.values():
            if isinstance(transform, Projection) and transform not in projections:
                projections.append(transform)
        rows = df
        whole: list[str] = []
        if None in transforms.values():
            rows = with_row_hash(df)
            whole = rows.columns
        columns = [quoted(name) for name in whole]
        projected: list[Column | str] = []
        for number, projection in enumerate(projections):
            user = next(name for name, each in transforms.items() if each == projection)
            column = f"{_PROJECTED}{number}"
            rows, with_hash = _with_struct(df, rows, column, projection, user)
            projected.append(with_hash.alias(column))
        if projections:
            rows = rows.select(*columns, *projected)
        shares: dict[str, Share] = {}
        for name, transform in transforms.items():
            if isinstance(transform, Projection):
                shares[name] = Projected(len(whole) + projections.index(transform))
            else:
                shares[name] = FirstColumns(len(whole))
        return cls(rows, shares)


@dataclass(frozen=True)
class FirstColumns:
    """The share of a sink without a transform: all columns of the batch, and their hash."""

    count: int

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.select(range(self.count))


@dataclass(frozen=True)
class Projected:
    """The share of a sink with a projection: the fields of one column, where it is not NULL."""

    column: int

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_struct_array(batch.column(self.column).drop_null())


def _with_struct(
    df: DataFrame, rows: DataFrame, column: str, projection: Projection, sink: str
) -> tuple[DataFrame, Column]:
    """Add the struct of a projection to `rows`, and return the column that has the hash, too."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions
    from pyspark.sql.types import StructType

    schema = projection(df).schema
    if not are_distinct(schema.names):
        raise ConfigurationError(
            f"sink {sink!r}: two columns of its projection have one name: {schema.names}"
        )
    try:
        fields = functions.struct(*named(projection.columns(df), schema.names))
        if projection.where:
            fields = functions.when(functions.expr(projection.where), fields)
        rows = rows.withColumn(column, fields)
    except AnalysisException as error:
        raise ConfigurationError(
            f"sink {sink!r}: its projection does not take each row by itself, so it cannot share "
            "the rows with other sinks. Give it as a function, transform=lambda df: "
            f"df.selectExpr(…): {error}"
        ) from error
    hashed = hash_of_struct(column, StructType(schema.fields), df.sparkSession).alias(HASH_COLUMN)
    names = [functions.col(f"{quoted(column)}.{quoted(name)}").alias(name) for name in schema.names]
    with_hash = functions.struct(*names, hashed)
    is_there = functions.isnotnull(functions.col(quoted(column)))
    return rows, functions.when(is_there, with_hash) if projection.where else with_hash
