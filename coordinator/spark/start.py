"""A query from the side of the program that starts it: which one it is, and what the program has been told of it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


class StartedQuery:
    """One that `CheckpointCoordinator.write_stream` led to."""

    def __init__(self, query: StreamingQuery) -> None:
        self.query = query
        self._told: set[int] = set()
        for name in ("awaitTermination", "exception"):
            setattr(query, name, self._noticed(getattr(query, name)))

    def has_told(self) -> bool:
        """Whether this thread has been told what the query failed with."""
        return threading.get_ident() in self._told

    def forget(self) -> None:
        """What was told was of a query before."""
        self._told.clear()

    def _noticed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        from pyspark.errors import StreamingQueryException

        @functools.wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            try:
                result = method(*arguments, **options)
            except StreamingQueryException:
                self._told.add(threading.get_ident())
                raise
            if isinstance(result, StreamingQueryException):
                self._told.add(threading.get_ident())
            return result

        return call


def noticing(writer: DataStreamWriter, started: Callable[[StartedQuery], None]) -> DataStreamWriter:
    """The writer itself, whose `start` hands the query to `started`, too."""
    start = writer.start

    @functools.wraps(start)
    def call(*arguments: Any, **options: Any) -> StreamingQuery:
        query = start(*arguments, **options)
        started(StartedQuery(query))
        return query

    writer.start = call  # type: ignore[method-assign]
    return writer
