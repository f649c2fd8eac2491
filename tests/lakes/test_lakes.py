"""What others do to a lake table while a checkpoint of ours is under way: they write, compact, delete and alter."""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import datetime, timezone
from datetime import time as clock
from decimal import Decimal
from pathlib import Path
from textwrap import dedent
from typing import Any

import pyarrow as pa
import pyarrow.dataset as dataset
import pytest
from deltalake.exceptions import DeltaError
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform, TruncateTransform
from pyiceberg.types import StringType

from coordinator import CheckpointConfig, CheckpointCoordinator, CheckpointingMode, Step
from examples.custom_sink import FileSink
from sinks.audit import Part
from sinks.delta import DeltaSink
from sinks.delta.sink import _FEATURES
from sinks.diagnosis import Severity
from sinks.errors import BadValue, CommittedError, ConfigurationError, SchemaMismatch, TransactionEnded
from sinks.iceberg import IcebergSink
from sinks.lake.sink import LakeSink, app_of
from sinks.postgres import PostgresSink
from sinks.testing import SCHEMA, rows
from sinks.testing.conformance import ids
from sinks.testing.table_crashes import At
from sinks.transaction import Checkpoint, CommitOutcome, CommitState, Committable, Fingerprint, TransactionId
from tests.lakes.steps import before_step
from tests.lakes.tables import LAKES, DeltaLake, IcebergLake
from tests.protocol.job import Job, Steps

Lake = Any
JOB, LINEAGE = "job", "0badcafe"


@pytest.fixture(params=LAKES, ids=lambda kind: kind.kind)
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    made = request.param(tmp_path)
    made.create()
    return made


def pre_committed(
    sink: LakeSink, table: pa.Table, checkpoint: int = 0, subtask: int = 0, attempt: int = 0
) -> Committable:
    name = TransactionId(JOB, LINEAGE, checkpoint, sink.name, subtask, 1, 0, 0, attempt)
    sink.check(table.schema)
    transaction = sink.begin_transaction(name.context(table.schema))
    for batch in table.to_batches():
        sink.write(transaction, batch)
    return sink.snapshot_state(transaction).of(sink.name, subtask, Fingerprint(table.num_rows))


def committed(sink: LakeSink, *made: Committable, checkpoint: int = 0, oldest: int = 0) -> list[CommitState]:
    answers = sink.commit_all(Checkpoint(JOB, LINEAGE, checkpoint, oldest), made)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return [one.state for one in answers if isinstance(one, CommitOutcome)]


COMMITTED, LOST, HELD, UNKNOWN = CommitState.COMMITTED, CommitState.LOST, CommitState.HELD, CommitState.UNKNOWN


# ---------------------------------------------------------------------- names of columns
def test_iceberg_takes_no_empty_name(tmp_path: Path) -> None:
    """pyiceberg would fail in every task."""
    made = IcebergLake(tmp_path)
    made.create()
    for columns in ({"id": [1], "": [2]}, {"id": [1], "s": [[{"": 1}]]}):
        with pytest.raises(SchemaMismatch, match="has an empty name, which pyiceberg cannot write"):
            made.sink().check(pa.table(columns).schema)


def test_names_that_differ_in_capitals_alone_are_told(lake: Lake) -> None:
    with pytest.raises(SchemaMismatch, match="column 'ID' differs from another one in capitals alone: rename it"):
        lake.sink().check(SCHEMA.append(pa.field("ID", pa.int64())))


def test_partitions_by_names_with_dots(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 2, 3], ".dot": ["a", "b", "a"], "user.id": ["x", "y", "x"], "place": [1, 1, 1]})
    delta, iceberg = DeltaLake(tmp_path), IcebergLake(tmp_path)
    delta.create(table.schema, partition_by=[".dot", "user.id"])
    iceberg.create(table.schema)
    with iceberg.table().update_spec() as update:
        update.add_field(".dot", IdentityTransform(), "part")
    for made in (delta, iceberg):
        sink = made.sink()
        assert committed(sink, pre_committed(sink, table)) == [COMMITTED]
        assert (
            sorted(made.read().select(table.schema.names).to_pylist(), key=lambda row: row["id"]) == table.to_pylist()
        )


# ---------------------------------------------------------------------- others at the same time
def test_another_writer_commits_during_ours(lake: Lake) -> None:
    """Another writer commits before each step of our commit in turn. Both have their rows, once."""
    sink = lake.sink()
    expected = []
    for number in itertools.count():
        ours, theirs = rows(2 * number, 1), rows(2 * number + 1, 1)
        made = pre_committed(sink, ours, number)
        with before_step(number, lambda: lake.append(theirs)) as stop:  # noqa: B023
            assert committed(sink, made) == [COMMITTED]
        expected.append(2 * number)
        if not stop.step:
            break
        expected.append(2 * number + 1)
    assert lake.ids() == expected


