"""What Spark forks its Python workers from in the tests, in place of `pyspark.daemon`: it has imported what each of
them would, and spares them the search for garbage in that after each task."""

from __future__ import annotations

import gc
import importlib
import py_compile
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pyspark

WORKERS: dict[str, Any] = {
    "spark.python.daemon.module": "tests.spark.workers",
    "spark.executorEnv.PYTHONPATH": f"{Path(__file__).parents[2]}",
}

MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
FILES = {"spark.sql.streaming.checkpointFileManagerClass": MANAGER} if pyspark.__version__.startswith("4.2.") else {}
"""Without it Spark runs the program `readlink` several times for each file of a checkpoint location that it renames, a
tenth of what a small query takes. With Spark Connect and on a cluster the tests leave it as it is."""


def compile_modules() -> None:
    """Spark's Python workers import pyspark from archives without compiled modules: each would compile what it
    imports, the worker of a Spark Connect query for one to two seconds of the ten that it has."""
    for archive in (Path(pyspark.__file__).parent / "python" / "lib").glob("*.zip"):
        with ZipFile(archive, "a") as modules, tempfile.TemporaryDirectory() as folder:
            names, compiled = modules.namelist(), f"{folder}/compiled"
            for name in names:
                if name.endswith(".py") and f"{name}c" not in names:
                    always = py_compile.PycInvalidationMode.UNCHECKED_HASH
                    source = modules.extract(name, folder)
                    py_compile.compile(source, compiled, f"{archive}/{name}", True, invalidation_mode=always)
                    modules.write(compiled, f"{name}c")


if __name__ == "__main__":
    from pyspark import daemon

    for module in (sys.argv[1], "pandas", "pyarrow", "sinks.task", "tests.spark.job"):
        with suppress(ImportError):  # which a worker without it tells
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    daemon.manager()
