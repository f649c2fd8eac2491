"""The table that a sink writes into: found or created, judged, altered, and planned for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic

import pyarrow as pa
import pyarrow.types as at

from sinks._util.log import get_logger
from sinks.arrow.spark_types import KINDS
from sinks.arrow.types import lacking, spark_name
from sinks.diagnosis import Finding, SchemaChange, SchemaDiff
from sinks.errors import ConfigurationError, SchemaMismatch
from sinks.sql.backend import Backend
from sinks.sql.databases import addition
from sinks.sql.dialect import TargetT
from sinks.sql.ledger import Ledger
from sinks.sql.names import label
from sinks.sql.routes import Route
from sinks.sql.routing import Routing
from sinks.sql.server import ConnectionT, explained
from sinks.sql.transaction import Plan

logger = get_logger(__name__)


class TargetTable(Generic[ConnectionT, TargetT]):
    """Find or create the table, tell whether rows fit it, alter it, and plan how rows go in.

    It holds the plan that was made last, which travels to the tasks.
    """

    def __init__(
        self,
        backend: Backend[ConnectionT, TargetT],
        table: str,
        *,
        sink: str,
        create_table: bool,
        ledger: str,
        evolves: bool,
        key: str = "",
        routing: Routing[ConnectionT, TargetT] | None = None,
    ) -> None:
        """Keep the options of the sink named `sink`; nothing is connected yet.

        With `routing`, the table gets those rows that name it `key`.
        """
        self._backend = backend
        self._server = backend.server
        self._catalog = backend.catalog
        self._dialect = backend.dialect
        self.merge = backend.merge
        self._table = table
        self._sink = sink
        self._create_table = create_table
        self._ledger = ledger
        self._evolves = evolves
        self._key = key
        self._routing = routing
        self._location: tuple[str, str] | None = None
        """Schema and name of the table as found first: they stay."""
        self.plan: Plan[ConnectionT, TargetT] | None = None
        self._logged = ""

    # ------------------------------------------------------------------ whether rows can go in
    def check(self, schema: pa.Schema) -> None:
        """Find or create the table, see whether it takes rows of `schema`, and choose the strategy.

        Raises ConfigurationError (SchemaMismatch if it is only about columns) with all reasons at
        once.
        """
        try:
            with self.usable_connection() as connection:
                target = self.describe(connection, schema)
                if self._routing:
                    schema = self._routing.reader(self._key, target, schema).schema
                additions = self._additions(connection, target, schema) if self._evolves else []
                columns = self._mismatches(target, schema, additions)
                if others := self._problems(connection, target, schema):
                    raise self._unfit(ConfigurationError, target, [*others, *columns])
                if columns:
                    raise self._unfit(SchemaMismatch, target, columns)
                if self.plan_for(connection, target).strategy == "staged" and (
                    reasons := [*self._backend.staging.unstageable(connection, target, schema)]
                ):
                    raise self._unfit(ConfigurationError, target, reasons)
        except Exception as error:
            if (reason := self._server.misconfigured(error)) is None:
                raise
            raise ConfigurationError(f"sink {self._sink!r}: {reason}") from None

    def _unfit(
        self, kind: type[ConfigurationError], target: TargetT, reasons: Sequence[str]
    ) -> ConfigurationError:
        listed = "".join(f"\n  - {reason}" for reason in reasons)
        return kind(
            f"sink {self._sink!r} cannot write to table {target.label} ({self._server}):{listed}"
        )

    def _problems(self, connection: ConnectionT, target: TargetT, batch: pa.Schema) -> list[str]:
        merge = self.merge
        others = [
            *merge.problems(batch, target.names),
            *self._backend.problems(connection, target, self._ledger),
        ]
        by = merge.order_by
        kind = batch.field(by).type if by in batch.names else pa.null()
        # a number or a time
        is_sortable = at.is_primitive(kind) or at.is_decimal(kind) or at.is_null(kind)
        if at.is_nested(kind) or not (self._dialect.SORTS_TEXTS or is_sortable):
            others.append(
                f"order_by names the column {by!r}, a {spark_name(kind)}, which the database sorts "
                "in another way than Spark: cast it to a number or a time in Spark"
            )
        return others

    def _mismatches(
        self, target: TargetT, batch: pa.Schema, additions: Sequence[SchemaChange]
    ) -> list[str]:
        """List the mismatches that the additions do not fix."""
        written = set(self.merge.written(batch.names, target.names)) - {a.column for a in additions}
        added = {a.column.lower(): a.column for a in additions}
        alike = [name for name in batch.names if name in written and name.lower() in added]
        reasons = [
            f'column "{name}" of the batch is not in the table, and differs from '
            f'"{added[name.lower()]}" by capitals alone, of which schema_evolution="add" adds only '
            "one: add it by hand, or rename or drop it in Spark"
            for name in alike
        ]
        others = [field for field in batch if field.name in written and field.name not in alike]
        return reasons + self._catalog.mismatches(pa.schema(others), target)

    @contextmanager
    def usable_connection(self) -> Iterator[ConnectionT]:
        """Lend a connection.

        Raises ConfigurationError for a server that the sink cannot work with at all.
        """
        with self._server.lend() as connection:
            if reason := self._server.unfit(connection):
                raise ConfigurationError(f"sink {self._sink!r}: {reason}")
            yield connection

    # --------------------------------------------------------------- finding, creating and planning
    def locate(self, connection: ConnectionT) -> tuple[str, str]:
        """Return schema and name of the table, as it was found first."""
        return self._location or self._catalog.locate(connection, self._table)

    def describe(self, connection: ConnectionT, create_for: pa.Schema | None = None) -> TargetT:
        """Read the table.

        If there is none and the sink may create it, the table is created for rows of `create_for`.
        Raises ConfigurationError if there is still none.
        """
        schema, name = self.locate(connection)
        target = self._catalog.describe(connection, schema, name)
        if target is None and create_for is not None and self._create_table:
            self._create(connection, schema, name, create_for)
            target = self._catalog.describe(connection, schema, name)
        if target is None:
            missing = (
                f"there is no table {label(schema, name)} at "
                f"{self._server}{self._catalog.NO_TABLE_HINT}"
            )
            raise ConfigurationError(
                f"sink {self._sink!r}: {missing}. Create it, or let create_table=True do so"
            )
        return target

    def _create(self, connection: ConnectionT, schema: str, name: str, batch: pa.Schema) -> None:
        keys = self.merge.keys
        marker = self.merge.delete_marker
        if missing := [key for key in keys if key not in batch.names]:
            raise SchemaMismatch(
                f"sink {self._sink!r}: the batch has no column {', '.join(missing)}, named in keys"
            )
        try:
            self._catalog.create(
                connection, schema, name, [field for field in batch if field.name != marker]
            )
        except ConfigurationError as error:
            raise type(error)(f"sink {self._sink!r}: {error}") from error.__cause__
        logger.info("sink %r created table %s", self._sink, label(schema, name))

    def planned(self) -> Plan[ConnectionT, TargetT]:
        """Return the plan of `check`, or make one now: recovery comes before the first batch."""
        if self.plan is None:
            with self._server.lend() as connection:
                return self.plan_for(connection, self.describe(connection))
        return self.plan

    def route(self) -> Route[ConnectionT, TargetT]:
        """Return the way into the table, as planned."""
        return Route(self._backend, self.planned())

    def plan_for(self, connection: ConnectionT, target: TargetT) -> Plan[ConnectionT, TargetT]:
        """Choose the strategy, and make the ledger if there is none."""
        strategy, reason = self._backend.choose(connection, target)
        if how := self._server.describe_loading(connection):
            reason = f"{reason}; {how}"
        ledger = Ledger.ensure(self._catalog, connection, target.schema, self._ledger)
        line = f"sink {self._sink!r} writes to {target.label} by strategy {strategy}: {reason}"
        if line != self._logged and self._routing is None:
            get_logger(type(self._server).__module__).info(line)
        self._logged = line
        triggers = self._catalog.triggers(connection, target.schema, target.name)
        self.plan = Plan(replace(target, triggers=triggers), ledger, strategy, self._key)
        self._location = target.schema, target.name
        return self.plan

    def forget_plan(self) -> None:
        """Forget the plan, so that it is made again when it is needed next."""
        self.plan = None

    def close(self) -> None:
        """Let the strategy be logged again when it is chosen next."""
        self._logged = ""

    def probe_schema(self) -> pa.Schema | None:
        """Return a schema of one column of the table with a type that fits the column.

        Return None if there is no table yet.
        """
        with self._server.lend() as connection:
            target = self._catalog.describe(connection, *self.locate(connection))
            if target is None:
                return None
            self.plan_for(connection, target)
            name = next(iter([*self.merge.keys, *target.names]))
            schemas = [pa.schema([(name, kind)]) for kind in dict.fromkeys(KINDS.values())]
            return min(schemas, key=lambda schema: len(self._catalog.mismatches(schema, target)))

    # ------------------------------------------------------------------ the ledger beside it
    def find_ledger(self, connection: ConnectionT) -> tuple[str, Ledger[ConnectionT] | None]:
        """Return the schema of table and ledger, and the ledger if there is one."""
        schema, _ = self.locate(connection)
        return schema, Ledger.find(self._catalog, connection, schema, self._ledger)

    def ensured_ledger(self, connection: ConnectionT) -> Ledger[ConnectionT]:
        """Find the ledger, or create it."""
        schema, _ = self.locate(connection)
        return Ledger.ensure(self._catalog, connection, schema, self._ledger)

    # ------------------------------------------------------------------ changes of the table
    def evolve(self, connection: ConnectionT, batch: pa.Schema) -> None:
        """Add to the table the columns that it lacks for rows of `batch`."""
        table = label(*self.locate(connection))

        def due() -> list[SchemaChange]:
            return self._additions(connection, self.describe(connection), batch)

        with explained(self._server.fault, table, f"sink {self._sink!r}, which alters it,"):
            for change in due():
                logger.info("sink %r alters its table: %s", self._sink, change)
                try:
                    with self._server.at_work(connection), self._server.transaction(connection):
                        self._server.execute(connection, change.statement)
                except Exception as error:
                    fault = self._server.fault(error)
                    if fault is None or fault.kind == "blocked":
                        raise
                    # nobody else has added it
                    if change.column in {missing.column for missing in due()}:
                        raise ConfigurationError(
                            f"sink {self._sink!r}: table {table} cannot be altered: {fault.text}. "
                            f"It takes: {change.statement}. Fix what the server names, or let the "
                            "table's owner run it, and start the query again"
                        ) from error
        if missing := due():
            raise ConfigurationError(
                f"sink {self._sink!r}: table {table} was altered, and does not show it; it still "
                f"takes: {'; '.join(change.statement for change in missing)}. Run this by hand, or "
                "give the columns plainer names"
            )

    def schema_diff(self, batch: pa.Schema) -> SchemaDiff:
        with self.usable_connection() as connection:
            schema, name = self.locate(connection)
            target = self._catalog.describe(connection, schema, name)
            if target is None:
                will = (
                    "the first batch creates it"
                    if self._create_table
                    else "create it, or let create_table=True do so"
                )
                return SchemaDiff(
                    unfit=(f"there is no table {label(schema, name)} at {self._server}: {will}",)
                )
            additions = self._additions(connection, target, batch)
            problems = self.merge.problems(batch, target.names)
            return SchemaDiff(
                tuple(additions), (*problems, *self._mismatches(target, batch, additions))
            )

    def _additions(
        self, connection: ConnectionT, target: TargetT, batch: pa.Schema
    ) -> list[SchemaChange]:
        """List the columns that the table lacks for `batch`."""
        table = self._dialect.quote(target.schema, target.name)
        fields = {field.name: field for field in batch}
        changes = []
        for field in lacking(
            [fields[name] for name in self.merge.written(list(fields), target.names)], target.names
        ):
            try:
                definition = self._catalog.definition(connection, target, field)
            except SchemaMismatch as unfit:
                raise SchemaMismatch(
                    f'sink {self._sink!r}: column "{field.name}" cannot be added: {unfit}'
                ) from None
            changes.append(
                addition(self._dialect.name, table, field.name, definition, automatic=self._evolves)
            )
        return changes

    # ------------------------------------------------------------------ for operators
    def findings(self, connection: ConnectionT) -> Iterator[Finding]:
        """Yield what the server tells an operator."""
        yield from self._server.findings(connection)
        yield from self._backend.prepared.findings(connection, self._backend.strategy)

    def findings_of_table(self, connection: ConnectionT) -> Iterator[Finding]:
        """Yield what the table tells an operator, without a batch."""
        schema, name = self.locate(connection)
        target = self._catalog.describe(connection, schema, name)
        if target is None and self._create_table:
            yield Finding.ok(
                f"the table {label(schema, name)} will be created with the first batch"
            )
        elif target is None:
            yield Finding.error(
                f"there is no table {label(schema, name)} at "
                f"{self._server}{self._catalog.NO_TABLE_HINT}",
                "create it, or set create_table = true",
            )
        else:
            problems = list(self._backend.problems(connection, target, self._ledger))
            for problem in problems:
                what, _, fix = problem.partition(": ")
                yield Finding.error(what, fix or "fix what is named")
            if not problems:
                strategy = self.plan_for(connection, target).strategy
                yield Finding.ok(f"table {target.label} can be written by strategy {strategy}")
