"""A table's changes, as Debezium writes them to Kafka, into the same table in PostgreSQL and in
MySQL.

    python -m examples.customers_cdc

Customers are created, changed and deleted; the topic has an event for each change, a tombstone
after each delete, and, as after a crash of the connector, stretches of events a second time. The
job gets SIGKILL twice: when all is pre-committed but not decided, and when it is decided but not
yet committed. At the end both tables are compared with what the changes lead to. Kafka, PostgreSQL
and MySQL are started for it unless addresses are given.

A deleted customer stays as a row with `deleted`: a row that is gone could not tell that an older
event, delivered once more, is older. Readers ask `WHERE NOT deleted`.

What orders the changes of a row depends on Debezium's connector: see `POSITIONS`, and
docs/tables.md for their limits. The events here are those of the connector for PostgreSQL.
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

import psycopg
from confluent_kafka import Producer
from psycopg import sql
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from sqlalchemy import text

from coordinator import CheckpointCoordinator
from examples.streams import (
    DieAt,
    all_systems,
    create_topic,
    local_session,
    mysql_engine,
    parse_arguments,
    read_topic,
    run_job,
)
from sinks.mysql import MySQLSink
from sinks.postgres import PostgresSink

CHANGES = 3000
PER_BATCH = 500
KILLS = {
    "PRE_COMMITTED 1": "in checkpoint 1, all pre-committed and nothing decided",
    "COMMITTING 3": "in checkpoint 3, decided and nothing committed",
}
ROW = "STRUCT<id: BIGINT, name: STRING, email: STRING>"
SOURCE = "STRUCT<lsn: BIGINT, file: STRING, pos: BIGINT, row: INT, commit_lsn: STRING, scn: STRING>"
EVENT = f"op STRING, before {ROW}, after {ROW}, source {SOURCE}, payload STRING"
POSITIONS = {
    "postgresql": "event.source.lsn",
    # the number of the binlog file, the position of the event there, the row in the event: 3, 1081,
    # 2 is one number
    "mysql": """
        CAST(concat(regexp_extract(event.source.file, '([0-9]+)$', 1),
                    lpad(event.source.pos, 12, '0'),
                    lpad(event.source.row, 7, '0')) AS DECIMAL(38))
    """,
    # three numbers in hexadecimal digits
    "sqlserver": """
        CAST(concat(lpad(conv(substring(event.source.commit_lsn, 1, 8), 16, 10), 10, '0'),
                    lpad(conv(substring(event.source.commit_lsn, 10, 8), 16, 10), 10, '0'),
                    lpad(conv(substring(event.source.commit_lsn, 19, 4), 16, 10), 5, '0'))
             AS DECIMAL(38))
    """,
    "oracle": "CAST(event.source.scn AS DECIMAL(38))",
}
"""By Debezium's connector, where in the log of the database a change was: later changes of a row
have greater ones."""
NO_ROW = """
    raise_error(IF(event.payload IS NULL,
        'an event of Debezium has neither a row before nor one after the change',
        'the events have the envelope {"schema": …, "payload": …}: set '
        || 'value.converter.schemas.enable=false in the connector, or parse '
        || 'get_json_object(value, "$.payload")'))
"""

Customer = tuple[str, str | None]
Event = tuple[int, str | None]
"""Key and value of a record; without a value, the tombstone."""


def position(connector: str, number: int) -> dict[str, object]:
    """Where a change was in the log.

    A binlog file has ten events of up to two rows, and the next one begins anew.
    """
    if connector == "postgresql":
        return {"connector": connector, "lsn": number}
    file, place = divmod(number, 20)
    return {
        "connector": connector,
        "file": f"binlog.{file + 5:06}",
        "pos": 157 + place // 2 * 300,
        "row": place % 2,
    }


def changes(
    count: int, connector: str = "postgresql", seed: int = 1
) -> tuple[list[Event], dict[int, Customer]]:
    """The events of so many changes, and the customers that they leave."""
    chance = random.Random(seed)
    customers: dict[int, Customer] = {}
    gone: set[int] = set()
    events: list[Event] = []

    def event(
        op: str, number: int, key: int, before: Customer | None, after: Customer | None
    ) -> Event:
        def row(customer: Customer | None) -> dict[str, object] | None:
            return customer and {"id": key, "name": customer[0], "email": customer[1]}

        payload = {"before": row(before), "after": row(after), "op": op, "ts_ms": number}
        return key, json.dumps(payload | {"source": position(connector, number)})

    for number in range(1, count + 1):
        choice = chance.random()
        key = (
            chance.choice(list(customers))
            if customers and choice > 0.3
            else len(customers) + len(gone)
        )
        before = customers.get(key)
        if before and choice > 0.9:
            del customers[key]
            gone.add(key)
            events += [event("d", number, key, before, None), (key, None)]
        else:
            customers[key] = (
                f"customer {key}, change {number}",
                None if choice < 0.35 else f"{number}@example.org",
            )
            events.append(event("u" if before else "c", number, key, before, customers[key]))
        if chance.random() < 0.01:
            events += events[-chance.randrange(1, 200) :]
    return events, customers


def write_events(bootstrap: str, topic: str, events: list[Event]) -> None:
    create_topic(bootstrap, topic, 2)
    producer = Producer({"bootstrap.servers": bootstrap})
    for key, value in events:
        producer.produce(topic, value, key=str(key))
        producer.poll(0)
    if left := producer.flush(120):
        raise SystemExit(f"{left:,} records could not be written to topic {topic} within 120 s")


def customers_of(records: DataFrame, connector: str) -> DataFrame:
    """The changed rows of a topic's records, without its tombstones."""
    values = records.where("value IS NOT NULL").select(f.col("value").cast("string"))
    return values.select(f.from_json("value", EVENT).alias("event")).selectExpr(
        f"coalesce(event.after.id, event.before.id, {NO_ROW}) AS id",
        "coalesce(event.after, event.before).name AS name",
        "coalesce(event.after, event.before).email AS email",
        "event.op = 'd' AS deleted",
        f"{POSITIONS[connector]} AS position",
    )


