"""The web page itself: a Flask application, where each address is a template over `JobView`.

Nothing can be changed by it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from coordinator.errors import reason
from coordinator.operations.inspection.balance import COLUMNS
from coordinator.operations.inspection.in_doubt_report import remedies
from coordinator.operations.inspection.text import (
    ago,
    by_sink,
    duration,
    of_driver,
    of_newest,
    time_of,
)
from coordinator.operations.statistics.model import PHASES, Status, summarized
from coordinator.operations.ui.job import JobView, key_of, pace, waterfall
from sinks._util.extras import needs_extra
from sinks._util.log import get_logger
from sinks.errors import printable
from sinks.transaction import shown

with needs_extra("ui"):
    from flask import Flask, Response, render_template, request
    from jinja2 import StrictUndefined
    from werkzeug.exceptions import HTTPException, NotFound

logger = get_logger("coordinator.ui")

TABS = {
    "": "Overview",
    "history": "History",
    "summary": "Summary",
    "in-doubt": "In doubt",
    "savepoints": "Savepoints",
    "balance": "Balance",
    "guarantee": "Guarantee",
    "configuration": "Configuration",
    "jobs": "All jobs",
}
"""The titles of the tabs, by path."""

_HOSTS = ["127.0.0.1", "localhost"]
"""The names by which browsers may call this machine.

A name that somebody else has led here (DNS rebinding) is refused.
"""
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_ON_A_PAGE = 50


def page_of(view: JobView, job_file: str = "FILE") -> Flask:
    """Make the application for one job.

    `job_file` is the name of the job in commands.
    """
    app = Flask("coordinator.operations.ui")
    app.config["TRUSTED_HOSTS"] = _HOSTS
    app.jinja_env.undefined = StrictUndefined
    app.jinja_env.finalize = lambda value: printable(value) if type(value) is str else value
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    functions = (key_of, pace, remedies, summarized, waterfall)
    app.jinja_env.globals |= {each.__name__: each for each in functions}
    app.jinja_env.globals |= {"Status": Status, "PHASES": PHASES, "COLUMNS": COLUMNS}
    app.jinja_env.globals |= {
        "tabs": TABS,
        "tab": "",
        "view": view,
        "job_option": f"--job {job_file}",
    }
    filters = (ago, by_sink, of_driver, of_newest, shown)
    app.jinja_env.filters |= {each.__name__: each for each in filters}
    app.jinja_env.filters |= {
        "clock": _clock,
        "number": "{:,}".format,
        "pretty": _pretty,
        "rate": _rate,
        "time": time_of,
        "took": _took,
    }

    @app.get("/")
    @app.get("/<tab>")
    def _tab(tab: str = "") -> str:
        if tab not in TABS:
            raise NotFound("there is no such page")
        name = tab.replace("-", "_") or "overview"
        return render_template(
            f"{name}.html", tab=tab, **_paged(view, request.args) if tab == "history" else {}
        )

    @app.get("/history/<key>")
    def _checkpoint(key: str) -> str:
        statistics = view.find(key)
        if statistics is None:
            raise NotFound("this try of a checkpoint is not in the history (any more)")
        return render_template("checkpoint.html", tab="history", checkpoint=statistics)

    @app.errorhandler(Exception)
    def _failed(error: Exception) -> tuple[str, int]:
        if isinstance(error, HTTPException):
            return render_template("error.html", error=error.description), error.code or 500
        logger.warning("a page could not be made", exc_info=True)
        return render_template("error.html", error=reason(error)), 500

    @app.after_request
    def _guarded(response: Response) -> Response:
        response.headers.update(_HEADERS)
        return response

    return app


def _paged(view: JobView, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of the history that is on the requested page."""
    wanted = query.get("status", "")
    tries = [each for each in view.tries().value if wanted in ("", each.status.value)]
    pages = max(1, -(-len(tries) // _ON_A_PAGE))
    number = int(query["page"]) if re.fullmatch(r"\d{1,6}", query.get("page", "")) else 1
    number = min(max(number, 1), pages)
    shown_tries = tries[(number - 1) * _ON_A_PAGE : number * _ON_A_PAGE]
    return {"shown_tries": shown_tries, "wanted": wanted, "number": number, "pages": pages}


def _clock(milliseconds: int) -> str:
    return time_of(milliseconds)[:19].replace("T", " ")


def _took(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else duration(seconds)


def _rate(rows: float) -> str:
    return f"{rows:,.0f}" if rows >= 10 else f"{rows:.2g}"


def _pretty(text: str) -> str:
    """Format JSON over several lines, and return any other text as it is."""
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except ValueError:
        return text
