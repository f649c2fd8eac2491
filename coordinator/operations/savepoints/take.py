"""The taking of a savepoint."""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from tempfile import SpooledTemporaryFile
from typing import Any

from coordinator.errors import CheckpointLocationMismatch, SavepointError
from coordinator.operations.savepoints.savepoint import (
    KEY,
    MARK,
    Savepoint,
    address_of,
    chunk_key,
    copying,
    delete,
)
from coordinator.protocol.decisions import require_same_offsets
from coordinator.spark.checkpoint_location import CheckpointLocation, facts_in, open_location
from coordinator.storage import CheckpointStorage
from coordinator.storage.stream import Cut
from coordinator.store.records import Record
from sinks._util.log import get_logger
from sinks._util.machine import machine
from sinks._util.progress import progress
from sinks.transaction import token

logger = get_logger("coordinator.savepoints")

_IN_MEMORY = 4 << 20
_PASSES = 20
_STATE_FILE = re.compile(r"(\d+)(_[^.]*)?\.(delta|snapshot|zip|changelog)(\.crc)?")


@copying()
def take_savepoint(
    target: CheckpointStorage,
    records: tuple[Record, ...],
    sinks: Mapping[str, str],
    location_uri: str,
    storage_uri: str,
    confirm: Callable[[], None],
) -> Savepoint:
    """Save a checkpoint that is completely visible, while no batch runs.

    `confirm` may raise at the last moment.
    """
    [record, *_] = records
    id = f"savepoint-{token(record.job)}-{record.checkpoint_id}-{machine.random.token(4)}"
    location = open_location(location_uri)
    chunks: list[str] = []

    def put(chunk: bytes) -> None:
        _put(target, chunk_key(id, len(chunks)), chunk)
        chunks.append(hashlib.sha256(chunk).hexdigest())

    cut = Cut(put)
    try:
        layout = require_own_location(location, record)
        with tarfile.open(mode="w|", fileobj=cut) as tar:
            sizes = _copy(location, record.checkpoint_id, tar)
        put(cut.rest)
        savepoint = Savepoint(
            address_of(target.uri, id),
            id,
            records,
            dict(sinks),
            location.uri,
            storage_uri,
            machine.clock.milliseconds(),
            _version("pyspark-exactly-once"),
            {"version": _version("pyspark"), "offsets": layout},
            len(sizes),
            sum(sizes.values()),
            tuple(chunks),
        )
        confirm()
        _put(target, f"{id}/_metadata", savepoint.to_bytes())
    except BaseException:
        with suppress(Exception):
            delete(target, id)
        raise
    logger.info(
        "job %s: checkpoint %d saved as %s", record.job, record.checkpoint_id, savepoint.uri
    )
    return savepoint


@copying()
def require_own_location(location: CheckpointLocation, record: Record) -> dict[str, Any]:
    """Return the header of `offsets/N`.

    Raises SavepointError if the checkpointLocation is not the one of this checkpoint.
    """
    n = record.checkpoint_id
    try:
        query_id = json.loads(_text(location, "metadata"))["id"]
        log = _text(location, f"offsets/{n}")
        version, settings, *_ = log.split("\n")
        require_same_offsets(facts_in(log, n, query_id), record)
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise SavepointError(
            f"{location.uri} is not the checkpointLocation of checkpoint {n} of job "
            f"{record.job!r}, or it is damaged: {error!r}"
        ) from error
    except CheckpointLocationMismatch as error:
        raise SavepointError(
            f"{location.uri} is not the checkpointLocation of checkpoint {n} of job "
            f"{record.job!r}, which query {record.query_id} wrote; this one is of query "
            f"{query_id}: {error}"
        ) from error
    return {"version": version, **json.loads(settings)}


def _text(location: CheckpointLocation, path: str) -> str:
    return b"".join(location.read(path)).decode()


def _copy(location: CheckpointLocation, n: int, tar: tarfile.TarFile) -> dict[str, int]:
    """Copy all files of checkpoints up to n into the tar, and return their sizes.

    Spark's maintenance may replace old state files by new ones meanwhile, so the location is listed
    again until nothing new is found. Then each file of the last listing is saved, and that listing
    is whole.
    """
    saved: dict[str, int] = {}
    for _ in range(_PASSES):
        new = [path for path in location.files() if path not in saved and _belongs(path, n)]
        if not new:
            break
        with progress(f"save {location.uri}", len(new), "files") as advance:
            for path in new:
                if (size := _add(tar, path, location)) is not None:
                    saved[path] = size
                advance(1)
    else:
        raise SavepointError(
            f"files in {location.uri} changed all the time while they were saved; try again"
        )
    needed = {"metadata", f"offsets/{n}"}
    # Spark has not written `commits/n` yet, and will ask for n again.
    if n > 0 and f"commits/{n}" not in saved:
        needed |= {f"offsets/{n - 1}", f"commits/{n - 1}"}
    if missing := sorted(needed - set(saved)):
        raise SavepointError(
            f"{location.uri} lacks {missing}, so no query can go on from there; nothing was saved"
        )
    return saved


def _add(tar: tarfile.TarFile, path: str, location: CheckpointLocation) -> int | None:
    """Add a file to the tar, and return its size; None if somebody has deleted the file.

    The size stands before the content, so the content is read first.
    """
    entry = tarfile.TarInfo(path)
    with SpooledTemporaryFile(_IN_MEMORY) as file:
        try:
            for piece in location.read(path):  # writelines would keep all of them in memory
                file.write(piece)
        except FileNotFoundError:
            return None
        entry.size = file.tell()
        file.seek(0)
        tar.addfile(entry, file)
        return entry.size


def _belongs(path: str, n: int) -> bool:
    """Tell whether a file is of checkpoints up to n: batch n writes version n + 1 of the state.

    Entries of a source's log that are ahead are kept, because Spark writes them before `offsets`,
    so it finds them after any crash. Other savepoints are not kept, because each would hold all
    savepoints before it.
    """
    folder, _, rest = path.partition("/")
    if folder in ("offsets", "commits"):
        number = re.match(r"\d+", rest)
        return number is not None and int(number[0]) <= n
    if folder == "state" and (version := _STATE_FILE.fullmatch(path.rsplit("/", 1)[-1])):
        return int(version[1]) <= n + 1
    return path != MARK and not KEY.search(path)


def _put(storage: CheckpointStorage, key: str, data: bytes) -> None:
    if not storage.put_if_absent(key, data) and storage.get(key) != data:
        raise SavepointError(f"{key} in {storage.uri} was written by somebody else")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed as a package"
