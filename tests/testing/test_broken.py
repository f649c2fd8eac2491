"""Each clause of the contract has a broken sink, and the kit's test that names the clause catches it."""

from __future__ import annotations

import inspect
import pydoc
import re
import time
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from sinks import CommitOutcome, Committable, Identity, TransactionContext
from sinks.errors import SinkError
from sinks.testing import Clause, SinkContract, clauses
from tests.testing.broken_drivers import TakesOneRequestAtATime
from tests.testing.catalogue import Broken, catalogue
from tests.testing.shelf import Handle, Kit, Rows, Shelf, WholeShelf, stored

CATALOGUE = catalogue()


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
