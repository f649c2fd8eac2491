"""One micro-batch as Spark hands it to foreachBatch: who asks, which input, and running sinks over it."""

from __future__ import annotations

import inspect
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import pyarrow as pa

from coordinator import guarantee
from coordinator.decisions import BatchFacts
from coordinator.errors import CheckpointError
from sinks.base import TwoPhaseCommitSink
from sinks.task import ACK_SCHEMA, Ack, SinkTask, with_row_hash

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Sink = TwoPhaseCommitSink[Any]


class Query(Protocol):
    """A streaming query that can be stopped."""

    def stop(self) -> None:
        """Returns when it has stopped."""


class MicroBatch(Protocol):
    """What the protocol needs of a batch. `run_id` tells one start of the query from the next; `location` is the
    checkpointLocation."""

    facts: BatchFacts
    run_id: str
    location: str

    @property
    def query(self) -> Query: ...

    def schema(self, sink: Sink) -> pa.Schema: ...
    def partitions(self, sink: Sink) -> int: ...
    def run(self, tasks: Mapping[str, SinkTask]) -> dict[str, list[Ack]]:
        """Run each task over the batch, side by side; one ack per partition that ran, by sink name."""

    def cancel(self) -> None:
        """Make what `run` is doing fail soon. Called from another thread, again and again until it has."""

    def weaknesses(self) -> list[str]:
        """Why the source or the query's settings may lose or double rows; for the job's `Guarantee`."""

    @property
    def active(self) -> bool:
        """False once the query is being stopped."""

    def leave(self) -> NoReturn:
        """Leave the batch of a query that is being stopped unprocessed: raises what counts as a clean stop, so that the
        next start hands the batch over again."""

    def drain(self) -> None:
        """Compute the batch without writing it."""

    def same_rows(self, other: Any) -> bool:
        """Whether another call for this batch, in the same run, came with the same DataFrame."""


