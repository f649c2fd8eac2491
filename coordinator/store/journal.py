"""The journal of a job, beside its records.

It has heartbeats, statistics, and notes between operators and drivers. It decides nothing about
rows. The last heartbeat only tells when a start that cannot be right is refused: after it has
claimed a generation if the driver before says that it has ended, and before the claim otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.errors import CorruptRecord
from coordinator.store.encoding import corrupt_if_malformed, require_field_types, seal, unseal
from coordinator.store.folder import JobFolder, new_heartbeat
from coordinator.store.records import Claim, Heartbeat
from sinks._util.log import get_logger
from sinks._util.machine import machine

logger = get_logger(__name__)

_STATISTICS = re.compile(r"/(\d+)\.(\d+)\.[0-9a-f]+$")
_NOTE = re.compile(r"\d{15}\.[0-9a-f]{16}")


class Journal:
    """The journal of one job."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder

    # ------------------------------------------------------------------ heartbeats
    def give_heartbeat(
        self,
        generation: int,
        number: int,
        next: float,
        ended: str = "",
        now: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the heartbeat `number` of a generation, in place of all earlier ones."""
        folder = f"{self._folder.root}/alive"
        key = f"{folder}/{generation:010d}.{number:010d}"
        self._folder.timed_storage.put_if_absent(
            key,
            seal(
                {
                    "sign": new_heartbeat(self._folder.storage, next, ended).to_json(),
                    "now": now or {},
                }
            ),
        )
        for old in self._folder.timed_storage.list(folder):
            if old < key:
                self._folder.timed_storage.delete(old)

    def last_heartbeat(self, claim: Claim) -> Heartbeat:
        """Return the newest heartbeat of the driver that holds the claim.

        The claim itself is the first heartbeat.
        """
        folder = f"{self._folder.root}/alive"
        own = f"{folder}/{claim.generation:010d}."
        while keys := [
            key for key in self._folder.timed_storage.list(folder) if key.startswith(own)
        ]:
            data = self._folder.timed_storage.get(keys[-1])
            if data is not None:  # if it is None, a newer one has its place
                body = unseal(data, self._folder.describe(keys[-1]))
                with corrupt_if_malformed(self._folder.describe(keys[-1])):
                    return require_field_types(Heartbeat(**body["sign"], now=body.get("now", {})))
        return claim.sign

    # ------------------------------------------------------------------ statistics
    def add_statistics(self, new: Sequence[Mapping[str, Any]], *, together: int, keep: int) -> None:
        """Add the statistics of some tries to those of the newest object.

        If that object has as many as `together`, another object is begun. Then the oldest objects
        that are not needed for the newest `keep` tries are deleted. Two drivers at once write some
        tries twice, and lose none.
        """
        objects = self.statistics_objects()
        number, count, newest = objects[-1] if objects else (0, 0, "")
        before: list[Mapping[str, Any]] = []
        if count >= together:
            newest = ""
        elif newest:
            try:
                before = self.read_statistics(newest)
            except CorruptRecord as error:
                logger.warning(
                    "statistics of job %s go on beside what cannot be read: %s",
                    self._folder.job,
                    error,
                )
                newest = ""
        number += not newest
        count = len(before) + len(new)
        key = f"{self._folder.root}/statistics/{number:010d}.{count:06d}.{machine.random.token(4)}"
        self._folder.timed_storage.put_if_absent(
            key, seal({"job": self._folder.job, "checkpoints": [*before, *new]})
        )
        if newest:
            self._folder.timed_storage.delete(newest)
        for _, older, old in reversed([each for each in objects if each[2] != newest]):
            if count >= keep:
                self._folder.timed_storage.delete(old)
            count += older

    def statistics_objects(self) -> list[tuple[int, int, str]]:
        """Return number, count and key of each object with statistics, oldest first.

        An object never changes. Keys of another form are passed over.
        """
        keys = self._folder.timed_storage.list(f"{self._folder.root}/statistics")
        matches = [(_STATISTICS.search(key), key) for key in keys]
        return [(int(name[1]), int(name[2]), key) for name, key in matches if name]

    def read_statistics(self, key: str) -> list[Mapping[str, Any]]:
        """Return the statistics in one object, oldest first.

        Some of them may be in another object, too.
        """
        body = self._folder.read(key)
        if body is None:
            return []
        with corrupt_if_malformed(self._folder.describe(key)):
            return [dict(checkpoint) for checkpoint in body["checkpoints"]]

    # ---------------------------------------------------------- notes between operators and drivers
    def new_note_id(self) -> tuple[str, Heartbeat]:
        """Return the id of a new note, and a sign that tells who puts the note and when.

        The id begins with the milliseconds since the epoch.
        """
        sign = new_heartbeat(self._folder.storage)
        return f"{sign.at:015d}.{machine.random.token(8)}", sign

    def put_note(self, folder: str, id: str, body: Mapping[str, Any]) -> None:
        """Put a note, unless it is there. `folder` is request, begun or answer."""
        self._folder.timed_storage.put_if_absent(
            f"{self._folder.root}/{folder}/{id}", seal({"job": self._folder.job, "note": body})
        )

    def note_ids(self, folder: str) -> list[str]:
        """Return the ids of the notes in a folder, oldest first.

        Keys of another form are passed over.
        """
        ids = [
            key.rpartition("/")[2]
            for key in self._folder.timed_storage.list(f"{self._folder.root}/{folder}")
        ]
        return [id for id in ids if _NOTE.fullmatch(id)]

    def read_note(self, folder: str, id: str) -> Mapping[str, Any] | None:
        key = f"{self._folder.root}/{folder}/{id}"
        body = self._folder.read(key)
        if body is None:
            return None
        if not isinstance(note := body.get("note"), dict):
            raise CorruptRecord(f"{self._folder.describe(key)} is no note of this library")
        return note

    def delete_note(self, folder: str, id: str) -> None:
        self._folder.timed_storage.delete(f"{self._folder.root}/{folder}/{id}")
