"""What a sink asks of the server before it writes: can the table take the rows, and by which strategy."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.types as at

from sinks.diagnosis import Finding, SchemaChange, SchemaDiff
from sinks.errors import ConfigurationError, SchemaMismatch
from sinks.spark_types import KINDS
from sinks.sql.backend import Backend, Plan
from sinks.sql.errors import explained
from sinks.sql.evolution import SchemaEvolution, addition, lacking
from sinks.sql.ledger import Ledger
from sinks.sql.names import label
from sinks.sql.target import Target

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planner:
    """The sink as the user configured it. `sink` and `ledger` are names, `table` is as the user wrote it. `home` has
    schema and name of the table as they were at first, which stay."""

    backend: Backend
    sink: str
    table: str
    create_table: bool
    ledger: str
    evolution: SchemaEvolution = "none"
    home: tuple[str, str] | None = None

    def check(self, connection: Any, batch: pa.Schema) -> Plan:
        """The plan for rows of `batch`, for which the table may yet be altered. Raises
        ConfigurationError (SchemaMismatch if it is only about columns) with all reasons at once."""
        self.ready(connection)
        schema, name = self.locate(connection)
        target = self.backend.describe(connection, schema, name)
        if target is None:
            self._create(connection, schema, name, batch)
            target = self._describe(connection, schema, name)
        changes = self._additions(connection, target, batch) if self.evolution == "add" else []
        columns, others = self._mismatches(target, batch, changes), self._problems(connection, target, batch)
        if columns or others:
            kind = ConfigurationError if others else SchemaMismatch
            reasons = "".join(f"\n  - {reason}" for reason in [*others, *columns])
            raise kind(f"sink {self.sink!r} cannot write to table {target.label} ({self.backend}):{reasons}")
        for change in changes:
            logger.info("sink %r alters its table before it writes the first batch: %s", self.sink, change)
        return self._plan(connection, target)

    def _problems(self, connection: Any, target: Target, batch: pa.Schema) -> list[str]:
        merge = self.backend.merge
        others = [*merge.problems(batch, target.names), *self.backend.problems(connection, target, self.ledger)]
        by = merge.order_by
        if not self.backend.SORTS_TEXTS and by in batch.names and not _sortable(batch.field(by).type):
            others.append(
                f"order_by names the column {by!r}, which is no number and no time: the database sorts "
                "others by their beginning alone, so cast it in Spark"
            )
        return others

    def _mismatches(self, target: Target, batch: pa.Schema, changes: Sequence[SchemaChange]) -> list[str]:
        """Those that the changes do not fix."""
        added = {change.column for change in changes}
        written = set(self.backend.merge.written(batch.names, target.names)) - added
        return self.backend.mismatches(pa.schema([field for field in batch if field.name in written]), target)

    # ------------------------------------------------------------------ changes of the table
    def diff(self, connection: Any, batch: pa.Schema) -> SchemaDiff:
        """Between `batch` and the table: also what the sink would not alter. Changes nothing."""
        self.ready(connection)
        schema, name = self.locate(connection)
        target = self.backend.describe(connection, schema, name)
        if target is None:
            will = "the first batch creates it" if self.create_table else "create it, or let create_table=True do so"
            return SchemaDiff(unfit=(f"there is no table {label(schema, name)} at {self.backend}: {will}",))
        changes = self._additions(connection, target, batch)
        unfit = [*self.backend.merge.problems(batch, target.names), *self._mismatches(target, batch, changes)]
        return SchemaDiff(tuple(changes), tuple(unfit))

    def evolve(self, connection: Any, batch: pa.Schema) -> None:
        """Add to the table what it lacks for rows of `batch`."""
        schema, name = self.locate(connection)

        def due() -> list[SchemaChange]:
            return self._additions(connection, self._describe(connection, schema, name), batch)

        with explained(self.backend.fault, label(schema, name), f"sink {self.sink!r}, which alters it,"):
            for change in due():
                logger.info("sink %r alters its table: %s", self.sink, change)
                try:
                    with self.backend.at_work(connection), self.backend.transaction(connection):
                        self.backend.execute(connection, change.statement)
                except Exception as error:
                    fault = self.backend.fault(error)
                    if fault is None or fault.kind == "blocked":
                        raise
                    if change.column in {missing.column for missing in due()}:  # nobody else has added it
                        raise ConfigurationError(
                            f"sink {self.sink!r}: table {label(schema, name)} cannot be altered: {fault.text}. It "
                            f"takes: {change.statement}. Fix what the server names, or let the table's owner run it, "
                            "and start the query again"
                        ) from error
        if missing := due():
            raise ConfigurationError(
                f"sink {self.sink!r}: table {label(schema, name)} was altered, and does not show it; it still takes: "
                f"{'; '.join(change.statement for change in missing)}. Run this by hand, or give the columns plainer "
                "names"
            )

    def _additions(self, connection: Any, target: Target, batch: pa.Schema) -> list[SchemaChange]:
        """The columns that the table lacks for `batch`."""
        backend, table = self.backend, self.backend.quote(target.schema, target.name)
        fields, changes = {field.name: field for field in batch}, []
        written = [fields[name] for name in backend.merge.written(list(fields), target.names)]
        for field in lacking(written, target.names):
            try:
                definition = backend.definition(connection, target, field)
            except SchemaMismatch as unfit:
                raise SchemaMismatch(f'sink {self.sink!r}: column "{field.name}" cannot be added: {unfit}') from None
            automatic = self.evolution == "add"
            changes.append(addition(backend.dialect, table, field.name, definition, automatic=automatic))
        return changes

    def load(self, connection: Any) -> Plan:
        """The plan without a look at any rows. Raises ConfigurationError if there is no table."""
        return self._plan(connection, self._describe(connection, *self.locate(connection)))

    def diagnose(self, connection: Any) -> Iterable[Finding]:
        """What can be told without a batch."""
        self.ready(connection)
        schema, name = self.locate(connection)
        target = self.backend.describe(connection, schema, name)
        if target is None and self.create_table:
            yield Finding.ok(f"the table {label(schema, name)} will be created with the first batch")
        elif target is None:
            yield Finding.error(
                f"there is no table {label(schema, name)} at {self.backend}{self.backend.UNSEEN}",
                "create it, or set create_table = true",
            )
        else:
            problems = list(self.backend.problems(connection, target, self.ledger))
            for problem in problems:
                what, _, fix = problem.partition(": ")
                yield Finding.error(what, fix or "fix what is named")
            if not problems:
                strategy = self._plan(connection, target).strategy
                yield Finding.ok(f"table {target.label} can be written by strategy {strategy}")

    def trial(self, connection: Any) -> tuple[pa.Schema, Plan] | None:
        """A column of the table with a type that fits, and the plan for it; None if there is no table yet."""
        target = self.backend.describe(connection, *self.locate(connection))
        if target is None:
            return None
        name = next(iter([*self.backend.merge.keys, *target.names]))
        schemas = [pa.schema([(name, kind)]) for kind in dict.fromkeys(KINDS.values())]
        schema = min(schemas, key=lambda schema: len(self.backend.mismatches(schema, target)))
        return schema, self._plan(connection, target)

    def find_ledger(self, connection: Any) -> tuple[str, Ledger | None]:
        """The schema of table and ledger, and the ledger if there is one."""
        schema, _ = self.locate(connection)
        return schema, Ledger.find(self.backend, connection, schema, self.ledger)

    def ensure_ledger(self, connection: Any) -> Ledger:
        schema, _ = self.locate(connection)
        return Ledger.ensure(self.backend, connection, schema, self.ledger)

    def ready(self, connection: Any) -> None:
        """Raise ConfigurationError for a server that the sink cannot work with at all."""
        if reason := self.backend.unfit_server(connection):
            raise ConfigurationError(f"sink {self.sink!r}: {reason}")

    def locate(self, connection: Any) -> tuple[str, str]:
        return self.home or self.backend.locate(connection, self.table)

    def _describe(self, connection: Any, schema: str, name: str) -> Target:
        target = self.backend.describe(connection, schema, name)
        if target is None:
            raise ConfigurationError(f"sink {self.sink!r}: there is no table {label(schema, name)} at {self.backend}")
        return target

    def _plan(self, connection: Any, target: Target) -> Plan:
        strategy, reason = self.backend.choose(connection, target)
        ledger = Ledger.ensure(self.backend, connection, target.schema, self.ledger)
        log = logging.getLogger(type(self.backend).__module__)
        log.info("sink %r writes to %s by strategy %s: %s", self.sink, target.label, strategy, reason)
        triggers = self.backend.triggers(connection, target.schema, target.name)
        return Plan(replace(target, triggers=triggers), ledger, strategy)

    def _create(self, connection: Any, schema: str, name: str, batch: pa.Schema) -> None:
        keys, marker = self.backend.merge.keys, self.backend.merge.delete_marker
        if not self.create_table:
            raise ConfigurationError(
                f"sink {self.sink!r}: there is no table {label(schema, name)} at {self.backend}{self.backend.UNSEEN}."
                " Create it, or let create_table=True do so"
            )
        if missing := [key for key in keys if key not in batch.names]:
            raise SchemaMismatch(f"sink {self.sink!r}: the batch has no column {', '.join(missing)}, named in keys")
        try:
            self.backend.create(connection, schema, name, [field for field in batch if field.name != marker])
        except ConfigurationError as error:
            raise type(error)(f"sink {self.sink!r}: {error}") from error.__cause__
        logger.info("sink %r created table %s", self.sink, label(schema, name))


def _sortable(kind: pa.DataType) -> bool:
    """A number or a time."""
    return bool(at.is_primitive(kind) or at.is_decimal(kind) or at.is_null(kind))
