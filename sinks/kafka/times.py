"""Times as the strings that JSON has for them, made without a pattern.

With `spark.sql.legacy.timeParserPolicy=LEGACY`, Spark writes by the patterns of Spark 2. These know
no offset with seconds, have other days before 1582, and other years after 9999.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession
    from pyspark.sql.types import DataType

_POLICY = "spark.sql.legacy.timeParserPolicy"


def has_old_patterns(session: SparkSession) -> bool:
    return str(session.conf.get(_POLICY, "CORRECTED")).upper() == "LEGACY"


def with_texts(value: Column, kind: DataType) -> Column:
    """Replace dates and timestamps in a value by strings, at any depth.

    Timestamps without a time zone stay, because Spark has no old pattern for them.
    """
    from pyspark.sql import functions
    from pyspark.sql.types import ArrayType, DateType, MapType, StructType, TimestampType

    if isinstance(kind, DateType):
        return _date(value)
    if isinstance(kind, TimestampType):
        return _moment(value)
    if not _holds_times(kind):
        return value
    if isinstance(kind, StructType):
        fields = [
            with_texts(value.getField(field.name), field.dataType).alias(field.name)
            for field in kind
        ]
        return functions.when(value.isNotNull(), functions.struct(*fields))
    if isinstance(kind, ArrayType):
        return functions.transform(value, lambda element: with_texts(element, kind.elementType))
    if isinstance(kind, MapType):
        return functions.transform_values(value, lambda _, each: with_texts(each, kind.valueType))
    return value


def _holds_times(kind: DataType) -> bool:
    """Tell whether a type contains a date or a timestamp.

    A field with such a name counts as well, which costs a little and changes nothing.
    """
    return re.search('"(date|timestamp)"', kind.json()) is not None


def _date(value: Column) -> Column:
    """Write a date as yyyy-MM-dd.

    The cast goes through a timestamp without a time zone, because a cast of the date itself follows
    the policy.
    """
    from pyspark.sql import functions

    return functions.substring_index(value.cast("timestamp_ntz").cast("string"), " ", 1)


def _moment(value: Column) -> Column:
    """Write a timestamp as the pattern yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXXXX does."""
    from pyspark.sql import functions

    to_the_second = functions.substring_index(value.cast("string"), ".", 1)
    micros = functions.pmod(functions.unix_micros(value), functions.lit(1_000_000))
    return functions.concat(
        functions.translate(to_the_second, " ", "T"),
        functions.lit("."),
        _digits(micros, 6),
        _offset(value),
    )


def _offset(value: Column) -> Column:
    """Write the session's time zone at that moment as an offset: Z, +05:30 or +00:53:28."""
    from pyspark.sql import functions

    days = functions.unix_date(value.cast("date")).cast("long")
    clock = functions.hour(value) * 3600 + functions.minute(value) * 60 + functions.second(value)
    offset = days * 86_400 + clock - functions.unix_seconds(value)
    away = functions.abs(offset)
    seconds = away % 60
    text = functions.concat(
        functions.when(offset < 0, "-").otherwise("+"),
        _digits((away / 3600).cast("int"), 2),
        functions.lit(":"),
        _digits((away % 3600 / 60).cast("int"), 2),
        functions.when(seconds == 0, "").otherwise(
            functions.concat(functions.lit(":"), _digits(seconds, 2))
        ),
    )
    return functions.when(offset == 0, "Z").otherwise(text)


def _digits(number: Column, count: int) -> Column:
    from pyspark.sql import functions

    return functions.lpad(number.cast("string"), count, "0")
