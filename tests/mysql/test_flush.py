"""What an administrator flushes in the middle of a query."""

from __future__ import annotations

import contextlib
from typing import Literal

import pymysql
import pytest

from sinks.errors import TransactionBlocked
from sinks.mysql import MySQLSink
from sinks.mysql.connection import execute, query
from sinks.testing.servers.mysql import EmbeddedMySQL
from sinks.testing.table import COMMITTED, SCHEMA, checkpoint, context, pre_commit, rows_of

STRATEGIES = pytest.mark.parametrize("strategy", ["xa", "staged"])
Strategy = Literal["xa", "staged"]


@STRATEGIES
def test_a_backup_blocks_tasks_for_a_bounded_time_and_commits_until_its_end(
    server: EmbeddedMySQL, strategy: Strategy
) -> None:
    with server.database() as dsn, server.connect() as admin, server.connect(dsn) as connection:
        execute(connection, "CREATE TABLE orders (id bigint, name text)")
        with contextlib.closing(MySQLSink(dsn, "orders", strategy=strategy, lock_timeout=1)) as sink:
            sink.check(SCHEMA)
            transaction = sink.begin_transaction(context(sink))
            sink.write(transaction, rows_of(1))
            execute(admin, "FLUSH TABLES WITH READ LOCK")
            with pytest.raises(TransactionBlocked, match="READ LOCK"):
                sink.pre_commit(transaction)
            execute(admin, "UNLOCK TABLES")
            sink.rollback(transaction)
            committable = pre_commit(sink, rows_of(1))
            execute(admin, "FLUSH TABLES WITH READ LOCK")
            [waits] = sink.commit_all(checkpoint(), [committable])
            assert isinstance(waits, pymysql.OperationalError)  # to be asked again
            execute(admin, "UNLOCK TABLES")
            assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
        assert query(connection, "SELECT count(*) FROM orders") == [(1,)]


@STRATEGIES
@pytest.mark.parametrize("kind", ["PRIVILEGES", "TABLES", "LOGS"])
def test_other_kinds_of_flush_stop_nothing(server: EmbeddedMySQL, strategy: Strategy, kind: str) -> None:
    with server.database() as dsn, server.connect() as admin, server.connect(dsn) as connection:
        execute(connection, "CREATE TABLE orders (id bigint, name text)")
        with contextlib.closing(MySQLSink(dsn, "orders", strategy=strategy)) as sink:
            sink.check(SCHEMA)
            execute(admin, f"FLUSH {kind}")
            committable = pre_commit(sink, rows_of(1))
            execute(admin, f"FLUSH {kind}")
            sink.validate_all(checkpoint(), [committable])
            execute(admin, f"FLUSH {kind}")
            assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
        assert query(connection, "SELECT count(*) FROM orders") == [(1,)]
