"""What a checkpoint asks a database beside its rows, in milliseconds: `python -m benchmarks.ledger [RUNS]`.

Each participant looks at its table under a lock, and each checkpoint at the ledger (docs/protocol.md#three-memories).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import pyarrow as pa

from sinks.mysql import MySQLSink
from sinks.mysql import catalog as mysql
from sinks.postgres import PostgresSink
from sinks.postgres import catalog as postgres
from sinks.sql.sink import TableSink
from sinks.testing.servers.mariadb import mysql_service
from sinks.testing.servers.postgres import postgres_service
from sinks.transaction import token

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("amount", pa.float64())])
LEDGERS = (400, 10_000, 100_000)
"""Rows: of 4, 100 and 1,000 participants in the hundred checkpoints that are kept."""


def timed(call: Callable[[], object], runs: int) -> str:
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return f"{min(seconds) * 1000:8.2f} {median(seconds) * 1000:8.2f}"


def fill(sink: TableSink, rows: int) -> None:
    """Rows of the job "job" in the ledger, as many as there are to be."""
    plan = sink._planned()
    numbers = range(rows)
    one = token("job"), "lineage", token(sink.name)
    with sink._server.lend() as connection, sink._server.transaction(connection), connection.cursor() as cursor:
        cursor.execute(f"DELETE FROM {plan.ledger.name} WHERE job = %s", one[:1])
        cursor.executemany(
            f"INSERT INTO {plan.ledger.name} (transaction_id, committed, job, lineage, sink, checkpoint)"
            " VALUES (%s, true, %s, %s, %s, %s)",
            [(f"x{n}", *one, n * 100 // rows) for n in numbers],
        )


def look_at_postgres(sink: TableSink) -> None:
    target = sink._planned().target
    with sink._server.lend() as connection, sink._server.transaction(connection):
        postgres.lock(connection, target)
        postgres.current(connection, target)


def look_at_all_of_postgres(sink: TableSink) -> None:
    target = sink._planned().target
    with sink._server.lend() as connection, sink._server.transaction(connection):
        postgres.describe(connection, target.schema, target.name)


def look_at_mysql(sink: TableSink) -> None:
    with sink._server.lend() as connection, sink._server.transaction(connection):
        mysql.current(connection, sink._planned().target, SCHEMA.names)


def measure(name: str, sink: TableSink, look: Callable[[TableSink], None], runs: int) -> None:
    sink.check(SCHEMA)
    look(sink)
    print(f"{name}, a participant's look at the table in a transaction of its own {timed(lambda: look(sink), runs)}")
    for rows in LEDGERS:
        fill(sink, rows)
        asked = timed(lambda: sink.committed_checkpoints("job"), max(5, runs // 10))
        print(f"{name}, a checkpoint's look at a ledger of {rows:>7,} rows {asked}")
    sink.close()


def main(arguments: Sequence[str]) -> None:
    runs = int(arguments[0]) if arguments else 300
    print("milliseconds: minimum, median")
    with postgres_service({"max_prepared_transactions": "16"}) as server, server.database() as dsn:
        sink = PostgresSink(dsn, "orders", create_table=True)
        measure("PostgreSQL", sink, look_at_postgres, runs)
        whole = timed(lambda: look_at_all_of_postgres(sink), runs)
        print(f"PostgreSQL, one of the two looks at all of the table of a staged checkpoint {whole}")
        sink.close()
    with mysql_service() as other, other.database() as dsn:
        measure("MariaDB", MySQLSink(dsn, "orders", create_table=True), look_at_mysql, runs)


if __name__ == "__main__":
    main(sys.argv[1:])
