"""One micro-batch as Spark hands it to foreachBatch in a classic session.

This module runs the sinks over the rows of the batch.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, cached_property, partial
from threading import Thread
from typing import TYPE_CHECKING, NoReturn

import pyarrow as pa

from coordinator.errors import CheckpointError
from coordinator.protocol import guarantee
from coordinator.protocol.decisions import require_own_plan
from coordinator.protocol.ports import (
    Acks,
    BatchFacts,
    BatchLeft,
    MicroBatch,
    Query,
    Sink,
    TopicIds,
)
from coordinator.spark.checkpoint_location import facts_in, open_location
from coordinator.spark.internals import (
    INTERRUPTED,
    StreamExecution,
    arrow_schema,
    executed_plan,
    partition_count,
)
from coordinator.spark.shared_rows import SharedRows, may_share
from coordinator.task.row_hash import ROW_HASH, with_row_hash
from coordinator.task.task import Ack, OnePass, SinkTask, together
from sinks._util.column_names import map_in_arrow
from sinks._util.threads import side_by_side
from sinks.errors import SinkError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

MAX_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
MAX_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
UNLIMITED = "2147483647"
"""The limit that stands for no limit.

Only with this value does Spark not sum up the size of the record batch before each row, which takes
longer than everything else on the way into Python (`BatchedPythonArrowInput.writeSizedBatch`, 4.0
to 4.3).
"""
SMALL_BATCH = 16 * 2**20
"""The size in bytes up to which a record batch counts as small.

Spark's limit is lifted if a record batch of its largest number of rows is small. This is a quarter
of the limit, since rows may grow.
"""
FEW_ROWS = 10_000
"""The number of rows up to which the limit stays: lifting it would cost more than it saves."""
LARGEST_BATCH = 64 * 2**20
"""The size in bytes that record batches shall have at most: Spark's own limit, since 4.0."""
LARGE_ROW = LARGEST_BATCH / 10_000
"""The size in bytes from which Spark's largest number of rows makes a record batch too large."""

_DESCRIPTION = "spark.job.description"
_COLUMNAR = "spark.sql.inMemoryColumnarStorage.enableVectorizedReader"
_NO_ID = "A" * 22
"""The id that Kafka answers for a topic without an id."""


def filter_py4j_log() -> None:
    """Keep the stacks of this library's errors out of the logger `py4j.clientserver`.

    Py4J logs the stack of everything that leaves foreachBatch, even if that only tells Spark of a
    clean stop. Errors of this library stop the query with their text, which Spark logs and raises.
    The coordinator calls this with the first batch, and no import does it. Calling it again changes
    nothing.
    """
    logging.getLogger("py4j.clientserver").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], (CheckpointError, SinkError)))


class RowTransfer:
    """The transfer of one query's rows into Python.

    If the batch before had small rows, it lifts Spark's limit of bytes. If it had large ones, and
    Spark has no such limit, it lowers the limit of rows.
    """

    def __init__(self) -> None:
        self.execution: StreamExecution | None = None
        """The StreamExecution of the batch before, in a classic session."""
        self.row_size: float | None = None
        """The average size of a row of the batch before, in bytes, in the sink with the largest.

        None if that batch had few rows, all of them small, or failed.
        """

    @contextmanager
    def limited(self, session: SparkSession, may_lift: Callable[[], bool]) -> Iterator[None]:
        row_size = self.row_size
        self.row_size = None
        with ExitStack() as stack:
            if row_size is not None and session.version.startswith("3."):  # it limits rows only
                most = max(1, int(LARGEST_BATCH / row_size))
                if most < int(session.conf.get(MAX_RECORDS) or 0):
                    stack.enter_context(setting(session, MAX_RECORDS, str(most)))
            elif row_size is not None and _are_small(session, row_size) and may_lift():
                stack.enter_context(setting(session, MAX_BYTES, UNLIMITED))
            yield

    def note(self, acks: Sequence[Ack]) -> None:
        """Note the size of the rows that the batch's tasks have written."""
        written = Acks(acks)
        bytes = written.bytes
        rows = written.rows
        largest = max((bytes[sink] / count for sink, count in rows.items() if count), default=0.0)
        are_many = sum(rows.values()) > FEW_ROWS
        self.row_size = largest if are_many or largest > LARGE_ROW else None


