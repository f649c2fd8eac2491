"""Driver processes that are killed with SIGKILL where a test wants it.

They are forked from a server that has imported what they need and opened nothing, so that a start costs milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from sinks.audit import Audit, Part
from sinks.base import TwoPhaseCommitSink
from sinks.dead_letters import FoundLetters, Refusal
from sinks.testing.local import LocalQuery, Partitions
from sinks.transaction import Checkpoint, CommitOutcome, Committable, Fingerprint, Identity, TransactionContext

KILLED = -signal.SIGKILL


_CALLS: Counter[str] = Counter()


def die() -> None:
    """SIGKILL to oneself: no handler, no finally, no flush."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class KillAt(CheckpointListener):
    """Dies at the n-th time that the driver comes to `step` (of `checkpoint_id`, if given)."""

    step: Step
    nth: int = 1
    checkpoint_id: int | None = None

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if step is self.step and self.checkpoint_id in (None, checkpoint_id):
            self.nth -= 1
            if self.nth == 0:
                die()


class Hooked(TwoPhaseCommitSink[Any]):
    """A sink around a sink, that calls `hook` before or after the n-th call of one of its methods. The hook is `die`,
    or anything else picklable that a test wants to happen there. Calls are counted per process, over all copies."""

    def __init__(
        self,
        inner: TwoPhaseCommitSink[Any],
        method: str,
        nth: int = 1,
        *,
        after: bool = False,
        hook: Callable[[], object] = die,
    ) -> None:
        super().__init__(name=inner.name, transform=inner.transform)
        self.dead_letters, self.max_dead_letters = inner.dead_letters, inner.max_dead_letters
        self.inner, self.method, self.nth, self.after, self.hook = inner, method, nth, after, hook
        self.key = uuid.uuid4().hex

    def _call(self, method: str, *args: Any) -> Any:
        due = False
        if method == self.method:
            _CALLS[self.key] += 1
            due = _CALLS[self.key] == self.nth
        if due and not self.after:
            self.hook()
        result = getattr(self.inner, method)(*args)
        if due and self.after:
            self.hook()
        return result

    def open(self) -> None:
        self._call("open")

    def close(self) -> None:
        self._call("close")

    def check(self, schema: pa.Schema) -> None:
        self._call("check", schema)

    @property
    def evolves(self) -> bool:
        return self.inner.evolves

    def evolve(self, schema: pa.Schema) -> None:
        self._call("evolve", schema)

    def begin_transaction(self, context: TransactionContext) -> Any:
        return self._call("begin_transaction", context)

    def write(self, transaction: Any, batch: pa.RecordBatch) -> None:
        self._call("write", transaction, batch)

    def write_accepted(self, transaction: Any, batch: pa.RecordBatch, most: int) -> Sequence[Refusal]:
        refused: Sequence[Refusal] = self._call("write_accepted", transaction, batch, most)
        return refused

    def sum_up(self, transaction: Any, fingerprint: Fingerprint) -> None:
        self.inner.sum_up(transaction, fingerprint)

    def pre_commit(self, transaction: Any) -> Identity | Committable:
        result: Identity | Committable = self._call("pre_commit", transaction)
        return result

    def rollback(self, transaction: Any) -> None:
        self._call("rollback", transaction)

    def commit_directly(self, transaction: Any) -> None:
        self._call("commit_directly", transaction)

    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        self._call("validate_all", checkpoint, committables)

    def commit(self, committable: Committable) -> CommitOutcome:
        outcome: CommitOutcome = self._call("commit", committable)
        return outcome

    def commit_all(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        if type(self.inner).commit_all is TwoPhaseCommitSink.commit_all:
            return super().commit_all(checkpoint, committables)
        outcomes: Sequence[CommitOutcome | Exception] = self._call("commit_all", checkpoint, committables)
        return outcomes

    def abort(self, transaction: Identity) -> None:
        self._call("abort", transaction)

    def purge(self, checkpoint: Checkpoint) -> None:
        self._call("purge", checkpoint)

    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        memory: Mapping[str, int] | None = self._call("committed_checkpoints", job)
        return memory

    def in_doubt(self, job: str) -> Iterable[Identity]:
        return list(self._call("in_doubt", job))

    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        return self.inner.audit(job, parts, quick=quick)

    def find_letters(self, job: str, sink: str, most: int) -> FoundLetters | None:
        found: FoundLetters | None = self._call("find_letters", job, sink, most)
        return found


@dataclass
class Driver:
    """One start of a job in a process of its own."""

    job: str
    sink: TwoPhaseCommitSink[Any]
    storage: str
    folder: Path
    input: Sequence[Partitions]
    listeners: Sequence[CheckpointListener] = ()
    config: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(commit_timeout=30))
    others: Sequence[TwoPhaseCommitSink[Any]] = ()
    """Sinks of the same job beside `sink`."""
    kill_after: float | None = None
    """Seconds from the first step after which the process dies, wherever it is."""

    def run_here(self) -> None:
        if self.kill_after is not None:
            threading.Timer(self.kill_after, die).start()
        sinks = [self.sink, *self.others]
        with CheckpointCoordinator(self.job, sinks, self.storage, self.config, self.listeners) as coordinator:
            LocalQuery(self.folder, self.input).run(coordinator)

    def start(self) -> BaseProcess:
        self.log = _new_log(self.folder)
        return _started(self.run_here, self.log, type(self.sink))

    def run(self, timeout: float = 300) -> int:
        """Run it to its end and return its exit code; `KILLED` if it was killed. What it wrote goes to stderr."""
        return _ended(self.start(), self.log, timeout)

    @property
    def said(self) -> str:
        """The end of what the last run wrote."""
        return _tail(self.log)


def in_process(work: Callable[[], object], folder: Path, preload: type, timeout: float = 300) -> tuple[int, str]:
    """`work()`, picklable, in a process of its own: its exit code, and the end of what it wrote, which goes to stderr.
    `preload`: a class whose module it needs."""
    log = _new_log(folder)
    return _ended(_started(work, log, preload), log, timeout), _tail(log)


def _new_log(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".log", delete=False) as file:
        return Path(file.name)


def _started(work: Callable[[], object], log: Path, preload: type) -> BaseProcess:
    pickled = cloudpickle.dumps(work)  # type: ignore[no-untyped-call]
    return fork(_work, pickled, log, dict(os.environ), preload=preload.__module__)


def _ended(process: BaseProcess, log: Path, timeout: float) -> int:
    try:
        process.join(timeout)
        if process.exitcode is None:
            raise TimeoutError(f"the driver has not ended within {timeout:g} s")
        return process.exitcode
    finally:
        process.kill()
        process.join()
        sys.stderr.write(log.read_text(errors="replace"))


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4_000:]


_forkserver = multiprocessing.get_context("forkserver")


def fork(target: Callable[..., None], *args: Any, preload: str) -> BaseProcess:
    """`target(*args)` in a process of its own. The first call starts the server, which imports the module `preload`
    and those of ours that are imported here."""
    ours = [name for name in sys.modules if name.partition(".")[0] in ("coordinator", "sinks")]
    _forkserver.set_forkserver_preload([*ours, preload, "pandas"])  # pandas: pyarrow imports it late
    process = _forkserver.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def redirect_output(file: Path) -> None:
    """All that this process writes goes to the end of `file` from now on."""
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _work(pickled: bytes, log: Path, environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    work: Callable[[], object] = cloudpickle.loads(pickled)
    redirect_output(log)
    work()
