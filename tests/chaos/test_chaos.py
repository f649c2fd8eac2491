"""A short run of the harness over every rig, and the proof that it finds what is wrong."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from tests.chaos.__main__ import one
from tests.chaos.rigs import MODES, Services

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with Services() as services:
        yield services


def options(batches: int = 20, bug: str | None = None, fault: tuple[str, ...] = ()) -> argparse.Namespace:
    return argparse.Namespace(batches=batches, keep=False, bug=bug, fault=fault, peer=False)


SHORT = (("postgres", "prepared"),)
"""The rig of `make test`."""


@pytest.mark.parametrize(
    ("sink", "mode"),
    [
        pytest.param(sink, mode, marks=() if (sink, mode) in SHORT else pytest.mark.large)
        for sink, modes in MODES.items()
        for mode in modes
    ],
)
def test_every_row_once_whatever_fails(services: Services, sink: str, mode: str) -> None:
    result = one(services, sink, mode, "make test", options(batches=5))
    assert result.violations == []
    assert result.kills.total() > 0
    assert (result.lost, result.duplicated) == (0, 0)


@pytest.mark.parametrize(("bug", "mode", "faults"), [
    ("commit-before-complete", "prepared", ()),
    pytest.param("recovery-without-sweep", "prepared", ("kill",), marks=pytest.mark.large),
    pytest.param("put-without-if-absent", "prepared", ("stop",), marks=pytest.mark.large),
    pytest.param("replay-without-fingerprint", "staged", ("source", "kill"), marks=pytest.mark.large),
])  # fmt: skip
def test_a_deliberate_bug_is_found(services: Services, bug: str, mode: str, faults: tuple[str, ...]) -> None:
    found: list[str] = []
    for attempt in range(5):
        found = one(services, "postgres", mode, f"{bug} {attempt}", options(bug=bug, fault=faults)).violations
        if found:
            break
    assert found, f"{bug} went unnoticed"
