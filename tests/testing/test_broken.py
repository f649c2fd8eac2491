"""Each clause of the contract has a broken sink, and the kit's test that names the clause catches it."""

from __future__ import annotations

import datetime
import inspect
import pydoc
import re
import time
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from sinks import CommitOutcome, Committable, Identity, TransactionContext
from sinks.errors import SinkError
from sinks.testing import Clause, SinkContract, clauses
from sinks.testing.kit import end_test
from sinks.transaction import TransactionId, token
from tests.testing.broken_drivers import TakesOneRequestAtATime
from tests.testing.catalogue import Broken, catalogue
from tests.testing.in_order import first_failure
from tests.testing.shelf import EvolvingShelf, Handle, Kit, Rows, Shelf, WholeShelf, stored

CATALOGUE = catalogue()


@pytest.fixture(autouse=True)
def _ended() -> Iterable[None]:
    """End each test of the kit that a test has called, as its own fixture does."""
    yield
    end_test()


@pytest.mark.parametrize("broken", CATALOGUE, ids=str)
def test_it_is_caught_by_its_clause(broken: Broken, tmp_path: Path) -> None:
    (tmp_path / "shelf").mkdir()
    folder = {"tmp_path": tmp_path} if "tmp_path" in inspect.signature(broken.test).parameters else {}
    with pytest.raises(AssertionError, match=re.escape(f"{broken.clause.name}: ")) as caught:
        broken.test(Kit(), broken.sink(tmp_path / "shelf"), **folder, **broken.options)
    message = str(caught.value)
    assert message.startswith(broken.clause.broken("").partition("\n")[0]), message
    assert re.search(r"\n +seen: .", message), message
    assert re.search(r"\n +contract: docstring of \w+\S*, \S+(base|optional).py:\d+", message), message
    assert message.count("contract: ") == 1, message
    shown = [entry for entry in caught.traceback if not entry.ishidden(caught)]
    assert Path(shown[-1].path).name not in ("kit.py", "clauses.py"), "pytest shows a step, and not the test"


BY_AUTHORS = ("broken_quietly", "broken_for_ever", "broken_answers")
"""Modules of mistakes that many tests of the kit come by, or none did."""


def _in_order() -> Iterable[Any]:
    """Those whose first failure counts; most are for `make test-all`, since many tests come before."""
    for sink in {broken.sink: None for broken in CATALOGUE}:
        module = sink.__module__.rpartition(".")[2]
        if module in (*BY_AUTHORS, "broken_and_misnamed"):
            marks = [pytest.mark.large] if module in BY_AUTHORS else []
            yield pytest.param(sink, marks=marks, id=sink.__name__)


@pytest.mark.parametrize("sink", list(_in_order()))
def test_the_first_failure_of_the_kit_names_the_clause(sink: type[Shelf], tmp_path: Path) -> None:
    """An author reads it first."""

    class Evolves(Kit):
        def evolving(self, shown: Shelf) -> Shelf:
            return sink(shown.folder)

    evolves = issubclass(sink, EvolvingShelf)
    failure = first_failure(Evolves if evolves else Kit, Shelf if evolves else sink, tmp_path)
    assert failure is not None
    expected = {broken.clause.name for broken in CATALOGUE if broken.sink is sink}
    assert failure.clause in expected, f"{failure.test}: {failure.message}"


class DerivesAFolderFromItsName(Shelf):
    """What it makes of its name, it makes once."""

    def __init__(self, folder: Path, name: str = "shelf") -> None:
        super().__init__(folder, name)
        self.token = token(name)

    def paths(self, job: str, state: str) -> list[Path]:
        paths = self.folder.glob(f"{TransactionId.prefix(job)}*.{state}")
        return [path for path in paths if TransactionId.parse(path.stem).sink == self.token]


@pytest.mark.parametrize(
    ("test", "options"),
    [
        (Kit.test_in_doubt_lists_no_other_sinks_transactions, {}),
        (Kit.test_names_that_look_alike_are_not_the_same, {"ours": "job+sink", "theirs": "job+sink2"}),
        (Kit.test_the_longest_names, {"characters": "🙂"}),
        (Kit.test_purge_removes_nothing_that_is_still_asked_for, {}),
    ],
)
def test_a_sink_may_derive_something_from_its_name(
    test: Callable[..., None], options: dict[str, Any], tmp_path: Path
) -> None:
    test(Kit(), DerivesAFolderFromItsName(tmp_path), **options)


