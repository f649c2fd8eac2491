"""Check the protocol's model with Spin: `make model`, or

    python docs/model/check.py                  all variants but the large ones
    python docs/model/check.py quick | large    two of them, or all
    python docs/model/check.py NAME …           some of them
    python docs/model/check.py trace NAME       the steps of a variant's counterexample

A variant *holds* when every state within its bounds was visited and no assertion failed. A variant
with a rule switched off must fail, with the property named. Needs `spin` and `gcc` (Debian, Ubuntu:
apt install spin gcc) and says so where they are missing. Exits with 1 on any surprise. Needs no
package and leaves no file behind.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).with_name("protocol.pml")
HOLDS = "holds"
MEMORY_MB = 6000
TIMEOUT = 1800
"""Seconds for one variant."""


@dataclass(frozen=True)
class Variant:
    name: str
    options: str
    expected: str = HOLDS
    large: bool = False
    """Takes many minutes or gigabytes; not known to end within TIMEOUT and MEMORY_MB."""


VARIANTS = [
    Variant("two drivers and a third", ""),
    Variant("staged", "-DNP=2 -DSTAGED=1 -DLOSS=2"),
    Variant("two participants", "-DNP=2"),
    Variant("a driver crashes", "-DCRASH=1"),
    Variant("two drivers crash", "-DCRASH=2 -DLOSS=0 -DNR=3"),
    Variant("two drivers crash, and a loss", "-DCRASH=2 -DNR=3", large=True),
    Variant("staged, a driver crashes", "-DNP=2 -DSTAGED=1 -DCRASH=1 -DNR=3"),
    Variant("three checkpoints", "-DNC=3 -DGC=1"),
    Variant("retention, sweeps that fail", "-DGC=1 -DFLAKY=1"),
    Variant("puts that time out", "-DLATEPUT=1"),
    Variant("sweeps at any batch", "-DSWEEPS=1"),
    Variant("a slow commit", "-DTWOSTEP=1"),
    Variant("row locks", "-DNA=2 -DNR=3 -DLOCKS=1"),
    Variant("speculation", "-DNA=2 -DNR=3"),
    Variant("Kafka", "-DKAFKA=1"),
    Variant("Kafka, fenced while writing", "-DKAFKA=1 -DOPENSTEP=1 -DNR=3"),
    Variant("Kafka, open transactions hide outcomes", "-DKAFKA=1 -DLSO=1 -DNA=2 -DLOSS=0"),
    Variant("Kafka, replays end", "-DKAFKA=1 -DLOSS=0 -DENDLESS=0"),
    Variant("older checkpointLocation", "-DBACKUP=1"),
    Variant("storage set back", "-DSETBACK=1 -DLOSS=0 -DNR=2"),
    Variant("the external system set back", "-DSETBACK=4 -DLOSS=0 -DNR=3"),
    Variant("any memories set back", "-DSETBACK=7 -DLOSS=0 -DNR=3"),
    Variant("any set back, two participants", "-DSETBACK=7 -DNP=2 -DLOSS=0 -DNR=3", large=True),
    Variant("restore", "-DRESTORE=1 -DNR=2 -DLOSS=0"),
    Variant("restore, an operator asks", "-DRESTORE=1 -DASK=1 -DNR=2 -DLOSS=0"),
    Variant("restore, a loss", "-DRESTORE=1 -DNR=3", large=True),
    Variant("restore, a driver crashes", "-DRESTORE=1 -DNR=2 -DLOSS=0 -DCRASH=1", large=True),
    Variant("without R1", "-DGC=1 -DFLAKY=1 -DR1=0 -DR14=0", "S1"),
    Variant("without R2", "-DTWOSTEP=1 -DR2=0", "S1"),
    Variant("without R2, Kafka", "-DNC=1 -DKAFKA=1 -DR2=0 -DR14=0", "S1"),
    Variant("without R3", "-DR3=0 -DR14=0", "S1"),
    Variant("without R4", "-DR4=0", "S3"),
    Variant("without R5", "-DKAFKA=1 -DR5=0", "S3"),
    Variant("without R6", "-DKAFKA=1 -DLOSS=0 -DENDLESS=0 -DR6=0", "S4"),
    Variant("without R7", "-DKAFKA=1 -DLSO=1 -DNA=2 -DLOSS=0 -DR7=0", "S4"),
    Variant("without R8", "-DNC=1 -DNR=3 -DNA=2 -DLOCKS=1 -DLOSS=0 -DR8=0", "S4"),
    Variant("without R9, torn load", "-DGC=1 -DR9=0 -DR14LOAD=0", "S7"),
    Variant("without R9, gap", "-DR9GAP=0", "S7"),
    Variant("without R9, loss", "-DR9LOST=0 -DR14LOAD=0", "S7"),
    Variant("without R12", "-DBACKUP=1 -DR12=0", "S2"),
    Variant("without R14", "-DRESTORE=1 -DNR=2 -DLOSS=0 -DR14=0", "S1"),
    Variant("without R14 after a load", "-DRESTORE=1 -DNR=2 -DLOSS=0 -DR14LOAD=0", "S1"),
    Variant("without R15, storage", "-DSETBACK=3 -DLOSS=0 -DNR=2 -DR15=0", "S1"),
    Variant("without R15, the external system", "-DSETBACK=4 -DLOSS=0 -DNR=3 -DR15=0", "S4"),
    Variant("without R16", "-DSETBACK=4 -DLOSS=0 -DNR=3 -DR16=0", "S4"),
    Variant("without HELD", "-DNP=2 -DSTAGED=1 -DHELD=0", "S5"),
    Variant("sweep reads, then lists", "-DLISTFIRST=0", "S6"),
    Variant("restore looks, then claims", "-DRESTORE=1 -DNR=2 -DLOSS=0 -DFENCE=0", "S1"),
    Variant(
        "an operator asks amid a restore", "-DRESTORE=1 -DASK=1 -DNR=2 -DLOSS=0 -DASKCLAIM=0", "S1"
    ),
    Variant(
        "restore claims, then puts its base", "-DRESTORE=1 -DNR=2 -DLOSS=0 -DBASEFIRST=0", "S1"
    ),
]
QUICK = ["two drivers and a third", "without HELD"]


@dataclass(frozen=True)
class Result:
    verdict: str
    """`holds`, the property that failed (`S1`…), or why there is no verdict."""
    states: int
    seconds: float
    steps: str = ""
    """The counterexample, if one was found."""


def run(variant: Variant, folder: Path) -> Result:
    """Generate, compile and run the verifier of one variant in an empty folder."""
    started = time.monotonic()
    shutil.copy(MODEL, folder)
    options = variant.options.split()
    compiled = (
        f"-O2 -w -DSAFETY -DCOLLAPSE -DNOFAIR -DVECTORSZ=2048 -DMEMLIM={MEMORY_MB} -o pan pan.c"
    )
    for command in (["spin", *options, "-a", MODEL.name], ["gcc", *compiled.split()]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode or "Error" in done.stdout:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    try:
        # -E: a process that has stopped for good is no error by itself; init asserts S4 when nobody
        # can move
        pan = subprocess.run(
            ["./pan", "-E", "-m20000"], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT
        )
        output = pan.stdout
    except subprocess.TimeoutExpired:
        output = f"not within {TIMEOUT} s"
    found = re.search(r"(\d+) states, stored", output)
    steps = ""
    if "assertion violated" in output:
        replay = ["spin", *options, "-t", MODEL.name]
        steps = subprocess.run(replay, cwd=folder, capture_output=True, text=True).stdout
        verdict = _property(steps)
    elif (
        "errors: 0" in output
        and "Search not completed" not in output
        and "max search depth" not in output
    ):
        verdict = HOLDS
    else:
        verdict = "not completed: " + " ".join(output.split()[:12])
    return Result(verdict, int(found[1]) if found else 0, time.monotonic() - started, steps)


def _property(steps: str) -> str:
    """The name in the comment beside the assertion that failed."""
    at = re.search(r"protocol\.pml:(\d+), Error: assertion violated", steps)
    line = MODEL.read_text().splitlines()[int(at[1]) - 1] if at else ""
    name = re.search(r"/\* (S\d)", line)
    return name[1] if name else f"an assertion without a name: {line.strip()}"


def main(arguments: list[str]) -> int:
    missing = [tool for tool in ("spin", "gcc") if not shutil.which(tool)]
    if missing:
        print(f"skipped: {' and '.join(missing)} not found (Debian, Ubuntu: apt install spin gcc)")
        return 0
    traced = arguments[:1] == ["trace"]
    names = arguments[traced:]
    if names == ["quick"]:
        names = QUICK
    unknown = set(names) - {variant.name for variant in VARIANTS} - {"large"}
    if unknown:
        raise SystemExit(
            f"no variant {sorted(unknown)}; there are: {', '.join(v.name for v in VARIANTS)}"
        )
    chosen = [
        v for v in VARIANTS if v.name in names or names == ["large"] or (not names and not v.large)
    ]
    surprises = 0
    print(f"{'variant':<40}{'states':>12}{'seconds':>9}  {'verdict':<8}expected", flush=True)
    for variant in chosen:
        with tempfile.TemporaryDirectory() as folder:
            result = run(variant, Path(folder))
        surprise = result.verdict != variant.expected
        surprises += surprise
        told = (
            f"{variant.name:<40}{result.states:>12,}{result.seconds:>9.1f}  "
            f"{result.verdict:<8}{variant.expected}"
        )
        print(told + ("   <-- SURPRISE" if surprise else ""), flush=True)
        if traced:
            print(
                "\n".join(
                    line.split("EV", 1)[1] for line in result.steps.splitlines() if "EV " in line
                )
            )
    print(f"{len(chosen)} variants, {surprises} surprises")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
