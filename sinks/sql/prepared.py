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
    """The server answered that it has ended a prepared transaction, and has not."""


class PreparedTransactions(Generic[ConnectionT, TargetT]):
    """Begin a transaction on the target in a task, and end it by its name from the driver.

    This class itself is for a database that has no prepared transactions: `NAME` is "", so the
    strategy is always `staged`, and nothing here is asked but `end`, for a transaction that another
    kind of sink prepared.
    """

    NAME: ClassVar[str] = ""
    """The name of the strategy; "" if the database has no prepared transactions."""
    KEY: ClassVar[str] = ""
    """Where the identity of a prepared transaction has the name that the ledger knows."""

    def __init__(self, catalog: Catalog[ConnectionT, TargetT]) -> None:
        self.catalog = catalog
        self.server = catalog.server
        self.dialect = catalog.dialect
        self.merge = catalog.merge

    def obstacle(self, connection: ConnectionT) -> str | None:
        """Tell why there can be no prepared transactions here, in a few words, and behind a colon
        what to do."""
        return None

    def findings(self, connection: ConnectionT, strategy: str) -> Iterable[Finding]:
        """Tell what `coordinator doctor` is to say of them, where the user asked for this strategy.

        Default: nothing.
        """
        return ()

    # ------------------------------------------------------------------ in the task
    def begin(
        self, plan: Plan[ConnectionT, TargetT], context: TransactionContext
    ) -> RowTransaction[ConnectionT]:
        """Open the participant's transaction, whose rows go into the target itself."""
        raise NotImplementedError

    def evidence(self, transaction: RowTransaction[ConnectionT]) -> dict[str, object]:
        """Tell what a committable carries beside the ledger's proof.

        `transaction_id` is needed where `key` is another. Default: nothing.
        """
        return {}

    # ------------------------------------------------------------------ on the driver
    def key(self, identity: Identity) -> str:
        """Tell by which name the ledger knows a prepared transaction."""
        return str(identity[self.KEY])

    def end(
        self,
        connection: ConnectionT,
        ledger: Ledger[ConnectionT],
        how: str,
        identity: Identity,
        proof: Mapping[str, object],
    ) -> bool:
        """COMMIT or ROLLBACK what is prepared; False if nothing is under this name.

        `proof` is the committable's.

        Raises ConfigurationError if the sink may not, NotEnded where the server answered and did
        not do it, and the driver's errors to be asked again.
        """
        raise ConfigurationError(
            f"{dict(identity)} is a prepared transaction, and this sink has none: let the program "
            "that prepared it start once more and finish its last checkpoint, then start this one"
        )

    def in_doubt(
        self, connection: ConnectionT, schema: str, job: str, sink: str
    ) -> Iterable[Identity]:
        """List what is prepared of this job and sink."""
        return ()

    def contradiction(self, connection: ConnectionT, proof: Mapping[str, object]) -> str | None:
        """Tell why a transaction of which the ledger has nothing can nevertheless not be called
        lost."""
        return None
