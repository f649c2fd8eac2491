"""What is used of Spark without being its public API is still there, and a Spark without it is refused in words."""

from __future__ import annotations

import inspect
import json
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark.sql.pandas.types
import pytest
from py4j.java_gateway import JavaClass
from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession, functions
from pyspark.sql.streaming.query import StreamingQuery

from coordinator.errors import UnsupportedSpark
from coordinator.spark import internals
from coordinator.spark.batch import runs_python
from coordinator.spark.internals import StreamExecution


def calling(df: DataFrame) -> StreamExecution:
    execution = StreamExecution.calling(df.sparkSession)
    assert execution is not None, f"Spark changed this: the local property {internals.QUERY_ID}, set for foreachBatch"
    return execution


def arrow_schemas(df: DataFrame) -> tuple[pa.Schema, pa.Schema]:
    """As it is foretold, and as a Python worker gets it."""

    def serialized(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schemas = [batch.schema for batch in batches]
        yield pa.RecordBatch.from_pydict({"schema": [schema.serialize().to_pybytes() for schema in schemas[:1]]})

    [row, *_] = df.mapInArrow(serialized, "schema binary").collect()
    return internals.arrow_schema(df), pa.ipc.read_schema(pa.py_buffer(row.schema))


def in_python(df: DataFrame) -> DataFrame:
    return df.mapInArrow(lambda batches: batches, df.schema)


PARTS: dict[str, Callable[[DataFrame], Any]] = {
    "query id": lambda df: calling(df).query_id,
    "run id": lambda df: calling(df).run_id,
    "location": lambda df: calling(df).location,
    "active": lambda df: calling(df).active,
    "query": lambda df: str(calling(df).query.id),
    "planned at": lambda df: calling(df).planned_at,
    "sources": lambda df: calling(df).sources,
    "deterministic": lambda df: [
        calling(df).is_deterministic(each) for each in (df, df.withColumn("chance", functions.rand()))
    ],
    "order dependent": lambda df: [calling(df).order_dependent(each) for each in (df, df.dropDuplicates(["value"]))],
    "gateway": lambda df: internals.gateway(df.sparkSession).jvm.java.lang.Math.abs(-1),
    "Hadoop's configuration": lambda df: internals.hadoop_conf(df.sparkSession).get("fs.defaultFS"),
    "partition count": lambda df: [internals.partition_count(df), internals.partition_count(df.coalesce(1))],
    "Arrow schema": arrow_schemas,
    "plan of the query": lambda df: runs_python(calling(df).executed_plan),
    "plan": lambda df: [runs_python(internals.executed_plan(each)) for each in (df, in_python(df))],
}


ASKED_ELSEWHERE = {
    "topic_ids": "a query of Kafka alone: tests/spark/test_killed.py",
    "runs_python": "no part of Spark: a note of this library",
}


def test_every_part_is_asked() -> None:
    """A name that is added to the module gets a part here."""
    of_module = [
        name
        for name, value in vars(internals).items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == internals.__name__
    ]
    assert {"gateway", "arrow_schema", "StreamExecution"} <= {*of_module}
    names = {
        name
        for name in (*of_module, *vars(StreamExecution))
        if not name.startswith("_") and name not in ASKED_ELSEWHERE
    }
    text = Path(__file__).read_text()
    assert {name for name in names if not re.search(rf"\.{name}\b|\b{name}\.", text)} == set()


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("internals")


@pytest.fixture(scope="module")
def answers(spark: SparkSession, location: Path) -> dict[str, Any]:
    """What each part says in a batch of a query, or what it raises."""
    found: dict[str, Any] = {}

    def ask(df: DataFrame, _: int) -> None:
        for name, part in PARTS.items():
            try:
                found[name] = part(df)
            except Exception as error:
                found[name] = error

    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).option("numPartitions", 2)
    writer = source.load().writeStream.foreachBatch(ask).option("checkpointLocation", str(location))
    query = writer.trigger(availableNow=True).start()  # a second batch would ask again while the query is stopped
    query.awaitTermination(300)
    return found | {"the query": query}


@pytest.mark.parametrize("name", list(PARTS))
def test_it_is_there(answers: dict[str, Any], location: Path, name: str) -> None:
    query: StreamingQuery = answers["the query"]
    answer = answers[name]
    assert not isinstance(answer, Exception), f"Spark changed this: {answer}"
    if name == "Arrow schema":
        assert answer[0] == answer[1], "Spark changed this: to_arrow_schema is not the schema that mapInArrow gives"
        return
    expected = {
        "query id": query.id,
        "run id": query.runId,
        "location": f"file:{location}",
        "active": True,
        "query": query.id,
        "planned at": json.loads((location / "offsets" / "0").read_text().split("\n")[1])["batchTimestampMs"],
        "deterministic": [True, False],
        "order dependent": [[], ["dropDuplicates on some of the columns"]],
        "gateway": 1,
        "Hadoop's configuration": "file:///",
        "partition count": [2, 1],
        "plan of the query": False,
        "plan": [False, True],
    }
    if name == "sources":
        [(kind, _)] = answer
        assert kind == "RatePerMicroBatchStream"
    else:
        assert answer == expected[name], f"Spark changed this: {name}"


