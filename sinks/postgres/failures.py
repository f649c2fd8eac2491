"""PostgreSQL's errors in the words of the sinks: what happened, in which table, column and row, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import errors

from sinks.errors import BadValue, ConfigurationError, SinkError, TransactionBlocked

_COPY_ROW = re.compile(r"COPY [^\n]*?, line (\d+)(?:, column ([^\n:]+))?")
_CHANGED = (
    errors.UndefinedTable,
    errors.UndefinedColumn,
    errors.UndefinedObject,
    errors.InvalidSchemaName,
    errors.WrongObjectType,
    errors.DatatypeMismatch,
    errors.GeneratedAlways,
)
_COPY = (
    "No two drivers of one checkpoint storage use one name: if a copy of it runs at the same time, stop one of the "
    "two, and give the copy another job name"
)
_INDEX = re.compile(r'in relation "([^"]+)"')


@contextmanager
def explained(table: str, where: str, aliases: dict[str, str] | None = None) -> Iterator[None]:
    """Turn PostgreSQL's errors into SinkErrors where they are about the rows, the rights or the set-up. `where` says
    who was writing; `aliases` maps names of staging tables to the table that the user knows."""
    try:
        yield
    except psycopg.Error as error:
        translated = explain(error, table, where, aliases or {})
        if translated is None:
            raise
        raise translated from error


def explain(error: psycopg.Error, table: str, where: str, aliases: dict[str, str]) -> SinkError | None:
    """The SinkError for an error of the server, or None if it is about something else (a lost connection)."""
    text = describe(error, aliases)
    state, who = error.sqlstate or "", f"table {table}: {where}"
    staging = next((name for name in aliases if name in (error.diag.message_primary or "")), "")
    if isinstance(error, errors.DuplicateTable):
        return SinkError(f"{who} found the name of its staging table in use: {describe(error)}. {_COPY}")
    if isinstance(error, errors.UndefinedTable) and staging:
        return SinkError(f"{who} found its staging table gone: {describe(error)}. Somebody has dropped it. {_COPY}")
    if isinstance(error, errors.LockNotAvailable | errors.DeadlockDetected):
        index = _INDEX.search(error.diag.context or "")
        held = f" on {index[1]}" if index else ""
        return TransactionBlocked(
            f"{who} waited for a lock{held} until its limit ({text}). Somebody else's open "
            "transaction holds it, or an orphaned one of this job (the coordinator aborts those and tries again), or "
            "two partitions of this batch write the same unique value; lock_timeout= of the sink is the limit"
        )
    if state in ("53200", "55000") and "prepared transactions" in text:
        return ConfigurationError(
            f"{who} cannot prepare its transaction: {text}. Every partition of every sink holds one "
            "prepared transaction until its checkpoint is committed: set max_prepared_transactions on the server at "
            'least as high (and restart it), write fewer partitions, or use strategy="staged", which needs none'
        )
    if isinstance(error, errors.FeatureNotSupported) and "PREPARE" in text:
        return ConfigurationError(
            f"{who} cannot prepare its transaction: {text}. A trigger or rule of the table does that, "
            'and PostgreSQL cannot prepare such a transaction; use strategy="staged"'
        )
    if isinstance(error, errors.FeatureNotSupported) and "row-level security" in text:
        return ConfigurationError(
            f"{who} was refused: {text}. COPY cannot obey the row-level security that the table has "
            'got: start the query again with strategy="auto" or "staged", or let the role pass it (BYPASSRLS)'
        )
    if isinstance(error, errors.InsufficientPrivilege):
        return ConfigurationError(f"{who} lacks a right: {text}")
    if isinstance(error, _CHANGED):
        return ConfigurationError(f"{who} found the table changed since it was checked: {text}")
    if state[:2] in ("22", "23") or isinstance(error, errors.RaiseException):
        bad = BadValue(f"{who} was refused{_position(error)}: {text}")
        return bad.because(text, type(error).__name__)
    return None


def _position(error: psycopg.Error) -> str:
    diag = error.diag
    row = _COPY_ROW.search(diag.context or "")
    column = diag.column_name or (row[2] if row else None)
    parts = [
        f"row {row[1]}" if row else "",
        f'column "{column}"' if column else "",
        f'constraint "{diag.constraint_name}"' if diag.constraint_name else "",
    ]
    found = ", ".join(part for part in parts if part)
    return f" ({found})" if found else ""


def describe(error: psycopg.Error, aliases: dict[str, str] | None = None) -> str:
    """Message, detail and hint of the server in one line."""
    diag = error.diag
    parts = [diag.message_primary or str(error).strip(), diag.message_detail, diag.message_hint]
    text = "; ".join(" ".join(part.split()) for part in parts if part)
    for name, known in (aliases or {}).items():
        text = text.replace(name, known)
    return text
