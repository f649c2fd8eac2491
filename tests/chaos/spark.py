"""One life of a driver with Spark: a streaming query in a process group of its own, on local threads, on executors that
are processes, or on a standalone cluster; and the tasks' processes, which can be killed one by one."""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from coordinator import CheckpointCoordinator
from sinks.testing.servers.maven import maven_jars
from sinks.testing.servers.spark_kafka import spark_kafka_jars
from tests.chaos import faults
from tests.chaos.driver import CHECKPOINT, COUNTS, PARTITIONS, Input, Life
from tests.chaos.faults import Injector, Steps, watched, watched_storage
from tests.spark.cluster import standalone_cluster
from tests.spark.connect import ConnectServer, started

LOCAL_THREADS, CONNECT = "local[2,10]", "connect"
"""A master, and another way to run."""
JDBC_DRIVER = "org.postgresql:postgresql:42.7.8"

_CONF = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executorEnv.PYTHONPATH": os.getcwd(),
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.showConsoleProgress": "false",
    "spark.task.maxFailures": "10",
    "spark.executor.cores": "1",
    "spark.cores.max": "2",
    "spark.deploy.maxExecutorRetries": "-1",
}
_SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.efficiency.enabled": "false",
}


class SparkProcess:
    """A driver's process with its group: the face of a `multiprocessing.Process`."""

    def __init__(self, life: Life, master: str) -> None:
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        pickled = life.folder / f"{random.getrandbits(64):x}.life"
        pickled.write_bytes(pickle.dumps((life, master)))
        with theirs, (life.folder / "driver.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.spark", str(pickled), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ
                | {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.getcwd(), "SPARK_LOCAL_IP": "127.0.0.1"},
            )
        self.sentinel = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # the group may outlive its leader
            os.killpg(self.pid, number)

    def close(self) -> None:
        """The driver has ended: what is left of its group too."""
        self.signal(signal.SIGKILL)
        os.close(self.sentinel)
        self.connection.close()


# ---------------------------------------------------------------------- inside the driver
def live(life: Life, connection: Connection, master: str) -> None:
    import logging

    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s {os.getpid()} %(name)s %(message)s")
    faults.here = here = Injector(connection, life.faults, group=True)
    try:
        if master == CONNECT:
            _over_connect(life, here)
        else:
            _classic(life, master)
    except Exception as error:
        if _AT_THE_END in str(error):
            os._exit(0)
        logging.exception("the driver fails")
        if not here.told:
            here.failed(_raised(error), str(error))
        os._exit(1)
    os._exit(0)


def _raised(error: Exception) -> str:
    """What Spark says was raised in another process, if it says so."""
    theirs = re.findall(r"^(?:coordinator|sinks|psycopg|pymysql|kafka)\.[\w.]*?(\w+): ", str(error), re.MULTILINE)
    return theirs[-1] if theirs else type(error).__name__


def _classic(life: Life, master: str) -> None:
    spark = _session(life, master)
    writer = _stream(spark, life.input).writeStream.option("checkpointLocation", str(life.folder))
    if life.peer:
        _run(writer, _peer(life.peer), len(life.input))
    else:
        with _coordinator(life) as coordinator:
            _run(writer, coordinator, len(life.input))
    spark.stop()


def _session(life: Life, master: str) -> Any:
    from pyspark.sql import SparkSession

    conf = _CONF | ({} if master.startswith("local[") else _SPECULATION)
    if life.peer:
        jars = maven_jars(JDBC_DRIVER, transitive=False)
        conf = conf | {"spark.jars": f"{spark_kafka_jars()},{','.join(map(str, jars))}"}
    builder = SparkSession.builder.master(master).config("spark.local.dir", str(life.folder / "local"))
    for key, value in conf.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def _coordinator(life: Life, **config: Any) -> CheckpointCoordinator:
    sinks = [watched(sink) for sink in life.sinks]
    storage = watched_storage(life.storage)
    return CheckpointCoordinator(life.job, sinks, storage, replace(life.config, **config), [Steps()])


