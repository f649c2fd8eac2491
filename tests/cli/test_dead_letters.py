from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from tests.cli.jobs import Job, cli
from tests.dead_letters import batch, ids


def test_counts_and_the_newest_letters(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "good.db")) as connection:
        connection.execute("CREATE TABLE good (id bigint, name varchar(20) NOT NULL, amount float)")
    place, dead = f'type = "sqlalchemy"\nurl = "sqlite:///{tmp_path}', "[sinks.dead_letters]\n"
    job = Job(
        tmp_path, f'{place}/good.db"\ntable = "good"\n{dead}{place}/dead.db"\ntable = "dead"\ncreate_table = true'
    )
    job.input = [batch(number, by_client=None, by_server=False) for number in range(3)]
    job.run(2)
    job.run()
    found = job.json("history")["checkpoints"]
    counts = [len(ids([tables], bad=True)) for tables in job.input]
    assert [one["status"] for one in found] == ["completed", "completed", "restored", "completed"]
    assert [one["dead_lettered"] for one in found] == [{"good": counts[number]} for number in (0, 1, 1, 2)]
    assert f"dead letters: good {counts[0]}" in cli("history", "--job", str(job.file)).stdout
    newest = job.json("dead-letters", "show", "-n", "2")["dead_letters"]
    assert [one["checkpoint"] for one in newest] == [2, 2]
    assert json.loads(newest[0]["row"])["name"] is None
    told = cli("dead-letters", "show", "good", "--job", str(job.file)).stdout
    assert "BadValue" in told
    assert "there are good" in cli("dead-letters", "show", "dead", "--job", str(job.file), code=2).stderr

    bad = ids(job.input, bad=True)
    letters = job.json("dead-letters", "show", "-n", "1000")["dead_letters"]
    assert len({one["letter"] for one in letters}) == len(bad)
    assert [one["checkpoint"] for one in letters] == [number for number in (2, 1, 0) for _ in range(counts[number])]
    first = letters[0]
    about = [first[name] for name in ("lineage", "checkpoint", "partition", "row_number")]
    assert first["letter"] == ".".join(map(str, about))
    assert first["letter"] in cli("dead-letters", "show", "good", "--job", str(job.file)).stdout


def test_a_job_without_dead_letters(file_job: Job) -> None:
    file_job.run(1)
    told = file_job.cli("dead-letters", "show", code=2).stderr
    assert "no sink of this job has the option dead_letters" in told


def test_letters_in_a_lake_table_are_not_read_and_its_place_is_told(tmp_path: Path) -> None:
    good = f'type = "sqlalchemy"\nurl = "sqlite:///{tmp_path}/good.db"\ntable = "good"'
    job = Job(tmp_path, f'{good}\n[sinks.dead_letters]\ntype = "delta"\nuri = "{tmp_path}/lake/dead"')
    told = job.cli("dead-letters", "show", code=4).stderr
    assert f"DeltaSink(name='dead', table='{tmp_path}/lake/dead') cannot read its dead letters: look there" in told
