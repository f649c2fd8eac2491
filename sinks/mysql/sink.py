"""The sink of MySQL and MariaDB.

With the strategy `xa`, rows go into the target in an XA branch, which XA PREPARE makes durable; the
driver runs XA COMMIT. With the strategy `staged`, rows go into a staging table, and COMMIT makes
them durable; one transaction of the driver writes the ledger rows and moves every staging table of
a checkpoint into the target. DROP TABLE would commit this transaction, so the staging tables are
dropped after it: the ledger tells that the staging tables that are still there were moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from sinks.base import Sink
from sinks.mysql.catalog import MySQLCatalog
from sinks.mysql.columns import MySQLTarget
from sinks.mysql.connection import Connection
from sinks.mysql.dialect import MySQLDialect
from sinks.mysql.prepared import XATransactions
from sinks.mysql.server import MySQLServer
from sinks.mysql.staging import MySQLStaging
from sinks.options import Duration
from sinks.sql.backend import Backend
from sinks.sql.routing import TableOptions, routing_of
from sinks.sql.sink import SchemaEvolution, TableSink
from sinks.sql.table import MergeOptions, Mode, OrderByNulls

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Strategy = Literal["auto", "xa", "staged"]


class MySQLSink(TableSink[Connection, MySQLTarget]):
    """A sink that writes rows into one table, by LOAD DATA LOCAL or by INSERT.

    It uses LOAD DATA LOCAL if the server has local_infile=ON. There are two strategies, and `auto`
    asks the server which one is possible:

    * `xa`: each task writes into the table itself and runs XA PREPARE, and the driver runs XA
      COMMIT. This is for appends only.
    * `staged`: each task writes into a staging table beside the target and commits that, and the
      driver moves all staging tables of a checkpoint in one transaction. This works for users and
      servers without XA privileges, and is the only strategy for upserts.

    The table `ledger`, beside the target, records what became of each transaction.

    The sink needs MySQL 8.0.29, MariaDB 10.5.2 or newer, and tables of InnoDB.
    """

    system = "MySQL or MariaDB"

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

        * `dsn`: mysql://user:password@host:3306/database, with parameters of pymysql.connect behind
          a question mark; `connect_options`: further parameters (`ssl_ca`, `read_timeout`,
          `unix_socket` …).
        * `table`: as in SQL: `orders`, `shop.orders`, with backticks around a part that has special
          characters. `name` (default: `table`) is the sink's uid.
        * `tables` in place of `table`, if rows name their tables: `table_column` (default "table")
          has the name, and `payload_column` (default "payload") the values.
        * `lock_timeout`: how long any of our statements waits for a lock, rounded up to whole
          seconds: a number of seconds, or a string such as "10 s".
        * The other options are those of every table: `sinks.sql.sink.TableSink`.

        Raises ConfigurationError for options that contradict each other, and for a string that is
        no DSN.
        """
        merge = MergeOptions.of(mode, keys, order_by, delete_marker, keep_newer, order_by_nulls)
        server = MySQLServer(
            MySQLDialect(merge),
            dsn,
            connect_options or {},
            name=name or table or "tables",
            lock_timeout=lock_timeout,
        )

        def backend(options: MergeOptions) -> Backend[Connection, MySQLTarget]:
            catalog = MySQLCatalog(server, MySQLDialect(options))
            return Backend(MySQLStaging(catalog), XATransactions(catalog), strategy=strategy)

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
