"""The web page: every tab tells what is so in every state of a job, to whom it may, and escapes what it is given."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from coordinator import CheckpointCoordinator, CheckpointListener
from coordinator.errors import CheckpointFailed
from coordinator.heartbeat import State, look_for_driver
from coordinator.http import access
from coordinator.http.client import ask_driver
from coordinator.http.server import Server
from coordinator.listener import Step
from coordinator.protocol import records
from coordinator.protocol.records import CheckpointStore
from coordinator.statistics.model import CheckpointStatistics, Status
from coordinator.ui.facts import waterfall
from coordinator.ui.page import TABS, Page
from coordinator.ui.visitors import Visitors
from examples.custom_sink import FileSink
from sinks.testing import Hooked
from sinks.testing.table import eventually
from sinks.transaction import Identity
from tests.protocol.play import CrashError, Job, crash_at, fail
from tests.storage.wrapped import WrappedStorage
from tests.ui.browser import Browser

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


@contextlib.contextmanager
def page_of(coordinator: CheckpointCoordinator, *, public: bool = False) -> Iterator[tuple[Server, Page]]:
    """As `coordinator ui` serves it."""
    server = Server("127.0.0.1", 0)
    page = Page(
        coordinator.facts(live=False),
        Visitors(server.address, "", public=public),
        lambda body: ask_driver(coordinator.protocol.store, "/savepoints", body),
        "job.toml",
    )
    server.begin(page.answer)
    try:
        yield server, page
    finally:
        server.close()


@contextlib.contextmanager
def seen_from_outside(job: Job, **options: object) -> Iterator[Browser]:
    """By a browser, of a job whose driver is another process or gone."""
    with job.coordinator(**options) as coordinator, page_of(coordinator) as (_, page):
        yield Browser.invited(page.invitation())


class Checked(HTMLParser):
    """Refuses what a hostile text could have made."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        assert tag not in ("img", "iframe", "style"), tag
        assert not [name for name in names if name.startswith("on")], names
        assert tag != "script" or names.get("src") == "/ui/live.js"
        assert "style" not in names, "the Content-Security-Policy lets no inline style through"


def see_all(browser: Browser) -> dict[str, str]:
    pages = {tab: browser.see(f"/ui/{tab}") for tab in TABS}
    for tab in re.findall(r'"/ui/(history/[^"]+)"', pages["history"]):
        pages[tab] = browser.see(f"/ui/{tab}")
    for text in pages.values():
        Checked().feed(text)
    return pages


# ---------------------------------------------------------------------- what is shown
def test_a_running_job_and_its_savepoints(job: Job, target: str) -> None:
    reached, go_on = threading.Event(), threading.Event()

    class Wait(CheckpointListener):
        def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
            if (step, checkpoint_id) == (Step.PRE_COMMITTED, 2):
                reached.set()
                assert go_on.wait(300)

    with (
        job.coordinator(config={"savepoint_dir": target}, listeners=[Wait()]) as coordinator,
        contextlib.ExitStack() as at_the_end,
    ):
        at_the_end.callback(go_on.set)
        coordinator.serve_http()
        running = threading.Thread(target=job.query().run, args=[coordinator])
        running.start()
        assert reached.wait(300)
        browser = Browser.invited(ask_driver(coordinator.protocol.store, "/invitations", {})["address"])
        pages = see_all(browser)
        assert "Checkpoint 2, for" in pages[""]
        assert "Done: prepare" in pages[""]
        assert "<b>3</b> triggered" in pages[""]
        assert '<b>2</b> <a href="/ui/history?status=completed">completed' in pages[""]
        assert "generation 1" in pages[""]
        assert pages["history"].index("in progress") < pages["history"].index(">completed</span>")
        assert "Of the last 2 tries: 2 completed." in pages["summary"]
        assert "computed by this driver, generation 1" in pages["guarantee"].lower()
        assert "it is gone with the driver&#39;s process" in pages["guarantee"]
        assert 'commit_timeout<td class="code">2.0' in pages["configuration"]
        opened = sum(bool(table.num_rows) for table in job.input[2])
        assert f"<b>{opened} open</b>: of the newest driver" in pages["in-doubt"]
        detail = next(text for tab, text in pages.items() if tab.startswith("history/1.1."))
        assert "&#34;end&#34;: 1" in detail
        assert detail.count("<rect") == 4
        participants = sum(bool(table.num_rows) for table in job.input[1])
        assert len(re.findall('<td>files<td class="n">[0-9]+<td', detail)) == 1 + participants
        go_on.set()
        running.join(300)
        assert browser.post("/ui/savepoints", {"how": "stop", "word": ""})[0] == 303
        assert "Nothing was done: to do it, type stop" in browser.see("/ui/savepoints")
        assert browser.post("/ui/savepoints", {"how": "trigger"})[0] == 303
        assert re.search(f"Saved checkpoint 3 as {target}/savepoint-", browser.see("/ui/savepoints"))


