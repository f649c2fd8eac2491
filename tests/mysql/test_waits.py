"""A server that is frozen, and one that wants the password: every wait ends, and no password goes out in clear."""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pymysql
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from coordinator.storage.base import StorageError
from coordinator.storage.sql import SQLStorage
from sinks.errors import ConfigurationError
from sinks.mysql import MySQLSink
from sinks.mysql.connection import Connection
from sinks.testing.servers.mysql import EmbeddedMySQL
from sinks.testing.table import COMMITTED, SCHEMA, checkpoint, eventually, pre_commit, rows_of
from tests.mysql.observer import Observer

ENDS = pytest.mark.timeout(300)
"""Of a wait of some seconds: a hang takes as long as the server is frozen."""


@contextmanager
def frozen(server: EmbeddedMySQL) -> Iterator[None]:
    """The server is frozen, and an answer may take two seconds."""
    with pytest.MonkeyPatch.context() as patched:
        limit = property(lambda _: 2, lambda self, given: vars(self).update(_read_timeout=given))
        patched.setattr(pymysql.connections.Connection, "_read_timeout", limit, raising=False)
        server.pause()
        try:
            yield
        finally:
            server.resume()


@ENDS
@pytest.mark.parametrize("strategy", ["xa", "staged"])
def test_a_frozen_server_is_given_up_and_asked_again(server: EmbeddedMySQL, strategy: str) -> None:
    with server.database() as dsn, closing(Observer(dsn)) as db:
        db.run("CREATE TABLE orders (id bigint NOT NULL, name varchar(100)) ENGINE=InnoDB")
        sink = MySQLSink(dsn, "orders", strategy=strategy)  # type: ignore[arg-type]
        sink.check(SCHEMA)
        committable = pre_commit(sink, rows_of(1))
        with frozen(server):
            (answer,) = sink.commit_all(checkpoint(), [committable])
            assert isinstance(answer, pymysql.OperationalError)
        eventually(lambda: sink.commit_all(checkpoint(), [committable]) == [COMMITTED])
        assert db.ids() == [1]
        sink.close()


def test_waits_have_bounds_that_nobody_had_to_set(server: EmbeddedMySQL) -> None:
    with server.database() as dsn, closing(Observer(dsn)) as db:
        db.run("CREATE TABLE orders (id bigint NOT NULL, name varchar(100)) ENGINE=InnoDB")
        sink = MySQLSink(dsn, "orders", lock_timeout=5)
        with sink._server.lend() as connection:
            assert connection._read_timeout == 35
            with sink._server.transaction(connection, undo=True):
                assert connection._read_timeout == 900
            assert connection._read_timeout == 35
        sink.close()


@ENDS
def test_a_frozen_storage_is_told_in_time(server: EmbeddedMySQL) -> None:
    with server.database() as dsn:
        storage = SQLStorage(dsn, retry_seconds=1)
        assert storage.put_if_absent("a/b", b"1")
        with frozen(server), pytest.raises(StorageError):
            storage.get("a/b")
        assert storage.get("a/b") == b"1"
        with storage._engine.connect() as connection:
            assert connection.connection.dbapi_connection._read_timeout == 10  # type: ignore[union-attr]
        storage.close()


def test_no_server_may_ask_storage_for_a_file() -> None:
    with pytest.raises(StorageError, match="local_infile would let the server read files"):
        SQLStorage("mysql://app:pw@127.0.0.1:1/x?local_infile=1")


class Asking:
    """A server that greets, asks for the password by a plugin of its choice, and keeps what it is told."""

    def __init__(self, plugin: bytes) -> None:
        self.plugin, self.heard, self.asked_for_key = plugin, b"", False
        self.asks = b"\x05Password: " if plugin in (b"mysql_clear_password", b"dialog") else b""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        channel, _ = self._listening.accept()
        with channel:
            channel.settimeout(120)
            salt = hashlib.sha256().digest()[:20].replace(b"\0", b"1")
            flags = 0x00000001 | 0x00000200 | 0x00008000 | 0x00080000  # long password, protocol 4.1, secure, plugins
            greeting = b"\x0a8.0.36\0" + struct.pack("<I", 1) + salt[:8] + b"\0" + struct.pack("<H", flags & 0xFFFF)
            greeting += b"\x21" + struct.pack("<HH", 2, flags >> 16) + b"\x15" + b"\0" * 10 + salt[8:] + b"\0"
            self._send(channel, 0, greeting + b"mysql_native_password\0")
            self.heard += channel.recv(4096)
            self._send(channel, 2, b"\xfe" + self.plugin + b"\0" + (self.asks or salt + b"\0"))
            with suppress(OSError):
                self.heard += channel.recv(4096)
                if self.plugin == b"caching_sha2_password":
                    self._send(channel, 4, b"\x01\x04")  # the proof is not known here: all of it, please
                    self.heard += channel.recv(4096)
                self.asked_for_key = self.heard[-1:] in (b"\x01", b"\x02")

    @staticmethod
    def _send(channel: socket.socket, number: int, payload: bytes) -> None:
        channel.sendall(struct.pack("<I", len(payload))[:3] + bytes([number]) + payload)

    def close(self) -> None:
        self._thread.join(120)
        self._listening.close()


@pytest.mark.parametrize("plugin", [b"mysql_clear_password", b"dialog", b"caching_sha2_password", b"sha256_password"])
@pytest.mark.parametrize("who", ["sink", "storage"])
def test_a_password_is_not_given_in_clear_to_an_unproven_server(plugin: bytes, who: str) -> None:
    with closing(Asking(plugin)) as rogue:
        url = f"mysql://app:s3cret@127.0.0.1:{rogue.port}/shop"
        if who == "storage":
            with pytest.raises(StorageError, match="the password"):
                SQLStorage(url)
        else:
            with pytest.raises(ConfigurationError, match="the password"):
                MySQLSink(url, "orders").check(SCHEMA)
    assert b"s3cret" not in rogue.heard
    assert not rogue.asked_for_key, "with the key of a rogue server the password is as good as in clear"


def test_a_password_is_encrypted_with_a_key_that_the_user_gave() -> None:
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    with closing(Asking(b"sha256_password")) as server:
        options = {"server_public_key": private.public_key().public_bytes(*form)}
        with pytest.raises(ConfigurationError):
            MySQLSink(f"mysql://app:s3cret@127.0.0.1:{server.port}/shop", "t", connect_options=options).check(SCHEMA)
    padded = padding.OAEP(padding.MGF1(hashes.SHA1()), hashes.SHA1(), None)
    secret, salt = private.decrypt(server.heard[-256:], padded), hashlib.sha256().digest()[:20].replace(b"\0", b"1")
    assert bytes(a ^ b for a, b in zip(secret, salt, strict=False)) == b"s3cret\0"


def test_a_local_socket_is_trusted() -> None:
    connection = Connection(host="localhost", defer_connect=True, unix_socket="/nowhere")
    assert connection._trusted()
