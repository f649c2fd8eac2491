"""What one database does in its own way: transactions of tasks, and a `Backend`. All else of a sink into its tables is
concrete, and written over this."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import pyarrow as pa

from sinks.diagnosis import Finding
from sinks.errors import ConfigurationError, SchemaMismatch, SinkError
from sinks.sql.dialects import DATABASES, MYSQL, TRIGGERS
from sinks.sql.ledger import LEDGER_COLUMNS, Ledger, LedgerRow
from sinks.sql.names import label, witness_of
from sinks.sql.server import Fault, Row, batches, explained, marks
from sinks.sql.table import ForeignKey, MergeOptions, Target, Unique, mismatches
from sinks.transaction import Fingerprint, Identity, TransactionContext

logger = logging.getLogger(__name__)

Declared = TypeVar("Declared")
LEDGER_RIGHTS = ("SELECT", "INSERT", "DELETE")
_COUNTED_TOGETHER = 50
_INSERTED_TOGETHER = 1000
_NULL_IS_SAID = (*MYSQL, "mssql")
"""Dialects in which a column that says nothing may take no NULL. Others know no such word."""
StagedTypes: TypeAlias = Mapping[str, Mapping[str, str]]
"""By staging table, its columns in order, each with its type as the server writes it."""


class RowTransaction(ABC):
    """An open transaction, on a connection that it has to itself. `identity` is what it will be known by when it is
    pre-committed; `may_be_durable` is set just before the statement that makes it so, after which only the server knows
    whether it is. `fingerprint` is set before that."""

    connection: Any

    def __init__(
        self, context: TransactionContext, identity: Identity, table: str, fault: Callable[[Exception], Fault | None]
    ) -> None:
        """`table` is the target's name for a reader, and `fault` the backend's."""
        self.context, self.identity = context, identity
        self.table, self._fault = table, fault
        self.may_be_durable = False
        self.fingerprint: Fingerprint | None = None
        self.own_keys: Sequence[ForeignKey] = ()
        """Of one that writes into the target itself: the foreign keys by which the table refers to itself."""
        self.who = f"partition {context.subtask} of checkpoint {context.checkpoint_id}"
        """Who writes, in errors."""

    @contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def explained(self) -> AbstractContextManager[None]:
        """Errors of the server inside this block name table, partition and checkpoint."""
        return explained(self.judge, self.table, self.who)

    def judge(self, error: Exception) -> Fault | None:
        """What an error of the server is about, with what to do about a table that refers to itself."""
        known = self._fault(error)
        if known and (known.kind == "blocked" or known.kind == "refused"):
            return replace(known, advice=known.advice + self.elsewhere(known.text, waited=known.kind == "blocked"))
        return known

    def elsewhere(self, text: str, *, waited: bool = False) -> str:
        """What follows the server's words if they name a foreign key to the table itself, or it `waited` for a lock:
        the row that is missing may be another partition's."""
        names = [key.name for key in self.own_keys if waited or key.name in text]
        if not names:
            return ""
        return (
            f"; by {', '.join(names)} the table refers to itself, and the row that is missing may be in another "
            'partition, whose transaction is not committed yet, or come later: strategy="staged" takes such rows'
        )

    def write(self, batch: pa.RecordBatch) -> None:
        """Default: `put`, which may do more than is needed here."""
        self.put(batch)

    @abstractmethod
    def encode(self, batch: pa.RecordBatch) -> object:
        """Raises BadValue if the columns cannot hold the rows, as far as that can be told without the server."""

    @abstractmethod
    def put(self, batch: pa.RecordBatch) -> None:
        """Write the rows, all or none: none if this raises BadValue, after which the transaction goes on."""

    @abstractmethod
    def finish(self) -> int:
        """Wait until the server has judged every row; returns how many there were."""

    def prepare(self) -> None:
        """Of one that writes into the target itself: make it durable under its name, and let go of the connection.
        Default: of a database without prepared transactions, of which this is never asked."""
        raise NotImplementedError

    @abstractmethod
    def commit(self) -> None:
        """Commit it at once, and let go of the connection."""

    @abstractmethod
    def discard(self) -> None:
        """Roll it back. The server has done so when this returns, unless it cannot be reached."""


@dataclass(frozen=True)
class Plan:
    """What the driver found out about the server, carried to the tasks in the sink's pickle."""

    target: Any
    ledger: Ledger
    strategy: str


class NotEnded(SinkError):
    """The server answered that it has ended a prepared transaction, and has not."""


class Move(NamedTuple):
    """Staged rows on their way into the target, which is locked. `staging` are their tables, `tables` the same, quoted;
    `written` are the columns that they have for the target, and `types` those of all."""

    connection: Any
    target: Any
    staging: Sequence[str]
    tables: Sequence[str]
    written: Sequence[str]
    types: Mapping[str, str]