def test_two_drivers_commit_and_abort_at_random(lake: Lake) -> None:
    """Of each transaction both say the same in the end."""
    made = [pre_committed(lake.sink(), rows(10 * n, 2), n) for n in range(12)]

    def commits() -> None:
        for one in made:
            committed(driver, one)

    def aborts() -> None:
        for one in made:
            with suppress(CommittedError):
                other.abort(one.transaction)

    driver, other = lake.sink(), lake.sink()
    threads = [threading.Thread(target=call) for call in (commits, aborts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    states = [committed(lake.sink(), one)[0] for one in made]
    assert {*states} <= {COMMITTED, LOST}
    expected = [id for n, state in enumerate(states) if state is COMMITTED for id in (10 * n, 10 * n + 1)]
    assert lake.ids() == expected
    assert len(lake.files()) == states.count(COMMITTED), "files of aborted ones are gone, and no other"
    assert list(lake.sink().in_doubt(JOB)) == []


def test_another_driver_commits_the_same_after_the_look_at_the_memory(lake: Lake) -> None:
    """It deletes the mark then, which the memory does not make up for yet."""
    sink, other = lake.sink(), lake.sink()
    made = pre_committed(sink, rows(0, 2))
    look = sink._table_and_memory

    def late(app: str) -> object:
        seen = look(app)
        sink.__dict__.pop("_table_and_memory")
        assert committed(other, made) == [COMMITTED]
        return seen

    sink.__dict__["_table_and_memory"] = late
    assert committed(sink, made) == [COMMITTED]
    assert lake.ids() == [0, 1]


def test_a_file_that_somebody_deleted_before_the_commit_is_lost(lake: Lake) -> None:
    """A table that names it could not be read at all."""
    sink = lake.sink()
    made = [pre_committed(sink, rows(10 * n, 2), subtask=n) for n in range(3)]
    os.unlink(next(path for path in lake.files() if path.name == os.path.basename(made[1].proof["files"][0]["path"])))
    assert committed(sink, *made) == [HELD, LOST, HELD]
    assert committed(lake.sink(), *made) == [HELD, LOST, HELD], "for ever"
    assert lake.ids() == []
    again = pre_committed(sink, rows(10, 2), subtask=1, attempt=1)
    assert committed(sink, made[0], again, made[2]) == [COMMITTED] * 3
    assert lake.ids() == [0, 1, 10, 11, 20, 21]


def marks(lake: Lake) -> list[Path]:
    return sorted((root_of(lake) / "_tpc").rglob("tpc.*.json"))


def test_a_mark_that_somebody_deleted_before_the_decision_lets_the_rows_be_written_again(lake: Lake) -> None:
    sink, checkpoint = lake.sink(), Checkpoint(JOB, LINEAGE, 0)
    made = [pre_committed(sink, rows(10 * n, 2), subtask=n) for n in range(2)]
    sink.validate_all(checkpoint, made)
    marks(lake)[0].unlink()
    with pytest.raises(TransactionEnded, match=r"_tpc/.*json is gone"):
        sink.validate_all(checkpoint, made)


def test_a_mark_that_somebody_deleted_is_no_proof(lake: Lake) -> None:
    """An empty file of that name will do in its place."""
    sink = lake.sink()
    made = pre_committed(sink, rows(0, 2))
    [mark] = marks(lake)
    mark.unlink()
    assert committed(sink, made) == [UNKNOWN]
    assert lake.ids() == []
    mark.touch()
    assert committed(sink, Committable(made.transaction)) == [UNKNOWN], "only the record tells its files"
    assert committed(sink, made) == [COMMITTED]
    assert lake.ids() == [0, 1]


def test_old_marks_that_somebody_puts_back_cost_no_rows(lake: Lake) -> None:
    """From a backup, or out of the versions of a bucket: a sweep would abort them, and delete files of the table."""
    sink = lake.sink()
    for n in range(8):
        made, before = pre_committed(sink, rows(10 * n, 1), n), {mark: mark.read_bytes() for mark in marks(lake)}
        if n == 0:
            kept = before
        committed(sink, made, checkpoint=n, oldest=max(0, n - 2))
        sink.purge(Checkpoint(JOB, LINEAGE, n, max(0, n - 2)))
    for mark, text in kept.items():
        mark.write_bytes(text)
    for transaction in sink.in_doubt(JOB):
        sink.abort(transaction)
    sink.purge(Checkpoint(JOB, LINEAGE, 7, 5))
    assert lake.ids() == [10 * n for n in range(8)]
    assert marks(lake) == []


def test_what_else_lies_among_the_marks_is_passed_over(lake: Lake) -> None:
    sink = lake.sink()
    made = pre_committed(sink, rows(0, 2))
    [mark] = marks(lake)
    mark.with_name(f"Copy of {mark.name}").write_text("[]")
    mark.with_name("tpc.txt").write_text("")
    mark.with_name(mark.name.replace("tpc.job-", "tpc.other-")).write_text("[]")
    assert list(sink.in_doubt(JOB)) == [made.transaction]
    assert committed(sink, made) == [COMMITTED]
    assert lake.ids() == [0, 1]


def test_a_mark_of_somebody_else_makes_no_driver_delete_other_files(lake: Lake, tmp_path: Path) -> None:
    sink = lake.sink()
    made = pre_committed(sink, rows(0, 2))
    [mark] = marks(lake)
    others = [tmp_path / name for name in ("victim", "part-0.zstd.parquet")]
    for victim in others:
        victim.write_text("")
    paths = [*map(str, others), *(f"file://{victim}" for victim in others), f"../{others[0].name}", 7]
    mark.write_text(json.dumps([*paths, *json.loads(mark.read_text())]))
    sink.abort(made.transaction)
    assert [victim.exists() for victim in others] == [True, True]
    assert marks(lake) == []
    assert not sink.owns("another", made.transaction)
    assert sink.owns(JOB, made.transaction)


def test_compaction_neither_doubles_nor_forgets(lake: Lake) -> None:
    sink = lake.sink()
    made = [pre_committed(sink, rows(10 * n, 2), n) for n in range(3)]
    for one in made:
        assert committed(sink, one) == [COMMITTED]
    lake.compact()
    for one in made:
        assert committed(lake.sink(), one) == [COMMITTED]
        with pytest.raises(CommittedError):
            lake.sink().abort(one.transaction)
    assert lake.ids() == [0, 1, 10, 11, 20, 21]
    [holding] = lake.sink().audit(JOB, [Part(LINEAGE, 0, made[:1])]).holdings
    assert holding.rows is None
    assert "compacted" in holding.remarks[0]


@pytest.mark.parametrize("kind", LAKES)
def test_a_job_in_a_thread_when_the_main_thread_has_ended(kind: Any, tmp_path: Path) -> None:
    """The pool of threads that pyiceberg has takes nothing more then."""
    program = f"""
        import sys, threading
        from pathlib import Path
        from sinks.testing import rows
        from tests.lakes.tables import {kind.__name__}
        from tests.lakes.test_lakes import committed, pre_committed

        def job():
            threading.main_thread().join()
            for checkpoint in range(1, 3):
                committed(sink, pre_committed(sink, rows(checkpoint, 1), checkpoint), checkpoint=checkpoint)
            print(lake.table().version() if lake.kind == "delta" else len(lake.table().metadata.snapshots))

        lake = {kind.__name__}(Path(sys.argv[1]))
        lake.create()
        sink = lake.sink()
        committed(sink, pre_committed(sink, rows(0, 1)))
        threading.Thread(target=job).start()
        """
    command = [sys.executable, "-c", dedent(program), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=Path(__file__).parents[2])
    assert done.stdout == "3\n", done.stderr


# ---------------------------------------------------------------------- the table is altered
def test_other_partitions_before_the_decision_let_the_rows_be_written_again(lake: Lake) -> None:
    lake.append(rows(500, 1))
    sink = lake.sink()
    made = pre_committed(sink, rows(0, 2))
    lake.repartition()
    with pytest.raises(TransactionEnded):
        sink.validate_all(Checkpoint(JOB, LINEAGE, 0), [made])
    sink.abort(made.transaction)
    again = pre_committed(sink, rows(0, 2), attempt=1)
    sink.validate_all(Checkpoint(JOB, LINEAGE, 0), [again])
    assert committed(sink, again) == [COMMITTED]
    assert lake.ids() == [0, 1, 500]


def test_other_partitions_after_the_decision_are_a_loss(lake: Lake) -> None:
    """Files would be taken for those of other partitions, and rows not be found."""
    lake.append(rows(500, 1))
    sink = lake.sink()
    made = pre_committed(sink, rows(0, 2))
    lake.repartition()
    assert committed(lake.sink(), made) == [LOST]
    assert lake.ids() == [500]


def test_partitions_that_double_rows_after_the_decision_are_to_be_undone(tmp_path: Path) -> None:
    """Else a replay would write for them."""
    lake = IcebergLake(tmp_path)
    lake.create()
    sink = lake.sink()
    made = pre_committed(sink, rows(0, 2))
    with lake.table().update_spec() as update:
        update.add_field("amount", IdentityTransform(), "by_amount")
    [outcome] = lake.sink().commit_all(Checkpoint(JOB, LINEAGE, 0), [made])
    assert isinstance(outcome, CommitOutcome)
    assert outcome.state is UNKNOWN
    assert "was altered, undo that: it is partitioned by 'by_amount', identity of a double" in outcome.reason
    with lake.table().update_spec() as update:
        update.remove_field("by_amount")
    assert committed(lake.sink(), made) == [COMMITTED]
    assert lake.ids() == [0, 1]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            DeltaLake,
            {
                "DeltaTable.update_incremental": LOST,  # the sink has yet to look at the table
                "DeltaTable.create_write_transaction": LOST,  # the log refuses the commit, so the sink looks again
                "ObjectFiles.delete": COMMITTED,
            },
        ),
        (
            IcebergLake,
            {
                "TableFiles.names": LOST,  # the sink has yet to look at the table
                "SqlCatalog.commit_table": COMMITTED,  # a snapshot may add files of earlier partitions
                "PyArrowFileIO.new_output": LOST,  # the catalog has read the table, so the sink looks again
                "TableFiles.delete": COMMITTED,
            },
        ),
    ],
    ids=["delta", "iceberg"],
)
def test_other_partitions_during_the_commit(kind: Any, expected: dict[str, CommitState], tmp_path: Path) -> None:
    """The partitions change before each step of a commit in turn.

    Readers find the rows by their new partition, or the sink reports them as lost and nobody finds them. `expected`
    has the steps that make a difference, each with the answer if the partitions change before its last time.
    """
    states = {}
    for number in itertools.count():
        lake = kind(tmp_path / str(number))
        lake.create()
        lake.append(rows(500, 1))
        sink = lake.sink()
        made = pre_committed(sink, rows(0, 2))
        with before_step(number, lake.repartition) as stop:
            [states[stop.step]] = committed(sink, made)
        found = [row["id"] for row in lake.rows() if row["name"] in lake.names_found("user-0")]
        assert found == ([0] if states[stop.step] is COMMITTED else [])
        if not stop.step:
            break
    assert states == states | expected
    assert {*states.values()} == {COMMITTED, LOST}


@pytest.mark.parametrize("step", [Step.TRIGGERED, Step.PRE_COMMITTED, Step.COMPLETE])
def test_a_column_that_is_dropped_while_the_query_runs_stops_it(lake: Lake, tmp_path: Path, step: Step) -> None:
    """Its values would be missing in each row that is written from then on."""
    job = Job(tmp_path)
    dropping = At(step, lambda: lake.drop_column("amount"))
    with pytest.raises(SchemaMismatch, match="'amount' is not in the table"):
        job.run(sink=lake.sink(), listeners=[dropping])
    with pytest.raises(SchemaMismatch, match="'amount' is not in the table"):
        job.run(sink=lake.sink())
    assert sorted(lake.read()["id"].to_pylist()) == sorted(ids(job.input[:1]))


@pytest.mark.parametrize("step", [Step.TRIGGERED, Step.PRE_COMMITTED, Step.COMPLETE])
def test_other_partitions_while_the_query_runs_cost_no_row(lake: Lake, tmp_path: Path, step: Step) -> None:
    job, steps = Job(tmp_path), Steps()
    job.run(sink=lake.sink(), listeners=[steps, At(step, lake.repartition)])
    assert lake.ids() == sorted(ids(job.input))
    assert [at for at, _ in steps.seen].count(Step.REPLAYING) == (step is Step.COMPLETE)


def test_another_table_of_that_name_is_told(lake: Lake, tmp_path: Path) -> None:
    sink = lake.sink()
    made = pre_committed(sink, rows(0, 2))
    if lake.kind == "delta":
        os.rename(lake.uri, f"{lake.uri}-before")
    else:
        lake.table().catalog.drop_table(lake.name)
    lake.create()
    with pytest.raises(TransactionEnded):  # before the decision its rows are written again
        sink.validate_all(Checkpoint(JOB, LINEAGE, 0), [made])
    [outcome] = lake.sink().commit_all(Checkpoint(JOB, LINEAGE, 0), [made])
    assert outcome.state is UNKNOWN
    assert "were written for" in outcome.reason
    assert lake.ids() == []


