"""Savepoints: a checkpoint with everything that it takes to go on from it, kept for the user, in any storage.

SAVEPOINT/NUMBER        the content of Spark's checkpointLocation up to that checkpoint: one stream of bytes, in chunks
SAVEPOINT/_metadata     which bytes are which file, and the checkpoint's record. Written last: it makes it a savepoint
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

from coordinator.batch import facts_in
from coordinator.decisions import require_same_offsets
from coordinator.errors import CheckpointLocationMismatch, CorruptRecord, SavepointError, UnknownSink
from coordinator.location import CheckpointLocation, open_location
from coordinator.records import CheckpointStore, Record, seal, unseal
from coordinator.storage import CheckpointStorage, open_storage
from sinks.transaction import token

logger = logging.getLogger(__name__)

_CHUNK = 4 << 20
_PASSES = 20
_MARK = "_restored"
_ADDRESS = re.compile(r"(?P<storage>.+)/(?P<id>savepoint-[a-z0-9-]+)/?(?P<options>\?.*)?")
_STATE_FILE = re.compile(r"(\d+)(_[^.]*)?\.(delta|snapshot|zip|changelog)(\.crc)?")


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

    def _to_bytes(self) -> bytes:
        body = asdict(self) | {"records": [record.to_json() for record in self.records]}
        del body["uri"]
        return seal(body)

    @classmethod
    def _from_bytes(cls, data: bytes, uri: str) -> Savepoint:
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


# ---------------------------------------------------------------------- taking one
def take_savepoint(
    target: CheckpointStorage,
    records: tuple[Record, ...],
    sinks: Mapping[str, str],
    location_uri: str,
    storage_uri: str,
    confirm: Callable[[], None],
) -> Savepoint:
    """Save a checkpoint that is all visible, while no batch runs. `confirm` may raise at the last moment."""
    [record, *_] = records
    id = f"savepoint-{token(record.job)}-{record.checkpoint_id}-{secrets.token_hex(4)}"
    location = open_location(location_uri)
    try:
        layout = _require_own(location, record)
        files = _copy(location, record.checkpoint_id, _ChunkWriter(target, id))
        savepoint = Savepoint(
            _address(target, id),
            id,
            records,
            dict(sinks),
            location.uri,
            storage_uri,
            time.time_ns() // 1_000_000,
            _version("pyspark-exactly-once"),
            {"version": _version("pyspark"), "offsets": layout},
            _CHUNK,
            tuple(files),
        )
        confirm()
        _put(target, f"{id}/_metadata", savepoint._to_bytes())
    except BaseException:
        with suppress(Exception):
            _delete(target, id)
        raise
    logger.info("job %s: checkpoint %d saved as %s", record.job, record.checkpoint_id, savepoint.uri)
    return savepoint


def _require_own(location: CheckpointLocation, record: Record) -> dict[str, Any]:
    """The header of `offsets/N`. Raises SavepointError if the checkpointLocation is not the one of this checkpoint."""
    n = record.checkpoint_id
    try:
        query_id = json.loads(_text(location, "metadata"))["id"]
        log = _text(location, f"offsets/{n}")
        version, settings, *_ = log.split("\n")
        require_same_offsets(facts_in(log, n, query_id), record)
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise SavepointError(
            f"{location.uri} is not the checkpointLocation of checkpoint {n} of job {record.job!r}, or it is damaged: "
            f"{error!r}"
        ) from error
    except CheckpointLocationMismatch as error:
        raise SavepointError(
            f"{location.uri} is not the checkpointLocation of checkpoint {n} of job {record.job!r}, which query "
            f"{record.query_id} wrote; this one is of query {query_id}: {error}"
        ) from error
    return {"version": version, **json.loads(settings)}


def _text(location: CheckpointLocation, path: str) -> str:
    return b"".join(location.read(path)).decode()


def _copy(location: CheckpointLocation, n: int, chunks: _ChunkWriter) -> list[SavedFile]:
    """All files of checkpoints up to n. Spark's maintenance may replace old state files by new ones meanwhile, so it is
    listed again until nothing new is found: then each file of the last listing is saved, and that listing is whole."""
    saved: dict[str, SavedFile] = {}
    for _ in range(_PASSES):
        new = [path for path in location.files() if path not in saved and _belongs(path, n)]
        if not new:
            break
        for path in new:
            with suppress(FileNotFoundError):
                saved[path] = chunks.add(path, location.read(path))
    else:
        raise SavepointError(f"files in {location.uri} changed all the time while they were saved; try again")
    chunks.flush()
    needed = {"metadata", f"offsets/{n}"}
    if n > 0 and f"commits/{n}" not in saved:  # Spark stands between the callback and it, and will ask for n again
        needed |= {f"offsets/{n - 1}", f"commits/{n - 1}"}
    if missing := sorted(needed - set(saved)):
        raise SavepointError(f"{location.uri} lacks {missing}, so no query can go on from there; nothing was saved")
    return list(saved.values())


def _belongs(path: str, n: int) -> bool:
    """Whether a file is of checkpoints up to n: batch n writes version n + 1 of the state. Entries of a source's log
    that are ahead are kept: Spark writes them before `offsets`, so it finds them after any crash."""
    folder, _, rest = path.partition("/")
    if folder in ("offsets", "commits"):
        number = re.match(r"\d+", rest)
        return number is not None and int(number[0]) <= n
    if folder == "state" and (version := _STATE_FILE.fullmatch(path.rsplit("/", 1)[-1])):
        return int(version[1]) <= n + 1
    return path != _MARK


class _ChunkWriter:
    """Joins small files and cuts large ones, since storage takes values of some MB at best."""

    def __init__(self, storage: CheckpointStorage, id: str) -> None:
        self._storage, self._id = storage, id
        self._buffer = bytearray()
        self._written = 0

    def add(self, path: str, pieces: Iterable[bytes]) -> SavedFile:
        offset, size, sha256 = self._written + len(self._buffer), 0, hashlib.sha256()
        for piece in pieces:
            sha256.update(piece)
            size += len(piece)
            self._buffer += piece
            while len(self._buffer) >= _CHUNK:
                self._put(_CHUNK)
        return SavedFile(path, size, sha256.hexdigest(), offset)

    def flush(self) -> None:
        if self._buffer:
            self._put(len(self._buffer))

    def _put(self, size: int) -> None:
        _put(self._storage, _chunk_key(self._id, self._written // _CHUNK), bytes(self._buffer[:size]))
        del self._buffer[:size]
        self._written += size


def _put(storage: CheckpointStorage, key: str, data: bytes) -> None:
    if not storage.put_if_absent(key, data) and storage.get(key) != data:
        raise SavepointError(f"{key} in {storage.uri} was written by somebody else")


def _chunk_key(id: str, number: int) -> str:
    return f"{id}/{number:010d}"


# ---------------------------------------------------------------------- looking at them
def list_savepoints(uri: str | CheckpointStorage) -> list[Savepoint]:
    """The whole savepoints in a storage, oldest first. Half-written and damaged ones are logged."""
    with _storage(uri) as storage:
        found = []
        for id in sorted({key.partition("/")[0] for key in storage.list("") if key.startswith("savepoint-")}):
            try:
                found.append(_load(storage, id))
            except SavepointError as error:
                logger.warning("%s", error)
        return sorted(found, key=lambda savepoint: savepoint.created_at)


def describe_savepoint(uri: str) -> Savepoint:
    """What a savepoint holds. Raises SavepointError if it is half-written or its `_metadata` damaged."""
    with _savepoint(uri) as (storage, id):
        return _load(storage, id)


def dispose_savepoint(uri: str) -> None:
    """Delete a savepoint, also a half-written or damaged one. No job needs it: a restore makes a copy."""
    with _savepoint(uri) as (storage, id):
        _delete(storage, id)


def _load(storage: CheckpointStorage, id: str) -> Savepoint:
    uri = _address(storage, id)
    data = storage.get(f"{id}/_metadata")
    if data is None:
        chunks = len(storage.list(id))
        raise SavepointError(
            f"there is no savepoint {uri}"
            if not chunks
            else f"savepoint {uri} is half-written: {chunks} chunk(s), but no _metadata, which is written last. "
            "Dispose of it, and take another."
        )
    return Savepoint._from_bytes(data, uri)


def _delete(storage: CheckpointStorage, id: str) -> None:
    storage.delete(f"{id}/_metadata")
    for key in storage.list(id):
        storage.delete(key)


def _address(storage: CheckpointStorage, id: str) -> str:
    base, mark, options = storage.uri.partition("?")
    return f"{base.rstrip('/')}/{id}{mark}{options}"


@contextmanager
def _storage(uri: str | CheckpointStorage) -> Iterator[CheckpointStorage]:
    """Closes what it opens."""
    storage = open_storage(uri)
    try:
        yield storage
    finally:
        if storage is not uri:
            storage.close()


@contextmanager
def _savepoint(uri: str) -> Iterator[tuple[CheckpointStorage, str]]:
    parts = _ADDRESS.fullmatch(uri)
    if not parts:  # repeats nothing: it may hold a password
        raise SavepointError("not the URI of a savepoint: its last part has to be savepoint-…, as it was answered")
    with _storage(parts["storage"] + (parts["options"] or "")) as storage:
        yield storage, parts["id"]


# ---------------------------------------------------------------------- restoring one
def restore_savepoint(
    uri: str,
    checkpoint_location: str,
    *,
    storage: str | CheckpointStorage,
    job: str | None = None,
    sinks: Iterable[str] | None = None,
    allow_non_restored: bool = False,
    allow_later_checkpoints: bool = False,
) -> Savepoint:
    """Prepare a start from a savepoint: copy it into an empty `checkpoint_location`, and make its checkpoint the newest
    one of a new lineage of the job in `storage`. Start the query there afterwards.

    `job`: another name makes another job, that its sinks know nothing of. `sinks`: names of the sinks of the job as it
    will run; without them, the first start looks whether one is missing. `allow_non_restored`: one may be.
    `allow_later_checkpoints`: rows of checkpoints after this one are visible, and may be written again.

    A driver of the lineage before is stopped by it (`Superseded`). After a crash call it again. Raises SavepointError,
    UnknownSink and StorageError, with nothing changed, and Superseded if a driver or another restore starts meanwhile.
    """
    with _savepoint(uri) as (source, id), _storage(storage) as target:
        savepoint = _load(source, id)
        _verify(source, savepoint)
        kept = _kept_sinks(savepoint, sinks, allow_non_restored)
        store = CheckpointStore(target, job or savepoint.job)
        location = open_location(checkpoint_location)
        lineage = _marked(location, savepoint, store)

        def allow() -> None:
            if not allow_later_checkpoints:
                _refuse_later(savepoint, store, lineage)

        if not lineage:
            allow()
            lineage = secrets.token_hex(4)
            mark = {"savepoint": savepoint.id, "job": store.job, "storage": target.uri, "lineage": lineage}
            location.write(_MARK, [seal(mark)])
        elif _history(target, store.job, lineage).look().newest_complete > savepoint.checkpoint_id:
            raise SavepointError(
                f"{location.uri} was restored from {savepoint.uri} before, and its query has gone on since: start the "
                "query there, or restore into an empty checkpointLocation"
            )
        chunks = _ChunkReader(source, savepoint)
        for file in savepoint.files:
            location.write(file.path, chunks.read(file))
        store.begin_lineage(_base(savepoint, store.job, lineage, kept), allow)
        logger.info("job %s: restored %s into %s, lineage %s", store.job, savepoint.uri, location.uri, lineage)
        return savepoint


def _base(savepoint: Savepoint, job: str, lineage: str, kept: Sequence[str]) -> Record:
    partitions = {name: savepoint.record.partitions.get(name, 0) for name in kept}
    return replace(
        savepoint.record,
        job=job,
        lineage=lineage,
        partitions=partitions,
        committables=(),
        restored_from=savepoint.id,
    )


def _verify(storage: CheckpointStorage, savepoint: Savepoint) -> None:
    chunks, damaged = _ChunkReader(storage, savepoint), []
    for file in savepoint.files:
        try:
            sha256 = hashlib.sha256()
            for piece in chunks.read(file):
                sha256.update(piece)
            if sha256.hexdigest() != file.sha256:
                damaged.append(f"{file.path}: its checksum does not match")
        except SavepointError as error:
            damaged.append(f"{file.path}: {error}")
    if damaged:
        more = f" and {len(damaged) - 5} more" if len(damaged) > 5 else ""
        raise SavepointError(
            f"savepoint {savepoint.uri} is damaged: {'; '.join(damaged[:5])}{more}. Nothing was changed."
        )


class _ChunkReader:
    """Keeps the chunk it read last: files lie in the order of their offsets."""

    def __init__(self, storage: CheckpointStorage, savepoint: Savepoint) -> None:
        self._storage, self._id, self._size = storage, savepoint.id, savepoint.chunk_size
        self._number, self._chunk = -1, b""

    def read(self, file: SavedFile) -> Iterator[bytes]:
        at, end = file.offset, file.offset + file.size
        while at < end:
            number, begin = divmod(at, self._size)
            piece = self._get(number)[begin : begin + end - at]
            if not piece:
                raise SavepointError(f"chunk {_chunk_key(self._id, number)} is cut off")
            yield piece
            at += len(piece)

    def _get(self, number: int) -> bytes:
        if number != self._number:
            chunk = self._storage.get(_chunk_key(self._id, number))
            if chunk is None:
                raise SavepointError(f"chunk {_chunk_key(self._id, number)} is missing")
            self._number, self._chunk = number, chunk
        return self._chunk


def _kept_sinks(savepoint: Savepoint, sinks: Iterable[str] | None, allow_non_restored: bool) -> list[str]:
    """Names of the savepoint's sinks that the restored job must have."""
    if sinks is None:
        return [] if allow_non_restored else sorted(savepoint.sinks)
    missing = sorted(set(savepoint.sinks) - set(sinks))
    if missing and not allow_non_restored:
        raise UnknownSink(
            f"savepoint {savepoint.uri} was written by sink(s) {missing}, which the job does not have any more. "
            "A sink's name must be stable. If they were taken out on purpose, pass allow_non_restored=True."
        )
    return sorted(set(savepoint.sinks) - set(missing))


