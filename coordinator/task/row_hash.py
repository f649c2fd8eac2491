"""The hash of each row, by which a replay tells whether it writes the same rows.

Spark's JVM computes it.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import TYPE_CHECKING

from sinks._util.column_names import are_distinct, by_place, place, quoted
from sinks.errors import SchemaMismatch

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

HASH_COLUMN = "__tpc_row_hash"
ROW_HASH = "xxhash64 of columns and parts"
"""The name of the way in which `with_row_hash` hashes rows, for `Record.row_hash`.

Another way needs another name.
"""


def with_row_hash(df: DataFrame) -> DataFrame:
    """Return `df` with a hash of each row as last column.

    Raises SchemaMismatch if `df` has a column of that name.
    """
    names = df.columns
    if HASH_COLUMN in map(str.lower, names):
        raise SchemaMismatch(
            f"the name {HASH_COLUMN} is taken by the coordinator: rename this column"
        )
    from pyspark.sql.utils import is_remote

    used_with = None if is_remote() else df.sparkSession.sparkContext
    if are_distinct(names):
        return df.withColumn(HASH_COLUMN, _hash(df.schema, used_with))
    hashed = by_place(df).withColumn(HASH_COLUMN, _hash(df.schema, used_with, placed=True))
    return hashed.toDF(*names, HASH_COLUMN)


def hash_of_struct(column: str, schema: StructType, session: SparkSession) -> Column:
    """Return the hash that `with_row_hash` would give the fields of a column that is a struct.

    `schema` are the fields, whose names Spark can tell apart.
    """
    from pyspark.sql.utils import is_remote

    used_with = None if is_remote() else session.sparkContext
    return _hash(schema, used_with, within=f"{quoted(column)}.")


@lru_cache
def _hash(
    schema: StructType, used_with: object, *, placed: bool = False, within: str = ""
) -> Column:
    """Return the hash of each row of a DataFrame with this schema.

    It is kept, because the same `Column` can be used again in one SparkContext, and each call that
    makes a column is a question to the JVM. `placed` means that the column is used with the
    DataFrame that `by_place` makes. `within` stands before each name.

    Spark's xxhash64 skips NULLs, wherever they are, and takes no maps. It gives the same hash for
    0.0 and -0.0, for the decimals 1.00 and 100, for a string and its bytes, and for strings that
    are equal in a collation. So it gets parts that it can tell apart, with a flag for each value
    that may be NULL, and a hash of the columns' names and types.
    """
    from pyspark.sql import functions

    columns = [(field.name, field.dataType.simpleString()) for field in schema]
    digest = hashlib.sha256(json.dumps(columns).encode()).digest()
    parts = [functions.lit(int.from_bytes(digest[:8], "big", signed=True))]
    for number, field in enumerate(schema):
        value = functions.col(within + (place(number) if placed else quoted(field.name)))
        parts += _parts(value, field.dataType, field.name)
    return functions.xxhash64(*parts)


def _parts(value: Column, data_type: DataType, name: str = "") -> list[Column]:
    """Return the columns that are hashed for a value.

    `name` is that of the value's column, if it is a column. No function is applied to each element,
    because Spark would not compile the projection then.
    """
    from pyspark.sql import functions
    from pyspark.sql import types as st

    is_null = functions.isnull(value)
    if isinstance(data_type, st.StringType):
        return [is_null, value.cast("string")]
    if isinstance(data_type, st.FractionalType):
        return [is_null, value, functions.when(value == 0, value.cast("string"))]
    if not _holds(data_type, "array", "map", "struct", "variant"):
        return [is_null, value]
    if isinstance(data_type, st.StructType) and _can_be_named(data_type):
        return [
            is_null,
            *(part for f in data_type for part in _parts(value.getField(f.name), f.dataType)),
        ]
    if isinstance(data_type, st.ArrayType):
        if isinstance(data_type.elementType, st.StringType):
            texts = value.cast("array<string>")
            return [is_null, *_elements(texts, _NULL, functions.array_join(texts, "\n", _NULL))]
        if isinstance(data_type.elementType, st.NumericType):
            return [
                is_null,
                *_elements(
                    value, functions.lit(0).cast(data_type.elementType), value.cast("string")
                ),
            ]
        if isinstance(data_type.elementType, (st.BooleanType, st.DateType)):
            return [is_null, value.cast("string")]
    if isinstance(data_type, st.MapType) and _holds(data_type.keyType, "binary", "array", "struct"):
        value = functions.map_entries(value)  # names in JSON would be addresses in the JVM's memory
    elif name:
        value = value.alias(name)
    return [is_null, functions.to_json(functions.struct(value), _JSON)]


def _elements(array: Column, rare: Column | str, text: Column) -> list[Column]:
    """Return the columns that are hashed for an array.

    They are its size and its elements. Its text, which takes longer, is added if it holds NULLs or
    the `rare` element.
    """
    from pyspark.sql import functions

    plain = functions.array_contains(array, rare).eqNullSafe(functions.lit(False))
    return [functions.array_size(array), array, functions.when(~plain, text)]


_NULL = "NULL 0c5f61e0a2d14f6f9a5c7c3f1f2f4b7e"
"""The text that stands for a NULL in an array of strings."""


def _can_be_named(data_type: StructType) -> bool:
    """Tell whether Spark can take each field of a struct by its name.

    It cannot if two names differ only in capitals.
    """
    return len({name.lower() for name in data_type.names}) == len(data_type.names)


_JSON = {
    "ignoreNullFields": "true",
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd HH:mm:ss.SSSSSS",
    "timestampNTZFormat": "yyyy-MM-dd HH:mm:ss.SSSSSS",
}
"""The options of to_json: times to the microsecond, and the same text in every session."""


def _holds(data_type: DataType, *kinds: str) -> bool:
    text = json.dumps(data_type.jsonValue())
    return any(f'"{kind}"' in text for kind in kinds)
