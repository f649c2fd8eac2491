"""Staging tables by SQLAlchemy, for any database.

The transaction that moves their rows has no DDL, which would commit it in many databases, so the
staging tables are dropped after it: the ledger tells that those that are still there were moved.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection
from sqlalchemy.types import SchemaType, TypeEngine

from sinks.errors import TransactionBlocked
from sinks.sql.catalog import ColumnTypes
from sinks.sql.dialect import Move
from sinks.sql.names import STAGING, staging_table
from sinks.sql.server import Row
from sinks.sql.staging import Staging
from sinks.sql.strategies import identity_of
from sinks.sql.transaction import Plan
from sinks.sqlalchemy.catalog import ID, SqlAlchemyCatalog
from sinks.sqlalchemy.dialect import ROW, SqlAlchemyDialect
from sinks.sqlalchemy.insert import InsertTransaction
from sinks.sqlalchemy.server import SqlAlchemyServer
from sinks.sqlalchemy.types import SqlAlchemyColumn, SqlAlchemyTarget, declared
from sinks.transaction import TransactionContext

_RECREATED = ("sqlite", "postgresql")
"""The dialects for which tests show that a staging table has the types of the target that it was
made after."""


class SqlAlchemyStaging(Staging[Connection, SqlAlchemyTarget]):
    server: SqlAlchemyServer
    dialect: SqlAlchemyDialect
    catalog: SqlAlchemyCatalog

    # ------------------------------------------------------------------ in the task
    def stage(
        self, plan: Plan[Connection, SqlAlchemyTarget], context: TransactionContext
    ) -> InsertTransaction:
        target = plan.target
        text = context.transaction_id
        keys = self.merge.keys
        name = self.dialect.name
        columns = self.choose_columns(
            target.columns,
            context.schema,
            lambda field: SqlAlchemyColumn.of(field.name, declared(field.type, name), name),
        )
        optional = bool(self.merge.delete_marker)  # a row that deletes needs nothing but its key
        staging = sa.Table(
            staging_table(text),
            sa.MetaData(),
            sa.Column(
                ROW,
                sa.BigInteger().with_variant(sa.Integer, "sqlite"),
                sa.Identity(),
                primary_key=True,
            ),
            sa.Column(ID, sa.String(199), default=sa.null(), server_default=text),
            *(
                sa.Column(
                    c.name, _copy(c.kind), nullable=c.nullable or (optional and c.name not in keys)
                )
                for c in columns
            ),
            schema=target.schema or None,
        )
        identity = identity_of(target.schema, text)
        return InsertTransaction(
            self.server, context, target.label, identity, staging, columns, self.merge
        )

    # ------------------------------------------------------------------ before the decision
    def locked(
        self, connection: Connection, plan: Plan[Connection, SqlAlchemyTarget], staged: ColumnTypes
    ) -> Move[SqlAlchemyTarget]:
        if self.dialect.name not in _RECREATED:
            types = {column.name: column.declared for column in plan.target.columns}
            staged = {
                table: {name: types.get(name, kind) for name, kind in of.items()}
                for table, of in staged.items()
            }
        return super().locked(connection, plan, staged)

    def changes_since(self, connection: Connection, move: Move[SqlAlchemyTarget]) -> Iterator[str]:
        """Yield what else keeps rows out of the locked table.

        Databases may put the next number, or the time, in place of a NULL that the table no longer
        takes.
        """
        target = move.target
        yield from self.catalog.obstacles(connection, target)
        required = {column.name for column in target.columns if not column.nullable} & set(
            move.written
        )
        existing = (
            sa.inspect(connection).get_multi_columns(target.schema or None, move.staging)
            if required
            else {}
        )
        marker = self.dialect.marker
        for (_, table), columns in existing.items():
            for name in [c["name"] for c in columns if c["name"] in required and c["nullable"]]:
                [rows] = self.dialect.tables(replace(move, staging=[str(table)]), [name, *marker])
                missing = (
                    rows.c[name].is_(None),
                    *(self.dialect.is_delete(rows).is_not(sa.true()) for _ in marker),
                )
                if connection.execute(sa.select(rows.c[name]).where(*missing).limit(1)).first():
                    yield (
                        f'its column "{name}" takes no NULL, and rows have NULL there: let it be '
                        "NULL"
                    )

    def first_duplicate(
        self, connection: Connection, move: Move[SqlAlchemyTarget], columns: Sequence[str]
    ) -> Row | None:
        row = connection.execute(self.dialect.duplicate_rows(move, columns)).first()
        return row and tuple(row)

    def first_tie(self, connection: Connection, move: Move[SqlAlchemyTarget]) -> Row | None:
        """Find a key and an `order_by` by which nobody can tell the last change.

        Python compares the changes, because few databases compare values of every type.
        """
        keys = self.merge.keys
        by = str(self.merge.order_by)
        if (
            len(move.staging) < 2
            or not connection.execute(self.dialect.equal_changes(move)).first()
        ):
            return None
        written = [name for name in move.written if name != by]
        shown = len(keys) + 2
        candidates = self.dialect.last_of_partitions(move, written)
        with connection.execute(candidates, execution_options={"yield_per": 1000}) as found:
            for _, group in itertools.groupby(map(tuple, found), key=operator.itemgetter(0)):
                first, *others = ((row[1:shown], row[shown:]) for row in group)
                if not all(_alike(change, first[1]) for _, change in others):
                    return (*first[0], len(others) + 1)
        return None

    # ------------------------------------------------------------------ the move
    def upsert(self, connection: Connection, move: Move[SqlAlchemyTarget]) -> None:
        """Replace rows as any database can: delete the rows with these keys, then insert.

        The last changes are inserted. DELETE waits for others that write the same rows, and judges
        what they made of them. Raises TransactionBlocked if others wrote rows with these keys in
        between.
        """
        for delete in self.dialect.deletes_of_changed(move):
            connection.execute(delete)
        try:
            with connection.begin_nested():
                connection.execute(self.dialect.insert_of_changes(move))
        except exc.IntegrityError as error:
            into = move.target.table
            for table in self.dialect.tables(move, self.merge.keys):
                there = (
                    sa.select(sa.literal(1))
                    .select_from(into)
                    .where(self.dialect.is_changed(into, table))
                    .limit(1)
                )
                if connection.execute(there).first():
                    raise TransactionBlocked(
                        f"table {move.target.label}: somebody else wrote rows with keys of this "
                        "batch at the same time"
                    ) from error
            raise

    # ------------------------------------------------------------------ afterwards
    def staged(self, connection: Connection, schema: str, prefix: str) -> list[str]:
        inspector = sa.inspect(connection)
        names = [
            name for name in inspector.get_table_names(schema or None) if STAGING.fullmatch(name)
        ]
        tables = inspector.get_multi_columns(schema or None, names) if names else {}
        defaults = [
            str(c["default"]) for columns in tables.values() for c in columns if c["name"] == ID
        ]
        ids = [text for default in defaults for text in re.findall(r"tpc\.[a-z0-9.-]+", default)]
        return sorted(text for text in ids if text.startswith(prefix))


def _alike(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Tell whether two changes come to the same.

    Each of them has a mark for a delete before its values.
    """
    (deletes, *values), (others, *theirs) = one, other
    # NaN is itself
    same = (a == b or (a != a and b != b) for a, b in zip(values, theirs, strict=True))
    return bool(deletes == others and (deletes or all(same)))


def _copy(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    if not isinstance(kind, SchemaType):
        return kind
    copy = kind.copy()
    if hasattr(copy, "create_type"):  # PostgreSQL's, which is there
        copy.create_type = False
    return copy
