"""Strategy `staged`: tasks insert into the sink's staging table and commit that; the driver moves a whole checkpoint.

Staged rows carry their participant's tag, and a participant is pre-committed by its ledger row, written in the same
transaction. The driver's one transaction turns all ledger rows of the checkpoint, copies the rows into the target and
deletes them from the staging table. All of it is plain INSERT, UPDATE and DELETE: no DDL is needed after `check`, which
in many databases would commit a transaction half done. In between nothing is locked and no transaction is open.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from sinks.errors import BadValue, ConfigurationError, SinkError
from sinks.sql import dialect as dialects
from sinks.sql import ledger as ledgers
from sinks.sql import strategies
from sinks.sql.names import altered, columns_digest
from sinks.sql.options import MergeOptions
from sinks.sqlalchemy import changes
from sinks.sqlalchemy.database import SORTED_BYTES, Database, has_table
from sinks.sqlalchemy.dialect import PARTICIPANT, SqlAlchemyDialect, Target
from sinks.sqlalchemy.ledger import Ledger
from sinks.sqlalchemy.rows import InsertTransaction
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    Committable,
    Identity,
    TransactionContext,
    token,
)

Plan: TypeAlias = dialects.Plan[Connection, Target]
Rows: TypeAlias = "tuple[sa.Table, list[str]]"
"""A staging table and the tags of participants."""
_SORTING_THE_BEGINNING = ("mysql", "mariadb")
"""Dialects whose servers sort texts by their first bytes."""


def tag(transaction_id: str) -> str:
    return hashlib.sha256(transaction_id.encode()).hexdigest()[:20]


def identity_of(transaction_id: str, staging: str) -> Identity:
    return {"transaction_id": transaction_id, "staging": staging}


class Staged(strategies.Staged[Connection, Target, InsertTransaction]):
    dialect: SqlAlchemyDialect
    server: Database

    def begin(self, plan: Plan, context: TransactionContext) -> InsertTransaction:
        target, text = plan.target, context.transaction_id
        assert target.staging is not None, "check() comes before the tasks"
        identity, constants = identity_of(text, target.staging.name), {PARTICIPANT: tag(text)}
        return InsertTransaction(
            self.server,
            context,
            target.label,
            identity,
            target.staging,
            target.filled,
            constants,
            rounding=self.dialect.rounding,
        )

    def pre_commit(self, transaction: InsertTransaction, plan: Plan) -> Committable:
        text, staging = transaction.context.transaction_id, transaction.identity["staging"]
        rows = self.finish(transaction, plan)
        sums = transaction.summed and replace(transaction.summed, rows=rows)
        with transaction.explained():
            if not _ledger(plan.ledger).stage(transaction.connection, text, staging, sums):
                raise SinkError(f"{text} was aborted, or used, before it was pre-committed")
        transaction.commit()
        columns = columns_digest(transaction.context.schema.names)
        return Committable(transaction.identity, proof=self.proof(plan) | {"columns": columns})

    def commit_directly(self, transaction: InsertTransaction, plan: Plan) -> None:
        """At-least-once: move the rows in the transaction that staged them."""
        assert plan.target.staging is not None
        rows = plan.target.staging, [tag(transaction.context.transaction_id)]
        self.finish(transaction, plan)
        with transaction.explained():
            self._require_same(transaction.connection, plan, [rows], [])
            _once(transaction.connection, plan, self.merge, rows)
            _sortable(transaction.connection, plan, self.merge, rows)
            _move(transaction.connection, plan.target.table, self.merge, rows)
        transaction.commit()

    def validate_all(self, plan: Plan, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        """Raise BadValue for what the target would refuse: move the rows on trial, and roll that back."""
        where = f"table {plan.target.label}: checkpoint {checkpoint.checkpoint_id}"
        with self.server.explained(where), self.server.lend() as connection, self.server.trial(connection):
            if tables := _by_table(connection, plan, committables):
                self._require_same(connection, plan, tables, committables)
                rows = _gathered(connection, tables)
                _once(connection, plan, self.merge, rows)
                _sortable(connection, plan, self.merge, rows)
                _move(connection, plan.target.table, self.merge, rows)

    def intact(self, connection: Connection, plan: Plan, committables: Sequence[Committable]) -> set[str]:
        """Those whose rows are as many as were acknowledged. If not, somebody changed them, and a ledger row that is
        undecided is proof that they were not moved."""
        counts: dict[str, int] = {}
        for table, tags in _by_table(connection, plan, committables):
            by = table.c[PARTICIPANT]
            for row in connection.execute(sa.select(by, sa.func.count()).where(by.in_(tags)).group_by(by)):
                counts[row[0]] = row[1]
        staged = _ledger(plan.ledger).undecided(connection, [c.transaction["transaction_id"] for c in committables])
        rows = {c.transaction["transaction_id"]: c.fingerprint.rows for c in committables}
        return {text for text in staged if counts.get(tag(text), 0) == rows[text]}

    def kept(self, committables: Sequence[Committable]) -> str:
        names = sorted({str(c.transaction["staging"]) for c in committables})
        return f"the staging table{'s' * (len(names) > 1)} {', '.join(names)}"

    def gone(self, transaction_id: str) -> str:
        return f"{transaction_id} was aborted by somebody else, or its staged rows were changed"

    def move(self, connection: Connection, plan: Plan, committables: Sequence[Committable]) -> None:
        tables = _by_table(connection, plan, committables)
        try:
            with self.server.explained(f"table {plan.target.label}"):
                self._require_same(connection, plan, tables, committables)
            with self.server.explained(f"table {plan.target.label}: a checkpoint"):
                _move(connection, plan.target.table, self.merge, _gathered(connection, tables))
        except ConfigurationError as error:
            raise strategies.TargetRefuses(f"{error}. Change it back") from error

    def _require_same(
        self, connection: Connection, plan: Plan, staged: Sequence[Rows], committables: Sequence[Committable]
    ) -> None:
        """Lock the target. Raises SinkError if somebody altered a staging table, and ConfigurationError if the target
        was altered since its rows were staged: if the types differ, or it takes no NULL where there is one, in place of
        which databases may count on, or put the time."""
        digests = {c.transaction["staging"]: c.proof["columns"] for c in committables}
        target = plan.target
        known = {column.name: column for column in target.columns}
        for staging, tags in staged:
            columns = changes.columns_of(connection, staging)
            given = [name for name in columns if name != PARTICIPANT]
            if digests.get(staging.name, columns_digest(given)) != columns_digest(given):
                raise altered(staging.name, given)
            then = changes.types_of(connection, columns)
            if connection.dialect.name not in changes.RECREATED:
                then = target.types if staging is target.staging else {}
            now = changes.require_same(connection, target.table, {name: then[name] for name in columns if name in then})
            kept = [staging.c[PARTICIPANT].in_(tags)]
            if self.merge.delete_marker:
                kept.append(sa.type_coerce(staging.c[self.merge.delete_marker], sa.Boolean).is_not(sa.true()))
            for name in self.merge.written([name for name in columns if name in now], now):
                takes_null = now[name]["nullable"] and (name not in known or known[name].nullable)
                if columns[name]["nullable"] and not takes_null:
                    missing = sa.select(sa.literal(1)).where(staging.c[name].is_(None), *kept).limit(1)
                    if connection.execute(missing).first():
                        raise changes.changed(
                            target.table, [f'its column "{name}" takes no NULL, and rows have NULL there']
                        )
        self.require_meant(connection, plan)

    def commit_all(self, plan: Plan, committables: Sequence[Committable]) -> list[CommitOutcome]:
        try:
            return super().commit_all(plan, committables)
        except exc.SQLAlchemyError as error:
            if not self.server.refuses(error):  # the connection, a lock, a full disk: to be asked again
                raise self.server.explain(error, f"table {plan.target.label}: a checkpoint") from None
            reason = f"table {plan.target.label} refuses rows: {self.server.said(error)}"
            return self.refused(committables, reason)

    def forget(self, connection: Connection, schema: str, identity: Identity) -> None:
        if has_table(connection, identity["staging"], schema):
            staging = sa.table(identity["staging"], sa.column(PARTICIPANT), schema=schema or None)
            mine = staging.c[PARTICIPANT] == tag(identity["transaction_id"])
            with self.server.transaction(connection):
                connection.execute(staging.delete().where(mine))

    def staged(
        self, connection: Connection, schema: str, ledger: ledgers.Ledger[Connection] | None, job: str, sink: str
    ) -> dict[str, Identity]:
        rows = _ledger(ledger).staged(connection, token(job), token(sink)) if ledger else {}
        return {text: identity_of(text, staging) for text, staging in rows.items()}


def _ledger(ledger: ledgers.Ledger[Connection]) -> Ledger:
    assert isinstance(ledger, Ledger)
    return ledger


# ---------------------------------------------------------------------- the move
def _by_table(connection: Connection, plan: Plan, committables: Sequence[Committable]) -> list[Rows]:
    """The staging tables that are there (nearly always one), each with the tags of its participants."""
    tags: dict[str, list[str]] = {}
    for c in committables:
        tags.setdefault(c.transaction["staging"], []).append(tag(c.transaction["transaction_id"]))
    tables = []
    for name, its in tags.items():
        if plan.target.staging is not None and plan.target.staging.name == name:
            known = plan.target.staging
            if has_table(connection, name, known.schema):
                tables.append((known, its))
        else:
            try:
                schema = plan.target.table.schema
                found = sa.Table(name, sa.MetaData(), schema=schema, autoload_with=connection, resolve_fks=False)
            except exc.NoSuchTableError:
                continue
            tables.append((found, its))
    return tables


def _gathered(connection: Connection, staged: Sequence[Rows]) -> Rows:
    """All rows of the checkpoint in one staging table. They are in two if the target's columns were altered before a
    lost participant was written again."""
    (into, tags), *others = staged
    for table, its in others:
        mine = table.c[PARTICIPANT].in_(its)
        connection.execute(into.insert().from_select(table.columns.keys(), sa.select(table).where(mine)))
        connection.execute(table.delete().where(mine))
        tags = [*tags, *its]
    return into, tags


def _once(connection: Connection, plan: Plan, merge: MergeOptions, rows: Rows) -> None:
    """Raise BadValue if a key comes twice and nothing tells which row is the last one."""
    if merge.mode == "append" or merge.order_by:
        return
    staging, tags = rows
    keys = [staging.c[key] for key in merge.keys]
    twice = sa.select(*keys, sa.func.count()).where(staging.c[PARTICIPANT].in_(tags))
    row = connection.execute(twice.group_by(*keys).having(sa.func.count() > 1).limit(1)).first()
    if row:
        key = f"({', '.join(merge.keys)}) = ({', '.join(map(str, row[:-1]))})"
        raise BadValue(
            f"table {plan.target.label}: two changes of one key in a batch, and no order_by=: {key} comes {row[-1]} "
            "times in the batch"
        )


def _sortable(connection: Connection, plan: Plan, merge: MergeOptions, rows: Rows) -> None:
    """Raise BadValue for a value of `order_by` of which MySQL would look at the beginning alone."""
    staging, tags = rows
    if not merge.order_by or connection.dialect.name not in _SORTING_THE_BEGINNING:
        return
    by = staging.c[merge.order_by]
    weights = sa.func.greatest(sa.func.length(by), sa.func.length(sa.func.weight_string(by)))
    too_long = sa.select(sa.literal(1)).where(staging.c[PARTICIPANT].in_(tags), weights > SORTED_BYTES).limit(1)
    if connection.execute(too_long).first():
        raise BadValue(
            f'table {plan.target.label}: a value of the order_by column "{merge.order_by}" is longer than '
            f"{SORTED_BYTES} bytes, or has more in its collation, and the server sorts by no more: order by a number, "
            "a time or a shorter text"
        )


def _move(connection: Connection, target: sa.Table, merge: MergeOptions, staged: Rows) -> None:
    """Put the staged rows into the target and delete them here: all, or the last one of each key in place of the row
    that the target has."""
    staging, tags = staged
    mine = staging.c[PARTICIPANT].in_(tags)
    written = merge.written([c.name for c in staging.columns if c.name != PARTICIPANT], target.columns.keys())
    rows: sa.Select[Any] = sa.select(*(staging.c[name] for name in written)).where(mine)
    if merge.keep_newer:
        connection.execute(staging.delete().where(mine, _is_older(target, merge, staging)))
    if merge.mode == "upsert":
        connection.execute(target.delete().where(_in_batch(target, merge, staging, mine)))
        rows = _last(connection, merge, staging, mine, written)
    connection.execute(target.insert().from_select(written, rows))
    connection.execute(staging.delete().where(mine))


def _in_batch(
    target: sa.Table, merge: MergeOptions, staging: sa.Table, mine: sa.ColumnElement[bool]
) -> sa.ColumnElement[bool]:
    if len(merge.keys) == 1:  # databases find the few rows of the target by its index
        key = merge.keys[0]
        return target.c[key].in_(sa.select(staging.c[key]).where(mine))
    equal = (staging.c[key] == target.c[key] for key in merge.keys)
    return sa.exists(sa.select(sa.literal(1)).select_from(staging).where(mine, *equal))


def _is_older(target: sa.Table, merge: MergeOptions, staging: sa.Table) -> sa.ColumnElement[bool]:
    """Whether the target has a newer row of a staged row's key."""
    stored, change = target.c[str(merge.order_by)], staging.c[str(merge.order_by)]
    equal = (staging.c[key] == target.c[key] for key in merge.keys)
    newer = sa.or_(change.is_(None), stored > change)
    return sa.exists(sa.select(sa.literal(1)).select_from(target).where(*equal, stored.is_not(None), newer))


