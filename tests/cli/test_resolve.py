from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from coordinator.errors import CheckpointError, ReplayMismatch, Superseded
from coordinator.listener import Step
from coordinator.operations import operator_decisions
from coordinator.operations.jobfile import load_job
from examples.custom_sink import FileSink
from sinks.testing import LocalQuery
from sinks.testing.conformance import example_input
from sinks.transaction import Identity
from tests.cli.jobs import INPUT, Job, ids
from tests.protocol.job import CrashError, crash_at


def lost_and_changed(job: Job) -> list[Any]:
    """Checkpoint 1 is complete, subtask 0 was rolled back by an operator, and the input has other rows there now."""
    job.run(crash=(Step.COMPLETE, 1))
    (one,) = [one for one in job.json("in-doubt", "list", code=1)["transactions"] if one["subtask"] == 0]
    job.cli("in-doubt", "abort", one["id"], "--break-decision", "--yes")
    changed: list[Any] = example_input(3)
    changed[1][0] = changed[1][0].slice(2)
    return changed


class Closed(FileSink):
    """Its system is away while the file is there."""

    def open(self) -> None:
        if (self.folder / ".away").exists():
            raise OSError("the file server does not answer")


def test_resolve_names_the_sink_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    job = Job(tmp_path, f'type = "{__name__}:Closed"\nfolder = "{tmp_path / "rows"}"')
    job.run(2, crash=(Step.COMPLETE, 1))
    (tmp_path / "rows" / ".away").touch()
    job.save_to(tmp_path / "savepoints")
    for command in (["resolve"], ["savepoint", "trigger", "--yes", "--checkpoint-location", str(tmp_path / "query")]):
        said = job.cli(*command, code=1).stderr
        assert "sink 'files' cannot be opened: OSError: the file server does not answer" in said
    (tmp_path / "rows" / ".away").unlink()
    assert "Committed 3 now." in job.cli("resolve").stdout


class Emptied(FileSink):
    """Somebody empties the storage when the sink is asked what is in doubt, while the file is there."""

    def in_doubt(self, job: str) -> Iterable[Identity]:
        if (self.folder / ".empty").exists():
            for folder in (self.folder.parent / "checkpoints").iterdir():
                shutil.rmtree(folder)
        return super().in_doubt(job)


def test_resolve_tells_that_its_storage_was_emptied_meanwhile(tmp_path: Path) -> None:
    """Between two readings. Seed `resolve-without-storage` of the simulation."""
    (tmp_path / "rows").mkdir()
    job = Job(tmp_path, f'type = "{__name__}:Emptied"\nfolder = "{tmp_path / "rows"}"')
    job.run(1)
    (tmp_path / "rows" / ".empty").touch()
    said = job.cli("resolve", code=1)
    assert "Job 'orders' has no checkpoint in" in said.stderr
    assert "Traceback" not in said.stdout + said.stderr


def run(job: Job, input: list[Any]) -> None:
    with load_job(str(job.file)) as coordinator:
        LocalQuery(job.folder / "query", input).run(coordinator)


def without(subtask: int) -> list[int]:
    gone = set(INPUT[1][subtask]["id"].to_pylist())
    return [id for id in ids() if id not in gone]


