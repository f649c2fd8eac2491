"""Draws docs/benchmarks.svg from a table of docs/benchmarks.md: `python -m benchmarks.chart`."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "benchmarks.md"
CHART = DOCS / "benchmarks.svg"
TITLE = "Plain, 1,000,000 rows"

_LEFT = 290
_WIDTH = 330
_STEP = 24
"""Pixels: of the names, of the longest bar, of a line."""


def figures(page: str, title: str) -> list[tuple[str, float, float, float]]:
    """Of the first table below a heading: name, and median, least and most of the first column."""
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) +\| ([\d.]+) \(([\d.]+) … ([\d.]+)\)", section, re.M)
    return [(name, float(median), float(least), float(most)) for name, median, least, most in rows]


def drawn(title: str, rows: list[tuple[str, float, float, float]]) -> str:
    scale = _WIDTH / max(most for *_, most in rows)
    lines = []
    for at, (name, median, least, most) in enumerate(rows):
        y = 52 + at * _STEP
        colour = "#1f6feb" if name.startswith("exactly-once") else "#9aa4b2"
        left, right = (_LEFT + value * scale for value in (least, most))
        lines += [
            f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{name}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{median * scale:.1f}" height="16" fill="{colour}"/>',
            f'<path d="M{left:.1f} {y + 8}H{right:.1f}" stroke="#24292f"/>',
            f'<text x="{right + 6:.1f}" y="{y + 12}">{median:.2f}</text>',
        ]
    height = 62 + len(rows) * _STEP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 {height}" width="680" '
        f'height="{height}" font-family="sans-serif" font-size="12" fill="#24292f">',
        f"<title>{title}: million rows a second</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold">{title}: million rows a '
        "second</text>",
        '<text x="12" y="40">median; the line is from the least to the most</text>',
    )
    return "\n".join([*head, *lines, "</svg>\n"])


if __name__ == "__main__":
    CHART.write_text(drawn(TITLE, figures(PAGE.read_text(), TITLE)))
