"""`coordinator verify`: whether the books balance. Changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from coordinator.balance import COLUMNS, Balance, Verdict, take_balance
from coordinator.cli.output import FOUND, JOB_FILE, UNTOLD, AsJson, Job, fail, opened, say, show_json, show_table
from coordinator.protocol.clock import Clock
from coordinator.protocol.records import CheckpointStore, jobs_in
from coordinator.statistics.metrics import write_balance

_STYLES = {Verdict.BALANCED: "green", Verdict.DIFFERS: "bold red", Verdict.UNTOLD: "yellow"}
_CODES = {Verdict.DIFFERS: FOUND, Verdict.UNTOLD: UNTOLD}


def verify(
    quick: Annotated[
        bool, typer.Option("--quick", help="Compare records and ledgers; read no table and no topic.")
    ] = False,
    metrics: Annotated[
        Path | None,
        typer.Option(
            "--metrics",
            metavar="FILE",
            help="Write what was found there, too, for node_exporter's textfile collector (extra prometheus).",
        ),
    ] = None,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Of each retained checkpoint and sink: rows that came to the sink, that were pre-committed, that the external
    system has; and what differs. Exit code 0: balanced, 1: something differs, 4: nobody can tell."""
    with opened(job) as coordinator:
        store = coordinator.protocol.store
        found = take_balance(store, coordinator.sinks, quick=quick)
    if metrics:
        try:
            write_balance(metrics, store.job, found, Clock().milliseconds())
        except (ImportError, OSError) as error:
            fail(f"The metrics were not written: {error}")
    if as_json:
        show_json({"job": store.job, "storage": store.storage.uri} | found.to_json())
    else:
        _show(found, store)
    if found.verdict in _CODES:
        raise typer.Exit(_CODES[found.verdict])


def _show(found: Balance, store: CheckpointStore) -> None:
    if not found.lines:
        others = [name for name in jobs_in(store.storage) if name != store.job]
        known = f" {store.storage.uri} holds the jobs {', '.join(map(repr, others))}." if others else ""
        say(f"No checkpoint of job {store.job!r} is retained: there is nothing to compare.{known}")
    rows = [
        [
            line.checkpoint,
            line.sink,
            *(_count(getattr(line, name)) for name in COLUMNS),
            Text(line.verdict.value, _STYLES[line.verdict]),
        ]
        for line in found.lines
    ]
    for sink, totals in found.totals().items():
        rows.append([Text("all", "bold"), sink, *(_count(totals[name]) for name in COLUMNS), ""])
    if rows:
        show_table(["checkpoint", "sink", *COLUMNS.values(), ""], rows)
    for text in found.found:
        say(f"Differs: {text}")
    told = [
        (sink, text) for texts_by in (found.untold, found.remarks) for sink, texts in texts_by.items() for text in texts
    ]
    told += [(line.sink, text) for line in found.lines for text in line.remarks]
    for sink, text in dict.fromkeys(told):
        numbers = [str(line.checkpoint) for line in found.lines if line.sink == sink and text in line.remarks]
        of = f", checkpoint{'s' * (len(numbers) > 1)} {', '.join(numbers)}" if numbers else ""
        say(f"Cannot tell: sink {sink}{of}: {text}")


def _count(rows: int | None) -> str:
    return "?" if rows is None else f"{rows:,}"
