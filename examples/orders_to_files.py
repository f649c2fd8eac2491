"""One stream of orders into a Kafka topic and a folder of Parquet files: each checkpoint is in
both, or in neither.

    python -m examples.orders_to_files

The job gets SIGKILL three times: when all is pre-committed and nothing decided, when it is decided
and nothing committed, and when the topic is committed and some files of the checkpoint are visible.
After each kill the topic and the folder are compared.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path

import pyarrow.dataset as ds
from pyspark.sql import functions as f

from coordinator import CheckpointCoordinator
from examples.streams import (
    DieAt,
    committed,
    create_topic,
    die,
    local_session,
    read_topic,
    run_job,
    show,
    show_losses,
    write_topic,
)
from sinks import CommitOutcome, Committable, TransactionId
from sinks.files import FileSink
from sinks.kafka import KafkaSink
from sinks.testing.servers.kafka import KafkaServer

ORDERS = 3000
PER_BATCH = 500
KILLS = {
    "PRE_COMMITTED 1": "in checkpoint 1, all pre-committed and nothing decided",
    "COMMITTING 3": "in checkpoint 3, decided and nothing committed",
    "files 4": "in checkpoint 4, committed by Kafka, with some of its files visible",
}


class DyingFiles(FileSink):
    """SIGKILL before the commit of the second partition, if that is the moment to die."""

    die_at = ""

    def commit(self, committable: Committable) -> CommitOutcome:
        name = TransactionId.parse(committable.transaction["transaction"])
        if name.subtask == 1 and f"files {name.checkpoint}" == self.die_at:
            while not any(committed_files(str(self), name.checkpoint)):
                time.sleep(0.01)  # another thread commits the first one
            die()
        return super().commit(committable)


def committed_files(folder: str, checkpoint: int) -> list[Path]:
    files = Path(folder).glob("customer=*/part-*")
    return [file for file in files if TransactionId.find(file.name).checkpoint == checkpoint]


def job(args: argparse.Namespace) -> None:
    spark = local_session()
    value = f.from_json(f.col("value").cast("string"), "id BIGINT, customer STRING, cents BIGINT")
    orders = (
        read_topic(spark, args.bootstrap, args.source, PER_BATCH)
        .select(value.alias("order"))
        .select("order.*")
    )
    files = DyingFiles(args.orders_folder, partition_by=["customer"], success_marker=True)
    files.die_at = args.die_at
    coordinator = CheckpointCoordinator(
        "orders-to-files",
        [
            KafkaSink(args.bootstrap, args.target, name="events", value_format="json"),
            files,
        ],
        (args.folder / "checkpoints").absolute().as_uri(),
        listeners=[DieAt(args.die_at)],
    )
    with coordinator:
        writer = orders.writeStream.foreachBatch(coordinator).option(
            "checkpointLocation", str(args.folder / "spark")
        )
        writer.trigger(availableNow=True).start().awaitTermination()
    spark.stop()


def run(bootstrap: str, folder: Path, orders: int = ORDERS) -> dict[str, Counter[int]]:
    """Returns how often each order is visible in each system."""
    source = f"orders-{uuid.uuid4().hex[:8]}"
    target = f"events-{uuid.uuid4().hex[:8]}"
    files = str(folder / "orders")
    values = (
        json.dumps({"id": i, "customer": f"c{i % 7}", "cents": 100 + i % 900})
        for i in range(orders)
    )
    write_topic(bootstrap, source, values, partitions=2)
    create_topic(bootstrap, target, 2)
    print(f"{orders:,} orders, {PER_BATCH} in a checkpoint, into Kafka and files", flush=True)
    options = ["--bootstrap", bootstrap, "--source", source, "--target", target]
    options += ["--orders-folder", files, "--folder", str(folder)]
    for moment, words in KILLS.items():
        run_job(
            "examples.orders_to_files", [*options, "--die-at", moment], expected=-signal.SIGKILL
        )
        print(f"killed {words}", flush=True)
        show(visible(bootstrap, target, files), PER_BATCH)
    run_job("examples.orders_to_files", options)
    print("run to its end", flush=True)
    found = visible(bootstrap, target, files)
    show(found, PER_BATCH)
    show_losses(found, orders)
    return found


def visible(bootstrap: str, topic: str, files: str) -> dict[str, Counter[int]]:
    in_kafka = Counter(json.loads(value)["id"] for value in committed(bootstrap, topic))
    table = ds.dataset(files, format="parquet", partitioning="hive").to_table(columns=["id"])
    return {"Kafka": in_kafka, "files": Counter(table["id"].to_pylist())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--orders", type=int, default=ORDERS)
    worker = parser.add_subparsers(dest="command").add_parser("job")
    for name in ("bootstrap", "source", "target", "orders-folder"):
        worker.add_argument(f"--{name}", required=True)
    worker.add_argument("--folder", type=Path, required=True)
    worker.add_argument("--die-at", default="")
    args = parser.parse_args()
    if args.command == "job":
        job(args)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the job and the server, too
    with tempfile.TemporaryDirectory() as folder, KafkaServer() as kafka:
        run(kafka.bootstrap, Path(folder), args.orders)


if __name__ == "__main__":
    main()
