"""Strategy `staged`: tasks insert into the sink's staging table and commit that; the driver moves a whole checkpoint.

Staged rows carry their participant's tag, and a participant is pre-committed by its ledger row, written in the same
transaction. The driver's one transaction turns all ledger rows of the checkpoint, copies the rows into the target and
deletes them from the staging table. All of it is plain INSERT, UPDATE and DELETE: no DDL is needed after `check`, which
in many databases would commit a transaction half done. In between nothing is locked and no transaction is open.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from sinks.errors import BadValue, CommittedError, SinkError
from sinks.sql.options import MergeOptions
from sinks.sqlalchemy.database import Database
from sinks.sqlalchemy.ledger import Ledger
from sinks.sqlalchemy.plan import PARTICIPANT, Plan
from sinks.sqlalchemy.rows import RowTransaction
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    Committable,
    Identity,
    TransactionContext,
    TransactionId,
    token,
)


def tag(transaction_id: str) -> str:
    return hashlib.sha256(transaction_id.encode()).hexdigest()[:20]


def identity_of(transaction_id: str, staging: str) -> Identity:
    return {"transaction_id": transaction_id, "staging": staging}


# ---------------------------------------------------------------------- in the task
def begin(database: Database, plan: Plan, context: TransactionContext) -> RowTransaction:
    assert plan.staging is not None, "check() comes before the tasks"
    identity = identity_of(context.transaction_id, plan.staging.name)
    constants = {PARTICIPANT: tag(context.transaction_id)}
    label = plan.target.fullname
    return RowTransaction(database, context, label, identity, plan.staging, plan.columns, constants)


def pre_commit(transaction: RowTransaction, ledger: Ledger) -> Committable:
    text = transaction.context.transaction_id
    with transaction.database.explained(transaction.where):
        name, staging = TransactionId.parse(text), transaction.identity["staging"]
        if not ledger.insert(transaction.connection, text, name, None, staging):
            raise SinkError(f"{text} was aborted, or used, before it was pre-committed")
    transaction.seal()
    return Committable(transaction.identity, proof=ledger.proof())


def commit_directly(transaction: RowTransaction, plan: Plan, merge: MergeOptions) -> None:
    """At-least-once: move the rows in the transaction that staged them."""
    assert plan.staging is not None
    tags = [tag(transaction.context.transaction_id)]
    _once(transaction.connection, plan, merge, plan.staging, tags)
    with transaction.database.explained(transaction.where):
        _move(transaction.connection, plan.target, merge, plan.staging, tags)
    transaction.seal()


# ---------------------------------------------------------------------- on the driver
def validate_all(
    database: Database, plan: Plan, merge: MergeOptions, checkpoint: Checkpoint, committables: Sequence[Committable]
) -> None:
    """Raise BadValue for what the target would refuse: move the rows on trial, and roll that back."""
    where = f"table {plan.target.fullname}: checkpoint {checkpoint.checkpoint_id}"
    with database.explained(where), database.engine.connect() as connection:
        if staged := _by_table(connection, plan, committables):
            staging, tags = _gathered(connection, staged)
            _once(connection, plan, merge, staging, tags)
            _move(connection, plan.target, merge, staging, tags)
        connection.rollback()


def commit_all(
    database: Database, plan: Plan, merge: MergeOptions, committables: Sequence[Committable]
) -> list[CommitOutcome]:
    """Settle the participants of one checkpoint together: all become visible, or none does."""
    try:
        with database.engine.begin() as connection:
            outcomes = _settle(connection, plan, merge, committables)
    except exc.SQLAlchemyError as error:
        if not database.refuses(error):
            raise  # the connection, a lock, a full disk: ask again
        unknown = CommitOutcome.unknown(
            f"table {plan.target.fullname} refuses rows: {database.said(error)}; the checkpoint is complete, so "
            "nothing is lost: it stays in its staging table until what stands in the way is removed and the query is "
            "started again"
        )
        return [unknown] * len(committables)
    return [outcomes[c.transaction["transaction_id"]] for c in committables]


class _SettledByOthers(Exception):
    """Somebody else settled a participant at the same time: ask again."""


def _settle(
    connection: Connection, plan: Plan, merge: MergeOptions, committables: Sequence[Committable]
) -> dict[str, CommitOutcome]:
    ledger = plan.ledger
    by_id = {c.transaction["transaction_id"]: c for c in committables}
    states = ledger.states(connection, list(by_id))
    outcomes: dict[str, CommitOutcome] = {}
    for text, committable in by_id.items():
        if text not in states:
            if reason := ledger.foreign(committable.proof):
                outcomes[text] = CommitOutcome.unknown(f"nobody can tell what became of {text}: {reason}")
                states[text] = None
            elif ledger.insert(connection, text, TransactionId.parse(text), False):
                states[text] = False
            else:
                raise _SettledByOthers(f"somebody else settled {text} at the same time")

    open_ids = [text for text, state in states.items() if state is None and text not in outcomes]
    staged = _by_table(connection, plan, [by_id[text] for text in open_ids])
    counts = {name: n for staging, tags in staged for name, n in _counts(connection, staging, tags).items()}
    for text in open_ids:
        # The row is proof that it was not moved. Somebody changed its rows, so they have to be written again.
        if counts.get(tag(text), 0) != by_id[text].fingerprint.rows:
            if not ledger.decide(connection, [text], False):
                raise _SettledByOthers(f"somebody else settled {text} at the same time")
            states[text] = False

    if open_ids and not outcomes and False not in states.values():
        if not ledger.decide(connection, open_ids, True):
            raise _SettledByOthers(f"somebody else settled one of {open_ids} at the same time")
        _move(connection, plan.target, merge, *_gathered(connection, staged))
        states |= dict.fromkeys(open_ids, True)

    for text, state in states.items():
        outcomes.setdefault(text, _outcome(text, state, ledger))
    return outcomes


def _outcome(text: str, committed: bool | None, ledger: Ledger) -> CommitOutcome:
    if committed is None:
        return CommitOutcome.HELD
    if committed:
        return CommitOutcome.COMMITTED
    return CommitOutcome.lost(
        f"{text} was aborted by somebody else, or its staged rows were changed: the ledger {ledger.table.fullname} has "
        "a tombstone in place of its row"
    )


def abort(connection: Connection, schema: str | None, ledger: Ledger, identity: Identity) -> None:
    """Make the loss final with a tombstone, and delete the staged rows. The caller commits."""
    text = identity["transaction_id"]
    if not ledger.bury(connection, text, TransactionId.parse(text)):
        raise CommittedError(f"{text} is committed: the ledger {ledger.table.fullname} has its row")
    if sa.inspect(connection).has_table(identity["staging"], schema=schema):
        staging = sa.table(identity["staging"], sa.column(PARTICIPANT), schema=schema)
        connection.execute(staging.delete().where(staging.c[PARTICIPANT] == tag(text)))


def in_doubt(connection: Connection, ledger: Ledger, job: str, sink: str) -> list[Identity]:
    """What the ledger has as staged and undecided."""
    t = ledger.table.c
    mine = (t.job == token(job), t.sink == token(sink), t.committed.is_(None))
    query = sa.select(t.transaction_id, t.staging).where(*mine).order_by(t.transaction_id)
    return [identity_of(row.transaction_id, row.staging) for row in connection.execute(query)]


# ---------------------------------------------------------------------- the move
def _by_table(
    connection: Connection, plan: Plan, committables: Sequence[Committable]
) -> list[tuple[sa.Table, list[str]]]:
    """The staging tables that are there (nearly always one), each with the tags of its participants."""
    tags: dict[str, list[str]] = {}
    for c in committables:
        tags.setdefault(c.transaction["staging"], []).append(tag(c.transaction["transaction_id"]))
    tables = []
    for name, its in tags.items():
        if plan.staging is not None and plan.staging.name == name:
            known = plan.staging
            if sa.inspect(connection).has_table(name, schema=known.schema):
                tables.append((known, its))
        else:
            try:
                schema = plan.target.schema
                found = sa.Table(name, sa.MetaData(), schema=schema, autoload_with=connection, resolve_fks=False)
            except exc.NoSuchTableError:
                continue
            tables.append((found, its))
    return tables


def _gathered(connection: Connection, staged: Sequence[tuple[sa.Table, list[str]]]) -> tuple[sa.Table, list[str]]:
    """All rows of the checkpoint in one staging table. They are in two if the target's columns were altered before a
    lost participant was written again."""
    (into, tags), *others = staged
    for table, its in others:
        mine = table.c[PARTICIPANT].in_(its)
        connection.execute(into.insert().from_select(table.columns.keys(), sa.select(table).where(mine)))
        connection.execute(table.delete().where(mine))
        tags = [*tags, *its]
    return into, tags


def _counts(connection: Connection, staging: sa.Table, tags: Sequence[str]) -> dict[str, int]:
    by = staging.c[PARTICIPANT]
    rows = connection.execute(sa.select(by, sa.func.count()).where(by.in_(tags)).group_by(by))
    return {row[0]: row[1] for row in rows}


def _once(connection: Connection, plan: Plan, merge: MergeOptions, staging: sa.Table, tags: Sequence[str]) -> None:
    """Raise BadValue if a key comes twice and nothing tells which row is the last one."""
    if merge.mode == "append" or merge.order_by:
        return
    keys = [staging.c[key] for key in merge.keys]
    twice = sa.select(*keys, sa.func.count()).where(staging.c[PARTICIPANT].in_(tags))
    row = connection.execute(twice.group_by(*keys).having(sa.func.count() > 1).limit(1)).first()
    if row:
        key = f"({', '.join(merge.keys)}) = ({', '.join(map(str, row[:-1]))})"
        raise BadValue(
            f"table {plan.target.fullname}: two changes of one key in a batch, and no order_by=: {key} comes {row[-1]} "
            "times in the batch"
        )


def _move(
    connection: Connection, target: sa.Table, merge: MergeOptions, staging: sa.Table, tags: Sequence[str]
) -> None:
    """Put the staged rows into the target and delete them here: all, or the last one of each key in place of the row
    that the target has."""
    mine = staging.c[PARTICIPANT].in_(tags)
    written = merge.written([c.name for c in staging.columns if c.name != PARTICIPANT], target.columns.keys())
    rows = sa.select(*(staging.c[name] for name in written)).where(mine)
    if merge.mode == "upsert":
        connection.execute(target.delete().where(_in_batch(target, merge, staging, mine)))
        rows = _last(merge, staging, mine, written)
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


def _last(
    merge: MergeOptions, staging: sa.Table, mine: sa.ColumnElement[bool], written: Sequence[str]
) -> sa.Select[tuple[object, ...]]:
    """The last change of each key, by the greatest `order_by`, NULLs first; of equals a delete wins."""
    deletes: sa.ColumnElement[int] = sa.literal(0)
    if merge.delete_marker:
        deletes = sa.case((sa.type_coerce(staging.c[merge.delete_marker], sa.Boolean) == sa.literal(True), 1), else_=0)
    order: list[sa.ColumnElement[object]] = []
    if merge.order_by:
        by = staging.c[merge.order_by]
        order = [sa.case((by.is_(None), 1), else_=0), by.desc()]
    number = sa.func.row_number().over(
        partition_by=[staging.c[key] for key in merge.keys], order_by=[*order, deletes.desc()]
    )
    columns = [staging.c[name] for name in written]
    last = sa.select(*columns, number.label("tpc_place"), deletes.label("tpc_deletes")).where(mine).subquery()
    kept = (last.c.tpc_place == 1, last.c.tpc_deletes == 0)
    return sa.select(*(last.c[name] for name in written)).where(*kept)
