from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest

from coordinator.listener import Step
from coordinator.operations.jobfile import load_job
from coordinator.storage import open_storage
from coordinator.store.job_store import JobStore
from sinks.testing.servers.kafka import KafkaService
from sinks.transaction import TransactionId
from tests.cli.jobs import Job, cli, ids


def prepared(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
        ).fetchone()
    assert row
    return int(row[0])


def visible(dsn: str) -> list[int]:
    with psycopg.connect(dsn) as connection:
        return [row[0] for row in connection.execute("SELECT id FROM orders ORDER BY 1")]


def test_nothing_in_doubt(file_job: Job) -> None:
    file_job.run(1)
    told = file_job.json("in-doubt", "list")
    assert (told["transactions"], told["errors"]) == ([], {})
    assert told["newest_checkpoint"]["checkpoint"] == 0
    said = file_job.cli("in-doubt", "list").stdout
    assert "Nothing of job 'orders' is in doubt in files (" in said
    assert f"Whether one was lost: coordinator resolve --job {file_job.file}" in said
    assert "nothing was aborted" in file_job.cli("in-doubt", "abort", "--all-orphans").stdout


def test_decided_transactions_in_postgres_are_listed_and_committed(pg_job: Job, pg_database: str) -> None:
    pg_job.run(crash=(Step.COMPLETE, 1))
    assert prepared(pg_database) == 3
    listed = pg_job.json("in-doubt", "list", code=1)["transactions"]
    assert [(one["sink"], one["decision"], one["checkpoint"], one["subtask"]) for one in listed] == [
        ("orders", "commit", 1, n) for n in range(3)
    ]
    one = listed[0]
    assert set(one) == {
        *("id", "sink", "decision", "transaction", "lineage", "checkpoint", "subtask", "generation", "round", "age")
    }
    assert (one["generation"], one["round"]) == (1, 0)
    assert 0 <= one["age"] < 60
    assert visible(pg_database) == ids(1)

    assert "coordinator resolve --job" in pg_job.cli("in-doubt", "commit", one["id"], code=2).stderr
    assert prepared(pg_database) == 3
    assert pg_job.json("resolve")["committed_now"] == 3
    assert prepared(pg_database) == 0
    assert visible(pg_database) == ids(2)
    pg_job.run()
    assert visible(pg_database) == ids(3)


def test_reading_claims_no_generation(pg_job: Job) -> None:
    pg_job.run(crash=(Step.COMPLETE, 0))
    store = JobStore(open_storage((pg_job.folder / "checkpoints").as_uri()), "orders")
    assert store.newest_generation() == 1
    pg_job.cli("in-doubt", "list", code=1)
    pg_job.cli("checkpoints", "show")
    pg_job.cli("resolve")
    assert store.newest_generation() == 1


def test_open_transactions_are_aborted_only_behind_a_fence(pg_job: Job, pg_database: str) -> None:
    pg_job.run(crash=(Step.PRE_COMMITTED, 1))
    listed = pg_job.json("in-doubt", "list")["transactions"]  # a driver may run, so that is no finding
    assert [one["decision"] for one in listed] == ["open"] * 3
    refused = pg_job.cli("in-doubt", "abort", listed[0]["id"], code=2)
    assert "--fence" in refused.stderr
    assert pg_job.json("in-doubt", "abort", "--all-orphans")["results"] == []
    refused = pg_job.cli("in-doubt", "abort", "--all-orphans", "--fence", code=3)
    assert "or with --yes" in refused.stderr
    assert "Superseded" in refused.stderr
    assert prepared(pg_database) == 3

    told = pg_job.json("in-doubt", "abort", "--all-orphans", "--fence", "--yes")
    assert [result["result"] for result in told["results"]] == ["aborted"] * 3
    assert prepared(pg_database) == 0
    pg_job.run()
    assert visible(pg_database) == ids(3)


