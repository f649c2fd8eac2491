"""The sink of PostgreSQL.

It writes rows by COPY, either into the target under PREPARE TRANSACTION, or into staging tables,
which are dropped in the transaction that moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from sinks.base import Sink
from sinks.diagnosis import InDoubt
from sinks.options import Duration
from sinks.postgres.catalog import PostgresCatalog
from sinks.postgres.columns import PostgresTarget
from sinks.postgres.connection import Connection
from sinks.postgres.dialect import PostgresDialect
from sinks.postgres.prepared import PreparedInPostgres
from sinks.postgres.server import PostgresServer
from sinks.postgres.staging import PostgresStaging
from sinks.sql.backend import Backend
from sinks.sql.routing import TableOptions, routing_of
from sinks.sql.sink import SchemaEvolution, TableSink
from sinks.sql.table import MergeOptions, Mode, OrderByNulls
from sinks.transaction import Identity

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Strategy = Literal["auto", "prepared", "staged"]


class PostgresSink(TableSink[Connection, PostgresTarget]):
    """A sink that writes rows into one table, by COPY BINARY.

    There are two strategies, and `auto` asks the server which one is possible:

    * `prepared`: each task copies into the table itself and runs PREPARE TRANSACTION, and the
      driver runs COMMIT PREPARED. This is for appends only, and the server must have
      max_prepared_transactions above the number of partitions.
    * `staged`: each task copies into a staging table beside the target and commits that, and the
      driver moves all staging tables of a checkpoint in one transaction. This works with any server
      and PgBouncer pool, and is the only strategy for upserts.

    The table `ledger`, beside the target, records what became of each transaction.
    """

    system = "PostgreSQL"

    strategy: Strategy

    def __init__(
        self,
        dsn: str,
        table: str | None = None,
        *,
        tables: Mapping[str, TableOptions] | None = None,
        table_column: str | None = None,
        payload_column: str | None = None,
        name: str | None = None,
        strategy: Strategy = "auto",
        mode: Mode = "append",
        keys: Sequence[str] = (),
        order_by: str | None = None,
        order_by_nulls: OrderByNulls = "error",
        delete_marker: str | None = None,
        keep_newer: bool = False,
        create_table: bool = False,
        schema_evolution: SchemaEvolution = "none",
        lock_timeout: Duration = 10.0,
        ledger: str = "tpc_ledger",
        transform: Callable[[DataFrame], DataFrame] | None = None,
        connect_options: Mapping[str, Any] | None = None,
        dead_letters: Sink | None = None,
        max_dead_letters: int | float = 1000,
    ) -> None:
        """Set up the sink; nothing is connected yet.

        * `dsn`: a libpq URL or key=value string; `connect_options`: further libpq parameters
          (`sslmode`, `passfile` …).
        * `table`: as in SQL: `orders`, `shop.orders`, `"Shop"."Orders"`. `name` (default: `table`)
          is the sink's uid.
        * `tables` in place of `table`, if rows name their tables: `table_column` (default "table")
          has the name, and `payload_column` (default "payload") the values.
        * `lock_timeout`: how long any of our transactions waits for a lock, in seconds, or as a
          string such as "10 s".
        * The other options are those of every table: `sinks.sql.sink.TableSink`.

        Raises ConfigurationError for options that contradict each other, and for a DSN that libpq
        cannot read.
        """
        merge = MergeOptions.of(mode, keys, order_by, delete_marker, keep_newer, order_by_nulls)
        server = PostgresServer(
            PostgresDialect(merge),
            dsn,
            connect_options or {},
            name=name or table or "tables",
            lock_timeout=lock_timeout,
        )

        def backend(options: MergeOptions) -> Backend[Connection, PostgresTarget]:
            catalog = PostgresCatalog(server, PostgresDialect(options))
            prepared = PreparedInPostgres(catalog)
            return Backend(PostgresStaging(catalog), prepared, strategy=strategy)

        super().__init__(
            backend(merge),
            table,
            routing=routing_of(
                name or "tables", tables, table_column, payload_column, merge, backend
            ),
            name=name,
            create_table=create_table,
            ledger=ledger,
            schema_evolution=schema_evolution,
            transform=transform,
            dead_letters=dead_letters,
            max_dead_letters=max_dead_letters,
        )

    def inspect(self, transactions: Sequence[Identity]) -> Sequence[InDoubt]:
        gids = [transaction["gid"] for transaction in transactions if "gid" in transaction]
        with self._server.lend() as connection:
            ages = dict(
                connection.execute(
                    "SELECT gid, extract(epoch from now() - prepared)::float FROM pg_prepared_xacts"
                    " WHERE gid = ANY(%s)",
                    [gids],
                ).fetchall()
            )
        return [
            InDoubt.parsed(transaction, ages.get(transaction.get("gid")))
            for transaction in transactions
        ]
