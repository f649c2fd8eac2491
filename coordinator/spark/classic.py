"""One micro-batch as Spark hands it to foreachBatch in a classic session, local or on a cluster."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any, NoReturn

from coordinator import guarantee
from coordinator.errors import CheckpointError
from coordinator.protocol.batch import Query, Sink
from coordinator.spark.dataframe import DataFrameBatch
from coordinator.spark.location import facts_in
from sinks.errors import SinkError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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
            self.raise_stopped()
        self.facts = facts_in(text, batch_id, query_id)

    @property
    def active(self) -> bool:
        return bool(self._execution.isActive())

    @property
    def query(self) -> Query:
        from pyspark.sql.streaming.query import StreamingQuery

        return StreamingQuery(self._execution)

    def raise_stopped(self) -> NoReturn:
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