def test_tables_of_one_transaction_are_committed_together(
    tmp_path: Path, pg_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the first sink's rows need those of the second."""
    monkeypatch.setenv("ORDERS_DSN", pg_database)
    with psycopg.connect(pg_database, autocommit=True) as connection:
        columns = "name text, amount double precision"
        connection.execute(f"CREATE TABLE orders (id bigint PRIMARY KEY, {columns})".encode())
        connection.execute(f"CREATE TABLE lines (id bigint REFERENCES orders, {columns})".encode())
    sink = 'type = "postgres"\ndsn = "${ORDERS_DSN}"\nstrategy = "staged"\ntable ='
    job = Job(tmp_path, f'{sink} "lines"', f'{sink} "orders"')
    job.run(crash=(Step.PRE_COMMITTED, 0))
    listed = [one["id"] for one in job.json("in-doubt", "list", code=None)["transactions"]]
    assert len(listed) == 6
    told = job.json("in-doubt", "commit", *listed, "--break-decision", "--yes")
    assert [result["result"] for result in told["results"]] == ["committed"] * 6
    assert visible(pg_database) == ids(1)
    with psycopg.connect(pg_database) as connection:
        assert connection.execute("SELECT count(*) FROM lines").fetchone() == (len(ids(1)),)


def test_orphans_of_an_older_driver_need_no_fence(pg_job: Job, pg_database: str) -> None:
    pg_job.run(crash=(Step.PRE_COMMITTED, 1))
    pg_job.run(crash=(Step.GENERATION_CLAIMED, -1))
    listed = pg_job.json("in-doubt", "list", code=1)["transactions"]
    assert [one["decision"] for one in listed] == ["orphan"] * 3
    gid = listed[0]["transaction"]["gid"]
    told = pg_job.json("in-doubt", "abort", gid)  # by the name that the database shows
    assert [result["transaction"]["gid"] for result in told["results"]] == [gid]
    assert prepared(pg_database) == 2


def test_aborting_what_is_decided_asks_and_the_query_writes_it_again(pg_job: Job, pg_database: str) -> None:
    pg_job.run(crash=(Step.COMPLETE, 1))
    one = pg_job.json("in-doubt", "list", code=1)["transactions"][0]
    for options in ([], ["--yes"], ["--break-decision"]):
        refused = pg_job.cli("in-doubt", "abort", one["id"], *options, code=3)
        assert "LOSES" in refused.stderr
    assert prepared(pg_database) == 3
    pg_job.cli("in-doubt", "abort", one["id"], "--break-decision", "--yes")
    assert prepared(pg_database) == 2
    pg_job.run()
    assert visible(pg_database) == ids(3)


def test_committing_what_no_record_names_asks(file_job: Job, file_rows: Callable[[], list[int]]) -> None:
    file_job.run(crash=(Step.PRE_COMMITTED, 1))
    one = file_job.json("in-doubt", "list")["transactions"][0]
    refused = file_job.cli("in-doubt", "commit", one["id"], code=3)
    assert "DOUBLES" in refused.stderr
    assert file_rows() == ids(1)
    told = file_job.json("in-doubt", "commit", one["id"], "--break-decision", "--yes")
    assert [result["result"] for result in told["results"]] == ["committed"]
    assert len(file_rows()) > len(ids(1))


def test_with_no_checkpoint_in_storage_nothing_is_called_an_orphan(pg_job: Job, pg_database: str) -> None:
    pg_job.run(crash=(Step.PRE_COMMITTED, 0))
    told = pg_job.cli("in-doubt", "abort", "--all-orphans", "--fence", "--yes", code=1).stdout
    assert "Not touched: 3 stranded" in told
    assert f"in-doubt abort ID --fence --job {pg_job.file} (Be sure of the storage" in told
    (one, *_) = pg_job.json("in-doubt", "list", code=1)["transactions"]
    refused = pg_job.cli("in-doubt", "abort", one["id"], "--fence", "--yes", code=3)
    assert "holds no checkpoint" in refused.stderr
    assert prepared(pg_database) == 3


def test_a_sink_that_cannot_tell_is_an_error_beside_the_others(pg_job: Job, pg_database: str) -> None:
    pg_job.run(crash=(Step.COMPLETE, 0))
    text = pg_job.file.read_text()
    other = '[[sinks]]\ntype = "postgres"\nname = "b"\ntable = "t"\ndsn = "postgresql://u:very-secret@127.0.0.1:1/d"\n'
    pg_job.file.write_text(f"{text}\n{other}")
    result = pg_job.cli("in-doubt", "list", "--json", code=1)
    told = pg_job.json("in-doubt", "list", code=1)
    assert list(told["errors"]) == ["b"]
    assert len(told["transactions"]) == 3
    assert "very-secret" not in result.output
    pg_job.cli("in-doubt", "abort", "--all-orphans", code=1)


def test_a_driver_that_starts_behind_the_fence_keeps_its_transactions(file_job: Job) -> None:
    file_job.run(1)
    file_job.run(2, crash=(Step.PRE_COMMITTED, 1))
    (file_job.folder / "racing.py").write_text(
        "from coordinator import load_job\n"
        f"coordinator = load_job('{file_job.file}')\n"
        "sink = coordinator.sinks['files']\n"
        "listing = sink.in_doubt\n"
        "def in_doubt(job):\n"
        "    load_job(coordinator_file)._protocol.store.claim_generation()\n"
        "    return list(listing(job))\n"
        f"coordinator_file = '{file_job.file}'\n"
        "sink.in_doubt = in_doubt\n"
    )
    place = f"{file_job.folder}/racing.py"
    refused = cli("in-doubt", "abort", "--all-orphans", "--fence", "--yes", "--job", place, code=1)
    assert "has started just now" in refused.stderr
    assert len(file_job.json("in-doubt", "list", code=1)["transactions"]) == 3


def test_usage(file_job: Job) -> None:
    file_job.run(1)
    assert "Missing argument" in file_job.cli("in-doubt", "commit", code=2).stderr
    assert "not in doubt" in file_job.cli("in-doubt", "abort", "0123456789", code=1).stderr


def test_no_driver_is_shut_out_for_a_transaction_that_is_not_in_doubt(file_job: Job) -> None:
    file_job.run(1)
    refused = file_job.cli("in-doubt", "abort", "0123456789", "--fence", "--yes", code=1)
    assert "No transaction was touched" in refused.stderr
    assert JobStore(open_storage((file_job.folder / "checkpoints").as_uri()), "orders").newest_generation() == 1


def test_a_storage_that_was_set_back_makes_no_orphans(pg_job: Job, pg_database: str) -> None:
    """Storage does not know what was decided after its backup."""
    storage, backup = pg_job.folder / "checkpoints", pg_job.folder / "backup"
    pg_job.run(1)
    shutil.copytree(storage, backup)
    pg_job.run(2)
    pg_job.run(crash=(Step.COMPLETE, 2))
    shutil.rmtree(storage)
    shutil.copytree(backup, storage)
    abort = "in-doubt", "abort", "--all-orphans", "--fence", "--yes"
    [one, *_] = pg_job.json("in-doubt", "list", code=1)["transactions"]
    assert "--fence" in pg_job.cli("in-doubt", "abort", one["id"], "--yes", "--break-decision", code=2).stderr
    refused = pg_job.cli(*abort, code=3)
    store = JobStore(open_storage(storage.as_uri()), "orders")
    assert store.newest_generation() == 1, "no driver is shut out before the answer"
    assert "newer by 1: the storage was set back" in refused.stderr
    assert "may be decided, though no record here names it, and aborting it LOSES its rows" in refused.stderr
    assert prepared(pg_database) == 3
    pg_job.cli(*abort, "--break-decision")
    assert prepared(pg_database) == 0


def test_a_person_types_the_word(file_job: Job) -> None:
    file_job.run(crash=(Step.COMPLETE, 0))
    one = file_job.json("in-doubt", "list", code=1)["transactions"][0]
    command = [sys.executable, "-m", "coordinator.cli", "in-doubt", "abort", one["id"], "--job", str(file_job.file)]
    for word, code in (("yes", 3), ("lose", 0)):
        ours, theirs = pty.openpty()
        os.write(ours, f"{word}\n".encode())
        done = subprocess.run(
            command,
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        os.close(ours)
        os.close(theirs)
        assert done.returncode == code, done.stderr
        assert "Type 'lose' to go on" in done.stderr
    assert one["id"] not in [left["id"] for left in file_job.json("in-doubt", "list", code=1)["transactions"]]


def test_kafka_and_mysql_in_one_job(tmp_path: Path, kafka: KafkaService, kafka_topic: str, mysql_database: str) -> None:
    sinks = {
        "k": f'type = "kafka"\nname = "k"\nbootstrap_servers = "{kafka.bootstrap}"\ntopic = "{kafka_topic}"',
        "m": f'type = "mysql"\nname = "m"\ndsn = "{mysql_database}"\ntable = "t"\nstrategy = "xa"\ncreate_table = true',
    }
    job = Job(tmp_path, *sinks.values())
    rows = pa.table({"value": ["a", "b"]})
    job.input = [[rows, rows], [rows, rows]]
    job.run(1)
    job.run(2, crash=(Step.COMPLETE, 1))
    listed = job.json("in-doubt", "list", code=1)["transactions"]
    assert [(one["sink"], one["decision"], one["checkpoint"], one["subtask"]) for one in listed] == [
        (sink, "commit", 1, subtask) for sink in "km" for subtask in range(2)
    ]
    assert all(0 <= one["age"] < 60 for one in listed if one["sink"] == "k")
    assert {one["age"] for one in listed if one["sink"] == "m"} == {None}
    assert job.json("resolve")["committed_now"] == 4

    job.input = [*job.input, [rows, rows]]
    job.run(3, crash=(Step.PRE_COMMITTED, 2))
    listed = job.json("in-doubt", "list")["transactions"]
    assert [(one["sink"], one["decision"], one["checkpoint"]) for one in listed] == [
        *[("k", "open", None)] * 2,
        *[("m", "open", 2)] * 2,
    ]
    told = job.json("in-doubt", "abort", "--all-orphans", "--fence", "--yes")
    assert [one["result"] for one in told["results"]] == ["aborted"] * 4
    assert job.json("in-doubt", "list")["transactions"] == []

    job.run(3, crash=(Step.PRE_COMMITTED, 2))
    shutil.rmtree(tmp_path / "checkpoints")
    left = [one["id"] for one in job.json("in-doubt", "list", code=1)["transactions"]]
    told = job.json("in-doubt", "commit", *left, "--break-decision", "--yes")
    assert [one["result"] for one in told["results"]] == ["committed"] * 4
    assert job.json("in-doubt", "list", code=1)["transactions"] == []


def test_a_storage_that_was_set_back_is_asked_about_before_anything_is_in_doubt(pg_job: Job) -> None:
    """A driver that runs may pre-commit until the fence shuts it out."""
    storage, backup = pg_job.folder / "checkpoints", pg_job.folder / "backup"
    pg_job.run(1)
    shutil.copytree(storage, backup)
    pg_job.run(2)
    shutil.rmtree(storage)
    shutil.copytree(backup, storage)
    refused = pg_job.cli("in-doubt", "abort", "--all-orphans", "--fence", "--yes", code=3)
    assert "So what is in doubt by then may be decided" in refused.stderr
    assert JobStore(open_storage(storage.as_uri()), "orders").newest_generation() == 1


def test_of_two_tries_in_kafka_only_one_is_committed(tmp_path: Path, kafka: KafkaService, kafka_topic: str) -> None:
    """Neither tells its checkpoint, and one may have been killed amid its rows."""
    job = Job(tmp_path, f'type = "kafka"\nbootstrap_servers = "{kafka.bootstrap}"\ntopic = "{kafka_topic}"')
    rows = pa.table({"value": ["a", "b"]})
    with load_job(str(job.file)) as coordinator:
        [sink] = coordinator.sinks.values()
        sink.check(rows.schema)
        for slot in range(2):
            name = TransactionId("orders", "aa", 0, sink.name, 0, 1, 0, 0, slot)
            transaction = sink.begin_transaction(replace(name.context(rows.schema), slot=slot))
            sink.write(transaction, rows[: slot + 1].to_batches()[0])
            sink.snapshot_state(transaction)
    ids = [one["id"] for one in job.json("in-doubt", "list", code=1)["transactions"]]
    assert len(ids) == 2
    told = job.cli("in-doubt", "commit", *ids, "--yes", "--break-decision", code=2).stderr
    assert "named twice; another try of it has the same rows, or some of them" in told
    assert job.json("in-doubt", "commit", ids[0], "--yes", "--break-decision")["results"][0]["result"] == "committed"


def test_what_is_staged_is_committed_without_its_record(pg_job: Job, pg_database: str) -> None:
    """As after storage was lost amid the commits of two sinks; all of a checkpoint together."""
    text = pg_job.file.read_text().replace('"prepared"', '"staged"')
    pg_job.file.write_text(f'{text}mode = "upsert"\nkeys = ["id"]\norder_by = "amount"\n')
    changes = [("old", 1.0), ("new", 2.0), ("older", 0.0)]
    pg_job.input = [[pa.table({"id": [1], "name": [name], "amount": [at]}) for name, at in changes]]
    pg_job.run(crash=(Step.PRE_COMMITTED, 0))
    left = [one["id"] for one in pg_job.json("in-doubt", "list", code=None)["transactions"]]
    told = pg_job.json("in-doubt", "commit", *left, "--break-decision", "--yes")
    assert [one["result"] for one in told["results"]] == ["committed"] * 3
    assert pg_job.json("in-doubt", "list", code=None)["transactions"] == []
    with psycopg.connect(pg_database) as connection:
        assert connection.execute("SELECT name FROM orders").fetchall() == [("new",)]
        sums = connection.execute("SELECT DISTINCT committed, written FROM tpc_ledger WHERE sink LIKE 'orders-%'")
        assert sums.fetchall() == [(True, None)]


def test_what_an_older_record_decides_is_no_orphan(file_job: Job, file_rows: Callable[[], list[int]]) -> None:
    """R16: the target was set back to where checkpoint 1 was in doubt, and storage has checkpoint 2."""
    rows, backup = file_job.folder / "rows", file_job.folder / "backup"
    file_job.run(2, crash=(Step.COMPLETE, 1))
    shutil.copytree(rows, backup)
    file_job.run(3)
    shutil.rmtree(rows)
    shutil.copytree(backup, rows)

    listed = file_job.json("in-doubt", "list", code=1)["transactions"]
    assert {(one["decision"], one["checkpoint"]) for one in listed} == {("commit", 1)}
    assert file_job.json("in-doubt", "abort", "--all-orphans")["results"] == []
    assert (
        "checkpoint 1), of a checkpoint before the newest: the system was set back"
        in file_job.cli("resolve", code=1).stdout
    )
    assert file_rows() == ids(1)
