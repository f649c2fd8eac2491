"""The parts that the sinks into tables of a SQL database share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias

import pyarrow as pa

from sinks._util.log import get_logger
from sinks.arrow.json import in_ascii
from sinks.audit import Audit, Holding, Part
from sinks.base import Sink, commit_in_threads
from sinks.dead_letters import SCHEMA, DeadLetters, Refusal
from sinks.diagnosis import Finding, SchemaDiff, Severity
from sinks.errors import ConfigurationError
from sinks.optional import (
    Auditable,
    DeadLettering,
    Diagnosable,
    DirectCommitting,
    JointCommitting,
    Related,
    SchemaEvolving,
    Validating,
)
from sinks.options import no_flags
from sinks.sql.backend import Backend
from sinks.sql.databases import weaknesses
from sinks.sql.dialect import TargetT
from sinks.sql.names import label, of_sink
from sinks.sql.routes import Routes
from sinks.sql.routing import NamedTable, RoutedTransaction, Routing
from sinks.sql.server import IDLE_CONNECTIONS, ConnectionT
from sinks.sql.strategies import Share, StagingTables, TwoPhase
from sinks.sql.target_table import TargetTable
from sinks.sql.transaction import RowTransaction
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    Committable,
    Fingerprint,
    Identity,
    TransactionContext,
    TransactionId,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = get_logger(__name__)

SchemaEvolution = Literal["none", "add"]
_COMMIT_THREADS = 16
# this is a prime, so a sink whose rows come in every second or tenth checkpoint meets it too
_PRUNE_EVERY = 53


class TableSink(
    DeadLettering[RowTransaction[ConnectionT]],
    SchemaEvolving[RowTransaction[ConnectionT]],
    Validating[RowTransaction[ConnectionT]],
    JointCommitting[RowTransaction[ConnectionT]],
    Related[RowTransaction[ConnectionT]],
    DirectCommitting[RowTransaction[ConnectionT]],
    Auditable[RowTransaction[ConnectionT]],
    Diagnosable[RowTransaction[ConnectionT]],
    Generic[ConnectionT, TargetT],
):
    """A sink into one table of a SQL database, or into tables that rows name.

    There are two strategies, and `check` chooses one. With `TwoPhase` each partition has a prepared
    transaction of its own on the table. With `StagingTables` each partition fills a staging table,
    and the driver moves the rows. Both kinds of sink finish what either strategy wrote, so the
    strategy may change between two runs.

    Every table has these options:

    * `mode="upsert"`: the last row of each key in a checkpoint, by the greatest `order_by`,
      replaces the row of that key, or deletes it if the boolean column `delete_marker` is true.
      `keys` are the columns of the key; they need a unique index. Of rows with an equal `order_by`,
      the last in its partition wins; such rows of several partitions must be the same row. Without
      `order_by` a key may come only once in a checkpoint. The sink does not write `delete_marker`,
      and writes `order_by` only if the table has that column.
    * `order_by_nulls`: with "error" a row without a value in `order_by` is a bad row, with "first"
      it is older than every other row of its key.
    * `keep_newer`: drop a change that is older, by `order_by`, than the table's row of its key.
    * `create_table`: create a missing table from the batch's schema, with `keys` as its primary
      key.
    * `schema_evolution`: "add" adds the columns that the batch has and the table lacks, as nullable
      columns. Nothing else of the table is altered.
    * `tables`: the tables that rows may name, by the names that rows have, each with the options
      that it has of its own (`sinks.sql.routing.TableOptions`). `table_column` is the column with
      the name of the table, and `payload_column` the column with the values: a struct, a map of
      strings, or a JSON object as a string. `order_by` and `delete_marker` are columns beside it,
      or fields in it. Such a sink has no `table`, `create_table` and `schema_evolution`.
    * `ledger`: the name of the table, beside the target, that proves what became of each
      transaction.
    * `dead_letters`: a sink for rows that the table refuses. `max_dead_letters`: the most of them
      in a checkpoint, or, as a float, their largest share of its rows.
    """

    def __init__(
        self,
        backend: Backend[ConnectionT, TargetT],
        table: str | None,
        *,
        name: str | None = None,
        create_table: bool = False,
        ledger: str = "tpc_ledger",
        schema_evolution: SchemaEvolution = "none",
        transform: Callable[[DataFrame], DataFrame] | None = None,
        dead_letters: Sink | None = None,
        max_dead_letters: int | float = 1000,
        routing: Routing[ConnectionT, TargetT] | None = None,
    ) -> None:
        """Set up the sink; nothing is connected yet.

        With `routing`, rows name their tables; otherwise all rows go into `table`.

        Raises ConfigurationError for options that contradict each other.
        """
        super().__init__(
            name=name or table or "tables",
            transform=transform,
            dead_letters=dead_letters,
            max_dead_letters=max_dead_letters,
        )
        problems = list(no_flags(create_table=create_table))
        if (table is None) == (routing is None):
            problems.append("give the sink table=, or tables= if rows name their tables")
        if routing and (create_table or schema_evolution != "none"):
            problems.append(
                "create_table and schema_evolution are for the sink of one table: the values of "
                "rows that name their tables get their types from tables that are there"
            )
        named = routing.tables if routing else {"": NamedTable(table or "", backend, None)}
        for key, each in named.items():
            where = f"tables[{key!r}]: " if key else ""
            merge = each.backend.merge
            found = [
                *merge.contradictions(backend.strategy, backend.prepared.NAME),
                *no_flags(keep_newer=merge.keep_newer),
            ]
            problems += [where + problem for problem in found]
        if schema_evolution not in ("none", "add"):
            problems.append(
                f'schema_evolution={schema_evolution!r} is not one of "none", "add"; alter types '
                "by hand"
            )
        if problems:
            raise ConfigurationError(f"sink {self.name!r}: " + "; ".join(problems))
        self.table = table or ", ".join(each.table for each in named.values())
        self.strategy = backend.strategy
        self._backend = backend
        self._server = backend.server
        self._catalog = backend.catalog
        self._dialect = backend.dialect
        self._merge = backend.merge
        self.evolves = schema_evolution != "none"
        self._routing = routing
        self._targets = [
            TargetTable(
                each.backend,
                each.table,
                sink=self.name,
                create_table=create_table,
                ledger=ledger,
                evolves=self.evolves,
                key=key,
                routing=routing,
            )
            for key, each in named.items()
        ]
        self._target = self._targets[0]
        """The only table, or one of several, which all have the ledger beside them."""
        self._logged = ""
        self._ledger = ledger
        self._two_phase = TwoPhase(backend)
        self._staged = StagingTables(backend)

    # ------------------------------------------------------------------ set-up
    def check(self, schema: pa.Schema) -> None:
        """Find or create the table, see whether it takes rows of `schema`, and choose the strategy.

        Raises ConfigurationError (SchemaMismatch if it is only about columns) with all reasons at
        once.
        """
        if self._routing and (problems := list(self._routing.problems(schema))):
            listed = "".join(f"\n  - {problem}" for problem in problems)
            raise ConfigurationError(
                f"sink {self.name!r} cannot write rows that name their tables:{listed}"
            )
        for target in self._targets:
            target.check(schema)
        routes = self._routes()
        if self._routing:
            line = f"sink {self.name!r} writes to {routes.label} by strategy {routes.plan.strategy}"
            if line != self._logged:
                logger.info(line)
            self._logged = line

    def _routes(self) -> Routes[ConnectionT, TargetT]:
        """Return the ways into the tables, as planned.

        Raises ConfigurationError for tables that cannot be written in one transaction.
        """
        routes = Routes.together(target.route() for target in self._targets)
        if len({route.target.schema for route in routes.all}) > 1:
            raise ConfigurationError(
                f"sink {self.name!r}: its tables {routes.label} are in several schemas, and one "
                "ledger beside them speaks for all: put them into one schema, or use a sink for "
                "each schema"
            )
        return routes

    def probe_schema(self) -> pa.Schema | None:
        """Return a schema of one column of the table with a type that fits the column.

        Return None if there is no table yet.
        """
        return None if self._routing else self._target.probe_schema()

    def check_with(self, others: Sequence[Sink]) -> None:
        """Raise ConfigurationError for a foreign key to the table of another sink of the job.

        Unless the rows of both are moved in one transaction, the database would judge a row before
        the rows of the same checkpoint that the row refers to are there.
        """
        targets = [route.target for route in self._routes().all]
        tables = [other for other in others if isinstance(other, TableSink)]
        if not any(target.foreign_keys for target in targets) or not tables:
            return
        own = self._located()
        with self._server.lend() as connection:
            referred = [
                (target, key, place)
                for target in targets
                for key in target.foreign_keys
                if (place := self._catalog.place(connection, key.schema, key.table))
                and place not in own
            ]
        problems = [
            f"the foreign key {key.name} of its table {target.label} refers to "
            f"{label(key.schema, key.table)}, into which sink {other.name!r} of this job writes"
            for other in tables
            if not self._moves_with(other) and (there := other._located())
            for target, key, place in referred
            if place in there
        ]
        if problems:
            raise ConfigurationError(
                f"sink {self.name!r}: {'; '.join(problems)}. Each sink commits by itself, so rows "
                f"would be judged too early. {self._one_transaction()}Write the two tables by two "
                "queries, or drop the foreign key"
            )

    def _moves_with(self, other: AnyTableSink) -> bool:
        """Tell whether one transaction moves the rows of both sinks."""
        strategies = {sink._routes().plan.strategy for sink in (self, other)}
        return (
            strategies == {"staged"} and self.place() is not None and self.place() == other.place()
        )

    def _one_transaction(self) -> str:
        """Say how to have one transaction for the rows of two sinks, if that is possible."""
        if self.place() is None:
            return ""
        return (
            'Give both sinks strategy="staged", the same DSN and the same connect_options, and one '
            "transaction moves the rows of both. Otherwise: "
        )

    def _located(self) -> list[tuple[object, ...]]:
        targets = [route.target for route in self._routes().all]
        with self._server.lend() as connection:
            places = [self._catalog.place(connection, each.schema, each.name) for each in targets]
        return [place for place in places if place]

    def _strategy_of(
        self, identity: Identity
    ) -> TwoPhase[ConnectionT, TargetT] | StagingTables[ConnectionT, TargetT]:
        return self._staged if _is_staged(identity) else self._two_phase

    def weaknesses(self) -> Sequence[str]:
        with self._server.lend() as connection:
            ask = partial(self._server.query, connection)
            found = [
                weakness
                for target in self._targets
                for weakness in weaknesses(self._dialect.name, ask, *target.locate(connection))
            ]
            return list(dict.fromkeys(found))

    # ------------------------------------------------------------------ changes of the table
    def evolve(self, schema: pa.Schema) -> None:
        with self._server.lend() as connection:
            self._target.evolve(connection, schema)
        self.check(schema)

    def schema_diff(self, batch: pa.Schema) -> SchemaDiff:
        if self._routing:
            return SchemaDiff(unfit=tuple(self._routing.problems(batch)))
        return self._target.schema_diff(batch)

    # ------------------------------------------------------------------ in the task
    def begin_transaction(self, context: TransactionContext) -> RowTransaction[ConnectionT]:
        routes = self._routes()
        if self._routing:
            return RoutedTransaction(context, self._routing, routes)
        return routes.all[0].begin(context)

    def write(self, transaction: RowTransaction[ConnectionT], batch: pa.RecordBatch) -> None:
        transaction.write(batch)

    def write_good_rows(
        self, transaction: RowTransaction[ConnectionT], batch: pa.RecordBatch, most: int
    ) -> Sequence[Refusal]:
        """Write the batch under savepoints, and return the rows that were refused.

        The client or the server refuses values that the columns cannot hold, and rows that
        constraints, domains and triggers reject by themselves.
        """
        return transaction.write_good_rows(batch, most)

    def record_fingerprint(
        self, transaction: RowTransaction[ConnectionT], fingerprint: Fingerprint
    ) -> None:
        transaction.fingerprint = fingerprint

    def pre_commit(self, transaction: RowTransaction[ConnectionT]) -> Committable:
        return self._strategy_of(transaction.identity).pre_commit(transaction, self._routes())

    def rollback(self, transaction: RowTransaction[ConnectionT]) -> None:
        """Roll the transaction back, and close its connection.

        If the statement that makes the transaction durable was sent, abort it by name as well.
        """
        transaction.discard()
        if transaction.may_be_durable:
            self.abort(transaction.identity)

    def commit_directly(self, transaction: RowTransaction[ConnectionT]) -> None:
        """Commit at once, at-least-once: no ledger row is written."""
        self._strategy_of(transaction.identity).commit_directly(transaction, self._routes())

    # ------------------------------------------------------------------ on the driver
    def place(self) -> Hashable | None:
        """Name the connection's parameters, by which one transaction can move staged rows."""
        return self._server.place

    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        """Reject what no staging table could see, such as duplicate keys and missing foreign keys.

        Only staged rows are looked at: a prepared transaction writes into the table itself, which
        has judged its rows.
        """
        self.validate_jointly(checkpoint, [(self, committables)])

    def validate_jointly(
        self, checkpoint: Checkpoint, shares: Sequence[tuple[Sink, Sequence[Committable]]]
    ) -> None:
        if staged := _staged_of(shares):
            self._staged.validate_all(
                checkpoint, [Share(s._staged, s._routes(), mine) for s, mine in staged]
            )

    def commit(self, committable: Committable) -> CommitOutcome:
        """Commit one partition.

        A staged partition is moved without the others of its checkpoint, which is right only if it
        is the last one.
        """
        [[outcome]] = self._commit([(self, [committable])])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def commit_all(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        """Commit the partitions of a checkpoint, whichever strategy wrote them.

        The staged partitions become visible together.
        """
        [outcomes] = self.commit_jointly(checkpoint, [(self, committables)])
        return outcomes

    def commit_jointly(
        self, checkpoint: Checkpoint, shares: Sequence[tuple[Sink, Sequence[Committable]]]
    ) -> Sequence[Sequence[CommitOutcome | Exception]]:
        """Commit the partitions of a checkpoint, whichever strategy wrote them.

        The staged partitions of all sinks become visible together. Prepared ones are committed one
        by one.
        """
        ended = []
        for sink, committables in shares:
            prepared = [c for c in committables if not _is_staged(c.transaction)]
            # for a few partitions, the connections that the pool keeps are enough; many partitions
            # get as many as it takes to be done soon
            threads = min(_COMMIT_THREADS, max(IDLE_CONNECTIONS, len(prepared) // 16))
            ended.append(iter(commit_in_threads(sink, prepared, threads)))
        staged = _staged_of(shares)
        names = [sink.name for sink, _ in staged]
        moved = dict(zip(names, map(iter, self._commit(staged) if staged else []), strict=True))
        return [
            [next(moved[sink.name] if _is_staged(c.transaction) else own) for c in committables]
            for (sink, committables), own in zip(shares, ended, strict=True)
        ]

    def _commit(
        self, shares: Sequence[tuple[AnyTableSink, Sequence[Committable]]]
    ) -> Sequence[Sequence[CommitOutcome | Exception]]:
        """Commit partitions that were all written by one strategy.

        Prepared ones come one at a time.
        """
        routes = []
        for sink, committables in shares:
            try:
                routes.append(sink._routes())
            except ConfigurationError as error:  # waiting does not bring back what is not there
                whereabouts = sink._strategy_of(committables[0].transaction).whereabouts(
                    committables
                )
                outcome = CommitOutcome.unknown(
                    f"{error}. {whereabouts}. Restore the table, or point the sink at the database "
                    "that has it"
                )
                return [
                    [outcome if other is sink else CommitOutcome.HELD] * len(theirs)
                    for other, theirs in shares
                ]
            except Exception as error:
                return [[error] * len(theirs) for _, theirs in shares]
        try:
            if all(_is_staged(c.transaction) for _, mine in shares for c in mine):
                return self._staged.commit(
                    [
                        Share(sink._staged, its, mine)
                        for (sink, mine), its in zip(shares, routes, strict=True)
                    ]
                )
            return [
                self._two_phase.commit(its, mine)
                for (_, mine), its in zip(shares, routes, strict=True)
            ]
        except Exception as error:
            if (fault := self._server.fault(error)) and fault.kind == "gone":
                for target in chain.from_iterable(sink._targets for sink, _ in shares):
                    target.forget_plan()  # it is made again before the next try
            return [[error] * len(theirs) for _, theirs in shares]

    def purge(self, checkpoint: Checkpoint) -> None:
        """Prune the ledger, once in `_PRUNE_EVERY` checkpoints."""
        if checkpoint.checkpoint_id % _PRUNE_EVERY == 0:
            with self._server.lend() as connection, self._server.transaction(connection):
                self._target.planned().ledger.prune(connection, checkpoint, self.name)

    def abort(self, transaction: Identity) -> None:
        with self._server.lend() as connection:
            self._strategy_of(transaction).abort(
                connection, self._target.ensured_ledger(connection), transaction
            )

    def owns(self, job: str, transaction: Identity) -> bool:
        with contextlib.suppress(LookupError):
            key = self._key(transaction)
            return key.startswith(TransactionId.prefix(job)) and of_sink(key, self.name)
        return False

    def in_doubt(self, job: str) -> Iterable[Identity]:
        with self._server.lend() as connection:
            schema, ledger = self._target.find_ledger(connection)
            return [
                *self._backend.prepared.in_doubt(connection, schema, job, self.name),
                *self._staged.in_doubt(connection, schema, ledger, job, self.name),
            ]

    def committed_checkpoints(self, job: str) -> Mapping[str, int]:
        """Return, by lineage, the newest checkpoint that the ledger knows to be committed."""
        if plan := self._target.plan:
            try:
                with self._server.lend() as connection:
                    plan.ledger.require_same(connection)
                    plan.ledger.witness.require_intact(connection)
                    return plan.ledger.newest(connection, job, self.name, is_witnessed=True)
            except Exception:
                logger.debug("sink %r looks for its ledger anew", self.name, exc_info=True)
        with self._server.lend() as connection:
            _, ledger = self._target.find_ledger(connection)
            return ledger.newest(connection, job, self.name) if ledger else {}

    # ------------------------------------------------------------------ for operators
    def diagnose(self, job: str) -> Iterable[Finding]:
        """Yield findings about the table, privileges and settings, then those of every sink.

        If there is an error, the findings of every sink are left out. The diagnosis may create the
        ledger, as the first batch would.
        """
        try:
            with self._target.usable_connection() as connection:
                each = (target.findings_of_table(connection) for target in self._targets)
                findings = [*chain.from_iterable(each), *self._target.findings(connection)]
        except Exception as error:
            what, _, fix = (
                self._server.misconfigured(error) or f"{type(error).__name__}: {error}"
            ).partition(". ")
            findings = [Finding.error(what, fix)]
        yield from findings
        if all(finding.severity is not Severity.ERROR for finding in findings):
            yield from super().diagnose(job)

    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        """Return what the ledger has of each part of a checkpoint."""
        with self._server.lend() as connection:
            _, ledger = self._target.find_ledger(connection)
            if ledger is None:
                gone = f"the ledger {self._ledger} is gone or was emptied"
                return Audit([Holding(remarks=(gone,))] * len(parts))
            return Audit(
                [ledger.holding(connection, job, self.name, part, self._key) for part in parts]
            )

    def lacks_characters(self) -> bool:
        return bool(self._target.planned().target.lacks_characters)

    def read_dead_letters(self, job: str, sink: str, most: int) -> DeadLetters:
        with self._server.lend() as connection:
            target = self._catalog.describe(connection, *self._target.locate(connection))
            if target is None:
                return DeadLetters(())
            quote = self._dialect.quote
            names = [name for name in SCHEMA.names if name in target.names]
            columns = ", ".join(map(quote, names))
            table = quote(target.schema, target.name)
            where = f"{quote('job')} = \0 AND {quote('sink')} = \0"
            statement = (
                f"SELECT {columns} FROM {table} WHERE {where} ORDER BY {quote('time')} DESC"
                " LIMIT \0"
            )
            statement = statement.replace("%", "%%").replace("\0", "%s")
            of = map(in_ascii, (job, sink)) if target.lacks_characters else (job, sink)
            rows = self._server.query(connection, statement, [*of, most])
            return DeadLetters([dict(zip(names, row, strict=True)) for row in rows])

    def _key(self, identity: Identity) -> str:
        return (
            str(identity["transaction_id"])
            if _is_staged(identity)
            else self._backend.prepared.key(identity)
        )

    # ------------------------------------------------------------------ life
    def describe_writing(self, written: Identity | None = None) -> str:
        """Tell the mode, the keys and the strategy.

        If `written` is given, the strategy is the one that `auto` took for it.
        """
        taken = self.strategy
        if written is not None:
            taken = "staged" if _is_staged(written) else self._backend.prepared.NAME
        chosen = f" ({self.strategy})" if taken != self.strategy else ""
        merges = dict.fromkeys(str(target.merge) for target in self._targets)
        return f"{', or '.join(merges)}; strategy {taken}{chosen}"

    def close(self) -> None:
        self._logged = ""
        for target in self._targets:
            target.close()
        self._server.close()

    def __repr__(self) -> str:
        what = f"name={self.name!r}, table={self.table!r}, strategy={self.strategy!r}"
        return f"{type(self).__name__}({what}, server={str(self._server)!r})"


def _staged_of(
    shares: Sequence[tuple[Sink, Sequence[Committable]]],
) -> list[tuple[AnyTableSink, list[Committable]]]:
    """Return what is staged of each share, without shares that have nothing staged."""
    staged = []
    for sink, committables in shares:
        mine = [c for c in committables if _is_staged(c.transaction)]
        if mine and isinstance(sink, TableSink):
            staged.append((sink, mine))
    return staged


def _is_staged(identity: Identity) -> bool:
    return "transaction_id" in identity


AnyTableSink: TypeAlias = TableSink[Any, Any]
"""A sink into a table of any database, for functions that take each of them."""
