"""What runs inside an executor: one sink driven through one participant, and the ack that goes back to the driver."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sinks.base import Sink
from sinks.dead_letters import SCHEMA, Recorded, Refusal, letters, most_in_task, too_many
from sinks.errors import LargeRow, SchemaMismatch, SinkError
from sinks.participant import Share, others
from sinks.transaction import Committable, Fingerprint, Refused, TransactionContext, TransactionId

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

logger = logging.getLogger(__name__)

HASH_COLUMN = "__tpc_row_hash"
ROW_HASH = "xxhash64 of columns and parts"
"""As `Record.row_hash` names it."""
ACK_SCHEMA = "subtask int, ack string"
_ACK_ARROW = pa.schema([("subtask", pa.int32()), ("ack", pa.string())])
_ON_DRIVER = 10**15
"""In place of Spark's number of a task attempt, which counts from 0 and never gets there."""


@dataclass(frozen=True)
class Ack:
    """One participant's acknowledgement. `committable` is None for a partition without rows and after an error; `bytes`
    are those of the record batches. `dead_letters` is the same of the rows that were refused."""

    subtask: int
    fingerprint: Fingerprint
    committable: Committable | None = None
    error: SinkError | None = None
    bytes: int = 0
    dead_letters: Ack | None = None

    @property
    def read(self) -> int:
        """How many rows came to the sink."""
        return self.fingerprint.rows + (self.dead_letters.fingerprint.rows if self.dead_letters else 0)

    def to_json(self) -> str:
        return json.dumps(self._fields())

    def _fields(self) -> dict[str, Any]:
        return {
            "subtask": self.subtask,
            "fingerprint": self.fingerprint.to_json(),
            "committable": self.committable and self.committable.to_json(),
            "error": self.error and self.error.to_json(),
            "bytes": self.bytes,
            **({"dead_letters": self.dead_letters._fields()} if self.dead_letters else {}),
        }

    @classmethod
    def from_json(cls, text: str) -> Ack:
        return cls._of(json.loads(text))

    @classmethod
    def _of(cls, value: dict[str, Any]) -> Ack:
        return cls(
            value["subtask"],
            Fingerprint.from_json(value["fingerprint"]),
            value["committable"] and Committable.from_json(value["committable"]),
            value["error"] and SinkError.from_json(value["error"]),
            value["bytes"],
            cls._of(value["dead_letters"]) if "dead_letters" in value else None,
        )


@dataclass(frozen=True)
class Again:
    """What a replay writes of a sink: the subtasks that lost its `own` rows, and those that lost their dead `letters`.
    What the record says was refused, by subtask, separates rows as it was then, whatever the target would say of them
    now. `whole`: all rows are to come as one partition, since they were written as one."""

    own: frozenset[int]
    letters: frozenset[int] = frozenset()
    refused: Mapping[int, Sequence[Refused]] = field(default_factory=dict)
    whole: bool = False

    @property
    def lost(self) -> frozenset[int]:
        return self.own | self.letters


Write = Callable[[pa.RecordBatch, pa.Array], Sequence[Refusal]]
"""Writes rows with these hashes; answers which of them it refused."""


