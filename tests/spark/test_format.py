"""`df.writeStream.format("exactly_once")`: whichever of its processes dies, and whenever, every row is there once."""

from __future__ import annotations

import json
import os
import pickle
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from coordinator import CheckpointListener, Step
from coordinator.errors import CheckpointError, CheckpointLocationMismatch, InDoubtError, ReplayMismatch, Superseded
from coordinator.jobfile import load_job
from coordinator.spark.source import CommitWriter, ExactlyOnceSource, TaskWriter, Written, _job_of, register
from sinks.errors import BadValue, ConfigurationError
from sinks.postgres import PostgresSink
from sinks.row_hash import row_hashes
from sinks.testing import rows
from tests.postgres.observer import Observer
from tests.spark.job import KILLED, SparkJob, write_input

COLUMNS = StructType().add("id", "long").add("name", "string").add("amount", "double")
IN_A_TASK = "in a task"

JOB = """
from coordinator import CheckpointConfig, CheckpointCoordinator
from tests.spark.test_format import Dying, DyingSink

sink = DyingSink({dsn!r}, {folder!r})
config = CheckpointConfig(commit_timeout=0.1)
coordinator = CheckpointCoordinator("orders", [sink], {storage!r}, config, [Dying({folder!r})])
"""


def write_job(folder: Path, dsn: str) -> None:
    text = JOB.format(dsn=dsn, folder=str(folder), storage=(folder / "storage").as_uri())
    (folder / "job.py").write_text(text)


def die_if_told(folder: str, when: str) -> None:
    """SIGKILL to this process, once, if a file says so, and to the process group in the file."""
    file = Path(folder, f"die {when}")
    if file.exists():
        group = file.read_text()
        file.unlink()
        if group:
            os.killpg(int(group), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Dying(CheckpointListener):
    folder: str

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        die_if_told(self.folder, step.value)


class DyingSink(PostgresSink):
    """Cannot commit while there is a file "unreachable"."""

    def __init__(self, dsn: str, folder: str) -> None:
        super().__init__(dsn, "orders", create_table=True, schema_evolution="add", strategy="prepared")
        self.folder = folder

    def pre_commit(self, transaction: Any) -> Any:
        answer = super().pre_commit(transaction)
        die_if_told(self.folder, IN_A_TASK)
        return answer

    def commit_all(self, *arguments: Any) -> Any:
        if Path(self.folder, "unreachable").exists():
            raise ConnectionError("unreachable")
        return super().commit_all(*arguments)


def begin(spark: SparkSession, folder: Path) -> StreamingQuery:
    """A query that reads files, two a batch, into a table."""
    register(spark)
    files = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 2).parquet(str(folder / "input"))
    writer = files.writeStream.format("exactly_once").option("jobFile", str(folder / "job.py"))
    return writer.option("checkpointLocation", str(folder / "spark")).trigger(availableNow=True).start()


@dataclass
class Orders:
    folder: Path
    table: Observer

    def visible(self) -> Counter[int]:
        if self.table.run("SELECT to_regclass('orders')") == [(None,)]:
            return Counter()
        return Counter(id for (id,) in self.table.run("SELECT id FROM orders"))

    def roll_one_back(self) -> None:
        self.table.run(f"ROLLBACK PREPARED '{self.table.prepared()[0]}'")


@pytest.fixture
def orders(tmp_path: Path, pg_database: str) -> Iterator[Orders]:
    write_job(tmp_path, pg_database)
    with closing(Observer(pg_database)) as table:
        yield Orders(tmp_path, table)


# ---------------------------------------------------------------------- with Spark
def killed(spark: SparkSession, folder: Path, when: str) -> None:
    file = folder / f"die {when}"
    file.touch()
    with pytest.raises(StreamingQueryException):
        begin(spark, folder).awaitTermination(300)
    assert not file.exists(), f"nothing died {when}"


@pytest.mark.ci
def test_the_process_that_decides_is_killed_and_what_it_decided_is_lost(spark: SparkSession, orders: Orders) -> None:
    ids = write_input(orders.folder / "input", batches=2, files=2)
    killed(spark, orders.folder, Step.COMPLETE.value)
    orders.roll_one_back()
    query = begin(spark, orders.folder)
    assert query.awaitTermination(300)
    assert orders.visible() == Counter(ids)
    assert orders.table.prepared() == []
    assert query.lastProgress is not None
    assert query.lastProgress["sink"]["numOutputRows"] == 100


