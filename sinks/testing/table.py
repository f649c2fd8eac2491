"""What tests of sinks into a table share: a coordinator in a few lines, and what reads the database
past the sink."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from sinks import Checkpoint, CommitOutcome, Committable, TransactionContext
from sinks.sql.ledger import Ledger
from sinks.sql.sink import AnyTableSink
from sinks.transaction import CommitState, Fingerprint, TransactionId

SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string())])
CHANGES = pa.schema(
    [("id", pa.int64()), ("name", pa.string()), ("at", pa.int64()), ("gone", pa.bool_())]
)
LINEAGE = "0badcafe"
COMMITTED = CommitOutcome.COMMITTED
_task_attempts = itertools.count()


def rows_of(*ids: int, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"id": n, "name": f"row {n}"} for n in ids], schema=schema)


def batch(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=schema)


def change(
    id: int | None, name: str | None, at: int | None, gone: bool | None = None
) -> dict[str, Any]:
    """A row of CHANGES."""
    return {"id": id, "name": name, "at": at, "gone": gone}


def context(
    sink: AnyTableSink,
    checkpoint: int = 0,
    subtask: int = 0,
    schema: pa.Schema = SCHEMA,
    job: str = "job",
    round: int = 0,
) -> TransactionContext:
    attempt = next(_task_attempts)
    name = TransactionId(job, LINEAGE, checkpoint, sink.name, subtask, 1, round, 0, attempt)
    return TransactionContext(
        job, LINEAGE, checkpoint, sink.name, subtask, f"a{attempt}", schema, str(name)
    )


def pre_commit(
    sink: AnyTableSink,
    *batches: pa.RecordBatch,
    checkpoint: int = 0,
    subtask: int = 0,
    job: str = "job",
    round: int = 0,
) -> Committable:
    """What a task does for its partition; rolls back what fails."""
    transaction = sink.begin_transaction(
        context(sink, checkpoint, subtask, batches[0].schema, job, round)
    )
    try:
        for part in batches:
            sink.write(transaction, part)
        committable = sink.pre_commit(transaction)
    except BaseException:
        sink.rollback(transaction)
        raise
    return committable.of(
        sink.name, subtask, Fingerprint(sum(part.num_rows for part in batches), 0)
    )


def checkpoint(number: int = 0, job: str = "job", oldest: int = 0) -> Checkpoint:
    return Checkpoint(job, LINEAGE, number, oldest)


def why_unknown(outcome: CommitOutcome | Exception) -> str:
    """The reason of an outcome that has to be UNKNOWN."""
    assert isinstance(outcome, CommitOutcome)
    assert outcome.state is CommitState.UNKNOWN
    return outcome.reason


class Database(ABC):
    """Reads, in autocommit mode, what is visible, prepared and staged."""

    dsn: str

    @abstractmethod
    def run(
        self, statement: str, parameters: Sequence[Any] | None = None
    ) -> list[tuple[Any, ...]]: ...

    @abstractmethod
    def prepared(self) -> Sequence[Any]: ...

    @abstractmethod
    def staging(self) -> list[str]: ...

    @abstractmethod
    def close(self) -> None: ...

    def visible(self, table: str = "orders", order: str = "1") -> list[tuple[Any, ...]]:
        return self.run(f"SELECT * FROM {table} ORDER BY {order}")

    def ids(self, table: str = "orders") -> list[int]:
        return [row[0] for row in self.run(f"SELECT id FROM {table} ORDER BY 1")]

    def pending(self) -> int:
        return len(self.prepared()) + len(self.staging())

    def ledger(self) -> dict[str, bool]:
        """What it says of transactions."""
        rows = self.run("SELECT transaction_id, committed FROM tpc_ledger")
        return {name: bool(done) for name, done in rows if name != Ledger.IDENTITY}


def eventually(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < seconds, "did not happen in time"
        time.sleep(max(0.02, waited / 20))
