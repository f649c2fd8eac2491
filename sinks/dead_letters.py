"""Dead letters: rows that a sink refuses, kept in another sink by the same checkpoint.

docs/dead-letters.md says more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sinks.arrow.json import escaped, in_ascii, to_json
from sinks.arrow.spark_types import schema_to_json
from sinks.arrow.types import is_bytes, is_text
from sinks.errors import BadValue, TooManyDeadLetters, without_code
from sinks.transaction import Refused, TransactionContext

SCHEMA = pa.schema(
    [
        ("job", pa.string()),
        ("lineage", pa.string()),
        ("sink", pa.string()),
        ("checkpoint", pa.int64()),
        ("partition", pa.int32()),
        ("row_number", pa.int64()),
        ("error_class", pa.string()),
        ("error", pa.string()),
        ("row", pa.string()),
        ("row_schema", pa.string()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("time", pa.timestamp("us", "UTC")),
    ]
)
"""Columns of the record batches that a sink for dead letters gets."""
MOST = 10_000
"""The most dead letters of one sink in a checkpoint, because the record names each."""
UNTRIED = ""
"""The error class of a row that waits without having been tried."""
_LONGEST_ERROR = 500


@dataclass(frozen=True)
class DeadLetters:
    """The result of `DeadLettering.read_dead_letters`.

    `rows` are the dead letters, in any order, each with its columns. `gaps` say why some that were
    written may be missing.
    """

    rows: Sequence[Mapping[str, Any]]
    gaps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """A row that was not written: its place in the record batch, from 0, and the error.

    `final` says that no other row can let it pass. If it is not final, the row waits, and is tried
    again when the other rows of the partition are written.
    """

    row: int
    error_class: str
    error: str
    final: bool = True

    @classmethod
    def of(cls, row: int, error: BadValue, *, final: bool = True) -> Refusal:
        """Return the refusal of a row for which the sink raised `error`."""
        return cls(
            row, error.kind or type(error).__name__, error.reason or without_code(str(error)), final
        )


def find_refused_rows(
    batch: pa.RecordBatch,
    take: Callable[[pa.RecordBatch], object],
    most: int,
    *,
    alone: bool = False,
) -> list[Refusal]:
    """Find the rows that `take` refuses, in order, by bisection; it takes all others.

    `take` is called with slices of the batch. For a slice with a bad row it raises BadValue and
    takes nothing of the slice. `alone` says that `take` judges each row by itself, whatever other
    rows there are, so that a refusal is final. After more than `most` refused rows, the remaining
    rows are not tried. Unless rows are judged alone, the remaining rows are returned too, with no
    error, and wait.
    """
    refused: list[Refusal] = []

    def halve(start: int, count: int) -> None:
        if len(refused) > most:
            return
        try:
            take(batch.slice(start, count))
        except BadValue as error:
            if count == 1:
                refused.append(Refusal.of(start, error, final=alone))
                return
            halve(start, count // 2)
            halve(start + count // 2, count - count // 2)

    halve(0, batch.num_rows)
    if len(refused) > most and not alone:
        refused += [
            Refusal(row, UNTRIED, "", final=False)
            for row in range(refused[-1].row + 1, batch.num_rows)
        ]
    return refused


def write_and_find_refused(
    batch: pa.RecordBatch,
    encode: Callable[[pa.RecordBatch], object],
    put: Callable[[pa.RecordBatch], None],
    most: int,
) -> list[Refusal]:
    """Do what `find_refused_rows` does, for a `put` that calls the server.

    The server may judge a row by other rows. `encode` finds bad rows without a call to the server,
    and raises BadValue for them.
    """
    try:
        put(batch)
        return []
    except BadValue:
        pass
    refused = find_refused_rows(batch, encode, most, alone=True)
    if len(refused) > most:
        return refused
    good = without(batch.num_rows, refused)
    if len(good):
        by_server = find_refused_rows(batch.take(good), put, most - len(refused))
        refused += [replace(refusal, row=good[refusal.row].as_py()) for refusal in by_server]
    return sorted(refused, key=lambda refusal: refusal.row)


def without(rows: int, refused: Iterable[Refusal]) -> pa.Array:
    """Return the places of the rows that are not refused."""
    places = pa.array(range(rows), pa.int64())
    return places.filter(
        pc.invert(pc.is_in(places, pa.array([refusal.row for refusal in refused], pa.int64())))
    )


class RecordedRefusals:
    """The rows that a record names as refused.

    They are found again by their hashes, and each is found as often as the record names it.
    """

    def __init__(self, refused: Iterable[Refused]) -> None:
        self._left: dict[int, deque[Refused]] = {}
        for row in refused:
            self._left.setdefault(row.row_hash, deque()).append(row)

    def find_refused(self, hashes: pa.Array) -> list[Refusal]:
        """Return the refusals of those rows, given by their hashes, that the record names.

        A row that is returned is used up: it is not found again.
        """
        if not self._left:
            return []
        known = pc.is_in(hashes, pa.array(list(self._left), pa.int64()))
        refusals = []
        for place in pc.indices_nonzero(known).to_pylist():
            if named := self._left[hashes[place].as_py()]:
                row = named.popleft()
                refusals.append(Refusal(place, row.error_class, row.error))
        return refusals


def letter_rows(
    context: TransactionContext, rows: pa.RecordBatch, numbers: pa.Array, refused: Sequence[Refusal]
) -> pa.RecordBatch:
    """Return the refused rows of a batch as dead letters: a record batch of `SCHEMA`.

    `numbers` has the number in the partition of each row of the batch.
    """
    bad = rows.take(pa.array([refusal.row for refusal in refused], pa.int64()))
    struct = (
        pa.StructArray.from_arrays(bad.columns, fields=list(bad.schema))
        if bad.num_columns
        else None
    )
    columns: dict[str, object] = {
        "job": pa.repeat(context.job, len(refused)),
        "lineage": pa.repeat(context.lineage, len(refused)),
        "sink": pa.repeat(context.sink, len(refused)),
        "checkpoint": [context.checkpoint_id] * len(refused),
        "partition": [context.subtask] * len(refused),
        "row_number": [numbers[refusal.row].as_py() for refusal in refused],
        "error_class": [refusal.error_class for refusal in refused],
        "error": [shortened(refusal.error) for refusal in refused],
        "row": pa.repeat("{}", len(refused))
        if struct is None
        else _for_any_column(to_json(struct)),
        "row_schema": [_schema(rows)] * len(refused),
        "key": _raw(bad, "key"),
        "value": _raw(bad, "value"),
        "time": [time.time_ns() // 1000] * len(refused),
    }
    arrays = [_as(columns[field.name], field.type) for field in SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def letters_in_ascii(letters: pa.RecordBatch) -> pa.RecordBatch:
    """Return the same letters for a target that lacks characters.

    JSON stays the same JSON, and other strings have JSON's escapes, too.
    """
    arrays = []
    for name, column in zip(SCHEMA.names, letters.columns, strict=True):
        if is_text(column.type):
            longest = _LONGEST_ERROR if name == "error" else None
            texts = [
                text if text is None else in_ascii(text)[:longest] for text in column.to_pylist()
            ]
            column = pa.array(texts, column.type)
        arrays.append(column)
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def shortened(error: str) -> str:
    """Return an error text as a dead letter has it: cut, and with NUL characters as escapes."""
    text = error.replace("\0", "\\0")
    return text if len(text) <= _LONGEST_ERROR else text[: _LONGEST_ERROR - 1] + "…"


def _for_any_column(texts: pa.Array) -> pa.Array:
    """Return the same JSON, with invalid UTF-8 as escapes.

    Columns of text refuse invalid UTF-8.
    """
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return pa.array(map(escaped, texts.cast(pa.binary()).to_pylist()))
    return texts


def _schema(rows: pa.RecordBatch) -> str | None:
    """Return the columns as Spark's JSON, or None if Spark has no name for a type."""
    try:
        return schema_to_json(rows.schema)
    except ValueError:
        return None


