"""Values that a column would not hold as they are: with more digits than it keeps, or longer than it is.

PostgreSQL rounds and cuts most of these without a word (manual, "Numeric Types", "Date/Time Types", "Character Types").
"""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at

from sinks.arrow.convert import ROUNDING, Convert, Unfit, refuse, to_scale, to_unit

_LIMITED = re.compile(
    r"(?P<name>[a-z]+(?: varying)?)(?P<fields>(?: (?!with)[a-z]+)*)(?:\((?P<size>-?\d+)(?:,(?P<scale>-?\d+))?\))?"
)
_HOUR = 3_600_000_000
_UNITS = {"hour": _HOUR, "minute": 60_000_000, "second": 1}


def exactness(declared: str) -> Convert | None:
    """What refuses the values, already in the form in which they are sent, that a type with these modifiers would
    change; None if it changes none. Raises Unfit for intervals without room for hours, in which all that Spark's
    day-time intervals hold would become 0."""
    match = _LIMITED.match(declared)
    if match is None:
        return None
    name, fields, size, scale = match.groups()
    if name == "interval":
        unit = _UNITS.get(fields.split()[-1]) if fields else 1
        if unit is None:
            raise Unfit("all of a day-time interval would be cut off; make the column a plain interval")
        return _multiples(max(unit, _fraction(size)), declared)
    if size is None:
        return None
    if name == "numeric":
        return _digits(int(scale or 0), declared)
    if name in ("time", "timestamp"):
        return _multiples(_fraction(size), declared)
    if name in ("character", "character varying"):
        return _length(int(size), declared, padded=name == "character")
    return None


def _fraction(digits: str | None) -> int:
    """The microseconds that a type with so many digits of a second counts in."""
    return 1 if digits is None else int(10 ** (6 - int(digits)))


def _digits(scale: int, declared: str) -> Convert:
    def judge(array: pa.Array) -> pa.Array:
        if at.is_decimal(array.type) and array.type.scale > scale:
            to_scale(array, 76, scale, declared)
        return array

    return judge


def _multiples(unit: int, declared: str) -> Convert | None:
    return None if unit == 1 else lambda array: to_unit(array, unit, declared)


def _length(limit: int, declared: str, *, padded: bool) -> Convert:
    def judge(array: pa.Array) -> pa.Array:
        if (pc.max(pc.binary_length(array)).as_py() or 0) > limit:  # bytes; no text has more characters
            refuse(array, pc.greater(pc.utf8_length(array), limit), f"is longer than {declared}")
        if padded:
            lost = pc.and_(pc.ends_with(array, " "), pc.less(pc.utf8_length(array), limit))
            refuse(array, lost, f"ends with a blank, which {declared} does not tell from its padding{ROUNDING}")
        return array

    return judge
