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
        return self.undoubled(".".join(quote(name) for name in names if name))

    def undoubled(self, compiled: str) -> str:
        """Take out the percent signs that a dialect doubles for its driver.

        `sqlalchemy.text` doubles them once more.
        """
        doubles = "%%" in self._preparer.quote("%")
        return compiled.replace("%%", "%") if doubles else compiled

    @cached_property
    def _preparer(self) -> sa.sql.compiler.IdentifierPreparer:
        return self.url.get_dialect()().identifier_preparer

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_preparer"}

    # ------------------------------------------------------------------ staged rows
    def tables(self, move: Move[SqlAlchemyTarget], columns: Sequence[str]) -> list[sa.TableClause]:
        schema = move.target.schema or None
        return [sa.table(name, *map(sa.column, columns), schema=schema) for name in move.staging]

    def _with_partition(self, move: Move[SqlAlchemyTarget], columns: Sequence[str]) -> sa.Subquery:
        """Select these columns of all staged rows, with the number of the row's staging table."""
        tables = enumerate(self.tables(move, columns))
        parts = (
            sa.select(*table.c, sa.literal_column(str(n)).label("tpc_part")) for n, table in tables
        )
        return sa.union_all(*parts).subquery()

    def _newest(self, rows: sa.FromClause) -> list[sa.ColumnElement[Any]]:
        """Order changes from the newest on, with changes without a value at the end."""
        by = rows.c[str(self.merge.order_by)]
        return [sa.case((by.is_(None), 1), else_=0), by.desc()]

    def _marked(self, rows: sa.FromClause) -> sa.ColumnElement[int]:
        """Build the expression that is 1 for a row that deletes, and 0 for others."""
        return (
            sa.case((self.is_delete(rows) == sa.literal(True), 1), else_=0)
            if self.marker
            else sa.literal(0)
        )

    @property
    def marker(self) -> list[str]:
        """The column of the delete marker, if there is one."""
        return [self.merge.delete_marker] if self.merge.delete_marker else []

    def is_delete(self, rows: sa.FromClause) -> sa.ColumnElement[bool]:
        """Build the condition that a row deletes."""
        return sa.type_coerce(rows.c[str(self.merge.delete_marker)], sa.Boolean)

    # ------------------------------------------------------------------ duplicates and ties
    def duplicate_rows(
        self, move: Move[SqlAlchemyTarget], columns: Sequence[str]
    ) -> sa.Select[Any]:
        """Select values of these columns that several staged rows have, and count the rows."""
        keys = list(sa.union_all(*map(sa.select, self.tables(move, columns))).subquery().c)
        return (
            sa.select(*keys, sa.func.count()).group_by(*keys).having(sa.func.count() > 1).limit(1)
        )

    def equal_changes(self, move: Move[SqlAlchemyTarget]) -> sa.Select[Any]:
        """Select one row if changes of two partitions have the same key and `order_by`."""
        keys = self.merge.keys
        by = str(self.merge.order_by)
        rows = self._with_partition(move, [*keys, by])
        part = rows.c.tpc_part
        alike = (
            sa.select(sa.literal(1))
            .select_from(rows)
            .group_by(*(rows.c[name] for name in (*keys, by)))
        )
        return alike.having(sa.func.min(part) < sa.func.max(part)).limit(1)

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
        place = sa.func.rank().over(partition_by=keys, order_by=newest)
        last = sa.func.row_number().over(
            partition_by=[*keys, rows.c.tpc_part], order_by=[*newest, rows.c[ROW].desc()]
        )
        ranked = sa.select(
            *rows.c,
            self._marked(rows).label("tpc_deletes"),
            sa.func.dense_rank().over(order_by=keys).label("tpc_key"),
            place.label("tpc_place"),
            last.label("tpc_last"),
        ).subquery()
        shown = [
            ranked.c[name]
            for name in (*self.merge.keys, str(self.merge.order_by), "tpc_deletes", *written)
        ]
        wanted = ranked.c.tpc_place == 1, ranked.c.tpc_last == 1
        return sa.select(ranked.c.tpc_key, *shown).where(*wanted).order_by(ranked.c.tpc_key)

    # ------------------------------------------------------------------ the move
    def deletes_of_changed(self, move: Move[SqlAlchemyTarget]) -> list[sa.Delete]:
        """Delete the rows of the target that have a change.

        With `keep_newer`, statements before and after that delete the staged changes that are older
        than their row. They do so twice, since others may write meanwhile.
        """
        into = move.target.table
        tables = self.tables(move, [*self.looked_at(move), ROW])
        older = [
            table.delete().where(self._is_older(table, into))
            for table in tables
            if self.merge.keep_newer
        ]
        replaced = [
            into.delete().where(self.is_changed(into, table), *self._is_due(into, table))
            for table in tables
        ]
        return [*older, *replaced, *older]

    def insert_of_changes(self, move: Move[SqlAlchemyTarget]) -> sa.Insert:
        """Insert the last change of each key."""
        tables = self.tables(move, [*self.looked_at(move), ROW])
        rows = sa.union_all(*map(sa.select, tables)).subquery()
        return move.target.table.insert().from_select(
            list(move.written), self._last(rows, move.written)
        )

    def is_changed(self, into: sa.Table, table: sa.TableClause) -> sa.ColumnElement[bool]:
        """Build the condition that the batch has a change of the row.

        It has the form by which a database looks for the rows of the target by its index: a list of
        keys, or otherwise an EXISTS for each row.
        """
        keys = self.merge.keys
        if len(keys) == 1 or self.name == "sqlite":
            return sa.tuple_(*(self._key(into, key) for key in keys)).in_(
                sa.select(*(table.c[key] for key in keys))
            )
        return sa.exists(
            sa.select(sa.literal(1)).select_from(table).where(*self._equal(into, table))
        )

    def _equal(self, into: sa.Table, table: sa.TableClause) -> list[sa.ColumnElement[bool]]:
        return [self._key(into, key) == table.c[key] for key in self.merge.keys]

    def _key(self, into: sa.Table, key: str) -> sa.ColumnElement[Any]:
        """Return a key of the target for a comparison with the batch.

        SQLite compares by the column's collation, and the column's unique index may have another
        collation.
        """
        collation = getattr(into.c[key].type, "collation", None) if self.name == "sqlite" else None
        return into.c[key].collate(collation) if collation else into.c[key]

    def _is_due(self, into: sa.Table, table: sa.TableClause) -> list[sa.ColumnElement[bool]]:
        """Build the condition, for `keep_newer`, that a change of the row is no older.

        There is none for SQLite, which would look for the change without an index. Nobody else
        writes into SQLite meanwhile.
        """
        if not self.merge.keep_newer or self.name == "sqlite":
            return []
        stored = into.c[str(self.merge.order_by)]
        change = table.c[str(self.merge.order_by)]
        due = sa.or_(stored.is_(None), stored <= change)
        return [
            sa.exists(
                sa.select(sa.literal(1)).select_from(table).where(*self._equal(into, table), due)
            )
        ]

    def _is_older(self, table: sa.TableClause, into: sa.Table) -> sa.ColumnElement[bool]:
        """Build the condition that the target has a newer row of a staged row's key."""
        stored = into.c[str(self.merge.order_by)]
        change = table.c[str(self.merge.order_by)]
        newer = stored.is_not(None), sa.or_(change.is_(None), stored > change)
        return sa.exists(
            sa.select(sa.literal(1)).select_from(into).where(*self._equal(into, table), *newer)
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
        order = [*self._newest(rows), rows.c[ROW].desc()]
        number = sa.func.row_number().over(
            partition_by=[rows.c[key] for key in self.merge.keys], order_by=order
        )
        last = sa.select(
            *columns, number.label("tpc_place"), deletes.label("tpc_deletes")
        ).subquery()
        return sa.select(*(last.c[name] for name in written)).where(
            last.c.tpc_place == 1, last.c.tpc_deletes == 0
        )
