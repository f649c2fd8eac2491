"""`coordinator explain`, which says what the code of an error means, and what to do."""

from __future__ import annotations

import re
from difflib import get_close_matches
from importlib.resources import files
from typing import Annotated

import typer

from coordinator.cli.output import USAGE, fail, tell

_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


def explain(
    code: Annotated[
        str, typer.Argument(metavar="CODE", help="From the end of a message, such as EO-SCHEMA.")
    ],
) -> None:
    """Show what the code of an error means, and what to do."""
    page = files("coordinator").joinpath("errors.md").read_text(encoding="utf-8")  # docs/errors.md
    sections = dict(re.findall(r"^### (EO-\S+)\n(.*?)(?=^#|\Z)", page, re.M | re.S))
    code = code.strip("[]").upper()
    if code not in sections:
        near = get_close_matches(code, sections, n=1) or ["EO-SCHEMA"]
        fail(f"There is no error code {code}. A code looks like {near[0]}.", USAGE)
    tell("\n\n".join([code, _LINK.sub(r"\1", sections[code]).strip()]))
