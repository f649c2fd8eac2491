"""The Apache Iceberg sink. Needs pyiceberg: `pip install` with the extra `iceberg`."""

from sinks._util.extras import needs_extra

with needs_extra("iceberg"):
    from sinks.iceberg.sink import IcebergSink

__all__ = ["IcebergSink"]