@pytest.mark.large
def test_its_processes_are_killed_at_every_step(spark: SparkSession, orders: Orders) -> None:
    ids = write_input(orders.folder / "input", batches=2, files=2)
    for when in (Step.GENERATION_CLAIMED.value, Step.SWEPT.value, IN_A_TASK, Step.PRE_COMMITTED.value):
        killed(spark, orders.folder, when)
        assert orders.visible() == Counter()
    killed(spark, orders.folder, Step.COMPLETE.value)
    orders.roll_one_back()
    killed(spark, orders.folder, Step.REPLAY_COMPLETE.value)
    assert len(orders.visible()) == 50
    for when in (Step.COMMITTED.value, Step.LOADED.value):
        killed(spark, orders.folder, when)
        assert orders.visible() == Counter(ids)
    begin(spark, orders.folder).awaitTermination(300)
    assert orders.visible() == Counter(ids)
    assert orders.table.prepared() == []
    pq.write_table(rows(9000, 50), orders.folder / "input" / "0004.parquet")
    with load_job(str(orders.folder / "job.py")) as coordinator:
        files = spark.readStream.schema(COLUMNS).parquet(str(orders.folder / "input"))
        writer = files.writeStream.foreachBatch(coordinator).option("checkpointLocation", str(orders.folder / "spark"))
        writer.trigger(availableNow=True).start().awaitTermination(300)
    assert orders.visible() == Counter([*ids, *range(9000, 9050)]), "foreachBatch goes on where the format has ended"


class FormatJob(SparkJob):
    def begin_here(self, stack: ExitStack) -> Any:
        for file in self.folder.glob("die *"):
            file.write_text(str(os.getpgid(0)))
        return begin(self.session(), self.folder)


@pytest.mark.large
def test_the_driver_is_killed(orders: Orders) -> None:
    ids = write_input(orders.folder / "input", batches=2, files=2)
    for step in (Step.COMPLETE, Step.COMMITTED):
        (orders.folder / f"die {step.value}").touch()
        job = FormatJob(orders.folder, [])
        assert job.run() == KILLED, job.output()
        assert max(orders.visible().values(), default=1) == 1
    job = FormatJob(orders.folder, [])
    assert job.run() == 0, job.output()
    assert orders.visible() == Counter(ids)
    assert orders.table.prepared() == []


# ---------------------------------------------------------------------- its halves
@dataclass
class Halves:
    """What Spark asks of the data source, as it asks it."""

    folder: Path

    def plan(self, batch_id: int, offsets: str = "{}", query: str = "q") -> None:
        """As Spark does before all else."""
        (self.folder / "spark" / "offsets").mkdir(parents=True, exist_ok=True)
        (self.folder / "spark" / "metadata").write_text(json.dumps({"id": query}))
        (self.folder / "spark" / "offsets" / str(batch_id)).write_text(f"v1\n{{}}\n{offsets}")

    def prepare(self) -> TaskWriter:
        writer = self.source().streamWriter(COLUMNS, False)
        return pickle.loads(pickle.dumps(writer))  # type: ignore[no-any-return]

    def commit_writer(self) -> CommitWriter:
        copy = pickle.loads(pickle.dumps(self.source()))
        return copy.streamWriter(COLUMNS, False)  # type: ignore[no-any-return]

    def source(self, **options: str) -> ExactlyOnceSource:
        known = {"jobFile": str(self.folder / "job.py"), "checkpointLocation": str(self.folder / "spark")}
        return ExactlyOnceSource(known | options)


def written(writer: TaskWriter, *starts: int) -> list[Written]:
    """By a task for each start, ten rows."""
    tasks = enumerate(starts)
    return [writer.acked(iter(rows(start, 10).to_batches()), task, 7 * task) for task, start in tasks]


@pytest.fixture
def halves(orders: Orders) -> Halves:
    halves = Halves(orders.folder)
    halves.plan(0)
    return halves


