"""Small batches: their rows come to the driver and are written there by one participant, without a Python worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from threading import Thread
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from coordinator.spark.arrow import bounded, can_be_bounded
from coordinator.spark.internals import collect_as_arrow, first_rows
from sinks.task import ON_DRIVER, Ack, SinkTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BATCH_BYTES = 16 * 2**20
"""Of the values that the driver fetches of a partition."""

_LOOK = 0.5
"""Seconds between two looks whether the query is being stopped."""


def rows_of(hashed: DataFrame, most: int) -> list[pa.RecordBatch] | None:
    """All rows. None if there are more than `most`, or if one is larger, or may be, than its share of `BATCH_BYTES`: of
    each partition at most one row more is computed and fetched, and no contents of large ones."""
    share = BATCH_BYTES // (most + 1)
    if not can_be_bounded(hashed, share):
        return None
    batches = collect_as_arrow(first_rows(bounded(hashed, share), most + 1))
    if sum(batch.num_rows for batch in batches) > most or any(batch.columns[-1].null_count for batch in batches):
        return None
    return batches


class Cancelled(Exception):
    """The rest of a batch is not to be written."""


class OneParticipant:
    """Writes a batch in a thread of its own, which is left alone when the checkpoint is cancelled or its query stopped,
    as Spark leaves a task: then it rolls back, or, if it has pre-committed, is swept."""

    def __init__(self, task: SinkTask, batches: Sequence[pa.RecordBatch]) -> None:
        self._task, self._batches = task, batches
        self._cancelled: Future[None] = Future()

    def cancel(self) -> None:
        if not self._cancelled.done():
            self._cancelled.set_result(None)

    def acks(self, is_active: Callable[[], bool]) -> list[Ack]:
        """Raises `Cancelled`, and what the sink does."""
        acked: Future[list[Ack]] = Future()
        Thread(target=self._write, args=[acked], name="checkpoint-on-driver", daemon=True).start()
        either: list[Future[Any]] = [acked, self._cancelled]
        while not wait(either, timeout=_LOOK, return_when=FIRST_COMPLETED).done:
            if not is_active():
                self.cancel()
        if acked.done():
            return acked.result()
        raise Cancelled(f"checkpoint {self._task.checkpoint_id} was cancelled while the driver wrote it")

    def _write(self, acked: Future[list[Ack]]) -> None:
        try:
            acked.set_result(self._task.run(self._until_cancelled(), 0, ON_DRIVER, opens=False))
        except BaseException as error:
            acked.set_exception(error)

    def _until_cancelled(self) -> Iterator[pa.RecordBatch]:
        yield from self._batches
        if self._cancelled.done():
            raise Cancelled
