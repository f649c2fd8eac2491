from __future__ import annotations

from coordinator.listener import Step
from tests.cli.play import INPUT, Job

SUMMARY = {
    *("checkpoint", "lineage", "generation", "mode", "guarantee", "query_id", "triggered_at", "completed_at"),
    *("duration_ms", "rows", "partitions", "participants", "offsets", "restored_from", "replays", "accepted"),
}


def test_list_and_show(file_job: Job) -> None:
    assert file_job.json("checkpoints", "list") == {
        "job": "orders",
        "storage": (file_job.folder / "checkpoints").as_uri(),
        "newest_generation": 0,
        "checkpoints": [],
        "losses": [],
    }
    assert "No checkpoint of job 'orders' is complete" in file_job.cli("checkpoints", "list").stderr
    assert "was ever given up" in file_job.cli("losses").stderr
    assert "there is none" in file_job.cli("checkpoints", "show", code=1).stderr
    file_job.run(2)
    listed = file_job.json("checkpoints", "list")
    assert listed["newest_generation"] == 1
    assert [one["checkpoint"] for one in listed["checkpoints"]] == [0, 1]
    one = listed["checkpoints"][1]
    assert set(one) == SUMMARY
    assert one["rows"] == {"files": sum(table.num_rows for table in INPUT[1])}
    assert (one["partitions"], one["participants"]) == ({"files": 4}, {"files": 3})
    assert (one["mode"], one["offsets"], one["replays"]) == ("exactly_once", ['{"end":1}'], [])
    assert one["guarantee"].startswith("exactly-once")

    shown = file_job.json("checkpoints", "show", "0")
    assert set(shown) == SUMMARY | {"committables"}
    assert shown == file_job.json("checkpoints", "show", "0")
    assert [c["subtask"] for c in shown["committables"]] == [0, 1, 2]
    assert set(shown["committables"][0]) == {"sink", "subtask", "transaction", "proof", "fingerprint", "round"}
    assert file_job.json("checkpoints", "show")["checkpoint"] == 1
    assert "there are 0, 1" in file_job.cli("checkpoints", "show", "7", code=1).stderr


def test_a_replay_is_shown(file_job: Job) -> None:
    file_job.run(crash=(Step.COMPLETE, 0))
    one = file_job.json("in-doubt", "list", code=1)["transactions"][0]
    file_job.cli("in-doubt", "abort", one["id"], "--break-decision", "--yes")
    file_job.run(1)
    shown = file_job.json("checkpoints", "show", "0")
    (replay,) = shown["replays"]
    assert (replay["round"], replay["generation"], replay["participants"]) == (1, 2, {"files": 1})
    assert shown["participants"] == {"files": 3}
    assert [c["round"] for c in shown["committables"]] == [0, 0, 0, 1]


def test_tables_hold_what_json_holds(file_job: Job) -> None:
    file_job.run(2)
    listed = file_job.cli("checkpoints", "list").stdout
    shown = file_job.cli("checkpoints", "show").stdout
    about = file_job.json("checkpoints", "show")
    assert about["lineage"] in listed
    for text in (about["query_id"], about["guarantee"], about["committables"][0]["fingerprint"]["hash"]):
        assert text in shown
