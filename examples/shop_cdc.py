"""The changes of a whole shop, as Debezium writes them to one topic, into the shop's tables in
PostgreSQL and in MySQL.

    python -m examples.shop_cdc

Customers have orders, and orders have lines, in PostgreSQL by foreign keys. Rows are inserted,
changed and deleted, and from the middle on a customer has a further column. Each event says which
table it is of, so one sink for each database writes all tables, and a checkpoint becomes visible in
all of them at once. The job gets SIGKILL twice: when all is pre-committed but not decided, and when
it is decided but not yet committed. At the end the tables are compared with what the changes lead
to, row by row. Kafka, PostgreSQL and MySQL are started for it unless addresses are given.

The topic has one partition, in the order of the database's log. With a topic for each table, an
order could come in an earlier checkpoint than its customer, which the foreign keys do not take.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
from pyspark.sql import DataFrame
from sqlalchemy import text

from coordinator import CheckpointCoordinator
from examples.streams import (
    DieAt,
    all_systems,
    local_session,
    mysql_engine,
    parse_arguments,
    read_topic,
    run_job,
    write_topic,
)
from sinks.mysql import MySQLSink
from sinks.postgres import PostgresSink
from sinks.sql.routing import TableOptions

CHANGES = 3000
PER_BATCH = 500
KILLS = {
    "PRE_COMMITTED 1": "in checkpoint 1, all pre-committed and nothing decided",
    "COMMITTING 3": "in checkpoint 3, decided and nothing committed",
}
COLUMNS = {
    "customers": "id bigint PRIMARY KEY, name varchar(80) NOT NULL, email varchar(80)",
    "orders": "id bigint PRIMARY KEY, customer bigint NOT NULL, total decimal(12,2) NOT NULL",
    "order_lines": "order_id bigint, line int, product varchar(80) NOT NULL,"
    " PRIMARY KEY (order_id, line)",
}
FOREIGN_KEYS = [("orders", "customer", "customers"), ("order_lines", "order_id", "orders")]
KEYS = {"customers": ["id"], "orders": ["id"], "order_lines": ["order_id", "line"]}

Row = dict[str, Any]
Tables = dict[str, dict[tuple[int, ...], Row]]
"""The rows of each table by their key."""


class Shop:
    """A shop's tables, and the events of what happens to them."""

    def __init__(self) -> None:
        self.tables: Tables = {name: {} for name in COLUMNS}
        self.events: list[str] = []

    def put(self, table: str, row: Row | None, *key: int) -> None:
        """Insert, change or delete a row, and write the event."""
        before = self.tables[table].get(key)
        if row is None:
            del self.tables[table][key]
        else:
            self.tables[table][key] = row
        event = {"before": before, "after": row, "op": "cud"[(before is not None) + (row is None)]}
        source = {"connector": "postgresql", "table": table, "lsn": len(self.events)}
        self.events.append(json.dumps(event | {"source": source}))

    def change(self, table: str, changed: Row, *key: int) -> None:
        self.put(table, self.tables[table][key] | changed, *key)

    def delete_order(self, order: int) -> None:
        for key in [key for key in self.tables["order_lines"] if key[0] == order]:
            self.put("order_lines", None, *key)
        self.put("orders", None, order)

    def delete_customer(self, customer: int) -> None:
        orders = self.tables["orders"].values()
        for order in [row["id"] for row in orders if row["customer"] == customer]:
            self.delete_order(order)
        self.put("customers", None, customer)


def changes(count: int, seed: int = 1) -> tuple[list[str], Tables]:
    """The events of about so many changes, and the rows that they leave."""
    chance = random.Random(seed)
    shop = Shop()
    while (number := len(shop.events)) < count:
        customers = [id for (id,) in shop.tables["customers"]]
        orders = [id for (id,) in shop.tables["orders"]]
        choice = chance.random()
        if not orders or choice < 0.2:
            customer = {"id": number, "name": f"customer ü {number}"}
            email = {"email": f"{number}@example.org"} if number > count // 2 else {}
            shop.put("customers", customer | email, number)
            order = {"id": number, "customer": number, "total": f"{number / 100:.2f}"}
            shop.put("orders", order, number)
        elif choice < 0.4:
            shop.change("customers", {"name": f"change {number}"}, chance.choice(customers))
        elif choice < 0.7:
            key = chance.choice(orders), chance.randrange(4)
            line = {"order_id": key[0], "line": key[1], "product": f"product {number}"}
            shop.put("order_lines", line, *key)
        elif choice < 0.8:
            shop.change("orders", {"customer": chance.choice(customers)}, chance.choice(orders))
        elif choice < 0.95:
            shop.delete_order(chance.choice(orders))
        else:
            shop.delete_customer(chance.choice(customers))
    return shop.events, shop.tables


