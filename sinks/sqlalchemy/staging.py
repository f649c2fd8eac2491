"""Strategy `staged` in any database: SQLAlchemy creates the staging tables, plain INSERT and DELETE move their rows.

The driver's transaction has no DDL, which would commit it in many databases. The staging tables are dropped after it:
the ledger tells that those that are still there were moved.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import Connection
from sqlalchemy.types import SchemaType, TypeEngine

from sinks.sql.dialect import Plan
from sinks.sql.engine import MYSQL
from sinks.sql.names import staging_table
from sinks.sql.questions import SORTED_BYTES
from sinks.sql.staging import Doubtful, StagedTypes, StagingTables, identity_of, too_long_to_sort, twice_in_batch
from sinks.sqlalchemy.database import RECREATED, Database, changed, columns_of, require_same, types_of
from sinks.sqlalchemy.dialect import InsertTransaction, SqlAlchemyDialect, Target
from sinks.transaction import CommitOutcome, Committable, TransactionContext

logger = logging.getLogger(__name__)

_ID = "tpc_transaction"
"""A column of a staging table, which is NULL in each row. Its default is the transaction's id: any database keeps that
with the table from its first moment on, and tells it."""
_ROW = "tpc_row"
"""Its primary key: without one PostgreSQL's publications refuse DELETE, and some servers the table."""


_TEXT = sa.String(199).with_variant(mysql.VARCHAR(199, charset="ascii", collation="ascii_bin"), *MYSQL)


