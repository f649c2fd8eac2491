from __future__ import annotations

import re
import shlex
import shutil
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from coordinator.listener import Step
from sinks._util.machine import Clock, machine
from tests.cli.jobs import INPUT, Job


def test_show(file_job: Job) -> None:
    assert "there is none" in file_job.cli("checkpoints", "show", code=1).stderr
    file_job.run(2)
    one = file_job.json("checkpoints", "show")
    assert one["rows"] == {"files": sum(table.num_rows for table in INPUT[1])}
    assert (one["generation"], one["partitions"], len(one["committables"])) == (1, {"files": 4}, 3)
    assert (one["mode"], one["offsets"], one["accepted"]) == ("exactly_once", ['{"end":1}'], [])
    assert one["guarantee"].startswith("exactly-once")

    shown = file_job.json("checkpoints", "show", "0")
    assert shown == file_job.json("checkpoints", "show", "0")
    assert [c["subtask"] for c in shown["committables"]] == [0, 1, 2]
    assert set(shown["committables"][0]) == {"sink", "subtask", "transaction", "proof", "fingerprint", "round"}
    assert file_job.json("checkpoints", "show")["checkpoint"] == 1
    assert "there are 0 to 1" in file_job.cli("checkpoints", "show", "7", code=1).stderr


def test_a_replay_is_shown(file_job: Job) -> None:
    file_job.run(crash=(Step.COMPLETE, 0))
    one = file_job.json("in-doubt", "list", code=1)["transactions"][0]
    file_job.cli("in-doubt", "abort", one["id"], "--break-decision", "--yes")
    file_job.run(1)
    shown = file_job.json("checkpoints", "show", "0")
    assert "Round 1, by generation 2: 1 written again." in file_job.cli("checkpoints", "show", "0").stdout
    assert [c["round"] for c in shown["committables"]] == [0, 0, 0, 1]


def test_tables_hold_what_json_holds(file_job: Job) -> None:
    file_job.run(2)
    shown = file_job.cli("checkpoints", "show").stdout
    about = file_job.json("checkpoints", "show")
    for text in (
        about["lineage"],
        about["query_id"],
        about["offsets"][0],
        about["guarantee"],
        about["committables"][0]["fingerprint"]["hash"],
    ):
        assert text in shown


def test_a_checkpoint_is_shown_in_lines_for_people(file_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are those of the machine's time zone, as in its logs. JSON has the record as it is."""
    file_job.run(1)
    record = file_job.json("checkpoints", "show")
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        shown = file_job.cli("checkpoints", "show").stdout
    finally:
        monkeypatch.undo()
        time.tzset()
    facts = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in shown.partition("round ")[0].splitlines())
    at = datetime.fromtimestamp(record["completed_at"] / 1000, timezone(timedelta(hours=5.5)))
    assert facts.pop("complete").startswith(f"{at.isoformat(timespec='milliseconds')} (")
    assert facts.pop("triggered")
    assert facts == {
        "checkpoint": f"0, lineage {record['lineage']}, generation 1",
        "mode": "exactly once",
        "guarantee": record["guarantee"],
        "batch rows": "24",
        "rows": "files 24",
        "partitions": "files 4",
        "offsets": '{"end":0}',
        "Spark's query": record["query_id"],
    }
    assert {"topic_ids", "newest_rows", "row_hash", "planned_at"} <= set(record)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("status", ["Job 'orders' in file:", "Driver: ", "Newest checkpoint: 1"]),
        ("history", ["completed"]),
        ("checkpoints show 0", ["Spark's query", "exactly-once"]),
        ("in-doubt list", ["Nothing of job 'orders' is in doubt", "Driver: ", "Newest checkpoint: 1"]),
        ("in-doubt abort --all-orphans", ["nothing was aborted"]),
        ("resolve", ["3 of 3 participants are visible"]),
        ("verify", ["checkpoint", "Cannot tell: "]),
        ("doctor", ["put-if-absent", "0 error(s)"]),
        ("savepoint list", ["There is no savepoint of job"]),
        ("schema diff 'id long'", ["no columns to compare"]),
    ],
)
def test_results_are_on_standard_output_and_json_is_alone_there(file_job: Job, command: str, told: list[str]) -> None:
    file_job.save_to(file_job.folder / "savepoints")
    file_job.run(2)
    result = file_job.cli(*shlex.split(command), code=None)
    assert not result.stderr
    assert [text for text in told if text not in result.stdout] == []
    assert file_job.json(*shlex.split(command), code=None) is not None