def job(args: argparse.Namespace) -> None:
    spark = local_session()
    customers = customers_of(
        read_topic(spark, args.bootstrap, args.source, PER_BATCH), args.connector
    )
    coordinator = CheckpointCoordinator(
        "customers",
        [
            PostgresSink(
                args.postgres,
                args.table,
                name="postgres",
                create_table=True,
                mode="upsert",
                keys=["id"],
                order_by="position",
                keep_newer=True,
            ),
            MySQLSink(
                args.mysql,
                args.table,
                name="mysql",
                create_table=True,
                mode="upsert",
                keys=["id"],
                order_by="position",
                keep_newer=True,
            ),
        ],
        (args.folder / "checkpoints").absolute().as_uri(),
        listeners=[DieAt(args.die_at)],
    )
    with coordinator:
        writer = customers.writeStream.foreachBatch(coordinator).option(
            "checkpointLocation", str(args.folder / "spark")
        )
        writer.trigger(availableNow=True).start().awaitTermination()
    spark.stop()


def run(
    bootstrap: str,
    postgres: str,
    mysql: str,
    folder: Path,
    count: int = CHANGES,
    kills: Mapping[str, str] = KILLS,
    connector: str = "postgresql",
) -> dict[str, int]:
    """Returns how many customers are missing, left over or not as they should be in each system."""
    topic = f"customers-{uuid.uuid4().hex[:8]}"
    table = topic.replace("-", "_")
    events, expected = changes(count, connector)
    write_events(bootstrap, topic, events)
    print(
        f"{count:,} changes in {len(events):,} records from Kafka into PostgreSQL and MySQL",
        flush=True,
    )
    options = [
        "--bootstrap",
        bootstrap,
        "--postgres",
        postgres,
        "--mysql",
        mysql,
        "--source",
        topic,
    ]
    options += ["--table", table, "--connector", connector, "--folder", str(folder)]
    for moment, words in kills.items():
        run_job("examples.customers_cdc", [*options, "--die-at", moment], expected=-signal.SIGKILL)
        print(f"killed {words}", flush=True)
    run_job("examples.customers_cdc", options)
    wrong = {}
    for name, found in visible(postgres, mysql, table):
        wrong[name] = sum(
            found.get(key) != expected.get(key) for key in found.keys() | expected.keys()
        )
        print(
            f"{name:10s}: {len(found):,} customers of {len(expected):,}, {wrong[name]} wrong",
            flush=True,
        )
    return wrong


def visible(postgres: str, mysql: str, table: str) -> Iterator[tuple[str, dict[int, Customer]]]:
    with psycopg.connect(postgres) as connection:
        query = sql.SQL("SELECT id, name, email FROM {} WHERE NOT deleted").format(
            sql.Identifier(table)
        )
        yield "PostgreSQL", {id: (name, email) for id, name, email in connection.execute(query)}
    with mysql_engine(mysql).begin() as connection_:
        rows = connection_.execute(text(f"SELECT id, name, email FROM {table} WHERE NOT deleted"))
        yield "MySQL", {id: (name, email) for id, name, email in rows}


def main() -> None:
    args = parse_arguments(__doc__, "changes", CHANGES, ("source", "table", "connector"))
    if args.command == "job":
        job(args)
        return
    with tempfile.TemporaryDirectory() as folder, all_systems(args) as (bootstrap, postgres, mysql):
        run(bootstrap, postgres, mysql, Path(folder), args.changes)


if __name__ == "__main__":
    main()