class SqlAlchemyStaging(StagingTables[Connection, Target, InsertTransaction]):
    dialect: SqlAlchemyDialect
    server: Database

    # ------------------------------------------------------------------ in the task
    def begin(self, plan: Plan[Connection, Target], context: TransactionContext) -> InsertTransaction:
        target, text = plan.target, context.transaction_id
        name, keys, columns = staging_table(text), self.merge.keys, self.dialect.filled(target, context.schema)
        optional = bool(self.merge.delete_marker)  # a row that deletes needs nothing but its key
        staging = sa.Table(
            name,
            sa.MetaData(),
            sa.Column(_ROW, sa.BigInteger().with_variant(sa.Integer, "sqlite"), sa.Identity(), primary_key=True),
            sa.Column(_ID, _TEXT, default=sa.null(), server_default=text),
            *(
                sa.Column(c.name, _copy(c.kind), nullable=c.name not in keys and (c.nullable or optional))
                for c in columns
            ),
            schema=target.schema or None,
            mysql_engine="InnoDB",
            mariadb_engine="InnoDB",
            mysql_collate="utf8mb4_bin",
            mariadb_collate="utf8mb4_bin",
        )
        identity = identity_of(target.schema, text)
        rounding = self.merge.rounds
        return InsertTransaction(
            self.server, context, target.label, identity, staging, columns, rounding=rounding, create=True
        )

    def seal(self, transaction: InsertTransaction, moved: str | None = None) -> None:
        transaction.commit()
        if moved:
            with self.server.lend() as connection:
                self.drop_unused(connection, transaction.into.schema or "", [transaction.into.name])

    # ------------------------------------------------------------------ before the decision
    def locked(self, connection: Connection, plan: Plan[Connection, Target], staged: StagedTypes) -> Target:
        """Databases may count on, or put the time, in place of a NULL that the table takes no more."""
        target = plan.target
        types = [one for columns in staged.values() for one in columns.items()]
        if connection.dialect.name not in RECREATED:
            types = [(name, target.types[name]) for name, _ in types if name in target.types]
        now = require_same(connection, target.table, dict.fromkeys(types))
        nullable = {c.name for c in target.columns if c.nullable} & {name for name in now if now[name]["nullable"]}
        required = [name for name in self.merge.written(list(dict(types)), target.names) if name not in nullable]
        found = sa.inspect(connection).get_multi_columns(target.schema or None, list(staged)) if required else {}
        for (_, table), columns in found.items():
            for name in [c["name"] for c in columns if c["name"] in required and c["nullable"]]:
                rows = self._union(target, [table], [name, *self._marker])
                missing = rows.c[name].is_(None), *(self._deletes(rows).is_not(sa.true()) for _ in self._marker)
                if connection.execute(sa.select(rows.c[name]).where(*missing).limit(1)).first():
                    raise changed(target.table, [f'its column "{name}" takes no NULL, and rows have NULL there'])
        return target

    def clashes(self, connection: Connection, target: Target, staging: Sequence[str], written: Sequence[str]) -> None:
        """Of a long text MySQL would look at the beginning alone."""
        super().clashes(connection, target, staging, written)
        if self.merge.order_by and self.server.dialect in MYSQL:
            by = self._union(target, staging, [self.merge.order_by]).c[self.merge.order_by]
            weights = sa.func.greatest(sa.func.length(by), sa.func.length(sa.func.weight_string(by)))
            if connection.execute(sa.select(sa.literal(1)).where(weights > SORTED_BYTES).limit(1)).first():
                raise too_long_to_sort(target, self.merge.order_by)

    def _twice(
        self, connection: Connection, target: Target, staging: Sequence[str], columns: Sequence[str], rule: str
    ) -> None:
        keys = list(self._union(target, staging, columns).c)
        twice = sa.select(*keys, sa.func.count()).group_by(*keys).having(sa.func.count() > 1).limit(1)
        if row := connection.execute(twice).first():
            raise twice_in_batch(target, rule, columns, row)

    # ------------------------------------------------------------------ the move
    def append(
        self, connection: Connection, target: Target, staging: Sequence[str], written: Sequence[str], rows: int
    ) -> None:
        self.count(connection, staging, rows)
        for table in self._tables(target, staging, written):
            connection.execute(target.table.insert().from_select(written, sa.select(table)))

    def upsert(self, connection: Connection, target: Target, staging: Sequence[str], written: Sequence[str]) -> None:
        """As any database can: the rows of the target with these keys go, then the last changes come."""
        into, (columns, _) = target.table, self.changes(written)
        tables = self._tables(target, staging, columns)
        if self.merge.keep_newer:
            for table in tables:
                connection.execute(table.delete().where(self._is_older(table, into)))
        for table in tables:
            connection.execute(into.delete().where(self._is_changed(into, table)))
        last = self._last(connection, self._union(target, staging, columns), written)
        connection.execute(into.insert().from_select(written, last))

    def _is_changed(self, into: sa.Table, table: sa.TableClause) -> sa.ColumnElement[bool]:
        """Whether the batch has a change of the row, in the form by which a database looks for the rows of the target
        by its index: a join, or a list of keys."""
        keys = self.merge.keys
        equal = [table.c[key] == into.c[key] for key in keys]
        if self.server.dialect in MYSQL:
            return sa.and_(*equal)
        if len(keys) == 1 or self.server.dialect == "sqlite":
            return sa.tuple_(*(into.c[key] for key in keys)).in_(sa.select(*(table.c[key] for key in keys)))
        return sa.exists(sa.select(sa.literal(1)).select_from(table).where(*equal))

    def _is_older(self, table: sa.TableClause, into: sa.Table) -> sa.ColumnElement[bool]:
        """Whether the target has a newer row of a staged row's key."""
        stored, change = into.c[str(self.merge.order_by)], table.c[str(self.merge.order_by)]
        equal = (table.c[key] == into.c[key] for key in self.merge.keys)
        newer = sa.or_(change.is_(None), stored > change)
        return sa.exists(sa.select(sa.literal(1)).select_from(into).where(*equal, stored.is_not(None), newer))

    def _last(self, connection: Connection, rows: sa.Subquery, written: Sequence[str]) -> sa.Select[Any]:
        """The last change of each key, by the greatest `order_by`, NULLs first; of equals a delete wins. Without
        `order_by` each key is there once. MariaDB sorts wide columns by no more than letters where their collation
        tells accents or capitals apart too."""
        columns = [rows.c[name] for name in written]
        deletes: sa.ColumnElement[int] = sa.literal(0)
        if self._marker:
            deletes = sa.case((self._deletes(rows) == sa.literal(True), 1), else_=0)
        if not self.merge.order_by:
            return sa.select(*columns).where(deletes == 0)
        by = rows.c[self.merge.order_by]
        order = [sa.case((by.is_(None), 1), else_=0), by.desc()]
        if self.server.dialect in MYSQL:
            order.append(sa.func.weight_string(by).desc())
        if self._marker:
            order.append(deletes.desc())
        number = sa.func.row_number().over(partition_by=[rows.c[key] for key in self.merge.keys], order_by=order)
        last = sa.select(*columns, number.label("tpc_place"), deletes.label("tpc_deletes")).subquery()
        return sa.select(*(last.c[name] for name in written)).where(last.c.tpc_place == 1, last.c.tpc_deletes == 0)

    @property
    def _marker(self) -> list[str]:
        return [self.merge.delete_marker] if self.merge.delete_marker else []

    def _deletes(self, rows: sa.Subquery) -> sa.ColumnElement[bool]:
        return sa.type_coerce(rows.c[str(self.merge.delete_marker)], sa.Boolean)

    def _union(self, target: Target, staging: Sequence[str], columns: Sequence[str]) -> sa.Subquery:
        return sa.union_all(*map(sa.select, self._tables(target, staging, columns))).subquery()

    def _tables(self, target: Target, staging: Sequence[str], columns: Sequence[str]) -> list[sa.TableClause]:
        """`staging` may be quoted names: they need no quotes."""
        names, schema = (name.rpartition(".")[2] for name in staging), target.schema or None
        return [sa.table(name, *map(sa.column, columns), schema=schema) for name in names]

    def settle(
        self, connection: Connection, plan: Plan[Connection, Target], committables: Sequence[Committable]
    ) -> dict[str, CommitOutcome]:
        older = [c.transaction["transaction_id"] for c in committables if "staging" in c.transaction]
        states = plan.ledger.states(connection, older)
        if not all(states.get(text) for text in older):
            raise Doubtful(
                f"table {plan.target.label}: {older[0]} was staged by an older version, in one table of all "
                "participants, which this version cannot read: let the older version start once more and finish its "
                "last checkpoint, then start this one"
            )
        return super().settle(connection, plan, committables)

    def commit_all(self, plan: Plan[Connection, Target], committables: Sequence[Committable]) -> list[CommitOutcome]:
        try:
            return super().commit_all(plan, committables)
        except exc.SQLAlchemyError as error:
            if not self.server.refuses(error):  # the connection, a lock, a full disk: to be asked again
                raise self.server.explain(error, f"table {plan.target.label}: a checkpoint") from None
            return self.refused(committables, f"table {plan.target.label} refuses rows: {self.server.said(error)}")

    def explained(self, target: Target, where: str, tables: Sequence[str]) -> AbstractContextManager[None]:
        return self.server.explained(f"table {target.label}: {where}")

    def refusal(self, error: Exception, target: Target, tables: Sequence[str]) -> str | None:
        fault = self.dialect.fault(error)
        if fault is None or fault.kind not in ("refused", "changed", "server"):
            return None
        return f": {fault.text}" + (". Change it back" if fault.kind == "changed" else "")

    # ------------------------------------------------------------------ staging tables
    def transfer(
        self, connection: Connection, target: Target, staging: Sequence[str], written: Sequence[str], rows: int
    ) -> None:
        """And empty the staging tables, so that this is tried before the decision, too."""
        super().transfer(connection, target, staging, written, rows)
        for table in self._tables(target, staging, ()):
            connection.execute(table.delete())

    def mark_moved(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        """They are empty."""

    def drop(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        for name in names:
            with self.server.transaction(connection):
                sa.Table(name, sa.MetaData(), schema=schema or None).drop(connection)

    def drop_unused(self, connection: Connection, schema: str, names: Sequence[str]) -> None:
        """What somebody reads now is dropped by the next sweep."""
        for name in names:
            try:
                self.drop(connection, schema, [name])
            except exc.DBAPIError as error:
                said = self.server.said(error)
                logger.warning("staging table %s was moved and could not be dropped yet: %s", name, said)

    def existing(self, connection: Connection, schema: str, names: Sequence[str]) -> set[str]:
        return set(names) & set(sa.inspect(connection).get_table_names(schema or None))

    def staged(self, connection: Connection, schema: str, prefix: str) -> list[str]:
        inspector = sa.inspect(connection)
        names = [name for name in inspector.get_table_names(schema or None) if re.fullmatch("tpc_[0-9a-f]{20}", name)]
        tables = inspector.get_multi_columns(schema or None, names) if names else {}
        defaults = [str(c["default"]) for columns in tables.values() for c in columns if c["name"] == _ID]
        ids = [text for default in defaults for text in re.findall(r"tpc\.[a-z0-9.-]+", default)]
        return sorted(text for text in ids if text.startswith(prefix))

    def staged_types(self, connection: Connection, schema: str, tables: Sequence[str]) -> StagedTypes:
        found = {}
        for name in tables:
            columns = columns_of(connection, sa.table(name, schema=schema or None))
            types = types_of(connection, columns)
            found[name] = {name: kind for name, kind in types.items() if name not in (_ROW, _ID)}
        return found


def _copy(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    if not isinstance(kind, SchemaType):
        return kind
    copy = kind.copy()
    for name in ("charset", "collation"):  # SQLAlchemy forgets those of MySQL's ENUM
        if hasattr(kind, name):
            setattr(copy, name, getattr(kind, name))
    if hasattr(copy, "create_type"):  # PostgreSQL's, which is there
        copy.create_type = False
    return copy
