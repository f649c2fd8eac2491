"""Which tests run where: `make test` runs `SHORT`, `.ci/run` what is not `large`, and `make test-all` everything."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest

from coordinator import Step
from sinks.testing import SinkContract

KIT = (
    "test_another_process_sees_and_commits_what_a_dead_one_pre_committed",
    "test_commit_is_idempotent",
    "test_commit_makes_all_rows_visible_once",
    "test_killed_again_and_again",
    "test_two_drivers_commit_the_same",
)
"""What the short loop runs of the conformance kit for a sink of a real system."""

CRASHES = ("test_driver_killed_in_the_middle_of_the_commits", "test_server_killed_while_tasks_write")

SHORT: Mapping[str, Mapping[str, Collection[str]]] = {
    "a wrong decision: gap, wiped storage, other offsets, query, rows, or layout": {
        "protocol/test_decisions.py": (),
        "protocol/test_protocol.py": (),
    },
    "a broken rule": {"protocol/test_rules.py": (), "protocol/test_claims.py": ()},
    "an interleaving that nobody thought of": {
        "simulation/test_families.py": (),
        "simulation/test_seeds.py": (),
        "simulation/test_simulation.py": ("test_what_once_failed",),
        "test_model.py": (),
        "protocol/test_sweeps.py": (),
    },
    "a sink that breaks the contract": {
        "test_custom_sink.py": (),
        "postgres/test_conformance.py": [f"TestPrepared::{test}" for test in KIT],
        "mysql/test_conformance.py": [f"TestXA::{test}" for test in KIT],
        "kafka/test_conformance.py": [f"TestRows::{test}" for test in KIT],
        "delta/test_conformance.py": [f"TestDeltaSink::{test}" for test in KIT],
        "files/test_conformance.py": [f"TestFileSink::{test}" for test in KIT[1:3]],
        "iceberg/test_conformance.py": [f"TestIcebergSink::{test}" for test in KIT[1:3]],
        "sqlalchemy_sink/test_conformance.py": [f"TestSQLite::{test}" for test in KIT[1:4]],
    },
    "a driver or task that dies at any step": {"test_custom_sink.py": (), "test_task.py": ()},
    "a second driver, a zombie": {
        "test_custom_sink.py": (),
        "postgres/test_faults.py": ("test_a_driver_stopped_inside_its_move_does_not_hold_up_its_successor",),
    },
    "a server that dies or cuts connections": {
        "postgres/test_crashes.py": [f"TestCrashes::{test}[prepared]" for test in CRASHES],
        "mysql/test_crashes.py": [f"TestCrashes::{test}" for test in CRASHES],
        "kafka/test_crashes.py": ("test_broker_killed_between_steps",),
    },
    "a table that is not written once": {
        "postgres/test_sink.py": (
            "TestTable::test_rows_are_invisible_until_committed_and_then_there_once",
            "TestTable::test_the_last_change_of_a_key_wins_over_all_partitions",
        ),
        "mysql/test_sink.py": (
            "TestTable::test_rows_are_invisible_until_committed_and_then_there_once",
            "TestTable::test_the_last_change_of_a_key_wins_over_all_partitions",
        ),
    },
    "a table that is altered wrongly": {
        "postgres/test_evolution.py": ("TestEvolution::test_driver_killed_between_the_alter_and_the_rows",),
    },
    "a transaction that is lost, or whose outcome is unknown": {
        "postgres/test_proofs.py": (),
        "postgres/test_crashes.py": ("test_an_operator_rolls_back_a_decided_prepared_transaction",),
        "kafka/test_crashes.py": ("test_time_is_up_after_the_decision",),
    },
    "a value that is altered, cut off, or rejected": {
        "postgres/test_encode.py": (),
        "kafka/test_record_batch.py": (),
        "mysql/test_types.py": ("test_values_that_are_read_by_other_means",),
    },
    "a bad row": {"postgres/test_dead_letters.py": ("TestPostgres::test_the_driver_is_killed",)},
    "a memory that is restored to an older state, or deleted": {
        "protocol/test_memories.py": ("test_storage_of_before_a_restore", "test_storage_of_before_a_replay"),
        "postgres/test_set_back.py": ("test_a_server_set_back_behind_sparks_back",),
    },
    "several sinks that disagree": {
        "test_several_sinks.py": ("test_all_or_nothing_over_a_kill[complete record written]",)
    },
    "a lake table that is not written once, or that another engine reads wrongly": {
        "lakes/test_lakes.py": (
            "test_another_writer_commits_during_ours",
            "test_a_file_that_somebody_deleted_before_the_commit_is_lost",
            "test_delta_readers_skip_files_by_bounds_and_miss_no_row",
        ),
    },
    "files that are not written once, or that a reader reads wrongly": {
        "files/test_files.py": ("test_files_appear_one_after_the_other_and_each_whole",),
    },
    "a storage that tears, overwrites, or loses a value": {
        "storage/test_conformance.py": ("TestFile", "TestSqlite"),
    },
    "Spark: the driver, the JVM, and the workers die": {"spark/test_killed.py": ("test_killed_and_restarted",)},
    "Spark: retries, lost executors, workers, and shuffle files, speculation": {
        "spark/test_spark.py": ("test_python_worker_killed", "test_task_that_fails_and_succeeds_on_retry"),
    },
    "Spark Connect: the server, a worker, or the client dies": {
        "spark/test_connect.py": ("test_refused_where_the_server_unpickles_it",)
    },
    "a savepoint or restore that is interrupted": {"savepoint/test_crashes.py": ()},
    "an operator's request that is lost, or done twice": {
        "requests/test_requests.py": (
            "test_a_driver_that_dies_after_it_has_begun",
            "test_a_query_is_stopped",
            "test_a_request_outlives_its_driver",
            "test_what_was_answered_is_not_done_again",
        ),
    },
    "a web page, command, metric, or row count that is wrong": {
        "cli/test_checkpoints.py": (
            "test_a_replay_is_shown",
            "test_memories_that_agree",
            "test_show",
            "test_the_memory_that_was_set_back_is_named",
        ),
        "cli/test_in_doubt.py": ("test_decided_transactions_in_postgres_are_listed_and_committed",),
        "cli/test_jobfile.py": ("test_every_kind_of_sink_and_the_checkpoint_options", "test_what_is_wrong_is_named"),
        "cli/test_killed.py": (
            "test_a_driver_that_runs_is_told_from_one_that_was_killed",
            "test_resolve_says_what_it_commits",
        ),
        "cli/test_resolve.py": ("test_the_job_goes_on_without_what_was_accepted",),
        "cli/test_savepoint.py": ("test_of_a_stopped_query_and_back",),
        "cli/test_verify.py": ("test_a_table_of_postgres", "test_a_topic"),
        "protocol/test_statistics.py": (),
        "ui/test_page.py": (
            "test_a_running_job",
            "test_hostile_texts_stay_texts",
            "test_what_a_killed_driver_left_in_doubt",
        ),
    },
    "a failed query that is not restarted": {
        "restart/test_strategies.py": (),
        "restart/test_stopped.py": (),
    },
    "all at once, at random": {"chaos/test_chaos.py": ("test_every_row_once_whatever_fails",)},
    "documentation, a demo, or an example that does not run": {
        "test_docs.py": (),
        "test_tutorial.py": (),
        "install/test_wheel.py": ("test_the_first_pipeline",),
    },
    "a job of an older version that cannot go on": {
        "formats/test_formats.py": (
            "test_a_savepoint_of_an_older_format_is_restored",
            "test_what_an_older_format_has_in_doubt_is_finished",
        ),
    },
    "servers of the tests that misbehave": {
        "test_leaks.py": (),
        "test_make.py": ("test_what_takes_minutes_is_told_before_it_begins",),
    },
}
"""By kind of failure, files below `tests` and what the short loop runs of each: the tests whose names begin so after
the file's, or all of it that is not `large`. docs/testing.md has the same kinds in the same order."""

