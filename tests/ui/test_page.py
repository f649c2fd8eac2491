"""The web page: every tab tells what is so in every state of a job, and escapes what it is given."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from coordinator import CheckpointCoordinator, CheckpointListener, Replay
from coordinator.errors import CheckpointFailed
from coordinator.listener import Step
from coordinator.operations.heartbeat import State, look_for_driver
from coordinator.operations.inspection.balance import Balance
from coordinator.operations.statistics.model import CheckpointStatistics, Status, load_history
from coordinator.operations.ui import job as job_view
from coordinator.operations.ui.job import JobView, pace, waterfall
from coordinator.operations.ui.page import TABS, page_of
from coordinator.storage.base import WrappedStorage
from coordinator.store import encoding
from coordinator.store.job_store import JobStore
from examples.custom_sink import FileSink
from sinks.testing import Hooked
from sinks.testing.table import eventually
from sinks.transaction import Identity
from tests.protocol.job import CrashError, Job, crash_at, fail

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


class Browser:
    """What a browser asks of the page, without one."""

    def __init__(self, coordinator: CheckpointCoordinator) -> None:
        self._client = page_of(JobView(coordinator), "job.toml").test_client()
        self.headers: Mapping[str, str] = {}

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        answer = self._client.get(path, headers={"Host": "127.0.0.1:8000"} | headers)
        self.headers = dict(answer.headers)
        with answer:
            return answer.status_code, answer.text

    def see(self, path: str) -> str:
        """The page, without the spaces between its words."""
        status, text = self.get(path)
        assert status == 200, text
        return re.sub(r"\s+", " ", text)


@contextlib.contextmanager
def seen_from_outside(job: Job, **options: object) -> Iterator[Browser]:
    """By a browser, of a job whose driver is another process or gone."""
    with job.coordinator(**options) as coordinator:
        yield Browser(coordinator)


class Checked(HTMLParser):
    """Refuses what a hostile text could have made."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        assert tag not in ("img", "iframe", "style"), tag
        assert not [name for name in names if name.startswith("on")], names
        assert tag != "script" or names.get("src") == "/static/live.js"
        assert "style" not in names, "the Content-Security-Policy lets no inline style through"


def see_all(browser: Browser) -> dict[str, str]:
    pages = {tab: browser.see(f"/{tab}") for tab in TABS}
    for tab in re.findall(r'"/(history/[^"]+)"', pages["history"]):
        pages[tab] = browser.see(f"/{tab}")
    for text in pages.values():
        Checked().feed(text)
    return pages


# ---------------------------------------------------------------------- what is shown
def test_a_running_job(job: Job) -> None:
    """What its driver does is seen within seconds."""
    reached, go_on = threading.Event(), threading.Event()

    class Wait(CheckpointListener):
        def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
            if (step, checkpoint_id) == (Step.PRE_COMMITTED, 2):
                reached.set()
                assert go_on.wait(300)

    with (
        job.coordinator(listeners=[Wait()]) as driver,
        contextlib.ExitStack() as at_the_end,
        seen_from_outside(job) as browser,
    ):
        at_the_end.callback(go_on.set)
        running = threading.Thread(target=job.quiet().run, args=[driver])
        running.start()
        assert reached.wait(300)
        eventually(lambda: "checkpoint 2, for" in browser.see("/"))
        pages = see_all(browser)
        assert "Done: prepare" in pages[""]
        assert "<b>3</b> triggered" in pages[""]
        assert '<b>2</b> <a href="/history?status=completed">completed' in pages[""]
        assert "generation 1" in pages[""]
        assert pages["history"].index("in progress") < pages["history"].index(">completed</span>")
        assert "Of the last 2 tries: 2 completed." in pages["summary"]
        assert "computed by the driver of generation 1" in pages["guarantee"].lower()
        assert "it is gone with the driver&#39;s process" in pages["guarantee"]
        assert 'commit_timeout<td class="code">600.0' in pages["configuration"]
        opened = sum(bool(table.num_rows) for table in job.input[2])
        assert f"<b>{opened} open</b>: of the newest driver" in pages["in-doubt"]
        detail = next(text for tab, text in pages.items() if tab.startswith("history/1.1."))
        assert "&#34;end&#34;: 1" in detail
        assert detail.count("<rect") == 4
        participants = sum(bool(table.num_rows) for table in job.input[1])
        assert len(re.findall('<td>files<td class="n">[0-9]+<td', detail)) == 1 + participants
        go_on.set()
        running.join(300)
        eventually(lambda: "checkpoint 2, for" not in browser.see("/") and "<b>4</b> triggered" in browser.see("/"))


