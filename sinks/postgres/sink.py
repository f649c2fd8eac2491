"""`PostgresSink`: exactly-once into a PostgreSQL table."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import psycopg
import pyarrow as pa

from sinks.base import TwoPhaseCommitSink
from sinks.errors import ConfigurationError
from sinks.postgres import catalog, prepared, staged
from sinks.postgres.copying import CopyTransaction
from sinks.postgres.failures import describe
from sinks.postgres.ledger import Ledger
from sinks.postgres.merge import Merge
from sinks.postgres.planning import Plan, Planner
from sinks.postgres.server import IDLE_CONNECTIONS, Server
from sinks.transaction import Checkpoint, CommitOutcome, Committable, Identity, TransactionContext

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)

Strategy = Literal["auto", "prepared", "staged"]
Mode = Literal["append", "upsert"]

_PRUNE_EVERY = 50
_COMMIT_THREADS = 16


class PostgresSink(TwoPhaseCommitSink[CopyTransaction]):
    """Rows into one table, by COPY BINARY.

    Two strategies. `prepared`: each task copies into the table itself and runs PREPARE TRANSACTION; the driver runs
    COMMIT PREPARED. Appends only, and the server must have max_prepared_transactions above the number of partitions.
    `staged`: each task copies into a staging table beside the target and commits that; the driver moves all staging
    tables of a checkpoint in one transaction. For any server and PgBouncer pool, and the only one for upserts. `auto`
    asks the server. What became of a transaction is kept in the table `ledger`, beside the target.
    """

    def __init__(
        self,
        dsn: str,
        table: str,
        *,
        name: str | None = None,
        strategy: Strategy = "auto",
        mode: Mode = "append",
        keys: Sequence[str] = (),
        order_by: str | None = None,
        delete_marker: str | None = None,
        create_table: bool = False,
        lock_timeout: float = 10.0,
        ledger: str = "tpc_ledger",
        transform: Callable[[DataFrame], DataFrame] | None = None,
        connect_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Set up the sink; nothing is connected yet.

        * `dsn`: a libpq URL or key=value string; `connect_options`: further libpq parameters (`sslmode`, `passfile` …).
        * `table`: as in SQL: `orders`, `shop.orders`, `"Shop"."Orders"`. `name` (default: `table`) is the sink's uid.
        * `mode="upsert"`: the last row of each key (`keys`, which need a unique index) in a checkpoint, by the greatest
          `order_by`, replaces the row of that key, or deletes it if the boolean column `delete_marker` is true. Without
          `order_by` a key may come only once in a checkpoint. Neither `delete_marker` nor an `order_by` that the table
          has not is written.
        * `create_table`: create a missing table from the batch's schema, with `keys` as its primary key.
        * `lock_timeout`: seconds that any of our transactions waits for a lock.

        Raises ConfigurationError for options that contradict each other, and for a DSN that libpq cannot read.
        """
        super().__init__(name=name or table, transform=transform)
        self.table = table
        self.strategy = strategy
        self._merge = Merge(mode, tuple([keys] if isinstance(keys, str) else keys), order_by, delete_marker)
        self._ledger_name = ledger
        self._server = Server(dsn, connect_options or {}, name=self.name, lock_timeout=lock_timeout)
        self._planner = Planner(self.name, table, str(self._server), strategy, self._merge, create_table, ledger)
        problems = list(self._merge.contradictions(strategy, "prepared"))
        if lock_timeout <= 0:
            problems.append("lock_timeout is in seconds and above 0: a wait without limit could block for ever")
        if problems:
            raise ConfigurationError(f"sink {self.name!r}: " + "; ".join(problems))
        self._plan: Plan | None = None

    # ------------------------------------------------------------------ set-up
    def check(self, schema: pa.Schema) -> None:
        """Find the table (or create it), see whether it can take rows of `schema`, and choose the strategy.

        Raises ConfigurationError (SchemaMismatch if it is only about columns) with all reasons at once.
        """
        try:
            with self._server.lend() as connection:
                self._plan = self._planner.check(connection, schema)
        except psycopg.OperationalError as error:
            raise ConfigurationError(
                f"sink {self.name!r}: {self._server.redact(str(error)).strip()}. Check host, port, database, user, "
                "password and pg_hba.conf, and that the server runs"
            ) from None
        except psycopg.errors.InsufficientPrivilege as error:
            raise ConfigurationError(
                f"sink {self.name!r}: the role lacks a right at {self._server}: {describe(error)}"
            ) from error

    def weaknesses(self) -> Sequence[str]:
        with self._server.lend() as connection:
            return catalog.weaknesses(connection, self.table)

    def _planned(self) -> Plan:
        """The plan of `check`, or one made now: recovery comes before the first batch."""
        if self._plan is None:
            with self._server.lend() as connection:
                self._plan = self._planner.load(connection)
        return self._plan

    # ------------------------------------------------------------------ in the task
    def begin_transaction(self, context: TransactionContext) -> CopyTransaction:
        plan = self._planned()
        if plan.strategy == "prepared":
            return prepared.begin(self._server, plan.target, context)
        return staged.begin(self._server, plan.target, self._merge, context)

    def write(self, transaction: CopyTransaction, batch: pa.RecordBatch) -> None:
        transaction.write(batch)

    def pre_commit(self, transaction: CopyTransaction) -> Committable:
        ledger = self._planned().ledger
        if "gid" in transaction.identity:
            return prepared.pre_commit(transaction, ledger)
        return staged.pre_commit(transaction, ledger)

    def rollback(self, transaction: CopyTransaction) -> None:
        """Close the connection. If the statement that makes it durable was sent, abort it by name as well."""
        transaction.close()
        if transaction.sealing:
            self.abort(transaction.identity)

    def commit_directly(self, transaction: CopyTransaction) -> None:
        """At-least-once: one plain transaction, without ledger."""
        if "gid" in transaction.identity:
            prepared.commit_directly(transaction)
        else:
            staged.commit_directly(transaction, self._planned().target, self._merge)

    # ------------------------------------------------------------------ on the driver
    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        """Refuse what no staging table could see: keys that come twice, unique indexes, foreign keys and the like."""
        if mine := [c for c in committables if "gid" not in c.transaction]:
            staged.validate_all(self._server, self._planned().target, self._merge, checkpoint, mine)

    def commit(self, committable: Committable) -> CommitOutcome:
        """Commit one participant. A staged one is moved without its siblings: right only if it is the last one."""
        plan = self._planned()
        try:
            if "gid" in committable.transaction:
                return prepared.commit(self._server, plan.ledger, committable)
            return staged.commit_all(self._server, plan.target, plan.ledger, self._merge, [committable])[0]
        except psycopg.errors.UndefinedTable:
            self._plan = None  # the ledger or the table was dropped: look again before the next try
            raise

    def commit_all(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        """Commit a checkpoint; either strategy's participants, whichever wrote them before a restart. The staged ones
        become visible together."""
        by_gid = [c for c in committables if "gid" in c.transaction]
        by_table = [c for c in committables if "gid" not in c.transaction]
        outcomes = iter(self._commit_prepared(by_gid)), iter(self._commit_staged(by_table))
        answer = [next(outcomes[0 if "gid" in c.transaction else 1]) for c in committables]
        if checkpoint.checkpoint_id % _PRUNE_EVERY == 0 and all(
            outcome == CommitOutcome.COMMITTED for outcome in answer
        ):
            self._prune(checkpoint)
        return answer

    def _commit_prepared(self, committables: Sequence[Committable]) -> Sequence[CommitOutcome | Exception]:
        # a few: those connections that the pool keeps; many: as many as it takes to be done soon
        return self._commit_each(committables, min(_COMMIT_THREADS, max(IDLE_CONNECTIONS, len(committables) // 16)))

    def _commit_staged(self, committables: Sequence[Committable]) -> Sequence[CommitOutcome | Exception]:
        if not committables:
            return []
        try:
            plan = self._planned()
            return staged.commit_all(self._server, plan.target, plan.ledger, self._merge, committables)
        except Exception as error:
            if isinstance(error, psycopg.errors.UndefinedTable):
                self._plan = None
            return [error] * len(committables)

    def _prune(self, checkpoint: Checkpoint) -> None:
        try:
            with self._server.lend() as connection, self._server.transaction(connection):
                self._planned().ledger.prune(connection, checkpoint, self.name)
        except Exception:
            logger.warning("sink %r could not prune its ledger; it will try again", self.name, exc_info=True)

    def abort(self, transaction: Identity) -> None:
        with self._server.lend() as connection:
            schema, _ = catalog.locate(connection, self.table)
            ledger = Ledger.ensure(connection, schema, self._ledger_name)
        if "gid" in transaction:
            prepared.abort(self._server, ledger, transaction["gid"])
        else:
            staged.abort(self._server, schema, ledger, transaction["transaction_id"])

    def in_doubt(self, job: str) -> Iterable[Identity]:
        with self._server.lend() as connection:
            schema, _ = catalog.locate(connection, self.table)
            found = [*prepared.in_doubt(connection, job, self.name)]
            listed = staged.in_doubt(connection, schema, job, self.name)
            if listed:
                ledger = Ledger.ensure(connection, schema, self._ledger_name)
                done = {text for text, committed in ledger.states(connection, listed).items() if committed}
                staged.drop_committed(connection, self._server, schema, sorted(done))  # a reader was in the way then
                found += [staged.identity_of(schema, text) for text in listed if text not in done]
            return found

    # ------------------------------------------------------------------ life
    def close(self) -> None:
        self._server.close()

    def __repr__(self) -> str:
        what = f"name={self.name!r}, table={self.table!r}, strategy={self.strategy!r}"
        return f"PostgresSink({what}, server={str(self._server)!r})"
