"""pyiceberg's data files as JSON, in which they travel from tasks to the commit, and files by pyiceberg's FileIO."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.fs as fs
from pyiceberg.avro.decoder import new_decoder
from pyiceberg.avro.encoder import BinaryEncoder
from pyiceberg.avro.resolver import construct_writer, resolve_reader
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
from pyiceberg.manifest import DataFile, data_file_with_partition
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import StructType

from sinks.lake.files import Files, make_durable, side_by_side


def to_json(file: DataFile, table: TableMetadata) -> dict[str, Any]:
    """As a manifest has it."""
    stream = io.BytesIO()
    construct_writer(_fields(table)).write(BinaryEncoder(stream), file)
    return {"path": file.file_path, "rows": file.record_count, "avro": base64.b64encode(stream.getvalue()).decode()}


def from_json(file: Mapping[str, Any], table: TableMetadata) -> DataFile:
    fields = Schema(*_fields(table).fields)
    reader = resolve_reader(fields, fields, read_types={-1: DataFile})
    parsed: DataFile = reader.read(new_decoder(base64.b64decode(file["avro"])))
    parsed.spec_id = table.default_spec_id
    return parsed


def _fields(table: TableMetadata) -> StructType:
    return data_file_with_partition(table.spec().partition_type(table.schema()), table.format_version)


def recording(properties: Mapping[str, str], begun: list[str]) -> PyArrowFileIO:
    """It tells the paths of files before they are there."""
    files = PyArrowFileIO(dict(properties))
    create = files.new_output

    def new_output(location: str) -> PyArrowFile:
        begun.append(location)
        return create(location)

    files.__dict__["new_output"] = new_output
    return files


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
        entries = self._io.fs_by_scheme(scheme, netloc).get_file_info(fs.FileSelector(place, allow_not_found=True))
        return [entry.base_name for entry in entries]

    def delete(self, paths: Sequence[str]) -> None:
        side_by_side(self._delete, paths)

    def _delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._io.delete(self._whole(path))

    def exists(self, path: str) -> bool:
        return bool(self._io.new_input(self._whole(path)).exists())

    def _whole(self, path: str) -> str:
        return path if "://" in path or path.startswith("/") else f"{self._location}/{path}"
