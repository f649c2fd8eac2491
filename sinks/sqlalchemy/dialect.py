"""The SQL that SQLAlchemy writes for a kind of database.

Names are text, and the statements of a move are SQLAlchemy's expressions. Nothing in here needs a
connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL

from sinks.sql.dialect import Dialect, Move
from sinks.sql.table import MergeOptions
from sinks.sqlalchemy.types import SqlAlchemyTarget

ROW = "tpc_row"
"""The primary key of a staging table: without one PostgreSQL's publications refuse DELETE, and some
servers the table."""


class SqlAlchemyDialect(Dialect[SqlAlchemyTarget]):
    """Write statements for any database that SQLAlchemy has a dialect for."""

    POSITION = ROW

    def __init__(self, url: URL, merge: MergeOptions) -> None:
        super().__init__(merge)
        self.url = url
        self.name = url.get_backend_name()

    # ------------------------------------------------------------------ names
    def quote(self, *names: str) -> str:
        quote = self._preparer.quote
        quoted = [quote(name) for name in names if name]
        return self.undoubled(".".join(quoted))

    def undoubled(self, compiled: str) -> str:
        """Take out the percent signs that a dialect doubles for its driver.

        `sqlalchemy.text` doubles them once more.
        """
        percent = self._preparer.quote("%")
        doubles = "%%" in percent
        return compiled.replace("%%", "%") if doubles else compiled

    @cached_property
    def _preparer(self) -> sa.sql.compiler.IdentifierPreparer:
        dialect = self.url.get_dialect()
        return dialect().identifier_preparer

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_preparer"}

    # ------------------------------------------------------------------ staged rows
    def tables(self, move: Move[SqlAlchemyTarget], columns: Sequence[str]) -> list[sa.TableClause]:
        schema = move.target.schema or None
        return [
            sa.table(
                name,
                *map(sa.column, columns),
                schema=schema,
            )
            for name in move.staging
        ]

    def _with_partition(self, move: Move[SqlAlchemyTarget], columns: Sequence[str]) -> sa.Subquery:
        """Select these columns of all staged rows, with the number of the row's staging table."""
        parts = []
        for number, table in enumerate(self.tables(move, columns)):
            part: sa.ColumnClause[int] = sa.literal_column(str(number))
            parts.append(sa.select(*table.c, part.label("tpc_part")))
        return sa.union_all(*parts).subquery()

    def _newest(self, rows: sa.FromClause) -> list[sa.ColumnElement[Any]]:
        """Order changes from the newest on, with changes without a value at the end."""
        by = self._order(rows)
        is_without = sa.case(
            (by.is_(None), 1),
            else_=0,
        )
        return [is_without, by.desc()]

    def _order(self, rows: sa.FromClause) -> sa.ColumnElement[Any]:
        """Return the column `order_by`."""
        return rows.c[str(self.merge.order_by)]

    def _marked(self, rows: sa.FromClause) -> sa.ColumnElement[int]:
        """Build the expression that is 1 for a row that deletes, and 0 for others."""
        if not self.marker:
            return sa.literal(0)
        deletes = self.is_delete(rows) == sa.literal(True)
        return sa.case(
            (deletes, 1),
            else_=0,
        )

    @property
    def marker(self) -> list[str]:
        """The column of the delete marker, if there is one."""
        return [self.merge.delete_marker] if self.merge.delete_marker else []

    def is_delete(self, rows: sa.FromClause) -> sa.ColumnElement[bool]:
        """Build the condition that a row deletes."""
        marker = rows.c[str(self.merge.delete_marker)]
        return sa.type_coerce(marker, sa.Boolean)

    # ------------------------------------------------------------------ duplicates and ties
    def duplicate_rows(
        self, move: Move[SqlAlchemyTarget], columns: Sequence[str]
    ) -> sa.Select[Any]:
        """Select values of these columns that several staged rows have, and count the rows."""
        tables = self.tables(move, columns)
        rows = _all_rows(tables)
        keys = list(rows.c)
        count = sa.func.count()
        return sa.select(*keys, count).group_by(*keys).having(count > 1).limit(1)

    def equal_changes(self, move: Move[SqlAlchemyTarget]) -> sa.Select[Any]:
        """Select one row if changes of two partitions have the same key and `order_by`."""
        names = [*self.merge.keys, str(self.merge.order_by)]
        rows = self._with_partition(move, names)
        part = rows.c.tpc_part
        in_two_partitions = sa.func.min(part) < sa.func.max(part)
        return (
            sa.select(sa.literal(1))
            .select_from(rows)
            .group_by(*(rows.c[name] for name in names))
            .having(in_two_partitions)
            .limit(1)
        )

    def last_of_partitions(
        self, move: Move[SqlAlchemyTarget], written: Sequence[str]
    ) -> sa.Select[Any]:
        """Select, for each key, the last change of each partition, if no change is newer.

        Newer is what has a greater `order_by`. The columns are a number that stands for the key,
        the key, `order_by`, whether the change deletes, and the columns `written`.
        """
        rows = self._with_partition(move, [*self.looked_at(move), ROW])
        keys = [rows.c[key] for key in self.merge.keys]
        newest = self._newest(rows)
        deletes = self._marked(rows)
        key = sa.func.dense_rank().over(order_by=keys)
        place = sa.func.rank().over(
            partition_by=keys,
            order_by=newest,
        )
        last = sa.func.row_number().over(
            partition_by=[*keys, rows.c.tpc_part],
            order_by=[*newest, rows.c[ROW].desc()],
        )
        ranked = sa.select(
            *rows.c,
            deletes.label("tpc_deletes"),
            key.label("tpc_key"),
            place.label("tpc_place"),
            last.label("tpc_last"),
        ).subquery()
        names = [
            "tpc_key",
            *self.merge.keys,
            str(self.merge.order_by),
            "tpc_deletes",
            *written,
        ]
        return (
            sa.select(*(ranked.c[name] for name in names))
            .where(
                ranked.c.tpc_place == 1,
                ranked.c.tpc_last == 1,
            )
            .order_by(ranked.c.tpc_key)
        )

    # ------------------------------------------------------------------ the move
    def deletes_of_changed(self, move: Move[SqlAlchemyTarget]) -> list[sa.Delete]:
        """Delete the rows of the target that have a change.

        With `keep_newer`, statements before and after that delete the staged changes that are older
        than their row. They do so twice, since others may write meanwhile.
        """
        into = move.target.table
        tables = self.tables(move, [*self.looked_at(move), ROW])
        older = []
        if self.merge.keep_newer:
            older = [table.delete().where(self._is_older(table, into)) for table in tables]
        replaced = []
        for table in tables:
            is_changed = self.is_changed(into, table)
            is_due = self._is_due(into, table)
            replaced.append(into.delete().where(is_changed, *is_due))
        return [*older, *replaced, *older]

    def insert_of_changes(self, move: Move[SqlAlchemyTarget]) -> sa.Insert:
        """Insert the last change of each key."""
        tables = self.tables(move, [*self.looked_at(move), ROW])
        rows = _all_rows(tables)
        last = self._last(rows, move.written)
        insert = move.target.table.insert()
        return insert.from_select(list(move.written), last)

    def is_changed(self, into: sa.Table, table: sa.TableClause) -> sa.ColumnElement[bool]:
        """Build the condition that the batch has a change of the row.

        It has the form by which a database looks for the rows of the target by its index: a list of
        keys, or otherwise an EXISTS for each row.
        """
        keys = self.merge.keys
        if len(keys) == 1 or self.name == "sqlite":
            stored = sa.tuple_(*(self._key(into, key) for key in keys))
            changed = sa.select(*(table.c[key] for key in keys))
            return stored.in_(changed)
        return _exists(table, *self._equal(into, table))

    def _equal(self, into: sa.Table, table: sa.TableClause) -> list[sa.ColumnElement[bool]]:
        return [self._key(into, key) == table.c[key] for key in self.merge.keys]

    def _key(self, into: sa.Table, key: str) -> sa.ColumnElement[Any]:
        """Return a key of the target for a comparison with the batch.

        SQLite compares by the column's collation, and the column's unique index may have another
        collation.
        """
        column = into.c[key]
        collation = None
        if self.name == "sqlite":
            collation = getattr(column.type, "collation", None)
        return column.collate(collation) if collation else column

    def _is_due(self, into: sa.Table, table: sa.TableClause) -> list[sa.ColumnElement[bool]]:
        """Build the condition, for `keep_newer`, that a change of the row is no older.

        There is none for SQLite, which would look for the change without an index. Nobody else
        writes into SQLite meanwhile.
        """
        if not self.merge.keep_newer or self.name == "sqlite":
            return []
        stored = self._order(into)
        change = self._order(table)
        is_no_older = sa.or_(
            stored.is_(None),
            stored <= change,
        )
        return [_exists(table, *self._equal(into, table), is_no_older)]

    def _is_older(self, table: sa.TableClause, into: sa.Table) -> sa.ColumnElement[bool]:
        """Build the condition that the target has a newer row of a staged row's key."""
        stored = self._order(into)
        change = self._order(table)
        is_newer = sa.or_(
            change.is_(None),
            stored > change,
        )
        return _exists(
            into,
            *self._equal(into, table),
            stored.is_not(None),
            is_newer,
        )

    def _last(self, rows: sa.Subquery, written: Sequence[str]) -> sa.Select[Any]:
        """Select the last change of each key, unless it deletes.

        This is the change with the greatest `order_by`, where NULL is less than any value. Of equal
        changes, the one that came last is taken. Without `order_by` each key is there once.
        """
        columns = [rows.c[name] for name in written]
        deletes = self._marked(rows)
        if not self.merge.order_by:
            return sa.select(*columns).where(deletes == 0)
        place = sa.func.row_number().over(
            partition_by=[rows.c[key] for key in self.merge.keys],
            order_by=[*self._newest(rows), rows.c[ROW].desc()],
        )
        last = sa.select(
            *columns,
            place.label("tpc_place"),
            deletes.label("tpc_deletes"),
        ).subquery()
        return sa.select(*(last.c[name] for name in written)).where(
            last.c.tpc_place == 1,
            last.c.tpc_deletes == 0,
        )


def _all_rows(tables: Sequence[sa.FromClause]) -> sa.Subquery:
    """Select all rows of several tables."""
    selects = [sa.select(table) for table in tables]
    return sa.union_all(*selects).subquery()


def _exists(rows: sa.FromClause, *conditions: sa.ColumnElement[bool]) -> sa.Exists:
    """Build the condition that one of the rows meets all conditions."""
    found = sa.select(sa.literal(1)).select_from(rows)
    return sa.exists(found.where(*conditions))
