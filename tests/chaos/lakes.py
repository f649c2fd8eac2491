"""Lake tables for the chaos."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from deltalake.exceptions import TableNotFoundError
from pyiceberg.exceptions import NoSuchTableError

from sinks.base import TwoPhaseCommitSink
from sinks.testing import SCHEMA
from tests.chaos.rigs import EVOLUTION, Row, System, Target
from tests.lakes.tables import DeltaLake, IcebergLake


class LakeTarget(Target):
    """A table in a folder: no server, and no network to harm."""

    atomic = True

    def __init__(self, system: System, kind: str, folder: Path, mode: str) -> None:
        self.system, self.name, self._mode = system, kind, mode
        self._lake = {"delta": DeltaLake, "iceberg": IcebergLake}[kind](folder)

    def sink(self, rng: random.Random) -> TwoPhaseCommitSink[Any]:
        options = {"schema_evolution": "add"} if self._mode == EVOLUTION else {}
        sink: TwoPhaseCommitSink[Any] = self._lake.sink(create_table=True, name=self.name, **options)
        return sink

    def rows(self) -> Sequence[Row]:
        """Now and then another writer commits an empty batch."""
        try:
            if random.random() < 0.05:
                with suppress(Exception):  # its own commit lost a race
                    self._lake.append(SCHEMA.empty_table())
            return [(row["id"], row["amount"]) for row in self._lake.rows()]
        except (TableNotFoundError, NoSuchTableError):
            return []

    def in_doubt(self, job: str) -> list[Any]:
        with closing(self._lake.sink(name=self.name)) as sink:
            return list(sink.in_doubt(job))

    def roll_back(self, job: str, rng: random.Random) -> None:
        """Or delete a file of data that nobody sees yet."""
        with closing(self._lake.sink(name=self.name)) as sink:
            found = list(sink.in_doubt(job))
            for identity in rng.sample(found, rng.choice((1, len(found)))) if found else []:
                files = [path for path in self._lake.files() if self._lake.is_of(path, identity["transaction"])]
                if files and rng.random() < 0.5:
                    files[0].unlink(missing_ok=True)
                    continue
                with suppress(Exception):  # committed just now
                    sink.abort(identity)

    def close(self) -> None:
        self._lake.close()
