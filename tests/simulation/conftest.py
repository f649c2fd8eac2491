"""Fixtures of the simulator's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def is_short(request: pytest.FixtureRequest) -> bool:
    """Tell whether this is the short loop of `make test`."""
    return bool(request.config.getoption("markexpr") == "short")
