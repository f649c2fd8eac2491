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

from tests.mutants.__main__ import ROOT, mutated, place
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


MISSED = {
    "a newer checkpoint is not looked for after the put (R1)": (
        "A newer checkpoint has a newer claim, and the fence after the put reads both from one listing: it stops the "
        "driver. tests/protocol/test_protocol.py, test_r1_…"
    ),
    "another query's checkpoint is taken for one's own": (
        "The query is compared once more, with the offsets of the record. tests/protocol/test_decisions.py"
    ),
    "a gap between the checkpoints": (
        "The batch is then compared with the newest record, whose offsets or planning time differ, so the start is "
        "refused with another message. tests/protocol/test_memories.py"
    ),
    "a batch of other offsets counts as done (R12)": (
        "Spark has planned a batch of other offsets at another time, which is compared next. "
        "tests/protocol/test_memories.py"
    ),
    "a replay in another layout (R13)": (
        "Other rows are in the partitions then, so their fingerprints differ. tests/protocol/test_decisions.py"
    ),
    "outcomes are final while one could not answer (R3)": (
        "The sink is asked again about all that it has committed (R20), and no simulated sink answers for a part of "
        "what it commits as a whole. tests/protocol/test_sweeps.py"
    ),
    "what is committed can be given up": ("The command refuses it before. tests/cli/test_resolve.py"),
    "a generation is claimed twice": (
        "A claim of a lower number is refused by the fence before its first commit. tests/protocol/test_rules.py"
    ),
    "no fence after the load of nothing (R14)": (
        "Without a record nothing is committed, and the fence before the put stops the driver. "
        "tests/protocol/test_protocol.py"
    ),
    "what another driver may have given the same names is aborted (R4)": (
        "A simulated target takes no name twice, as the real ones, and no family brings two drivers to the same names "
        "after the target was restored, too. tests/protocol/test_claims.py"
    ),
    "a restore goes by the number of its claim": (
        "No start follows such a restore: the target has later rows of the earlier lineage (R15). "
        "tests/protocol/test_claims.py"
    ),
    "a driver that was superseded tells the error that it met": (
        "In the families, the fence of the next sweep, try, or commit tells the driver before. "
        "tests/protocol/test_memories.py"
    ),
    "spool: rows that somebody altered are written again": (
        "The simulator alters records, and no spooled rows. tests/protocol/test_spool.py"
    ),
    "more dead letters than a checkpoint may have": (
        "A simulated batch has at most one dead letter, and its task counts that itself. "
        "tests/postgres/test_dead_letters.py"
    ),
    "any oldest record is taken for the one that a restore put": (
        "No family reaches an oldest record that has by chance the number at which an earlier lineage ended. "
        "tests/protocol/test_decisions.py"
    ),
    "a replay that was blocked does not ask whether another driver has done it": (
        "It takes a driver with a copy of storage that commits between a blocked task and the sweep after it, which "
        "no family hits. tests/protocol/test_memories.py"
    ),
    "a put that was repeated is taken for another driver's": (
        "A driver then adopts the record, which is its own. A restore refuses, and the judge does not judge a command "
        "that refuses. tests/protocol/test_rules.py"
    ),
    "a superseded driver alters the table": (
        "Columns never change in a simulated query, so a table is altered right after the sweep of a start, whose "
        "fence stops the driver. tests/postgres/test_evolution.py"
    ),
    "rows that were hashed in an unknown way are written again": (
        "Rows that are hashed in another way have other fingerprints, which are compared, too. "
        "tests/protocol/test_rules.py"
    ),
}
"""The deliberate bugs that the simulator alone cannot see: the reason of each, and the test that does see it."""


def power(names: Sequence[str], cpu: float, processes: int) -> int:
    """Print which bugs are found, and how soon. Returns 0 if each of the others has its reason in `MISSED`."""
    chosen = [mutant for mutant in (*MUTANTS, *OWN) if str(place(mutant)).startswith(ROOMS)]
    if names:
        chosen = [mutant for mutant in chosen if any(part in mutant.name for part in names)]
    seconds = min(cpu, 600.0)
    with ThreadPoolExecutor(processes) as pool:
        found = list(pool.map(lambda mutant: _is_found(mutant, seconds), chosen))
    print(f"{sum(found)} of {len(chosen)} found within {seconds:g} s of processor time each")
    missed = [mutant.name for mutant, is_found in zip(chosen, found, strict=True) if not is_found]
    unexplained = [name for name in missed if name not in MISSED]
    for name in missed:
        print(f"{name}: {MISSED.get(name, 'NO REASON is given for this one')}")
    return int(bool(unexplained))


def _is_found(mutant: Mutant, seconds: float) -> bool:
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy = Path(name)
        for entry in ("coordinator", "sinks", "tests"):
            shutil.copytree(ROOT / entry, copy / entry, ignore=shutil.ignore_patterns("*.pyc", ".hypothesis"))
        file, text = mutated(mutant)
        (copy / file).write_text(text)
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
