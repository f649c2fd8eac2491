"""What a table lacks for the rows of a batch: columns, and room in those that it has. Nothing here asks a database."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.types as at

from sinks.diagnosis import VARCHAR

SchemaEvolution = Literal["none", "add", "widen"]
STEPS: tuple[SchemaEvolution, ...] = ("none", "add", "widen")
"""Each does what those before it do."""

_BITS = {
    "tinyint": 8,
    "smallint": 16,
    "mediumint": 24,
    "int": 32,
    "integer": 32,
    "bigint": 64,
    "real": 32,
    "float": 32,  # MySQL's; PostgreSQL's catalog has no such name
    "double": 64,
    "double precision": 64,
}
_DECIMALS = ("decimal", "numeric")
_TEXTS = ("varchar", "character varying")
_NAMES = "|".join(sorted([*_BITS, *_DECIMALS, *_TEXTS], key=len, reverse=True))
_TYPE = re.compile(rf"({_NAMES})(?: ?\((\d+)(?:, ?(\d+))?\))?((?: .*)?)", re.IGNORECASE)


@dataclass(frozen=True)
class Shape:
    """What a type of numbers or text has room for: `size` is in bits, digits before the point, or characters."""

    family: Literal["integer", "float", "decimal", "text"]
    size: int
    scale: int = 0

    @property
    def precision(self) -> int:
        return self.size + self.scale

    def widened(self, needed: Shape) -> Shape | None:
        """With room for both; None if there is already, or another kind of type is needed."""
        wider = Shape(self.family, max(self.size, needed.size), max(self.scale, needed.scale))
        return None if self.family != needed.family or wider == self else wider


def shape_of(declared: str) -> Shape | None:
    """Of a type in SQL. None for one that is never widened: of another kind, without a limit, `unsigned` and the like,
    or MySQL's tinyint(1), which is a boolean."""
    shape, more = _parsed(declared)
    return None if more else shape


def _parsed(declared: str) -> tuple[Shape | None, str]:
    """And what stands behind it: `unsigned`, a collation."""
    match = _TYPE.fullmatch(declared)
    if match is None:
        return None, ""
    name, first, second, more = match[1].lower(), match[2], match[3], match[4]
    if name in _DECIMALS:
        scale = int(second or 0)
        return (Shape("decimal", int(first) - scale, scale) if first else None), more
    if name in _TEXTS:
        return (Shape("text", int(first)) if first else None), more
    if name.endswith("int") or name == "integer":
        return (None if (name, first) == ("tinyint", "1") else Shape("integer", _BITS[name])), more
    return (None if first else Shape("float", _BITS[name])), more


def holds(now: str, then: str) -> bool:
    """Whether a column of the type `now` takes, as they are, all values that were written for the type `then`."""
    if now == then:
        return True
    (wide, more), (narrow, before) = _parsed(now), _parsed(then)
    if wide is None or narrow is None or more != before or wide.family != narrow.family:
        return False
    return narrow.widened(wide) == wide


def needed(field: pa.Field) -> Shape | None:
    """What the values of a batch's column need at most. Strings need no length, unless Spark knows one."""
    kind = field.type
    if at.is_signed_integer(kind):
        return Shape("integer", kind.bit_width)
    if at.is_floating(kind):
        return Shape("float", max(32, kind.bit_width))
    if at.is_decimal(kind):
        return Shape("decimal", kind.precision - kind.scale, kind.scale)
    known = (field.metadata or {}).get(VARCHAR.encode())
    return shape_of(known.decode()) if known else None


def lacking(batch: Iterable[pa.Field], table: Iterable[str]) -> Iterator[pa.Field]:
    """Fields that the table has no column for. One that differs from a column by capitals alone is a mistake more often
    than not, and left to be told."""
    known = {name.lower() for name in table}
    for field in batch:
        if field.name.lower() not in known:
            known.add(field.name.lower())
            yield field
