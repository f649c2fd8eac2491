"""Strategy `staged` with a staging table for each participant, which lies beside the target."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, TypeAlias

from sinks.errors import BadValue, SinkError
from sinks.sql.dialect import Plan, TargetT
from sinks.sql.ledger import Ledger
from sinks.sql.names import altered, columns_digest, of_sink, staging_table
from sinks.sql.server import C, Row
from sinks.sql.strategies import Staged, TargetRefuses
from sinks.sql.transaction import T
from sinks.transaction import Checkpoint, CommitOutcome, Committable, Identity, TransactionContext, TransactionId

_COUNTED_TOGETHER = 50

StagedTypes: TypeAlias = Mapping[str, Mapping[str, str]]
"""By staging table, its columns in order, each with its type as the server writes it."""


class StagingTables(Staged[C, TargetT, T]):
    """Tables that were moved and are still there are told by the ledger. Were that emptied, they could not be moved
    again: rows are counted, and whoever moves a table without dropping it leaves it with another number of rows.

    What a database does with staging tables is for a subclass to say. They are given by name, or, for statements, as
    quoted names; `written` are the columns of the target that the batch has."""

    MATCHING: ClassVar[str]
    """What follows FROM (…) AS staged for rows to which {table} AS target has one that meets {condition}."""

    @abstractmethod
    def begin(self, plan: Plan[C, TargetT], context: TransactionContext) -> T:
        """Open the participant's transaction, which writes into a new table, its `staging_table`. Its comment is the
        transaction's id."""

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
    def comments(self, connection: C, schema: str, prefix: str) -> list[str]:
        """The comments of all tables `tpc_…` that begin so, sorted."""

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
            raise BadValue(f"table {target.label}: {rule}: {_key(columns, row)} comes {row[-1]} times in the batch")

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
            counts = (f"(SELECT count(*) FROM {table})" for table in staging[start : start + _COUNTED_TOGETHER])
            ((some,),) = self.server.query(connection, f"SELECT {' + '.join(counts)}")
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
            tables = [name for name in names_of(committables) if name in there]
            if not tables:
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

    def settle(
        self, connection: C, plan: Plan[C, TargetT], committables: Sequence[Committable]
    ) -> dict[str, CommitOutcome]:
        one = TransactionId.parse(committables[0].transaction["transaction_id"])
        self.one_at_a_time(connection, one.job, one.sink)
        return super().settle(connection, plan, committables)

    def intact(self, connection: C, plan: Plan[C, TargetT], committables: Sequence[Committable]) -> list[str]:
        there = self.existing(connection, plan.target.schema, names_of(committables))
        ids = [c.transaction["transaction_id"] for c in committables]
        return [text for text in ids if staging_table(text) in there]

    def kept(self, committables: Sequence[Committable]) -> str:
        tables = [str(c.transaction["table"]) for c in committables]
        more = f" and {len(tables) - 1} more, one for each partition" if len(tables) > 1 else ""
        return f"the staging table{'s' if more else ''} {tables[0]}{more}"

    def gone(self, transaction_id: str) -> str:
        return f"the staging table {staging_table(transaction_id)} of {transaction_id} is gone"

    def move(self, connection: C, plan: Plan[C, TargetT], committables: Sequence[Committable]) -> None:
        target, tables = plan.target, names_of(committables)
        try:
            target, staging, written = self._locked(connection, plan, tables, committables)
            self.transfer(connection, target, staging, written, sum(c.fingerprint.rows for c in committables))
        except SinkError:
            raise
        except Exception as error:
            reason = self.refusal(error, target, tables)
            if reason is None:
                raise
            raise TargetRefuses(f"table {target.label} refuses rows{reason}") from error
        self.mark_moved(connection, plan.target.schema, tables)

    def tidy(self, connection: C, schema: str, ids: Sequence[str]) -> None:
        self.drop_unused(connection, schema, self._existing(connection, schema, ids))

    def forget(self, connection: C, schema: str, identity: Identity) -> None:
        self.drop(connection, schema, self._existing(connection, schema, [identity["transaction_id"]]))

    def _existing(self, connection: C, schema: str, ids: Sequence[str]) -> list[str]:
        return sorted(self.existing(connection, schema, [staging_table(text) for text in ids]))

    def staged(self, connection: C, schema: str, ledger: Ledger[C] | None, job: str, sink: str) -> dict[str, Identity]:
        prefix = TransactionId.prefix(job)
        found = self.comments(connection, schema, prefix)
        mine = [text for text in found if text.startswith(prefix) and of_sink(text, sink)]
        return {text: identity_of(schema, text) for text in mine}

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


def identity_of(schema: str, transaction_id: str) -> Identity:
    return {"transaction_id": transaction_id, "table": f"{schema}.{staging_table(transaction_id)}"}


def by_table(rows: Iterable[Row]) -> StagedTypes:
    """Of rows of table, column and type."""
    found: dict[str, dict[str, str]] = {}
    for table, column, kind in rows:
        found.setdefault(table, {})[column] = kind
    return found


def names_of(committables: Sequence[Committable]) -> list[str]:
    return [staging_table(c.transaction["transaction_id"]) for c in committables]


def _key(columns: Sequence[str], row: Sequence[object]) -> str:
    return f"({', '.join(columns)}) = ({', '.join(map(str, row[: len(columns)]))})"
