"""The values of rows that carry them in one column: a struct, a map, or a JSON object as text.

The columns of the table decide how text becomes a value. Arrow casts it to the type that goes into
the column, and refuses what would lose something.
"""

from __future__ import annotations

import base64
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at

from sinks.arrow.convert import RefusedValue, Unfit, first_refused, short
from sinks.arrow.types import is_text
from sinks.sql.table import Column

_NESTED = pa.struct([("x", pa.int64())])
_SCALARS = (
    pa.float64(),
    pa.string(),
    pa.binary(),
    pa.date32(),
    pa.timestamp("us", "UTC"),
    pa.timestamp("us"),
    pa.time64("us"),
)
_SIZE = re.compile(r"\((\d+)(?:,\s*(\d+))?\)")
_MOST_DIGITS = 38
_FRACTION_DIGITS = 18
"""The digits behind the point, for a column of decimals that does not limit them."""


class Payload(ABC):
    """Make the columns of one table out of the column that carries the values.

    `schema` has the columns. `fields` are the only fields of the payload that are written, if they
    are given; otherwise a value for which the table has no column is refused.
    """

    schema: pa.Schema

    def __init__(
        self, columns: Sequence[Column], fields: Collection[str] | None, others: Collection[str]
    ) -> None:
        """Look at the table's `columns`; `others` of them have their values from elsewhere."""
        self._known = {column.name for column in columns}
        self._fields = fields
        self._columns = [
            column
            for column in columns
            if not column.generated
            and column.name not in others
            and (fields is None or column.name in fields)
        ]

    @abstractmethod
    def arrays(self, payload: pa.Array, goes: pa.Array | None) -> list[pa.Array]:
        """Return the columns of `schema`. `goes` is true for rows that delete.

        Raises RefusedValue.
        """

    def _require_values(self, payload: pa.Array) -> None:
        if payload.null_count:
            raise RefusedValue(pc.index(payload.is_null(), True).as_py(), "the payload is NULL")

    def _refuse_field(self, index: int, name: str) -> None:
        raise RefusedValue(
            index, f'the payload has a value of "{name}", for which the table has no column'
        )


def payload_of(
    kind: pa.DataType,
    columns: Sequence[Column],
    fields: Collection[str] | None,
    others: Collection[str],
) -> Payload:
    """Return what reads a payload of this type. Raises Unfit for a type that carries no values."""
    if at.is_struct(kind):
        return StructPayload(kind, columns, fields, others)
    if is_text(kind) or (at.is_map(kind) and is_text(kind.key_type) and is_text(kind.item_type)):
        return TextPayload(columns, fields, others)
    raise Unfit("a payload is a struct, a map of strings, or a JSON object as a string")


class StructPayload(Payload):
    """A payload that is a struct: each field is a column, with the type that it has in Spark.

    One struct serves all tables, so it may have fields that the table lacks. They are NULL in rows
    of the table.
    """

    def __init__(self, kind: pa.DataType, *about: Any) -> None:
        super().__init__(*about)
        names = {column.name for column in self._columns}
        self._fields_of = [kind.field(i) for i in range(kind.num_fields)]
        self.schema = pa.schema([field for field in self._fields_of if field.name in names])

    def arrays(self, payload: pa.Array, goes: pa.Array | None) -> list[pa.Array]:
        self._require_values(payload)
        arrays = []
        for field, values in zip(self._fields_of, payload.flatten(), strict=True):
            if field.name in self.schema.names:
                arrays.append(values)
            elif (
                self._fields is None
                and field.name not in self._known
                and values.null_count < len(values)
            ):
                self._refuse_field(pc.index(values.is_valid(), True).as_py(), field.name)
        return arrays


class TextPayload(Payload):
    """A payload whose values are text: a JSON object, or a map of strings.

    It writes all columns of the table. A field that is missing is NULL, unless the column has a
    default, which a NULL would replace.
    """

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self._readers = [ColumnReader(column) for column in self._columns]
        self.schema = pa.schema(
            [pa.field(reader.column.name, reader.type) for reader in self._readers]
        )

    def arrays(self, payload: pa.Array, goes: pa.Array | None) -> list[pa.Array]:
        self._require_values(payload)
        rows = [_object(index, value) for index, value in enumerate(payload.to_pylist())]
        deletes = goes.to_pylist() if goes is not None else [False] * len(rows)
        defaults = [column.name for column in self._columns if column.has_default]
        for index, row in enumerate(rows):
            if self._fields is None and not row.keys() <= self._known:
                for name, value in row.items():
                    if value is not None and name not in self._known:
                        self._refuse_field(index, name)
            if not deletes[index] and any(name not in row for name in defaults):
                missing = next(name for name in defaults if name not in row)
                raise RefusedValue(
                    index,
                    f'the payload has no "{missing}", and the column has a default: name the '
                    "fields that are to be written in columns=",
                )
        return [
            reader.array([row.get(reader.column.name) for row in rows]) for reader in self._readers
        ]


