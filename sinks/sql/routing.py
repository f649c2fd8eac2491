"""Rows that name the table that they go to, and carry its values in one column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Generic, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sinks.arrow.convert import RefusedValue, Unfit
from sinks.arrow.types import is_text
from sinks.dead_letters import Refusal, write_and_find_refused
from sinks.errors import BadValue, ConfigurationError
from sinks.sql.backend import Backend
from sinks.sql.dialect import TargetT
from sinks.sql.payload import Payload, payload_of
from sinks.sql.routes import Routes
from sinks.sql.server import ConnectionT
from sinks.sql.strategies import identity_of
from sinks.sql.table import ForeignKey, MergeOptions, Mode, OrderByNulls, Target
from sinks.sql.transaction import RowTransaction
from sinks.transaction import TransactionContext

TABLE_COLUMN = "table"
PAYLOAD_COLUMN = "payload"


class TableOptions(TypedDict, total=False):
    """The options of one table to which rows name the way.

    `table` is its name in the database, by default the name that rows have. `columns` are the only
    fields of the payload that are written. The other options are those of the sink, and take the
    place of these.
    """

    table: str
    columns: Sequence[str]
    mode: Mode
    keys: Sequence[str]
    order_by: str | None
    order_by_nulls: OrderByNulls
    delete_marker: str | None
    keep_newer: bool


@dataclass(frozen=True)
class NamedTable(Generic[ConnectionT, TargetT]):
    """A table of a sink whose rows name their tables."""

    table: str
    backend: Backend[ConnectionT, TargetT]
    columns: tuple[str, ...] | None


@dataclass(frozen=True)
class Routing(Generic[ConnectionT, TargetT]):
    """The tables that rows may name, by the names that rows have, and the columns of the rows.

    `table_column` has the name, and `payload_column` the values.
    """

    tables: Mapping[str, NamedTable[ConnectionT, TargetT]]
    table_column: str
    payload_column: str

    @classmethod
    def of(
        cls,
        sink: str,
        tables: Mapping[str, TableOptions],
        table_column: str | None,
        payload_column: str | None,
        merge: MergeOptions,
        backend: Callable[[MergeOptions], Backend[ConnectionT, TargetT]],
    ) -> Routing[ConnectionT, TargetT]:
        """Make the routing out of a sink's arguments, which are those of `routing_of`."""
        named = {}
        problems = [] if tables else ["tables={} names no table"]
        for key, options in tables.items():
            known = set(TableOptions.__annotations__)
            if not isinstance(options, Mapping) or not known.issuperset(options):
                problems.append(
                    f"tables[{key!r}] takes the options {', '.join(sorted(known))}, not {options!r}"
                )
                continue
            if not key:
                problems.append('tables={"": …} has a table without a name')
            # the options of an upsert mean nothing for a table that is appended to
            inherits = options.get("mode", merge.mode) == merge.mode
            inherited = vars(merge if inherits else MergeOptions())
            own: dict[str, Any] = {
                name: value for name, value in options.items() if name in inherited
            }
            columns = options.get("columns")
            named[key] = NamedTable(
                options.get("table", key),
                backend(MergeOptions.of(**{**inherited, **own})),
                None if columns is None else tuple(columns),
            )
        if problems:
            raise ConfigurationError(f"sink {sink!r}: " + "; ".join(problems))
        return cls(named, table_column or TABLE_COLUMN, payload_column or PAYLOAD_COLUMN)

    # ------------------------------------------------------------------ the columns of rows
    def problems(self, batch: pa.Schema) -> Iterator[str]:
        """Yield why rows of this schema cannot name their tables, or carry no values."""
        roles = {"table_column": self.table_column, "payload_column": self.payload_column}
        for role, name in roles.items():
            if name not in batch.names:
                yield f"{role} is {name!r}, which the batch has not"
        if self.table_column in batch.names and not is_text(batch.field(self.table_column).type):
            yield f"the column {self.table_column!r} names the table, so it must be a string"
        used = {self.table_column, self.payload_column}
        for named in self.tables.values():
            used |= self.beside(named.backend.merge, batch.names)
        if others := [name for name in batch.names if name not in used]:
            yield (
                f"the columns {', '.join(others)} go nowhere, because the values of a row are in "
                f"{self.payload_column!r}: put them there, or drop them in Spark"
            )

    def beside(self, merge: MergeOptions, names: Sequence[str]) -> set[str]:
        """Return the columns that a table's merge looks at and that are not in the payload."""
        wanted = {merge.order_by, merge.delete_marker} - {None}
        return {name for name in names if name in wanted}

    def reader(self, key: str, target: Target, batch: pa.Schema) -> RowReader:
        """Return what makes the rows of a table. Raises ConfigurationError."""
        named = self.tables[key]
        merge = named.backend.merge
        beside = self.beside(merge, batch.names)
        kind = batch.field(self.payload_column).type
        try:
            payload = payload_of(kind, target.columns, named.columns, beside)
        except Unfit as unfit:
            raise ConfigurationError(f"table {target.label}: {unfit}") from None
        fields = [batch.field(name) for name in batch.names if name in beside]
        schema = pa.schema([*payload.schema, *fields])
        return RowReader(self.payload_column, merge, payload, schema)

    # ------------------------------------------------------------------ rows
    def split(self, batch: pa.RecordBatch, keys: Sequence[str]) -> list[tuple[str, pa.Array]]:
        """Return the places of the rows of each table, in the order of `keys`.

        Rows that name none of them come first, under "".
        """
        names = batch.column(self.table_column)
        found = pc.index_in(names, pa.array(keys, names.type))
        codes = found.fill_null(-1).to_numpy()
        order = np.argsort(codes, kind="stable")
        starts = np.searchsorted(codes[order], range(-1, len(keys) + 1))
        return [
            (key, pa.array(order[begin:end], pa.int64()))
            for key, (begin, end) in zip(["", *keys], pairwise(starts), strict=True)
            if begin < end
        ]

    def stranger(self, batch: pa.RecordBatch, row: int) -> BadValue:
        """Return the error for a row that names no table of the sink."""
        name = batch.column(self.table_column)[row].as_py()
        known = ", ".join([*self.tables][:5]) + (", …" if len(self.tables) > 5 else "")
        what = f'column "{self.table_column}": {name!r} is none of the tables {known}'
        return BadValue(
            f"row {row + 1} of a record batch, {what}: add it to tables=, filter such rows out in "
            "Spark, or set dead_letters="
        ).because(what)


