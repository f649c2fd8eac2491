"""Savepoints: a checkpoint with everything that it takes to go on from it, kept for the user, in any storage.

SAVEPOINT/NUMBER        the content of Spark's checkpointLocation up to that checkpoint: one stream of bytes, in chunks
SAVEPOINT/_metadata     which bytes are which file, and the checkpoint's record. Written last: it makes it a savepoint
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from coordinator.errors import CorruptRecord, SavepointError
from coordinator.protocol.records import Record, seal, unseal
from coordinator.storage import CheckpointStorage, open_storage

logger = logging.getLogger(__package__)

MARK = "_restored"
"""A file in the checkpointLocation that a restore has begun."""
_ADDRESS = re.compile(r"(?P<storage>.+)/(?P<id>savepoint-[a-z0-9-]+)/?(?P<options>\?.*)?")


@dataclass(frozen=True)
class SavedFile:
    """A file of Spark's checkpointLocation. `offset` counts bytes from the begin of the savepoint's first chunk."""

    path: str
    size: int
    sha256: str
    offset: int


@dataclass(frozen=True)
class Savepoint:
    """What a savepoint's `_metadata` says.

    `uri`: for `restore_savepoint`; a password in it is left out. `records`: the checkpoint's record and those of its
    replays; all that they name is visible. `sinks`: class by name. `created_at`: milliseconds since the epoch.
    `spark`: version of PySpark, and of the offset log with its settings. `chunk_size`: in bytes.
    """

    uri: str
    id: str
    records: tuple[Record, ...]
    sinks: Mapping[str, str]
    checkpoint_location: str
    storage: str
    created_at: int
    library: str
    spark: Mapping[str, Any]
    chunk_size: int
    files: tuple[SavedFile, ...]

    @property
    def record(self) -> Record:
        return self.records[0]

    @property
    def job(self) -> str:
        return self.record.job

    @property
    def lineage(self) -> str:
        return self.record.lineage

    @property
    def checkpoint_id(self) -> int:
        return self.record.checkpoint_id

    @property
    def size(self) -> int:
        """Bytes in all files."""
        return sum(file.size for file in self.files)

    def summary(self) -> dict[str, Any]:
        """JSON values for a user to read."""
        return {
            "uri": self.uri,
            "id": self.id,
            "job": self.job,
            "lineage": self.lineage,
            "checkpoint": self.checkpoint_id,
            "query_id": self.record.query_id,
            "offsets": list(self.record.offsets),
            "sinks": dict(self.sinks),
            "partitions": dict(self.record.partitions),
            "mode": self.record.mode,
            "created_at": self.created_at,
            "checkpoint_location": self.checkpoint_location,
            "storage": self.storage,
            "library": self.library,
            "spark": dict(self.spark),
            "files": len(self.files),
            "bytes": self.size,
        }

    def to_bytes(self) -> bytes:
        body = asdict(self) | {"records": [record.to_json() for record in self.records]}
        del body["uri"]
        return seal(body)

    @classmethod
    def from_bytes(cls, data: bytes, uri: str) -> Savepoint:
        where = f"the _metadata of savepoint {uri}"
        try:
            body = unseal(data, where)
            records = tuple(Record.from_json(record, where) for record in body["records"])
            files = tuple(SavedFile(**file) for file in body["files"])
            return cls(**body | {"uri": uri, "records": records, "files": files})
        except CorruptRecord as error:
            raise SavepointError(str(error)) from error
        except (KeyError, TypeError) as error:
            raise SavepointError(f"{where} lacks or misuses a field: {error!r}") from error


def chunk_key(id: str, number: int) -> str:
    return f"{id}/{number:010d}"


def list_savepoints(uri: str | CheckpointStorage) -> list[Savepoint]:
    """The whole savepoints in a storage, oldest first. Half-written and damaged ones are logged."""
    with opened(uri) as storage:
        found = []
        for id in sorted({key.partition("/")[0] for key in storage.list("") if key.startswith("savepoint-")}):
            try:
                found.append(load(storage, id))
            except SavepointError as error:
                logger.warning("%s", error)
        return sorted(found, key=lambda savepoint: savepoint.created_at)


def describe_savepoint(uri: str) -> Savepoint:
    """What a savepoint holds. Raises SavepointError if it is half-written or its `_metadata` damaged."""
    with opened_savepoint(uri) as (storage, id):
        return load(storage, id)


def dispose_savepoint(uri: str) -> None:
    """Delete a savepoint, also a half-written or damaged one. No job needs it: a restore makes a copy."""
    with opened_savepoint(uri) as (storage, id):
        delete(storage, id)


def load(storage: CheckpointStorage, id: str) -> Savepoint:
    uri = address_of(storage, id)
    data = storage.get(f"{id}/_metadata")
    if data is None:
        chunks = len(storage.list(id))
        raise SavepointError(
            f"there is no savepoint {uri}"
            if not chunks
            else f"savepoint {uri} is half-written: {chunks} chunk(s), but no _metadata, which is written last. "
            "Dispose of it, and take another."
        )
    return Savepoint.from_bytes(data, uri)


def delete(storage: CheckpointStorage, id: str) -> None:
    storage.delete(f"{id}/_metadata")
    for key in storage.list(id):
        storage.delete(key)


def address_of(storage: CheckpointStorage, id: str) -> str:
    base, mark, options = storage.uri.partition("?")
    return f"{base.rstrip('/')}/{id}{mark}{options}"


@contextmanager
def opened(uri: str | CheckpointStorage) -> Iterator[CheckpointStorage]:
    """Closes what it opens."""
    storage = open_storage(uri)
    try:
        yield storage
    finally:
        if storage is not uri:
            storage.close()


@contextmanager
def opened_savepoint(uri: str) -> Iterator[tuple[CheckpointStorage, str]]:
    parts = _ADDRESS.fullmatch(uri)
    if not parts:  # repeats nothing: it may hold a password
        raise SavepointError("not the URI of a savepoint: its last part has to be savepoint-…, as it was answered")
    with opened(parts["storage"] + (parts["options"] or "")) as storage:
        yield storage, parts["id"]
