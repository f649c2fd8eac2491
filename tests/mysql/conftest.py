"""Each test runs on MySQL; on MariaDB in `make test-all`, or where MySQL cannot be had."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from sinks.mysql import server as mysql_server
from sinks.mysql import xa
from sinks.testing.servers.mariadb import MariaDBServer
from sinks.testing.servers.mysql import EmbeddedMySQL, MySQLServer, MySQLService, mysql_can_be_had
from tests.mysql.observer import Observer

REPEATED = [pytest.mark.large] if mysql_can_be_had() else []


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No busy machine takes ten minutes from one statement of a transaction to the next, nor two minutes to end a
    session of MariaDB."""
    monkeypatch.setattr(mysql_server, "_IDLE_LIMIT", 600)
    monkeypatch.setattr(xa, "_DETACH_TIMEOUT", 120.0)


@pytest.fixture(
    params=[pytest.param("mysql_server", id="MySQL"), pytest.param("mariadb", id="MariaDB", marks=REPEATED)]
)
def mysql(request: pytest.FixtureRequest) -> MySQLService:
    server: MySQLService = request.getfixturevalue(request.param)
    return server


SETTINGS = {"max_connections": "133"}
MARIADB = SETTINGS | {"log_bin": "binlog", "binlog_format": "ROW", "server_id": "1"}
"""A binary log, as those have that are replicated; MySQL has one anyway."""


@pytest.fixture(scope="session")
def to_kill() -> Iterator[Callable[[type[EmbeddedMySQL]], EmbeddedMySQL]]:
    """The server of a kind that tests may kill, another than `mysql`; each leaves it running."""
    with ExitStack() as stack:
        yield functools.cache(lambda kind: stack.enter_context(kind(MARIADB if kind is MariaDBServer else SETTINGS)))


@pytest.fixture(
    scope="module",
    params=[pytest.param(MySQLServer, id="MySQL"), pytest.param(MariaDBServer, id="MariaDB", marks=REPEATED)],
)
def server(request: pytest.FixtureRequest, to_kill: Callable[[type[EmbeddedMySQL]], EmbeddedMySQL]) -> EmbeddedMySQL:
    return to_kill(request.param)


@pytest.fixture
def db(mysql: MySQLService, mysql_database: str) -> Iterator[Observer]:
    """A fresh database with a table `orders (id bigint, name text)`."""
    observer = Observer(mysql_database)
    observer.run("CREATE TABLE orders (id bigint NOT NULL, name varchar(100)) ENGINE=InnoDB")
    yield observer
    observer.close()


@pytest.fixture
def without_local(mysql: MySQLService) -> Iterator[None]:
    """The server refuses LOAD DATA LOCAL meanwhile."""
    with mysql.connect() as admin, admin.cursor() as cursor:
        cursor.execute("SET GLOBAL local_infile = OFF")
        try:
            yield
        finally:
            cursor.execute("SET GLOBAL local_infile = ON")
