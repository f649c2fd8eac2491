"""The sink for files of Parquet or JSON lines, in a folder or an object store."""

from sinks.files.sink import FileSink

__all__ = ["FileSink"]
