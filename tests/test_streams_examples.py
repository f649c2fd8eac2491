"""The examples with Kafka as source, with smaller inputs: what they leave in the databases, and what they print."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from pyspark.sql import SparkSession

from coordinator import CheckpointCoordinator
from examples import customers_cdc, orders_fan_out, orders_to_files, orders_to_lake, page_views, shop_cdc, word_count
from sinks.postgres import PostgresSink
from sinks.testing.servers.kafka import KafkaService
from tests.signals import in_background
from tests.spark.job import wait_for


@pytest.mark.large
def test_page_views_are_counted_once(
    kafka: KafkaService, mysql_database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = page_views.run(kafka.bootstrap, mysql_database, tmp_path, crash_at=3)
    views = page_views.VIEWS_PER_BATCH * 6
    assert found["exactly once"] == {"app0": views // 2, "app1": views // 2}
    assert sum(found["at least once"].values()) == views + page_views.VIEWS_PER_BATCH, "one batch is counted twice"
    assert "'checkpoint': 3" in capsys.readouterr().out


@pytest.mark.large
@pytest.mark.chaos
def test_every_order_is_in_all_three_systems(
    kafka: KafkaService, pg_database: str, mysql_database: str, tmp_path: Path
) -> None:
    orders = orders_fan_out.PER_BATCH * 5
    found = orders_fan_out.run(kafka.bootstrap, pg_database, mysql_database, tmp_path, orders, orders_fan_out.KILLS)
    assert found == {system: Counter(range(orders)) for system in ("PostgreSQL", "MySQL", "Kafka")}


@pytest.mark.large
@pytest.mark.chaos
def test_every_order_is_in_the_lake_too(kafka: KafkaService, pg_database: str, tmp_path: Path) -> None:
    orders = orders_to_lake.PER_BATCH * 6
    found = orders_to_lake.run(kafka.bootstrap, pg_database, tmp_path, orders)
    assert found == {system: Counter(range(orders)) for system in ("Kafka", "PostgreSQL", "Delta")}


@pytest.mark.large
@pytest.mark.chaos
def test_every_order_is_in_the_files_too(kafka: KafkaService, tmp_path: Path) -> None:
    orders = orders_to_files.PER_BATCH * 6
    found = orders_to_files.run(kafka.bootstrap, tmp_path, orders)
    assert found == {system: Counter(range(orders)) for system in ("Kafka", "files")}


@pytest.mark.large
def test_words_are_counted_once_over_three_attempts(kafka: KafkaService, pg_database: str) -> None:
    """In a process of its own, since its session has other jars than the tests' session."""
    options = ["--bootstrap", kafka.bootstrap, "--dsn", pg_database, "--lines", "1500", "--delay", "0.5"]
    command = [sys.executable, "-m", "examples.word_count", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 words counted wrongly" in done.stdout
    attempts = [line.split() for line in done.stdout.split("ended\n")[1].split("\n\n")[0].splitlines()]
    assert [(one[0], one[1], one[2]) for one in attempts] == [
        ("1", "0", "500"),
        ("2", "500", "500"),
        ("3", "500", "1500"),
    ]
    assert word_count.LINES_PER_BATCH == 500


@pytest.mark.large
@pytest.mark.chaos
def test_changes_of_a_table_arrive_as_its_newest_rows(
    kafka: KafkaService, pg_database: str, mysql_database: str, tmp_path: Path
) -> None:
    assert customers_cdc.run(kafka.bootstrap, pg_database, mysql_database, tmp_path) == {"PostgreSQL": 0, "MySQL": 0}


@pytest.mark.large
@pytest.mark.chaos
def test_changes_of_a_shop_arrive_in_all_its_tables(
    kafka: KafkaService, pg_database: str, mysql_database: str, tmp_path: Path
) -> None:
    assert shop_cdc.run(kafka.bootstrap, pg_database, mysql_database, tmp_path) == {"PostgreSQL": 0, "MySQL": 0}


@pytest.mark.large
def test_changes_that_came_from_mysql_arrive_as_its_newest_rows(
    kafka: KafkaService, pg_database: str, mysql_database: str, tmp_path: Path
) -> None:
    """The positions of its log begin anew with each file."""
    systems = kafka.bootstrap, pg_database, mysql_database, tmp_path
    assert customers_cdc.run(*systems, count=600, kills={}, connector="mysql") == {"PostgreSQL": 0, "MySQL": 0}


EVENTS_OF_MYSQL = [
    {
        "before": None,
        "after": {"id": 7, "name": f"v{n}", "email": None},
        "source": {"connector": "mysql", "file": file, "pos": pos, "row": row, "gtid": None, "server_id": 223344},
        "op": "u",
    }
    for n, (file, pos, row) in enumerate(
        [
            *(("binlog.000009", 900, 0), ("binlog.000009", 900, 1), ("binlog.000009", 10_000, 0)),
            *(("binlog.000010", 157, 0), ("binlog.000010", 600, 9), ("binlog.000010", 600, 10)),
            *(("binlog.000099", 5, 0), ("binlog.000100", 4, 0)),
        ],
        1,
    )
]
"""Eight updates of one row."""


@pytest.mark.parametrize("order", [1, -1])
def test_the_last_of_eight_updates_stays(spark: SparkSession, pg_database: str, tmp_path: Path, order: int) -> None:
    """In whichever order a checkpoint has them, over several partitions."""
    events = EVENTS_OF_MYSQL[::order]
    write_customers(spark, "mysql", [events[:3], events[3:4], events[4:]], pg_database, tmp_path)
    with psycopg.connect(pg_database) as connection:
        assert connection.execute("SELECT id, name FROM customers").fetchall() == [(7, "v8")]


def test_events_without_the_position_of_another_connector_stop_the_query(
    spark: SparkSession, pg_database: str, tmp_path: Path
) -> None:
    """Ordered by `source.lsn`, which MySQL has not: any of the eight would stay."""
    with pytest.raises(Exception, match=r'column "position": NULL in the column of order_by') as stopped:
        write_customers(spark, "postgresql", [EVENTS_OF_MYSQL], pg_database, tmp_path)
    assert "begins id=7, name='v1'" in str(stopped.value)


@pytest.mark.parametrize(
    ("connector", "sources"),
    [
        ("postgresql", [{"lsn": 99}, {"lsn": 100}]),
        ("sqlserver", [{"commit_lsn": f"{lsn}"} for lsn in ("00000027:00000c78:0003", "00000027:00000c78:000a")]),
        ("sqlserver", [{"commit_lsn": f"{lsn}"} for lsn in ("00000027:ffffffff:ffff", "0000002a:00000000:0001")]),
        ("oracle", [{"scn": "999999999999999999999"}, {"scn": "1000000000000000000000"}]),
    ],
)
def test_positions_of_each_connector_grow(spark: SparkSession, connector: str, sources: list[Any]) -> None:
    events = [{"op": "c", "after": {"id": n, "name": "x"}, "source": source} for n, source in enumerate(sources)]
    frame = spark.createDataFrame([(json.dumps(event),) for event in events], "value STRING")
    customers = customers_cdc.customers_of(frame, connector)
    assert [row.id for row in customers.where("position IS NOT NULL").orderBy("position").collect()] == [0, 1]


def test_events_with_their_schema_are_told(spark: SparkSession) -> None:
    event = {"schema": {"type": "struct"}, "payload": EVENTS_OF_MYSQL[0]}
    frame = spark.createDataFrame([(json.dumps(event),)], "value STRING")
    with pytest.raises(Exception, match=r"the envelope .*value\.converter\.schemas\.enable=false"):
        customers_cdc.customers_of(frame, "mysql").collect()


def write_customers(
    spark: SparkSession, connector: str, files: list[list[dict[str, Any]]], dsn: str, folder: Path
) -> None:
    """One checkpoint, with the events of each file in a partition."""
    (folder / "events").mkdir()
    for number, events in enumerate(files):
        (folder / "events" / str(number)).write_text("".join(f"{json.dumps(event)}\n" for event in events))
    records = spark.readStream.text(str(folder / "events"))
    options: dict[str, Any] = {"mode": "upsert", "keys": ["id"], "order_by": "position", "keep_newer": True}
    sink = PostgresSink(dsn, "customers", create_table=True, **options)
    with CheckpointCoordinator("customers", [sink], (folder / "checkpoints").as_uri()) as coordinator:
        writer = customers_cdc.customers_of(records, connector).writeStream.foreachBatch(coordinator)
        writer = writer.option("checkpointLocation", str(folder / "spark")).trigger(availableNow=True)
        writer.start().awaitTermination()


@pytest.mark.large
@pytest.mark.parametrize("example", ["customers_cdc", "page_views"])
def test_sigterm_ends_the_job_too(
    kafka: KafkaService, pg_database: str, mysql_database: str, tmp_path: Path, example: str
) -> None:
    systems = {"customers_cdc": ["--postgres", pg_database, "--mysql", mysql_database]}
    options = ["--bootstrap", kafka.bootstrap, *systems.get(example, ["--dsn", mysql_database])]
    process = psutil.Popen(
        [sys.executable, "-m", f"examples.{example}", *options],
        stdout=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        preexec_fn=in_background,
    )
    wait_for(lambda: process.children() or process.poll() is not None)
    jobs = process.children()
    process.terminate()
    try:
        assert process.wait(300) == -signal.SIGINT
        assert len(jobs) == 1
        assert psutil.wait_procs(jobs, timeout=300)[1] == []
        assert list(tmp_path.iterdir()) == []
    finally:
        for left in (process, *jobs):
            with suppress(psutil.NoSuchProcess):
                left.kill()


def test_events_of_the_example_lead_to_its_customers() -> None:
    events, customers = customers_cdc.changes(2000)
    times = Counter(value for _, value in events if value)
    assert max(times.values()) > 1, "some are delivered again"
    assert any(value is None for _, value in events), "tombstones"
    newest: dict[int, dict[str, Any]] = {}
    for key, event in ((key, json.loads(value)) for key, value in events if value):
        if key not in newest or event["source"]["lsn"] >= newest[key]["source"]["lsn"]:
            newest[key] = event
    left = {key: event["after"] for key, event in newest.items() if event["op"] != "d"}
    assert {key: (row["name"], row["email"]) for key, row in left.items()} == customers
