"""What a checkpoint asks a system beside its rows, in milliseconds: `python -m benchmarks.ledger
[RUNS] [SYSTEM …]`.

Each participant looks at its table under a lock, and each checkpoint at the ledger
(docs/failures.md#three-memories). To Kafka each participant sends an offset, and each checkpoint
asks for the group's. Systems: postgres, mysql, kafka.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median

import pyarrow as pa

from sinks.kafka import KafkaSink
from sinks.mysql import MySQLSink
from sinks.mysql.catalog import MySQLCatalog
from sinks.postgres import PostgresSink
from sinks.postgres import catalog as postgres
from sinks.sql.sink import AnyTableSink
from sinks.testing.servers.kafka import KafkaServer
from sinks.testing.servers.mysql import mysql_service
from sinks.testing.servers.postgres import postgres_service
from sinks.transaction import Checkpoint, Committable, TransactionId, token

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("amount", pa.float64())])
LEDGERS = (400, 10_000, 100_000)
"""Rows: of 4, 100 and 1,000 participants in the hundred checkpoints that are kept."""
PARTS = ((1, 1), (1, 100_000), (4, 1000), (32, 10))
"""Participants and rows of each, of 100 bytes."""


def timed(call: Callable[[], object], runs: int) -> str:
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return f"{min(seconds) * 1000:8.2f} {median(seconds) * 1000:8.2f}"


def fill(sink: AnyTableSink, rows: int) -> None:
    """Rows of the job "job" in the ledger, as many as there are to be."""
    plan = sink._target.planned()
    numbers = range(rows)
    one = token("job"), "lineage", token(sink.name)
    with (
        sink._server.lend() as connection,
        sink._server.transaction(connection),
        connection.cursor() as cursor,
    ):
        cursor.execute(f"DELETE FROM {plan.ledger.name} WHERE job = %s", one[:1])
        cursor.executemany(
            f"INSERT INTO {plan.ledger.name} (transaction_id, committed, job, lineage, sink,"
            " checkpoint)"
            " VALUES (%s, true, %s, %s, %s, %s)",
            [(f"x{n}", *one, n * 100 // rows) for n in numbers],
        )


def look_at_postgres(sink: AnyTableSink) -> None:
    target = sink._target.planned().target
    with sink._server.lend() as connection, sink._server.transaction(connection):
        postgres.lock(connection, target)
        postgres.current(connection, target)


def look_at_all_of_postgres(sink: AnyTableSink) -> None:
    target = sink._target.planned().target
    with sink._server.lend() as connection, sink._server.transaction(connection):
        postgres.describe(connection, target.schema, target.name)


def look_at_mysql(sink: AnyTableSink) -> None:
    catalog = sink._backend.catalog
    assert isinstance(catalog, MySQLCatalog)
    with sink._server.lend() as connection, sink._server.transaction(connection):
        catalog.current(connection, sink._target.planned().target, SCHEMA.names)


def measure(name: str, sink: AnyTableSink, look: Callable[[AnyTableSink], None], runs: int) -> None:
    sink.check(SCHEMA)
    look(sink)
    print(
        f"{name}, a participant's look at the table in a transaction of its own "
        f"{timed(lambda: look(sink), runs)}"
    )
    for rows in LEDGERS:
        fill(sink, rows)
        asked = timed(lambda: sink.committed_checkpoints("job"), max(5, runs // 10))
        print(f"{name}, a checkpoint's look at a ledger of {rows:>7,} rows {asked}")
    sink.close()


def measure_kafka(runs: int) -> None:
    """Tasks of both kinds in turn, four at a time in threads."""
    with (
        KafkaServer() as server,
        server.topic(partitions=3) as topic,
        ThreadPoolExecutor(4) as pool,
    ):
        for participants, rows in PARTS:
            batch = pa.RecordBatch.from_pydict({"value": ["x" * 100] * rows})
            name = f"{participants} participant(s) of {rows:,} rows"
            seconds: dict[bool, list[float]] = {True: [], False: []}
            sinks = {
                remember: KafkaSink(server.bootstrap, topic, name=name, remember=remember)
                for remember in seconds
            }
            for n in range(runs):
                for remember, sink in sinks.items():
                    write = partial(_write, sink, batch, n)
                    began = time.perf_counter()
                    written = list(pool.map(write, range(participants)))
                    seconds[remember].append(time.perf_counter() - began)
                    sink.commit_all(Checkpoint("job", "lineage", n), written)
            told = {remember: f"{median(seconds[remember][2:]) * 1000:.1f}" for remember in seconds}
            print(f"Kafka, {name}: median {told[True]}, without an offset {told[False]}")
            asked = timed(partial(sinks[True].committed_checkpoints, "job"), runs)
            print(f"Kafka, a checkpoint's look at the group {asked}")
            for sink in sinks.values():
                sink.close()


def _write(sink: KafkaSink, batch: pa.RecordBatch, checkpoint: int, subtask: int) -> Committable:
    name = TransactionId("job", "lineage", checkpoint, sink.name, subtask, 1, 0, 0, 0)
    transaction = sink.begin_transaction(name.context(batch.schema))
    sink.write(transaction, batch)
    return sink.pre_commit(transaction)


def measure_postgres(runs: int) -> None:
    with postgres_service({"max_prepared_transactions": "16"}) as server, server.database() as dsn:
        sink = PostgresSink(dsn, "orders", create_table=True)
        measure("PostgreSQL", sink, look_at_postgres, runs)
        whole = timed(lambda: look_at_all_of_postgres(sink), runs)
        print(
            f"PostgreSQL, one of the two looks at all of the table of a staged checkpoint {whole}"
        )
        sink.close()


def measure_mysql(runs: int) -> None:
    with mysql_service() as server, server.database() as dsn:
        measure("MySQL", MySQLSink(dsn, "orders", create_table=True), look_at_mysql, runs)


SYSTEMS = {"postgres": measure_postgres, "mysql": measure_mysql, "kafka": measure_kafka}


def main(arguments: Sequence[str]) -> None:
    numbers = [int(one) for one in arguments if one.isdecimal()]
    runs = numbers[0] if numbers else 300
    print("milliseconds: minimum, median")
    for name in [one for one in arguments if not one.isdecimal()] or SYSTEMS:
        SYSTEMS[name](runs)


if __name__ == "__main__":
    main(sys.argv[1:])
