"""Books that balance after drivers were killed, and what is named when somebody touches the target."""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import psycopg
import pytest
from confluent_kafka import TopicPartition

from coordinator import CheckpointCoordinator
from coordinator.errors import Superseded
from coordinator.listener import Step
from coordinator.operations.inspection.balance import Balance, take_balance
from coordinator.operations.jobfile import load_job
from coordinator.operations.verifier import Verifier
from coordinator.storage import open_storage
from coordinator.store.job_store import JobStore
from sinks.audit import Part
from sinks.errors import ConfigurationError
from sinks.kafka import KafkaSink
from sinks.kafka.connection import Where
from sinks.kafka.topics import Logs, Topics
from sinks.testing import LocalQuery
from sinks.testing.conformance import example_input
from sinks.testing.servers.kafka import KafkaService
from sinks.testing.table import eventually
from tests.cli.conftest import TABLE
from tests.cli.jobs import INPUT, Job
from tests.kafka.tasks import pre_commit, sink_of, texts
from tests.mysql.observer import Observer
from tests.protocol.job import CheckedThenPut, QuietQuery

PAGE = Path(__file__).parents[2] / "docs" / "verify.md"
ROWS = [sum(table.num_rows for table in batch) for batch in INPUT]


def lines(told: Any) -> list[tuple[Any, ...]]:
    columns = ("checkpoint", "read", "pre_committed", "ledger", "present", "verdict")
    return [tuple(line[name] for name in columns) for line in told["checkpoints"]]


def balanced(*checkpoints: int, kept: bool = True, held: bool = False) -> list[tuple[Any, ...]]:
    return [
        (n, ROWS[n], ROWS[n], ROWS[n] if kept else None, ROWS[n] if held else None, "balanced") for n in checkpoints
    ]


@pytest.mark.parametrize("strategy", ["prepared", "staged"])
def test_a_table_of_postgres(tmp_path: Path, pg_database: str, strategy: str) -> None:
    job = Job(tmp_path, f'type = "postgres"\ndsn = "{pg_database}"\ntable = "orders"\nstrategy = "{strategy}"')
    with psycopg.connect(pg_database, autocommit=True) as connection:
        connection.execute(TABLE)
        job.run(2, crash=(Step.COMPLETE, 1))
        told = job.json("verify", code=4)
        assert "in doubt" in told["checkpoints"][1]["remarks"][0]
        job.run(3, crash=(Step.PRE_COMMITTED, 2))
        job.run(3)
        told = job.json("verify")
        assert lines(told) == balanced(0, 1, 2)
        assert told["totals"]["orders"] == {
            **dict.fromkeys(("batch", "read", "pre_committed", "ledger"), sum(ROWS)),
            **dict.fromkeys(("filtered", "dead_lettered", "given_up"), 0),
            "present": None,
        }


def test_the_sample_of_the_page_is_what_the_command_prints(pg_job: Job, pg_database: str) -> None:
    pg_job.run(3)
    with psycopg.connect(pg_database, autocommit=True) as connection:
        one = "SELECT max(transaction_id) FROM tpc_ledger WHERE checkpoint = 1 AND written > 0"
        connection.execute(f"UPDATE tpc_ledger SET written = written - 1 WHERE transaction_id = ({one})")
    found = re.search(r"    \$ coordinator verify\n(.*?)\n\n", PAGE.read_text(), re.S)
    assert found
    said = pg_job.cli("verify", code=1).stdout
    assert [line.rstrip() for line in said.splitlines()] == dedent(found[1]).splitlines()


def test_what_is_compared_again_and_again_are_the_newest_checkpoints(file_job: Job) -> None:
    """Thousands may be retained."""
    file_job.run()
    with load_job(str(file_job.file)) as coordinator:
        balance = take_balance(coordinator._protocol.store, coordinator.sinks, last=2)
    assert [line.checkpoint for line in balance.lines] == [1, 2]


@pytest.mark.parametrize("batches", [4, 5])
def test_a_record_that_a_zombie_has_put_after_retention_is_not_compared(tmp_path: Path, batches: int) -> None:
    """Until the next checkpoint deletes it. What it names was aborted, and the target has the new driver's rows."""
    table = f'url = "sqlite:///{tmp_path}/orders.db"\ntable = "orders"\ncreate_table = true'
    job = Job(tmp_path, f'type = "sqlalchemy"\n{table}')
    job.input = example_input(batches)
    with load_job(str(job.file)) as old:
        storage = CheckedThenPut(old.storage, "put_if_absent", "/checkpoint/", lambda: job.run(batches))
        zombie = CheckpointCoordinator("orders", [*old.sinks.values()], storage, old.config)
        with pytest.raises(Superseded):
            LocalQuery(job.folder / "query", job.input[:1]).run(zombie)
    assert [id for id, _ in JobStore(storage.inner, "orders").record_keys()] == [0, *range(batches - 3, batches)]
    told = job.json("verify")
    assert [line["checkpoint"] for line in told["checkpoints"]] == [*range(batches - 3, batches)]
    found: list[Balance] = []
    verifier = Verifier(
        JobStore(storage.inner, "orders"), old.sinks, replace(old.config, verify_interval=0.1), found.append
    )
    verifier.begin(QuietQuery(job.folder / "query", []))
    eventually(lambda: bool(found))
    verifier.end()
    assert found[0].findings == ()