def rows_of(records: DataFrame) -> DataFrame:
    """The rows of a topic's records, with the table of each, and where it was in the log."""
    events = records.where("value IS NOT NULL").selectExpr("CAST(value AS STRING) AS event")
    return events.selectExpr(
        "get_json_object(event, '$.source.table') AS table",
        "coalesce(get_json_object(event, '$.after'), get_json_object(event, '$.before')) AS row",
        "CAST(get_json_object(event, '$.source.lsn') AS BIGINT) AS lsn",
        "get_json_object(event, '$.op') = 'd' AS deleted",
    )


def job(args: argparse.Namespace) -> None:
    spark = local_session()
    rows = rows_of(read_topic(spark, args.bootstrap, args.source, PER_BATCH))
    tables: dict[str, TableOptions] = {
        name: {"table": f"{args.table}_{name}", "keys": keys} for name, keys in KEYS.items()
    }
    change: dict[str, Any] = {
        "tables": tables,
        "payload_column": "row",
        "mode": "upsert",
        "order_by": "lsn",
        "delete_marker": "deleted",
    }
    coordinator = CheckpointCoordinator(
        "shop",
        [
            PostgresSink(args.postgres, name="postgres", **change),
            MySQLSink(args.mysql, name="mysql", **change),
        ],
        (args.folder / "checkpoints").absolute().as_uri(),
        listeners=[DieAt(args.die_at)],
    )
    with coordinator:
        # each table's rows in one partition, so each has one staging table in a checkpoint
        writer = rows.repartition("table").writeStream.foreachBatch(coordinator)
        writer = writer.option("checkpointLocation", str(args.folder / "spark"))
        writer.trigger(availableNow=True).start().awaitTermination()
    spark.stop()


def run(
    bootstrap: str,
    postgres: str,
    mysql: str,
    folder: Path,
    count: int = CHANGES,
    kills: Mapping[str, str] = KILLS,
) -> dict[str, int]:
    """Returns how many rows are missing, left over or not as they should be in each system."""
    shop = f"shop_{uuid.uuid4().hex[:8]}"
    names = {name: f"{shop}_{name}" for name in COLUMNS}
    with psycopg.connect(postgres) as connection, mysql_engine(mysql).begin() as other:
        for name, columns in COLUMNS.items():
            statement = f"CREATE TABLE {names[name]} ({columns})"
            connection.execute(statement.encode())
            other.execute(text(statement))
        for table, column, parent in FOREIGN_KEYS:
            refers = f"FOREIGN KEY ({column}) REFERENCES {names[parent]} (id)"
            connection.execute(f"ALTER TABLE {names[table]} ADD {refers}".encode())
    events, expected = changes(count)
    write_topic(bootstrap, shop, events, 1)
    print(f"{len(events):,} changes of {len(names)} tables into PostgreSQL and MySQL", flush=True)
    options = ["--bootstrap", bootstrap, "--postgres", postgres, "--mysql", mysql]
    options += ["--source", shop, "--table", shop, "--folder", str(folder)]
    for moment, words in kills.items():
        run_job("examples.shop_cdc", [*options, "--die-at", moment], expected=-signal.SIGKILL)
        print(f"killed {words}", flush=True)
    run_job("examples.shop_cdc", options)
    rows = {(name, key): row for name, each in expected.items() for key, row in each.items()}
    wrong = {}
    for system, found in visible(postgres, mysql, names):
        wrong[system] = sum(
            found.get(key) != as_text(rows.get(key)) for key in found.keys() | rows.keys()
        )
        print(f"{system:10s}: {len(found):,} rows of {len(rows):,}, {wrong[system]} wrong")
    return wrong


def as_text(row: Mapping[str, Any] | None) -> dict[str, str] | None:
    """A row with its values as text, without those that are missing."""
    if row is None:
        return None
    return {name: str(value) for name, value in row.items() if value is not None}


def visible(
    postgres: str, mysql: str, names: Mapping[str, str]
) -> Iterator[tuple[str, dict[tuple[str, tuple[int, ...]], dict[str, str] | None]]]:
    with psycopg.connect(postgres) as connection, mysql_engine(mysql).begin() as other:
        for system in ("PostgreSQL", "MySQL"):
            found = {}
            for name, table in names.items():
                query = f"SELECT * FROM {table}"
                if system == "MySQL":
                    rows = [dict(row) for row in other.execute(text(query)).mappings()]
                else:
                    cursor = connection.execute(query.encode())
                    columns = [column.name for column in cursor.description or ()]
                    rows = [dict(zip(columns, row, strict=True)) for row in cursor]
                for row in rows:
                    found[name, tuple(row[key] for key in KEYS[name])] = as_text(row)
            yield system, found


def main() -> None:
    args = parse_arguments(__doc__, "changes", CHANGES, ("source", "table"))
    if args.command == "job":
        job(args)
        return
    with tempfile.TemporaryDirectory() as folder, all_systems(args) as (bootstrap, postgres, mysql):
        run(bootstrap, postgres, mysql, Path(folder), args.changes)


if __name__ == "__main__":
    main()
