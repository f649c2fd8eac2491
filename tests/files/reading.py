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

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as at
from obstore.store import LocalStore, ObjectStore

from sinks.files.layout import NO_VALUE, Layout


def names_of(store: ObjectStore) -> list[str]:
    """The files that a reader finds who passes over hidden names."""
    names = [str(entry["path"]) for chunk in obstore.list(store) for entry in chunk]
    return sorted(name for name in names if not any(part.startswith(("_", ".")) for part in name.split("/")))


def hidden_of(store: ObjectStore) -> list[str]:
    """The names of files that no commit and no abort has settled."""
    names = [str(entry["path"]) for chunk in obstore.list(store, "_tpc") for entry in chunk]
    return [name for name in names if name.split("/")[-2] in ("staged", "pre-committed")]


def rows_of(store: ObjectStore) -> Iterator[Mapping[str, Any]]:
    """Each visible row, with the values of its partition folders."""
    names = names_of(store)
    columns = Layout.from_bytes(_data(store, "_tpc/layout")).columns if names else pa.schema([])
    for name in names:
        yield from _rows_in(name, _data(store, name), columns)


def rows_below(folder: Path | str) -> list[Mapping[str, Any]]:
    return list(rows_of(LocalStore(folder))) if Path(folder).exists() else []


def _data(store: ObjectStore, name: str) -> bytes:
    return obstore.get(store, name).bytes().to_bytes()


def _rows_in(name: str, data: bytes, columns: pa.Schema) -> Iterator[Mapping[str, Any]]:
    *folders, file = name.split("/")
    values = dict[str, Any]()
    for folder in folders:
        key, text = map(unquote, folder.split("="))
        values[key] = _parsed(None if text == NO_VALUE else text, columns.field(key).type)
    if file.endswith(".parquet"):
        rows = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False).to_pylist()
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
