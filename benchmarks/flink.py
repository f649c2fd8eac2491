"""Flink's sinks, if their program is there: a folder with its sources, of which a copy is built in
the cache.

Each setting has a JVM of its own that waits for its turns; what a turn takes begins with the first
row, so neither the JVM's start nor the job's counts, and ends when all is committed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.bench import ROOT, say
from benchmarks.measure import Contender
from benchmarks.target import Target
from benchmarks.topic import Topic
from sinks.testing.servers.postgres import PostgresService, jdbc_url

_TURNS = Path(__file__).with_name("Turns.java")
_CLASSPATH = "target/classes:lib/*"


def jdbc(
    stack: ExitStack, program: Path, service: PostgresService, dsn: str, rows: int, target: Target
) -> Iterator[Contender]:
    """Its JDBC XA sink into table `t`, with the rows of the plain shape."""
    variables = {"PG_URL": jdbc_url(dsn), "PG_USER": service.user, "PG_PASSWORD": service.password}
    for rewrite in (False, True):
        settings = {"mode": "jdbc-xa", "n": rows, "batch": 1000, "rewrite": str(rewrite).lower()}
        flink = Flink(stack, program, settings, variables)
        name = f"Flink JDBC XA, batch 1,000, rewrite {'on' if rewrite else 'off'}"
        yield Contender(
            name, flink.run, target.clear, partial(_tell_of, name, target.check, target.clear)
        )


def kafka(
    stack: ExitStack, program: Path, bootstrap: str, rows: int, topic: Topic
) -> Iterator[Contender]:
    """Its Kafka sink, exactly-once, with the values of the small shape."""
    for tuned in (False, True):
        where = {"kafka": bootstrap, "topic": topic.name}
        flink = Flink(
            stack, program, {"mode": "kafka-eos", "n": rows, "tuned": str(tuned).lower(), **where}
        )
        name = f"Flink, exactly-once, {'tuned' if tuned else 'defaults'}"
        yield Contender(name, flink.run, check=partial(_tell_of, name, topic.check, topic.clear))


def _tell_of(name: str, check: Callable[[], None], clear: Callable[[], None]) -> None:
    """What is wrong with its result, which is no reason to stop."""
    try:
        check()
    except AssertionError as error:
        say(f"{name} has not written each row once: {error}")
        clear()


class Flink:
    """A JVM that runs a job with these settings whenever it is told to."""

    def __init__(
        self,
        stack: ExitStack,
        program: Path,
        settings: Mapping[str, object],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._line = " ".join(f"{name}={value}" for name, value in settings.items())
        opened = [
            f"--add-opens=java.base/java.{package}=ALL-UNNAMED" for package in ("util", "lang")
        ]
        jvm = [
            "java",
            "-Dlvl=ERROR",
            "-Duser.timezone=UTC",
            "-Xmx4g",
            *opened,
            "-cp",
            _CLASSPATH,
            "peers.Turns",
        ]
        pipe = subprocess.PIPE
        environment = os.environ | dict(variables or {})
        self._process = subprocess.Popen(
            jvm,
            cwd=_compiled(program),
            env=environment,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.STDOUT,
            text=True,
        )
        stack.callback(self._end)

    def run(self) -> float:
        """Seconds from the first row to the last commit.

        Raises RuntimeError with Flink's errors if the job failed.
        """
        assert self._process.stdin
        assert self._process.stdout
        print(self._line, file=self._process.stdin, flush=True)
        last: deque[str] = deque(maxlen=40)
        for line in self._process.stdout:
            if line.startswith("SECONDS "):
                return float(line.split()[1])
            last.append(line)
        raise RuntimeError(f"Flink with {self._line} failed:\n{''.join(last)}")

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


def _compiled(program: Path) -> Path:
    """A copy of the program's folder with its classes, made on first use (Maven, JDK 17)."""
    copy: Path = ROOT / ".cache" / "flink"
    if not (copy / "lib").exists():
        shutil.copytree(program, copy, dirs_exist_ok=True)
        for path in [copy, *copy.rglob("*")]:
            path.chmod(path.stat().st_mode | 0o200)
        _call(copy, "mvn", "-q", "-B", "compile")
        _call(
            copy,
            "mvn",
            "-q",
            "-B",
            "dependency:copy-dependencies",
            "-DoutputDirectory=lib",
            "-DincludeScope=runtime",
        )
    made = copy / "target" / "classes" / "peers" / "Turns.class"
    if not made.exists() or made.stat().st_mtime < _TURNS.stat().st_mtime:
        _call(copy, "javac", "-cp", _CLASSPATH, "-d", "target/classes", str(_TURNS))
    return copy


def _call(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
