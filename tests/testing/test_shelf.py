"""The correct sinks pass the contract, so that what is broken in the others is what they differ in."""

from __future__ import annotations

from pathlib import Path

import pytest

from sinks.testing import SinkContract
from tests.testing.shelf import Kit, Shelf, WholeShelf


class Contract(SinkContract):
    kind: type[Shelf]
    visible = Kit.visible
    leftovers = Kit.leftovers
    accepting = Kit.accepting
    upserting = Kit.upserting
    set_otherwise = Kit.set_otherwise
    evolving = Kit.evolving
    types = Kit.types
    bad = Kit.bad

    @pytest.fixture
    def sink(self, tmp_path: Path) -> Shelf:
        return self.kind(tmp_path)


class TestShelf(Contract):
    kind = Shelf


class TestWholeShelf(Contract):
    kind = WholeShelf