FILES: Mapping[str, frozenset[str]] = {
    file: frozenset(test for of in SHORT.values() if file in of for test in of[file])
    if all(of[file] for of in SHORT.values() if file in of)
    else frozenset()
    for files in SHORT.values()
    for file in files
}
"""The same without the kinds."""

EVERY_CASE = ("test_custom_sink.py", "test_kit.py", "test_shelf.py")
"""Run every case of the kit, or of the contract, at little cost, since their sinks write files or are simulated."""

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
    """Return `short`, `large`, or "" for what only `.ci/run` and `make test-all` run."""
    if item.get_closest_marker("large") or _is_large(item):
        return "large"
    file, _, test = item.nodeid.removeprefix("tests/").partition("::")
    if file not in FILES:
        return ""
    return "short" if not FILES[file] or any(_begins(test, name) for name in FILES[file]) else ""


def unknown(items: Iterable[pytest.Item]) -> list[str]:
    """Return what `SHORT` names and no collected test is, for example because a test has got another name."""
    tests = [item.nodeid.removeprefix("tests/") for item in items]
    named = [f"{file}::{test}" for file, some in FILES.items() for test in some] + [f"{file}::" for file in FILES]
    return [name for name in named if not any(_begins(test, name) for test in tests)]


def _begins(test: str, name: str) -> bool:
    """Return whether a test is the one of that name, one of its cases, or in the class or file of that name."""
    return test == name or (test.startswith(name) and (name.endswith("::") or test[len(name)] in "[:"))


def _is_large(item: pytest.Item) -> bool:
    """Return whether it is one of the further cases of the conformance kit."""
    name = getattr(item, "originalname", "")
    if name == "test_over_a_local_spark":
        return True  # jobs of Spark are killed in tests/spark, for all sinks
    cases: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    if str(item.path).endswith(PREPARED_HAS_IT) and "staged" in cases.values():
        return True
    if name == "test_server_goes_down_between_pre_commit_and_commit" and cases["how"] == "restart":
        return True  # one that is killed has more to lose
    if item.path.name in EVERY_CASE or not issubclass(getattr(item, "cls", None) or object, SinkContract):
        return False
    kit, riskiest = "::".join(item.nodeid.split("::")[:2]), name in RISKIEST
    second_variant = kit.endswith(SECOND_VARIANTS)
    every_test = item.nodeid.startswith(f"tests/{EVERY_TEST}")

    def left_out(kept: Mapping[str, Collection[Any]]) -> bool:
        return name in kept and not any(case in kept[name] for case in cases.values())

    return (second_variant and not riskiest) or left_out(KEPT) or (left_out(KEPT_ELSEWHERE) and not every_test)
