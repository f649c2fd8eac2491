"""MySQL's and MariaDB's own way.

Strategy `xa`: rows go into the target in an XA branch, which XA PREPARE makes durable; the driver
runs XA COMMIT. Strategy `staged`: rows go into a staging table, and COMMIT; the driver's one
transaction writes the ledger rows and moves every staging table of a checkpoint into the target.
DROP TABLE would commit it, so the staging tables are dropped after it: the ledger tells that those
that are still there were moved.
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
from sinks.sql.sink import SchemaEvolution, TableSink
from sinks.sql.table import MergeOptions, Mode, OrderByNulls

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Strategy = Literal["auto", "xa", "staged"]


class MySQLSink(TableSink[Connection, MySQLTarget]):
    """Rows into one table, by LOAD DATA LOCAL where the server has local_infile=ON, else by
    INSERT.

    Two strategies. `xa`: each task writes into the table itself and runs XA PREPARE; the driver
    runs XA COMMIT. Appends only. `staged`: each task writes into a staging table beside the target
    and commits that; the driver moves all staging tables of a checkpoint in one transaction. For
    users and servers without XA rights, and the only one for upserts. `auto` asks the server. What
    became of a transaction is kept in the table `ledger`, beside the target.

    Needs MySQL 8.0.29, MariaDB 10.5.2 or newer, and tables of InnoDB.
    """

    system = "MySQL or MariaDB"

    strategy: Strategy

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
          a question mark; `connect_options`: further ones (`ssl_ca`, `read_timeout`, `unix_socket`
          …).
        * `table`: as in SQL: `orders`, `shop.orders`, with backticks around a part that has special
          characters. `name` (default: `table`) is the sink's uid.
        * `lock_timeout`: how long any of our statements waits for a lock, rounded up to whole
          seconds: a number of them, or a text such as "10 s".
        * The other options are those of every table: `sinks.sql.sink.TableSink`.

        Raises ConfigurationError for options that contradict each other, and for what is no DSN.
        """
        merge = MergeOptions.of(mode, keys, order_by, delete_marker, keep_newer, order_by_nulls)
        dialect = MySQLDialect(merge)
        server = MySQLServer(
            dialect, dsn, connect_options or {}, name=name or table, lock_timeout=lock_timeout
        )
        catalog = MySQLCatalog(server, dialect)
        backend = Backend(MySQLStaging(catalog), XATransactions(catalog), strategy=strategy)
        super().__init__(
            backend,
            table,
            name=name,
            create_table=create_table,
            ledger=ledger,
            schema_evolution=schema_evolution,
            transform=transform,
            dead_letters=dead_letters,
            max_dead_letters=max_dead_letters,
        )