def test_columns_are_added_for_rows_that_have_them(lake: Lake) -> None:
    wide = rows(0, 2).append_column("note", pa.array(["a", None]))
    with pytest.raises(SchemaMismatch, match="'note' is not in the table"):
        lake.sink().check(wide.schema)
    sink = lake.sink(schema_evolution="add")
    sink.check(wide.schema)
    sink.evolve(wide.schema)
    assert committed(sink, pre_committed(sink, wide)) == [COMMITTED]
    assert committed(sink, pre_committed(sink, rows(5, 1), 1)) == [COMMITTED]
    assert sorted(lake.read()["note"].to_pylist(), key=str) == [None, None, "a"]


def test_columns_that_do_not_fit_are_all_named(lake: Lake) -> None:
    other = pa.schema([("id", pa.string()), ("NAME", pa.string()), ("amount", pa.float64()), ("more", pa.int8())])
    with pytest.raises(SchemaMismatch) as caught:
        lake.sink().check(other)
    for part in ("'id' is string, and bigint", "'NAME' is 'name'", "'more' is not in the table"):
        assert part in str(caught.value)


def test_narrower_types_go_into_wider_columns(lake: Lake) -> None:
    narrow = pa.table({"id": pa.array([1, None], pa.int16()), "amount": pa.array([0.5, None], pa.float32())})
    sink = lake.sink()
    assert committed(sink, pre_committed(sink, narrow)) == [COMMITTED]
    assert lake.rows() == [{"id": 1, "name": None, "amount": 0.5}, {"id": None, "name": None, "amount": None}]


# ---------------------------------------------------------------------- the memory
def test_the_memory_forgets_what_nobody_asks_for_any_more(lake: Lake) -> None:
    sink = lake.sink()
    for n in range(20):
        made = pre_committed(sink, rows(10 * n, 1), n)
        committed(sink, made, checkpoint=n, oldest=max(0, n - 2))
        sink.abort(pre_committed(sink, rows(0, 1), n, attempt=1).transaction)
        sink.purge(Checkpoint(JOB, LINEAGE, n, max(0, n - 2)))
    memory = sink._remembered(app_of(JOB, sink.name))
    assert sorted(memory.committed) == [f"{LINEAGE}.{n}" for n in (17, 18, 19)]
    assert len(memory.aborted) <= 4
    assert lake.sink().committed_checkpoints(JOB) == {LINEAGE: 19}
    left = [path.name for path in root_of(lake).joinpath("_tpc").rglob("*.json")]
    assert len(left) == (1 if lake.kind == "delta" else 0), left


def root_of(lake: Lake) -> Path:
    return Path(lake.uri if lake.kind == "delta" else lake.table().location().removeprefix("file://"))


def test_what_a_driver_that_died_has_left_is_purged(lake: Lake) -> None:
    """A mark of what is committed would else be aborted once the memory has forgotten it."""
    sink = lake.sink()
    made = pre_committed(sink, rows(0, 2))
    [mark] = (root_of(lake) / "_tpc").rglob("tpc.*.json")
    text = mark.read_bytes()
    committed(sink, made)
    mark.write_bytes(text)
    for n in range(1, 5):
        committed(sink, pre_committed(sink, rows(10 * n, 1), n), checkpoint=n, oldest=n)
    assert list(sink.in_doubt(JOB)) == []
    sink.purge(Checkpoint(JOB, LINEAGE, 4, 4))
    assert not mark.exists()
    assert lake.ids() == [0, 1, 10, 20, 30, 40]


# ---------------------------------------------------------------------- rows
def test_null_in_a_required_column_is_named(tmp_path: Path) -> None:
    for kind in LAKES:
        lake = kind(tmp_path / kind.kind)
        lake.create(pa.schema([SCHEMA.field(0).with_nullable(False), *list(SCHEMA)[1:]]))
        with pytest.raises(BadValue, match="row 2 of a batch, column 'id': NULL, and it is NOT NULL in the table"):
            pre_committed(lake.sink(), pa.table([[1, None], ["a", "b"], [0.5, 0.5]], schema=SCHEMA))


@pytest.mark.parametrize("nested", [False, True])
def test_a_text_that_is_no_utf8_is_a_bad_row_and_the_others_are_written(tmp_path: Path, nested: bool) -> None:
    """Parquet has no bounds for it, and a partition of the table no name."""
    bytes = pa.array([b"a", b"\xff", b"z", None])
    texts = pa.Array.from_buffers(pa.string(), 4, bytes.buffers())
    column = pa.StructArray.from_arrays([texts], ["text"]) if nested else texts
    table = pa.table({"id": pa.array([1, 2, 3, 4]), "name": column})
    for kind in LAKES:
        lake = kind(tmp_path / kind.kind)
        lake.create(table.schema)
        with pytest.raises(BadValue, match="row 2 of a batch, column 'name': the text is not UTF-8"):
            pre_committed(lake.sink(), table)
        sink = lake.sink()
        sink.check(table.schema)
        name = TransactionId(JOB, LINEAGE, 0, sink.name, 0, 1, 0, 0, 0)
        transaction = sink.begin_transaction(name.context(table.schema))
        assert [refusal.row for refusal in sink.write_good_rows(transaction, table.to_batches()[0], 10)] == [1]
        assert committed(sink, sink.snapshot_state(transaction)) == [COMMITTED]
        assert sorted(lake.read()["id"].to_pylist()) == [1, 3, 4]


def test_null_in_place_of_a_list_or_map_of_structs_stays_null(tmp_path: Path) -> None:
    """pyiceberg makes it an empty one."""
    struct = pa.struct([("a", pa.int32())])
    schema = pa.schema([("id", pa.int64()), ("lists", pa.list_(struct)), ("maps", pa.map_(pa.string(), struct))])
    table = pa.table([range(3), [[{"a": 1}, None], None, []], [[("k", {"a": 1})], None, []]], schema=schema)
    for kind in LAKES:
        lake, sink = kind(tmp_path / kind.kind), kind(tmp_path / kind.kind).sink(create_table=True)
        made = [pre_committed(sink, table.slice(0, 1)), pre_committed(sink, table.slice(1), subtask=1)]
        assert committed(sink, *made) == [COMMITTED, COMMITTED]
        written = dataset.dataset([str(file) for file in lake.files()]).to_table().sort_by("id")
        assert written.select(schema.names).to_pylist() == table.to_pylist()


@pytest.mark.parametrize("days", [-800_000, 3_000_000, 12_000_000])
def test_a_day_of_which_there_can_be_no_partition_is_a_bad_row(tmp_path: Path, days: int) -> None:
    """Delta's log took no commit with it any more, when it was decided already; pyiceberg failed in the task."""
    table = pa.table({"id": pa.array([1], pa.int64()), "day": pa.array([days], pa.date32())})
    delta, iceberg = DeltaLake(tmp_path), IcebergLake(tmp_path)
    delta.create(table.schema, partition_by=["day"])
    iceberg.create(table.schema)
    with iceberg.table().update_spec() as update:
        update.add_field("day", DayTransform(), "part")
    for lake in (delta, iceberg):
        with pytest.raises(BadValue, match=r"row 1 of a batch, column 'day': .* outside the years 0001 to 9999"):
            pre_committed(lake.sink(), table)


def test_times_have_a_table_where_there_are_any(tmp_path: Path) -> None:
    """Spark hands them over in nanoseconds."""
    times = pa.table({"t": pa.array([86_399_999_999_000, None], pa.time64("ns"))})
    lake = IcebergLake(tmp_path)
    sink = lake.sink(create_table=True)
    assert committed(sink, pre_committed(sink, times)) == [COMMITTED]
    assert lake.read()["t"].to_pylist() == [clock(23, 59, 59, 999_999), None]
    with pytest.raises(ConfigurationError, match="cannot create"):
        DeltaLake(tmp_path).sink(create_table=True).check(times.schema)


def test_no_table_is_made_of_the_inner_bytes_of_a_variant(tmp_path: Path) -> None:
    inner = pa.struct([("value", pa.binary()), pa.field("metadata", pa.binary(), metadata={"variant": "true"})])
    schema = pa.schema([("id", pa.int64()), ("deep", pa.list_(pa.struct([("v", inner)])))])
    for kind in LAKES:
        with pytest.raises(ConfigurationError, match=r"column 'deep': it holds a variant: use to_json\(\)"):
            kind(tmp_path).sink(create_table=True).check(schema)


def test_no_column_is_added_for_the_inner_bytes_of_a_variant(lake: Lake) -> None:
    inner = pa.struct([("value", pa.binary()), pa.field("metadata", pa.binary(), metadata={"variant": "true"})])
    schema, sink = pa.schema([*SCHEMA, ("deep", inner)]), lake.sink(schema_evolution="add")
    with pytest.raises(SchemaMismatch, match=r"cannot write to .*\n  - column 'deep': it holds a variant: use to_json"):
        sink.check(schema)
    assert sink.schema_diff(schema).unfit == ("column 'deep': it holds a variant: use to_json() in Spark",)


