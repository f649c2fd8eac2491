"""`coordinator schema diff`: what a sink's table lacks for the rows of a batch, before anything is altered."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.text import Text

from coordinator.cli.output import FOUND, JOB_FILE, USAGE, AsJson, Job, fail, opened, say, show_json, show_table
from coordinator.protocol.dead_letters import writers
from sinks import dead_letters
from sinks.diagnosis import VARCHAR, SchemaDiff

app = typer.Typer(no_args_is_help=True, help="Compare tables with the rows that come.")


@app.callback()
def _group() -> None:
    pass


@app.command()
def diff(
    schema: Annotated[
        str,
        typer.Argument(
            metavar="SCHEMA",
            help="Of the rows: FILE.json with df.schema.json(), a Parquet file, or DDL as 'id bigint, name string'.",
        ),
    ],
    sink: Annotated[str | None, typer.Option("--sink", metavar="NAME", help="This sink alone.")] = None,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Print the statements that make room for rows of SCHEMA in the sinks' tables, what each locks and whether it
    writes all rows anew, and what no statement mends. Changes nothing. Exit code 1 if there is anything."""
    try:
        wanted = schema_of(schema)
    except (OSError, ValueError, pa.ArrowException) as error:
        fail(f"cannot read the schema {schema!r}: {error}", USAGE)
    with opened(job, missing_storage=True) as coordinator:
        if sink is not None and sink not in coordinator.sinks:
            fail(f"the job has no sink {sink!r}; there are {', '.join(coordinator.sinks)}", USAGE)
        chosen = coordinator.sinks if sink is None else {sink: coordinator.sinks[sink]}
        dead = writers(coordinator.sinks)
        asked = {name: one.schema_diff(dead_letters.SCHEMA if name in dead else wanted) for name, one in chosen.items()}
    found = {name: answer for name, answer in asked.items() if answer is not None}
    if as_json:
        show_json({name: _plain(answer) for name, answer in found.items()})
    else:
        _show(found)
    for name in asked.keys() - found.keys():
        say(f"sink {name}: its target has no columns to compare")
    if any(answer.changes or answer.unfit for answer in found.values()):
        raise typer.Exit(FOUND)


def _plain(answer: SchemaDiff) -> dict[str, Any]:
    return {"changes": [vars(change) for change in answer.changes], "unfit": list(answer.unfit)}


def _show(found: dict[str, SchemaDiff]) -> None:
    rows = [
        [
            name,
            change.statement,
            change.locks,
            Text("yes", "yellow") if change.rewrites else "no",
            "the sink" if change.automatic else f'you, or schema_evolution="{change.step}"',
        ]
        for name, answer in found.items()
        for change in answer.changes
    ]
    if rows:
        show_table(["sink", "statement", "locks", "writes all rows anew", "run by"], rows)
    for name, answer in found.items():
        for reason in answer.unfit:
            say(f"sink {name}, no statement mends: {reason}")
        if not answer.changes and not answer.unfit:
            say(f"sink {name}: its table takes these rows as it is")


# ---------------------------------------------------------------------- schemas without Spark
_KINDS: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    **dict.fromkeys(("byte", "tinyint"), pa.int8()),
    **dict.fromkeys(("short", "smallint"), pa.int16()),
    **dict.fromkeys(("integer", "int"), pa.int32()),
    **dict.fromkeys(("long", "bigint"), pa.int64()),
    **dict.fromkeys(("float", "real"), pa.float32()),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "interval day to second": pa.duration("us"),
}
_DECIMAL = re.compile(r"decimal\((\d+), ?(\d+)\)")
_DDL = re.compile(r"\s*(?:`([^`]+)`|([^\s`,]+))\s*:?\s+([a-z_]+(?: day to second)?(?:\([\d, ]+\))?)\s*(?:,|$)", re.I)


def schema_of(text: str) -> pa.Schema:
    """Of a Parquet file, of a file with the JSON of a Spark schema, or of DDL without nested types. Raises ValueError,
    OSError, and pyarrow's errors."""
    if text.endswith(".json"):
        return _of_json(json.loads(Path(text).read_text(encoding="utf-8")))
    if text.endswith(".parquet"):
        return pq.read_schema(text)
    fields, at = [], 0
    while at < len(text):
        match = _DDL.match(text, at)
        if match is None:
            raise ValueError(
                f"not understood from {text[at:].strip()!r} on; for nested types give FILE.json, df.schema.json()"
            )
        fields.append(_field(match[1] or match[2], match[3].lower(), {}))
        at = match.end()
    if not fields:
        raise ValueError("it has no columns")
    return pa.schema(fields)


def _of_json(value: Any) -> pa.Schema:
    if not isinstance(value, dict) or value.get("type") != "struct":
        raise ValueError("it is not the JSON of a Spark schema, as df.schema.json() gives it")
    return pa.schema([_field(each["name"], each["type"], each.get("metadata") or {}) for each in value["fields"]])


def _field(name: str, kind: Any, metadata: dict[str, Any]) -> pa.Field:
    length = kind if isinstance(kind, str) and re.fullmatch(r"(var)?char\(\d+\)", kind) else metadata.get(VARCHAR)
    arrow = pa.string() if length else _arrow(kind)
    return pa.field(name, arrow, metadata={VARCHAR: length} if length else None)


def _arrow(kind: Any) -> pa.DataType:
    if isinstance(kind, dict):
        if kind["type"] == "struct":
            return pa.struct(list(_of_json(kind)))
        if kind["type"] == "array":
            return pa.list_(_arrow(kind["elementType"]))
        if kind["type"] == "map":
            return pa.map_(_arrow(kind["keyType"]), _arrow(kind["valueType"]))
    elif decimal := _DECIMAL.fullmatch(kind):
        return pa.decimal128(int(decimal[1]), int(decimal[2]))
    elif kind in _KINDS:
        return _KINDS[kind]
    elif kind.startswith("time("):
        return pa.time64("us")
    raise ValueError(f"there is no type {kind!r} here; there are {', '.join(_KINDS)}, decimal(p,s), varchar(n)")
