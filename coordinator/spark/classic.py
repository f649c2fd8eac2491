"""One micro-batch as Spark hands it to foreachBatch in a classic session, local or on a cluster."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any, NoReturn

from coordinator import guarantee
from coordinator.errors import CheckpointError
from coordinator.protocol.batch import Query, Sink, TopicIds
from coordinator.spark import arrow
from coordinator.spark.arrow import RowTransfer
from coordinator.spark.checkpoint_location import facts_in, open_location
from coordinator.spark.dataframe import DataFrameBatch
from coordinator.spark.internals import INTERRUPTED, StreamExecution, executed_plan, partition_count
from sinks.errors import SinkError
from sinks.task import SinkTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_DESCRIPTION = "spark.job.description"
_NO_OFFSET = "-"
"""Of a source that has none yet, in Spark's offset log."""
_NO_ID = "A" * 22
"""Kafka's text for zeros."""


def _is_news(record: logging.LogRecord) -> bool:
    """Py4J logs the stack of whatever leaves foreachBatch, also where it only tells Spark of a clean stop. Errors of
    ours stop the query with their text, which Spark logs and raises."""
    return not (record.exc_info and isinstance(record.exc_info[1], (CheckpointError, SinkError)))


logging.getLogger("py4j.clientserver").addFilter(_is_news)


class SparkBatch(DataFrameBatch):
    """A batch of a classic (not Connect) streaming query.

    The query is found through the local properties that Spark's stream execution sets on its thread; offsets are read
    from its offset log in the checkpointLocation, where Spark has written them before it calls foreachBatch.
    """

    def __init__(self, df: DataFrame, batch_id: int, transfer: RowTransfer, *, shared: bool = False) -> None:
        super().__init__(df, transfer, shared=shared)
        self._job_tag = f"checkpoint-{batch_id}-{uuid.uuid4()}"
        execution = StreamExecution.calling(df.sparkSession, transfer.execution)
        if execution is None:
            raise CheckpointError(
                "the coordinator has to be called by a running streaming query: "
                "df.writeStream.foreachBatch(coordinator).option('checkpointLocation', …).start()"
            )
        self._execution = transfer.execution = execution
        self.run_id: str = self._execution.run_id
        self.location: str = self._execution.location
        try:
            log = b"".join(open_location(self.location).read(f"offsets/{batch_id}")).decode()
        except Exception:
            if self.active:
                raise
            self.raise_stopped()
        self.facts = facts_in(log, batch_id, execution.query_id)

    @property
    def active(self) -> bool:
        return self._execution.active

    @property
    def query(self) -> Query:
        return self._execution.query

    def raise_stopped(self) -> NoReturn:
        raise CheckpointError(INTERRUPTED) from None

    def partitions(self, sink: Sink) -> int:
        with self._computed_once():
            return partition_count(self._written(sink))

    def cancel(self) -> None:
        self._df.sparkSession.sparkContext.cancelJobsWithTag(self._job_tag)

    def weaknesses(self, *, recomputed: bool) -> list[str]:
        weaknesses = guarantee.of_checkpoint_location(self.location)
        for source in self._execution.sources:
            weaknesses += guarantee.of_source(*source)
        deterministic = self._execution.is_deterministic(self._df)
        weaknesses += guarantee.of_order(self._execution.order_dependent(self._df)) if recomputed else []
        return weaknesses + guarantee.of_shuffles(checked=self._shuffles_are_checked(), deterministic=deterministic)

    def topic_ids(self) -> TopicIds:
        kinds = [kind for kind, _ in self._execution.sources]
        sources = zip(kinds, self.facts.offsets, strict=True)
        return [
            self._ids(at, offsets) if kind.startswith("Kafka") else {} for at, (kind, offsets) in enumerate(sources)
        ]

    def _ids(self, source: int, offsets: str) -> dict[str, str]:
        topics = json.loads(offsets) if offsets != _NO_OFFSET else {}
        ids = self._execution.topic_ids(source, topics)
        if _NO_ID in ids.values():
            raise CheckpointError("Kafka before 2.8 has no such ids")
        return ids

    def _shuffles_are_checked(self) -> bool:
        try:
            return all(self._df.sparkSession.conf.get(key) == "true" for key in guarantee.CHECKED_SHUFFLES)
        except Exception:  # this Spark does not know them
            return False

    def _may_lift_limit(self, tasks: Mapping[str, SinkTask]) -> bool:
        if self._execution.runs_python is None:
            plans = [self._execution.executed_plan]
            plans += [executed_plan(self._written(task.sink)) for task in tasks.values() if task.sink.transform]
            self._execution.runs_python = any(map(arrow.runs_python, plans))
        return not self._execution.runs_python

    @contextmanager
    def _tagged(self, doing: str) -> Iterator[None]:
        context = self._df.sparkSession.sparkContext
        of_batch = context.getLocalProperty(_DESCRIPTION) or ""
        context.addJobTag(self._job_tag)
        context.setLocalProperty(_DESCRIPTION, f"{of_batch}<br/>checkpoint {self.facts.checkpoint_id}: {doing}")
        try:
            yield
        finally:
            context.setLocalProperty(_DESCRIPTION, of_batch)
            context.removeJobTag(self._job_tag)

    def _thread(self, target: Callable[..., None], *args: Any) -> Thread:
        from pyspark import InheritableThread

        return InheritableThread(target=target, args=args)
