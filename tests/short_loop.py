"""Which cases of the kit `make test` leaves to `make test-all`: further ones of a failure that it has already."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from coordinator import Step
from sinks.testing import SinkConformance

EVERY_CASE = "test_custom_sink.py"
"""Runs every case of the kit, at little cost, since its sink writes files."""

KEPT: dict[str, Collection[Any]] = {
    "test_an_undisturbed_run": (),
    "test_driver_killed_at_every_step": (),
    "test_a_driver_of_another_process_commits_the_same": (),
    "test_process_killed_inside_the_sink": ("pre_commit", "commit_all"),
    "test_a_decided_transaction_is_rolled_back_by_an_operator": (Step.REPLAY_COMPLETE,),
    "test_a_second_driver_takes_over_from_a_zombie": ("pre_commit",),
    "test_names_that_look_alike_are_not_the_same": (
        "a:b+c",
        "a.b+c",
        "JOB+sink",
        "job+sink2",
        "job+s_nk",
        "job +sink",
        "_+sink",
        "other job/ü 'o\"`; DROP TABLE orders --%s_%+sink",
    ),
}
"""Of these tests of the kit, the cases that each other sink runs too. At which step a driver dies, and what the next
one does about it, is the protocol's, whatever the sink; what is the sink's is whether another process sees, commits and
aborts what a dead one has pre-committed."""


SECOND_VARIANTS = ("delta/test_conformance.py::TestPartitioned", "sqlalchemy_sink/test_conformance.py::TestPostgres")
"""The code of another variant over other files or another database: of its processes that die, only `ONCE`; no call
`FAILS` in it, and of a checkpoint of one or three transactions only that of three meets another driver."""

ONCE = ("test_another_process_sees_and_commits_what_a_dead_one_pre_committed", "test_killed_again_and_again")
FAILS = (
    "test_a_system_that_does_not_answer_is_no_outcome",
    "test_a_task_fails_and_rolls_back",
    "test_begin_transaction_fails_at_any_line",
    "test_silence_is_no_answer",
)
MANY = (
    "test_many_commit_at_once",
    "test_many_rows_in_several_batches_arrive",
    "test_nothing_grows_with_each_transaction",
)

OVER_OTHERS = (
    "sqlalchemy_sink/test_dead_letters.py::TestTwoPhase::test_what_only_the_move_shows_fails_the_checkpoint",
    "sqlalchemy_sink/test_dead_letters.py::TestMySQL::test_what_only_the_move_shows_fails_the_checkpoint",
)
"""Of the same code over SQLite, and of the same database under its own sink; most of it here is to look at tables."""


def is_large(item: pytest.Item) -> bool:
    name = getattr(item, "originalname", "")
    if item.nodeid.endswith(OVER_OTHERS):
        return True
    if name == "test_over_a_local_spark":
        return True  # jobs of Spark are killed in tests/spark, for all sinks
    cases: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    if name == "test_server_goes_down_between_pre_commit_and_commit":
        return bool(cases["how"] == "restart")  # one that is killed has more to lose
    if item.path.name == EVERY_CASE:
        return False
    if "::".join(item.nodeid.split("::")[:2]).endswith(SECOND_VARIANTS):
        dies = name in vars(SinkConformance) and name not in ONCE
        if dies or name in (*FAILS, *MANY) or cases.get("count") == 1:
            return True
    if name not in KEPT:
        return False
    return not any(case in KEPT[name] for case in cases.values())
