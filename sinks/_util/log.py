"""Loggers of this library, whose records cannot steer a terminal.

Messages and tracebacks contain what servers answer and rows hold, because `logging` makes a
traceback of the raw error.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from sinks.errors import printable


def get_logger(name: str) -> logging.Logger:
    """Return a logger of this library.

    Each of its modules takes its logger from here, and not from `logging`.

    Control characters and marks of direction in a record become escapes before any handler sees
    them. Each logger has a filter for that, because of loggers further up `logging` asks only the
    handlers.
    """
    logger = logging.getLogger(name)
    logger.addFilter(_make_printable)
    return logger


def _make_printable(record: logging.LogRecord) -> bool:
    with suppress(Exception):  # logging itself reports a message that cannot be formatted
        text = record.getMessage()
        if (fit := printable(text)) != text:
            record.msg = fit
            record.args = ()
        if record.exc_info:
            record.exc_text = printable(logging.Formatter().formatException(record.exc_info))
    return True
