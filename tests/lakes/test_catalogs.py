"""An Iceberg catalog in PostgreSQL, which several machines share."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

from sinks.testing import rows
from tests.lakes.tables import IcebergLake
from tests.lakes.test_lakes import JOB, committed, pre_committed


def test_drivers_that_commit_the_same_at_once(pg_database: str, tmp_path: Path) -> None:
    dsn = pg_database.replace("postgresql://", "postgresql+psycopg://")
    with closing(IcebergLake(tmp_path, dsn)) as lake:
        lake.create(properties={"commit.retry.num-retries": "100"})  # the other writer's; the drivers have their own
        with closing(lake.sink()) as sink:
            made = [pre_committed(sink, rows(10 * n, 2), n) for n in range(8)]

        def commit() -> None:
            with closing(lake.sink()) as driver:
                for one in made:
                    committed(driver, one)

        drivers = [threading.Thread(target=commit) for _ in range(3)]
        for driver in drivers:
            driver.start()
        lake.append(rows(900, 1))
        for driver in drivers:
            driver.join()
        assert lake.ids() == [*(10 * n + m for n in range(8) for m in range(2)), 900]
        with closing(lake.sink()) as sink:
            assert sink.committed_checkpoints(JOB) == {"0badcafe": 7}
