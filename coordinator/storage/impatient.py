"""A connection to PostgreSQL that does not wait for ever for a server that has stopped, as libpq does."""

from __future__ import annotations

import time
from typing import Any

import psycopg
from psycopg.abc import PQGen
from psycopg.rows import TupleRow

SILENCE = 10.0


class ImpatientConnection(psycopg.Connection[TupleRow]):
    """Closes itself, with an OperationalError, when the server has not said a word for `SILENCE` seconds: a frozen one
    keeps its TCP connections up, so no timeout of the network ends the wait."""

    def wait(self, gen: PQGen[Any], *args: Any, **kwargs: Any) -> Any:
        return super().wait(self._bounded(gen), *args, **kwargs)

    def _bounded(self, gen: Any) -> Any:
        try:
            wanted, end = next(gen), time.monotonic() + SILENCE
            while True:
                ready = yield wanted
                if ready:
                    end = time.monotonic() + SILENCE
                elif time.monotonic() > end:
                    self.close()
                    raise psycopg.OperationalError(
                        f"the server was silent for {SILENCE:g} s, so the connection was closed"
                    )
                wanted = gen.send(ready)
        except StopIteration as done:
            return done.value
