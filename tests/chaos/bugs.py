"""Deliberate bugs, switched on inside a driver process: the harness has to find each of them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coordinator.protocol import decisions
from coordinator.protocol.fence import CommitPermit
from coordinator.protocol.protocol import CheckpointProtocol
from coordinator.storage.files import FileStorage
from coordinator.store.records import CompletedCheckpoint, Record

# Private members are replaced, for want of any way to ask the product for a bug.


def commit_before_complete() -> None:
    decide = CheckpointProtocol.decide

    def commit_then_decide(
        self: CheckpointProtocol, record: Record, before: CompletedCheckpoint | None = None
    ) -> CommitPermit:
        self.commit_once(CommitPermit(before.with_round(record) if before else CompletedCheckpoint((record,))))
        return decide(self, record, before)

    _replace(CheckpointProtocol, "decide", commit_then_decide)


def recovery_without_sweep() -> None:
    _replace(CheckpointProtocol, "sweep", lambda self: None)


def put_over_what_is_there() -> None:
    def put(self: Any, key: str, value: bytes) -> bool:
        path = Path(self._root) / key
        with self._errors("cannot write", key):
            path.parent.mkdir(parents=True, exist_ok=True)
            staged = path.with_name(f"{path.name}#{uuid.uuid4().int}")
            staged.write_bytes(value)
            os.replace(staged, path)
        return True

    _replace(FileStorage, "put_if_absent", put)


def replay_without_fingerprint() -> None:
    _replace(decisions, "require_same_rows", lambda lost, acks: None)


BUGS: dict[str, Callable[[], None]] = {
    "commit-before-complete": commit_before_complete,
    "recovery-without-sweep": recovery_without_sweep,
    "put-without-if-absent": put_over_what_is_there,
    "replay-without-fingerprint": replay_without_fingerprint,
}


def switch_on(name: str | None) -> None:
    if name is not None:
        BUGS[name]()


def _replace(owner: Any, name: str, value: Any) -> None:
    if not hasattr(owner, name):
        raise AttributeError(f"{owner} has no {name} any more: this deliberate bug has to be rewritten")
    setattr(owner, name, value)
