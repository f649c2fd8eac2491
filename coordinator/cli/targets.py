"""`coordinator verify`, `dead-letters show` and `schema diff`: what the sinks' systems hold.

These commands only read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.text import Text

from coordinator.cli.output import (
    FINDING,
    JOB_FILE,
    UNKNOWN,
    USAGE,
    AsJson,
    Columns,
    Job,
    coordinator_of,
    fail,
    say,
    show,
    store_of,
    tell,
)
from coordinator.errors import CheckpointError
from coordinator.operations.inspection.balance import COLUMNS, Balance, Verdict, take_balance
from coordinator.protocol.ports import Sink, dead_letter_writers
from coordinator.storage import StorageError
from sinks.arrow.spark_types import field_of, schema_of_json
from sinks.dead_letters import SCHEMA
from sinks.diagnosis import SchemaDiff
from sinks.errors import SinkError
from sinks.optional import DeadLettering, SchemaEvolving

dead_letters = typer.Typer(
    help="Show rows that sinks have refused; `coordinator history` counts them.",
    no_args_is_help=True,
    callback=lambda: None,
)
schema = typer.Typer(
    no_args_is_help=True, help="Compare tables with the columns of new rows.", callback=lambda: None
)

_ID = ("lineage", "checkpoint", "partition", "row_number")
_COLUMNS: Columns = {name: name for name in ("letter", "time", "error_class", "error", "row")}
_STYLES = {
    Verdict.BALANCED.value: "green",
    Verdict.DIFFERS.value: "bold red",
    Verdict.UNKNOWN.value: "yellow",
}
_NAMED = 10
"""The number of checkpoints up to which a sentence names all of them."""
_CODES = {Verdict.DIFFERS: FINDING, Verdict.UNKNOWN: UNKNOWN}


def verify(
    quick: Annotated[
        bool, typer.Option("--quick", help="Compare records and ledgers only; read no topic.")
    ] = False,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Compare, for each retained checkpoint and sink, the rows that Spark delivered with those that
    the target has. Exit code 0: balanced, 1: something differs, 4: cannot tell."""
    with coordinator_of(job) as coordinator:
        store = store_of(coordinator)
        retained = coordinator.config.retained_checkpoints
        balance = take_balance(store, coordinator.sinks, quick=quick, retained=retained)
    about = {"job": store.job, "storage": store.storage.uri} | balance.to_json()
    totals = [
        {"checkpoint": Text("all", "bold"), "sink": sink, "verdict": ""} | of
        for sink, of in balance.totals().items()
    ]
    if not as_json:
        about["checkpoints"] += totals
    if not balance.lines:
        tell(
            f"There is nothing to compare: job {store.job!r} has completed no checkpoint that is "
            "retained, since its first start or since the restore that it began with. See "
            "coordinator status.",
            as_json,
        )
    counts = {title: lambda line, name=name: _count(line[name]) for name, title in COLUMNS.items()}
    verdict = lambda line: Text(line["verdict"], _STYLES.get(line["verdict"], ""))  # noqa: E731
    show(
        about,
        as_json,
        checkpoints={"checkpoint": "checkpoint", "sink": "sink", **counts, "verdict": verdict},
    )
    for text in _differences(balance):
        tell(text, as_json)
    if balance.verdict in _CODES:
        raise typer.Exit(_CODES[balance.verdict])


def _differences(balance: Balance) -> Iterable[str]:
    for text in balance.findings:
        yield f"Differs: {text}"
    remarks = [
        (sink, text)
        for texts_by in (balance.unknown, balance.remarks)
        for sink, texts in texts_by.items()
        for text in texts
    ]
    remarks += [(line.sink, text) for line in balance.lines for text in line.remarks]
    for sink, text in dict.fromkeys(remarks):
        numbers = [
            str(line.checkpoint)
            for line in balance.lines
            if line.sink == sink and text in line.remarks
        ]
        if len(numbers) > _NAMED:
            numbers = [*numbers[:_NAMED], f"… {numbers[-1]}"]
        of = f", checkpoint{'s' * (len(numbers) > 1)} {', '.join(numbers)}" if numbers else ""
        yield f"Cannot tell: sink {sink}{of}: {text}"


@contextmanager
def _reading(sink: Sink) -> Iterator[None]:
    """End the command if the sink's system raises an error in the block."""
    try:
        yield
    except (CheckpointError, StorageError, SinkError):
        raise
    except Exception as error:
        fail(f"{sink!r} cannot be read: {error}")


def _count(rows: int | None) -> str:
    return "?" if rows is None else f"{rows:,}"


