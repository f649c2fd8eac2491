"""The command `coordinator`, by which operators see and settle a job.

It needs the extra `cli`, and no Spark.
"""

from __future__ import annotations

import io
import os
import sys
import traceback

from sinks.errors import printable


def main() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # A stream that is closed is replaced, because the next file or connection would get its
        # number.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    # A terminal of another encoding gets escapes for the characters that it lacks.
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