@pytest.mark.parametrize(("kind", "told"), [(pa.null(), "void"), (pa.duration("us"), "interval")])
def test_types_that_no_lake_has(lake: Lake, tmp_path: Path, kind: pa.DataType, told: str) -> None:
    schema, told = pa.schema([*SCHEMA, ("n", kind)]), rf"column 'n': files have no column of type {told}"
    with pytest.raises(SchemaMismatch, match=told):
        lake.sink(schema_evolution="add").check(schema)
    with pytest.raises(ConfigurationError, match=told):
        type(lake)(tmp_path / "new").sink(create_table=True).check(schema)


def test_at_least_once_is_refused_before_anything_is_written(lake: Lake, tmp_path: Path) -> None:
    """Also by a sink of dead letters, which may have no row for months."""
    config = CheckpointConfig(mode=CheckpointingMode.AT_LEAST_ONCE)
    letters = PostgresSink("postgresql://nowhere/db", "orders", dead_letters=lake.sink())
    for sinks in ([FileSink(tmp_path), lake.sink()], [letters]):
        with pytest.raises(ValueError, match=f"'{lake.sink().name}' cannot be written in at-least-once mode"):
            CheckpointCoordinator("job", sinks, "memory:none", config)


def test_many_are_aborted_by_one_commit_of_the_table(lake: Lake) -> None:
    sink = lake.sink()
    done, aborted, *made = (pre_committed(sink, rows(10 * n, 1), subtask=n) for n in range(8))
    assert committed(sink, done) == [COMMITTED]
    sink.abort(aborted.transaction)
    never = {"transaction": made[0].transaction["transaction"].replace(".2.g", ".99.g")}
    before = lake.versions()
    answers = sink.abort_all([one.transaction for one in (done, aborted, *made)] + [never])
    assert [type(answer) for answer in answers] == [CommittedError, *[type(None)] * 8]
    assert lake.versions() == before + 1
    assert list(sink.in_doubt(JOB)) == []
    assert committed(sink, *made) == [LOST] * 6
    assert lake.ids() == [0]
    assert len(lake.files()) == 1


def test_a_stray_file_beside_the_memories_keeps_none_from_being_purged(tmp_path: Path) -> None:
    lake = DeltaLake(tmp_path)
    lake.create()
    sink = lake.sink()
    folder = f"_tpc/{app_of(JOB, sink.name)}"
    sink._files().put(f"{folder}/memory-1 (copy).json", b"{}")
    for n in range(2):
        committed(sink, pre_committed(sink, rows(n, 1), n), checkpoint=n)
        sink.purge(Checkpoint(JOB, LINEAGE, n, 0))
    assert len([*sink._files().names(folder)]) == 2, "the copy, and the newest"


def test_large_transactions_become_several_files(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinks.lake.buffer._ENOUGH", 10_000)
    sink = lake.sink()
    made = pre_committed(sink, pa.concat_tables([rows(1000 * n, 1000) for n in range(3)]))
    assert len(made.proof["files"]) == 3
    assert committed(sink, made) == [COMMITTED]
    assert lake.ids() == list(range(3000))


def test_audit_tells_rows_and_strangers(lake: Lake) -> None:
    sink = lake.sink()
    one, other = (pre_committed(sink, rows(10 * n, 2 + n), subtask=n) for n in range(2))
    committed(sink, one, other)
    whole, part = sink.audit(JOB, [Part(LINEAGE, 0, [one, other]), Part(LINEAGE, 0, [one])]).holdings
    assert (whole.rows, whole.unexpected) == (5, ())
    assert part.rows == 2
    assert part.unexpected == (f"{LINEAGE}.0.1.g1r0t0a0",)


def test_an_audit_misses_rows_whose_file_somebody_has_deleted(lake: Lake) -> None:
    sink = lake.sink()
    parts = []
    for n in range(2):
        made = pre_committed(sink, rows(10 * n, 2), n)
        committed(sink, made, checkpoint=n)
        parts.append(Part(LINEAGE, n, [made]))
    [file] = [path for path in lake.files() if lake.is_of(path, made.transaction["transaction"])]
    file.unlink()
    assert [one.rows for one in sink.audit(JOB, parts).holdings] == [2, 0]


def amid(sink: LakeSink, call: Callable[[], object]) -> None:
    """Let somebody do this once, when the sink has decided what it is about to commit."""
    append = sink._append

    def late(*arguments: Any) -> None:
        sink.__dict__.pop("_append")
        call()
        append(*arguments)

    sink.__dict__["_append"] = late


# ---------------------------------------------------------------------- Delta
def refused(lake: DeltaLake, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        lake.sink().check(SCHEMA)


@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (lambda table: table.alter.add_constraint({"positive": "id >= 0"}), "CHECK constraint, 'positive'"),
        (
            lambda table: table.alter.set_table_properties(
                {"delta.setTransactionRetentionDuration": "interval 1 days"}, raise_if_not_exists=False
            ),
            "lets its log forget",
        ),
    ],
)
def test_delta_tables_whose_promises_an_append_would_break_are_refused(
    tmp_path: Path, alter: Callable[[Any], None], words: str
) -> None:
    lake = DeltaLake(tmp_path)
    lake.create()
    alter(lake.table())
    refused(lake, words)


def in_log(lake: DeltaLake, change: Callable[[dict[str, Any]], None]) -> None:
    """Alter the first entry of the log, as another engine would have written it."""
    first = Path(lake.uri, "_delta_log", f"{0:020d}.json")
    entries = [json.loads(line) for line in first.read_text().splitlines()]
    for entry in entries:
        change(entry)
    first.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("delta.generationExpression", "id + 1"),
        ("delta.identity.start", 1),
        ("delta.invariants", '{"expression": {}}'),
        ("__CHAR_VARCHAR_TYPE_STRING", "varchar(3)"),
    ],
)
def test_delta_columns_whose_rules_writers_keep_are_refused(tmp_path: Path, key: str, value: object) -> None:
    def change(entry: dict[str, Any]) -> None:
        if "metaData" in entry:
            schema = json.loads(entry["metaData"]["schemaString"])
            schema["fields"][0]["metadata"] = {key: value}
            entry["metaData"]["schemaString"] = json.dumps(schema)

    lake = DeltaLake(tmp_path)
    lake.create()
    in_log(lake, change)
    mend = "TYPE STRING" if "VARCHAR" in key else "use a table without"
    refused(lake, f"column 'id' has {key}, which writers keep and this sink cannot: .*{mend}")


def test_delta_rules_of_fields_within_a_struct_or_list_are_refused(tmp_path: Path) -> None:
    """Files would bypass them just as those of whole columns."""
    ruled = {"name": "a", "type": "integer", "nullable": True, "metadata": {"delta.invariants": "{}"}}
    struct = {"type": "struct", "fields": [ruled]}
    kinds = {
        "s": struct,
        "l": {"type": "array", "elementType": struct, "containsNull": True},
        "m": {"type": "map", "keyType": "string", "valueType": struct, "valueContainsNull": True},
    }

    def change(entry: dict[str, Any]) -> None:
        if "metaData" in entry:
            schema = json.loads(entry["metaData"]["schemaString"])
            schema["fields"] += [{"name": n, "type": k, "nullable": True, "metadata": {}} for n, k in kinds.items()]
            entry["metaData"]["schemaString"] = json.dumps(schema)

    lake = DeltaLake(tmp_path)
    lake.create()
    in_log(lake, change)
    refused(lake, r"(?s)column 's\.a' has delta.invariants.*column 'l\[\]\.a' has.*column 'm\{\}\.a' has")


def test_delta_fields_with_much_metadata_within_a_struct_take_checkpoints(tmp_path: Path) -> None:
    """deltalake gives this metadata in another order at each look. The table counted as altered then, so that the rows
    of each checkpoint were written again without end."""
    inner = pa.field("a", pa.int32(), metadata={"comment": "x", "owner": "y", "tag": "z"})
    struct = pa.struct([inner])
    schema = pa.schema([("id", pa.int64()), ("s", struct), ("l", pa.list_(struct)), ("m", pa.map_("string", struct))])
    lake = DeltaLake(tmp_path)
    lake.create(schema)
    assert lake.table().schema().to_json().count('"owner"') == 3, "the table has it"
    assert len({lake.sink()._require_table().layout for _ in range(10)}) == 1
    for n in range(4):
        one = {"id": n, "s": {"a": n}, "l": [{"a": n}], "m": [("k", {"a": n})]}
        table = pa.Table.from_pylist([one], schema)
        made = pre_committed(lake.sink(), table, n)
        lake.sink().validate_all(Checkpoint(JOB, LINEAGE, n), [made])
        assert committed(lake.sink(), made, checkpoint=n) == [COMMITTED]
    found = sorted(lake.read().to_pylist(), key=lambda row: row["id"])
    assert [(row["id"], row["s"], row["l"]) for row in found] == [(n, {"a": n}, [{"a": n}]) for n in range(4)]


