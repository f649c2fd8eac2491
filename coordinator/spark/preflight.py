"""The checks before a query starts: Spark's packages on the driver, the sinks in its workers."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from coordinator.errors import WorkersNotReady, reason
from coordinator.protocol.ports import Sink
from coordinator.spark.internals import minimum_versions, pickler
from coordinator.task.task import SinkTask
from sinks._util.log import get_logger

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = get_logger(__name__)

OLDEST_SPARK = (3, 5)
OLDEST_CONNECT = (4, 0)
"""Before it, Spark Connect's server loses the text of an error in foreachBatch (SPARK-44463)."""

UNIX_SOCKETS = "spark.python.unix.domain.socket.enabled"
UNIX_SOCKETS_SINCE = (4, 1)


def package_problems() -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the packages that Spark needs in this process, and what fixes it.

    Spark itself knows which versions of pandas and pyarrow it takes.
    """
    try:
        from pyspark import __version__ as spark
    except ImportError as error:
        yield (
            f"pyspark cannot be imported: {error}",
            "pip install 'pyspark>=3.5,<5', in the cluster's version",
        )
        return
    if _release(spark) < OLDEST_SPARK:
        yield (
            f"pyspark {spark} is too old: this library needs 3.5 or newer",
            "pip install 'pyspark>=3.5,<5'",
        )
        return
    from pyspark.sql.utils import is_remote

    if _release(spark) < OLDEST_CONNECT and is_remote():
        yield (
            f"pyspark {spark} is too old for Spark Connect, which needs 4.0 or newer here",
            "start a classic session, without a remote URL, or use a newer Spark",
        )
    minimum = minimum_versions()
    for package, wanted in (("pandas", "pandas>=2.2,<3"), ("pyarrow", "pyarrow>=18")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about a pandas newer than this Spark knows
                minimum[package]()
        except ImportError as error:
            yield (
                f"pyspark {spark} cannot run a sink's tasks without {package}: {error}",
                f"pip install '{wanted}'",
            )


def _release(spark: str) -> tuple[int, ...]:
    return tuple(int(part) for part in spark.split(".")[:2])


def advice_on_sockets() -> str:
    """Return a sentence on a setting that shortens checkpoints; "" if this Spark lacks it.

    Spark reads the setting when the first session is made.
    """
    from pyspark import __version__

    if _release(__version__) < UNIX_SOCKETS_SINCE:
        return ""
    return (
        f"Spark reaches its Python workers by TCP unless {UNIX_SOCKETS}=true is set before the "
        "session is made, which takes some 40 ms off each checkpoint"
    )


def require_packages() -> None:
    """Raise ImportError with everything that is missing or too old."""
    if problems := list(package_problems()):
        raise ImportError("; ".join(f"{what} ({fix})" for what, fix in problems))


def require_workers(spark: SparkSession, sinks: Sequence[Sink]) -> None:
    """Let one of Spark's Python workers load the sinks, as each task of a batch will.

    Raises `WorkersNotReady`.
    """
    from pyspark.sql import functions

    try:
        load = functions.udf(_loading(pickler()((SinkTask, *sinks))), "string", useArrow=False)
        [(problem,)] = spark.range(1, numPartitions=1).select(load("id")).collect()
    except Exception as error:
        problem = reason(error)
        if "PYTHON_VERSION_MISMATCH" not in problem and "ModuleNotFoundError" not in problem:
            logger.debug("Spark could not try a Python worker; the batch will tell", exc_info=True)
            return
    if problem:
        raise WorkersNotReady(
            f"Spark's Python workers cannot load the sinks: {problem.rstrip('.')}. They need the "
            f"driver's Python ({sys.version_info[0]}.{sys.version_info[1]}) and packages. On one "
            f"machine, set PYSPARK_PYTHON={sys.executable} before the session is made. On a "
            "cluster, install this library on its nodes, or use spark.archives"
        )


def _loading(task: bytes) -> Callable[[object], str]:
    # The function is nested, so that it travels by value, even to workers without this library.
    def load(_: object) -> str:
        import pickle
        import sys

        try:
            pickle.loads(task)
        except Exception as error:
            return f"{sys.executable} says {type(error).__name__}: {error}"
        return ""

    return load
