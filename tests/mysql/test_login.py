"""MySQL's own login, caching_sha2_password: the server asks for the password whenever its cache has not got it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import certifi
import pytest

from coordinator.storage.base import StorageError
from coordinator.storage.sql import SQLStorage
from sinks.errors import ConfigurationError
from sinks.mysql import MySQLSink
from sinks.mysql.connection import Connection, execute
from sinks.testing.servers import debian
from sinks.testing.servers.mysql import MySQLServer
from sinks.testing.table import COMMITTED, SCHEMA, checkpoint, pre_commit, rows_of
from tests.mysql.observer import Observer

pytestmark = pytest.mark.skipif(not debian.available(), reason="MySQL cannot be had: this machine is no Debian")


@pytest.fixture(scope="module")
def server() -> Iterator[MySQLServer]:
    """With TLS, as each MySQL has it, by a certificate that it has made itself."""
    with MySQLServer({"tls_version": "TLSv1.3"}) as server:
        yield server


@pytest.fixture
def dsn(server: MySQLServer) -> Iterator[str]:
    with server.database() as dsn:
        with closing(Observer(dsn)) as observer:
            observer.run("CREATE TABLE orders (id bigint NOT NULL, name text) ENGINE=InnoDB")
        yield dsn


def forget_logins(server: MySQLServer) -> None:
    with server.connect() as admin:
        execute(admin, "FLUSH PRIVILEGES")


@pytest.mark.parametrize("cached", [False, True], ids=["first login", "later login"])
@pytest.mark.parametrize("who", ["sink", "storage"])
def test_without_a_proof_of_the_server_no_login_works_by_chance(
    server: MySQLServer, dsn: str, who: str, cached: bool
) -> None:
    forget_logins(server)
    if cached:
        server.connect(dsn).close()
    url, refusal = dsn.partition("?")[0], r"nothing proves the server's identity\. Set ssl_ca=FILE"
    if who == "storage":
        with pytest.raises(StorageError, match=refusal):
            SQLStorage(url)
    else:
        with closing(MySQLSink(url, "orders")) as sink, pytest.raises(ConfigurationError, match=refusal):
            sink.check(SCHEMA)


@pytest.mark.parametrize("proof", ["key", "TLS"])
def test_a_query_goes_on_when_the_server_forgets_its_logins(server: MySQLServer, dsn: str, proof: str) -> None:
    address = f"{dsn.partition('?')[0]}?ssl_ca={server.home / 'data' / 'ca.pem'}" if proof == "TLS" else dsn
    with closing(MySQLSink(address, "orders")) as sink:
        sink.check(SCHEMA)
        for number, forget in enumerate([lambda: forget_logins(server), server.restart]):
            committable = pre_commit(sink, rows_of(number), checkpoint=number)
            forget()
            while sink.commit_all(checkpoint(number), [committable]) != [COMMITTED]:
                pass  # the connections that the restart has ended
    with closing(Observer(dsn)) as observer:
        assert observer.ids() == [0, 1]


def test_a_wrong_password_is_one_where_the_server_is_proven(server: MySQLServer, dsn: str) -> None:
    forget_logins(server)
    sink = MySQLSink(dsn, "orders", connect_options={"password": "wrong"})
    with pytest.raises(ConfigurationError, match="Access denied"):
        sink.check(SCHEMA)


def test_a_key_is_a_file_or_its_text(server: MySQLServer, dsn: str, tmp_path: Path) -> None:
    forget_logins(server)
    text = (server.home / "data" / "public_key.pem").read_text()
    for key in (text, text.encode()):
        with closing(MySQLSink(dsn, "orders", connect_options={"server_public_key": key})) as sink:
            sink.check(SCHEMA)
    server.connect(dsn).close()
    for wrong in (tmp_path / "none.pem", server.home / "data" / "ca.pem"):
        with pytest.raises(ConfigurationError, match="server_public_key is no public key in PEM"):
            MySQLSink(dsn, "orders", connect_options={"server_public_key": str(wrong)}).check(SCHEMA)


@pytest.mark.parametrize("name", ["none.pem", "public_key.pem"])
def test_a_file_for_tls_that_is_none_is_named(server: MySQLServer, dsn: str, name: str) -> None:
    file = server.home / "data" / name
    with pytest.raises(ConfigurationError, match=f"the files for TLS .*ca={file}.* cannot be used"):
        MySQLSink(f"{dsn.partition('?')[0]}?ssl_ca={file}", "orders").check(SCHEMA)


def test_over_tls_that_nothing_verifies_a_key_is_no_proof(dsn: str) -> None:
    """The server would take the encrypted password for the password, and deny the access."""
    with pytest.raises(ConfigurationError, match=r"over TLS, server_public_key is not used"):
        MySQLSink(dsn, "orders", connect_options={"ssl_disabled": False}).check(SCHEMA)


@pytest.mark.parametrize(
    ("options", "checks_name", "trusted"),
    [
        ({}, False, False),
        ({"ssl_verify_cert": True}, False, False),
        ({"ssl_verify_identity": True}, True, True),
        ({"ssl_ca": certifi.where()}, False, True),
        ({"ssl_ca": certifi.where(), "ssl_verify_identity": True}, True, True),
        ({"ssl": {"ca": certifi.where()}}, True, True),
        ({"ssl": {"ca": certifi.where()}, "ssl_verify_identity": "true"}, True, True),
        ({"ssl": {"ca": certifi.where()}, "ssl_verify_identity": "false"}, False, True),
        ({"ssl": {"ca": certifi.where()}, "ssl_verify_cert": "false"}, False, False),
        ({"ssl": {}, "ssl_ca": certifi.where()}, False, True),
    ],
    ids=str,
)
def test_whom_a_server_has_to_prove_that_it_is(options: Any, checks_name: bool, trusted: bool) -> None:
    """A public authority vouches for anybody's name. SQLAlchemy gives the authority in a dict."""
    connection: Any = Connection(host="db", user="app", defer_connect=True, **options)
    context = getattr(connection, "ctx", None)
    assert bool(context and context.check_hostname) is checks_name
    connection._sock = SimpleNamespace(context=context)
    assert connection._trusted() is trusted
