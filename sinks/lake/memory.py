"""What a lake table itself remembers of a sink's transactions, changed only in one step with the table."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field

from sinks.transaction import Checkpoint, TransactionId


@dataclass
class Memory:
    """`newest` has by lineage the newest committed checkpoint; `committed` and `aborted` name transactions by lineage
    and checkpoint."""

    newest: dict[str, int] = field(default_factory=dict)
    committed: dict[str, list[str]] = field(default_factory=dict)
    aborted: dict[str, list[str]] = field(default_factory=dict)

    def is_committed(self, name: TransactionId) -> bool | None:
        """None if the table has decided nothing of it."""
        if _short(name) in self.committed.get(_place(name), ()):
            return True
        return False if _short(name) in self.aborted.get(_place(name), ()) else None

    def commit(self, name: TransactionId) -> None:
        self.committed.setdefault(_place(name), []).append(_short(name))
        self.newest[name.lineage] = max(name.checkpoint, self.newest.get(name.lineage, -1))

    def abort(self, name: TransactionId) -> None:
        self.aborted.setdefault(_place(name), []).append(_short(name))

    def others(self, lineage: str, checkpoint: int, names: Collection[TransactionId]) -> tuple[str, ...]:
        """Committed transactions of a checkpoint beside these."""
        known = {_short(name) for name in names}
        shorts = self.committed.get(f"{lineage}.{checkpoint}", ())
        return tuple(f"{lineage}.{checkpoint}.{short}" for short in shorts if short not in known)

    def forget(self, checkpoint: Checkpoint, marked: Collection[TransactionId]) -> None:
        """What nobody asks for any more. What still has a mark would be taken for undecided, and is kept."""
        undecided = {_place(name) for name in marked}
        for place in {*self.committed, *self.aborted} - undecided:
            lineage, _, number = place.partition(".")
            if lineage == checkpoint.lineage and int(number) < checkpoint.oldest_retained:
                self.committed.pop(place, None)
                self.aborted.pop(place, None)

    def to_json(self) -> str:
        return json.dumps(self.__dict__, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes | None) -> Memory:
        return cls(**json.loads(text)) if text else cls()


def _place(name: TransactionId) -> str:
    return f"{name.lineage}.{name.checkpoint}"


def _short(name: TransactionId) -> str:
    return f"{name.subtask}.{name.attempt_label}"