def test_a_superseded_driver_decides_nothing(orders: Orders, halves: Halves) -> None:
    older = halves.prepare()
    of_older = written(older, 0, 10)
    newer = halves.prepare()
    of_newer = written(newer, 0, 10)
    with pytest.raises(Superseded, match="generation 2"):
        halves.commit_writer().commit(of_older, 0)
    halves.commit_writer().commit(of_newer, 0)
    assert orders.visible() == Counter(range(20))
    halves.prepare()
    assert orders.table.prepared() == []


@pytest.mark.parametrize(
    ("former", "later"),
    [
        ('"orders", [sink]', '"other", [sink]'),
        ("/storage'", "/storage2'"),
        ("\nconfig", '\nsink.name = "other"\nconfig'),
        ("\nconfig", "\nsink.mode = None\nconfig"),
    ],
    ids=["job", "storage", "sink", "what a sink does not show"],
)
def test_a_job_file_that_is_changed_while_a_batch_runs(orders: Orders, halves: Halves, former: str, later: str) -> None:
    file = orders.folder / "job.py"
    answers = written(halves.prepare(), 0, 10)
    before = file.read_text()
    file.write_text(before.replace(former, later))
    with pytest.raises(CheckpointError, match="the job file was changed while batch 0 ran"):
        halves.commit_writer().commit(answers, 0)
    file.write_text(before)
    assert orders.visible() == Counter()
    halves.commit_writer().commit(written(halves.prepare(), 0, 10), 0)
    assert orders.visible() == Counter(range(20))
    assert orders.table.prepared() == []


def test_the_table_is_altered_before_the_tasks(orders: Orders, halves: Halves) -> None:
    orders.table.run("CREATE TABLE orders (id bigint, amount double precision)")
    halves.commit_writer().commit(written(halves.prepare(), 0, 10), 0)
    assert orders.table.visible()[:2] == [(0, 0.5, "user-0"), (1, 1.5, "user-1")]


def test_it_is_offered_twice(orders: Orders, halves: Halves) -> None:
    answers = written(halves.prepare(), 0, 10)
    for _ in range(2):
        halves.commit_writer().commit(answers, 0)
    again = written(halves.prepare(), 0, 10)
    assert orders.table.prepared() == [], "it is known to be visible, so nothing is written"
    halves.commit_writer().commit(again, 0)
    assert orders.visible() == Counter(range(20))


@pytest.mark.parametrize(
    ("starts", "why"), [((0, 30), "rows"), ((0, 10, 20), "partitions")], ids=["other rows", "another layout"]
)
def test_a_lost_transaction_is_not_replaced_by_other_rows(
    orders: Orders, halves: Halves, starts: Sequence[int], why: str
) -> None:
    (orders.folder / "unreachable").touch()
    answers = written(halves.prepare(), 0, 10)
    with pytest.raises(InDoubtError, match="unreachable"):
        halves.commit_writer().commit(answers, 0)
    halves.commit_writer().abort(answers, 0)
    assert len(orders.table.prepared()) == 2, "a record names them"
    orders.table.run(f"ROLLBACK PREPARED '{orders.table.prepared()[1]}'")
    (orders.folder / "unreachable").unlink()
    for _ in range(2):
        again = written(halves.prepare(), *starts)
        assert orders.visible() == Counter(range(10))
        with pytest.raises(ReplayMismatch, match=why):
            halves.commit_writer().commit(again, 0)
    halves.commit_writer().commit(written(halves.prepare(), 0, 10), 0)
    assert orders.visible() == Counter(range(20))
    assert orders.table.prepared() == []


def test_what_the_others_have_written_is_aborted_when_a_task_failed(orders: Orders, halves: Halves) -> None:
    answers = written(halves.prepare(), 0, 10)
    halves.commit_writer().abort(answers, 0)
    assert len(orders.table.prepared()) == 2, "a record may name them"
    halves.commit_writer().abort([answers[0], None], 0)
    assert len(orders.table.prepared()) == 1