# ---------------------------------------------------------------------- the three memories
@pytest.fixture
def db_job(tmp_path: Path) -> Job:
    """A job into a table of SQLite, whose ledger remembers, and a copy of all when checkpoint 0 was done."""
    (tmp_path / "db").mkdir()
    job = Job(tmp_path, f'type = "sqlalchemy"\nurl = "sqlite:///{tmp_path}/db/o.db"\ntable = "o"\ncreate_table = true')
    job.run(1)
    for part in ("checkpoints", "query", "db"):
        shutil.copytree(tmp_path / part, tmp_path / f"old-{part}")
    return job


def set_back(job: Job, part: str) -> None:
    shutil.rmtree(job.folder / part)
    shutil.copytree(job.folder / f"old-{part}", job.folder / part)


def findings(job: Job) -> list[Any]:
    """On the memories, by the doctor."""
    findings = job.json("doctor", "--checkpoint-location", str(job.folder / "query"), code=None)
    return [finding for finding in findings if finding["subject"] == "memories"]


def memories(job: Job) -> dict[str, tuple[int | None, str]]:
    """By name, the newest checkpoint and the verdict."""
    form = r"newest checkpoint of (.+?): (\?|none|\d+)(?:, (.*))?"
    parts = [re.fullmatch(form, finding["message"]) for finding in findings(job)]
    return {
        part[1]: (int(part[2]) if part[2].isdigit() else -1 if part[2] == "none" else None, part[3] or "")
        for part in parts
        if part
    }


def doctors_errors(job: Job) -> list[Any]:
    """And the exit code, which is 1 if there are any."""
    errors = [finding["message"] for finding in findings(job) if finding["severity"] == "error"]
    assert job.cli("doctor", "--checkpoint-location", str(job.folder / "query"), code=int(bool(errors)))
    return errors


def test_memories_that_agree(db_job: Job) -> None:
    db_job.run()
    same = {"storage": (2, ""), "checkpointLocation": (2, "as storage"), "sink o": (2, "as storage")}
    assert memories(db_job) == same
    assert doctors_errors(db_job) == []


def test_memories_after_a_restore(db_job: Job) -> None:
    db_job.run(1)
    db_job.save_to(db_job.folder / "savepoints")
    uri = db_job.json("savepoint", "trigger", "--checkpoint-location", f"{db_job.folder}/query", "--yes")["uri"]
    db_job.cli("savepoint", "restore", uri, f"{db_job.folder}/restored", "--yes")
    assert memories(db_job)["sink o"] == (-1, "as storage, which has no rows of its lineage for it")


def test_a_checkpoint_that_is_complete_and_not_yet_committed(db_job: Job) -> None:
    db_job.run(2, crash=(Step.COMPLETE, 1))
    assert memories(db_job) == {
        "storage": (1, ""),
        "checkpointLocation": (0, "as storage, once Spark has asked for batch 1 again"),
        "sink o": (0, "as storage, once checkpoint 1 is committed: its driver or the next start does"),
    }
    assert doctors_errors(db_job) == []


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (
            "checkpoints",
            {"checkpointLocation": (2, "newer by 2: the storage was set back")}
            | {"sink o": (2, "newer by 2: the storage was set back")},
        ),
        ("query", {"checkpointLocation": (0, "older by 2: it was set back")}),
        ("db", {"sink o": (0, "older by 2, unless that is in doubt: the system was set back")}),
    ],
)
def test_the_memory_that_was_set_back_is_named(db_job: Job, part: str, told: dict[str, tuple[int | None, str]]) -> None:
    db_job.run()
    set_back(db_job, part)
    assert memories(db_job).items() >= told.items()
    assert len(doctors_errors(db_job)) == len(told)
    for command in ("in-doubt", "list"), ("resolve",):
        said = db_job.cli(*command, code=int("sink o" in told)).stdout
        assert all(
            f"newest checkpoint is {n}, {words}" in said for name, (n, words) in told.items() if name == "sink o"
        )


def test_a_mistyped_checkpoint_location_is_named(db_job: Job) -> None:
    where = "--checkpoint-location", str(db_job.folder / "qeury")
    assert "checkpointLocation: ?, there is none: mistyped, or deleted" in " ".join(
        db_job.cli("doctor", *where, code=1).stdout.split()
    )


