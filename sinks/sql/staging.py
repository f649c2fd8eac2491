"""Staging tables, and the move of their rows into the target.

This is the part of the strategy `sinks.sql.strategies.StagingTables` that differs between kinds of
databases.
"""

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
from sinks.sql.names import staging_table
from sinks.sql.server import ConnectionT, Fault, Row
from sinks.sql.table import Column
from sinks.sql.transaction import Plan, RowTransaction
from sinks.transaction import TransactionContext

logger = get_logger(__name__)

ColumnT = TypeVar("ColumnT", bound=Column)
_COUNTED_TOGETHER = 50
"""The number of staging tables that one statement counts."""


class Staging(ABC, Generic[ConnectionT, TargetT]):
    """Make staging tables in tasks, and move their rows on the driver.

    The move runs in the transaction that the caller has begun.
    """

    DROPPED_TOGETHER: ClassVar[int] = 1
    """The number of staging tables that one transaction drops."""
    MOVED_TOGETHER: ClassVar[int] = 1
    """The number of staging tables that go into the target by one INSERT. If the table refers to
    itself, all of them do, because at the end of the statement a row may refer to a row of another
    staging table."""

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
        """Open the transaction of one partition, which writes into a new `plan.staging_table`.

        The table tells the transaction's ID from its first moment on. It has exactly the columns of
        the batch, including the columns that are only for the merge. Where the target has a column
        as NOT NULL, only a row that deletes may leave the column out, and never a key. The identity
        is `sinks.sql.strategies.identity_of`.
        """

    def add_part(
        self,
        transaction: RowTransaction[ConnectionT],
        plan: Plan[ConnectionT, TargetT],
        context: TransactionContext,
    ) -> RowTransaction[ConnectionT]:
        """Let an open transaction write into a further staging table, as `stage` makes them.

        Return its part for the table. It is needed where rows name their tables.
        """
        raise NotImplementedError

    def unstageable(
        self, connection: ConnectionT, target: TargetT, batch: pa.Schema
    ) -> Iterable[str]:
        """Yield why there can be no staging table for rows of `batch`, and what to do.

        The rows fit the target. By default, there can be a staging table wherever there is a
        target.
        """
        return ()

    def choose_columns(
        self, known: Iterable[ColumnT], batch: pa.Schema, extra: Callable[[pa.Field], ColumnT]
    ) -> list[ColumnT]:
        """Choose the columns of a staging table.

        These are the columns of the target (`known`) that are written, with keys as NOT NULL, and
        the columns that only the merge looks at, as `extra` makes them. Raises SchemaMismatch.
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
        """Lock the target until the running transaction ends, and return the move into it.

        Nobody can change the target meanwhile. The move has the target as the running transaction
        sees it. What is new in the table may bind rows that the staging tables took, so the move
        treats it as a constraint. Raises ConfigurationError if the rows of these staging tables
        cannot go into the target as they are; the error says what was changed, and what to change
        back.
        """
        known = plan.target
        types = sorted({column for columns in staged.values() for column in columns.items()})
        written = self.merge.written(list(dict(types)), known.names)
        not_locked = self.lock(connection, plan, written)
        target = self.catalog.describe(connection, known.schema, known.name)
        reasons = [f"it is gone: create it again as it was, columns {', '.join(known.names)}"]
        if target is not None:
            tables = [self.dialect.quote(known.schema, name) for name in staged]
            # this includes what was added for the merge meanwhile
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
        """Let nobody alter the table until the transaction ends; return why if that cannot be.

        By default an INSERT of no rows does this, as far as the database has a lock for it.
        """
        table = self.dialect.quote(plan.target.schema, plan.target.name)
        known = [name for name in written if name in plan.target.names]
        rows = f"SELECT {self.dialect.quoted(known)} FROM {table} WHERE 1 = 0"
        self.server.execute(connection, f"{self.dialect.into(plan.target, known)} {rows}")
        return None

    def changes_since(self, connection: ConnectionT, move: Move[TargetT]) -> Iterable[str]:
        """Yield what else keeps rows out of the locked table.

        An example is a NULL that the table would replace by a number. By default there is nothing
        else.
        """
        return ()

    def constraints(self, connection: ConnectionT, move: Move[TargetT]) -> list[str]:
        """List what only the target itself can judge of rows.

        If there is anything, a move is tried before the commit decision.
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
        """Try what tells more than a look at the table did, such as an insert of one row.

        By default nothing tells more.
        """
        return

    def first_duplicate(
        self, connection: ConnectionT, move: Move[TargetT], columns: Sequence[str]
    ) -> Row | None:
        """Find values of these columns that several staged rows have, and count the rows."""
        return next(
            iter(self.server.query(connection, self.dialect.duplicates(move, columns))), None
        )

    def first_tie(self, connection: ConnectionT, move: Move[TargetT]) -> Row | None:
        """Find a key and an `order_by` by which nobody can tell the last change.

        Such changes are in two or more partitions. The last value counts the changes. The search
        has two steps, since most batches have no changes that are equal by `order_by`.
        """
        if len(move.tables) < 2 or not self.server.query(
            connection, self.dialect.equals_in_two_partitions(move)
        ):
            return None
        return next(iter(self.server.query(connection, self.dialect.ties(move))), None)

    def count(self, connection: ConnectionT, move: Move[TargetT], rows: int | None) -> None:
        """Raise SinkError if the staging tables do not hold this many rows.

        If `rows` is None, they may hold any number.
        """
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
                "somebody changed one, or emptied the ledger"
            )

    # ------------------------------------------------------------------ the move
    def append(self, connection: ConnectionT, move: Move[TargetT], rows: int | None) -> None:
        """Put the rows of all staging tables into the target, in the caller's transaction.

        Raises SinkError if there are not `rows` of them, and the driver's error if the target
        refuses a row.
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

    def upsert(self, connection: ConnectionT, move: Move[TargetT]) -> None:
        """Put the last change of each key into the target, in the caller's transaction.

        By default this is `delete`, then `put`. Where a database does it in another way, the sinks
        with one database cannot commit as one.
        """
        self.delete(connection, move)
        self.put(connection, move)

    def put(self, connection: ConnectionT, move: Move[TargetT]) -> None:
        """Put the last change of each key into the target, except for deletes."""
        raise NotImplementedError

    def delete(self, connection: ConnectionT, move: Move[TargetT]) -> None:
        """Delete the rows whose last change is a delete.

        In a table that refers to itself, other rows may still refer to the deleted rows. The
        database would refuse the DELETE then, or a cascade would take the other rows too. So the
        rows that move away go first, and of the rows that are deleted those to which none of the
        others refers.
        """
        if not self.merge.delete_marker:
            return
        last = self.dialect.last(move)
        for statement in self.dialect.move_away(move, last):
            self.server.execute(connection, statement)
        if leaves := self.dialect.deletes_of_leaves(move, last):
            while self.server.execute(connection, leaves):
                pass
        self.server.execute(connection, self.dialect.deletes(move, last))

    def of_move(self, target: TargetT, error: Exception) -> Fault | None:
        """Tell what an error of the move is about.

        If an upsert meets a value of another row, the fault also says what to do if the other row
        gives the value up in the same batch.
        """
        fault = self.server.fault(error)
        if fault is None or not fault.clash or self.merge.mode != "upsert":
            return fault
        keeps = keeps_rows(target)
        why = f", because of {keeps[0]}" if keeps else ""
        advice = f"; to swap the value with another row, use two checkpoints{why}"
        return replace(fault, advice=fault.advice + advice)

    # ------------------------------------------------------------------ afterwards
    def mark_moved(self, connection: ConnectionT, schema: str, names: Sequence[str]) -> None:
        """Make sure that tables whose rows were moved are never moved again.

        This runs in the transaction of the move. The tables are dropped, or get another number of
        rows. Then a later move fails because it counts the rows, even if the ledger was emptied. By
        default the tables are left without rows.
        """
        for name in names:
            self.server.execute(connection, f"DELETE FROM {self.dialect.quote(schema, name)}")

    def tables_of(self, connection: ConnectionT, schema: str, ids: Sequence[str]) -> list[str]:
        """List the staging tables that these transactions have now, sorted.

        By default a transaction has one.
        """
        return sorted(
            self.catalog.existing(connection, schema, [staging_table(text) for text in ids])
        )

    @abstractmethod
    def staged(self, connection: ConnectionT, schema: str, prefix: str) -> list[str]:
        """List the transaction IDs that begin with `prefix` and have a staging table, sorted.

        This includes the tables of tasks that died before their pre-commit, and of partitions that
        were moved.
        """

    def drop(self, connection: ConnectionT, schema: str, names: Sequence[str]) -> None:
        """Drop staging tables, outside a transaction."""
        for some in batches(names, self.DROPPED_TOGETHER):
            tables = ", ".join(self.dialect.quote(schema, name) for name in some)
            with self.server.transaction(connection):
                self.server.execute(connection, f"DROP TABLE {tables}")

    def drop_unused(self, connection: ConnectionT, schema: str, names: Sequence[str]) -> None:
        """Drop those staging tables that nobody reads now. The next sweep drops the others."""
        for some in batches(names, self.DROPPED_TOGETHER):
            try:
                self.drop(connection, schema, some)
            except Exception as error:
                if (fault := self.server.fault(error)) is None:
                    raise
                # a table that cannot be dropped must not keep the others
                if len(some) > 1 and fault.kind != "blocked":
                    for name in some:
                        self.drop_unused(connection, schema, [name])
                    continue
                logger.warning(
                    "staging tables in %s were moved and could not be dropped yet: %s",
                    schema,
                    fault.text,
                )