def test_what_the_first_try_of_a_task_has_left_is_aborted_with_its_batch(orders: Orders, halves: Halves) -> None:
    writer = halves.prepare()
    writer.acked(iter(rows(0, 10).to_batches()), 0, 99)  # pre-commits, and dies
    answers = written(writer, 0, 10)
    assert len(orders.table.prepared()) == 3
    halves.commit_writer().commit(answers, 0)
    assert orders.visible() == Counter(range(20))
    assert orders.table.prepared() == []


def test_an_older_checkpoint_location_is_refused(orders: Orders, halves: Halves) -> None:
    halves.commit_writer().commit(written(halves.prepare(), 0, 10), 0)
    halves.plan(0, offsets='{"other": 1}')
    with pytest.raises(CheckpointLocationMismatch):
        halves.prepare()
    assert orders.visible() == Counter(range(20))


def test_a_row_that_the_table_refuses_stops_the_query(orders: Orders, halves: Halves) -> None:
    halves.prepare()
    orders.table.run("ALTER TABLE orders ADD CHECK (id <> 15)")
    answers = written(halves.prepare(), 0, 10)
    with pytest.raises(BadValue, match="orders_id_check"):
        halves.commit_writer().commit(answers, 0)
    assert orders.visible() == Counter()
    assert orders.table.prepared() == []


# ---------------------------------------------------------------------- hashes of rows
VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "integers": (pa.int64(), [0, 1, 2**62, 2**62 + 1, None]),
    "bytes": (pa.int8(), [0, 1, -1, None]),
    "booleans": (pa.bool_(), [True, False, None]),
    "floats": (pa.float64(), [0.0, 1.5, 2.0, None]),
    "decimals": (pa.decimal128(20, 2), [Decimal("0.00"), Decimal("1.50"), None]),
    "texts": (pa.string(), ["", "a", "nan", "None", None]),
    "binaries": (pa.binary(), [b"", b"a", None]),
    "times": (pa.timestamp("us", "UTC"), [datetime(1970, 1, 1), datetime(2026, 1, 1), None]),
    "dates": (pa.date32(), [date(1970, 1, 1), date(2026, 1, 1), None]),
    "lists": (pa.list_(pa.int64()), [[], [1], [1, None], [None, 1], None]),
    "structs": (pa.struct({"a": pa.int64()}), [{"a": 1}, {"a": None}, None]),
    "maps": (pa.map_(pa.string(), pa.int64()), [[], [("a", 1)], [("a", None)], None]),
}


@pytest.mark.parametrize(("kind", "values"), VALUES.values(), ids=VALUES)
def test_the_hash_is_of_the_row_alone_and_tells_values_apart(kind: pa.DataType, values: list[Any]) -> None:
    both = [(one, other) for one in values for other in values]
    batch = pa.RecordBatch.from_arrays([pa.array(column, kind) for column in zip(*both, strict=True)], ["a", "b"])
    hashes = row_hashes(batch).to_pylist()
    assert len(set(hashes)) == len(both)
    for at in range(len(both)):
        assert row_hashes(batch.slice(at, 1)).to_pylist() == [hashes[at]]
    assert row_hashes(batch.slice(0, 0)).to_pylist() == []


def test_the_hash_is_of_names_and_types_too() -> None:
    rows = pa.table({"a": pa.array([1, 2], pa.int32()), "b": pa.array([3, 4], pa.int32())})
    cents = pa.array([100], pa.decimal128(10, 0)), pa.array([Decimal("1.00")], pa.decimal128(10, 2))
    for one, other in (
        (rows, rows.rename_columns(["b", "a"])),
        (rows, rows.cast(pa.schema([("a", pa.int64()), ("b", pa.int64())]))),
        (pa.table([cents[0]], ["a"]), pa.table([cents[1]], ["a"])),
    ):
        hashes = [row_hashes(each.to_batches()[0]).to_pylist() for each in (one, other)]
        assert not set(hashes[0]) & set(hashes[1])


def test_the_hash_does_not_depend_on_the_session() -> None:
    text, moment, kind = pa.array(["a"]), pa.array([0], pa.timestamp("us", "UTC")), pa.timestamp("us", "Europe/Berlin")
    usual = pa.RecordBatch.from_arrays([text, moment], ["a", "b"])
    other = pa.RecordBatch.from_arrays([text.cast(pa.large_string()), moment.cast(kind)], ["a", "b"])
    assert row_hashes(usual) == row_hashes(other)


