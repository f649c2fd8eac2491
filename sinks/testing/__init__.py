"""For authors of sinks: the conformance kit, killable drivers, and real servers for tests.

Unlike the rest of `sinks`, this package imports `coordinator`: it runs the whole protocol around
the sink under test.
"""

import pytest

_OF_SINKS = (
    "conformance",
    "faults",
    "kit",
    "options",
    "outcomes",
    "over_spark",
    "two_phases",
    "values",
)
_OF_OTHERS = ("storage", "table_crashes", "table_suite")
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in _OF_SINKS + _OF_OTHERS))

from sinks.testing.clauses import Ability, Clause  # noqa: E402
from sinks.testing.conformance import SinkConformance, SinkContract  # noqa: E402
from sinks.testing.driver import KILLED, Driver, Hooked, KillAt  # noqa: E402
from sinks.testing.kit import SCHEMA, rows  # noqa: E402
from sinks.testing.local import LocalBatch, LocalQuery  # noqa: E402
from sinks.testing.over_spark import OverSpark  # noqa: E402

__all__ = [
    "KILLED",
    "SCHEMA",
    "Ability",
    "Clause",
    "Driver",
    "Hooked",
    "KillAt",
    "LocalBatch",
    "LocalQuery",
    "OverSpark",
    "SinkConformance",
    "SinkContract",
    "rows",
]
