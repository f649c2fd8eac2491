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
from dataclasses import dataclass, field
from itertools import chain, count

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
    """The writer that keeps the rows of a sink's participants as they pass.

    It is called as `SinkTask.spooling`.
    """

    uri: str = field(repr=False)
    place: str
    """The beginning of the sink's keys."""

    def __call__(
        self, batches: Iterable[pa.RecordBatch], subtask: int, attempt: str
    ) -> Iterator[pa.RecordBatch]:
        batches = (batch for batch in batches if batch.num_rows)
        first = next(iter(batches), None)
        if first is None:
            return
        with storage_at(self.uri, existing=True) as storage:
            numbers = count()

            def put(data: bytes, end: str = "") -> None:
                part = f"{subtask:06d}.{attempt}.{next(numbers):06d}"
                key = f"{self.place}.{part}.{zlib.crc32(data):08x}{end}"
                storage.put_if_absent(key, data)

            cut = Cut(put)
            fingerprint = Fingerprint()
            # The writer is closed only after the last row, so a task that fails puts nothing more.
            writer = pa.ipc.new_stream(
                cut, first.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")
            )
            for batch in chain([first], batches):
                writer.write_batch(batch)
                fingerprint = fingerprint.add(
                    batch.num_rows, pc.sum(batch.columns[-1]).as_py() or 0
                )
                yield batch
            writer.close()
            rows, text = fingerprint.stored()
            put(cut.rest, f".{rows}.{text}")


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
