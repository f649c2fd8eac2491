"""The protocol through a Spark Connect server: foreachBatch runs in a Python worker of the server."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from coordinator.errors import CheckpointError, SavepointError
from coordinator.operations.requests import ask_driver
from examples.custom_sink import FileSink
from sinks import Identity
from sinks.postgres import PostgresSink
from sinks.testing import Hooked
from sinks.testing.driver import die
from tests.postgres.observer import Observer
from tests.spark.connect import ConnectJob, ConnectServer
from tests.spark.job import Once, end_group, wait_for, write_input
from tests.spark.test_spark import ROCKSDB, assert_exactly_once, count_by_remainder, linger, visible, withdraw_one


@pytest.fixture
def url(spark: SparkSession) -> str:
    """Of the server in the JVM of the session."""
    return f"sc://127.0.0.1:{spark.sparkContext.getConf().get('spark.connect.grpc.binding.port')}"


@pytest.fixture
def sink(tmp_path: Path) -> FileSink:
    (tmp_path / "rows").mkdir()
    return FileSink(tmp_path / "rows")


@dataclass
class CallAt(CheckpointListener):
    step: Step
    checkpoint_id: int
    hook: Callable[[], None]

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if step is self.step and checkpoint_id == self.checkpoint_id:
            self.hook()


def small_ids(df: Any) -> Any:
    return df.filter("id < 2000").selectExpr("id", "upper(name) AS name")


@dataclass
class Blocked:
    """Tells that it was reached, and goes on when it is let go."""

    folder: Path

    def __call__(self) -> None:
        (self.folder / "reached").touch()
        wait_for((self.folder / "let-go").exists)
        (self.folder / "went-on").touch()


@dataclass
class Standing:
    """Tells its process' id, and stays."""

    file: Path

    def __call__(self) -> None:
        self.file.with_suffix(".new").write_text(f"{os.getpid()}")
        self.file.with_suffix(".new").rename(self.file)
        threading.Event().wait()


@pytest.mark.large  # test_killed.py has a JVM that dies, and the kit a zombie
def test_server_killed_and_another_goes_on(tmp_path: Path, url: str, pg_database: str) -> None:
    """SIGKILL to the server under two queries. The worker of one is a zombie that has decided its checkpoint, and goes
    on beside the next run. That of the other dies with the server, after pre-commit."""
    dead, zombie = tmp_path / "dead", tmp_path / "zombie"
    ids = [write_input(folder / "input", batches=2) for folder in (dead, zombie)]

    def job(folder: Path, url: str, *listeners: CheckpointListener) -> ConnectJob:
        sink = PostgresSink(pg_database, folder.name, create_table=True)
        return ConnectJob(folder, [sink], folder.name, url=url, listeners=listeners)

    clients = []
    with ConnectServer(tmp_path) as server:
        try:
            clients.append(job(dead, server.url, CallAt(Step.PRE_COMMITTED, 0, Standing(dead / "worker"))).start())
            wait_for((dead / "worker").exists)
            clients.append(job(zombie, server.url, CallAt(Step.COMPLETE, 0, Blocked(zombie))).start())
            wait_for((zombie / "reached").exists)
            server.process.kill()
            os.kill(int((dead / "worker").read_text()), signal.SIGKILL)
        finally:
            for client in clients:
                end_group(client)
        with closing(Observer(pg_database)) as observer:
            assert observer.pending() == 6
        for last in (job(dead, url), job(zombie, url, CallAt(Step.TRIGGERED, 1, (zombie / "let-go").touch))):
            assert last.run() == 0, last.output()
        wait_for((zombie / "went-on").exists)
    with closing(Observer(pg_database)) as observer:
        assert [Counter(observer.ids(folder.name)) for folder in (dead, zombie)] == list(map(Counter, ids))
        assert observer.pending() == 0


@pytest.mark.large
def test_worker_killed_in_a_stateful_query(tmp_path: Path, sink: FileSink, url: str) -> None:
    """R10: the restart has nothing to write for that batch, yet Spark needs it to run for the state store."""
    ids = write_input(tmp_path / "input", batches=2)

    def job(*listeners: CheckpointListener) -> ConnectJob:
        options: Any = {"shape": count_by_remainder, "output_mode": "update", "conf": ROCKSDB}
        return ConnectJob(tmp_path, [sink], url=url, listeners=listeners, **options)

    killed = job(CallAt(Step.DONE, 0, die))
    assert killed.run() == 1
    assert "Python worker exited unexpectedly" in killed.output()
    last = job()
    assert last.run() == 0, last.output()
    final: dict[int, int] = {}
    for row in visible(sink):
        final[row["key"]] = max(final.get(row["key"], 0), row["count"])
    assert final == Counter(id % 10 for id in ids)
    assert len(visible(sink)) == 2 * 10, "each of the two checkpoints emits each key once"
    assert list(sink.in_doubt("spark-job")) == []


def test_client_killed_while_the_query_goes_on(tmp_path: Path, sink: FileSink, url: str) -> None:
    ids = write_input(tmp_path / "input", batches=2)
    job = ConnectJob(tmp_path, [sink], url=url, listeners=[CallAt(Step.COMPLETE, 0, Blocked(tmp_path))])
    client = job.start()
    wait_for((tmp_path / "reached").exists)
    end_group(client)
    (tmp_path / "let-go").touch()
    wait_for((tmp_path / "spark" / "commits" / "1").exists)
    assert_exactly_once(sink, ids)


