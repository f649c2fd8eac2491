"""The job, its place for savepoints, and where drivers leave their tokens."""

from tests.savepoint.conftest import job as job
from tests.savepoint.conftest import state_home as state_home
from tests.savepoint.conftest import target as target
