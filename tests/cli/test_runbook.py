"""The commands of docs/runbook.md, word for word, on what drivers left behind that got SIGKILL."""

from __future__ import annotations

import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest

import coordinator.errors
import coordinator.jobfile
import coordinator.storage
import sinks.errors
from coordinator.cli import output
from coordinator.errors import CheckpointError, CheckpointFailed, CheckpointLocationMismatch
from coordinator.listener import CheckpointListener, Step
from coordinator.operations.jobfile import load_job
from sinks.errors import SinkError
from sinks.testing import LocalQuery
from sinks.testing.conformance import example_input
from sinks.testing.servers.kafka import KafkaService
from sinks.testing.servers.postgres import PostgresService
from sinks.testing.table import eventually
from sinks.testing.table_crashes import At
from sinks.transaction import TransactionId
from tests.cli.jobs import INPUT, Job, ids
from tests.kafka.reading import read, settled

DOCS = Path(__file__).parents[2] / "docs"
RUNBOOK = (DOCS / "runbook.md").read_text()


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", RUNBOOK, re.S | re.M)
    assert found, title
    return found[1]


def commands(text: str) -> list[str]:
    """Those with an argument: `coordinator status` says nothing by itself."""
    return [" ".join(found.split()) for found in re.findall(r"(?:`| {4})coordinator ([^`#\n]+)", text)]


def row(title: str, symptom: str) -> str:
    """The one command of a line of a table."""
    [line] = [line for line in section(title).splitlines() if line.startswith(f"| {symptom} |")]
    [command] = commands(line)
    return command


@dataclass
class Target:
    """A job into a system, and what its users see."""

    job: Job
    visible: Callable[[], Counter[int]]

    def expected(self, batches: int) -> Counter[int]:
        return Counter(id for batch in self.job.input[:batches] for table in batch for id in table["id"].to_pylist())

    def run_command(self, command: str, code: int | None = 0) -> str:
        """An operator's answers are given by options."""
        asks = ["--yes"] if "--fence" in command or "restore" in command else []
        if re.search(r"abort (?!--)", command):
            asks.append("--break-decision")
        return self.job.cli(*command.split(), *asks, code=code).output

    def decisions(self) -> set[str]:
        return {one["decision"] for one in self.job.json("in-doubt", "list", code=None)["transactions"]}


@pytest.fixture
def on_postgres(pg_job: Job, pg_database: str) -> Target:
    def visible() -> Counter[int]:
        with psycopg.connect(pg_database) as connection:
            return Counter(id for (id,) in connection.execute("SELECT id FROM orders"))

    return Target(pg_job, visible)


@pytest.fixture
def on_kafka(tmp_path: Path, kafka: KafkaService, kafka_topic: str) -> Target:
    job = Job(tmp_path, f'type = "kafka"\nbootstrap_servers = "{kafka.bootstrap}"\ntopic = "{kafka_topic}"')
    job.input = [
        [pa.table({"id": table["id"], "value": table["id"].cast("string")}).select(["value"]) for table in batch]
        for batch in INPUT
    ]

    def visible() -> Counter[int]:
        settled(kafka.bootstrap)
        return Counter(int(message.value() or b"") for message in read(kafka.client_options(), kafka_topic))

    return KafkaTarget(job, visible)


class KafkaTarget(Target):
    def expected(self, batches: int) -> Counter[int]:
        return Counter(
            int(v) for batch in self.job.input[:batches] for table in batch for v in table["value"].to_pylist()
        )


@pytest.fixture(params=["on_postgres", "on_kafka"])
def target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.getfixturevalue(request.param)
    return found


def test_every_command_is_one(tmp_path: Path) -> None:
    """On a job without checkpoints: found nothing, or asked for a confirmation, but understood."""
    place = f'type = "sqlalchemy"\nurl = "sqlite:///{tmp_path}'
    sink = f'{place}/orders.db"\ntable = "orders"'
    job = Job(tmp_path, f'{sink}\n[sinks.dead_letters]\n{place}/dead.db"\ntable = "dead"')
    place = f'[checkpointing]\nsavepoint_dir = "{tmp_path.as_uri()}/savepoints"'
    job.file.write_text(job.file.read_text().replace("[checkpointing]", place))
    found = commands(RUNBOOK)
    assert len(found) > 15
    for command in found:
        words = command.replace("ID …", "ID").replace("show N", "show 1").split()
        assert job.cli(*words, code=None).exit_code in (0, 1, 3, 4), command


