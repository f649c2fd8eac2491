"""Values of options, which come from code, or as strings from a job file or Spark's settings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import timedelta

from sinks.errors import ConfigurationError

Duration = float | str | timedelta
"""A number of seconds, a `timedelta`, or a string such as "500 ms", "10 s", "5 min", "2 hours" or
"1 day"."""

_UNITS = {
    "ms": 0.001,
    "millisecond": 0.001,
    "s": 1,
    "sec": 1,
    "second": 1,
    "m": 60,
    "min": 60,
    "minute": 60,
}
_UNITS |= {"h": 3600, "hour": 3600, "d": 86400, "day": 86400}


def seconds(value: object, name: str) -> float:
    """Return the seconds of a `Duration`, which is the value of the option `name`.

    Raises ValueError for a string or a number that is not a duration, and TypeError for anything
    else.
    """
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
        unit = match and (match[2] or "s")
        scale = unit and (_UNITS.get(unit) or _UNITS.get(unit.removesuffix("s")))
        if not match or not scale:
            raise ValueError(f"{name} must be a time such as 10, '10 s' or '5 min', not {value!r}")
        return float(match[1]) * scale
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"{name} must be a number of seconds or a text such as '10 s', not {value!r}"
        )
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number of seconds, not {value}")
    return float(value)


def seconds_of_sink(sink: str, value: Duration, name: str) -> float:
    """Return the seconds of a `Duration`, which is the value of an option of a sink.

    Raises ConfigurationError if the value is not a duration.
    """
    try:
        return seconds(value, name)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"sink {sink!r}: {error}") from None


def no_flags(**options: object) -> Iterator[str]:
    """Yield the reason for each option that is not a flag.

    A string would count as true, even "false".
    """
    for name, value in options.items():
        if not isinstance(value, bool):
            yield f"{name} must be true or false, without quotation marks, not {value!r}"
