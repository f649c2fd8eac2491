"""The preparation of a start from a savepoint."""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath
from typing import IO

from coordinator.errors import SavepointError, UnknownSink
from coordinator.operations.savepoints.savepoint import (
    MARK,
    Savepoint,
    chunk_key,
    copying,
    load,
    savepoint_at,
)
from coordinator.spark.checkpoint_location import CheckpointLocation, open_location
from coordinator.storage import CheckpointStorage, storage_at
from coordinator.storage.stream import Joined
from coordinator.store.encoding import seal, unseal
from coordinator.store.job_store import JobStore
from coordinator.store.records import ANY_LINEAGE, CompletedCheckpoint, Record
from sinks._util.log import get_logger
from sinks._util.machine import machine
from sinks._util.progress import progress

logger = get_logger("coordinator.savepoints")

_PIECE = 1 << 20
_NO_PATH = re.compile(r"(^|/)(\.|/|$)|\\")
"""Paths with an empty or hidden part, or with what another system treats as a '/'."""


@copying()
def restore_savepoint(
    uri: str,
    checkpoint_location: str,
    *,
    storage: str | CheckpointStorage,
    job: str | None = None,
    sinks: Iterable[str] | None = None,
    allow_non_restored: bool = False,
    allow_later_checkpoints: bool = False,
    confirm: Callable[[Savepoint], object] | None = None,
) -> Savepoint:
    """Prepare a start from a savepoint, in an empty `checkpoint_location`.

    This copies the savepoint there, and begins a new lineage of the job in `storage` with its
    checkpoint. Then start the query there.

    Another name as `job` makes another job. `sinks` are the names of the sinks that the job will
    have, to check them now; otherwise the first start checks them. `allow_non_restored` accepts
    that the job lacks a sink of the savepoint. `allow_later_checkpoints` accepts that visible rows
    of later checkpoints are written again. `confirm` is called when everything is checked and
    nothing is changed yet, and may raise.

    A driver of the earlier lineage stops with `Superseded`. After a crash, call this again. Raises
    SavepointError, UnknownSink and StorageError, with nothing changed, and Superseded if a driver
    or another restore starts meanwhile.
    """
    with savepoint_at(uri) as (source, id), storage_at(storage) as target:
        savepoint = load(source, id)
        _verify(source, savepoint)
        required = _required_sinks(savepoint, sinks, allow_non_restored)
        store = JobStore(target, job or savepoint.job)
        location = open_location(checkpoint_location)
        lineage = _marked(location, savepoint, store)

        def allow() -> None:
            if not allow_later_checkpoints:
                _refuse_later(savepoint, store, lineage)

        if (
            lineage
            and JobStore(target, store.job, lineage).listing().newest_complete
            > savepoint.checkpoint_id
        ):
            raise SavepointError(
                f"{location.uri} was restored from {savepoint.uri} before, and its query has gone "
                "on since: start the query there, or restore into an empty checkpointLocation"
            )
        # If the lineage is current, an earlier call has shut out the drivers, and has looked then.
        if not lineage or store.newest_claim().lineage != lineage:
            allow()
        if confirm:
            confirm(savepoint)
        if not lineage:
            lineage = machine.random.token(4)
            mark = {
                "savepoint": savepoint.id,
                "job": store.job,
                "storage": target.uri,
                "lineage": lineage,
            }
            location.write(MARK, [seal(mark)])
        with progress(f"restore into {location.uri}", savepoint.files, "files") as advance:
            for path, content in _files(source, savepoint):
                location.write(path, iter(partial(content.read, _PIECE), b""))
                advance(1)
        store.begin_lineage(
            _base(savepoint, store.job, lineage, required, allow_later_checkpoints), allow
        )
        logger.info(
            "job %s: restored %s into %s, lineage %s",
            store.job,
            savepoint.uri,
            location.uri,
            lineage,
        )
        return savepoint


def _base(
    savepoint: Savepoint, job: str, lineage: str, required: Sequence[str], later: bool
) -> Record:
    """Return the record that the new lineage begins with.

    `required` are the sinks that the job must have. With `later`, the sinks may have rows of any
    lineage and checkpoint.
    """
    record = savepoint.record
    n = record.checkpoint_id
    others = {ANY_LINEAGE: -1} if later or record.predecessors is None else {}
    # A lineage that ended at this number by chance must not pass for the savepoint's own.
    ended = {
        before: at + (at == n and not record.restored_from)
        for before, at in (record.predecessors or {}).items()
    }
    return replace(
        record,
        job=job,
        lineage=lineage,
        partitions={name: record.partitions.get(name, 0) for name in required},
        committables=(),
        restored_from=savepoint.id,
        predecessors={**ended, record.lineage: n, **others},
        newest_rows=CompletedCheckpoint(savepoint.records).newest_rows
        if job == savepoint.job
        else {},
    )