def _object(index: int, value: Any) -> dict[str, Any]:
    if isinstance(value, list):  # Arrow's map
        return dict(value)
    try:
        row = json.loads(value, parse_float=Decimal, parse_constant=_no_number)
    except ValueError as error:
        raise RefusedValue(index, f"{short(value)} is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise RefusedValue(index, f"{short(value)} is no JSON object")
    return row


def _no_number(text: str) -> None:
    raise ValueError(f"JSON has no {text}")


class ColumnReader:
    """Make the values of one column out of text.

    `type` is the Arrow type that they get.
    """

    def __init__(self, column: Column) -> None:
        """Choose the type. Raises Unfit if no text becomes a value of the column."""
        self.column = column
        self._is_json = _takes(column, _NESTED)
        self._is_list = False
        self.type = self._chosen()
        self._takes_booleans = _takes(column, pa.bool_())

    def _chosen(self) -> pa.DataType:
        column = self.column
        if self._is_json:
            return pa.string()
        if _takes(column, pa.decimal128(_MOST_DIGITS, 1)):
            size = _SIZE.search(column.in_sql)
            scale = int(size[2] or 0) if size else _FRACTION_DIGITS
            return pa.decimal128(_MOST_DIGITS, scale)
        if _takes(column, pa.int64()):
            # an unsigned column may hold more than an int64
            return pa.uint64() if "unsigned" in column.in_sql else pa.int64()
        for kind in (pa.bool_(), *_SCALARS):
            if _takes(column, kind):
                return pa.float32() if at.is_float64(kind) and _is_single(column) else kind
        for kind in (pa.bool_(), pa.int64(), *_SCALARS):
            if _takes(column, pa.list_(kind)):
                self._is_list = True
                return pa.list_(kind)
        raise Unfit(
            f'column "{column.name}": no text becomes a value of {column.in_sql}: leave the field '
            "out, with columns="
        )

    def array(self, values: Sequence[Any]) -> pa.Array:
        """Return the values of a payload's fields as an array. Raises RefusedValue."""
        texts = self._each(values, self._list_of_texts if self._is_list else self._text)
        kind = pa.list_(pa.string()) if self._is_list else pa.string()
        try:
            return self._cast(pa.array(texts, kind))
        except (pa.ArrowInvalid, ValueError):
            array = pa.array(texts, kind)
            index = first_refused(array, self._cast) or 0
            raise RefusedValue(
                index, f"{short(array[index])} is no value of {self.column.in_sql}"
            ) from None

    def _each(self, values: Iterable[Any], text: Callable[[Any], Any]) -> list[Any]:
        texts = []
        for index, value in enumerate(values):
            try:
                texts.append(None if value is None else text(value))
            except ValueError as error:
                name = self.column.in_sql
                raise RefusedValue(
                    index, f"{short(value)} is no value of {name}: {error}"
                ) from None
        return texts

    def _list_of_texts(self, values: Any) -> list[str | None]:
        if isinstance(values, str):
            values = json.loads(values, parse_float=Decimal, parse_constant=_no_number)
        if not isinstance(values, list):
            raise ValueError("it takes a list")
        return [None if value is None else self._text(value) for value in values]

    def _text(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        if self._is_json or isinstance(value, dict | list):
            return json.dumps(value, default=_exact, ensure_ascii=False)
        if isinstance(value, bool):
            if at.is_integer(self.type) and self._takes_booleans:
                return str(int(value))
            return "true" if value else "false"
        return str(value)

    def _cast(self, texts: pa.Array) -> pa.Array:
        kind = self.type.value_type if self._is_list else self.type
        if at.is_binary(kind):
            if self._is_list:
                raise ValueError("it is a list of binary values")
            decoded = [
                None if text is None else base64.b64decode(text, validate=True)
                for text in texts.to_pylist()
            ]
            return pa.array(decoded, kind)
        if self._is_list:
            return texts.cast(self.type)
        if at.is_time(kind):
            return (
                pc.binary_join_element_wise("1970-01-01T", texts, "")
                .cast(pa.timestamp("us"))
                .cast(kind)
            )
        if at.is_timestamp(kind) and kind.tz is None:
            # the wall clock of UTC, as Debezium writes a time without a zone
            return pc.replace_substring_regex(texts, "Z$", "").cast(kind)
        return texts.cast(kind)


def _exact(number: Any) -> float:
    """Return a decimal of nested JSON as the float that has the same digits."""
    if Decimal(repr(float(number))) != number:
        raise ValueError(f"{number} has more digits than JSON's numbers keep")
    return float(number)


def _takes(column: Column, kind: pa.DataType) -> bool:
    try:
        column.conversion(kind)
    except Unfit:
        return False
    return True


def _is_single(column: Column) -> bool:
    """Tell whether a column of floating-point numbers has single precision."""
    try:
        column.conversion(pa.float64())(pa.array([0.1]))
    except RefusedValue:
        return True
    return False
