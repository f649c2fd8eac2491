"""What is told of a checkpoint agrees with what happened to it: in the log, in storage, and as metrics."""

from __future__ import annotations

import gc
import logging
import re
import threading
import urllib.error
import urllib.request
import uuid
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from coordinator import CheckpointListener, Step
from coordinator.errors import CheckpointFailed, CheckpointLocationMismatch, InDoubtError
from coordinator.operations.statistics.model import CheckpointHistory, CheckpointStatistics, Status, load_history
from coordinator.storage import StorageError, open_storage
from coordinator.storage.base import WrappedStorage
from coordinator.store.job_store import JobStore
from examples.custom_sink import FileSink
from sinks.audit import Audit, Holding, Part
from sinks.optional import Auditable
from sinks.testing import Hooked, LocalQuery
from sinks.testing.servers.common import free_port
from sinks.testing.table import eventually
from sinks.transaction import Checkpoint, Committable, Fingerprint
from tests.protocol.job import CrashError, Job, complete_but_one_lost, crash_at, fail


class Told:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.all: list[CheckpointStatistics] = []

    def report(self, statistics: CheckpointStatistics) -> None:
        self.all.append(statistics)


def followed(job: Job, batches: int | None = None, **options: Any) -> list[CheckpointStatistics]:
    """Of one run, which may fail."""
    told = Told()
    with job.coordinator(**options) as coordinator:
        coordinator.statistics.reporters.append(told)
        try:
            job.query(batches).run(coordinator)
        except (CheckpointFailed, InDoubtError, CrashError) as error:
            logging.info("ended with %r", error)
    return told.all


def rows_of(job: Job, n: int) -> int:
    return sum(table.num_rows for table in job.input[n])


