"""Functions that all commands share: the job, how results are shown, how errors end, how to ask."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordinator.coordinator import CheckpointCoordinator
from coordinator.errors import CheckpointError
from coordinator.operations.inspection.text import ago
from coordinator.operations.jobfile import JobFileError, load_job
from coordinator.storage import MissingStorage, StorageError, existing_storages, open_storage
from coordinator.store.job_store import JobStore
from sinks._util.progress import shown_by
from sinks.errors import SinkError, printable
from sinks.optional import Diagnosable

FINDING = 1
USAGE = 2
UNCONFIRMED = 3
UNKNOWN = 4
"""The exit codes beside 0.

They mean, in this order, that something was found or failed, wrong usage or a wrong job file, a
confirmation that was not given, and that nobody can tell what was asked for.
"""

Job = Annotated[
    str,
    typer.Option(
        "--job",
        "-j",
        envvar="COORDINATOR_JOB",
        metavar="FILE",
        help="The job: FILE.toml, FILE.py:ATTRIBUTE or package.module:ATTRIBUTE.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output instead of tables.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for a confirmation.")]
JOB_FILE = "job.toml"
_place: ContextVar[str] = ContextVar("place", default=JOB_FILE)
_FOLDED = 24
"""The length above which a word in a table, such as an address, may be folded."""
_PATIENCE = 8.0
"""Seconds within which a command has to reach a sink's system."""


def tell(text: str, as_json: bool = False) -> None:
    """Print a part of the result, on standard error if the result is JSON."""
    Console(stderr=as_json, highlight=False, soft_wrap=True).print(printable(text), markup=False)


def say(text: str) -> None:
    """Print what is not part of the result, on standard error.

    This is for the person: progress, warnings and failures.
    """
    tell(text, True)


def say_bad(sentences: Iterable[str]) -> None:
    """Print a sentence on everything that could not be read."""
    for text in sentences:
        say(f"Left out: {text}")


def fail(text: str, code: int = FINDING) -> NoReturn:
    say(text)
    raise typer.Exit(code)


@contextmanager
def coordinator_of(place: str, *, missing_storage: bool = False) -> Iterator[CheckpointCoordinator]:
    """Yield the job's coordinator, on storage as it is found.

    A missing storage ends the command, or, with `missing_storage`, stays a `MissingStorage`. Errors
    of the coordinator end the command with their message and exit code.
    """
    _place.set(place)
    try:
        with existing_storages():
            coordinator = load_job(place)
        open_storage(coordinator.storage)
    except JobFileError as error:
        fail(str(error), USAGE)
    except (CheckpointError, StorageError) as error:
        fail(str(error))
    if not missing_storage and (why := of_missing_storage(coordinator)):
        fail(why)
    for sink in coordinator.sinks.values():
        if isinstance(sink, Diagnosable):
            sink.set_answer_timeout(_PATIENCE)
    try:
        with coordinator, shown_by(say):
            yield coordinator
    except (CheckpointError, StorageError, SinkError) as error:
        fail(str(error))


def store_of(coordinator: CheckpointCoordinator) -> JobStore:
    """Return the part of checkpoint storage that belongs to the job."""
    return JobStore(coordinator.storage, coordinator.job)


def runnable(command: str) -> str:
    """Return a command for the person to paste.

    It names the job, unless the job is found without its name.
    """
    place = _place.get()
    return (
        command
        if place == os.environ.get("COORDINATOR_JOB", JOB_FILE)
        else f"{command} --job {shlex.quote(place)}"
    )


def of_missing_storage(coordinator: CheckpointCoordinator) -> str:
    """Describe a storage that is missing; "" if storage is there."""
    storage = open_storage(coordinator.storage)
    if not isinstance(storage, MissingStorage):
        return ""
    return (
        f"There is no checkpoint storage {storage.uri}: {storage.why.reason}. So no checkpoint of "
        f"job {coordinator.job!r} has been taken yet; its first start makes the storage. If the "
        "job has run before, `storage` is mistyped, or somebody has deleted it: abort nothing, "
        "and restore it from a backup as new as Spark's checkpointLocation."
    )


Columns = Mapping[str, str | Callable[[Any], object]]
"""The columns of a table, by title: a key of each entry, or a function that returns the cell."""


def show(
    about: Any, as_json: bool, *, facts: Mapping[str, Any] | None = None, **tables: Columns
) -> None:
    """Print the result of a command.

    With `as_json`, this is JSON. Otherwise it is the `facts`, one per line, and each of the
    result's lists that `tables` names. The name `self` stands for a result that is itself the list.
    """
    if as_json:
        typer.echo(json.dumps(about, indent=2, default=str))
        return
    if facts:
        _print_facts(
            Console(highlight=False),
            {name: _text(_fact(name, value)) for name, value in facts.items()},
        )
    for name, columns in tables.items():
        _print(about if name == "self" else about[name], columns)


def _print(rows: Iterable[Any], columns: Columns) -> None:
    """Print a table, or nothing if it has no rows.

    If the table is too wide for the terminal, each row is printed by itself, one cell per line.
    """
    lines = [
        [
            _text(row[column] if isinstance(column, str) else column(row))
            for column in columns.values()
        ]
        for row in rows
    ]
    # Nothing is folded if standard output is no terminal.
    console = Console(width=None if sys.stdout.isatty() else 10_000, highlight=False)
    if sum(map(_needed, zip(columns, *lines, strict=True))) <= console.width:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in columns:
            table.add_column(title, overflow="fold")
        for line in lines:
            table.add_row(*line)
        if lines:
            with console.capture() as printed:
                console.print(table)
            typer.echo("\n".join(map(str.rstrip, printed.get().splitlines())), color=True)
    else:
        for line in lines:
            _print_facts(
                console, {title: cell for title, cell in zip(columns, line, strict=True) if cell}
            )
            console.print()


def _print_facts(console: Console, facts: Mapping[str, Text]) -> None:
    """Print one fact per line, which is not folded, so that it can be copied."""
    wide = max(map(len, facts)) + 2
    for title, text in facts.items():
        console.print(Text(title.ljust(wide)).append_text(text), soft_wrap=True)


def _text(cell: Any) -> Text:
    return cell if isinstance(cell, Text) else Text(printable("?" if cell is None else str(cell)))


def _needed(column: Sequence[str | Text]) -> int:
    """Return the width that a column needs in the terminal, with the space behind it.

    It fits the longest word, unless that word may be folded.
    """
    return 2 + min(
        _FOLDED, max(len(word) for cell in column for word in (str(cell).split() or [""]))
    )


def _fact(name: str, value: Any) -> str:
    if name.endswith("_at") and isinstance(value, int):
        return ago(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_fact(key, item)}" for key, item in sorted(value.items()))
    return (
        ", ".join(map(str, value))
        if isinstance(value, Sequence) and not isinstance(value, str)
        else str(value)
    )


def confirm(consequence: str, word: str, *, given: bool) -> None:
    """End the command unless a person types `word`, or the option for it was given.

    A fence may have been claimed by then.
    """
    say(consequence)
    if given:
        return
    if not sys.stdin.isatty():
        fail(
            "Not done: this needs a confirmation. Run it in a terminal, or with --yes (and "
            "--break-decision where it goes against a decision).",
            UNCONFIRMED,
        )
    if typer.prompt(f"Type {word!r} to go on", default="", show_default=False, err=True) != word:
        fail("Not done.", UNCONFIRMED)
