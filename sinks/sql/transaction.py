"""What travels to the tasks, which is the plan that the driver made, and one participant's
transaction there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Generic

import pyarrow as pa

from sinks.sql.dialect import TargetT
from sinks.sql.ledger import Ledger
from sinks.sql.server import ConnectionT, Fault, explained
from sinks.sql.table import ForeignKey
from sinks.transaction import Fingerprint, Identity, TransactionContext


@dataclass(frozen=True)
class Plan(Generic[ConnectionT, TargetT]):
    """What the driver found out about the server, carried to the tasks in the sink's pickle."""

    target: TargetT
    ledger: Ledger[ConnectionT]
    strategy: str


class RowTransaction(ABC, Generic[ConnectionT]):
    """An open transaction, on a connection that it has to itself.

    `identity` is what it will be known by when it is pre-committed; `may_be_durable` is set just
    before the statement that makes it so, after which only the server knows whether it is.
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
        """`table` is the target's name for a reader, and `fault` the backend's."""
        self.context = context
        self.identity = identity
        self.table = table
        self._fault = fault
        self.may_be_durable = False
        self.fingerprint: Fingerprint | None = None
        self.own_keys: Sequence[ForeignKey] = ()
        """Of one that writes into the target itself: the foreign keys by which the table refers to
        itself."""
        self.who = f"partition {context.subtask} of checkpoint {context.checkpoint_id}"
        """Who writes, in errors."""

    @contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def explained(self) -> AbstractContextManager[None]:
        """Errors of the server inside this block name table, partition and checkpoint."""
        return explained(self.judge, self.table, self.who)

    def judge(self, error: Exception) -> Fault | None:
        """What an error of the server is about, with what to do about a table that refers to
        itself."""
        known = self._fault(error)
        if known and (known.kind == "blocked" or known.kind == "refused"):
            return replace(
                known,
                advice=known.advice + self.elsewhere(known.text, waited=known.kind == "blocked"),
            )
        return known

    def elsewhere(self, text: str, *, waited: bool = False) -> str:
        """What follows the server's words if they name a foreign key to the table itself, or it
        `waited` for a lock: the row that is missing may be another partition's."""
        names = [key.name for key in self.own_keys if waited or key.name in text]
        if not names:
            return ""
        return (
            f"; by {', '.join(names)} the table refers to itself, and the row that is missing may "
            "be in another "
            'partition, whose transaction is not committed yet, or come later: strategy="staged" '
            "takes such rows"
        )

    def write(self, batch: pa.RecordBatch) -> None:
        """Default: `put`, which may do more than is needed here."""
        self.put(batch)

    @abstractmethod
    def encode(self, batch: pa.RecordBatch) -> object:
        """Raises BadValue if the columns cannot hold the rows, as far as that can be told without
        the server."""

    @abstractmethod
    def put(self, batch: pa.RecordBatch) -> None:
        """Write the rows, all or none: none if this raises BadValue, after which the transaction
        goes on."""

    @abstractmethod
    def finish(self) -> int:
        """Wait until the server has judged every row; returns how many there were."""

    def prepare(self) -> None:
        """Of one that writes into the target itself: make it durable under its name, and let go of
        the connection. Default: of a database without prepared transactions, of which this is never
        asked."""
        raise NotImplementedError

    @abstractmethod
    def commit(self) -> None:
        """Commit it at once, and let go of the connection."""

    @abstractmethod
    def discard(self) -> None:
        """Roll it back. The server has done so when this returns, unless it cannot be reached."""
