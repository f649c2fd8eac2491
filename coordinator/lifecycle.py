"""The query that a coordinator serves: when a batch of it may begin, and how it is stopped."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from coordinator.errors import SavepointError
from coordinator.protocol.batch import MicroBatch, Query
from coordinator.protocol.clock import Clock

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_WORKER_GRACE_PERIOD = 2.0
"""Seconds for Python workers to end after Spark has cancelled their tasks: until then one may still pre-commit."""
_BATCH_GRACE_PERIOD = 5.0
"""Seconds that a stop waits for the end of the batch under way."""
_IDLE_LOOKS = 3
"""How often in a row a stop finds no batch under way: between two batches there is none either, for a moment."""


class QueryLifecycle:
    """Stops and starts of one query at a time. A stop holds the next batch back, and waits for the one under way."""

    def __init__(self, clock: Clock, min_pause: float) -> None:
        """`min_pause`: seconds from the end of a batch to the begin of the next."""
        self.started: StreamingQuery | None = None
        """What `write_stream` led to last, also if no batch of it has come."""
        self.calling: Query | None = None
        """What the coordinator was last called by, whoever started it."""
        self.location: str | None = None
        self._clock, self._min_pause = clock, min_pause
        self._finished_at = self._cut_off_at = -math.inf
        self._stopping = self._held_back = self._seen_through = False

    @property
    def query(self) -> Query:
        if self.calling is None:
            raise SavepointError("the query has not had a batch since it was started; try again when it has")
        return self.calling

    @property
    def queries(self) -> list[Query]:
        return [query for query in (self.started, self.calling) if query]

    @property
    def is_quiet(self) -> bool:
        """Whether its last batch was seen through, and another one may come."""
        return self._seen_through and self.calling is not None and self.calling.isActive

    def has_had_a_batch(self, query: StreamingQuery) -> bool:
        """In this run of it."""
        return getattr(self.calling, "runId", None) == query.runId

    def notice_start_of(self, writer: DataStreamWriter) -> None:
        start = writer.start

        @functools.wraps(start)
        def noticed(*arguments: Any, **options: Any) -> StreamingQuery:
            self.started = query = start(*arguments, **options)
            if not self.has_had_a_batch(query):
                self.calling = None  # of the run before
            return query

        writer.start = noticed  # type: ignore[method-assign]

    # ------------------------------------------------------------------ a batch
    def pause(self, batch: MicroBatch) -> None:
        not_before = self._finished_at + self._min_pause
        while batch.active and not self._stopping and (left := not_before - self._clock.monotonic()) > 0:
            self._clock.sleep(min(left, 0.2))

    def admit(self, batch: MicroBatch) -> None:
        """Returns when the batch may begin; raises what counts as a clean stop if its query is being stopped."""
        self.calling, self.location, self._seen_through = batch.query, batch.location, False
        while self._stopping and batch.active:
            self._held_back = True
            self._clock.sleep(0.05)
        self._held_back = False
        if not batch.active:
            batch.raise_stopped()

    def finished(self) -> None:
        self._finished_at, self._seen_through = self._clock.monotonic(), True

    def cut_off(self) -> None:
        self._cut_off_at = self._clock.monotonic()

    def wait_for_workers(self) -> None:
        """Of a batch that was cut off."""
        self._clock.sleep(max(0, self._cut_off_at + _WORKER_GRACE_PERIOD - self._clock.monotonic()))

    # ------------------------------------------------------------------ a stop
    def hold(self) -> None:
        """No further batch begins until `stop` has ended."""
        self._stopping = True

    def stop(self, query: Query) -> None:
        self.hold()
        try:
            end, idle = self._clock.monotonic() + _BATCH_GRACE_PERIOD, 0
            while idle < _IDLE_LOOKS and self._clock.monotonic() < end:
                idle = 0 if self._is_busy(query) else idle + 1
                self._clock.sleep(0.02)
            query.stop()
        finally:
            self._stopping = False

    def _is_busy(self, query: Query) -> bool:
        """Whether a batch is under way that will come back, or be held back, here."""
        if not self.queries or self._held_back or not query.isActive:
            return False
        return bool(query.status["isTriggerActive"])
