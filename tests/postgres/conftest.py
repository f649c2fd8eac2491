from __future__ import annotations

from collections.abc import Iterator

import pytest

from sinks.sql import databases
from sinks.testing.servers.postgres import PostgresService
from tests.postgres.observer import Observer


@pytest.fixture(autouse=True)
def patient_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """No busy machine takes ten minutes from one statement of a transaction to the next."""
    monkeypatch.setattr(databases, "_IDLE_LIMIT", 600)


@pytest.fixture
def db(pg_database: str) -> Iterator[Observer]:
    """A fresh database that takes prepared transactions, with a table `orders (id bigint, name text)`."""
    observer = Observer(pg_database)
    observer.run("CREATE TABLE orders (id bigint NOT NULL, name text)")
    yield observer
    observer.close()


@pytest.fixture
def unprepared_db(postgres_unprepared: PostgresService) -> Iterator[Observer]:
    """The same on a server with max_prepared_transactions = 0."""
    with postgres_unprepared.database() as dsn:
        observer = Observer(dsn)
        observer.run("CREATE TABLE orders (id bigint NOT NULL, name text)")
        yield observer
        observer.close()
