from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from tests.cli.play import Job, cli
from tests.dead_letters import batch, ids


def test_counts_and_the_newest_letters(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "good.db")) as connection:
        connection.execute("CREATE TABLE good (id bigint, name varchar(20) NOT NULL, amount float)")
    place, dead = f'type = "sqlalchemy"\nurl = "sqlite:///{tmp_path}', "[sinks.dead_letters]\n"
    job = Job(
        tmp_path, f'{place}/good.db"\ntable = "good"\n{dead}{place}/dead.db"\ntable = "dead"\ncreate_table = true'
    )
    job.input = [batch(number, by_client=None, by_server=False) for number in range(3)]
    assert "has no dead letters" in cli("dead-letters", "list", "--job", str(job.file)).stderr
    job.run()
    found = job.json("dead-letters", "list")["checkpoints"]
    counts = [len(ids([tables], bad=True)) for tables in job.input]
    assert [(one["checkpoint"], one["sink"], one["dead_letters"]) for one in found] == [
        (number, "good", count) for number, count in enumerate(counts)
    ]
    newest = job.json("dead-letters", "show", "-n", "2")["dead_letters"]
    assert [one["checkpoint"] for one in newest] == [2, 2]
    assert json.loads(newest[0]["row"])["name"] is None
    told = cli("dead-letters", "show", "good", "--job", str(job.file)).stdout
    assert "BadValue" in told
    assert "there are good" in cli("dead-letters", "show", "dead", "--job", str(job.file), code=2).stderr

    bad = ids(job.input, bad=True)
    letters = job.json("dead-letters", "show", "-n", "1000")["dead_letters"]
    assert len(letters) == len(bad)
    mended = [{"letter": one["letter"], "row": json.loads(one["row"]) | {"name": "men\u2028ded"}} for one in letters]
    older = shutil.copytree(tmp_path / "checkpoints", tmp_path / "older")
    file = tmp_path / "mended.jsonl"
    file.write_bytes(
        "\ufeff".encode() + "\r\n".join(json.dumps(one, ensure_ascii=False) for one in mended[1:]).encode()
    )
    assert "Nothing was changed" in job.cli("dead-letters", "replay", "--from", str(file), "--dry-run").stderr
    told = job.cli("dead-letters", "replay", "--from", str(file)).stderr
    assert f"Written: {len(bad) - 1} row(s). Refused again, and letters again: 0." in told
    assert "there is no letter 0.0" in job.cli("dead-letters", "replay", "0.0", code=1).stderr
    told = job.cli("dead-letters", "replay", letters[0]["letter"].rpartition(".")[0], code=1).stderr
    assert "Written: 0 row(s). Refused again, and letters again: 1." in told
    assert "NOT NULL constraint failed" in told or "BadValue" in told
    shown = job.json("dead-letters", "show", "-n", "1000")["dead_letters"]
    assert [one["replayed"] for one in shown] == [False] + [True] * len(bad)
    assert job.json("dead-letters", "replay", "--all", code=1)["refused"] == 1
    with closing(sqlite3.connect(tmp_path / "good.db")) as connection:
        assert connection.execute("SELECT count(*), count(DISTINCT id) FROM good").fetchall() == [(3 * 260 - 1,) * 2]
    books = job.json("verify", code=None)
    assert books["verdict"] == "balanced", books["differences"]
    assert books["replays"]["good"]["totals"]["good"]["ledger"] == len(bad) - 1
    assert "Replays of the dead letters of sink 'good'" in job.cli("verify").stderr
    assert "is left to finish" in job.cli("dead-letters", "replay").stderr
    storage, newer = tmp_path / "checkpoints", tmp_path / "newer"
    storage.rename(newer)
    shutil.copytree(older, storage)
    told = job.cli("dead-letters", "replay", "--all", code=1).stderr
    assert "Restore the newer storage" in told or "restore it together" in told, told
    assert "run it again" not in told
    shutil.rmtree(storage)
    newer.rename(storage)
    assert "line 1: write" in _refused(job, file, "{}")
    with closing(sqlite3.connect(tmp_path / "good.db")) as connection:
        connection.execute("ALTER TABLE good RENAME TO bad")
    told = job.cli("dead-letters", "replay", "--all", code=1).stderr
    assert "has not ended" in told
    assert "run it again" in told
    assert "there is no letter" in _refused(job, file, json.dumps(mended[0] | {"letter": "0.0.0.0"}), code=1)


def _refused(job: Job, file: Path, text: str, code: int = 2) -> str:
    file.write_text(text)
    return job.cli("dead-letters", "replay", "--from", str(file), code=code).stderr
