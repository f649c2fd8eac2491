"""A Spark streaming job in a process group of its own: driver, JVM and Python workers, killable as one.

Spark takes seconds to start. So the jobs of a test process follow each other in one such group, each in a session of
its own, until one of them kills it, or one needs other settings of the JVM.
"""

from __future__ import annotations

import atexit
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark import cloudpickle

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from sinks._util.machine import Clock
from sinks.base import TwoPhaseCommitSink
from sinks.testing import rows
from sinks.testing.driver import redirect_output
from tests.spark.workers import FILES, WORKERS

KILLED = -signal.SIGKILL


def die_with_all() -> None:
    """SIGKILL to driver, JVM and workers at once, as when the machine goes down."""
    os.killpg(0, signal.SIGKILL)


@dataclass
class KillGroupAt(CheckpointListener):
    step: Step
    checkpoint_id: int

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if step is self.step and checkpoint_id == self.checkpoint_id:
            die_with_all()


@dataclass
class KillGroupTogether(CheckpointListener):
    """Stands still at its step, for ever: when as many as that stand at theirs, the last one to come kills all."""

    step: Step
    checkpoint_id: int
    meeting: Path
    count: int
    name: str

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if step is self.step and checkpoint_id == self.checkpoint_id:
            (self.meeting / self.name).touch()
            if len(os.listdir(self.meeting)) == self.count:
                die_with_all()
            threading.Event().wait()


@dataclass
class Once:
    """Calls `hook` the first time that any process calls this; `marker` is a file that must not exist."""

    marker: Path
    hook: Callable[[], None]

    def __call__(self) -> None:
        try:
            os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        self.hook()


def wait_for(condition: Callable[[], Any], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


def write_input(folder: Path, batches: int = 3, files: int = 3, rows_per_file: int = 50) -> list[int]:
    """Parquet files, `files` of them a batch, one partition each. Returns the ids in them."""
    folder.mkdir(parents=True)
    for i in range(batches * files):
        path = folder / f"{i:04d}.parquet"
        pq.write_table(rows(1000 * i, rows_per_file), path)
        os.utime(path, (1_700_000_000 + i, 1_700_000_000 + i))
    return [1000 * i + j for i in range(batches * files) for j in range(rows_per_file)]


CONF = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.files.maxPartitionBytes": "4096",
    "spark.sql.files.openCostInBytes": "4096",
    "spark.ui.showConsoleProgress": "false",
    **WORKERS,
    **FILES,
}


@dataclass(frozen=True)
class Kind:
    """Jobs of one kind may follow each other in a driver, as may those that ask for less."""

    place: str
    settings: Mapping[str, str] = field(default_factory=dict)

    def covers(self, other: Kind) -> bool:
        return self.place == other.place and other.settings.items() <= self.settings.items()