def test_what_the_driver_tells_of_itself(job: Job) -> None:
    with job.coordinator(config={"request_poll_interval": 0.1}) as driver, seen_from_outside(job) as browser:
        job.quiet(1).run(driver)
        driver.statistics.on_step(Step.COMMITTING, 1, {"transactions": {"files": 3}})
        driver.statistics.verified(Balance((), {"files": ("the ledger has 8 row(s)",)}, {}))
        eventually(lambda: "3 decided transactions are not known to be visible for" in browser.see("/"))
        assert "Row counts differ: " in browser.see("/")
        assert "The driver asks again" in browser.see("/in-doubt")


def test_savepoints(job: Job, target: str) -> None:
    job.run(2)
    with job.coordinator(config={"savepoint_dir": target}) as coordinator:
        taken = coordinator.trigger_savepoint(target, str(job.folder / "query"))
        text = Browser(coordinator).see("/savepoints")
    assert taken.uri in text
    assert "<code>coordinator savepoint trigger --checkpoint-location LOCATION --job job.toml</code>" in text


def test_no_checkpoint_yet(job: Job) -> None:
    with seen_from_outside(job) as browser:
        pages = see_all(browser)
    assert "the job has never been started on this storage" in pages[""]
    assert "No checkpoint yet" in pages["history"]
    assert "there are none" in pages["summary"]
    assert "there is no checkpoint yet" in pages["guarantee"]
    assert "no place for savepoints" in pages["savepoints"]


def test_what_a_job_that_requires_more_than_it_has_is_told(job: Job) -> None:
    """Its driver does not start, and its page says why."""
    with seen_from_outside(job, config={"require": "exactly-once"}) as browser:
        assert "it is gone with the driver&#39;s process" in browser.see("/guarantee")
        assert "This job is not exactly-once" in browser.see("/")


def test_a_job_whose_driver_ended(job: Job) -> None:
    with job.coordinator() as coordinator:
        job.query().run(coordinator)
    with seen_from_outside(job) as browser:
        pages = see_all(browser)
        assert "has ended its query" in pages[""]
        assert "The row counts could not all be compared" in pages["balance"], "files keep no ledger"
        assert len(re.findall("<td>files<td", pages["balance"])) == 2 + 1, "retained, and all"
        assert "Newest checkpoint: 3, complete" in pages[""]
        assert "Of the last 4 tries: 4 completed." in pages["summary"]
        assert len([tab for tab in pages if tab.startswith("history/")]) == 4
        assert "computed by the driver of generation 1" in pages["guarantee"].lower()
        assert "it is gone with the driver&#39;s process" in pages["guarantee"]


def test_all_jobs_of_the_storage(job: Job) -> None:
    job.run(2)
    JobStore(job.storage, "broken").claim_generation()
    key = next(key for key in job.storage.list("") if key.startswith("broken") and "generation" in key)
    job.storage.delete(key)
    job.storage.put_if_absent(key, b"evil")
    with seen_from_outside(job) as browser:
        text = browser.see("/jobs")
    assert "<td>job " in text
    assert re.search(r"<td>broken-\w+ \(its claim cannot be read\)", text)


def test_places_are_shown_without_their_passwords(job: Job) -> None:
    with job.coordinator() as coordinator:
        view = JobView(coordinator)
        place = "postgresql://me:geheim@host/database"
        view.config = replace(view.config, savepoint_dir=place, spool_dir=place, replay=Replay.SPOOL)
        text = page_of(view).test_client().get("/configuration").text
    assert text.count("postgresql://me:***@host/database") == 2
    assert "geheim" not in text


class Impatient(FileSink):
    """Answers until a time."""

    answers_until = math.inf

    def set_answer_timeout(self, seconds: float) -> None:
        self.answers_until = time.monotonic() + seconds

    def in_doubt(self, job: str) -> Iterable[Identity]:
        if time.monotonic() > self.answers_until:
            raise OSError("asked too late")
        return super().in_doubt(job)


def test_a_page_that_is_open_for_long_still_asks_the_sinks(job: Job, tmp_path: Path) -> None:
    job.run(2)
    sink = Impatient(tmp_path / "rows")
    sink.set_answer_timeout(-1)  # as the command did, which began long ago
    with job.coordinator(sink=sink) as coordinator:
        browser = Browser(coordinator)
        assert "asked too late" not in browser.see("/balance")
        assert "asked too late" not in browser.see("/in-doubt")


