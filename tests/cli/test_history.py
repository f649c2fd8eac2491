from __future__ import annotations

from coordinator.listener import Step
from tests.cli.play import INPUT, Job


def test_history(file_job: Job) -> None:
    assert "No statistics of job 'orders'" in file_job.cli("history").stdout
    file_job.run(1)
    file_job.run(2, crash=(Step.COMPLETE, 1))
    file_job.run(3)
    told = file_job.json("history")
    ended = [(one["checkpoint_id"], one["status"], one["generation"]) for one in told["checkpoints"]]
    # what the killed driver had restored, and not yet flushed, is not in it
    assert ended == [(0, "completed", 1), (1, "restored", 3), (2, "completed", 3)]
    assert told["checkpoints"][2]["rows"] == {"files": sum(table.num_rows for table in INPUT[2])}
    assert told["summary"]["status"] == {"completed": 2, "restored": 1}
    assert 0 < told["summary"]["took"]["min"] <= told["summary"]["took"]["p99"] <= told["summary"]["took"]["max"]
    table = file_job.cli("history").stdout
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [
        ["0", "completed"],
        ["1", "restored"],
        ["2", "completed"],
    ]
    assert "recovery 0." in table
    assert len(file_job.json("history", "--last", "1")["checkpoints"]) == 1