@dataclass
class SparkJob:
    """Reads `source` to its end into the sinks: without one, `folder/input`, three files a batch."""

    folder: Path
    sinks: Sequence[TwoPhaseCommitSink[Any]]
    job: str = "spark-job"
    master: str = "local[2,4]"
    listeners: Sequence[CheckpointListener] = ()
    config: CheckpointConfig = field(default_factory=CheckpointConfig)
    clock: Clock | None = None
    conf: Mapping[str, str] = field(default_factory=dict)
    source: Callable[[Any], Any] | None = None
    """SparkSession -> streaming DataFrame."""
    shape: Callable[[Any], Any] | None = None
    """DataFrame -> DataFrame between source and sinks."""
    transforms: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """By sink name; beside the sinks, since a sink's pickle, by which this job gets into its process, leaves it out."""
    output_mode: str = "append"
    files_per_batch: int = 3
    beside: Sequence[SparkJob] = ()
    """Other jobs, that run at the same time in the same driver, with this one's master and settings of the JVM."""
    log: Path = field(init=False)

    def run_here(self) -> None:
        with ExitStack() as stack:
            queries = [job.begin_here(stack) for job in (self, *self.beside)]
            while queries:
                queries = [query for query in queries if not query.awaitTermination(0.1)]

    def begin_here(self, stack: ExitStack) -> Any:
        """The query; whoever closes `stack` ends its coordinator."""
        spark = self.session()
        df = self.source(spark) if self.source else self._files(spark)
        df = self.shape(df) if self.shape else df
        storage = f"file://{self.folder / 'storage'}"
        for sink in self.sinks:
            sink.transform = self.transforms.get(sink.name)
        coordinator = CheckpointCoordinator(
            self.job, self.sinks, storage, self.config, self.listeners, clock=self.clock
        )
        return (
            df.writeStream.foreachBatch(stack.enter_context(coordinator))
            .outputMode(self.output_mode)
            .option("checkpointLocation", str(self.folder / "spark"))
            .trigger(availableNow=True)
            .start()
        )

    def session(self) -> Any:
        """One of its own; that logs nothing."""
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master(self.master)
        for key, value in (CONF | self._of_the_jvm()).items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate().newSession()
        for key, value in self.conf.items():
            if key not in self._of_the_jvm():
                spark.conf.set(key, value)
        spark.sparkContext.setLogLevel("OFF")
        return spark

    def _files(self, spark: Any) -> Any:
        reader = spark.readStream.schema("id long, name string, amount double")
        return reader.option("maxFilesPerTrigger", self.files_per_batch).parquet(str(self.folder / "input"))

    def start(self) -> subprocess.Popen[bytes]:
        """In a process of its own, which ends with the job."""
        host = Host(self.kind(), self.folder / "local")
        host.begin(self)
        host.last()
        return host.process

    def run(self, timeout: float = 500, meanwhile: Callable[[], object] = lambda: None) -> int:
        """Its exit code: 0, 1 if it failed, `KILLED`. While it runs, `meanwhile` is called again and again."""
        host, code = Host.warm(self.kind()), None
        try:
            host.begin(self)
            code = host.wait(timeout, meanwhile)
            return code
        finally:
            if code not in (0, 1):
                host.end()

    def kind(self) -> Kind:
        return Kind(self.master, self._of_the_jvm())

    def _of_the_jvm(self) -> dict[str, str]:
        """Settings that a session cannot change."""
        return {key: value for key, value in self.conf.items() if not key.startswith("spark.sql.")}

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process group, and wait until nothing of it runs."""
    if process.stdin:
        process.stdin.close()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        process.poll()
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.05)


class Host:
    """A process group that runs one job after the other; it dies when the process that started it does."""

    _warm: Host | None = None

    def __init__(self, kind: Kind, local: Path) -> None:
        """`local` is Spark's spark.local.dir, until the last job has ended."""
        self.kind, self._local = kind, local
        self._answers, theirs = os.pipe()
        environment = {
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "SPARK_LOCAL_DIRS": str(local),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.spark.job import serve; serve({theirs})"],
            start_new_session=True,
            stdin=subprocess.PIPE,
            pass_fds=[theirs],
            env=os.environ | environment,
        )
        os.close(theirs)

    @classmethod
    def warm(cls, kind: Kind) -> Host:
        """One that has run a job and takes this kind too, or a new one."""
        if cls._warm and (not cls._warm.kind.covers(kind) or cls._warm.process.poll() is not None):
            cls._warm.end()
        if cls._warm is None:
            cls._warm = Host(kind, Path(tempfile.mkdtemp(prefix="spark-local-")))
        return cls._warm

    def begin(self, job: SparkJob) -> None:
        with tempfile.NamedTemporaryFile(dir=job.folder, suffix=".job", delete=False) as file:
            file.write(cloudpickle.dumps(job))
        job.log = Path(file.name).with_suffix(".log")
        job.log.touch()
        self._tell(file.name)

    def last(self) -> None:
        """After the job that has begun, the process ends with its exit code."""
        self._tell("")

    def wait(self, timeout: float, meanwhile: Callable[[], object]) -> int:
        end = time.monotonic() + timeout
        while not select.select([self._answers], [], [], 0.05)[0]:
            if time.monotonic() > end:
                raise TimeoutError(f"the job has not ended within {timeout:g} s")
            meanwhile()
        answer = os.read(self._answers, 1)
        return int(answer) if answer else self.process.wait()

    def end(self) -> None:
        end_group(self.process)
        os.close(self._answers)
        shutil.rmtree(self._local, ignore_errors=True)
        if Host._warm is self:
            Host._warm = None

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()


@atexit.register
def cool() -> None:
    """End the group that waits for another job, if there is one."""
    if Host._warm is not None:
        Host._warm.end()


def serve(answers: int) -> None:
    """Inside: run what the lines of stdin name, until there is no more."""
    jobs = queue.SimpleQueue[str]()
    threading.Thread(target=_listen, args=[jobs], daemon=True).start()
    code = 0
    while name := jobs.get():
        redirect_output(Path(name).with_suffix(".log"))
        try:
            cloudpickle.loads(Path(name).read_bytes()).run_here()
            code = 0
        except Exception:
            traceback.print_exc()
            code = 1
        os.write(answers, b"%d" % code)
    sys.exit(code)


def _listen(jobs: queue.SimpleQueue[str]) -> None:
    with open(0, closefd=False) as lines:
        for line in lines:
            jobs.put(line.strip())
    die_with_all()
