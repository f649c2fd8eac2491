"""`replay="spool"`: what the external system has lost is written again from rows that were kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coordinator import CheckpointConfig, CheckpointCoordinator, Step
from coordinator.errors import ReplayMismatch
from coordinator.operations import operator_decisions
from coordinator.storage import StorageError, open_storage, stream
from coordinator.store import spool
from examples.custom_sink import FileSink
from sinks.dead_letters import Refusal, find_refused_rows
from sinks.diagnosis import InDoubt
from sinks.errors import BadValue
from sinks.optional import DeadLettering
from sinks.testing import LocalQuery
from sinks.testing.conformance import ids
from sinks.testing.local import Partitions
from tests.protocol.job import CrashError, Job, crash_at


class SpoolingJob(Job):
    """Its query is not deterministic: with each start, a batch has the same rows in other partitions."""

    starts = 0

    def coordinator(self, *args: object, **options: object) -> CheckpointCoordinator:
        config = {"replay": "spool", "spool_dir": f"file://{self.folder}/spool"} | options.pop("config", {})  # type: ignore[operator]
        return super().coordinator(*args, config=config, **options)

    def query(self, batches: int | None = None) -> LocalQuery:
        self.starts += 1
        return LocalQuery(self.folder / "query", [dealt_again(each, self.starts) for each in self.input[:batches]])

    def kept(self) -> list[Path]:
        return sorted(path for path in (self.folder / "spool").rglob("*") if path.is_file())


def dealt_again(partitions: Partitions, number: int) -> Sequence[pa.Table]:
    rows = pa.concat_tables(partitions)
    order = [(index * 7919 + number * 13) % len(rows) for index in range(len(rows))]
    assert sorted(order) == list(range(len(rows)))
    count = len(partitions) + number % 2  # another layout, too
    return [rows.take([index for at, index in enumerate(order) if at % count == part]) for part in range(count)]


@pytest.fixture
def job(tmp_path: Path) -> SpoolingJob:
    return SpoolingJob(tmp_path)


def complete_but_lost(job: SpoolingJob, n: int, count: int) -> None:
    """Checkpoint n is complete with nothing committed; an operator has rolled back so many of its transactions."""
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.COMPLETE, n)])
    for identity in sorted(job.sink.in_doubt("job"), key=str)[:count]:
        job.sink.abort(identity)


@pytest.mark.parametrize("count", [1, 4])
def test_lost_transactions_are_written_again_from_what_was_kept(job: SpoolingJob, count: int) -> None:
    complete_but_lost(job, 1, count)
    assert job.kept()
    job.run()
    job.assert_exactly_once()
    assert job.kept() == []


def test_of_what_two_drivers_have_kept_that_is_written_which_was_decided(job: SpoolingJob) -> None:
    with pytest.raises(CrashError):
        job.run(listeners=[crash_at(Step.PRE_COMMITTED, 1)])
    complete_but_lost(job, 1, 4)
    job.run()
    job.assert_exactly_once()


def test_without_it_the_same_job_stops(job: SpoolingJob) -> None:
    complete_but_lost(job, 1, 4)
    with pytest.raises(ReplayMismatch):
        job.run(config={"replay": "recompute", "spool_dir": None})


@pytest.mark.parametrize("step", [step for step in Step if step.value not in ("halted", "failed")])
def test_a_driver_dies_at_any_step(job: SpoolingJob, step: Step) -> None:
    """And again at the same, in the replay of what was lost meanwhile."""
    for _ in range(2):
        try:
            job.run(listeners=[crash_at(step, 1)])
        except CrashError:
            for identity in sorted(job.sink.in_doubt("job"), key=str)[:2]:
                job.sink.abort(identity)
    job.run()
    job.assert_exactly_once()
    assert job.kept() == []


class Refusing(FileSink):
    def write(self, transaction: Any, batch: pa.RecordBatch) -> None:
        raise BadValue("no such row")


def test_rows_that_a_sink_refuses_are_not_kept_to_their_end(job: SpoolingJob) -> None:
    """What is left of the partition is drained past the storage, which may fail meanwhile."""
    with pytest.raises(BadValue):
        job.run(sink=Refusing(job.sink.folder))
    assert job.kept() == []


def test_rows_of_many_chunks(job: SpoolingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "VALUE_BYTES", 100)
    complete_but_lost(job, 0, 4)
    assert len(job.kept()) > 40
    assert max(path.stat().st_size for path in job.kept()) == 100
    job.run()
    job.assert_exactly_once()


def test_a_task_that_fails_amid_its_rows_puts_no_more(job: SpoolingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are let go when Python collects them, perhaps long after storage is gone."""
    monkeypatch.setattr(stream, "VALUE_BYTES", 1)
    spooling = spool.SpoolingRows(f"file://{job.folder}/spool", "spool/job/lineage/0")
    rows = spooling(0, "attempt")
    rows.write(pa.record_batch({"id": [1], "hash": [1]}))
    before = job.kept()
    rows.close()
    del rows
    assert len(before) > 1
    assert job.kept() == before


