"""`SqlAlchemySink`: exactly-once into a table of any database that SQLAlchemy knows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import URL

from sinks.base import TwoPhaseCommitSink
from sinks.errors import ConfigurationError
from sinks.sql.options import MergeOptions
from sinks.sqlalchemy import staged, two_phase
from sinks.sqlalchemy.database import Database
from sinks.sqlalchemy.ledger import Ledger
from sinks.sqlalchemy.plan import TWO_PHASE, Plan, Planner
from sinks.sqlalchemy.rows import RowTransaction
from sinks.transaction import Checkpoint, CommitOutcome, Committable, Identity, TransactionContext

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)

Strategy = Literal["auto", "two_phase", "staged"]
Mode = Literal["append", "upsert"]

_PRUNE_EVERY = 50
_COMMIT_THREADS = 4


class SqlAlchemySink(TwoPhaseCommitSink[RowTransaction]):
    """Rows into one table, by `executemany` of INSERT: the portable path, not the fast one. PostgresSink and MySQLSink
    are the fast ones.

    Two strategies. `staged`, for any database with transactions: tasks insert into a staging table beside the target
    and commit that; the driver moves a checkpoint in one transaction. `two_phase`, where dialect and server can
    (PostgreSQL with max_prepared_transactions above 0), appends only: tasks insert into the table itself and prepare;
    the driver commits. `auto` asks the server. What became of a transaction is kept in the table `ledger`, beside the
    target.
    """

    def __init__(
        self,
        url: str | URL,
        table: str,
        *,
        name: str | None = None,
        strategy: Strategy = "auto",
        mode: Mode = "append",
        keys: Sequence[str] = (),
        order_by: str | None = None,
        delete_marker: str | None = None,
        create_table: bool = False,
        ledger: str = "tpc_ledger",
        transform: Callable[[DataFrame], DataFrame] | None = None,
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Set up the sink; nothing is connected yet.

        * `url`: SQLAlchemy's, `sqlite:////var/lib/app.db`; `engine_options`: more for `sqlalchemy.create_engine`.
        * `table`: `orders` or `schema.orders`, as the database has it. `name` (default: `table`) is the sink's uid.
        * `mode="upsert"`: the last row of each key (`keys`, which need a unique index) in a checkpoint, by the greatest
          `order_by`, replaces the row of that key (as DELETE and INSERT), or deletes it if the boolean column
          `delete_marker` is true. Without `order_by` a key may come only once in a checkpoint. Neither `delete_marker`
          nor an `order_by` that the table has not is written.
        * `create_table`: create a missing table from the batch's schema, with `keys` as its primary key.

        Raises ConfigurationError for options that contradict each other, and for a URL that SQLAlchemy cannot read.
        """
        super().__init__(name=name or table, transform=transform)
        self.table = table
        self.strategy = strategy
        self._merge = MergeOptions(mode, tuple([keys] if isinstance(keys, str) else keys), order_by, delete_marker)
        self._database = Database(url, engine_options or {}, name=self.name)
        if problems := list(self._merge.contradictions(strategy, "two_phase")):
            raise ConfigurationError(f"sink {self.name!r}: " + "; ".join(problems))
        self._planner = Planner(self.name, table, self._database, strategy, self._merge, create_table, ledger)
        self._plan: Plan | None = None

    # ------------------------------------------------------------------ set-up
    def check(self, schema: pa.Schema) -> None:
        """Find the table (or create it), see whether it can take rows of `schema`, and choose the strategy.

        Raises ConfigurationError (SchemaMismatch if it is only about columns) with all reasons at once.
        """
        try:
            with self._database.explained(f"sink {self.name!r}"), self._database.engine.connect() as connection:
                self._plan = self._planner.check(connection, schema)
        except exc.OperationalError as error:
            raise ConfigurationError(
                f"sink {self.name!r}: cannot use {self._database}: {self._database.said(error)}. Check address, user, "
                "password and rights, and that the server runs"
            ) from None

    def _planned(self) -> Plan:
        """The plan of `check`, or one made now: recovery comes before the first batch."""
        if self._plan is None:
            with self._database.engine.connect() as connection:
                self._plan = self._planner.load(connection)
        return self._plan

    # ------------------------------------------------------------------ in the task
    def begin_transaction(self, context: TransactionContext) -> RowTransaction:
        plan = self._planned()
        if plan.strategy == "two_phase":
            return two_phase.begin(self._database, plan, context)
        return staged.begin(self._database, plan, context)

    def write(self, transaction: RowTransaction, batch: pa.RecordBatch) -> None:
        transaction.write(batch)

    def pre_commit(self, transaction: RowTransaction) -> Committable:
        ledger = self._planned().ledger
        if "xid" in transaction.identity:
            return two_phase.pre_commit(transaction, ledger)
        return staged.pre_commit(transaction, ledger)

    def rollback(self, transaction: RowTransaction) -> None:
        """Close the connection. If the statement that makes it durable was sent, abort it by name as well."""
        transaction.close()
        if transaction.sealing:
            self.abort(transaction.identity)

    def commit_directly(self, transaction: RowTransaction) -> None:
        """At-least-once: one plain transaction, without ledger."""
        if "xid" in transaction.identity:
            two_phase.commit_directly(transaction)
        else:
            staged.commit_directly(transaction, self._planned(), self._merge)

    # ------------------------------------------------------------------ on the driver
    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        """Refuse what the target would refuse, and keys that come twice without `order_by`."""
        if mine := [c for c in committables if "xid" not in c.transaction]:
            staged.validate_all(self._database, self._planned(), self._merge, checkpoint, mine)

    def commit(self, committable: Committable) -> CommitOutcome:
        """Commit one participant. A staged one is moved without its siblings: right only if it is the last one."""
        if "xid" in committable.transaction:
            return two_phase.commit(self._database, self._planned().ledger, committable)
        return staged.commit_all(self._database, self._planned(), self._merge, [committable])[0]

    def commit_all(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        """Commit a checkpoint; either strategy's participants, whichever wrote them before a restart. The staged ones
        become visible together."""
        prepared = [c for c in committables if "xid" in c.transaction]
        others = [c for c in committables if "xid" not in c.transaction]
        outcomes = iter(self._commit_prepared(prepared)), iter(self._commit_staged(others))
        answer = [next(outcomes[0 if "xid" in c.transaction else 1]) for c in committables]
        if checkpoint.checkpoint_id % _PRUNE_EVERY == 0 and all(o == CommitOutcome.COMMITTED for o in answer):
            self._prune(checkpoint)
        return answer

    def _commit_prepared(self, committables: Sequence[Committable]) -> Sequence[CommitOutcome | Exception]:
        if not committables:
            return []
        _ = self._database.engine  # made once, before the threads
        return self._commit_each(committables, _COMMIT_THREADS)

    def _commit_staged(self, committables: Sequence[Committable]) -> Sequence[CommitOutcome | Exception]:
        if not committables:
            return []
        try:
            return staged.commit_all(self._database, self._planned(), self._merge, committables)
        except Exception as error:
            return [error] * len(committables)

    def _prune(self, checkpoint: Checkpoint) -> None:
        try:
            with self._database.engine.begin() as connection:
                self._planned().ledger.prune(connection, checkpoint, self.name)
        except Exception:
            logger.warning("sink %r could not prune its ledger; it will try again", self.name, exc_info=True)

    def abort(self, transaction: Identity) -> None:
        schema = self._planner.schema
        with self._database.engine.connect() as connection:
            ledger = Ledger.ensure(connection, self._planner.ledger, schema)
        if "xid" in transaction:
            two_phase.abort(self._database, ledger, transaction["xid"])
        else:
            with self._database.engine.begin() as connection:
                staged.abort(connection, schema, ledger, transaction)

    def in_doubt(self, job: str) -> Iterable[Identity]:
        found: list[Identity] = []
        if self._database.dialect in TWO_PHASE:
            found += two_phase.in_doubt(self._database, job, self.name)
        name, schema = self._planner.ledger, self._planner.schema
        with self._database.engine.connect() as connection:
            if sa.inspect(connection).has_table(name, schema=schema):
                found += staged.in_doubt(connection, Ledger.ensure(connection, name, schema), job, self.name)
        return found

    # ------------------------------------------------------------------ life
    def close(self) -> None:
        self._database.close()

    def __repr__(self) -> str:
        what = f"name={self.name!r}, table={self.table!r}, strategy={self.strategy!r}"
        return f"SqlAlchemySink({what}, database={str(self._database)!r})"
