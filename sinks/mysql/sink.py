"""`MySQLSink`: exactly-once into a table of MySQL or MariaDB."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pymysql
from pymysql.constants import ER

from sinks.base import TwoPhaseCommitSink
from sinks.errors import ConfigurationError
from sinks.mysql import catalog, staged, xa
from sinks.mysql.failures import code_of, describe
from sinks.mysql.ledger import Ledger
from sinks.mysql.loading import RowTransaction
from sinks.mysql.merge import Merge
from sinks.mysql.planning import Plan, Planner, weaknesses
from sinks.mysql.server import IDLE_CONNECTIONS, Server
from sinks.transaction import Checkpoint, CommitOutcome, Committable, Identity, TransactionContext

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)

Strategy = Literal["auto", "xa", "staged"]
Mode = Literal["append", "upsert"]

_PRUNE_EVERY = 50
_COMMIT_THREADS = 16


class MySQLSink(TwoPhaseCommitSink[RowTransaction]):
    """Rows into one table, by LOAD DATA LOCAL where the server has local_infile=ON, else by INSERT.

    Two strategies. `xa`: each task writes into the table itself and runs XA PREPARE; the driver runs XA COMMIT. Appends
    only. `staged`: each task writes into a staging table beside the target and commits that; the driver moves all
    staging tables of a checkpoint in one transaction. For users and servers without XA rights, and the only one for
    upserts. `auto` asks the server. What became of a transaction is kept in the table `ledger`, beside the target.

    Needs MySQL 8.0.29, MariaDB 10.5.2 or newer, and tables of InnoDB.
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

        * `dsn`: mysql://user:password@host:3306/database, with parameters of pymysql.connect behind a question mark;
          `connect_options`: further ones (`ssl_ca`, `read_timeout`, `unix_socket` …).
        * `table`: as in SQL: `orders`, `shop.orders`, with backticks around a part that has special characters. `name`
          (default: `table`) is the sink's uid.
        * `mode="upsert"`: the last row of each key (`keys`, which need a unique index) in a checkpoint, by the greatest
          `order_by`, replaces the row of that key, or deletes it if the boolean column `delete_marker` is true. Without
          `order_by` a key may come only once in a checkpoint. Neither `delete_marker` nor an `order_by` that the table
          has not is written.
        * `create_table`: create a missing table from the batch's schema, with `keys` as its primary key.
        * `lock_timeout`: seconds that any of our statements waits for a lock, rounded up to whole ones.

        Raises ConfigurationError for options that contradict each other, and for what is no DSN.
        """
        super().__init__(name=name or table, transform=transform)
        self.table = table
        self.strategy = strategy
        self._merge = Merge(mode, tuple([keys] if isinstance(keys, str) else keys), order_by, delete_marker)
        self._ledger_name = ledger
        self._server = Server(dsn, connect_options or {}, name=self.name, lock_timeout=lock_timeout)
        self._planner = Planner(self.name, table, str(self._server), strategy, self._merge, create_table, ledger)
        problems = list(self._merge.contradictions(strategy, "xa"))
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
        except pymysql.Error as error:
            raise ConfigurationError(
                f"sink {self.name!r}: {self._server.redact(describe(error))}. Check host, port, database, user, "
                "password and rights, and that the server runs"
            ) from None

    def weaknesses(self) -> Sequence[str]:
        with self._server.lend() as connection:
            return weaknesses(connection)

    def _planned(self) -> Plan:
        """The plan of `check`, or one made now: recovery comes before the first batch."""
        if self._plan is None:
            with self._server.lend() as connection:
                self._plan = self._planner.load(connection)
        return self._plan

    # ------------------------------------------------------------------ in the task
    def begin_transaction(self, context: TransactionContext) -> RowTransaction:
        plan = self._planned()
        if plan.strategy == "xa":
            return xa.begin(self._server, plan.target, plan.encoder, context)
        return staged.begin(self._server, plan.target, self._merge, plan.encoder, context)

    def write(self, transaction: RowTransaction, batch: pa.RecordBatch) -> None:
        transaction.write(batch)

    def pre_commit(self, transaction: RowTransaction) -> Committable:
        ledger = self._planned().ledger
        if "gtrid" in transaction.identity:
            return xa.pre_commit(transaction, ledger)
        return staged.pre_commit(transaction, ledger)

    def rollback(self, transaction: RowTransaction) -> None:
        """Undo and close the connection. If the statement that makes it durable was sent, abort it by name as well."""
        transaction.close()
        if transaction.sealing:
            self.abort(transaction.identity)

    def commit_directly(self, transaction: RowTransaction) -> None:
        """At-least-once: without ledger."""
        target = self._planned().target
        if "gtrid" in transaction.identity:
            xa.commit_directly(transaction, target)
        else:
            staged.commit_directly(transaction, target, self._merge)

    # ------------------------------------------------------------------ on the driver
    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        """Refuse what no staging table could see: keys that come twice, unique indexes, foreign keys and the like."""
        if mine := [c for c in committables if "gtrid" not in c.transaction]:
            staged.validate_all(self._server, self._planned().target, self._merge, checkpoint, mine)

    def commit(self, committable: Committable) -> CommitOutcome:
        """Commit one participant. A staged one is moved without its siblings: right only if it is the last one."""
        plan = self._planned()
        try:
            if "gtrid" in committable.transaction:
                return xa.commit(self._server, plan.ledger, committable)
            return staged.commit_all(self._server, plan.target, plan.ledger, self._merge, [committable])[0]
        except pymysql.Error as error:
            self._look_again(error)
            raise

    def commit_all(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        """Commit a checkpoint; either strategy's participants, whichever wrote them before a restart. The staged ones
        become visible together."""
        branches = [c for c in committables if "gtrid" in c.transaction]
        tables = [c for c in committables if "gtrid" not in c.transaction]
        outcomes = iter(self._commit_branches(branches)), iter(self._commit_staged(tables))
        answer = [next(outcomes[0 if "gtrid" in c.transaction else 1]) for c in committables]
        if checkpoint.checkpoint_id % _PRUNE_EVERY == 0 and all(
            outcome == CommitOutcome.COMMITTED for outcome in answer
        ):
            self._prune(checkpoint)
        return answer

    def _commit_branches(self, committables: Sequence[Committable]) -> Sequence[CommitOutcome | Exception]:
        # a few: those connections that the pool keeps; many: as many as it takes to be done soon
        return self._commit_each(committables, min(_COMMIT_THREADS, max(IDLE_CONNECTIONS, len(committables) // 16)))

    def _commit_staged(self, committables: Sequence[Committable]) -> Sequence[CommitOutcome | Exception]:
        if not committables:
            return []
        try:
            plan = self._planned()
            return staged.commit_all(self._server, plan.target, plan.ledger, self._merge, committables)
        except Exception as error:
            self._look_again(error)
            return [error] * len(committables)

    def _look_again(self, error: Exception) -> None:
        """The ledger or the table was dropped: ask the catalog before the next try."""
        if isinstance(error, pymysql.Error) and code_of(error) == ER.NO_SUCH_TABLE:
            self._plan = None

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
        if "gtrid" in transaction:
            xa.abort(self._server, ledger, transaction)
        else:
            staged.abort(self._server, schema, ledger, transaction["transaction_id"])

    def in_doubt(self, job: str) -> Iterable[Identity]:
        with self._server.lend() as connection:
            schema, _ = catalog.locate(connection, self.table)
            found = [*xa.in_doubt(connection, schema, job, self.name)]
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
        return f"MySQLSink({what}, server={str(self._server)!r})"
