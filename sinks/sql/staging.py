"""Strategy `staged` with a staging table for each participant, which lies beside the target."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from sinks.errors import ConfigurationError, SinkError
from sinks.sql.ledger import Ledger
from sinks.sql.names import of_sink, staging_table
from sinks.sql.strategies import Doubtful, Refused, Staged, T
from sinks.transaction import Checkpoint, Committable, Identity, TransactionContext, TransactionId


class StagingTables(Staged[T]):
    """A table's comment is its participant's transaction id. Tables that were moved and are still there are told by the
    ledger. Were that emptied, they could not be moved again: rows are counted, and whoever moves a table without
    dropping it leaves it with another number of rows."""

    # ------------------------------------------------------------------ the database's own
    @abstractmethod
    def create(self, plan: Any, context: TransactionContext, name: str) -> T:
        """Open the participant's transaction, which writes into a new table of this name."""

    @abstractmethod
    def seal(self, transaction: T) -> None:
        """Commit what was staged, and let go of the connection."""

    @abstractmethod
    def seal_without(self, transaction: T, table: str) -> None:
        """Commit, and drop the (quoted) staging table whose rows were moved already."""

    @abstractmethod
    def columns(self, connection: Any, target: Any, name: str) -> list[str]:
        """Those of a staging table that go into the target or tell what to do with a row."""

    @abstractmethod
    def existing(self, connection: Any, schema: str, names: Sequence[str]) -> set[str]:
        """Those of the names that a table has."""

    @abstractmethod
    def comments(self, connection: Any, schema: str, prefix: str) -> list[str]:
        """The comments of all tables `tpc_…` that begin so, sorted."""

    @abstractmethod
    def drop(self, connection: Any, schema: str, names: Sequence[str]) -> None:
        """Outside a transaction."""

    @abstractmethod
    def judges(self, target: Any) -> bool:
        """Whether the table may refuse rows that staging tables take."""

    @abstractmethod
    def locked(self, connection: Any, plan: Any, tables: Sequence[str]) -> Any:
        """The target as the running transaction sees it, locked against changes until its end. Raises
        ConfigurationError that says what was changed, and what to change back, if the rows of these staging tables
        cannot go into it as they are."""

    @abstractmethod
    def explained(self, target: Any, where: str, tables: Sequence[str]) -> AbstractContextManager[None]:
        """The server's errors as SinkErrors, with the target's name instead of a staging table's."""

    @abstractmethod
    def refusal(self, error: Exception, target: Any, tables: Sequence[str]) -> str | None:
        """What the server has against rows, or None if the error is about something else: to be asked again."""

    # ------------------------------------------------------------------ in the task
    def begin(self, plan: Any, context: TransactionContext) -> T:
        return self.create(plan, context, staging_table(context.transaction_id))

    def pre_commit(self, transaction: T, ledger: Ledger) -> Committable:
        transaction.finish()
        self.seal(transaction)
        return Committable(transaction.identity, proof=ledger.proof())

    def commit_directly(self, transaction: T, plan: Any) -> None:
        """At-least-once: move the rows in the transaction that staged them."""
        rows, merge, target = transaction.finish(), self.merge, plan.target
        table = merge.quoted(target.schema, staging_table(transaction.context.transaction_id))
        written = merge.written(transaction.context.schema.names, target.names)
        with transaction.explained():
            if merge.mode == "upsert":
                merge.clashes(transaction.connection, target, [table], written)
            merge.move(transaction.connection, target, [table], written, rows)
        self.seal_without(transaction, table)

    # ------------------------------------------------------------------ on the driver
    def validate_all(self, plan: Any, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        """Raise what would keep the rows from being moved: a table that was changed since they were staged, and values
        that it would refuse and no staging table could. For an append to a table without constraints it only looks at
        the table, or tries one row; the same for an upsert with `order_by` to a table with none but its key."""
        merge = self.merge
        with self.server.lend() as connection:
            there = self.existing(connection, plan.target.schema, names_of(committables))
            tables = [name for name in names_of(committables) if name in there]
            if not tables:
                return
            where = f"checkpoint {checkpoint.checkpoint_id}"
            with self.explained(plan.target, where, tables), self.server.trial(connection):
                target = self.locked(connection, plan, tables)
                staging, written = self._staging(connection, target, tables)
                if merge.mode == "upsert" or self.judges(target):
                    merge.clashes(connection, target, staging, written)
                    if merge.beyond(target, written):
                        merge.move(connection, target, staging, written, sum(c.fingerprint.rows for c in committables))
                        return
                merge.sample(connection, target, staging, written)

    def intact(self, connection: Any, plan: Any, committables: Sequence[Committable]) -> list[str]:
        there = self.existing(connection, plan.target.schema, names_of(committables))
        ids = [c.transaction["transaction_id"] for c in committables]
        return [text for text in ids if staging_table(text) in there]

    def kept(self, committables: Sequence[Committable]) -> str:
        tables = [str(c.transaction["table"]) for c in committables]
        more = f" and {len(tables) - 1} more, one for each partition" if len(tables) > 1 else ""
        return f"the staging table{'s' if more else ''} {tables[0]}{more}"

    def gone(self, transaction_id: str) -> str:
        return f"the staging table {staging_table(transaction_id)} of {transaction_id} is gone"

    def move(self, connection: Any, plan: Any, committables: Sequence[Committable]) -> None:
        target, tables = plan.target, names_of(committables)
        try:
            target = self.locked(connection, plan, tables)
            staging, written = self._staging(connection, target, tables)
            self.merge.move(connection, target, staging, written, sum(c.fingerprint.rows for c in committables))
        except ConfigurationError as error:
            raise Refused(str(error)) from error
        except SinkError as error:
            if error.retryable:
                raise
            raise Doubtful(f"table {target.label}: {error}") from error
        except Exception as error:
            reason = self.refusal(error, target, tables)
            if reason is None:
                raise
            raise Refused(f"table {target.label} refuses rows{reason}") from error

    def discard(self, connection: Any, schema: str, ids: Sequence[str]) -> None:
        """Drop those of their staging tables that are there."""
        self.drop(connection, schema, sorted(self.existing(connection, schema, [staging_table(text) for text in ids])))

    def forget(self, connection: Any, schema: str, identity: Identity) -> None:
        self.discard(connection, schema, [identity["transaction_id"]])

    def staged(self, connection: Any, schema: str, ledger: Ledger | None, job: str, sink: str) -> dict[str, Identity]:
        prefix = TransactionId.prefix(job)
        found = self.comments(connection, schema, prefix)
        mine = [text for text in found if text.startswith(prefix) and of_sink(text, sink)]
        return {text: identity_of(schema, text) for text in mine}

    def _staging(self, connection: Any, target: Any, tables: Sequence[str]) -> tuple[list[str], list[str]]:
        """Staging tables, quoted, and the columns that they have for the target."""
        columns = self.columns(connection, target, tables[0])
        return [self.merge.quoted(target.schema, name) for name in tables], self.merge.written(columns, target.names)


def identity_of(schema: str, transaction_id: str) -> Identity:
    return {"transaction_id": transaction_id, "table": f"{schema}.{staging_table(transaction_id)}"}


def names_of(committables: Sequence[Committable]) -> list[str]:
    return [staging_table(c.transaction["transaction_id"]) for c in committables]
