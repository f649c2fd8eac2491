"""`coordinator schema diff`: what a sink's table lacks for the rows of a batch, before anything is altered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from coordinator.cli.output import FINDING, JOB_FILE, USAGE, AsJson, Columns, Job, coordinator_of, fail, say, show
from coordinator.protocol.dead_letters import writers
from sinks import dead_letters
from sinks.diagnosis import SchemaDiff
from sinks.optional import SchemaEvolving
from sinks.spark_types import field_of, schema_of_json

app = typer.Typer(no_args_is_help=True, help="Compare tables with the columns of new rows.", callback=lambda: None)


@app.command()
def diff(
    schema: Annotated[
        str,
        typer.Argument(
            metavar="SCHEMA",
            help="A FILE.json with df.schema.json(), a Parquet file, or DDL such as 'id bigint, name string'.",
        ),
    ],
    sink: Annotated[str | None, typer.Option("--sink", metavar="NAME", help="Only this sink.")] = None,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Print the statements that make the sinks' tables take rows of SCHEMA, with their locks, and differences that no
    statement can remove. Changes nothing. Exit code 1 if there is a difference."""
    try:
        wanted = schema_of(schema)
    except (OSError, ValueError, pa.ArrowException) as error:
        fail(f"cannot read the schema {schema!r}: {error}", USAGE)
    with coordinator_of(job, missing_storage=True) as coordinator:
        if sink is not None and sink not in coordinator.sinks:
            fail(f"the job has no sink {sink!r}; there are {', '.join(coordinator.sinks)}", USAGE)
        chosen = coordinator.sinks if sink is None else {sink: coordinator.sinks[sink]}
        dead = writers(coordinator.sinks)
        diffs = {
            name: each.schema_diff(dead_letters.SCHEMA if name in dead else wanted)
            if isinstance(each, SchemaEvolving)
            else None
            for name, each in chosen.items()
        }
    about = {
        "changes": [{"sink": name} | vars(change) for name, diff in diffs.items() if diff for change in diff.changes],
        "unfit": [{"sink": name, "reason": reason} for name, diff in diffs.items() if diff for reason in diff.unfit],
        "notes": [{"sink": name, "note": note} for name, diff in diffs.items() for note in _notes(diff)],
    }
    show(about, as_json, changes=_CHANGES)
    for note in about["notes"]:
        say(f"sink {note['sink']}: {note['note']}")
    for unfit in about["unfit"]:
        say(f"sink {unfit['sink']}, no statement can change this: {unfit['reason']}")
    if about["changes"] or about["unfit"]:
        raise typer.Exit(FINDING)


_CHANGES: Columns = {
    **{name: name for name in ("sink", "statement", "locks")},
    "run by": lambda change: "the sink" if change["automatic"] else f'you, or schema_evolution="{change["step"]}"',
}


def _notes(diff: SchemaDiff | None) -> Iterable[str]:
    if diff is None:
        yield "its target has no columns to compare"
    else:
        yield from diff.notes
        if not diff.changes and not diff.unfit:
            yield "its target takes these rows as it is"


_DDL = re.compile(r"\s*(?:`([^`]+)`|([^\s`,]+))\s*:?\s+([a-z_]+(?: day to second)?(?:\([\d, ]+\))?)\s*(?:,|$)", re.I)


def schema_of(text: str) -> pa.Schema:
    """Of a Parquet file, of a file with the JSON of a Spark schema, or of DDL without nested types. Raises ValueError,
    OSError, and pyarrow's errors."""
    if text.endswith(".json"):
        return schema_of_json(json.loads(Path(text).read_text(encoding="utf-8")))
    if text.endswith(".parquet"):
        return pq.read_schema(text)
    fields = [field_of(match[1] or match[2], match[3].lower()) for match in _DDL.finditer(text)]
    rest = _DDL.sub("", text).strip()
    if rest or not fields:
        raise ValueError(f"not understood from {rest!r} on; for nested types give FILE.json, df.schema.json()")
    return pa.schema(fields)
