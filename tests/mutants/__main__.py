"""Put one deliberate bug after the other into a copy of the sources, and see whether the tests catch it.

The test that caught a bug the last time, which caught_by.json names, runs alone first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.catalogue import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("coordinator", "sinks", "tests", "examples", "pyproject.toml")
LIMIT = 900
CAUGHT_BY = Path(__file__).with_name("caught_by.json")


def main(arguments: list[str] | None = None) -> int:
    """0: each was caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="a part of the name of those to try; default: all")
    parser.add_argument("-j", type=int, default=1, help="so many at once")
    parser.add_argument("--list", action="store_true", help="only see that each can still be made")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if not options.names or any(part in m.name for part in options.names)]
    for mutant in chosen:
        mutated(mutant)
    if options.list:
        print(f"{len(chosen)} mutants, and the sources have a place for each")
        return 0
    caught_by = json.loads(CAUGHT_BY.read_text())
    caught = 0
    with ThreadPoolExecutor(options.j) as pool:
        tests = pool.map(lambda mutant: catch(mutant, caught_by.get(mutant.name)), chosen)
        for mutant, test in zip(chosen, tests, strict=True):
            if test:
                caught += 1
                caught_by[mutant.name] = test
                known = {mutant.name: caught_by[mutant.name] for mutant in MUTANTS if mutant.name in caught_by}
                CAUGHT_BY.write_text(json.dumps(known, indent=0) + "\n")
    print(f"{caught} of {len(chosen)} caught")
    return int(caught < len(chosen))


def anywhere(code: str) -> re.Pattern[str]:
    """Match this code however its lines are broken. Spaces before it stand for its place in a block."""
    indented = re.match("(?: {4})+", code)
    pattern = rf"(?<={indented[0]})" if indented else ""
    pieces = re.findall(r"\w+|\s+|[^\w\s]", code.strip())
    for piece in pieces:
        if piece.isspace():
            pattern += r"\s+"
        elif piece in ")]}":
            pattern += rf",?\s*{re.escape(piece)}"
        elif piece in "([{":
            pattern += rf"{re.escape(piece)}\s*"
        else:
            pattern += re.escape(piece)
    return re.compile(pattern)


def place(mutant: Mutant) -> Path:
    """Find the one file below the mutant's folder that has its text. Raises LookupError if that is not one any more."""
    text = anywhere(mutant.old)
    found = [path for path in sorted((ROOT / mutant.folder).rglob("*.py")) if text.search(path.read_text())]
    if len(found) != 1 or len(text.findall(found[0].read_text())) != 1:
        raise LookupError(f"{mutant.name}: the text has to be rewritten, it is in {found}: {mutant.old!r}")
    return found[0].relative_to(ROOT)


def mutated(mutant: Mutant) -> tuple[Path, str]:
    """The file that a mutant alters, below the root, and its text then.

    Raises SyntaxError if Python cannot read that text, as any test would catch such a mutant.
    """
    file = place(mutant)
    text, count = anywhere(mutant.old).subn(lambda _: mutant.new.strip(), (ROOT / file).read_text())
    assert count == 1, mutant
    compile(text, str(file), "exec", dont_inherit=True)
    return file, text


def catch(mutant: Mutant, last: str | None) -> str | None:
    """The test that fails. `last`: the one of the last time."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as name:
        copy = Path(name) / "copy"
        copy.mkdir()
        for entry in COPIED:
            source = ROOT / entry
            if source.is_dir():
                shutil.copytree(source, copy / entry)  # with what Python has compiled
            else:
                shutil.copy(source, copy)
        (copy / ".cache").symlink_to(ROOT / ".cache")
        file, text = mutated(mutant)
        (copy / file).write_text(text)
        for tests in ([last] if last else []) + [*mutant.tests]:  # to collect all takes longer than to run most
            failed, output = _run(copy, tests)
            if failed:
                break
    print(f"{mutant.name:<55} {time.monotonic() - started:4.0f} s  {failed or output}", flush=True)
    return failed


def _run(copy: Path, tests: str) -> tuple[str | None, str]:
    """The first of these tests that fails, and what pytest printed if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not large"]
    done = subprocess.run(
        [*command, "--basetemp", f"{copy.parent}/tmp", "--timeout", "120", tests],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", done.stdout, re.M)
    if done.returncode == 1 and failed:
        return failed[0], ""
    return None, done.stdout[-2000:] if done.returncode else "NOT CAUGHT"


if __name__ == "__main__":
    sys.exit(main())
