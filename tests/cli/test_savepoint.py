from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from coordinator import Step
from coordinator.operations.jobfile import load_job
from coordinator.storage import open_storage
from coordinator.store.job_store import JobStore
from sinks.testing import LocalQuery
from sinks.testing.table import eventually
from sinks.transaction import token
from tests.cli.jobs import INPUT, Job, ids
from tests.protocol.job import QuietQuery


def test_of_a_stopped_query_and_back(file_job: Job, file_rows: Callable[[], list[int]]) -> None:
    file_job.run(2)
    query = f"{file_job.folder}/query"
    assert "Set savepoint_dir" in file_job.cli("savepoint", "list", code=2).stderr
    configure(file_job, f'savepoint_dir = "file://{file_job.folder}/savepoints"')
    refused = file_job.cli("savepoint", "trigger", code=1).stderr
    assert "has ended its query" in refused
    assert "say --checkpoint-location" in refused
    file_job.cli("savepoint", "trigger", "--checkpoint-location", query, code=3)
    taken = file_job.json("savepoint", "trigger", "--checkpoint-location", query, "--yes")
    assert (taken["job"], taken["checkpoint"]) == ("orders", 1)
    assert file_job.json("savepoint", "list") == [taken]
    assert file_job.json("savepoint", "show", taken["uri"]) == taken
    assert taken["uri"] in file_job.cli("savepoint", "list").stdout

    place = f"{file_job.folder}/restored"
    refused = file_job.cli("savepoint", "restore", taken["uri"], query, code=1).stderr
    assert "is not empty" in refused
    assert "This begins a new lineage" not in refused
    file_job.cli("savepoint", "restore", taken["uri"], place, code=3)
    assert not Path(place).exists()
    restored = file_job.json("savepoint", "restore", taken["uri"], place, "--yes")
    assert restored["lineage"] != taken["lineage"]
    assert restored == taken | {"lineage": restored["lineage"], "checkpoint_location": place}
    assert "since the restore that it began with" in file_job.cli("verify", code=4).stdout
    shown = file_job.cli("savepoint", "show", taken["uri"]).stdout
    assert "{'" not in shown
    assert str(taken["created_at"]) not in shown
    with load_job(str(file_job.file)) as coordinator:
        LocalQuery(place, INPUT).run(coordinator)
    assert file_rows() == ids()
    first = file_job.json("checkpoints", "show", str(taken["checkpoint"]))
    assert first["restored_from"] == taken["id"]

    file_job.cli("savepoint", "dispose", taken["uri"], code=3)
    file_job.cli("savepoint", "dispose", taken["uri"], "--yes")
    assert file_job.json("savepoint", "list") == []
    assert "there is no savepoint" in file_job.cli("savepoint", "show", taken["uri"], code=1).stderr


def test_by_the_driver_that_runs(file_job: Job) -> None:
    target = f"file://{file_job.folder}/savepoints"
    configure(file_job, f'savepoint_dir = "{target}"')
    with load_job(str(file_job.file)) as coordinator:
        QuietQuery(file_job.folder / "query", INPUT[:2]).run(coordinator)
        generation = coordinator._protocol.store.newest_generation()
        taken = file_job.json("savepoint", "trigger")
        assert taken["checkpoint"] == 1
        assert coordinator._protocol.store.newest_generation() == generation
        file_job.cli("savepoint", "trigger", "--stop", "--cancel", code=2)
        assert "must be a time" in file_job.cli("savepoint", "trigger", "--timeout", "soon", code=2).stderr
        assert "1.0 d at most" in file_job.cli("savepoint", "trigger", "--timeout", "2 days", code=2).stderr
        stopped = file_job.json("savepoint", "trigger", "--stop")
        assert not coordinator.query.isActive
    assert "has ended its query" in file_job.cli("savepoint", "trigger", code=1).stderr
    assert json.loads(file_job.cli("savepoint", "list", "--json").stdout) == [taken, stopped]
    file_job.cli("savepoint", "dispose", stopped["id"], "--yes")
    assert file_job.json("savepoint", "show", taken["id"]) == taken
    file_job.cli("savepoint", "dispose", taken["id"], "--yes")
    again = file_job.cli("savepoint", "dispose", taken["id"], "--yes", code=1).stderr.replace("\n", " ")
    assert f"There is no savepoint {taken['uri']}" in again
    assert "not the id or the URI of a savepoint" in file_job.cli("savepoint", "dispose", "nope", code=1).stderr
    assert file_job.json("savepoint", "list") == []


