"""Connections to a server: a few are lent again and again on the driver, and no password is ever shown; and what a
server answers, in the words of the sinks: what happened, where, and what to do."""

from __future__ import annotations

import contextlib
import logging
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from sinks._util.idle_connections import disconnect, put_back, take
from sinks.errors import BadValue, ConfigurationError, SinkError, TransactionBlocked
from sinks.options import Duration, seconds_of_sink
from sinks.sql.names import target_named

logger = logging.getLogger(__name__)

IDLE_CONNECTIONS = 4
PERCENT_ENCODED = (
    "write '@', ':', '/', '?', '#' and '%' in user, password and database as %40, %3A, %2F, %3F, %23 and %25"
)
KEEPALIVES = {"keepalives_idle": 20, "keepalives_interval": 10}
"""libpq's parameters, in seconds, by which a peer that went without a word is noticed."""
_TRUSTED_SECONDS = 5

Row: TypeAlias = tuple[Any, ...]
"""What a driver makes of a row."""
ItemT = TypeVar("ItemT")


class Pool(ABC):
    """Connections to one database of one server. All are in autocommit mode, and every transaction of ours is begun by
    hand."""

    SECRETS: ClassVar[tuple[str, ...]] = ("password",)  # parameters that are passwords
    SHOWN: ClassVar[tuple[str, ...]] = ("host", "port", "database", "user")  # those that tell which database it is
    KEEPS_IDLE: ClassVar[bool] = False  # whether the next task of a process may take one that was given back
    IDLE: ClassVar[int] = IDLE_CONNECTIONS  # so many are kept for the next who needs one

    def __init__(self, parameters: Mapping[str, Any], *, name: str, lock_timeout: Duration) -> None:
        """`parameters` are the driver's, for a connection; `name` is the sink's. Raises ConfigurationError
        for a `lock_timeout` that is not above 0."""
        self._lock_timeout = seconds_of_sink(name, lock_timeout, "lock_timeout")
        if self._lock_timeout <= 0:
            raise ConfigurationError(
                f"sink {name!r}: lock_timeout is above 0, such as '10 s': a wait without limit could block for ever"
            )
        self._parameters = dict(parameters)
        self._idle: list[tuple[Any, float]] = []
        self._in_task = False

    @abstractmethod
    def connect(self) -> Any:
        """A new connection, in autocommit mode, that any thread may use. Raises the driver's OperationalError, naming
        the server but no password, if it fails."""

    @abstractmethod
    def answers(self, connection: Any, rested: float) -> bool:
        """Whether a connection that was idle for some seconds still has its server. The driver's errors mean no."""

    def can_be_lent(self, connection: Any) -> bool:
        """Whether it is open, and not inside a transaction, once what it has queued is sent. Default: it is, since
        `transaction` has ended each."""
        return True

    @contextmanager
    def lend(self) -> Iterator[Any]:
        """A connection out of a small pool. It comes back unless something was raised meanwhile."""
        connection = self.take()
        try:
            yield connection
            self.give(connection)
        except BaseException:
            disconnect(connection)
            raise

    def take(self) -> Any:
        """One that is idle and answers, or a new one."""
        for connection, since in self._pooled():
            if self._answers(connection, time.monotonic() - since):
                return connection
        while self.KEEPS_IDLE and (connection := take(self._place)) is not None:
            if self._answers(connection, 0):
                return connection
        return self.connect()

    def _pooled(self) -> Iterator[tuple[Any, float]]:
        """Takes each out of the pool, for one thread only, with the moment from which on it was idle."""
        with contextlib.suppress(IndexError):
            while True:
                yield self._idle.pop()

    def _answers(self, connection: Any, idle_seconds: float) -> bool:
        with contextlib.suppress(Exception):
            if self.answers(connection, idle_seconds):
                return True
        disconnect(connection)
        return False

    def give(self, connection: Any) -> None:
        """Into the pool, unless that is full or the connection cannot be lent again."""
        if self.can_be_lent(connection) and len(self._idle) < self.IDLE:
            self._idle.append((connection, time.monotonic()))
        else:
            disconnect(connection)

    def close(self) -> None:
        for connection, _ in self._pooled():
            if self.KEEPS_IDLE and self._in_task:
                put_back(self._place, connection)
            else:
                disconnect(connection)

    @property
    def _place(self) -> tuple[object, ...]:
        return tuple((key, str(value)) for key, value in sorted(self._parameters.items()))

    def redact(self, text: str) -> str:
        for secret in self.SECRETS:
            if value := self._parameters.get(secret):
                text = text.replace(str(value), "***")
        return text

    def __str__(self) -> str:
        """Host, port, database and user as far as they are given, never a password."""
        shown = {key: self._parameters.get(key) for key in self.SHOWN}
        return " ".join(f"{key}={value}" for key, value in shown.items() if value) or "the driver's defaults"

    def __repr__(self) -> str:
        return f"Server({self})"

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key != "_idle"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._idle = []
        self._in_task = True


