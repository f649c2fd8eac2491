"""Staging tables, and the move of their rows into the target: what one kind of database does for
the strategy `sinks.sql.strategies.StagingTables`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

import pyarrow as pa

from sinks._util.log import get_logger
from sinks.errors import ConfigurationError, SinkError
from sinks.sql.catalog import Catalog, ColumnTypes, declarations
from sinks.sql.dialect import Move, TargetT, batches, keeps_rows
from sinks.sql.server import ConnectionT, Fault, Row
from sinks.sql.table import Column
from sinks.sql.transaction import Plan, RowTransaction
from sinks.transaction import TransactionContext

logger = get_logger(__name__)

ColumnT = TypeVar("ColumnT", bound=Column)
_COUNTED_TOGETHER = 50
"""How many staging tables one statement counts."""


class Staging(ABC, Generic[ConnectionT, TargetT]):
    """Make staging tables in tasks, and move their rows on the driver, in the transaction that the
    caller has begun."""

    DROPPED_TOGETHER: ClassVar[int] = 1
    """So many staging tables go in one transaction."""
    MOVED_TOGETHER: ClassVar[int] = 1
    """So many go into the target by one INSERT. All do if the table refers to itself: at the end of
    the statement a row may refer to another one of them."""
    HANDED_ON: ClassVar[str] = (
        "can hand it on only in an index over whole columns that the batch has"
    )
    """Follows "an upsert" in messages: in which unique indexes its rows hand on a value."""

    def __init__(self, catalog: Catalog[ConnectionT, TargetT]) -> None:
        self.catalog = catalog
        self.server = catalog.server
        self.dialect = catalog.dialect
        self.merge = catalog.merge

    # ------------------------------------------------------------------ in the task
    @abstractmethod
    def stage(
        self, plan: Plan[ConnectionT, TargetT], context: TransactionContext
    ) -> RowTransaction[ConnectionT]:
        """Open the participant's transaction, which writes into a new table, its
        `staging_table`.

        The table tells the transaction's id from its first moment on. It has just the columns of
        the batch, also those that are only for the merge; what the target has as NOT NULL only a
        row that deletes may leave out, but for its keys. The identity is
        `sinks.sql.strategies.identity_of`.
        """

    def unstageable(
        self, connection: ConnectionT, target: TargetT, batch: pa.Schema
    ) -> Iterable[str]:
        """Tell why there can be no staging table for rows of `batch`, which fit the target, and
        what to do. Default: there can be one wherever there is a target."""
        return ()

    def columns(
        self, known: Iterable[ColumnT], batch: pa.Schema, extra: Callable[[pa.Field], ColumnT]
    ) -> list[ColumnT]:
        """Choose the columns of a staging table.

        These are the target's columns (`known`) that are written, keys as NOT NULL; and those that
        only the merge looks at, as `extra` makes them. Raises SchemaMismatch.
        """
        of_target = list(known)
        written = self.merge.written(batch.names, [column.name for column in of_target])
        keys = self.merge.keys
        columns = [
            replace(c, nullable=c.nullable and c.name not in keys)
            for c in of_target
            if c.name in written
        ]
        others = declarations((field for field in batch if field.name not in written), extra)
        return columns + [column for _, column in others]

    # ------------------------------------------------------------------ before the decision
    def locked(
        self, connection: ConnectionT, plan: Plan[ConnectionT, TargetT], staged: ColumnTypes
    ) -> Move[TargetT]:
        """Lock the target, as the running transaction sees it, against changes until its end.

        Raises ConfigurationError that says what was changed, and what to change back, if the rows
        of these staging tables cannot go into it as they are. What is new in the table may bind
        rows that the staging tables took, so it is a constraint.
        """
        known = plan.target
        types = sorted({column for columns in staged.values() for column in columns.items()})
        written = self.merge.written(list(dict(types)), known.names)
        not_locked = self.lock(connection, plan, written)
        target = self.catalog.describe(connection, known.schema, known.name)
        reasons = [f"it is gone: create it again as it was, columns {', '.join(known.names)}"]
        if target is not None:
            tables = [self.dialect.quote(known.schema, name) for name in staged]
            # also what was added for the merge meanwhile
            columns = self.merge.written(list(dict(types)), target.names)
            move = Move(target, list(staged), tables, columns, dict(types))
            reasons = [*target.unfit(list(dict.fromkeys([*written, *columns])), types)]
            if self.merge.keys and not target.is_unique(self.merge.keys):
                keys = ", ".join(self.merge.keys)
                there = "".join(f"; {what}" for what in target.no_arbiters(self.merge.keys))
                reasons.append(
                    f"it has no unique index on ({keys}) any more that upserts can go by{there}: "
                    "undo that"
                )
            reasons = (
                reasons
                or [*self.changes_since(connection, move)]
                or ([not_locked] if not_locked else [])
            )
        if reasons or target is None:
            raise ConfigurationError(
                f"table {known.label} was changed while the query ran: {'; '.join(reasons)}"
            )
        self.catalog.require_known_triggers(connection, known)
        if target == known:
            return move
        return replace(
            move,
            target=replace(target, constraints=(*target.constraints, "what is new in the table")),
        )

    def lock(
        self, connection: ConnectionT, plan: Plan[ConnectionT, TargetT], written: Sequence[str]
    ) -> str | None:
        """Let nobody alter the table until the transaction ends; or tell why that cannot be.

        Default: by an INSERT of no rows, as far as the database has a lock for it.
        """
        table = self.dialect.quote(plan.target.schema, plan.target.name)
        known = [name for name in written if name in plan.target.names]
        rows = f"SELECT {self.dialect.quoted(known)} FROM {table} WHERE 1 = 0"
        self.server.execute(connection, f"{self.dialect.into(plan.target, known)} {rows}")
        return None

    def changes_since(self, connection: ConnectionT, move: Move[TargetT]) -> Iterable[str]:
        """Tell what else keeps rows out of the locked table, such as a NULL that it would take for
        a number. Default: nothing."""
        return ()

    def constraints(self, connection: ConnectionT, move: Move[TargetT]) -> list[str]:
        """List what only the target itself can judge of rows.

        If there is any, a move is tried before the decision.
        """
        target = move.target
        written = set(move.written)
        upsert = self.merge.mode == "upsert"
        differing = {
            c.name for c in target.columns if c.counter or (c.nullable and not c.has_default)
        } - written
        reasons = list(target.constraints)
        for unique in target.uniques:
            columns = set(unique.columns)
            is_judged = (
                columns == set(self.merge.keys)
                if upsert
                else columns <= written and not unique.nulls_equal
            )
            may_clash = (
                not columns & differing or unique.nulls_equal or (upsert and columns & written)
            )
            if (unique.period or not is_judged) and may_clash:
                reasons.append(f"index {unique.name}")
        return reasons + (list(target.referenced_by) if upsert else [])

    def try_out(self, connection: ConnectionT, move: Move[TargetT]) -> None:
        """Try what tells more than a look at the table did, such as to insert one row.

        Default: nothing does.
        """
        return

    def first_duplicate(
        self, connection: ConnectionT, move: Move[TargetT], columns: Sequence[str]
    ) -> Row | None:
        """Find values of these columns that more than one staged row has, and how many have
        them."""
        return next(
            iter(self.server.query(connection, self.dialect.duplicates(move, columns))), None
        )

    def first_tie(self, connection: ConnectionT, move: Move[TargetT]) -> Row | None:
        """Find key and `order_by` of changes in two or more partitions of which nobody can tell
        which is the last, and how many these are. In two steps, since most batches have no changes
        that are equal by `order_by`."""
        if len(move.tables) < 2 or not self.server.query(
            connection, self.dialect.equals_in_two_partitions(move)
        ):
            return None
        return next(iter(self.server.query(connection, self.dialect.ties(move))), None)

    def count(self, connection: ConnectionT, move: Move[TargetT], rows: int | None) -> None:
        """Raise SinkError if the staging tables do not hold so many rows; None: they may hold any
        number."""
        staged = 0
        for some in batches(move.tables, _COUNTED_TOGETHER):
            counts = (f"SELECT count(*) AS n FROM {table}" for table in some)
            ((count,),) = self.server.query(
                connection, f"SELECT sum(n) FROM ({' UNION ALL '.join(counts)}) counted"
            )
            staged += int(count)
        if rows not in (staged, None):
            raise SinkError(
                f"the staging tables hold {staged} rows, and their tasks acknowledged {rows}: "
                "somebody changed one, or emptied the ledger after they were moved"
            )

    # ------------------------------------------------------------------ the move
    def append(self, connection: ConnectionT, move: Move[TargetT], rows: int | None) -> None:
        """Put the rows of all staging tables into the target, in the caller's transaction.

        Raises SinkError if there are not `rows` of them, the driver's error if the target refuses
        one.
        """
        into = self.dialect.into(move.target, move.written)
        names = self.dialect.quoted(move.written)
        moved = 0
        for some in batches(
            move.tables, len(move.tables) if move.target.own_keys else self.MOVED_TOGETHER
        ):
            moved += self.server.execute(connection, f"{into} {self.dialect.union(some, names)}")
        # by a trigger or rule of the target, or because somebody changed a staging table
        if moved != rows:
            self.count(connection, move, rows)

    @abstractmethod
    def upsert(self, connection: ConnectionT, move: Move[TargetT]) -> None:
        """Put the last change of each key into the target, in the caller's transaction."""

    def delete(self, connection: ConnectionT, move: Move[TargetT], last: str) -> None:
        """Delete the rows whose last change is a delete.

        In a table that refers to itself, the database would refuse that, or a cascade would take
        rows, while others still refer to them: those that move away go first, and of those that are
        deleted the ones to which none of the others refers.
        """
        if not self.merge.delete_marker:
            return
        for statement in self.dialect.move_away(move, last):
            self.server.execute(connection, statement)
        if leaves := self.dialect.deletes_of_leaves(move, last):
            while self.server.execute(connection, leaves):
                pass
        self.server.execute(connection, self.dialect.deletes(move, last))

    def of_move(self, target: TargetT, error: Exception) -> Fault | None:
        """Tell what an error of the move is about.

        Of an upsert that meets a value of another row it says when rows of one batch can hand the
        value on.
        """
        fault = self.server.fault(error)
        if fault is None or not fault.clash or self.merge.mode != "upsert":
            return fault
        keeps = keeps_rows(target)
        why = f"cannot hand it on in this table, because of {keeps[0]}" if keeps else self.HANDED_ON
        advice = (
            f"; if a row of the same batch gives this value up, an upsert {why}. Let that row give "
            "it up in an earlier checkpoint"
        )
        return replace(fault, advice=fault.advice + advice)

    # ------------------------------------------------------------------ afterwards
    def mark_moved(self, connection: ConnectionT, schema: str, names: Sequence[str]) -> None:
        """Drop these tables, whose rows were moved in the running transaction, or leave them
        another number of rows: they fail the count then, and are never moved twice, even if the
        ledger is emptied. Default: no rows."""
        for name in names:
            self.server.execute(connection, f"DELETE FROM {self.dialect.quote(schema, name)}")

    @abstractmethod
    def staged(self, connection: ConnectionT, schema: str, prefix: str) -> list[str]:
        """List the transaction ids of all staging tables that begin so, sorted: those of tasks that
        died before their pre-commit, and of participants that were moved, too."""

    def drop(self, connection: ConnectionT, schema: str, names: Sequence[str]) -> None:
        """Drop staging tables, outside a transaction."""
        for some in batches(names, self.DROPPED_TOGETHER):
            tables = ", ".join(self.dialect.quote(schema, name) for name in some)
            with self.server.transaction(connection):
                self.server.execute(connection, f"DROP TABLE {tables}")

    def drop_unused(self, connection: ConnectionT, schema: str, names: Sequence[str]) -> None:
        """Drop those that nobody reads now. The next sweep drops the others."""
        for some in batches(names, self.DROPPED_TOGETHER):
            try:
                self.drop(connection, schema, some)
            except Exception as error:
                if (fault := self.server.fault(error)) is None:
                    raise
                # one that cannot be dropped keeps no other
                if len(some) > 1 and fault.kind != "blocked":
                    for name in some:
                        self.drop_unused(connection, schema, [name])
                    continue
                logger.warning(
                    "staging tables in %s were moved and could not be dropped yet: %s",
                    schema,
                    fault.text,
                )