def test_a_job_whose_name_begins_with_savepoint_has_its_checkpoints_beside_its_savepoints(file_job: Job) -> None:
    """In the same storage: its records are no savepoint that could be disposed of."""
    storage = f"file://{file_job.folder}/checkpoints"
    configure(file_job, f'savepoint_dir = "{storage}"')
    file_job.file.write_text(file_job.file.read_text().replace('"orders"', '"savepoint copy"'))
    file_job.run(2)
    taken = file_job.json("savepoint", "trigger", "--checkpoint-location", f"{file_job.folder}/query", "--yes")
    listed = file_job.cli("savepoint", "list", "--json")
    assert json.loads(listed.stdout) == [taken]
    assert listed.stderr == ""
    folder = token("savepoint copy")
    assert "There is no savepoint" in file_job.cli("savepoint", "dispose", folder, "--yes", code=1).stderr
    assert file_job.json("checkpoints", "show")["checkpoint"] == 1


def test_a_query_that_is_stopped_is_not_stopped_again(file_job: Job) -> None:
    file_job.save_to(file_job.folder / "savepoints")
    file_job.run(1)
    trigger = "savepoint", "trigger", "--checkpoint-location", f"{file_job.folder}/query", "--yes"
    for option in ("--stop", "--cancel"):
        assert "leave --stop and --cancel out" in file_job.cli(*trigger, option, code=2).stderr
    assert file_job.json("savepoint", "list") == []


def test_a_checkpoint_location_that_cannot_be_reached_or_written_is_told(file_job: Job) -> None:
    file_job.save_to(file_job.folder / "savepoints")
    file_job.run(1)
    taken = file_job.json("savepoint", "trigger", "--checkpoint-location", f"{file_job.folder}/query", "--yes")
    for place, why in (("/proc/location", "No such file"), (f"{file_job.file}/location", "Not a directory")):
        told = file_job.cli("savepoint", "restore", taken["id"], place, "--yes", code=1).stderr
        assert "files of the checkpointLocation cannot be copied: " in told
        assert why in told
    told = file_job.cli("savepoint", "trigger", "--checkpoint-location", str(file_job.file), "--yes", code=1).stderr
    assert "Not a directory" in told
    command = ["savepoint", "restore", taken["id"], "hdfs://namenode/location", "--yes", "--job", str(file_job.file)]
    done = subprocess.run([sys.executable, "-m", "coordinator.cli", *command], capture_output=True, text=True)
    assert done.returncode == 1
    assert "takes a Spark session in this process" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_driver_that_is_killed_meanwhile(file_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(file_job, f'savepoint_dir = "file://{file_job.folder}/savepoints"')
    file_job.beat_fast()
    with monkeypatch.context() as patient, file_job.halted(Step.PRE_COMMITTED, 1) as process:
        patient.setattr("coordinator.operations.heartbeat._MISSED", 2000)  # of a busy machine
        file_job.wait_until("running")

        def kill_when_asked() -> None:
            store = JobStore(open_storage((file_job.folder / "checkpoints").as_uri()), "orders")
            eventually(lambda: bool(store.journal.note_ids("request")))
            process.kill()
            patient.undo()

        threading.Thread(target=kill_when_asked).start()
        told = file_job.cli("savepoint", "trigger", "--stop", code=1).stderr
    assert "Nothing was done, and the request is withdrawn" in told
    assert "is dead, frozen, or cut off" in told


def test_a_password_is_in_no_output_log_record_or_error(
    file_job: Job, pg_database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of checkpoint storage and of the savepoints' own; neither is on a command line."""
    caplog.set_level("DEBUG")
    secret = make_url(pg_database).password
    assert secret
    assert len(str(secret)) > 3
    monkeypatch.setenv("PLACE", pg_database)
    file_job.file.write_text(file_job.file.read_text().replace((file_job.folder / "checkpoints").as_uri(), "${PLACE}"))
    configure(file_job, 'savepoint_dir = "${PLACE}"')
    shown = []

    def run(*arguments: str, code: int = 0) -> Any:
        result = file_job.cli("savepoint", *arguments, code=code)
        shown.append(result.output)
        return result

    with load_job(str(file_job.file)) as coordinator:
        shown += [repr(coordinator.config), repr(coordinator.storage), str(coordinator.guarantee)]
        QuietQuery(file_job.folder / "query", INPUT[:2]).run(coordinator)
        taken = json.loads(run("trigger", "--json").stdout)
        storage = coordinator.storage
        stored = b"".join(storage.get(key) or b"" for key in storage.list(""))
    run("list")
    run("show", taken["id"])
    assert "name the savepoint by its id" in " ".join(run("show", taken["uri"], code=1).stderr.split())
    run("restore", taken["id"], f"{file_job.folder}/restored", "--yes")
    run("dispose", pg_database + "/savepoint-none", "--yes", code=1)
    run("dispose", taken["id"], "--yes")
    run("show", pg_database + "x/savepoint-none", code=1)
    run("show", pg_database + "/none", code=1)
    shown.append(file_job.cli("doctor", code=0).output)
    for text in (*shown, stored.decode("latin-1"), caplog.text):
        assert str(secret) not in text


def configure(job: Job, line: str) -> None:
    job.file.write_text(job.file.read_text().replace("[checkpointing]\n", f"[checkpointing]\n{line}\n"))
