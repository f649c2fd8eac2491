from __future__ import annotations

import pytest

from sinks.mysql import MySQLSink
from tests.mysql.observer import Observer
from tests.one_transaction import OneTransaction


@pytest.fixture
def dsn(mysql_database: str) -> str:
    return mysql_database


class TestMySQL(OneTransaction):
    make = MySQLSink
    observe = Observer