class DataFrameBatch(ABC):
    """What all sessions have in common: a sink is run over the batch's DataFrame by `mapInArrow`."""

    def __init__(self, df: DataFrame, *, shared: bool = False) -> None:
        """`shared`: several sinks write it, so it is computed once; a replay too, since that can change the layout."""
        self._df, self._shared = df, shared

    def schema(self, sink: Sink) -> pa.Schema:
        from pyspark.sql.pandas.types import to_arrow_schema

        zone = self._df.sparkSession.conf.get("spark.sql.session.timeZone")
        accepts_zone = "timezone" in inspect.signature(to_arrow_schema).parameters  # since PySpark 4.2
        options: Any = {"timezone": zone} if accepts_zone else {}
        return to_arrow_schema(self._written(sink).schema, **options)

    def run(self, tasks: Mapping[str, SinkTask]) -> dict[str, list[Ack]]:
        with self._tagged(), self._computed_once():
            if len(tasks) == 1:
                [(name, task)] = tasks.items()
                return {name: self._collect(task)}
            self.drain()  # else two executors may compute one partition, each for a sink of its own, with other rows
            return self._side_by_side({name: partial(self._collect, task) for name, task in tasks.items()})

    def drain(self) -> None:
        self._df.write.format("noop").mode("overwrite").save()

    def same_rows(self, other: DataFrameBatch) -> bool:
        return self._df.sameSemantics(other._df)

    @abstractmethod
    def _tagged(self) -> AbstractContextManager[None]:
        """Spark jobs that this thread begins, and threads that inherit from it, can be cancelled."""

    @abstractmethod
    def _thread(self, target: Callable[..., None], *args: Any) -> Thread:
        """A thread whose Spark jobs are cancelled with those of the thread that starts it."""

    def _computed_once(self) -> AbstractContextManager[None]:
        return _persisted(self._df) if self._shared else nullcontext()

    def _written(self, sink: Sink) -> DataFrame:
        return sink.transform(self._df) if sink.transform else self._df

    def _collect(self, task: SinkTask) -> list[Ack]:
        rows = with_row_hash(self._written(task.sink)).mapInArrow(task, ACK_SCHEMA).collect()
        return [Ack.from_json(row.ack) for row in rows]

    def _side_by_side(self, calls: Mapping[str, Callable[[], list[Ack]]]) -> dict[str, list[Ack]]:
        """Run the calls in threads of their own. Raises the first error after all have ended."""
        results: dict[str, list[Ack]] = {}
        errors: list[BaseException] = []

        def run(name: str, call: Callable[[], list[Ack]]) -> None:
            try:
                results[name] = call()
            except BaseException as error:
                errors.append(error)

        threads = [self._thread(run, *item) for item in calls.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


class SparkBatch(DataFrameBatch):
    """A batch of a classic (not Connect) streaming query.

    The query is found through the local properties that Spark's stream execution sets on its thread; offsets are read
    from its offset log in the checkpointLocation, where Spark has written them before it calls foreachBatch.
    """

    def __init__(self, df: DataFrame, batch_id: int, *, shared: bool = False) -> None:
        super().__init__(df, shared=shared)
        self._job_tag = f"checkpoint-{batch_id}-{uuid.uuid4()}"
        session = df.sparkSession
        query_id = session.sparkContext.getLocalProperty("sql.streaming.queryId")
        jvm: Any = session.sparkContext._jvm
        queries = session._jsparkSession.sharedState().activeStreamingQueries()
        execution = query_id and queries.get(jvm.java.util.UUID.fromString(query_id))
        if not query_id or not execution:
            raise CheckpointError(
                "the coordinator has to be called by a running streaming query: "
                "df.writeStream.foreachBatch(coordinator).option('checkpointLocation', …).start()"
            )
        self._execution = execution
        self.run_id: str = execution.runId().toString()
        self.location: str = execution.resolvedCheckpointRoot()
        path = jvm.org.apache.hadoop.fs.Path(f"{self.location}/offsets/{batch_id}")
        conf = session._jsparkSession.sessionState().newHadoopConf()
        try:
            with closing(path.getFileSystem(conf).open(path)) as stream:
                text = str(jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        except Exception:
            if self.active:
                raise
            self.leave()
        self.facts = facts_in(text, batch_id, query_id)

    @property
    def active(self) -> bool:
        return bool(self._execution.isActive())

    @property
    def query(self) -> Query:
        from pyspark.sql.streaming.query import StreamingQuery

        return StreamingQuery(self._execution)

    def leave(self) -> NoReturn:
        """Spark knows by its text that an error comes of a stop, with a regular expression that overflows the stack on
        a long one, such as a stack trace of the JVM (StreamExecution.isInterruptionException, PROXY_ERROR)."""
        raise CheckpointError(
            "py4j.protocol.Py4JJavaError: An error occurred while calling foreachBatch: "
            "java.lang.InterruptedException: the query is being stopped"
        ) from None

    def partitions(self, sink: Sink) -> int:
        with self._computed_once():
            fresh = self._written(sink).select("*")  # a plan made now, so that it sees whether the batch is persisted
            return int(fresh._jdf.queryExecution().toRdd().getNumPartitions())

    def cancel(self) -> None:
        self._df.sparkSession.sparkContext.cancelJobsWithTag(self._job_tag)

    def weaknesses(self) -> list[str]:
        sources = self._execution.sources()
        found = guarantee.of_checkpoint_location(self.location)
        for source in map(sources.apply, range(sources.size())):
            found += guarantee.of_source(source.getClass().getSimpleName(), source.toString())
        plans = self._execution.logicalPlan(), self._df._jdf.queryExecution().analyzed()
        deterministic = all(plan.deterministic() for plan in plans)
        return found + guarantee.of_shuffles(checked=self._shuffles_are_checked(), deterministic=deterministic)

    def _shuffles_are_checked(self) -> bool:
        try:
            return all(self._df.sparkSession.conf.get(key) == "true" for key in guarantee.CHECKED_SHUFFLES)
        except Exception:  # this Spark does not know them
            return False

    @contextmanager
    def _tagged(self) -> Iterator[None]:
        context = self._df.sparkSession.sparkContext
        context.addJobTag(self._job_tag)
        try:
            yield
        finally:
            context.removeJobTag(self._job_tag)

    def _thread(self, target: Callable[..., None], *args: Any) -> Thread:
        from pyspark import InheritableThread

        return InheritableThread(target=target, args=args)


def facts_in(log: str, batch_id: int, query_id: str) -> BatchFacts:
    """From a file of Spark's offset log: its version, the batch's time and settings, and the sources' offsets, a line
    each."""
    _, settings, *offsets = log.split("\n")
    return BatchFacts(batch_id, query_id, tuple(offsets), json.loads(settings or "{}").get("batchTimestampMs", 0))


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
