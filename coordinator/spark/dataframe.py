"""Running sinks over the DataFrame of a micro-batch, in any kind of session."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from threading import Thread
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from coordinator.protocol.batch import Sink, TopicIds
from coordinator.spark.arrow import RowTransfer, setting
from coordinator.spark.internals import arrow_schema
from sinks.errors import LargeRow
from sinks.row_hash import ROW_HASH, with_row_hash
from sinks.task import Ack, SinkTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


class DataFrameBatch(ABC):
    """What all sessions have in common: a sink is run over the batch's DataFrame by `mapInArrow`."""

    row_hash = ROW_HASH

    def __init__(self, df: DataFrame, transfer: RowTransfer, *, shared: bool = False) -> None:
        """`shared`: several sinks write it, so it is computed once; a replay too, since that can change the layout.
        `transfer`: of all batches of the run."""
        self._df, self._transfer, self._shared = df, transfer, shared
        self.rows: int | None = None

    def schema(self, sink: Sink) -> pa.Schema:
        return arrow_schema(self._written(sink))

    def run(self, tasks: Mapping[str, SinkTask], ended: Callable[[str], None]) -> list[Ack]:
        with self._tagged(f"pre-commit {', '.join(tasks)}"), self._computed_once():
            if any(task.replay and task.replay.spooled for task in tasks.values()):
                return self._side_by_side([partial(_collect, self._df, task, ended) for task in tasks.values()])
            if len(tasks) > 1:  # else two executors may compute a partition, each for a sink, with other rows
                self.rows = self._df.count()
            hashed = {name: with_row_hash(self._written(task.sink)) for name, task in tasks.items()}
            first = all(task.exactly_once and not task.replay for task in tasks.values())  # may refuse large rows
            with self._transfer.frames(hashed, first and self._may_lift_limit(tasks)) as frames:
                calls = [partial(_collect, frames[name], task, ended) for name, task in tasks.items()]
                acks = self._side_by_side(calls)
            self._transfer.limited_by_spark |= any(isinstance(ack.error, LargeRow) for ack in acks)
            self._transfer.rows_before = sum(ack.fingerprint.rows for ack in acks)
            if len(tasks) == 1 and not any(task.sink.transform or task.replay for task in tasks.values()):
                self.rows = self._transfer.rows_before
            return acks

    def topic_ids(self) -> TopicIds:
        return ()

    def drain(self) -> None:
        self._df.write.format("noop").mode("overwrite").save()

    def same_rows(self, other: DataFrameBatch) -> bool:
        return self._df.sameSemantics(other._df)

    @abstractmethod
    def _tagged(self, doing: str) -> AbstractContextManager[None]:
        """Spark jobs that this thread begins, and threads that inherit from it, can be cancelled. `doing`: for
        Spark's UI, where that shows it."""

    @abstractmethod
    def _thread(self, target: Callable[..., None], *args: Any) -> Thread:
        """A thread whose Spark jobs are cancelled with those of the thread that starts it."""

    @property
    @abstractmethod
    def active(self) -> bool: ...

    @abstractmethod
    def _may_lift_limit(self, tasks: Mapping[str, SinkTask]) -> bool:
        """Whether nobody else's rows go into Python in this session, or in these jobs."""

    def _computed_once(self) -> AbstractContextManager[None]:
        return _cached(self._df) if self._shared else nullcontext()

    def _written(self, sink: Sink) -> DataFrame:
        return sink.transform(self._df) if sink.transform else self._df

    def _side_by_side(self, calls: Sequence[Callable[[], list[Ack]]]) -> list[Ack]:
        """Run several calls in threads of their own. Raises the first error after all have ended."""
        if len(calls) == 1:
            return calls[0]()
        acks: list[Ack] = []
        errors: list[BaseException] = []

        def run(call: Callable[[], list[Ack]]) -> None:
            try:
                acks.extend(call())
            except BaseException as error:
                errors.append(error)

        threads = [self._thread(run, call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return acks


def _collect(hashed: DataFrame, task: SinkTask, ended: Callable[[str], None]) -> list[Ack]:
    rows, replay = hashed, task.replay
    if replay and replay.spooled:
        subtasks = 1 + max(replay.lost)
        rows = hashed.sparkSession.range(0, subtasks, 1, subtasks)
    elif replay and replay.whole:
        rows = hashed.coalesce(1)
    acks = [Ack.from_json(row.ack) for row in rows.mapInArrow(task, _ack_schema()).collect()]
    ended(task.sink.name)
    return acks


@cache
def _ack_schema() -> StructType:
    """A text in its place is three questions to the JVM."""
    from pyspark.sql.types import StringType, StructType

    return StructType().add("ack", StringType())


_COLUMNAR = "spark.sql.inMemoryColumnarStorage.enableVectorizedReader"


@contextmanager
def _cached(df: DataFrame) -> Iterator[None]:
    """Computed once, and read from the cache as rows: Spark 4.2.0 was reported to hang where a Python UDF reads columns
    from there."""
    with setting(df.sparkSession, _COLUMNAR, "false"), _persisted(df):
        yield


@contextmanager
def _persisted(df: DataFrame) -> Iterator[None]:
    if df.storageLevel.useMemory or df.storageLevel.useDisk:  # by the user, who may want to read it afterwards
        yield
        return
    df.persist()
    try:
        yield
    finally:
        df.unpersist()
