"""A folder of files for the chaos."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from sinks.base import TwoPhaseCommitSink
from sinks.files import FileSink
from tests.chaos.rigs import Row, System, Target
from tests.files.reading import rows_below


class FolderTarget(Target):
    """Without a server, and without a network to harm."""

    name = "files"

    def __init__(self, system: System, folder: Path) -> None:
        self.system, self._folder = system, folder

    def sink(self, rng: random.Random) -> TwoPhaseCommitSink[Any]:
        """Whatever a restarted job may change, changes."""
        limit = rng.choice((None, 3, 50))
        return FileSink(self._folder, name=self.name, max_rows_per_file=limit, compression=rng.choice(("zstd", "none")))

    def rows(self) -> Sequence[Row]:
        return [(row["id"], row["amount"]) for row in rows_below(self._folder)]

    def in_doubt(self, job: str) -> list[Any]:
        with closing(FileSink(self._folder, name=self.name)) as sink:
            return list(sink.in_doubt(job))

    def roll_back(self, job: str, rng: random.Random) -> None:
        with closing(FileSink(self._folder, name=self.name)) as sink:
            found = list(sink.in_doubt(job))
            for identity in rng.sample(found, rng.choice((1, len(found)))) if found else []:
                with suppress(Exception):  # committed just now
                    sink.abort(identity)

    def close(self) -> None:
        pass