class Picky(FileSink, DeadLettering[Any]):
    """Takes no row whose id is a multiple of 3."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "letters").mkdir(exist_ok=True)
        self.letters = FileSink(folder / "letters", "letters")
        self.dead_letters = self.letters

    def write(self, transaction: Any, batch: pa.RecordBatch) -> None:
        if any(id % 3 == 0 for id in batch["id"].to_pylist()):
            raise BadValue("a multiple of 3")
        super().write(transaction, batch)

    def write_good_rows(self, transaction: Any, batch: pa.RecordBatch, most: int) -> Sequence[Refusal]:
        return find_refused_rows(batch, lambda piece: self.write(transaction, piece), most)


@pytest.mark.parametrize("given_up", ["files", "letters"])
def test_what_was_kept_is_found_after_a_part_of_it_was_given_up(job: SpoolingJob, given_up: str) -> None:
    """Rows of a partition are kept together with its dead letters, of which an operator goes on without one."""
    sink = Picky(job.sink.folder)
    with pytest.raises(CrashError):
        job.run(sink=sink, listeners=[crash_at(Step.COMPLETE, 1)])
    lost = [min(its.in_doubt("job"), key=str) for its in (sink, sink.letters)]
    assert [InDoubt.parsed(identity).subtask for identity in lost] == [0, 0]
    sink.abort(lost[0])
    sink.letters.abort(lost[1])
    with job.coordinator(sink=sink) as coordinator:
        operator_decisions.accept_loss(coordinator._protocol, [(given_up, 0)], who="ann", why="gone")
    job.run(sink=sink)
    files = [pq.read_table(path)["id"].to_pylist() for path in job.sink.folder.glob("[!.]*.parquet")]
    good = [id for id in ids(job.input) if id % 3]
    assert given_up == "files" or sorted(chain(*files)) == sorted(good)
    letters = sum(pq.read_metadata(path).num_rows for path in sink.letters.folder.glob("[!.]*.parquet"))
    assert given_up == "letters" or letters == len(ids(job.input)) - len(good)
    assert job.kept() == []


@pytest.mark.parametrize("what", ["altered", "gone"])
def test_rows_that_are_not_what_was_kept_are_not_written(job: SpoolingJob, what: str) -> None:
    """An altered chunk stops the query; without all chunks the rows are computed again, and compared as ever."""
    complete_but_lost(job, 1, 4)
    whole = {path: path.read_bytes() for path in job.kept()}
    for path, data in whole.items():
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1])) if what == "altered" else path.unlink()
    with pytest.raises(StorageError if what == "altered" else ReplayMismatch):
        job.run()
    for path, data in whole.items():
        path.write_bytes(data)
    job.run()
    job.assert_exactly_once()


def test_a_driver_of_a_lineage_that_is_over_leaves_the_rows_of_the_new_one(tmp_path: Path) -> None:
    rows = spool.Spool(f"file://{tmp_path}", "job")
    for lineage in ("aaaa0000", "bbbb0000"):
        kept = rows.spooling(lineage, 7, "sink")(0, "g1r0t0a0")
        kept.write(batch())
        kept.finish()
        kept.close()
    rows.delete("aaaa0000", 9)
    assert [path.parent.name for path in tmp_path.rglob("*.*") if path.is_file()] == ["bbbb0000"]
    rows.delete("cccc0000", 0, ["bbbb0000"])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def batch() -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"id": [1], "hash": [2]})


def test_rows_stay_while_their_storage_is_away(
    job: SpoolingJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are deleted with the next checkpoint."""
    coordinator, query = job.coordinator(), job.query()
    storage = open_storage(f"file://{job.folder}/spool")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(type(storage), "delete", away)
        coordinator.process(query.batch(0, "run"))
    assert "rows that are visible could not be deleted" in caplog.text
    assert job.kept()
    coordinator.process(query.batch(1, "run"))
    assert job.kept() == []


def away(self: object, key: str) -> None:
    raise StorageError("file:", key, "not now")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"spool_dir": "file:///somewhere"}, "without that it is not used"),
        ({"replay": "spool", "mode": "at_least_once"}, "AT_LEAST_ONCE has none"),
        ({"replay": "keep"}, "replay must be one of"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        CheckpointConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("storage", ["memory:here", open_storage("memory:here")])
def test_a_storage_that_executors_cannot_open_is_refused(job: SpoolingJob, storage: object) -> None:
    with pytest.raises(ValueError, match="spool_dir"):
        job.coordinator(storage=storage, config={"spool_dir": None})
