"""A standalone Spark cluster from pyspark's own jars: a master and two workers on two loopback addresses.

Two addresses, because Spark never runs a speculative copy of a task on the host of the original.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

HOSTS = ("127.0.0.1", "127.0.0.2")


@contextmanager
def standalone_cluster(folder: Path, cores: int = 1) -> Iterator[str]:
    """The master's URL, once both workers have registered, with `cores` and as many GiB each."""
    with ExitStack() as stack:
        log = stack.enter_context(_daemon(folder, "master", HOSTS[0], "master.Master", "--port", "0"))
        url = _wait_for(log, r"Starting Spark master at (spark://\S+)")
        for number, host in enumerate(HOSTS):
            arguments = [
                "--port",
                "0",
                "--cores",
                str(cores),
                "--memory",
                f"{cores}g",
                "--work-dir",
                str(folder / f"work{number}"),
                url,
            ]
            worker = stack.enter_context(_daemon(folder, f"worker{number}", host, "worker.Worker", *arguments))
            _wait_for(worker, r"Successfully registered with (master)")
        yield url


@contextmanager
def _daemon(folder: Path, name: str, host: str, kind: str, *arguments: str) -> Iterator[Path]:
    home = Path(pyspark.__file__).parent
    log = folder / f"{name}.log"
    command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}"]
    environment = os.environ | {
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": host,
        "SPARK_DAEMON_MEMORY": "256m",
        "PYSPARK_PYTHON": sys.executable,
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", host, "--webui-port", "0", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        yield log
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(log: Path, pattern: str, timeout: float = 300) -> str:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if found := re.search(pattern, log.read_text(errors="replace")):
            return found[1]
        time.sleep(0.2)
    raise TimeoutError(f"no {pattern!r} in {log}: {log.read_text(errors='replace')[-2000:]}")
