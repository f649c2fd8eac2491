"""Options of sinks: times are one type everywhere, and what is of another type is told by the option's name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from coordinator import CheckpointConfig
from coordinator.operations.jobfile import JobFileError, load_job
from coordinator.operations.restart import ExponentialDelay, FailureRate, FixedDelay
from sinks.delta import DeltaSink
from sinks.errors import ConfigurationError
from sinks.files import FileSink
from sinks.iceberg import IcebergSink
from sinks.kafka import KafkaSink
from sinks.mysql import MySQLSink
from sinks.options import Duration, seconds
from sinks.postgres import PostgresSink
from sinks.sqlalchemy import SqlAlchemySink

MAKE: Mapping[str, Callable[..., Any]] = {
    "postgres": lambda **options: PostgresSink("postgresql://h/d", "orders", **options),
    "mysql": lambda **options: MySQLSink("mysql://u@h/d", "orders", **options),
    "sqlalchemy": lambda **options: SqlAlchemySink("sqlite:///no.db", "orders", **options),
    "kafka": lambda **options: KafkaSink("h:9092", "orders", **options),
    "delta": lambda **options: DeltaSink("/no", **options),
    "files": lambda **options: FileSink("/no/orders", **options),
    "iceberg": lambda **options: IcebergSink("a.b", catalog={}, **options),
}
TIMES = [
    ("postgres", "lock_timeout"),
    ("mysql", "lock_timeout"),
    ("kafka", "transaction_timeout"),
    ("kafka", "timeout"),
]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *((5, 5.0), (0.5, 0.5), ("5", 5.0), ("10 s", 10.0), ("500ms", 0.5), ("5 Min", 300.0), ("2 hours", 7200.0)),
        *((timedelta(minutes=2), 120.0), (timedelta(milliseconds=1), 0.001), ("1 day", 86_400.0)),
    ],
)
def test_a_time(given: Duration, expected: float) -> None:
    assert seconds(given, "timeout") == expected


@pytest.mark.parametrize("given", ["10 s", "2 min", timedelta(seconds=30), 5, 5.5, "5"])
@pytest.mark.parametrize(("kind", "option"), TIMES)
def test_every_time_of_a_sink_may_be_a_text(kind: str, option: str, given: Duration) -> None:
    MAKE[kind](**{option: given})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("10 parsecs", "must be a time such as 10, '10 s' or '5 min', not '10 parsecs'"),
        ("-5 s", "must be a time such as 10, '10 s' or '5 min', not '-5 s'"),
        (True, "must be a number of seconds or a text such as '10 s', not True"),
        (None, "must be a number of seconds or a text such as '10 s', not None"),
        (float("nan"), "must be a finite number of seconds, not nan"),
    ],
)
@pytest.mark.parametrize(("kind", "option"), TIMES)
def test_what_is_no_time(kind: str, option: str, given: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"sink 'orders': {option} {told}")):
        MAKE[kind](**{option: given})


@pytest.mark.parametrize(("kind", "option"), TIMES)
def test_no_time_at_all(kind: str, option: str) -> None:
    for nothing in (0, "0 s", timedelta(seconds=-1)):
        with pytest.raises(ConfigurationError, match=option):
            MAKE[kind](**{option: nothing})


def test_times_of_the_coordinator_may_be_timedeltas() -> None:
    given: Any = timedelta(minutes=1)
    assert CheckpointConfig(interval=given, min_pause=given).interval == 60
    text: Any = "2 min"
    assert FixedDelay(delay=text).delay_after([]) == 120
    assert ExponentialDelay(initial=text, max=given * 10).max == 600
    assert FailureRate(interval=given, delay=text) == FailureRate(interval=60, delay=120)
    with pytest.raises(ValueError, match="delay must be a time such as"):
        FixedDelay(delay="soon")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        *((kind, "create_table") for kind in ("postgres", "mysql", "sqlalchemy", "delta", "iceberg")),
        *(("postgres", "keep_newer"), ("kafka", "create_topic"), ("kafka", "remember"), ("files", "success_marker")),
    ],
)
def test_a_text_is_no_flag(kind: str, option: str) -> None:
    """Python takes each for true."""
    for text in ("false", "true", 1):
        with pytest.raises(ConfigurationError, match=f"{option} must be true or false, without quotation marks, not "):
            MAKE[kind](**{option: text})


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('create_table = "true"', "create_table has to be true or false, without quotation marks"),
        ('max_dead_letters = "8"', "max_dead_letters is a number of rows, or a share of them as float, not '8'"),
        ('lock_timeout = "soon"', "lock_timeout must be a time such as 10, '10 s' or '5 min', not 'soon'"),
        ('connect_options = "x"', "connect_options has to be a table, { key = value }"),
        ("table = 5", "table has to be a text, in quotation marks"),
    ],
)
def test_the_job_file_is_named_with_what_is_wrong_in_it(tmp_path: Path, line: str, told: str) -> None:
    with pytest.raises(JobFileError, match=rf"job\.toml, sink 1: .*{re.escape(told)}"):
        load_job(job_file(tmp_path, line))


def test_times_of_a_job_file_are_texts(tmp_path: Path) -> None:
    """As its section [checkpointing] has them."""
    load_job(job_file(tmp_path, 'lock_timeout = "10 s"'))


def job_file(folder: Path, line: str) -> str:
    own = "" if line.startswith("table") else 'table = "orders"'
    file = folder / "job.toml"
    file.write_text(
        f'job = "a"\nstorage = "file://{folder}/storage"\n[checkpointing]\ninterval = "10 s"\n'
        f'[[sinks]]\ntype = "mysql"\ndsn = "mysql://u@h/d"\n{own}\n{line}\n'
    )
    return str(file)
