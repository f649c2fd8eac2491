"""A checkpoint of one row into a table, with something that happens amid it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sinks import CommitOutcome
from sinks.sql.sink import TableSink
from sinks.testing.table import checkpoint, context, rows_of
from sinks.transaction import Fingerprint

WHEN = pytest.mark.parametrize("when", ["between", "amid", "then"])
"""Between two checkpoints, before the pre-commit of one, or after it."""


def nothing() -> None: ...


def write(
    sink: TableSink, n: int, amid: Callable[[], object] = nothing, then: Callable[[], object] = nothing
) -> CommitOutcome | Exception:
    """What the coordinator calls for a checkpoint of one row. Raises what fails it; what was in doubt is swept."""
    try:
        transaction = sink.begin_transaction(context(sink, checkpoint=n))
        try:
            sink.write(transaction, rows_of(n))
            amid()
            committable = sink.pre_commit(transaction).of(sink.name, 0, Fingerprint(1, n))
        except BaseException:
            sink.rollback(transaction)
            raise
        then()
        sink.committed_checkpoints("job")
        sink.validate_all(checkpoint(n), [committable])
    except BaseException:
        for identity in sink.in_doubt("job"):
            sink.abort(identity)
        raise
    (outcome,) = sink.commit_all(checkpoint(n), [committable])
    return outcome