def test_every_error_has_a_line() -> None:
    listed = set(re.findall(r"`(\w+)`", (DOCS / "errors.md").read_text()))
    ours = {
        name
        for module in (coordinator.errors, coordinator.jobfile, coordinator.storage, sinks.errors)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert len(ours) > 25
    assert ours - listed == set()


def test_decided(target: Target) -> None:
    target.job.kill(Step.COMPLETE, 1)
    assert target.visible() == target.expected(1)
    [begin] = {command for command in commands(section("DROP or ALTER hangs")) if command == "in-doubt list"}
    assert "3 commit: decided" in target.run_command(begin, code=1)
    assert "Committed 3 now." in target.run_command(row("DROP or ALTER hangs", "`commit`"))
    assert target.visible() == target.expected(2)
    assert target.decisions() == set()
    target.job.run()
    assert target.visible() == target.expected(3)


def test_of_a_driver_that_was_replaced(target: Target) -> None:
    """Kafka's transactions do not tell which driver's they are, so there they are stranded."""
    target.job.beat_fast()
    target.job.kill(Step.PRE_COMMITTED, 1)
    target.job.kill(Step.GENERATION_CLAIMED, -1)
    target.job.wait_until("silent")
    [decision] = target.decisions()
    assert decision == ("stranded" if isinstance(target, KafkaTarget) else "orphan")
    told = target.run_command(row("DROP or ALTER hangs", f"`{decision}`" if decision == "orphan" else "`stranded`"))
    assert told.count("aborted") >= 3
    assert target.decisions() == set()
    target.job.run()
    assert target.visible() == target.expected(3)


def test_stranded(target: Target) -> None:
    target.job.beat_fast()
    target.job.kill(Step.PRE_COMMITTED, 1)
    target.job.wait_until("silent")
    assert target.decisions() == {"stranded"}
    command = row("DROP or ALTER hangs", "`stranded`")
    assert command in target.run_command("in-doubt list", code=1), "list and runbook say the same"
    assert target.run_command(command).count("aborted") >= 3
    assert target.decisions() == set()
    assert "Driver: none" in target.run_command("status", code=1)
    assert target.visible() == target.expected(1)
    target.job.run()
    assert target.visible() == target.expected(3)


def test_stranded_in_the_first_checkpoint(target: Target) -> None:
    target.job.beat_fast()
    target.job.kill(Step.PRE_COMMITTED, 0)
    target.job.wait_until("silent")
    command = row("DROP or ALTER hangs", "`stranded`, and storage holds no checkpoint")
    for one in target.job.json("in-doubt", "list", code=1)["transactions"]:
        assert "aborted" in target.run_command(command.replace("ID", one["id"]))
    assert target.decisions() == set()
    target.job.run()
    assert target.visible() == target.expected(3)


def test_open(target: Target) -> None:
    with target.job.halted(Step.PRE_COMMITTED, 1):
        target.job.wait_until("running")
        assert target.decisions() == {"open"}
        assert "| `open` | a driver runs" in section("DROP or ALTER hangs")
        assert "Not touched: 3 open" in target.run_command(row("DROP or ALTER hangs", "`orphan`"))


def test_the_brokers_are_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands ask the brokers. Neither goes by the limit that the sink has for a question of its driver."""
    monkeypatch.setattr(output, "_PATIENCE", 1)
    job = Job(tmp_path, 'type = "kafka"\nbootstrap_servers = "127.0.0.1:1"\ntopic = "events"\ntimeout = 3600')
    told = job.cli("in-doubt", "list", code=1).output
    assert "sink 'events' cannot tell: KafkaTimeoutError: Unable to bootstrap" in told
    assert "Nothing of job" not in told
    assert "has no checkpoint" in job.cli("resolve", code=1).stderr
    told = job.cli("doctor", code=1).stdout
    assert "the brokers at 127.0.0.1:1 cannot be asked" in told
    assert told.count("error ") == 2, "one of the sink, one of its memory"
    assert "restore a newer state" not in told


def test_the_brokers_abort_what_nobody_settles(on_kafka: Target) -> None:
    """After transaction_timeout readers go on, and the next start writes again what was decided."""
    job = on_kafka.job
    assert "transaction_timeout" in section("Consumers get nothing")
    text = job.file.read_text()
    for seconds in (6, 60):  # a busy machine may not come to the decision in the first
        job.file.write_text(f"{text}transaction_timeout = {seconds}\n")
        with suppress(EOFError):
            job.kill(Step.COMPLETE, 1)
            break
    eventually(lambda: not on_kafka.decisions(), 300)
    told = on_kafka.run_command("resolve", code=1)
    assert told.count("lost") >= 3, told
    assert "Start the query again" in told
    job.run()
    assert on_kafka.visible() == on_kafka.expected(3)


def test_the_database_is_down(
    tmp_path: Path, own_postgres: PostgresService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Amid a batch the query stops at once. A start waits, and goes on."""

    def come_back() -> None:
        eventually(lambda: "sink 'orders' fails to" in caplog.text)
        own_postgres.start()

    told = section("The database is down")
    assert "in its first batch, the newest one with rows for this sink | asks for `commit_timeout`" in told
    assert "stops (`CheckpointFailed`, or the sink's error) within seconds" in told
    with own_postgres.database() as dsn:
        monkeypatch.setenv("ORDERS_DSN", dsn)
        job = Job(tmp_path, 'type = "postgres"\ndsn = "${ORDERS_DSN}"\ntable = "orders"\ncreate_table = true')
        job.file.write_text(job.file.read_text().replace("commit_timeout = 2", "commit_timeout = 3600"))
        with pytest.raises((CheckpointFailed, SinkError)):
            start(job, listeners=[At(Step.TRIGGERED, own_postgres.stop)])
        caplog.clear()
        back = threading.Thread(target=come_back)
        back.start()
        start(job)
        back.join()
        with psycopg.connect(dsn) as connection:
            assert sorted(id for (id,) in connection.execute("SELECT id FROM orders")) == ids()


# ---------------------------------------------------------------------- what was deleted
def start(job: Job, batches: int = 3, query: str = "query", listeners: Sequence[CheckpointListener] = ()) -> None:
    with load_job(str(job.file)) as coordinator:
        for listener in listeners:
            coordinator._protocol.listeners.add(listener)
        LocalQuery(job.folder / query, job.input[:batches]).run(coordinator)


def test_the_checkpoint_location_is_gone_and_there_is_a_savepoint(on_postgres: Target) -> None:
    job = on_postgres.job
    target = f"file://{job.folder}/savepoints"
    job.file.write_text(job.file.read_text().replace("[checkpointing]", f'[checkpointing]\nsavepoint_dir = "{target}"'))
    job.run(2)
    taken = job.json("savepoint", "trigger", "--checkpoint-location", f"{job.folder}/query", "--yes")
    shutil.rmtree(job.folder / "query")
    with pytest.raises(CheckpointLocationMismatch):
        start(job)
    [command] = [c for c in commands(section("I deleted Spark's checkpointLocation")) if "restore" in c]
    place = job.folder / "restored"
    told = on_postgres.run_command(command.replace("SAVEPOINT", taken["id"]).replace("CHECKPOINT_LOCATION", str(place)))
    assert f"option('checkpointLocation', '{place}')" in told.replace("\n", " ")
    start(job, query="restored")
    assert on_postgres.visible() == on_postgres.expected(3)


@pytest.mark.parametrize("decided", [True, False])
def test_the_machine_is_gone(on_postgres: Target, pg_database: str, decided: bool) -> None:
    """With storage and checkpointLocation. What the list advises gets rid of the locks, as the section does."""
    job, steps = on_postgres.job, section("The driver's machine is gone")
    job.kill(Step.COMPLETE, 1)
    listed = job.json("in-doubt", "list", code=1)["transactions"]
    ids = [one["id"] for one in listed]
    with psycopg.connect(pg_database, autocommit=True) as connection:
        if decided:
            connection.execute(f"COMMIT PREPARED '{listed[0]['transaction']['gid']}'")
            ids.pop(0)
        for folder in ("checkpoints", "query"):
            shutil.rmtree(job.folder / folder)
        told = on_postgres.run_command("in-doubt list", code=1)
        assert "There is no checkpoint storage" in told
        assert f"{len(ids)} stranded" in told
        [command] = [c for c in commands(steps) if c.startswith("in-doubt commit" if decided else "in-doubt abort")]
        assert decided or command.replace("ID …", "ID") in told, "list and runbook say the same"
        done = job.cli(*command.replace("ID …", " ".join(ids)).split(), "--yes", "--break-decision")
        assert done.stdout.count("committed" if decided else "aborted") == len(ids)
        assert on_postgres.visible() == on_postgres.expected(2 if decided else 1)
        assert on_postgres.decisions() == set()
        assert not (job.folder / "checkpoints").exists(), "a fence shuts nobody out in a storage that is not there"
        connection.execute("SET lock_timeout = '60s'")
        connection.execute("DROP TABLE orders")


def test_of_two_tries_of_a_subtask_only_one_is_committed(tmp_path: Path, pg_database: str) -> None:
    """Where the storage is gone, the rest of what is visible, and a speculative try beside each, are in doubt."""
    job = Job(tmp_path, f'type = "postgres"\ndsn = "{pg_database}"\ntable = "plain"\nstrategy = "prepared"')
    with psycopg.connect(pg_database, autocommit=True) as connection:
        connection.execute("CREATE TABLE plain (id bigint, name text, amount double precision)")
        job.kill(Step.COMPLETE, 1)
        named = job.json("in-doubt", "list", code=1)["transactions"]
        with load_job(str(job.file)) as coordinator:
            sink = coordinator.sinks["plain"]
            for one in named[:2]:
                where = "orders", one["lineage"], 1, "plain", one["subtask"], one["generation"], 0, 0, 99
                rows = job.input[1][one["subtask"]]
                sink.check(rows.schema)
                transaction = sink.begin_transaction(TransactionId(*where).context(rows.schema))
                sink.write(transaction, rows.to_batches()[0])
                sink.snapshot_state(transaction)
        connection.execute(f"COMMIT PREPARED '{named[0]['transaction']['gid']}'")
    shutil.rmtree(job.folder / "checkpoints")
    tries: dict[int, list[str]] = {}
    for one in job.json("in-doubt", "list", code=1)["transactions"]:
        tries.setdefault(one["subtask"], []).append(one["id"])
    [late], [first, second], [single] = (tries[one["subtask"]] for one in named)
    sure = ("--yes", "--break-decision")
    told = job.cli("in-doubt", "commit", late, first, second, single, *sure, code=2).output
    assert "Commit one for each subtask" in told
    assert [id in told for id in (late, first, second, single)] == [True, True, True, False]
    job.cli("in-doubt", "commit", first, single, *sure)
    for id in (late, second):
        job.cli("in-doubt", "commit", id, *sure, code=2)
        job.cli("in-doubt", "abort", id, "--fence", *sure)
    with psycopg.connect(pg_database) as connection:
        assert sorted(id for (id,) in connection.execute("SELECT id FROM plain")) == ids(2)


@pytest.mark.parametrize("decided", [True, False])
def test_the_checkpoints_are_gone(on_postgres: Target, pg_database: str, decided: bool) -> None:
    """The steps of the section, where the driver died in its last checkpoint, and part of it may be visible."""
    job = on_postgres.job
    steps = section("I deleted the checkpoints")
    job.kill(Step.COMPLETE if decided else Step.PRE_COMMITTED, 1)
    with psycopg.connect(pg_database, autocommit=True) as connection:
        if decided:
            one = job.json("in-doubt", "list", code=1)["transactions"][0]
            connection.execute(f"COMMIT PREPARED '{one['transaction']['gid']}'")
        shutil.rmtree(job.folder / "checkpoints")
        assert "There is no checkpoint storage" in " ".join(steps.split())
        assert "There is no checkpoint storage" in on_postgres.run_command("status", code=1)
        assert not (job.folder / "checkpoints").exists(), "looking makes nothing"
        with pytest.raises(CheckpointError) as stopped:
            start(job)
        error = type(stopped.value).__name__
        assert f"`{error}`" in steps
        told = on_postgres.run_command("status", code=1)
        assert error in told
        assert "none is complete" in told
        assert '"none is complete"' in steps

        logs = job.folder / "query"
        n = max(int(file.name) for file in (logs / "offsets").iterdir())
        assert not (logs / "commits" / str(n)).exists()
        [query] = re.findall(r"`(SELECT [^`]* FROM tpc_ledger[^`]*)`", steps)
        listed = job.json("in-doubt", "list", code=1)["transactions"]
        beginning = re.match(r"tpc\.[^.]+\.[^.]+\.", listed[0]["transaction"]["gid"])
        assert beginning
        query = query.replace("tpc.JOB.LINEAGE.N.", f"{beginning[0]}{n}.")
        assert bool(connection.execute(query).fetchall()) == decided
    if decided:
        [command] = [command for command in commands(steps) if "commit ID" in command]
        rest = [one["id"] for one in job.json("in-doubt", "list", code=1)["transactions"]]
        told = job.cli(*command.removesuffix("ID …").split(), *rest, "--yes", "--break-decision").output
        assert told.count("committed") == 2
        shutil.copy(logs / "commits" / str(n - 1), logs / "commits" / str(n))
    assert "`adopt = true` under `[checkpointing]`" in steps
    without = job.file.read_text()
    job.file.write_text(without.replace("[checkpointing]", "[checkpointing]\nadopt = true"))
    start(job)
    job.file.write_text(without)
    job.input = example_input(4)
    start(job, 4)
    assert on_postgres.visible() == on_postgres.expected(4)
    assert on_postgres.decisions() == set()
