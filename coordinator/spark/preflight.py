"""What has to be there before a query starts: Spark's packages on the driver, the sinks in its Python workers."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from coordinator.errors import WorkersNotReady, reason
from coordinator.protocol.batch import Sink
from sinks.task import SinkTask

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

OLDEST_SPARK = (4, 0)


def package_problems() -> Iterator[tuple[str, str]]:
    """What is wrong with the packages that Spark needs in this process, and what mends it. Which versions of pandas and
    pyarrow a Spark takes, it knows itself."""
    try:
        from pyspark import __version__ as spark
        from pyspark.sql.pandas import utils
    except ImportError as error:
        yield f"pyspark cannot be imported: {error}", "pip install 'pyspark>=4.0,<5', in the cluster's version"
        return
    if tuple(int(part) for part in spark.split(".")[:2]) < OLDEST_SPARK:
        yield f"pyspark {spark} is too old: this library needs 4.0 or newer", "pip install 'pyspark>=4.0,<5'"
        return
    for package, wanted, require in (
        ("pandas", "pandas>=2.2,<3", utils.require_minimum_pandas_version),
        ("pyarrow", "pyarrow>=18", utils.require_minimum_pyarrow_version),
    ):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a pandas newer than this Spark knows
                require()
        except ImportError as error:
            yield f"pyspark {spark} cannot run a sink's tasks without {package}: {error}", f"pip install '{wanted}'"


def require_packages() -> None:
    """Raises ImportError with all that is missing or too old."""
    if problems := list(package_problems()):
        raise ImportError("; ".join(f"{what} ({mend})" for what, mend in problems))


def require_workers(spark: SparkSession, sinks: Sequence[Sink]) -> None:
    """Let one of Spark's Python workers load the sinks, as each task of a batch will. Raises `WorkersNotReady`."""
    from pyspark import cloudpickle
    from pyspark.sql import functions

    try:
        pickled: bytes = cloudpickle.dumps((SinkTask, *sinks))  # type: ignore[no-untyped-call]
        load = functions.udf(_loading(pickled), "string", useArrow=False)
        [(problem,)] = spark.range(1, numPartitions=1).select(load("id")).collect()
    except Exception as error:
        problem = reason(error)
        if "PYTHON_VERSION_MISMATCH" not in problem and "ModuleNotFoundError" not in problem:
            logger.debug("Spark could not try a Python worker; the batch will tell", exc_info=True)
            return
    if problem:
        raise WorkersNotReady(
            f"Spark's Python workers cannot load the sinks: {problem.rstrip('.')}. They need the Python "
            f"({sys.version_info[0]}.{sys.version_info[1]}) and the packages that the driver has, {sys.executable}. "
            f"Before the session is made, set the environment variable PYSPARK_PYTHON={sys.executable} where workers "
            "have the driver's disk; on a cluster install this library on its nodes, or ship an environment with "
            "spark.archives"
        )


def _loading(pickled: bytes) -> Callable[[object], str]:
    def load(_: object) -> str:  # nested, so that it travels by value, also to workers without this library
        import pickle
        import sys

        try:
            pickle.loads(pickled)
        except Exception as error:
            return f"{sys.executable} says {type(error).__name__}: {error}"
        return ""

    return load
