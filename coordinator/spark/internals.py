"""What is used of Spark without being its public API, all of it here, with the versions it was read
in.

Where Spark has changed it, `UnsupportedSpark` says what, in place of an AttributeError.
`tests/spark/test_internals.py` asks each version of `make test-matrix` for every part, and sees
that no other module uses such a part: but for `sinks.testing`, which sends jobs to processes by
`pyspark.cloudpickle`, a copy of the package of that name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from coordinator.errors import UnsupportedSpark

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

READ_IN = "4.0.5, 4.1.4, 4.2.0, 4.2.1 and 4.3.0"
"""Unless a function says otherwise."""

P = ParamSpec("P")
T = TypeVar("T")


def _internal(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A function that uses `what` of Spark."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if not _says_gone(error):
                    raise
                from pyspark import __version__

                without_stack = " ".join(str(error).partition("\n\tat ")[0].split())
                raise UnsupportedSpark(
                    f"Spark {__version__} is not supported here: {what} is gone or is another one "
                    f"there ({without_stack}). It was read in Spark {READ_IN}; use one of these, "
                    "or a newer release of this library."
                ) from error

        return call

    return decorate


def _says_gone(error: Exception) -> bool:
    """Python, or Py4J for the JVM, knows no such name, or no such parameter.

    A package of Py4J's is whatever is no class: calling it is a TypeError.
    """
    from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
    from pyspark.errors import PySparkException

    if isinstance(error, (Py4JJavaError, Py4JNetworkError, PySparkException)):
        return False
    if isinstance(error, Py4JError):
        return "does not exist" in str(error)
    return isinstance(error, (AttributeError, ImportError, TypeError))


# --------------------------------------------------------------------- the JVM of a classic session
@_internal("SparkContext._gateway")
def gateway(session: SparkSession) -> Any:
    """Py4J's gateway into the JVM.

    Raises PySparkException if the session has none, as with Spark Connect.
    """
    java = session.sparkContext._gateway
    if java is None:
        raise AttributeError("it is None")
    return java


@_internal("SparkSession._jsparkSession.sessionState().newHadoopConf()")
def hadoop_conf(session: SparkSession) -> Any:
    """Hadoop's Configuration with the settings of the session."""
    return session._jsparkSession.sessionState().newHadoopConf()


# --------------------------------------------------------- the streaming query of a classic session
QUERY_ID = "sql.streaming.queryId"
"""A local property that StreamExecution sets on the thread that calls foreachBatch."""


class StreamExecution:
    """Spark's StreamExecution, which calls foreachBatch."""

    def __init__(self, execution: Any, query_id: str = "") -> None:
        self._execution = execution
        self.query_id = query_id
        self.runs_python: bool | None = None
        """Whether the user's Python functions run in its jobs, as `SparkBatch` notes it."""

    @classmethod
    @_internal("SparkSession._jsparkSession.sharedState().activeStreamingQueries()")
    def calling(
        cls, session: SparkSession, last: StreamExecution | None = None
    ) -> StreamExecution | None:
        """The one that calls on this thread; None if there is none.

        `last`: the one of the batch before, which is answered again as long as it runs: a query has
        one run at a time.
        """
        query_id = session.sparkContext.getLocalProperty(QUERY_ID)
        if not query_id:
            return None
        if last and last.query_id == query_id and last.active:
            return last
        queries = session._jsparkSession.sharedState().activeStreamingQueries()
        execution = queries.get(gateway(session).jvm.java.util.UUID.fromString(query_id))
        return cls(execution, query_id) if execution else None

    @cached_property
    @_internal("StreamExecution.runId()")
    def run_id(self) -> str:
        return str(self._execution.runId().toString())

    @cached_property
    @_internal("StreamExecution.resolvedCheckpointRoot()")
    def location(self) -> str:
        return str(self._execution.resolvedCheckpointRoot())

    @property
    @_internal("StreamExecution.isActive()")
    def active(self) -> bool:
        return bool(self._execution.isActive())

    @property
    @_internal("pyspark.sql.streaming.query.StreamingQuery(jsq)")
    def query(self) -> StreamingQuery:
        from pyspark.sql.streaming.query import StreamingQuery

        return StreamingQuery(self._execution)

    @property
    @_internal("StreamExecution.lastExecution().executedPlan()")
    def executed_plan(self) -> str:
        """The physical plan of the batch under way, as foreachBatch gets it."""
        return str(self._execution.lastExecution().executedPlan().toString())

    @property
    @_internal("StreamExecution.lastExecution().offsetSeqMetadata().batchTimestampMs()")
    def planned_at(self) -> int:
        """When this driver has planned the batch under way, in milliseconds since the epoch."""
        return int(self._execution.lastExecution().offsetSeqMetadata().batchTimestampMs())

    @cached_property
    @_internal("StreamExecution.sources()")
    def sources(self) -> list[tuple[str, str]]:
        """The class of each, without its package, and what it says of itself."""
        sources = self._execution.sources()
        streams = [sources.apply(i) for i in range(sources.size())]
        return [
            (str(source.getClass().getSimpleName()), str(source.toString())) for source in streams
        ]

    @_internal("KafkaMicroBatchStream.kafkaOffsetReader().admin()")
    def topic_ids(self, source: int, topics: Collection[str]) -> dict[str, str]:
        """As the brokers of a Kafka source, by its place among all, tell them.

        Raises Py4JJavaError as Kafka does, as late as for any question of Spark's
        (`kafka.default.api.timeout.ms`). Read in 4.2.0.
        """
        admin = self._execution.sources().apply(source).kafkaOffsetReader().admin()
        descriptions = admin.describeTopics(list(topics)).allTopicNames().get()
        return {topic: str(descriptions[topic].topicId().toString()) for topic in topics}

    @_internal(
        "StreamExecution.logicalPlan() and Dataset.queryExecution().analyzed(), with "
        "deterministic()"
    )
    def is_deterministic(self, df: DataFrame) -> bool:
        """The query's own plan, and what foreachBatch made of the batch: `df`."""
        plans = self._execution.logicalPlan(), df._jdf.queryExecution().analyzed()
        return all(bool(plan.deterministic()) for plan in plans)

    @_internal(
        "LogicalPlan.children(), nodeName() and output(), Deduplicate.keys(), "
        "Aggregate.aggregateExpressions()"
    )
    def order_dependent(self, df: DataFrame) -> list[str]:
        """What takes the rows that come first, in the query's own plan and in what foreachBatch
        made of the batch."""
        plans = self._execution.logicalPlan(), df._jdf.queryExecution().analyzed()
        nodes = [node for plan in plans for node in _nodes(plan)]
        functions = set()
        for node in nodes:
            name = str(node.nodeName())
            if name.startswith("Deduplicate") and node.keys().size() < node.child().output().size():
                functions.add("dropDuplicates on some of the columns")
            elif name == "Aggregate":
                text = str(node.aggregateExpressions().mkString(", "))
                functions |= {f"{function}()" for function in _BY_ORDER.findall(text)}
        return sorted(functions)


