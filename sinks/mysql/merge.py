"""How staged rows get into the target: plain inserts, or the last change of each key as update, insert or delete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sinks.errors import BadValue, SinkError
from sinks.mysql.catalog import Target, Unique
from sinks.mysql.server import Connection, execute, listed, query, quoted
from sinks.sql.options import MergeOptions

_CHUNK = 50


class Merge(MergeOptions):
    """The statements that do it. Staging tables are given as quoted names."""

    def beyond(self, target: Target, written: Sequence[str]) -> list[str]:
        """What only the target itself can judge of rows. If there is any, a move is tried before the decision."""
        reasons = list(target.beyond)
        for unique in target.uniques:
            known = set(unique.columns) & set(written)
            if self.mode == "append":
                if known and not known >= set(unique.columns):
                    reasons.append(f"index {unique.name}")
            elif known and set(unique.columns) != set(self.keys):
                reasons.append(f"index {unique.name}")
        return reasons + (list(target.referenced_by) if self.mode == "upsert" else [])

    # ------------------------------------------------------------------ the move
    def move(
        self, connection: Connection, target: Target, staging: Sequence[str], written: Sequence[str], rows: int
    ) -> None:
        """Put the rows of all staging tables into the target, in the caller's transaction. Raises SinkError if there
        are not `rows` of them, pymysql.Error if the target refuses one."""
        if self.mode == "append":
            moved = sum(execute(connection, self._append(target, table, written)) for table in staging)
            if moved != rows:
                raise SinkError(
                    f"{moved} rows went into the table out of the staging tables, and their tasks acknowledged {rows}: "
                    "somebody changed a staging table"
                )
            return
        found = sum(int(query(connection, f"SELECT count(*) FROM {table}")[0][0]) for table in staging)
        if found != rows:
            raise SinkError(
                f"the staging tables hold {found} rows, and their tasks acknowledged {rows}: somebody changed one"
            )
        if self.delete_marker:
            execute(connection, self._delete(target, staging, written))
        if set(written) > set(self.keys):
            execute(connection, self._update(target, staging, written))
        execute(connection, self._insert(target, staging, written))

    def _append(self, target: Target, table: str, written: Sequence[str]) -> str:
        return f"INSERT INTO {target.identifier} ({listed(written)}) SELECT {listed(written)} FROM {table}"

    def _last(self, staging: Sequence[str], written: Sequence[str]) -> str:
        """The last change of each key, over all participants."""
        extra = [column for column in (self.order_by, self.delete_marker) if column and column not in written]
        columns = listed([*written, *extra])
        if not self.order_by:  # validated: every key is there once
            return _union(staging, columns)
        order = (
            [self.order_by, self.delete_marker] if self.delete_marker else [self.order_by]
        )  # of equals, a delete wins
        ranks = ", ".join(f"{quoted(column)} DESC" for column in order)  # NULL is below all else
        return (
            f"SELECT {columns} FROM (SELECT {columns}, ROW_NUMBER() OVER (PARTITION BY {listed(self.keys)}"
            f" ORDER BY {ranks}) AS `tpc rank` FROM ({_union(staging, columns)}) AS staged) AS ranked"
            " WHERE `tpc rank` = 1"
        )

    def _kept(self, and_: str = "") -> str:
        """The condition for rows that are no deletes."""
        terms = [f"last.{quoted(self.delete_marker)} IS NOT TRUE"] if self.delete_marker else []
        terms += [and_] if and_ else []
        return f" WHERE {' AND '.join(terms)}" if terms else ""

    def _delete(self, target: Target, staging: Sequence[str], written: Sequence[str]) -> str:
        return (
            f"DELETE target FROM {target.identifier} AS target JOIN ({self._last(staging, written)}) AS last"
            f" ON {_equal('target', 'last', self.keys)} WHERE last.{quoted(self.delete_marker or '')} IS TRUE"
        )

    def _update(self, target: Target, staging: Sequence[str], written: Sequence[str]) -> str:
        changes = [column for column in written if column not in self.keys]
        sets = ", ".join(f"target.{quoted(column)} = last.{quoted(column)}" for column in changes)
        return (
            f"UPDATE {target.identifier} AS target JOIN ({self._last(staging, written)}) AS last"
            f" ON {_equal('target', 'last', self.keys)} SET {sets}{self._kept()}"
        )

    def _insert(self, target: Target, staging: Sequence[str], written: Sequence[str]) -> str:
        columns = ", ".join(f"last.{quoted(column)}" for column in written)
        return (
            f"INSERT INTO {target.identifier} ({listed(written)}) SELECT {columns}"
            f" FROM ({self._last(staging, written)}) AS last LEFT JOIN {target.identifier} AS target"
            f" ON {_equal('target', 'last', self.keys)}{self._kept(f'target.{quoted(self.keys[0])} IS NULL')}"
        )

    # ------------------------------------------------------------------ before the decision
    def clashes(self, connection: Connection, target: Target, staging: Sequence[str], written: Sequence[str]) -> None:
        """Raise BadValue if the union of the rows breaks a unique index, as far as that can be told without writing."""
        if self.mode == "upsert":
            if not self.order_by:
                self._twice(
                    connection, target, staging, self.keys, "two changes of one key in a batch, and no order_by="
                )
            return
        for unique in target.uniques:
            if set(unique.columns) <= set(written):
                self._twice(connection, target, staging, unique.columns, f'unique index "{unique.name}"')
                self._taken(connection, target, staging, unique)

    def _twice(
        self, connection: Connection, target: Target, staging: Sequence[str], columns: Sequence[str], rule: str
    ) -> None:
        names = listed(columns)
        known = " AND ".join(f"{quoted(column)} IS NOT NULL" for column in columns)
        rows = query(
            connection,
            f"SELECT {names}, count(*) FROM ({_union(staging, names)}) AS staged WHERE {known}"
            f" GROUP BY {names} HAVING count(*) > 1 LIMIT 1",
        )
        if rows:
            raise BadValue(
                f"table {target.label}: {rule}: {_key(columns, rows[0])} comes {rows[0][-1]} times in the batch"
            )

    def _taken(self, connection: Connection, target: Target, staging: Sequence[str], unique: Unique) -> None:
        names = ", ".join(f"staged.{quoted(column)}" for column in unique.columns)
        for chunk in _chunks(staging):
            rows = query(
                connection,
                f"SELECT {names} FROM ({_union(chunk, listed(unique.columns))}) AS staged"
                f" JOIN {target.identifier} AS target ON {_equal('target', 'staged', unique.columns)} LIMIT 1",
            )
            if rows:
                raise BadValue(
                    f'table {target.label}: unique index "{unique.name}": {_key(unique.columns, rows[0])} is in the '
                    "table already"
                )


def _chunks(staging: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(staging), _CHUNK):
        yield staging[start : start + _CHUNK]


def _union(staging: Sequence[str], columns: str) -> str:
    return " UNION ALL ".join(f"SELECT {columns} FROM {table}" for table in staging)


def _equal(left: str, right: str, columns: Sequence[str]) -> str:
    return " AND ".join(f"{left}.{quoted(column)} = {right}.{quoted(column)}" for column in columns)


def _key(columns: Sequence[str], row: Sequence[object]) -> str:
    return f"({', '.join(columns)}) = ({', '.join(map(str, row[: len(columns)]))})"
