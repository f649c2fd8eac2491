"""The page itself: addresses below `/ui/`, each a template over `JobFacts`. Needs Jinja2 (extra `ui`)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from datetime import datetime, timezone
from functools import cache
from importlib import resources
from typing import Any

from coordinator.balance import COLUMNS
from coordinator.errors import reason
from coordinator.http.server import Answer, Request, RequestRefused
from coordinator.in_doubt import Decision, Pending, remedies
from coordinator.statistics.model import PHASES, Status
from coordinator.statistics.summary import remarks, summarized
from coordinator.ui.facts import JobFacts, counts, key_of, latest, waterfall
from coordinator.ui.visitors import Visitors
from coordinator.wording import ago, by_sink, duration, of_driver, of_newest, time_of
from sinks.extras import needs_extra
from sinks.progress import under_way
from sinks.transaction import shown

with needs_extra("ui"):
    from jinja2 import Environment, PackageLoader, StrictUndefined

logger = logging.getLogger(__name__)

TABS = {
    "": "Overview",
    "history": "History",
    "summary": "Summary",
    "in-doubt": "In doubt",
    "savepoints": "Savepoints",
    "balance": "Balance",
    "guarantee": "Guarantee",
    "configuration": "Configuration",
}
"""By path below `/ui/`."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src "
    "'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_STATIC = {"style.css": "text/css; charset=utf-8", "live.js": "text/javascript; charset=utf-8"}
_ON_A_PAGE = 50
_BARS = 60

Save = Callable[[dict[str, Any]], dict[str, Any]]
"""Takes a savepoint, as `POST /savepoints` of the driver does."""


