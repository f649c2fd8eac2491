"""A sink of one's own: Parquet files that appear under their final name only when their checkpoint
is committed.

    python -m examples.custom_sink OUTPUT_FOLDER

The whole sink is `FileSink`. `rename` is atomic, so a file is either open, hidden (pre-committed),
visible (committed) or withdrawn (aborted), and each state stays provable.
`tests/test_custom_sink.py` runs the conformance kit over it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sinks import Checkpoint, CommitOutcome, Committable, Identity, TransactionContext
from sinks.errors import CommittedError
from sinks.optional import Diagnosable
from sinks.transaction import TransactionId, token


class FileSink(Diagnosable[tuple[str, pq.ParquetWriter]]):
    def __init__(self, folder: str | Path, name: str = "files") -> None:
        super().__init__(name=name)
        self.folder = Path(folder)

    def begin_transaction(self, context: TransactionContext) -> tuple[str, pq.ParquetWriter]:
        file = context.transaction_id + ".parquet"
        return file, pq.ParquetWriter(self.folder / f".open-{file}", context.schema)

    def write(self, transaction: tuple[str, pq.ParquetWriter], batch: pa.RecordBatch) -> None:
        transaction[1].write_batch(batch)

    def pre_commit(self, transaction: tuple[str, pq.ParquetWriter]) -> Identity:
        file, writer = transaction
        writer.close()
        fsync(self.folder / f".open-{file}")
        (self.folder / f".open-{file}").rename(self.folder / f".{file}")
        fsync(self.folder)
        return {"file": file}

    def rollback(self, transaction: tuple[str, pq.ParquetWriter]) -> None:
        transaction[1].close()
        for prefix in (".open-", "."):
            (self.folder / f"{prefix}{transaction[0]}").unlink(missing_ok=True)

    def commit(self, committable: Committable) -> CommitOutcome:
        file = committable.transaction["file"]
        self._rename(f".{file}", file)
        if (self.folder / file).exists():
            return CommitOutcome.COMMITTED
        if (self.folder / f".withdrawn-{file}").exists():
            return CommitOutcome.lost(f"{file} was withdrawn")
        return CommitOutcome.unknown(
            f"{file} is neither hidden, visible nor withdrawn; was it deleted?"
        )

    def abort(self, transaction: Identity) -> None:
        file = transaction["file"]
        self._rename(f".{file}", f".withdrawn-{file}")
        if (self.folder / file).exists():
            raise CommittedError(f"{file} is committed")

    def in_doubt(self, job: str) -> Iterable[Identity]:
        for path in self.folder.glob(f".{TransactionId.prefix(job)}*.parquet"):
            if TransactionId.parse(path.stem[1:]).sink == token(self.name):
                yield {"file": path.name[1:]}

    def purge(self, checkpoint: Checkpoint) -> None:
        mine = TransactionId.prefix(checkpoint.job, checkpoint.lineage)
        for state in (".withdrawn-", ".open-"):  # proofs of aborts, and what dead tasks have left
            for path in self.folder.glob(f"{state}{mine}*.parquet"):
                name = TransactionId.parse(path.stem.removeprefix(state))
                if name.sink == token(self.name) and name.checkpoint < checkpoint.oldest_retained:
                    path.unlink(missing_ok=True)

    def probe_schema(self) -> pa.Schema:
        return pa.schema([("id", pa.int64())])

    def _rename(self, before: str, after: str) -> None:
        """If it is there.

        Durable when this returns, also if another process has renamed it just now.
        """
        with suppress(FileNotFoundError):
            (self.folder / before).rename(self.folder / after)
        fsync(self.folder)


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def main(output: str) -> None:
    from pyspark.sql import SparkSession

    from coordinator import CheckpointCoordinator

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the Python that has this library
    builder = SparkSession.builder.master("local[2]")
    # some 40 ms less in each checkpoint
    builder.config("spark.python.unix.domain.socket.enabled", "true")
    spark = builder.getOrCreate()
    Path(output, "rows").mkdir(parents=True, exist_ok=True)
    coordinator = CheckpointCoordinator(
        job="custom-sink-example",
        sinks=[FileSink(Path(output, "rows"))],
        storage=Path(output, "checkpoints").absolute().as_uri(),
    )
    numbers = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1000).load()
    writer = numbers.writeStream.foreachBatch(coordinator).option(
        "checkpointLocation", f"{output}/spark"
    )
    writer.trigger(processingTime="1 second").start().awaitTermination(20)


if __name__ == "__main__":
    main(sys.argv[1])