class WritesWhereItsNameSays(Shelf):
    def __init__(self, folder: Path, name: str = "shelf") -> None:
        super().__init__(folder / name, name)
        self.folder.mkdir(exist_ok=True)


def test_a_sink_whose_target_is_named_as_the_sink_is_told_of_the_hook(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"`named` made 'shelf-2': override it in your kit if they have"):
        Kit().test_purge_removes_nothing_that_is_still_asked_for(WritesWhereItsNameSays(tmp_path))


class IsAlwaysNamedTheSame(Kit):
    def named(self, sink: Any, name: str) -> Any:
        return sink


def test_a_hook_that_makes_no_other_sink_is_told(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="`named` of IsAlwaysNamedTheSame has to return another sink"):
        IsAlwaysNamedTheSame().test_in_doubt_lists_no_other_sinks_transactions(Shelf(tmp_path))


class TakesTimes(Kit):
    types = (pa.int64(), pa.time64("us"))


class TakesTheseTimes(Kit):
    types: ClassVar[Any] = {pa.time64("us"): [datetime.time(1), datetime.time.max, None]}


def test_a_type_without_values_is_told(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"`types` of TakesTimes names time64\[us\], and the kit has no"):
        TakesTimes().test_values_of_every_type_that_it_takes_arrive(Shelf(tmp_path))


def test_a_type_may_come_with_its_values(tmp_path: Path) -> None:
    TakesTheseTimes().test_values_of_every_type_that_it_takes_arrive(Shelf(tmp_path))
    with pytest.raises(AssertionError, match="WRITE: "):
        TakesTheseTimes().test_values_of_every_type_that_it_takes_arrive(ForgetsMicroseconds(tmp_path))


class ForgetsMicroseconds(Shelf):
    def put(self, transaction: Handle, rows: Rows) -> None:
        times = [{name: str(value)[:8] for name, value in row.items()} for row in rows]
        super().put(transaction, times)


class RefusesWhatWasGivenUp(Shelf):
    """It tells what it does not find LOST, and bars its way by a tombstone, which a primary key keeps apart."""

    def of_gone(self, name: str) -> CommitOutcome:
        outcome = super().of_gone(name)
        if outcome.state.name == "UNKNOWN":
            with self.locked():
                if self.path(name, "ready").exists():
                    return self.commit(Committable({"name": name}))
                self.path(name, "gone").touch()
            return CommitOutcome.lost(f"{name} was not there, and cannot come any more")
        return outcome

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        with self.locked():
            if self.path(transaction.name, "gone").exists():
                raise SinkError(f"{transaction.name} was given up")
            return super().pre_commit(transaction)


def test_an_open_transaction_may_be_lost_if_it_is_barred(tmp_path: Path) -> None:
    Kit().test_a_commit_beside_a_pre_commit(RefusesWhatWasGivenUp(tmp_path))


@pytest.mark.parametrize(("name", "unlike"), [("ComparesWithoutAccents", "j\\xf6b"), ("NormalizesTexts", "e\\u0301")])
def test_what_looks_alike_is_told_apart(name: str, unlike: str, tmp_path: Path) -> None:
    broken = next(broken for broken in CATALOGUE if broken.sink.__name__ == name)
    with pytest.raises(AssertionError, match=re.escape(unlike)):
        broken.test(Kit(), broken.sink(tmp_path), **broken.options)


@pytest.mark.parametrize(
    "test", [Kit.test_several_participants_commit_together, Kit.test_what_is_unknown_keeps_no_sibling_from_its_outcome]
)
def test_requests_that_overlap_fail_in_the_tests_of_that_alone(test: Callable[..., None], tmp_path: Path) -> None:
    test(Kit(), TakesOneRequestAtATime(tmp_path))


class RefusesAtTheBegin(Shelf):
    """Its aborts leave tombstones, as primary keys, which a begin of the same name meets."""

    def begin_transaction(self, context: TransactionContext) -> Handle:
        if self.path(context.transaction_id, "gone").exists():
            raise SinkError(f"{context.transaction_id} was aborted")
        return super().begin_transaction(context)

    def abort(self, transaction: Identity) -> None:
        super().abort(transaction)
        self.path(transaction["name"], "gone").touch()