def test_delta_rows_that_the_version_before_has_written_fit_the_table(tmp_path: Path) -> None:
    """0.2.1 named the layout of a table without metadata by this hash. Another one would have them written again."""
    struct = pa.struct([pa.field("a", pa.int32(), False), ("l", pa.list_(pa.string()))])
    schema = pa.schema(
        [pa.field("id", pa.int64(), False), ("s", struct), ("m", pa.map_("string", pa.decimal128(9, 2)))]
    )
    lake = DeltaLake(tmp_path)
    lake.create(schema, partition_by=["id"])
    sink = lake.sink()
    assert sink._require_table().layout == "db9e8cce24425696"


def test_delta_column_mapping_and_unknown_features_are_refused(tmp_path: Path) -> None:
    def change(entry: dict[str, Any]) -> None:
        if "metaData" in entry:
            entry["metaData"]["configuration"] = {"delta.columnMapping.mode": "name"}
            schema = json.loads(entry["metaData"]["schemaString"])
            for n, field in enumerate(schema["fields"]):
                mapped = {"delta.columnMapping.id": n, "delta.columnMapping.physicalName": f"col-{n}"}
                field["metadata"] = mapped
            entry["metaData"]["schemaString"] = json.dumps(schema)
        if "protocol" in entry:
            features = {"readerFeatures": ["columnMapping"], "writerFeatures": ["columnMapping", "rowTracking"]}
            entry["protocol"] = {"minReaderVersion": 3, "minWriterVersion": 7, **features}

    lake = DeltaLake(tmp_path)
    lake.create()
    in_log(lake, change)
    refused(lake, "(?s)columns are mapped.*cannot write: rowTracking")


