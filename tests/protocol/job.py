"""A job of files under the coordinator, and what may happen to it."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pyarrow.parquet as pq
import pytest

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from coordinator.protocol.ports import TopicIds
from coordinator.storage import CheckpointStorage, open_storage
from coordinator.storage.base import WrappedStorage
from coordinator.store.job_store import JobStore
from coordinator.store.records import Record
from examples.custom_sink import FileSink
from sinks import TransactionContext
from sinks._util.machine import Clock, Event
from sinks.errors import TransactionBlocked
from sinks.testing import LocalQuery
from sinks.testing.conformance import example_input, ids
from sinks.testing.local import Partitions


class HookedStorage(WrappedStorage):
    """Calls the hook once, before the first call of `method` on a key that contains `part`."""

    def __init__(self, inner: CheckpointStorage, method: str, part: str, hook: Callable[[], object]) -> None:
        super().__init__(inner)
        self.method, self.part, self.hook = method, part, hook
        self.due = True

    def _call(self, method: str, key: str, *more: Any) -> Any:
        if self.due and method == self.method and self.part in key:
            self.due = False
            self.hook()
        return super()._call(method, key, *more)


class CheckedThenPut(HookedStorage):
    """A driver that has passed its generation check; its put lands when `put()` is called, from inside the hook."""

    def put_if_absent(self, key: str, value: bytes) -> bool:
        if self.due and self.part in key:
            self.due = False
            self.put = lambda: self.inner.put_if_absent(key, value)
            self.hook()
        return self.inner.put_if_absent(key, value)


class Steps(CheckpointListener):
    def __init__(self) -> None:
        self.seen: list[tuple[Step, int]] = []
        self.facts: list[dict[str, Any]] = []

    def on_step(self, step, checkpoint_id, facts) -> None:
        self.seen.append((step, checkpoint_id))
        self.facts.append(dict(facts))


class TestClock(Clock):
    """Goes on when somebody sleeps by it, and a little whenever it is looked at. Nobody waits."""

    __test__ = False
    _lock = threading.Lock()  # of the class, since hooks of sinks are pickled with their job

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._go_on(1e-6)

    def sleep(self, seconds: float) -> None:
        self._go_on(seconds)

    def _go_on(self, seconds: float) -> float:
        with self._lock:  # threads of the coordinator look at it, too
            self._now += seconds
            return self._now

    def wait(self, event: Event, seconds: float) -> bool:
        end = self._now + seconds
        while self._now < end and not event.wait(0.001):
            pass
        return event.is_set()


QUIET = {"commit_timeout": 2, "heartbeat_interval": 600, "request_poll_interval": 0, "verify_interval": 0}
"""No thread of the driver does anything between its steps, however long the machine takes for them."""


class QuietQuery(LocalQuery):
    """Waits for more input when `run` has come to the end of it, until it is stopped."""

    @property
    def isActive(self) -> bool:  # noqa: N802 - Spark's name
        return not self.stopped

    @property
    def status(self) -> dict[str, bool]:
        return {"isTriggerActive": super().isActive}


class Job:
    """One job: a folder for rows and Spark's logs, a storage, an input."""

    def __init__(self, folder: Path, batches: int = 3, clock: Clock | None = None) -> None:
        (folder / "rows").mkdir()
        self.sink = FileSink(folder / "rows")
        self.folder = folder
        self.input: Sequence[Partitions] = example_input(batches)
        self.storage = open_storage(f"memory:{uuid.uuid4().hex}")
        self.clock = clock or Clock()
        self.topics: TopicIds = ()
        """What brokers would tell of its source."""

    def coordinator(self, sink: Any = None, storage: Any = None, **options: Any) -> CheckpointCoordinator:
        defaults = {"retained_checkpoints": 2} | (QUIET if isinstance(self.clock, TestClock) else {})
        config = CheckpointConfig(**(defaults | options.pop("config", {})))
        storage = storage or self.storage
        return CheckpointCoordinator("job", [sink or self.sink], storage, config, clock=self.clock, **options)

    def query(self, batches: int | None = None) -> LocalQuery:
        query = LocalQuery(self.folder / "query", self.input[:batches])
        query.topic_ids = lambda: self.topics
        return query

    def quiet(self, batches: int | None = None) -> QuietQuery:
        return QuietQuery(self.folder / "query", self.input[:batches])

    def forget_commits(self, first: int) -> None:
        """As in a checkpointLocation that was set back to before the end of a batch."""
        for file in (self.folder / "query" / "commits").iterdir():
            if int(file.name) >= first:
                file.unlink()

    def run(self, batches: int | None = None, **options: Any) -> None:
        self.query(batches).run(self.coordinator(**options))

    def visible(self) -> Counter[int]:
        files = self.sink.folder.glob("[!.]*.parquet")
        return Counter(id for file in files for id in pq.read_table(file)["id"].to_pylist())

    def assert_exactly_once(self, batches: int | None = None) -> None:
        assert self.visible() == Counter(ids(self.input[:batches]))
        assert list(self.sink.in_doubt("job")) == []


class CrashError(BaseException):
    """Ends a driver on the spot, past all handlers, like a SIGKILL."""


def crash() -> None:
    raise CrashError


class OutOfReach:
    """In place of the store for the heartbeats of a driver that was killed."""

    job = ""

    def sign(self, *_: Any) -> None:
        """The last one, of a thread that finds the query at its end."""


def crash_at(step: Step, checkpoint_id: int, of: CheckpointCoordinator | None = None) -> CheckpointListener:
    """`of`: whose heartbeats end, too, and its history. Else there is a last one when the query is at its end."""

    class Crash(CheckpointListener):
        def on_step(self, at, id, facts) -> None:
            if (at, id) == (step, checkpoint_id):
                if of:
                    of._attendants.heartbeat._store = OutOfReach()  # type: ignore[assignment]
                    of._attendants.heartbeat._flush = lambda: None
                raise CrashError

    return Crash()


def complete_but_one_lost(job: Job, n: int = 0) -> None:
    """Leaves checkpoint n complete with nothing committed and one transaction rolled back by an operator."""
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.COMPLETE, n)])
    job.sink.abort(min(job.sink.in_doubt("job"), key=str))


class Recording(FileSink):
    names: list[str] = []  # noqa: RUF012 - shared by the copies that tasks get

    def begin_transaction(self, context: TransactionContext) -> tuple[str, pq.ParquetWriter]:
        self.names.append(context.transaction_id)
        return super().begin_transaction(context)


def fail() -> NoReturn:
    raise OSError("not today")


class Locking(FileSink):
    """As row locks of an orphan do: a task is refused while another attempt's transaction of its subtask is there."""

    def begin_transaction(self, context: TransactionContext) -> tuple[str, pq.ParquetWriter]:
        name = context.transaction_id.rsplit(".", 1)[0]
        if list(self.folder.glob(f".{name}.*.parquet")):
            raise TransactionBlocked("lock timeout: another transaction holds the row")
        return super().begin_transaction(context)


def newest_record(storage: CheckpointStorage, job: str = "job") -> Record:
    newest = JobStore(storage, job).load_newest()
    assert newest
    return newest.record


def decided(job: Job) -> list[str]:
    """Hidden files that a record in storage names."""
    newest = JobStore(job.storage, "job").load_newest()
    named = (
        {committable.transaction["file"] for record in newest.rounds for committable in record.committables}
        if newest
        else set()
    )
    return sorted(identity["file"] for identity in job.sink.in_doubt("job") if identity["file"] in named)
