"""The command `coordinator`: what operators see and settle of a job. Needs the extra `cli`, and no Spark."""

from __future__ import annotations

import sys
import traceback

from sinks.errors import printable


def main() -> None:
    try:
        from coordinator.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(
            "The command `coordinator` needs typer and rich: install this library with its extra `cli` "
            "(README, Installation), or pip install typer rich"
        )
    try:
        app()
    except Exception:
        sys.exit(printable(f"{traceback.format_exc()}\nThis is a bug of `coordinator`, or of a sink."))
