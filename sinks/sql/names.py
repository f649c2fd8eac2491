"""Names of transactions in a database, and names of tables for a reader."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from sinks.transaction import TransactionId, token

STAGING = re.compile("tpc_[0-9a-f]{20}(?:_[0-9a-f]{8})?")
"""The names of staging tables."""


def staging_table(transaction_id: str, key: str = "") -> str:
    """Return the name of a partition's staging table for the target that rows call `key`.

    It has up to 33 characters of [a-z0-9_], so any database takes it unquoted. The names of all
    staging tables of a partition begin with the name for the key "".
    """
    name = f"tpc_{hashlib.sha256(transaction_id.encode()).hexdigest()[:20]}"
    return f"{name}_{hashlib.sha256(key.encode()).hexdigest()[:8]}" if key else name


def target_named(text: str, table: str) -> str:
    """Replace the name of a staging table in a server's words by the name of the target."""
    return STAGING.sub(lambda _: table, text)


def witness_of(ledger: str) -> str:
    """Return the name of the table that has each commit a second time."""
    return f"{ledger}_witness"


def of_sink(transaction_id: str, sink: str) -> bool:
    """Tell whether this is the name of a transaction of the sink, and not some other string."""
    try:
        return TransactionId.parse(transaction_id).sink == token(sink)
    except ValueError:
        return False


def columns_digest(columns: Iterable[str]) -> str:
    """Hash the columns that a staging table has for its rows; a committable carries the result."""
    return hashlib.sha256("\0".join(sorted(columns)).encode()).hexdigest()[:16]


def label(schema: str | None, name: str) -> str:
    return f"{schema}.{name}" if schema else name
