"""Processes that are killed with SIGKILL at each step of a savepoint and of a restore."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from pyspark import cloudpickle

from coordinator import CheckpointCoordinator, list_savepoints, restore_savepoint
from coordinator.storage import open_storage
from coordinator.storage.base import WrappedStorage
from sinks.postgres import PostgresSink
from sinks.testing import KILLED, LocalQuery
from sinks.testing.conformance import example_input, ids
from sinks.testing.driver import die, fork

INPUT = example_input(4)


class Dies(WrappedStorage):
    """Kills the process after the n-th put."""

    def __init__(self, uri: str, nth: int) -> None:
        super().__init__(open_storage(uri))
        self.nth = nth

    def put_if_absent(self, key: str, value: bytes) -> bool:
        self.nth -= 1
        answer = super().put_if_absent(key, value)
        if self.nth == 0:
            die()
        return answer

    def close(self) -> None:
        self.inner.close()


def child(call: Callable[[], object]) -> int:
    """Run it in a process of its own; returns the exit code."""
    process = fork(_call, cloudpickle.dumps(call), preload="sinks.postgres")
    process.join(300)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


def _call(pickled: bytes) -> None:
    cloudpickle.loads(pickled)()


class Play:
    def __init__(self, dsn: str, folder: Path) -> None:
        self.dsn, self.folder = dsn, folder
        self.storage, self.target = f"file://{folder}/storage", f"file://{folder}/savepoints"

    def coordinator(self) -> CheckpointCoordinator:
        return CheckpointCoordinator("job", [PostgresSink(self.dsn, "orders", create_table=True)], self.storage)

    def run(self, location: str = "query", batches: int | None = None) -> None:
        with self.coordinator() as coordinator:
            LocalQuery(self.folder / location, INPUT[:batches]).run(coordinator)

    def assert_exactly_once(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            seen = Counter(id for (id,) in connection.execute("SELECT id FROM orders").fetchall())
            assert seen == Counter(ids(INPUT))
            assert (
                connection.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()").fetchall()
                == []
            )


@pytest.fixture
def play(pg_database: str, tmp_path: Path) -> Play:
    return Play(pg_database, tmp_path)


@pytest.mark.chaos
@pytest.mark.parametrize("nth", [1, 2])
def test_killed_while_a_savepoint_is_taken(play: Play, nth: int) -> None:
    """After the chunk, after _metadata. What is half-written is no savepoint, and the query goes on."""
    play.run(batches=2)

    def take() -> None:
        coordinator = play.coordinator()
        coordinator.trigger_savepoint(Dies(play.target, nth), str(play.folder / "query"))

    assert child(take) == KILLED
    assert len(list_savepoints(play.target)) == (nth == 2)
    play.run(batches=3)
    with play.coordinator() as coordinator:
        savepoint = coordinator.trigger_savepoint(play.target, str(play.folder / "query"))
    restore_savepoint(savepoint.uri, str(play.folder / "restored"), storage=play.storage)
    play.run("restored")
    play.assert_exactly_once()


@pytest.mark.chaos
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_killed_while_a_savepoint_is_restored(play: Play, nth: int) -> None:
    """After the claim of a generation that fences, at the base record, and at the claim that changes the lineage."""
    play.run(batches=2)
    with play.coordinator() as coordinator:
        uri = coordinator.trigger_savepoint(play.target, str(play.folder / "query")).uri
    location = str(play.folder / "restored")
    assert child(lambda: restore_savepoint(uri, location, storage=Dies(play.storage, nth))) == KILLED
    restore_savepoint(uri, location, storage=play.storage)
    play.run("restored")
    play.assert_exactly_once()


@pytest.mark.chaos
@pytest.mark.parametrize("files", [0, 1, 3, 5])
def test_killed_while_the_files_are_restored(play: Play, files: int) -> None:
    play.run(batches=2)
    with play.coordinator() as coordinator:
        uri = coordinator.trigger_savepoint(play.target, str(play.folder / "query")).uri
    location = str(play.folder / "restored")

    def restore() -> None:
        written = iter(range(files))
        replace = Path.replace

        def replace_or_die(path: Path, to: Path) -> Path:
            if next(written, None) is None:
                die()
            return replace(path, to)

        Path.replace = replace_or_die  # type: ignore[assignment,method-assign]
        restore_savepoint(uri, location, storage=play.storage)

    assert child(restore) == KILLED
    restore_savepoint(uri, location, storage=play.storage)
    play.run("restored")
    play.assert_exactly_once()


@pytest.mark.chaos
def test_the_old_job_goes_on_when_a_restore_was_killed_and_given_up(play: Play) -> None:
    play.run(batches=2)
    with play.coordinator() as coordinator:
        uri = coordinator.trigger_savepoint(play.target, str(play.folder / "query")).uri
    location = str(play.folder / "restored")
    assert child(lambda: restore_savepoint(uri, location, storage=Dies(play.storage, 2))) == KILLED
    play.run()
    play.assert_exactly_once()
