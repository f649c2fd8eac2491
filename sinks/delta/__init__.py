"""The Delta Lake sink. Needs deltalake: `pip install` with the extra `delta`."""

from sinks._util.extras import needs_extra

with needs_extra("delta"):
    from sinks.delta.sink import DeltaSink

__all__ = ["DeltaSink"]