class Page:
    """`job_file` is what commands name the job by, if it is known."""

    def __init__(self, facts: JobFacts, visitors: Visitors, save: Save, job_file: str = "FILE") -> None:
        self._facts, self._visitors, self._save = facts, visitors, save
        self._saved: tuple[str, str] | None = None
        """What the last order from the page led to: good or bad, and the text."""
        self._values = {
            "tabs": TABS,
            "job": facts.job,
            "place": facts.storage.uri,
            "live": facts.live,
            "job_option": f"--job {job_file}",
        }

    def invitation(self) -> str:
        return self._visitors.invitation()

    # ------------------------------------------------------------------ who, and what
    def answer(self, request: Request) -> Answer:
        try:
            self._visitors.require_own_page(request)
            return self._route(request, request.path.removeprefix("/ui/"))
        except RequestRefused as refused:
            return self._show("error", "", refused.status, error=refused.why)
        except Exception as error:
            logger.warning("the page %s could not be made", request.path, exc_info=True)
            return self._show("error", "", 500, error=reason(error))

    def _route(self, request: Request, path: str) -> Answer:
        if path in _STATIC and request.method == "GET":
            data = (resources.files("coordinator.ui") / "static" / path).read_bytes()
            return Answer(200, _STATIC[path], data, {**_HEADERS, "Cache-Control": "no-cache"})
        if path == "login":
            return self._login(request)
        known = self._visitors.is_known(request)
        if request.method == "POST":
            if not known:
                raise RequestRefused(401, "this needs a browser that was let in")
            if path != "savepoints":
                raise RequestRefused(404, "nothing can be done here")
            return self._take_savepoint(request.form())
        if not known and not self._visitors.public:
            return self._show("login", "", 401, failed=False)
        if path in TABS:
            tab = path.replace("-", "_") or "overview"
            return self._show(tab, path, known=known, **getattr(self, f"_{tab}")(request.query))
        if key := re.fullmatch(r"history/(\d+\.-?\d+\.\d+\.\d+)", path):
            return self._checkpoint(key[1], known=known)
        raise RequestRefused(404, "there is no such page")

    def _login(self, request: Request) -> Answer:
        by_token = request.method == "POST" and self._visitors.has_token(request.form().get("token", ""))
        if by_token or (request.method == "GET" and self._visitors.accepts(request.query.get("once", ""))):
            return self._go("/ui/", {"Set-Cookie": self._visitors.cookie})
        return self._show("login", "", 401, failed=True)

    def _go(self, where: str, headers: dict[str, str] | None = None) -> Answer:
        return Answer(303, "text/plain", b"", {**_HEADERS, "Location": where, **(headers or {})})

    def _show(self, name: str, tab: str, code: int = 200, **values: Any) -> Answer:
        html = _templates().get_template(f"{name}.html").render(self._values, tab=tab, **{"known": False} | values)
        return Answer(code, "text/html; charset=utf-8", html.encode("utf-8", "replace"), _HEADERS)

    # ------------------------------------------------------------------ the tabs
    def _overview(self, query: dict[str, str]) -> dict[str, Any]:
        facts, found = self._facts, self._facts.tries()
        tries = found.value
        driver, newest = facts.driver(), facts.newest()
        return {
            "notices": facts.notices(),
            "driver": driver.value,
            "driver_text": driver.trouble or of_driver(driver.value),
            "newest_text": newest.trouble or of_newest(newest.value),
            "under_way": facts.tracker.under_way,
            "doing": under_way(),
            "counts": counts(tries),
            "latest": latest(tries),
            "tries": len(tries),
            "bars": list(reversed(tries[:_BARS])),
            "longest": max((one.duration for one in tries[:_BARS]), default=0) or 1,
        }

    def _history(self, query: dict[str, str]) -> dict[str, Any]:
        found = self._facts.tries()
        wanted = query.get("status", "")
        tries = [one for one in found.value if wanted in ("", one.status.value)]
        number = int(query["page"]) if re.fullmatch(r"\d{1,6}", query.get("page", "")) else 1
        pages = max(1, -(-len(tries) // _ON_A_PAGE))
        number = min(max(number, 1), pages)
        return {
            "trouble": found.trouble,
            "shown_tries": tries[(number - 1) * _ON_A_PAGE : number * _ON_A_PAGE],
            "wanted": wanted,
            "number": number,
            "pages": pages,
            "phases": PHASES,
            "under_way": None if wanted or number > 1 else self._facts.tracker.under_way,
        }

    def _checkpoint(self, key: str, *, known: bool) -> Answer:
        one = self._facts.one(key)
        if one is None:
            raise RequestRefused(404, "this try of a checkpoint is not kept (any more)")
        sinks = sorted({*one.rows, *one.transactions, *one.replayed, *one.aborted})
        values: dict[str, Any] = {
            "one": one,
            "bars": waterfall(one),
            "sinks": sinks,
            "participants": self._facts.participants(one),
        }
        return self._show("checkpoint", "history", known=known, **values)

    def _summary(self, query: dict[str, str]) -> dict[str, Any]:
        found = self._facts.tries()
        about = summarized(found.value)
        return {"trouble": found.trouble, "tries": len(found.value), "status": about.pop("status"), "spreads": about}

    def _in_doubt(self, query: dict[str, str]) -> dict[str, Any]:
        found = self._facts.in_doubt()
        seen, memories = found.value or (None, [])
        pending: list[Pending] = sorted(seen.found, key=lambda one: -(one.about.age or 0)) if seen else []
        return {
            "trouble": found.trouble,
            "pending": pending,
            "memories": memories,
            "errors": dict(seen.errors) if seen else {},
            "remedies": remedies(seen) if seen else [],
            "systems": {name: sink.system for name, sink in self._facts.sinks.items()},
            "own": self._facts.tracker.in_doubt,
            "own_age": self._facts.tracker.in_doubt_seconds,
        }

    def _savepoints(self, query: dict[str, str]) -> dict[str, Any]:
        return {
            "found": self._facts.savepoints(),
            "has_place": bool(self._facts.config.savepoint_dir),
            "saved": self._saved,
        }

    def _take_savepoint(self, form: dict[str, str]) -> Answer:
        how = form.get("how", "")
        if how not in ("trigger", "stop", "cancel"):
            raise RequestRefused(400, "how has to be trigger, stop or cancel")
        if how != "trigger" and form.get("word") != how:
            self._saved = "bad", f"Nothing was done: to do it, type {how}"
            return self._go("/ui/savepoints")
        try:
            about = self._save({} if how == "trigger" else {how: True})
            self._saved = "good", f"Saved checkpoint {about['checkpoint']} as {about['uri']}"
        except Exception as error:
            self._saved = "bad", reason(error)
        self._facts.forget("savepoints")
        return self._go("/ui/savepoints")

    def _guarantee(self, query: dict[str, str]) -> dict[str, Any]:
        promise, source = self._facts.promise()
        known = bool(self._facts.driver().value or self._facts.newest().value)
        return {"promise": promise, "source": source, "given_up": self._facts.given_up(), "known_job": known}

    def _balance(self, query: dict[str, str]) -> dict[str, Any]:
        found = self._facts.balance()
        return {"found": found, "balance": found.value, "columns": COLUMNS}

    def _configuration(self, query: dict[str, str]) -> dict[str, Any]:
        return {
            "settings": self._facts.settings(),
            "sinks": list(self._facts.sinks.values()),
            "versions": self._facts.versions(),
        }


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("coordinator.ui"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals |= {"Status": Status, "key_of": key_of, "command": _command}
    templates.filters |= {
        "ago": ago,
        "by_sink": by_sink,
        "clock": _clock,
        "number": "{:,}".format,
        "pretty": _pretty,
        "remarks": remarks,
        "shown": shown,
        "time": time_of,
        "took": _took,
        "size": _size,
    }
    return templates


def _command(pending: Pending) -> str:
    """What settles this one alone."""
    if pending.decision is Decision.COMMIT:
        return f"coordinator in-doubt commit {pending.id}"
    fence = "" if pending.decision is Decision.ORPHAN else " --fence"
    return f"coordinator in-doubt abort {pending.id}{fence}"


def _clock(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def _took(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else duration(seconds)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _pretty(text: str) -> str:
    """JSON over several lines; what is none, as it is."""
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except ValueError:
        return text