@dataclass(frozen=True)
class SinkTask:
    """The function given to `DataFrame.mapInArrow`. Batches carry the row hash as their last column.

    A `SinkError` comes back in the ack, since Spark's retries cannot help; anything else fails the Spark task.
    With `again`, all partitions but those that it names are drained: a replay rewrites lost participants alone.
    """

    sink: Sink
    job: str
    lineage: str
    checkpoint_id: int
    generation: int
    round: int = 0
    attempt: int = 0
    exactly_once: bool = True
    again: Again | None = None
    rows: Callable[[Iterable[pa.RecordBatch], int, str], Iterator[pa.RecordBatch]] | None = None
    """Takes the rows that Spark gives to a subtask in an attempt; keeps them as they pass, or gives others instead."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None, "a SinkTask runs inside a Spark task"
        ack = self.run(batches, task.partitionId(), task.taskAttemptId(), task.attemptNumber())
        yield pa.RecordBatch.from_pylist([{"subtask": ack.subtask, "ack": ack.to_json()}], schema=_ACK_ARROW)

    def run(self, batches: Iterable[pa.RecordBatch], subtask: int, task_attempt: int, slot: int = 0) -> Ack:
        given = iter(batches)
        if not self._writes(subtask) and not self._writes_letters(subtask):
            _drain(given)
            return Ack(subtask, Fingerprint())
        rows = self.rows(given, subtask, self._name(self.sink, subtask, task_attempt).which_try) if self.rows else given
        opened: list[Sink] = []

        def open(sink: Sink) -> None:
            opened.append(sink)
            sink.open()

        try:
            return self._participate(rows, subtask, task_attempt, slot, open)
        except SinkError as error:
            logger.warning("subtask %d of checkpoint %d failed: %s", subtask, self.checkpoint_id, error)
            _drain(given)
            return Ack(subtask, Fingerprint(), error=error)
        finally:
            for sink in opened:
                try:
                    sink.close()
                except Exception:
                    logger.warning("sink %r could not be closed in subtask %d", sink.name, subtask, exc_info=True)

    def run_on_driver(self, batches: Iterable[pa.RecordBatch]) -> Ack:
        """The one participant of a small batch. With the driver's own sinks, which are open and stay so."""
        try:
            rows = self.rows(batches, 0, self._name(self.sink, 0, _ON_DRIVER).which_try) if self.rows else iter(batches)
            return self._participate(rows, 0, _ON_DRIVER, 0, lambda sink: None)
        except SinkError as error:
            logger.warning("checkpoint %d failed on the driver: %s", self.checkpoint_id, error)
            return Ack(0, Fingerprint(), error=error)

    def _writes(self, subtask: int) -> bool:
        return self.again is None or subtask in self.again.own

    def _writes_letters(self, subtask: int) -> bool:
        return self.sink.dead_letters is not None and (self.again is None or subtask in self.again.letters)

    def _participate(
        self,
        batches: Iterator[pa.RecordBatch],
        subtask: int,
        task_attempt: int,
        slot: int,
        open: Callable[[Sink], None],
    ) -> Ack:
        own = Share(self.sink) if self._writes(subtask) else None
        dead = Share(self.sink.dead_letters) if self.sink.dead_letters and self._writes_letters(subtask) else None
        shares = [share for share in (own, dead) if share]
        if own:
            open(own.sink)
        filled = (batch for batch in batches if batch.num_rows)
        first = next(filled, None)
        if first is None:
            return Ack(subtask, Fingerprint())
        schema = first.schema.remove(first.num_columns - 1)
        context = self._context(self.sink, schema, subtask, task_attempt, slot)
        if own:
            own.begin(context)
        write = self._way(own, dead, subtask)
        try:
            before = 0
            for batch in chain([first], filled):
                rows, hashes = _apart(batch, schema)
                refused = write(rows, hashes)
                if dead and refused:
                    if not dead.is_open:
                        open(dead.sink)
                        dead.begin(self._context(dead.sink, SCHEMA, subtask, task_attempt, slot))
                    dead.write_letters(letters(context, rows, before, refused), hashes, refused)
                before += rows.num_rows
            for share in shares:
                share.end(subtask, exactly_once=self.exactly_once)
        except BaseException:
            for share in shares:
                share.undo()
            raise
        refused_ack = Ack(subtask, dead.fingerprint, dead.committable, bytes=dead.bytes) if dead else None
        if own is None:
            return Ack(subtask, Fingerprint(), dead_letters=refused_ack)
        return Ack(subtask, own.fingerprint, own.committable, bytes=own.bytes, dead_letters=refused_ack)

    def _way(self, own: Share | None, dead: Share | None, subtask: int) -> Write:
        """How rows are written, so that those that go to the dead letters are answered."""
        if self.again:
            recorded = Recorded(self.again.refused.get(subtask, ()))
            return lambda rows, hashes: _write_as_recorded(own, recorded, rows, hashes)
        assert own is not None
        if dead is None:
            return own.write
        return lambda rows, hashes: self._write_accepted(own, dead, rows, hashes, subtask)

    def _write_accepted(
        self, own: Share, dead: Share, rows: pa.RecordBatch, hashes: pa.Array, subtask: int
    ) -> Sequence[Refusal]:
        limit = self.sink.max_dead_letters
        most = most_in_task(limit)
        refused = own.write_accepted(rows, hashes, most - len(dead.refused))
        if len(dead.refused) + len(refused) > most:
            where = f"the rows of partition {subtask} of checkpoint {self.checkpoint_id}"
            reasons = [(one.error_class, one.error) for one in dead.refused[:3]]
            reasons += [(one.error_class, one.error) for one in refused[: 3 - len(reasons)]]
            raise too_many(self.sink.name, where, f"more than {most:,}", limit, reasons)
        return refused

    def _name(self, sink: Sink, subtask: int, task_attempt: int) -> TransactionId:
        tries = self.generation, self.round, self.attempt, task_attempt
        return TransactionId(self.job, self.lineage, self.checkpoint_id, sink.name, subtask, *tries)

    def _context(self, sink: Sink, schema: pa.Schema, subtask: int, task_attempt: int, slot: int) -> TransactionContext:
        return self._name(sink, subtask, task_attempt).context(schema, slot, exactly_once=self.exactly_once)


def _apart(batch: pa.RecordBatch, schema: pa.Schema) -> tuple[pa.RecordBatch, pa.Array]:
    """Rows and their hashes."""
    *columns, hashes = batch.columns
    if hashes.null_count:
        raise LargeRow(
            "a row takes more than its share of a record batch (64 MiB / maxRecordsPerBatch); from here "
            "on this driver lets Spark's maxBytesPerBatch bound record batches instead"
        )
    return pa.RecordBatch.from_arrays(columns, schema=schema), hashes


