"""The rows of a checkpoint, kept until all of it is visible (`replay="spool"`).

What the external system loses of the checkpoint is then written again from here. It need not be
computed again, which may give other rows.

A participant's rows are one Arrow IPC stream with the row hash as last column, cut into values
under the keys

    spool/JOB/LINEAGE/CHECKPOINT.SINK.SUBTASK.ATTEMPT.NUMBER.CRC32[.ROWS.HASH]

The last key, which is put before the pre-commit, ends with the fingerprint of all rows. So a record
need not name what was kept: of several attempts, the one with the committable's fingerprint has its
rows.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count

import pyarrow as pa
import pyarrow.compute as pc

from coordinator.storage import CheckpointStorage, StorageError, deferred_storage, storage_at
from coordinator.storage.stream import Cut, Joined
from coordinator.store.records import CompletedCheckpoint, Participant
from sinks._util.log import get_logger
from sinks._util.threads import side_by_side
from sinks.transaction import Fingerprint, token

logger = get_logger(__name__)


@dataclass(frozen=True)
class SpooledRows:
    """The kept rows of a sink's participants: the keys of each subtask's chunks, in order.

    It is called as `LostRows.spooled`.
    """

    uri: str = field(repr=False)  # a password may be in it
    chunks: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def __call__(self, subtask: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one subtask.

        Raises `StorageError` if a chunk is gone, or not what was put.
        """
        with storage_at(self.uri, existing=True) as storage:
            values = (_get(storage, key) for key in self.chunks[subtask])
            with pa.ipc.open_stream(io.BufferedReader(Joined(values))) as reader:
                yield from reader


@dataclass(frozen=True)
class SpoolingRows:
    """The place where the tasks of a sink keep their rows.

    It travels to the tasks as `SinkTask.spooling`. Each calls it to begin with its own rows.
    """

    uri: str = field(repr=False)
    place: str
    """The beginning of the sink's keys."""

    def __call__(self, subtask: int, attempt: str) -> RowsOfParticipant:
        return RowsOfParticipant(self.uri, f"{self.place}.{subtask:06d}.{attempt}")


class RowsOfParticipant:
    """The rows of one participant, which are put as they pass.

    Storage is opened with the first row. What was put without the last key never counts.
    """

    def __init__(self, uri: str, place: str) -> None:
        self._uri = uri
        self._place = place
        self._numbers = count()
        self._fingerprint = Fingerprint()
        self._open = ExitStack()
        self._storage: CheckpointStorage | None = None
        self._cut = Cut(self._put)
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        if self._writer is None:
            self._storage = self._open.enter_context(storage_at(self._uri, existing=True))
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            self._writer = pa.ipc.new_stream(self._cut, batch.schema, options=options)
        self._writer.write_batch(batch)
        self._fingerprint = self._fingerprint.add(
            batch.num_rows, pc.sum(batch.columns[-1]).as_py() or 0
        )

    def finish(self) -> None:
        """Put the last key, after the last row. Without rows this does nothing."""
        # The writer is closed only here, so a task that fails puts nothing more.
        if self._writer is not None:
            self._writer.close()
            rows, text = self._fingerprint.stored()
            self._put(self._cut.rest, f".{rows}.{text}")

    def close(self) -> None:
        self._open.close()

    def _put(self, data: bytes, end: str = "") -> None:
        assert self._storage is not None
        key = f"{self._place}.{next(self._numbers):06d}.{zlib.crc32(data):08x}{end}"
        self._storage.put_if_absent(key, data)


class Spool:
    """The driver's side, which finds kept rows again, and deletes visible ones."""

    def __init__(self, uri: str, job: str) -> None:
        """Open nothing yet. Raises ValueError for a storage that executors cannot open."""
        scheme = uri.partition(":")[0]
        if scheme in ("memory", "hdfs", "viewfs"):
            raise ValueError(
                f"replay='spool' needs a storage that executors can open, and {scheme}: is opened "
                "by the driver alone; name one in spool_dir: file:///… (shared by all hosts), "
                "s3://…, gs://…, az://… or a database"
            )
        self._uri = uri
        self._root = f"spool/{token(job)}"
        self._storage = deferred_storage(uri)

    def spooling(self, lineage: str, checkpoint_id: int, sink: str) -> SpoolingRows:
        return SpoolingRows(self._uri, f"{self._root}/{lineage}/{_part(checkpoint_id, sink)}")

    def rows_of(
        self, complete: CompletedCheckpoint, lost: Iterable[Participant], writers: Mapping[str, str]
    ) -> dict[str, SpooledRows]:
        """Return, by sink, the kept rows of lost participants; none unless all of them are there.

        The rows of the sinks in `writers`, which tasks of another sink write, are among the rows of
        that sink, even if they were given up since.
        """
        attempts: dict[str, dict[str, list[str]]] = {}
        for key in self._storage.list(f"{self._root}/{complete.record.lineage}"):
            number, name, index, attempt, *_ = key.rpartition("/")[2].split(".")
            attempts.setdefault(f"{number}.{name}.{index}", {}).setdefault(attempt, []).append(key)
        written = {
            (committable.sink, committable.subtask): committable
            for committable in complete.record.committables
        }
        chunks: dict[str, dict[int, tuple[str, ...]]] = {}
        for sink, subtask in {(writers.get(sink, sink), subtask) for sink, subtask in lost}:
            own = attempts.get(f"{_part(complete.checkpoint_id, sink)}.{subtask:06d}", {})
            wanted = Fingerprint()
            for name in (sink, *(dead for dead, writer in writers.items() if writer == sink)):
                if part := written.get((name, subtask)):
                    wanted += part.fingerprint
            whole = next((tuple(keys) for keys in own.values() if _is_whole(keys, wanted)), None)
            if whole is None:
                return {}
            chunks.setdefault(sink, {})[subtask] = whole
        return {sink: SpooledRows(self._uri, of_sink) for sink, of_sink in chunks.items()}

    def delete(
        self, lineage: str, visible: int | None = None, predecessors: Iterable[str] = ()
    ) -> None:
        """Delete the rows of `lineage` up to the checkpoint `visible` (None: all).

        All rows of its predecessors, which are over, are deleted, too.
        """
        over = tuple(f"{self._root}/{before}/" for before in predecessors if before != lineage)
        own = f"{self._root}/{lineage}/"
        first_after = own + (f"{visible + 1:020d}" if visible is not None else "~")
        try:
            keys = [
                key
                for key in self._storage.list(self._root)
                if key.startswith(over) or (key.startswith(own) and key < first_after)
            ]
            side_by_side(self._storage.delete, keys)
        except StorageError as error:
            logger.warning(
                "rows that are visible could not be deleted; the next checkpoint tries again: %s",
                error,
            )

    def close(self) -> None:
        self._storage.close()


def _part(checkpoint_id: int, sink: str) -> str:
    return f"{checkpoint_id:020d}.{token(sink)}"


def _is_whole(keys: list[str], wanted: Fingerprint) -> bool:
    """Tell whether an attempt has come to its end, with the rows of the `wanted` fingerprint."""
    number, _, *end = keys[-1].split(".")[4:]
    rows, text = wanted.stored()
    return end == [str(rows), text] and int(number) == len(keys) - 1


def _get(storage: CheckpointStorage, key: str) -> bytes:
    data = storage.get(key)
    if data is None or f"{zlib.crc32(data):08x}" != key.split(".")[5]:
        what = "it is gone" if data is None else "its checksum is another: it was altered"
        raise StorageError(storage.uri, key, f"{what}, and the rows in it were to be written again")
    return data
