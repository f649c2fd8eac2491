"""Tables that refer to each other, or to themselves: for the sinks of each database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coordinator import CheckpointCoordinator
from sinks.base import Sink
from sinks.errors import BadValue, ConfigurationError
from sinks.sql.sink import TableSink
from sinks.testing import LocalQuery
from sinks.testing.table import Database
from sinks.testing.table_crashes import run
from tests.self_references import chain, partition

FAMILY = pa.table({"id": [1, 2], "parent": [1, 2]})


def run_all(folder: Path, *sinks: Sink, times: int = 1, job: str = "job") -> None:
    with CheckpointCoordinator(job, list(sinks), f"file://{folder / 'storage'}") as coordinator:
        for _ in range(times):
            LocalQuery(folder / job, [[FAMILY]]).run(coordinator)


class ForeignKeys:
    """Fixture `dsn`: of a fresh database."""

    make: Callable[..., TableSink]
    observe: Callable[[str], Database]
    key = "has_parent"

    @pytest.fixture
    def db(self, dsn: str) -> Iterator[Database]:
        with closing(type(self).observe(dsn)) as db:
            db.run("CREATE TABLE parent (id bigint PRIMARY KEY, parent bigint)")
            db.run(
                "CREATE TABLE child (id bigint PRIMARY KEY, parent bigint NOT NULL,"
                " CONSTRAINT has_parent FOREIGN KEY (parent) REFERENCES parent (id))"
            )
            yield db

    def sink(self, dsn: str, table: str, **options: Any) -> TableSink:
        return type(self).make(dsn, table, **options)

    @pytest.mark.parametrize("tables", [("parent", "child"), ("child", "parent")])
    def test_two_sinks_of_a_job(self, tmp_path: Path, dsn: str, db: Database, tables: tuple[str, str]) -> None:
        """Refused before a row is written, also if the query calls the same coordinator again."""
        sinks = [self.sink(dsn, table) for table in tables]
        told = rf"sink 'child': .*{self.key} .*child refers to .*parent, into which sink 'parent' .* two queries"
        with CheckpointCoordinator("job", sinks, f"file://{tmp_path / 'storage'}") as coordinator:
            for _ in range(2):
                with pytest.raises(ConfigurationError, match=told):
                    LocalQuery(tmp_path / "query", [[FAMILY]]).run(coordinator)
        assert (db.ids("parent"), db.ids("child"), db.pending()) == ([], [], 0)

    def test_two_jobs_one_after_the_other(self, tmp_path: Path, dsn: str, db: Database) -> None:
        """As the refusal says."""
        for table in ("parent", "child"):
            run_all(tmp_path, self.sink(dsn, table), job=table)
        assert (db.ids("parent"), db.ids("child")) == ([1, 2], [1, 2])

    def test_a_key_to_a_table_that_no_sink_writes(self, tmp_path: Path, dsn: str, db: Database) -> None:
        db.run("INSERT INTO parent VALUES (1, 1), (2, 2)")
        db.run("CREATE TABLE other (id bigint PRIMARY KEY, parent bigint)")
        run_all(tmp_path, self.sink(dsn, "child"), self.sink(dsn, "other"))
        assert (db.ids("child"), db.ids("other")) == ([1, 2], [1, 2])

    def bosses(self, db: Database) -> None:
        db.run(
            "CREATE TABLE emp (id bigint PRIMARY KEY, boss bigint,"
            " CONSTRAINT has_boss FOREIGN KEY (boss) REFERENCES emp (id))"
        )

    @pytest.mark.parametrize("options", [{}, {"mode": "upsert", "keys": ["id"]}], ids=["append", "upsert"])
    def test_a_row_needs_one_of_another_partition(
        self, tmp_path: Path, dsn: str, db: Database, options: dict[str, Any]
    ) -> None:
        """In whatever order they come."""
        self.bosses(db)
        rows = chain(30)
        input = [[partition(rows[:9]), partition(rows[9:20]), partition(rows[20:], [(31, 31)])]]
        run(tmp_path, self.sink(dsn, "emp", **options), input)
        assert db.ids("emp") == [*range(1, 32)]

    def test_a_row_that_is_nowhere_fails_the_checkpoint(self, tmp_path: Path, dsn: str, db: Database) -> None:
        self.bosses(db)
        with pytest.raises(BadValue, match=r"(?i)foreign key"):
            run(tmp_path, self.sink(dsn, "emp"), [[partition([(1, None), (3, 999)]), partition([(2, 1)])]])
        assert (db.ids("emp"), db.pending()) == ([], 0)
