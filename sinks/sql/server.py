"""One database as a sink reaches it: connections, statements, transactions, and errors."""

from __future__ import annotations

import contextlib
import hashlib
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar

from sinks._util.idle_connections import Closable, disconnect, put_back, take
from sinks._util.log import get_logger
from sinks.diagnosis import Finding
from sinks.errors import BadValue, ConfigurationError, SinkError, TransactionBlocked
from sinks.options import Duration, seconds_of_sink
from sinks.sql.dialect import Dialect
from sinks.sql.names import target_named

logger = get_logger(__name__)

IDLE_CONNECTIONS = 4
PERCENT_ENCODED = (
    "write '@', ':', '/', '?', '#' and '%' in user, password and database as %40, %3A, %2F, %3F, "
    "%23 and %25"
)
KEEPALIVES = {"keepalives_idle": 20, "keepalives_interval": 10}
"""libpq's parameters, in seconds, by which it notices that a peer has vanished."""
_TRUSTED_SECONDS = 5

Row: TypeAlias = tuple[Any, ...]
"""A row as a driver returns it."""
ConnectionT = TypeVar("ConnectionT", bound=Closable)


class HasDescriptor(Protocol):
    """A connection that tells the file descriptor of its socket."""

    def fileno(self) -> int: ...


class Server(ABC, Generic[ConnectionT]):
    """Reach one database: lend connections, run statements and transactions, and explain errors.

    It is pickled to the executors, so it holds no open connection there. `str` of it tells which
    database it is, and never a password.
    """

    CHECK: ClassVar[str] = (
        "host, port, database, user, password and rights, and that the server runs"
    )
    """The things to check if the server cannot be reached, or lets nobody in."""

    dialect: Dialect[Any]

    # ------------------------------------------------------------------ connections
    @abstractmethod
    def lend(self) -> AbstractContextManager[ConnectionT]:
        """Lend a connection for the block."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections that nobody uses."""

    @property
    def place(self) -> Hashable | None:
        """What sinks have in common if one transaction can move the rows of all of them.

        That is the database, and the user. By default each sink moves its rows by itself, as it
        must if its database overrides `Staging.upsert`.
        """
        return None

    # ------------------------------------------------------------------ statements and transactions
    @abstractmethod
    def transaction(
        self, connection: ConnectionT, *, undo: bool = False
    ) -> AbstractContextManager[None]:
        """Run the block as one READ COMMITTED transaction with bounded lock waits.

        The transaction is durable when the block ends, and rolled back if anything is raised. With
        `undo` it is rolled back in any case.
        """

    def at_work(self, connection: ConnectionT) -> AbstractContextManager[None]:
        """Let statements in the block take long. By default any statement may."""
        return contextlib.nullcontext()

    @abstractmethod
    def execute(
        self, connection: ConnectionT, statement: str, parameters: Sequence[object] = ()
    ) -> int:
        """Run a statement; return how many rows it changed."""

    @abstractmethod
    def query(
        self, connection: ConnectionT, statement: str, parameters: Sequence[object] = ()
    ) -> list[Row]:
        """Run a statement; return its rows."""

    def defer(
        self,
        connection: ConnectionT,
        statement: str,
        parameters: Sequence[object],
        judge: Callable[[list[Row]], object],
    ) -> object:
        """Run a statement at the latest with the next one.

        `judge` gets the rows, and may raise. By default the statement runs now.
        """
        return judge(self.query(connection, statement, parameters))

    def insert_missing(
        self,
        connection: ConnectionT,
        columns: Sequence[str],
        inserts: Mapping[str, Sequence[Sequence[object]]],
    ) -> int:
        """Insert the rows whose primary key no row has; return how many these are.

        `inserts` has the rows of each (quoted) table, and `columns` are those of every table. If
        others insert the same keys, the insert waits for them, within the limit for lock waits.
        """
        statements = [
            statement
            for table, rows in inserts.items()
            for statement in self.dialect.insertions(table, columns, rows)
        ]
        return sum(self.execute(connection, *statement) for statement in statements)

    def describe_loading(self, connection: ConnectionT) -> str:
        """Tell by which statement rows go in, for the log; "" if that goes without saying."""
        return ""

    # ------------------------------------------------------------------ whether it will do
    def unfit(self, connection: ConnectionT) -> str | None:
        """Tell why the sink cannot work with this server at all; return None if it can.

        By default it can work with any server.
        """
        return None

    def findings(self, connection: ConnectionT) -> Iterable[Finding]:
        """Return what `coordinator doctor` is to say about this kind of server.

        By default it is nothing.
        """
        return ()

    # ------------------------------------------------------------------ errors
    @abstractmethod
    def fault(self, error: Exception) -> Fault | None:
        """Tell what an error of the server is about.

        Return None for a lost connection, and for what is not an error of the server.
        """

    def misconfigured(self, error: Exception) -> str | None:
        """Tell what an error means to a person who sets up the sink; return None to let it pass."""
        fault = self.fault(error)
        if fault and fault.kind == "blocked":
            where = f"table or ledger at {self}"
            return (
                f"somebody locks {where} for longer than the sink waits: {fault.text}{fault.advice}"
            )
        if fault and fault.kind == "privilege":
            return f"the user lacks a right at {self}: {fault.text}"
        text = self.unreachable(error)
        return None if text is None else f"{text}. Check {self.CHECK}"

    def unreachable(self, error: Exception) -> str | None:
        """Return the driver's words if the server could not be reached, without the password.

        Otherwise return None. That is also the default: the driver's own error speaks then.
        """
        return None


