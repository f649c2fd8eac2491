"""`coordinator verify`: whether all row counts agree. Changes nothing."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from coordinator.cli.output import FINDING, JOB_FILE, UNKNOWN, AsJson, Job, coordinator_of, say, show
from coordinator.operate.balance import COLUMNS, Balance, Verdict, take_balance

_STYLES = {Verdict.BALANCED.value: "green", Verdict.DIFFERS.value: "bold red", Verdict.UNKNOWN.value: "yellow"}
_CODES = {Verdict.DIFFERS: FINDING, Verdict.UNKNOWN: UNKNOWN}


def verify(
    quick: Annotated[bool, typer.Option("--quick", help="Compare records and ledgers only; read no topic.")] = False,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Compare, for each retained checkpoint and sink, the rows that Spark delivered with those that the target has.
    Exit code 0: balanced, 1: something differs, 4: cannot tell."""
    with coordinator_of(job) as coordinator:
        store = coordinator.protocol.store
        balance = take_balance(store, coordinator.sinks, quick=quick)
    about = {"job": store.job, "storage": store.storage.uri} | balance.to_json()
    totals = [
        {"checkpoint": Text("all", "bold"), "sink": sink, "verdict": ""} | of for sink, of in balance.totals().items()
    ]
    if not as_json:
        about["checkpoints"] += totals
    if not balance.lines:
        say(f"No checkpoint of job {store.job!r} is retained: there is nothing to compare. See coordinator status.")
    counts = {title: lambda line, name=name: _count(line[name]) for name, title in COLUMNS.items()}
    verdict = lambda line: Text(line["verdict"], _STYLES.get(line["verdict"], ""))  # noqa: E731
    show(about, as_json, checkpoints={"checkpoint": "checkpoint", "sink": "sink", **counts, "": verdict})
    _say_differences(balance)
    if balance.verdict in _CODES:
        raise typer.Exit(_CODES[balance.verdict])


def _say_differences(balance: Balance) -> None:
    for text in balance.findings:
        say(f"Differs: {text}")
    remarks = [
        (sink, text)
        for texts_by in (balance.unknown, balance.remarks)
        for sink, texts in texts_by.items()
        for text in texts
    ]
    remarks += [(line.sink, text) for line in balance.lines for text in line.remarks]
    for sink, text in dict.fromkeys(remarks):
        numbers = [str(line.checkpoint) for line in balance.lines if line.sink == sink and text in line.remarks]
        of = f", checkpoint{'s' * (len(numbers) > 1)} {', '.join(numbers)}" if numbers else ""
        say(f"Cannot tell: sink {sink}{of}: {text}")


def _count(rows: int | None) -> str:
    return "?" if rows is None else f"{rows:,}"
