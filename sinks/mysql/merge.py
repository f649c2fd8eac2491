"""How staged rows get into the target: plain inserts, or the last change of each key as update, insert or delete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sinks.errors import SinkError, TransactionBlocked
from sinks.mysql.catalog import Target
from sinks.mysql.server import Connection, execute, query, quoted
from sinks.sql import merge


class Merge(merge.Merge):
    """The statements that do it."""

    def quoted(self, *names: str) -> str:
        return quoted(*names)

    def execute(self, connection: Connection, statement: str) -> int:
        return execute(connection, statement)

    def query(self, connection: Connection, statement: str) -> list[tuple[Any, ...]]:
        return query(connection, statement)

    def matching(self, table: str, condition: str) -> str:
        return f"JOIN {table} AS target ON {condition}"

    def move(
        self, connection: Connection, target: Target, staging: Sequence[str], written: Sequence[str], rows: int
    ) -> None:
        names = self.listed(written)
        if self.mode == "append":
            into = f"INSERT INTO {target.identifier} ({names}) SELECT {names} FROM"
            moved = sum(execute(connection, f"{into} {table}") for table in staging)
            if moved != rows:
                raise SinkError(
                    f"{moved} rows went into the table out of the staging tables, and their tasks acknowledged {rows}: "
                    "somebody changed a staging table, or emptied the ledger after they were moved"
                )
            return
        self.count(connection, staging, rows)
        last = self._last(staging, written)
        if self.delete_marker:
            execute(connection, self._delete(target, last))
        if set(written) == set(self.keys):
            execute(connection, self._insert(target, last, written))
            return
        changed = execute(connection, self._update(target, last, written))
        changed += execute(connection, self._insert(target, last, written))
        ((kept,),) = query(connection, f"SELECT count(*) FROM ({last}) AS last{self._kept()}")
        if changed != kept:  # neither missing for the INSERT nor there for the UPDATE
            raise TransactionBlocked(
                f"table {target.label}: somebody else inserted or deleted keys of the batch while it was moved"
            )

    def _last(self, staging: Sequence[str], written: Sequence[str]) -> str:
        """The last change of each key, over all participants."""
        columns, order = self.changes(written)
        names = self.listed(columns)
        if not self.order_by:  # validated: every key is there once
            return self.union(staging, names)
        ranks = ", ".join(f"{quoted(column)} DESC" for column in order)  # NULL is below all else
        return (
            f"SELECT {names} FROM (SELECT {names}, ROW_NUMBER() OVER (PARTITION BY {self.listed(self.keys)}"
            f" ORDER BY {ranks}) AS `tpc rank` FROM ({self.union(staging, names)}) AS staged) AS ranked"
            " WHERE `tpc rank` = 1"
        )

    def _kept(self, and_: str = "") -> str:
        """The condition for rows that are no deletes."""
        terms = [f"last.{quoted(self.delete_marker)} IS NOT TRUE"] if self.delete_marker else []
        terms += [and_] if and_ else []
        return f" WHERE {' AND '.join(terms)}" if terms else ""

    def _delete(self, target: Target, last: str) -> str:
        return (
            f"DELETE target FROM {target.identifier} AS target JOIN ({last}) AS last"
            f" ON {self.equal('target', 'last', self.keys)} WHERE last.{quoted(self.delete_marker or '')} IS TRUE"
        )

    def _update(self, target: Target, last: str, written: Sequence[str]) -> str:
        changes = [column for column in written if column not in self.keys]
        sets = ", ".join(f"target.{quoted(column)} = last.{quoted(column)}" for column in changes)
        return (
            f"UPDATE {target.identifier} AS target JOIN ({last}) AS last"
            f" ON {self.equal('target', 'last', self.keys)} SET {sets}{self._kept()}"
        )

    def _insert(self, target: Target, last: str, written: Sequence[str]) -> str:
        columns = ", ".join(f"last.{quoted(column)}" for column in written)
        return (
            f"INSERT INTO {target.identifier} ({self.listed(written)}) SELECT {columns} FROM ({last}) AS last"
            f" LEFT JOIN {target.identifier} AS target ON {self.equal('target', 'last', self.keys)}"
            f"{self._kept(f'target.{quoted(self.keys[0])} IS NULL')}"
        )
