"""`df.writeStream.format("exactly_once")`: the protocol behind Spark's API for data sources in Python.

For each micro-batch Spark makes a data source on the driver's machine and asks it for a writer, which travels to the
tasks; when all of them have written, it asks a copy of another one for a writer, in another process, and has that
commit. None of these processes knows the query; all are told its options. Read in Spark 4.1 to 4.3:
pyspark/sql/worker/write_into_data_source.py, python_streaming_sink_runner.py, and PythonStreamingWrite.scala.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import pyarrow as pa
from pyarrow.fs import FileSelector, FileSystem, LocalFileSystem

from coordinator import guarantee
from coordinator.config import Replay
from coordinator.errors import CheckpointError, InDoubtError, ReplayMismatch, UnsupportedSpark
from coordinator.jobfile import job_file_digest, load_job
from coordinator.protocol.batch import BatchFacts, Query, Sink, TopicIds
from coordinator.protocol.sweep import abort_or_leave
from coordinator.protocol.two_processes import Prepared, TwoProcessProtocol
from coordinator.spark.checkpoint_location import facts_in
from coordinator.spark.internals import task_of_query, to_arrow
from sinks.errors import ConfigurationError
from sinks.row_hash import HASH_COLUMN, row_hashes
from sinks.task import Ack, SinkTask

try:
    from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage
except ImportError as error:
    raise UnsupportedSpark(
        'format("exactly_once") needs Spark 4.1 or later: 4.0 hands a sink in Python rows, not record batches. Use '
        "foreachBatch(coordinator)."
    ) from error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType


def register(spark: SparkSession) -> None:
    """Let queries of this session write to `format("exactly_once")`, with the options `jobFile` (as of the command
    `coordinator --job`) and `checkpointLocation`."""
    from pyspark.sql import SparkSession

    for session in (spark, SparkSession.getActiveSession()):  # Spark looks for the name in that one
        if session:
            session.dataSource.register(ExactlyOnceSource)


class ExactlyOnceSource(DataSource):
    """Its copies, which Spark has pickled, are asked for the writer that commits."""

    _is_copy = False

    @classmethod
    def name(cls) -> str:
        return "exactly_once"

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "_is_copy": True}

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        job_file, location = (self._option(name) for name in ("jobFile", "checkpointLocation"))
        if self._is_copy:
            return CommitWriter(job_file, location, schema)
        if overwrite:
            raise ConfigurationError('format("exactly_once") writes what is new: outputMode("complete") is not for it')
        with _job_of(job_file) as (sink, protocol):
            prepared = protocol.prepare(_WrittenBatch(_facts_at(location), location, schema))
            return TaskWriter(prepared, prepared.task(sink, protocol.job))

    def _option(self, name: str) -> str:
        value = self.options.get(name)
        if not value:
            raise ConfigurationError(f'format("exactly_once") needs .option("{name}", …)')
        return str(value)


_digests: dict[str, str] = {}
"""Of the job files that this process has loaded: Spark uses its Python processes again."""


@contextmanager
def _job_of(job_file: str) -> Iterator[tuple[Sink, TwoProcessProtocol]]:
    """The job's one sink, and its protocol, in this process."""
    digest = ""
    with suppress(Exception):  # what is wrong with the file, `load_job` tells
        digest = job_file_digest(job_file)
    if _digests.setdefault(job_file, digest) != digest:
        sys.modules.pop(job_file.partition(":")[0], None)
        _digests[job_file] = digest
    job = load_job(job_file)
    of, store = job.protocol, job.protocol.store
    [sink, *others] = job.sinks.values()
    for given, what in (
        (sink.dead_letters, "a sink's dead letters"),
        (others, "several sinks"),
        (sink.transform, "a sink's transform"),
        (not job.config.exactly_once, "at-least-once mode"),
        (job.config.replay is Replay.SPOOL, "replay='spool'"),
        (store.storage.uri.startswith("memory:"), "a storage in memory, of which each process has its own,"),
        (job.config.require, "a required guarantee, since no process sees the source,"),
    ):
        if given:
            raise ConfigurationError(f'{job_file}: {what} is not for format("exactly_once"), but for foreachBatch')
    try:
        protocol = TwoProcessProtocol(job.job, job.sinks, store, job.config, of.listeners, of.clock)
        protocol.job_file_digest = digest
        yield sink, protocol
    finally:
        sink.close()
        store.storage.close()


# ---------------------------------------------------------------------- in the tasks
@dataclass
class Written(WriterCommitMessage):
    """A task's answer."""

    prepared: Prepared
    ack: str


@dataclass
class TaskWriter(DataSourceStreamArrowWriter):
    prepared: Prepared
    task: SinkTask

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        query_id, batch_id = task_of_query(context)
        if (query_id, batch_id) != (self.prepared.query_id, self.prepared.checkpoint_id):
            raise CheckpointError(
                f"a task of batch {batch_id} of query {query_id} found batch {self.prepared.checkpoint_id} of query "
                f"{self.prepared.query_id} in the checkpointLocation that the option names: it is another query's, or "
                "two run in it"
            )
        return self.acked(iterator, context.partitionId(), context.taskAttemptId(), context.attemptNumber())

    def acked(self, rows: Iterator[pa.RecordBatch], subtask: int, task_attempt: int, slot: int = 0) -> Written:
        if not self.prepared.needed:
            for _ in rows:  # R10
                pass
            return Written(self.prepared, "")
        hashed = (batch.append_column(HASH_COLUMN, row_hashes(batch)) for batch in rows)
        [ack] = self.task.run(hashed, subtask, task_attempt, slot) or [Ack(self.task.sink.name, subtask)]
        return Written(self.prepared, ack.to_json())