def _are_small(session: SparkSession, row_size: float) -> bool:
    """Tell whether a record batch stays small without the limit.

    This is never so where users have set the limit.
    """
    records = int(session.conf.get(MAX_RECORDS) or 0)
    return (
        records > 0
        and row_size * records <= SMALL_BATCH
        and session.conf.get(MAX_BYTES, None) is None
    )


class SparkBatch(MicroBatch):
    """A batch of a streaming query in a classic session.

    A sink is run over its DataFrame by `map_in_arrow`. The query is found through the local
    properties that Spark's stream execution sets on its thread. Offsets are read from its offset
    log in the checkpointLocation, where Spark has written them before it calls foreachBatch.
    """

    row_hash = ROW_HASH
    rows: int | None = None

    def __init__(
        self,
        df: DataFrame,
        batch_id: int,
        transfer: RowTransfer,
        sinks: Mapping[str, Sink] | None = None,
    ) -> None:
        """Find the query that calls, and read the facts of the batch.

        `sinks` are all sinks with tasks of their own. In a replay of one sink, Spark's plan is that
        of all of them, too, because other columns or a cache can change the number of partitions.
        `transfer` is the same object for all batches of the run.
        """
        self._df = df
        self._transfer = transfer
        self._sinks = sinks or {}
        self._find_query(batch_id)

    def _find_query(self, batch_id: int) -> None:
        """Set `facts`, `run_id` and `location`."""
        execution = StreamExecution.calling(self._df.sparkSession, self._transfer.execution)
        if execution is None:
            raise CheckpointError(
                "the coordinator has to be called by a running streaming query: "
                "df.writeStream.foreachBatch(coordinator).option('checkpointLocation', …).start() "
                "[EO-CALL-OUTSIDE]"
            )
        if execution is not self._transfer.execution:
            self._transfer.execution = execution
            self._transfer.row_size = None
        self._execution = execution
        self._job_tag = f"checkpoint-{batch_id}-{uuid.uuid4()}"
        self.run_id = execution.run_id
        self.location = execution.location
        try:
            self.facts = self.facts_of(batch_id)
        except Exception:
            if self.active:
                raise
            self.raise_stopped()
        require_own_plan(self.facts, execution.planned_at, self.location)

    def facts_of(self, checkpoint_id: int) -> BatchFacts:
        log = b"".join(open_location(self.location).read(f"offsets/{checkpoint_id}")).decode()
        return facts_in(log, checkpoint_id, self._execution.query_id)

    def is_done(self, checkpoint_id: int) -> bool:
        return open_location(self.location).has(f"commits/{checkpoint_id}")

    @property
    def active(self) -> bool:
        return self._execution.active

    @property
    def query(self) -> Query:
        return self._execution.query

    def raise_stopped(self) -> NoReturn:
        raise BatchLeft(INTERRUPTED) from None

    def schema(self, sink: Sink) -> pa.Schema:
        return arrow_schema(self._rows_for(sink)) if sink.transform else self._schema

    @cached_property
    def _schema(self) -> pa.Schema:
        return arrow_schema(self._df)

    def partitions(self, sink: Sink) -> int:
        shared = self._shared_rows
        if shared and sink.name in shared.shares:
            with self._computed_once():
                return partition_count(shared.rows)
        with self._computed_once():
            return partition_count(self._rows_for(sink))

    # ------------------------------------------------------------------ its rows
    @cached_property
    def _shared_rows(self) -> SharedRows | None:
        """Return what several sinks get in one pass; None if no two of them can share."""
        sharing = {name: sink for name, sink in self._sinks.items() if may_share(sink)}
        return SharedRows.of(self._df, sharing) if len(sharing) > 1 else None

    def run(self, tasks: Mapping[str, SinkTask], ended: Callable[[str], None]) -> list[Ack]:
        with self._tagged(f"pre-commit {', '.join(tasks)}"), self._computed_once():
            if any(task.replay and task.replay.spooled for task in tasks.values()):
                alone = [OnePass((task,)) for task in tasks.values()]
                return self._side_by_side(
                    [partial(_collect, self._df, one, ended) for one in alone]
                )
            # This fills the cache. Otherwise two executors may compute a partition, each for
            # another sink, and get different rows.
            if self._is_read_again:
                self.rows = self._df.count()
            with self._transfer.limited(
                self._df.sparkSession, partial(self._may_lift_limit, tasks)
            ):
                acks = self._side_by_side(
                    [partial(_collect, rows, task, ended) for rows, task in self._passes(tasks)]
                )
            self._transfer.note(acks)
            if self.rows is None:
                self.rows = _rows_read(tasks.values(), acks)
            return acks

    def _passes(self, tasks: Mapping[str, SinkTask]) -> Iterator[tuple[DataFrame, OnePass]]:
        """Yield the Spark jobs of the tasks: the DataFrame of each, and what its tasks do."""
        shared = self._shared_rows
        shares = shared.shares if shared else {}
        if shared:
            for group in together(task for name, task in tasks.items() if name in shares):
                own = tuple(shares[task.sink.name] for task in group)
                yield shared.rows, OnePass(group, own)
        for name, task in tasks.items():
            if name not in shares:
                yield with_row_hash(self._rows_for(task.sink)), OnePass((task,))

    def drain(self) -> None:
        self._df.write.format("noop").mode("overwrite").save()

    def same_rows(self, other: SparkBatch) -> bool:
        return self._df.sameSemantics(other._df)

    def _rows_for(self, sink: Sink) -> DataFrame:
        return sink.transform(self._df) if sink.transform else self._df

    @property
    def _is_read_again(self) -> bool:
        """Tell whether several Spark jobs read the batch when all sinks write it."""
        sharing = len(self._shared_rows.shares) if self._shared_rows else 0
        return len(self._sinks) - sharing + bool(sharing) > 1

    def _computed_once(self) -> AbstractContextManager[None]:
        return _persisted(self._df) if self._is_read_again else nullcontext()

    def _may_lift_limit(self, tasks: Mapping[str, SinkTask]) -> bool:
        """Tell whether only the sinks' tasks get rows in record batches in these jobs.

        The same limit would hold for the user's Python functions (ArrowEvalPython, MapInPandas,
        FlatMapGroupsInPandas, TransformWithStateInPySpark, …).
        """
        if self._execution.runs_python is None:
            plans = [self._execution.executed_plan]
            plans += [executed_plan(self._rows_for(task.sink)) for task in tasks.values()]
            self._execution.runs_python = any(runs_python(plan) for plan in plans)
        return not self._execution.runs_python

    def _side_by_side(self, calls: Sequence[Callable[[], list[Ack]]]) -> list[Ack]:
        return [
            ack
            for acks in side_by_side(lambda call: call(), calls, len(calls), self._start)
            for ack in acks
        ]

    def _start(self, work: Callable[[], None]) -> Thread:
        """Start a thread whose Spark jobs are canceled with those of the thread that starts it."""
        from pyspark import InheritableThread

        thread: Thread = InheritableThread(target=work, daemon=True)
        thread.start()
        return thread

    @contextmanager
    def _tagged(self, doing: str) -> Iterator[None]:
        """Tag the Spark jobs that this thread begins in the block, so that `cancel` reaches them.

        `doing` is what Spark's UI shows of them.
        """
        context = self._df.sparkSession.sparkContext
        of_batch = context.getLocalProperty(_DESCRIPTION) or ""
        context.addJobTag(self._job_tag)
        context.setLocalProperty(
            _DESCRIPTION, f"{of_batch}<br/>checkpoint {self.facts.checkpoint_id}: {doing}"
        )
        try:
            yield
        finally:
            context.setLocalProperty(_DESCRIPTION, of_batch)
            context.removeJobTag(self._job_tag)

    def cancel(self) -> None:
        self._df.sparkSession.sparkContext.cancelJobsWithTag(self._job_tag)

    # ------------------------------------------------------------------ its source
    def weaknesses(self, *, recomputed: bool) -> list[str]:
        weaknesses = guarantee.checkpoint_location_weaknesses(self.location)
        for source in self._execution.sources:
            weaknesses += guarantee.source_weaknesses(*source)
        by_order = self._execution.order_dependent(self._df)
        weaknesses += guarantee.order_weaknesses(by_order) if recomputed else []
        deterministic = self._execution.is_deterministic(self._df) and not by_order
        return weaknesses + guarantee.shuffle_weaknesses(
            checked=self._shuffles_are_checked(), deterministic=deterministic
        )

    def _shuffles_are_checked(self) -> bool:
        try:
            return all(
                self._df.sparkSession.conf.get(key) == "true" for key in guarantee.CHECKED_SHUFFLES
            )
        except Exception:  # this Spark has no such settings
            return False

    def topic_ids(self) -> TopicIds:
        kinds = [kind for kind, _ in self._execution.sources]
        sources = zip(kinds, self.facts.offsets, strict=True)
        return [
            self._ids(at, offsets) if kind.startswith("Kafka") else {}
            for at, (kind, offsets) in enumerate(sources)
        ]

    def _ids(self, source: int, offsets: str) -> dict[str, str]:
        # In Spark's second format, since 4.2, the source's name stands before the JSON.
        _, brace, topics = offsets.partition("{")
        ids = self._execution.topic_ids(source, json.loads(brace + topics or "{}"))
        if _NO_ID in ids.values():
            raise CheckpointError("Kafka before 2.8 has no such ids")
        return ids


