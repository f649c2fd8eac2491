"""Savepoints, kept for the user in any storage.

A savepoint is a checkpoint with everything that a query needs to continue from it.

* SAVEPOINT/NUMBER: the content of Spark's checkpointLocation up to that checkpoint, as a tar, in
  chunks
* SAVEPOINT/_metadata: the chunks' checksums, and the checkpoint's record. It is written last, and
  only with it is this a savepoint
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from coordinator.errors import CorruptRecord, SavepointError
from coordinator.storage import CheckpointStorage, StorageError, storage_at
from coordinator.store.encoding import corrupt_if_malformed, require_field_types, seal, unseal
from coordinator.store.records import Record
from sinks._util.log import get_logger

logger = get_logger("coordinator.savepoints")

MARK = "_restored"
"""The file that marks a checkpointLocation in which a restore has begun."""
_ID = "savepoint-[a-z0-9-]+"
KEY = re.compile(rf"({_ID})/(_metadata|\d{{10}})")
_ADDRESS = re.compile(rf"(?P<storage>.+)/(?P<id>{_ID})/?(?P<options>\?.*)?")


@dataclass(frozen=True)
class Savepoint:
    """The content of a savepoint's `_metadata`.

    `uri` is for `restore_savepoint`, and leaves a password out. `records` are the checkpoint's
    record and those of its replays, and everything that they name is visible. `sinks` are class
    names by sink. `created_at` is in milliseconds since the epoch. `spark` has the version of
    PySpark, and that of the offset log with its settings. There are `files` files, of `size` bytes
    in total. `chunks` has the SHA-256 of each chunk.
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
    files: int
    size: int
    chunks: tuple[str, ...]

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

    def summary(self) -> dict[str, Any]:
        """Return JSON values for a user to read."""
        own = {
            name: value
            for name, value in vars(self).items()
            if name not in ("records", "size", "chunks")
        }
        of_record = {
            name: getattr(self.record, name)
            for name in ("job", "lineage", "query_id", "partitions", "mode")
        }
        more = {
            "checkpoint": self.checkpoint_id,
            "offsets": list(self.record.offsets),
            "bytes": self.size,
        }
        return of_record | more | own

    def to_bytes(self) -> bytes:
        body = asdict(self) | {"records": [record.to_json() for record in self.records]}
        del body["uri"]
        return seal(body)

    @classmethod
    def from_bytes(cls, data: bytes, uri: str) -> Savepoint:
        where = f"the _metadata of savepoint {uri}"
        try:
            body = unseal(data, where)
            with corrupt_if_malformed(where):
                records = tuple(Record.from_json(record, where) for record in body["records"])
                if not uri.partition("?")[0].endswith(f"/{body['id']}") or not records:
                    raise SavepointError(
                        f"{where} is that of another savepoint, or of no checkpoint: "
                        f"{body['id']!r} [EO-SAVEPOINT-DAMAGED]"
                    )
                return require_field_types(
                    cls(**body | {"uri": uri, "records": records, "chunks": tuple(body["chunks"])})
                )
        except CorruptRecord as error:
            raise SavepointError(str(error)) from error


def chunk_key(id: str, number: int) -> str:
    return f"{id}/{number:010d}"


def list_savepoints(uri: str | CheckpointStorage, bad: list[str] | None = None) -> list[Savepoint]:
    """List the complete savepoints in a storage, oldest first.

    Half-written and damaged savepoints are logged, or, if `bad` is given, it gets a sentence on
    each.
    """
    savepoints = []
    with storage_at(uri, existing=True) as storage:
        for id in sorted({key[1] for key in map(KEY.fullmatch, storage.list("")) if key}):
            try:
                savepoints.append(load(storage, id))
            except (SavepointError, StorageError) as error:
                if bad is None:
                    logger.warning("%s", error)
                else:
                    bad.append(str(error))
    return sorted(savepoints, key=lambda savepoint: savepoint.created_at)


def describe_savepoint(uri: str) -> Savepoint:
    """Return the content of a savepoint's `_metadata`.

    Raises SavepointError if the savepoint is half-written or its `_metadata` damaged.
    """
    with savepoint_at(uri) as (storage, id):
        return load(storage, id)


def dispose_savepoint(uri: str) -> bool:
    """Delete a savepoint, even a half-written or damaged one.

    No job needs the savepoint, because a restore makes a copy. Returns False if nothing of it was
    there.
    """
    with savepoint_at(uri) as (storage, id):
        was_there = bool(_keys(storage, id))
        delete(storage, id)
        return was_there


def load(storage: CheckpointStorage, id: str) -> Savepoint:
    uri = address_of(storage.uri, id)
    data = storage.get(f"{id}/_metadata")
    if data is None:
        chunks = len(_keys(storage, id))
        if not chunks:
            raise SavepointError(f"there is no savepoint {uri}")
        raise SavepointError(
            f"savepoint {uri} is half-written: {chunks} chunk(s), but no _metadata, which is "
            "written last. Dispose of it, and take another. [EO-SAVEPOINT-DAMAGED]"
        )
    return Savepoint.from_bytes(data, uri)


def delete(storage: CheckpointStorage, id: str) -> None:
    storage.delete(f"{id}/_metadata")
    for key in _keys(storage, id):
        storage.delete(key)


def _keys(storage: CheckpointStorage, id: str) -> list[str]:
    """List the keys of a savepoint.

    The records of a job whose name begins with "savepoint" may be in a folder of that form.
    """
    return [key for key in storage.list(id) if KEY.fullmatch(key)]


def address_of(storage_uri: str, id: str) -> str:
    base, mark, options = storage_uri.partition("?")
    return f"{base.rstrip('/')}/{id}{mark}{options}"


def full_address(address: str, savepoint_dir: str | None) -> str:
    """Return the URI of a savepoint, given as this URI or as its id in `savepoint_dir`.

    Raises SavepointError for anything else.
    """
    if savepoint_dir and re.fullmatch(_ID, address):
        return address_of(savepoint_dir, address)
    if "***" in address:
        raise SavepointError(
            "the URI is shown without its password: name the savepoint by its id, in savepoint_dir"
        )
    _parts(address)
    return address


@contextmanager
def savepoint_at(uri: str) -> Iterator[tuple[CheckpointStorage, str]]:
    of, id = _parts(uri)
    with storage_at(of, existing=True) as storage:
        yield storage, id


@contextmanager
def copying() -> Iterator[None]:
    """Turn errors of a file system in the block into SavepointError."""
    try:
        yield
    except OSError as error:
        raise SavepointError(
            f"files of the checkpointLocation cannot be copied: {error}"
        ) from error


def _parts(uri: str) -> tuple[str, str]:
    """Split the URI of a savepoint into the URI of the storage, and the id."""
    parts = _ADDRESS.fullmatch(uri)
    if not parts:  # repeats nothing: it may hold a password
        raise SavepointError(
            "not the id or the URI of a savepoint: the last part has to be savepoint-…; see "
            "coordinator savepoint list"
        )
    return parts["storage"] + (parts["options"] or ""), parts["id"]