class Pool(Server[ConnectionT]):
    """Lend a few connections again and again.

    All of them are in autocommit mode, and the sink begins every transaction by a statement.
    """

    SECRETS: ClassVar[tuple[str, ...]] = ("password",)  # parameters that are passwords
    # those that tell which database it is
    SHOWN: ClassVar[tuple[str, ...]] = ("host", "port", "database", "user")
    # whether the next task of a process may take one that was given back
    KEEPS_IDLE: ClassVar[bool] = False
    IDLE: ClassVar[int] = IDLE_CONNECTIONS  # so many are kept for the next who needs one

    def __init__(
        self,
        dialect: Dialect[Any],
        parameters: Mapping[str, Any],
        *,
        name: str,
        lock_timeout: Duration,
    ) -> None:
        """Keep the driver's `parameters` for connections; nothing is connected yet.

        `name` is the sink's.

        Raises ConfigurationError for a `lock_timeout` that is not above 0.
        """
        self.dialect = dialect
        self._lock_timeout = seconds_of_sink(name, lock_timeout, "lock_timeout")
        if self._lock_timeout <= 0:
            raise ConfigurationError(
                f"sink {name!r}: lock_timeout is above 0, such as '10 s': a wait without limit "
                "could block for ever"
            )
        self._parameters = dict(parameters)
        self._idle: list[tuple[ConnectionT, float]] = []
        self._in_task = False

    @abstractmethod
    def connect(self) -> ConnectionT:
        """Open a connection, in autocommit mode, that any thread may use.

        If that fails, it raises the driver's OperationalError, which names the server but no
        password.
        """

    @abstractmethod
    def answers(self, connection: ConnectionT, rested: float) -> bool:
        """Tell whether a connection that was idle for `rested` seconds still has its server.

        The driver's errors mean no.
        """

    def can_be_lent(self, connection: ConnectionT) -> bool:
        """Tell whether a connection is open and in no transaction, once what it has queued is sent.

        By default it is, since `transaction` has ended each transaction.
        """
        return True

    @contextmanager
    def lend(self) -> Iterator[ConnectionT]:
        """Lend a connection of the small pool for the block.

        The connection returns to the pool, unless the block raises; then it is closed.
        """
        connection = self.take()
        try:
            yield connection
            self.give(connection)
        except BaseException:
            disconnect(connection)
            raise

    def take(self) -> ConnectionT:
        """Take a connection that is idle and answers, or open a new one."""
        for connection, since in self._pooled():
            if self._answers(connection, time.monotonic() - since):
                return connection
        while self.KEEPS_IDLE:
            kept: ConnectionT | None = take(self._key)
            if kept is None:
                break
            if self._answers(kept, 0):
                return kept
        return self.connect()

    def _pooled(self) -> Iterator[tuple[ConnectionT, float]]:
        """Take each connection out of the pool, with the moment from which on it was idle.

        One thread alone gets each of them.
        """
        with contextlib.suppress(IndexError):
            while True:
                yield self._idle.pop()

    def _answers(self, connection: ConnectionT, idle_seconds: float) -> bool:
        with contextlib.suppress(Exception):
            if self.answers(connection, idle_seconds):
                return True
        disconnect(connection)
        return False

    def give(self, connection: ConnectionT) -> None:
        """Put a connection back into the pool.

        If the pool is full, or the connection cannot be lent again, it is closed.
        """
        if self.can_be_lent(connection) and len(self._idle) < self.IDLE:
            self._idle.append((connection, time.monotonic()))
        else:
            disconnect(connection)

    def close(self) -> None:
        for connection, _ in self._pooled():
            if self.KEEPS_IDLE and self._in_task:
                put_back(self._key, connection)
            else:
                disconnect(connection)

    @property
    def _key(self) -> tuple[tuple[str, str], ...]:
        return tuple((key, str(value)) for key, value in sorted(self._parameters.items()))

    def digest(self, without: str) -> str:
        """Hash the parameters of the connections, apart from the parameter `without`."""
        parameters = [(key, value) for key, value in self._key if key != without]
        return hashlib.sha256(repr(parameters).encode()).hexdigest()

    def redact(self, text: str) -> str:
        for secret in self.SECRETS:
            if value := self._parameters.get(secret):
                text = text.replace(str(value), "***")
        return text

    def __str__(self) -> str:
        """Name host, port, database and user as far as they are given, never a password."""
        shown = {key: self._parameters.get(key) for key in self.SHOWN}
        return (
            " ".join(f"{key}={value}" for key, value in shown.items() if value)
            or "the driver's defaults"
        )

    def __repr__(self) -> str:
        return f"Server({self})"

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key != "_idle"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._idle = []
        self._in_task = True