def test_who_decides_is_a_number_where_the_user_has_no_name(file_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    lost_and_changed(file_job)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    told = file_job.json("resolve", "--accept-loss", "all", "--why", "source is gone", "--yes")
    assert told["given_up"][0]["who"].startswith("54321@")


def test_the_job_goes_on_without_what_was_accepted(file_job: Job, file_rows: Callable[[], list[int]]) -> None:
    changed = lost_and_changed(file_job)
    with pytest.raises(ReplayMismatch, match="coordinator resolve"):
        run(file_job, changed)
    told = file_job.json("resolve", code=1)
    assert set(told) == {"job", "checkpoint", "offsets", "visible", "participants", "committed_now", "given_up"}
    (lost,) = [one for one in told["participants"] if one["outcome"] == "lost"]
    assert (told["checkpoint"], lost["participant"], lost["rows"]) == (1, "files/0", INPUT[1][0].num_rows)

    assert "--why" in file_job.cli("resolve", "--accept-loss", "all", code=2).stderr
    refused = file_job.cli("resolve", "--accept-loss", "all", "--why", "source is gone", code=3)
    assert f"WITHOUT {lost['rows']} row(s)" in refused.stderr
    told = file_job.json("resolve", "--accept-loss", "files/0", "--why", "source is gone", "--who", "ann", "--yes")
    assert [(loss["sink"], loss["subtask"]) for loss in told["given_up"]] == [("files", 0)]
    assert (told["visible"], told["participants"]) == (2, [])

    (accepted,) = file_job.json("checkpoints", "show")["accepted"]
    assert accepted["at"].startswith("20")
    assert accepted["transaction"] == lost["transaction"]
    wanted = {"sink": "files", "subtask": 0, "rows": lost["rows"], "outcome": "lost", "who": "ann", "round": 1}
    assert {key: accepted[key] for key in wanted} == wanted
    assert accepted["why"] == "source is gone"

    run(file_job, changed)
    assert file_rows() == without(0)
    assert file_job.json("checkpoints", "show")["checkpoint"] == 2


@pytest.mark.parametrize(("step", "checkpoint"), [(Step.GENERATION_CLAIMED, -1), (Step.REPLAY_COMPLETE, 1)])
def test_a_resolve_that_dies_has_decided_or_has_not(
    file_job: Job, file_rows: Callable[[], list[int]], step: Step, checkpoint: int
) -> None:
    changed = lost_and_changed(file_job)
    coordinator = load_job(str(file_job.file))
    coordinator._protocol.listeners.add(crash_at(step, checkpoint))
    with pytest.raises(CrashError):
        operator_decisions.accept_loss(coordinator._protocol, [("files", 0)], who="ann", why="source is gone")
    if step is Step.GENERATION_CLAIMED:
        with pytest.raises(ReplayMismatch, match="coordinator resolve"):
            run(file_job, changed)
        file_job.json("resolve", "--accept-loss", "files/0", "--why", "source is gone", "--who", "ann", "--yes")
    run(file_job, changed)
    assert file_rows() == without(0)
    assert file_job.json("in-doubt", "list")["transactions"] == []


def test_participants_held_for_a_lost_sibling_become_visible(
    tmp_path: Path, pg_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORDERS_DSN", pg_database)
    with psycopg.connect(pg_database, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY, name text, amount double precision)")
        job = Job(tmp_path, 'type = "postgres"\ndsn = "${ORDERS_DSN}"\ntable = "orders"\nstrategy = "staged"')
        changed = lost_and_changed(job)
        told = job.json("resolve", code=1)
        assert sorted(one["outcome"] for one in told["participants"]) == ["held", "held", "lost"]
        job.json("resolve", "--accept-loss", "orders/0", "--why", "cannot be read again", "--yes")
        run(job, changed)
        assert [row[0] for row in connection.execute("SELECT id FROM orders ORDER BY 1")] == without(0)


def test_what_nobody_can_tell_can_be_given_up(
    file_job: Job, file_rows: Callable[[], list[int]], tmp_path: Path
) -> None:
    file_job.run(crash=(Step.COMPLETE, 1))
    one = file_job.json("in-doubt", "list", code=1)["transactions"][0]
    (tmp_path / "rows" / f".{one['transaction']['file']}").unlink()
    told = file_job.json("resolve", code=1)
    assert [p["outcome"] for p in told["participants"]].count("unknown") == 1
    file_job.json("resolve", "--accept-loss", "all", "--why", "disk gone", "--yes")
    file_job.run()
    assert file_rows() == without(one["subtask"])


def test_only_what_is_lost_or_unknown_can_be_given_up(file_job: Job) -> None:
    file_job.run(2)
    assert file_job.cli("resolve").exit_code == 0
    assert "Nothing is lost" in file_job.cli("resolve", "--accept-loss", "all", "--why", "x", code=1).stderr
    assert "Neither lost" in file_job.cli("resolve", "--accept-loss", "files/0", "--why", "x", code=2).stderr
    with load_job(str(file_job.file)) as coordinator, pytest.raises(CheckpointError, match="is committed: only"):
        operator_decisions.accept_loss(coordinator._protocol, [("files", 0)], who="x", why="x")


def test_a_driver_that_runs_stops_and_keeps_to_the_decision(file_job: Job, file_rows: Callable[[], list[int]]) -> None:
    """The loss is accepted between the driver's look at the outcomes and its replay record."""
    lost_and_changed(file_job)

    class Accepting(FileSink):
        done = False

        def commit_all(self, checkpoint, committables):
            outcomes = super().commit_all(checkpoint, committables)
            if not Accepting.done:
                Accepting.done = True
                file_job.json("resolve", "--accept-loss", "all", "--why", "quicker", "--yes")
            return outcomes

    coordinator = load_job(str(file_job.file))
    sink: FileSink = coordinator.sinks["files"]  # type: ignore[assignment]
    coordinator.sinks["files"] = Accepting(sink.folder)
    with pytest.raises(Superseded):
        LocalQuery(file_job.folder / "query", INPUT).run(coordinator)
    file_job.run()
    assert file_rows() == without(0)


def test_a_missing_reason_is_told_before_anything_is_asked_or_claimed(file_job: Job) -> None:
    assert "Give the reason" in file_job.cli("resolve", "--accept-loss", "all", code=2).stderr