def runs_python(plan: str) -> bool:
    """Tell whether a physical plan hands rows to Python in record batches."""
    return re.search(r"Arrow|Pandas|PySpark", plan) is not None


def _collect(rows: DataFrame, one_pass: OnePass, ended: Callable[[str], None]) -> list[Ack]:
    replay = one_pass.tasks[0].replay
    if replay and replay.spooled:
        subtasks = 1 + max(replay.lost)
        rows = rows.sparkSession.range(0, subtasks, 1, subtasks)
    elif replay and replay.single_partition:
        rows = rows.coalesce(1)
    acks = [Ack.from_json(row.ack) for row in map_in_arrow(rows, one_pass, _ack_schema()).collect()]
    for task in one_pass.tasks:
        ended(task.sink.name)
    return acks


def _rows_read(tasks: Iterable[SinkTask], acks: Sequence[Ack]) -> int | None:
    """Return the number of the batch's rows, by the acks of a sink that got all of them.

    Returns None if there is no such sink.
    """
    for task in tasks:
        if task.sink.transform is None and task.replay is None:
            letters = task.sink.dead_letters
            names = {task.sink.name} | ({letters.name} if letters else set())
            return sum(ack.fingerprint.rows for ack in acks if ack.sink in names)
    return None


@cache
def _ack_schema() -> StructType:
    """Return the schema of acks.

    It is made once, because a schema as text would cost three calls into the JVM each time.
    """
    from pyspark.sql.types import StringType, StructType

    return StructType().add("ack", StringType())


@contextmanager
def _persisted(df: DataFrame) -> Iterator[None]:
    """Cache `df` in the block.

    It is read from the cache as rows, because Spark 4.2.0 was reported to hang where a Python UDF
    reads columns from there.
    """
    with setting(df.sparkSession, _COLUMNAR, "false"):
        # The user has cached it, and may want to read it afterwards.
        if df.storageLevel.useMemory or df.storageLevel.useDisk:
            yield
            return
        df.persist()
        try:
            yield
        finally:
            df.unpersist()


@contextmanager
def setting(session: SparkSession, key: str, value: str) -> Iterator[None]:
    """Set `value` in the block, and restore the earlier value after it.

    The session keeps the earlier value too, because with Spark Connect (up to 4.2) the session is
    the user's own, and outlives a worker that is killed in the block.
    """
    conf = session.conf
    saved = f"spark.coordinator.before.{key}"
    before = conf.get(saved, None)
    if before is None:
        before = conf.get(key, None) or ""
        conf.set(saved, before)
    conf.set(key, value)
    try:
        yield
    finally:
        if before:
            conf.set(key, before)
        else:
            conf.unset(key)
        conf.unset(saved)
