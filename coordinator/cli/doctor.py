"""`coordinator doctor`, which tells whether storage and sinks can keep the promise.

It also says how to fix what is wrong.
"""

from __future__ import annotations

import importlib.metadata
import secrets
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from textwrap import fill
from typing import Annotated

import typer

from coordinator import __version__
from coordinator.cli.output import (
    FINDING,
    JOB_FILE,
    AsJson,
    Job,
    coordinator_of,
    show,
    store_of,
    tell,
)
from coordinator.coordinator import CheckpointCoordinator
from coordinator.operations import operator_decisions
from coordinator.operations.inspection.memory_comparison import SET_BACK, compare_memories
from coordinator.spark.preflight import advice_on_sockets, package_problems
from coordinator.storage import CheckpointStorage, MissingStorage, open_storage
from sinks._util.threads import side_by_side
from sinks.diagnosis import Finding, Severity, compare_clocks
from sinks.optional import Diagnosable, basic_findings

_RACES = 5
_RACERS = 8
_INDENT = " " * 9
_DRIVERS = (
    "SQLAlchemy",
    "psycopg",
    "pgpq",
    "PyMySQL",
    "confluent-kafka",
    "kafka-python",
    "deltalake",
    "pyiceberg",
)
"""The packages whose versions are shown if they are installed.

A job whose sinks need others cannot be loaded.
"""


def doctor(
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 for warnings too.")] = False,
    location: Annotated[
        str | None,
        typer.Option(
            "--checkpoint-location", help="Spark's checkpointLocation, to compare it as well."
        ),
    ] = None,
    job: Job = JOB_FILE,
    as_json: AsJson = False,
) -> None:
    """Check storage and every sink: connect, check versions, settings and permissions, prepare and
    roll back an empty transaction. It does not disturb a running driver, and leaves nothing
    behind."""
    with coordinator_of(job, missing_storage=True) as coordinator:
        findings = list(_findings(coordinator, location))
    show([{"subject": subject, **vars(finding)} for subject, finding in findings], as_json)
    if not as_json:
        for subject, finding in findings:
            _print(subject, finding)
    severities = [finding.severity for _, finding in findings]
    tell(
        f"{severities.count(Severity.ERROR)} error(s), {severities.count(Severity.WARNING)} "
        "warning(s)",
        as_json,
    )
    bad = (Severity.ERROR, Severity.WARNING) if strict else (Severity.ERROR,)
    if any(finding.severity in bad for _, finding in findings):
        raise typer.Exit(FINDING)


def _print(subject: str, finding: Finding) -> None:
    """Print a finding in lines of 100 columns, which fold no word."""
    folded = partial(
        fill, width=100, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False
    )
    tell(
        folded(
            " ".join(f"{subject}: {finding.message}".split()),
            initial_indent=finding.severity.value.ljust(len(_INDENT)),
        )
    )
    if finding.fix:
        tell(folded(f"To fix it: {finding.fix}", initial_indent=_INDENT))


def _findings(
    coordinator: CheckpointCoordinator, location: str | None
) -> Iterable[tuple[str, Finding]]:
    job = coordinator.job
    storage = open_storage(coordinator.storage)
    looked_at = {"packages": _packages(), f"storage {storage.uri}": of_storage(storage)}
    for name, sink in coordinator.sinks.items():
        diagnosed = (
            sink.diagnose(job) if isinstance(sink, Diagnosable) else basic_findings(sink, job)
        )
        looked_at[f"sink {name}"] = diagnosed
    looked_at["memories"] = _memories(coordinator, location)
    for subject, findings in looked_at.items():
        try:
            yield from ((subject, finding) for finding in findings)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            yield (
                subject,
                Finding.error(message, "fix what the message names, and run the doctor again"),
            )


def _memories(coordinator: CheckpointCoordinator, location: str | None) -> Iterable[Finding]:
    for memory in compare_memories(store_of(coordinator), coordinator.sinks, location):
        what = (
            f"newest checkpoint of {memory.name}: "
            f"{memory.shown}{memory.verdict and ', '}{memory.verdict}"
        )
        fix = (
            "bring it back, or fix what it says, and run the doctor again"
            if memory.newest is None
            else SET_BACK
        )
        yield Finding.ok(what) if memory.agrees else Finding.error(what, fix)
    protocol = operator_decisions.protocol_of(
        store_of(coordinator), coordinator.sinks, coordinator.config
    )
    protocol.load()  # raises UnknownSink


def _packages() -> Iterable[Finding]:
    if find_spec("pyspark"):
        for what, fix in package_problems():
            yield Finding.error(what, fix)
        if advice := advice_on_sockets():
            yield Finding.ok(advice)
    else:
        yield Finding.warning(
            "no pyspark here, so no driver runs here", "run the doctor where the driver runs, too"
        )
    versions = [f"pyspark-exactly-once {__version__}", f"Python {sys.version.split()[0]}"]
    for name in ("pyspark", "pandas", "pyarrow", *_DRIVERS):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    yield Finding.ok(", ".join(versions))
    for name, owners in importlib.metadata.packages_distributions().items():
        if name in ("coordinator", "sinks") and len(set(owners)) > 1:
            yield Finding.error(
                f"{' and '.join(sorted(set(owners)))} are installed over each other: each has a "
                f"package {name!r}",
                "uninstall all of them and install pyspark-exactly-once again, in an environment "
                "of its own",
            )


def of_storage(storage: CheckpointStorage) -> Iterable[Finding]:
    """Diagnose checkpoint storage: races of put-if-absent, what others see, and the clock.

    What this writes, it deletes again.
    """
    if isinstance(storage, MissingStorage):
        yield Finding.warning(
            f"{storage.why.reason}; the first start of the job makes it",
            "nothing, before that start; after it: fix `storage` of the job, or restore it",
        )
        return
    # All runs use one folder, because storages in files keep an empty folder.
    folder = "doctor"
    own = secrets.token_hex(8)
    keys = [f"{folder}/{own}.{at}" for at in range(_RACES)]
    try:
        for key in keys:
            values = [f"{at}".encode() for at in range(_RACERS)]
            won = side_by_side(partial(storage.put_if_absent, key), values)
            value = storage.get(key)
            if won.count(True) != 1 or value != values[won.index(True)]:
                yield Finding.error(
                    f"put-if-absent is not atomic: {won.count(True)} of {_RACERS} writers of one "
                    f"key won, and {value!r} was kept",
                    "use another storage: two drivers could both complete a checkpoint",
                )
                return
        if [key for key in storage.list(folder) if own in key] != keys:
            yield Finding.error(
                "a listing misses what was just written", "use a storage with consistent listings"
            )
            return
        yield Finding.ok(
            f"put-if-absent had one winner in each of {_RACES} races of {_RACERS} writers"
        )
        for weakness in storage.weaknesses():
            yield Finding.error(
                weakness,
                'set it otherwise, or storage = "file:///…", or another database or bucket',
            )
        if storage.clock() is not None:
            yield from compare_clocks("the storage", lambda: storage.clock() or 0.0)
    finally:
        for key in keys:
            storage.delete(key)
