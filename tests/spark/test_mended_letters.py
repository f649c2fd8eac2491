"""The program of docs/dead-letters.md puts each letter through once, also if it is killed and finds letters again."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest

from coordinator import Step
from tests.cli.jobs import Job
from tests.spark.job import KILLED, KillGroupAt, SparkJob

PAGE = (Path(__file__).parents[2] / "docs" / "dead-letters.md").read_text()
[PROGRAM] = re.findall(r"^```python\n# mend_orders\.py\n(.*?)^```", PAGE, re.M | re.S)
[EXPORT] = re.findall(r"coordinator (dead-letters show .*?) > ", PAGE)
END = '/checkpoints") as coordinator:\n'


@dataclass
class Mending(SparkJob):
    environment: Mapping[str, str] = field(default_factory=dict)

    def run_here(self) -> None:
        self.session()
        os.environ |= self.environment
        assert END in PROGRAM
        watched = PROGRAM.replace(END, END.replace('")', '", listeners=listeners)'))
        exec(
            compile(f"{watched}    print(coordinator.guarantee)\n", "mend_orders.py", "exec"),
            {"listeners": self.listeners},
        )


def orders(first: int, rows: int = 40) -> list[pa.Table]:
    """One in 7 has no amount, one in 5 less than 0, one in 8 just 0, which no mending makes more."""
    ids = range(first, first + rows)
    amounts = [None if id % 7 == 0 else -1.25 * id if id % 5 == 0 else 0.0 if id % 8 == 0 else 1.0 for id in ids]
    return [pa.table({"id": pa.array(ids, pa.int64()), "amount": pa.array(amounts, pa.float64())})]


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.large)], ids=["", "killed"])
def test_each_letter_goes_through_once(tmp_path: Path, pg_database: str, killed: bool) -> None:
    place = f'type = "postgres"\ndsn = "{pg_database}"\ncreate_table = true\ntable ='
    job = Job(tmp_path, f'{place} "orders"\n[sinks.dead_letters]\n{place} "orders_dead"')
    home = tmp_path / "mend"
    letters = home / "letters"
    letters.mkdir(parents=True)

    def export(name: str) -> None:
        found = job.cli(*EXPORT.split()).stdout
        (home / "new").write_text(found)
        (home / "new").rename(letters / name)

    def mend(*listeners: KillGroupAt) -> Mending:
        environment = {"DSN": pg_database, "MEND_HOME": str(home)}
        return Mending(home, [], listeners=listeners, environment=environment)

    with psycopg.connect(pg_database, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id bigint, amount float8 NOT NULL CHECK (amount > 0))")
        job.input = [orders(0)]
        job.run()
        export("first.json")
        if killed:
            assert mend(KillGroupAt(Step.COMPLETE, 0)).run() == KILLED
        else:
            assert mend().run() == 0
        job.input = [orders(0), orders(40)]
        job.run()
        export("second.json")  # with those of the first
        export("third.json")
        run = mend()
        assert run.run() == 0, run.output()
        assert "exactly-once: yes" in run.output()

        every = {row["id"]: row["amount"] for tables in job.input for table in tables for row in table.to_pylist()}
        expected = {id: abs(amount) for id, amount in every.items() if amount}
        refused = [id for id, amount in every.items() if amount == 0]
        found = connection.execute("SELECT id, amount FROM orders").fetchall()
        assert Counter(found) == Counter(expected.items())
        again = connection.execute("SELECT (row::json ->> 'id')::bigint FROM orders_dead_again").fetchall()
        assert sorted(id for (id,) in again) == refused
        assert connection.execute("SELECT count(*) FROM pg_prepared_xacts").fetchall() == [(0,)]

        shutil.rmtree(home / "query")
        run = mend()
        assert run.run() == 1
        assert "CheckpointLocationMismatch" in run.output()
        assert connection.execute("SELECT count(*) FROM orders").fetchall() == [(len(expected),)]