def _over_connect(life: Life, here: Injector) -> None:
    """The server is a process of this group; the coordinator runs in a Python process of the server."""
    from pyspark.sql import SparkSession

    os.environ[faults.REMOTE] = address = str(life.folder.parent / f"{os.getpid()}.driver")
    here.listen(address)
    folder = Path(tempfile.mkdtemp(dir=life.folder.parent))
    server = ConnectServer(folder, new_session=False)
    server.start()
    spark = SparkSession.builder.remote(server.url).create()
    with _coordinator(life, checkpoint_location=str(life.folder)) as coordinator:
        writer = coordinator.write_stream(_stream(spark, life.input))
        started(writer.foreachBatch(_until(coordinator, len(life.input)))).awaitTermination()


def _stream(spark: Any, input: Input) -> Any:
    """The rows of the input, made in the JVM. Spark's file source would not do: after a crash between its own log and
    that of the offsets, one micro-batch has the files of two."""
    slots = max(COUNTS) + input.hot
    counts = ", ".join(str(len(table)) for batch in input for table in batch)
    stream = spark.readStream.format("rate-micro-batch")
    return (
        stream.options(rowsPerBatch=PARTITIONS * slots, numPartitions=PARTITIONS, startTimestamp=0)
        .load()
        .selectExpr(
            f"value DIV {PARTITIONS * slots} AS n",
            f"value % {PARTITIONS} AS part",
            f"value DIV {PARTITIONS} % {slots} - {int(input.hot)} AS number",
        )
        .where(f"number + {int(input.hot)} < get(array({counts}), int(n * {PARTITIONS} + part))")
        .selectExpr(
            f"IF(number < 0, -1 - part, n * {CHECKPOINT} + part * 1000 + number) AS id",
            "IF(number < 0, double(n), number + 0.5D) AS amount",
        )
        .selectExpr("id", "'user-' || id AS name", "amount")
    )


_AT_THE_END = "the input ends before batch"


def _run(writer: Any, write: Callable[[Any, int], None], batches: int) -> None:
    writer.foreachBatch(_until(write, batches)).start().awaitTermination()


def _until(write: Callable[[Any, int], None], batches: int) -> Callable[[Any, int], None]:
    """Take the first `batches` micro-batches. An error is told as it is, before Spark wraps it."""

    def call(df: Any, batch_id: int) -> None:
        if batch_id >= batches:
            raise EOFError(f"{_AT_THE_END} {batch_id}")
        try:
            write(df, batch_id)
        except Exception as error:
            faults.failed(error)
            raise

    return call


def _as_json(df: Any) -> Any:
    from pyspark.sql import functions

    return df.select(functions.to_json(functions.struct("id", "name", "amount")).alias("value"))


def _peer(options: Mapping[str, str]) -> Callable[[Any, int], None]:
    """Spark's own writer, as its documentation has it in foreachBatch."""

    def write(df: Any, batch_id: int) -> None:
        faults.at("TRIGGERED")
        if "topic" in options:
            _as_json(df).write.format("kafka").options(**options).save()
        else:
            df.write.format("jdbc").options(**options).mode("append").save()
        faults.at("DONE")

    return write


# ---------------------------------------------------------------------- the tasks' processes
def victims(roots: list[int]) -> list[tuple[str, psutil.Process]]:
    """Python workers and executors below these processes, as (kind, process)."""
    found = []
    for root in roots:
        with suppress(psutil.Error):
            for child in psutil.Process(root).children(recursive=True):
                with suppress(psutil.Error):
                    command = " ".join(child.cmdline())
                    if "CoarseGrainedExecutorBackend" in command:
                        found.append(("executor", child))
                    elif "foreach_batch_worker" in command:
                        found.append(("foreachBatch process", child))
                    elif "pyspark.daemon" in command and "pyspark.daemon" in " ".join(child.parent().cmdline()):
                        found.append(("Python worker", child))
    return found


@contextmanager
def master(kind: str, folder: Path) -> Iterator[tuple[str, list[int]]]:
    """The master's URL, and the processes that start its executors, besides the driver."""
    if kind == "standalone":
        before = {child.pid for child in psutil.Process().children()}
        with standalone_cluster(folder, cores=2) as url:  # room for two drivers
            daemons = {child.pid for child in psutil.Process().children()} - before
            yield url, sorted(daemons)
    else:
        yield {"spark": LOCAL_THREADS, "local-cluster": "local-cluster[2,1,512]"}.get(kind, kind), []


if __name__ == "__main__":
    pickled_life, pickled_master = pickle.loads(Path(sys.argv[1]).read_bytes())
    live(pickled_life, Connection(int(sys.argv[2])), pickled_master)
