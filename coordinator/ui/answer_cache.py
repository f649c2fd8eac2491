"""What pages ask of storage and of systems, so that a slow answer stops no other page."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.errors import CheckpointError, reason
from coordinator.operate.text import duration
from coordinator.storage import StorageError
from sinks.errors import SinkError

logger = logging.getLogger(__name__)

_PATIENCE = 5.0
"""Seconds that a page waits for an answer, from when it was asked for."""


@dataclass(frozen=True)
class Answer:
    """What was read, and why it could not be, or not all of it."""

    value: Any = None
    trouble: str = ""


@dataclass
class AnswerCache:
    """Answers by name. Each is read by one thread at a time and good for a while, so that many viewers cost no more
    than one. Who would wait too long gets the answer of before."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _answers: dict[str, tuple[float, Answer]] = field(default_factory=dict)
    _readers: dict[str, tuple[float, threading.Thread]] = field(default_factory=dict)

    def get(self, name: str, seconds: float, read: Callable[[list[str]], Any]) -> Answer:
        """`read` gets a list for sentences on what it leaves out."""
        with self._lock:
            until, answer = self._answers.get(name, (0.0, Answer()))
            if time.monotonic() < until:
                return answer
            if name not in self._readers:
                thread = threading.Thread(target=self._read, args=(name, seconds, read), daemon=True)
                self._readers[name] = time.monotonic(), thread
                thread.start()
            began, thread = self._readers[name]
        thread.join(max(0.0, began + _PATIENCE - time.monotonic()))
        if thread.is_alive():
            late = f"no answer for {duration(time.monotonic() - began)}"
            return replace(answer, trouble=f"{late}; what is shown is older" if until else late)
        return self._answers[name][1]

    def _read(self, name: str, seconds: float, read: Callable[[list[str]], Any]) -> None:
        bad: list[str] = []
        try:
            answer = Answer(read(bad), " ".join(bad))
        except Exception as error:
            if not isinstance(error, (CheckpointError, StorageError, SinkError, OSError)):
                logger.warning("%s could not be read", name, exc_info=True)
            answer = Answer(trouble=reason(error))
        with self._lock:
            self._answers[name] = time.monotonic() + seconds, answer
            del self._readers[name]
