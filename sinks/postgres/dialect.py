"""PostgreSQL's SQL, as text."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import sql

from sinks.postgres.columns import PostgresTarget
from sinks.sql.dialect import Dialect, Move


class PostgresDialect(Dialect[PostgresTarget]):
    """Write PostgreSQL's SQL."""

    name = "postgresql"
    NEWEST_FIRST = "{} DESC NULLS LAST"
    POSITION = "ctid"  # COPY fills a table that its transaction made from the beginning to the end
    AS_TEXT = "{}::text"

    def quote(self, *names: str) -> str:
        return sql.Identifier(*names).as_string()

    def into(self, target: PostgresTarget, written: Sequence[str]) -> str:
        """Write the INSERT up to its rows.

        It writes identity columns that are GENERATED ALWAYS too, as COPY does.
        """
        overriding = " OVERRIDING SYSTEM VALUE" if target.always_identity & set(written) else ""
        return (
            f"INSERT INTO {self.quote(target.schema, target.name)} AS target"
            f" ({self.quoted(written)}){overriding}"
        )

    def sorted_by(self, move: Move[PostgresTarget], column: str) -> str:
        is_own = column not in move.target.names and move.types[column] == "text"
        # a column of the target sorts as the table does
        return f'{self.quote(column)} COLLATE "C"' if is_own else self.quote(column)

    def compared(self, target: PostgresTarget, column: str) -> str:
        """Write a column as text that is compared byte by byte.

        Some types have no equality.
        """
        return f'{self.quote(column)}::text COLLATE "C"'

    def takes(self, move: Move[PostgresTarget]) -> list[str]:
        """Write conditions under which a change `taker` may take a value of the row `target`.

        They include partial indexes, as if these covered the whole table, and indexes over
        expressions.
        """
        takes = super().takes(move)
        for unique in move.target.special_uniques:
            plain = [self.quote(column) for column in unique.columns if column in move.written]
            sides = [(f"taker.{column}", f"target.{column}") for column in plain]
            if set(unique.reads) <= set(move.written):  # of others the new value is not known
                sides += [
                    (
                        self._evaluated(expression, unique.reads, "taker"),
                        self._evaluated(expression, unique.reads, "target"),
                    )
                    for expression in unique.expressions
                ]
            operator = "IS NOT DISTINCT FROM" if unique.nulls_equal else "="
            if sides:
                takes.append(
                    "("
                    + " AND ".join(f"{taker} {operator} {target}" for taker, target in sides)
                    + ")"
                )
        return takes

    def _evaluated(self, expression: str, columns: Sequence[str], row: str) -> str:
        """Write an expression over columns of a `row` of the surrounding statement."""
        names = ", ".join(f"{row}.{self.quote(column)}" for column in columns)
        return f"(SELECT {expression} FROM (SELECT {names}) AS one)"

    # ------------------------------------------------------------------ statements of the move
    def upsert(self, move: Move[PostgresTarget], last: str) -> str:
        """Insert the changes that are no deletes, or update the rows of their keys."""
        keys = self.merge.keys
        changes = [column for column in move.written if column not in keys]
        sets = ", ".join(f"{name} = excluded.{name}" for name in map(self.quote, changes))
        action = (
            f"UPDATE SET {sets} WHERE true{self.not_older('excluded')}" if changes else "NOTHING"
        )
        rows = (
            f"SELECT {self.quoted(move.written)} FROM ({last}) AS last WHERE {self.stays('last')}"
        )
        return (
            f"{self.into(move.target, move.written)} {rows} ON CONFLICT ({self.quoted(keys)}) DO "
            f"{action}"
        )

    def givers(self, move: Move[PostgresTarget], last: str, handed_on: str) -> str:
        """Select one row if any row gives up a value that another row takes."""
        table = self.quote(move.target.schema, move.target.name)
        return f"SELECT 1 FROM {table} AS target, ({last}) AS last WHERE {handed_on} LIMIT 1"

    def put_in_anew(self, move: Move[PostgresTarget], last: str, handed_on: str) -> str:
        """Take out the rows that give up a value which another row takes, and put them in again.

        The rows get their changes, and keep what they had in columns that the batch lacks.
        """
        table = self.quote(move.target.schema, move.target.name)
        keys = self.merge.keys
        changes = {column for column in move.written if column not in keys}
        own = [column.name for column in move.target.columns if not column.generated]
        values = ", ".join(
            f"{'last' if column in changes else 'given'}.{self.quote(column)}" for column in own
        )
        # counted first: no row goes in before all are out
        return (
            f"WITH given AS (DELETE FROM {table} AS target USING ({last}) AS last"
            f" WHERE {handed_on} RETURNING target.*)"
            f" {self.into(move.target, own)} SELECT {values} FROM given JOIN ({last}) AS last"
            f" ON {self.equal('given', 'last', keys)} WHERE (SELECT count(*) FROM given) > 0"
        )

    def one_row(self, move: Move[PostgresTarget]) -> str:
        """Insert one of the staged rows."""
        marker = [self.merge.delete_marker] if self.merge.delete_marker else []
        tables = move.tables if marker else move.tables[:1]
        staged = (
            f"({self.union(tables, self.quoted(dict.fromkeys([*move.written, *marker])))}) AS "
            "staged"
        )
        row = (
            f"SELECT {self.quoted(move.written)} FROM {staged} WHERE {self.stays('staged')} LIMIT 1"
        )
        conflict = (
            f" ON CONFLICT ({self.quoted(self.merge.keys)}) DO NOTHING" if self.merge.keys else ""
        )
        return f"{self.into(move.target, move.written)} {row}{conflict}"

    def values_longer_than(self, move: Move[PostgresTarget], longest: int) -> str | None:
        """Select one row if a staged row has more than `longest` bytes for an index of the target.

        Return None if the target has no such index.
        """
        columns = [set(index) & set(move.written) for index in move.target.long_indexes]
        sizes = [
            " + ".join(
                f"coalesce(pg_catalog.pg_column_size({self.quote(c)}), 0)" for c in sorted(c)
            )
            for c in columns
            if c
        ]
        if not sizes:
            return None
        staged = self.union(move.tables, self.quoted(sorted(set().union(*columns))))
        return (
            f"SELECT 1 FROM ({staged}) AS staged WHERE greatest({', '.join(sizes)}) > {longest}"
            " LIMIT 1"
        )
