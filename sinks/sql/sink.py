"""What the sinks that write into one table of a SQL database do alike."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from sinks.audit import Audit, Holding, Part
from sinks.base import Sink, commit_in_threads
from sinks.dead_letters import SCHEMA, DeadLetters, Refusal, write_and_find_refused
from sinks.diagnosis import Finding, SchemaDiff, Severity
from sinks.errors import ConfigurationError
from sinks.optional import (
    Auditable,
    DeadLettering,
    Diagnosable,
    DirectCommitting,
    SchemaEvolving,
    Validating,
)
from sinks.sql.backend import Backend, Plan, RowTransaction
from sinks.sql.catalog_queries import weaknesses
from sinks.sql.evolution import STEPS
from sinks.sql.names import of_sink
from sinks.sql.planning import Planner
from sinks.sql.server import IDLE_CONNECTIONS
from sinks.sql.strategies import StagingTables, TwoPhase
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    Committable,
    Fingerprint,
    Identity,
    TransactionContext,
    TransactionId,
    token,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)

_PRUNE_EVERY = 50


class TableSink(
    DeadLettering[RowTransaction],
    SchemaEvolving[RowTransaction],
    Validating[RowTransaction],
    DirectCommitting[RowTransaction],
    Auditable[RowTransaction],
    Diagnosable[RowTransaction],
):
    """Two strategies, of which `check` chooses one: `TwoPhase`, in which each participant has a prepared transaction of
    its own on the table, and `StagingTables`. What either wrote is finished by both kinds of sink, so the strategy may
    change between two runs."""

    COMMIT_THREADS: ClassVar[int] = 16

    def __init__(
        self,
        planner: Planner,
        transform: Callable[[DataFrame], DataFrame] | None,
        dead_letters: Sink | None = None,
        max_dead_letters: int | float = 1000,
    ) -> None:
        """Raises ConfigurationError for options that contradict each other."""
        super().__init__(
            name=planner.sink, transform=transform, dead_letters=dead_letters, max_dead_letters=max_dead_letters
        )
        backend = planner.backend
        problems = list(backend.merge.contradictions(backend.strategy, backend.TWO_PHASE))
        if planner.evolution not in STEPS:
            known = ", ".join(f'"{step}"' for step in STEPS)
            problems.append(f"schema_evolution={planner.evolution!r} is not one of {known}; alter types by hand")
        if problems:
            raise ConfigurationError(f"sink {self.name!r}: " + "; ".join(problems))
        self.table = planner.table
        self.strategy = backend.strategy
        self._backend: Backend = backend
        self._planner = planner
        self._two_phase = TwoPhase(backend)
        self._staged = StagingTables(backend)
        self._plan: Plan | None = None

    # ------------------------------------------------------------------ set-up
    def check(self, schema: pa.Schema) -> None:
        """Find the table (or create it), see whether it can take rows of `schema`, and choose the strategy.

        Raises ConfigurationError (SchemaMismatch if it is only about columns) with all reasons at once.
        """
        try:
            with self._backend.lend() as connection:
                self._at_home(self._planner.check(connection, schema))
        except Exception as error:
            reason = self._backend.misconfigured(error)
            if reason is None:
                raise
            raise ConfigurationError(f"sink {self.name!r}: {reason}") from None

    @property
    def evolves(self) -> bool:
        return self._planner.evolution != "none"

    def evolve(self, schema: pa.Schema) -> None:
        with self._backend.lend() as connection:
            self._planner.evolve(connection, schema)
        self.check(schema)

    def schema_diff(self, schema: pa.Schema) -> SchemaDiff:
        with self._backend.lend() as connection:
            return self._planner.diff(connection, schema)

    def _planned(self) -> Plan:
        """The plan of `check`, or one made now: recovery comes before the first batch."""
        if self._plan is None:
            with self._backend.lend() as connection:
                return self._at_home(self._planner.load(connection))
        return self._plan

    def _at_home(self, plan: Plan) -> Plan:
        self._plan, self._planner = plan, replace(self._planner, home=(plan.target.schema, plan.target.name))
        return plan

    def _strategy(self, identity: Identity) -> TwoPhase | StagingTables:
        return self._staged if _is_staged(identity) else self._two_phase

    def weaknesses(self) -> Sequence[str]:
        with self._backend.lend() as connection:
            ask = partial(self._backend.query, connection)
            return weaknesses(self._backend.dialect, ask, *self._planner.locate(connection))

    # ------------------------------------------------------------------ in the task
    def begin_transaction(self, context: TransactionContext) -> RowTransaction:
        plan = self._planned()
        return (self._backend.stage if plan.strategy == "staged" else self._backend.begin)(plan, context)

    def write(self, transaction: RowTransaction, batch: pa.RecordBatch) -> None:
        transaction.write(batch)

    def write_good_rows(self, transaction: RowTransaction, batch: pa.RecordBatch, most: int) -> Sequence[Refusal]:
        """Each batch under a savepoint. Refused by the client or the server: values that the columns cannot hold, and
        what constraints, domains and triggers have against a row by itself."""
        return write_and_find_refused(batch, transaction.encode, transaction.put, most)

    def record_fingerprint(self, transaction: RowTransaction, fingerprint: Fingerprint) -> None:
        transaction.summed = fingerprint

    def pre_commit(self, transaction: RowTransaction) -> Committable:
        return self._strategy(transaction.identity).pre_commit(transaction, self._planned())

    def rollback(self, transaction: RowTransaction) -> None:
        """Undo and close the connection. If the statement that makes it durable was sent, abort it by name as well."""
        transaction.close()
        if transaction.sealing:
            self.abort(transaction.identity)

    def commit_directly(self, transaction: RowTransaction) -> None:
        """At-least-once: without ledger."""
        self._strategy(transaction.identity).commit_directly(transaction, self._planned())

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
        threads = min(self.COMMIT_THREADS, max(IDLE_CONNECTIONS, len(prepared) // 16))
        outcomes = iter(commit_in_threads(self, prepared, threads)), iter(self._commit(staged))
        return [next(outcomes[_is_staged(c.transaction)]) for c in committables]

    def _commit(self, committables: Sequence[Committable]) -> Sequence[CommitOutcome | Exception]:
        """All of one strategy."""
        if not committables:
            return []
        strategy = self._strategy(committables[0].transaction)
        try:
            plan = self._planned()
        except ConfigurationError as error:  # waiting does not bring back what is not there
            outcome = CommitOutcome.unknown(
                f"{error}. {strategy.location(committables)}. If this is another database, a new one or an older copy, "
                "point the sink at the one that has the rows, or restore it; then start the query again"
            )
            return [outcome] * len(committables)
        except Exception as error:
            return [error] * len(committables)
        try:
            return strategy.commit(plan, committables)
        except Exception as error:
            if (fault := self._backend.fault(error)) and fault.kind == "gone":
                self._plan = None  # it is made anew before the next try
            return [error] * len(committables)

    def purge(self, checkpoint: Checkpoint) -> None:
        """Now and then: prune the ledger."""
        if checkpoint.checkpoint_id % _PRUNE_EVERY == 0:
            with self._backend.lend() as connection, self._backend.transaction(connection):
                self._planned().ledger.prune(connection, checkpoint, self.name)

    def abort(self, transaction: Identity) -> None:
        with self._backend.lend() as connection:
            ledger = self._planner.ensure_ledger(connection)
            self._strategy(transaction).abort(connection, ledger, transaction)

    def owns(self, job: str, transaction: Identity) -> bool:
        with contextlib.suppress(LookupError):
            key = self._key(transaction)
            return key.startswith(TransactionId.prefix(job)) and of_sink(key, self.name)
        return False

    def in_doubt(self, job: str) -> Iterable[Identity]:
        with self._backend.lend() as connection:
            schema, ledger = self._planner.find_ledger(connection)
            return [
                *self._backend.prepared(connection, schema, job, self.name),
                *self._staged.in_doubt(connection, schema, ledger, job, self.name),
            ]

    def committed_checkpoints(self, job: str) -> Mapping[str, int]:
        """As the ledger has it."""
        mine = token(job), token(self.name)
        if plan := self._plan:
            try:
                with self._backend.lend() as connection:
                    plan.ledger.require_same(connection)
                    plan.ledger.witness.require_intact(connection)
                    return plan.ledger.newest(connection, *mine, is_witnessed=True)
            except Exception:
                logger.debug("sink %r looks for its ledger anew", self.name, exc_info=True)
        with self._backend.lend() as connection:
            _, ledger = self._planner.find_ledger(connection)
            return ledger.newest(connection, *mine) if ledger else {}

    # ------------------------------------------------------------------ for operators
    def diagnose(self, job: str) -> Iterable[Finding]:
        """As for every sink, with the table, rights and settings. May make the ledger, as the first batch would."""
        try:
            with self._backend.lend() as connection:
                findings = [*self._planner.diagnose(connection), *self._backend.findings(connection)]
        except Exception as error:
            what, _, fix = (self._backend.misconfigured(error) or f"{type(error).__name__}: {error}").partition(". ")
            findings = [Finding.error(what, fix)]
        yield from findings
        if all(finding.severity is not Severity.ERROR for finding in findings):
            yield from super().diagnose(job)

    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        """By the ledger."""
        with self._backend.lend() as connection:
            _, ledger = self._planner.find_ledger(connection)
            if ledger is None:
                gone = f"the ledger {self._planner.ledger} is gone or was emptied"
                return Audit([Holding(remarks=(gone,))] * len(parts))
            return Audit([ledger.holding(connection, job, self.name, part, self._key) for part in parts])

    def read_dead_letters(self, job: str, sink: str, most: int) -> DeadLetters:
        with self._backend.lend() as connection:
            target = self._backend.describe(connection, *self._planner.locate(connection))
            if target is None:
                return DeadLetters(())
            quote, names = self._backend.quote, [name for name in SCHEMA.names if name in target.names]
            columns, table = ", ".join(map(quote, names)), quote(target.schema, target.name)
            where = f"{quote('job')} = \0 AND {quote('sink')} = \0"
            statement = f"SELECT {columns} FROM {table} WHERE {where} ORDER BY {quote('time')} DESC LIMIT \0"
            statement = statement.replace("%", "%%").replace("\0", "%s")
            rows = self._backend.query(connection, statement, [job, sink, most])
            return DeadLetters([dict(zip(names, row, strict=True)) for row in rows])

    def _key(self, identity: Identity) -> str:
        return str(identity["transaction_id"]) if _is_staged(identity) else self._backend.key(identity)

    def probe_schema(self) -> pa.Schema | None:
        with self._backend.lend() as connection:
            if trial := self._planner.trial(connection):
                schema, self._plan = trial
                return schema
        return None

    # ------------------------------------------------------------------ life
    def describe_writing(self, written: Identity | None = None) -> str:
        """Mode, keys, and the strategy: the one that `auto` took for `written`."""
        taken = self.strategy
        if written is not None:
            taken = "staged" if _is_staged(written) else self._backend.TWO_PHASE
        chosen = f" ({self.strategy})" if taken != self.strategy else ""
        return f"{self._backend.merge}; strategy {taken}{chosen}"

    def close(self) -> None:
        self._backend.close()

    def __repr__(self) -> str:
        what = f"name={self.name!r}, table={self.table!r}, strategy={self.strategy!r}"
        return f"{type(self).__name__}({what}, server={str(self._backend)!r})"


def _is_staged(identity: Identity) -> bool:
    return "transaction_id" in identity
