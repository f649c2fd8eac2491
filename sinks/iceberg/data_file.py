"""pyiceberg's data files as JSON, in which they travel from tasks to the commit, and files by pyiceberg's FileIO."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.fs as fs
from pyiceberg.conversions import from_bytes, to_bytes
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import Record
from pyiceberg.types import PrimitiveType

from sinks.lake.files import Files, make_durable, side_by_side

_COUNTS = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")
_BOUNDS = ("lower_bounds", "upper_bounds")


def to_json(file: DataFile, table: TableMetadata) -> dict[str, Any]:
    values = [file.partition[at] for at in range(len(file.partition))]
    kinds = _partition_types(table)
    return {
        "path": file.file_path,
        "size": file.file_size_in_bytes,
        "rows": file.record_count,
        "splits": file.split_offsets,
        "values": [v if v is None else _text(to_bytes(kind, v)) for kind, v in zip(kinds, values, strict=True)],
        **{name: {str(key): value for key, value in (getattr(file, name) or {}).items()} for name in _COUNTS},
        **{name: {str(key): _text(value) for key, value in (getattr(file, name) or {}).items()} for name in _BOUNDS},
    }


def from_json(file: Mapping[str, Any], table: TableMetadata) -> DataFile:
    kinds = _partition_types(table)
    values = [v if v is None else from_bytes(kind, _bytes(v)) for kind, v in zip(kinds, file["values"], strict=True)]
    columns: dict[str, Any] = {name: {int(key): value for key, value in file[name].items()} for name in _COUNTS}
    columns |= {name: {int(key): _bytes(value) for key, value in file[name].items()} for name in _BOUNDS}
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=file["path"],
        file_format=FileFormat.PARQUET,
        partition=Record(*values),
        record_count=file["rows"],
        file_size_in_bytes=file["size"],
        split_offsets=file["splits"],
        sort_order_id=None,
        spec_id=table.default_spec_id,
        equality_ids=None,
        key_metadata=None,
        **columns,
    )


def _partition_types(table: TableMetadata) -> list[PrimitiveType]:
    fields = table.spec().partition_type(table.schema()).fields
    return [field.field_type for field in fields if isinstance(field.field_type, PrimitiveType)]


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def recording(properties: Mapping[str, str], begun: list[str]) -> PyArrowFileIO:
    """It tells the paths of files before they are there."""
    io = PyArrowFileIO(dict(properties))
    create = io.new_output

    def new_output(location: str) -> PyArrowFile:
        begun.append(location)
        return create(location)

    io.__dict__["new_output"] = new_output
    return io


class TableFiles(Files):
    """Paths are whole, or below the table's location."""

    def __init__(self, location: str, properties: Mapping[str, str]) -> None:
        self.place = location, properties
        self._location, self.properties = location.rstrip("/"), dict(properties)
        self._io = PyArrowFileIO(self.properties)

    def put(self, path: str, data: bytes) -> None:
        with self._io.new_output(self._whole(path)).create(overwrite=True) as stream:
            stream.write(data)
        self.settle([path])

    def settle(self, paths: Sequence[str]) -> None:
        """What was written there is durable when this returns."""
        for path in paths:
            scheme, _, place = PyArrowFileIO.parse_location(self._whole(path), self.properties)
            if scheme == "file":
                _, _, root = PyArrowFileIO.parse_location(self._location, self.properties)
                make_durable(Path(place), Path(root))

    def get(self, path: str) -> bytes | None:
        with suppress(FileNotFoundError), self._io.new_input(self._whole(path)).open() as stream:
            return bytes(stream.read())
        return None

    def names(self, folder: str) -> list[str]:
        scheme, netloc, place = PyArrowFileIO.parse_location(self._whole(folder), self.properties)
        found = self._io.fs_by_scheme(scheme, netloc).get_file_info(fs.FileSelector(place, allow_not_found=True))
        return [one.base_name for one in found]

    def delete(self, paths: Sequence[str]) -> None:
        side_by_side(self._delete, paths)

    def _delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._io.delete(self._whole(path))

    def exists(self, path: str) -> bool:
        return bool(self._io.new_input(self._whole(path)).exists())

    def _whole(self, path: str) -> str:
        return path if "://" in path or path.startswith("/") else f"{self._location}/{path}"
