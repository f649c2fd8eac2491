"""PyMySQL's connection with a bound for every wait, and a password that no server gets in clear."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import pymysql
from pymysql.constants import CR

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

ANSWER_SECONDS = 30
"""How long a server may take for its greeting and for short statements."""
WORK_SECONDS = 900
"""How long it may take for a statement that moves or loads rows."""

_IN_CLEAR = (b"mysql_clear_password", b"dialog")


class Connection(pymysql.connections.Connection):
    """`read_timeout` and `write_timeout` hold for all of it if they are given.

    Where TLS is used just because the server offers it, PyMySQL reads all of the system's certificates for every
    connection, though it verifies none then. One such context serves them all."""

    _unverified: ClassVar[Any] = None
    _encrypted = False

    def __init__(self, **options: Any) -> None:
        self._given = options.get("read_timeout")
        bounds = {"connect_timeout": 10, "read_timeout": ANSWER_SECONDS, "write_timeout": WORK_SECONDS}
        super().__init__(**{**bounds, **options})

    def connect(self, sock: Any = None) -> None:
        """A SET NAMES in `init_command`, which comes last, is not what PyMySQL encodes texts in: the server would take
        their bytes for others."""
        super().connect(sock)
        if self.init_command:
            self.set_character_set(self.charset, self.collation)

    def may_take(self, seconds: float) -> None:
        """The next statements may take so long, unless `read_timeout` says otherwise."""
        self._read_timeout = self._given or seconds

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Statements in this block move rows."""
        before = self._read_timeout
        self.may_take(WORK_SECONDS)
        try:
            yield
        finally:
            self._read_timeout = before

    def _create_ssl_ctx(self, options: Any) -> Any:
        create = super()._create_ssl_ctx  # type: ignore[misc]
        if options:
            return create(options)
        Connection._unverified = Connection._unverified or create(options)
        return Connection._unverified

    @property
    def _secure(self) -> bool:
        """Whether PyMySQL may send the whole password through this channel."""
        return self._encrypted and self._trusted()

    @_secure.setter
    def _secure(self, encrypted: bool) -> None:
        self._encrypted = encrypted

    @property
    def server_public_key(self) -> Any:
        """What PyMySQL encrypts the whole password with where it may not send it. It would take the key that the server
        sends, whoever that is."""
        if self._key is None:
            raise pymysql.OperationalError(
                CR.CR_AUTH_PLUGIN_CANNOT_LOAD,
                "the server asks for the password, by a plugin that needs all of it (caching_sha2_password does at a "
                "user's first login), and nothing proves who it is: give ssl_ca (and ssl_verify_identity) for verified "
                "TLS, or the server's server_public_key, or use a local socket",
            )
        return self._key

    @server_public_key.setter
    def server_public_key(self, key: Any) -> None:
        self._key = key

    def _process_auth(self, plugin_name: bytes, *rest: Any) -> Any:
        if plugin_name in _IN_CLEAR and not self._trusted():
            raise pymysql.OperationalError(
                CR.CR_AUTH_PLUGIN_CANNOT_LOAD,
                f"the server asks for the password in clear ({plugin_name.decode()}), and nothing proves who it is: "
                "give ssl_ca (and ssl_verify_identity) for verified TLS, or use a local socket",
            )
        return super()._process_auth(plugin_name, *rest)  # type: ignore[misc]

    def _trusted(self) -> bool:
        """Whether the server is the right one: a local socket, or TLS with a verified certificate."""
        if self.unix_socket:
            return True
        context = getattr(self._sock, "context", None)  # type: ignore[attr-defined]
        return context is not None and bool(context.verify_mode)


def used_by(engine: Engine) -> None:
    """An engine of SQLAlchemy makes its connections so."""
    from sqlalchemy import event

    @event.listens_for(engine, "do_connect")
    def connect(_: object, __: object, arguments: list[Any], options: dict[str, Any]) -> Connection:
        return Connection(*arguments, **options)