@dead_letters.command("show")
def show_(
    sink: Annotated[
        str, typer.Argument(help="The sink that refused rows; needed if several have dead letters.")
    ] = "",
    last: Annotated[
        int, typer.Option("--last", "-n", min=1, help="How many letters to show.")
    ] = 20,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Show the newest dead letters of a table or topic.

    Exit code 4: their sink cannot read them.
    """
    with coordinator_of(job) as coordinator:
        dead = {
            name: coordinator.sinks[writer]
            for writer, name in dead_letter_writers(coordinator.sinks).items()
        }
        if not sink and len(dead) == 1:
            [sink] = dead
        if sink not in dead:
            there = (
                f"there are {', '.join(dead)}"
                if dead
                else "no sink of this job has the option dead_letters"
            )
            wrong = f"{sink!r} has no dead letters: " if sink else ""
            fail(f"{wrong}name a sink with dead letters; {there}", USAGE)
        writer = dead[sink]
        with _reading(writer):
            answer = (
                writer.read_dead_letters(coordinator.job, sink, last)
                if isinstance(writer, DeadLettering)
                else None
            )
        if answer is None:
            fail(f"{writer!r} cannot read its dead letters: look there", UNKNOWN)
    letters: list[dict[str, Any]] = [
        {"letter": ".".join(str(letter[name]) for name in _ID), **letter}
        for letter in answer.rows
        if (letter["job"], letter["sink"]) == (coordinator.job, sink)  # by any collation
    ]
    letters.sort(key=lambda letter: (letter["time"], *(letter[name] for name in _ID)), reverse=True)
    show({"sink": sink, "dead_letters": letters[:last]}, as_json, dead_letters=_COLUMNS)
    for gap in answer.gaps:
        say(f"There may be more, or may have been: {gap}.")


@schema.command()
def diff(
    rows: Annotated[
        str,
        typer.Argument(
            metavar="SCHEMA",
            help=(
                "A FILE.json with df.schema.json(), a Parquet file, or DDL such as 'id bigint, "
                "name string'."
            ),
        ),
    ],
    sink: Annotated[
        str | None, typer.Option("--sink", metavar="NAME", help="Only this sink.")
    ] = None,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Print the statements that make the sinks' tables take rows of SCHEMA, with their locks, and
    differences that no statement can remove. Changes nothing. Exit code 1 if there is a difference.
    """
    try:
        wanted = schema_of(rows)
    except (OSError, ValueError, pa.ArrowException) as error:
        fail(f"cannot read the schema {rows!r}: {error}", USAGE)
    with coordinator_of(job, missing_storage=True) as coordinator:
        if sink is not None and sink not in coordinator.sinks:
            fail(f"the job has no sink {sink!r}; there are {', '.join(coordinator.sinks)}", USAGE)
        chosen = coordinator.sinks if sink is None else {sink: coordinator.sinks[sink]}
        dead = dead_letter_writers(coordinator.sinks)
        diffs = dict[str, SchemaDiff | None]()
        for name, each in chosen.items():
            with _reading(each):
                columns = SCHEMA if name in dead else wanted
                diffs[name] = (
                    each.schema_diff(columns) if isinstance(each, SchemaEvolving) else None
                )
    about = {
        "changes": [
            {"sink": name} | vars(change)
            for name, diff in diffs.items()
            if diff
            for change in diff.changes
        ],
        "unfit": [
            {"sink": name, "reason": reason}
            for name, diff in diffs.items()
            if diff
            for reason in diff.unfit
        ],
        "notes": [
            {"sink": name, "note": note} for name, diff in diffs.items() for note in _notes(diff)
        ],
    }
    show(about, as_json, changes=_CHANGES)
    for note in about["notes"]:
        tell(f"sink {note['sink']}: {note['note']}", as_json)
    for unfit in about["unfit"]:
        tell(f"sink {unfit['sink']}, no statement can change this: {unfit['reason']}", as_json)
    if about["changes"] or about["unfit"]:
        raise typer.Exit(FINDING)


_CHANGES: Columns = {
    **{name: name for name in ("sink", "statement", "locks")},
    "run by": lambda change: (
        "the sink" if change["automatic"] else f'you, or schema_evolution="{change["step"]}"'
    ),
}


def _notes(diff: SchemaDiff | None) -> Iterable[str]:
    if diff is None:
        yield "its target has no columns to compare"
    else:
        yield from diff.notes
        if not diff.changes and not diff.unfit:
            yield "its target takes these rows as it is"


_DDL = re.compile(
    r"\s*(?:`([^`]+)`|([^\s`,]+))\s*:?\s+([a-z_]+(?: day to second)?(?:\([\d, ]+\))?)\s*(?:,|$)",
    re.I,
)


def schema_of(text: str) -> pa.Schema:
    """Return the schema in a file or in DDL.

    The file is a Parquet file, or a file with the JSON of a Spark schema. DDL must not have nested
    types. Raises ValueError, OSError, and pyarrow's errors.
    """
    if text.endswith(".json"):
        return schema_of_json(json.loads(Path(text).read_text(encoding="utf-8")))
    if text.endswith(".parquet"):
        return pq.read_schema(text)
    fields = [field_of(match[1] or match[2], match[3].lower()) for match in _DDL.finditer(text)]
    rest = _DDL.sub("", text).strip()
    if rest or not fields:
        raise ValueError(
            f"not understood from {rest!r} on; for nested types give FILE.json, df.schema.json()"
        )
    return pa.schema(fields)
