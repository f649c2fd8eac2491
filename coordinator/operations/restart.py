"""Restarts of a failed query from the last complete checkpoint, by one of Flink's strategies."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coordinator import errors
from coordinator.coordinator import CheckpointCoordinator, refused_start
from coordinator.errors import Attempt, CheckpointError, JobFailed, reason
from coordinator.protocol.ports import BatchLeft
from sinks._util.log import get_logger
from sinks.errors import TargetChanged
from sinks.options import seconds

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

logger = get_logger("coordinator.restart")

FATAL = (
    errors.CheckpointGap,
    errors.CheckpointLocationMismatch,
    errors.CorruptRecord,
    errors.ExternalSystemBehind,
    errors.QueryNotAdopted,
    errors.NotExactlyOnce,
    TargetChanged,
    errors.ReplayMismatch,
    errors.SourceReplaced,
    errors.StorageBehind,
    errors.Superseded,
    errors.UnknownSink,
    errors.UnsupportedSpark,
    errors.WorkersNotReady,
    errors.WrongJob,
)
"""The errors that a restart cannot fix.

After `Superseded`, a restart would fence the driver that has taken over. After `TargetChanged`, it
would accept a change that nobody has looked at. A sink's other errors are not among them, as in
Flink, because a changed table is checked again, and somebody may fix a row or a permission
meanwhile.
"""
_POLL = 0.1


@dataclass(frozen=True)
class RunSummary:
    """The way in which a job came to its end.

    `stopped_by` is "SIGTERM", "SIGINT" or "stop"; "" if the query ended by itself.
    """

    attempts: tuple[Attempt, ...]
    stopped_by: str = ""


# ---------------------------------------------------------------------- strategies
@dataclass(frozen=True)
class NoRestart:
    """The strategy that never restarts: the first failure ends the job."""

    def delay_after(self, failed: Sequence[Attempt]) -> float | None:
        return None


@dataclass(frozen=True)
class FixedDelay:
    """The strategy that restarts at most `attempts` times in a run, `delay` after each failure.

    Times of all strategies are `sinks.options.Duration`: seconds, a timedelta, or a string such as
    "10 s".
    """

    attempts: int = 3
    delay: float = 10.0

    def __post_init__(self) -> None:
        _in_seconds(self, "delay")
        _at_least(self, 0, "attempts", "delay")

    def delay_after(self, failed: Sequence[Attempt]) -> float | None:
        return self.delay if len(failed) <= self.attempts else None


@dataclass(frozen=True)
class ExponentialDelay:
    """The strategy whose delay grows with each failure in a row.

    The delay begins with `initial` seconds, is multiplied by `multiplier` with each failure, and is
    at most `max` seconds. Chance makes it longer or shorter by up to the share `jitter`. After a
    start that ran for `reset_after` seconds, the delay and the count of `attempts` begin again. If
    `attempts` is None, the number of restarts has no limit.
    """

    initial: float = 1.0
    max: float = 60.0
    multiplier: float = 1.5
    jitter: float = 0.1
    reset_after: float = 3600.0
    attempts: int | None = None

    def __post_init__(self) -> None:
        _in_seconds(self, "initial", "max", "reset_after")
        _at_least(self, 0, "initial", "jitter", "attempts")
        _at_least(self, 1, "multiplier")
        if self.max < self.initial:
            raise ValueError(f"max must be at least initial, {self.initial:g}, not {self.max:g}")
        if self.jitter > 1:
            raise ValueError(f"jitter is a share of the delay, at most 1, not {self.jitter:g}")
        if self.reset_after <= 0:
            raise ValueError(f"reset_after must be more than 0 seconds, not {self.reset_after:g}")

    def delay_after(self, failed: Sequence[Attempt]) -> float | None:
        in_a_row = 1
        for attempt in reversed(failed[1:]):
            began, ended = attempt.span
            if ended - began >= self.reset_after:
                break
            in_a_row += 1
        if self.attempts is not None and in_a_row > self.attempts:
            return None
        try:
            delay = min(self.initial * self.multiplier ** (in_a_row - 1), self.max)
        except OverflowError:
            delay = self.max
        return min(delay * random.uniform(1 - self.jitter, 1 + self.jitter), self.max)


@dataclass(frozen=True)
class FailureRate:
    """The strategy that ends the job after more than `max_failures` within `interval` seconds.

    Otherwise it restarts `delay` seconds later.
    """

    max_failures: int = 3
    interval: float = 60.0
    delay: float = 1.0

    def __post_init__(self) -> None:
        _in_seconds(self, "interval", "delay")
        _at_least(self, 1, "max_failures")
        _at_least(self, 0, "delay")
        if self.interval <= 0:
            raise ValueError(f"interval must be more than 0 seconds, not {self.interval:g}")

    def delay_after(self, failed: Sequence[Attempt]) -> float | None:
        since = failed[-1].span[1] - self.interval
        recent = [attempt for attempt in failed if attempt.span[1] >= since]
        return self.delay if len(recent) <= self.max_failures else None


RestartStrategy = NoRestart | FixedDelay | ExponentialDelay | FailureRate


def _in_seconds(strategy: Any, *names: str) -> None:
    for name in names:
        object.__setattr__(strategy, name, seconds(getattr(strategy, name), name))


def _at_least(strategy: Any, least: float, *names: str) -> None:
    for name in names:
        value = getattr(strategy, name)
        if value is not None and not value >= least:
            raise ValueError(f"{name} must be {least:g} or more, not {value!r}")


# ---------------------------------------------------------------------- running
def run(
    query_factory: Callable[[], StreamingQuery],
    restart: RestartStrategy = FixedDelay(),
    coordinator: CheckpointCoordinator | None = None,
    stop: threading.Event | None = None,
) -> RunSummary:
    """Start the query, and start it again after each failure, as long as the strategy allows.

    `query_factory` starts the query, each time with the same checkpointLocation and `coordinator`,
    so the query continues from the last complete checkpoint. The coordinator knows which errors a
    restart cannot fix, and is closed at the end. Without it, each failure of the query leads to a
    restart.

    SIGTERM and SIGINT (if this is called in the main thread), and setting `stop`, stop the job
    cleanly: a complete checkpoint is committed, an incomplete one aborted. Returns when the query
    was stopped or has ended. Raises `JobFailed`, from the last error, if it gives up.
    """
    if refusal := refused_start.get():
        raise refusal
    attempts: list[Attempt] = []
    stopping = _Stopping(stop)
    with stopping.on_signals():
        try:
            while not stopping.asked_by:
                error, fatal = _attempt(query_factory, coordinator, stopping, attempts)
                if error is None:
                    break
                delay = None if fatal else restart.delay_after(attempts)
                if delay is None:
                    why = (
                        "a restart cannot fix it" if fatal else f"{restart} allows no other attempt"
                    )
                    raise JobFailed(
                        f"{_job(coordinator)} failed at attempt {len(attempts)}, and {why}: "
                        f"{type(error).__name__}: {error}",
                        attempts,
                    ) from error
                # The traceback and the other errors would keep the batch in memory.
                error.__traceback__ = error.__cause__ = error.__context__ = None
                logger.info("attempt %d starts in %.3g s", len(attempts) + 1, delay)
                stopping.sleep(delay)
        finally:
            if coordinator:
                coordinator.close()
    return RunSummary(tuple(attempts), stopping.asked_by)


class _Stopping:
    """The wish to end the job, and who asked for that first.

    A signal's handler sets no Event, because it may interrupt the main thread inside that very
    Event.
    """

    def __init__(self, event: threading.Event | None) -> None:
        self._event = event
        self._by = ""
        self._before: dict[signal.Signals, Any] = {}

    @property
    def asked_by(self) -> str:
        if not self._by and self._event and self._event.is_set():
            self._by = "stop"
        return self._by

    def sleep(self, time_off: float) -> None:
        end = time.monotonic() + time_off
        while not self.asked_by and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _POLL))

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        self.listen()
        try:
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def listen(self) -> None:
        """Install the handlers of the signals.

        This is called again after each start, since a new SparkContext takes SIGINT for itself.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                handler = signal.signal(number, self._on_signal)
                if handler != self._on_signal:
                    self._before[number] = signal.SIG_DFL if handler is None else handler

    def _on_signal(self, number: int, _: object) -> None:
        self._by = self._by or signal.Signals(number).name