def routing_of(
    sink: str,
    tables: Mapping[str, TableOptions] | None,
    table_column: str | None,
    payload_column: str | None,
    merge: MergeOptions,
    backend: Callable[[MergeOptions], Backend[ConnectionT, TargetT]],
) -> Routing[ConnectionT, TargetT] | None:
    """Make the routing out of a sink's arguments; return None if rows do not name their tables.

    `merge` are the sink's own options for the merge, and `backend` makes the backend of a table.
    Raises ConfigurationError for options that there are not.
    """
    if tables is not None:
        return Routing.of(sink, tables, table_column, payload_column, merge, backend)
    if table_column or payload_column:
        raise ConfigurationError(
            f"sink {sink!r}: table_column and payload_column belong to tables=, the tables that "
            "rows may name"
        )
    return None


@dataclass(frozen=True)
class RowReader:
    """Make the rows of one table out of rows that carry them as a payload."""

    payload_column: str
    merge: MergeOptions
    payload: Payload
    schema: pa.Schema

    def rows(self, batch: pa.RecordBatch, table: str) -> pa.RecordBatch:
        """Return the rows. Raises BadValue for one that is none of the table."""
        marker = self.merge.delete_marker
        goes = batch.column(marker).fill_null(False) if marker else None
        try:
            arrays = self.payload.arrays(batch.column(self.payload_column), goes)
        except RefusedValue as refused:
            what = f'column "{self.payload_column}": {refused}'
            where = f"table {table}: row {refused.index + 1} of a record batch"
            raise BadValue(f"{where}, {what}").because(what) from None
        others = self.schema.names[len(arrays) :]
        return pa.RecordBatch.from_arrays(
            [*arrays, *(batch.column(name) for name in others)], schema=self.schema
        )


