"""What a table lacks for a batch."""

from __future__ import annotations

import pyarrow as pa

from sinks.arrow.types import lacking


def test_a_column_that_comes_twice_but_for_capitals_is_lacking_once() -> None:
    fields = [pa.field(name, pa.int64()) for name in ("ID", "more", "More")]
    assert [field.name for field in lacking(fields, ["id"])] == ["more"]
