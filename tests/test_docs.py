"""README, CHANGELOG and docs/: links lead somewhere; pages and sentences are short. The Python can be copied: it
parses, imports what is there, and passes arguments that exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import runpy
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import chart
from tests.public_api import PACKAGES

ROOT = Path(__file__).parents[1]
LENGTHS = runpy.run_path(str(ROOT / "docs" / "site" / "lengths.py"))
PAGES: list[Path] = LENGTHS["PAGES"]
PUBLIC = {name: getattr(module, name) for module in map(importlib.import_module, PACKAGES) for name in module.__all__}


def blocks(page: Path) -> Iterator[ast.Module]:
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        yield ast.parse(textwrap.dedent(re.sub(r"\A(#.*\n)+", "", code)), str(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_the_documentation_can_be_copied(page: Path) -> None:
    for block in blocks(page):
        for node in ast.walk(block):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in {"coordinator", "sinks"}:
                module = importlib.import_module(str(node.module))
                missing = [name.name for name in node.names if not hasattr(module, name.name)]
                assert not missing, f"{node.module} has no {missing}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in PUBLIC:
                given = {keyword.arg for keyword in node.keywords} - {None}
                taken = inspect.signature(PUBLIC[node.func.id]).parameters
                takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values())
                assert takes_any or given <= set(taken), f"{node.func.id} takes no {given - set(taken)}"


def test_the_chart_is_of_the_figures_beside_it() -> None:
    rows = chart.figures(chart.PAGE.read_text(), chart.TITLE)
    assert len(rows) > 5
    assert chart.CHART.read_text() == chart.drawn(chart.TITLE, rows), "run python -m benchmarks.chart"


def test_there_is_code_to_look_at() -> None:
    assert sum(1 for page in PAGES for _ in blocks(page)) > 20


def headings(page: Path) -> set[str]:
    """As the anchors that sites make of them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    found = re.findall(r"^#+ (.*)", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.M | re.S)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", prose):
        path = page.parent / target if target else page
        assert path.exists(), f"{target} is not there"
        assert not anchor or anchor in headings(path), f"{target} has no heading #{anchor}"


@pytest.mark.parametrize(
    "page", ["databricks", "emr-dataproc-glue", "kubernetes", "managed-databases", "managed-kafka", "yarn"]
)
def test_a_platforms_page_says_first_whether_the_library_runs_there(page: str) -> None:
    _, first, *_ = (ROOT / "docs" / f"{page}.md").read_text().splitlines()
    assert first.startswith(("**Runs.**", "**Does not run.**", "**Not tried"))


def test_the_words_of_the_concepts_are_in_the_glossary() -> None:
    concepts = (ROOT / "docs" / "concepts.md").read_text()
    used = {word.lower() for word in re.findall(r"(?<![*\w])\*([^*\n]+)\*(?!\*)", concepts)} - {"italic"}
    entries = re.findall(r"^### (.*)", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    assert len(used) > 10
    assert used <= {entry.lower() for entry in entries}


def test_sentences_and_lines_are_short() -> None:
    assert LENGTHS["findings"]() == []


PAGE = """# A title

A sentence of five words. [A link](https://example.org/long) and `some code` are words.
- An item, on
  two lines

    indented code = 1

| a cell | 1,234 |
|---|---|

```python
code = 1
```
"""


def test_words_and_sentences_are_counted_without_code_and_figures() -> None:
    found = [sentence for sentence in LENGTHS["sentences"](PAGE) if LENGTHS["words"](sentence)]
    assert found == [
        "A title",
        "A sentence of five words",
        "A link and `some code` are words.",
        "An item, on two lines",
        "a cell",
    ]
    assert [LENGTHS["words"](sentence) for sentence in found] == [2, 5, 6, 5, 2]


def test_what_is_too_long_is_found() -> None:
    sentence, line = LENGTHS["too_long"]("word " * 50)
    assert sentence.startswith("a sentence of 50 words: word")
    assert line.startswith("a line of 250 characters: word")