@pytest.mark.parametrize("version", [2, 3, 4, 5, 6, *sorted(_FEATURES), "identityColumns", "vacuumProtocolCheck"])
def test_delta_tables_that_deltalake_cannot_write_are_refused_before_the_first_row(
    tmp_path: Path, version: int | str
) -> None:
    """What comes out at the commit comes too late."""

    def change(entry: dict[str, Any]) -> None:
        if "protocol" in entry and isinstance(version, int):
            entry["protocol"] = {"minReaderVersion": 2 if version > 4 else 1, "minWriterVersion": version}
        elif "protocol" in entry:
            for_readers = {"columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}
            features = {"readerFeatures": [version] if version in for_readers else [], "writerFeatures": [version]}
            entry["protocol"] = {"minReaderVersion": 3, "minWriterVersion": 7, **features}

    lake = DeltaLake(tmp_path)
    lake.create()
    in_log(lake, change)
    if version in (6, "identityColumns", "vacuumProtocolCheck"):
        refused(lake, "features that deltalake cannot write: (identityColumns|vacuumProtocolCheck)")
    else:
        sink = lake.sink()
        assert committed(sink, pre_committed(sink, rows(0, 2))) == [COMMITTED]


def test_delta_partitions_by_text_with_anything_in_it(tmp_path: Path) -> None:
    lake = DeltaLake(tmp_path)
    lake.create(partition_by=["name"])
    names = ["a/b=c", "ü 日本", "%20", None, "x' OR '1", "__HIVE_DEFAULT_PARTITION__x"]
    table = pa.table([list(range(6)), names, [0.5] * 6], schema=SCHEMA)
    sink = lake.sink()
    assert committed(sink, pre_committed(sink, table)) == [COMMITTED]
    assert sorted(lake.rows(), key=lambda row: row["id"]) == table.to_pylist()
    with pytest.raises(BadValue, match="empty text in the partition column 'name'"):
        pre_committed(sink, pa.table([[1], [""], [0.5]], schema=SCHEMA), 1)


def test_delta_partition_columns_of_any_name(tmp_path: Path) -> None:
    lake = DeltaLake(tmp_path)
    table = pa.table({"id": [1, 2, 3], "place": ["a", "b", "a"], "place_list": ["c", "c", "d"]})
    lake.create(table.schema, partition_by=["place", "place_list"])
    sink = lake.sink()
    assert committed(sink, pre_committed(sink, table)) == [COMMITTED]
    assert lake.read().sort_by("id").select(table.column_names).to_pylist() == table.to_pylist()


@pytest.mark.parametrize(
    ("rare", "bounded"),
    [
        (pa.array([1.5, 2.5]), True),
        (pa.array([1.5, float("nan")]), False),
        (pa.array([1.5, float("inf")], pa.float32()), False),
        (pa.array([None, None], pa.int32()), True),
        (pa.array([b"a", b"\xff"]), True),
        (pa.array([Decimal("0.10"), Decimal("1e20")], pa.decimal128(38, 2)), False),
        (pa.array(["a", chr(0x10FFFF) * 40]), False),
        (pa.array(["a", chr(0x10FFFF) * 4]), True),  # as an escape in JSON, deltalake reads it as U+FFFFF
        (pa.array([datetime(2020, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999_999)], pa.timestamp("us")), False),
        (pa.array([{"a": 1}, None]), True),
        (pa.array([0, 3_000_000], pa.date32()), False),
        (pa.array([-800_000, 0], pa.date32()), False),
        (pa.array([-800_000 * 86_400_000_000, 0], pa.timestamp("us", "UTC")), False),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_delta_readers_skip_files_by_bounds_and_miss_no_row(tmp_path: Path, rare: pa.Array, bounded: bool) -> None:
    """deltalake's own take a bound that a file lacks, and has for other columns, for one that no row meets."""
    from deltalake import QueryBuilder

    lake = DeltaLake(tmp_path)
    columns = {
        "id": pa.array([1, 2], pa.int64()),
        "f": rare,
        "t": pa.array([1_700_000_000_000_001, 1_700_000_000_000_999], pa.timestamp("us", "UTC")),
        "s": pa.array(["a" * 40, "b" * 40]),
        "d": pa.array([-1, 20_000], pa.date32()),
        "n": pa.array([Decimal("-1.10"), Decimal("12345678901.25")], pa.decimal128(20, 2)),
        "b": pa.array([None, True]),
    }
    table = pa.table(columns)
    lake.create(table.schema)
    sink = lake.sink()
    made = pre_committed(sink, table)
    assert committed(sink, made) == [COMMITTED]
    assert ("maxValues" in json.loads(made.proof["files"][0]["stats"])) is bounded
    for where in (
        "t = '2023-11-14T22:13:20.000999Z'",
        "s > 'bbb'",
        "d < '1970-01-01'",
        "id = 2",
        "t < '2023-11-14T22:13:20.000002Z'",
        "n > 12345678901.24",
        "b",
    ):
        query = QueryBuilder().register("lake", lake.table()).execute(f"SELECT id FROM lake WHERE {where}")
        assert pa.table(query.read_all()).num_rows >= 1, where
    for column, value in columns.items():
        for each in () if pa.types.is_struct(value.type) else value.drop_null():
            rows_of = lake.table().to_pyarrow_dataset().to_table(filter=dataset.field(column) >= each)
            assert rows_of.num_rows >= 1 or str(each) == "nan", column


@pytest.mark.parametrize(
    ("name", "value"), [("dataSkippingNumIndexedCols", "-1"), ("dataSkippingStatsColumns", "c0,c40")]
)
def test_delta_readers_of_a_wide_table_that_says_which_columns_have_bounds(
    tmp_path: Path, name: str, value: str
) -> None:
    lake = DeltaLake(tmp_path)
    table = pa.table({f"c{n}": pa.array([n, n + 1], pa.int64()) for n in range(41)})
    lake.create(table.schema, configuration={f"delta.{name}": value})
    sink = lake.sink()
    assert committed(sink, pre_committed(sink, table)) == [COMMITTED]
    for column in ("c0", "c31", "c32", "c40"):
        assert lake.table().to_pyarrow_table(filters=[(column, "=", int(column[1:]))]).num_rows == 1


@pytest.mark.parametrize("zeros", [(-0.0, 0.0), (0.0, -0.0), (0.0, 0.0), (-0.0, -0.0)])
@pytest.mark.parametrize("other", [0.0, 1.0, -1.0])
def test_delta_readers_to_whom_a_zero_is_below_another_miss_none(
    tmp_path: Path, zeros: tuple[float, float], other: float
) -> None:
    from deltalake import QueryBuilder

    lake = DeltaLake(tmp_path)
    table = pa.table({"f": [*zeros, other]})
    lake.create(table.schema)
    sink = lake.sink()
    assert committed(sink, pre_committed(sink, table)) == [COMMITTED]
    for zero in map(str, zeros):
        query = QueryBuilder().register("lake", lake.table()).execute(f"SELECT f FROM lake WHERE f = {zero}")
        found = pa.table(query.read_all())["f"].to_pylist()
        assert zero in map(str, found), found


@pytest.mark.parametrize("where", ["f > 5", "s['f'] > 5"])
def test_delta_readers_to_whom_nan_is_above_all_numbers_find_it(tmp_path: Path, where: str) -> None:
    from deltalake import QueryBuilder

    lake = DeltaLake(tmp_path)
    table = pa.table({"f": [1.5, float("nan")], "s": [{"f": 1.5}, {"f": float("nan")}]})
    lake.create(table.schema)
    sink = lake.sink()
    assert committed(sink, pre_committed(sink, table)) == [COMMITTED]
    query = QueryBuilder().register("lake", lake.table()).execute(f"SELECT f FROM lake WHERE {where}")
    assert str(pa.table(query.read_all())["f"].to_pylist()) == "[nan]"


def test_delta_table_that_has_nothing_but_partition_columns_is_refused(tmp_path: Path) -> None:
    lake = DeltaLake(tmp_path)
    lake.create(partition_by=["id", "name"])
    lake.sink().check(SCHEMA)
    schema = pa.schema([("id", pa.int64())])
    with pytest.raises(ConfigurationError, match="readers find no rows"):
        DeltaLake(tmp_path / "all").sink(create_table=True, partition_by=["id"]).check(schema)


def test_delta_takes_a_scheme_for_no_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in dbfs:/mnt/rows."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="Unknown scheme"):
        DeltaSink("nosuch:/mnt/rows", create_table=True).check(SCHEMA)


@pytest.mark.parametrize("name", ["a#1", "a?1", "a b", "ä%1"])
def test_delta_folder_of_any_name(tmp_path: Path, name: str) -> None:
    sink = DeltaLake(tmp_path / name).sink(create_table=True)
    assert committed(sink, pre_committed(sink, rows(0, 2))) == [COMMITTED]
    assert DeltaLake(tmp_path / name).ids() == [0, 1]
    assert [folder.name for folder in tmp_path.iterdir()] == [name]


def test_delta_memory_that_is_gone_stops_it(tmp_path: Path) -> None:
    """Else rows would be doubled."""
    lake = DeltaLake(tmp_path)
    lake.create()
    made = pre_committed(lake.sink(), rows(0, 2))
    committed(lake.sink(), made)
    for path in Path(lake.uri, "_tpc").rglob("memory-*"):
        path.unlink()
    with pytest.raises(ConfigurationError, match="restore the folder _tpc"):
        lake.sink().committed_checkpoints(JOB)
    with pytest.raises(ConfigurationError, match="restore the folder _tpc"):
        lake.sink().commit_all(Checkpoint(JOB, LINEAGE, 0), [made])
    assert lake.ids() == [0, 1]


def test_delta_log_that_was_told_to_forget_a_commit_stops_it(tmp_path: Path) -> None:
    """The driver dies between the commit and the removal of its mark. Before the next start the table is compacted."""
    lake = DeltaLake(tmp_path)
    lake.create()
    made = pre_committed(lake.sink(), rows(0, 2))
    (mark,) = Path(lake.uri, "_tpc").rglob("tpc.*.json")
    text = mark.read_bytes()
    committed(lake.sink(), made)
    mark.write_bytes(text)
    lake.append(rows(10, 1))
    lake.compact()
    forgets = {"delta.setTransactionRetentionDuration": "interval 1 seconds"}
    lake.table().alter.set_table_properties(forgets, raise_if_not_exists=False)
    time.sleep(1.5)
    with pytest.raises(ConfigurationError, match="setTransactionRetentionDuration"):
        lake.sink().commit_all(Checkpoint(JOB, LINEAGE, 0), [made])
    assert lake.ids() == [0, 1, 10]


def test_delta_vacuum_spares_what_is_pre_committed(tmp_path: Path) -> None:
    lake = DeltaLake(tmp_path)
    lake.create()
    sink = lake.sink()
    made = pre_committed(sink, rows(0, 2))
    lake.table().vacuum(dry_run=False)
    assert committed(sink, made) == [COMMITTED]
    late = pre_committed(sink, rows(10, 2), 1)
    lake.table().vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True)
    assert committed(sink, late) == [LOST], "a full one without retention takes it, and that is told"
    assert lake.ids() == [0, 1]


def test_delta_restored_to_an_older_version_forgets_nothing(tmp_path: Path) -> None:
    lake = DeltaLake(tmp_path)
    lake.create()
    sink = lake.sink()
    gone, late = pre_committed(sink, rows(0, 2)), pre_committed(sink, rows(10, 2), 1)
    committed(sink, gone)
    lake.table().restore(0)
    assert committed(lake.sink(), gone) == [COMMITTED], "what an operator took out does not come back"
    assert committed(sink, late, checkpoint=1) == [COMMITTED]
    assert lake.ids() == [10, 11]


@pytest.mark.parametrize("aborts", [True, False])
def test_delta_zombie_whose_next_entry_of_the_log_is_free_again(tmp_path: Path, aborts: bool) -> None:
    """Its successor has made a checkpoint of the log, and what came before was deleted."""
    lake = DeltaLake(tmp_path)
    lake.create()
    zombie, driver = lake.sink(), lake.sink()
    made = pre_committed(zombie, rows(0, 2))

    def succeed() -> None:
        driver.abort(made.transaction) if aborts else committed(driver, made)
        committed(driver, pre_committed(driver, rows(10, 2), 1), checkpoint=1, oldest=1)
        driver.purge(Checkpoint(JOB, LINEAGE, 1, 1))
        lake.table().create_checkpoint()
        for version in range(lake.table().version()):
            Path(lake.uri, "_delta_log", f"{version:020d}.json").unlink()

    amid(zombie, succeed)
    with pytest.raises(DeltaError, match="not found"):
        committed(zombie, made)
    assert lake.ids() == ([10, 11] if aborts else [0, 1, 10, 11])


@pytest.mark.parametrize("versions", [0, 5])
def test_delta_table_that_takes_the_place_of_another_is_seen_by_a_driver_that_goes_on(
    tmp_path: Path, versions: int
) -> None:
    """Also if the new one has come further than the old one had."""
    lake = DeltaLake(tmp_path)
    lake.create()
    sink = lake.sink()
    committed(sink, pre_committed(sink, rows(0, 2)))
    made = pre_committed(sink, rows(10, 2), 1)
    os.rename(lake.uri, f"{lake.uri}-before")
    lake.create(pa.schema([("other", pa.int64())]))
    for n in range(versions):
        lake.append(pa.table({"other": [n]}))
    with pytest.raises(TransactionEnded, match="its rows were written for "):
        sink.validate_all(Checkpoint(JOB, LINEAGE, 1), [made])
    [outcome] = sink.commit_all(Checkpoint(JOB, LINEAGE, 1), [made])
    assert isinstance(outcome, CommitOutcome)
    assert outcome.state is UNKNOWN
    assert "were written for" in outcome.reason


def test_delta_checkpoints_of_the_log_without_statistics(tmp_path: Path) -> None:
    lake = DeltaLake(tmp_path)
    lake.create(configuration={"delta.checkpoint.writeStatsAsJson": "false"})
    sink = lake.sink()
    made = pre_committed(sink, rows(0, 2))
    committed(sink, made)
    lake.table().create_checkpoint()
    [holding] = lake.sink().audit(JOB, [Part(LINEAGE, 0, [made])]).holdings
    assert holding.rows is None
    assert "1 of its files are not counted" in holding.remarks[0]
    assert committed(lake.sink(), made) == [COMMITTED]


# ---------------------------------------------------------------------- Iceberg
@pytest.mark.parametrize("elsewhere", [True, False])
def test_iceberg_aborts_that_leave_the_branch_as_a_zombie_has_found_it(tmp_path: Path, elsewhere: bool) -> None:
    """They went to another branch, or were rolled back. Their numbers tell them all the same."""
    lake = IcebergLake(tmp_path)
    lake.create()
    lake.append(rows(500, 1))
    before = lake.table().current_snapshot().snapshot_id
    lake.table().manage_snapshots().create_branch(before, "other").commit()
    zombie, driver = lake.sink(), lake.sink(branch="other" if elsewhere else "main")
    made = pre_committed(zombie, rows(0, 2))

    def succeed() -> None:
        driver.abort(made.transaction)
        if not elsewhere:
            lake.table().manage_snapshots().rollback_to_snapshot(before).commit()

    amid(zombie, succeed)
    assert committed(zombie, made) == [LOST]
    assert lake.ids() == [500]


def test_iceberg_another_branch_takes_commits_meanwhile(tmp_path: Path) -> None:
    lake = IcebergLake(tmp_path)
    lake.create()
    lake.append(rows(500, 1))
    table = lake.table()
    table.manage_snapshots().create_branch(table.current_snapshot().snapshot_id, "other").commit()
    sink = lake.sink()
    made = pre_committed(sink, rows(0, 2))
    amid(sink, lambda: lake.table().append(rows(600, 1), branch="other"))
    assert committed(sink, made) == [COMMITTED]
    assert lake.ids() == [0, 1, 500]


@pytest.mark.parametrize("gone", [False, True])
def test_iceberg_manifests_of_a_partition_column_that_is_gone_hinder_no_commit(tmp_path: Path, gone: bool) -> None:
    lake = IcebergLake(tmp_path)
    lake.create(properties={"commit.manifest-merge.enabled": "true"})
    with lake.table().update_schema() as update:
        update.add_column("country", StringType())
    with lake.table().update_spec() as update:
        update.add_field("country", IdentityTransform())
    for first in (500, 600):
        lake.append(rows(first, 1).append_column("country", pa.array(["NO"])))
    with lake.table().update_spec() as update:
        update.remove_field("country")
    if gone:
        with lake.table().update_schema() as update:
            update.delete_column("country")
    sink = lake.sink()
    assert committed(sink, pre_committed(sink, rows(0, 2))) == [COMMITTED]
    assert lake.ids() == [0, 1, 500, 600]
    table = lake.table()
    assert len(table.current_snapshot().manifests(table.io)) == (3 if gone else 2), "those of old partitions are merged"


def branch(lake: IcebergLake, **keeps: int) -> None:
    """Make the branch `audit` of the table as it is."""
    table = lake.table()
    table.manage_snapshots().create_branch(table.current_snapshot().snapshot_id, "audit", **keeps).commit()


def audited(lake: IcebergLake) -> list[int]:
    """The ids in the branch."""
    snapshot = lake.table().snapshot_by_name("audit").snapshot_id
    return sorted(lake.table().scan(snapshot_id=snapshot).to_arrow()["id"].to_pylist())


def test_iceberg_branches(tmp_path: Path) -> None:
    lake = IcebergLake(tmp_path)
    lake.create()
    with pytest.raises(ConfigurationError, match="no branch 'audit': create it"):
        lake.sink(branch="audit").check(SCHEMA)
    lake.append(rows(500, 1))
    branch(lake)
    sink = lake.sink(branch="audit")
    made = pre_committed(sink, rows(0, 2))
    assert committed(sink, made) == [COMMITTED]
    sink.abort(pre_committed(sink, rows(7, 2), 1).transaction)
    assert lake.ids() == [500]
    assert audited(lake) == [0, 1, 500]
    [holding] = sink.audit(JOB, [Part(LINEAGE, 0, [made])]).holdings
    assert holding.rows == 2
    decided = pre_committed(sink, rows(10, 2), 2)
    assert committed(lake.sink(), decided, checkpoint=2) == [UNKNOWN], "its rows were written for the branch"
    assert lake.ids() == [500]
    assert committed(sink, decided, checkpoint=2) == [COMMITTED]


def test_iceberg_branch_that_somebody_drops_is_not_made_anew(tmp_path: Path) -> None:
    """It would be one without its earlier rows."""
    lake = IcebergLake(tmp_path)
    lake.create()
    lake.append(rows(500, 1))
    branch(lake)
    sink = lake.sink(branch="audit")
    made = pre_committed(sink, rows(0, 2))
    lake.table().manage_snapshots().remove_branch("audit").commit()
    with pytest.raises(ConfigurationError, match="no branch 'audit': create it"):
        committed(sink, made)
    with pytest.raises(ConfigurationError, match="no branch 'audit': create it"):
        sink.abort(made.transaction)
    branch(lake)
    assert committed(sink, made) == [COMMITTED]
    assert audited(lake) == [0, 1, 500]


def test_iceberg_branch_keeps_what_it_says_of_old_snapshots(tmp_path: Path) -> None:
    lake = IcebergLake(tmp_path)
    lake.create()
    lake.append(rows(500, 1))
    keeps = {"max_ref_age_ms": 7, "max_snapshot_age_ms": 8, "min_snapshots_to_keep": 9}
    branch(lake, **keeps)
    sink = lake.sink(branch="audit")
    assert committed(sink, pre_committed(sink, rows(0, 2))) == [COMMITTED]
    ref = lake.table().metadata.refs["audit"]
    assert audited(lake) == [0, 1, 500]
    assert {name: getattr(ref, name) for name in keeps} == keeps


def test_iceberg_location_as_hadoop_writes_it(tmp_path: Path) -> None:
    lake = IcebergLake(tmp_path)
    lake.create(location=f"file:{tmp_path}/iceberg/orders")
    sink = lake.sink()
    assert committed(sink, pre_committed(sink, rows(0, 2))) == [COMMITTED]
    assert lake.ids() == [0, 1]


def test_iceberg_tag_is_no_branch(tmp_path: Path) -> None:
    lake = IcebergLake(tmp_path)
    lake.create()
    lake.append(rows(500, 1))
    table = lake.table()
    table.manage_snapshots().create_tag(table.current_snapshot().snapshot_id, "v1").commit()
    with pytest.raises(ConfigurationError, match="'v1' is a tag there"):
        lake.sink(branch="v1").check(SCHEMA)


def test_iceberg_commit_that_the_client_of_the_catalog_repeats(tmp_path: Path) -> None:
    """The first one counts, and the second one meets a conflict. After one pyiceberg deletes the manifests."""
    lake = IcebergLake(tmp_path)
    lake.create()
    sink = lake.sink()
    made = pre_committed(sink, rows(0, 2))

    def commit_twice(self: SqlCatalog, *about: Any) -> Any:
        monkeypatch.undo()
        self.commit_table(*about)
        return self.commit_table(*about)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(SqlCatalog, "commit_table", commit_twice)
        assert committed(sink, made) == [COMMITTED]
    assert lake.ids() == [0, 1]
    assert committed(lake.sink(), pre_committed(lake.sink(), rows(10, 2), 1), checkpoint=1) == [COMMITTED]
    assert lake.ids() == [0, 1, 10, 11]


@pytest.mark.parametrize(
    "rare",
    [
        pa.array([0, 3_000_000], pa.date32()),
        pa.array([-800_000 * 86_400_000_000, 0], pa.timestamp("us", "UTC")),
        pa.array([[None], [12_000_000]], pa.list_(pa.date32())),
        pa.array(["b", "a" * 15 + "\ud7ff" + "b"]),
    ],
    ids=lambda value: str(value.type),
)
def test_iceberg_values_of_which_python_has_no_bounds(tmp_path: Path, rare: pa.Array) -> None:
    table = pa.table({"id": pa.array([1, 2], pa.int64()), "rare": rare})
    lake = IcebergLake(tmp_path)
    lake.create(table.schema)
    sink = lake.sink()
    assert committed(sink, pre_committed(sink, table)) == [COMMITTED]
    assert str(lake.read()["rare"].combine_chunks()) == str(rare)
    assert [lake.table().scan(row_filter=f"id == {id}").count() for id in (1, 2)] == [1, 1]


def test_iceberg_readers_miss_no_row_beside_a_text_that_has_no_bounds(tmp_path: Path) -> None:
    """Parquet has none of a text longer than 4 KiB. Of several row groups pyiceberg took those of the others."""
    lake = IcebergLake(tmp_path)
    lake.create(properties={"write.parquet.row-group-limit": "2"})
    names = ["a", "b", "z" * 5000, "c"]
    sink = lake.sink()
    made = pre_committed(sink, pa.table([list(range(4)), names, [0.5] * 4], schema=SCHEMA))
    assert committed(sink, made) == [COMMITTED]
    assert [lake.names_found(name) for name in names] == [[name] for name in names]


def test_iceberg_refuses_what_it_cannot_keep(tmp_path: Path) -> None:
    lake = IcebergLake(tmp_path)
    lake.create(properties={"write.format.default": "orc"})
    with pytest.raises(ConfigurationError, match="its files are orc"):
        lake.sink().check(SCHEMA)
    older = IcebergLake(tmp_path / "older")
    older.create(properties={"format-version": "1"})
    with pytest.raises(ConfigurationError, match="format version 1, and this sink writes version 2"):
        older.sink().check(SCHEMA)
    with pytest.raises(ConfigurationError, match=r"NAMESPACE\.TABLE"):
        IcebergSink("orders", catalog={})


def upgraded(lake: IcebergLake, **more: Any) -> None:
    """To format version 3, as another engine does it: by metadata that the catalog points to. `more`: other parts."""
    before = Path(lake.table().metadata_location.removeprefix("file://"))
    metadata = json.loads(before.read_text()) | {"format-version": 3, "next-row-id": 0} | more
    after = before.with_name(f"99999-{uuid.uuid4()}.metadata.json")
    after.write_text(json.dumps(metadata))
    with closing(sqlite3.connect(lake.properties["uri"].removeprefix("sqlite:///"))) as connection, connection:
        connection.execute("UPDATE iceberg_tables SET metadata_location = ?", (f"file://{after}",))


VARIANT = {"id": 1, "name": "v", "type": "variant", "required": False}
VERSION_3 = "it has format version 3, and this sink writes version 2: use a table of that"


def test_iceberg_format_version_3_is_refused_before_the_first_row(tmp_path: Path) -> None:
    lake = IcebergLake(tmp_path)
    lake.create()
    upgraded(lake)
    with pytest.raises(ConfigurationError, match=f"cannot write to test.orders .*\n  - {VERSION_3}"):
        lake.sink().check(SCHEMA)
    findings = list(lake.sink().diagnose(JOB))
    [error] = [finding for finding in findings if finding.severity is Severity.ERROR]
    assert error.message.endswith("it has format version 3, and this sink writes version 2")
    assert error.fix == "use a table of that"


def test_iceberg_table_that_is_upgraded_to_format_version_3_while_the_query_runs(tmp_path: Path) -> None:
    """What is visible and what is in doubt can be asked for; the query stops, and says why."""
    lake = IcebergLake(tmp_path)
    lake.create()
    sink = lake.sink()
    done, checkpoint = pre_committed(sink, rows(0, 2)), Checkpoint(JOB, LINEAGE, 1)
    assert committed(sink, done) == [COMMITTED]
    made = pre_committed(sink, rows(10, 2), 1)
    before = lake.table().metadata_location
    upgraded(lake)
    with pytest.raises(ConfigurationError, match=f"was altered: {VERSION_3}"):
        sink.validate_all(checkpoint, [made])
    with pytest.raises(ConfigurationError, match=f"cannot commit to test.orders: {VERSION_3}"):
        lake.sink().abort(made.transaction)
    [outcome] = lake.sink().commit_all(checkpoint, [made])
    assert isinstance(outcome, CommitOutcome)
    assert outcome.state is UNKNOWN
    assert f"was altered, undo that: {VERSION_3}" in outcome.reason
    assert list(lake.sink().in_doubt(JOB)) == [made.transaction]
    assert lake.sink().committed_checkpoints(JOB) == {LINEAGE: 0}
    [holding] = lake.sink().audit(JOB, [Part(LINEAGE, 0, [done])]).holdings
    assert holding.rows == 2
    catalog = lake.table().catalog
    catalog.drop_table(lake.name)
    catalog.register_table(lake.name, before)
    assert committed(lake.sink(), made, checkpoint=1) == [COMMITTED]
    assert lake.ids() == [0, 1, 10, 11]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"format-version": 4}, "'4' .*does not match any of the expected tags"),
        ({"schemas": [{"type": "struct", "schema-id": 0, "fields": [VARIANT]}]}, "Unsupported field type: 'variant'"),
    ],
)
def test_iceberg_tables_that_pyiceberg_cannot_read_at_all(tmp_path: Path, more: Any, told: str) -> None:
    lake = IcebergLake(tmp_path)
    lake.create()
    sink = lake.sink()
    made = pre_committed(sink, rows(0, 2))
    upgraded(lake, **more)
    calls: list[Callable[[], object]] = [
        lambda: lake.sink().check(SCHEMA),
        lambda: list(lake.sink().in_doubt(JOB)),
        lambda: sink.validate_all(Checkpoint(JOB, LINEAGE, 0), [made]),
    ]
    for call in calls:
        with pytest.raises(
            ConfigurationError, match=f"(?s)cannot read the metadata of test.orders: .*{told}.*version 2"
        ):
            call()


