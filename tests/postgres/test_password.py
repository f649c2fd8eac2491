"""A server that asks for the password in clear does not get it."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest

from coordinator.storage import open_storage
from sinks.postgres import PostgresSink
from sinks.sqlalchemy import SqlAlchemySink

_SSL_REQUEST = 80877103
_ASK_IN_CLEAR = b"R" + struct.pack("!ii", 8, 3)
_SECRET = b"s3cret"


class Rogue:
    """Speaks as much of PostgreSQL's protocol as it takes to be given a password."""

    def __init__(self) -> None:
        self._heard = b""
        self._done = threading.Event()
        self._place = socket.create_server(("127.0.0.1", 0))
        self.port = self._place.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):  # the end of the test
            while True:
                connection, _ = self._place.accept()
                with connection, suppress(OSError, struct.error):
                    connection.settimeout(120)
                    self._ask(connection)
                self._done.set()

    def _ask(self, connection: socket.socket) -> None:
        while True:
            size, code = struct.unpack("!ii", connection.recv(8))
            connection.recv(size - 8)
            if code != _SSL_REQUEST:
                break
            connection.sendall(b"N")
        connection.sendall(_ASK_IN_CLEAR)
        self._heard += connection.recv(1000)

    @property
    def heard(self) -> bytes:
        """What the client has sent before it went, or until it was left."""
        assert self._done.wait(120)
        return self._heard

    def close(self) -> None:
        self._place.shutdown(socket.SHUT_RDWR)  # ends its `accept`, which `close` does not
        self._place.close()
        self._thread.join()


@pytest.fixture
def rogue() -> Iterator[Rogue]:
    with closing(Rogue()) as server:
        yield server


def _sink(dsn: str) -> None:
    PostgresSink(dsn, "t").committed_checkpoints("job")


def _alchemy(dsn: str) -> None:
    SqlAlchemySink(dsn, "t").committed_checkpoints("job")


def _storage(dsn: str) -> None:
    open_storage(dsn)


@pytest.mark.parametrize("connect", [_sink, _alchemy, _storage])
class TestPassword:
    def test_it_is_not_sent_in_clear(self, rogue: Rogue, connect: Callable[[str], None]) -> None:
        with pytest.raises(Exception, match=r"not sent in clear.*sslmode=verify-full.*require_auth=password"):
            connect(f"postgresql://u:s3cret@127.0.0.1:{rogue.port}/d?gssencmode=disable")
        assert _SECRET not in rogue.heard

    def test_it_is_where_the_dsn_says_so(self, rogue: Rogue, connect: Callable[[str], None]) -> None:
        with pytest.raises(Exception, match="closed the connection unexpectedly"):
            connect(f"postgresql://u:s3cret@127.0.0.1:{rogue.port}/d?require_auth=password&gssencmode=disable")
        assert _SECRET in rogue.heard
