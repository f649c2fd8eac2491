"""One participant's transaction in the task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, TypeVar

import pyarrow as pa

from sinks.sql.server import C, Opaque
from sinks.transaction import Fingerprint, Identity, TransactionContext


class RowTransaction(ABC, Generic[C]):
    """An open transaction, on a connection that it has to itself. `identity` is what it will be known by when it is
    pre-committed; `sealing` is set just before the statement that makes it durable, after which only the server knows
    whether it is. `summed` is what the task says of its rows, before that."""

    connection: C

    def __init__(self, context: TransactionContext, identity: Identity) -> None:
        self.context, self.identity = context, identity
        self.sealing = False
        self.summed: Fingerprint | None = None
        self.who = f"partition {context.subtask} of checkpoint {context.checkpoint_id}"
        """Who writes, in errors."""

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Throws it away if anything is raised in this block."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def explained(self) -> AbstractContextManager[None]:
        """Errors of the server inside this block name table, partition and checkpoint."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Default: `put`, which may do more than is needed here."""
        self.put(batch)

    @abstractmethod
    def encode(self, batch: pa.RecordBatch) -> object:
        """Raises BadValue if the columns cannot hold the rows, as far as that can be told without the server."""

    @abstractmethod
    def put(self, batch: pa.RecordBatch) -> None:
        """Write the rows, all or none: none if this raises BadValue, after which the transaction goes on."""

    @abstractmethod
    def finish(self) -> int:
        """Wait until the server has judged every row; returns how many there were."""

    def prepare(self) -> None:
        """Of one that writes into the target itself: make it durable under its name, and let go of the connection.
        Default: of a database without prepared transactions, of which this is never asked."""
        raise NotImplementedError

    @abstractmethod
    def commit(self) -> None:
        """Commit it at once, and let go of the connection."""

    @abstractmethod
    def close(self) -> None:
        """Throw it away. The server has done so when this returns, unless it cannot be reached."""


T = TypeVar("T", bound=RowTransaction[Opaque])
