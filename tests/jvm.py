"""Java of the tests: most of its processes live for seconds, in which they load and compile Spark's or Kafka's classes.

    python -m tests.jvm

archives those that a streaming job and a broker load, for all later starts (JEP 350, "Dynamic CDS Archives"), and
compiles what Spark's Python workers import.
"""

from __future__ import annotations

import compileall
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CLASSES = Path(__file__).parents[1] / ".cache" / "spark-classes.jsa"
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
QUIET = "-Xlog:disable -Xlog:all=off"
NOT_IMPORTED = re.compile("/tests/|pyspark/(ml|mllib|pandas)/")
"""Modules that no worker of a streaming query imports: most of pyspark, which would take most of the time."""


def prepare() -> None:
    """Have the Java processes that start from now on start fast; with `CLASSES`, if it is there: a JVM of another
    version, or with other classes, goes without it."""
    _set(f"{SHORT_LIVED} -XX:SharedArchiveFile={CLASSES} {QUIET}" if CLASSES.exists() else SHORT_LIVED)


def archive() -> None:
    """Run small streaming jobs, also through Spark Connect, and keep the classes of their JVM in `CLASSES`."""
    from pyspark import SparkContext

    from examples.custom_sink import FileSink
    from sinks.testing.servers.common import free_port
    from tests.spark.connect import ConnectJob
    from tests.spark.job import SparkJob, write_input

    CLASSES.parent.mkdir(exist_ok=True)
    file = CLASSES.with_suffix(".new")
    _set(f"{SHORT_LIVED} -XX:ArchiveClassesAtExit={file} {QUIET}")
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    with tempfile.TemporaryDirectory() as name:
        classic, connect = Path(name) / "classic", Path(name) / "connect"
        for folder in (classic, connect):
            write_input(folder / "input", batches=1)
            (folder / "rows").mkdir()
        port = free_port()
        server = {
            "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": f"{port}",
        }
        SparkJob(classic, [FileSink(classic / "rows")], conf=server).run_here()
        client = ConnectJob(connect, [FileSink(connect / "rows")], url=f"sc://127.0.0.1:{port}")
        if client.run():
            print(client.output())
        gateway = SparkContext._gateway
        assert gateway is not None
        gateway.proc.stdin.close()
        gateway.proc.wait(1200)  # writes the archive
    file.replace(CLASSES)


def compile_modules() -> None:
    """Spark's Python workers import pyspark from archives without compiled modules: each would compile what it
    imports, the worker of a Spark Connect query for one to two seconds of the ten that it has."""
    import pyspark

    for archive in (Path(pyspark.__file__).parent / "python" / "lib").glob("*.zip"):
        with zipfile.ZipFile(archive) as file:
            if any(name.endswith(".pyc") for name in file.namelist()):
                continue
        with tempfile.TemporaryDirectory(dir=archive.parent) as name:
            modules = Path(name) / "modules"
            shutil.unpack_archive(archive, modules)
            compileall.compile_dir(
                modules,
                rx=NOT_IMPORTED,
                quiet=1,
                legacy=True,
                stripdir=str(modules),
                prependdir=str(archive),
                invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            )
            os.replace(shutil.make_archive(f"{name}/compiled", "zip", modules), archive)


def _set(options: str) -> None:
    before = os.environ.get("JAVA_TOOL_OPTIONS", "")
    if options not in before:
        os.environ["JAVA_TOOL_OPTIONS"] = f"{before} {options}".strip()


if __name__ == "__main__":
    kafka = [sys.executable, "-c", "from sinks.testing.servers.kafka import archive_classes; archive_classes()"]
    with subprocess.Popen(kafka) as other:  # at the same time, because each needs one processor
        archive()
        compile_modules()
    sys.exit(other.returncode)
