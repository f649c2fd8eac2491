"""A participant: which calls a task makes of its sink, whatever fails."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest

from coordinator.protocol.ports import sinks_by_name
from coordinator.task.task import Ack, LostRows, OnePass, SinkTask
from sinks import CommitOutcome, Committable, Identity, TransactionContext
from sinks.dead_letters import Refusal, allowed, find_refused_rows
from sinks.errors import BadValue, TooManyDeadLetters
from sinks.optional import DeadLettering, DirectCommitting
from sinks.testing import rows
from sinks.testing.local import with_row_hash
from sinks.transaction import Refused


class Calls(DirectCommitting[None]):
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


def run(sink: Calls, count: int = 250, *, exactly_once: bool = True) -> list[Ack]:
    task = SinkTask(sink, "job", "aa", 0, 1, exactly_once=exactly_once)
    return task.run([*with_row_hash(rows(0, 0)), *with_row_hash(rows(0, count))], subtask=0, task_attempt=1)


def test_a_participant() -> None:
    sink = Calls()
    [ack] = run(sink)
    assert sink.calls == ["open", "begin_transaction", "write", "write", "write", "pre_commit", "close"]
    assert ack.committable is not None
    assert (ack.committable.sink, ack.fingerprint.rows, ack.error) == ("calls", 250, None)


def test_nothing_is_begun_for_a_partition_without_rows() -> None:
    sink = Calls()
    assert run(sink, 0) == [Ack("calls", 0)]
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
    [ack] = run(sink)
    assert isinstance(ack.error, BadValue)
    assert sink.calls[-2:] == ["rollback", "close"]


class Choosy(Calls, DeadLettering[None]):
    """Refuses rows whose id is odd, and is `dead_letters` itself where it is one."""

    takes_any = False

    def write_good_rows(self, transaction: None, batch: pa.RecordBatch, most: int) -> list[Refusal]:
        self._call("write_good_rows")
        if self.takes_any:
            return []
        return [Refusal(at, "Odd", f"{id} is odd") for at, id in enumerate(batch["id"].to_pylist()) if id % 2]

    def abort(self, transaction: Identity) -> None:
        self._call("abort")


def choosy(letters: Calls, fails_in: str = "", most: int | float = 1000) -> Choosy:
    sink = Choosy(fails_in)
    letters.name = "letters"
    sink.dead_letters, sink.max_dead_letters = letters, most
    return sink


def test_refused_rows_are_one_more_participant() -> None:
    letters = Calls()
    sink, plain = choosy(letters), Calls()
    ack, refused = (Ack.from_json(one.to_json()) for one in run(sink, 250))
    [all_rows] = run(plain, 250)
    assert (ack.sink, refused.sink) == ("calls", "letters")
    assert refused.committable is not None
    assert refused.committable.sink == "letters"
    assert ack.fingerprint.add(refused.fingerprint.rows, refused.fingerprint.hash) == all_rows.fingerprint
    assert (ack.fingerprint.rows, refused.fingerprint.rows, len(refused.committable.refused)) == (125, 125, 125)
    assert refused.committable.refused[0].error == "1 is odd"
    assert sink.calls == ["open", "begin_transaction", *["write_good_rows"] * 3, "pre_commit", "close"]
    assert letters.calls == ["open", "begin_transaction", "write", "write", "write", "pre_commit", "close"]


def test_at_least_once_commits_both() -> None:
    letters = Calls()
    sink = choosy(letters)
    assert [ack.fingerprint.rows for ack in run(sink, 50, exactly_once=False)] == [25, 25]
    assert (sink.calls[-2], letters.calls[-2]) == ("commit_directly", "commit_directly")


def test_without_a_refused_row_the_other_sink_is_not_touched() -> None:
    letters = Calls()
    ack, of_letters = SinkTask(choosy(letters), "job", "aa", 0, 1).run(with_row_hash(rows(0, 1)), 0, 1)
    assert (ack.fingerprint.rows, of_letters, letters.calls) == (1, Ack("letters", 0), [])


def test_with_refused_rows_alone_nothing_is_pre_committed_but_they() -> None:
    sink = choosy(Calls())
    ack, of_letters = SinkTask(sink, "job", "aa", 0, 1).run(with_row_hash(rows(1, 1)), 0, 1)
    assert (ack.committable, sink.calls[-2:]) == (None, ["rollback", "close"])
    assert of_letters.fingerprint.rows == 1


@pytest.mark.parametrize(
    ("fails_in", "letters_fail_in", "own", "others"),
    [
        ("pre_commit", "", ["pre_commit", "rollback"], ["write", "rollback"]),
        ("", "pre_commit", ["pre_commit", "abort"], ["pre_commit", "rollback"]),
        ("", "write", ["write_good_rows", "rollback"], ["write", "rollback"]),
        ("", "begin_transaction", ["write_good_rows", "rollback"], ["open", "begin_transaction"]),
    ],
)
def test_both_are_pre_committed_or_none(fails_in: str, letters_fail_in: str, own: list[str], others: list[str]) -> None:
    letters = Calls(letters_fail_in)
    sink = choosy(letters, fails_in)
    with pytest.raises(ConnectionError):
        run(sink, 50)
    assert (sink.calls[-3:-1], letters.calls[-3:-1]) == (own, others)


def test_more_than_the_limit_end_the_task() -> None:
    letters = Calls()
    [ack] = run(choosy(letters, most=60), 250)
    assert isinstance(ack.error, TooManyDeadLetters)
    assert "more than 60 of the rows of partition 0 of checkpoint 0" in str(ack.error)
    assert "Odd: 1 is odd" in str(ack.error)
    assert letters.calls == ["open", "begin_transaction", "write", "rollback", "close"]


@pytest.mark.parametrize(("own", "letters_too"), [(True, False), (False, True), (True, True)])
def test_a_replay_separates_by_the_record(own: bool, letters_too: bool) -> None:
    """Also if the sink would take the refused rows now; equal rows are told apart by their number alone."""
    table = pa.concat_tables([rows(0, 40), rows(1, 1)])
    hashes = [hash for batch in with_row_hash(table) for hash in batch.columns[-1].to_pylist()]
    refused = {1: [Refused(hashes[at], "Odd", "") for at in (1, 7)]}
    replay = LostRows(frozenset({1} if own else ()), frozenset({1} if letters_too else ()), refused)
    letters = Calls()
    sink = choosy(letters)
    sink.takes_any = True
    task = SinkTask(sink, "job", "aa", 0, 1, 1, replay=replay)
    written = {ack.sink: ack.fingerprint.rows for ack in task.run(with_row_hash(table), 1, 1)}
    assert written == ({"calls": 39} if own else {}) | ({"letters": 2} if letters_too else {})
    assert ("write" in letters.calls) is letters_too
    assert task.run(with_row_hash(table), 0, 2) == []


class AfterOthers(Choosy):
    """Takes a row when the one with the next higher id is there, and all of a batch or none. Ids from `top` on need no
    other one, and negative ones are never taken."""

    def __init__(self, top: int, most: int = 1000) -> None:
        super().__init__()
        self.top, self.there, self.tries = top, set[int](), 0
        self.dead_letters, self.max_dead_letters = Calls(), most
        self.dead_letters.name = "letters"

    def write_good_rows(self, transaction: None, batch: pa.RecordBatch, most: int) -> list[Refusal]:
        return find_refused_rows(batch, self.take, most)

    def take(self, batch: pa.RecordBatch) -> None:
        self.tries += 1
        taken = set[int]()
        for id in batch["id"].to_pylist():
            if id < 0 or (id < self.top and id + 1 not in self.there | taken):
                raise BadValue(f"{id} needs {id + 1}" if id >= 0 else f"{id} is negative")
            taken.add(id)
        self.there |= taken


def test_a_sink_of_your_own_need_not_know_that_rows_wait_for_others() -> None:
    """`find_refused_rows` tells what may get in later."""
    sink = AfterOthers(399)
    ack, letters = SinkTask(sink, "job", "aa", 0, 1).run(with_row_hash(rows(0, 400)), 0, 1)
    assert (ack.fingerprint.rows, letters.fingerprint.rows, len(sink.there)) == (400, 0, 400)
    assert sink.tries < 4 * 400


def test_many_rows_that_are_never_taken_are_tried_a_few_times_each() -> None:
    bad, good = rows(-1500, 1500), rows(0, 60)
    sink = AfterOthers(59, most=2000)
    table = pa.concat_tables([bad.slice(0, 700), good, bad.slice(700)])
    ack, letters = SinkTask(sink, "job", "aa", 0, 1).run(with_row_hash(table), 0, 1)
    assert (ack.fingerprint.rows, letters.fingerprint.rows) == (60, 1500)
    assert letters.committable is not None
    assert sink.tries < 12 * 1560


def test_a_table_that_takes_no_row_is_given_up_soon() -> None:
    sink = AfterOthers(10**6, most=5)
    [ack] = SinkTask(sink, "job", "aa", 0, 1).run(with_row_hash(rows(0, 50_000)), 0, 1)
    assert isinstance(ack.error, TooManyDeadLetters)
    assert sink.tries < 20_000


def test_what_does_not_go_together() -> None:
    with pytest.raises(ValueError, match="'calls' is for dead letters of 'main', and cannot have some itself"):
        DeadLettering.__init__(Choosy(), name="main", dead_letters=choosy(Calls()))
    for limit in (-1, 10_001, 1.5, True, "some"):
        with pytest.raises(ValueError, match="max_dead_letters"):
            DeadLettering.__init__(Choosy(), name="main", max_dead_letters=limit)  # type: ignore[arg-type]

    shared = Calls()
    with pytest.raises(ValueError, match="'letters' is for the dead letters of two sinks"):
        sinks_by_name([choosy(shared), choosy(shared)])


SEARCHED = """
import gc
from coordinator.task.task import _freeze_imports