def _marked(location: CheckpointLocation, savepoint: Savepoint, store: CheckpointStore) -> str:
    """The lineage of this same restore if it was begun before, "" if the checkpointLocation is empty."""
    files = location.files()
    if not files:
        return ""
    mark = unseal(b"".join(location.read(_MARK)), f"{location.uri}/{_MARK}") if _MARK in files else {}
    lineage = mark.pop("lineage", "")
    if mark != {"savepoint": savepoint.id, "job": store.job, "storage": store.storage.uri}:
        raise SavepointError(
            f"{location.uri} is not empty: it holds {len(files)} file(s)"
            + (f" of the restore {mark}" if mark else "")
            + ". Restore into a checkpointLocation that does not exist yet."
        )
    return str(lineage)


def _refuse_later(savepoint: Savepoint, store: CheckpointStore, restoring: str) -> None:
    """Raises SavepointError if the storage shows that input after the savepoint was written already."""
    n = savepoint.checkpoint_id
    current = store.newest_claim().lineage
    lineages = {(savepoint.job, savepoint.lineage), (store.job, current)} - {(store.job, restoring)}
    for job, lineage in sorted(lineages):
        records = _history(store.storage, job, lineage).load_newest()
        newest = records[0].checkpoint_id if records else -1
        untouched = lineage == savepoint.lineage or all(record.restored_from for record in records)
        if newest > n or not untouched:
            raise SavepointError(
                f"savepoint {savepoint.uri} is of checkpoint {n}, but {store.storage.uri} has checkpoints of job "
                f"{job!r} after it, up to {newest} (lineage {lineage}): their rows are visible, and a restore would "
                "write them again. Start the query from its own checkpointLocation or restore a newer savepoint; or, "
                "if those rows were removed from the targets or may be there twice, pass allow_later_checkpoints=True."
            )


def _history(storage: CheckpointStorage, job: str, lineage: str) -> CheckpointStore:
    """The records of one lineage, also of an abandoned one."""
    store = CheckpointStore(storage, job)
    store.lineage = lineage
    return store


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed as a package"
