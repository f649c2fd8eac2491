"""How files are named, and what is in them.

Partition folders are named as Hive and Spark name them. What readers must not see yet, and what the
sink remembers, is in the folder `_tpc`, which Spark and pyarrow pass over. No name in `_tpc` ends
with that of a format, so a pattern such as `**/*.parquet` does not find it either.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as at

from sinks.arrow.convert import RefusedValue
from sinks.arrow.json import to_json
from sinks.arrow.types import is_text
from sinks.lake.columns import mismatches, without_nan

Format = Literal["parquet", "jsonl"]

CODECS: Mapping[str, Mapping[str, str]] = {
    "parquet": {"zstd": ".zstd", "snappy": ".snappy", "gzip": ".gz", "lz4": ".lz4", "none": ""},
    "jsonl": {"none": "", "gzip": ".gz"},
}
"""The compressions of each format, and how they show in the names of files. The first one is the
default."""

NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""What Hive and Spark write for NULL in the name of a partition folder."""
_ESCAPED = {*map(chr, range(1, 32)), *"\"#%'*/:=?\\\x7f{[]^"}
"""The characters that Spark escapes in the name of a partition folder
(`ExternalCatalogUtils.escapePathName`)."""
_LONGEST = 255
"""The most bytes that file systems allow for the name of a folder."""
_LONGEST_PATH = 600
"""The most bytes of all partition folders together. S3 allows 1,024 for the whole key."""


@dataclass(frozen=True)
class Layout:
    """What is the same in all files: the format, the columns, and the partition columns.

    The folder has it in the file `_tpc/layout`, so that no driver writes files that do not go with
    those that are there.
    """

    format: str
    columns: pa.Schema
    partition_by: Sequence[str]

    def to_bytes(self) -> bytes:
        about = {"format": self.format, "partition_by": json.dumps(list(self.partition_by))}
        return bytes(self.columns.with_metadata(about).serialize())

    @classmethod
    def from_bytes(cls, data: bytes) -> Layout:
        schema = pa.ipc.read_schema(pa.py_buffer(data))
        about = schema.metadata
        return cls(
            about[b"format"].decode(),
            schema.remove_metadata(),
            tuple(json.loads(about[b"partition_by"])),
        )


def partition_problems(columns: pa.Schema, partition_by: Sequence[str]) -> list[str]:
    """Return the reasons why files of these columns cannot be partitioned like this."""
    problems = []
    for name in partition_by:
        if name not in columns.names:
            problems.append(f"there is no column {name!r} to partition by")
            continue
        kind = columns.field(name).type
        if not (is_text(kind) or at.is_integer(kind) or at.is_date(kind) or at.is_boolean(kind)):
            problems.append(
                f"partition column {name!r} is not a string, integer, date or boolean: partition "
                "by another one"
            )
        if name.startswith(("_", ".")):
            problems.append(
                f"partition column {name!r} begins with {name[0]!r}, and readers pass over folders "
                "of such a name: rename it in Spark"
            )
    if len({*partition_by}) < len(partition_by):
        problems.append("a partition column is named twice")
    if len(partition_by) == len(columns):
        problems.append("all columns are partition columns: partition by fewer")
    return problems


def column_problems(given: pa.Schema, known: pa.Schema, *, adds: bool) -> list[str]:
    """Return the reasons why rows do not go with the files that are there."""
    return list(mismatches(given, known, adds=adds, target="the files"))


def require_folder_names(name: str, array: pa.Array, count: int) -> None:
    """Refuse strings of a partition column that cannot name a folder.

    `count` is how many partition columns there are. Raises RefusedValue. Readers take the empty
    string, and Hive's name for NULL, for NULL.
    """
    if not is_text(array.type):
        return
    longest = min(_LONGEST, _LONGEST_PATH // count)
    for value in pc.unique(array).to_pylist():
        problem = ""
        if value == "" or value == NO_VALUE:
            problem = f"{value!r} in a partition column, which readers take for NULL"
        elif len(folder_of({name: value}).encode()) > longest:
            problem = f"a string of {len(value)} characters is too long to name a folder"
        if problem:
            raise RefusedValue(pc.index(array, value).as_py(), problem)


def folder_of(values: Mapping[str, str | None]) -> str:
    """Return the path of a partition folder, with a slash at the end.

    >>> folder_of({"day": "2024-01-01", "shop": "a/b", "note": None})
    'day=2024-01-01/shop=a%2Fb/note=__HIVE_DEFAULT_PARTITION__/'
    """
    return "".join(
        f"{_escaped(name)}={NO_VALUE if value is None else _escaped(value)}/"
        for name, value in values.items()
    )


def _escaped(text: str) -> str:
    return "".join(f"%{ord(c):02X}" if c in _ESCAPED else c for c in text)


def suffix(format: str, compression: str) -> str:
    """Return the end of the names of files, such as `.zstd.parquet` or `.jsonl.gz`."""
    codec = CODECS[format][compression]
    return f"{codec}.parquet" if format == "parquet" else f".jsonl{codec}"


def encoded(rows: pa.Table, format: str, compression: str) -> bytes:
    """Return the bytes of a file with these rows."""
    stream = io.BytesIO()
    if format == "parquet":
        options: Any = {"compression": compression, "write_statistics": without_nan(rows)}
        pq.write_table(rows, stream, **options)
        return stream.getvalue()
    for batch in rows.combine_chunks().to_batches():
        lines = to_json(batch.to_struct_array()).cast(pa.binary())
        stream.write(b"\n".join(lines.to_pylist()) + b"\n")
    if compression == "none":
        return stream.getvalue()
    packed = pa.BufferOutputStream()
    with pa.CompressedOutputStream(packed, compression) as out:
        out.write(stream.getvalue())
    return bytes(packed.getvalue().to_pybytes())