def test_a_driver_that_retains_more_than_the_job_file_says(tmp_path: Path) -> None:
    """Its program has the config in Python. All that it retains is compared."""
    job = Job(
        tmp_path, f'type = "sqlalchemy"\nurl = "sqlite:///{tmp_path}/orders.db"\ntable = "orders"\ncreate_table = true'
    )
    job.input = example_input(6)
    with load_job(str(job.file)) as of_file:
        config = replace(of_file.config, retained_checkpoints=10)
        storage, sinks = of_file.storage, [*of_file.sinks.values()]
        LocalQuery(job.folder / "query", job.input).run(CheckpointCoordinator("orders", sinks, storage, config))
    with closing(sqlite3.connect(tmp_path / "orders.db")) as database, database:
        database.execute("UPDATE tpc_ledger SET written = written + 1 WHERE checkpoint = 1 AND written > 0")
    told = job.json("verify", code=1)
    assert [line["checkpoint"] for line in told["checkpoints"]] == [0, 1, 2, 3, 4, 5]
    assert [line["checkpoint"] for line in told["checkpoints"] if line["verdict"] == "differs"] == [1]


def test_a_transaction_that_no_record_names_and_one_that_is_gone(pg_job: Job, pg_database: str) -> None:
    pg_job.run(2)
    with psycopg.connect(pg_database, autocommit=True) as connection:
        another = "transaction_id || '7', committed, job, lineage, sink, checkpoint"
        mine = "FROM tpc_ledger WHERE checkpoint = 1 AND sink <> '-' ORDER BY transaction_id LIMIT 1"
        connection.execute(
            "INSERT INTO tpc_ledger (transaction_id, committed, job, lineage, sink, checkpoint)"
            f" SELECT {another} {mine}"
        )
        connection.execute("DELETE FROM tpc_ledger WHERE checkpoint = 0 AND sink <> '-' AND transaction_id <> 'ledger'")
    told = pg_job.json("verify", code=1)
    with psycopg.connect(pg_database, autocommit=True) as connection:
        connection.execute("CREATE TABLE kept AS TABLE tpc_ledger; TRUNCATE tpc_ledger, orders")
        said = pg_job.cli("verify", code=1).stdout
        assert "the ledger tpc_ledger is gone or was emptied" in said
        assert "Differs: sink orders: its newest checkpoint is none, older by 2" in said
    assert "its rows are there beside those of the record" in told["checkpoints"][1]["differences"][0]
    assert lines(told)[0][3:] == (0, None, "differs")
    assert not any("deleted" in text for text in told["checkpoints"][0]["differences"])
    assert "does not say that tpc.orders" in told["checkpoints"][0]["differences"][0]


OLD_LEDGER = (
    'CREATE TABLE tpc_ledger (transaction_id text COLLATE "C" PRIMARY KEY, committed boolean NOT NULL,'
    " job text NOT NULL, lineage text NOT NULL, sink text NOT NULL, checkpoint bigint NOT NULL,"
    " at timestamptz NOT NULL DEFAULT now())"
)
"""As version 0.1 made it."""


def test_a_ledger_of_an_older_version_is_refused_until_the_columns_are_added(pg_job: Job, pg_database: str) -> None:
    with psycopg.connect(pg_database, autocommit=True) as connection:
        connection.execute(OLD_LEDGER)
        with pytest.raises(
            ConfigurationError, match=r"not a ledger of this version .*written, row_hash\): add what is missing"
        ):
            pg_job.run(1)
        connection.execute("ALTER TABLE tpc_ledger ADD written bigint, ADD row_hash text")
        pg_job.run(2)
        assert lines(pg_job.json("verify")) == balanced(0, 1)
        connection.execute("UPDATE tpc_ledger SET written = NULL, row_hash = NULL")
        told = pg_job.json("verify", code=4)
        assert "an older version wrote it" in told["checkpoints"][0]["remarks"][0]