class Sink: ...
class Other: ...

for kind in (Sink, Sink, Sink, Other, Other):
    imported = [kind]
    _freeze_imports(kind)
    print(any(each is imported for each in gc.get_objects()))
"""


def test_what_a_first_task_has_imported_is_left_out_of_the_search_for_garbage() -> None:
    """In a process of its own, since what is left out is so for all tests of a process."""
    done = subprocess.run([sys.executable, "-c", SEARCHED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "True", "True", "False"]


def test_a_share_of_the_rows_is_not_cut_by_how_doubles_are_written() -> None:
    assert [allowed(percent / 100, 100) for percent in range(101)] == [*range(101)]


class TestSeveralSinks:
    """One task writes its partition into all of them."""

    @staticmethod
    def run(*sinks: Calls) -> list[Ack]:
        tasks = tuple(SinkTask(sink, "job", "aa", 0, 1) for sink in sinks)
        return OnePass(tasks).run(with_row_hash(rows(0, 250)), 0, 1)

    @staticmethod
    def named(name: str, fails_at: str = "") -> Calls:
        sink = Calls(fails_at)
        sink.name = name
        return sink

    def test_each_is_a_participant(self) -> None:
        a, b = self.named("a"), self.named("b")
        acks = self.run(a, b)
        assert [(ack.sink, ack.fingerprint.rows) for ack in acks] == [("a", 250), ("b", 250)]
        assert a.calls == b.calls == ["open", "begin_transaction", "write", "write", "write", "pre_commit", "close"]

    def test_nothing_is_pre_committed_before_all_have_all_rows(self) -> None:
        a, b = self.named("a"), self.named("b", "write")
        with pytest.raises(ConnectionError):
            self.run(a, b)
        assert "pre_commit" not in a.calls
        assert a.calls[-2:] == b.calls[-2:] == ["rollback", "close"]

    def test_an_error_of_one_undoes_the_work_of_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Refusing(Calls):
            def pre_commit(self, transaction: None) -> Identity:
                raise BadValue("no such row")

        aborted = list[Identity]()
        a, b = self.named("a"), Refusing()
        monkeypatch.setattr(a, "abort", aborted.append)
        b.name = "b"
        [ack] = self.run(a, b)
        assert (ack.sink, ack.committable) == ("b", None)
        assert "no such row" in str(ack.error)
        assert len(aborted) == 1