def test_a_system_without_a_memory(file_job: Job) -> None:
    file_job.run(1)
    of_sink = "cannot tell: it keeps no memory, has none yet, or it has expired"
    assert memories(file_job).items() >= {"storage": (0, ""), "sink files": (None, of_sink)}.items()


def test_an_emptied_storage_is_told_by_the_doctor(db_job: Job) -> None:
    shutil.rmtree(db_job.folder / "checkpoints")
    found = doctors_errors(db_job)
    assert any("sink o: 0, newer: the storage was deleted, or is another one" in one for one in found)


class ShiftedClock(Clock):
    """The clock of a machine that is so many days ahead."""

    def __init__(self, days: int) -> None:
        self._days = days

    def milliseconds(self) -> int:
        return super().milliseconds() + self._days * 86_400_000


def test_a_clock_that_is_wrong_by_a_day(file_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    file_job.kill(Step.COMPLETE, 1)
    for days, words in (
        (1, "1.0 d ago by the driver's and this machine's clock"),
        (-1, "ahead by the driver's and this machine's clock"),
    ):
        monkeypatch.setattr(machine, "clock", ShiftedClock(days))
        assert words in file_job.cli("status", code=1).stdout


LOOKING = (
    "status",
    "checkpoints show",
    "in-doubt list",
    "in-doubt abort --all-orphans --fence --yes",
    "resolve",
    "savepoint trigger",
)


@pytest.mark.parametrize("storage", ["file://{}/mistyped", "sqlite:///{}/mistyped"])
@pytest.mark.parametrize("command", LOOKING)
def test_a_storage_that_is_not_there_is_named_and_not_made(file_job: Job, storage: str, command: str) -> None:
    text = file_job.file.read_text()
    uri = storage.format(file_job.folder)
    file_job.file.write_text(text.replace((file_job.folder / "checkpoints").as_uri(), uri))
    told = file_job.cli(*command.split(), code=1).stderr
    assert f"There is no checkpoint storage {uri}: there is no such" in told.replace("\n", " ")
    assert "So no checkpoint of job 'orders' has been taken yet; its first start makes the storage." in told
    assert not (file_job.folder / "mistyped").exists()


def test_savepoints_and_doctor_do_without_the_storage_and_do_not_make_it(file_job: Job) -> None:
    file_job.run(1)
    text = file_job.file.read_text()
    file_job.save_to(file_job.folder / "savepoints")
    taken = file_job.json("savepoint", "trigger", "--checkpoint-location", f"{file_job.folder}/query", "--yes")
    shutil.rmtree(file_job.folder / "checkpoints")
    (listed,) = file_job.json("savepoint", "list")
    assert listed["id"] == taken["id"]
    assert file_job.json("savepoint", "show", taken["uri"])["checkpoint"] == 0
    assert "no such directory; the first start" in " ".join(file_job.cli("doctor", code=None).stdout.split())
    elsewhere = file_job.folder / "elsewhere"
    file_job.file.write_text(text)
    file_job.save_to(elsewhere)
    assert "There is no savepoint" in file_job.cli("savepoint", "list").stdout
    assert not elsewhere.exists()
    assert not (file_job.folder / "checkpoints").exists()
    file_job.cli("savepoint", "restore", taken["uri"], f"{file_job.folder}/restored", "--yes")
    assert file_job.json("checkpoints", "show")["checkpoint"] == 0


def test_a_mistyped_job_is_told_the_jobs_of_the_storage(file_job: Job) -> None:
    file_job.run(1)
    file_job.file.write_text(file_job.file.read_text().replace('job = "orders"', 'job = "order"'))
    assert "It holds the jobs 'orders'." in file_job.cli("status", code=1).stdout


def test_a_driver_whose_clock_is_ahead_is_not_taken_for_one_that_runs(
    file_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_job.kill(Step.PRE_COMMITTED, 1)
    monkeypatch.setattr(machine, "clock", ShiftedClock(-1))
    told = " ".join(file_job.cli("status", code=1).stdout.split())
    assert "cannot tell whether generation 1 (" in told
    assert re.search(r"(24\.0 h|1\.0 d) ahead by the driver's and this machine's clock", told)
    assert file_job.json("status", code=1)["driver"]["state"] == "unknown"
    seen = file_job.json("in-doubt", "list", code=1)
    assert {one["decision"] for one in seen["transactions"]} == {"stranded"}
