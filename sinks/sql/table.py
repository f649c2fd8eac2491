"""The table that rows go to, as its database describes it, and how rows get in.

It includes the part of encoding Arrow record batches that is alike for all databases.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from sinks.arrow.convert import Convert, RefusedValue, Unfit, first_refused, short
from sinks.arrow.types import spark_name
from sinks.errors import BadValue, SchemaMismatch, TargetChanged
from sinks.sql.names import label

Mode = Literal["append", "upsert"]
OrderByNulls = Literal["error", "first"]
_OWN = {
    "tpc_place",
    "tpc_last",
    "tpc_part",
    "tpc_key",
    "tpc_deletes",
    "tpc_row",
    "tpc row",
    "tpc_transaction",
}
"""Columns that the sinks' staging tables and statements have in addition to those of the rows. A
database may not distinguish capitals."""


@dataclass(frozen=True)
class Column(ABC):
    """A column of a table.

    Its type in SQL is `declared`, or, if that is empty, `type`. `counter` says that the table
    itself gives each row another value.
    """

    name: str
    type: str
    declared: str = ""
    nullable: bool = True
    has_default: bool = False
    generated: bool = False
    counter: bool = False

    @property
    def in_sql(self) -> str:
        return self.declared or self.type

    @abstractmethod
    def conversion(self, arrow: pa.DataType) -> Convert:
        """Return how values of an Arrow type get into the column.

        The conversion refuses values that the column would round or cut. Raises Unfit for a type
        that does not go into the column.
        """

    @property
    def staged_as(self) -> str:
        """The column's type as staging tables show it."""
        return self.in_sql


ColumnT = TypeVar("ColumnT", bound=Column)


@dataclass(frozen=True)
class Unique:
    """A unique index over whole columns.

    `arbiter` says that upserts can go by it: it is not deferred, and has no period. `nulls_equal`
    says that it treats NULL as a value, which only one row may have. `period` are the two columns
    in which a period begins and ends (WITHOUT OVERLAPS); then rows that are equal in the other
    columns clash if their periods overlap.
    """

    name: str
    columns: tuple[str, ...]
    arbiter: bool = True
    nulls_equal: bool = False
    period: tuple[str, str] | None = None


@dataclass(frozen=True)
class ForeignKey:
    """A foreign key of a table.

    By its constraint `name` the table's `columns` refer to the columns `referred` of another table,
    or of the same one. If `columns` is empty, it is not known which columns these are.
    """

    name: str
    schema: str
    table: str
    columns: Sequence[str] = ()
    referred: Sequence[str] = ()


@dataclass(frozen=True)
class Target:
    """The table that rows go to.

    `schema` is "" for the one that the database takes when none is named.

    `constraints` names what judges a row there and cannot be judged in a staging table, such as
    foreign keys and triggers. `triggers` are what the database runs for each row when the query
    looks at the table first, with their definitions: what they do is intended. `other_uniques` are
    unique indexes that no upsert can go by: the columns that each reads, and what it is.
    `lacks_characters` says that the columns cannot hold every string.
    """

    schema: str
    name: str
    columns: tuple[Column, ...]
    uniques: tuple[Unique, ...] = ()
    constraints: tuple[str, ...] = ()
    referenced_by: tuple[str, ...] = ()
    triggers: Mapping[str, str] = field(default_factory=dict, compare=False)
    other_uniques: tuple[tuple[tuple[str, ...], str], ...] = ()
    lacks_characters: bool = False
    foreign_keys: tuple[ForeignKey, ...] = ()

    @property
    def own_keys(self) -> list[ForeignKey]:
        """The foreign keys by which the table refers to itself."""
        return [
            key for key in self.foreign_keys if (key.schema, key.table) == (self.schema, self.name)
        ]

    @property
    def label(self) -> str:
        return label(self.schema, self.name)

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def require_known_triggers(self, triggers: Mapping[str, str]) -> None:
        """Raise TargetChanged if a trigger is new or was altered since the query started.

        `triggers` are the present ones.
        """
        new = sorted(
            name for name, definition in triggers.items() if self.triggers.get(name) != definition
        )
        if new:
            raise TargetChanged(
                f"table {self.label} was changed while the query ran: {' and '.join(new)} is new "
                "or was altered, and may change or drop rows. Remove it, or start the query "
                "again, which accepts it"
            )

    def is_unique(self, keys: tuple[str, ...]) -> bool:
        """Tell whether upserts can go by these keys."""
        arbiters = [unique.arbiter for unique in self.uniques if set(unique.columns) == set(keys)]
        return bool(arbiters) and all(arbiters)

    def no_arbiters(self, keys: Iterable[str]) -> Iterator[str]:
        """Describe the unique indexes that upserts by `keys` cannot go by.

        Only indexes with some of these columns are described.
        """
        for unique in self.uniques:
            if set(unique.columns) & set(keys) and set(unique.columns) != set(keys):
                yield f"{unique.name} is on ({', '.join(unique.columns)})"
        yield from (what for columns, what in self.other_uniques if set(columns) & set(keys))

    def unfit(
        self, written: Sequence[str], staged: Iterable[tuple[str, str]] = ()
    ) -> Iterator[str]:
        """Yield why rows of the columns `written` cannot go in as they are.

        Each text also says what to change back. `staged` are columns with the types that their
        staging tables have.
        """
        now = {column.name: column for column in self.columns}
        for name in written:
            if name not in now:
                yield f'it has no column "{name}" any more: name it so again, or add it'
            elif now[name].generated:
                yield f'its column "{name}" is generated now: make it a plain one again'
        for name, kind in staged:
            column = now.get(name) if name in written else None
            if column and not column.generated and column.staged_as != kind:
                again = "change it back, and again when the rows are in"
                yield f'its column "{name}" was {kind} and is {column.staged_as}: {again}'
        for column in self.columns:
            if column.name not in written and not (
                column.nullable or column.has_default or column.generated
            ):
                yield (
                    f'its column "{column.name}" is NOT NULL, and the rows have none: give it a '
                    "default"
                )


