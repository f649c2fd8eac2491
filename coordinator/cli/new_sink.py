"""`coordinator new-sink`, which writes a sink to start from.

It also writes the test that tells whether the sink keeps the contract.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.output import FINDING, USAGE, fail, say

_SKELETON = Path(__file__).parent / "skeleton"


class Also(str, Enum):
    """The classes of `sinks.optional` that the skeleton implements on request."""

    VALIDATING = "Validating"
    AUDITABLE = "Auditable"


def new_sink(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of the system: redis, audit-log, EventStore, …"),
    ],
    also: Annotated[
        list[Also] | None,
        typer.Option("--with", help="An optional class of sinks.optional; may be repeated."),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--folder", help="Where to write the two files.")
    ] = Path(),
) -> None:
    """Write a working sink to start from, NAME_sink.py, and its conformance test,
    test_NAME_sink.py."""
    words = _words(name)
    module = f"{'_'.join(words)}_sink"
    plain = " ".join(words)
    class_name = "".join(word.capitalize() for word in words) + "Sink"
    files = {folder / f"{module}.py": "sink.py", folder / f"test_{module}.py": "conformance.py"}
    if not folder.is_dir():
        fail(f"there is no folder {folder}", USAGE)
    if there := [str(file) for file in files if file.exists()]:
        fail(
            f"{' and '.join(there)} exists already; nothing was written. Choose another name or "
            "--folder",
            FINDING,
        )
    for file, template in files.items():
        text = (
            (_SKELETON / template)
            .read_text(encoding="utf-8")
            .replace("coordinator.cli.skeleton.sink", module)
        )
        text = (
            _with(text, also or [])
            .replace("SkeletonSink", class_name)
            .replace("Skeleton", plain.capitalize())
        )
        try:
            with file.open("x", encoding="utf-8") as new:
                new.write(text.replace("skeleton", "-".join(words)))
        except OSError as error:
            fail(f"cannot write {file}: {error.strerror}")
    sink, test = files
    say(
        f"Wrote {sink} and {test}. The test passes as it is, and needs the extras testing and "
        "spark:"
    )
    typer.echo(f"python -m pytest {test}")


def _with(text: str, also: Sequence[Also]) -> str:
    """Return the skeleton without the sections of other optional classes.

    What only these sections import is left out, too.
    """
    for other in set(Also).difference(also):
        text = re.sub(rf"    # -+ {other.value}\n.*?(?=    # -+ )", "", text, flags=re.S)
        text = re.sub(rf"^    {other.value}\[TextIO\],\n", "", text, flags=re.M)
    for line in re.findall(r"^from (?!__future__)\S+ import .*\n", text, re.M):
        start, names = line.rstrip().split(" import ")
        used = [name for name in names.split(", ") if len(re.findall(rf"\b{name}\b", text)) > 1]
        text = text.replace(line, f"{start} import {', '.join(used)}\n" if used else "")
    return text


def _words(name: str) -> list[str]:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower().replace("_", "-").split("-")
    if words[-1] == "sink":
        words.pop()
    if (
        not words
        or not all(re.fullmatch("[a-z0-9]+", word) for word in words)
        or words[0][0].isdigit()
    ):
        fail(
            f"{name!r} names no system: letters first, then letters and digits, with - between "
            "words",
            USAGE,
        )
    return words