def _last(
    connection: Connection, merge: MergeOptions, staging: sa.Table, mine: sa.ColumnElement[bool], written: Sequence[str]
) -> sa.Select[Any]:
    """The last change of each key, by the greatest `order_by`, NULLs first; of equals a delete wins. Without `order_by`
    each key is there once. MariaDB sorts wide columns by no more than letters where their collation tells accents or
    capitals apart too."""
    columns = [staging.c[name] for name in written]
    deletes: sa.ColumnElement[int] = sa.literal(0)
    if merge.delete_marker:
        deletes = sa.case((sa.type_coerce(staging.c[merge.delete_marker], sa.Boolean) == sa.literal(True), 1), else_=0)
    if not merge.order_by:
        return sa.select(*columns).where(mine, deletes == 0)
    by = staging.c[merge.order_by]
    order = [sa.case((by.is_(None), 1), else_=0), by.desc()]
    if connection.dialect.name in _SORTING_THE_BEGINNING and isinstance(by.type, sa.String):
        order.append(sa.func.weight_string(by).desc())
    if merge.delete_marker:
        order.append(deletes.desc())
    number = sa.func.row_number().over(partition_by=[staging.c[key] for key in merge.keys], order_by=order)
    last = sa.select(*columns, number.label("tpc_place"), deletes.label("tpc_deletes")).where(mine).subquery()
    kept = (last.c.tpc_place == 1, last.c.tpc_deletes == 0)
    return sa.select(*(last.c[name] for name in written)).where(*kept)
