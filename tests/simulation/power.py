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

OPERATIONS = "coordinator/operations"
OWN = (
    Mutant(
        "a command withdraws a request without looking whether it was begun",
        OPERATIONS,
        """store.journal.delete_note("request", id)
            begun = store.journal.read_note("begun", id) is not None""",
        """store.journal.delete_note("request", id)""",
        tests=(),
    ),
    Mutant(
        "a driver that is asked to stop takes the savepoint and goes on",
        OPERATIONS,
        """stops=None if how == "trigger" else query""",
        """stops=query if how == "cancel" else None""",
        tests=(),
    ),
    Mutant(
        "the next batch begins after the savepoint at which the query is to stop",
        OPERATIONS,
        """self._lifecycle.hold()
            if stops:""",
        """pass
            if stops:""",
        tests=(),
    ),
    Mutant(
        "a savepoint is taken of rows that are not visible",
        OPERATIONS,
        """        decisions.require_visible(newest)
        # Another driver may have written to the storage.""",
        """        # Another driver may have written to the storage.""",
        tests=(),
    ),
    Mutant(
        "a savepoint lacks the newest state",
        OPERATIONS,
        """int(version[1]) <= n + 1""",
        """int(version[1]) <= n""",
        tests=(),
    ),
    Mutant(
        "a savepoint has the plan of the next batch",
        OPERATIONS,
        """number is not None and int(number[0]) <= n""",
        """number is not None and int(number[0]) <= n + 1""",
        tests=(),
    ),
    Mutant(
        "a restore does not look again for later checkpoints",
        OPERATIONS,
        """_base(savepoint, store.job, lineage, required, allow_later_checkpoints), allow
        )""",
        """_base(savepoint, store.job, lineage, required, allow_later_checkpoints), lambda: None
        )""",
        tests=(),
    ),
    Mutant(
        "a chunk of a savepoint is restored whatever its checksum",
        OPERATIONS,
        """chunk is None or hashlib.sha256(chunk).hexdigest() != sha256""",
        """chunk is None""",
        tests=(),
    ),
    Mutant(
        "a restored job may lack sinks that nobody took out",
        OPERATIONS,
        """return sorted(set(savepoint.sinks) - set(missing))""",
        """return []""",
        tests=(),
    ),
    Mutant(
        "rows are given up against the replay of another driver",
        OPERATIONS,
        """if permit.complete.rounds[-1] is not record:""",
        """if False:""",
        tests=(),
    ),
    Mutant(
        "an operator's question in the middle of a restore shuts nobody out",
        OPERATIONS,
        """if claim.address is None:""",
        """if False:""",
        tests=(),
    ),
    Mutant(
        "what the newest driver has open counts as an orphan",
        OPERATIONS,
        """about.generation is not None and about.generation < generation""",
        """about.generation is not None and about.generation <= generation""",
        tests=(),
    ),
    Mutant(
        "a transaction of an older checkpoint counts as an orphan even if a record names it",
        OPERATIONS,
        """for complete in retained:
        for named""",
        """for complete in retained[:1]:
        for named""",
        tests=(),
    ),
)
"""Bugs of which no test of the catalogue knows."""


def power(names: Sequence[str], cpu: float, processes: int) -> int:
    """Print which bugs are found, and how soon. Returns 0 if all are."""
    chosen = [mutant for mutant in (*MUTANTS, *OWN) if str(place(mutant)).startswith(ROOMS)]
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
