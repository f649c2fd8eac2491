"""Members of MySQL's ENUM and SET, which its catalog writes with marks, and without characters beyond U+FFFF."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

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