@pytest.mark.parametrize("strategy", ["xa", "staged"])
def test_a_table_of_mysql(tmp_path: Path, mysql_database: str, strategy: str) -> None:
    sink = f'type = "mysql"\ndsn = "{mysql_database}"\ntable = "orders"\nstrategy = "{strategy}"\ncreate_table = true'
    job = Job(tmp_path, sink)
    job.run(2, crash=(Step.COMPLETE, 1))
    job.run(3)
    assert lines(job.json("verify")) == balanced(0, 1, 2)
    with closing(Observer(mysql_database)) as observer:
        observer.run("UPDATE tpc_ledger SET row_hash = '0123456789abcdef' WHERE checkpoint = 1 AND written > 0")
        observer.run("UPDATE tpc_ledger SET written = written - 1 WHERE checkpoint = 2 AND written > 0")
    told = Job(tmp_path, sink).json("verify", code=1)
    assert lines(told)[0][3:] == (ROWS[0], None, "balanced")
    assert "the hashes differ" in told["checkpoints"][1]["differences"][0]
    assert "and the record" in told["checkpoints"][2]["differences"][0]


def test_a_table_of_sqlite(tmp_path: Path) -> None:
    file = tmp_path / "shop.db"
    sink = f'type = "sqlalchemy"\nurl = "sqlite:///{file}"\ntable = "orders"\ncreate_table = true'
    job = Job(tmp_path, sink)
    job.run(2)
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "older")
    job.run(3)
    assert lines(job.json("verify")) == balanced(0, 1, 2)
    (tmp_path / "checkpoints").rename(tmp_path / "newer")
    (tmp_path / "older").rename(tmp_path / "checkpoints")
    behind = job.cli("verify", "--quick", code=1).stdout
    assert "Differs: sink orders: its newest checkpoint is 2, newer by 1: the storage was set back" in behind
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "newer").rename(tmp_path / "checkpoints")
    with closing(sqlite3.connect(file)) as connection, connection:
        one = "SELECT min(transaction_id) FROM tpc_ledger WHERE written > 0"
        connection.execute(f"UPDATE tpc_ledger SET written = written - 1 WHERE transaction_id = ({one})")
    assert sum(line[3] for line in lines(job.json("verify", code=1))) == sum(ROWS) - 1


def test_a_topic(tmp_path: Path, kafka: KafkaService, kafka_topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(
        tmp_path,
        f'type = "tests.kafka.tasks:AsRecords"\nbootstrap_servers = "{kafka.bootstrap}"\ntopic = "{kafka_topic}"',
    )
    job.run(2, crash=(Step.PRE_COMMITTED, 1))
    job.run(3, crash=(Step.COMPLETE, 2))
    job.run(3)
    assert lines(job.json("verify")) == balanced(0, 1, 2, kept=False, held=True)
    assert job.json("verify", "--quick", code=4)["verdict"] == "cannot tell"

    sink = load_job(str(job.file)).sinks[kafka_topic]
    assert isinstance(sink, KafkaSink)
    complete = JobStore(open_storage((tmp_path / "checkpoints").as_uri()), "orders").history()[0]
    part = complete.audited_part(sink.name)
    other = sink_of(kafka, kafka_topic)
    transactions = [pre_commit(other, texts("another", "two"), subtask=n) for n in range(2)]
    other.abort(transactions[0].transaction)
    aborted, is_open = (Part("", 0, [one]) for one in transactions)
    told_by_sink = [*sink.audit("orders", [part, aborted]).holdings]
    sink.timeout = 2  # nobody ends the transaction that is open
    told_by_sink += sink.audit("orders", [is_open]).holdings
    sink.timeout = 30
    assert [one.rows for one in told_by_sink] == [ROWS[0], 0, None]
    assert "readers of" in told_by_sink[2].remarks[0]
    other.abort(transactions[1].transaction)
    other.close()

    admin = kafka.admin()
    spans = [span for one in part.committables for span in one.proof["spans"][kafka_topic]]
    starts = {partition: first + 1 for partition, first, *_ in sorted(spans, reverse=True)}
    removed = [TopicPartition(kafka_topic, partition, start) for partition, start in starts.items()]
    ask = Topics.logs

    def and_remove(self: Topics, places: Iterable[Where]) -> Logs:
        answer = ask(self, places)
        for done in admin.delete_records(removed).values():
            done.result(120)
        return answer

    monkeypatch.setattr(Topics, "logs", and_remove)
    (amid,) = sink.audit("orders", [part]).holdings
    assert "has removed records" in amid.remarks[0]
    sink.close()
    told = job.json("verify", code=4)
    assert [line[4:] for line in lines(told)] == [(None, "cannot tell"), (ROWS[1], "balanced"), (ROWS[2], "balanced")]
    assert "retention, or somebody, has removed records" in told["checkpoints"][0]["remarks"][0]


def test_rows_that_were_written_at_least_once_are_nobodys_mistake(pg_job: Job) -> None:
    pg_job.run(1)
    config = pg_job.file.read_text()
    pg_job.file.write_text(config.replace("[checkpointing]", '[checkpointing]\nmode = "at_least_once"'))
    pg_job.run(2)
    told = pg_job.json("verify", code=4)
    assert lines(told) == [*balanced(0), (1, ROWS[1], 0, None, None, "cannot tell")]
