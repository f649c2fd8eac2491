"""Spark in the simulated world: the log of a query in its checkpointLocation, its batches, and its tasks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import pyarrow as pa

from coordinator.errors import InDoubtError, StorageBehind, Superseded
from coordinator.operations.savepoints.savepoint import MARK
from coordinator.protocol.decisions import require_own_plan
from coordinator.protocol.ports import BatchFacts, BatchLeft
from coordinator.spark.checkpoint_location import facts_in
from coordinator.storage import StorageError
from coordinator.task.row_hash import HASH_COLUMN
from coordinator.task.task import OnePass, SinkTask, together
from sinks.errors import SinkError, TransactionBlocked
from tests.simulation.memory import Memory
from tests.simulation.scheduler import Process
from tests.simulation.world import CHANGED, ConcurrentLog, JobFailed, Unreachable, World, id_of


class StateMissing(Exception):
    """Spark: the state store lacks a version that the query needs. Nothing that the library does may lead to this."""


SCHEMA = pa.schema([("id", pa.int64())])
ADOPTED = {
    "metadata": b'{"id": "adopted"}',
    "offsets/0": b'v1\n{"batchTimestampMs": 5}\n[1]',
    "commits/0": b"v1",
    "state/0/0/1.delta": b"rows before unit 1",
}
"""The files of a query that ran without the library so far, over one unit of input."""


class SimLocation:
    """A checkpointLocation, as savepoints read and write it."""

    def __init__(self, world: World, name: str) -> None:
        self.uri = f"loc:{name}"
        self._world = world
        self._memory = world.location(name)

    def files(self) -> list[str]:
        self._world.scheduler.tick(f"{self.uri} files")
        return sorted(self._memory.values)

    def has(self, path: str) -> bool:
        self._world.scheduler.tick(f"{self.uri} has {path}")
        return path in self._memory.values

    def read(self, path: str) -> Iterator[bytes]:
        self._world.scheduler.tick(f"{self.uri} read {path}")
        if path not in self._memory.values:
            raise FileNotFoundError(path)
        yield self._memory.values[path]

    def write(self, path: str, pieces: Iterable[bytes]) -> None:
        self._world.scheduler.tick(f"{self.uri} write {path}")
        content = b"".join(pieces)
        self._memory.put(path, content)
        if path == MARK:
            self._world.restore_was_begun(self.uri, content)


class SimQuery:
    """The stream execution of Spark over one checkpointLocation."""

    def __init__(
        self,
        world: World,
        location: str,
        *,
        batches: int = 100,
        step: int = 0,
        partitions: int = 1,
        pause: float = 0.0,
    ) -> None:
        """Start nothing yet.

        The query ends after so many `batches`, or at the end of the input. `step` decides which batches have one unit
        of input and which two. `pause` are the seconds before each batch, and before the end.
        """
        self.name = location
        self.partitions = partitions
        self.isActive = False
        self.failed: Exception | None = None
        self.between: dict[int, Callable[[Any], None]] = {}
        """What the driver does after so many batches, with its coordinator."""
        self.query_id = ""
        self.world = world
        self._batches = batches
        self._step = step
        self._pause = pause
        self._in_batch = False
        self.first = self.end = 0
        """The units of input of the batch: its first one, and the first one after it.

        Spark reads them from its log at a start only. From then on it goes on from what it knows itself.
        """
        self.planned_at = 0
        self.failed_at: int | None = None
        """The tick at which it failed outside of a batch."""
        self.listens_since: int | None = None
        """The tick at which its first batch was done. From then on its driver looks for requests."""

    @property
    def memory(self) -> Memory:
        return self.world.location(self.name)

    # as `coordinator.protocol.ports.Query`
    @property
    def status(self) -> Mapping[str, Any]:
        return {"isTriggerActive": self._in_batch}

    @property
    def is_quiet(self) -> bool:
        """Whether it waits for the next trigger."""
        return not self._in_batch

    def exception(self) -> Exception | None:
        return self.failed

    def stop(self) -> None:
        self.world.requests.query_was_stopped(self)
        self.isActive = False

    def fail(self) -> None:
        """Fail outside of a batch, as when the source cannot be reached."""
        if self.isActive and not self._in_batch:
            self.failed = JobFailed("simulated: the source failed")
            self.failed_at = self.world.scheduler.ticks
            self.isActive = False

    # ------------------------------------------------------------------ the log
    def _put(self, path: str, value: bytes) -> None:
        self.world.scheduler.tick(f"spark writes {path}")
        if path in self.memory.values:
            raise ConcurrentLog(path)
        if self.world.scenario.log_is_overwritten:
            self.world.scheduler.tick(f"spark renames {path}")
            self.world.causes["log overwritten"] += path in self.memory.values
        self.memory.put(path, value)

    def _read(self, n: int) -> str:
        try:
            return str(self.memory.values[f"offsets/{n}"].decode())
        except KeyError:
            raise ConcurrentLog(f"offsets/{n} is gone: the location was restored while the query ran") from None

    def facts_of(self, n: int) -> BatchFacts:
        return facts_in(self._read(n), n, self.query_id)

    def _plan(self, n: int, *, first_of_the_run: bool) -> bool:
        """Plan batch n, unless a run before has planned it. Returns False if there is no input for it."""
        world = self.world
        if first_of_the_run and f"offsets/{n}" in self.memory.values:
            self.end = end_of(self._read(n))
            self.planned_at = self.facts_of(n).planned_at
            return True
        if self.first >= world.units:
            return False
        size = 0 if world.scenario.is_empty(n) else 1 + (n * 7 + self._step) % 2
        self.end = min(self.first + size, world.units)
        world.scheduler.tick(f"spark plans {n}")
        self.planned_at = int(world.scheduler.now * 1000)
        world.planned[n, self.planned_at] = self.first
        stamp = json.dumps({"batchTimestampMs": self.planned_at})
        self._put(f"offsets/{n}", f"v1\n{stamp}\n[{self.end}]".encode())
        return True

    # ------------------------------------------------------------------ a run
    def run(self, coordinator: Any) -> None:
        """Run the query in the calling process, as a driver does it."""
        world = self.world
        world.scheduler.tick(f"spark starts {self.name}")
        if "metadata" not in self.memory.values:
            self._put("metadata", json.dumps({"id": world.scheduler.token(8)}).encode())
        self.query_id = json.loads(self.memory.values["metadata"])["id"]
        run_id = world.scheduler.token(8)
        n = newest_batch(self.memory.values, "offsets")
        if n < 0 or f"commits/{n}" in self.memory.values:
            n += 1
        try:
            self.first = end_of(self._read(n - 1)) if n else 0
            for done in range(1, self._batches + 1):
                self._wait()
                if not self.isActive or not self._plan(n, first_of_the_run=done == 1):
                    break
                self._require_state(n)
                self._in_batch = True
                world.handed_over += 1
                batch = SimBatch(self, n, run_id)
                world.scheduler.running.local["source was silent"] = False
                self._hand_over(coordinator, batch)
                if not batch.was_computed:  # Spark's stateful operators would lack it (R10)
                    world.violations.append(f"not computed: batch {n} is done, and nobody has run it")
                self.memory.put(f"state/0/0/{n + 1}.delta", state_after(self.end))
                world.batch_is_done(n, batch.facts.planned_at)
                world.scheduler.running.local["has done a batch"] = True
                self._put(f"commits/{n}", b"v1")
                self._in_batch = False
                self.first = self.end
                if self.listens_since is None:
                    self.listens_since = world.scheduler.ticks
                if done in self.between:
                    self.between[done](coordinator)
                n += 1
            self._wait()
            if self.failed:
                raise self.failed
        except BatchLeft:
            pass
        except Exception as error:
            self.failed = error
            if isinstance(error, StorageBehind):
                # Records elsewhere may say what is decided: this driver must abort nothing any more (R16).
                world.scheduler.running.local["told"] = "that storage is another one"
            raise
        finally:
            self.isActive = self._in_batch = False

    def _hand_over(self, coordinator: Any, batch: SimBatch) -> None:
        """Call the user's function, which calls the coordinator, and perhaps calls it again after an error."""
        try:
            coordinator.process(batch)
        except BatchLeft:
            raise
        except Exception as error:
            if not self.world.scenario.calls_again or not self.isActive:
                # Without an answer of storage, a driver cannot know that it was superseded.
                cut_off = any(kind in ("cut off", "fault", "down") for _, kind, _ in self.world.scenario.events)
                knows = isinstance(error, (Superseded, StorageBehind, StorageError, Unreachable))
                if self.isActive and not knows and not cut_off:
                    looks = 2 + len(self.world.all_sinks())
                    self.world.require_newest(f"ends with {type(error).__name__}", calls=looks)
                if isinstance(error, InDoubtError) and self.world.scheduler.running.local.get("held by orphans"):
                    self.world.violations.append("blocked: a driver ends because an orphan holds a lock")
                if self.isActive and isinstance(error, TransactionBlocked) and batch.blocked == 1:
                    self.world.violations.append("blocked: a driver ends over a lock, and has not tried again")
                raise
            coordinator.process(batch)

    def _wait(self) -> None:
        """Wait for the next trigger, or for a stop."""
        if self._pause:
            scheduler = self.world.scheduler
            scheduler.running.wait(lambda: not self.isActive, scheduler.now + self._pause)
            scheduler.tick("spark has waited for the trigger")

    def _require_state(self, n: int) -> None:
        """Raise if the state of the batches before n is not there, or is of other batches.

        A location that was restored while a query ran may lack it, and so may one in which two queries ran.
        """
        path = f"state/0/0/{n}.delta"
        altered = self.world.was_restored or self.world.causes["log overwritten"]
        if n and not altered and self.memory.values.get(path) != state_after(self.first):
            raise StateMissing(f"{path} of {self.name}")


