"""Transforms that take each row by itself, so that sinks can share one pass over the rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sinks._util.column_names import are_distinct, columns_of
from sinks.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class Projection(ABC):
    """A transform that makes at most one row of each row, whatever the other rows are.

    Of a job with several sinks, those without a transform and those with a projection get their
    rows in one pass: Spark computes and transfers each row once for all of them. Any other
    transform costs a Spark job of its own.
    """

    where: str | None = None
    """A condition in Spark SQL. Rows for which it is not true are left out."""

    @abstractmethod
    def columns(self, df: DataFrame) -> list[Column]:
        """Return the columns that the sink gets, as expressions on the columns of `df`."""

    def __call__(self, df: DataFrame) -> DataFrame:
        """Return what the sink writes of `df`."""
        kept = df.where(self.where) if self.where else df
        return kept.select(*self.columns(df))


@dataclass(frozen=True, init=False)
class Select(Projection):
    """A choice of columns and rows in Spark SQL, for the argument `transform` of a sink.

        Select("id", "upper(name) AS name", where="kind = 'order'")

    * `expressions` are the columns, as for `DataFrame.selectExpr`. Without any, the sink gets all
      columns.
    * `where` is a condition. Rows for which it is false or NULL are left out.

    An expression must give the same value whenever the same row is written again, so it has no
    place for `rand()` or the current time.
    """

    expressions: tuple[str, ...]
    where: str | None

    def __init__(self, *expressions: str, where: str | None = None) -> None:
        object.__setattr__(self, "expressions", expressions or ("*",))
        object.__setattr__(self, "where", where)

    def columns(self, df: DataFrame) -> list[Column]:
        from pyspark.sql import functions

        columns: list[Column] = []
        for expression in self.expressions:
            # Otherwise Spark itself knows which columns these are, whatever their names.
            if expression.strip() == "*" and are_distinct(df.columns):
                columns += columns_of(df)[1]
            else:
                columns.append(functions.expr(expression))
        return columns


def named(columns: Sequence[Column], names: Sequence[str]) -> list[Column]:
    """Give each column of a projection the name that it has in a DataFrame.

    Raises ConfigurationError if an expression makes several columns, as `s.*` does.
    """
    if len(columns) != len(names):
        raise ConfigurationError(
            f"a projection of {len(columns)} expressions makes {len(names)} columns "
            f"({', '.join(names)}). Where several sinks share the rows, or with `value_format`, "
            "each expression makes one column: name the fields in place of `s.*`"
        )
    return [column.alias(name) for column, name in zip(columns, names, strict=True)]