# ---------------------------------------------------------------------- on the driver's machine
def _facts_at(location: str, batch_id: int | None = None) -> BatchFacts:
    """Without a `batch_id`, of the batch that Spark is at, which it has planned last."""
    path = re.sub(r"^file:(//(localhost)?(?=/))?", "", location)
    files, root = LocalFileSystem(), str(Path(path).absolute())
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", path):
        files, root = FileSystem.from_uri(re.sub(r"^s3[an]:", "s3:", path))
    if batch_id is None:
        names = [file.base_name for file in files.get_file_info(FileSelector(f"{root}/offsets"))]
        batch_id = max((int(name) for name in names if name.isdigit()), default=None)
        if batch_id is None:
            raise ConfigurationError('trigger(continuous=…) has no batches, which format("exactly_once") needs')
    log, metadata = (
        files.open_input_stream(f"{root}/{name}").read().decode() for name in (f"offsets/{batch_id}", "metadata")
    )
    return facts_in(log, batch_id, json.loads(metadata)["id"])


@dataclass
class CommitWriter(DataSourceStreamArrowWriter):
    job_file: str
    location: str
    schema: StructType

    def write(self, iterator: Iterator[pa.RecordBatch]) -> NoReturn:
        raise NotImplementedError

    def commit(self, messages: Sequence[Any], batchId: int) -> None:  # noqa: N803
        [prepared, *others] = [message.prepared for message in messages]
        if any(other != prepared for other in others):
            raise CheckpointError(f"the tasks of batch {batchId} were prepared by different processes")
        if prepared.needed:
            acks = [Ack.from_json(message.ack) for message in messages]
            batch = _WrittenBatch(_facts_at(self.location, batchId), self.location, self.schema, prepared, acks)
            with _job_of(self.job_file) as (_, protocol):
                protocol.conclude(prepared, batch)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:  # noqa: N803
        """Of a batch that was not offered to `commit`, since it lacks an answer: no record can name what the other
        tasks have pre-committed. Else a record may, and the next start knows."""
        acks = [Ack.from_json(message.ack) for message in messages if message and message.ack]
        mine = [ack.committable for ack in acks if ack.committable]
        if mine and None in messages:
            with _job_of(self.job_file) as (sink, _):
                sink.open()
                abort_or_leave(sink, [committable.transaction for committable in mine])


@dataclass
class _WrittenBatch:
    """As the protocol sees a batch whose tasks have run, or are about to."""

    row_hash: ClassVar[str] = "pandas with columns"

    facts: BatchFacts
    location: str
    columns: StructType
    prepared: Prepared | None = None
    acks: Sequence[Ack] = ()
    run_id: str = ""
    active: bool = True

    @property
    def query(self) -> Query:
        raise NotImplementedError("it is not known in this process")

    @property
    def rows(self) -> int | None:
        """A job file's sink has no transform."""
        return sum(ack.fingerprint.rows for ack in self.acks)

    def facts_of(self, checkpoint_id: int) -> BatchFacts:
        return _facts_at(self.location, checkpoint_id)

    def is_done(self, checkpoint_id: int) -> bool:
        """Never: this process takes what was planned last, whichever driver has planned it."""
        return False

    def schema(self, sink: Sink) -> pa.Schema:
        return to_arrow(self.columns, "UTC")

    def partitions(self, sink: Sink) -> int:
        return len(self.acks)

    def run(self, tasks: Mapping[str, SinkTask], ended: Callable[[str], None]) -> list[Ack]:
        [(name, task)] = tasks.items()
        assert self.prepared is not None
        n = self.facts.checkpoint_id
        if task != self.prepared.task(task.sink, task.job):
            raise next((ack.error for ack in self.acks if ack.error), None) or InDoubtError(
                f"checkpoint {n} is complete, and transactions of sink {name!r} were lost after it. To write them "
                "again takes a new start of the query: start it again.",
                [dict(ack.committable.transaction) for ack in self.acks if ack.committable],
            )
        if task.replay and task.replay.whole and len(self.acks) != 1:
            raise ReplayMismatch(
                f"checkpoint {n} of sink {name!r} was written in one partition, which was lost, and the batch now has "
                f"{len(self.acks)}: start the query once with coalesce(1) before writeStream"
            )
        ended(name)
        return list(self.acks)

    def cancel(self) -> None: ...

    def weaknesses(self, *, recomputed: bool) -> list[str]:
        return guarantee.of_checkpoint_location(self.location)

    def raise_stopped(self) -> NoReturn:
        raise NotImplementedError("nobody tells that the query is being stopped")

    def topic_ids(self) -> TopicIds:
        return ()

    def drain(self) -> None: ...

    def same_rows(self, other: Any) -> bool:
        return self is other
