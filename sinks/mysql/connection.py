"""PyMySQL's connection with a bound for every wait, and no password in clear for any server.

Further, how statements are run on it, and MySQL's errors and warnings in the words of the sinks.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import parse_qsl, unquote, urlsplit

import pymysql
from pymysql.constants import CR, ER

from sinks.sql.server import Fault, Kind

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine


ANSWER_SECONDS = 30
"""The time that a server may take for its greeting and for short statements."""
WORK_SECONDS = 900
"""The time that a server may take for a statement that moves or loads rows."""

_IN_CLEAR = (b"mysql_clear_password", b"dialog")
_SSL = {f"ssl_{name}": name for name in ("ca", "cert", "key")}
_SSL |= {
    "ssl_key_password": "password",
    "ssl_verify_cert": "verify_mode",
    "ssl_verify_identity": "check_hostname",
}
"""PyMySQL's parameters, and what it calls them in a dict."""
Rows = list[tuple[Any, ...]]


class Connection(pymysql.connections.Connection):
    """A connection with a bound for every wait, and a password only for a proven server.

    If `read_timeout` and `write_timeout` are given, they hold for all of it.

    Where TLS is used just because the server offers it, PyMySQL reads all of the system's
    certificates for every connection, though it verifies none then. One such context serves all
    connections.
    """

    _unverified: ClassVar[Any] = None
    _encrypted = False
    _any_authority = False
    """True if any authority that the system knows may vouch for the server."""

    def __init__(self, *, server_public_key: str | bytes | None = None, **options: Any) -> None:
        """Connect with these parameters of PyMySQL.

        `server_public_key` is the server's key for RSA, in PEM, or the name of a file with it.
        """
        self._deferred: list[tuple[str, Rows, Callable[[Rows], object]]] = []
        self._given = options.get("read_timeout")
        self._key = _read_key(server_public_key)
        for name in ("ssl_verify_cert", "ssl_verify_identity"):  # texts, in a URL of SQLAlchemy
            if isinstance(options.get(name), str):
                options[name] = options[name].lower() not in ("false", "no", "0", "none")
        # PyMySQL would take the other parameters in place of the dict
        if (given := options.get("ssl")) and isinstance(given, dict):
            moved = {key: options.pop(name) for name, key in _SSL.items() if name in options}
            if moved.get("check_hostname"):
                moved["verify_mode"] = True
            elif not moved.get("verify_mode", True):
                moved["check_hostname"] = False
            options["ssl"] = given | moved
        elif options.get("ssl_ca"):  # PyMySQL alone verifies nothing without a second option
            options.setdefault("ssl_verify_cert", True)
        bounds = {
            "connect_timeout": 10,
            "read_timeout": ANSWER_SECONDS,
            "write_timeout": WORK_SECONDS,
        }
        super().__init__(**{**bounds, **options})

    def connect(self, sock: Any = None) -> None:
        """Log in, unless nothing proves the server and the next login may need the password.

        The server's cache may have spared the password this time. A SET NAMES in `init_command`,
        which comes last, is not what PyMySQL encodes strings in, so the server would take their
        bytes for other characters. Hence the character set is set once more.
        """
        self._plugin = b""
        super().connect(sock)
        if self._cached_login() and not self._proven():
            self.close()
            raise self._unproven()
        if self.init_command:
            self.set_character_set(self.charset, self.collation)

    def _cached_login(self) -> bool:
        """Tell whether this login needed no more than the server's cache.

        The next login may find that cache empty.
        """
        return self._login_plugin() == "caching_sha2_password" and bool(self.password)

    def _login_plugin(self) -> str:
        """Return the plugin by which the user logs in.

        It is the server's default, unless the server asked for another plugin.
        """
        return self._plugin.decode() or str(self._auth_plugin_name)  # type: ignore[attr-defined]

    @functools.cached_property
    def longest_statement(self) -> int:
        """The server's max_allowed_packet, in bytes. A session keeps the one that it began with."""
        ((most,),) = query(self, "SELECT @@max_allowed_packet")
        return int(most)

    def defer(
        self, statement: str, parameters: Sequence[Any] = (), judge: Callable[[Rows], object] = len
    ) -> Rows:
        """Run a statement in one message with the next statement, just before it.

        This needs CLIENT.MULTI_STATEMENTS. The returned list has the rows once the message is
        answered. `judge` gets them, and may raise.
        """
        rows: Rows = []
        with self.cursor() as cursor:
            self._deferred.append((cursor.mogrify(statement, parameters or None), rows, judge))
        return rows

    def flush(self) -> int:
        """Run what was deferred; return how many rows that changed."""
        if not self._deferred:
            return 0
        deferred = self.forget()
        answered = 0
        changed = 0
        try:
            with self.cursor() as cursor:
                cursor.execute("; ".join(text for text, _, _ in deferred))
                for _, rows, _ in deferred:
                    if answered:
                        cursor.nextset()
                    rows += cursor.fetchall()
                    changed += 0 if cursor.description else cursor.rowcount
                    answered += 1
        finally:  # what an answer is judged by may say why a later statement failed
            for _, rows, judge in deferred[:answered]:
                judge(rows)
        return changed

    def forget(self) -> list[tuple[str, Rows, Callable[[Rows], object]]]:
        """Drop what was deferred without running it, and return it."""
        deferred = self._deferred
        self._deferred = []
        return deferred

    def fileno(self) -> int:
        return int(self._sock.fileno())  # type: ignore[attr-defined]

    def may_take(self, seconds: float) -> None:
        """Let the next statements take this long, unless `read_timeout` says otherwise."""
        self._read_timeout = self._given or seconds

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Let statements in this block take as long as statements that move rows."""
        before = self._read_timeout
        self.may_take(WORK_SECONDS)
        try:
            yield
        finally:
            self._read_timeout = before

    def give_up_on_silence(self) -> None:
        """Let the system close the connection when the server's host has been silent for a minute.

        It does so however long a statement takes.
        """
        options = {
            "TCP_KEEPIDLE": 20,
            "TCP_KEEPINTVL": 10,
            "TCP_KEEPCNT": 4,
            "TCP_USER_TIMEOUT": 60_000,
        }
        channel: socket.socket = self._sock  # type: ignore[attr-defined]
        if channel.family != getattr(socket, "AF_UNIX", None):
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in options.items():
                if number := getattr(socket, name, None):  # not every system has each of them
                    channel.setsockopt(socket.IPPROTO_TCP, number, value)

    def _create_ssl_ctx(self, options: Any) -> Any:
        create = super()._create_ssl_ctx  # type: ignore[misc]
        if not options:
            Connection._unverified = Connection._unverified or create(options)
            return Connection._unverified
        try:
            context = create(options)
        except (OSError, ValueError) as error:
            files = ", ".join(
                f"{name}={file}" for name, file in options.items() if isinstance(file, str)
            )
            raise pymysql.OperationalError(
                CR.CR_SSL_CONNECTION_ERROR, f"the files for TLS ({files}) cannot be used: {error}"
            ) from None
        if isinstance(options, dict):
            self._any_authority = not (options.get("ca") or options.get("capath"))
            # which PyMySQL looks at only beside an authority
            if self._any_authority and options.get("check_hostname"):
                context.check_hostname = True
        return context

    @property
    def _secure(self) -> bool:
        """True if PyMySQL may send the whole password through this channel."""
        return self._encrypted and self._trusted()

    @_secure.setter
    def _secure(self, encrypted: bool) -> None:
        self._encrypted = encrypted

    @property
    def server_public_key(self) -> bytes:
        """The key by which PyMySQL encrypts a password that it may not send as it is.

        Raises OperationalError if nothing proves that the server is the right one.
        """
        if not self._proven():
            raise self._unproven()
        assert self._key is not None
        return self._key

    @server_public_key.setter
    def server_public_key(self, key: object) -> None:
        """Ignore the key that the server sends.

        PyMySQL would take that key, whoever the server is, but only the key that was given counts.
        """

    def _proven(self) -> bool:
        """Tell whether the server may have the password.

        Over TLS the server would not take a password that is encrypted with its key.
        """
        return self._trusted() or (self._key is not None and not self._encrypted)

    def _unproven(self) -> pymysql.OperationalError:
        unused = (
            " (over TLS, server_public_key is not used)" if self._key and self._encrypted else ""
        )
        return pymysql.OperationalError(
            CR.CR_AUTH_PLUGIN_CANNOT_LOAD,
            f"{self._login_plugin()} sends the password, and nothing proves the server's "
            f"identity{unused}. Set ssl_ca=FILE or ssl_verify_identity=true, or ssl_disabled=true "
            "with server_public_key=FILE, or use a local socket",
        )

    def _process_auth(self, plugin_name: bytes, *rest: Any) -> Any:
        self._plugin = plugin_name
        if plugin_name in _IN_CLEAR and not self._trusted():
            raise pymysql.OperationalError(
                CR.CR_AUTH_PLUGIN_CANNOT_LOAD,
                f"the server asks for the password in clear ({plugin_name.decode()}), and nothing "
                "proves who it is: give ssl_ca (and ssl_verify_identity) for verified TLS, or use "
                "a local socket",
            )
        return super()._process_auth(plugin_name, *rest)  # type: ignore[misc]

    def _trusted(self) -> bool:
        """Tell whether the server is the right one.

        It is at a local socket, or has TLS with a verified certificate. The certificate must be of
        this name if anyone may have one.
        """
        if self.unix_socket:
            return True
        context = getattr(self._sock, "context", None)  # type: ignore[attr-defined]
        return bool(
            context and context.verify_mode and (context.check_hostname or not self._any_authority)
        )


def _read_key(given: str | bytes | None) -> bytes | None:
    if given is None:
        return None
    # this package is needed only if a key is given
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        if isinstance(given, str):
            given = given.encode() if given.startswith("-----BEGIN") else Path(given).read_bytes()
        load_pem_public_key(given)
    except (OSError, ValueError) as error:
        raise pymysql.OperationalError(
            CR.CR_AUTH_PLUGIN_CANNOT_LOAD,
            f"server_public_key is no public key in PEM, and no file with one: {error}",
        ) from None
    return given


def connect_for(engine: Engine) -> None:
    """Let an engine of SQLAlchemy connect by `Connection`."""
    from sqlalchemy import event

    @event.listens_for(engine, "do_connect")
    def connect(_: object, __: object, arguments: list[Any], options: dict[str, Any]) -> Connection:
        return Connection(*arguments, **options)


# ---------------------------------------------------------------------- statements
def parameters(dsn: str) -> dict[str, Any]:
    """Return the parameters of pymysql.connect that a URL stands for.

    The URL is mysql://user:password@host:port/database?ssl_ca=…, and mariadb:// and
    mysql+pymysql:// will do too. Raises ValueError, which never quotes the DSN, for another string.
    """
    form = (
        "a DSN is mysql://user:password@host:3306/database, with special characters percent-encoded"
    )
    try:
        url = urlsplit(dsn)
        port = url.port
        if "@" in url.path:
            raise ValueError
    except ValueError:
        raise ValueError(f"the DSN cannot be read; {form}") from None
    if url.scheme.split("+")[0] not in ("mysql", "mariadb"):
        raise ValueError(f"the DSN does not begin with mysql:// or mariadb://; {form}")
    options: dict[str, Any] = {
        "host": url.hostname or "localhost",
        "port": port or 3306,
        "user": unquote(url.username or ""),
        "password": unquote(url.password or ""),
        "database": unquote(url.path.removeprefix("/")),
    }
    for name, value in parse_qsl(url.query):
        word = {"true": True, "false": False}.get(value.lower())
        options[name] = word if word is not None else int(value) if value.isdigit() else value
    return {name: value for name, value in options.items() if value != ""}


def is_mariadb(connection: Connection) -> bool:
    return "mariadb" in connection.get_server_info().lower()  # type: ignore[no-untyped-call]


def execute(connection: Connection, statement: str, parameters: Sequence[Any] = ()) -> int:
    """Run a statement; return how many rows it changed."""
    connection.defer(statement, parameters)
    return connection.flush()


def query(connection: Connection, statement: str, parameters: Sequence[Any] = ()) -> Rows:
    rows = connection.defer(statement, parameters)
    connection.flush()
    return rows


def setting(connection: Connection, name: str) -> str:
    """Return a variable of the server in capitals; "" if it has none of that name."""
    rows = query(connection, "SHOW GLOBAL VARIABLES LIKE %s", [name])
    return str(rows[0][1]).upper() if rows else ""


def quoted(*names: str) -> str:
    """Quote an identifier of one or more parts, in backticks."""
    return ".".join("`" + name.replace("`", "``") + "`" for name in names)


def listed(names: Sequence[str]) -> str:
    return ", ".join(map(quoted, names))


def literal(text: str) -> str:
    """Write a string literal for a session without NO_BACKSLASH_ESCAPES."""
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


# ---------------------------------------------------------------------- errors
XA_UNKNOWN = 1397  # XAER_NOTA
_XA_ROLLED_BACK = {1613, 1614}  # XA_RBTIMEOUT, XA_RBDEADLOCK
BLOCKED = {ER.LOCK_WAIT_TIMEOUT, ER.LOCK_DEADLOCK, 3572, *_XA_ROLLED_BACK}
DENIED = {1044, 1142, 1143, 1227, 1370}
_CHANGED = {ER.NO_SUCH_TABLE, ER.BAD_FIELD_ERROR, ER.BAD_DB_ERROR}
_GTID_UNSAFE = 1785
SHAPE = {*_CHANGED, 1364, 1906, 3105, _GTID_UNSAFE}
"""The codes of these errors: no such table or column; no value for a column; a value for a
generated column (two codes); a table without transactions."""
_CLASHES = {ER.DUP_ENTRY, 1586}
_OF_THE_CLIENT = range(2000, 3000)
"""Codes of errors that no server has sent."""
# Refused rows, as far as PyMySQL takes them for something else: no default, SIGNAL, bad function
# arguments, no partition, invalid JSON (two codes), CHECK of MySQL and of MariaDB, strings of
# another character set, a division by zero, no number left for AUTO_INCREMENT, more than a page
# holds, what does not fit an index over an expression; and what statements of a trigger meet: other
# than one row (three codes), results that are too large, patterns, JSON
_REFUSED = {1292, 1364, 1366, 1411, 1526, 1644, 1690, 1906, 3105, 3140, 3819, 4025, 4078}
_REFUSED |= {1118, 1365, 1467, 3157, 3751, 3752, *range(3903, 3909)}
_REFUSED |= {1172, 1242, 1329, 1301, 1139, *range(3685, 3700), *range(4035, 4045)}
_REFUSED_STATES = ("22", "23", "45")
"""The first digits of SQLSTATE for bad data, broken constraints, and SIGNAL with its own code."""


def code_of(error: pymysql.Error) -> int:
    code = error.args[0] if error.args else 0
    return code if isinstance(code, int) else 0


def fault(error: Exception) -> Fault | None:
    """Tell what an error is about.

    Return None for a lost connection, and for what is not an error of the server.
    """
    if not isinstance(error, pymysql.Error) or code_of(error) in _OF_THE_CLIENT:
        return None
    text = error_text(error)
    code = code_of(error)
    if code in BLOCKED:
        return Fault(
            "blocked",
            text,
            advice="; a backup's READ LOCK or an XA branch (XA RECOVER) may hold it",
        )
    if code in DENIED:
        return Fault("privilege", text)
    if code in _CHANGED:
        return Fault("gone" if code == ER.NO_SUCH_TABLE else "changed", text)
    if code == _GTID_UNSAFE:
        return Fault("server", text)
    state = str(getattr(error, "sqlstate", ""))  # newer PyMySQL tells
    refused = isinstance(error, pymysql.IntegrityError | pymysql.DataError) or code in _REFUSED
    kind: Kind = "refused" if refused or state.startswith(_REFUSED_STATES) else "other"
    return Fault(kind, text, clash=code in _CLASHES)


def error_text(error: pymysql.Error) -> str:
    """Return the server's message in one line."""
    return " ".join(str(error.args[-1] if error.args else "").split()) or repr(error)
