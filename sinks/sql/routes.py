"""The tables of one sink, as its driver planned them: one table, or those that rows name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

from sinks.sql.backend import Backend
from sinks.sql.catalog import order_by_foreign_keys
from sinks.sql.dialect import TargetT
from sinks.sql.ledger import Ledger
from sinks.sql.names import staging_table
from sinks.sql.server import ConnectionT
from sinks.sql.transaction import Plan, RowTransaction
from sinks.transaction import Committable, TransactionContext


@dataclass(frozen=True)
class Route(Generic[ConnectionT, TargetT]):
    """The way of rows into one table: what the driver found out, and the objects that write."""

    backend: Backend[ConnectionT, TargetT]
    plan: Plan[ConnectionT, TargetT]

    @property
    def target(self) -> TargetT:
        return self.plan.target

    @property
    def destination(self) -> str:
        """Where rows go, and how, in the words by which committables are compared."""
        return self.backend.merge.destination(self.target)

    def begin(self, context: TransactionContext) -> RowTransaction[ConnectionT]:
        """Open the transaction of one partition."""
        if self.plan.strategy == "staged":
            return self.backend.staging.stage(self.plan, context)
        return self.backend.prepared.begin(self.plan, context)

    def add_part(
        self, transaction: RowTransaction[ConnectionT], context: TransactionContext
    ) -> RowTransaction[ConnectionT]:
        """Let an open transaction write into this table, too; return its part for the table."""
        if self.plan.strategy == "staged":
            return self.backend.staging.add_part(transaction, self.plan, context)
        return self.backend.prepared.add_part(transaction, self.plan, context)


@dataclass(frozen=True)
class Routes(Generic[ConnectionT, TargetT]):
    """The routes of one sink.

    All have one strategy, and their tables are in one schema, with one ledger. Each comes after the
    routes into the tables that its table refers to.
    """

    all: Sequence[Route[ConnectionT, TargetT]]

    @classmethod
    def together(
        cls, routes: Iterable[Route[ConnectionT, TargetT]]
    ) -> Routes[ConnectionT, TargetT]:
        """Put the routes in order.

        If one table needs the strategy staged, all are written by it. So are, unless the user asked
        for another strategy, tables that refer to each other, because a row may need one of another
        partition.
        """
        ordered = order_by_foreign_keys(routes, lambda route: route.target)
        tables = {(route.target.schema, route.target.name) for route in ordered}
        keys = [key for route in ordered for key in route.target.foreign_keys]
        are_related = len(ordered) > 1 and any((key.schema, key.table) in tables for key in keys)
        strategies = {route.plan.strategy for route in ordered}
        if len(strategies) > 1 or (are_related and ordered[0].backend.strategy == "auto"):
            ordered = [
                replace(route, plan=replace(route.plan, strategy="staged")) for route in ordered
            ]
        return cls(ordered)

    @property
    def plan(self) -> Plan[ConnectionT, TargetT]:
        """The plan of the first route, for what all plans have in common."""
        return self.all[0].plan

    @property
    def ledger(self) -> Ledger[ConnectionT]:
        return self.plan.ledger

    @property
    def schema(self) -> str:
        return self.plan.target.schema

    @property
    def label(self) -> str:
        """The names of the tables, for a reader."""
        more = len(self.all) - 3
        labels = ", ".join(route.target.label for route in self.all[:3])
        return f"{labels} and {more} more" if more > 0 else labels

    @property
    def by_key(self) -> dict[str, Route[ConnectionT, TargetT]]:
        return {route.plan.key: route for route in self.all}

    def astray(self, committable: Committable) -> str:
        """Tell why rows cannot go where they were written for; return "" if they can."""
        by_key = self.by_key
        for key, part in parts_of(committable).items():
            if (route := by_key.get(key)) is None:
                return (
                    f"its rows name the table {key!r}, which tables= does not have any more: let "
                    "it have the table until this checkpoint is visible"
                )
            if astray := Committable({}, proof=part).target_mismatch(route.destination):
                return astray
        return ""


def parts_of(committable: Committable) -> Mapping[str, Mapping[str, Any]]:
    """Return what a committable says of each table, by the name that rows give the table.

    If it has no proof, it says nothing of any table.
    """
    proof = committable.proof
    parts: Mapping[str, Mapping[str, Any]] = proof.get("tables", {"": proof} if proof else {})
    return parts


def proof_of(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the part of a proof out of which `parts_of` reads `parts`."""
    return dict(parts[""]) if "" in parts else {"tables": parts}


def text_of(committable: Committable) -> str:
    """Return the ID of a staged transaction."""
    return str(committable.transaction["transaction_id"])


def staging_tables(
    routes: Iterable[Route[Any, Any]], committables: Iterable[Committable]
) -> dict[str, list[str]]:
    """List, by transaction, the staging tables that the committables must have.

    A committable without proof may have one for each route.
    """
    keys = [route.plan.key for route in routes]
    return {
        (text := text_of(c)): [staging_table(text, key) for key in parts_of(c) or keys]
        for c in committables
    }
