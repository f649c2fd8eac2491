"""The sink of any database that SQLAlchemy knows.

SQLAlchemy creates the staging tables, and plain INSERT and DELETE move their rows. The driver's
transaction has no DDL, which would commit it in many databases, so the staging tables are dropped
after it: the ledger tells that the staging tables that are still there were moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy.engine import URL, Connection

from sinks.base import Sink
from sinks.errors import ConfigurationError
from sinks.sql.backend import Backend
from sinks.sql.sink import SchemaEvolution, TableSink
from sinks.sql.table import MergeOptions, Mode, OrderByNulls
from sinks.sqlalchemy.catalog import SqlAlchemyCatalog
from sinks.sqlalchemy.server import SqlAlchemyServer
from sinks.sqlalchemy.staging import SqlAlchemyStaging
from sinks.sqlalchemy.types import SqlAlchemyTarget

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class SqlAlchemySink(TableSink[Connection, SqlAlchemyTarget]):
    """A sink that writes rows into one table, by `executemany` of INSERT.

    This is the portable path, not the fast one: PostgresSink and MySQLSink are faster.

    Tasks insert into staging tables beside the target and commit them, and the driver moves a
    checkpoint in one transaction. The table `ledger`, beside the target, records what became of
    each transaction. MySQL and MariaDB are rejected, since `MySQLSink` is theirs.
    """

    _server: SqlAlchemyServer

    def __init__(
        self,
        url: str | URL,
        table: str,
        *,
        name: str | None = None,
        mode: Mode = "append",
        keys: Sequence[str] = (),
        order_by: str | None = None,
        order_by_nulls: OrderByNulls = "error",
        delete_marker: str | None = None,
        keep_newer: bool = False,
        create_table: bool = False,
        schema_evolution: SchemaEvolution = "none",
        ledger: str = "tpc_ledger",
        transform: Callable[[DataFrame], DataFrame] | None = None,
        engine_options: Mapping[str, Any] | None = None,
        dead_letters: Sink | None = None,
        max_dead_letters: int | float = 1000,
    ) -> None:
        """Set up the sink; nothing is connected yet.

        * `url`: a URL of SQLAlchemy, such as `sqlite:////var/lib/app.db`; `engine_options`: further
          parameters of `sqlalchemy.create_engine`.
        * `table`: `orders` or `schema.orders`, as the database has it. `name` (default: `table`) is
          the sink's uid.
        * The other options are those of every table: `sinks.sql.sink.TableSink`. An upsert replaces
          a row as DELETE and INSERT do.

        Raises ConfigurationError for options that contradict each other, and for a URL that
        SQLAlchemy cannot read.
        """
        merge = MergeOptions.of(mode, keys, order_by, delete_marker, keep_newer, order_by_nulls)
        server = SqlAlchemyServer(url, engine_options or {}, merge, name=name or table)
        dialect = server.dialect
        beside = isinstance(dead_letters, SqlAlchemySink) and str(dead_letters._server) == str(
            server
        )
        if dialect.name == "sqlite" and beside:
            raise ConfigurationError(
                f"sink {name or table!r}: a SQLite file takes one writer at a time, so its dead "
                "letters go into another file"
            )
        backend = Backend(SqlAlchemyStaging(SqlAlchemyCatalog(server, dialect)))
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
        self.system = dialect.name
        self.writes_alone = dialect.name == "sqlite"
