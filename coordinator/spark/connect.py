"""Spark Connect, where the coordinator travels to the server, and learns about its batches there.

The server starts a Python worker for each start of a query, unpickles the coordinator in it, and
calls it there. The worker has a Connect session to its own server, and no JVM, no SparkContext, no
local properties. Sources: pyspark/sql/connect/streaming/worker/foreach_batch_worker.py, and
StreamingForeachBatchHelper.scala of the server.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from threading import Thread
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pyarrow as pa

from coordinator.errors import CheckpointError
from coordinator.protocol import guarantee
from coordinator.protocol.ports import BatchFacts, BatchLeft, Query, Sink, TopicIds
from coordinator.spark.batch import RowTransfer, SparkBatch
from coordinator.spark.checkpoint_location import facts_in
from coordinator.task.row_hash import with_row_hash
from coordinator.task.task import SinkTask
from sinks._util.column_names import map_in_arrow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Coordinator = TypeVar("Coordinator")


_home: SparkSession | None = None
"""The session that started the query, in the server's worker.

Since Spark 4.3, batches belong to a copy of this session, which knows of no query.
"""


def batch_of(
    df: DataFrame,
    batch_id: int,
    location: str | None,
    transfer: RowTransfer,
    sinks: Mapping[str, Sink],
) -> SparkBatch:
    """Return the batch, in the kind of session that this process has.

    `location` is the query's checkpointLocation, and `sinks` are those with tasks of their own.
    """
    from pyspark.sql.utils import is_remote

    if is_remote() and location:
        return ConnectBatch(df, batch_id, location, transfer, sinks)
    return SparkBatch(df, batch_id, transfer, sinks)


class ConnectBatch(SparkBatch):
    """A batch of a streaming query of a Spark Connect session.

    It lives in the server's worker for foreachBatch. The query is the one whose id is in the
    checkpointLocation's `metadata`. Offsets are read from its offset log, where Spark has written
    them before it calls foreachBatch. Spark reads both, so any file system of the server will do.
    Its jobs carry the query's run id as a tag.
    """

    def __init__(
        self,
        df: DataFrame,
        batch_id: int,
        location: str,
        transfer: RowTransfer,
        sinks: Mapping[str, Sink] | None = None,
    ) -> None:
        self.location = location
        super().__init__(df, batch_id, transfer, sinks)

    def _find_query(self, batch_id: int) -> None:
        from pyspark.errors import AnalysisException

        location = self.location
        session = self._df.sparkSession
        try:
            metadata, log = _read(session, location, "metadata", f"offsets/{batch_id}")
        except AnalysisException as error:
            why = f"metadata or offsets/{batch_id} is not there"
            raise CheckpointError(_NOT_THE_LOCATION.format(location=location, why=why)) from error
        query_id = json.loads(metadata)["id"]
        query = (_home or session).streams.get(query_id)
        if query is None:
            why = f"it belongs to query {query_id}, which does not run in this session"
            raise CheckpointError(_NOT_THE_LOCATION.format(location=location, why=why))
        self.run_id = query.runId
        self._query = query
        self.facts = facts_in(log, batch_id, query_id)

    def facts_of(self, checkpoint_id: int) -> BatchFacts:
        [log] = _read(self._df.sparkSession, self.location, f"offsets/{checkpoint_id}")
        return facts_in(log, checkpoint_id, self.facts.query_id)

    def is_done(self, checkpoint_id: int) -> bool:
        from pyspark.errors import AnalysisException

        try:
            return bool(_read(self._df.sparkSession, self.location, f"commits/{checkpoint_id}"))
        except AnalysisException:  # no such file exists
            return False

    @property
    def active(self) -> bool:
        return self._query.isActive

    @property
    def query(self) -> Query:
        return self._query

    def raise_stopped(self) -> NoReturn:
        raise BatchLeft(
            f"batch {self.facts.checkpoint_id} was left, since the query is being stopped"
        )

    def partitions(self, sink: Sink) -> int:
        with self._computed_once():
            hashed = with_row_hash(self._rows_for(sink))
            return len(map_in_arrow(hashed, _single_row, "one int").collect())

    def cancel(self) -> None:
        self._df.sparkSession.interruptTag(self.run_id)

    def weaknesses(self, *, recomputed: bool) -> list[str]:
        plan = io.StringIO()
        with redirect_stdout(plan):
            self._query.explain(extended=True)
        socket = re.search(
            r"StreamingDataSourceV2\w*\[.*?\] (\w*Socket\w*\[.*?\])", plan.getvalue()
        )
        return (
            guarantee.source_weaknesses("TextSocketMicroBatchStream", socket[1]) if socket else []
        )

    def topic_ids(self) -> TopicIds:
        return ()

    def _may_lift_limit(self, tasks: Mapping[str, SinkTask]) -> bool:
        # Before Spark 4.3 the session is the user's own, and stays as a killed worker leaves it.
        return False

    @contextmanager
    def _tagged(self, doing: str) -> Iterator[None]:
        session = self._df.sparkSession
        session.addTag(self.run_id)
        try:
            yield
        finally:
            session.removeTag(self.run_id)

    def _start(self, work: Callable[[], None]) -> Thread:
        from pyspark import InheritableThread

        thread: Thread = InheritableThread(target=work, daemon=True, session=self._df.sparkSession)
        thread.start()
        return thread


_NOT_THE_LOCATION = (
    "CheckpointConfig.checkpoint_location is {location!r}, but the running query has another one: "
    "{why}. Start the query with coordinator.write_stream(df).start(), which sets it from there. "
    "[EO-CONNECT]"
)


def _read(session: SparkSession, location: str, *files: str) -> list[str]:
    """Read files of a folder that the server can reach, as text.

    The folder's name may hold characters that Spark treats as a pattern, so they are escaped.
    """
    folder = re.sub(r"([\\*?\[\]{}])", r"\\\1", location.rstrip("/"))
    paths = [f"{folder}/{file}" for file in files]
    rows = session.read.text(paths, wholetext=True).select("value", "_metadata.file_path").collect()
    return [next(row.value for row in rows if row.file_path.endswith(f"/{file}")) for file in files]


def _single_row(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        pass
    yield pa.RecordBatch.from_pylist([{"one": 1}], schema=pa.schema([("one", pa.int32())]))


# ---------------------------------------------------------------------- the way to the server
def reduced(kind: Callable[..., Coordinator], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a coordinator's `__reduce__` answers, so that it is recreated from its arguments.

    Transforms travel beside their sinks, whose own pickle leaves transforms out, since tasks do not
    need them.
    """
    return _rebuilt, (kind, arguments, [sink.transform for sink in arguments[1]])


def _rebuilt(
    kind: Callable[..., Coordinator], arguments: Any, transforms: Sequence[Any]
) -> Coordinator:
    from pyspark.sql import SparkSession

    global _home
    _, sinks, storage, config, _ = arguments
    if config is None or config.checkpoint_location is None:
        raise CheckpointError(
            "with Spark Connect the coordinator cannot ask Spark for the query's "
            "checkpointLocation: name it in CheckpointConfig(checkpoint_location='…') and start "
            "with coordinator.write_stream(df).start() [EO-CONNECT]"
        )
    storage = storage or config.storage
    if (storage if isinstance(storage, str) else storage.uri).startswith("memory:"):
        raise CheckpointError(
            "with Spark Connect checkpoints cannot be recorded in memory:, which is gone with the "
            "worker that the server starts for each run of the query; use a file:///… that the "
            "server can reach, or a database [EO-CONNECT]"
        )
    for sink, transform in zip(sinks, transforms, strict=True):
        sink.transform = transform
    _home = SparkSession.getActiveSession()
    return kind(*arguments)