def _write_as_recorded(
    own: Share | None, recorded: Recorded, rows: pa.RecordBatch, hashes: pa.Array
) -> Sequence[Refusal]:
    refused = recorded.among(hashes)
    accepted, their_hashes = others(rows, hashes, refused)
    if own and accepted.num_rows:
        own.write(accepted, their_hashes)
    return refused


def with_row_hash(df: DataFrame) -> DataFrame:
    """`df` with a hash of each row as last column. Raises SchemaMismatch for a column of its name, whose place it would
    take."""
    if HASH_COLUMN in map(str.lower, df.columns):
        raise SchemaMismatch(f"the name {HASH_COLUMN} is taken by the coordinator: rename this column")
    return df.withColumn(HASH_COLUMN, _hash(df))


def _hash(df: DataFrame) -> Column:
    """Spark's xxhash64 passes over NULLs, wherever they are, takes 0.0 and -0.0 for the same, and what is equal in a
    collation, 1.00 and 100 as decimals, texts and their bytes, and no maps. So it gets what it can tell apart, with a
    flag for each value that may be NULL, and the columns' names and types."""
    from pyspark.sql import functions

    columns = columns_hash((field.name, field.dataType.simpleString()) for field in df.schema)
    parts = [part for field in df.schema for part in _parts(_column(df, field.name), field.dataType)]
    return functions.xxhash64(functions.lit(columns), *parts)


def columns_hash(columns: Iterable[tuple[str, str]]) -> int:
    """Of names and types, in 64 bits."""
    return int.from_bytes(hashlib.sha256(json.dumps(list(columns)).encode()).digest()[:8], "big", signed=True)


def _parts(value: Column, data_type: DataType) -> list[Column]:
    """Nothing here has a function for each element: Spark would compile none of the projection then."""
    from pyspark.sql import functions
    from pyspark.sql.types import (
        ArrayType,
        BooleanType,
        DateType,
        FractionalType,
        MapType,
        NumericType,
        StringType,
        StructType,
    )

    is_null = functions.isnull(value)
    if isinstance(data_type, StringType):
        return [is_null, value.cast("string")]
    if isinstance(data_type, FractionalType):
        return [is_null, value, functions.when(value == 0, value.cast("string"))]
    if not _holds(data_type, "array", "map", "struct", "variant"):
        return [is_null, value]
    if isinstance(data_type, StructType) and _can_be_named(data_type):
        return [is_null, *(part for f in data_type for part in _parts(value.getField(f.name), f.dataType))]
    if isinstance(data_type, ArrayType):
        if isinstance(data_type.elementType, StringType):
            texts = value.cast("array<string>")
            return [is_null, *_elements(texts, _NULL, functions.array_join(texts, "\n", _NULL))]
        if isinstance(data_type.elementType, NumericType):
            return [is_null, *_elements(value, functions.lit(0).cast(data_type.elementType), value.cast("string"))]
        if isinstance(data_type.elementType, (BooleanType, DateType)):
            return [is_null, value.cast("string")]
    if isinstance(data_type, MapType) and _holds(data_type.keyType, "binary", "array", "struct"):
        value = functions.map_entries(value)  # names in JSON would be addresses in the JVM's memory
    return [is_null, functions.to_json(functions.struct(value), _JSON)]


def _elements(array: Column, rare: Column | str, text: Column) -> list[Column]:
    """Also the text, which takes longer, if the array holds NULLs or what is `rare`."""
    from pyspark.sql import functions

    plain = functions.array_contains(array, rare).eqNullSafe(functions.lit(False))
    return [functions.array_size(array), array, functions.when(~plain, text)]


_NULL = "NULL 0c5f61e0a2d14f6f9a5c7c3f1f2f4b7e"
"""In place of a NULL among texts."""


def _can_be_named(data_type: StructType) -> bool:
    """Spark takes no field of a struct by its name if there are two that differ in capitals alone."""
    return len({name.lower() for name in data_type.names}) == len(data_type.names)


_JSON = {
    "ignoreNullFields": "true",
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd HH:mm:ss.SSSSSS",
    "timestampNTZFormat": "yyyy-MM-dd HH:mm:ss.SSSSSS",
}
"""To the microsecond, and the same in every session."""


def _column(df: DataFrame, name: str) -> Column:
    return df[f"`{name.replace('`', '``')}`"]


def _holds(data_type: DataType, *kinds: str) -> bool:
    text = json.dumps(data_type.jsonValue())
    return any(f'"{kind}"' in text for kind in kinds)


def _drain(batches: Iterator[pa.RecordBatch]) -> None:
    for _ in batches:
        pass
