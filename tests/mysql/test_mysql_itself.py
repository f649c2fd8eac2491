"""MySQL itself, where a Docker engine answers, passes the conformance kit as MariaDB does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sinks.testing.servers.common import docker_answers
from sinks.testing.servers.mariadb import MySQLService, mysql_container
from tests.mysql import test_conformance as on_mariadb

pytestmark = pytest.mark.skipif(not docker_answers(), reason="MySQL needs a Docker engine, and none answers here")


@pytest.fixture(scope="module")
def mysql() -> Iterator[MySQLService]:
    with mysql_container() as server:
        yield server


@pytest.fixture
def mysql_database(mysql: MySQLService) -> Iterator[str]:
    with mysql.database() as dsn:
        yield dsn


class TestXA(on_mariadb.TestXA):
    pass


class TestStaged(on_mariadb.TestStaged):
    pass