class SimWriter:
    """What starts a query, as Spark's `DataStreamWriter`."""

    def __init__(self, query: SimQuery) -> None:
        self._query = query

    def start(self) -> SimQuery:
        self._query.isActive = True
        return self._query


def state_after(end: int) -> bytes:
    """Return what the state of an aggregation holds after the input before that unit."""
    return f"rows before unit {end}".encode()


def end_of(log: str) -> int:
    """Return the first unit of input after a batch, as a file of the log of offsets has it."""
    end: int = json.loads(log.split("\n")[2])[0]
    return end


def newest_batch(files: Iterable[str], log: str) -> int:
    """Return the newest batch in a log of a checkpointLocation, -1 if there is none."""
    return max((int(path.partition("/")[2]) for path in files if path.startswith(f"{log}/")), default=-1)


class SimBatch:
    """A micro-batch, as `coordinator.protocol.ports.MicroBatch`."""

    row_hash = "simulated"

    def __init__(self, query: SimQuery, n: int, run_id: str) -> None:
        if query.world.scenario.log_is_overwritten:
            query.world.scheduler.tick(f"spark hands over batch {n}")
        self.facts = query.facts_of(n)
        require_own_plan(self.facts, query.planned_at, query.name)  # as `SparkBatch` does
        self.run_id = run_id
        self.location = f"loc:{query.name}"
        self.query = query
        self._world = query.world
        changed = self._world.changed_from
        self.ids = tuple(id + CHANGED * (id // 2 >= changed) for id in range(2 * query.first, 2 * query.end))
        self.rows: int | None = len(self.ids)
        self.was_computed = False
        self.blocked = 0
        """How often a lock has kept the tasks from writing the batch."""
        self._cancelled = False

    @property
    def active(self) -> bool:
        return self.query.isActive

    def raise_stopped(self) -> NoReturn:
        raise BatchLeft("the query is being stopped")

    def facts_of(self, checkpoint_id: int) -> BatchFacts:
        self._world.scheduler.tick(f"spark reads offsets/{checkpoint_id}")
        return self.query.facts_of(checkpoint_id)

    def is_done(self, checkpoint_id: int) -> bool:
        self._world.scheduler.tick(f"spark reads commits/{checkpoint_id}")
        return f"commits/{checkpoint_id}" in self.query.memory.values

    def schema(self, sink: Any) -> pa.Schema:
        return SCHEMA

    def partitions(self, sink: Any) -> int:
        return self.query.partitions

    def weaknesses(self, *, recomputed: bool) -> list[str]:
        return []

    def topic_ids(self) -> Sequence[Mapping[str, str]]:
        world = self._world
        if not world.scenario.topics:
            return ()
        world.scheduler.tick("the source tells the ids of its topics")
        if world.source_calls_that_fail:
            world.source_calls_that_fail -= 1
            self._driver().local["source was silent"] = True
            raise Unreachable("the source does not answer")
        return ({"events": f"topic-{world.topic}"},)

    def drain(self) -> None:
        self.was_computed = True
        self._world.scheduler.tick("spark computes the batch without writing it")

    def cancel(self) -> None:
        self._cancelled = True
        for child in self._driver().children:
            if child.kind == "task":
                child.dead = True

    def same_rows(self, other: Any) -> bool:
        return bool(self.ids == other.ids)

    def _driver(self) -> Process:
        return self._world.scheduler.running.owner

    def run(self, tasks: Mapping[str, SinkTask], ended: Callable[[str], None]) -> list[Any]:
        """Run the tasks as Spark does it: each by itself, a failed one a second time, some with a speculative copy."""
        if any(task.replay for task in tasks.values()):
            self._world.require_newest_since_commit("replays")
        self._driver().local["tasks began at"] = self._world.scheduler.ticks
        job = SparkJob(self, tasks)
        job.run()
        self.was_computed = True
        self._driver().local["tasks ended at"] = self._world.scheduler.ticks
        for name in tasks:
            ended(name)
        self.blocked += any(isinstance(ack.error, TransactionBlocked) for ack in job.acks)
        return job.acks


class SparkJob:
    """The Spark jobs that write a batch: one for all sinks that share its rows, and one for each other sink."""

    def __init__(self, batch: SimBatch, tasks: Mapping[str, SinkTask]) -> None:
        self._world = batch.query.world
        self._batch = batch
        self._passes = list(_passes(list(tasks.values()), shared=self._world.scenario.one_pass))
        self._driver = self._world.scheduler.running.owner
        self._answers: dict[tuple[int, int], list[Any]] = {}
        self._failures: list[Exception] = []

    @property
    def acks(self) -> list[Any]:
        return [ack for _, acks in sorted(self._answers.items()) for ack in acks]

    def run(self) -> None:
        for child in self._driver.children:
            if child.kind == "task":
                child.parent = None  # a task of an earlier job, which nobody waits for
        self._driver.children = [child for child in self._driver.children if child.kind == "thread"]
        wanted = self._partitions()
        for (number, subtask), rows in wanted.items():
            self._attempt(number, subtask, rows, tries=2)
            if self._world.speculative:
                self._world.speculative -= 1
                self._attempt(number, subtask, rows, tries=1)
        self._wait_for_tasks()
        for _ in range(2):
            if self._failures:
                break
            for number, subtask in sorted(wanted.keys() - self._answers.keys()):  # their executors died
                self._attempt(number, subtask, wanted[number, subtask], tries=1)
            self._wait_for_tasks()
        if wanted.keys() - self._answers.keys():
            raise self._failures[0] if self._failures else JobFailed("simulated: the tasks were killed")

    def _partitions(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Return the rows of each partition, by the number of its pass and its own."""
        wanted = {}
        for number, one_pass in enumerate(self._passes):
            rows = self._batch.ids
            count = self._batch.query.partitions
            replay = one_pass.tasks[0].replay
            if replay and replay.spooled:
                count = 1 + max(replay.lost)
                rows = ()
            elif replay and replay.single_partition:
                count = 1
            for subtask in range(count):
                wanted[number, subtask] = tuple(row for row in rows if id_of(row) % count == subtask)
        return wanted

    def _wait_for_tasks(self) -> None:
        tasks = [child for child in self._driver.children if child.kind == "task"]
        self._world.scheduler.running.wait(lambda: all(task.ended for task in tasks))

    def _attempt(self, number: int, subtask: int, rows: tuple[int, ...], tries: int) -> None:
        world = self._world
        # Each driver counts its own, so drivers of one generation give transactions the same names.
        attempt = self._driver.local["task attempts"] = 1 + self._driver.local.get("task attempts", 0)
        # as the pickled tasks in an executor
        tasks = tuple(replace(task, sink=copy.copy(task.sink)) for task in self._passes[number].tasks)
        one_pass = OnePass(tasks, tuple(partial(_share, task.sink) for task in tasks))

        def work() -> None:
            try:
                acks = one_pass.run(record_batches(rows), subtask, attempt, 2 - tries)
            except (StorageError, SinkError, Unreachable) as error:
                if tries > 1 and (number, subtask) not in self._answers and not self._driver.dead:
                    self._attempt(number, subtask, rows, tries - 1)
                    self._wait_for_another()
                else:
                    self._failures.append(error)
                return
            self._answers.setdefault((number, subtask), acks)

        names = "+".join(task.sink.name for task in tasks)
        world.scheduler.spawn(f"task {names}/{subtask}", "task", work, self._driver)

    def _wait_for_another(self) -> None:
        """Let the next try end before this one, so that whoever waits for this one has waited for both."""
        another = self._driver.children[-1]
        self._world.scheduler.running.wait(lambda: another.ended)


def _passes(tasks: Sequence[SinkTask], *, shared: bool) -> Iterator[OnePass]:
    """Yield what the tasks of each Spark job do, as `SparkBatch` has it."""
    spooled = any(task.replay and task.replay.spooled for task in tasks)
    if not shared or spooled:
        for task in tasks:
            yield OnePass((task,))
        return
    yield from map(OnePass, together(tasks))


def _share(sink: Any, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows that a simulated sink takes."""
    return batch.filter(pa.array([sink.takes(row) for row in batch.column("id").to_pylist()], pa.bool_()))


_BATCHES: dict[tuple[int, ...], list[pa.RecordBatch]] = {}


def record_batches(ids: tuple[int, ...]) -> list[pa.RecordBatch]:
    """Return rows as a task gets them, each with its hash."""
    if not ids:
        return []
    if ids not in _BATCHES:
        hashes = [(id * 0x9E3779B97F4A7C15 + 12345) % (1 << 63) for id in ids]
        columns = {"id": pa.array(ids, pa.int64()), HASH_COLUMN: pa.array(hashes, pa.int64())}
        _BATCHES[ids] = [pa.record_batch(columns)]
    return _BATCHES[ids]


def copy_missing(memory: Memory, files: Mapping[str, bytes]) -> None:
    """Put files into a location that lacks them."""
    with suppress(KeyError):
        for path, content in files.items():
            memory.values.setdefault(path, content)
    memory.keep()
