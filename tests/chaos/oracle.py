"""What has to be true: of every moment, as a reader sees it, and in the end."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from coordinator.storage import StorageError, open_storage
from coordinator.store.job_store import JobStore
from coordinator.store.records import Record
from tests.chaos.driver import CHECKPOINT, PARTITIONS, Input
from tests.chaos.rigs import UNREADABLE, Row, Target

T = TypeVar("T")

_PAUSE = 0.05
_PATIENCE = 300.0


class Reader(threading.Thread):
    """Polls everything that is visible while the drivers come and go. Whatever it finds wrong is in `violations`:

    * a row of a checkpoint whose complete record is not in storage yet: it was undecided when it became visible;
    * a row more than once;
    * a part of a checkpoint, where a checkpoint becomes visible as a whole;
    * for upserts: keys that are of different checkpoints, or one that goes back to an older.
    """

    def __init__(self, targets: Sequence[Target], job: str, storage: str, input: Input) -> None:
        super().__init__(daemon=True)
        self._targets, self._expected = targets, [set(ids) for ids in input.ids()]
        self._store = JobStore(open_storage(storage), job)
        self._complete = -1
        self._hottest: dict[str, float] = defaultdict(lambda: -1.0)
        self._over = threading.Event()
        self.violations: list[str] = []
        self.polls = 0

    def run(self) -> None:
        while not self._over.wait(_PAUSE):
            for target in self._targets:
                try:
                    self._look(target.name, target.rows(), target)
                    self.polls += 1
                except (*UNREADABLE, StorageError):
                    continue

    def remember(self) -> None:
        """What is complete now, before storage is set back or in the lineage that it is in since."""
        self._store.follow_newest_claim()
        newest = self._store.load_newest()
        self._complete = max(self._complete, newest.checkpoint_id if newest else -1)

    def stop(self) -> None:
        self._over.set()
        self.join()
        self._store.storage.close()

    def _look(self, name: str, rows: Sequence[Row], target: Target) -> None:
        found: dict[int, list[int]] = defaultdict(list)
        for id, _ in rows:
            if id >= 0:
                found[id // CHECKPOINT].append(id)
        if not found:
            return
        newest = max(found)
        if newest > self._complete:
            self.remember()
            if newest > self._complete:
                self._say(f"{name}: rows of checkpoint {newest} visible, complete is only {self._complete}")
        for n, ids in found.items():
            if len(set(ids)) < len(ids):
                twice = [id for id, count in Counter(ids).items() if count > 1]
                self._say(f"{name}: {len(twice)} row(s) of checkpoint {n} more than once: {sorted(twice)[:5]}")
            if target.atomic and set(ids) != self._expected[n]:
                self._say(f"{name}: {len(ids)} of the {len(self._expected[n])} rows of checkpoint {n} visible")
        if target.hot:
            self._look_at_hot(name, {id: amount for id, amount in rows if id < 0}, newest)

    def _look_at_hot(self, name: str, hot: dict[int, float], newest: int) -> None:
        if len(hot) < PARTITIONS or len(set(hot.values())) > 1 or max(hot.values()) != newest:
            self._say(f"{name}: keys of different checkpoints {hot} beside checkpoint {newest}")
        if max(hot.values(), default=-1) < self._hottest[name]:
            self._say(f"{name}: keys went back from checkpoint {self._hottest[name]} to {hot}")
        self._hottest[name] = max(self._hottest[name], *hot.values())

    def _say(self, violation: str) -> None:
        if violation not in self.violations:
            self.violations.append(violation)


class Verdict:
    """The end of a round, after a clean stop: every row once, nothing in doubt, the storage in order."""

    def __init__(self, targets: Sequence[Target], input: Input) -> None:
        self.lost = self.duplicated = 0
        self.violations: list[str] = []
        expected = Counter(id for ids in input.ids() for id in ids)
        for target in targets:
            rows = eventually(target.final)
            seen = Counter(id for id, _ in rows if id >= 0)
            lost, more = expected - seen, seen - expected
            self.lost += lost.total()
            self.duplicated += more.total()
            if lost:
                self.violations.append(f"{target.name}: {lost.total()} row(s) lost: {sorted(lost)[:5]}")
            if more:
                self.violations.append(f"{target.name}: {more.total()} row(s) too many: {sorted(more)[:5]}")
            hot = {id: amount for id, amount in rows if id < 0}
            if target.hot and hot != {-1 - p: float(len(input) - 1) for p in range(PARTITIONS)}:
                self.violations.append(f"{target.name}: updated keys end as {hot}")

    def ask_systems(self, targets: Sequence[Target], job: str) -> None:
        for target in targets:
            if left := eventually(partial(target.in_doubt, job)):
                self.violations.append(f"{target.name}: in doubt after a clean stop: {left}")

    def ask_storage(self, job: str, uri: str, last: int, retained: int) -> None:
        storage = open_storage(uri)
        store = JobStore(storage, job)
        complete = store.load_newest()
        newest = complete.checkpoint_id if complete else -1
        if newest != last:
            self.violations.append(f"storage: the newest checkpoint is {newest}, not {last}")
        records = [record for n in range(last + 1) if (record := store.get(n, 0))]
        kept = [record.checkpoint_id for record in records]
        if not last - retained <= min(kept, default=-1) or kept != list(range(min(kept, default=0), last + 1)):
            self.violations.append(f"storage: records of {kept} are kept, with {retained} to be retained")
        self.violations += [f"storage: {problem}" for record in records for problem in _doubles(record)]
        storage.close()


def _doubles(record: Record) -> list[str]:
    """A record must name each participant once, under a name of its own."""
    participants = Counter((c.sink, c.subtask) for c in record.committables)
    return [f"checkpoint {record.checkpoint_id} names {p} {n} times" for p, n in participants.items() if n > 1]


def eventually(read: Callable[[], T]) -> T:
    """Its result, as soon as the server answers."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return read()
        except UNREADABLE:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