def test_iceberg_two_partition_fields_of_one_column_are_refused_before_the_first_row(tmp_path: Path) -> None:
    """pyiceberg fails at them in each task."""
    lake = IcebergLake(tmp_path)
    lake.create()
    with lake.table().update_spec() as update:
        update.add_field("id", BucketTransform(4), "by_bucket")
        update.add_field("name", IdentityTransform(), "by_name")
        update.add_field("id", TruncateTransform(10), "by_ten")
    told = r"fields 'by_bucket' \(bucket\[4\]\) and 'by_ten' \(truncate\[10\]\) are of one column, 'id'"
    with pytest.raises(ConfigurationError, match=told):
        lake.sink().check(SCHEMA)
    with lake.table().update_spec() as update:
        update.remove_field("by_ten")
    sink = lake.sink()
    assert committed(sink, pre_committed(sink, rows(0, 2))) == [COMMITTED]
    assert lake.ids() == [0, 1]


def test_iceberg_snapshots_of_a_driver_whose_clock_is_behind_stay_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REST catalogs refuse a log whose times go back by more than a minute, until the clock is past them."""
    lake = IcebergLake(tmp_path)
    lake.create()
    sink = lake.sink()
    assert committed(sink, pre_committed(sink, rows(0, 1))) == [COMMITTED]
    newest = lake.table().metadata.last_updated_ms
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() - 90)
    for n in (1, 2):
        assert committed(sink, pre_committed(sink, rows(n, 1), n), checkpoint=n) == [COMMITTED]
    metadata = lake.table().metadata
    times = [entry.timestamp_ms for entry in metadata.snapshot_log]
    assert times == sorted(times)
    assert times[1] >= newest
    assert times == [snapshot.timestamp_ms for snapshot in metadata.snapshots]
    assert lake.ids() == [0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "by"),
    [
        (pa.float64(), IdentityTransform()),
        (pa.float32(), IdentityTransform()),
        (pa.binary(), TruncateTransform(2)),
        (pa.time64("us"), BucketTransform(4)),
    ],
)
def test_iceberg_partitions_that_pyiceberg_cannot_write(tmp_path: Path, kind: pa.DataType, by: Any) -> None:
    """Rows with 0.0 and with -0.0 would be doubled."""
    lake = IcebergLake(tmp_path)
    schema = pa.schema([("id", pa.int64()), ("amount", kind)])
    lake.create(schema)
    with lake.table().update_spec() as update:
        update.add_field("amount", by, "part")
    with pytest.raises(ConfigurationError, match="it is partitioned by 'part', "):
        lake.sink().check(schema)


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_iceberg_day_before_1970_has_its_last_second(tmp_path: Path, zone: str | None) -> None:
    """pyiceberg put it into the next day's partition."""
    schema = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", zone))])
    lake = IcebergLake(tmp_path)
    lake.create(schema)
    with lake.table().update_spec() as update:
        update.add_field("at", DayTransform())
    day = 86_400_000_000
    counts = [
        None,
        *(start + more for start in (-700_000 * day, -day, 0, day) for more in (-999_999, -1, 0, 1, 999_999)),
    ]
    table = pa.table([range(len(counts)), pa.array(counts, pa.int64()).view(schema[1].type)], schema=schema)
    sink = lake.sink()
    assert committed(sink, pre_committed(sink, table)) == [COMMITTED]
    for row in table.to_pylist():
        where = "at IS NULL" if row["at"] is None else f"at = '{row['at'].isoformat()}'"
        assert lake.table().scan(where).to_arrow().to_pylist() == [row]


