"""What Spark forks its Python workers from in the tests, in place of `pyspark.daemon`: it has imported what each of
them would, and spares them the search for garbage in that after each task."""

from __future__ import annotations

import gc
import importlib
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

WORKERS: dict[str, Any] = {
    "spark.python.daemon.module": "tests.spark.workers",
    "spark.executorEnv.PYTHONPATH": f"{Path(__file__).parents[2]}",
}

if __name__ == "__main__":
    from pyspark import daemon

    for module in (sys.argv[1], "pyarrow", "sinks.task"):
        with suppress(ImportError):  # which a worker without it tells
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    daemon.manager()
