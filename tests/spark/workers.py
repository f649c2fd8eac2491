"""What Spark forks its Python workers from in the tests, in place of `pyspark.daemon`: it has imported what each of
them would, and spares them the search for garbage in that after each task."""

from __future__ import annotations

import gc
import importlib
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyspark

WORKERS: dict[str, Any] = {
    "spark.python.daemon.module": "tests.spark.workers",
    "spark.executorEnv.PYTHONPATH": f"{Path(__file__).parents[2]}",
}

MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
FILES = {"spark.sql.streaming.checkpointFileManagerClass": MANAGER} if pyspark.__version__.startswith("4.2.") else {}
"""Without it Spark runs the program `readlink` several times for each file of a checkpoint location that it renames, a
tenth of what a small query takes. With Spark Connect and on a cluster the tests leave it as it is."""

HAS_CONNECT = any((Path(pyspark.__file__).parent / "jars").glob("spark-connect_*.jar"))
"""Whether this Spark brings its Connect server. That of Spark 3.5 is an artifact of its own."""
CONNECT: dict[str, Any] = {"spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin"} if HAS_CONNECT else {}

if __name__ == "__main__":
    from pyspark import daemon

    for module in (*sys.argv[1:], "pandas", "pyarrow", "coordinator.task.task", "tests.spark.job"):
        with suppress(ImportError):  # which a worker without it tells
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    daemon.manager()