# ---------------------------------------------------------------------- how rows get in
@dataclass(frozen=True)
class MergeOptions:
    """The options for rows on their way into the table: append them, or upsert them.

    An upsert keeps the last row of each key (by `order_by`), which replaces the row of that key, or
    deletes it if `delete_marker` is true in it. With `keep_newer` the sink drops a change that is
    older, by `order_by`, than the row that the table has. `order_by_nulls` says what a change
    without a value there is: a bad row ("error"), or older than every other change ("first").
    """

    mode: str = "append"
    keys: tuple[str, ...] = ()
    order_by: str | None = None
    delete_marker: str | None = None
    keep_newer: bool = False
    order_by_nulls: str = "error"

    @classmethod
    def of(
        cls,
        mode: str,
        keys: Sequence[str] | str,
        order_by: str | None = None,
        delete_marker: str | None = None,
        keep_newer: bool = False,
        order_by_nulls: str = "error",
    ) -> MergeOptions:
        """Make the options out of a sink's arguments. A single key may be given as a string."""
        names = (keys,) if isinstance(keys, str) else tuple(keys)
        return cls(mode, names, order_by, delete_marker, keep_newer, order_by_nulls)

    def __str__(self) -> str:
        """Describe the options in the words that committables keep.

        Later versions compare committables by these words, so the same options must always give the
        same text. It leaves out what only the task looks at, such as `order_by_nulls`.
        """
        if self.mode == "append":
            return self.mode
        parts = [f"{self.mode} by {', '.join(self.keys)}"]
        parts += [f"the last by {self.order_by}"] if self.order_by else []
        parts += [f"deletes by {self.delete_marker}"] if self.delete_marker else []
        return "; ".join([*parts, *["newer rows stay"] * self.keep_newer])

    def contradictions(self, strategy: str, two_phase: str) -> Iterable[str]:
        """Yield what cannot be meant, as far as that can be told without asking the server.

        `two_phase` is the name of the strategy in which each partition has a transaction of its own
        on the table, which is for appends only.
        """
        known = [name for name in ("auto", two_phase, "staged") if name]
        if strategy not in known:
            yield f"strategy={strategy!r} is not one of " + ", ".join(f'"{name}"' for name in known)
        if self.mode not in ("append", "upsert"):
            yield f'mode={self.mode!r} is not one of "append", "upsert"'
        if self.mode == "upsert":
            if not self.keys:
                yield 'mode="upsert" needs keys=[…], the columns of a unique index'
            if strategy == two_phase:
                yield (
                    'mode="upsert" needs strategy="staged": two prepared transactions with one key '
                    "block each other"
                )
            if self.keep_newer and not self.order_by:
                yield "keep_newer=True needs order_by, the column that tells which change is newer"
            if self.order_by_nulls not in ("error", "first"):
                yield f'order_by_nulls={self.order_by_nulls!r} is not one of "error", "first"'
            elif self.order_by_nulls != "error" and not self.order_by:
                yield (
                    f"order_by_nulls={self.order_by_nulls!r} needs order_by, the column that it "
                    "speaks of"
                )
        elif (
            self.keys
            or self.order_by
            or self.delete_marker
            or self.keep_newer
            or self.order_by_nulls != "error"
        ):
            yield (
                "keys, order_by, order_by_nulls, delete_marker and keep_newer belong to "
                'mode="upsert"'
            )
        if len(set(self.keys)) < len(self.keys):
            yield f"keys={list(self.keys)} names a column twice"
        if self.delete_marker in {*self.keys, self.order_by} - {None}:
            yield f"delete_marker={self.delete_marker!r} is a key or the order_by column too"

    def problems(self, schema: pa.Schema, target: Collection[str]) -> Iterable[str]:
        """Yield why a batch or its table does not fit the options.

        The batch has the columns of `schema`, and the table has the columns `target`.
        """
        for role, column in [
            *(("keys", key) for key in self.keys),
            ("order_by", self.order_by),
            ("delete_marker", self.delete_marker),
        ]:
            if column is not None and column not in schema.names:
                yield f"{role} names column {column!r}, which the batch has not"
        for name in (name for name in schema.names if name.lower() in _OWN):
            yield (
                f"column {name!r} has a name that the sink itself uses beside it: rename it in "
                "Spark"
            )
        if self.delete_marker in schema.names and not pa.types.is_boolean(
            schema.field(self.delete_marker).type
        ):
            kind = schema.field(self.delete_marker).type
            yield f"delete_marker {self.delete_marker!r} is {kind}, and must be boolean"
        if self.keep_newer and self.order_by not in target:
            yield (
                f"keep_newer=True needs the column {self.order_by!r} of order_by in the table, to "
                "compare with"
            )

    def written(self, columns: Sequence[str], target: Collection[str]) -> list[str]:
        """List those of the batch's columns that go into a table with the columns `target`."""
        extra = {self.delete_marker} | ({self.order_by} if self.order_by not in target else set())
        return [column for column in columns if column not in extra]

    def privileges(self, target: Target, strategy: str) -> list[str]:
        """List the privileges that the sink needs on the target."""
        upsert = self.mode == "upsert"
        needed = {
            "INSERT": True,
            "SELECT": strategy == "staged" and (upsert or target.uniques),
            "UPDATE": upsert,
            "DELETE": self.delete_marker,
        }
        return [privilege for privilege, is_needed in needed.items() if is_needed]

    def destination(self, target: Target) -> str:
        """Tell where rows go, and how, in the words by which committables are compared."""
        return f"{target.label} ({self})"


