"""The columns that a Kafka sink takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t

from sinks._util.column_names import columns_of
from sinks.arrow.types import is_bytes, is_moment, is_text
from sinks.dead_letters import Refusal
from sinks.errors import SchemaMismatch
from sinks.kafka.record_batch import milliseconds
from sinks.kafka.times import has_old_patterns, with_texts
from sinks.projection import Projection, named

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructField

_LARGEST_PARTITION = 2**31 - 1
_TOPIC = r"^[a-zA-Z0-9._-]{1,249}$"
_RESERVED = pa.array(
    [b".", b"..", b"__consumer_offsets", b"__transaction_state", b"__share_group_state"]
)
"""Names that no topic of a client can have. The last three are topics of the brokers."""


def _bytes(kind: pa.DataType) -> bool:
    return is_text(kind) or is_bytes(kind)


def _headers(kind: pa.DataType) -> bool:
    if not t.is_list(kind) or not t.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    return set(fields) == {"key", "value"} and is_text(fields["key"]) and _bytes(fields["value"])


_COLUMNS: dict[str, tuple[str, Callable[[pa.DataType], bool]]] = {
    "key": ("string or binary", _bytes),
    "value": ("string or binary", _bytes),
    "topic": ("string", is_text),
    "partition": ("int", t.is_integer),
    "headers": ("array<struct<key: string, value: binary>>", _headers),
    "timestamp": ("timestamp, a point in time", is_moment),
}


@dataclass(frozen=True)
class KafkaColumns(Projection):
    """The transform of a sink with a `value_format`.

    It adds the column `value`, unless there is one: a struct of all columns that are none of the
    sink's own. With `json`, it converts `key` and `value` to JSON where they are structs, maps,
    arrays or variants. `before` is the user's own projection, which comes first.
    """

    json: bool
    before: Projection | None = None

    @property
    def where(self) -> str | None:  # type: ignore[override]
        return self.before.where if self.before else None

    def columns(self, df: DataFrame) -> list[Column]:
        """Return the columns. Raises SchemaMismatch for names that JSON cannot have."""
        if self.before:
            columns = self.before.columns(df)
            fields = df.select(*columns).schema.fields
            columns = named(columns, [field.name for field in fields])
        else:
            _, columns = columns_of(df)
            fields = df.schema.fields
        fields, columns = _with_value(fields, columns)
        return _as_json(df.sparkSession, fields, columns) if self.json else columns

    def __call__(self, df: DataFrame) -> DataFrame:
        if self.before:
            return KafkaColumns(self.json)(self.before(df))
        selected, _ = columns_of(df)
        return selected.select(*self.columns(df))


def _with_value(
    fields: list[StructField], columns: list[Column]
) -> tuple[list[StructField], list[Column]]:
    """Add the column `value`, unless there is one."""
    from pyspark.sql import functions
    from pyspark.sql.types import StructField, StructType

    if any(field.name == "value" for field in fields):
        return fields, columns
    pairs = list(zip(fields, columns, strict=True))
    own = [(field, column) for field, column in pairs if field.name in _COLUMNS]
    others = [(field, column) for field, column in pairs if field.name not in _COLUMNS]
    value = functions.struct(*(column for _, column in others)).alias("value")
    value_field = StructField("value", StructType([field for field, _ in others]), False)
    return [*(field for field, _ in own), value_field], [*(column for _, column in own), value]


def value_type(schema: pa.Schema) -> pa.DataType:
    """Return the type of the column `value` that `KafkaColumns` makes of these columns."""
    if "value" in schema.names:
        return schema.field("value").type
    return pa.struct([field for field in schema if field.name not in _COLUMNS])


def key_type(schema: pa.Schema) -> pa.DataType:
    """Return the type of the column `key`, or null if there is no such column."""
    return schema.field("key").type if "key" in schema.names else pa.null()


def _as_json(
    session: SparkSession, fields: list[StructField], columns: list[Column]
) -> list[Column]:
    from pyspark.sql import functions
    from pyspark.sql.types import ArrayType, MapType, StructType

    old_patterns = has_old_patterns(session)
    options = _JSON if old_patterns else _JSON | _MOMENTS
    converted = []
    for field, column in zip(fields, columns, strict=True):
        kind = field.dataType
        nested = isinstance(kind, (ArrayType, MapType, StructType)) or kind.typeName() == "variant"
        if field.name in ("key", "value") and nested:
            _require_names(field.name, kind)
            value = with_texts(column, kind) if old_patterns else column
            column = functions.to_json(value, options).alias(field.name)
        converted.append(column)
    return converted


_JSON = {"ignoreNullFields": "false", "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"}
"""Options of Spark's to_json. Its own format cuts off everything below a millisecond."""
_MOMENTS = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXXXX"}
"""One more option. Spark 2 has no such pattern, so `with_texts` writes the same without it."""


