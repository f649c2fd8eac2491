"""The conformance kit over a sink whose rows name their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pyarrow as pa

from sinks.arrow.json import to_json
from sinks.dead_letters import Refusal
from sinks.errors import SchemaMismatch
from sinks.sql.sink import TableSink
from sinks.testing import SinkConformance
from sinks.testing.kit import SCHEMA
from sinks.transaction import TransactionContext

NAMED = pa.schema([("table", pa.string()), ("payload", pa.string())])
TABLES = ("odd", "even")


def named(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The kit's rows as JSON, in the table `odd` or `even` by the column `id`."""
    rows = pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))
    tables = ["odd" if int(id) % 2 else "even" for id in batch.column("id").to_pylist()]
    return pa.RecordBatch.from_arrays([pa.array(tables), to_json(rows)], schema=NAMED)


class NamesTables(TableSink[Any, Any]):
    """Takes the rows of the kit, before another sink gets them with their tables' names."""

    def check(self, schema: pa.Schema) -> None:
        if sorted(schema.names) != sorted(SCHEMA.names):
            raise SchemaMismatch("these are not the columns of the kit")
        super().check(NAMED)

    def begin_transaction(self, context: TransactionContext) -> Any:
        return super().begin_transaction(replace(context, schema=NAMED))

    def write(self, transaction: Any, batch: pa.RecordBatch) -> None:
        super().write(transaction, named(batch))

    def write_good_rows(self, transaction: Any, batch: pa.RecordBatch, most: int) -> Sequence[Refusal]:
        return super().write_good_rows(transaction, named(batch), most)


class NamedTablesConformance(SinkConformance):
    """A database with the tables `odd` and `even`, for rows of the kit."""

    strategy: ClassVar[str]
    many = 40
    refused = None
    bad: ClassVar = {"name": "\0"}

    test_columns_of_another_type_arrive_or_are_refused = None
    """A payload's numbers may be texts, as Debezium's decimals are: the table's column says what they are."""

    def made(self, name: str = "named", **options: Any) -> TableSink[Any, Any]:
        raise NotImplementedError

    def query(self, statement: str) -> Sequence[Mapping[str, Any]]:
        raise NotImplementedError

    def named(self, sink: Any, name: str) -> TableSink[Any, Any]:
        return self.made(name)

    def visible(self, sink: Any) -> Sequence[Mapping[str, Any]]:
        return [row for table in TABLES for row in self.query(f"SELECT * FROM {table}")]

    def set_otherwise(self, sink: Any) -> Sequence[TableSink[Any, Any]]:
        swapped = {"odd": {"table": "even"}, "even": {"table": "odd"}}
        return [self.made(tables=swapped)]
