"""How many deliberate bugs the simulator finds: one after the other is put into a copy of the code.

The bugs are those of tests/mutants/catalogue.py in the rooms that the simulator runs, with those of `OWN`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.__main__ import ROOT, anywhere, place
from tests.mutants.catalogue import MUTANTS, Mutant

ROOMS = (
    "coordinator/protocol",
    "coordinator/store/job_store.py",
    "coordinator/store/records.py",
    "coordinator/store/spool.py",
    "coordinator/operations/savepoints",
    "coordinator/operations/operator_decisions.py",
    "coordinator/operations/requests.py",
    "coordinator/operations/inspection/in_doubt_report.py",
    "coordinator/cli/in_doubt.py",
)
"""What the simulator is the proof of."""


def power(names: Sequence[str], cpu: float, processes: int) -> int:
    """Print which bugs are found, and how soon. Returns 0 if all are."""
    chosen = [mutant for mutant in MUTANTS if str(place(mutant)).startswith(ROOMS)]
    if names:
        chosen = [mutant for mutant in chosen if any(part in mutant.name for part in names)]
    seconds = min(cpu, 600.0)
    with ThreadPoolExecutor(processes) as pool:
        found = sum(pool.map(lambda mutant: _is_found(mutant, seconds), chosen))
    print(f"{found} of {len(chosen)} found within {seconds:g} s of processor time each")
    return int(found < len(chosen))


def _is_found(mutant: Mutant, seconds: float) -> bool:
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy = Path(name)
        for entry in ("coordinator", "sinks", "tests"):
            shutil.copytree(ROOT / entry, copy / entry, ignore=shutil.ignore_patterns("*.pyc", ".hypothesis"))
        file = copy / place(mutant)
        text, count = anywhere(mutant.old).subn(lambda _: mutant.new.strip(), file.read_text())
        assert count == 1, mutant
        file.write_text(text)
        for what in (["seeds-and-families"], ["random"]):
            done = subprocess.run(
                [sys.executable, "-m", "tests.simulation.search", *what, str(seconds / 2)],
                cwd=copy,
                env=os.environ | {"PYTHONPATH": str(copy)},
                capture_output=True,
                text=True,
            )
            if done.returncode:
                break
    last = [line for line in (done.stdout or done.stderr).splitlines() if line][-1:]
    found = done.returncode == 1 and bool(re.match("FOUND", last[0] if last else ""))
    print(f"{'found ' if found else 'MISSED'} {mutant.name:<70} {(last or [''])[0][:200]}", flush=True)
    with open(os.environ.get("POWER_LOG", os.devnull), "a") as log:
        log.write(json.dumps({"name": mutant.name, "place": str(place(mutant)), "found": found, "by": last}) + "\n")
    return found
