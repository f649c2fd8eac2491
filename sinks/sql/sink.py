"""What the sinks that write into one table of a SQL database do alike."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias

import pyarrow as pa
import pyarrow.types as at

from sinks.arrow.json import in_ascii
from sinks.arrow.spark_types import KINDS
from sinks.arrow.types import lacking, spark_name
from sinks.audit import Audit, Holding, Part
from sinks.base import Sink, commit_in_threads
from sinks.dead_letters import SCHEMA, DeadLetters, Refusal, write_and_find_refused
from sinks.diagnosis import Finding, SchemaChange, SchemaDiff, Severity
from sinks.errors import ConfigurationError, SchemaMismatch
from sinks.optional import Auditable, DeadLettering, Diagnosable, DirectCommitting, Related, SchemaEvolving, Validating
from sinks.options import no_flags
from sinks.sql.backend import Backend
from sinks.sql.databases import addition, weaknesses
from sinks.sql.dialect import TargetT
from sinks.sql.ledger import Ledger
from sinks.sql.names import label, of_sink
from sinks.sql.server import IDLE_CONNECTIONS, ConnectionT, explained
from sinks.sql.strategies import StagingTables, TwoPhase
from sinks.sql.transaction import Plan, RowTransaction
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    Committable,
    Fingerprint,
    Identity,
    TransactionContext,
    TransactionId,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)

SchemaEvolution = Literal["none", "add"]
_COMMIT_THREADS = 16
_PRUNE_EVERY = 53  # a prime: a sink whose rows come in every second or tenth checkpoint meets it, too


class TableSink(
    DeadLettering[RowTransaction[ConnectionT]],
    SchemaEvolving[RowTransaction[ConnectionT]],
    Validating[RowTransaction[ConnectionT]],
    Related[RowTransaction[ConnectionT]],
    DirectCommitting[RowTransaction[ConnectionT]],
    Auditable[RowTransaction[ConnectionT]],
    Diagnosable[RowTransaction[ConnectionT]],
    Generic[ConnectionT, TargetT],
):
    """Two strategies, of which `check` chooses one: `TwoPhase`, in which each participant has a prepared transaction of
    its own on the table, and `StagingTables`. What either wrote is finished by both kinds of sink, so the strategy may
    change between two runs.

    Options of every table:

    * `mode="upsert"`: the last row of each key (`keys`, which need a unique index) in a checkpoint, by the greatest
      `order_by`, replaces the row of that key, or deletes it if the boolean column `delete_marker` is true. Of equal
      ones the last in its partition wins; those of several partitions have to be the same row. Without `order_by` a key
      may come only once in a checkpoint. `delete_marker` is not written, `order_by` only if the table has that column.
    * `order_by_nulls`: with "error" a row without a value in `order_by` is a bad row, with "first" it is older than
      every other of its key.
    * `keep_newer`: drop a change that is older, by `order_by`, than the table's row of its key.
    * `create_table`: create a missing table from the batch's schema, with `keys` as its primary key.
    * `schema_evolution`: "add" adds the columns that the batch has and the table lacks, as nullable ones. Nothing else
      of the table is altered.
    * `ledger`: the name of the table, beside the target, that proves what became of each transaction.
    * `dead_letters`: a sink for rows that the table refuses. `max_dead_letters`: the most of them in a checkpoint, or,
      as a float, their largest share of its rows.
    """

    def __init__(
        self,
        backend: Backend[ConnectionT, TargetT],
        table: str,
        *,
        name: str | None = None,
        create_table: bool = False,
        ledger: str = "tpc_ledger",
        schema_evolution: SchemaEvolution = "none",
        transform: Callable[[DataFrame], DataFrame] | None = None,
        dead_letters: Sink | None = None,
        max_dead_letters: int | float = 1000,
    ) -> None:
        """Raises ConfigurationError for options that contradict each other."""
        super().__init__(
            name=name or table, transform=transform, dead_letters=dead_letters, max_dead_letters=max_dead_letters
        )
        problems = list(backend.merge.contradictions(backend.strategy, backend.prepared.NAME))
        problems += no_flags(create_table=create_table, keep_newer=backend.merge.keep_newer)
        if schema_evolution not in ("none", "add"):
            problems.append(f'schema_evolution={schema_evolution!r} is not one of "none", "add"; alter types by hand')
        if problems:
            raise ConfigurationError(f"sink {self.name!r}: " + "; ".join(problems))
        self.table = table
        self.strategy = backend.strategy
        self._backend = backend
        self._server = backend.server
        self._catalog = backend.catalog
        self._dialect = backend.dialect
        self._merge = backend.merge
        self._create_table, self._ledger, self.evolves = create_table, ledger, schema_evolution != "none"
        self._location: tuple[str, str] | None = None  # schema and name of the table as found first: they stay
        self._two_phase = TwoPhase(backend)
        self._staged = StagingTables(backend)
        self._plan: Plan[ConnectionT, TargetT] | None = None
        self._logged = ""

    # ------------------------------------------------------------------ set-up
    def check(self, schema: pa.Schema) -> None:
        """Find the table (or create it), see whether it can take rows of `schema`, and choose the strategy.

        Raises ConfigurationError (SchemaMismatch if it is only about columns) with all reasons at once.
        """
        try:
            with self._usable_connection() as connection:
                target = self._describe(connection, schema)
                additions = self._additions(connection, target, schema) if self.evolves else []
                columns = self._mismatches(target, schema, additions)
                if others := self._problems(connection, target, schema):
                    raise self._unfit(ConfigurationError, target, [*others, *columns])
                if columns:
                    raise self._unfit(SchemaMismatch, target, columns)
                if self._plan_for(connection, target).strategy == "staged" and (
                    reasons := [*self._backend.staging.unstageable(connection, target, schema)]
                ):
                    raise self._unfit(ConfigurationError, target, reasons)
        except Exception as error:
            if (reason := self._server.misconfigured(error)) is None:
                raise
            raise ConfigurationError(f"sink {self.name!r}: {reason}") from None

    def check_with(self, others: Sequence[Sink]) -> None:
        """Refuse a foreign key to the table of another sink: each sink commits by itself, so that rows are judged
        before those of the same checkpoint are there that they refer to."""
        target = self._planned().target
        tables = [other for other in others if isinstance(other, TableSink)]
        if not target.foreign_keys or not tables:
            return
        with self._server.lend() as connection:
            own = self._catalog.place(connection, target.schema, target.name)
            referred = [
                (key, place)
                for key in target.foreign_keys
                if (place := self._catalog.place(connection, key.schema, key.table)) not in (own, None)
            ]
        problems = [
            f"the foreign key {key.name} of its table {target.label} refers to {label(key.schema, key.table)}, into "
            f"which sink {other.name!r} of this job writes"
            for other in tables
            if (there := other._place())
            for key, place in referred
            if place == there
        ]
        if problems:
            raise ConfigurationError(
                f"sink {self.name!r}: {'; '.join(problems)}. Each sink of a job commits by itself, so a row would be "
                "judged before the row of the same batch that it refers to is visible. Write the two tables by two "
                "queries with a job of their own each, and each batch of the referring one when what it refers to is "
                "visible; or drop the foreign key. To make it DEFERRABLE does not help"
            )

    def _place(self) -> tuple[object, ...] | None:
        target = self._planned().target
        with self._server.lend() as connection:
            return self._catalog.place(connection, target.schema, target.name)

    def _unfit(self, kind: type[ConfigurationError], target: TargetT, reasons: Sequence[str]) -> ConfigurationError:
        listed = "".join(f"\n  - {reason}" for reason in reasons)
        return kind(f"sink {self.name!r} cannot write to table {target.label} ({self._server}):{listed}")

    def _problems(self, connection: ConnectionT, target: TargetT, batch: pa.Schema) -> list[str]:
        merge = self._merge
        others = [*merge.problems(batch, target.names), *self._backend.problems(connection, target, self._ledger)]
        by = merge.order_by
        kind = batch.field(by).type if by in batch.names else pa.null()
        is_sortable = at.is_primitive(kind) or at.is_decimal(kind) or at.is_null(kind)  # a number or a time
        if at.is_nested(kind) or not (self._dialect.SORTS_TEXTS or is_sortable):
            others.append(
                f"order_by names the column {by!r}, a {spark_name(kind)}, which the database sorts in another way than "
                "Spark: cast it to a number or a time in Spark"
            )
        return others

    def _mismatches(self, target: TargetT, batch: pa.Schema, additions: Sequence[SchemaChange]) -> list[str]:
        """Those that the additions do not fix."""
        written = set(self._merge.written(batch.names, target.names)) - {a.column for a in additions}
        added = {a.column.lower(): a.column for a in additions}
        alike = [name for name in batch.names if name in written and name.lower() in added]
        reasons = [
            f'column "{name}" of the batch is not in the table, and differs from "{added[name.lower()]}" by capitals '
            'alone, of which schema_evolution="add" adds only one: add it by hand, or rename or drop it in Spark'
            for name in alike
        ]
        others = [field for field in batch if field.name in written and field.name not in alike]
        return reasons + self._catalog.mismatches(pa.schema(others), target)

    @contextmanager
    def _usable_connection(self) -> Iterator[ConnectionT]:
        """A connection. Raises ConfigurationError for a server that the sink cannot work with at all."""
        with self._server.lend() as connection:
            if reason := self._server.unfit(connection):
                raise ConfigurationError(f"sink {self.name!r}: {reason}")
            yield connection

    def _locate(self, connection: ConnectionT) -> tuple[str, str]:
        return self._location or self._catalog.locate(connection, self.table)

    def _describe(self, connection: ConnectionT, create_for: pa.Schema | None = None) -> TargetT:
        """Raises ConfigurationError if there is no table, which is created for rows, if it may be."""
        schema, name = self._locate(connection)
        target = self._catalog.describe(connection, schema, name)
        if target is None and create_for is not None and self._create_table:
            self._create(connection, schema, name, create_for)
            target = self._catalog.describe(connection, schema, name)
        if target is None:
            missing = f"there is no table {label(schema, name)} at {self._server}{self._catalog.NO_TABLE_HINT}"
            raise ConfigurationError(f"sink {self.name!r}: {missing}. Create it, or let create_table=True do so")
        return target

    def _create(self, connection: ConnectionT, schema: str, name: str, batch: pa.Schema) -> None:
        keys, marker = self._merge.keys, self._merge.delete_marker
        if missing := [key for key in keys if key not in batch.names]:
            raise SchemaMismatch(f"sink {self.name!r}: the batch has no column {', '.join(missing)}, named in keys")
        try:
            self._catalog.create(connection, schema, name, [field for field in batch if field.name != marker])
        except ConfigurationError as error:
            raise type(error)(f"sink {self.name!r}: {error}") from error.__cause__
        logger.info("sink %r created table %s", self.name, label(schema, name))

    def _planned(self) -> Plan[ConnectionT, TargetT]:
        """The plan of `check`, or one made now: recovery comes before the first batch."""
        if self._plan is None:
            with self._server.lend() as connection:
                return self._plan_for(connection, self._describe(connection))
        return self._plan

    def _plan_for(self, connection: ConnectionT, target: TargetT) -> Plan[ConnectionT, TargetT]:
        strategy, reason = self._backend.choose(connection, target)
        if how := self._server.writing(connection):
            reason = f"{reason}; {how}"
        ledger = Ledger.ensure(self._catalog, connection, target.schema, self._ledger)
        line = f"sink {self.name!r} writes to {target.label} by strategy {strategy}: {reason}"
        if line != self._logged:
            logging.getLogger(type(self._server).__module__).info(line)
        self._logged = line
        triggers = self._catalog.triggers(connection, target.schema, target.name)
        self._plan = Plan(replace(target, triggers=triggers), ledger, strategy)
        self._location = target.schema, target.name
        return self._plan

    def probe_schema(self) -> pa.Schema | None:
        """A column of the table with a type that fits; None if there is no table yet."""
        with self._server.lend() as connection:
            target = self._catalog.describe(connection, *self._locate(connection))
            if target is None:
                return None
            self._plan_for(connection, target)
            name = next(iter([*self._merge.keys, *target.names]))
            schemas = [pa.schema([(name, kind)]) for kind in dict.fromkeys(KINDS.values())]
            return min(schemas, key=lambda schema: len(self._catalog.mismatches(schema, target)))

    def _strategy_of(self, identity: Identity) -> TwoPhase[ConnectionT, TargetT] | StagingTables[ConnectionT, TargetT]:
        return self._staged if _is_staged(identity) else self._two_phase

    def weaknesses(self) -> Sequence[str]:
        with self._server.lend() as connection:
            ask = partial(self._server.query, connection)
            return weaknesses(self._dialect.name, ask, *self._locate(connection))

    # ------------------------------------------------------------------ changes of the table
    def evolve(self, schema: pa.Schema) -> None:
        with self._server.lend() as connection:
            self._evolve(connection, schema)
        self.check(schema)

    def _evolve(self, connection: ConnectionT, batch: pa.Schema) -> None:
        """Add to the table what it lacks for rows of `batch`."""
        table = label(*self._locate(connection))

        def due() -> list[SchemaChange]:
            return self._additions(connection, self._describe(connection), batch)

        with explained(self._server.fault, table, f"sink {self.name!r}, which alters it,"):
            for change in due():
                logger.info("sink %r alters its table: %s", self.name, change)
                try:
                    with self._server.at_work(connection), self._server.transaction(connection):
                        self._server.execute(connection, change.statement)
                except Exception as error:
                    fault = self._server.fault(error)
                    if fault is None or fault.kind == "blocked":
                        raise
                    if change.column in {missing.column for missing in due()}:  # nobody else has added it
                        raise ConfigurationError(
                            f"sink {self.name!r}: table {table} cannot be altered: {fault.text}. It takes: "
                            f"{change.statement}. Fix what the server names, or let the table's owner run it, and "
                            "start the query again"
                        ) from error
        if missing := due():
            raise ConfigurationError(
                f"sink {self.name!r}: table {table} was altered, and does not show it; it still takes: "
                f"{'; '.join(change.statement for change in missing)}. Run this by hand, or give the columns plainer "
                "names"
            )

    def schema_diff(self, batch: pa.Schema) -> SchemaDiff:
        with self._usable_connection() as connection:
            schema, name = self._locate(connection)
            target = self._catalog.describe(connection, schema, name)
            if target is None:
                will = (
                    "the first batch creates it" if self._create_table else "create it, or let create_table=True do so"
                )
                return SchemaDiff(unfit=(f"there is no table {label(schema, name)} at {self._server}: {will}",))
            additions = self._additions(connection, target, batch)
            problems = self._merge.problems(batch, target.names)
            return SchemaDiff(tuple(additions), (*problems, *self._mismatches(target, batch, additions)))

    def _additions(self, connection: ConnectionT, target: TargetT, batch: pa.Schema) -> list[SchemaChange]:
        """The columns that the table lacks for `batch`."""
        table = self._dialect.quote(target.schema, target.name)
        fields, changes = {field.name: field for field in batch}, []
        for field in lacking([fields[name] for name in self._merge.written(list(fields), target.names)], target.names):
            try:
                definition = self._catalog.definition(connection, target, field)
            except SchemaMismatch as unfit:
                raise SchemaMismatch(f'sink {self.name!r}: column "{field.name}" cannot be added: {unfit}') from None
            changes.append(addition(self._dialect.name, table, field.name, definition, automatic=self.evolves))
        return changes

    # ------------------------------------------------------------------ in the task
    def begin_transaction(self, context: TransactionContext) -> RowTransaction[ConnectionT]:
        plan = self._planned()
        return (self._backend.staging.stage if plan.strategy == "staged" else self._backend.prepared.begin)(
            plan, context
        )

    def write(self, transaction: RowTransaction[ConnectionT], batch: pa.RecordBatch) -> None:
        transaction.write(batch)

    def write_good_rows(
        self, transaction: RowTransaction[ConnectionT], batch: pa.RecordBatch, most: int
    ) -> Sequence[Refusal]:
        """Each batch under a savepoint. Refused by the client or the server: values that the columns cannot hold, and
        what constraints, domains and triggers have against a row by itself."""
        return write_and_find_refused(batch, transaction.encode, transaction.put, most)

    def record_fingerprint(self, transaction: RowTransaction[ConnectionT], fingerprint: Fingerprint) -> None:
        transaction.fingerprint = fingerprint

    def pre_commit(self, transaction: RowTransaction[ConnectionT]) -> Committable:
        return self._strategy_of(transaction.identity).pre_commit(transaction, self._planned())

    def rollback(self, transaction: RowTransaction[ConnectionT]) -> None:
        """Undo and close the connection. If the statement that makes it durable was sent, abort it by name as well."""
        transaction.discard()
        if transaction.may_be_durable:
            self.abort(transaction.identity)

    def commit_directly(self, transaction: RowTransaction[ConnectionT]) -> None:
        """At-least-once: without ledger."""
        self._strategy_of(transaction.identity).commit_directly(transaction, self._planned())

    # ------------------------------------------------------------------ on the driver
    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        """Refuse what no staging table could see: keys that come twice, unique indexes, foreign keys and the like."""
        if mine := [c for c in committables if _is_staged(c.transaction)]:
            self._staged.validate_all(self._planned(), checkpoint, mine)

    def commit(self, committable: Committable) -> CommitOutcome:
        """Commit one participant. A staged one is moved without its siblings: right only if it is the last one."""
        [outcome] = self._commit([committable])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def commit_all(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        """Commit a checkpoint; either strategy's participants. The staged ones become visible together."""
        staged = [c for c in committables if _is_staged(c.transaction)]
        prepared = [c for c in committables if not _is_staged(c.transaction)]
        # a few: those connections that the pool keeps; many: as many as it takes to be done soon
        threads = min(_COMMIT_THREADS, max(IDLE_CONNECTIONS, len(prepared) // 16))
        outcomes = iter(commit_in_threads(self, prepared, threads)), iter(self._commit(staged))
        return [next(outcomes[_is_staged(c.transaction)]) for c in committables]

    def _commit(self, committables: Sequence[Committable]) -> Sequence[CommitOutcome | Exception]:
        """All of one strategy."""
        if not committables:
            return []
        strategy = self._strategy_of(committables[0].transaction)
        try:
            plan = self._planned()
        except ConfigurationError as error:  # waiting does not bring back what is not there
            outcome = CommitOutcome.unknown(
                f"{error}. {strategy.whereabouts(committables)}. If this is another database, a new one or an older "
                "copy, point the sink at the one that has the rows, or restore it; then start the query again"
            )
            return [outcome] * len(committables)
        except Exception as error:
            return [error] * len(committables)
        try:
            return strategy.commit(plan, committables)
        except Exception as error:
            if (fault := self._server.fault(error)) and fault.kind == "gone":
                self._plan = None  # it is made anew before the next try
            return [error] * len(committables)

    def purge(self, checkpoint: Checkpoint) -> None:
        """Now and then: prune the ledger."""
        if checkpoint.checkpoint_id % _PRUNE_EVERY == 0:
            with self._server.lend() as connection, self._server.transaction(connection):
                self._planned().ledger.prune(connection, checkpoint, self.name)

    def abort(self, transaction: Identity) -> None:
        with self._server.lend() as connection:
            self._strategy_of(transaction).abort(connection, self._ensured_ledger(connection), transaction)

    def owns(self, job: str, transaction: Identity) -> bool:
        with contextlib.suppress(LookupError):
            key = self._key(transaction)
            return key.startswith(TransactionId.prefix(job)) and of_sink(key, self.name)
        return False

    def in_doubt(self, job: str) -> Iterable[Identity]:
        with self._server.lend() as connection:
            schema, ledger = self._find_ledger(connection)
            return [
                *self._backend.prepared.in_doubt(connection, schema, job, self.name),
                *self._staged.in_doubt(connection, schema, ledger, job, self.name),
            ]

    def _find_ledger(self, connection: ConnectionT) -> tuple[str, Ledger[ConnectionT] | None]:
        """The schema of table and ledger, and the ledger if there is one."""
        schema, _ = self._locate(connection)
        return schema, Ledger.find(self._catalog, connection, schema, self._ledger)

    def _ensured_ledger(self, connection: ConnectionT) -> Ledger[ConnectionT]:
        schema, _ = self._locate(connection)
        return Ledger.ensure(self._catalog, connection, schema, self._ledger)

    def committed_checkpoints(self, job: str) -> Mapping[str, int]:
        """As the ledger has it."""
        if plan := self._plan:
            try:
                with self._server.lend() as connection:
                    plan.ledger.require_same(connection)
                    plan.ledger.witness.require_intact(connection)
                    return plan.ledger.newest(connection, job, self.name, is_witnessed=True)
            except Exception:
                logger.debug("sink %r looks for its ledger anew", self.name, exc_info=True)
        with self._server.lend() as connection:
            _, ledger = self._find_ledger(connection)
            return ledger.newest(connection, job, self.name) if ledger else {}

    # ------------------------------------------------------------------ for operators
    def diagnose(self, job: str) -> Iterable[Finding]:
        """As for every sink, with the table, rights and settings. May make the ledger, as the first batch would."""
        try:
            with self._usable_connection() as connection:
                findings = [*self._diagnose(connection), *self._findings(connection)]
        except Exception as error:
            what, _, fix = (self._server.misconfigured(error) or f"{type(error).__name__}: {error}").partition(". ")
            findings = [Finding.error(what, fix)]
        yield from findings
        if all(finding.severity is not Severity.ERROR for finding in findings):
            yield from super().diagnose(job)

    def _findings(self, connection: ConnectionT) -> Iterator[Finding]:
        """What the server itself is asked for."""
        yield from self._server.findings(connection)
        yield from self._backend.prepared.findings(connection, self._backend.strategy)

    def _diagnose(self, connection: ConnectionT) -> Iterator[Finding]:
        """What can be told without a batch."""
        schema, name = self._locate(connection)
        target = self._catalog.describe(connection, schema, name)
        if target is None and self._create_table:
            yield Finding.ok(f"the table {label(schema, name)} will be created with the first batch")
        elif target is None:
            yield Finding.error(
                f"there is no table {label(schema, name)} at {self._server}{self._catalog.NO_TABLE_HINT}",
                "create it, or set create_table = true",
            )
        else:
            problems = list(self._backend.problems(connection, target, self._ledger))
            for problem in problems:
                what, _, fix = problem.partition(": ")
                yield Finding.error(what, fix or "fix what is named")
            if not problems:
                strategy = self._plan_for(connection, target).strategy
                yield Finding.ok(f"table {target.label} can be written by strategy {strategy}")

    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        """By the ledger."""
        with self._server.lend() as connection:
            _, ledger = self._find_ledger(connection)
            if ledger is None:
                gone = f"the ledger {self._ledger} is gone or was emptied"
                return Audit([Holding(remarks=(gone,))] * len(parts))
            return Audit([ledger.holding(connection, job, self.name, part, self._key) for part in parts])

    def lacks_characters(self) -> bool:
        return bool(self._planned().target.lacks_characters)

    def read_dead_letters(self, job: str, sink: str, most: int) -> DeadLetters:
        with self._server.lend() as connection:
            target = self._catalog.describe(connection, *self._locate(connection))
            if target is None:
                return DeadLetters(())
            quote, names = self._dialect.quote, [name for name in SCHEMA.names if name in target.names]
            columns, table = ", ".join(map(quote, names)), quote(target.schema, target.name)
            where = f"{quote('job')} = \0 AND {quote('sink')} = \0"
            statement = f"SELECT {columns} FROM {table} WHERE {where} ORDER BY {quote('time')} DESC LIMIT \0"
            statement = statement.replace("%", "%%").replace("\0", "%s")
            of = map(in_ascii, (job, sink)) if target.lacks_characters else (job, sink)
            rows = self._server.query(connection, statement, [*of, most])
            return DeadLetters([dict(zip(names, row, strict=True)) for row in rows])

    def _key(self, identity: Identity) -> str:
        return str(identity["transaction_id"]) if _is_staged(identity) else self._backend.prepared.key(identity)

    # ------------------------------------------------------------------ life
    def describe_writing(self, written: Identity | None = None) -> str:
        """Mode, keys, and the strategy: the one that `auto` took for `written`."""
        taken = self.strategy
        if written is not None:
            taken = "staged" if _is_staged(written) else self._backend.prepared.NAME
        chosen = f" ({self.strategy})" if taken != self.strategy else ""
        return f"{self._merge}; strategy {taken}{chosen}"

    def close(self) -> None:
        self._logged = ""
        self._server.close()

    def __repr__(self) -> str:
        what = f"name={self.name!r}, table={self.table!r}, strategy={self.strategy!r}"
        return f"{type(self).__name__}({what}, server={str(self._server)!r})"


def _is_staged(identity: Identity) -> bool:
    return "transaction_id" in identity


AnyTableSink: TypeAlias = TableSink[Any, Any]
"""A sink into a table of any database, for functions that take each of them."""
