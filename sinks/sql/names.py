"""Names that a transaction goes by in a database, and those of tables for a reader."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from sinks.transaction import TransactionId, token

STAGING = re.compile("tpc_[0-9a-f]{20}")
"""Names of staging tables."""


def staging_table(transaction_id: str) -> str:
    """The name of a participant's staging table: 24 characters of [a-z0-9_], which any database
    takes unquoted."""
    return f"tpc_{hashlib.sha256(transaction_id.encode()).hexdigest()[:20]}"


def target_named(text: str, table: str) -> str:
    """A server's words, with the name of the target in place of a staging table's."""
    return STAGING.sub(lambda _: table, text)


def witness_of(ledger: str) -> str:
    """The name of the table that has each commit a second time."""
    return f"{ledger}_witness"


def of_sink(transaction_id: str, sink: str) -> bool:
    """Whether this is the name of a transaction of a sink, and not some other text."""
    try:
        return TransactionId.parse(transaction_id).sink == token(sink)
    except ValueError:
        return False


def columns_digest(columns: Iterable[str]) -> str:
    """What a committable carries of the columns that its staging table has for its rows."""
    return hashlib.sha256("\0".join(sorted(columns)).encode()).hexdigest()[:16]


def label(schema: str | None, name: str) -> str:
    return f"{schema}.{name}" if schema else name