_BY_ORDER = re.compile(r"(?<![\w.])(first|last|any_value|collect_list|collect_set)\(")


def _nodes(plan: Any) -> Iterator[Any]:
    """A logical plan's, from the top."""
    yield plan
    children = plan.children()
    for i in range(children.size()):
        yield from _nodes(children.apply(i))


INTERRUPTED = (
    "py4j.protocol.Py4JJavaError: An error occurred while calling foreachBatch: "
    "java.lang.InterruptedException: the query is being stopped"
)
"""Spark knows by its text that an error of foreachBatch comes of a stop, with a regular expression
that overflows the stack on a long one, such as a stack trace of the JVM
(StreamExecution.isInterruptionException, PROXY_ERROR)."""


# ---------------------------------------------------------------------- Python packages
@_internal(
    "pyspark.sql.pandas.utils.require_minimum_pandas_version, or require_minimum_pyarrow_version"
)
def minimum_versions() -> dict[str, Callable[[], None]]:
    """By package, what raises ImportError where it is missing, or too old for this Spark."""
    from pyspark.sql.pandas import utils

    return {
        "pandas": utils.require_minimum_pandas_version,
        "pyarrow": utils.require_minimum_pyarrow_version,
    }


@_internal("pyspark.cloudpickle")
def pickler() -> Callable[[object], bytes]:
    """What Spark sends functions to its Python workers by."""
    from pyspark import cloudpickle

    return cloudpickle.dumps


# ---------------------------------------------------------------------- DataFrames
@_internal("DataFrame._jdf.queryExecution().toRdd()")
def partition_count(df: DataFrame) -> int:
    """Of the plan that is made now, so that it sees what is persisted. Classic sessions only."""
    return int(df.select("*")._jdf.queryExecution().toRdd().getNumPartitions())


@_internal("DataFrame._jdf.queryExecution().executedPlan()")
def executed_plan(df: DataFrame) -> str:
    """As it would run now. Classic sessions only."""
    return str(df._jdf.queryExecution().executedPlan().toString())


@_internal("pyspark.sql.pandas.types.to_arrow_schema")
def arrow_schema(df: DataFrame) -> pa.Schema:
    """Of the record batches that a Python worker gets of `df`."""
    from pyspark.sql.pandas.types import to_arrow_schema

    options: Any = {}
    # read in 4.2.0, 4.2.1 and 4.3.0
    if "timezone" in inspect.signature(to_arrow_schema).parameters:
        options["timezone"] = df.sparkSession.conf.get("spark.sql.session.timeZone")
    return to_arrow_schema(df.schema, **options)