def _verify(storage: CheckpointStorage, savepoint: Savepoint) -> None:
    """Raise SavepointError if the savepoint is damaged, or holds what no savepoint holds.

    A restore must write below its checkpointLocation only, and each file once.
    """
    paths = [MARK]
    with progress(f"verify {savepoint.uri}", savepoint.files, "files") as advance:
        for path, _ in _files(storage, savepoint):
            paths.append(path)
            advance(1)
    if len(paths) - 1 != savepoint.files:
        raise SavepointError(
            f"savepoint {savepoint.uri} holds {len(paths) - 1} files, and {savepoint.files} were "
            "saved: it is damaged. Nothing was changed. [EO-SAVEPOINT-DAMAGED]"
        )
    folders = {str(folder) for path in paths for folder in PurePosixPath(path).parents}
    for path, count in Counter(paths).items():
        if count > 1 or path in folders or _NO_PATH.search(path) or not path.isprintable():
            raise SavepointError(
                f"savepoint {savepoint.uri} holds {path!r}: outside of a checkpointLocation, "
                "hidden, twice, as a file and as a folder, or as if Spark had written it. Nothing "
                "was changed. [EO-SAVEPOINT-DAMAGED]"
            )


def _files(storage: CheckpointStorage, savepoint: Savepoint) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the paths and contents of the saved files.

    A content can be read until the next file is asked for.
    """
    try:
        with tarfile.open(mode="r|", fileobj=Joined(_chunks(storage, savepoint))) as tar:
            for entry in tar:
                content = tar.extractfile(entry) if entry.isreg() and not entry.issparse() else None
                if content is None:
                    raise SavepointError(
                        f"savepoint {savepoint.uri} holds {entry.name!r}, which is no file "
                        "[EO-SAVEPOINT-DAMAGED]"
                    )
                yield entry.name, content
    except (tarfile.TarError, ValueError) as error:
        raise SavepointError(
            f"the chunks of savepoint {savepoint.uri} are no tar: {error!r} [EO-SAVEPOINT-DAMAGED]"
        ) from error


def _chunks(storage: CheckpointStorage, savepoint: Savepoint) -> Iterator[bytes]:
    for number, sha256 in enumerate(savepoint.chunks):
        key = chunk_key(savepoint.id, number)
        chunk = storage.get(key)
        if chunk is None or hashlib.sha256(chunk).hexdigest() != sha256:
            what = (
                "is missing"
                if chunk is None
                else "was altered or cut off: its checksum does not match"
            )
            raise SavepointError(
                f"savepoint {savepoint.uri} is damaged: chunk {key} {what}. Bring it back from a "
                "backup, or use another savepoint. [EO-SAVEPOINT-DAMAGED]"
            )
        yield chunk


def _required_sinks(
    savepoint: Savepoint, sinks: Iterable[str] | None, allow_non_restored: bool
) -> list[str]:
    """List the names of the savepoint's sinks that the restored job must have."""
    if sinks is None:
        return [] if allow_non_restored else sorted(savepoint.sinks)
    missing = sorted(set(savepoint.sinks) - set(sinks))
    if missing and not allow_non_restored:
        raise UnknownSink(
            f"savepoint {savepoint.uri} was written by sink(s) {missing}, which the job does not "
            "have any more. A sink's name must be stable. If they were taken out on purpose, pass "
            "allow_non_restored=True (--allow-non-restored)."
        )
    return sorted(set(savepoint.sinks) - set(missing))


def _marked(location: CheckpointLocation, savepoint: Savepoint, store: JobStore) -> str:
    """Return the lineage of this same restore if it was begun before.

    Returns "" if the checkpointLocation is empty, and raises SavepointError if it holds anything
    else.
    """
    files = location.files()
    if not files:
        return ""
    mark = unseal(b"".join(location.read(MARK)), f"{location.uri}/{MARK}") if MARK in files else {}
    lineage = mark.pop("lineage", "")
    if mark != {"savepoint": savepoint.id, "job": store.job, "storage": store.storage.uri}:
        raise SavepointError(
            f"{location.uri} is not empty: it holds {len(files)} file(s)"
            + (f" of the restore {mark}" if mark else "")
            + ". Restore into a checkpointLocation that does not exist yet."
        )
    return str(lineage)


def _refuse_later(savepoint: Savepoint, store: JobStore, restoring: str) -> None:
    """Raise SavepointError if storage shows that input after the savepoint was written already."""
    n = savepoint.checkpoint_id
    current = store.newest_claim().lineage
    lineages = {(savepoint.job, savepoint.lineage), (store.job, current)} - {(store.job, restoring)}
    for job, lineage in sorted(lineages):
        complete = JobStore(store.storage, job, lineage).load_newest()
        newest = complete.checkpoint_id if complete else -1
        untouched = (
            lineage == savepoint.lineage or complete is None or complete.record.restored_from
        )
        if newest > n or not untouched:
            raise SavepointError(
                f"savepoint {savepoint.uri} is of checkpoint {n}, but {store.storage.uri} has "
                f"checkpoints of job {job!r} after it, up to {newest} (lineage {lineage}). A "
                "restore would write their rows again. Restore a newer savepoint, or delete these "
                "rows and pass allow_later_checkpoints=True (--allow-later-checkpoints). "
                "[EO-SAVEPOINT-LATER]"
            )