def test_the_pace_is_that_of_the_newest_driver() -> None:
    def completed(generation: int, second: int) -> CheckpointStatistics:
        return CheckpointStatistics(
            "orders", second, generation, Status.COMPLETED, ended_at=second * 1000, rows={"a": 10}
        )

    before = [completed(1, 2), completed(1, 1)]
    assert pace([completed(2, 1002), completed(2, 1000), *before]) == (5.0, 2.0), "and not the hours between both"
    assert pace([completed(2, 1000), *before]) is None
    assert pace(before) == (10.0, 1.0)
    assert pace([]) is None


def test_the_waterfall_of_two_sinks(job: Job) -> None:
    (job.folder / "other").mkdir()
    sinks = [job.sink, FileSink(job.folder / "other", name="other")]
    with CheckpointCoordinator("job", sinks, job.storage) as coordinator:
        job.query(1).run(coordinator)
        coordinator.history.flush()
        [one] = load_history(coordinator._protocol.store, [])
    assert [(bar.phase, bar.sink) for bar in waterfall(one)] == [
        ("prepare", ""),
        ("prepare", "files"),
        ("prepare", "other"),
        ("validate", ""),
        ("decide", ""),
        ("commit", ""),
        ("commit", "files"),
        ("commit", "other"),
    ]
    of_other = [bar for bar in waterfall(one) if bar.sink == "other"]
    assert all(0 <= bar.begin <= bar.begin + bar.width <= 1001 for bar in waterfall(one))
    assert of_other[0].begin == 0 < of_other[1].begin


def test_a_checkpoint_that_failed(job: Job) -> None:
    failing = Hooked(job.sink, "write", hook=fail)
    with job.coordinator(failing) as coordinator, pytest.raises(CheckpointFailed):
        job.query(1).run(coordinator)
    with seen_from_outside(job) as browser:
        pages = see_all(browser)
    assert "Checkpoint 0 failed:" in pages[""]
    assert "not today" in pages[""]
    [detail] = [text for tab, text in pages.items() if tab.startswith("history/")]
    assert "No phase was finished" in detail
    assert "not today" in detail


def test_what_a_killed_driver_left_in_doubt(job: Job) -> None:
    with pytest.raises(CrashError):
        job.run(2, listeners=[crash_at(Step.COMPLETE, 1)])
    with seen_from_outside(job, config={"heartbeat_interval": 30}) as browser:
        text = browser.see("/in-doubt")
        Checked().feed(text)
        decided = [identity["file"] for identity in job.sink.in_doubt("job")]
        assert decided
        assert f"<b>{len(decided)} commit</b>: decided: the next start of the query commits them" in text
        assert "<code>coordinator resolve --job job.toml</code>" in text
        assert all(file in text for file in decided)
    with pytest.raises(CrashError):
        job.run(2, listeners=[crash_at(Step.LOADED, -1)], config={"heartbeat_interval": 0.1})
    store = JobStore(job.storage, "job")
    eventually(lambda: (driver := look_for_driver(store)) is not None and driver.state is not State.RUNNING)
    with seen_from_outside(job) as browser:
        assert f"{len(decided)} transactions in doubt: commit" in browser.see("/")


def test_a_sink_that_cannot_tell(job: Job) -> None:
    class Silent(FileSink):
        def in_doubt(self, job: str) -> Iterator[Identity]:
            raise OSError("not today")

    with seen_from_outside(job, sink=Silent(job.sink.folder)) as browser:
        assert "Sink files cannot tell: OSError: not today" in browser.see("/in-doubt")


def test_what_to_do_about_a_storage_that_was_deleted(job: Job) -> None:
    class Remembers(FileSink):
        def committed_checkpoints(self, job: str) -> Mapping[str, int]:
            return {"lineage": 7}

    with seen_from_outside(job, sink=Remembers(job.sink.folder)) as browser:
        said = browser.see("/in-doubt")
    assert "Sink files: its newest checkpoint is 7, newer: the storage was deleted" in said
    assert "set storage, checkpointLocation and all targets back" in said, "names and commands keep their capitals"


def test_a_newest_record_that_was_altered(job: Job) -> None:
    """Under a driver that runs, and does not read it."""
    with job.coordinator() as driver, seen_from_outside(job) as browser:
        job.quiet(1).run(driver)
        [key] = [key for key in job.storage.list("") if "/checkpoint/" in key]
        job.storage.delete(key)
        job.storage.put_if_absent(key, b"evil")
        eventually(lambda: "The newest checkpoint cannot be read" in browser.see("/"))


