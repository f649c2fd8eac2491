"""One kind of database as a sink uses it.

There are five objects with one job each, and the decisions that need several of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic

from sinks.sql.catalog import Catalog
from sinks.sql.dialect import TargetT
from sinks.sql.names import witness_of
from sinks.sql.prepared import PreparedTransactions
from sinks.sql.server import ConnectionT
from sinks.sql.staging import Staging


class Backend(Generic[ConnectionT, TargetT]):
    """The five objects through which the sinks into tables speak to a database.

    * `server`: connections, statements, transactions, errors.
    * `dialect`: names and parts of statements, as text.
    * `catalog`: the target and other tables, as the database describes them; creating and altering.
    * `staging`: staging tables, and the move of their rows into the target.
    * `prepared`: transactions of two phases, if the database has them.

    It is pickled to the executors.
    """

    def __init__(
        self,
        staging: Staging[ConnectionT, TargetT],
        prepared: PreparedTransactions[ConnectionT, TargetT] | None = None,
        *,
        strategy: str = "staged",
    ) -> None:
        """Put the objects together, which share one catalog.

        `strategy` is the one that the user asked for.
        """
        self.staging = staging
        self.catalog: Catalog[ConnectionT, TargetT] = staging.catalog
        self.prepared = prepared or PreparedTransactions(self.catalog)
        self.server = self.catalog.server
        self.dialect = self.catalog.dialect
        self.merge = self.catalog.merge
        self.strategy = strategy

    def choose(self, connection: ConnectionT, target: TargetT) -> tuple[str, str]:
        """Choose the strategy; return it and, in a few words, the reason for it."""
        if not self.prepared.NAME:
            return "staged", "the only one for this database"
        if self.merge.mode == "upsert":
            return "staged", "upserts need it"
        if self.strategy != "auto":
            return self.strategy, "as configured"
        obstacle, _, _ = (self.prepared.obstacle(connection) or "").partition(": ")
        if obstacle:
            return "staged", obstacle
        privileges = self.merge.privileges(target, "staged")
        if target.own_keys and not list(
            self.catalog.missing_privileges(connection, target, privileges, create=True)
        ):
            return (
                "staged",
                "the table refers to itself, and a row may need one of another partition",
            )
        return self.prepared.NAME, "server and rights allow it"

    def problems(self, connection: ConnectionT, target: TargetT, ledger: str) -> Iterable[str]:
        """Yield what is in the way, apart from columns that do not fit.

        This is about the index that upserts need, the server, privileges, and what is wrong in this
        kind of database.
        """
        if self.merge.keys and not target.is_unique(self.merge.keys):
            there = "".join(f"; {what}" for what in target.no_arbiters(self.merge.keys))
            yield (
                f"upsert by ({', '.join(self.merge.keys)}) needs a unique index on just these "
                f"columns, whole ones, neither partial nor deferrable, and without a period{there}"
            )
        if self.strategy not in ("auto", "staged") and (
            reason := self.prepared.obstacle(connection)
        ):
            yield f'{reason}{", or" if ": " in reason else ":"} use strategy="staged"'
        strategy, _ = self.choose(connection, target)
        ledgers = self.catalog.existing(connection, target.schema, [ledger, witness_of(ledger)])
        create = strategy == "staged" or len(ledgers) < 2
        privileges = self.merge.privileges(target, strategy)
        yield from self.catalog.missing_privileges(connection, target, privileges, ledgers, create)
        yield from self.catalog.problems(connection, target, ledger)
