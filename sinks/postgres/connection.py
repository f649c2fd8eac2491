"""psycopg's connection with an end to every wait, and the meaning of its errors."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import errors

from sinks._util.log import get_logger
from sinks.sql.names import STAGING
from sinks.sql.server import Fault

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

logger = get_logger(__name__)

_NOT_IN_CLEAR = "!password"
_IN_CLEAR = (
    "The password is not sent in clear: set sslmode=verify-full, or, if the network is safe, "
    "require_auth=password"
)
SILENCE = 5  # seconds without an answer, after which the server is asked whether it is there
_COPY_ROW = re.compile(r"COPY [^\n]*?, line (\d+)(?:, column ([^\n:]+))?")
_INDEX = re.compile(r'in relation "([^"]+)"')
_ONE_DRIVER = (
    "Another driver with a copy of checkpoint storage may use the same names: stop it, and give "
    "the copy another job name"
)
_NO_TRANSACTION_LEFT = (
    "Set max_prepared_transactions on the server to at least the number of partitions of all sinks "
    '(and restart it), write fewer partitions, or use strategy="staged"'
)


_NOT_PREPARED = (
    'A trigger or rule of the table does what cannot be prepared: use strategy="staged". Row-level '
    "security: let the role pass it (BYPASSRLS)"
)
_MENDS: dict[type[psycopg.Error], str] = {
    errors.UniqueViolation: (
        "remove the other row, drop the index, or set the key's sequence beyond the table's keys "
        "(setval)"
    ),
    errors.ExclusionViolation: "remove the row that is in the way, or drop the constraint",
    errors.ForeignKeyViolation: (
        "add the row that it refers to (or delete the rows that refer to it), or drop the "
        "constraint"
    ),
    errors.CheckViolation: (
        "drop the constraint (it can come back as NOT VALID when the rows are in)"
    ),
    errors.NotNullViolation: (
        "let the column be NULL, fill it in Spark, or give it a default and leave it out of the "
        "batch"
    ),
}
_OF_ROWS = ("21", "22", "23", "P0")
"""Classes of SQLSTATE: values, constraints, and what a trigger's own statements meet."""
Rows = list[tuple[Any, ...]]


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection on which no wait outlives its server, not even a frozen one.

    The kernel of a frozen server keeps connections open and answers keepalives forever. So if a
    server is silent, a new connection asks whether it is there, and has `connect_timeout` to get
    any answer.
    """

    answer_seconds: float | None = None
    """The limit of any statement. If it is None, a statement may take as long as it takes, while
    the server answers others."""
    server = ""
    """The name of the server in errors; "" for host, port, database and user."""
    on_silence: Callable[[], None] | None = None
    """The function that is called when the server did not answer."""

    @classmethod
    def connect(cls, conninfo: str = "", **options: Any) -> Connection:
        """Connect to the primary, and send no password in clear to a server that proves nothing.

        A server proves who it is by sslmode=verify-full; `require_auth` or PGREQUIREAUTH overrides
        this. Of several hosts the primary is taken, since a standby is behind;
        `target_session_attrs` overrides that. The latter needs libpq 14, and the former needs libpq
        16.
        """
        if psycopg.pq.version() >= 140000:
            options = {"target_session_attrs": "primary"} | options
        proved = options.get("sslmode", os.environ.get("PGSSLMODE")) == "verify-full"
        if not proved and "PGREQUIREAUTH" not in os.environ and psycopg.pq.version() >= 160000:
            options = {"require_auth": _NOT_IN_CLEAR} | options
        try:
            return super().connect(conninfo, **options)
        except psycopg.OperationalError as error:
            if f'"{_NOT_IN_CLEAR}" failed' not in str(error):
                raise
            raise psycopg.OperationalError(f"{str(error).strip()}. {_IN_CLEAR}") from error

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deferred: list[tuple[str, Rows, Callable[[Rows], object] | None]] = []

    def defer(
        self, statement: str, parameters: Any = None, judge: Callable[[Rows], object] | None = None
    ) -> Rows:
        """Run a statement in one message with the next statement, just before it.

        This needs cursors that are psycopg.ClientCursor. The returned list has the rows once the
        message is answered. `judge` gets them, and may raise.
        """
        rows: Rows = []
        self._deferred.append((self._text(statement.encode(), parameters), rows, judge))
        return rows

    def _text(self, statement: Any, parameters: Any) -> str:
        cursor: Any = self.cursor()
        return str(cursor.mogrify(statement, parameters or None))

    @property
    def idle(self) -> bool:
        """True if the connection is in no transaction, and has nothing to run."""
        return (
            not self._deferred and self.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        )

    def flush(self) -> None:
        if self._deferred:
            self.execute(b"")

    def rollback(self) -> None:
        self._deferred = []
        super().rollback()

    def end(self, statement: Any) -> None:
        """Run COMMIT or PREPARE TRANSACTION, and raise if the server rolls back in its place.

        After a failed statement the server answers ROLLBACK to it, and no error.
        """
        if self.execute(statement).statusmessage == "ROLLBACK":
            raise errors.InFailedSqlTransaction(
                "the server rolled back in place of a commit: a statement had failed"
            )

    def execute(
        self, query: Any, params: Any = None, **options: Any
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        """Run a query together with what was deferred.

        The cursor is at the result of the query itself.
        """
        if not self._deferred:
            return super().execute(query, params, **options)
        texts = [*(text for text, _, _ in self._deferred), self._text(query, params)]
        deferred = self._deferred
        self._deferred = []
        cursor = super().execute("; ".join(texts).encode())
        for _, rows, judge in deferred:
            rows += cursor.fetchall() if cursor.description else ()
            if judge:
                judge(rows)
            cursor.nextset()
        return cursor

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        return super().wait(self._watched(gen), *args, **kwargs)

    def _watched(self, gen: Any) -> Any:
        answered_at = time.monotonic()
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if ready or ready is None:  # None: begun again, after an interrupt
                    answered_at = time.monotonic()
                elif time.monotonic() - answered_at > (self.answer_seconds or SILENCE):
                    self._require_answer()
                    answered_at = time.monotonic()
                wanted = gen.send(ready)
        except StopIteration as stop:
            return stop.value

    def _require_answer(self) -> None:
        if self.answer_seconds is not None:
            self.close()
            text = (
                f"the server was silent for {self.answer_seconds:g} s, so the connection was closed"
            )
            raise psycopg.OperationalError(text)
        try:
            self.probe()
        except errors.ConnectionTimeout as error:
            if self.on_silence:
                self.on_silence()
            place = self.place
            self.pgconn.finish()
            raise psycopg.OperationalError(
                f"PostgreSQL at {place} takes connections and does not answer: it is frozen, or "
                "cannot be reached"
            ) from error
        except psycopg.Error:
            logger.debug("PostgreSQL at %s answers, though not well", self.place, exc_info=True)

    @property
    def place(self) -> str:
        known = self.info
        return (
            self.server
            or f"host={known.host} port={known.port} dbname={known.dbname} user={known.user}"
        )

    def probe(self) -> None:
        """Connect to the same server, to see whether it answers.

        Raises ConnectionTimeout if it does not.
        """
        known = self.info
        parameters = dict[str, Any](self.info.get_parameters())
        parameters |= {"host": known.host, "port": known.port, "hostaddr": known.hostaddr or None}
        psycopg.connect(**parameters, password=known.password or None).close()


def connect_for(engine: Engine, answer_seconds: float | None) -> None:
    """Let an engine of SQLAlchemy connect by `Connection`."""
    from sqlalchemy import event

    @event.listens_for(engine, "do_connect")
    def connect(_: object, __: object, arguments: list[Any], options: dict[str, Any]) -> Connection:
        unprepared = {"prepare_threshold": None}  # a pooler may give the session to somebody else
        connection = Connection.connect(*arguments, **unprepared | options)
        connection.answer_seconds = answer_seconds
        return connection


def row(connection: Connection, query: str, *parameters: object) -> tuple[Any, ...]:
    """Return the row of a query that has one."""
    answer = connection.execute(query, parameters or None).fetchone()
    assert answer is not None
    return answer


# ---------------------------------------------------------------------- errors
def fault(error: BaseException | None) -> Fault | None:
    """Tell what an error is about.

    Return None for a lost connection, and for what is not an error of the server.
    """
    if not isinstance(error, psycopg.Error):
        return None
    text = error_text(error)
    state = error.sqlstate or ""
    if isinstance(error, errors.LockNotAvailable | errors.DeadlockDetected):
        index = _INDEX.search(error.diag.context or "")
        return Fault(
            "blocked",
            text,
            f" on {index[1]}" if index else "",
            "; lock_timeout= of the sink is the limit",
        )
    if state in ("53200", "55000") and "prepared transactions" in text:
        return Fault("server", text, advice=_NO_TRANSACTION_LEFT)
    if state == "55000":  # a publication without a replica identity, and the like
        return Fault("server", text)
    if isinstance(error, errors.FeatureNotSupported):
        return Fault(
            "server",
            text,
            advice=_NOT_PREPARED if re.search("PREPARE|row-level security", text) else "",
        )
    if isinstance(error, errors.InsufficientPrivilege):
        return Fault("privilege", text)
    if isinstance(error, errors.DuplicateTable | errors.UndefinedTable) and STAGING.search(text):
        state = "was there before" if isinstance(error, errors.DuplicateTable) else "is gone"
        return Fault("server", f"its staging table {state}", advice=_ONE_DRIVER)
    if isinstance(error, errors.UndefinedTable):
        return Fault("gone", text)
    # a trigger raises what it likes; a value may be too long for an index, or for a column of type
    # name
    is_too_long = isinstance(error, errors.ProgramLimitExceeded | errors.NameTooLong)
    if is_too_long or state[:2] in _OF_ROWS or type(error) is psycopg.DatabaseError:
        needs_partition = (
            isinstance(error, errors.CheckViolation) and not error.diag.constraint_name
        )
        mends = (
            ["attach a partition that takes it, or change the bounds of one"]
            if needs_partition
            else []
        )
        mends += [mend for kind, mend in _MENDS.items() if isinstance(error, kind)]
        clash = isinstance(error, errors.UniqueViolation | errors.ExclusionViolation)
        return Fault(
            "refused",
            text,
            _position(error),
            "".join(f"; {mend}" for mend in mends[:1]),
            clash=clash,
        )
    if state[:2] in ("42", "3F"):  # what the statement names is not there, or no longer of its kind
        return Fault("changed", text)
    return None if isinstance(error, psycopg.OperationalError) else Fault("other", text)


def _position(error: psycopg.Error) -> str:
    diag = error.diag
    row = _COPY_ROW.search(diag.context or "")
    column = diag.column_name or (row[2] if row else None)
    parts = [
        f"row {row[1]}" if row else "",
        f'column "{column}"' if column else "",
        f'constraint "{diag.constraint_name}"' if diag.constraint_name else "",
    ]
    position = ", ".join(part for part in parts if part)
    return f" ({position})" if position else ""


def error_text(error: psycopg.Error) -> str:
    """Join message, detail and hint of the server in one line."""
    diag = error.diag
    parts = [diag.message_primary or str(error).strip(), diag.message_detail, diag.message_hint]
    return "; ".join(" ".join(part.split()) for part in parts if part)
