"""The file of results, one JSON line a round, and the tables made from it."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.faults import STEPS

Line = Mapping[str, Any]
SINKS = ("kafka", "mariadb", "mysql", "postgres")


def load(path: Path) -> list[Line]:
    """A last line that a killed run left torn is passed over."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def append(path: Path, line: Line) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def report(lines: Sequence[Line]) -> str:
    """The tables of a results file; docs/proof.md has totals of them."""
    groups = _groups(lines, "sink") | _groups(lines, "tier")
    parts = [_origin(lines), _totals(_groups(lines, "tier", "sink", "mode")), _totals(groups | {"in all": lines})]
    for title, kind in (
        ("kills", "kills"), ("other faults", "faults"), ("last protocol step before the kill", "at_steps"),
        ("last call of sink or storage, or step, before the kill", "at_calls"),
        ("how drivers failed by themselves", "errors"), ("starts that were refused after a set-back", "refused"),
    ):  # fmt: skip
        parts.append(_by(title, kind, groups))
    bad = [f"- {line['sink']} {line['mode']}, seed {line['seed']}: {v}" for line in lines for v in line["violations"]]
    return "\n\n".join([*parts, "\n".join(["Violations:", *bad]) if bad else "No violations."])


def _groups(lines: Sequence[Line], *keys: str) -> dict[str, list[Line]]:
    groups: dict[str, list[Line]] = {}
    for line in sorted(lines, key=lambda line: [line[key] for key in keys]):
        groups.setdefault(" ".join(line[key] for key in keys), []).append(line)
    return groups


def _origin(lines: Sequence[Line]) -> str:
    commits = Counter(line["commit"] for line in lines)
    rounds = ", ".join(f"{commit} ({count} rounds)" for commit, count in commits.items())
    kills = {
        sink: sum(sum(line["kills"].values()) for line in lines if line["sink"] in (sink, "all")) for sink in SINKS
    }
    written = ", ".join(f"{sink} {count:,}" for sink, count in kills.items())
    return f"Commits: {rounds}. Kills in jobs that write to: {written}."


def _totals(rigs: Mapping[str, Sequence[Line]]) -> str:
    head = ["rig", "rounds", "driver lives", "kills", "other faults", "replays", "checkpoints", "rows", "lost",
            "doubled", "violations", "recovery median / p99 / max, s"]  # fmt: skip
    return _table(head, [[name, *_figures(lines)] for name, lines in rigs.items()])


def _figures(lines: Sequence[Line]) -> list[str]:
    def total(key: str) -> int:
        return sum(sum(line[key].values()) if isinstance(line[key], dict) else line[key] for line in lines)

    names = ("lives", "kills", "faults", "replays", "checkpoints", "rows", "lost", "duplicated")
    violations = sum(len(line["violations"]) for line in lines)
    recovery = sorted(second for line in lines for second in line["recovery"])
    times = "-"
    if recovery:
        p99 = recovery[min(len(recovery) - 1, int(len(recovery) * 0.99))]
        times = f"{statistics.median(recovery):.2f} / {p99:.2f} / {recovery[-1]:.2f}"
    return [f"{len(lines):,}", *(f"{total(name):,}" for name in names), f"{violations:,}", times]


def _by(title: str, kind: str, groups: Mapping[str, Sequence[Line]]) -> str:
    counted = {name: _count(lines, kind) for name, lines in groups.items()}
    found = {key for count in counted.values() for key in count}
    order = ["", *STEPS] if kind == "at_steps" else sorted(found)
    rows = [[key or "none yet", *(f"{count[key]:,}" for count in counted.values())] for key in order if key in found]
    return _table([title, *counted], rows)


def _count(lines: Iterable[Line], kind: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for line in lines:
        total.update(line.get(kind, {}))
    return total


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)
