"""Flights from one Kafka topic into another with their speed, exactly-once, while the job is killed
and started again.

    python -m examples.kafka_to_kafka [--bootstrap host:port] [--rows 336776]

`job` is the pipeline, to be copied; the rest kills it twice with SIGKILL and shows what a
read_committed consumer sees. A Kafka is started for it unless `--bootstrap` names one.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import uuid
from contextlib import ExitStack, closing
from pathlib import Path

from pyspark.sql import functions as f

from coordinator import CheckpointCoordinator
from examples.kafka_flights import BATCHES, PARTITIONS, flights, report, run_and_kill
from examples.streams import DieAt, committed, create_topic, local_session, read_topic, write_topic
from sinks.kafka import KafkaSink
from sinks.testing.servers.kafka import KafkaServer

JOB = "kafka-to-kafka"


def job(args: argparse.Namespace) -> None:
    """From topic `source` into topic `target`: of each flight some fields and its speed, keyed by
    its plane."""
    spark = local_session()
    records = read_topic(spark, args.bootstrap, args.source, args.per_batch)
    schema = (
        "id BIGINT, tailnum STRING, origin STRING, dest STRING, distance BIGINT, air_time DOUBLE"
    )
    rows = records.select(f.from_json(f.col("value").cast("string"), schema).alias("row")).select(
        "row.*"
    )
    speeds = rows.withColumns(
        {"mph": f.round(60 * rows.distance / rows.air_time), "key": rows.tailnum}
    )
    coordinator = CheckpointCoordinator(
        job=JOB,
        sinks=[KafkaSink(args.bootstrap, args.target, value_format="json")],
        storage=(args.folder / "checkpoints").absolute().as_uri(),
        listeners=[DieAt(args.die_at)],
    )
    with coordinator:
        writer = speeds.writeStream.foreachBatch(coordinator).option(
            "checkpointLocation", str(args.folder / "spark")
        )
        writer.trigger(availableNow=True).start().awaitTermination()
    spark.stop()


def run(bootstrap: str, folder: Path, rows: int | None) -> str:
    """Returns the name of the topic that was written."""
    source, target = (f"flights-{name}-{uuid.uuid4().hex[:8]}" for name in ("in", "out"))
    values = flights(rows)
    write_topic(bootstrap, source, values, PARTITIONS)
    create_topic(bootstrap, target, PARTITIONS)
    print(f"{len(values):,} flights in topic {source}", flush=True)

    def state() -> str:
        with closing(KafkaSink(bootstrap, target)) as sink:
            in_doubt = len(list(sink.in_doubt(JOB)))
        return (
            f"{in_doubt} transactions in doubt, consumers see "
            f"{len(committed(bootstrap, target)):,} flights"
        )

    options = [
        "--bootstrap",
        bootstrap,
        "--source",
        source,
        "--target",
        target,
        "--folder",
        str(folder),
    ]
    run_and_kill(
        "examples.kafka_to_kafka", [*options, "--per-batch", str(len(values) // BATCHES)], state
    )
    report(
        f"topic {target}",
        (json.loads(value)["id"] for value in committed(bootstrap, target)),
        len(values),
    )
    return target


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bootstrap", help="brokers, host:port,…; one is started if there is none")
    parser.add_argument("--rows", type=int, help="only the first so many flights")
    worker = parser.add_subparsers(dest="command").add_parser("job")
    for name in ("bootstrap", "source", "target"):
        worker.add_argument(f"--{name}", required=True)
    worker.add_argument("--per-batch", type=int, required=True)
    worker.add_argument("--folder", type=Path, required=True)
    worker.add_argument("--die-at", default="")
    args = parser.parse_args()
    if args.command == "job":
        job(args)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bootstrap = args.bootstrap or stack.enter_context(KafkaServer()).bootstrap
        run(bootstrap, folder, args.rows)


if __name__ == "__main__":
    main()
