"""R15 and R16 on a real server: its data folder is put back to what it was in an earlier checkpoint, while storage and
checkpointLocation stay as they are."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from coordinator import Step
from coordinator.errors import ExternalSystemBehind, InDoubtError, StorageBehind
from sinks.postgres import PostgresSink
from sinks.testing import KILLED, Driver
from sinks.testing.conformance import example_input, ids
from sinks.testing.driver import KillAt
from sinks.testing.servers.postgres import PostgresServer

INPUT = example_input(5)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer({"max_prepared_transactions": "16"}) as server:
        yield server


@pytest.fixture(scope="module")
def empty(server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of its data as they were made."""
    copy = tmp_path_factory.mktemp("empty") / "data"
    with_the_server_down(server, "cp", "-a", f"{server.home}/data", str(copy))
    return copy


def with_the_server_down(server: PostgresServer, *command: str) -> None:
    server.stop()
    subprocess.run(command, check=True)
    server.start()


def put_back(server: PostgresServer, backup: Path) -> None:
    with_the_server_down(server, "sh", "-c", f"rm -r '{server.home}/data' && cp -a '{backup}' '{server.home}/data'")


class Job:
    """Three drivers in a row: killed when checkpoint 1 is in doubt, where a backup is made; then as a test wants it."""

    def __init__(self, server: PostgresServer, strategy: str, folder: Path) -> None:
        self.server, self.folder, self.backup = server, folder, folder / "backup"
        with server.connect(autocommit=True) as connection:
            connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY, name text, amount double precision)")
        self.sink = PostgresSink(server.dsn, "orders", strategy=strategy)  # type: ignore[arg-type]
        assert self.run(KillAt(Step.COMPLETE, checkpoint_id=1)) == KILLED
        self.sink.close()
        with_the_server_down(server, "cp", "-a", f"{server.home}/data", str(self.backup))
        self.others_write(50)

    def others_write(self, transactions: int) -> None:
        """The server counts its transactions, and starts from the backup's number when it is set back."""
        with self.server.connect(autocommit=True) as connection:
            for _ in range(transactions):
                connection.execute("SELECT txid_current()")

    def run(self, *listeners: KillAt, batches: int = 5) -> int:
        return self.driver(*listeners, batches=batches).run()

    def driver(self, *listeners: KillAt, batches: int = 5) -> Driver:
        storage = f"file://{self.folder / 'storage'}"
        return Driver("job", self.sink, storage, self.folder / "query", INPUT[:batches], listeners)

    def set_back(self) -> None:
        self.sink.close()
        put_back(self.server, self.backup)

    def in_doubt(self) -> int:
        return len(list(self.sink.in_doubt("job")))

    def visible(self) -> Counter[int]:
        with self.server.connect() as connection:
            return Counter(id for (id,) in connection.execute("SELECT id FROM orders"))


@pytest.fixture(params=["prepared", "staged"])
def job(request: pytest.FixtureRequest, tmp_path: Path, server: PostgresServer, empty: Path) -> Iterator[Job]:
    put_back(server, empty)
    made = Job(server, request.param, tmp_path)
    yield made
    made.sink.close()


def test_a_server_set_back_by_more_than_it_has_in_doubt(job: Job) -> None:
    """Checkpoint 2 was visible and is gone; checkpoint 1, which it has in doubt again, stays."""
    assert job.run(batches=4) == 0
    job.set_back()
    assert job.in_doubt() == 3
    with pytest.raises(ExternalSystemBehind, match="ends with checkpoint 0, but checkpoint 2 was complete and visible"):
        job.driver().run_here()
    assert job.in_doubt() == 3
    assert job.visible() == Counter(ids(INPUT[:1]))


def test_a_server_set_back_to_what_an_older_record_decides(job: Job) -> None:
    """Checkpoint 1 is committed again, and 2, which was not visible yet, is written again."""
    assert job.run(KillAt(Step.COMPLETE, checkpoint_id=2)) == KILLED
    job.set_back()
    assert job.run() == 0
    assert job.visible() == Counter(ids(INPUT))
    assert job.in_doubt() == 0


@pytest.mark.parametrize("job", ["prepared"], indirect=True)
def test_a_server_set_back_where_others_took_the_numbers_of_its_transactions(job: Job) -> None:
    """It says that they were committed, and means others': nobody can tell, so nothing is written again."""
    assert job.run(KillAt(Step.COMPLETE, checkpoint_id=2)) == KILLED
    job.set_back()
    job.others_write(200)
    with pytest.raises(InDoubtError, match="and the server says that its transaction"):
        job.driver().run_here()
    assert job.visible() == Counter(ids(INPUT[:2]))


@pytest.mark.parametrize("job", ["prepared"], indirect=True)
def test_a_server_set_back_to_before_a_loss(job: Job) -> None:
    """It has in doubt again what was written anew since, which is gone. The former would hold the keys for ever."""
    job.sink.abort(min(job.sink.in_doubt("job"), key=str))
    assert job.run(KillAt(Step.COMMITTED, checkpoint_id=1)) == KILLED
    job.set_back()
    assert job.in_doubt() == 3
    assert job.run() == 0
    assert (job.visible(), job.in_doubt()) == (Counter(ids(INPUT)), 0)


def test_storage_set_back_to_before_a_driver_whose_transactions_were_lost(job: Job) -> None:
    """The next driver has the number of that one, and its transactions the same names."""
    shutil.copytree(job.folder / "storage", job.folder / "older")
    assert job.run(KillAt(Step.COMPLETE, checkpoint_id=2)) == KILLED
    for transaction in job.sink.in_doubt("job"):
        job.sink.abort(transaction)
    assert job.run(KillAt(Step.REPLAYING, checkpoint_id=2)) == KILLED
    shutil.rmtree(job.folder / "storage")
    (job.folder / "older").rename(job.folder / "storage")
    assert job.run() == 0
    assert (job.visible(), job.in_doubt()) == (Counter(ids(INPUT)), 0)


def test_a_server_set_back_behind_sparks_back(job: Job) -> None:
    """As before, but Spark has moved on from checkpoint 2. What the error says to do fixes it."""
    assert job.run(batches=3) == 0
    job.set_back()
    with pytest.raises(InDoubtError, match="delete commits/2 and all later files"):
        job.driver().run_here()
    assert job.visible() == Counter(ids(INPUT[:2]))
    for file in ("commits/2", "offsets/3"):
        (job.folder / "query" / file).unlink()
    assert job.run() == 0
    assert job.visible() == Counter(ids(INPUT))


def test_storage_and_location_older_than_the_server(job: Job) -> None:
    for part in ("storage", "query"):
        shutil.copytree(job.folder / part, job.folder / f"old-{part}")
    assert job.run() == 0
    for part in ("storage", "query"):
        shutil.rmtree(job.folder / part)
        shutil.copytree(job.folder / f"old-{part}", job.folder / part)
    with pytest.raises(StorageBehind, match="older by 3 checkpoint"):
        job.driver().run_here()
    assert job.visible() == Counter(ids(INPUT))


def test_a_server_that_does_not_know_the_job(job: Job) -> None:
    """Storage is kept, and the database is a new and empty one."""
    assert job.run(batches=3) == 0
    job.sink.close()
    with psycopg.connect(job.server.dsn, autocommit=True) as connection:
        connection.execute("DROP TABLE orders")
        connection.execute("DROP TABLE tpc_ledger")
    with pytest.raises(ExternalSystemBehind, match="has nothing of this lineage"):
        job.driver().run_here()
