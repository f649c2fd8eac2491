"""The commands of an operator, as the library's command line runs them.

The operator is careful: he confirms what is asked (`--yes`), never goes against a decision (`--break-decision`), and
follows the runbook.
"""

from __future__ import annotations

from coordinator.cli import in_doubt, savepoints
from tests.simulation.world import World

JOB_FILE = "job"


class Operator:
    def __init__(self, world: World) -> None:
        self._world = world

    def list_in_doubt(self) -> None:
        in_doubt.list_(job=JOB_FILE)

    def abort_orphans(self, *, fence: bool) -> None:
        in_doubt.abort(chosen=None, all_orphans=True, fence=fence, yes=True, job=JOB_FILE)

    def abort_one(self, name: str, *, fence: bool) -> None:
        self._world.scheduler.running.local["chosen"] = name
        in_doubt.abort(chosen=[name], fence=fence, yes=True, job=JOB_FILE)

    def resolve(self, accept_loss: list[str] | None) -> None:
        """Commit what is decided, and give up participants that are named, or `all` that are lost."""
        self._world.scheduler.running.local["accepts"] = accept_loss or ()
        in_doubt.resolve(accept_loss=accept_loss, why="simulated", who="operator", yes=True, job=JOB_FILE)

    def save(self) -> None:
        """Take a savepoint of a query that is stopped, as far as the operator knows."""
        location = f"loc:{self._world.location_name}"
        savepoints.trigger(location=location, yes=True, job=JOB_FILE)

    def request(self, way: str, timeout: str) -> None:
        """Ask the running driver for a savepoint."""
        savepoints.trigger(stop=way == "stop", cancel=way == "cancel", timeout=timeout, yes=True, job=JOB_FILE)

    def restore(self, uri: str, location: str, *, later: bool, fewer_sinks: bool) -> None:
        savepoints.restore(
            uri,
            f"loc:{location}",
            allow_later_checkpoints=later,
            allow_non_restored=fewer_sinks,
            yes=True,
            job=JOB_FILE,
        )

    def list_savepoints(self) -> None:
        savepoints.list_(job=JOB_FILE)

    def dispose(self, uri: str) -> None:
        savepoints.dispose(uri, yes=True, job=JOB_FILE)
