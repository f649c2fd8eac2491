"""What the conformance kit asks of a sink into tables, besides its own table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from sinks.sql.sink import TableSink
from sinks.testing.kit import SinkTests


def transaction_name(job: str, lineage: str, sink: str, checkpoint: int) -> str:
    """As a ledger has it, from the tokens of job and sink."""
    return f"tpc.{job}.{lineage}.{checkpoint}.{sink}.0.g1r0t0a0"


class TableKit(SinkTests):
    merges = True
    """Whether its strategy takes `keys`."""

    def into(self, table: str, **options: Any) -> TableSink:
        """A sink like the one under test into this table of the same database."""
        raise NotImplementedError

    def named(self, sink: TableSink, name: str) -> TableSink:
        return self.into("orders", name=name)

    def accepting(self, sink: TableSink, schema: pa.Schema) -> TableSink:
        return self.into("accepting", create_table=True)

    def evolving(self, sink: TableSink) -> TableSink:
        return self.into("orders", schema_evolution="add")

    def upserting(self, sink: TableSink) -> TableSink | None:
        return self.into("upserted", mode="upsert", keys=["id"], create_table=True) if self.merges else None

    def set_otherwise(self, sink: TableSink) -> Sequence[TableSink]:
        elsewhere = self.into("others", name=sink.name)
        return [elsewhere, self.into("orders", mode="upsert", keys=["id"])] if self.merges else [elsewhere]
