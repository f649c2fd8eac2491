"""The query that a coordinator serves: when a batch of it may begin, and how it is stopped."""

from __future__ import annotations

import functools
import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coordinator.errors import CheckpointError, SavepointError
from coordinator.protocol.decisions import hand_over_again
from coordinator.protocol.ports import MicroBatch, Query
from sinks._util.machine import Clock, Thread, machine

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_WORKER_GRACE_PERIOD = 2.0
"""Seconds for Python workers to end after Spark has canceled their tasks.

Until then a worker may still pre-commit.
"""
_BATCH_GRACE_PERIOD = 5.0
"""Seconds that a stop waits for the end of the current batch."""
_IDLE_LOOKS = 3
"""The number of looks in a row that have to see no batch before a stop continues.

A single look may hit the gap between two batches.
"""


@dataclass
class _Calls:
    """The calls made for one batch; the first fixes its rows."""

    batch: MicroBatch
    failed: Exception | None
    """The error of the last call with these rows.

    Unless the calling function catches it, Spark fails the query with it, and no other call comes.
    """
    refused: Exception | None = None
    """The error of a call with other rows."""

    @property
    def error(self) -> Exception | None:
        return self.failed or self.refused

    def are_for(self, batch: MicroBatch) -> bool:
        return (
            self.batch.run_id == batch.run_id
            and self.batch.facts.checkpoint_id == batch.facts.checkpoint_id
        )


_CALLS: dict[tuple[str, str], _Calls] = {}
"""The calls for the newest batch that have ended, by job and storage.

They may be of several coordinators of this process, because a function may make another coordinator
for each part of a batch.
"""


class FairLock:
    """A lock that goes to the thread that has waited longest.

    So a request that comes during a batch is served before the next batch, however soon that
    follows. A thread that has the lock may take it again.
    """

    def __init__(self) -> None:
        self._changed = machine.threads.condition()
        self._queue: deque[Thread] = deque()
        """The threads that want the lock. The first one has it."""
        self._depth = 0

    def __enter__(self) -> None:
        thread = machine.threads.current()
        with self._changed:
            if not self._queue or self._queue[0] is not thread:
                self._queue.append(thread)
                try:
                    self._changed.wait_for(lambda: self._queue[0] is thread)
                except BaseException:  # Ctrl-C
                    self._queue.remove(thread)
                    self._changed.notify_all()
                    raise
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._queue.popleft()
                self._changed.notify_all()


