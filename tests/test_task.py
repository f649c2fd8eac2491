"""A participant: which calls a task makes of its sink, whatever fails."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sinks import CommitOutcome, Committable, Identity, TransactionContext, TwoPhaseCommitSink
from sinks.errors import BadValue
from sinks.task import Ack, SinkTask
from sinks.testing import rows
from sinks.testing.local import with_row_hash
from sinks.transaction import Fingerprint


class Calls(TwoPhaseCommitSink[None]):
    """Its transactions need no handle. Fails in the method that is named."""

    def __init__(self, fails_in: str = "", error: type[Exception] = ConnectionError) -> None:
        super().__init__(name="calls")
        self.fails_in, self.error = fails_in, error
        self.calls: list[str] = []

    def _call(self, method: str) -> None:
        self.calls.append(method)
        if method == self.fails_in:
            raise self.error("not today")

    def open(self) -> None:
        self._call("open")

    def close(self) -> None:
        self._call("close")

    def begin_transaction(self, context: TransactionContext) -> None:
        self._call("begin_transaction")

    def write(self, transaction: None, batch: pa.RecordBatch) -> None:
        self._call("write")

    def pre_commit(self, transaction: None) -> Identity:
        self._call("pre_commit")
        return {"name": "a"}

    def rollback(self, transaction: None) -> None:
        self._call("rollback")

    def commit_directly(self, transaction: None) -> None:
        self._call("commit_directly")

    def commit(self, committable: Committable) -> CommitOutcome:
        raise AssertionError("a task commits nothing")

    def abort(self, transaction: Identity) -> None:
        raise AssertionError("a task aborts nothing")

    def in_doubt(self, job: str) -> list[Identity]:
        raise AssertionError("a task lists nothing")


def run(sink: Calls, count: int = 250, *, exactly_once: bool = True) -> Ack:
    task = SinkTask(sink, "job", "aa", 0, 1, exactly_once=exactly_once)
    return task.run([*with_row_hash(rows(0, 0)), *with_row_hash(rows(0, count))], subtask=0, task_attempt=1)


def test_a_participant() -> None:
    sink = Calls()
    ack = run(sink)
    assert sink.calls == ["open", "begin_transaction", "write", "write", "write", "pre_commit", "close"]
    assert ack.committable is not None
    assert (ack.committable.sink, ack.fingerprint.rows, ack.error) == ("calls", 250, None)


def test_nothing_is_begun_for_a_partition_without_rows() -> None:
    sink = Calls()
    assert run(sink, 0) == Ack(0, Fingerprint())
    assert sink.calls == ["open", "close"]


@pytest.mark.parametrize("method", ["write", "pre_commit", "commit_directly"])
def test_what_has_begun_is_rolled_back(method: str) -> None:
    """whatever the handle is, also None"""
    sink = Calls(method)
    with pytest.raises(ConnectionError):
        run(sink, exactly_once=method != "commit_directly")
    assert sink.calls[-3:] == [method, "rollback", "close"]


def test_there_is_no_rollback_without_a_handle() -> None:
    sink = Calls("begin_transaction")
    with pytest.raises(ConnectionError):
        run(sink)
    assert sink.calls == ["open", "begin_transaction", "close"]


def test_a_failed_rollback_hides_no_error(caplog: pytest.LogCaptureFixture) -> None:
    class NorRollback(Calls):
        def rollback(self, transaction: None) -> None:
            raise OSError("gone")

    with pytest.raises(ConnectionError):
        run(NorRollback("write"))
    assert "left to the sweep" in caplog.text


def test_an_error_of_the_sink_goes_into_the_ack() -> None:
    sink = Calls("write", BadValue)
    assert isinstance(run(sink).error, BadValue)
    assert sink.calls[-2:] == ["rollback", "close"]