def test_no_checkpoint_yet(job: Job) -> None:
    with seen_from_outside(job) as browser:
        pages = see_all(browser)
    assert "the job has never been started on this storage" in pages[""]
    assert "No checkpoint yet" in pages["history"]
    assert "there are none" in pages["summary"]
    assert "no checkpoint has told yet" in pages["guarantee"]
    assert "no place for savepoints" in pages["savepoints"]


def test_a_job_whose_driver_ended(job: Job) -> None:
    with job.coordinator() as coordinator:
        job.query().run(coordinator)
    with seen_from_outside(job) as browser:
        pages = see_all(browser)
        assert "has ended its query" in pages[""]
        assert "Nobody can tell whether the books balance" in pages["balance"], "files keep no ledger"
        assert len(re.findall("<td>files<td", pages["balance"])) == 2 + 1, "retained, and all"
        assert "Newest checkpoint: 3, complete" in pages[""]
        assert "Of the last 4 tries: 4 completed." in pages["summary"]
        assert len([tab for tab in pages if tab.startswith("history/")]) == 4
        assert "computed by the driver of generation 1" in pages["guarantee"].lower()
        assert "it is gone with the driver&#39;s process" in pages["guarantee"]


def test_the_waterfall_of_two_sinks(job: Job) -> None:
    (job.folder / "other").mkdir()
    sinks = [job.sink, FileSink(job.folder / "other", name="other")]
    with CheckpointCoordinator("job", sinks, job.storage) as coordinator:
        job.query(1).run(coordinator)
        [one] = coordinator.history.own()
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
        text = browser.see("/ui/in-doubt")
        Checked().feed(text)
        decided = [identity["file"] for identity in job.sink.in_doubt("job")]
        assert decided
        assert f"<b>{len(decided)} commit</b>: decided: the next start of the query commits them" in text
        assert "<code>coordinator in-doubt commit --all-decided --job job.toml</code>" in text
        assert all(file in text for file in decided)
        assert len(re.findall("coordinator in-doubt commit [0-9a-f]{10} --job job.toml", text)) == len(decided)
    with pytest.raises(CrashError):
        job.run(2, listeners=[crash_at(Step.LOADED, -1)], config={"heartbeat_interval": 0.1})
    store = CheckpointStore(job.storage, "job")
    eventually(lambda: (driver := look_for_driver(store)) is not None and driver.state is not State.RUNNING)
    with seen_from_outside(job) as browser:
        assert f"{len(decided)} transactions in doubt: commit" in browser.see("/ui/")


def test_a_sink_that_cannot_tell(job: Job) -> None:
    class Silent(FileSink):
        def in_doubt(self, job: str) -> Iterator[Identity]:
            raise OSError("not today")

    with seen_from_outside(job, sink=Silent(job.sink.folder)) as browser:
        assert "Sink files cannot tell: OSError: not today" in browser.see("/ui/in-doubt")


