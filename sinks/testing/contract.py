"""`SinkContract`: what each method of a sink has to do, and to leave behind, in one process."""

from __future__ import annotations

from sinks.testing.faults import Faults
from sinks.testing.options import Options
from sinks.testing.outcomes import Outcomes
from sinks.testing.two_phases import TwoPhases
from sinks.testing.values import Values


class SinkContract(Faults, Options, Values, Outcomes, TwoPhases):
    """The tests without a process that dies: some seconds for a sink into files."""
