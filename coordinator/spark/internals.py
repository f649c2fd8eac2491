"""All parts of Spark that are used without being its public API.

`READ_IN` has the versions of Spark in which they were read. If Spark has changed a part,
`UnsupportedSpark` says which one, in place of an AttributeError. `tests/spark/test_internals.py`
asks each version of `make test-matrix` for every part, and checks that no other module uses such a
part. The exception is `sinks.testing`, which sends jobs to processes by `pyspark.cloudpickle`, a
copy of the package of that name.
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

READ_IN = "3.5.9, 4.0.5, 4.1.4, 4.2.0, 4.2.1 and 4.3.0"
"""The versions in which all parts were read, unless a function says otherwise."""

P = ParamSpec("P")
T = TypeVar("T")


def _internal(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function that uses `what` of Spark."""

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
    """Tell whether Python, or Py4J for the JVM, knows no such name, or no such parameter.

    Py4J treats every name that is no class as a package, and calling a package is a TypeError.
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
    """Return Py4J's gateway into the JVM.

    Raises PySparkException if the session has no gateway, as with Spark Connect.
    """
    java = session.sparkContext._gateway
    if java is None:
        raise AttributeError("it is None")
    return java


@_internal("SparkSession._jsparkSession.sessionState().newHadoopConf()")
def hadoop_conf(session: SparkSession) -> Any:
    """Return Hadoop's Configuration with the settings of the session."""
    return session._jsparkSession.sessionState().newHadoopConf()


# --------------------------------------------------------- the streaming query of a classic session
QUERY_ID = "sql.streaming.queryId"
"""The local property that StreamExecution sets on the thread that calls foreachBatch."""


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
        """Return the StreamExecution that calls on this thread; None if there is none.

        `last` is that of the batch before. It is returned again as long as it runs, because a query
        has one run at a time.
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
        """Return the physical plan of the current batch, as foreachBatch gets it."""
        return str(self._execution.lastExecution().executedPlan().toString())

    @property
    @_internal("StreamExecution.lastExecution().offsetSeqMetadata().batchTimestampMs()")
    def planned_at(self) -> int:
        """Return when this driver planned the current batch, in milliseconds since the epoch."""
        return int(self._execution.lastExecution().offsetSeqMetadata().batchTimestampMs())

    @cached_property
    @_internal("StreamExecution.sources()")
    def sources(self) -> list[tuple[str, str]]:
        """Return the class of each source, without its package, and its own description."""
        sources = self._execution.sources()
        streams = [sources.apply(i) for i in range(sources.size())]
        return [
            (str(source.getClass().getSimpleName()), str(source.toString())) for source in streams
        ]

    @_internal("KafkaMicroBatchStream.kafkaOffsetReader().admin()")
    def topic_ids(self, source: int, topics: Collection[str]) -> dict[str, str]:
        """Ask the brokers of a Kafka source for the ids of topics.

        `source` is its place among all sources. Raises Py4JJavaError as Kafka does, as late as for
        any question of Spark's (`kafka.default.api.timeout.ms`). Read in 4.2.0.
        """
        admin = self._execution.sources().apply(source).kafkaOffsetReader().admin()
        descriptions = admin.describeTopics(list(topics)).allTopicNames().get()
        return {topic: str(descriptions[topic].topicId().toString()) for topic in topics}

    @_internal(
        "StreamExecution.logicalPlan() and Dataset.queryExecution().analyzed(), with "
        "deterministic()"
    )
    def is_deterministic(self, df: DataFrame) -> bool:
        """Tell whether the plans are deterministic.

        These are the query's own plan, and that of `df`, which foreachBatch made of the batch.
        """
        plans = self._execution.logicalPlan(), df._jdf.queryExecution().analyzed()
        return all(bool(plan.deterministic()) for plan in plans)

    @_internal(
        "LogicalPlan.children(), nodeName() and output(), Deduplicate.keys(), "
        "Aggregate.aggregateExpressions()"
    )
    def order_dependent(self, df: DataFrame) -> list[str]:
        """List the functions whose result depends on which rows come first.

        They are searched for in the query's own plan and in that of `df`, which foreachBatch made
        of the batch.
        """
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
    """Yield the nodes of a logical plan, from the top."""
    yield plan
    children = plan.children()
    for i in range(children.size()):
        yield from _nodes(children.apply(i))


INTERRUPTED = (
    "py4j.protocol.Py4JJavaError: An error occurred while calling foreachBatch.\n"
    ": java.lang.InterruptedException: the query is being stopped"
)
"""The text by which Spark knows that an error of foreachBatch comes from a stop.

Spark 3.5 wants the line break.

Spark uses a regular expression that overflows the stack on a long text, such as a stack trace of
the JVM (StreamExecution.isInterruptionException, PROXY_ERROR).
"""


# ---------------------------------------------------------------------- Python packages
@_internal(
    "pyspark.sql.pandas.utils.require_minimum_pandas_version, or require_minimum_pyarrow_version"
)
def minimum_versions() -> dict[str, Callable[[], None]]:
    """Return functions that raise ImportError if a package is missing or too old for this Spark.

    They are by the name of the package.
    """
    from pyspark.sql.pandas import utils

    return {
        "pandas": utils.require_minimum_pandas_version,
        "pyarrow": utils.require_minimum_pyarrow_version,
    }


@_internal("pyspark.cloudpickle")
def pickler() -> Callable[[object], bytes]:
    """Return the function by which Spark pickles functions for its Python workers."""
    from pyspark import cloudpickle

    return cloudpickle.dumps


# ---------------------------------------------------------------------- DataFrames
@_internal("DataFrame._jdf.queryExecution().toRdd()")
def partition_count(df: DataFrame) -> int:
    """Return the number of partitions of a plan, in a classic session.

    The plan is made now, so that it sees what is persisted.
    """
    return int(df.select("*")._jdf.queryExecution().toRdd().getNumPartitions())


@_internal("DataFrame._jdf.queryExecution().executedPlan()")
def executed_plan(df: DataFrame) -> str:
    """Return the physical plan of a DataFrame as it would run now, in a classic session."""
    return str(df._jdf.queryExecution().executedPlan().toString())


@_internal("pyspark.sql.pandas.types.to_arrow_schema")
def arrow_schema(df: DataFrame) -> pa.Schema:
    """Return the schema of the record batches that a Python worker gets of `df`."""
    from pyspark.sql.pandas.types import to_arrow_schema

    options: Any = {}
    # This parameter was read in 4.2.0, 4.2.1 and 4.3.0.
    if "timezone" in inspect.signature(to_arrow_schema).parameters:
        options["timezone"] = df.sparkSession.conf.get("spark.sql.session.timeZone")
    return to_arrow_schema(df.schema, **options)
