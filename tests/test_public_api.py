"""Public names change only on purpose, and the changelog says so."""

from __future__ import annotations

import difflib

from tests.public_api import PINNED, public


def test_public_names_and_their_parameters_are_those_that_are_pinned() -> None:
    changed = [line for line in difflib.ndiff(PINNED.read_text().splitlines(), public()) if line[0] in "+-"]
    assert changed == [], (
        "A public name changed (docs/api-policy.md). If that is what you want, name the change in CHANGELOG.md, and "
        "run `python -m tests.public_api`, which writes tests/public_api.txt."
    )