def test_a_history_of_a_newer_version(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.run(1)
    newer = CheckpointStatistics("job", 7, 1, Status.COMPLETED).to_json() | {"status": "unheard of"}
    with monkeypatch.context() as later:
        later.setattr(encoding, "FORMAT", encoding.FORMAT + 1)
        JobStore(job.storage, "job").journal.add_statistics([newer], together=100, keep=100)
    with seen_from_outside(job) as browser:
        pages = see_all(browser)
    assert "The history cannot be read" in pages[""]
    assert "was written by a newer version" in pages["history"]
    assert "Newest checkpoint: 0" in pages[""]


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    job = Job(tmp_path)
    told = CheckpointStatistics(
        HOSTILE,
        3,
        1,
        Status.HALTED,
        rows={HOSTILE: 1},
        phases={HOSTILE: 1.0},
        reasons=(HOSTILE,),
        error=HOSTILE,
        offsets_from=(HOSTILE,),
        offsets_to=(f'{{"x": "{HOSTILE}"}}',),
    )
    JobStore(job.storage, HOSTILE).journal.add_statistics([told.to_json()], together=100, keep=100)
    sink = FileSink(job.sink.folder / HOSTILE.replace("/", ""), name=HOSTILE)
    with CheckpointCoordinator(HOSTILE, [sink], job.storage) as coordinator:
        browser = Browser(coordinator)
        for tab, text in see_all(browser).items():
            assert "<script>alert" not in text, tab
            assert "&lt;script&gt;alert(1)" in text, tab
        for path in (f"/{HOSTILE}", f"/history?status={HOSTILE}", f"/history/{HOSTILE}"):
            Checked().feed(browser.get(quote(path, safe="/?="))[1])


# ---------------------------------------------------------------------- who may
@pytest.fixture
def browser(job: Job) -> Iterator[Browser]:
    job.run(1)
    with seen_from_outside(job) as browser:
        yield browser


@pytest.mark.parametrize("host", ["rebound.example", "127.0.0.1.rebound.example:80", "localhost:1@rebound.example", ""])
def test_no_name_that_somebody_else_has_led_here(browser: Browser, host: str) -> None:
    for path in ("/", "/history", "/static/live.js"):
        status, text = browser.get(path, Host=host)
        assert status == 400
        assert "files" not in text
    assert browser.get("/", Host="localhost:1")[0] == 200


def test_nothing_can_be_done(browser: Browser) -> None:
    for tab in TABS:
        for method in ("post", "put", "delete"):
            answer = getattr(browser._client, method)(f"/{tab}", headers={"Host": "127.0.0.1"}, data={"how": "stop"})
            assert answer.status_code == 405
    assert browser.get("/elsewhere")[0] == browser.get("/history/1.1.1.1")[0] == 404


def test_headers(browser: Browser) -> None:
    for path in ("/", "/static/style.css", "/static/live.js", "/elsewhere"):
        browser.get(path)
        policy = browser.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert browser.headers["X-Frame-Options"] == "DENY"
        assert browser.headers["X-Content-Type-Options"] == "nosniff"
    assert "http://" not in "".join(browser.get(f"/static/{file}")[1] for file in ("style.css", "live.js"))


# ---------------------------------------------------------------------- what it costs
def test_one_slow_read_stops_no_other_page(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_view, "_PATIENCE", 0.5)
    go_on = threading.Event()

    class Frozen(WrappedStorage):
        def _call(self, method: str, key: str, *more: Any) -> Any:
            assert "/statistics" not in key or go_on.wait(300)
            return super()._call(method, key, *more)

    job.run(1)
    with seen_from_outside(job, storage=Frozen(job.storage)) as browser:
        with ThreadPoolExecutor(2) as pool:
            at_once = [pool.submit(browser.see, "/history") for _ in range(2)]
            eventually(lambda: "Newest checkpoint: 0, complete" in browser.see("/"))
            for page in at_once:
                assert "no answer for" in page.result(300)
        go_on.set()
        eventually(lambda: "completed</span>" in browser.see("/history"))
        go_on.clear()
        older = "no answer for .* what is shown is older.*completed</span>"
        eventually(lambda: re.search(older, browser.see("/history")) is not None)
        go_on.set()


def test_many_looks_read_storage_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the answers are good, which they are for a second or more."""
    monkeypatch.setattr(job_view, "time", SimpleNamespace(monotonic=lambda: 0.0))
    asked = list[str]()

    class Counting(WrappedStorage):
        def _call(self, method: str, key: str, *more: Any) -> Any:
            asked.append(method)
            return super()._call(method, key, *more)

    job.run(1)
    with job.coordinator(storage=Counting(job.storage)) as coordinator:
        facts = JobView(coordinator)
        for _ in range(50):
            facts.driver()
            facts.newest()
    assert 0 < len(asked) < 60