def test_a_text_that_is_no_utf8_has_a_hash_and_changes_none() -> None:
    texts = pa.array([b"\xff", b"a\xff", b"a", None]).view(pa.string())
    hashes = row_hashes(pa.RecordBatch.from_arrays([texts], ["a"])).to_pylist()
    assert len(set(hashes)) == 4
    assert hashes[2:] == row_hashes(pa.RecordBatch.from_arrays([pa.array(["a", None])], ["a"])).to_pylist()


@pytest.mark.parametrize(
    ("rare", "usual"),
    [
        (pa.array([b"\xff", b"a"]).view(pa.string()), pa.array(["", "a"])),
        (pa.array([12_000_000, 1], pa.date32()), pa.array([0, 1], pa.date32())),
    ],
    ids=["no UTF-8", "no year"],
)
def test_a_nested_value_that_python_has_not_has_a_hash_and_changes_none(rare: pa.Array, usual: pa.Array) -> None:
    for wrap in (
        lambda values: pa.StructArray.from_arrays([values], ["v"]),
        lambda values: pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), values),
    ):
        (strange, same), (other, good) = (
            row_hashes(pa.RecordBatch.from_arrays([wrap(values)], ["a"])).to_pylist() for values in (rare, usual)
        )
        assert same == good
        assert strange not in (same, other)


SINK = """[[sinks]]
type = "postgres"
dsn = "postgresql://nowhere"
table = "{}"
"""


@pytest.mark.parametrize(
    ("job", "options", "overwrite", "why"),
    [
        ("", {"jobFile": ""}, False, r'needs .option\("jobFile"'),
        ("", {"checkpointLocation": ""}, False, r'needs .option\("checkpointLocation"'),
        ("", {}, True, "complete"),
        (SINK.format("a") + SINK.format("b"), {}, False, "several sinks"),
        ('[checkpointing]\nmode = "AT_LEAST_ONCE"\n' + SINK.format("a"), {}, False, "at-least-once"),
        ('[checkpointing]\nreplay = "spool"\n' + SINK.format("a"), {}, False, "spool"),
        ('[checkpointing]\nrequire = "exactly-once"\n' + SINK.format("a"), {}, False, "required"),
        (SINK.format("a") + 'transform = "json:loads"\n', {}, False, "transform"),
        ("storage = 'memory:x'\n" + SINK.format("a"), {}, False, "a storage in memory"),
    ],
)
def test_what_it_cannot_do_is_refused(
    tmp_path: Path, job: str, options: dict[str, str], overwrite: bool, why: str
) -> None:
    storage = "" if "memory:" in job else f'storage = "{(tmp_path / "storage").as_uri()}"'
    (tmp_path / "job.toml").write_text(f'job = "j"\n{storage}\n{job}')
    halves = Halves(tmp_path)
    halves.plan(0)
    source = halves.source(**{"jobFile": str(tmp_path / "job.toml")} | options)
    with pytest.raises(ConfigurationError, match=why):
        source.streamWriter(COLUMNS, overwrite)


def test_a_query_without_batches_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(f'job = "j"\nstorage = "{tmp_path.as_uri()}/storage"\n' + SINK.format("a"))
    (tmp_path / "spark" / "offsets").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=r"trigger\(continuous=…\) has no batches"):
        Halves(tmp_path).source(jobFile=str(tmp_path / "job.toml")).streamWriter(COLUMNS, False)


def test_a_process_that_is_used_again_takes_the_job_module_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    digests = []
    for name in ("before", "afterwards"):
        text = f"""
from coordinator import CheckpointCoordinator
from examples.custom_sink import FileSink

job = CheckpointCoordinator("orders", [FileSink({str(tmp_path)!r}, name={name!r})], "file://{tmp_path}/storage")
"""
        (tmp_path / "job_of_a_module.py").write_text(text)
        with _job_of("job_of_a_module:job") as (sink, protocol):
            assert sink.name == name
        digests.append(protocol.job_file_digest)
    assert all(digests)
    assert len({*digests}) == 2