def _attempt(
    query_factory: Callable[[], StreamingQuery],
    coordinator: CheckpointCoordinator | None,
    stopping: _Stopping,
    attempts: list[Attempt],
) -> tuple[Exception | None, bool]:
    """Start the query, and wait for its end.

    Returns what the query failed with, and whether a restart cannot fix that.
    """
    number = len(attempts) + 1
    started = time.time()
    began = time.monotonic()
    before = _offsets(coordinator)
    logger.info("%s: attempt %d starts after offsets %s", _job(coordinator), number, before)
    if coordinator:
        coordinator.last_error = None
    refused = True
    error = None
    try:
        query = query_factory()
        refused = False
        stopping.listen()
        while not query.awaitTermination(_POLL):  # type: ignore[arg-type]
            if stopping.asked_by:
                logger.info("%s: stopping, asked by %s", _job(coordinator), stopping.asked_by)
                coordinator.stop(query) if coordinator else query.stop()
                break
    except Exception as raised:
        error = raised
    swallowed = coordinator.swallowed_error if coordinator and not error else None
    stopped = stopping.asked_by or not (error or swallowed)  # maybe by somebody else
    if swallowed:
        error = swallowed
    elif coordinator and coordinator.last_error:
        error = coordinator.last_error  # Spark passes on only its text
    if stopped and (isinstance(error, BatchLeft) or not isinstance(error, CheckpointError)):
        error = None  # otherwise of Spark's jobs that were canceled
    after = _offsets(coordinator)
    attempts.append(
        Attempt(number, started, time.time(), before, after, error, (began, time.monotonic()))
    )
    logger.info("%s: attempt %d ended at offsets %s", _job(coordinator), number, after)
    if error:
        logger.warning("%s: attempt %d failed: %s", _job(coordinator), number, reason(error))
    return (None, False) if stopped or not error else (error, _is_fatal(error, refused=refused))


def _is_fatal(error: Exception, *, refused: bool) -> bool:
    from py4j.protocol import Py4JNetworkError
    from pyspark.errors import AnalysisException, IllegalArgumentException

    # Spark's JVM is gone, and it starts only once in a process.
    gone = isinstance(error, (Py4JNetworkError, ConnectionRefusedError))
    wrong = isinstance(error, (AnalysisException, IllegalArgumentException, TypeError, ValueError))
    return isinstance(error, FATAL) or gone or (refused and wrong)


def _offsets(coordinator: CheckpointCoordinator | None) -> tuple[str, ...]:
    try:
        return coordinator.newest_offsets() if coordinator else ()
    except Exception as error:
        logger.warning("the offsets of the newest checkpoint cannot be read: %s", reason(error))
        return ()


def _job(coordinator: CheckpointCoordinator | None) -> str:
    return f"job {coordinator.job}" if coordinator else "the query"
