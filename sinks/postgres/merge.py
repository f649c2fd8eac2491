"""How staged rows get into the target: plain inserts, or the last change of each key as upsert or delete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from psycopg import sql

from sinks.errors import BadValue, SinkError
from sinks.postgres.catalog import Target, Unique
from sinks.postgres.server import Connection
from sinks.sql.options import MergeOptions

_CHUNK = 100


class Merge(MergeOptions):
    """The statements that do it."""

    def beyond(self, target: Target, written: Sequence[str]) -> list[str]:
        """What only the target itself can judge of rows. If there is any, a move is tried before the decision."""
        reasons = list(target.beyond)
        reasons += [f"check {check.name}" for check in target.checks if not set(check.columns) <= set(written)]
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
        self,
        connection: Connection,
        target: Target,
        staging: Sequence[sql.Identifier],
        written: Sequence[str],
        rows: int,
    ) -> None:
        """Put the rows of all staging tables into the target, in the caller's transaction, and let deferred constraints
        judge them now. Raises SinkError if there are not `rows` of them, psycopg.Error if the target refuses one."""
        if self.mode == "append":
            moved = sum(connection.execute(self._insert(target, chunk, written)).rowcount for chunk in _chunks(staging))
            if moved != rows:  # by a trigger or rule of the target, or because somebody changed a staging table
                _count(connection, staging, rows)
        else:
            _count(connection, staging, rows)
            if self.delete_marker:
                connection.execute(self._delete(target, staging, written))
            connection.execute(self._upsert(target, staging, written))
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")

    def _insert(self, target: Target, staging: Sequence[sql.Identifier], written: Sequence[str]) -> sql.Composed:
        return sql.SQL("INSERT INTO {} ({}){} {}").format(
            target.identifier, _list(written), target.overriding(written), _union(staging, written)
        )

    def _last(self, staging: Sequence[sql.Identifier], written: Sequence[str]) -> sql.Composed:
        """The last change of each key, over all participants."""
        extra = [column for column in (self.order_by, self.delete_marker) if column and column not in written]
        columns = [*written, *extra]
        if not self.order_by:  # validated: every key is there once
            return _union(staging, columns)
        order = (
            [self.order_by, self.delete_marker] if self.delete_marker else [self.order_by]
        )  # of equals, a delete wins
        return sql.SQL("SELECT DISTINCT ON ({0}) {1} FROM ({2}) AS staged ORDER BY {0}, {3}").format(
            _list(self.keys),
            _list(columns),
            _union(staging, columns),
            sql.SQL(", ").join(sql.SQL("{} DESC NULLS LAST").format(sql.Identifier(column)) for column in order),
        )

    def _delete(self, target: Target, staging: Sequence[sql.Identifier], written: Sequence[str]) -> sql.Composed:
        return sql.SQL("DELETE FROM {} AS target USING ({}) AS last WHERE last.{} AND {}").format(
            target.identifier,
            self._last(staging, written),
            sql.Identifier(self.delete_marker or ""),
            _equal("target", "last", self.keys),
        )

    def _upsert(self, target: Target, staging: Sequence[sql.Identifier], written: Sequence[str]) -> sql.Composed:
        changes = [column for column in written if column not in {*self.keys, *target.always_identity}]
        action = (
            sql.SQL("UPDATE SET {}").format(
                sql.SQL(", ").join(sql.SQL("{0} = excluded.{0}").format(sql.Identifier(column)) for column in changes)
            )
            if changes
            else sql.SQL("NOTHING")
        )
        kept = (
            sql.SQL("WHERE last.{} IS NOT TRUE").format(sql.Identifier(self.delete_marker))
            if self.delete_marker
            else sql.SQL("WHERE true")  # else the parser takes ON CONFLICT for a join condition
        )
        return sql.SQL("INSERT INTO {} ({}){} SELECT {} FROM ({}) AS last {} ON CONFLICT ({}) DO {}").format(
            target.identifier,
            _list(written),
            target.overriding(written),
            _list(written),
            self._last(staging, written),
            kept,
            _list(self.keys),
            action,
        )

    # ------------------------------------------------------------------ before the decision
    def clashes(
        self, connection: Connection, target: Target, staging: Sequence[sql.Identifier], written: Sequence[str]
    ) -> None:
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
        self,
        connection: Connection,
        target: Target,
        staging: Sequence[sql.Identifier],
        columns: Sequence[str],
        rule: str,
    ) -> None:
        query = sql.SQL("SELECT {0}, count(*) FROM ({1}) AS staged WHERE {2} GROUP BY {0} HAVING count(*) > 1 LIMIT 1")
        row = connection.execute(query.format(_list(columns), _union(staging, columns), _known(columns))).fetchone()
        if row:
            raise BadValue(f"table {target.label}: {rule}: {_key(columns, row)} comes {row[-1]} times in the batch")

    def _taken(self, connection: Connection, target: Target, staging: Sequence[sql.Identifier], unique: Unique) -> None:
        query = sql.SQL("SELECT {0} FROM ({1}) AS staged WHERE EXISTS (SELECT FROM {2} AS target WHERE {3}) LIMIT 1")
        columns = unique.columns
        row = connection.execute(
            query.format(
                _list(columns), _union(staging, columns), target.identifier, _equal("target", "staged", columns)
            )
        ).fetchone()
        if row:
            raise BadValue(
                f'table {target.label}: unique index "{unique.name}": {_key(columns, row)} is in the table already'
            )


def _count(connection: Connection, staging: Sequence[sql.Identifier], rows: int) -> None:
    found = 0
    for chunk in _chunks(staging):
        (count,) = connection.execute(
            sql.SQL("SELECT count(*) FROM ({}) AS staged").format(_union(chunk, []))
        ).fetchone() or (0,)
        found += count
    if found != rows:
        raise SinkError(
            f"the staging tables hold {found} rows, and their tasks acknowledged {rows}: somebody changed one"
        )


def _chunks(staging: Sequence[sql.Identifier]) -> Iterator[Sequence[sql.Identifier]]:
    for start in range(0, len(staging), _CHUNK):
        yield staging[start : start + _CHUNK]


def _union(staging: Sequence[sql.Identifier], columns: Sequence[str]) -> sql.Composed:
    select = sql.SQL("SELECT {} FROM {}")
    return sql.SQL(" UNION ALL ").join(select.format(_list(columns), table) for table in staging)


def _list(columns: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, columns))


def _known(columns: Sequence[str]) -> sql.Composed:
    return sql.SQL(" AND ").join(sql.SQL("{} IS NOT NULL").format(sql.Identifier(column)) for column in columns)


def _equal(left: str, right: str, columns: Sequence[str]) -> sql.Composed:
    return sql.SQL(" AND ").join(
        sql.SQL("{} = {}").format(sql.Identifier(left, column), sql.Identifier(right, column)) for column in columns
    )


def _key(columns: Sequence[str], row: Sequence[object]) -> str:
    return f"({', '.join(columns)}) = ({', '.join(map(str, row[: len(columns)]))})"
