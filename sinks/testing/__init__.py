"""For authors of sinks: the conformance kit, killable drivers, and real servers for tests.

Unlike the rest of `sinks`, this package imports `coordinator`: it runs the whole protocol around the sink under test.
"""

from sinks.testing.conformance import SCHEMA, SinkConformance, SinkContract, rows
from sinks.testing.driver import KILLED, Driver, Hooked, KillAt
from sinks.testing.local import LocalBatch, LocalQuery

__all__ = [
    "KILLED",
    "SCHEMA",
    "Driver",
    "Hooked",
    "KillAt",
    "LocalBatch",
    "LocalQuery",
    "SinkConformance",
    "SinkContract",
    "rows",
]
