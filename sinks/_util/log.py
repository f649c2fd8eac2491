"""Lets nothing into the log that could steer a terminal: what servers answer and rows hold is in messages and in
tracebacks, which logging makes of the raw error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from sinks.errors import printable

_OURS = ("coordinator", "sinks")


def _fit(make: Callable[..., logging.LogRecord], *args: Any, **kwargs: Any) -> logging.LogRecord:
    record = make(*args, **kwargs)
    if str(record.name).partition(".")[0] in _OURS:
        with suppress(Exception):  # logging tells of a message that cannot be formatted
            text = record.getMessage()
            if (fit := printable(text)) != text:
                record.msg, record.args = fit, ()
            if record.exc_info:
                record.exc_text = printable(logging.Formatter().formatException(record.exc_info))
    return record


logging.setLogRecordFactory(partial(_fit, logging.getLogRecordFactory()))
