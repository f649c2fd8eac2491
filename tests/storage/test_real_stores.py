"""The conformance suite on the object stores that TEST_STORAGE_URIS names.

TEST_STORAGE_URIS="s3://bucket/x gs://bucket/x az://container/x" runs it there, each time below a folder of its own,
with the credentials of the environment. What it wrote stays there.
"""

from __future__ import annotations

import os
from uuid import uuid4

import pytest

from sinks.testing.storage import ProcessConformance

URIS = os.environ.get("TEST_STORAGE_URIS", "").split()
if not URIS:
    pytest.skip("TEST_STORAGE_URIS names no object store", allow_module_level=True)


class TestRealStore(ProcessConformance):
    keys = 50
    kills = 2

    @pytest.fixture(params=URIS)
    def uri(self, request: pytest.FixtureRequest) -> str:
        return f"{request.param}/test-{uuid4().hex}"
