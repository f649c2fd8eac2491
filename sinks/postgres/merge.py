"""How staged rows get into the target: plain inserts, or the last change of each key as upsert or delete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg import sql

from sinks.postgres.catalog import Target
from sinks.postgres.server import Connection
from sinks.sql import merge

_CHUNK = 100


class Merge(merge.Merge):
    """The statements that do it."""

    def quoted(self, *names: str) -> str:
        return sql.Identifier(*names).as_string()

    def execute(self, connection: Connection, statement: str) -> int:
        return connection.execute(statement.encode()).rowcount

    def query(self, connection: Connection, statement: str) -> list[tuple[Any, ...]]:
        return connection.execute(statement.encode()).fetchall()

    def matching(self, table: str, condition: str) -> str:
        return f"WHERE EXISTS (SELECT FROM {table} AS target WHERE {condition})"

    def beyond(self, target: Target, written: Sequence[str]) -> list[str]:
        reasons = [f"check {check.name}" for check in target.checks if not set(check.columns) <= set(written)]
        reasons += [f'domain of column "{name}"' for name in self.undomained(target, written)]
        return super().beyond(target, written) + reasons

    def sample(self, connection: Connection, target: Target, staging: Sequence[str], written: Sequence[str]) -> None:
        """Rights of defaults and the like show with the first row only."""
        names = self.listed(written)
        kept = f"{self.quoted(self.delete_marker)} IS NOT TRUE" if self.delete_marker else "true"
        into = f"INSERT INTO {self.quoted(target.schema, target.name)} ({names}){target.overriding(written)}"
        one = f"SELECT {names} FROM {staging[0]} WHERE {kept} LIMIT 1"
        # judged already; and a deferrable index takes no ON CONFLICT
        conflict = " ON CONFLICT DO NOTHING" if all(unique.arbiter for unique in target.uniques) else ""
        self.execute(connection, f"{into} {one}{conflict}")

    def undomained(self, target: Target, written: Sequence[str]) -> list[str]:
        """Columns that are staged without their domain: it may have a rule that binds no row that deletes."""
        if not self.delete_marker:
            return []
        return [
            c.name
            for c in target.columns
            if c.domain and not c.element and c.name in written and c.name not in self.keys
        ]

    def move(
        self, connection: Connection, target: Target, staging: Sequence[str], written: Sequence[str], rows: int
    ) -> None:
        """Deferred constraints judge the rows now."""
        into = f"INSERT INTO {self.quoted(target.schema, target.name)} ({self.listed(written)})"
        into += target.overriding(written)
        if self.mode == "append":
            moved = 0
            for start in range(0, len(staging), _CHUNK):
                some = self.union(staging[start : start + _CHUNK], self.listed(written))
                moved += self.execute(connection, f"{into} {some}")
            if moved != rows:  # by a trigger or rule of the target, or because somebody changed a staging table
                self.count(connection, staging, rows)
        else:
            self.count(connection, staging, rows)
            last = self._last(staging, written)
            if self.delete_marker:
                self.execute(connection, self._delete(target, last))
            self.execute(connection, f"{into} {self._upsert(target, last, written)}")
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")

    def _last(self, staging: Sequence[str], written: Sequence[str]) -> str:
        """The last change of each key, over all participants."""
        columns, order = self.changes(written)
        union = self.union(staging, self.listed(columns))
        if not self.order_by:  # validated: every key is there once
            return union
        keys, ranks = self.listed(self.keys), ", ".join(f"{self.quoted(column)} DESC NULLS LAST" for column in order)
        return f"SELECT DISTINCT ON ({keys}) {self.listed(columns)} FROM ({union}) AS staged ORDER BY {keys}, {ranks}"

    def _delete(self, target: Target, last: str) -> str:
        return (
            f"DELETE FROM {self.quoted(target.schema, target.name)} AS target USING ({last}) AS last"
            f" WHERE last.{self.quoted(self.delete_marker or '')} AND {self.equal('target', 'last', self.keys)}"
        )

    def _upsert(self, target: Target, last: str, written: Sequence[str]) -> str:
        changed = [self.quoted(column) for column in written if column not in {*self.keys, *target.always_identity}]
        action = f"UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in changed)}" if changed else "NOTHING"
        # without a WHERE the parser takes ON CONFLICT for a join condition
        kept = f"last.{self.quoted(self.delete_marker)} IS NOT TRUE" if self.delete_marker else "true"
        return (
            f"SELECT {self.listed(written)} FROM ({last}) AS last WHERE {kept}"
            f" ON CONFLICT ({self.listed(self.keys)}) DO {action}"
        )
