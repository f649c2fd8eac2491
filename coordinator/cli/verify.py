"""`coordinator verify`: whether all row counts agree. Changes nothing."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from coordinator.cli.output import FOUND, JOB_FILE, UNKNOWN, AsJson, Job, opened, say, show
from coordinator.operate.balance import COLUMNS, Balance, Verdict, take_balance
from coordinator.protocol.records import CheckpointStore, jobs_in

_STYLES = {Verdict.BALANCED.value: "green", Verdict.DIFFERS.value: "bold red", Verdict.UNKNOWN.value: "yellow"}
_CODES = {Verdict.DIFFERS: FOUND, Verdict.UNKNOWN: UNKNOWN}


def verify(
    quick: Annotated[bool, typer.Option("--quick", help="Compare records and ledgers only; read no topic.")] = False,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Compare, for each retained checkpoint and sink, the rows that Spark delivered with those that the target has.
    Exit code 0: balanced, 1: something differs, 4: cannot tell."""
    with opened(job) as coordinator:
        store = coordinator.protocol.store
        found = take_balance(store, coordinator.sinks, quick=quick)
    about = {"job": store.job, "storage": store.storage.uri} | found.to_json()
    totals = [
        {"checkpoint": Text("all", "bold"), "sink": sink, "verdict": ""} | of for sink, of in found.totals().items()
    ]
    if not as_json:
        about["checkpoints"] += totals
    _say_nothing(found, store)
    counts = {title: lambda line, name=name: _count(line[name]) for name, title in COLUMNS.items()}
    verdict = lambda line: Text(line["verdict"], _STYLES.get(line["verdict"], ""))  # noqa: E731
    show(about, as_json, checkpoints={"checkpoint": "checkpoint", "sink": "sink", **counts, "": verdict})
    _say(found)
    if found.verdict in _CODES:
        raise typer.Exit(_CODES[found.verdict])


def _say_nothing(found: Balance, store: CheckpointStore) -> None:
    if not found.lines:
        others = [name for name in jobs_in(store.storage) if name != store.job]
        known = f" {store.storage.uri} holds the jobs {', '.join(map(repr, others))}." if others else ""
        say(f"No checkpoint of job {store.job!r} is retained: there is nothing to compare.{known}")


def _say(found: Balance) -> None:
    for text in found.found:
        say(f"Differs: {text}")
    told = [
        (sink, text)
        for texts_by in (found.unknown, found.remarks)
        for sink, texts in texts_by.items()
        for text in texts
    ]
    told += [(line.sink, text) for line in found.lines for text in line.remarks]
    for sink, text in dict.fromkeys(told):
        numbers = [str(line.checkpoint) for line in found.lines if line.sink == sink and text in line.remarks]
        of = f", checkpoint{'s' * (len(numbers) > 1)} {', '.join(numbers)}" if numbers else ""
        say(f"Cannot tell: sink {sink}{of}: {text}")


def _count(rows: int | None) -> str:
    return "?" if rows is None else f"{rows:,}"