class QueryLifecycle:
    """The starts and stops of one query at a time.

    A stop holds the next batch back, and waits for the current one.
    """

    def __init__(self, job: str, storage_uri: str, clock: Clock, min_pause: float) -> None:
        """Serve no query yet.

        `min_pause` is the number of seconds from the end of a batch to the beginning of the next.
        """
        self.started: StreamingQuery | None = None
        """The query that `write_stream` started last, even if it has had no batch."""
        self.calling: Query | None = None
        """The query that last called the coordinator, whoever started it."""
        self.run_id: str | None = None
        """Spark's id of the query's run, because each batch brings another object for the query."""
        self.location: str | None = None
        self._job = job
        self._clock = clock
        self._min_pause = min_pause
        self._key = job, storage_uri
        self._thread: Thread | None = None
        """The thread of the last batch. Spark has one thread for each run of a query."""
        self._finished_at = self._cut_off_at = -math.inf
        self._stopping = self._held_back = self._idle = False
        self._query_id = ""

    @property
    def query(self) -> Query:
        if self.calling is None:
            raise SavepointError(
                "the query has not had a batch since it was started; try again when it has"
            )
        return self.calling

    @property
    def queries(self) -> list[Query]:
        return [query for query in (self.started, self.calling) if query]

    @property
    def is_quiet(self) -> bool:
        """Tell whether the query runs, and its last batch was processed to its end."""
        return self._idle and self.calling is not None and self.calling.isActive

    def notice_start_of(self, writer: DataStreamWriter) -> None:
        start = writer.start

        @functools.wraps(start)
        def noticed(*arguments: Any, **options: Any) -> StreamingQuery:
            self.started = query = start(*arguments, **options)
            if self.calling and not self.calling.isActive:
                self.calling = None  # of the run before
            return query

        writer.start = noticed  # type: ignore[method-assign]

    # ------------------------------------------------------------------ a batch
    def pause(self, batch: MicroBatch) -> None:
        """Wait until `min_pause` has passed since the last batch."""
        not_before = self._finished_at + self._min_pause
        while (
            batch.active
            and not self._stopping
            and (left := not_before - self._clock.monotonic()) > 0
        ):
            self._clock.sleep(min(left, 0.2))

    def admit(self, batch: MicroBatch) -> None:
        """Return when the batch may begin.

        If its query is being stopped, this raises what counts as a clean stop.
        """
        self.calling = batch.query
        self.run_id = batch.run_id
        self.location = batch.location
        self._idle = False
        self._query_id = batch.facts.query_id
        while self._stopping and batch.active:
            self._held_back = True
            self._clock.sleep(0.05)
        self._held_back = False
        self._thread = machine.threads.current()
        if not batch.active:
            batch.raise_stopped()
        self._require_called_once(batch)

    def finished(self, batch: MicroBatch) -> None:
        self._finished_at = self._clock.monotonic()
        self._idle = True
        self._ended(batch, None)

    def failed(self, batch: MicroBatch, error: Exception) -> None:
        """Note that the batch ended with an error.

        A stop of its query cuts a batch off in this way, too.
        """
        self._cut_off_at = self._clock.monotonic()
        calls = _CALLS.get(self._key)
        if not batch.active:
            if calls and calls.are_for(batch) and batch.same_rows(calls.batch):
                _CALLS.pop(self._key, None)  # Spark hands them over again
        elif self._query_id in ("", batch.facts.query_id):
            self.run_id = batch.run_id
            self._ended(batch, error)

    def _ended(self, batch: MicroBatch, error: Exception | None) -> None:
        calls = _CALLS.get(self._key)
        if not calls or not calls.are_for(batch):
            _CALLS[self._key] = _Calls(batch, error)
        elif batch.same_rows(calls.batch):
            calls.failed = error
        else:
            calls.refused = calls.refused or error

    # ------------------------------------------------------ the function that calls the coordinator
    def require_one_query(self, batch: MicroBatch) -> None:
        """Raise if this object serves another running query.

        The two queries would end each other's heartbeat.
        """
        if self.calling and self._query_id != batch.facts.query_id and self.calling.isActive:
            raise CheckpointError(
                f"the coordinator of job {self._job!r} serves query {self._query_id}, which runs, "
                f"and was called by query {batch.facts.query_id}. Give that one a coordinator of "
                "its own, with another job name. Nothing of it was written. [EO-CALL-QUERY]"
            )

    def _require_called_once(self, batch: MicroBatch) -> None:
        """Raise if this is a second call for a batch, with other rows.

        A second call does no harm if it has the same rows, because it finds the checkpoint
        complete, or tries again. With other rows, either these rows or those of the first call
        would be missing.
        """
        calls = _CALLS.get(self._key)
        n = batch.facts.checkpoint_id
        if not calls or not calls.are_for(batch):
            # The DataFrame would keep Spark from freeing what it was computed from.
            _CALLS.pop(self._key, None)
        elif not batch.same_rows(calls.batch):
            twice = (
                f"the coordinator of job {self._job!r} was called twice for batch {n}, with "
                "different DataFrames. "
            )
            if error := calls.failed:
                raise CheckpointError(
                    f"{twice}A call with the first one failed: {type(error).__name__}: {error}. "
                    "Nothing of the second was written. Do not catch errors of the coordinator, "
                    "and call it once for each batch. [EO-CALL-TWICE]"
                ) from error
            raise CheckpointError(
                f"{twice}The checkpoint is complete with the rows of the first call, and the rows "
                "of the other ARE MISSING in the targets. To write them, use a second coordinator "
                "with another job name. [EO-CALL-TWICE]"
            )

    def close(self) -> None:
        """Forget the calls of the last batch, unless its query runs.

        If the query runs, the function that calls the coordinator may call another object.
        """
        with suppress(Exception):  # Spark is gone
            if self.calling and self.calling.isActive:
                return
        if (calls := _CALLS.get(self._key)) and calls.batch.run_id == self.run_id:
            _CALLS.pop(self._key, None)

    def require_errors_passed_on(self, batch: MicroBatch) -> None:
        """Raise if a call failed, and Spark continues with another batch in the same run.

        This means that somebody caught the error.
        """
        calls = _CALLS.get(self._key)
        if (
            calls
            and calls.error
            and calls.batch.run_id == batch.run_id
            and not calls.are_for(batch)
        ):
            raise self._swallowed(calls.batch, calls.error)

    @property
    def swallowed_error(self) -> CheckpointError | None:
        """Return the error of the last batch, if the query ended as if there had been none."""
        calls = _CALLS.get(self._key)
        if calls and calls.error and not calls.batch.query.exception():
            return self._swallowed(calls.batch, calls.error)
        return None

    def _swallowed(self, batch: MicroBatch, error: Exception) -> CheckpointError:
        n = batch.facts.checkpoint_id
        swallowed = CheckpointError(
            f"batch {n} failed, but Spark considers it finished, because the function that calls "
            f"the coordinator of job {self._job!r} caught the error: {type(error).__name__}: "
            f"{error}. To make Spark hand the batch over again, {hand_over_again(n)}. "
            "[EO-CALL-CAUGHT]"
        )
        swallowed.__cause__ = error
        return swallowed

    # ------------------------------------------------------------------ a stop
    def require_no_later_run(self, query: Query) -> None:
        """Raise if `query` has ended and was started again, because a stop would stop nothing."""
        if not query.isActive and any(other.isActive for other in self.queries):
            raise CheckpointError(
                f"this query of job {self._job!r} has ended, and another run of it is active, "
                "which was not stopped: pass the query that runs"
            )

    def wait_for_workers(self) -> None:
        """Wait until Python workers of a batch that was cut off have ended."""
        self._clock.sleep(max(0, self._cut_off_at + _WORKER_GRACE_PERIOD - self._clock.monotonic()))

    def hold(self) -> None:
        """Keep further batches from beginning until `stop` has ended."""
        self._stopping = True

    def stop(self, query: Query) -> None:
        self.hold()
        try:
            if self._thread is machine.threads.current() and self._is_busy(query):
                raise CheckpointError(
                    f"a batch of job {self._job!r} cannot stop its own query: Spark would hand the "
                    "batch over again at each start. Stop the query, and end the with block, "
                    "outside of the function for foreachBatch [EO-STOP-INSIDE]"
                )
            end = self._clock.monotonic() + _BATCH_GRACE_PERIOD
            idle = 0
            while query.isActive and idle < _IDLE_LOOKS and self._clock.monotonic() < end:
                idle = 0 if self._is_busy(query) else idle + 1
                self._clock.sleep(0.02)
            query.stop()
        finally:
            self._stopping = False

    def _is_busy(self, query: Query) -> bool:
        """Tell whether a batch is under way that is not held back here."""
        if not self.queries or self._held_back or not query.isActive:
            return False
        return bool(query.status["isTriggerActive"])