APPEND = MergeOptions()
_NO_ORDER = (
    "NULL in the column of order_by, so it is unknown which change of the key is newer: order by "
    'a column that each change has, or set order_by_nulls="first"'
)


# ---------------------------------------------------------------------- rows
class Encoder(Generic[ColumnT]):
    """Encode the batches that go into one table, whose `columns` the catalog told.

    Raises SchemaMismatch at once if `schema` does not fit, or later for a batch of another schema.
    Raises BadValue for a value that the column would not keep as it is. The error names table,
    column and row (counted from 1 over all batches), and says what the row begins with.
    """

    rows_at_once: ClassVar[int]
    bytes_at_once: ClassVar[int]
    """The number of bytes of which a piece should not have much more."""
    no_null: ClassVar[str] = ""
    """The complaint about a NULL in a column that takes none; if it is "", the server complains."""

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
        self._schema = schema
        self._merge = merge
        self._convert = [known[field.name].conversion(field.type) for field in schema]

    def slices(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one batch, some thousands at a time.

        Raises SchemaMismatch unless the batch has the columns of the encoder's schema.
        """
        if batch.schema.names != self._schema.names or batch.schema.types != self._schema.types:
            now, before = (
                ", ".join(f"{field.name} {field.type}" for field in x)
                for x in (batch.schema, self._schema)
            )
            after = f"after row {self.rows} the batches have other columns than at the start"
            raise SchemaMismatch(f"table {self.table}: {after}: {now}, not {before}")
        rows = min(
            self.rows_at_once, max(1, batch.num_rows * self.bytes_at_once // max(batch.nbytes, 1))
        )
        for start in range(0, batch.num_rows, rows):
            yield batch.slice(start, rows)

    def converted(self, batch: pa.RecordBatch) -> list[pa.Array]:
        arrays = []
        for column, convert, array in zip(self.columns, self._convert, batch.columns, strict=True):
            try:
                if array.null_count and column.name in self._merge.keys:
                    self._refuse_nulls(batch, column.name, array, "a key cannot be NULL")
                if self.no_null and array.null_count and not column.nullable:
                    self._refuse_nulls(batch, column.name, array, self.no_null)
                if (
                    column.name == self._merge.order_by
                    and self._merge.order_by_nulls == "error"
                    and array.null_count
                ):
                    raise RefusedValue(pc.index(array.is_null(), True).as_py(), _NO_ORDER)
                arrays.append(convert(array))
            except RefusedValue as refused:
                raise self.bad_value(batch, column.name, refused) from None
        return arrays

    def _refuse_nulls(self, batch: pa.RecordBatch, name: str, array: pa.Array, why: str) -> None:
        """Raise RefusedValue for the first NULL that its row may not have.

        A row that deletes needs nothing but its key.
        """
        missing = array.is_null()
        if self._merge.delete_marker and name not in self._merge.keys:
            missing = pc.and_not(missing, batch.column(self._merge.delete_marker).fill_null(False))
        if pc.any(missing).as_py():
            raise RefusedValue(pc.index(missing, True).as_py(), why)

    def bad_value(self, batch: pa.RecordBatch, name: str, refused: RefusedValue) -> BadValue:
        """Return an error that names the column and the row, and what tells the row from others.

        The latter are the row's first other columns, which are the keys more often than not.
        """
        others = [other for other in batch.schema.names if other != name][:3]
        values = ", ".join(
            f"{other}={short(batch.column(other)[refused.index])}" for other in others
        )
        begins = f" (the row begins {values})" if others else ""
        what = f'column "{name}": {refused}'
        where = f"table {self.table}: row {self.rows + refused.index + 1}"
        return BadValue(f"{where}, {what}{begins}").because(what)


class Values(Encoder[ColumnT]):
    """The encoder for drivers that take rows of Python values."""

    rows_at_once = 1000
    bytes_at_once = 16 * 2**20
    no_null = "NULL in a column that takes none"

    def of(self, batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
        """Return the rows, with Python's values."""
        columns = []
        for column, array in zip(self.columns, self.converted(batch), strict=True):
            try:
                columns.append(array.to_pylist())
            except (ValueError, OverflowError) as error:
                text = isinstance(error, UnicodeDecodeError)
                index = first_refused(array, pa.Array.to_pylist) or 0
                reason = "the text is not UTF-8" if text else "Python has no such value"
                raise self.bad_value(batch, column.name, RefusedValue(index, reason)) from None
        return list(zip(*columns, strict=True))


def mismatches(schema: pa.Schema, columns: Sequence[Column]) -> list[str]:
    """List every reason why rows of `schema` do not fit a table of `columns`; [] if they do."""
    known = {column.name: column for column in columns}
    reasons: list[str] = []
    written = Counter(schema.names)
    for name in sorted(name for name, times in written.items() if times > 1):
        reasons.append(f'column "{name}" comes more than once in the batch')
    for name, arrow in zip(schema.names, schema.types, strict=True):
        column = known.get(name)
        if column is None:
            similar = [other for other in known if other.lower() == name.lower()]
            hint = f' (there is "{similar[0]}"; capitals count)' if similar else ""
            add = "add it" if similar else 'add it (schema_evolution="add" does)'
            reasons.append(
                f'column "{name}" of the batch is not in the table{hint}: {add}, or drop it in '
                "Spark"
            )
        elif column.generated:
            reasons.append(
                f'column "{name}" is generated by the table and cannot be written: drop it in Spark'
            )
        else:
            try:
                column.conversion(arrow)
            except Unfit as unfit:
                kind = spark_name(arrow)
                reasons.append(f'column "{name}": {kind} does not go into {column.in_sql}: {unfit}')
    for column in columns:
        if column.name not in written and not (
            column.nullable or column.has_default or column.generated
        ):
            reasons.append(
                f'column "{column.name}" of the table is NOT NULL without default, and not in the '
                "batch"
            )
    return reasons
