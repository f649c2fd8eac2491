"""`make docs`: the site of the documentation, in build/docs/site.

Its pages are the .md files beside README.md and in docs/. A file of the code that they point at
becomes a page as well. Ends with status 1 if a link leads nowhere, if a page is too long
(lengths.py), or if one would make a browser load something from another host.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import lengths

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "docs"
STAGED = BUILD / "pages"
SITE = BUILD / "site"
PAGES = {
    ROOT / "README.md": "index.md",
    ROOT / "CHANGELOG.md": "changelog.md",
    ROOT / "CONTRIBUTING.md": "contributing.md",
    ROOT / "SECURITY.md": "reporting.md",
    ROOT / "CODE_OF_CONDUCT.md": "conduct.md",
}

_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
_LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


def stage() -> None:
    shutil.rmtree(BUILD, ignore_errors=True)
    STAGED.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("zensical.toml"), BUILD)
    sources: set[Path] = set()
    for page in [*PAGES, *sorted((ROOT / "docs").glob("*.md"))]:
        (STAGED / PAGES.get(page, page.name)).write_text(_with_links_of_the_site(page, sources))
    for asset in sorted((ROOT / "docs").glob("*")):
        if asset.suffix in {".css", ".json", ".png", ".svg", ".yaml"}:
            shutil.copy(asset, STAGED)
    for source in sorted(sources):
        page = _source_page(source)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(_listing(source) if source.is_dir() else _code(source))


def _with_links_of_the_site(page: Path, sources: set[Path]) -> str:
    def rewritten(link: re.Match[str]) -> str:
        before, target, anchor, after = link.groups()
        if urlsplit(target).scheme:
            return link[0]
        path = Path(os.path.normpath(page.parent / target))
        if path in PAGES:
            target = PAGES[path]
        elif path.parent == ROOT / "docs" and path.is_file():
            target = path.name
        elif path.exists():
            sources.add(path)
            target = _source_page(path).relative_to(STAGED).as_posix()
        return f"{before}{target}{anchor or ''}{after}"

    text = page.read_text()
    end = 0
    parts = []
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(rewritten, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(rewritten, text[end:])])


def _source_page(path: Path) -> Path:
    return STAGED / "source" / f"{path.relative_to(ROOT).as_posix()}.md"


def _code(path: Path) -> str:
    return f"# {path.relative_to(ROOT)}\n\n````{path.suffix.lstrip('.')}\n{path.read_text()}````\n"


def _listing(folder: Path) -> str:
    lines = [f"# {folder.relative_to(ROOT)}/", "", "| file | |", "|---|---|"]
    for path in sorted({*folder.glob("*.py"), *folder.glob("*.txt")}):
        text = path.read_text()
        summary = (ast.get_docstring(ast.parse(text)) or "") if path.suffix == ".py" else text
        summary = summary.partition("\n\n")[0].replace("\n", " ")
        lines.append(f"| `{path.name}` | {summary.replace('|', '&#124;')} |")
    return "\n".join(lines) + "\n"


class Page(HTMLParser):
    """`loads`: what a browser fetches when it shows the page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        loaded = given.get(_LOADS.get(tag, ""))
        if loaded and not (tag == "link" and given.get("rel") in {"canonical", "next", "prev"}):
            self.loads.add(loaded)


def loaded_from_elsewhere() -> list[str]:
    return [
        f"{path.relative_to(SITE)} loads {url}"
        for path in sorted(SITE.rglob("*.html"))
        for url in sorted(Page(path.read_text()).loads)
        if urlsplit(url).netloc
    ]


def main() -> int:
    stage()
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    status = subprocess.run(command, cwd=BUILD, check=False).returncode
    found = lengths.findings() + loaded_from_elsewhere()
    print(*found, sep="\n", end="\n" if found else "")
    if not (status or found):
        print(f"{SITE.relative_to(ROOT)}/index.html: {len(list(SITE.rglob('*.html')))} pages")
    return int(bool(status or found))


if __name__ == "__main__":
    sys.exit(main())
