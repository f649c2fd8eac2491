"""The page in a real Chromium: nothing but itself runs there, it follows the job, and it can be read on a phone.

With SCREENSHOTS=docs in the environment the pictures of docs/monitoring.md are made anew.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from werkzeug.serving import make_server

from coordinator import CheckpointConfig, CheckpointCoordinator
from coordinator.errors import CheckpointFailed
from coordinator.operations.ui.job import JobView
from coordinator.operations.ui.page import TABS, page_of
from coordinator.storage import open_storage
from examples.custom_sink import FileSink
from sinks.testing import Hooked
from sinks.testing.conformance import example_input
from sinks.testing.local import LocalQuery
from tests.protocol.job import Job, QuietQuery, fail
from tests.ui.chromium import chromium, playwright
from tests.ui.test_page import HOSTILE

pytestmark = pytest.mark.large


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = playwright()
    program, environment = chromium()
    with api.sync_playwright() as running:
        browser = running.chromium.launch(
            executable_path=str(program), env=environment, args=["--no-sandbox"], timeout=300_000
        )
        yield browser
        browser.close()


class Watched:
    """A window, and what should not happen in it: words of the browser's console (the policy's among them), dialogs,
    requests to elsewhere."""

    def __init__(self, browser: Any, driver: CheckpointCoordinator, **options: Any) -> None:
        self._server = make_server("127.0.0.1", 0, page_of(JobView(driver)), threaded=True)
        threading.Thread(target=self._server.serve_forever, args=[0.1]).start()
        self.home = f"http://127.0.0.1:{self._server.server_port}"
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | options)
        self.context.set_default_timeout(300_000)
        self.window = self.context.new_page()
        self.told: list[str] = []
        self.window.on("console", lambda message: self.told.append(message.text))
        self.window.on("pageerror", lambda error: self.told.append(str(error)))
        self.window.on("dialog", self._dismiss)
        self.window.on("request", lambda request: self._of_here(request.url))
        self.window.goto(self.home)

    def _dismiss(self, dialog: Any) -> None:
        self.told.append(dialog.message)
        dialog.dismiss()

    def _of_here(self, url: str) -> None:
        if not url.startswith(f"{self.home}/"):
            self.told.append(f"asked for {url}")

    def go(self, tab: str) -> Any:
        self.window.goto(f"{self.home}/{tab}")
        return self.window

    def end(self) -> None:
        """The command is ended, and the page stays open."""
        self._server.shutdown()
        self._server.server_close()

    def close(self) -> None:
        self.context.close()
        self.end()
        assert self.told == []


@pytest.fixture
def driver(job: Job, target: str) -> Iterator[CheckpointCoordinator]:
    """Of a job `orders` into two sinks; one try has failed before."""
    (job.folder / "other").mkdir()
    storage = open_storage(f"memory:{secrets.token_hex(4)}")
    sinks: list[Any] = [
        FileSink(job.sink.folder, name="orders"),
        FileSink(job.folder / "other", name="events"),
    ]
    failing = [Hooked(sinks[0], "write", hook=fail), sinks[1]]
    job.input = example_input(40)
    with (
        CheckpointCoordinator("orders", failing, storage) as first,
        pytest.raises(CheckpointFailed),
    ):
        LocalQuery(job.folder / "query", job.input[:1]).run(first)
    config = CheckpointConfig(savepoint_dir=target)
    with CheckpointCoordinator("orders", sinks, storage, config) as coordinator:
        QuietQuery(job.folder / "query", job.input[:30]).run(coordinator)
        coordinator.history.flush()
        yield coordinator


def test_it_follows_the_job_and_runs_nothing_else(browser: Any, driver: CheckpointCoordinator, job: Job) -> None:
    watched = Watched(browser, driver)
    window = watched.window
    for name in TABS.values():
        window.click(f"nav >> text='{name}'")
        assert window.locator("nav [aria-current]").inner_text() == name
    window.click("nav >> text='Overview'")
    window.evaluate("document.stayed = true")
    QuietQuery(job.folder / "query", job.input).run(driver)
    window.locator(".cards div", has_text="completed").locator("b", has_text="40").wait_for(timeout=300_000)
    assert window.evaluate("document.stayed"), "it was changed in place"
    watched.end()
    window.locator("#live.lost").wait_for(timeout=300_000)
    watched.told = [line for line in watched.told if "ERR_CONNECTION_REFUSED" not in line]
    watched.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window(browser: Any, driver: CheckpointCoordinator, width: int) -> None:
    watched = Watched(browser, driver, viewport={"width": width, "height": 800})
    for tab in [*TABS, watched.go("history").locator("tbody a").first.get_attribute("href").removeprefix("/")]:
        window = watched.go(tab)
        assert window.evaluate("document.documentElement.scrollWidth") <= width, tab
    watched.close()


def test_hostile_names_do_nothing(browser: Any, tmp_path: Path) -> None:
    job = Job(tmp_path, batches=1)
    sink = FileSink(job.sink.folder, name=HOSTILE)
    with CheckpointCoordinator(HOSTILE, [sink], job.storage) as coordinator:
        job.query().run(coordinator)
        watched = Watched(browser, coordinator)
        for tab in TABS:
            assert HOSTILE.split("<")[1] in watched.go(tab).inner_text("body")
        watched.close()


def test_pictures(browser: Any, driver: CheckpointCoordinator, tmp_path: Path) -> None:
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    for name, options, tab in (
        ("page-light", {"color_scheme": "light", "viewport": {"width": 1280, "height": 640}}, ""),
        ("page-dark", {"color_scheme": "dark", "viewport": {"width": 1280, "height": 640}}, "a checkpoint"),
        ("page-phone", {"color_scheme": "dark", "viewport": {"width": 390, "height": 700}}, ""),
    ):
        watched = Watched(browser, driver, **options)
        window = watched.go("history" if tab else "")
        if tab:
            window.click("tbody a >> nth=0")
        light = window.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert light is (options["color_scheme"] == "light")
        window.screenshot(path=str(folder / f"{name}.png"))
        assert (folder / f"{name}.png").stat().st_size < 100_000
        watched.close()
