"""Each test runs on MySQL; on MariaDB in `make test-all`, or where MySQL cannot be had."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sinks.testing.servers.mariadb import MariaDBServer
from sinks.testing.servers.mysql import EmbeddedMySQL, MySQLServer, MySQLService, mysql_can_be_had
from tests.mysql.play import Observer

REPEATED = [pytest.mark.large] if mysql_can_be_had() else []


@pytest.fixture(
    params=[pytest.param("mysql_server", id="MySQL"), pytest.param("mariadb", id="MariaDB", marks=REPEATED)]
)
def mysql(request: pytest.FixtureRequest) -> MySQLService:
    server: MySQLService = request.getfixturevalue(request.param)
    return server


@pytest.fixture(
    scope="module",
    params=[pytest.param(MySQLServer, id="MySQL"), pytest.param(MariaDBServer, id="MariaDB", marks=REPEATED)],
)
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedMySQL]:
    """One of the module's own, which tests may kill, with the module's SETTINGS."""
    server: EmbeddedMySQL = request.param(getattr(request.module, "SETTINGS", {}).get(request.param.PRODUCT))
    try:
        server.start()
    except RuntimeError as error:
        server.close()
        pytest.skip(str(error))
    with server:
        yield server


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
