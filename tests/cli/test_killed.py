"""What an operator is told of jobs on PostgreSQL whose drivers got SIGKILL, or whose database is down."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest

from coordinator.listener import Step
from coordinator.operations.jobfile import load_job
from coordinator.operations.ui.job import JobView
from coordinator.operations.ui.page import page_of
from coordinator.storage import open_storage
from coordinator.store.job_store import JobStore
from sinks.testing.conformance import example_input
from sinks.testing.servers.postgres import PostgresService
from sinks.testing.table import eventually
from tests.cli.conftest import TABLE
from tests.cli.jobs import INPUT, Job, ids
from tests.cli.test_in_doubt import prepared, visible


def test_a_driver_that_runs_is_told_from_one_that_was_killed(
    pg_job: Job, pg_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pg_job.beat_fast()
    with monkeypatch.context() as patient, pg_job.halted(Step.PRE_COMMITTED, 1) as process:
        patient.setattr("coordinator.operations.heartbeat._MISSED", 2000)  # of a busy machine
        assert pg_job.wait_until("running")["newest_checkpoint"]["checkpoint"] == 0
        told = pg_job.json("in-doubt", "list")
        assert [one["decision"] for one in told["transactions"]] == ["open"] * 3
        assert f"process {process.pid}" in told["driver"]["who"]
        assert told["driver"]["last_sign"].startswith("20")
        assert told["driver"]["age"] < 600
        assert told["newest_checkpoint"]["age"] > 0
        left = pg_job.cli("in-doubt", "abort", "--all-orphans").stdout
        assert "There is no orphan" in left
        assert "Not touched: 3 open" in left
    pg_job.wait_until("silent")
    told = pg_job.json("in-doubt", "list", code=1)
    assert [one["decision"] for one in told["transactions"]] == ["stranded"] * 3
    said = pg_job.cli("in-doubt", "list", code=1).output
    assert "is dead, frozen, or cut off from checkpoint storage; last heartbeat 20" in said
    assert "in-doubt abort --all-orphans --fence" in said
    assert "{'" not in said
    said = pg_job.cli("resolve").stdout
    assert "Not touched: 3 stranded: no record names them" in said
    assert "in-doubt abort --all-orphans --fence" in said

    left = pg_job.cli("in-doubt", "abort", "--all-orphans", code=1).stdout
    assert "Not touched: 3 stranded" in left
    assert "--fence" in left
    assert prepared(pg_database) == 3
    with psycopg.connect(pg_database) as connection:
        connection.execute("SET lock_timeout = '200ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            connection.execute("DROP TABLE orders")
    done = pg_job.cli("in-doubt", "abort", "--all-orphans", "--fence", "--yes")
    assert done.stdout.count("aborted") == 3
    assert prepared(pg_database) == 0
    assert pg_job.json("status", code=1)["driver"]["state"] == "none"
    pg_job.run()
    assert visible(pg_database) == ids(3)
    ended = pg_job.cli("status", code=1).stdout
    assert "the coordinator was closed" in ended or "the query was stopped" in ended  # whichever is seen first
    assert "Newest checkpoint: 2, complete 20" in ended


def test_a_driver_that_was_killed_just_now(pg_job: Job) -> None:
    """Nobody can tell it from one that runs, so nothing says that it does."""
    text = pg_job.file.read_text()
    pg_job.file.write_text(text.replace("[checkpointing]", "[checkpointing]\nheartbeat_interval = 400"))
    pg_job.kill(Step.PRE_COMMITTED, 0)
    unsure = (
        r"runs, or has died since its last heartbeat: that was 20\S+, \d+\.\d (s|min) ago by .* clock\. "
        r"It is taken for dead after 20\.0 min "
    )
    assert re.search(unsure, pg_job.cli("status").stdout)
    told = pg_job.cli("in-doubt", "list").stdout
    assert re.search(unsure, told)
    assert re.search(
        r"3 open: of the newest driver, whose last heartbeat came \d+\.\d (s|min) ago: .* unless it has died", told
    )


def test_what_was_in_progress_when_a_driver_died(file_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    file_job.beat_fast()
    with file_job.halted(Step.PRE_COMMITTED, 1) as process:
        with monkeypatch.context() as patient:
            patient.setattr("coordinator.operations.heartbeat._MISSED", 2000)  # of a busy machine
            doing = "In progress by the last heartbeat: checkpoint 1, for"
            eventually(lambda: doing in file_job.cli("status", code=None).stdout)
        process.kill()
        file_job.wait_until("silent")
    told = file_job.cli("status", code=1).stdout
    assert re.search(
        r"In progress when the driver died or fell silent: checkpoint 1, for \d+\.\d (s|min) then\. "
        r"Done: prepare \d.*; rows: files \d+\. The next start settles it\.\nNewest checkpoint: 0, complete",
        told,
    )
    with load_job(str(file_job.file)) as coordinator:
        client = page_of(JobView(coordinator)).test_client()
        pages = {page: client.get(page, headers={"Host": "127.0.0.1"}).text for page in ("/", "/history")}
    assert "In progress when the driver died or fell silent: checkpoint 1" in pages["/"]
    assert "<b>0</b> in progress" in pages["/"]
    assert "when the driver died or fell silent" in pages["/history"]


def test_a_checkpoint_that_a_driver_died_of_just_after_it_was_complete_is_not_in_progress(file_job: Job) -> None:
    """By its last heartbeat it is: that came before."""
    file_job.beat_fast()
    text = file_job.file.read_text()
    file_job.file.write_text(text.replace("[checkpointing]", "[checkpointing]\nrequest_poll_interval = 0.1"))
    file_job.dies_of_a_commit(1)
    told = file_job.cli("status", code=None).stdout
    file_job.wait_until("silent")
    for said in (told, file_job.cli("status", code=1).stdout):
        assert "In progress" not in said
        assert "Newest checkpoint: 1, complete" in said
    with load_job(str(file_job.file)) as coordinator:
        page = page_of(JobView(coordinator)).test_client().get("/", headers={"Host": "127.0.0.1"}).text
    assert "In progress" not in page


def test_what_a_driver_that_runs_is_about_to_commit_is_no_finding(pg_job: Job) -> None:
    """Its checkpoints follow one another, so that each look meets another one."""
    pg_job.input = example_input(50) * 1000  # more than it comes to
    with pg_job.at_work() as process:
        looks = [pg_job.json("in-doubt", "list")["transactions"] for _ in range(10)]
        assert process.is_alive()
    assert {one["decision"] for look in looks for one in look} <= {"open"}


def test_resolve_says_what_it_commits(pg_job: Job, pg_database: str) -> None:
    pg_job.kill(Step.COMPLETE, 1)
    said = pg_job.cli("resolve").stdout
    assert "3 of 3 participants are visible" in said
    assert "Committed 3 now." in said
    assert visible(pg_database) == ids(2)
    assert "now" not in pg_job.cli("resolve").stdout
    assert pg_job.json("resolve")["committed_now"] == 0


@pytest.mark.parametrize("committed", [True, False])
def test_resolve_with_the_database_down_cannot_tell(
    tmp_path: Path, own_postgres: PostgresService, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    with own_postgres.database() as dsn:
        monkeypatch.setenv("ORDERS_DSN", dsn)
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(TABLE)
        job = Job(tmp_path, 'type = "postgres"\ndsn = "${ORDERS_DSN}"\ntable = "orders"\nstrategy = "prepared"')
        job.kill(Step.COMMITTED if committed else Step.COMPLETE, 1)
        own_postgres.stop()
        for command in (["resolve"], ["resolve", "--accept-loss", "all", "--why", "x", "--yes"]):
            said = job.cli(*command, code=1).output
            assert "Cannot tell what became of 3 of 3 participants of checkpoint 1: bring PostgreSQL (sink" in said
            assert "--accept-loss" not in said
            assert "participants are visible" not in said
        told = job.json("resolve", code=1)
        assert {one["outcome"] for one in told["participants"]} == {"cannot tell"}
        said = job.cli("in-doubt", "list", code=1).output
        assert "sink 'orders' cannot tell: " in said
        assert "Nothing of job" not in said
        assert "No transaction was touched" in job.cli("in-doubt", "abort", "--all-orphans", code=1).stderr
        assert "cannot connect to PostgreSQL" in job.cli("doctor", code=1).stdout
        own_postgres.start()
        assert "3 of 3 participants are visible" in job.cli("resolve").stdout
        assert visible(dsn) == ids(2)


def test_what_was_given_up_is_told_for_ever(pg_job: Job, pg_database: str) -> None:
    pg_job.kill(Step.COMPLETE, 0)
    one = pg_job.json("in-doubt", "list", code=1)["transactions"][0]
    with psycopg.connect(pg_database, autocommit=True) as connection:
        connection.execute(f"ROLLBACK PREPARED '{one['transaction']['gid']}'")
    pg_job.cli("resolve", "--accept-loss", "orders/0", "--why", "gone", "--who", "ann", "--yes")
    assert re.search(r"Round 1, by generation \d+: 1 given up\.", pg_job.cli("checkpoints", "show").stdout)
    store = JobStore(open_storage((pg_job.folder / "checkpoints").as_uri()), "orders")
    (key,) = store.storage.list(f"{store._folder.root}/loss")
    store.storage.delete(key)  # whoever accepted it died in between
    assert len(pg_job.json("status", code=1)["losses"]) == 1
    pg_job.file.write_text(
        pg_job.file.read_text().replace("[checkpointing]", "[checkpointing]\nretained_checkpoints = 2")
    )
    pg_job.run()
    assert "there are 1 to 2" in pg_job.cli("checkpoints", "show", "0", code=1).stderr
    (loss,) = pg_job.json("status", code=1)["losses"]
    wanted = {
        "sink": "orders",
        "subtask": 0,
        "rows": INPUT[0][0].num_rows,
        "checkpoint": 0,
        "who": "ann",
        "why": "gone",
    }
    assert {key: loss[key] for key in wanted} == wanted
    told = pg_job.cli("status", code=1)
    assert "ann" in told.stdout
    assert "Given up by operators: 1 participant" in told.stdout
