"""MySQL's numbers, JSON and enumerations, for MySQLSink and for SqlAlchemySink."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at

from sinks.arrow.convert import DOUBLE_DIGITS, ROUNDING, Convert, RefusedValue, Unfit, as_json, short
from sinks.arrow.types import is_text, spark_name

NO_INFINITIES = (lambda array: pc.invert(pc.is_finite(array)), "is no number, and MySQL has no NaN and no infinities")

# ---------------------------------------------------------------------- JSON
# It has 64-bit integers and doubles, and the last of equal names. MariaDB's is a text.
_SUSPICIOUS = r'"\s*:(?s:.*)"\s*:|[0-9.]{16}|[0-9][eE][+-]?[0-9]{3}'
"""Two names, or a number that may have more digits than a double, or be beyond its range."""


def beyond_doubles(arrow: pa.DataType) -> pa.DataType | None:
    """The first type in it, or itself, whose values may have more digits than a double."""
    if at.is_decimal(arrow) and arrow.precision > DOUBLE_DIGITS:
        return arrow
    inner = (beyond_doubles(arrow.field(i).type) for i in range(arrow.num_fields))
    return next(filter(None, inner), None)


def as_mysql_json(arrow: pa.DataType, *, rounding: bool) -> Convert:
    """Texts as the JSON that they are, and all else as `to_json` has it; refused where MySQL would drop a name, or,
    unless `rounding`, a digit. Raises Unfit."""
    as_text = as_json(arrow)
    if not rounding and (wide := beyond_doubles(arrow)):
        raise Unfit(
            f"it holds a {spark_name(wide)}, and MySQL's JSON keeps such numbers as doubles, with {DOUBLE_DIGITS} "
            f"digits: make the column longtext, or cast to string in Spark{ROUNDING}"
        )
    unaltered = _unaltered(rounding)
    judged = is_text(arrow) or _holds_map(arrow)
    return (lambda array: unaltered(as_text(array))) if judged else as_text


def _holds_map(arrow: pa.DataType) -> bool:
    """Their keys are names, and may come twice."""
    return at.is_map(arrow) or any(_holds_map(arrow.field(i).type) for i in range(arrow.num_fields))


def _unaltered(rounding: bool) -> Convert:
    check = partial(_check_number, rounding=rounding)
    decode = json.JSONDecoder(object_pairs_hook=_distinct_names, parse_float=check, parse_int=check).decode

    def convert(array: pa.Array) -> pa.Array:
        suspicious = pc.fill_null(pc.match_substring_regex(array, _SUSPICIOUS), False)
        for index in np.flatnonzero(suspicious.to_numpy(zero_copy_only=False)):
            try:
                decode(array[index].as_py())
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
                raise RefusedValue(int(index), f"{short(array[index])} is no JSON: {error}") from None
            except ValueError as error:
                altered = f"{short(array[index])} would be altered by MySQL's JSON, use a longtext column"
                raise RefusedValue(int(index), f"{altered}: {error}") from None
        return array

    return convert


def _distinct_names(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError for a name that comes twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} comes twice")
    return found


def _check_number(text: str, *, rounding: bool) -> None:
    """Raises ValueError for one that neither a 64-bit integer nor a double holds."""
    if len(text) <= DOUBLE_DIGITS and "e" not in text.lower():
        return
    value = float(text)
    if math.isinf(value) or (not value and text.lower().partition("e")[0].strip("-0.")):
        raise ValueError(f"{text[:60]} is out of range of a double")
    if rounding or not value or Decimal(text) == Decimal(repr(value)):
        return
    if not text.lstrip("-").isdigit() or not -(2**63) <= Decimal(text) < 2**64:
        raise ValueError(f"{text[:60]} would be rounded to {value!r}{ROUNDING}")


# ---------------------------------------------------------------------- members of ENUM and SET
# Its catalog writes them with marks, and without characters beyond U+FFFF.
_MARKS = {"\\0": "\0", "\\n": "\n", "\\r": "\r", "''": "'"}


def members_of(declared: str) -> tuple[str, ...]:
    """Of a type as the catalog writes it."""
    return tuple(re.findall(r"'((?:[^'\\]|''|\\.)*)'", declared))


def in_full(
    written: Sequence[str], column: str, table: str, *, several: bool, query: Callable[[str], Sequence[Sequence[str]]]
) -> tuple[str, ...]:
    """The members `written` in the catalog, of a (quoted) column. Where a question mark may stand for another
    character, they are asked for by their places: the result of `query` has the column's own type."""
    plain = [re.sub(r"''|\\.", lambda mark: _MARKS.get(mark[0], mark[0][1]), member) for member in written]
    if not any("?" in member for member in plain):
        return tuple(plain)
    place = "1 << place" if several else "place + 1"
    rows = query(
        f"WITH RECURSIVE members (place, member) AS (SELECT 0, {column} FROM (SELECT 1) AS once LEFT JOIN {table}"
        f" ON FALSE UNION ALL SELECT place + 1, {place} FROM members WHERE place < {len(written)})"
        " SELECT member FROM members WHERE place > 0 ORDER BY place"
    )  # MariaDB tells no more than eight of a SET
    return tuple(member or shown for (member,), shown in zip(rows, plain, strict=True))