def batches(items: Sequence[ItemT], size: int) -> Iterator[Sequence[ItemT]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def marks(parameters: Sequence[object]) -> str:
    """For a list of parameters."""
    return ", ".join(["%s"] * len(parameters))


def is_trusted(connection: Any, rested: float) -> bool:
    """Whether a connection, with a file descriptor, need not be asked if it still works: after a short rest, in which
    nothing came. A server that ends says so."""
    came = select.poll()
    came.register(connection, select.POLLIN)
    return rested < _TRUSTED_SECONDS and not came.poll(0)


def ambiguous(table: str, schemas: Sequence[str]) -> ConfigurationError:
    """What is told of a table without a schema that several schemas of the search_path have."""
    return ConfigurationError(
        f"several schemas of the search_path have a table {table} ({', '.join(schemas)}): write the schema too, as in "
        f"{schemas[0]}.{table}, with name={table!r} so that the sink is known as before"
    )


# ---------------------------------------------------------------------- errors
Kind: TypeAlias = Literal["blocked", "right", "gone", "changed", "server", "refused", "other"]


@dataclass(frozen=True)
class Fault:
    """What an error is about: a bounded wait for a lock ran out (`blocked`), the user lacks a `right`, a table is
    `gone` or `changed`, the `server` is not set up for what is asked, a row is `refused`, or `other`.

    `text` are the server's words in one line, and `reason` (default: `text`) why a row is refused without saying in
    which place. `at` says for which row, or lock. `advice` goes beyond what each error of the kind is told with.
    `clash`: another row has a value that only one row may have."""

    kind: Kind
    text: str
    at: str = ""
    advice: str = ""
    reason: str = ""
    clash: bool = False

    def sink_error(self, who: str, error: Exception) -> SinkError | None:
        """None for what the driver's own error says best."""
        if self.kind == "blocked":
            return TransactionBlocked(
                f"{who} waited for a lock{self.at} until its limit, or in a circle ({self.text}). Somebody else's open "
                "transaction holds it, or an orphaned one of this job (the coordinator aborts those and tries again), "
                f"or two partitions of this batch write the same unique value{self.advice}"
            )
        if self.kind == "right":
            return ConfigurationError(f"{who} lacks a right: {self.text}")
        if self.kind in ("gone", "changed"):
            return ConfigurationError(f"{who} found the table changed since it was checked: {self.text}")
        if self.kind == "server":
            return ConfigurationError(f"{who} failed: {self.text}. {self.advice}".removesuffix(". "))
        if self.kind == "refused":
            return BadValue(f"{who} was refused{self.at}: {self.text}{self.advice}").because(
                self.reason or self.text, type(error).__name__
            )
        return None


@contextmanager
def explained(judge: Callable[[Exception], Fault | None], table: str, who: str) -> Iterator[None]:
    """The server's errors in this block as SinkErrors, where they are about rows, rights, locks or the set-up. They
    name the table in place of a staging table, and `who` was at work."""
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
