from __future__ import annotations

import pytest

from sinks.mysql import MySQLSink
from tests.dead_letters import INPUT, DeadLettersOfTables, batch
from tests.mysql.observer import Observer


@pytest.fixture
def dsn(mysql_database: str) -> str:
    return mysql_database


class TestMySQL(DeadLettersOfTables):
    make = MySQLSink
    observe = Observer
    strategies = ("xa", "staged")
    input = (*INPUT[:2], batch(2, by_server=False))  # a staging table has no CHECK