class RoutedTransaction(RowTransaction[ConnectionT], Generic[ConnectionT, TargetT]):
    """The transaction of one partition whose rows name their tables.

    It has a part for each table, which begins with the first row of the table. All parts are in one
    transaction of the server, which the first part has begun.
    """

    def __init__(
        self,
        context: TransactionContext,
        routing: Routing[ConnectionT, TargetT],
        routes: Routes[ConnectionT, TargetT],
    ) -> None:
        """Keep the routes; nothing is begun yet."""
        server = routes.all[0].backend.server
        is_staged = routes.plan.strategy == "staged"
        # the first part tells the name of a prepared transaction
        identity = identity_of(routes.schema, context.transaction_id) if is_staged else {}
        super().__init__(context, identity, routes.label, server.fault)
        self._routing = routing
        self._routes = routes.by_key
        self._readers: dict[str, RowReader] = {}
        self._parts: dict[str, RowTransaction[ConnectionT]] = {}
        self._active = ""
        self._is_sealed = False

    @property
    def parts(self) -> Mapping[str, RowTransaction[ConnectionT]]:
        return self._parts

    @property
    def first(self) -> RowTransaction[ConnectionT]:
        """The part that has begun the transaction."""
        return next(iter(self._parts.values()))

    # ------------------------------------------------------------------ rows
    def write(self, batch: pa.RecordBatch) -> None:
        for key, places in self._routing.split(batch, list(self._routes)):
            if not key:
                raise self._routing.stranger(batch, places[0].as_py())
            rows = self._rows(key, batch.take(places))
            self._part(key).write(rows)

    def write_good_rows(self, batch: pa.RecordBatch, most: int) -> list[Refusal]:
        """Write the rows that the tables take, and return the refusals of the others."""
        refused: list[Refusal] = []
        for key, places in self._routing.split(batch, list(self._routes)):
            if not key:
                strangers = places.to_pylist()[: most + 1]
                refused += [
                    Refusal.of(row, self._routing.stranger(batch, row)) for row in strangers
                ]
                continue
            found = self._write_good_rows(key, batch.take(places), most)
            refused += [replace(each, row=places[each.row].as_py()) for each in found]
        return sorted(refused, key=lambda refusal: refusal.row)

    def _write_good_rows(self, key: str, batch: pa.RecordBatch, most: int) -> list[Refusal]:
        part = self._part(key)

        def encode(some: pa.RecordBatch) -> None:
            part.encode(self._rows(key, some))

        def put(some: pa.RecordBatch) -> None:
            part.put(self._rows(key, some))

        return write_and_find_refused(batch, encode, put, most)

    def _rows(self, key: str, batch: pa.RecordBatch) -> pa.RecordBatch:
        return self._reader(key).rows(batch, self._routes[key].target.label)

    def _reader(self, key: str) -> RowReader:
        if key not in self._readers:
            self._readers[key] = self._routing.reader(
                key, self._routes[key].target, self.context.schema
            )
        return self._readers[key]

    def _part(self, key: str) -> RowTransaction[ConnectionT]:
        """Return the part for a table, which has the connection until another part is asked for."""
        if self._active not in ("", key):
            self._parts[self._active].pause()
        if key not in self._parts:
            route = self._routes[key]
            context = replace(self.context, schema=self._reader(key).schema)
            part = route.add_part(self.first, context) if self._parts else route.begin(context)
            if route.plan.strategy != "staged":
                part.own_keys = self._own_keys(route.target)
            self._parts[key] = part
            if len(self._parts) == 1:
                self.connection = part.connection
                self.identity = part.identity
        self._active = key
        return self._parts[key]

    def _own_keys(self, target: Target) -> list[ForeignKey]:
        """Return the foreign keys by which a table refers to a table of the sink."""
        own = {(route.target.schema, route.target.name) for route in self._routes.values()}
        return [key for key in target.foreign_keys if (key.schema, key.table) in own]

    def encode(self, batch: pa.RecordBatch) -> object:
        raise NotImplementedError("the parts encode their rows")

    def put(self, batch: pa.RecordBatch) -> None:
        raise NotImplementedError("the parts put in their rows")

    # ------------------------------------------------------------------ the end
    def finish(self) -> int:
        if not self._parts:  # no row has come
            self._part(next(iter(self._routes)))
        return sum(part.finish() for part in self._parts.values())

    def prepare(self) -> None:
        self._sealed(self.first.prepare)

    def commit(self) -> None:
        self._sealed(self.first.commit)

    def _sealed(self, end: Callable[[], None]) -> None:
        try:
            end()
            self._is_sealed = True  # another may have the connection
        finally:
            self.may_be_durable = self.first.may_be_durable

    def discard(self) -> None:
        """Roll all parts back, first the one that uses the connection."""
        if self._is_sealed:
            return
        for key in sorted(self._parts, key=lambda key: key != self._active):
            self._parts[key].discard()
