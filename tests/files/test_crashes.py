"""Files in one checkpoint with a table, while drivers get SIGKILL: each row is in both, once, or in neither."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from obstore.store import LocalStore, from_url

from coordinator import Step
from sinks.files import FileSink
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing.conformance import example_input, ids
from sinks.testing.driver import KILLED, Driver, Hooked, KillAt
from tests.files.reading import hidden_of, rows_of

JOB = "fan-out"
INPUT = example_input(6)


class Targets:
    """A folder or a prefix of a store, and a table beside it."""

    def __init__(self, place: str, folder: Path) -> None:
        self.place, self.folder = place, folder
        self.database = f"sqlite:///{folder}/orders.db"

    def files(self) -> FileSink:
        return FileSink(self.place, name="files", partition_by=["name"], max_rows_per_file=3, success_marker=True)

    def driver(self, batches: int, files: Any = None, **options: Any) -> Driver:
        table = SqlAlchemySink(self.database, "orders", name="table", create_table=True)
        storage = f"file://{self.folder / 'storage'}"
        sink = files or self.files()
        return Driver(JOB, sink, storage, self.folder / "query", INPUT[:batches], others=[table], **options)

    def store(self) -> Any:
        return from_url(self.place) if "://" in self.place else LocalStore(self.place)

    def expect_all(self, batches: int) -> None:
        expected = Counter(ids(INPUT[:batches]))
        assert Counter(row["id"] for row in rows_of(self.store())) == expected
        engine = sqlalchemy.create_engine(self.database)
        with engine.connect() as connection, closing(connection.connection):
            assert Counter(connection.execute(sqlalchemy.text("SELECT id FROM orders")).scalars()) == expected
        engine.dispose()
        sink = self.files()
        sink.open()
        assert list(sink.in_doubt(JOB)) == []
        assert hidden_of(self.store()) == []


@pytest.fixture(params=["folder", "S3"])
def targets(request: pytest.FixtureRequest, tmp_path: Path) -> Targets:
    place = f"{request.getfixturevalue('s3_bucket')}/rows" if request.param == "S3" else str(tmp_path / "rows")
    return Targets(place, tmp_path)


@pytest.mark.chaos
def test_drivers_are_killed_at_every_turn(targets: Targets) -> None:
    """One after the other; the last two inside the sink, before and after the commit of one of three partitions."""
    steps = (Step.PRE_COMMITTED, Step.COMPLETE, Step.COMMITTING, Step.COMMITTED)
    for number, step in enumerate(steps, 1):
        killed = targets.driver(number, listeners=[KillAt(step, checkpoint_id=number - 1)])
        assert killed.run() == KILLED, killed.said
    for number, after in ((5, False), (6, True)):
        killed = targets.driver(number, Hooked(targets.files(), "commit", nth=2, after=after))
        assert killed.run() == KILLED, killed.said
    last = targets.driver(6)
    assert last.run() == 0, last.said
    targets.expect_all(6)


def test_a_memory_that_is_gone_stops_the_query(tmp_path: Path) -> None:
    targets = Targets(str(tmp_path / "rows"), tmp_path)
    first = targets.driver(2)
    assert first.run() == 0, first.said
    for path in (tmp_path / "rows").rglob("decided/*"):
        path.unlink()
    second = targets.driver(3)
    assert second.run() != 0
    assert "[EO-TARGET-BEHIND]" in second.said
    targets.expect_all(2)
