"""Driver processes of the conformance kit: each is a process like any other, though it starts in milliseconds."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from examples.custom_sink import FileSink
from sinks.base import Sink
from sinks.testing import KILLED, Driver, Hooked
from sinks.testing.conformance import example_input


@pytest.fixture
def sink(tmp_path: Path) -> FileSink:
    (tmp_path / "rows").mkdir()
    return FileSink(tmp_path / "rows")


def driver(folder: Path, sink: Sink) -> Driver:
    return Driver("job", sink, f"file://{folder / 'storage'}", folder / "query", example_input(1))


def tell() -> None:
    print(f"{os.getpid()} {os.getcwd()} {os.environ.get('OF_THIS_TEST')}", file=sys.stderr)
    os.system("echo from a child of the driver")


def test_a_process_of_its_own_with_the_environment_of_now(
    tmp_path: Path, sink: FileSink, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pids = set()
    for value in ("one", "other"):
        monkeypatch.setenv("OF_THIS_TEST", value)
        assert driver(tmp_path / value, Hooked(sink, "begin_transaction", hook=tell)).run() == 0
        told, child = capsys.readouterr().err.splitlines()
        pid, cwd, of_this_test = told.split()
        pids.add(int(pid))
        assert (cwd, of_this_test, child) == (str(tmp_path), value, "from a child of the driver")
    assert len(pids - {os.getpid()}) == 2


def fail() -> None:
    raise ValueError("the disk hiccupped")


def test_what_a_driver_wrote_is_shown_with_a_failure(
    tmp_path: Path, sink: FileSink, capsys: pytest.CaptureFixture[str]
) -> None:
    assert driver(tmp_path, Hooked(sink, "write", hook=fail)).run() == 1
    assert "ValueError: the disk hiccupped" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["write", "purge"])
def test_sigkill_is_one(tmp_path: Path, sink: FileSink, method: str) -> None:
    assert driver(tmp_path, Hooked(sink, method)).run() == KILLED


def linger() -> None:
    time.sleep(100)


def test_a_driver_that_does_not_end_is_killed(tmp_path: Path, sink: FileSink) -> None:
    hung = driver(tmp_path, Hooked(sink, "write", hook=linger))
    with pytest.raises(TimeoutError, match="has not ended within 1 s"):
        hung.run(timeout=1)
