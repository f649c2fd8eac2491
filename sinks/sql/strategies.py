"""The strategies `TwoPhase` and `StagingTables`.

They decide how rows become visible, and how outcomes are told. Methods that are named as in
`sinks.base` do the same. `routes` are what the sink has found out about its server and tables.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic

from sinks._util.log import get_logger
from sinks._util.progress import progress
from sinks.errors import (
    BadValue,
    CommittedError,
    ConfigurationError,
    SinkError,
    TransactionBlocked,
    TransactionEnded,
)
from sinks.sql.backend import Backend
from sinks.sql.catalog import order_by_foreign_keys
from sinks.sql.databases import JUDGE_LATER, JUDGE_NOW
from sinks.sql.dialect import Move, TargetT
from sinks.sql.ledger import Ledger
from sinks.sql.names import columns_digest, label, of_sink, staging_table, target_named
from sinks.sql.prepared import NotEnded
from sinks.sql.routes import Route, Routes, parts_of, proof_of, staging_tables, text_of
from sinks.sql.server import ConnectionT, Fault, Row, explained
from sinks.sql.transaction import Plan, RowTransaction
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    Committable,
    Fingerprint,
    Identity,
    TransactionId,
)

logger = get_logger(__name__)


class Strategy(Generic[ConnectionT, TargetT]):
    """The parts that `TwoPhase` and `StagingTables` share."""

    def __init__(self, backend: Backend[ConnectionT, TargetT]) -> None:
        self.server = backend.server
        self.dialect = backend.dialect
        self.catalog = backend.catalog
        self.staging = backend.staging
        self.prepared = backend.prepared
        self.merge = backend.merge

    def finish(
        self, transaction: RowTransaction[ConnectionT], routes: Routes[ConnectionT, TargetT]
    ) -> int:
        """Wait until every row is judged, and return how many rows there were.

        Raises ConfigurationError if the rows went into another database than the one that the query
        began with.
        """
        rows = transaction.finish()
        with transaction.explained():
            routes.ledger.require_same(transaction.connection)
        return rows

    def proof(
        self, transaction: RowTransaction[ConnectionT], routes: Routes[ConnectionT, TargetT]
    ) -> dict[str, object]:
        """Return what committables carry.

        It says which ledger speaks for them, and what their rows were written for.
        """
        by_key = routes.by_key
        parts = {
            key: {"target": by_key[key].destination, **self.part_proof(part, key)}
            for key, part in transaction.parts.items()
        }
        return routes.ledger.proof() | proof_of(parts)

    def part_proof(self, part: RowTransaction[ConnectionT], key: str) -> dict[str, object]:
        """Return what a committable carries of one table besides its target."""
        return {}


class TwoPhase(Strategy[ConnectionT, TargetT]):
    """The strategy in which each partition has a transaction of its own on the target.

    The task prepares the transaction, and the driver ends it by its name.
    """

    def finish(
        self, transaction: RowTransaction[ConnectionT], routes: Routes[ConnectionT, TargetT]
    ) -> int:
        rows = super().finish(transaction, routes)
        by_key = routes.by_key
        with transaction.explained():
            for key in transaction.parts:
                self.catalog.require_known_triggers(transaction.connection, by_key[key].target)
        return rows

    def pre_commit(
        self, transaction: RowTransaction[ConnectionT], routes: Routes[ConnectionT, TargetT]
    ) -> Committable:
        """Write the ledger row into the transaction, and prepare it.

        Since both are in the same transaction, the ledger row becomes visible if and only if the
        rows do. Raises TransactionEnded if the ledger has a row or a tombstone of the transaction
        already.
        """
        rows = self.finish(transaction, routes)
        text = transaction.context.transaction_id
        ledger = routes.ledger
        key = self.prepared.key(transaction.identity)
        fingerprints = (
            {key: replace(transaction.fingerprint, rows=rows)} if transaction.fingerprint else None
        )
        with transaction.explained():
            proof = self.proof(transaction, routes) | self.prepared.evidence(transaction)
            names = {key: TransactionId.parse(text)}
            if not ledger.insert(
                transaction.connection, names, committed=True, fingerprints=fingerprints
            ):
                raise TransactionEnded(f"{text} was aborted, or used, before it was pre-committed")
        transaction.prepare()
        return Committable(transaction.identity, proof=proof)

    def commit_directly(
        self, transaction: RowTransaction[ConnectionT], routes: Routes[ConnectionT, TargetT]
    ) -> None:
        self.finish(transaction, routes)
        transaction.commit()

    def commit(
        self, routes: Routes[ConnectionT, TargetT], committables: Sequence[Committable]
    ) -> list[CommitOutcome]:
        """Commit one partition.

        The checkpoint's other partitions are committed by calls of their own.
        """
        [committable] = committables
        with self.server.lend() as connection:
            try:
                if self.prepared.end(
                    connection, routes.ledger, "COMMIT", committable.transaction, committable.proof
                ):
                    return [CommitOutcome.COMMITTED]
            except (ConfigurationError, NotEnded) as refused:
                return [CommitOutcome.unknown(str(refused))]
            return [self._outcome_of_gone(connection, routes, committable)]

    def whereabouts(self, committables: Sequence[Committable]) -> str:
        """Tell where the rows are, for a person who looks for them."""
        return "It was there when the rows were prepared"

    def _outcome_of_gone(
        self,
        connection: ConnectionT,
        routes: Routes[ConnectionT, TargetT],
        committable: Committable,
    ) -> CommitOutcome:
        """Return the outcome of a transaction that is not prepared.

        It was committed, or rolled back by somebody else, or is not prepared yet. The ledger tells
        which; if it has nothing of the transaction, a tombstone makes the loss final.
        """
        ledger = routes.ledger
        key = self.prepared.key(committable.transaction)
        witnessed = key in ledger.witness.states(connection, [key])
        committed = ledger.states(connection, [key]).get(key)
        if committed is None:
            proof = committable.proof
            reason = ledger.contradiction(connection, proof, witnessed=witnessed)
            if reason or (reason := self.prepared.contradiction(connection, proof)):
                return CommitOutcome.unknown(
                    f"{key} is no longer prepared at {self.server}, and {_look_for_rows(reason)}"
                )
            tombstone = {key: TransactionId.parse(proof.get("transaction_id", key))}
            with self.server.transaction(connection):
                ledger.insert(connection, tombstone, committed=False)
            committed = ledger.states(connection, [key])[key]
        if committed:
            return CommitOutcome.COMMITTED
        lost = (
            f"{key} was rolled back by somebody else: it is not prepared any more, and the ledger "
            f"{ledger.label} has a tombstone in place of its row"
        )
        if astray := routes.astray(committable):
            return CommitOutcome.unknown(f"{lost}; {astray}")
        return CommitOutcome.lost(lost)

    def abort(
        self, connection: ConnectionT, ledger: Ledger[ConnectionT], identity: Identity
    ) -> None:
        key = self.prepared.key(identity)
        ended = self.prepared.end(connection, ledger, "ROLLBACK", identity, {})
        if not ended and ledger.states(connection, [key]).get(key):
            raise CommittedError(f"{key} is committed: the ledger {ledger.label} has its row")


@dataclass(frozen=True)
class Share(Generic[ConnectionT, TargetT]):
    """What one sink has staged of a checkpoint.

    The shares of several sinks with one database are moved in one transaction. The strategy of any
    of these sinks does so, on a connection of its own.
    """

    strategy: StagingTables[ConnectionT, TargetT]
    routes: Routes[ConnectionT, TargetT]
    committables: Sequence[Committable]
    there: Collection[str] | None = None
    """The staging tables of the committables that exist, if that is known."""

    @property
    def tables(self) -> list[TableShare[ConnectionT, TargetT]]:
        """What is staged for each table."""
        shares = []
        for route in self.routes.all:
            key = route.plan.key
            names = dict[str, Committable]()
            for c in self.committables:
                name = route.plan.staging_table(text_of(c))
                # without a proof, nobody knows for which tables the partition has rows
                is_known = key in parts_of(c) if c.proof else not key
                if is_known or (not c.proof and name in (self.there or ())):
                    names[name] = c
            if names:
                shares.append(TableShare(self.strategy.of(route), route.plan, names))
        return shares


@dataclass(frozen=True)
class TableShare(Generic[ConnectionT, TargetT]):
    """What one sink has staged of a checkpoint for one table.

    `staged` has the committable of each staging table.
    """

    strategy: StagingTables[ConnectionT, TargetT]
    plan: Plan[ConnectionT, TargetT]
    staged: Mapping[str, Committable]

    @property
    def table(self) -> tuple[str, str]:
        """Schema and name of the target."""
        return self.plan.target.schema, self.plan.target.name

    @property
    def names(self) -> list[str]:
        """The staging tables."""
        return list(self.staged)

    @property
    def committables(self) -> list[Committable]:
        return list(self.staged.values())

    @property
    def rows(self) -> int | None:
        """How many rows the tasks have acknowledged; None if a committable has no proof."""
        committables = self.committables
        if not all(c.proof for c in committables):
            return None
        parts = (parts_of(c)[self.plan.key].get("rows", c.fingerprint.rows) for c in committables)
        total: int = sum(parts)
        return total


class NotMovable(Exception):
    """The rows of a complete checkpoint cannot be moved, and a retry cannot help.

    `share` is the one at fault, or has the table at fault.
    """

    def __init__(self, reason: str, share: Share[Any, Any] | TableShare[Any, Any]) -> None:
        super().__init__(reason)
        self.share = share

    def is_about(self, share: Share[Any, Any]) -> bool:
        """Tell whether it is the share at fault, or has the table at fault."""
        at_fault = set(map(text_of, self.share.committables))
        return not at_fault.isdisjoint(map(text_of, share.committables))


class TargetRefuses(NotMovable):
    """The target refuses the rows. An operator can help."""


class StagedRowsChanged(NotMovable):
    """The staging tables hold other rows than were acknowledged.

    So the outcome of the rows is unknown.
    """


@dataclass
class _Found(Generic[ConnectionT, TargetT]):
    """What is known of a share in the middle of its commit, by transaction ID."""

    share: Share[ConnectionT, TargetT]
    states: dict[str, bool]
    """What the ledger says."""
    there: set[str] = field(default_factory=set)
    """The staging tables that exist."""
    intact: dict[str, Committable] = field(default_factory=dict)
    """What is undecided, and has its staging tables."""
    lost: list[str] = field(default_factory=list)
    unknown: dict[str, CommitOutcome] = field(default_factory=dict)

    @property
    def may_move(self) -> bool:
        return not self.unknown and all(self.states.values())


class StagingTables(Strategy[ConnectionT, TargetT]):
    """The strategy in which tasks fill staging tables, and the driver moves the rows.

    Tasks commit their rows into staging tables. The driver moves a whole checkpoint in one
    transaction, which also writes the ledger. In between nothing is locked and no transaction is
    open.

    The ledger tells which of the remaining staging tables were moved. Even without the ledger no
    table is moved twice: a move that does not drop a table leaves it with another number of rows,
    and every move counts the rows.
    """

    # ---------------------------------------------------------------- in the task and on the driver
    def transfer(self, connection: ConnectionT, move: Move[TargetT], rows: int | None) -> None:
        """Append or upsert the rows of all staging tables, in the caller's transaction.

        `rows` has the meaning that it has in `Staging.count`.
        """
        with self.server.at_work(connection):
            if self.merge.mode == "append":
                self.staging.append(connection, move, rows)
            else:
                self.staging.count(connection, move, rows)
                self.staging.upsert(connection, move)
            self._judge(connection, JUDGE_NOW)

    def _transfer_all(
        self,
        connection: ConnectionT,
        moves: Sequence[tuple[TableShare[ConnectionT, TargetT], Move[TargetT]]],
        explains: Callable[[TableShare[ConnectionT, TargetT]], AbstractContextManager[None]],
    ) -> None:
        """Transfer the rows of several shares, in an order that satisfies the foreign keys.

        Rows are put into a table before the rows that refer to them, and are deleted after those.
        Constraints that can be deferred judge all rows together at the end. Errors about a share
        are raised inside the context that `explains` the share.
        """
        if len(moves) == 1:
            [(share, move)] = moves
            with explains(share):
                share.strategy.transfer(connection, move, share.rows)
            return
        ordered = order_by_foreign_keys(moves, lambda each: each[1].target)
        upserts = [each for each in ordered if each[0].strategy.merge.mode == "upsert"]
        late = _deleted_last(ordered)
        with self.server.at_work(connection):
            self._judge(connection, JUDGE_LATER)
            for share, move in reversed(upserts):
                with explains(share):
                    share.strategy.staging.count(connection, move, share.rows)
                    if share.table not in late:
                        share.strategy.staging.delete(connection, move)
            for share, move in ordered:
                with explains(share):
                    if share.strategy.merge.mode == "append":
                        share.strategy.staging.append(connection, move, share.rows)
                    else:
                        share.strategy.staging.put(connection, move)
            for share, move in reversed(upserts):
                if share.table in late:
                    with explains(share):
                        share.strategy.staging.delete(connection, move)
            self._judge(connection, JUDGE_NOW)

    def _judge(self, connection: ConnectionT, when: Mapping[str, str]) -> None:
        if statement := when.get(self.dialect.name):
            self.server.execute(connection, statement)

    def require_unique(self, connection: ConnectionT, move: Move[TargetT]) -> None:
        """Raise BadValue if rows of one checkpoint exclude each other.

        An append must not break a unique index, as far as that can be told without writing. In an
        upsert, it must be clear which change of a key is the last one.
        """
        if self.merge.mode == "upsert":
            if not self.merge.order_by:
                self._twice(
                    connection,
                    move,
                    self.merge.keys,
                    "two changes of one key in a batch, and no order_by=",
                )
            elif not self.dialect.POSITION:
                ordered = [*self.merge.keys, self.merge.order_by]
                self._twice(
                    connection, move, ordered, "two changes of one key with an equal order_by"
                )
            elif row := self.staging.first_tie(connection, move):
                self._refuse_tie(move, row)
            return
        for unique in move.target.uniques:
            if set(unique.columns) <= set(move.written):
                rule = f'unique index "{unique.name}"'
                self._twice(connection, move, unique.columns, rule)
                self._taken(connection, move, unique.columns, rule)

    def _twice(
        self, connection: ConnectionT, move: Move[TargetT], columns: Sequence[str], rule: str
    ) -> None:
        if row := self.staging.first_duplicate(connection, move, columns):
            clash = f"{_key(columns, row)} comes {row[-1]} times in the batch"
            raise BadValue(f"table {move.target.label}: {rule}: {clash}")

    def _refuse_tie(self, move: Move[TargetT], row: Row) -> None:
        keys = _key(self.merge.keys, row)
        by = self.merge.order_by
        raise BadValue(
            f"table {move.target.label}: {row[-1]} partitions have different changes of the key "
            f"{keys}, all with {by} = {row[-2]}. Order by a column that no two changes of a key "
            "share, or let all changes of a key come in one partition"
        )

    def _taken(
        self, connection: ConnectionT, move: Move[TargetT], columns: Sequence[str], rule: str
    ) -> None:
        for row in self.server.query(connection, self.dialect.taken(move, columns)):
            raise BadValue(
                f"table {move.target.label}: {rule}: {_key(columns, row)} is in the table already"
            )

    def of(self, route: Route[ConnectionT, TargetT]) -> StagingTables[ConnectionT, TargetT]:
        """Return the strategy for one of the tables that rows name; it is this one without names.

        Each of these tables has keys and a mode of its own.
        """
        return StagingTables(route.backend) if route.plan.key else self

    # ------------------------------------------------------------------ in the task
    def pre_commit(
        self, transaction: RowTransaction[ConnectionT], routes: Routes[ConnectionT, TargetT]
    ) -> Committable:
        staged = self.finish(transaction, routes)
        given = transaction.fingerprint
        if given and staged != given.rows:
            raise SinkError(
                f"table {routes.label}: {staged} of {given.rows} rows were staged. A subclass "
                "may not leave rows out: filter before the sink, or by its transform="
            )
        proof = self.proof(transaction, routes)
        transaction.commit()
        return Committable(transaction.identity, proof=proof)

    def part_proof(self, part: RowTransaction[ConnectionT], key: str) -> dict[str, object]:
        """Return the digest of the columns and, if rows name their tables, the number of rows."""
        columns = columns_digest(part.context.schema.names)
        return {"columns": columns, "rows": part.finish()} if key else {"columns": columns}

    def commit_directly(
        self, transaction: RowTransaction[ConnectionT], routes: Routes[ConnectionT, TargetT]
    ) -> None:
        """Move the rows in the transaction that staged them, at-least-once."""
        rows = self.finish(transaction, routes)
        connection = transaction.connection
        text = transaction.context.transaction_id
        with transaction.explained():
            its = Committable(transaction.identity, proof=self.proof(transaction, routes))
            tables = Share(self, routes, [its.of("", 0, Fingerprint(rows))]).tables

            def explains(share: TableShare[ConnectionT, TargetT]) -> AbstractContextManager[None]:
                return nullcontext()

            moves = self._locked_all(connection, tables, explains)
            for share, move in moves:
                if share.strategy.merge.mode == "upsert":
                    share.strategy.require_unique(connection, move)
            self._transfer_all(connection, moves, explains)
        transaction.commit()
        try:
            with self.server.lend() as connection:
                self.drop_moved(connection, routes.schema, [text])
        except Exception:
            logger.info("staging tables of %s are dropped by the next sweep", text, exc_info=True)

    # ------------------------------------------------------------------ on the driver
    def validate_all(
        self, checkpoint: Checkpoint, shares: Sequence[Share[ConnectionT, TargetT]]
    ) -> None:
        """Raise what would keep the rows from being moved.

        That can be a staging table that is gone, a table that was changed since the rows were
        staged, or values that the table would refuse and no staging table could. A move is tried
        out and rolled back. An append to a table without constraints only looks at the tables, or
        tries one row. So does an upsert with `order_by` to a table that has no constraint but its
        key. But if another table of the move refers to such a table, or has triggers, its rows are
        moved on trial, too.
        """
        where = f"checkpoint {checkpoint.checkpoint_id}"
        tables = [table for share in shares for table in share.tables]

        def explains(share: TableShare[ConnectionT, TargetT]) -> AbstractContextManager[None]:
            target = share.plan.target
            judge = partial(share.strategy.staging.of_move, target)
            return explained(judge, target.label, where)

        with self.server.lend() as connection:
            for table in tables:
                table.strategy._require_staged(connection, table, where)
            judge = partial(self.staging.of_move, tables[0].plan.target)
            with (
                explained(judge, _targets(tables), where),
                self.server.transaction(connection, undo=True),
            ):
                moves = self._locked_all(connection, tables, explains)
                for share, move in moves:
                    with explains(share):
                        share.strategy.require_unique(connection, move)
                if judged := self._judged(connection, moves, explains):
                    self._transfer_all(connection, judged, explains)

    def _judged(
        self,
        connection: ConnectionT,
        moves: Sequence[tuple[TableShare[ConnectionT, TargetT], Move[TargetT]]],
        explains: Callable[[TableShare[ConnectionT, TargetT]], AbstractContextManager[None]],
    ) -> list[tuple[TableShare[ConnectionT, TargetT], Move[TargetT]]]:
        """Choose the moves that only a trial can judge, and try out the others with a row."""
        judged = []
        referred = set[tuple[str, str]]()
        # a trigger may look at any table
        all_count = len(moves) > 1 and any(share.plan.target.triggers for share, _ in moves)
        for share, move in reversed(order_by_foreign_keys(moves, lambda each: each[1].target)):
            staging = share.strategy.staging
            with explains(share):
                if all_count or share.table in referred or staging.constraints(connection, move):
                    judged.append((share, move))
                    referred |= {(key.schema, key.table) for key in move.target.foreign_keys}
                else:
                    staging.try_out(connection, move)
        return judged

    def _require_staged(
        self, connection: ConnectionT, share: TableShare[ConnectionT, TargetT], where: str
    ) -> None:
        """Raise TransactionEnded if a staging table of the share is gone."""
        target = share.plan.target
        tables = share.names
        there = self.catalog.existing(connection, target.schema, tables)
        if gone := sorted(set(tables) - there):
            raise TransactionEnded(
                f"table {target.label}: {len(gone)} of {len(tables)} staging tables of {where} are "
                f"gone. Of {gone[0]}: an operator or another driver of this job has dropped it, or "
                "this is another database"
            )

    def commit(self, shares: Sequence[Share[ConnectionT, TargetT]]) -> list[list[CommitOutcome]]:
        """Make all partitions of the shares of a checkpoint visible, or none.

        Return the outcomes of each share.
        """
        committables = [c for share in shares for c in share.committables]
        rows = sum(committable.fingerprint.rows for committable in committables)
        targets = " and ".join(share.routes.label for share in shares)
        moving = f"move {rows:,} rows of {len(committables):,} participants into {targets}"
        try:
            with self.server.lend() as connection:
                with progress(moving), self.server.transaction(connection):
                    outcomes = self._commit_all(connection, shares)
                try:
                    for share in shares:
                        ids = map(text_of, share.committables)
                        moved = [text for text in ids if outcomes[text] == CommitOutcome.COMMITTED]
                        share.strategy.drop_moved(connection, share.routes.schema, moved)
                except Exception:
                    logger.info(
                        "staging tables of %s are dropped by the next sweep",
                        targets,
                        exc_info=True,
                    )
        except Exception as error:
            at_fault = [
                share
                for share in shares
                if not isinstance(error, NotMovable) or error.is_about(share)
            ]
            if (reason := self._advice(error, at_fault)) is None:
                raise
            unknown = CommitOutcome.unknown(reason)
            return [
                [unknown if share in at_fault else CommitOutcome.HELD] * len(share.committables)
                for share in shares
            ]
        return [[outcomes[text_of(c)] for c in share.committables] for share in shares]

    def _advice(
        self, error: Exception, at_fault: Sequence[Share[ConnectionT, TargetT]]
    ) -> str | None:
        """Tell what an operator has to fix; return None if a retry may help."""
        if isinstance(error, StagedRowsChanged):
            return (
                f"{error}. Nothing was moved. Look which rows are in the table. If none is there, "
                "drop the staging tables that have too few rows"
            )
        if isinstance(error, TargetRefuses):
            reason = str(error)
        elif (fault := self.server.fault(error)) and fault.kind == "privilege":
            reason = f"the user lacks a right: {fault.text}: grant it"
        elif fault and fault.kind == "refused":
            reason = _refusal(fault, " and ".join(share.routes.label for share in at_fault))
        else:
            return None
        tables = _tables([c for share in at_fault for c in share.committables])
        return f"{reason}. Fix this and start the query again: the rows are safe in {tables}"

    def _commit_all(
        self, connection: ConnectionT, shares: Sequence[Share[ConnectionT, TargetT]]
    ) -> dict[str, CommitOutcome]:
        """Move the rows of a checkpoint, and return the outcomes by transaction ID.

        A lost partition gets a tombstone, and holds the checkpoint's other partitions until the
        replay, because an older change must not come after a newer one, nor a row before the row
        that it refers to. If no partition is lost and no outcome is unknown, all rows are moved.
        """
        # two of us that settle the same shares never deadlock, since the shares are sorted
        ordered = sorted(shares, key=lambda share: min(map(text_of, share.committables)))
        found = [share.strategy._look(connection, share) for share in ordered]
        for each in found:
            if each.lost:
                each.states |= self._write_ledger(connection, each.share.routes.ledger, each.lost)

        due = [each for each in found if each.intact]
        if due and all(each.may_move for each in found):
            for each in due:
                fingerprints = {text: c.fingerprint for text, c in each.intact.items() if c.proof}
                each.states |= self._write_ledger(
                    connection, each.share.routes.ledger, list(each.intact), fingerprints
                )
            self.move(
                connection,
                [
                    replace(each.share, committables=list(each.intact.values()), there=each.there)
                    for each in due
                ],
            )

        return {
            text: each.unknown.get(text)
            or self._outcome(each.share.routes.ledger, text, each.states.get(text))
            for each in found
            for text in map(text_of, each.share.committables)
        }

    def _look(
        self, connection: ConnectionT, share: Share[ConnectionT, TargetT]
    ) -> _Found[ConnectionT, TargetT]:
        """Find out what is decided of a share, what is lost, and what can be moved."""
        ledger = share.routes.ledger
        by_id = {text_of(c): c for c in share.committables}
        witnessed = ledger.witness.states(connection, list(by_id))
        found = _Found(share, ledger.states(connection, list(by_id)))
        ledger.require_intact(connection)
        undecided = {text: c for text, c in by_id.items() if text not in found.states}
        for text, c in by_id.items():
            if not found.states.get(text) and (astray := share.routes.astray(c)):
                raise TargetRefuses(f"{text}: {astray}", share)
        names = staging_tables(share.routes.all, undecided.values())
        found.there = self.catalog.existing(
            connection, share.routes.schema, [name for some in names.values() for name in some]
        )
        for text, c in undecided.items():
            if (all if c.proof else any)(name in found.there for name in names[text]):
                found.intact[text] = c
            if text in witnessed or text not in found.intact:
                if reason := ledger.contradiction(connection, c.proof, witnessed=text in witnessed):
                    found.unknown[text] = CommitOutcome.unknown(
                        f"it is unknown whether {text} was committed: {_look_for_rows(reason)}"
                    )
                else:
                    found.lost.append(text)
        return found

    def _outcome(
        self, ledger: Ledger[ConnectionT], text: str, committed: bool | None
    ) -> CommitOutcome:
        if committed is None:
            return CommitOutcome.HELD
        if committed:
            return CommitOutcome.COMMITTED
        return CommitOutcome.lost(
            f"the staging table {staging_table(text)} of {text} is gone, and the ledger "
            f"{ledger.label} has a tombstone in place of its row"
        )

    def _write_ledger(
        self,
        connection: ConnectionT,
        ledger: Ledger[ConnectionT],
        ids: Sequence[str],
        fingerprints: Mapping[str, Fingerprint] | None = None,
    ) -> dict[str, bool]:
        """Write the outcome of transactions into the ledger, and return it.

        With `fingerprints` of their rows the transactions are committed, and without they are lost.
        Raises TransactionBlocked if one of them has an outcome meanwhile.
        """
        names = {text: TransactionId.parse(text) for text in ids}
        committed = fingerprints is not None
        if not ledger.insert(connection, names, committed=committed, fingerprints=fingerprints):
            raise TransactionBlocked(f"somebody else settled one of {sorted(ids)} at the same time")
        return dict.fromkeys(ids, committed)

    def abort(
        self, connection: ConnectionT, ledger: Ledger[ConnectionT], identity: Identity
    ) -> None:
        """Make the loss final with a tombstone, and remove what is staged.

        Raises CommittedError if the transaction is committed.
        """
        text = identity["transaction_id"]
        with self.server.transaction(connection):
            ledger.insert(connection, {text: TransactionId.parse(text)}, committed=False)
        if ledger.states(connection, [text]).get(text):
            raise CommittedError(f"{text} is committed: the ledger {ledger.label} has its row")
        self.staging.drop(
            connection, ledger.schema, self.staging.tables_of(connection, ledger.schema, [text])
        )

    def in_doubt(
        self,
        connection: ConnectionT,
        schema: str,
        ledger: Ledger[ConnectionT] | None,
        job: str,
        sink: str,
    ) -> Iterator[Identity]:
        """Return the transactions that are staged and were not moved.

        Staging tables that were moved and could not be dropped then are dropped now.
        """
        prefix = TransactionId.prefix(job)
        tagged = self.staging.staged(connection, schema, prefix)
        staged = [text for text in tagged if text.startswith(prefix) and of_sink(text, sink)]
        states = ledger.states(connection, staged) if ledger and staged else {}
        moved = sorted(text for text in staged if states.get(text))
        if moved:
            self.drop_moved(connection, schema, moved)  # a reader was in the way at the move
        return (identity_of(schema, text) for text in staged if text not in moved)

    def whereabouts(self, committables: Sequence[Committable]) -> str:
        """Tell where the rows are, for a person who looks for them."""
        return f"The rows are safe in {_tables(committables)}"

    def move(self, connection: ConnectionT, shares: Sequence[Share[ConnectionT, TargetT]]) -> None:
        """Transfer the rows of partitions, in the caller's transaction.

        Nobody can move them again then. Raises NotMovable for what a retry does not fix. A
        committable without proof does not tell how many rows the partition has, so the rows are not
        counted then.
        """
        tables = [table for share in shares for table in share.tables]
        self._transfer_all(connection, self._locked_all(connection, tables, _refusals), _refusals)
        for share in shares:
            names = [name for table in share.tables for name in table.names]
            share.strategy.staging.mark_moved(connection, share.routes.schema, names)

    def drop_moved(self, connection: ConnectionT, schema: str, ids: Sequence[str]) -> None:
        """Drop the staging tables of moved partitions, as far as that can be done now."""
        tables = self.staging.tables_of(connection, schema, ids)
        self.staging.drop_unused(connection, schema, tables)

    def _locked_all(
        self,
        connection: ConnectionT,
        shares: Sequence[TableShare[ConnectionT, TargetT]],
        explains: Callable[[TableShare[ConnectionT, TargetT]], AbstractContextManager[None]],
    ) -> list[tuple[TableShare[ConnectionT, TargetT], Move[TargetT]]]:
        """Lock the targets, in the same order every time, and return the moves into them."""
        moves = []
        for share in sorted(shares, key=lambda share: share.table):
            with explains(share):
                moves.append((share, share.strategy._locked(connection, share)))
        return moves

    def _locked(
        self, connection: ConnectionT, share: TableShare[ConnectionT, TargetT]
    ) -> Move[TargetT]:
        """Lock the target, and return the move of the share's staging tables.

        Raises SinkError if a staging table has other columns than its task gave it.
        """
        plan = share.plan
        staged = self.catalog.column_types(connection, plan.target.schema, share.names)
        for name, committable in share.staged.items():
            there = staged.get(name, {})
            digest = columns_digest(there)
            part = parts_of(committable).get(plan.key, {})
            # what is missing would become NULL
            if there and part.get("columns", digest) != digest:
                raise SinkError(
                    f"the staging table {label(plan.target.schema, name)} was altered by somebody, "
                    f"and has the columns {', '.join(there)} now: change it back"
                )
        with self.server.at_work(connection):
            return self.staging.locked(
                connection, plan, {name: staged.get(name, {}) for name in share.names}
            )


@contextmanager
def _refusals(share: TableShare[Any, Any]) -> Iterator[None]:
    """Raise NotMovable for errors about the share that a retry does not fix."""
    target = share.plan.target
    try:
        yield
    except (ConfigurationError, BadValue) as error:
        raise TargetRefuses(str(error), share) from error
    except SinkError as error:
        if error.retryable:
            raise
        raise StagedRowsChanged(f"table {target.label}: {error}", share) from error
    except Exception as error:
        fault = share.strategy.staging.of_move(target, error)
        if fault is None or fault.kind not in ("refused", "changed", "server", "gone"):
            raise
        # a staging table is gone: a retry finds that its rows are lost
        if fault.kind == "gone" and any(name in fault.text for name in share.names):
            raise
        raise TargetRefuses(_refusal(fault, target.label), share) from error


def _deleted_last(
    ordered: Sequence[tuple[TableShare[Any, Any], Move[Any]]],
) -> set[tuple[str, str]]:
    """Choose tables that lose rows after all rows were put in, so that none refers to those.

    A row that referred to a deleted row may refer to another row by then. But a table loses rows
    first if a new row may need the unique value of a deleted one, or if it refers to itself, or to
    such a table. `ordered` has each table after the tables that it refers to.
    """
    referred = {
        (key.schema, key.table)
        for share, move in ordered
        for key in move.target.foreign_keys
        if (key.schema, key.table) != share.table
    }
    first = {share.table for share, _ in ordered} - referred
    for share, move in ordered:
        target = move.target
        keys = set(share.strategy.merge.keys)
        others = [unique for unique in target.uniques if set(unique.columns) != keys]
        parents = {(key.schema, key.table) for key in target.foreign_keys}
        if others or target.other_uniques or parents & {*first, share.table}:
            first.add(share.table)
    return referred - first


def _refusal(fault: Fault, table: str) -> str:
    return f"table {table} refuses rows{fault.at}: {target_named(fault.text, table)}{fault.advice}"


def _look_for_rows(reason: str) -> str:
    return (
        f"{reason}. Look for its rows in the table, then use the old ledger, or insert its row "
        "into the new one"
    )


def _tables(committables: Sequence[Committable]) -> str:
    tables = [str(c.transaction["table"]) for c in committables]
    more = f" and {len(tables) - 1} more" if len(tables) > 1 else ""
    return f"the staging table{'s' if more else ''} {tables[0]}{more}"


def _targets(shares: Sequence[TableShare[Any, Any]]) -> str:
    return " and ".join(share.plan.target.label for share in shares)


def identity_of(schema: str, transaction_id: str) -> Identity:
    return {"transaction_id": transaction_id, "table": label(schema, staging_table(transaction_id))}


def _key(columns: Sequence[str], row: Sequence[object]) -> str:
    return f"({', '.join(columns)}) = ({', '.join(map(str, row[: len(columns)]))})"