def _require_names(column: str, kind: DataType) -> None:
    """Raise SchemaMismatch for a type whose names JSON, or a reader of it, cannot tell apart.

    Spark writes some keys of maps as it has them in memory, such as an address, or the days since
    1970. Of two fields with the same name, readers find one.
    """
    from pyspark.sql.types import (
        ArrayType,
        BooleanType,
        MapType,
        NumericType,
        StringType,
        StructType,
    )

    if isinstance(kind, MapType):
        if not isinstance(kind.keyType, (BooleanType, NumericType, StringType)):
            key = kind.keyType.simpleString()
            raise SchemaMismatch(
                f"column `{column}` holds a map with keys of {key}, which JSON has no names for: "
                "cast them to string, or make it an array of structs (map_entries)"
            )
        _require_names(column, kind.valueType)
    elif isinstance(kind, ArrayType):
        _require_names(column, kind.elementType)
    elif isinstance(kind, StructType):
        if twice := [name for name in kind.names if kind.names.count(name) > 1]:
            raise SchemaMismatch(
                f"column `{column}` holds a struct with two fields `{twice[0]}`: rename one of them"
            )
        for field in kind:
            _require_names(column, field.dataType)


def check(
    sink: str, schema: pa.Schema, topic: str | None, serialized: Collection[str] = ()
) -> None:
    """Raise SchemaMismatch with every column that does not fit.

    `serialized` are columns that a serializer makes bytes of, so any type of them fits.
    """
    problems = []
    if "value" not in schema.names:
        problems.append(
            "there is no column `value`; value_format='json' makes it of the other columns"
        )
    if topic is None and "topic" not in schema.names:
        problems.append("there is no column `topic`, and the sink has no topic of its own")
    if others := [f"`{name}`" for name in schema.names if name not in _COLUMNS]:
        problems.append(
            f"only {', '.join(_COLUMNS)} are written: drop {', '.join(others)}, or put them into "
            "the value"
        )
    for field in schema:
        if field.name not in _COLUMNS:
            continue
        wanted, fits = _COLUMNS[field.name]
        if not fits(field.type) and field.name not in serialized:
            hint = ""
            if field.name in ("key", "value"):
                nested = "value_format='json' writes it as JSON"
                hint = f"; {nested if t.is_nested(field.type) else 'cast it to string'}"
            problems.append(f"column `{field.name}` is {field.type}, and must be {wanted}{hint}")
    for name in set(schema.names):
        if schema.names.count(name) > 1:
            problems.append(f"column `{name}` comes twice")
    if problems:
        raise SchemaMismatch(f"sink {sink!r}: " + "; ".join(problems))


def refusals(bad: pa.Array, kind: str, why: Callable[[int], str]) -> Iterator[Refusal]:
    """Yield a refusal for each row that is `bad`. Null counts as good.

    `why` gets the place of the row in the batch.
    """
    for at in pc.indices_nonzero(pc.fill_null(bad, False)).to_pylist():
        yield Refusal(at, kind, why(at))


def refused(batch: pa.RecordBatch, default_topic: str | None) -> Iterator[Refusal]:
    """Yield rows that no topic takes, whatever its settings.

    Such a row has no topic, or the name of its topic is impossible. It may also ask for an
    impossible partition, have a timestamp that is not after 1970, or a header that Kafka's client
    would change. `default_topic` is for rows without a topic.
    """
    names = batch.schema.names
    if "topic" in names:
        topic = batch["topic"].cast(pa.binary())  # a text of Spark may be no UTF-8
        if default_topic is None:
            yield from refusals(
                topic.is_null(),
                "NoTopic",
                lambda at: "the column topic is null, and the sink has no topic of its own",
            )
        reserved = pc.is_in(topic, _RESERVED)
        yield from refusals(
            pc.or_(reserved, pc.invert(pc.match_substring_regex(topic, _TOPIC))),
            "NoTopic",
            lambda at: (
                f"{_shown(topic[at])} is no name of a topic: 1 to 249 letters of ASCII, digits, "
                "'.', '_', '-'"
            ),
        )
    if "partition" in names:
        wanted = batch["partition"]
        yield from refusals(
            pc.or_(pc.less(wanted, 0), pc.greater(wanted, _LARGEST_PARTITION)),
            "NoPartition",
            lambda at: (
                f"it asks for partition {wanted[at]}, which no topic has: null leaves the choice "
                "to the partitioner"
            ),
        )
    if "timestamp" in names:
        moment = milliseconds(batch["timestamp"])
        yield from refusals(
            pc.less_equal(moment, 0),
            "BadTimestamp",
            lambda at: f"the timestamp is {moment[at]} ms from {_TOO_EARLY}",
        )
    if "headers" in names:
        lists = batch["headers"]
        keys = pc.struct_field(pc.list_flatten(lists), "key")
        bad = pc.fill_null(pc.greater_equal(pc.find_substring(keys, "\0"), 0), True)
        rows = pc.list_parent_indices(lists).filter(bad)
        yield from refusals(
            pc.is_in(pa.array(range(batch.num_rows), rows.type), rows),
            "BadHeader",
            lambda at: _HEADER,
        )


_TOO_EARLY = (
    "1970-01-01 00:00 UTC: Kafka takes 0 and -1 for none, and an earlier one ends the compaction "
    "of the partition for good. Make it NULL, or a later one"
)
_HEADER = "a header is null, or its key is, or holds a NUL, at which it would be cut off"


def _shown(topic: pa.Scalar) -> str:
    return repr(topic.as_py().decode(errors="backslashreplace"))
