"""A Spark Connect server from pyspark's own jars, and jobs that run on it from a client process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyspark

from coordinator import CheckpointCoordinator
from sinks.testing.servers.common import free_port
from tests.spark.job import Kind, SparkJob, end_group
from tests.spark.workers import WORKERS


class ConnectServer:
    """`with ConnectServer(folder) as server:`; killed and started again on the same port by `restart`."""

    def __init__(self, folder: Path, new_session: bool = True) -> None:
        self.folder, self._new_session = folder, new_session
        self.port = 0

    @property
    def url(self) -> str:
        return f"sc://127.0.0.1:{self.port}"

    def __enter__(self) -> ConnectServer:
        for attempts in range(4, -1, -1):
            self.port = free_port()
            try:
                self.start()
                break
            except TimeoutError as error:
                if not attempts or "Address already in use" not in str(error):  # nobody took the port in between
                    raise
        return self

    def __exit__(self, *_: object) -> None:
        end_group(self.process)

    def start(self, timeout: float = 300) -> None:
        home = Path(pyspark.__file__).parent
        conf = {
            "spark.master": "local[2]",
            "spark.driver.memory": "700m",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.local.dir": str(self.folder / "local"),
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.enabled": "false",
        } | WORKERS
        command = [str(home / "bin" / "spark-submit")]
        for key, value in conf.items():
            command += ["--conf", f"{key}={value}"]
        command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
        environment = os.environ | {
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        self.log = self.folder / f"server-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, start_new_session=self._new_session, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        deadline = time.monotonic() + timeout
        while not re.search("Spark Connect server started at", self.output()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise TimeoutError(f"no Spark Connect server: {self.output()[-2000:]}")
            time.sleep(0.2)

    def output(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class ConnectJob(SparkJob):
    """As SparkJob, through a client of a Spark Connect server at `url`."""

    url: str = ""
    storage: str | None = None
    location: str | None = "spark"
    """Below `folder`; None: the coordinator is not told."""
    end: Callable[[Any, Any, Any], None] = lambda spark, query, coordinator: query.awaitTermination()
    """What the client does once the query runs."""

    def kind(self) -> Kind:
        return Kind(self.url)

    def run_here(self) -> None:
        from pyspark.sql import SparkSession

        spark = SparkSession.builder.remote(self.url).create()
        settings = {"spark.sql.files.maxPartitionBytes": "4096", "spark.sql.files.openCostInBytes": "4096"}
        for key, value in (settings | dict(self.conf)).items():
            spark.conf.set(key, value)
        df: Any = self.source(spark) if self.source else self._files(spark)
        df = self.shape(df) if self.shape else df
        config = replace(self.config, checkpoint_location=self.location and str(self.folder / self.location))
        storage = self.storage or f"file://{self.folder / 'storage'}"
        for sink in self.sinks:
            sink.transform = self.transforms.get(sink.name)
        with CheckpointCoordinator(self.job, self.sinks, storage, config, self.listeners) as coordinator:
            writer = coordinator.write_stream(df).outputMode(self.output_mode).trigger(availableNow=True)
            query = started(writer.option("checkpointLocation", str(self.folder / "spark")))
            self.end(spark, query, coordinator)
        spark.stop()


def started(writer: Any, seconds: float = 300) -> Any:
    """The query. Spark gives a worker of its server ten seconds to start, too few where the machine is busy."""
    from pyspark.errors import PySparkException

    deadline = time.monotonic() + seconds
    while True:
        try:
            return writer.start()
        except PySparkException as error:
            if "Python worker failed to connect back" not in str(error) or time.monotonic() > deadline:
                raise
