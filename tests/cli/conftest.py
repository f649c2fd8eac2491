from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psycopg
import pyarrow.parquet as pq
import pytest

from coordinator.cli import output
from tests.cli.jobs import Job
from tests.ui.conftest import patient as patient

TABLE = "CREATE TABLE orders (id bigint PRIMARY KEY, name text, amount double precision)"


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No colours in what commands print, which some CI systems ask for."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a command waits for a sink's answer."""
    monkeypatch.setattr(output, "_PATIENCE", 300)


@pytest.fixture
def file_job(tmp_path: Path) -> Job:
    """A job into Parquet files."""
    (tmp_path / "rows").mkdir()
    return Job(tmp_path, f'type = "examples.custom_sink:FileSink"\nfolder = "{tmp_path / "rows"}"')


@pytest.fixture
def file_rows(tmp_path: Path) -> Callable[[], list[int]]:
    def visible() -> list[int]:
        files = (tmp_path / "rows").glob("[!.]*.parquet")
        return sorted(id for file in files for id in pq.read_table(file)["id"].to_pylist())

    return visible


@pytest.fixture
def pg_job(tmp_path: Path, pg_database: str, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job into a PostgreSQL table by prepared transactions; the DSN comes from the environment."""
    monkeypatch.setenv("ORDERS_DSN", pg_database)
    with psycopg.connect(pg_database, autocommit=True) as connection:
        connection.execute(TABLE)
    return Job(tmp_path, 'type = "postgres"\ndsn = "${ORDERS_DSN}"\ntable = "orders"\nstrategy = "prepared"')
