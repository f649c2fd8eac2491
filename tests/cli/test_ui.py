from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.cli.play import Job, cli
from tests.signals import in_background, in_foreground
from tests.ui.browser import Browser


@pytest.mark.parametrize(("started", "how"), [(in_foreground, signal.SIGINT), (in_background, signal.SIGTERM)])
def test_the_page_of_a_job_that_is_down(file_job: Job, started: Callable[[], None], how: signal.Signals) -> None:
    file_job.run(2)
    command = [sys.executable, "-m", "coordinator.cli", "ui", "--job", str(file_job.file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=started) as process:
        assert process.stdout
        try:
            browser = Browser.invited(process.stdout.readline().strip())
            assert "Newest checkpoint: 1, complete" in browser.see("/ui/")
            assert f"--job {file_job.file}" in browser.see("/ui/balance")
            process.send_signal(how)
            assert process.wait(120) == 0
        finally:
            process.kill()


def test_what_cannot_be_served(file_job: Job) -> None:
    file_job.run(1)
    assert "No driver of job 'orders' answers over HTTP" in file_job.cli("ui", "--driver", code=1).stderr
    assert "host has to be the address" in file_job.cli("ui", "--host", "0.0.0.0", code=2).stderr
    text = file_job.file.read_text()
    file_job.file.write_text(text.replace("/checkpoints", "/chekpoints"))
    assert "There is no checkpoint storage" in file_job.cli("ui", code=1).stderr
    file_job.file.write_text(text)
    assert "also when no driver runs" in " ".join(cli("ui", "--help").stdout.replace("│", " ").split())
