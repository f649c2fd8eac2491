from __future__ import annotations

from pathlib import Path

import pytest

from tests.protocol.job import Job, TestClock


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, clock=TestClock())
