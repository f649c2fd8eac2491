"""The plan that the driver makes for the tasks, and the transaction of one partition."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Generic

import pyarrow as pa

from sinks.dead_letters import Refusal, write_and_find_refused
from sinks.sql.dialect import TargetT
from sinks.sql.ledger import Ledger
from sinks.sql.names import staging_table
from sinks.sql.server import ConnectionT, Fault, explained
from sinks.sql.table import ForeignKey
from sinks.transaction import Fingerprint, Identity, TransactionContext


@dataclass(frozen=True)
class Plan(Generic[ConnectionT, TargetT]):
    """The facts that the driver found out about the server and one table.

    The sink's pickle takes them to the tasks. `key` is the name that rows give the table, or "" if
    all rows of the sink go there.
    """

    target: TargetT
    ledger: Ledger[ConnectionT]
    strategy: str
    key: str = ""

    def staging_table(self, transaction_id: str) -> str:
        """Return the name of a partition's staging table for this table."""
        return staging_table(transaction_id, self.key)


class RowTransaction(ABC, Generic[ConnectionT]):
    """An open transaction, on a connection that it has to itself.

    `identity` is the name of the transaction once it is pre-committed. `may_be_durable` is set just
    before the statement that makes it durable; after that only the server knows whether it is.
    `fingerprint` is set before that.
    """

    connection: ConnectionT

    def __init__(
        self,
        context: TransactionContext,
        identity: Identity,
        table: str,
        fault: Callable[[Exception], Fault | None],
    ) -> None:
        """Keep what the transaction needs to explain errors.

        `table` is the target's name for a reader, and `fault` is the server's method of this name.
        """
        self.context = context
        self.identity = identity
        self.table = table
        self._fault = fault
        self.may_be_durable = False
        self.fingerprint: Fingerprint | None = None
        self.own_keys: Sequence[ForeignKey] = ()
        """If the transaction writes into the target itself, the foreign keys by which the table
        refers to itself."""
        self.who = f"partition {context.subtask} of checkpoint {context.checkpoint_id}"
        """The name of the writer, in errors."""

    @property
    def parts(self) -> Mapping[str, RowTransaction[ConnectionT]]:
        """The part of the transaction for each table, by the name that rows give the table.

        A transaction into one table is its own part, with the name "".
        """
        return {"": self}

    @contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def explained(self) -> AbstractContextManager[None]:
        """Let errors of the server inside this block name table, partition and checkpoint."""
        return explained(self.judge, self.table, self.who)

    def judge(self, error: Exception) -> Fault | None:
        """Tell what an error of the server is about.

        If the table refers to itself, the fault says what to do about that.
        """
        known = self._fault(error)
        if known and (known.kind == "blocked" or known.kind == "refused"):
            elsewhere = self.elsewhere(known.text, waited=known.kind == "blocked")
            return replace(known, advice=elsewhere or known.advice)
        return known

    def elsewhere(self, text: str, *, waited: bool = False) -> str:
        """Return what follows the server's words if the missing row may be another partition's.

        That can be if the table refers to itself, and the words name one of these foreign keys or
        the transaction `waited` for a lock. Otherwise return "".
        """
        names = [key.name for key in self.own_keys if waited or key.name in text]
        if not names:
            return ""
        return (
            f"; the row that {', '.join(names)} needs may be in another partition: use "
            'strategy="staged"'
        )

    def write(self, batch: pa.RecordBatch) -> None:
        """Write the rows.

        By default this is `put`, which may do more than is needed here.
        """
        self.put(batch)

    def write_good_rows(self, batch: pa.RecordBatch, most: int) -> list[Refusal]:
        """Write the rows that the target takes, and return the refusals of the others.

        After more than `most` refused rows it may stop.
        """
        return write_and_find_refused(batch, self.encode, self.put, most)

    @abstractmethod
    def encode(self, batch: pa.RecordBatch) -> object:
        """Encode the rows.

        Raises BadValue if the columns cannot hold them, as far as that can be told without the
        server.
        """

    @abstractmethod
    def put(self, batch: pa.RecordBatch) -> None:
        """Write all of the rows or none.

        If this raises BadValue, none is written, and the transaction continues.
        """

    def pause(self) -> None:
        """Wait until the connection is free for another part of the transaction.

        More rows may follow. By default the connection is free between two calls.
        """
        return

    @abstractmethod
    def finish(self) -> int:
        """Wait until the server has judged every row; return how many rows there were."""

    def prepare(self) -> None:
        """Make a transaction on the target itself durable under its name.

        Then let go of the connection. The default is that of a database without prepared
        transactions, which is never asked for this.
        """
        raise NotImplementedError

    @abstractmethod
    def commit(self) -> None:
        """Commit the transaction at once, and let go of the connection."""

    @abstractmethod
    def discard(self) -> None:
        """Roll the transaction back.

        When this returns, the server has done so, unless it cannot be reached.
        """
