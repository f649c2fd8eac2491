"""What `coordinator verify` costs: `python -m benchmarks.verify [ROWS] [SYSTEM …]`.

ROWS (1,000,000) are in the three retained checkpoints, of four participants each. quick: records
and ledgers, what the driver compares every `verify_interval`; whole: the rows too. And what it
costs KafkaSink to ask the brokers, once in a checkpoint, whether its transactions are still open
(`validate_all`). Systems: postgres, mysql, kafka.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import psutil
import pyarrow as pa

from benchmarks.measure import spread, table
from benchmarks.protocol import batch
from coordinator import CheckpointCoordinator
from coordinator.operations.inspection.balance import Verdict, take_balance
from coordinator.protocol.ports import Sink
from coordinator.store.job_store import JobStore
from sinks.kafka import KafkaSink
from sinks.mysql import MySQLSink
from sinks.postgres import PostgresSink
from sinks.testing import rows
from sinks.testing.servers.kafka import KafkaServer
from sinks.testing.servers.mariadb import MariaDBServer
from sinks.testing.servers.postgres import PostgresServer
from sinks.transaction import Checkpoint, Committable, TransactionId

RUNS = 7
PARTICIPANTS = (1, 4, 32, 100)


def measure(
    sink: Sink,
    count: int,
    server: int,
    as_records: Callable[[pa.Table], pa.Table] = lambda one: one,
) -> None:
    part = count // 12
    with CheckpointCoordinator("job", [sink], f"file://{tempfile.mkdtemp()}") as coordinator:
        for n in range(3):
            coordinator.process(
                batch(n, [as_records(rows((n * 4 + i) * part, part)) for i in range(4)])
            )
        lines = []
        for name, quick in (("quick", True), ("whole", False)):
            seconds = list[float]()
            client = list[float]()
            servers = list[float]()
            for _ in range(RUNS):
                began = time.perf_counter()
                own = time.process_time()
                of_server = _processor_seconds(server)
                balance = take_balance(
                    JobStore(coordinator.storage, "job"), coordinator.sinks, quick=quick
                )
                seconds.append((time.perf_counter() - began) * 1000)
                client.append((time.process_time() - own) * 1000)
                servers.append((_processor_seconds(server) - of_server) * 1000)
                assert balance.verdict is not Verdict.DIFFERS, balance.findings
            lines.append(
                [
                    name,
                    balance.verdict.value,
                    *(spread(each, "{:.0f}") for each in (seconds, client, servers)),
                ]
            )
    print(f"\n{sink.system}, {part * 12:,} rows, {RUNS} rounds\n")
    print(table(["verify", "says", "ms", "CPU ms of the client", "CPU ms of the server"], lines))


def _processor_seconds(pid: int) -> float:
    this = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:4]) for one in (this, *this.children(recursive=True)))


def postgres(count: int) -> None:
    with PostgresServer() as server, server.database() as dsn:
        measure(PostgresSink(dsn, "orders", create_table=True), count, server.pid)


def mysql(count: int) -> None:
    with MariaDBServer() as server, server.database() as dsn:
        sink = MySQLSink(dsn, "orders", create_table=True)
        measure(sink, count, server.pid)


def kafka(count: int) -> None:
    with KafkaServer() as server, server.topic(partitions=4) as topic:
        measure(
            KafkaSink(server.bootstrap, topic),
            count,
            server.broker().pid,
            lambda one: one.select(["name"]).rename_columns(["value"]),
        )
        lines = [[str(n), *validate_all(server.bootstrap, topic, n)] for n in PARTICIPANTS]
    print("\nKafkaSink.validate_all\n")
    print(table(["participants", "ms", "CPU ms of the client"], lines))


def validate_all(bootstrap: str, topic: str, participants: int) -> tuple[str, str]:
    sink = KafkaSink(bootstrap, topic, name=f"of-{participants}")
    asked = [_pre_committed(sink, subtask) for subtask in range(participants)]
    seconds = list[float]()
    client = list[float]()
    for _ in range(RUNS * 3):
        began = time.perf_counter()
        own = time.process_time()
        sink.validate_all(Checkpoint("job", "lineage", 0), asked)
        seconds.append((time.perf_counter() - began) * 1000)
        client.append((time.process_time() - own) * 1000)
    sink.commit_all(Checkpoint("job", "lineage", 0), asked)
    sink.close()
    return spread(seconds, "{:.1f}"), spread(client, "{:.1f}")


def _pre_committed(sink: KafkaSink, subtask: int) -> Committable:
    name = TransactionId("job", "lineage", 0, sink.name, subtask, 1, 0, 0, 0)
    one = pa.RecordBatch.from_pydict({"value": ["x" * 100]})
    transaction = sink.begin_transaction(name.context(one.schema))
    sink.write(transaction, one)
    return sink.snapshot_state(transaction)


SYSTEMS: Mapping[str, Callable[[int], None]] = {
    "postgres": postgres,
    "mysql": mysql,
    "kafka": kafka,
}


def main(arguments: Sequence[str]) -> None:
    numbers = [int(one) for one in arguments if one.isdecimal()]
    for name in [one for one in arguments if not one.isdecimal()] or SYSTEMS:
        SYSTEMS[name](numbers[0] if numbers else 1_000_000)


if __name__ == "__main__":
    main(sys.argv[1:])
