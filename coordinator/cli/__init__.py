"""The command `coordinator`: what operators see and settle of a job.

Needs the extra `cli`, and no Spark.
"""

from __future__ import annotations

import io
import os
import sys
import traceback

from sinks.errors import printable


def main() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # closed; and the next file or connection would get its number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    # with escapes for what a terminal of another encoding lacks
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from coordinator.cli.app import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in ("typer", "rich"):
            sys.exit(
                "The command `coordinator` needs typer and rich: install this library with its "
                "extra `cli`, or pip install typer rich"
            )
        sys.exit(
            printable(f"{traceback.format_exc()}\nThis is a bug of `coordinator`, or of a sink.")
        )
