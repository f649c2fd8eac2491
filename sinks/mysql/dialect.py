"""The SQL of MySQL and MariaDB, as text."""

from __future__ import annotations

from collections.abc import Sequence

from sinks.mysql.columns import MySQLTarget
from sinks.mysql.connection import listed, quoted
from sinks.sql.dialect import Dialect, Move

ROW = "tpc row"
"""The primary key of a staging table: many servers take no table without one."""
GIVEN = "tpc given"
"""The temporary table of rows that give up a value which another one takes."""
_ALL = 2**64 - 1
"""As a LIMIT: it makes the server put the rows aside before it changes the table that they were
looked up in."""


class MySQLDialect(Dialect[MySQLTarget]):
    """Write the SQL of MySQL and MariaDB."""

    name = "mysql"
    SORTS_TEXTS = False
    INSERT_MISSING = "INSERT IGNORE INTO {table} ({columns}) VALUES {rows}"
    DELETE = "DELETE target FROM {target} AS target JOIN {rows} WHERE {condition}"
    UPDATE = "UPDATE {target} AS target CROSS JOIN {rows} SET {own_sets} WHERE {condition}"
    POSITION = quoted(ROW)

    def quote(self, *names: str) -> str:
        return quoted(*names)

    def grouped(self, target: MySQLTarget, column: str) -> str:
        """Write the expression by which equal values of a column are grouped.

        MariaDB has two groups for 0.0 and -0.0, which are one key.
        """
        types = {known.name: known.type for known in target.columns}
        return (
            f"{quoted(column)} + 0" if types.get(column) in ("double", "float") else quoted(column)
        )

    def compared(self, target: MySQLTarget, column: str) -> str:
        """Write a column as bytes, whatever its collation; a float has all of its digits."""
        return f"CAST({self.grouped(target, column)} AS BINARY)"

    # ------------------------------------------------------ rows that need others of the same table
    def needed_rows_are_there(self, move: Move[MySQLTarget], rows: str) -> str:
        """Write the condition for `rows` that need no row of the table that is yet to come.

        Such a row refers to no other row of the table, or to one that the table has. Return "" if
        the table does not refer to itself by columns that are written, or has triggers, which may
        alter them.
        """
        conditions = []
        for key in move.target.own_keys if not move.target.triggers else ():
            if not set(key.columns) <= set(move.written):
                continue
            names = [(quoted(c), quoted(r)) for c, r in zip(key.columns, key.referred, strict=True)]
            nothing = " OR ".join(f"{rows}.{column} IS NULL" for column, _ in names)
            there = " AND ".join(
                f"needed.{referred} = {rows}.{column}" for column, referred in names
            )
            table = move.target.identifier
            alternatives = [nothing, f"EXISTS (SELECT 1 FROM {table} AS needed WHERE {there})"]
            if set(key.referred) <= set(move.written):
                alternatives.append(
                    " AND ".join(
                        f"{rows}.{referred} = {rows}.{column}" for column, referred in names
                    )
                )
            conditions.append(f"({' OR '.join(alternatives)})")
        return " AND ".join(conditions)

    # ------------------------------------------------------------------ statements of the move
    def missing(self, move: Move[MySQLTarget], keys: Sequence[str]) -> str:
        """Insert the staged rows whose `keys` no row of the target has."""
        staged = f"({self.union(move.tables, self.quoted(move.written))}) AS staged"
        return (
            f"{self.into(move.target, move.written)} SELECT staged.* FROM {staged}"
            f" LEFT JOIN {move.target.identifier} AS own"
            f" ON {self.equal('own', 'staged', keys)} WHERE own.{quoted(keys[0])} IS NULL"
        )

    def due(self, move: Move[MySQLTarget], last: str) -> str:
        """Count the changes that replace a row or insert one."""
        changes = f"SELECT count(*) FROM ({last}) AS last"
        newer = ""
        if self.merge.keep_newer:
            same = self.equal("target", "last", self.merge.keys)
            changes += f" LEFT JOIN {move.target.identifier} AS target ON {same}"
            newer = f" AND (target.{quoted(self.merge.keys[0])} IS NULL OR TRUE{self.not_older()})"
        return f"{changes} WHERE {self.stays('last')}{newer}"

    def first(self, last: str, needed: str) -> str:
        """Select those of the changes `last` that meet the condition `needed`.

        They are selected before any row is changed.
        """
        return f"SELECT last.* FROM ({last}) AS last WHERE {needed} LIMIT {_ALL}"

    def update(self, move: Move[MySQLTarget], last: str, table: str = "") -> str:
        """Update the target, or another (quoted) table with its rows, by the changes `last`.

        A key keeps its value even if the server puts the time into columns that are not set (ON
        UPDATE).
        """
        target = move.target
        keys = self.merge.keys
        own = [
            c.name for c in target.columns if c.name in keys and c.type in ("timestamp", "datetime")
        ]
        changes = [(column, "last") for column in move.written if column not in keys]
        changes += [(column, "target") for column in own]
        sets = ", ".join(
            f"target.{quoted(column)} = {row}.{quoted(column)}" for column, row in changes
        )
        return (
            f"UPDATE {table or target.identifier} AS target JOIN ({last}) AS last"
            f" ON {self.equal('target', 'last', keys)}{self.not_older()} SET {sets}"
            f" WHERE {self.stays('last')}"
        )

    def insert(self, move: Move[MySQLTarget], last: str) -> str:
        """Insert the changes `last` whose key no row of the target has."""
        target = move.target
        keys = self.merge.keys
        columns = ", ".join(f"last.{quoted(column)}" for column in move.written)
        return (
            f"{self.into(target, move.written)} SELECT {columns} FROM ({last}) AS last"
            f" LEFT JOIN {target.identifier} AS target ON {self.equal('target', 'last', keys)}"
            f" WHERE {self.stays('last')} AND target.{quoted(keys[0])} IS NULL"
        )

    # ---------------------------------------------------- rows that give up a value for another one
    def givers(self, move: Move[MySQLTarget], last: str, handed_on: str) -> str:
        """Write the FROM and WHERE of the rows that give up a value which another row takes."""
        return f"FROM {move.target.identifier} AS target JOIN ({last}) AS last WHERE {handed_on}"

    def keep_givers(self, move: Move[MySQLTarget], givers: str) -> str:
        """Make a temporary table of the rows that give up a value.

        It has the keys, and ON UPDATE as in the target.
        """
        keys = self.merge.keys
        own = [column.name for column in move.target.columns if not column.generated]
        names = ", ".join(f"target.{quoted(column)}" for column in own)
        renewed = [
            c for c in move.target.columns if c.on_update and c.name not in (*move.written, *keys)
        ]
        parts = [f"{quoted(c.name)} {c.declared} NULL ON UPDATE {c.on_update}" for c in renewed]
        parts.append(f"PRIMARY KEY ({listed(keys)})")
        create = f"CREATE TEMPORARY TABLE {quoted(GIVEN)} ({', '.join(parts)}) ENGINE=InnoDB"
        return f"{create} SELECT {names} {givers}"

    def take_givers_out(self, move: Move[MySQLTarget]) -> str:
        """Delete the rows of the temporary table from the target."""
        same = self.equal("target", "given", self.merge.keys)
        target = move.target.identifier
        return f"DELETE target FROM {target} AS target JOIN {quoted(GIVEN)} AS given ON {same}"

    def put_givers_in(self, move: Move[MySQLTarget]) -> str:
        """Insert the rows of the temporary table into the target."""
        own = [column.name for column in move.target.columns if not column.generated]
        return f"{self.into(move.target, own)} SELECT {listed(own)} FROM {quoted(GIVEN)}"
