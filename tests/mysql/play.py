"""A coordinator in a few lines, and an observer that reads the database past the sink."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pymysql

from sinks import Checkpoint, Committable, TransactionContext
from sinks.mysql import MySQLSink
from sinks.mysql.server import Connection, execute, parameters, query
from sinks.transaction import Fingerprint, TransactionId

SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string())])
LINEAGE = "0badcafe"
_task_attempts = itertools.count()


def rows_of(*ids: int, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"id": n, "name": f"row {n}"} for n in ids], schema=schema)


def batch(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=schema)


def context(
    sink: MySQLSink,
    checkpoint: int = 0,
    subtask: int = 0,
    schema: pa.Schema = SCHEMA,
    job: str = "job",
    round: int = 0,
) -> TransactionContext:
    attempt = next(_task_attempts)
    name = TransactionId(job, LINEAGE, checkpoint, sink.name, subtask, 1, round, 0, attempt)
    return TransactionContext(job, LINEAGE, checkpoint, sink.name, subtask, f"a{attempt}", schema, str(name))


def pre_commit(
    sink: MySQLSink,
    *batches: pa.RecordBatch,
    checkpoint: int = 0,
    subtask: int = 0,
    job: str = "job",
    round: int = 0,
) -> Committable:
    """What a task does for its partition; rolls back what fails."""
    transaction = sink.begin_transaction(context(sink, checkpoint, subtask, batches[0].schema, job, round))
    try:
        for one in batches:
            sink.write(transaction, one)
        committable = sink.pre_commit(transaction)
    except BaseException:
        sink.rollback(transaction)
        raise
    return committable.of(sink.name, subtask, Fingerprint(sum(one.num_rows for one in batches), 0))


def checkpoint(number: int = 0, job: str = "job", oldest: int = 0) -> Checkpoint:
    return Checkpoint(job, LINEAGE, number, oldest)


class Observer:
    """Reads, in autocommit mode, what is visible, prepared and staged."""

    def __init__(self, dsn: str, **options: Any) -> None:
        self.dsn = dsn
        chosen: dict[str, Any] = {"autocommit": True, "charset": "utf8mb4"} | parameters(dsn) | options
        self.connection: Connection = pymysql.connect(**chosen)
        self.schema = parameters(dsn)["database"]

    def run(self, statement: str, parameters: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        return query(self.connection, statement, parameters)

    def visible(self, table: str = "orders", order: str = "1") -> list[tuple[Any, ...]]:
        return self.run(f"SELECT * FROM {table} ORDER BY {order}")

    def ids(self, table: str = "orders") -> list[int]:
        return [row[0] for row in self.run(f"SELECT id FROM {table} ORDER BY 1")]

    def prepared(self) -> list[tuple[Any, ...]]:
        """All branches of the server."""
        return sorted(self.run("XA RECOVER"), key=str)

    def staging(self) -> list[str]:
        rows = self.run(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()"
            " AND table_name REGEXP '^tpc_[0-9a-f]{20}$' ORDER BY 1"
        )
        return [row[0] for row in rows]

    def pending(self) -> int:
        return len(self.prepared()) + len(self.staging())

    def sessions(self) -> int:
        """Other connections to the database."""
        ((count,),) = self.run(
            "SELECT count(*) FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()"
        )
        return int(count)

    def ledger(self) -> dict[str, bool]:
        return {name: bool(done) for name, done in self.run("SELECT transaction_id, committed FROM tpc_ledger")}

    def close(self) -> None:
        self.connection.close()


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


@contextmanager
def held(dsn: str, *statements: str) -> Iterator[Connection]:
    """Another session with an open transaction that ran these statements."""
    observer = Observer(dsn)
    try:
        execute(observer.connection, "BEGIN")
        for statement in statements:
            observer.run(statement)
        yield observer.connection
    finally:
        execute(observer.connection, "ROLLBACK")
        observer.close()
