"""HDFS for tests: `with HdfsServer() as server: spark.read.text(f"{server.uri}/x")`.

Hadoop's mini cluster, a name node and one data node, in one Java process on free loopback ports. It
comes from Maven Central (`sinks.testing.servers.maven`) in the version of the Hadoop client that
pyspark ships, and runs on that client. The user that started it has all permissions. What was
written outlives `kill` and `start`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from sinks.testing.servers.common import CannotBeHad, ServerProcess, small_jvm
from sinks.testing.servers.maven import maven_jars

JUNIT = "org.junit.jupiter:junit-jupiter-api:5.13.4"
"""The mini cluster asserts with it."""


class HdfsServer(ServerProcess):
    @property
    def uri(self) -> str:
        return f"hdfs://127.0.0.1:{self.port}"

    def _command(self) -> Sequence[str]:
        self._started.unlink(missing_ok=True)
        data = self.home / "data"
        return [
            *small_jvm(self.home, "512m"),
            f"-Dtest.build.data={data}",
            "-cp",
            os.pathsep.join(map(str, _jars())),
            "org.apache.hadoop.test.MiniDFSClusterManager",
            *([] if data.exists() else ["-format"]),
            "-datanodes",
            "1",
            "-nnport",
            str(self.port),
            "-writeDetails",
            str(self._started),
        ]

    def _answers(self) -> bool:
        return self._started.exists() and self._started.stat().st_size > 0

    @property
    def _started(self) -> Path:
        """The mini cluster writes it when it is ready."""
        return self.home / "details.json"


def _jars() -> list[Path]:
    spec = find_spec("pyspark")  # not imported: that takes a second
    if spec is None or not spec.submodule_search_locations:
        raise CannotBeHad(
            "the mini cluster runs on the Hadoop client that pyspark ships: pip install pyspark"
        )
    folder = Path(spec.submodule_search_locations[0]) / "jars"
    client = next(folder.glob("hadoop-client-api-*.jar"))
    version = re.sub(r"hadoop-client-api-(.*)\.jar", r"\1", client.name)
    cluster = maven_jars(f"org.apache.hadoop:hadoop-client-minicluster:{version}", transitive=False)
    shipped = [
        jar
        for name in ("hadoop-client", "slf4j", "log4j", "jcl", "commons")
        for jar in folder.glob(f"{name}*")
    ]
    return [*cluster, *maven_jars(JUNIT), *sorted(shipped)]
