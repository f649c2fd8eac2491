"""What a sink asks of the server before it writes: can the table take the rows, and by which strategy."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Generic

import pyarrow as pa

from sinks.diagnosis import Finding
from sinks.errors import ConfigurationError, SchemaMismatch
from sinks.sql.dialect import Dialect, Plan, T, TargetT
from sinks.sql.ledger import Ledger
from sinks.sql.names import label
from sinks.sql.server import C

logger = logging.getLogger(__name__)

_KINDS = (
    pa.int64(),
    pa.int32(),
    pa.int16(),
    pa.string(),
    pa.float64(),
    pa.bool_(),
    pa.date32(),
    pa.timestamp("us", "UTC"),
    pa.timestamp("us"),
    pa.binary(),
    pa.decimal128(10, 2),
)


@dataclass(frozen=True)
class Planner(Generic[C, TargetT, T]):
    """The sink as the user configured it. `sink` and `ledger` are names, `table` is as the user wrote it."""

    dialect: Dialect[C, TargetT, T]
    sink: str
    table: str
    create_table: bool
    ledger: str

    def check(self, connection: C, batch: pa.Schema) -> Plan[C, TargetT]:
        """The plan for rows of `batch`. Raises ConfigurationError (SchemaMismatch if it is only about columns) with all
        reasons at once."""
        self.ready(connection)
        schema, name = self._locate(connection)
        target = self.dialect.describe(connection, schema, name)
        if target is None:
            self._create(connection, schema, name, batch)
            target = self._describe(connection, schema, name)
        merge = self.dialect.merge
        written = merge.written(batch.names, target.names)
        columns = self.dialect.mismatches(pa.schema([field for field in batch if field.name in written]), target)
        others = [*merge.problems(batch, target.names), *self.dialect.problems(connection, target, self.ledger)]
        if columns or others:
            kind = ConfigurationError if others else SchemaMismatch
            reasons = "".join(f"\n  - {reason}" for reason in [*others, *columns])
            raise kind(f"sink {self.sink!r} cannot write to table {target.label} ({self._place}):{reasons}")
        return self._plan(connection, target, batch)

    def load(self, connection: C) -> Plan[C, TargetT]:
        """The plan without a look at any rows. Raises ConfigurationError if there is no table."""
        return self._plan(connection, self._describe(connection, *self._locate(connection)), None)

    def diagnose(self, connection: C) -> Iterable[Finding]:
        """What can be told without a batch."""
        self.ready(connection)
        schema, name = self._locate(connection)
        target = self.dialect.describe(connection, schema, name)
        if target is None and self.create_table:
            yield Finding.ok(f"the table {label(schema, name)} will be created with the first batch")
        elif target is None:
            others = self.dialect.similar(connection, schema, name)
            hint = f"; did you mean {' or '.join(others)}?" if others else ""
            yield Finding.error(
                f"there is no table {label(schema, name)} at {self._place}{self.dialect.UNSEEN}",
                f"create it, or set create_table = true{hint}",
            )
        else:
            problems = list(self.dialect.problems(connection, target, self.ledger))
            for problem in problems:
                what, _, mend = problem.partition(": ")
                yield Finding.error(what, mend or "mend what is named")
            if not problems:
                strategy = self._plan(connection, target, None).strategy
                yield Finding.ok(f"table {target.label} can be written by strategy {strategy}")

    def trial(self, connection: C) -> tuple[pa.Schema, Plan[C, TargetT]] | None:
        """A column of the table with a type that fits, and the plan for it; None if there is no table yet."""
        target = self.dialect.describe(connection, *self._locate(connection))
        if target is None:
            return None
        name = next(iter([*self.dialect.merge.keys, *target.names]))
        schemas = [pa.schema([(name, kind)]) for kind in _KINDS]
        schema = min(schemas, key=lambda schema: len(self.dialect.mismatches(schema, target)))
        return schema, self._plan(connection, target, schema)

    def find_ledger(self, connection: C) -> tuple[str, Ledger[C] | None]:
        """The schema of table and ledger, and the ledger if there is one."""
        schema, _ = self._locate(connection)
        return schema, self.dialect.LEDGER.find(self.dialect.server, connection, schema, self.ledger)

    def find_target(self, connection: C) -> TargetT | None:
        return self.dialect.describe(connection, *self._locate(connection))

    def ensure_ledger(self, connection: C) -> Ledger[C]:
        schema, _ = self._locate(connection)
        return self.dialect.LEDGER.ensure(self.dialect.server, connection, schema, self.ledger)

    def ready(self, connection: C) -> None:
        """Raise ConfigurationError for a server that the sink cannot work with at all."""
        if reason := self.dialect.unfit_server(connection):
            raise ConfigurationError(f"sink {self.sink!r}: {reason}")

    @property
    def _place(self) -> str:
        return str(self.dialect.server)

    def _locate(self, connection: C) -> tuple[str, str]:
        return self.dialect.locate(connection, self.table)

    def _describe(self, connection: C, schema: str, name: str) -> TargetT:
        target = self.dialect.describe(connection, schema, name)
        if target is None:
            raise ConfigurationError(f"sink {self.sink!r}: there is no table {label(schema, name)} at {self._place}")
        return target

    def _plan(self, connection: C, target: TargetT, batch: pa.Schema | None) -> Plan[C, TargetT]:
        """`batch` is None in recovery, before the first batch."""
        strategy, reason = self.dialect.choose(connection, target)
        ledger = self.dialect.LEDGER.ensure(self.dialect.server, connection, target.schema, self.ledger)
        told = logging.getLogger(type(self.dialect).__module__)
        told.info("sink %r writes to %s by strategy %s: %s", self.sink, target.label, strategy, reason)
        triggers = self.dialect.server.triggers(connection, target.schema, target.name)
        target = replace(target, triggers=triggers)
        if strategy == "staged" and batch is not None:
            target = self.dialect.staged_beside(connection, target, batch, self.sink)
        return Plan(target, ledger, strategy)

    def _create(self, connection: C, schema: str, name: str, batch: pa.Schema) -> None:
        keys, marker = self.dialect.merge.keys, self.dialect.merge.delete_marker
        if not self.create_table:
            others = self.dialect.similar(connection, schema, name)
            hint = f" Did you mean {' or '.join(others)}?" if others else ""
            raise ConfigurationError(
                f"sink {self.sink!r}: there is no table {label(schema, name)} at {self._place}{self.dialect.UNSEEN}."
                f"{hint} Create it, or let create_table=True do so{self.dialect.ADVICE}"
            )
        if missing := [key for key in keys if key not in batch.names]:
            raise SchemaMismatch(f"sink {self.sink!r}: the batch has no column {', '.join(missing)}, named in keys")
        try:
            self.dialect.create(connection, schema, name, [field for field in batch if field.name != marker])
        except ConfigurationError as error:
            raise type(error)(f"sink {self.sink!r}: {error}") from error.__cause__
        logger.info("sink %r created table %s", self.sink, label(schema, name))
