from __future__ import annotations

from collections.abc import Iterator

import pytest

from sinks.testing.servers.mariadb import MySQLService
from tests.mysql.play import Observer


@pytest.fixture
def db(mysql_database: str) -> Iterator[Observer]:
    """A fresh database with a table `orders (id bigint, name text)`."""
    observer = Observer(mysql_database)
    observer.run("CREATE TABLE orders (id bigint NOT NULL, name varchar(100)) ENGINE=InnoDB")
    yield observer
    observer.close()


@pytest.fixture
def without_local(mariadb: MySQLService) -> Iterator[None]:
    """The server refuses LOAD DATA LOCAL meanwhile."""
    with mariadb.connect() as admin, admin.cursor() as cursor:
        cursor.execute("SET GLOBAL local_infile = OFF")
        try:
            yield
        finally:
            cursor.execute("SET GLOBAL local_infile = ON")