def is_trusted(connection: HasDescriptor, rested: float) -> bool:
    """Tell whether a connection need not be asked if it still works.

    That is so after a short rest in which nothing came: a server that ends says so. The connection
    must have a file descriptor.
    """
    came = select.poll()
    came.register(connection, select.POLLIN)
    return rested < _TRUSTED_SECONDS and not came.poll(0)


def ambiguous(table: str, schemas: Sequence[str]) -> ConfigurationError:
    """Return the error for a table without a schema that several schemas have.

    These are schemas of the search_path.
    """
    return ConfigurationError(
        f"several schemas of the search_path have a table {table} ({', '.join(schemas)}): write "
        f"the schema too, as in {schemas[0]}.{table}, with name={table!r} so that the sink is "
        "known as before"
    )


# ---------------------------------------------------------------------- errors
Kind: TypeAlias = Literal["blocked", "privilege", "gone", "changed", "server", "refused", "other"]


@dataclass(frozen=True)
class Fault:
    """The meaning of an error, whose `kind` is one of these:

    * `blocked`: a wait for a lock timed out, or was a deadlock;
    * `privilege`: the user lacks a privilege;
    * `gone`, `changed`: a table is gone, or is not as it was;
    * `server`: the server is not set up for what is asked;
    * `refused`: a row is refused;
    * `other`: something else.

    `text` are the server's words in one line, and `reason` (default: `text`) says why a row is
    refused, without the row's place. `at` says for which row, or lock. `advice` goes beyond what
    each error of the kind says. `clash` says that another row has a value that only one row may
    have.
    """

    kind: Kind
    text: str
    at: str = ""
    advice: str = ""
    reason: str = ""
    clash: bool = False

    def sink_error(self, who: str, error: Exception) -> SinkError | None:
        """Return the error to raise; None if the driver's own error says it best."""
        if self.kind == "blocked":
            return TransactionBlocked(
                f"{who} timed out waiting for a lock{self.at}, or deadlocked ({self.text}). End "
                "the other session that holds it, and let no two partitions write the same unique "
                f"value{self.advice}"
            )
        if self.kind == "privilege":
            return ConfigurationError(f"{who} lacks a right: {self.text}")
        if self.kind in ("gone", "changed"):
            return ConfigurationError(
                f"{who} found the table changed since it was checked: {self.text}"
            )
        if self.kind == "server":
            return ConfigurationError(
                f"{who} failed: {self.text}. {self.advice}".removesuffix(". ")
            )
        if self.kind == "refused":
            return BadValue(f"{who} was refused{self.at}: {self.text}{self.advice}").because(
                self.reason or self.text, type(error).__name__
            )
        return None


@contextmanager
def explained(judge: Callable[[Exception], Fault | None], table: str, who: str) -> Iterator[None]:
    """Turn the server's errors in this block into SinkErrors.

    That applies to errors about rows, privileges, locks or the set-up; all others pass as they are.
    The SinkErrors name the table in place of a staging table, and say that `who` was at work.
    """
    try:
        yield
    except SinkError:
        raise
    except Exception as error:
        if (fault := judge(error)) is None:
            raise
        fault = replace(fault, text=target_named(fault.text, table))
        explanation = fault.sink_error(f"table {table}: {who}", error)
        if explanation is None:
            raise
        raise explanation from error
