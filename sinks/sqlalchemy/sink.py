"""`SqlAlchemySink`: exactly-once into a table of any database that SQLAlchemy knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy.engine import URL

from sinks.base import Sink
from sinks.errors import ConfigurationError
from sinks.sql.evolution import SchemaEvolution
from sinks.sql.options import MergeOptions, Mode
from sinks.sql.planning import Planner
from sinks.sql.sink import TableSink
from sinks.sqlalchemy.backend import SqlAlchemyBackend

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class SqlAlchemySink(TableSink):
    """Rows into one table, by `executemany` of INSERT: the portable path, not the fast one. PostgresSink and MySQLSink
    are the fast ones.

    Tasks insert into staging tables beside the target and commit them; the driver moves a checkpoint in one
    transaction. What became of a transaction is kept in the table `ledger`, beside the target. MySQL and MariaDB are
    refused: `MySQLSink` is theirs.
    """

    system = "the database"

    def __init__(
        self,
        url: str | URL,
        table: str,
        *,
        name: str | None = None,
        mode: Mode = "append",
        keys: Sequence[str] = (),
        order_by: str | None = None,
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

        * `url`: SQLAlchemy's, `sqlite:////var/lib/app.db`; `engine_options`: more for `sqlalchemy.create_engine`.
        * `table`: `orders` or `schema.orders`, as the database has it. `name` (default: `table`) is the sink's uid.
        * `mode="upsert"`: the last row of each key (`keys`, which need a unique index) in a checkpoint, by the greatest
          `order_by`, replaces the row of that key (as DELETE and INSERT), or deletes it if the boolean column
          `delete_marker` is true. Without `order_by` a key may come only once in a checkpoint. `delete_marker` is not
          written, `order_by` only if the table has that column.
        * `keep_newer`: drop a change that is older, by `order_by`, than the table's row of its key.
        * `create_table`: create a missing table from the batch's schema, with `keys` as its primary key.
        * `schema_evolution`: "add" adds the columns that the batch has and the table lacks, as nullable ones. Nothing
          else of the table is altered.
        * `dead_letters`: a sink for rows that the table refuses. `max_dead_letters`: the most of them in a
          checkpoint, or, as a float, their largest share of its rows.

        Raises ConfigurationError for options that contradict each other, and for a URL that SQLAlchemy cannot read.
        """
        merge = MergeOptions.of(mode, keys, order_by, delete_marker, keep_newer)
        backend = SqlAlchemyBackend(url, engine_options or {}, merge, name=name or table)
        planner = Planner(backend, name or table, table, create_table, ledger, schema_evolution)
        beside = isinstance(dead_letters, SqlAlchemySink) and str(dead_letters._backend) == str(backend)
        if backend.dialect == "sqlite" and beside:
            raise ConfigurationError(
                f"sink {name or table!r}: a SQLite file takes one writer at a time, so its dead letters go into "
                "another file"
            )
        super().__init__(planner, transform, dead_letters, max_dead_letters)
