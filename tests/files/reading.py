"""Files as readers see them: past the sink."""

from __future__ import annotations

import base64
import datetime
import gzip
import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as at

from sinks.files.layout import NO_VALUE, Layout


def visible_files(folder: Path) -> list[Path]:
    """The files that a reader finds who passes over hidden names."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(folder / path for path in paths if not any(part.startswith(("_", ".")) for part in path.parts))


def rows_of(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Each visible row, with the values of its partition folders."""
    for path in visible_files(folder):
        yield from rows_in(path.relative_to(folder).as_posix(), path.read_bytes(), columns_of(folder))


def columns_of(folder: Path) -> pa.Schema:
    return Layout.from_bytes((folder / "_tpc" / "layout").read_bytes()).columns


def rows_in(name: str, data: bytes, columns: pa.Schema) -> Iterator[Mapping[str, Any]]:
    *folders, file = name.split("/")
    values = dict[str, Any]()
    for folder in folders:
        key, text = map(unquote, folder.split("="))
        values[key] = _parsed(None if text == NO_VALUE else text, columns.field(key).type)
    if file.endswith(".parquet"):
        rows = pq.read_table(pa.BufferReader(data)).to_pylist()
    else:
        plain = gzip.decompress(data) if file.endswith(".gz") else data
        lines = (json.loads(line, parse_float=Decimal) for line in plain.split(b"\n")[:-1])
        rows = [{key: _parsed(value, columns.field(key).type) for key, value in line.items()} for line in lines]
    for row in rows:
        yield {**values, **row}


def _parsed(value: Any, kind: pa.DataType) -> Any:
    """A value of JSON, or of the name of a folder, as one of the column."""
    if value is None:
        return None
    if at.is_floating(kind):
        return float(value)
    if at.is_integer(kind):
        return int(value)
    if at.is_boolean(kind):
        return value in (True, "true")
    if at.is_date(kind):
        return datetime.date.fromisoformat(value)
    if at.is_timestamp(kind):
        return datetime.datetime.fromisoformat(value.replace("Z", "+00:00"))
    if at.is_decimal(kind):
        return Decimal(str(value))
    return base64.b64decode(value) if at.is_binary(kind) else value
