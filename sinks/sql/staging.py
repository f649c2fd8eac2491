"""Strategy `staged` with a staging table for each participant, which lies beside the target."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, TypeAlias

from sinks.errors import BadValue, CommittedError, ConfigurationError, SinkError
from sinks.progress import progress
from sinks.sql.dialect import Plan, TargetT
from sinks.sql.ledger import Ledger
from sinks.sql.names import altered, columns_digest, label, of_sink, staging_table
from sinks.sql.questions import SORTED_BYTES
from sinks.sql.server import C, Row
from sinks.sql.strategies import Strategy
from sinks.sql.target import Column, Target
from sinks.sql.transaction import T
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    Committable,
    Fingerprint,
    Identity,
    TransactionContext,
    TransactionId,
)

logger = logging.getLogger(__name__)

_COUNTED_TOGETHER = 50

StagedTypes: TypeAlias = Mapping[str, Mapping[str, str]]
"""By staging table, its columns in order, each with its type as the server writes it."""


class TargetRefuses(Exception):
    """The target refuses the rows of a complete checkpoint: asking again cannot help, an operator can."""


class Doubtful(Exception):
    """What is staged is not what was acknowledged, so nobody can tell what became of the rows."""


class SettledByOthers(Exception):
    """Somebody else settled a participant at the same time: ask again."""


class StagingTables(Strategy[C, TargetT, T], ABC):
    """Tasks commit their rows into staging tables; the driver moves a whole checkpoint in one transaction, which also
    writes the ledger. In between nothing is locked and no transaction is open.

    Tables that were moved and are still there are told by the ledger. Were that emptied, they could not be moved again:
    rows are counted, and whoever moves a table without dropping it leaves it with another number of rows.

    What a database does with staging tables is for a subclass to say. They are given by name, or, for statements, as
    quoted names; `written` are the columns of the target that the batch has."""

    MATCHING: ClassVar[str]
    """What follows FROM (…) AS staged for rows to which {table} AS target has one that meets {condition}."""

    @abstractmethod
    def begin(self, plan: Plan[C, TargetT], context: TransactionContext) -> T:
        """Open the participant's transaction, which writes into a new table, its `staging_table`. The table tells the
        transaction's id from its first moment on."""

    @abstractmethod
    def seal(self, transaction: T, moved: str | None = None) -> None:
        """Commit what was staged, and let go of the connection. `moved` is the (quoted) staging table to drop, if its
        rows were moved already."""

    @abstractmethod
    def staged_types(self, connection: C, schema: str, tables: Sequence[str]) -> StagedTypes:
        """Of the staging tables that are there. A column that only the table itself needs is left out."""

    @abstractmethod
    def existing(self, connection: C, schema: str, names: Sequence[str]) -> set[str]:
        """Those of the names that a table has."""

    @abstractmethod
    def staged(self, connection: C, schema: str, prefix: str) -> list[str]:
        """The transaction ids of all staging tables that begin so, sorted: those of tasks that died before their
        pre-commit, and of participants that were moved, too."""

    @abstractmethod
    def locked(self, connection: C, plan: Plan[C, TargetT], staged: StagedTypes) -> TargetT:
        """The target as the running transaction sees it, locked against changes until its end. Raises
        ConfigurationError that says what was changed, and what to change back, if the rows of these staging tables
        cannot go into it as they are."""

    @abstractmethod
    def append(self, connection: C, target: TargetT, staging: Sequence[str], written: Sequence[str], rows: int) -> None:
        """Put the rows of all staging tables into the target, in the caller's transaction. Raises SinkError if there
        are not `rows` of them, the driver's error if the target refuses one."""

    @abstractmethod
    def upsert(self, connection: C, target: TargetT, staging: Sequence[str], written: Sequence[str]) -> None:
        """The same with the last change of each key."""

    @abstractmethod
    def mark_moved(self, connection: C, schema: str, names: Sequence[str]) -> None:
        """Drop these tables, whose rows were moved in the running transaction, or leave them another number of rows."""

    @abstractmethod
    def drop(self, connection: C, schema: str, names: Sequence[str]) -> None:
        """Outside a transaction."""

    @abstractmethod
    def drop_unused(self, connection: C, schema: str, names: Sequence[str]) -> None:
        """Drop those that nobody reads now."""

    @abstractmethod
    def explained(self, target: TargetT, where: str, tables: Sequence[str]) -> AbstractContextManager[None]:
        """The server's errors as SinkErrors, with the target's name instead of a staging table's."""

    @abstractmethod
    def refusal(self, error: Exception, target: TargetT, tables: Sequence[str]) -> str | None:
        """What the server has against rows, or None if the error is about something else: to be asked again."""

    def one_at_a_time(self, connection: C, job: str, sink: str) -> None:
        """Wait for another driver that settles a checkpoint of this sink (as tokens). Default: the ledger's rows are
        enough."""

    def sample(self, connection: C, target: TargetT, staging: Sequence[str], written: Sequence[str]) -> None:
        """Try to insert one row, where that tells more than a look at the table did. Default: it does not."""

    def constraints(self, target: TargetT, written: Sequence[str]) -> list[str]:
        """What only the target itself can judge of rows. If there is any, a move is tried before the decision."""
        reasons = list(target.constraints)
        for unique in target.uniques:
            known = set(unique.columns) & set(written)
            if self.merge.mode == "append":
                if known and not known >= set(unique.columns):
                    reasons.append(f"index {unique.name}")
            elif known and set(unique.columns) != set(self.merge.keys):
                reasons.append(f"index {unique.name}")
        return reasons + (list(target.referenced_by) if self.merge.mode == "upsert" else [])

    # ------------------------------------------------------------------ alike
    def transfer(
        self, connection: C, target: TargetT, staging: Sequence[str], written: Sequence[str], rows: int
    ) -> None:
        """Put the rows of all staging tables into the target, in the caller's transaction."""
        if self.merge.mode == "append":
            self.append(connection, target, staging, written, rows)
        else:
            self.count(connection, staging, rows)
            self.upsert(connection, target, staging, written)

    def clashes(self, connection: C, target: TargetT, staging: Sequence[str], written: Sequence[str]) -> None:
        """Raise BadValue if the union of the rows breaks a unique index, as far as that can be told without writing."""
        if self.merge.mode == "upsert":
            if not self.merge.order_by:
                rule = "two changes of one key in a batch, and no order_by="
                self._twice(connection, target, staging, self.merge.keys, rule)
            return
        for unique in target.uniques:
            if set(unique.columns) <= set(written):
                rule = f'unique index "{unique.name}"'
                self._twice(connection, target, staging, unique.columns, rule)
                self._taken(connection, target, staging, unique.columns, rule)

    def grouped(self, target: TargetT, column: str) -> str:
        """What equal values of a column are grouped by."""
        return self.server.quote(column)

    def _twice(self, connection: C, target: TargetT, staging: Sequence[str], columns: Sequence[str], rule: str) -> None:
        names = ", ".join(self.grouped(target, column) for column in columns)
        known = " AND ".join(f"{self.server.quote(column)} IS NOT NULL" for column in columns)
        staged = self.union(staging, self.dialect.quoted(columns))
        rows = self.server.query(
            connection,
            f"SELECT {names}, count(*) FROM ({staged}) AS staged WHERE {known}"
            f" GROUP BY {names} HAVING count(*) > 1 LIMIT 1",
        )
        for row in rows:
            raise twice_in_batch(target, rule, columns, row)

    def _taken(self, connection: C, target: TargetT, staging: Sequence[str], columns: Sequence[str], rule: str) -> None:
        names = ", ".join(f"staged.{self.server.quote(column)}" for column in columns)
        table = self.server.quote(target.schema, target.name)
        matching = self.MATCHING.format(table=table, condition=self.equal("target", "staged", columns))
        staged = self.union(staging, self.dialect.quoted(columns))
        for row in self.server.query(connection, f"SELECT {names} FROM ({staged}) AS staged {matching} LIMIT 1"):
            raise BadValue(f"table {target.label}: {rule}: {_key(columns, row)} is in the table already")

    def count(self, connection: C, staging: Sequence[str], rows: int) -> None:
        """Raise SinkError if the staging tables do not hold so many rows."""
        found = 0
        for start in range(0, len(staging), _COUNTED_TOGETHER):
            counts = (f"SELECT count(*) AS n FROM {table}" for table in staging[start : start + _COUNTED_TOGETHER])
            ((some,),) = self.server.query(connection, f"SELECT sum(n) FROM ({' UNION ALL '.join(counts)}) counted")
            found += int(some)
        if found != rows:
            raise SinkError(
                f"the staging tables hold {found} rows, and their tasks acknowledged {rows}: somebody changed one, or "
                "emptied the ledger after they were moved"
            )

    def changes(self, written: Sequence[str]) -> tuple[list[str], list[str]]:
        """The columns that tell the last change of each key and what it is, and those that order the changes."""
        # of equals, a delete wins
        order = [column for column in (self.merge.order_by, self.merge.delete_marker) if column]
        return [*written, *(column for column in order if column not in written)], order

    def not_older(self, change: str = "last") -> str:
        """With `keep_newer`, what a change has to meet beside the key to replace the row `target`."""
        if not self.merge.keep_newer:
            return ""
        by = self.server.quote(str(self.merge.order_by))
        return f" AND (target.{by} IS NULL OR target.{by} <= {change}.{by})"

    def giving(self, target: TargetT, written: Sequence[str], last: str) -> str | None:
        """The condition for rows `target`, with the change `last` of their key, whose value of another unique index a
        change of another key takes: one that is changed first would meet what the other is yet to give up. None if
        there can be none, or if a row cannot go in anew: foreign keys and triggers would take that for a delete."""
        keys, takes = self.merge.keys, []
        for unique in target.uniques:
            columns = [column for column in unique.columns if column in written]
            if columns and set(unique.columns) != set(keys):
                takes.append(f"({self.equal('taker', 'target', columns)})")
        if (
            not takes
            or target.referenced_by
            or any(one.startswith(("trigger ", "rule ")) for one in target.constraints)
        ):
            return None
        marker = (
            f" AND taker.{self.server.quote(self.merge.delete_marker)} IS NOT TRUE" if self.merge.delete_marker else ""
        )
        return (
            f"{self.equal('target', 'last', keys)}{self.not_older()} AND EXISTS (SELECT 1 FROM ({last}) AS taker"
            f" WHERE ({' OR '.join(takes)}) AND NOT ({self.equal('taker', 'target', keys)}){marker})"
        )

    def union(self, staging: Sequence[str], columns: str) -> str:
        return " UNION ALL ".join(f"SELECT {columns} FROM {table}" for table in staging)

    def equal(self, left: str, right: str, columns: Sequence[str]) -> str:
        names = map(self.server.quote, columns)
        return " AND ".join(f"{left}.{name} = {right}.{name}" for name in names)

    # ------------------------------------------------------------------ in the task
    def pre_commit(self, transaction: T, plan: Plan[C, TargetT]) -> Committable:
        self.finish(transaction, plan)
        self.seal(transaction)
        columns = columns_digest(transaction.context.schema.names)
        return Committable(transaction.identity, proof=self.proof(plan) | {"columns": columns})

    def commit_directly(self, transaction: T, plan: Plan[C, TargetT]) -> None:
        """At-least-once: move the rows in the transaction that staged them."""
        rows, connection = self.finish(transaction, plan), transaction.connection
        name = staging_table(transaction.context.transaction_id)
        with transaction.explained():
            target, [table], written = self._locked(connection, plan, [name])
            if self.merge.mode == "upsert":
                self.clashes(connection, target, [table], written)
            self.transfer(connection, target, [table], written, rows)
        self.seal(transaction, table)

    # ------------------------------------------------------------------ on the driver
    def validate_all(self, plan: Plan[C, TargetT], checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        """Raise what would keep the rows from being moved: a table that was changed since they were staged, and values
        that it would refuse and no staging table could. For an append to a table without constraints it only looks at
        the table, or tries one row; the same for an upsert with `order_by` to a table with none but its key."""
        with self.server.lend() as connection:
            there = self.existing(connection, plan.target.schema, names_of(committables))
            committables = [c for c, name in zip(committables, names_of(committables), strict=True) if name in there]
            if not (tables := names_of(committables)):
                return
            where = f"checkpoint {checkpoint.checkpoint_id}"
            with self.explained(plan.target, where, tables), self.server.trial(connection):
                target, staging, written = self._locked(connection, plan, tables, committables)
                if self.merge.mode == "upsert" or target.judges:
                    self.clashes(connection, target, staging, written)
                    if self.constraints(target, written):
                        rows = sum(c.fingerprint.rows for c in committables)
                        self.transfer(connection, target, staging, written, rows)
                        return
                self.sample(connection, target, staging, written)

    def commit_all(self, plan: Plan[C, TargetT], committables: Sequence[Committable]) -> list[CommitOutcome]:
        """Settle the participants of one checkpoint together: all become visible, or none does."""
        with self.server.lend() as connection:
            try:
                with progress(_moving(plan, committables)), self.server.transaction(connection):
                    outcomes = self.settle(connection, plan, committables)
            except TargetRefuses as refused:
                return self.refused(committables, str(refused))
            except Doubtful as doubtful:
                what = f"{doubtful}. Nothing was moved now: look which of its rows are in the table"
                return [CommitOutcome.unknown(what)] * len(committables)
            except Exception as error:
                fault = self.dialect.fault(error)
                if fault is None or fault.kind != "right":
                    raise
                return self.refused(committables, f"the user lacks a right: {fault.text}: grant it")
            committed = [text for text, outcome in outcomes.items() if outcome == CommitOutcome.COMMITTED]
            try:
                self.tidy(connection, plan.ledger.schema, committed)
            except Exception:
                logger.info("staging tables of %s are dropped by the next sweep", plan.target.label, exc_info=True)
        return [outcomes[_id(c)] for c in committables]

    def refused(self, committables: Sequence[Committable], reason: str) -> list[CommitOutcome]:
        """What an operator is told: asking again does not help, mending what is named does."""
        return [
            CommitOutcome.unknown(
                f"{reason}. The checkpoint is complete and none of it is in the table; its rows are safe in "
                f"{self.kept(committables)}, which must not be touched. Mend what is named and start the query "
                "again: it moves every row, once"
            )
        ] * len(committables)

    def settle(
        self, connection: C, plan: Plan[C, TargetT], committables: Sequence[Committable]
    ) -> dict[str, CommitOutcome]:
        """The outcomes by transaction id. What is lost is told by tombstones, and holds its siblings until the replay:
        an older change must not come after a newer one."""
        ledger, one = plan.ledger, TransactionId.parse(_id(committables[0]))
        self.one_at_a_time(connection, one.job, one.sink)
        by_id = {_id(c): c for c in committables}
        witnessed = ledger.witness.states(connection, list(by_id))
        states = ledger.states(connection, list(by_id))
        ledger.require_intact(connection)
        undecided = [c for text, c in by_id.items() if text not in states]
        for text, c in by_id.items():
            if not states.get(text) and (astray := c.astray(self.dialect.aim(plan.target))):
                raise TargetRefuses(f"{text}: {astray}")
        there = self._existing(connection, plan.target.schema, list(map(_id, undecided)))
        intact = [_id(c) for c in undecided if staging_table(_id(c)) in there]
        outcomes: dict[str, CommitOutcome] = {}

        lost = []
        for c in undecided:
            if _id(c) in witnessed or _id(c) not in intact:
                if reason := ledger.contradiction(connection, c.proof, witnessed=_id(c) in witnessed):
                    outcomes[_id(c)] = CommitOutcome.unknown(
                        f"nobody can tell whether the rows of {_id(c)} are in the table: {reason}. Look for them, then "
                        "point the sink at the old ledger, or insert its row into the new one"
                    )
                else:
                    lost.append(_id(c))
        if lost:
            states |= self._decide(connection, ledger, lost, committed=False)

        if intact and not outcomes and all(states.values()):
            sums = {text: c.fingerprint for text, c in by_id.items()}
            states |= self._decide(connection, ledger, intact, committed=True, sums=sums)
            self.move(connection, plan, [c for c in undecided if _id(c) in intact])

        return {text: outcomes.get(text) or self._outcome(ledger, text, states.get(text)) for text in by_id}

    def _outcome(self, ledger: Ledger[C], text: str, committed: bool | None) -> CommitOutcome:
        if committed is None:
            return CommitOutcome.HELD
        if committed:
            return CommitOutcome.COMMITTED
        return CommitOutcome.lost(
            f"the staging table {staging_table(text)} of {text} is gone, and the ledger {ledger.label} has a tombstone "
            "in place of its row"
        )

    def _decide(
        self,
        connection: C,
        ledger: Ledger[C],
        ids: Collection[str],
        *,
        committed: bool,
        sums: Mapping[str, Fingerprint] | None = None,
    ) -> dict[str, bool]:
        if not ledger.decide(connection, ids, committed=committed, sums=sums):
            raise SettledByOthers(f"somebody else settled one of {sorted(ids)} at the same time")
        return dict.fromkeys(ids, committed)

    def abort(self, connection: C, ledger: Ledger[C], identity: Identity) -> None:
        """Make the loss final with a tombstone, and remove what is staged."""
        text = identity["transaction_id"]
        with self.server.transaction(connection):
            ledger.decide(connection, [text], committed=False)
        if ledger.states(connection, [text]).get(text):
            raise CommittedError(f"{text} is committed: the ledger {ledger.label} has its row")
        self.drop(connection, ledger.schema, self._existing(connection, ledger.schema, [text]))

    def in_doubt(self, connection: C, schema: str, ledger: Ledger[C] | None, job: str, sink: str) -> Iterator[Identity]:
        """What is staged and was not moved."""
        prefix = TransactionId.prefix(job)
        found = self.staged(connection, schema, prefix)
        staged = [text for text in found if text.startswith(prefix) and of_sink(text, sink)]
        states = ledger.states(connection, staged) if ledger and staged else {}
        moved = sorted(text for text in staged if states.get(text))
        if moved:
            self.tidy(connection, schema, moved)  # a reader was in the way then
        return (identity_of(schema, text) for text in staged if text not in moved)

    def kept(self, committables: Sequence[Committable]) -> str:
        tables = [str(c.transaction.get("table") or c.transaction["staging"]) for c in committables]
        more = f" and {len(tables) - 1} more, one for each partition" if len(tables) > 1 else ""
        return f"the staging table{'s' if more else ''} {tables[0]}{more}"

    def move(self, connection: C, plan: Plan[C, TargetT], committables: Sequence[Committable]) -> None:
        """Put their rows into the target, in the caller's transaction."""
        target, tables = plan.target, names_of(committables)
        try:
            target, staging, written = self._locked(connection, plan, tables, committables)
            self.transfer(connection, target, staging, written, sum(c.fingerprint.rows for c in committables))
        except (ConfigurationError, BadValue) as error:
            raise TargetRefuses(str(error)) from error
        except SinkError as error:
            if error.retryable:
                raise
            raise Doubtful(f"table {target.label}: {error}") from error
        except Exception as error:
            reason = self.refusal(error, target, tables)
            if reason is None:
                raise
            raise TargetRefuses(f"table {target.label} refuses rows{reason}") from error
        self.mark_moved(connection, plan.target.schema, tables)

    def tidy(self, connection: C, schema: str, ids: Sequence[str]) -> None:
        """Remove what moved participants leave behind, as far as it can be done now."""
        self.drop_unused(connection, schema, self._existing(connection, schema, ids))

    def _existing(self, connection: C, schema: str, ids: Sequence[str]) -> list[str]:
        return sorted(self.existing(connection, schema, [staging_table(text) for text in ids]))

    def _locked(
        self,
        connection: C,
        plan: Plan[C, TargetT],
        tables: Sequence[str],
        committables: Sequence[Committable] = (),
    ) -> tuple[TargetT, list[str], list[str]]:
        """The target, locked; the staging tables, quoted; and the columns that they have for it. Raises SinkError if
        one of `committables` has other columns than its task gave it."""
        staged = self.staged_types(connection, plan.target.schema, tables)
        for committable in committables:
            there = staged.get(staging_table(committable.transaction["transaction_id"]), {})
            if there and committable.proof["columns"] != columns_digest(there):
                raise altered(committable.transaction["table"], there)
        target = self.locked(connection, plan, staged)
        self.require_meant(connection, plan)
        quoted = [self.server.quote(target.schema, name) for name in tables]
        return target, quoted, self.merge.written(list(staged.get(tables[0], ())), target.names)


def _moving(plan: Plan[C, TargetT], committables: Sequence[Committable]) -> str:
    rows = sum(committable.fingerprint.rows for committable in committables)
    return f"move {rows:,} rows of {len(committables):,} participants into {plan.target.label}"


def _id(committable: Committable) -> str:
    return str(committable.transaction["transaction_id"])


def identity_of(schema: str, transaction_id: str) -> Identity:
    return {"transaction_id": transaction_id, "table": label(schema, staging_table(transaction_id))}


def by_table(rows: Iterable[Row]) -> StagedTypes:
    """Of rows of table, column and type."""
    found: dict[str, dict[str, str]] = {}
    for table, column, kind in rows:
        found.setdefault(table, {})[column] = kind
    return found


def names_of(committables: Sequence[Committable]) -> list[str]:
    return [staging_table(c.transaction["transaction_id"]) for c in committables]


def twice_in_batch(target: Target[Column], rule: str, columns: Sequence[str], row: Sequence[object]) -> BadValue:
    return BadValue(f"table {target.label}: {rule}: {_key(columns, row)} comes {row[-1]} times in the batch")


def too_long_to_sort(target: Target[Column], order_by: str) -> BadValue:
    return BadValue(
        f'table {target.label}: a value of the order_by column "{order_by}" is longer than {SORTED_BYTES} bytes, or '
        "has more in its collation, and the server sorts by no more: order by a number, a time or a shorter text"
    )


def _key(columns: Sequence[str], row: Sequence[object]) -> str:
    return f"({', '.join(columns)}) = ({', '.join(map(str, row[: len(columns)]))})"
