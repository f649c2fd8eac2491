"""What Delta's log says of a file: the partition that it belongs to, and the bounds of its columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at

from sinks.arrow.types import is_text

_COLUMNS = 32
"""That have bounds, as Delta's own writers give them."""
_LONGEST = 32
"""Characters of a bound."""


def partitions(rows: pa.Table, columns: Sequence[str]) -> Iterator[tuple[dict[str, str | None], pa.Table]]:
    """The rows of each partition, without its columns, and the values of these as the log has them."""
    if not columns:
        yield {}, rows
        return
    texts = rows.select(columns).cast(pa.schema([(name, pa.string()) for name in columns]))
    place = pa.array(range(rows.num_rows))
    groups = texts.append_column("place", place).group_by(columns, use_threads=False).aggregate([("place", "list")])
    for group in groups.to_pylist():
        chosen = rows.take(pa.array(group.pop("place_list"))).drop_columns(list(columns))
        yield group, chosen


def statistics(rows: pa.Table) -> dict[str, Any]:
    low, high, nulls = dict[str, Any](), dict[str, Any](), dict[str, int]()
    for name in rows.column_names[:_COLUMNS]:
        column = rows[name]
        if at.is_nested(column.type):
            continue
        nulls[name] = column.null_count
        if (bounds := _bounds(column)) is not None:
            low[name], high[name] = bounds
    return {"numRecords": rows.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls}


def _bounds(column: pa.ChunkedArray) -> tuple[Any, Any] | None:
    """None where there are no values, or none that JSON has a form for."""
    kind = column.type
    if at.is_timestamp(kind):
        return _of_times(column)
    if not (at.is_integer(kind) or at.is_floating(kind) or is_text(kind) or at.is_date(kind)):
        return None
    if at.is_floating(kind) and not pc.all(pc.is_finite(column)).as_py():
        return None  # Delta orders NaN above all numbers, Arrow nowhere
    ends = pc.min_max(column.cast(pa.string()) if at.is_date(kind) else column).as_py()
    low, high = ends["min"], ends["max"]
    if low is None or (isinstance(high, str) and len(high) > _LONGEST):
        return None
    return (low[:_LONGEST] if isinstance(low, str) else low), high


def _of_times(column: pa.ChunkedArray) -> tuple[str, str] | None:
    """In milliseconds, as Delta has them: the upper bound is the next one."""
    counts = pc.min_max(column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())).as_py()
    if counts["min"] is None:
        return None
    bounds = pa.array([counts["min"] // 1000, -(-counts["max"] // 1000)]).cast(pa.timestamp("ms"))
    zone = "Z" if column.type.tz else ""
    return tuple(f"{text.replace(' ', 'T')}{zone}" for text in bounds.cast(pa.string()).to_pylist())  # type: ignore[return-value]
