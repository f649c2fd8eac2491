"""Fit and convert the columns of a batch to the columns of a lake table.

A value goes into the table as it is, or the sink rejects it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at

from sinks.arrow.convert import RefusedValue, Unfit, in_utf8, in_years, no_internals
from sinks.arrow.types import is_bytes, is_list, is_moment, is_text, spark_name
from sinks.errors import BadValue


def mismatches(
    batch: pa.Schema, table: pa.Schema, *, adds: bool, target: str = "the table"
) -> Iterator[str]:
    """List the reasons why rows of `batch` do not fit the table.

    With `adds`, a column that the table lacks is no reason, unless no lake table can have it.
    Messages call the table `target`.
    """
    columns = {name.lower(): name for name in table.names}
    lower = [name.lower() for name in batch.names]
    for field in batch:
        known = columns.get(field.name.lower())
        if batch.names.count(field.name) > 1:
            yield f"column {field.name!r} comes twice"
        elif lower.count(field.name.lower()) > 1:
            yield (
                f"column {field.name!r} differs from another one in capitals alone: rename it in "
                "Spark"
            )
        elif known is None:
            if not adds:
                yield (
                    f"column {field.name!r} is not in {target}: leave it out, add it there, or "
                    'let schema_evolution="add" do so'
                )
                continue
            try:
                column_of(field)
            except Unfit as unfit:
                yield str(unfit)
        elif known != field.name:
            yield f"column {field.name!r} is {known!r} in {target}: rename it in Spark"
        elif not fits(field.type, table.field(known).type):
            there = spark_name(table.field(known).type)
            yield (
                f"column {field.name!r} is {spark_name(field.type)}, and {there} in {target}: "
                "cast it in Spark"
            )
    for field in table:
        if not field.nullable and field.name not in batch.names:
            yield (
                f"column {field.name!r} is NOT NULL in the table, and the batch has none: add it "
                "in Spark"
            )


def column_of(field: pa.Field) -> pa.Field:
    """Return the column that a table gets for a column of a batch.

    Raises Unfit for a variant, a geometry or a geography, because the table would get the bytes
    inside it. Raises Unfit, too, for types that no lake table has.
    """
    try:
        no_internals(field.type)
        return field.remove_metadata().with_type(_of_table(field.type))
    except Unfit as unfit:
        raise Unfit(f"column {field.name!r}: {unfit}") from None


def _of_table(kind: pa.DataType) -> pa.DataType:
    """Return the type of the table's column for a type of the batch.

    Points in time are in UTC, whatever time zone the session shows them in. Times are in
    microseconds. Raises Unfit for types that no lake table has.
    """

    def child(field: pa.Field) -> pa.Field:
        return field.with_type(_of_table(field.type))

    if at.is_struct(kind):
        return pa.struct([child(kind.field(i)) for i in range(kind.num_fields)])
    if is_list(kind):
        return pa.list_(child(kind.value_field))
    if at.is_map(kind):
        return pa.map_(child(kind.key_field), child(kind.item_field))
    if at.is_null(kind) or at.is_duration(kind):
        raise Unfit(f"files have no column of type {spark_name(kind)}: cast it in Spark")
    if at.is_time(kind):
        return pa.time64("us")
    return pa.timestamp(kind.unit, "UTC") if is_moment(kind) else kind


def fits(given: pa.DataType, column: pa.DataType) -> bool:
    """Tell whether each value of the type `given` is a value of the type `column`."""
    if given == column:
        return True
    if at.is_struct(given) and at.is_struct(column):
        there = [column.field(i) for i in range(column.num_fields)]
        here = [given.field(i) for i in range(given.num_fields)]
        return [field.name for field in here] == [field.name for field in there] and all(
            map(_child_fits, here, there)
        )
    if is_list(given) and is_list(column):
        return _child_fits(given.value_field, column.value_field)
    if at.is_map(given) and at.is_map(column):
        return fits(given.key_type, column.key_type) and _child_fits(
            given.item_field, column.item_field
        )
    if at.is_signed_integer(given) and at.is_signed_integer(column):
        return bool(given.bit_width <= column.bit_width)
    if at.is_decimal(given) and at.is_decimal(column):
        whole = given.precision - given.scale <= column.precision - column.scale
        return bool(whole and given.scale <= column.scale)
    if at.is_timestamp(given) and at.is_timestamp(column):
        return given.unit == column.unit and (given.tz is None) == (column.tz is None)
    wider = (at.is_float32(given) and at.is_float64(column)) or (
        at.is_time(given) and at.is_time(column)
    )
    return bool(
        wider or (is_text(given) and is_text(column)) or (is_bytes(given) and is_bytes(column))
    )


def _child_fits(given: pa.Field, column: pa.Field) -> bool:
    return fits(given.type, column.type) and (column.nullable or not given.nullable)


def converted(
    batch: pa.RecordBatch, table: pa.Schema, parts: Collection[str], who: str
) -> pa.RecordBatch:
    """Convert a batch to the table's columns and types.

    A column that the batch lacks gets NULL. The message of an error begins with `who`. The
    function raises BadValue for:

    * a NULL in a column that takes none;
    * invalid UTF-8, because the table's log cannot have bounds of such a string;
    * a year that a partition column, which `parts` names, cannot have.
    """
    arrays = []
    for field in table:
        at_place = batch.schema.get_field_index(field.name)
        array = batch.column(at_place) if at_place >= 0 else pa.nulls(batch.num_rows, field.type)
        try:
            if array.null_count and not field.nullable:
                raise RefusedValue(
                    array.is_null().index(True).as_py(), "NULL, and it is NOT NULL in the table"
                )
            in_utf8(array)
            if field.name in parts:
                in_years(array)
        except RefusedValue as refused:
            why = f"column {field.name!r}: {refused}"
            raise BadValue(f"{who}: row {refused.index + 1} of a batch, {why}").because(
                why
            ) from None
        arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=table)


def partitions(
    rows: pa.Table, columns: Sequence[str]
) -> Iterator[tuple[dict[str, str | None], pa.Table]]:
    """Split rows by the partitions of the table.

    Yield for each partition the values of the partition `columns`, as the log has them, and the
    partition's rows without these columns.
    """
    if not columns:
        yield {}, rows
        return
    # Arrow treats a name that begins with a dot as a path
    keys = [str(number) for number in range(len(columns))]
    texts = (
        rows.select(columns)
        .rename_columns(keys)
        .cast(pa.schema([(key, pa.string()) for key in keys]))
    )
    numbered = texts.append_column("place", pa.array(range(rows.num_rows)))
    groups = numbered.group_by(keys, use_threads=False).aggregate([("place", "list")])
    for group in groups.to_pylist():
        chosen = rows.take(pa.array(group["place_list"])).drop_columns(list(columns))
        yield {name: group[key] for name, key in zip(columns, keys, strict=True)}, chosen


def without_nan(rows: pa.Table) -> list[str]:
    """Return the flat columns that have no NaN.

    Parquet's own bounds leave NaN out. For Spark, NaN is above all numbers, so with these bounds
    Spark would miss it.
    """
    flat = [name for name in rows.column_names if not at.is_nested(rows[name].type)]
    return [
        name
        for name in flat
        if not (at.is_floating(rows[name].type) and pc.any(pc.is_nan(rows[name])).as_py())
    ]
