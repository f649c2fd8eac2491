"""An object in storage that somebody has altered is named, and hides nothing else: in no command and on no tab."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from coordinator import CheckpointCoordinator
from coordinator.cli import main
from coordinator.operations.jobfile import load_job
from coordinator.operations.statistics.model import CheckpointStatistics
from coordinator.operations.ui.job import JobView
from coordinator.operations.ui.page import TABS, page_of
from coordinator.storage import CheckpointStorage, open_storage
from coordinator.store.encoding import seal, unseal
from sinks._util.log import get_logger
from sinks.errors import SinkError, printable
from sinks.transaction import shown
from tests.cli.jobs import Job

ESCAPES = "\x1b]0;owned\x07\x1b[31m\u202eevil\x9b"
COMMANDS = (
    ("status",),
    ("history",),
    ("checkpoints", "show"),
    ("savepoint", "list"),
    ("in-doubt", "list"),
)


@pytest.fixture
def job(file_job: Job, tmp_path: Path) -> Job:
    text = file_job.file.read_text()
    file_job.file.write_text(
        text.replace("[checkpointing]", f'[checkpointing]\nsavepoint_dir = "{tmp_path.as_uri()}/savepoints"')
    )
    file_job.run()
    with load_job(str(file_job.file)) as coordinator:
        coordinator.trigger_savepoint(f"{tmp_path.as_uri()}/savepoints", str(tmp_path / "query"))
    return file_job


def storage_of(coordinator: CheckpointCoordinator) -> CheckpointStorage:
    return coordinator.storage


def put(storage: CheckpointStorage, key: str, value: bytes) -> None:
    storage.delete(key)
    assert storage.put_if_absent(key, value)


def altered(storage: CheckpointStorage, key: str, changes: dict[str, Any]) -> bytes:
    """As it is, but for these fields, and with the checksum that belongs to that."""
    data = storage.get(key)
    assert data
    return seal(unseal(data, key) | changes)


NESTED = b'{"a":' * 100_000 + b"1" + b"}" * 100_000


@pytest.mark.parametrize("kind", ["nested", "text", "wrong types"])
@pytest.mark.parametrize("folder", ["alive", "statistics", "loss", "checkpoint"])
def test_in_checkpoint_storage(job: Job, kind: str, folder: str) -> None:
    with load_job(str(job.file)) as coordinator:
        storage = storage_of(coordinator)
        root, generation = storage.list("")[0].partition("/")[0], coordinator._protocol.store.newest_generation()
        made = {"alive": f"{root}/alive/{generation:010d}.9999999999", "loss": f"{root}/loss/x.{0:020d}.{0:06d}"}
        key = made.get(folder) or next(key for key in storage.list("") if f"/{folder}/" in key)
        wrong = seal(
            {"job": "orders", "checkpoints": [{"status": [], "checkpoint_id": "evil"}], "sign": {"at": "evil"}}
        )
        put(storage, key, {"nested": NESTED, "text": b"\xff nothing", "wrong types": wrong}[kind])
    for command in COMMANDS:
        result = job.cli(*command, code=None)
        assert result.exception is None or isinstance(result.exception, SystemExit), command
        assert "Traceback" not in result.output
    told = {"alive": "status", "statistics": "history", "loss": "status", "checkpoint": "checkpoints show 0"}[folder]
    output = job.cli(*told.split(), code=None).output
    assert key in output.replace("\n", "")
    if folder == "checkpoint":
        assert job.json("checkpoints", "show", "1")["checkpoint"] == 1
    see_all(job)


def test_the_newest_record_hides_neither_the_driver_nor_other_records(job: Job) -> None:
    with load_job(str(job.file)) as coordinator:
        storage, store = storage_of(coordinator), coordinator._protocol.store
        store.journal.give_heartbeat(store.newest_generation(), 5, 1000.0)
        *_, newest = [key for key in storage.list("") if "/checkpoint/" in key]
        put(storage, newest, b"evil")
    told = job.cli("status", code=1)
    assert newest in told.stderr.replace("\n", "")
    assert "Driver: generation " in told.stdout
    assert "Newest checkpoint: it cannot be read." in told.stdout
    assert newest in job.json("status", code=1)["errors"][0]
    assert job.json("checkpoints", "show", "1")["checkpoint"] == 1


def test_what_a_driver_says_that_it_does(job: Job) -> None:
    with load_job(str(job.file)) as coordinator:
        storage, store = storage_of(coordinator), coordinator._protocol.store
        store.journal.give_heartbeat(store.newest_generation(), 5, 1000.0)
        key = storage.list(f"{storage.list('')[0].partition('/')[0]}/alive")[-1]
        put(storage, key, altered(storage, key, {"now": {"doing": 5, "in_doubt": {"a": "b"}, "checkpoint": []}}))
        assert "runs, or has died since its last heartbeat" in job.cli("status").output
        now = CheckpointStatistics("orders", 3, triggered_at=1000, phases={"prepare": 0.5}).to_json()
        put(storage, key, altered(storage, key, {"now": {"doing": ["sink x: commit"], "checkpoint": now}}))
        said = job.cli("status").stdout
        assert "In progress by the last heartbeat: checkpoint 3, for" in said
        assert "Done: prepare 0.5 s." in said
        assert "sink x: commit" in said
    see_all(job)


def see_all(job: Job) -> dict[str, str]:
    with load_job(str(job.file)) as coordinator:
        client = page_of(JobView(coordinator)).test_client()
        pages = {}
        for tab in TABS:
            with client.get(f"/{tab}", headers={"Host": "127.0.0.1"}) as answer:
                assert answer.status_code == 200, tab
                pages[tab] = answer.get_data(as_text=True)
    return pages


@pytest.mark.parametrize(
    "changes", [{"created_at": "evil"}, {"created_at": 10**30}, {"records": 5}, {"files": None}, None]
)
def test_savepoints(job: Job, tmp_path: Path, changes: dict[str, Any] | None) -> None:
    storage = open_storage((tmp_path / "savepoints").as_uri())
    [good] = [key for key in storage.list("") if key.endswith("_metadata")]
    bad = "savepoint-orders-9-bad"
    value = NESTED if changes is None else altered(storage, good, {"id": bad} | changes)
    put(storage, f"{bad}/_metadata", value)
    result = job.cli("savepoint", "list")
    assert good.partition("/")[0] in result.stdout
    assert bad in result.output
    page = see_all(job)["savepoints"]
    assert good.partition("/")[0] in page
    assert bad in page


def test_a_record_that_names_what_is_not_of_the_job(pg_job: Job) -> None:
    """As somebody could write it who can write to storage: nothing is committed by such a name."""
    pg_job.run()
    with load_job(str(pg_job.file)) as coordinator:
        storage = storage_of(coordinator)
        newest = [key for key in storage.list("") if "/checkpoint/" in key][-1]
        data = storage.get(newest)
        assert data
        body = unseal(data, newest)
        body["committables"][0]["transaction"] = {"gid": "somebody elses"}
        put(storage, newest, seal(body))
    result = pg_job.cli("resolve", code=1)
    assert "is no transaction of this job and sink" in result.output
    assert "somebody elses" in result.output


def test_text_of_others_steers_no_terminal(job: Job) -> None:
    for text in (printable(ESCAPES), str(SinkError(ESCAPES)).removesuffix(" [EO-SINK]"), shown({"gid": ESCAPES})):
        assert text == r"\x1b]0;owned\x07\x1b[31m\u202eevil\x9b"
    assert printable("Zürich\n\t✓ 北京") == "Zürich\n\t✓ 北京"
    with load_job(str(job.file)) as coordinator:
        storage = storage_of(coordinator)
        [key] = [key for key in storage.list("") if "/statistics/" in key]
        one = json.loads(storage.get(key) or b"")["body"]["checkpoints"][-1]
        put(storage, key, seal({"job": "orders", "checkpoints": [one | {"status": "failed", "error": ESCAPES}]}))
    output = job.cli("history").output
    pages = see_all(job)
    for text in (output, pages["history"], pages[""]):
        assert r"\x1b]0;owned" in text
        assert not {"\x1b", "\u202e", "\x9b", "\x07"} & set(text)


def test_tracebacks_of_others_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    handler, logger = logging.StreamHandler(stream), get_logger("sinks.somewhere")
    logger.addHandler(handler)
    try:
        raise ValueError(ESCAPES)
    except ValueError as error:
        logger.exception("sink %r failed: %s", "orders", error)
    finally:
        logger.removeHandler(handler)
    with pytest.raises(SystemExit) as ended, patch("coordinator.cli.app.app", side_effect=ValueError(ESCAPES)):
        main()
    for text in (stream.getvalue(), str(ended.value)):
        assert "Traceback" in text
        assert r"\x1b]0;owned" in text
        assert not {"\x1b", "\u202e", "\x9b", "\x07"} & set(text)
    assert stream.getvalue().startswith(r"sink 'orders' failed: \x1b]0;owned")