def test_worker_killed_and_a_transaction_lost(tmp_path: Path, sink: FileSink, url: str, pg_database: str) -> None:
    """Under two sinks of their own shape. The replay under Connect: the layout is counted, the lost partition written
    again."""
    ids = write_input(tmp_path / "input", batches=2)
    table = PostgresSink(pg_database, "orders", create_table=True)

    def job(*listeners: CheckpointListener) -> ConnectJob:
        transforms = {table.name: small_ids}
        return ConnectJob(tmp_path, [sink, table], url=url, listeners=listeners, transforms=transforms)

    assert job(CallAt(Step.COMPLETE, 0, die)).run() == 1
    assert visible(sink) == []
    withdraw_one(sink.folder)
    last = job()
    assert last.run() == 0, last.output()
    assert_exactly_once(sink, ids)
    with closing(Observer(pg_database)) as observer:
        assert Counter(observer.run("SELECT id, name = upper(name) FROM orders")) == Counter(
            (id, True) for id in ids if id < 2000
        )
        assert observer.pending() == 0


@pytest.mark.large
def test_checkpoint_that_expires_is_cancelled_on_the_server(tmp_path: Path, sink: FileSink, url: str) -> None:
    write_input(tmp_path / "input", batches=1)
    hooked = Hooked(sink, "pre_commit", hook=Once(tmp_path / "lingered", linger))
    job = ConnectJob(tmp_path, [hooked], url=url, config=CheckpointConfig(timeout=4))
    assert job.run() == 1
    assert "was not complete within 4 s" in job.output()
    assert visible(sink) == []


class BlockedInSecondCheckpoint(FileSink):
    def pre_commit(self, transaction: Any) -> Identity:
        identity = super().pre_commit(transaction)
        if visible(self):
            Blocked(self.folder.parent)()
        return identity


def test_stopped_by_the_client(tmp_path: Path, sink: FileSink, url: str) -> None:
    """The task outlives its query until it is interrupted; what it had pre-committed is swept by the client."""
    ids = write_input(tmp_path / "input", batches=2, files=1)
    blocked = BlockedInSecondCheckpoint(sink.folder)

    def end(spark: Any, query: Any, coordinator: Any) -> None:
        wait_for((tmp_path / "reached").exists)
        assert len(list(sink.in_doubt("spark-job"))) == 1
        query.stop()
        assert len(spark.interruptTag(query.runId)) == 1
        coordinator.recover()

    job = ConnectJob(tmp_path, [blocked], url=url, files_per_batch=1, end=end)
    assert job.run() == 0, job.output()
    assert_exactly_once(sink, ids[:50])


@pytest.mark.large
def test_an_operator_is_told_that_no_savepoint_stops_the_query(tmp_path: Path, sink: FileSink, url: str) -> None:
    """The worker would be gone before it has answered: the operator would wait for it, and be told nothing."""
    ids = write_input(tmp_path / "input", batches=1)

    def end(spark: Any, query: Any, coordinator: Any) -> None:
        wait_for((tmp_path / "reached").exists)
        with pytest.raises(SavepointError, match=r"stop the query with query\.stop"):
            ask_driver(coordinator._protocol.store, "stop")
        (tmp_path / "let-go").touch()
        query.awaitTermination()

    config = CheckpointConfig(savepoint_dir=f"file://{tmp_path}/savepoints")
    blocked = CallAt(Step.PRE_COMMITTED, 0, Blocked(tmp_path))
    job = ConnectJob(tmp_path, [sink], url=url, config=config, listeners=[blocked], end=end)
    assert job.run() == 0, job.output()
    assert_exactly_once(sink, ids)


NO_LOCATION = r"name it in CheckpointConfig\(checkpoint_location='…'\)"
IN_MEMORY = "with Spark Connect checkpoints cannot be recorded in memory:"


@pytest.mark.large
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"location": None}, NO_LOCATION),
        ({"location": "elsewhere"}, "but the running query has another one"),
        ({"storage": "memory:refused"}, IN_MEMORY),
    ],
    ids=["no location", "another location", "memory"],
)
def test_refused(tmp_path: Path, sink: FileSink, url: str, options: dict[str, Any], message: str) -> None:
    write_input(tmp_path / "input", batches=1)
    job = ConnectJob(tmp_path, [sink], url=url, **options)
    assert job.run() == 1
    assert re.search(message, job.output())
    assert visible(sink) == []


@pytest.mark.parametrize(
    ("location", "storage", "message"),
    [(None, "file://{}", NO_LOCATION), ("/spark", "memory:refused", IN_MEMORY)],
    ids=["no location", "memory"],
)
def test_refused_where_the_server_unpickles_it(
    tmp_path: Path, sink: FileSink, location: str | None, storage: str, message: str
) -> None:
    config = CheckpointConfig(checkpoint_location=location)
    with CheckpointCoordinator("job", [sink], storage.format(tmp_path), config) as coordinator:
        sent = cloudpickle.dumps(coordinator)
    with pytest.raises(CheckpointError, match=message):
        cloudpickle.loads(sent)


@pytest.mark.large
def test_a_source_without_replay_is_seen(tmp_path: Path, sink: FileSink, url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as lines, ExitStack() as connections:
        lines.setblocking(False)
        port = lines.getsockname()[1]

        def source(spark: Any) -> Any:
            reader = spark.readStream.format("socket").option("host", "127.0.0.1")
            return reader.option("port", port).load().selectExpr("length(value) AS id")

        config = CheckpointConfig(require="exactly-once")
        job = ConnectJob(tmp_path, [sink], url=url, source=source, config=config)

        def speak() -> None:
            with suppress(BlockingIOError):
                connections.enter_context(lines.accept()[0]).sendall(b"one line\n")

        assert job.run(meanwhile=speak) == 1
    assert "requires exactly-once, but cannot promise it: the source Socket" in job.output()
    assert visible(sink) == []
