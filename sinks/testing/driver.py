"""Driver processes that are killed with SIGKILL where a test wants it.

They are forked from a server that has imported what they need and opened nothing, so that a start
costs milliseconds.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pyspark import cloudpickle

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointListener, Step
from sinks.base import Sink, TwoPhaseCommitSink
from sinks.optional import OPTIONAL
from sinks.testing.local import LocalQuery, Partitions

KILLED = -signal.SIGKILL
NOT_UNPICKLED = 97
"""The exit code of a process that could not unpickle its work."""


COMMIT_TIMEOUT = 120.0
"""Seconds in which a commit is tried again after an error. A slow machine does not take as long,
and a sink that never commits is told of after them."""

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


Around = Callable[[str, Callable[[], Any]], Any]
"""`around` has it called in place of each method of a sink, with the method's name and a function
that calls the method; what it returns is returned. Picklable."""
METHODS = tuple(
    dict.fromkeys(
        name
        for kind in (TwoPhaseCommitSink, *OPTIONAL)
        for name, value in vars(kind).items()
        if inspect.isfunction(value)
        and not name.startswith("_")
        and not hasattr(value, "__final__")
    )
)


@dataclass
class _Hook:
    """The `Around` of `Hooked`."""

    method: str
    nth: int | None
    after: bool
    hook: Callable[[], object]
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __call__(self, method: str, call: Callable[[], Any]) -> Any:
        due = method == self.method
        if due and self.nth:
            _CALLS[self.key] += 1
            due = _CALLS[self.key] == self.nth
        if due and not self.after:
            self.hook()
        result = call()
        if due and self.after:
            self.hook()
        return result


def Hooked(  # noqa: N802 - it makes a class, and its object
    sink: Sink,
    method: str,
    nth: int | None = 1,
    *,
    after: bool = False,
    hook: Callable[[], object] = die,
) -> Any:
    """The sink, with `hook` called before or after the n-th call of one of its methods, or, with
    None, each. The hook is `die`, or anything else picklable that a test wants to happen there.
    Calls are counted per process, over all copies."""
    return around(sink, _Hook(method, nth, after, hook))


def around(sink: Sink, call: Around) -> Any:
    """The sink, whose methods are called through `call`; it shares the state of `sink`."""
    inner = type(sink)
    hooked = call.method if isinstance(call, _Hook) else ""
    kinds = [kind for kind in OPTIONAL if hooked in vars(kind) and not hasattr(inner, hooked)]

    def through(method: str) -> Callable[..., Any]:
        def called(self: Any, *args: Any, **more: Any) -> Any:
            def of_sink() -> Any:
                result = getattr(super(cls, self), method)(*args, **more)
                return list(result) if method == "in_doubt" else result

            return call(method, of_sink)

        return called

    def reduced(self: Any, protocol: object) -> Any:
        return around, (_with_state(inner, self), call)

    methods = {name: through(name) for name in METHODS if hasattr(inner, name) or name == hooked}
    about = {"__module__": inner.__module__, "__reduce_ex__": reduced}
    cls: Any = type(inner.__name__, (inner, *kinds), methods | about)
    return _with_state(cls, sink)


def _with_state(kind: type, sink: Sink) -> Any:
    made: Any = object.__new__(kind)
    made.__dict__ = sink.__dict__
    return made


@dataclass
class Driver:
    """One start of a job in a process of its own."""

    job: str
    sink: Sink
    storage: str
    folder: Path
    """Of the query, as its checkpointLocation; what the driver writes to its output goes there,
    too."""
    input: Sequence[Partitions]
    listeners: Sequence[CheckpointListener] = ()
    config: CheckpointConfig = field(
        default_factory=lambda: CheckpointConfig(commit_timeout=COMMIT_TIMEOUT)
    )
    others: Sequence[Sink] = ()
    """Sinks of the same job beside `sink`."""
    kill_after: float | None = None
    """Seconds from the first step after which the process dies, wherever it is."""

    def run_here(self) -> None:
        if self.kill_after is not None:
            threading.Timer(self.kill_after, die).start()
        sinks = [self.sink, *self.others]
        with CheckpointCoordinator(
            self.job, sinks, self.storage, self.config, self.listeners
        ) as coordinator:
            LocalQuery(self.folder, self.input).run(coordinator)

    def start(self) -> BaseProcess:
        self.log = _new_log(self.folder)
        return _started(self.run_here, self.log, type(self.sink))

    def run(self, timeout: float = 300) -> int:
        """Run it to its end and return its exit code; `KILLED` if it was killed.

        What it wrote goes to stderr.
        """
        return _ended(self.start(), self.log, timeout)

    @property
    def said(self) -> str:
        """The end of what the last run wrote."""
        return _tail(self.log)


def in_process(
    work: Callable[[], object], folder: Path, preload: type, timeout: float = 300
) -> tuple[int, str]:
    """`work()`, picklable, in a process of its own: its exit code, and the end of what it wrote,
    which goes to stderr. `preload`: a class whose module it needs."""
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
    """`target(*args)` in a process of its own.

    The first call starts the server, which imports the module `preload` and those of ours that are
    imported here.
    """
    ours = [name for name in sys.modules if name.partition(".")[0] in ("coordinator", "sinks")]
    # pandas: pyarrow imports it late
    _forkserver.set_forkserver_preload([*ours, preload, "pandas"])
    process = _forkserver.Process(target=target, args=args, daemon=True)
    seed = os.environ.pop("PYTHONHASHSEED", None)  # the server's is another
    process.start()
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed
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
    redirect_output(log)
    try:
        work: Callable[[], object] = cloudpickle.loads(pickled)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(NOT_UNPICKLED)
    work()
