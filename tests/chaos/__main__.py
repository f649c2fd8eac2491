"""Run rounds of chaos until the time is up, and write what they found into the results file; or print its tables."""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from sinks.testing.servers.kafka import VERSION
from tests import jvm, signals
from tests.chaos import ledger, spark
from tests.chaos.bugs import BUGS
from tests.chaos.faults import KINDS
from tests.chaos.rigs import EVOLUTION, MODES, Services, targets
from tests.chaos.supervisor import LOCAL, Result, Round, Tier

TIERS = ("local", "spark", "local-cluster", "standalone", spark.CONNECT)


def main(arguments: list[str] | None = None) -> int:
    """0: no violation (with --bug: one was found); 1: the contrary."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--sink", choices=MODES, action="append", help="may be repeated; default: each in turn")
    parser.add_argument("--mode", action="append", help="prepared, staged, upsert, xa, append …; default: each in turn")
    parser.add_argument(
        "--tier", choices=TIERS, default="local", help="where drivers and tasks run; local: without Spark"
    )
    parser.add_argument("--peer", action="store_true", help="Spark's own writer instead: --sink postgres or kafka")
    parser.add_argument("--minutes", type=float, default=5.0, help="no round starts after so long")
    parser.add_argument("--rounds", type=int, default=10**9, help="or after so many rounds")
    parser.add_argument("--seed", default="1", help="of plans and rows; a second call with the same seed goes on")
    parser.add_argument("--batches", type=int, default=60, help="checkpoints in a round")
    parser.add_argument("--results", type=Path, default=Path("build/chaos.jsonl"), help="grows by a line a round")
    parser.add_argument(
        "--fault", choices=KINDS, action="append", default=[], help="only faults of this kind; may be repeated"
    )
    parser.add_argument("--kafka", default=VERSION, metavar="VERSION", help="of the broker; default: %(default)s")
    parser.add_argument("--keep", action="store_true", help="keep the folder of a round with a violation")
    parser.add_argument("--bug", choices=BUGS, help="switch on a deliberate bug, and stop when it is found")
    parser.add_argument(
        "--report", type=Path, nargs="+", metavar="FILE", help="print the tables of results files, and stop"
    )
    options = parser.parse_args(arguments)
    signals.prepare()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers, drivers and folders go too
    if options.report:
        print(ledger.report([line for file in options.report for line in ledger.load(file)]))
        return 0
    rigs = [(s, m) for s in options.sink or MODES for m in MODES[s] if not options.mode or m in options.mode]
    if options.tier != "local":  # a query of Spark has one schema
        rigs = [(sink, mode) for sink, mode in rigs if mode != EVOLUTION]
    if not rigs:
        parser.error(f"no such mode; there are {dict(MODES)}")
    if options.peer and (options.tier == "local" or not set(options.sink or MODES) <= {"postgres", "kafka"}):
        parser.error("--peer needs a tier with Spark, and --sink postgres or kafka")
    jvm.prepare()
    return int(run(rigs, options) != (options.bug is not None))


def run(rigs: list[tuple[str, str]], options: argparse.Namespace) -> bool:
    """Whether there was a violation."""
    tier = options.tier + ("-peer" if options.peer else "")
    known = {(line["tier"], line["sink"], line["mode"], line["seed"]) for line in ledger.load(options.results)}
    commit = _commit()
    deadline, violated = time.monotonic() + options.minutes * 60, False
    with ExitStack() as stack:
        services = stack.enter_context(Services(options.kafka))
        how = replace(stack.enter_context(_tier(options.tier)), name=tier)
        for number in range(options.rounds):
            if time.monotonic() > deadline:
                break
            sink, mode = rigs[number % len(rigs)]
            seed = f"{options.seed}/{sink}/{mode}/{number // len(rigs)}"
            seed += f"/kafka-{options.kafka}" if options.kafka != VERSION else ""
            if (tier, sink, mode, seed) in known and not options.bug:
                continue
            result = one(services, sink, mode, seed, options, how)
            if not options.bug:
                ledger.append(options.results, result.to_json() | {"commit": commit})
            _say(result)
            violated |= bool(result.violations)
            if violated and options.bug:
                break
    return violated


def one(services: Services, sink: str, mode: str, seed: str, options: argparse.Namespace, tier: Tier = LOCAL) -> Result:
    """One round. The folder of one with a violation is kept if `options.keep` says so."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    violated = True
    try:
        with targets(services, sink, mode) as fresh:
            peer = fresh[0].peer() if options.peer else None
            how = {"batches": options.batches, "tier": tier, "only": options.fault, "bug": options.bug, "peer": peer}
            result = Round(sink, mode, fresh, folder, seed, **how).run()
        violated = bool(result.violations)
        return result
    finally:
        if violated and options.keep:
            print(f"  kept: {folder}", flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _tier(kind: str) -> Iterator[Tier]:
    if kind == "local":
        yield LOCAL
        return
    with (
        tempfile.TemporaryDirectory(prefix="chaos-spark-") as folder,
        spark.master(kind, Path(folder)) as (url, daemons),
    ):
        yield Tier(
            kind,
            launch=partial(spark.SparkProcess, master=url),
            pace=15.0,
            patience=90.0,
            longest_stop=45.0,
            limit=900.0,
            quiet=300.0,
            victims=lambda driver: spark.victims([driver, *daemons]),
        )


def _commit() -> str:
    """What is tried: the commit checked out, with a mark if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def _say(result: Result) -> None:
    print(
        f"{result.sink} {result.mode} seed {result.seed}: {result.kills.total()} kills, {result.faults.total()} other "
        f"faults, {result.checkpoints} checkpoints, {result.rows} rows, {result.seconds:.0f} s",
        flush=True,
    )
    for violation in result.violations:
        print(f"  VIOLATION {violation}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
