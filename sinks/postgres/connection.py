"""psycopg's connection with an end to every wait."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import errors

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

logger = logging.getLogger(__name__)

SILENCE = 5  # seconds without an answer, after which the server is asked whether it is there


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """No wait on it outlives its server, even a frozen one, whose kernel keeps connections and answers keepalives for
    ever: a silent server is asked by a new connection, which has `connect_timeout` to get any answer."""

    answer_seconds: float | None = None
    """How long any statement may take; None: as long as it takes, while others are answered."""

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        return super().wait(self._watched(gen), *args, **kwargs)

    def _watched(self, gen: Any) -> Any:
        heard = time.monotonic()
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if ready or ready is None:  # None: begun again, after an interrupt
                    heard = time.monotonic()
                elif time.monotonic() - heard > (self.answer_seconds or SILENCE):
                    self._require_answer()
                    heard = time.monotonic()
                wanted = gen.send(ready)
        except StopIteration as stop:
            return stop.value

    def _require_answer(self) -> None:
        if self.answer_seconds is not None:
            self.close()
            said = f"the server was silent for {self.answer_seconds:g} s, so the connection was closed"
            raise psycopg.OperationalError(said)
        place = self.place
        try:
            self.probe()
        except errors.ConnectionTimeout as error:
            self.pgconn.finish()
            raise psycopg.OperationalError(
                f"PostgreSQL at {place} takes connections and does not answer: it is frozen, or cannot be reached"
            ) from error
        except psycopg.Error:
            logger.debug("PostgreSQL at %s answers, though not well", place, exc_info=True)

    @property
    def place(self) -> str:
        return f"host={self.info.host} port={self.info.port} dbname={self.info.dbname} user={self.info.user}"

    def probe(self) -> None:
        """Connect to the same server, to see whether it answers. Raises ConnectionTimeout if it does not."""
        known, parameters = self.info, dict[str, Any](self.info.get_parameters())
        parameters |= {"host": known.host, "port": known.port, "hostaddr": known.hostaddr or None}
        psycopg.connect(**parameters, password=known.password or None).close()


def used_by(engine: Engine, answer_seconds: float | None) -> None:
    """An engine of SQLAlchemy makes its connections so."""
    from sqlalchemy import event

    @event.listens_for(engine, "do_connect")
    def connect(_: object, __: object, arguments: list[Any], options: dict[str, Any]) -> Connection:
        connection = Connection.connect(*arguments, **options)
        connection.answer_seconds = answer_seconds
        return connection