def _raw(rows: pa.RecordBatch, name: str) -> object:
    """Return the bytes of a string or binary column, or nulls if there is no such column."""
    if name in rows.schema.names:
        column = rows.column(name)
        if is_text(column.type) or is_bytes(column.type):
            return column.cast(pa.binary())
    return [None] * rows.num_rows


def _as(values: object, kind: pa.DataType) -> pa.Array:
    return values.cast(kind) if isinstance(values, pa.Array) else pa.array(values, kind)


# ---------------------------------------------------------------------- the limit
def limit_problem(limit: object) -> str | None:
    """Say why a `max_dead_letters` is invalid; return None if it is valid."""
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        return f"max_dead_letters is a number of rows, or a share of them as float, not {limit!r}"
    if isinstance(limit, int) and not 0 <= limit <= MOST:
        return f"max_dead_letters is between 0 and {MOST:,} rows, not {limit:,}"
    if isinstance(limit, float) and not 0 <= limit <= 1:
        return (
            f"max_dead_letters, as a float, is a share of the rows between 0 and 1, not {limit:g}"
        )
    return None


def most_in_task(limit: int | float) -> int:
    """Return the limit that a task can check alone."""
    return limit if isinstance(limit, int) else MOST


def allowed(limit: int | float, rows: int) -> int:
    """Return the limit of a checkpoint with this many rows for the sink."""
    return limit if isinstance(limit, int) else min(int(round(limit * rows, 6)), MOST)


def too_many(
    sink: str, refused: str, limit: int | float, reasons: Iterable[tuple[str, str]]
) -> TooManyDeadLetters:
    """Return the error for a checkpoint with too many dead letters.

    `reasons` has class and text of the first errors.
    """
    lines = "".join(f"\n  - {error_class}: {shortened(error)}" for error_class, error in reasons)
    most = (
        f"{limit:,} row(s)"
        if isinstance(limit, int)
        else f"{limit:.2%} of the rows, {MOST:,} at most,"
    )
    return TooManyDeadLetters(
        f"sink {sink!r} refused {refused}, and max_dead_letters allows {most} in a whole "
        f"checkpoint; the first of them:{lines}\nNo row of it is visible. Fix the source or the "
        "table and start the query again, or raise max_dead_letters [EO-DEAD-LETTERS]"
    )