def test_a_tombstone_may_be_met_at_the_begin(tmp_path: Path) -> None:
    Kit().test_abort_of_what_was_never_seen_is_no_error_and_no_commit(RefusesAtTheBegin(tmp_path))


class LeavesWhatIsPreCommittedToTheSweep(Shelf):
    def rollback(self, transaction: Handle) -> None:
        transaction.file.close()
        self.path(transaction.name, "open").unlink(missing_ok=True)


@pytest.mark.parametrize("stopped", ["purge", "pre_commit"])
def test_a_rollback_may_leave_to_the_sweep_what_is_pre_committed(tmp_path: Path, stopped: str) -> None:
    Kit().test_a_purge_beside_a_pre_commit(LeavesWhatIsPreCommittedToTheSweep(tmp_path), stopped)


class PreCommitsOneAtATime(Shelf):
    """Another one fails, as by a conflict that a database reports, and is tried again."""

    def pre_commit(self, transaction: Handle) -> Identity | Committable:
        busy = self.folder / "busy"
        busy.touch(exist_ok=False)
        try:
            return super().pre_commit(transaction)
        finally:
            busy.unlink()


def test_tasks_may_fail_beside_each_other(tmp_path: Path) -> None:
    Kit().test_a_pre_commit_beside_another_task_or_a_sweep(PreCommitsOneAtATime(tmp_path), "pre_commit")


class CommitsOneAtATime(WholeShelf):
    """Another driver's commit raises meanwhile, as by a deadlock that a database reports, and is asked again."""

    def settle(self, committables: Sequence[Committable]) -> list[CommitOutcome]:
        busy = self.folder / "busy"
        busy.touch(exist_ok=False)
        try:
            time.sleep(0.1)
            return super().settle(committables)
        finally:
            busy.unlink()


def test_drivers_may_fail_beside_each_other(tmp_path: Path) -> None:
    Kit().test_many_commit_at_once(CommitsOneAtATime(tmp_path))


class ShowsTheGreater(Kit):
    """Of two participants' rows of a key, as a table that is ordered by a column."""

    def visible(self, sink: Shelf) -> Rows:
        shown: dict[int, tuple[int, str, dict[str, Any]]] = {}
        for path in sink.folder.glob("*.done"):
            for row in sink.merged([*stored(path)]):
                at = sink.order(path), row["name"], row
                shown[row["id"]] = max(at, shown.get(row["id"], at), key=itemgetter(0, 1))
        return [row for *_, row in shown.values()]


def test_either_participant_may_win_a_key(tmp_path: Path) -> None:
    ShowsTheGreater().test_upserts_of_one_key_in_one_checkpoint(Shelf(tmp_path))


class ListsWhatItCanBar(Shelf):
    """Open ones, too: their pre-commit fails once they were aborted."""

    def in_doubt(self, job: str) -> Iterable[Identity]:
        return [{"name": path.stem} for state in ("open", "ready") for path in self.paths(job, state)]

    def abort(self, transaction: Identity) -> None:
        super().abort(transaction)
        self.path(transaction["name"], "open").unlink(missing_ok=True)


def test_a_sink_that_cannot_tell_open_ones_is_told_to_say_so(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)IN_DOUBT_OPEN.*`cannot = \{Ability.TELL_OPEN: why\}`"):
        Kit().test_written_rows_are_invisible_and_not_in_doubt(ListsWhatItCanBar(tmp_path))


def test_pydoc_shows_each_clause_whole() -> None:
    shown = pydoc.plain(pydoc.render_doc(clauses))
    assert [clause for clause in Clause if f"`{clause.method}` {clause.sentence}\n" not in shown] == []


def test_every_clause_is_broken() -> None:
    assert set(Clause) - {broken.clause for broken in CATALOGUE} == set()


def test_every_test_of_the_contract_catches_one() -> None:
    tests = {test for name, test in inspect.getmembers(SinkContract) if name.startswith("test_")}
    assert {test.__name__ for test in tests - {broken.test for broken in CATALOGUE}} == set()