# ---------------------------------------------------------------------- what is told
def test_an_undisturbed_run(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    told = followed(job, storage=f"file://{job.folder / 'storage'}")
    assert [(one.checkpoint_id, one.status, one.attempt) for one in told] == [
        (n, Status.COMPLETED, 1) for n in range(len(job.input))
    ]
    for n, one in enumerate(told):
        assert one.rows == {"files": rows_of(job, n)}
        assert one.transactions == {"files": sum(bool(table.num_rows) for table in job.input[n])}
        assert one.bytes["files"] > 8 * one.rows["files"]
        assert (one.generation, one.exactly_once, one.adopted) == (1, True, False)
        assert list(one.phases) == ["prepare", "validate", "decide", "commit"]
        assert 0 < sum(one.phases.values()) <= one.duration < 60
        [begin, end], [asked, answered] = one.spans["prepare"]["files"], one.spans["commit"]["files"]
        assert begin == 0 < end < one.phases["prepare"] + 1e-5
        assert sum(one.phases.values()) - one.phases["commit"] - 1e-5 < asked < answered <= one.duration
        assert 0 < one.triggered_at <= one.ended_at
        assert one.offsets_to == (f'{{"end":{n}}}',)
        assert one.offsets_from == (told[n - 1].offsets_to if n else ())
    lines = [record for record in caplog.records if record.name == "coordinator.statistics"]
    assert [line.levelname for line in lines] == ["INFO"] * len(told)
    assert lines[0].getMessage().startswith("job job: checkpoint 0 completed in ")
    assert f"rows: {rows_of(job, 0)} into files; {told[0].transactions['files']} transactions" in lines[0].getMessage()
    assert vars(lines[0])["checkpoint"] == told[0].to_json()


def test_a_failed_try_and_the_next(job: Job) -> None:
    failing = Hooked(job.sink, "write", hook=fail)
    told = followed(job, 1, sink=failing, config={"tolerable_failed_checkpoints": 1})
    assert [(one.status, one.attempt) for one in told] == [(Status.FAILED, 1), (Status.COMPLETED, 2)]
    assert "not today" in told[0].error
    assert "commit" not in told[0].phases
    assert "try 2" in str(told[1])


def test_a_checkpoint_that_fails_twice_leaves_nothing_of_the_one_before_in_doubt(job: Job) -> None:
    job.run(1)
    told = followed(job, 2, sink=Hooked(job.sink, "write", None, hook=fail), config={"tolerable_failed_checkpoints": 1})
    assert [(one.status, one.attempt, one.unknown) for one in told[1:]] == [
        (Status.FAILED, 1, {}),
        (Status.FAILED, 2, {}),
    ]


def test_a_checkpoint_that_a_killed_driver_left_complete(job: Job) -> None:
    with pytest.raises(CrashError):
        job.run(2, listeners=[crash_at(Step.COMPLETE, 1)])
    told = followed(job)
    assert [(one.checkpoint_id, one.status) for one in told] == [(1, Status.RESTORED), (2, Status.COMPLETED)]
    assert [one.rows["files"] for one in told] == [rows_of(job, 1), rows_of(job, 2)]
    assert told[0].transactions == {"files": sum(bool(table.num_rows) for table in job.input[1])}
    assert list(told[0].phases) == ["recover"]
    assert re.match(
        r"checkpoint 1, complete before this start, restored; its rows: .*; no row was written again$", str(told[0])
    )
    assert told[1].generation == 2
    job.assert_exactly_once()


def test_a_start_that_is_refused_names_its_batch(job: Job) -> None:
    job.run(2)
    told = Told()
    coordinator = job.coordinator()
    coordinator.statistics.reporters.append(told)
    with pytest.raises(CheckpointLocationMismatch):
        LocalQuery(job.folder / "another", job.input).run(coordinator)
    assert [(one.checkpoint_id, one.status) for one in told.all] == [(0, Status.FAILED)]


def test_of_a_coordinator_that_is_gone_no_metric_stays(job: Job) -> None:
    coordinator = job.coordinator()
    job.query().run(coordinator)
    coordinator.close()
    statistics = weakref.ref(coordinator.statistics)
    del coordinator
    gc.collect()
    assert statistics() is None


def test_orphans_and_what_is_lost(job: Job) -> None:
    complete_but_one_lost(job)
    told = followed(job, 1)
    assert [(one.status, one.replayed) for one in told] == [(Status.COMPLETED, {"files": 1})]
    with pytest.raises(CrashError):
        job.run(2, listeners=[crash_at(Step.PRE_COMMITTED, 1)])
    orphans = len(list(job.sink.in_doubt("job")))
    assert orphans
    told = followed(job, 2)
    assert sum(one.aborted.get("files", 0) for one in told) == orphans


def test_what_is_lost_and_is_not_written_again_is_halted_and_not_restored(job: Job) -> None:
    complete_but_one_lost(job)
    (job.folder / "query" / "commits" / "0").touch()  # Spark has moved on
    [one] = followed(job)
    assert (one.checkpoint_id, one.status, one.unknown) == (0, Status.HALTED, {"files": 1})
    assert "Spark has moved on to batch 1" in one.error
    assert "no row was written again" not in str(one)


class Refusing(FileSink):
    def commit_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> Any:
        raise OSError("not today")


def test_what_cannot_be_committed_for_now(job: Job) -> None:
    in_doubt = []

    class Look(CheckpointListener):
        def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
            if step is Step.ASKING_AGAIN:
                in_doubt.append((statistics.in_doubt.total(), statistics.in_doubt_seconds))

    told = Told()
    coordinator = job.coordinator(Refusing(job.sink.folder), listeners=[Look()])
    statistics = coordinator.statistics
    statistics.reporters.append(told)
    with pytest.raises(InDoubtError):
        job.query(1).run(coordinator)
    [one] = told.all
    assert one.status is Status.HALTED
    assert one.commit_retries == len(in_doubt) > 1
    assert {count for count, _ in in_doubt} == {one.transactions["files"]}
    assert one.unknown == one.transactions
    ages = [age for _, age in in_doubt]
    assert ages == sorted(ages)
    assert ages[-1] > 1, "of the two seconds of the commit timeout"
    assert "not today" in one.error


def test_a_reporter_that_fails_changes_nothing(job: Job) -> None:
    class Broken:
        def report(self, statistics: CheckpointStatistics) -> None:
            raise RuntimeError

    with job.coordinator() as coordinator:
        coordinator.statistics.reporters.insert(0, Broken())
        job.query().run(coordinator)
    job.assert_exactly_once()
    assert len(load_history(JobStore(job.storage, "job"), [])) == len(job.input)


# ---------------------------------------------------------------------- the history in storage
def test_the_history_outlives_its_drivers(job: Job) -> None:
    first, second = followed(job, 1), followed(job)
    assert load_history(JobStore(job.storage, "job"), []) == first + second
    assert len(statistics_keys(job)) == 1


def statistics_keys(job: Job) -> list[str]:
    return [key for key in job.storage.list("") if "/statistics/" in key]


def numbered(n: int) -> CheckpointStatistics:
    return CheckpointStatistics("job", n, 1, Status.COMPLETED, ended_at=n + 1)


def test_the_history_is_bounded_and_takes_few_objects(job: Job) -> None:
    store = JobStore(job.storage, "job")
    history = CheckpointHistory(store, 250)
    for n in range(1000):
        history.report(numbered(n))
        if n % 7 == 0:
            history.flush()
    history.flush()
    found = [one.checkpoint_id for one in load_history(store, [])]
    assert found == list(range(found[0], 1000))
    assert 250 <= len(found) <= 360
    assert len(statistics_keys(job)) <= 4
    none = CheckpointHistory(JobStore(open_storage(f"memory:{uuid.uuid4().hex}"), "job"), 0)
    none.report(numbered(1))
    none.flush()


def test_the_history_is_in_order_where_the_clock_was_set_back(job: Job) -> None:
    store = JobStore(job.storage, "job")
    history = CheckpointHistory(store, 10)
    for n, ended_at in enumerate((9000, 2000, 3000)):
        history.report(replace(numbered(n), ended_at=ended_at))
    history.flush()
    assert [one.checkpoint_id for one in load_history(store, [])] == [0, 1, 2]


def test_two_drivers_that_flush_at_once_lose_nothing(job: Job) -> None:
    histories = [CheckpointHistory(JobStore(job.storage, "job"), 1000) for _ in range(2)]

    def flush(generation: int) -> None:
        for n in range(40):
            histories[generation].report(replace(numbered(n), generation=generation))
            histories[generation].flush()

    threads = [threading.Thread(target=flush, args=[generation]) for generation in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = load_history(JobStore(job.storage, "job"), [])
    assert Counter(one.generation for one in found) == {0: 40, 1: 40}


def test_a_storage_that_refuses_statistics_is_asked_again(job: Job) -> None:
    class Refuses(WrappedStorage):
        refused = 0

        def put_if_absent(self, key: str, value: bytes) -> bool:
            if "/statistics/" in key and self.refused < 2:
                self.refused += 1
                raise StorageError(self.uri, key, "not today")
            return super().put_if_absent(key, value)

    history = CheckpointHistory(JobStore(Refuses(job.storage), "job"), 10)
    for n in range(2):
        history.report(numbered(n))
        with pytest.raises(StorageError):
            history.flush()
    history.flush()
    assert [one.checkpoint_id for one in load_history(JobStore(job.storage, "job"), [])] == [0, 1]


def test_an_altered_history_is_named_and_stops_no_query(job: Job) -> None:
    followed(job, 1)
    [key] = statistics_keys(job)
    data = job.storage.get(key)
    assert data
    job.storage.delete(key)
    job.storage.put_if_absent(key, data.replace(b'"completed"', b'"failed"   '))
    bad: list[str] = []
    assert load_history(JobStore(job.storage, "job"), bad) == []
    [told] = bad
    assert key in told
    assert "changed after it was written" in told
    went_on = followed(job)
    job.assert_exactly_once()
    job.storage.delete(key)
    assert load_history(JobStore(job.storage, "job"), []) == went_on


def test_a_history_that_is_none_and_a_foreign_key(job: Job) -> None:
    first = followed(job, 1)
    store, [key] = JobStore(job.storage, "job"), statistics_keys(job)
    store.journal.add_statistics([numbered(1).to_json() | {"status": "unheard of"}], together=100, keep=100)
    bad: list[str] = []
    assert load_history(store, bad) == first
    assert ["lack or misuse a field" in text for text in bad] == [True]
    job.storage.put_if_absent(f"{key.rpartition('/')[0]}/somebody-elses", b"")
    new = followed(job)
    assert load_history(store, []) == first + new
    job.assert_exactly_once()


# ---------------------------------------------------------------------- metrics
def test_prometheus(job: Job) -> None:
    registry = CollectorRegistry()
    with job.coordinator(storage=f"file://{job.folder / 'storage'}") as coordinator:
        coordinator.register_metrics(registry)

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"checkpointing_{name}", {"job_name": "job", **labels})

        assert value("checkpoints_total", status="failed") == 0
        assert value("transactions_total", sink="files", outcome="lost") == 0
        assert value("checkpoint_last") == -1
        job.query().run(coordinator)
        newest = coordinator.statistics.newest
        assert newest
        batches = len(job.input)
        assert value("checkpoints_total", status="completed") == batches
        assert value("rows_total", sink="files") == sum(rows_of(job, n) for n in range(batches))
        assert (value("data_bytes_total", sink="files") or 0) > 0
        assert (value("transactions_total", sink="files", outcome="committed") or 0) >= batches
        assert value("checkpoint_duration_seconds_count") == batches
        assert value("checkpoint_size_bytes_sum") == value("data_bytes_total", sink="files")
        assert value("checkpoint_last_size_bytes") == newest.bytes["files"]
        assert value("phase_duration_seconds_count", phase="decide") == batches
        assert (value("storage_duration_seconds_count", operation="put") or 0) > batches
        assert value("checkpoint_last") == batches - 1
        assert value("checkpoint_last_timestamp_seconds") == newest.ended_at / 1000
        assert (value("in_doubt"), value("in_doubt_age_seconds"), value("exactly_once")) == (0, 0, 1)
        assert (value("generation"), value("checkpoint_in_progress_seconds")) == (1, 0)
        with pytest.raises(ValueError, match="already"):
            coordinator.register_metrics(registry)


def test_metrics_at_an_address(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()

    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    with job.coordinator(config={"metrics_address": str(port)}) as coordinator:
        with pytest.raises(urllib.error.URLError):  # commands open the same job
            read()
        job.query(1).run(coordinator)
        assert 'checkpointing_checkpoints_total{job_name="job",status="completed"} 1.0' in read().splitlines()
        names = {family.name for family in text_string_to_metric_families(read())}
        assert {"checkpointing_rows", "checkpointing_phase_duration_seconds", "checkpointing_in_doubt"} <= names
        with job.coordinator(config={"metrics_address": f"127.0.0.1:{port}"}) as next_one:
            job.query(2).run(next_one)
        assert f"cannot serve metrics at 127.0.0.1:{port}" in caplog.text
    with pytest.raises(urllib.error.URLError):
        read()
    reporters = len(coordinator.statistics.reporters)
    with coordinator:
        job.query(3).run(coordinator)
        assert 'checkpointing_checkpoints_total{job_name="job",status="completed"} 2.0' in read().splitlines()
    assert len(coordinator.statistics.reporters) == reporters
    job.assert_exactly_once(3)


def test_the_books_as_metrics(job: Job, telemetry: InMemoryMetricReader) -> None:
    registry = CollectorRegistry()
    with job.coordinator(sink=Books(job.folder / "rows"), config={"verify_interval": 0.05}) as coordinator:
        coordinator.register_metrics(registry)
        assert registry.get_sample_value("checkpointing_balance_timestamp_seconds") is None

        class Waits(CheckpointListener):
            def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
                for _ in range(2 if step is Step.COMMITTED else 0):  # the first may have been begun before
                    coordinator.statistics.balance = None
                    eventually(lambda: coordinator.statistics.balance is not None)

        coordinator._protocol.listeners.add(Waits())
        job.query(2).run(coordinator)

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"checkpointing_balance_{name}", {"job_name": "job", **labels})

        sink = {"sink": "files"}
        assert value("rows", column="read", **sink) == rows_of(job, 0) + rows_of(job, 1)
        assert value("rows", column="ledger", **sink) == rows_of(job, 0) + rows_of(job, 1) - 1
        assert value("rows", column="present", **sink) is None
        assert (value("differences", **sink), value("unknown", **sink)) == (1, 0)
        assert value("timestamp_seconds") == coordinator.statistics.verified_at / 1000
        assert "checkpoint 1" in coordinator.statistics.activity(0)["balance"]
        data = telemetry.get_metrics_data()
    assert data
    [scope] = data.resource_metrics[0].scope_metrics
    [told] = [metric for metric in scope.metrics if metric.name == "checkpointing.balance.differences"]
    assert [(vars(one)["attributes"], vars(one)["value"]) for one in told.data.data_points] == [
        ({"job_name": "job", **sink}, 1)
    ]


class Books(FileSink, Auditable[Any]):
    """Keeps a ledger that has lost a row of checkpoint 1."""

    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        assert quick
        sums = [[one.fingerprint for one in part.committables] for part in parts]
        totals = [Fingerprint(sum(one.rows for one in each), sum(one.hash for one in each) % 2**64) for each in sums]
        missing = [part.checkpoint_id == 1 for part in parts]
        return Audit([Holding(replace(one, rows=one.rows - m)) for one, m in zip(totals, missing, strict=True)])


@pytest.fixture
def telemetry(monkeypatch: pytest.MonkeyPatch) -> InMemoryMetricReader:
    reader = InMemoryMetricReader()
    monkeypatch.setattr(metrics, "get_meter", MeterProvider([reader], shutdown_on_exit=False).get_meter)
    return reader


def test_a_coordinator_that_processes_nothing_opens_no_telemetry(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it opens stays as long as the process; the processes of `format` make two coordinators a batch."""
    monkeypatch.setattr(metrics, "get_meter", fail)
    job.coordinator().close()


def test_open_telemetry(job: Job, telemetry: InMemoryMetricReader) -> None:
    followed(job)
    data = telemetry.get_metrics_data()
    assert data
    [scope] = data.resource_metrics[0].scope_metrics
    points = {metric.name: list(metric.data.data_points) for metric in scope.metrics}
    [completed] = points["checkpointing.checkpoints"]
    assert vars(completed)["attributes"] == {"job_name": "job", "status": "completed"}
    assert vars(completed)["value"] == len(job.input)
    assert [vars(point)["value"] for point in points["checkpointing.checkpoint.last"]] == [len(job.input) - 1]
