"""Queries that somebody else than `run` stops."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from coordinator import CheckpointCoordinator, CheckpointListener, FixedDelay, Step, run
from coordinator.errors import JobFailed
from coordinator.protocol.ports import BatchLeft
from coordinator.storage import open_storage
from sinks.testing import Hooked, LocalQuery
from sinks.testing.conformance import ids
from sinks.testing.local import LocalBatch
from sinks.testing.table import eventually
from tests.protocol.job import Job, fail


class Started:
    """A start of a LocalQuery, with the methods of Spark's StreamingQuery."""

    def __init__(self, query: LocalQuery, coordinator: CheckpointCoordinator) -> None:
        self.query, self.coordinator = query, coordinator
        self.stop = query.stop
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.query.run(self.coordinator)
        except Exception:
            if not self.query.stopped:
                raise

    @property
    def runId(self) -> object:  # noqa: N802 - Spark's name
        """That of the batches which the coordinator has seen."""
        return getattr(self.coordinator.query, "runId", None)

    def awaitTermination(self, timeout: float) -> bool:  # noqa: N802 - Spark's name
        self._thread.join(timeout)
        return not self._thread.is_alive()


def test_a_query_that_is_stopped_amid_a_batch_is_not_started_again(tmp_path: Path) -> None:
    """Its tasks are cancelled, which is no failure."""
    job = Job(tmp_path)

    class Stop(CheckpointListener):
        def on_step(self, step, checkpoint_id, facts) -> None:
            if (step, checkpoint_id) == (Step.PRE_COMMITTED, 1):
                threading.Thread(target=coordinator.query.stop).start()
                eventually(lambda: coordinator.query.stopped)  # type: ignore[attr-defined]

    coordinator = job.coordinator(sink=Hooked(job.sink, "validate_all", nth=2, hook=fail), listeners=[Stop()])
    summary = run(lambda: Started(job.query(), coordinator), FixedDelay(1, 0), coordinator)  # type: ignore[arg-type,return-value]
    assert [attempt.error for attempt in summary.attempts] == [None]
    job.assert_exactly_once(batches=1)


def test_a_batch_that_a_stop_held_back_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its call raises what Spark takes for a clean stop."""
    coordinator, stop = Job(tmp_path).coordinator(), threading.Event()

    class HeldBack:
        isActive, status = False, {"isTriggerActive": False}  # noqa: N815 - Spark's names

        def awaitTermination(self, timeout: float) -> bool:  # noqa: N802 - Spark's name
            coordinator.last_error = BatchLeft("the query is being stopped")
            stop.set()
            return False

        def stop(self) -> None: ...

    summary = run(HeldBack, FixedDelay(1, 0), coordinator, stop)  # type: ignore[arg-type]
    assert ([attempt.error for attempt in summary.attempts], summary.stopped_by) == ([None], "stop")
    assert "failed" not in caplog.text


def test_a_query_that_was_stopped_with_a_savepoint_is_not_started_again(tmp_path: Path) -> None:
    """No checkpoint may become complete after the savepoint's. The next batch waits already, and leaves."""
    job = Job(tmp_path)
    coordinator = job.coordinator(config={"min_pause": 600})

    def start() -> Any:
        return Started(job.query(), coordinator)

    def stop() -> None:
        while not (tmp_path / "query" / "offsets" / "1").exists():
            time.sleep(0.01)
        coordinator.stop_with_savepoint(coordinator.query, open_storage(f"memory:{uuid.uuid4().hex}"))

    stopper = threading.Thread(target=stop)
    stopper.start()
    summary = run(start, FixedDelay(1, 0), coordinator)
    stopper.join()
    assert [attempt.error for attempt in summary.attempts] == [None]
    assert job.visible() == Counter(ids(job.input[:1]))


def test_batches_of_attempts_that_failed_are_not_kept(tmp_path: Path) -> None:
    """With their DataFrames and queries they would fill the memory of a job that is started again for ever."""
    job, kept = Job(tmp_path), []

    class Failing(Started):
        def _run(self) -> None:
            self.error = None
            try:
                super()._run()
            except Exception as error:
                self.error = error

        def awaitTermination(self, timeout: float) -> bool:  # noqa: N802 - Spark's name
            if ended := super().awaitTermination(timeout):
                assert self.error
                raise self.error
            return ended

    def start() -> Any:
        gc.collect()
        kept.append(sum(type(each) is LocalBatch for each in gc.get_objects()))
        return Failing(job.query(), coordinator)

    coordinator = job.coordinator(sink=Hooked(job.sink, "write", None, hook=fail))
    with pytest.raises(JobFailed) as failed:
        run(start, FixedDelay(4, 0), coordinator)
    assert len(failed.value.attempts) == len(kept) == 5
    assert max(kept) - kept[0] <= 2  # there may be others, of other tests


def test_a_job_goes_on_in_a_thread_when_the_main_thread_has_ended(tmp_path: Path) -> None:
    """The pools of `concurrent.futures` take nothing more then, and its checkpoints have several transactions."""
    (tmp_path / "rows").mkdir()
    program = """
        import sys, threading
        from coordinator import CheckpointConfig, CheckpointCoordinator
        from examples.custom_sink import FileSink
        from sinks.testing import LocalQuery
        from sinks.testing.conformance import example_input

        def job():
            threading.main_thread().join()
            config = CheckpointConfig(commit_timeout=1, replay="spool")
            with CheckpointCoordinator("job", [FileSink(f"{folder}/rows")], f"file://{folder}/storage", config) as it:
                LocalQuery(f"{folder}/query", example_input(2)).run(it)
            print("done")

        folder = sys.argv[1]
        threading.Thread(target=job).start()
        """
    command = [sys.executable, "-c", dedent(program), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.stdout == "done\n", done.stderr