def test_a_table_is_created_of_the_first_batch(tmp_path: Path) -> None:
    for kind in LAKES:
        lake = kind(tmp_path)
        with pytest.raises(ConfigurationError, match="create_table=True"):
            lake.sink().check(SCHEMA)
        sink = lake.sink(create_table=True)
        assert sink.committed_checkpoints(JOB) == {}
        assert list(sink.in_doubt(JOB)) == []
        assert committed(sink, pre_committed(sink, rows(0, 2))) == [COMMITTED]
        assert lake.ids() == [0, 1]


def test_a_local_folder_is_told_before_its_table_is_there(tmp_path: Path) -> None:
    """The promise is made, or refused, before the first batch creates it."""
    sink = DeltaLake(tmp_path).sink(create_table=True)
    assert "local folder" in sink.weaknesses()[0]
    assert committed(sink, pre_committed(sink, rows(0, 2))) == [COMMITTED]
    assert "local folder" in sink.weaknesses()[0]


def test_moments_of_any_time_zone_have_a_table(lake: Lake, tmp_path: Path) -> None:
    """A session has its machine's time zone; the tables have UTC."""
    moment, berlin = datetime(2023, 11, 14, 22, 13, 20, tzinfo=timezone.utc), pa.timestamp("us", "Europe/Berlin")
    batch = pa.table(
        {
            "id": pa.array([1], pa.int64()),
            "at": pa.array([moment], berlin),
            "deep": pa.array([[{"at": moment}]], pa.list_(pa.struct([("at", berlin)]))),
            "by_name": pa.array([[("x", moment)]], pa.map_(pa.string(), berlin)),
        }
    )
    new = type(lake)(tmp_path / "new")
    for one, options in ((new, {"create_table": True}), (lake, {"schema_evolution": "add"})):
        sink = one.sink(**options)
        if one is lake:
            sink.evolve(batch.schema)
        assert committed(sink, pre_committed(sink, batch)) == [COMMITTED]
        [row] = one.read().to_pylist()
        assert (row["at"], row["deep"], row["by_name"]) == (moment, [{"at": moment}], [("x", moment)])


def test_a_table_that_cannot_be_created(tmp_path: Path) -> None:
    for kind in LAKES:
        with pytest.raises(ConfigurationError, match=r"sink 'lake' cannot create .*: [^\n]+\Z"):
            kind(tmp_path).sink(create_table=True).check(pa.schema([("took", pa.duration("us"))]))
