"""Prepared transactions: what a database does for the strategy `sinks.sql.strategies.TwoPhase`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Generic

from sinks.diagnosis import Finding
from sinks.errors import ConfigurationError, SinkError
from sinks.sql.catalog import Catalog
from sinks.sql.dialect import TargetT
from sinks.sql.ledger import Ledger
from sinks.sql.server import ConnectionT
from sinks.sql.transaction import Plan, RowTransaction
from sinks.transaction import Identity, TransactionContext


class NotEnded(SinkError):
    """The server answered that it ended a prepared transaction, although it did not."""


class PreparedTransactions(Generic[ConnectionT, TargetT]):
    """Begin a transaction on the target in a task, and end it by its name from the driver.

    This class itself serves databases that have no prepared transactions. There `NAME` is "", so
    the strategy is always `staged`, and `end` rejects a transaction that another kind of sink
    prepared.
    """

    NAME: ClassVar[str] = ""
    """The name of the strategy; "" if the database has no prepared transactions."""
    KEY: ClassVar[str] = ""
    """The entry of a prepared transaction's identity that has the name that the ledger knows."""

    def __init__(self, catalog: Catalog[ConnectionT, TargetT]) -> None:
        self.catalog = catalog
        self.server = catalog.server
        self.dialect = catalog.dialect
        self.merge = catalog.merge

    def obstacle(self, connection: ConnectionT) -> str | None:
        """Tell why there can be no prepared transactions here; return None if there can be some.

        The text has a few words, and, if there is a remedy, a colon and the remedy.
        """
        return None

    def findings(self, connection: ConnectionT, strategy: str) -> Iterable[Finding]:
        """Return what `coordinator doctor` says of prepared transactions.

        `strategy` is the one that the user asked for. By default there is nothing to say.
        """
        return ()

    # ------------------------------------------------------------------ in the task
    def begin(
        self,
        plan: Plan[ConnectionT, TargetT],
        context: TransactionContext,
    ) -> RowTransaction[ConnectionT]:
        """Open the transaction of one partition, whose rows go into the target itself."""
        raise NotImplementedError

    def add_part(
        self,
        transaction: RowTransaction[ConnectionT],
        plan: Plan[ConnectionT, TargetT],
        context: TransactionContext,
    ) -> RowTransaction[ConnectionT]:
        """Let an open transaction write into a further table; return its part for the table.

        It is needed where rows name their tables.
        """
        raise NotImplementedError

    def evidence(self, transaction: RowTransaction[ConnectionT]) -> dict[str, object]:
        """Return what a committable carries in addition to the ledger's proof.

        If `key` is not the transaction's ID, the evidence must have the ID as `transaction_id`. By
        default there is nothing to add.
        """
        return {}

    # ------------------------------------------------------------------ on the driver
    def key(self, identity: Identity) -> str:
        """Return the name by which the ledger knows a prepared transaction."""
        return str(identity[self.KEY])

    def end(
        self,
        connection: ConnectionT,
        ledger: Ledger[ConnectionT],
        how: str,
        identity: Identity,
        proof: Mapping[str, object],
    ) -> bool:
        """Run COMMIT or ROLLBACK (`how`) of a prepared transaction; return False if there is none.

        `proof` is that of the committable.

        Raises ConfigurationError if the sink's user may not end the transaction, and NotEnded if
        the server answered but did not end it. After an error of the driver, the caller may ask
        again.
        """
        raise ConfigurationError(
            f"{dict(identity)} is a prepared transaction, and this sink has none: let the program "
            "that prepared it start once more and finish its last checkpoint, then start this one"
        )

    def in_doubt(
        self, connection: ConnectionT, schema: str, job: str, sink: str
    ) -> Iterable[Identity]:
        """List the prepared transactions of this job and sink."""
        return ()

    def contradiction(self, connection: ConnectionT, proof: Mapping[str, object]) -> str | None:
        """Tell why a transaction cannot be called lost although the ledger has nothing of it.

        Return None if it can.
        """
        return None
