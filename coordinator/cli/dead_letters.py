"""`coordinator dead-letters`: rows that sinks have refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.cli.output import (
    FOUND,
    JOB_FILE,
    UNTOLD,
    USAGE,
    AsJson,
    Job,
    fail,
    opened,
    runnable,
    say,
    show_json,
    show_table,
    time_of,
)
from coordinator.dead_letters import DeadLetters, Letter, Replayed
from coordinator.errors import CheckpointError, DeadLetterError, ExternalSystemBehind, StorageBehind
from coordinator.protocol.dead_letters import writers
from coordinator.statistics.history import load_history
from coordinator.statistics.model import Status
from coordinator.storage import StorageError
from sinks.sql.from_json import loads

app = typer.Typer(help="Rows that sinks have refused.", no_args_is_help=True)
_SHOWN = ("time", "error_class", "error")
_SINK = "The sink that refused rows; needed if several have dead letters."


@app.command("list")
def list_(job: Job = JOB_FILE, as_json: AsJson = False) -> None:
    """Of each checkpoint of the history and each sink, how many rows it has refused."""
    with opened(job) as coordinator:
        store = coordinator.protocol.store
        found = [
            (one.checkpoint_id, one.ended_at, sink, rows)
            for one in load_history(store)
            if one.status is Status.COMPLETED
            for sink, rows in one.dead_lettered.items()
        ]
    if as_json:
        keys = ("checkpoint", "ended_at", "sink", "dead_letters")
        checkpoints = [dict(zip(keys, one, strict=True)) for one in found]
        show_json({"job": store.job, "storage": store.storage.uri, "checkpoints": checkpoints})
    elif not found:
        say(f"The history of job {store.job!r} in {store.storage.uri} has no dead letters.")
    else:
        show_table(
            ["checkpoint", "ended", "sink", "dead letters"],
            [[checkpoint, time_of(ended_at), sink, f"{rows:,}"] for checkpoint, ended_at, sink, rows in found],
        )


@app.command()
def show(
    sink: Annotated[str, typer.Argument(help=_SINK)] = "",
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="So many letters are shown.")] = 20,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """The newest dead letters, from the table or topic that they are in. Exit code 4: their sink cannot tell them."""
    with _letters(job, sink) as letters:
        try:
            found = letters.find(most=last)
            unfinished = letters.unfinished()
        except (CheckpointError, StorageError):
            raise
        except Exception as error:
            fail(f"{letters.dead!r} cannot be read: {error}")
        if found is None:
            fail(f"{letters.dead!r} cannot tell its letters: read them there", UNTOLD)
        _show(letters.sink.name, found, as_json)
        _say_gaps(letters.gaps)
        if unfinished:
            say(
                f"{unfinished} transaction(s) of a replay are in doubt: it runs, or was cut off; then "
                f"{runnable(f'coordinator dead-letters replay --sink {letters.sink.name}')} finishes it."
            )


@app.command()
def replay(
    wanted: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LETTER]...", help="As `show` has them; what they begin with stands for all of these: 6e2c84f8.12"
        ),
    ] = None,
    all_letters: Annotated[bool, typer.Option("--all", help="All that were not put through yet.")] = False,
    mended: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help='Mended rows: lines as {"letter": "6e2c84f8.12.0.5", "row": {"id": 1}}.'
        ),
    ] = None,
    sink: Annotated[str, typer.Option("--sink", help=_SINK)] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show them, and change nothing.")] = False,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Put dead letters through their sink again, exactly once, beside the query: as they are, since the target was
    mended, or mended in their table or in a file. What is refused again is a letter again. Without letters: finish a
    replay that was cut off. Exit code 1: some were refused again; 4: nobody can tell whether these were all."""
    if bool(wanted) + all_letters + bool(mended) > 1:
        fail("Name letters, or --all, or a file with --from.", USAGE)
    rows = _mended(mended) if mended else None
    with _letters(job, sink) as letters:
        if dry_run:
            left = [letter for letter in letters.choose(wanted or (), rows) if not letter.replayed]
            _show(letters.sink.name, left, as_json)
            _say_gaps(letters.gaps)
            say(f"{len(left):,} row(s) would be put through sink {letters.sink.name!r}. Nothing was changed.")
            return
        try:
            if wanted or all_letters or mended:
                _tell(letters.sink.name, letters.replay(wanted or (), rows), as_json)
            else:
                letters.finish()
                say("Nothing of a replay is left to finish. Name letters, or --all, or a file with --from.")
        except (DeadLetterError, StorageBehind, ExternalSystemBehind, typer.Exit):
            raise
        except Exception as error:
            fail(
                f"{error}\nThe replay of the dead letters of sink {letters.sink.name!r} has not ended. What it has "
                "decided becomes visible, once, by the next one: run it again, which leaves out what was put through."
            )


@contextmanager
def _letters(place: str, sink: str) -> Iterator[DeadLetters]:
    with opened(place) as coordinator:
        dead = list(writers(coordinator.sinks).values())
        if not sink and len(dead) == 1:
            [sink] = dead
        if sink not in dead:
            fail(f"name a sink with dead letters; there are {', '.join(dead) or 'none'}", USAGE)
        with coordinator.dead_letters(sink) as letters:
            yield letters


def _mended(file: Path) -> dict[str, Any]:
    """Rows by letter."""
    rows: dict[str, Any] = {}
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read {file}: {error}", USAGE)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            one = loads(line)
            row = loads(one["row"]) if isinstance(one["row"], str) else one["row"]
            if not isinstance(row, dict) or rows.setdefault(str(one["letter"]), row) is not row:
                raise ValueError("its row is no object, or the letter comes twice")
        except (ValueError, TypeError, KeyError) as error:
            fail(f'{file}, line {number}: write {{"letter": "…", "row": {{…}}}}: {error}. Nothing was changed.', USAGE)
    return rows


def _tell(sink: str, found: Replayed, as_json: bool) -> None:
    if as_json:
        show_json({"sink": sink} | vars(found))
    else:
        before = f"; {found.before:,} had been before" if found.before else ""
        say(f"Put through sink {sink!r}: {found.written + found.refused:,} letter(s){before}.")
        say(f"Written: {found.written:,} row(s). Refused again, and letters again: {found.refused:,}.")
        for error_class, error in found.reasons:
            say(f"  - {error_class}: {error}")
        _say_gaps(found.gaps)
    if found.refused or found.gaps:
        raise typer.Exit(FOUND if found.refused else UNTOLD)


def _say_gaps(gaps: Sequence[str]) -> None:
    for gap in gaps:
        say(f"There may be more, or may have been: {gap}.")


def _show(sink: str, found: Sequence[Letter], as_json: bool) -> None:
    if as_json:
        about = [{"letter": str(one.id), "replayed": one.replayed, **one.columns} for one in found]
        show_json({"sink": sink, "dead_letters": about})
        return
    rows = [
        [one.id, "yes" if one.replayed else "no", *(_text(one.columns[name]) for name in _SHOWN), one.row]
        for one in found
    ]
    show_table(["letter", "replayed", *_SHOWN, "row"], rows)


def _text(value: Any) -> Any:
    return value if isinstance(value, int) else str(value)
