"""Which cases of the kit `make test` leaves to `.ci/run` or `make test-all`: further ones of a failure that it has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest

from coordinator import Step
from sinks.testing import SinkContract

EVERY_CASE = ("test_custom_sink.py", "test_shelf.py")
"""Run every case of the kit, or of the contract, at little cost, since their sinks write files."""

EVERY_TEST = "postgres/test_conformance.py"
"""Runs every test of the kit in `.ci/run`: in a real system that prepares, and in one with staging tables."""

QUOTED = "other job/ü 'o\"`; DROP TABLE orders --%s_%+sink"

KEPT: dict[str, Collection[Any]] = {
    "test_an_undisturbed_run": (),
    "test_driver_killed_at_every_step": (),
    "test_a_driver_killed_at_any_line_of_commit": (3,),
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
        QUOTED,
    ),
}
"""Of these tests of the kit, the cases that each sink but `EVERY_CASE` runs. At which step a driver dies, and what the
next one does about it, is the protocol's, whatever the sink; what is the sink's is whether another process sees,
commits and aborts what a dead one has pre-committed."""

KEPT_ELSEWHERE: dict[str, Collection[Any]] = {
    "test_a_system_that_does_not_answer_is_no_outcome": (3,),
    "test_a_driver_killed_at_any_line_of_abort": (),
    "test_a_driver_killed_at_any_line_of_purge": (),
    "test_two_drivers_commit_the_same": (3,),
    "test_an_abort_beside_a_commit": (3,),
    "test_an_abort_beside_a_pre_commit": (),
    "test_begin_transaction_fails_at_any_line": (),
    "test_many_commit_at_once": (),
    "test_nothing_grows_with_each_transaction": (),
    "test_silence_is_no_answer": ("committed_checkpoints",),
    "test_a_task_fails_and_rolls_back": ("pre_commit",),
    "test_process_killed_inside_the_sink": ("commit_all",),
    "test_a_pre_commit_beside_another_task_or_a_sweep": ("abort",),
    "test_a_purge_beside_a_pre_commit": ("purge",),
    "test_a_purge_beside_committed_checkpoints": (),
    "test_a_commit_beside_an_abort": (),
    "test_at_least_once_loses_nothing_when_killed_again_and_again": (),
    "test_names_that_look_alike_are_not_the_same": ("JOB+sink", "job+s_nk", QUOTED),
}
"""The same for what is not `EVERY_CASE`. The further cases of `EVERY_TEST` run in `.ci/run`."""

SECOND_VARIANTS = (
    "another_database/test_conformance.py::TestSqliteSink",
    "delta/test_conformance.py::TestPartitioned",
    "mysql/test_conformance.py::TestStaged",
    "sqlalchemy_sink/test_conformance.py::TestPostgres",
)
"""The code of another variant over other files or another database: it runs only `RISKIEST`, in `.ci/run`."""

WHOLE_IN_CI = (
    "iceberg/test_conformance.py::TestIcebergSink",
    "postgres/test_conformance.py::TestStaged",
    "sqlalchemy_sink/test_conformance.py::TestSQLite",
)
"""`make test` runs `RISKIEST` of these, and all of sinks that share most of their code; the rest is of `.ci/run`."""

RISKIEST = (
    "test_abort_after_commit_raises_and_changes_nothing",
    "test_abort_leaves_nothing_and_may_be_repeated",
    "test_abort_of_what_was_never_seen_is_no_error_and_no_commit",
    "test_another_process_sees_and_commits_what_a_dead_one_pre_committed",
    "test_bad_rows_are_named_and_the_others_written",
    "test_commit_after_abort_is_lost_and_stays_lost",
    "test_commit_all_tells_the_outcome_of_each_in_order",
    "test_commit_is_idempotent",
    "test_commit_makes_all_rows_visible_once",
    "test_commit_of_what_was_never_seen_is_no_success_and_no_proof",
    "test_committed_checkpoints_are_those_that_are_visible",
    "test_evolve_takes_new_columns",
    "test_in_doubt_lists_no_other_sinks_transactions",
    "test_killed_again_and_again",
    "test_names_that_look_alike_are_not_the_same",
    "test_pre_committed_rows_are_invisible_and_in_doubt",
    "test_purge_removes_nothing_that_is_still_asked_for",
    "test_rollback_after_a_pre_commit_whose_answer_was_lost",
    "test_rollback_leaves_nothing",
    "test_settings_that_changed_before_the_commit",
    "test_the_audit_counts_what_is_visible",
    "test_two_drivers_commit_the_same",
    "test_upserts_of_one_key_in_one_checkpoint",
    "test_written_rows_are_invisible_and_not_in_doubt",
)

PREPARED_HAS_IT = ("mysql/test_crashes.py", "postgres/test_set_back.py")
"""What these do with staging tables is large: with prepared transactions the server has more to lose."""


def marker(item: pytest.Item) -> str:
    """`large`, `ci`, or "" for what `make test` runs."""
    name = getattr(item, "originalname", "")
    if name == "test_over_a_local_spark":
        return "large"  # jobs of Spark are killed in tests/spark, for all sinks
    cases: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    if str(item.path).endswith(PREPARED_HAS_IT) and "staged" in cases.values():
        return "large"
    if name == "test_server_goes_down_between_pre_commit_and_commit" and cases["how"] == "restart":
        return "large"  # one that is killed has more to lose
    if item.path.name in EVERY_CASE or not issubclass(getattr(item, "cls", None) or object, SinkContract):
        return ""
    kit, riskiest = "::".join(item.nodeid.split("::")[:2]), name in RISKIEST
    second_variant = kit.endswith(SECOND_VARIANTS)
    every_test = item.nodeid.startswith(f"tests/{EVERY_TEST}")

    def left_out(kept: Mapping[str, Collection[Any]]) -> bool:
        return name in kept and not any(case in kept[name] for case in cases.values())

    left_out_elsewhere = left_out(KEPT_ELSEWHERE)
    if (second_variant and not riskiest) or left_out(KEPT) or (left_out_elsewhere and not every_test):
        return "large"
    return "ci" if second_variant or left_out_elsewhere or (kit.endswith(WHOLE_IN_CI) and not riskiest) else ""