class Backend(ABC):
    """One kind of database as a sink uses it: its connections, the target, errors, two-phase transactions and staging
    tables. `strategy` is the one that the user asked for. `dialect` is SQLAlchemy's name for the kind of database, by
    which what is known of it is found; "" for one of which nothing is.

    In statements %s stands for a parameter and %% for a percent sign; one without parameters is taken as it is."""

    merge: MergeOptions
    strategy: str = "staged"
    dialect: str = ""

    DROPPED_TOGETHER: ClassVar[int] = 1
    """So many staging tables go in one transaction."""
    MOVED_TOGETHER: ClassVar[int] = 1
    """So many go into the target by one INSERT. All do if the table refers to itself: at the end of the statement a row
    may refer to another one of them."""
    SORTS_TEXTS: ClassVar[bool] = True
    """Whether it sorts by all of a long text."""
    HANDED_ON: ClassVar[str] = "can hand it on only in an index over whole columns that the batch has"
    """Follows "an upsert": in which unique indexes its rows hand on a value."""
    NO_TABLE_HINT: ClassVar[str] = ""
    """Follows "there is no table"."""
    CHECK: ClassVar[str] = "host, port, database, user, password and rights, and that the server runs"
    """What to check if the server cannot be reached, or lets nobody in."""
    TWO_PHASE: ClassVar[str] = ""
    """The name of the strategy in which each participant has a transaction of its own on the table."""
    KEY: ClassVar[str] = ""
    """Where the identity of a two-phase transaction has the name that the ledger knows."""
    INSERT_MISSING: ClassVar[str] = "INSERT INTO {table} ({columns}) VALUES {rows} ON CONFLICT DO NOTHING"
    """It skips rows whose key is there, and waits for those that are not committed yet."""
    NEWEST_FIRST: ClassVar[str] = "{} DESC"
    """Orders by a column, NULL at the end."""
    POSITION: ClassVar[str] = ""
    """What sorts the rows of a staging table as they were put in. "" if nothing does: then two changes of one key with
    an equal `order_by` are refused."""
    AS_TEXT: ClassVar[str] = "{}"
    """A value for a message, where the driver cannot read each one that a column may hold."""
    DELETE: ClassVar[str] = "DELETE FROM {target} AS target USING {rows} WHERE {condition}"
    UPDATE: ClassVar[str] = "UPDATE {target} AS target SET {sets} FROM {rows} WHERE {condition}"
    """Deletes rows of the target for which there are such `rows`."""

    # ------------------------------------------------------------------ connections and statements
    @abstractmethod
    def lend(self) -> AbstractContextManager[Any]: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def transaction(self, connection: Any, *, undo: bool = False) -> AbstractContextManager[None]:
        """One READ COMMITTED transaction, durable when it ends, rolled back if anything is raised, with bounded lock
        waits. With `undo` it is rolled back in any case."""

    def at_work(self, connection: Any) -> AbstractContextManager[None]:
        """Statements in this block may take long. Default: any may."""
        return contextlib.nullcontext()

    @abstractmethod
    def execute(self, connection: Any, statement: str, parameters: Sequence[object] = ()) -> int:
        """Run a statement; returns how many rows it changed."""

    @abstractmethod
    def query(self, connection: Any, statement: str, parameters: Sequence[object] = ()) -> list[Row]: ...

    def defer(
        self, connection: Any, statement: str, parameters: Sequence[object], judge: Callable[[list[Row]], object]
    ) -> object:
        """Query, at the latest with the next statement. `judge` gets the rows, and may raise. Default: now."""
        return judge(self.query(connection, statement, parameters))

    # ------------------------------------------------------------------ the ledger
    def insertions(self, ledger: str, rows: Sequence[LedgerRow]) -> Iterator[tuple[str, list[object]]]:
        """Statements, with parameters, that insert those rows into the (quoted) ledger whose primary key no row has."""
        for some in batches(rows, _INSERTED_TOGETHER):
            values = ", ".join([f"({marks(LEDGER_COLUMNS)})"] * len(some))
            statement = self.INSERT_MISSING.format(table=ledger, columns=", ".join(LEDGER_COLUMNS), rows=values)
            yield statement, [value for row in some for value in row]

    def insert_missing(self, connection: Any, inserts: Mapping[str, Sequence[LedgerRow]]) -> int:
        """Insert those rows whose primary key no row has into (quoted) ledgers; returns how many. Waits for others that
        insert the same keys, within the limit for lock waits."""
        parts = (part for ledger, rows in inserts.items() for part in self.insertions(ledger, rows))
        return sum(self.execute(connection, *part) for part in parts)

    # ------------------------------------------------------------------ the target
    @abstractmethod
    def locate(self, connection: Any, table: str) -> tuple[str, str]:
        """Schema and name of the table, which need not exist. Raises ConfigurationError if it is no table name."""

    @abstractmethod
    def describe(self, connection: Any, schema: str, name: str) -> Target | None:
        """The table, None if there is none. Raises ConfigurationError if it is something else."""

    def table_options(self, connection: Any) -> str:
        """What follows the columns in CREATE TABLE. Default: nothing."""
        return ""

    def create(self, connection: Any, schema: str, name: str, fields: Sequence[pa.Field]) -> None:
        """Create the table, with the keys as primary key. Raises ConfigurationError with the server's words."""
        keys = self.merge.keys
        kinds = declarations(fields, lambda field: self.declared(connection, field, key=field.name in keys))
        columns = [self.column(f.name, kind, nullable=f.nullable and f.name not in keys) for f, kind in kinds]
        if keys:
            columns.append(f"PRIMARY KEY ({self.quoted(keys)})")
        try:
            self.create_table(connection, schema, name, columns, self.table_options(connection))
        except Exception as error:
            fault = self.fault(error)
            if fault is None or fault.kind == "blocked":
                raise
            raise ConfigurationError(f"cannot create table {label(schema, name)} at {self}: {fault.text}") from error

    def place(self, connection: Any, schema: str, name: str) -> tuple[object, ...] | None:
        """What tells a table from those of all databases, as the server says it; None, where it is not known how to
        ask: of a `dialect` that `DATABASES` has not."""
        ask = DATABASES.get(self.dialect)
        return (*self.query(connection, ask)[0], schema, name) if ask else None

    def triggers(self, connection: Any, schema: str, name: str) -> Mapping[str, str]:
        """What the database runs for the rows of a table and may alter them, with definitions. None, where it is not
        known how to ask: of a `dialect` that `TRIGGERS` has not."""
        ask = TRIGGERS.get(self.dialect)
        return dict(self.query(connection, ask, [schema, name])) if ask else {}

    def require_known_triggers(self, connection: Any, target: Any) -> None:
        """Raise TargetChanged, at the latest with the next statement, if triggers are new or altered."""
        if ask := TRIGGERS.get(self.dialect):
            asked = [target.schema, target.name]
            self.defer(connection, ask, asked, lambda rows: target.require_known_triggers(dict(rows)))

    @abstractmethod
    def declared(self, connection: Any, field: pa.Field, *, key: bool) -> str:
        """The type of a column that is created for a field, as CREATE TABLE and ADD COLUMN have it; `key`: it gets an
        index. Raises SchemaMismatch for a type that has none, or a name that the server would not keep."""

    def column(self, name: str, kind: str, *, nullable: bool) -> str:
        """A column for CREATE TABLE and ADD COLUMN."""
        null = " NULL" if self.dialect in _NULL_IS_SAID else ""
        return f"{self.quote(name)} {kind}{null if nullable else ' NOT NULL'}"

    def create_table(self, connection: Any, schema: str, name: str, columns: Sequence[str], options: str = "") -> None:
        """Create a table, unless somebody else does at the same moment. Outside a transaction."""
        table = self.quote(schema, name)
        try:
            with self.transaction(connection):
                self.execute(connection, f"CREATE TABLE {table} ({', '.join(columns)}){options}")
        except Exception:
            there = False
            with contextlib.suppress(Exception):
                there = bool(self.existing(connection, schema, [name]))
            if not there:
                raise
            logger.debug("somebody else created %s at the same time", table)

    def definition(self, connection: Any, target: Any, field: pa.Field) -> str:
        """Name and type of a nullable column for ADD COLUMN. Raises SchemaMismatch."""
        return self.column(field.name, self.declared(connection, field, key=False), nullable=True)

    def missing_rights(
        self, connection: Any, target: Any, rights: Sequence[str], ledgers: Iterable[str] = (), create: bool = False
    ) -> Iterable[str]:
        """Which of these rights on the target the user lacks, or of those on ledgers, or to `create` tables, and how to
        give them. Default: none."""
        return ()

    def problems(self, connection: Any, target: Any, ledger: str) -> Iterable[str]:
        """What else is in the way: the index that upserts need, the server, rights."""
        if self.merge.keys and not target.is_unique(self.merge.keys):
            there = "".join(f"; {what}" for what in target.no_arbiters(self.merge.keys))
            yield (
                f"upsert by ({', '.join(self.merge.keys)}) needs a unique index on just these columns, whole ones, "
                f"neither partial nor deferrable, and without a period{there}"
            )
        if self.strategy not in ("auto", "staged") and (reason := self.no_two_phase(connection)):
            yield f'{reason}{", or" if ": " in reason else ":"} use strategy="staged"'
        strategy, _ = self.choose(connection, target)
        ledgers = self.existing(connection, target.schema, [ledger, witness_of(ledger)])
        create = strategy == "staged" or len(ledgers) < 2
        yield from self.missing_rights(connection, target, self.rights(target, strategy), ledgers, create)

    def choose(self, connection: Any, target: Any) -> tuple[str, str]:
        """The strategy and, in a few words, the reason for it."""
        if not self.TWO_PHASE:
            return "staged", "the only one for this database"
        if self.merge.mode == "upsert":
            return "staged", "upserts need it"
        if self.strategy != "auto":
            return self.strategy, "as configured"
        obstacle, _, _ = (self.no_two_phase(connection) or "").partition(": ")
        if obstacle:
            return "staged", obstacle
        if target.own_keys and not list(
            self.missing_rights(connection, target, self.rights(target, "staged"), create=True)
        ):
            return "staged", "the table refers to itself, and a row may need one of another partition"
        return self.TWO_PHASE, "server and rights allow it"

    def no_two_phase(self, connection: Any) -> str | None:
        """Why there can be no prepared transactions here, in a few words, and behind a colon what to do. Default: of a
        database that has none, which is never asked."""
        return None

    def unfit_server(self, connection: Any) -> str | None:
        """Why the sink cannot work with this server at all. Default: it can with any."""
        return None

    def findings(self, connection: Any) -> Iterable[Finding]:
        """What `coordinator doctor` is to say about this kind of server. Default: nothing."""
        return ()

    # ------------------------------------------------------------------ errors
    @abstractmethod
    def fault(self, error: Exception) -> Fault | None:
        """What an error of the server is about; None for a lost connection, and what is no error of the server."""

    def misconfigured(self, error: Exception) -> str | None:
        """What an error means to somebody who sets up the sink; None to let it pass."""
        fault = self.fault(error)
        if fault and fault.kind == "blocked":
            where = f"table or ledger at {self}"
            return f"somebody locks {where} for longer than the sink waits: {fault.text}{fault.advice}"
        if fault and fault.kind == "right":
            return f"the user lacks a right at {self}: {fault.text}"
        text = self.unreachable(error)
        return None if text is None else f"{text}. Check {self.CHECK}"

    def unreachable(self, error: Exception) -> str | None:
        """The driver's words where the server could not be reached, without the password. Default: what is no `fault`
        is for the driver's error to say."""
        return None

    # ------------------------------------------------------------------ two-phase transactions
    # Defaults: a database that has none, whose `TWO_PHASE` is "" and whose `choose` says `staged`.
    def begin(self, plan: Plan, context: TransactionContext) -> RowTransaction:
        """Open the participant's transaction, whose rows go into the target itself."""
        raise NotImplementedError

    def end_prepared(
        self, connection: Any, ledger: Ledger, how: str, identity: Identity, proof: Mapping[str, object]
    ) -> bool:
        """COMMIT or ROLLBACK what is prepared; False if nothing is under this name. `proof`: of the committable. Raises
        ConfigurationError if the sink may not, NotEnded where the server answered and did not do it, and the driver's
        errors to be asked again."""
        raise ConfigurationError(
            f"{dict(identity)} is a prepared transaction, and this sink has none: let the program that prepared it "
            "start once more and finish its last checkpoint, then start this one"
        )

    def prepared(self, connection: Any, schema: str, job: str, sink: str) -> Iterable[Identity]:
        """What is prepared of this job and sink."""
        return ()

    def key(self, identity: Identity) -> str:
        """What the ledger knows a prepared transaction by."""
        return str(identity[self.KEY])

    def evidence(self, transaction: Any) -> dict[str, object]:
        """What a committable carries beside the ledger's proof. `transaction_id` is needed where `key` is another."""
        return {}

    def contradiction(self, connection: Any, proof: Mapping[str, object]) -> str | None:
        """Why a transaction of which the ledger has nothing can nevertheless not be called lost."""
        return None

    # ------------------------------------------------------------------ staging tables
    def existing(self, connection: Any, schema: str, names: Sequence[str]) -> set[str]:
        """Those of the names that a table has, be it a staging table or another one."""
        return set(self.staged_types(connection, schema, names))

    def unstageable(self, connection: Any, target: Any, batch: pa.Schema) -> Iterable[str]:
        """Why there can be no staging table for rows of `batch`, which fit the target, and what to do. Default: there
        can be one wherever there is a target."""
        return ()

    @abstractmethod
    def stage(self, plan: Plan, context: TransactionContext) -> RowTransaction:
        """Open the participant's transaction, which writes into a new table, its `staging_table`. The table tells the
        transaction's id from its first moment on. It has just the columns of the batch, also those that are only for
        the merge; what the target has as NOT NULL only a row that deletes may leave out, but for its keys. The
        identity is `sinks.sql.strategies.identity_of`."""

    @abstractmethod
    def staged_types(self, connection: Any, schema: str, tables: Sequence[str]) -> StagedTypes:
        """Of the staging tables that are there. A column that only the table itself needs is left out."""

    @abstractmethod
    def staged(self, connection: Any, schema: str, prefix: str) -> list[str]:
        """The transaction ids of all staging tables that begin so, sorted: those of tasks that died before their
        pre-commit, and of participants that were moved, too."""

    def drop(self, connection: Any, schema: str, names: Sequence[str]) -> None:
        """Drop staging tables, outside a transaction."""
        for some in batches(names, self.DROPPED_TOGETHER):
            tables = ", ".join(self.quote(schema, name) for name in some)
            with self.transaction(connection):
                self.execute(connection, f"DROP TABLE {tables}")

    def drop_unused(self, connection: Any, schema: str, names: Sequence[str]) -> None:
        """Drop those that nobody reads now. The next sweep drops the others."""
        for some in batches(names, self.DROPPED_TOGETHER):
            try:
                self.drop(connection, schema, some)
            except Exception as error:
                if (fault := self.fault(error)) is None:
                    raise
                if len(some) > 1 and fault.kind != "blocked":  # one that cannot be dropped keeps no other
                    for name in some:
                        self.drop_unused(connection, schema, [name])
                    continue
                logger.warning("staging tables in %s were moved and could not be dropped yet: %s", schema, fault.text)

    def staging_columns(self, target: Any, batch: pa.Schema, extra: Callable[[pa.Field], Any]) -> list[Any]:
        """The target's columns that are written, keys as NOT NULL; and those that only the merge looks at, as `extra`
        makes them. Raises SchemaMismatch."""
        written, keys = self.merge.written(batch.names, target.names), self.merge.keys
        columns = [replace(c, nullable=c.nullable and c.name not in keys) for c in target.columns if c.name in written]
        others = declarations((field for field in batch if field.name not in written), extra)
        return columns + [column for _, column in others]

    # ------------------------------------------------------------------ the move
    def locked(self, connection: Any, plan: Plan, staged: StagedTypes) -> Move:
        """These staging tables and the target as the running transaction sees it, locked against changes until its end.
        Raises ConfigurationError that says what was changed, and what to change back, if their rows cannot go into it
        as they are. What is new in the table may bind rows that the staging tables took, so it is a constraint."""
        known, types = plan.target, sorted({column for columns in staged.values() for column in columns.items()})
        written = self.merge.written(list(dict(types)), known.names)
        not_locked = self.lock(connection, plan, written)
        target: Target | None = self.describe(connection, known.schema, known.name)
        reasons = [f"it is gone: create it again as it was, columns {', '.join(known.names)}"]
        if target is not None:
            tables = [self.quote(known.schema, name) for name in staged]
            columns = self.merge.written(list(dict(types)), target.names)  # also what was added for the merge meanwhile
            move = Move(connection, target, list(staged), tables, columns, dict(types))
            reasons = [*target.unfit(list(dict.fromkeys([*written, *columns])), types)]
            if self.merge.keys and not target.is_unique(self.merge.keys):
                keys = ", ".join(self.merge.keys)
                there = "".join(f"; {what}" for what in target.no_arbiters(self.merge.keys))
                reasons.append(f"it has no unique index on ({keys}) any more that upserts can go by{there}: undo that")
            reasons = reasons or [*self.changes_since(move)] or ([not_locked] if not_locked else [])
        if reasons or target is None:
            raise ConfigurationError(f"table {known.label} was changed while the query ran: {'; '.join(reasons)}")
        self.require_known_triggers(connection, known)
        if target == known:
            return move
        return move._replace(target=replace(target, constraints=(*target.constraints, "what is new in the table")))

    def lock(self, connection: Any, plan: Plan, written: Sequence[str]) -> str | None:
        """Let nobody alter the table until the transaction ends; or why that cannot be. Default: by an INSERT of no
        rows, as far as the database has a lock for it."""
        table = self.quote(plan.target.schema, plan.target.name)
        known = [name for name in written if name in plan.target.names]
        rows = f"SELECT {self.quoted(known)} FROM {table} WHERE 1 = 0"
        self.execute(connection, f"{self.into(plan.target, known)} {rows}")
        return None

    def changes_since(self, move: Move) -> Iterable[str]:
        """What else keeps rows out of the locked table, such as a NULL that it would take for a number. Default:
        nothing."""
        return ()

    def append(self, move: Move, rows: int | None) -> None:
        """Put the rows of all staging tables into the target, in the caller's transaction. Raises SinkError if there
        are not `rows` of them, the driver's error if the target refuses one."""
        into, names, moved = self.into(move.target, move.written), self.quoted(move.written), 0
        for some in batches(move.tables, len(move.tables) if move.target.own_keys else self.MOVED_TOGETHER):
            moved += self.execute(move.connection, f"{into} {self.union(some, names)}")
        if moved != rows:  # by a trigger or rule of the target, or because somebody changed a staging table
            self.count(move, rows)

    @abstractmethod
    def upsert(self, move: Move) -> None:
        """Put the last change of each key into the target, in the caller's transaction."""

    def mark_moved(self, connection: Any, schema: str, names: Sequence[str]) -> None:
        """Drop these tables, whose rows were moved in the running transaction, or leave them another number of rows:
        they fail the count then, and are never moved twice, even if the ledger is emptied. Default: no rows."""
        for name in names:
            self.execute(connection, f"DELETE FROM {self.quote(schema, name)}")

    def try_out(self, move: Move) -> None:
        """Try what tells more than a look at the table did, such as to insert one row. Default: nothing does."""
        return

    def first_duplicate(self, move: Move, columns: Sequence[str]) -> Row | None:
        """Values of these columns that more than one staged row has, and how many have them."""
        keys = [self.grouped(move.target, column) for column in columns]
        names, shown = ", ".join(keys), ", ".join(map(self.AS_TEXT.format, keys))
        known = " AND ".join(f"{self.quote(column)} IS NOT NULL" for column in columns)
        staged = self.union(move.tables, self.quoted(columns))
        rows = self.query(
            move.connection,
            f"SELECT {shown}, count(*) FROM ({staged}) AS staged WHERE {known}"
            f" GROUP BY {names} HAVING count(*) > 1 LIMIT 1",
        )
        return next(iter(rows), None)

    def grouped(self, target: Any, column: str) -> str:
        """What equal values of a column are grouped by."""
        return self.quote(column)

    def count(self, move: Move, rows: int | None) -> None:
        """Raise SinkError if the staging tables do not hold so many rows; None: they may hold any number."""
        staged = 0
        for some in batches(move.tables, _COUNTED_TOGETHER):
            counts = (f"SELECT count(*) AS n FROM {table}" for table in some)
            ((count,),) = self.query(move.connection, f"SELECT sum(n) FROM ({' UNION ALL '.join(counts)}) counted")
            staged += int(count)
        if rows not in (staged, None):
            raise SinkError(
                f"the staging tables hold {staged} rows, and their tasks acknowledged {rows}: somebody changed one, or "
                "emptied the ledger after they were moved"
            )

    def constraints(self, move: Move) -> list[str]:
        """What only the target itself can judge of rows. If there is any, a move is tried before the decision."""
        target, written, upsert = move.target, set(move.written), self.merge.mode == "upsert"
        differing = {c.name for c in target.columns if c.counter or (c.nullable and not c.has_default)} - written
        reasons = list(target.constraints)
        for unique in target.uniques:
            columns = set(unique.columns)
            is_judged = columns == set(self.merge.keys) if upsert else columns <= written and not unique.nulls_equal
            may_clash = not columns & differing or unique.nulls_equal or (upsert and columns & written)
            if (unique.period or not is_judged) and may_clash:
                reasons.append(f"index {unique.name}")
        return reasons + (list(target.referenced_by) if upsert else [])

    # ------------------------------------------------------------------ parts of statements
    def quote(self, *names: str) -> str:
        """An identifier of one or more parts, of which the first may be empty. Default: as in standard SQL."""
        return ".".join('"' + name.replace('"', '""') + '"' for name in names if name)

    def quoted(self, columns: Iterable[str]) -> str:
        """Identifiers, as a list."""
        return ", ".join(self.quote(column) for column in columns)

    def into(self, target: Any, written: Sequence[str]) -> str:
        """The INSERT, before its rows."""
        return f"INSERT INTO {self.quote(target.schema, target.name)} ({self.quoted(written)})"

    def union(self, tables: Sequence[str], columns: str) -> str:
        """A SELECT for each staging table, of which there are as many as Spark has partitions."""
        return " UNION ALL ".join(f"SELECT {columns} FROM {table}" for table in tables)

    def equal(self, left: str, right: str, columns: Sequence[str], *, nulls: bool = False) -> str:
        """`nulls`: of indexes that take NULL for a value."""
        names, operator = map(self.quote, columns), "IS NOT DISTINCT FROM" if nulls else "="
        return " AND ".join(f"{left}.{name} {operator} {right}.{name}" for name in names)

    def clash(self, left: str, right: str, columns: Sequence[str], unique: Unique) -> str:
        """The condition for two rows that a unique index does not take together, as far as these columns of it tell.
        They have both bounds of its period, or the bounds are left out."""
        period = unique.period or ()
        equal = [column for column in columns if column not in period]
        conditions = [self.equal(left, right, equal, nulls=unique.nulls_equal)] if equal else []
        if period and set(period) <= set(columns):
            begin, end = map(self.quote, period)
            conditions.append(f"{left}.{begin} < {right}.{end} AND {right}.{begin} < {left}.{end}")
        return " AND ".join(conditions) or "TRUE"

    def last(self, move: Move) -> str:
        """The last change of each key, over all staging tables. Of equals that one which came last in its partition;
        validated: those of several partitions are the same row."""
        names = self.quoted(self._looked_at(move))
        if not self.merge.order_by:  # validated: every key is there once
            return self.union(move.tables, names)
        staged = self.union(move.tables, f"{names}, {self.POSITION or 0} AS tpc_row")
        order = f"{self._newest_first(move)}, tpc_row DESC"
        place = f"row_number() OVER (PARTITION BY {self.quoted(self.merge.keys)} ORDER BY {order}) AS tpc_place"
        ranked = f"SELECT {names}, {place} FROM ({staged}) AS staged"
        return f"SELECT {names} FROM ({ranked}) AS ranked WHERE tpc_place = 1"

    def first_tie(self, move: Move) -> Row | None:
        """Key and `order_by` for which the last changes of two or more partitions are equal by `order_by` and are not
        the same row, and how many these are. Looked for in two steps, since most batches have no such equals."""
        keys, by = self.merge.keys, str(self.merge.order_by)
        groups = [*(self.grouped(move.target, key) for key in keys), self.sorted_by(move, by)]
        alike = f" GROUP BY {', '.join(groups)} HAVING"
        staged = self._numbered(move, self.quoted([*keys, by]))
        equals = f"SELECT 1 FROM ({staged}) AS staged{alike} min(tpc_part) < max(tpc_part) LIMIT 1"
        if len(move.tables) < 2 or not self.query(move.connection, equals):
            return None
        shown = ", ".join(map(self.AS_TEXT.format, groups))
        rows = self.query(
            move.connection,
            f"SELECT {shown}, count(*) FROM ({self._candidates(move)}) AS ranked WHERE tpc_place = 1 AND tpc_last = 1"
            f"{alike} {self._differ(move)} LIMIT 1",
        )
        return next(iter(rows), None)

    def _candidates(self, move: Move) -> str:
        """All staged changes. `tpc_place` is 1 if none of the key is newer by `order_by`, and `tpc_last` if none of the
        key and partition came later."""
        names, keys, newest = self.quoted(self._looked_at(move)), self.quoted(self.merge.keys), self._newest_first(move)
        place = f"rank() OVER (PARTITION BY {keys} ORDER BY {newest}) AS tpc_place"
        last = f"row_number() OVER (PARTITION BY {keys}, tpc_part ORDER BY {newest}, tpc_row DESC) AS tpc_last"
        return f"SELECT {names}, {place}, {last} FROM ({self._numbered(move, names)}) AS staged"

    def _differ(self, move: Move) -> str:
        """The condition for a group of changes that do not all come to the same. Two deletes do."""
        values = [self.compared(move.target, column) for column in move.written if column != self.merge.order_by]
        if self.merge.delete_marker:
            deletes = f"{self.quote(self.merge.delete_marker)} IS TRUE"
            values = [f"CASE WHEN {deletes} THEN NULL ELSE {value} END" for value in values]
            values.append(f"CASE WHEN {deletes} THEN 1 ELSE 0 END")
        rules = (f"min({v}) <> max({v}) OR count({v}) BETWEEN 1 AND count(*) - 1" for v in values)
        return " OR ".join(rules)

    def compared(self, target: Any, column: str) -> str:
        """What equal values of any column have in common, and others have not."""
        return self.quote(column)

    def _numbered(self, move: Move, names: str) -> str:
        """These columns of all staged rows, with the number of their staging table and the place there."""
        columns = f"{names}, {self.POSITION} AS tpc_row"
        numbered = [f"(SELECT {columns}, {n} AS tpc_part FROM {table}) AS t{n}" for n, table in enumerate(move.tables)]
        return self.union(numbered, "*")

    def _looked_at(self, move: Move) -> list[str]:
        """The columns that are written, and those that only the merge looks at."""
        others = [column for column in (self.merge.order_by, self.merge.delete_marker) if column]
        return [*move.written, *(column for column in others if column not in move.written)]

    def _newest_first(self, move: Move) -> str:
        return self.NEWEST_FIRST.format(self.sorted_by(move, str(self.merge.order_by)))

    def sorted_by(self, move: Move, column: str) -> str:
        """An expression by which changes are sorted as Spark would: of a text, byte by byte, where that can be had."""
        return self.quote(column)

    def stays(self, rows: str) -> str:
        """The condition for rows that are no deletes."""
        return f"{rows}.{self.quote(self.merge.delete_marker)} IS NOT TRUE" if self.merge.delete_marker else "TRUE"

    def not_older(self, change: str = "last") -> str:
        """With `keep_newer`, what a change has to meet beside the key to replace the row `target`."""
        if not self.merge.keep_newer:
            return ""
        by = self.quote(str(self.merge.order_by))
        return f" AND (target.{by} IS NULL OR target.{by} <= {change}.{by})"

    def delete(self, move: Move, last: str) -> None:
        """Delete the rows whose last change is a delete. In a table that refers to itself, the database would refuse
        that, or a cascade would take rows, while others still refer to them: those that move away go first, and of
        those that are deleted the ones to which none of the others refers."""
        if not self.merge.delete_marker:
            return
        for statement in self.move_away(move, last):
            self.execute(move.connection, statement)
        same = f"{self.equal('target', 'last', self.merge.keys)}{self.not_older()}"
        condition = f"{self._goes('last')} AND {same}"
        target = self.quote(move.target.schema, move.target.name)
        rows = f"({last}) AS last"
        if free := self._referred_by_none_that_goes(move, last):
            leaves = self.DELETE.format(target=target, rows=rows, condition=f"{condition} AND {free}")
            while self.execute(move.connection, leaves):
                pass
        self.execute(move.connection, self.DELETE.format(target=target, rows=rows, condition=condition))

    def move_away(self, move: Move, last: str) -> list[str]:
        """Statements, for each foreign key of the table to itself, by which the changed rows let go of what they
        referred to, if the batch deletes anything: they refer to their new row, or to nothing if that is yet to
        come."""
        if not self.merge.delete_marker:
            return []
        statements: list[str] = []
        nullable = {column.name for column in move.target.columns if column.nullable}
        table = self.quote(move.target.schema, move.target.name)
        deletes = f"EXISTS (SELECT 1 FROM ({last}) AS deletion WHERE {self._goes('deletion')})"
        for key in move.target.own_keys:
            if not key.columns or not set(key.columns) <= set(move.written):
                continue
            pairs = [
                (self.quote(column), self.quote(own)) for column, own in zip(key.columns, key.referred, strict=True)
            ]
            given = " AND ".join(f"target.{column} IS NOT NULL" for column, _ in pairs)
            moved = f"NOT COALESCE({self.equal('last', 'target', key.columns)}, FALSE)"
            same = f"{self.equal('target', 'last', self.merge.keys)}{self.not_older()}"
            due = f"{same} AND {self.stays('last')} AND {given} AND {moved} AND {deletes}"
            nothing = " OR ".join(f"last.{column} IS NULL" for column, _ in pairs)
            there = " AND ".join(f"parent.{own} = last.{column}" for column, own in pairs)
            new_rows = f"({last}) AS last LEFT JOIN {table} AS parent ON {there}"
            is_there = f"({nothing} OR parent.{pairs[0][1]} IS NOT NULL)"
            statements.append(
                self._set(table, {column: f"last.{column}" for column, _ in pairs}, new_rows, f"{due} AND {is_there}")
            )
            if set(key.columns) <= nullable:
                nothing_yet = {column: "NULL" for column, _ in pairs}
            elif set(key.referred) == set(self.merge.keys):
                nothing_yet = {column: f"target.{own}" for column, own in pairs}  # the row itself is there
            else:
                continue
            statements.append(self._set(table, nothing_yet, f"({last}) AS last", due))
        return statements

    def _pairs(self, key: ForeignKey) -> list[tuple[str, str]]:
        """Each (quoted) column, and the one that it refers to."""
        return [(self.quote(column), self.quote(own)) for column, own in zip(key.columns, key.referred, strict=True)]

    def _goes(self, rows: str) -> str:
        """The condition for rows that delete."""
        return f"{rows}.{self.quote(str(self.merge.delete_marker))} IS TRUE"

    def _set(self, table: str, values: Mapping[str, str], rows: str, condition: str) -> str:
        sets = ", ".join(f"{column} = {value}" for column, value in values.items())
        own_sets = ", ".join(f"target.{column} = {value}" for column, value in values.items())
        return self.UPDATE.format(target=table, sets=sets, own_sets=own_sets, rows=rows, condition=condition)

    def _referred_by_none_that_goes(self, move: Move, last: str) -> str:
        """The condition for rows to which no other row refers that the batch deletes; "" if the table does not refer to
        itself."""
        table = self.quote(move.target.schema, move.target.name)
        conditions = []
        for key in move.target.own_keys:
            pairs = [
                (self.quote(column), self.quote(own)) for column, own in zip(key.columns, key.referred, strict=True)
            ]
            if not pairs:
                continue
            columns = ", ".join(f"child.{column}" for column, _ in pairs)
            to_itself = " AND ".join(f"child.{column} = child.{own}" for column, own in pairs)
            # DISTINCT: MySQL reads the table that it deletes from only through a result of its own
            children = (
                f"SELECT DISTINCT {columns} FROM {table} AS child CROSS JOIN ({last}) AS gone"
                f" WHERE {self.equal('child', 'gone', self.merge.keys)} AND {self._goes('gone')}"
                f" AND NOT COALESCE({to_itself}, FALSE)"
            )
            refers = " AND ".join(f"held.{column} = target.{own}" for column, own in pairs)
            conditions.append(f"NOT EXISTS (SELECT 1 FROM ({children}) AS held WHERE {refers})")
        return " AND ".join(conditions)

    def takes(self, move: Move) -> list[str]:
        """Conditions, one for each other unique index, by which a change `taker` may get what the row `target` has."""
        takes = []
        for unique in move.target.uniques:
            columns = [column for column in unique.columns if column in move.written]
            if columns and set(unique.columns) != set(self.merge.keys):
                takes.append(f"({self.clash('taker', 'target', columns, unique)})")
        return takes

    def _keeps_rows(self, target: Target) -> list[str]:
        """Foreign keys, triggers and rules for which a row of the table cannot go out and come back."""
        judges = [judge for judge in target.constraints if judge.startswith(("trigger ", "rule "))]
        return [*target.referenced_by, *judges]

    def of_move(self, target: Target, error: Exception) -> Fault | None:
        """What an error of the move is about. Of an upsert that meets a value of another row it says when rows of one
        batch can hand the value on."""
        fault = self.fault(error)
        if fault is None or not fault.clash or self.merge.mode != "upsert":
            return fault
        keeps = self._keeps_rows(target)
        why = f"cannot hand it on in this table, because of {keeps[0]}" if keeps else self.HANDED_ON
        advice = (
            f"; if a row of the same batch gives this value up, an upsert {why}. Let that row give it up in an earlier "
            "checkpoint"
        )
        return replace(fault, advice=fault.advice + advice)

    def hands_on_unique_value(self, move: Move, last: str) -> str | None:
        """The condition for rows `target`, with the change `last` of their key, whose value of another unique index a
        change of another key takes: one that is changed first would meet what the other is yet to give up. None if
        there can be none, or if a row cannot go in anew: foreign keys and triggers would take that for a delete."""
        target, keys, takes = move.target, self.merge.keys, self.takes(move)
        if not takes or self._keeps_rows(target):
            return None
        other = f"NOT ({self.equal('taker', 'target', keys)}) AND {self.stays('taker')}"
        return (
            f"{self.equal('target', 'last', keys)}{self.not_older()} AND EXISTS (SELECT 1 FROM ({last}) AS taker"
            f" WHERE ({' OR '.join(takes)}) AND {other})"
        )

    # ------------------------------------------------------------------ alike
    def mismatches(self, batch: pa.Schema, target: Any) -> list[str]:
        """Every reason why the columns do not fit."""
        return mismatches(batch, target.columns)

    def destination(self, target: Any) -> str:
        """Where rows go, and how, in the words by which committables are compared."""
        return f"{target.label} ({self.merge})"

    def rights(self, target: Any, strategy: str) -> list[str]:
        """What the sink has to be allowed to do with the target."""
        upsert = self.merge.mode == "upsert"
        needed = {
            "INSERT": True,
            "SELECT": strategy == "staged" and (upsert or target.uniques),
            "UPDATE": upsert,
            "DELETE": self.merge.delete_marker,
        }
        return [right for right, is_needed in needed.items() if is_needed]


def declarations(
    fields: Iterable[pa.Field], declare: Callable[[pa.Field], Declared]
) -> list[tuple[pa.Field, Declared]]:
    """Each field with the type that a created table has for it. Raises SchemaMismatch that names the column."""
    declared = []
    for field in fields:
        try:
            declared.append((field, declare(field)))
        except SchemaMismatch as unfit:
            raise SchemaMismatch(f'column "{field.name}": {unfit}') from None
    return declared


def by_table(rows: Iterable[Row]) -> StagedTypes:
    """Of rows of table, column and type."""
    tables: dict[str, dict[str, str]] = {}
    for table, column, kind in rows:
        tables.setdefault(table, {})[column] = kind
    return tables
