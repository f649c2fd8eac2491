from __future__ import annotations

import json
from collections.abc import Callable

from coordinator.jobfile import load_job
from sinks.testing import LocalQuery
from tests.cli.play import INPUT, Job, ids


def test_of_a_stopped_query_and_back(file_job: Job, file_rows: Callable[[], list[int]]) -> None:
    file_job.run(2)
    target, query = f"file://{file_job.folder}/savepoints", f"{file_job.folder}/query"
    assert "serve_http" in file_job.cli("savepoint", "trigger", target, code=1).stderr
    file_job.cli("savepoint", "trigger", target, "--checkpoint-location", query, code=3)
    taken = file_job.json("savepoint", "trigger", target, "--checkpoint-location", query, "--yes")
    assert (taken["job"], taken["checkpoint"]) == ("orders", 1)
    assert file_job.json("savepoint", "list", target) == [taken]
    assert file_job.json("savepoint", "show", taken["uri"]) == taken
    assert taken["uri"] in file_job.cli("savepoint", "list", target).stdout

    place = f"{file_job.folder}/restored"
    file_job.cli("savepoint", "restore", taken["uri"], place, code=3)
    assert file_job.json("savepoint", "restore", taken["uri"], place, "--yes") == taken
    with load_job(str(file_job.file)) as coordinator:
        LocalQuery(place, INPUT).run(coordinator)
    assert file_rows() == ids()
    (first, *_) = file_job.json("checkpoints", "list")["checkpoints"]
    assert first["restored_from"] == taken["id"]

    file_job.cli("savepoint", "dispose", taken["uri"], code=3)
    file_job.cli("savepoint", "dispose", taken["uri"], "--yes")
    assert file_job.json("savepoint", "list", target) == []
    assert "there is no savepoint" in file_job.cli("savepoint", "show", taken["uri"], code=1).stderr


def test_by_the_driver_that_runs(file_job: Job) -> None:
    target = f"file://{file_job.folder}/savepoints"
    with load_job(str(file_job.file)) as coordinator:
        coordinator.serve_http()
        LocalQuery(file_job.folder / "query", INPUT[:2]).run(coordinator)
        generation = coordinator.protocol.store.newest_generation()
        taken = file_job.json("savepoint", "trigger", target)
        assert taken["checkpoint"] == 1
        assert coordinator.protocol.store.newest_generation() == generation
        refused = file_job.cli("savepoint", "trigger", "no-storage", code=1)
        assert "refused" in refused.stderr
    assert "does not answer" in file_job.cli("savepoint", "trigger", target, code=1).stderr
    assert json.loads(file_job.cli("savepoint", "list", target, "--json").stdout) == [taken]
