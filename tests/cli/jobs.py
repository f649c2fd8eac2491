"""Jobs on real systems, left by drivers that died, and the CLI over them."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from typer.testing import CliRunner, Result

from coordinator.cli.app import app
from coordinator.listener import CheckpointListener, Step
from coordinator.operations.jobfile import load_job
from sinks.testing import LocalQuery
from sinks.testing.conformance import example_input
from sinks.testing.driver import fork
from tests.cli import driver
from tests.protocol.job import CrashError, crash_at

INPUT = example_input(3)

# A runner would make all commands anew each time, which takes longer than most of them.
typer.testing._get_command = functools.cache(typer.testing._get_command)  # type: ignore[attr-defined]


class Job:
    """A job file with one sink or several, and a query over it."""

    def __init__(self, folder: Path, *sinks: str) -> None:
        self.folder = folder
        self.input = INPUT
        self.file = folder / "job.toml"
        (folder / "checkpoints").mkdir(exist_ok=True)
        sections = "".join(f"\n[[sinks]]\n{sink}\n" for sink in sinks)
        self.file.write_text(
            f'job = "orders"\nstorage = "{(folder / "checkpoints").as_uri()}"\n\n[checkpointing]\ncommit_timeout = 2\n'
            + sections
        )

    def run(self, batches: int = 3, crash: tuple[Step, int] | None = None) -> None:
        """Run the query; `crash` ends it on the spot at this step of this checkpoint."""
        coordinator = load_job(str(self.file))
        if crash is None:
            LocalQuery(self.folder / "query", self.input[:batches]).run(coordinator)
            coordinator.close()
            return
        coordinator._protocol.listeners.add(crash_at(*crash, of=coordinator))
        with pytest.raises(CrashError):
            LocalQuery(self.folder / "query", self.input[:batches]).run(coordinator)
        for sink in coordinator.sinks.values():
            sink.close()

    def save_to(self, folder: Path) -> None:
        text = self.file.read_text()
        self.file.write_text(text.replace("[checkpointing]", f'[checkpointing]\nsavepoint_dir = "{folder}"'))

    def beat_fast(self) -> None:
        self.file.write_text(
            self.file.read_text().replace("[checkpointing]", "[checkpointing]\nheartbeat_interval = 0.3")
        )

    def wait_until(self, state: str) -> Any:
        """Until `coordinator status` tells so of the driver; what it says then."""
        deadline = time.monotonic() + 300
        while True:
            told = self.cli("status", "--json", code=None)
            about = json.loads(told.stdout)
            if about["driver"]["state"] == state:
                break
            assert time.monotonic() < deadline, about
            time.sleep(0.1)
        assert state != "running" or told.exit_code == 0, about
        return about

    def halted(self, step: Step, checkpoint: int) -> AbstractContextManager[BaseProcess]:
        """A driver in a process of its own, which stands still at this step; killed with SIGKILL at the latest here."""
        return self._driven(partial(driver.Halt, step, checkpoint))

    def at_work(self) -> AbstractContextManager[BaseProcess]:
        """A driver in a process of its own, whose commits are slow enough to be seen, from its first one on."""
        return self._driven(driver.Slow)

    def dies_of_a_commit(self, checkpoint: int) -> None:
        with self._driven(partial(driver.DiesOfACommit, checkpoint, file=str(self.file))) as process:
            process.join()

    @contextmanager
    def _driven(self, listener: Callable[[Connection], CheckpointListener]) -> Iterator[BaseProcess]:
        ours, theirs = Pipe(duplex=False)
        query, told = str(self.folder / "query"), listener(theirs)
        process = fork(driver.run, dict(os.environ), str(self.file), query, self.input, told, preload=driver.__name__)
        theirs.close()
        try:
            assert ours.recv() == "halted"
            yield process
        finally:
            process.kill()
            process.join()
            ours.close()

    def kill(self, step: Step, checkpoint: int) -> None:
        with self.halted(step, checkpoint):
            pass

    def cli(self, *arguments: str, code: int | None = 0, input: str | None = None) -> Result:
        return cli(*arguments, "--job", str(self.file), code=code, input=input)

    def json(self, *arguments: str, code: int | None = 0) -> Any:
        return json.loads(self.cli(*arguments, "--json", code=code).stdout)


def cli(
    *arguments: str, code: int | None = 0, input: str | None = None, env: Mapping[str, str] | None = None
) -> Result:
    result = CliRunner().invoke(app, list(arguments), input=input, env=env)
    assert code in (None, result.exit_code), (result.exit_code, result.output, result.exception)
    return result


def ids(batches: int = 3) -> list[int]:
    return sorted(id for batch in INPUT[:batches] for table in batch for id in table["id"].to_pylist())
