"""How long sentences and lines of the documentation may be, so that busy people can read it.

`python docs/site/lengths.py` shows the words of each page, which have no limit. `make docs` and
tests/test_docs.py fail over a sentence or a line that is too long. Code, figures and addresses of
links do not count.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]

SENTENCE = 35
LINE = 120

_IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+|^#+ ", re.M)
_END = re.compile(r"[.!?][\"')*`]*\s+(?=[\"'(*`]*[A-Z0-9`])")


def without_code(page: str) -> str:
    lines = [""]
    fence = ""
    before = ""
    for line in page.splitlines():
        if fence or line.startswith("```"):
            fence = "" if line == fence else fence or line[: len(line) - len(line.lstrip("`"))]
        elif line.startswith("    ") and (before == "" or before.startswith(("#", "    "))):
            lines.append("")
        else:
            lines.append(f"{line}\n" if line.startswith("#") else line)
        before = line
    return "\n".join(lines)


def blocks(page: str) -> Iterator[str]:
    """Paragraphs, headings, items of lists and cells of tables."""
    prose = _LINK.sub(r"\1", _IMAGE.sub("", without_code(page)))
    for paragraph in re.split(r"\n\s*\n|(?=^#+ )|(?<=\|)\n|\n(?=\|)", prose, flags=re.M):
        if paragraph.lstrip().startswith("|"):
            yield from re.split(r"(?<!\\)\|", paragraph)
        else:
            yield from _ITEM.split(paragraph)


def words(text: str) -> int:
    """Those with a letter in them; a piece of code is one word."""
    return sum(
        bool(re.search(r"[^\W\d_]", word)) for word in re.sub(r"`[^`]*`", "code", text).split()
    )


def sentences(page: str) -> list[str]:
    found = (" ".join(sentence.split()) for block in blocks(page) for sentence in _END.split(block))
    return [sentence for sentence in found if sentence]


def count(page: str) -> int:
    return sum(map(words, blocks(page)))


def too_long(page: str) -> list[str]:
    found = [
        f"a sentence of {words(each)} words: {each}"
        for each in sentences(page)
        if words(each) > SENTENCE
    ]
    lines = [
        line
        for line in without_code(page).splitlines()
        if len(line) > LINE and not line.startswith("|")
    ]
    return found + [f"a line of {len(line)} characters: {line}" for line in lines]


def findings() -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {finding}"
        for path in PAGES
        for finding in too_long(path.read_text())
    ]


if __name__ == "__main__":
    for each in PAGES:
        print(f"{count(each.read_text()):6} {each.relative_to(ROOT)}")
    print(*findings(), sep="\n")
    sys.exit(bool(findings()))
