"""How far something has come reaches the log now and then, and ends with what it tells of."""

from __future__ import annotations

import contextlib
import logging
import re
from pathlib import Path

import pytest

from sinks._util import progress as module
from sinks._util.progress import progress, under_way
from sinks.testing.table import eventually
from tests.protocol.job import Job, complete_but_one_lost


def test_a_line_now_and_then(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("sinks._util.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr(module, "_watch", lambda: None)
    caplog.set_level(logging.INFO, logger="sinks.progress")
    with progress("sink orders: commit", 1000, "transactions") as advance:
        for _ in range(1000):
            advance(1)
            module._under_way[0].tell_if_due()
            now[0] += 0.012
        assert under_way() == ["sink orders: commit: 1,000 of 1,000 transactions"]
    assert under_way() == []
    assert caplog.messages == [
        "sink orders: commit: 418 of 1,000 transactions (5 s, 84/s)",
        "sink orders: commit: 835 of 1,000 transactions (10 s, 83/s)",
        "sink orders: commit: 1,000 of 1,000 transactions (12 s, 83/s), ended",
    ]


def test_what_does_not_go_on_is_told_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.1)
    monkeypatch.setattr(module, "_TICK", 0.05)
    caplog.set_level(logging.INFO, logger="sinks.progress")
    with progress("count the rows of orders"):
        eventually(lambda: len(caplog.messages) >= 2)
        assert under_way() == ["count the rows of orders"]
    assert re.fullmatch(r"count the rows of orders \(\d+ s\)", caplog.messages[0])
    assert caplog.messages[-1].endswith("), ended")
    assert len({record.message for record in caplog.records if "ended" in record.message}) == 1


def test_two_of_the_same_kind_at_once() -> None:
    """Two jobs of one process whose sinks have the same name."""
    with contextlib.ExitStack() as first, progress("commit", 2, "transactions") as advance:
        first.enter_context(progress("commit", 2, "transactions"))
        first.close()
        advance(1)
        assert under_way() == ["commit: 1 of 2 transactions"]
    with contextlib.ExitStack() as later:
        with progress("commit", 2, "transactions"):
            advance = later.enter_context(progress("commit", 2, "transactions"))
        advance(1)
    assert under_way() == []


def test_what_is_done_soon_says_nothing(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sinks.progress")
    job.run()
    assert [record for record in caplog.records if record.name == "sinks.progress"] == []


def test_a_commit_of_many_tells(job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.0)
    caplog.set_level(logging.INFO, logger="sinks.progress")
    job.run(1)
    participants = sum(bool(table.num_rows) for table in job.input[0])
    told = f"sink files: commit: {participants} of {participants} transactions"
    assert caplog.messages[-1].startswith(told)
    assert caplog.messages[-1].endswith(", ended")


def test_a_replay_tells(job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    complete_but_one_lost(job)
    monkeypatch.setattr(module, "SECONDS", 0.0)
    caplog.set_level(logging.INFO, logger="sinks.progress")
    job.run(1)
    assert any(text.startswith("checkpoint 0: write 1 lost transactions again (") for text in caplog.messages)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)
