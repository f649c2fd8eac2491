from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

from coordinator.operations.jobfile import load_job
from coordinator.operations.ui.job import JobView
from coordinator.operations.ui.page import page_of
from sinks.testing.table import eventually
from tests.cli.jobs import Job, cli
from tests.signals import in_background, in_foreground


@pytest.mark.parametrize(("started", "how"), [(in_foreground, signal.SIGINT), (in_background, signal.SIGTERM)])
def test_the_page_of_a_job_that_is_down(file_job: Job, started: Callable[[], None], how: signal.Signals) -> None:
    file_job.run(2)
    command = [sys.executable, "-m", "coordinator.cli", "ui", "--job", str(file_job.file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=started) as process:
        assert process.stdout
        try:
            address = process.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:")
            eventually(lambda: "Newest checkpoint: 1, complete" in see(address))  # a busy machine may answer late
            eventually(lambda: f"--job {file_job.file}" in see(f"{address}balance"))
            with pytest.raises(urllib.error.HTTPError, match="400"):
                see(address, host="rebound.example")
            process.send_signal(how)
            assert process.wait(300) == 0
        finally:
            process.kill()


def see(address: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=300) as answer:
        return str(answer.read().decode())


def test_what_cannot_be_served(file_job: Job) -> None:
    file_job.run(1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = file_job.cli("ui", "--port", str(taken.getsockname()[1]), code=2).stderr
    assert "Cannot listen at 127.0.0.1" in refused
    text = file_job.file.read_text()
    file_job.file.write_text(text.replace("/checkpoints", "/chekpoints"))
    assert "There is no checkpoint storage" in file_job.cli("ui", code=1).stderr
    file_job.file.write_text(text)
    assert "so no driver has to run" in " ".join(cli("ui", "--help").stdout.replace("│", " ").split())


def test_how_each_sink_writes(pg_job: Job) -> None:
    """Mode, keys, and the strategy that `auto` took, by the newest checkpoint."""

    def writes() -> str:
        with load_job(str(pg_job.file)) as coordinator:
            return page_of(JobView(coordinator)).test_client().get("/configuration").text

    text = pg_job.file.read_text().replace('strategy = "prepared"', 'strategy = "auto"')
    pg_job.file.write_text(text)
    assert "<td>append; strategy auto<td" in writes()
    pg_job.run(1)
    assert "<td>append; strategy prepared (auto)<td" in writes()
    pg_job.file.write_text(text + 'mode = "upsert"\nkeys = ["id"]\n')
    pg_job.run(2)
    assert "<td>upsert by id; strategy staged (auto)<td" in writes()
