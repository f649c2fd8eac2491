"""The job, its place for savepoints, and pages that wait for their answers."""

import pytest

from coordinator.operations.ui import job as job_view
from tests.savepoint.conftest import job as job
from tests.savepoint.conftest import target as target


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a page shows what it has asked for."""
    monkeypatch.setattr(job_view, "_PATIENCE", 300)