def test_a_history_of_a_newer_version(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.run(1)
    newer = CheckpointStatistics("job", 7, 1, Status.COMPLETED).to_json() | {"status": "unheard of"}
    with monkeypatch.context() as later:
        later.setattr(records, "FORMAT", records.FORMAT + 1)
        CheckpointStore(job.storage, "job").add_statistics([newer], together=100, keep=100)
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
    CheckpointStore(job.storage, HOSTILE).add_statistics([told.to_json()], together=100, keep=100)
    sink = FileSink(job.sink.folder / HOSTILE.replace("/", ""), name=HOSTILE)
    with CheckpointCoordinator(HOSTILE, [sink], job.storage) as coordinator, page_of(coordinator) as (_, page):
        browser = Browser.invited(page.invitation())
        for tab, text in see_all(browser).items():
            assert "<script>alert" not in text, tab
            assert "&lt;script&gt;alert(1)" in text, tab
        for path in (f"/ui/{HOSTILE}", f"/ui/history?status={HOSTILE}", f"/ui/login?once={HOSTILE}"):
            Checked().feed(browser.get(quote(path, safe="/?="))[1])


# ---------------------------------------------------------------------- who may
@pytest.fixture
def driver(job: Job, target: str) -> Iterator[CheckpointCoordinator]:
    with job.coordinator(config={"savepoint_dir": target}) as coordinator:
        coordinator.serve_http()
        job.query(1).run(coordinator)
        yield coordinator


def invited(driver: CheckpointCoordinator) -> Browser:
    return Browser.invited(ask_driver(driver.protocol.store, "/invitations", {})["address"])


def test_nothing_is_shown_to_a_stranger(driver: CheckpointCoordinator, tmp_path: Path) -> None:
    stranger = Browser(driver.serve_http().removeprefix("http://"))
    for tab in TABS:
        status, text = stranger.get(f"/ui/{tab}")
        assert status == 401
        assert "Let this browser in" in text
        assert "files" not in text
    assert stranger.get("/ui/style.css")[0] == 200
    assert stranger.post("/ui/savepoints", {"how": "trigger"})[0] == 401
    assert stranger.post("/ui/login", {"token": ""})[0] == stranger.post("/ui/login", {"token": "x" * 43})[0] == 401
    assert not (tmp_path / "savepoints").exists()
    stranger.cookie = f"coordinator-{stranger.place.rpartition(':')[2]}=wrong"
    assert stranger.get("/ui/")[0] == 401


def test_a_browser_is_let_in_by_the_token_or_once_by_an_address(driver: CheckpointCoordinator) -> None:
    place = driver.serve_http().removeprefix("http://")
    token = access.read(access.token_file("job", driver.protocol.store.storage.uri))
    assert token
    browser = Browser(place)
    assert browser.post("/ui/login", {"token": f" {token} "})[0] == 303
    assert "HttpOnly; SameSite=Strict" in browser.headers["Set-Cookie"]
    assert token not in browser.headers["Set-Cookie"]
    browser.cookie = browser.headers["Set-Cookie"].partition(";")[0]
    assert browser.get("/ui/")[0] == 200
    address = ask_driver(driver.protocol.store, "/invitations", {})["address"]
    assert Browser.invited(address).get("/ui/")[0] == 200
    assert Browser(place).get(address.removeprefix(f"http://{place}"))[0] == 401, "it was used"
    for _ in range(9):
        newest = ask_driver(driver.protocol.store, "/invitations", {})["address"]
    assert Browser.invited(newest).get("/ui/")[0] == 200


@pytest.mark.parametrize("headers", [{"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}])
def test_no_other_web_page_gets_in(driver: CheckpointCoordinator, headers: dict[str, str]) -> None:
    browser = invited(driver)
    assert browser.get("/ui/", **headers)[0] == 403
    assert browser.post("/ui/savepoints", {"how": "trigger"}, **headers)[0] == 403
    assert browser.get("/checkpoints", **headers)[0] == 403
    assert browser.get("/checkpoints")[0] == 401, "the cookie is for the page alone"
    assert browser.get("/ui/", Host="rebound.example")[0] == 421


@pytest.mark.parametrize("origin", [None, "null", "http://127.0.0.1", "http://127.0.0.1:1", "https://evil.example"])
def test_what_changes_something_comes_from_the_page(driver: CheckpointCoordinator, origin: str | None) -> None:
    browser = invited(driver)
    assert browser.post("/ui/savepoints", {"how": "trigger"}, Origin=origin)[0] == 403


def test_a_public_page_is_for_looking_only(job: Job, target: str) -> None:
    with job.coordinator(config={"savepoint_dir": target}) as coordinator:
        guest = Browser(coordinator.serve_http(public_page=True).removeprefix("http://"))
        assert "never been started" in guest.see("/ui/")
        assert "To take one, let this browser in" in guest.see("/ui/savepoints")
        assert guest.post("/ui/savepoints", {"how": "trigger"})[0] == 401
        assert guest.get("/checkpoints")[0] == 401


def test_headers(driver: CheckpointCoordinator) -> None:
    browser = invited(driver)
    for path in ("/ui/", "/ui/style.css", "/ui/live.js", "/ui/elsewhere"):
        browser.get(path)
        policy = browser.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert browser.headers["X-Frame-Options"] == "DENY"
        assert browser.headers["X-Content-Type-Options"] == "nosniff"
    assert "http://" not in "".join(browser.get(f"/ui/{file}")[1] for file in ("style.css", "live.js"))


def test_a_job_that_is_down_takes_no_savepoint_from_the_page(job: Job, target: str) -> None:
    job.run(1)
    with seen_from_outside(job, config={"savepoint_dir": target}) as browser:
        assert browser.post("/ui/savepoints", {"how": "trigger"})[0] == 303
        assert "No driver of job &#39;job&#39; answers over HTTP" in browser.see("/ui/savepoints")


# ---------------------------------------------------------------------- what it costs the driver
def test_many_looks_read_storage_once(driver: CheckpointCoordinator) -> None:
    facts, asked = driver.facts(live=True), list[str]()

    class Counting(WrappedStorage):
        def _call(self, method: str, key: str, *more: Any) -> Any:
            asked.append(method)
            return super()._call(method, key, *more)

    facts.storage = Counting(facts.storage)
    for _ in range(50):
        facts.driver()
        facts.newest()
    assert 0 < len(asked) < 30
