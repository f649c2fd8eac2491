"""Arrow record batches as what a database takes rows by: the part that is alike in all of them."""

from __future__ import annotations

from abc import ABC
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from sinks.arrow.convert import RefusedValue, Unfit, short
from sinks.arrow.types import spark_name
from sinks.errors import BadValue, SchemaMismatch
from sinks.sql.options import APPEND, MergeOptions
from sinks.sql.target import Column

ColumnT = TypeVar("ColumnT", bound=Column)


class Encoder(ABC, Generic[ColumnT]):
    """Encodes the batches that go into one table, whose `columns` the catalog told.

    Raises SchemaMismatch at the start if `schema` does not fit, or later for a batch of another schema, and BadValue
    for a value that the column would not keep as it is, naming table, column and row (counted from 1 over all batches)
    and what the row begins with.
    """

    rows_at_once: ClassVar[int]
    bytes_at_once: ClassVar[int]
    """What a piece should not have much more of."""
    no_null: ClassVar[str] = ""
    """What to say of a NULL in a column that takes none; the server says it, if this is empty."""

    def __init__(
        self,
        schema: pa.Schema,
        columns: Sequence[ColumnT],
        table: str,
        merge: MergeOptions = APPEND,
    ) -> None:
        if reasons := mismatches(schema, columns):
            raise SchemaMismatch(f"table {table}: " + "; ".join(reasons))
        known = {column.name: column for column in columns}
        self.table = table
        self.columns = [known[name] for name in schema.names]
        self.rows = 0
        self._schema, self._merge = schema, merge
        self._convert = [known[field.name].conversion(field.type) for field in schema]

    def slices(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The rows of one batch, some thousands at a time. Raises SchemaMismatch unless it has the first one's
        columns."""
        if batch.schema.names != self._schema.names or batch.schema.types != self._schema.types:
            now, before = (", ".join(f"{field.name} {field.type}" for field in x) for x in (batch.schema, self._schema))
            after = f"after row {self.rows} the batches have other columns than at the start"
            raise SchemaMismatch(f"table {self.table}: {after}: {now}, not {before}")
        rows = min(self.rows_at_once, max(1, batch.num_rows * self.bytes_at_once // max(batch.nbytes, 1)))
        for start in range(0, batch.num_rows, rows):
            yield batch.slice(start, rows)

    def converted(self, batch: pa.RecordBatch) -> list[pa.Array]:
        arrays = []
        for column, convert, array in zip(self.columns, self._convert, batch.columns, strict=True):
            try:
                if self.no_null and array.null_count and not column.nullable:
                    self._refuse_nulls(batch, column.name, array)
                arrays.append(convert(array))
            except RefusedValue as refused:
                raise self.bad_value(batch, column.name, refused) from None
        return arrays

    def _refuse_nulls(self, batch: pa.RecordBatch, name: str, array: pa.Array) -> None:
        """A row that deletes needs nothing but its key."""
        missing = array.is_null()
        if self._merge.delete_marker and name not in self._merge.keys:
            missing = pc.and_not(missing, batch.column(self._merge.delete_marker).fill_null(False))
        if pc.any(missing).as_py():
            raise RefusedValue(pc.index(missing, True).as_py(), self.no_null)

    def bad_value(self, batch: pa.RecordBatch, name: str, refused: RefusedValue) -> BadValue:
        """Names column, row, and what tells it from others: its first other columns, which are the keys more often than
        not."""
        others = [other for other in batch.schema.names if other != name][:3]
        values = ", ".join(f"{other}={short(batch.column(other)[refused.index])}" for other in others)
        begins = f" (the row begins {values})" if others else ""
        what = f'column "{name}": {refused}'
        where = f"table {self.table}: row {self.rows + refused.index + 1}"
        return BadValue(f"{where}, {what}{begins}").because(what)


class Values(Encoder[ColumnT]):
    """For drivers that take rows of Python values."""

    rows_at_once = 1000
    bytes_at_once = 16 * 2**20
    no_null = "NULL in a column that takes none"

    def of(self, batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
        """The rows, as Python has their values."""
        columns = []
        for column, array in zip(self.columns, self.converted(batch), strict=True):
            try:
                columns.append(array.to_pylist())
            except (ValueError, OverflowError) as error:
                text = isinstance(error, UnicodeDecodeError)
                reason = "the text is not UTF-8" if text else "Python has no such value"
                raise self.bad_value(batch, column.name, RefusedValue(_first_unreadable(array), reason)) from None
        return list(zip(*columns, strict=True))


def _first_unreadable(array: pa.Array) -> int:
    for index, value in enumerate(array):
        try:
            value.as_py()
        except (ValueError, OverflowError):
            return index
    return 0


def mismatches(schema: pa.Schema, columns: Sequence[Column]) -> list[str]:
    """Every reason why rows of `schema` do not fit a table of `columns`; [] if they do."""
    known = {column.name: column for column in columns}
    reasons: list[str] = []
    written = Counter(schema.names)
    for name in sorted(name for name, times in written.items() if times > 1):
        reasons.append(f'column "{name}" comes more than once in the batch')
    for field in schema:
        column = known.get(field.name)
        if column is None:
            similar = [name for name in known if name.lower() == field.name.lower()]
            hint = f' (there is "{similar[0]}"; capitals count)' if similar else ""
            reasons.append(f'column "{field.name}" of the batch is not in the table{hint}: add it, or drop it in Spark')
        elif column.generated:
            reasons.append(f'column "{field.name}" is generated by the table and cannot be written: drop it in Spark')
        else:
            try:
                column.conversion(field.type)
            except Unfit as unfit:
                kind = spark_name(field.type)
                reasons.append(f'column "{field.name}": {kind} does not go into {column.in_sql}: {unfit}')
    for column in columns:
        if column.name not in written and not (column.nullable or column.has_default or column.generated):
            reasons.append(f'column "{column.name}" of the table is NOT NULL without default, and not in the batch')
    return reasons
