"""The job, and its place for savepoints."""

from tests.savepoint.conftest import job as job
from tests.savepoint.conftest import target as target