def test_each_run_of_a_query_is_one_execution(spark: SparkSession, tmp_path: Path) -> None:
    """Which is not looked up again before it has ended."""
    executions: list[StreamExecution] = []

    def ask(df: DataFrame, _: int) -> None:
        execution = StreamExecution.calling(df.sparkSession, executions[-1] if executions else None)
        assert execution is not None
        executions.append(execution)

    runs = []
    for _ in range(2):
        spark.range(2).coalesce(1).write.option("maxRecordsPerFile", 1).mode("append").parquet(f"{tmp_path}/rows")
        source = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).parquet(f"{tmp_path}/rows")
        writer = source.writeStream.foreachBatch(ask).option("checkpointLocation", f"{tmp_path}/spark")
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(300)
        runs += [query.runId] * 2
    assert [execution.run_id for execution in executions] == runs
    assert [len({id(execution) for execution in executions[at : at + 2]}) for at in range(3)] == [1, 2, 1]


def test_a_stop_is_told_by_the_text_of_the_error(spark: SparkSession) -> None:
    jvm: Any = spark.sparkContext._jvm
    streaming = jvm.org.apache.spark.sql.execution.streaming
    for package in (streaming.runtime, streaming):  # since 4.1, before
        if isinstance(package.StreamExecution, JavaClass):
            companion = getattr(getattr(package, "StreamExecution$"), "MODULE$")  # 3.5 has no static forwarder
            assert companion.PROXY_ERROR().pattern().matcher(internals.INTERRUPTED).find()
            return
    pytest.fail("Spark changed this: StreamExecution.PROXY_ERROR")


def test_cloudpickle_is_there() -> None:
    """`sinks.testing` sends jobs to processes with it."""
    from pyspark import cloudpickle

    square: Callable[[int], int] = cloudpickle.loads(cloudpickle.dumps(lambda x: x * x))
    assert square(3) == 9


def test_packages_that_spark_wants() -> None:
    for require in internals.minimum_versions().values():
        require()
    assert pickle.loads(internals.pickler()(lambda x: x * x))(3) == 9


PRIVATE = re.compile(
    r"^ *(from|import) pyspark(\.sql\.pandas|.*cloudpickle)|(?<!self)\._(j[a-z]\w*|gateway|sc)\b", re.M
)


def test_no_other_module_uses_what_is_private() -> None:
    root = Path(internals.__file__).parents[2]
    found = {
        str(file.relative_to(root))
        for package in ("coordinator", "sinks")
        for file in (root / package).rglob("*.py")
        if PRIVATE.search(file.read_text())
    }
    assert found == {"coordinator/spark/internals.py", "sinks/testing/driver.py", "sinks/testing/local.py"}


def test_a_python_name_that_is_gone(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pyspark.sql.pandas.types, "to_arrow_schema")
    version = pyspark.__version__
    with pytest.raises(UnsupportedSpark, match=f"^Spark {version} is not supported here: .*to_arrow_schema is gone"):
        internals.arrow_schema(spark.range(1))


def test_a_method_or_class_of_the_jvm_that_is_gone(spark: SparkSession) -> None:
    class Changed:
        """Real objects of the JVM under the names of others."""

        runId = spark._jsparkSession.noSuchMethod  # noqa: N815
        isActive = spark.sparkContext._jvm.org.apache.spark.NoSuchClass  # type: ignore[union-attr]  # noqa: N815

    execution = StreamExecution(Changed())
    with pytest.raises(UnsupportedSpark, match=r"StreamExecution\.runId\(\) is gone"):
        _ = execution.run_id
    with pytest.raises(UnsupportedSpark, match=r"StreamExecution\.isActive\(\) is gone"):
        _ = execution.active
    with pytest.raises(UnsupportedSpark, match=r"StreamExecution\.sources\(\) is gone"):
        _ = execution.sources
    with pytest.raises(UnsupportedSpark, match=r"kafkaOffsetReader\(\)\.admin\(\) is gone"):
        execution.topic_ids(0, ["orders"])


def test_what_the_gateway_raises_is_passed_on() -> None:
    class Ended:
        def isActive(self) -> bool:  # noqa: N802
            raise Py4JError("Answer from Java side is empty")

    with pytest.raises(Py4JError, match="is empty"):
        _ = StreamExecution(Ended()).active
