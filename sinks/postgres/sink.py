"""`PostgresSink`: exactly-once into a PostgreSQL table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from sinks.base import Sink
from sinks.diagnosis import InDoubt
from sinks.postgres.backend import PostgresBackend
from sinks.sql.evolution import SchemaEvolution
from sinks.sql.options import MergeOptions, Mode
from sinks.sql.planning import Planner
from sinks.sql.sink import TableSink
from sinks.transaction import Identity

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Strategy = Literal["auto", "prepared", "staged"]


class PostgresSink(TableSink):
    """Rows into one table, by COPY BINARY.

    Two strategies. `prepared`: each task copies into the table itself and runs PREPARE TRANSACTION; the driver runs
    COMMIT PREPARED. Appends only, and the server must have max_prepared_transactions above the number of partitions.
    `staged`: each task copies into a staging table beside the target and commits that; the driver moves all staging
    tables of a checkpoint in one transaction. For any server and PgBouncer pool, and the only one for upserts. `auto`
    asks the server. What became of a transaction is kept in the table `ledger`, beside the target.
    """

    system = "PostgreSQL"

    strategy: Strategy
    _backend: PostgresBackend

    def __init__(
        self,
        dsn: str,
        table: str,
        *,
        name: str | None = None,
        strategy: Strategy = "auto",
        mode: Mode = "append",
        keys: Sequence[str] = (),
        order_by: str | None = None,
        delete_marker: str | None = None,
        keep_newer: bool = False,
        create_table: bool = False,
        schema_evolution: SchemaEvolution = "none",
        lock_timeout: float = 10.0,
        ledger: str = "tpc_ledger",
        transform: Callable[[DataFrame], DataFrame] | None = None,
        connect_options: Mapping[str, Any] | None = None,
        dead_letters: Sink | None = None,
        max_dead_letters: int | float = 1000,
    ) -> None:
        """Set up the sink; nothing is connected yet.

        * `dsn`: a libpq URL or key=value string; `connect_options`: further libpq parameters (`sslmode`, `passfile` …).
        * `table`: as in SQL: `orders`, `shop.orders`, `"Shop"."Orders"`. `name` (default: `table`) is the sink's uid.
        * `mode="upsert"`: the last row of each key (`keys`, which need a unique index) in a checkpoint, by the greatest
          `order_by`, replaces the row of that key, or deletes it if the boolean column `delete_marker` is true. Without
          `order_by` a key may come only once in a checkpoint. `delete_marker` is not written, `order_by` only if the
          table has that column.
        * `keep_newer`: drop a change that is older, by `order_by`, than the table's row of its key.
        * `create_table`: create a missing table from the batch's schema, with `keys` as its primary key.
        * `schema_evolution`: "add" adds the columns that the batch has and the table lacks, as nullable ones. Nothing
          else of the table is altered.
        * `lock_timeout`: seconds that any of our transactions waits for a lock.
        * `dead_letters`: a sink for rows that the table refuses. `max_dead_letters`: the most of them in a
          checkpoint, or, as a float, their largest share of its rows.

        Raises ConfigurationError for options that contradict each other, and for a DSN that libpq cannot read.
        """
        merge = MergeOptions.of(mode, keys, order_by, delete_marker, keep_newer)
        options = connect_options or {}
        backend = PostgresBackend(dsn, options, merge, strategy, name=name or table, lock_timeout=lock_timeout)
        planner = Planner(backend, name or table, table, create_table, ledger, schema_evolution)
        super().__init__(planner, transform, dead_letters, max_dead_letters)

    def inspect(self, transactions: Sequence[Identity]) -> Sequence[InDoubt]:
        gids = [transaction["gid"] for transaction in transactions if "gid" in transaction]
        with self._backend.lend() as connection:
            ages = dict(
                connection.execute(
                    "SELECT gid, extract(epoch from now() - prepared)::float FROM pg_prepared_xacts"
                    " WHERE gid = ANY(%s)",
                    [gids],
                ).fetchall()
            )
        return [InDoubt.named(transaction, ages.get(transaction.get("gid"))) for transaction in transactions]
