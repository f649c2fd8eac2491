"""Words from Kafka, counted with state, exactly-once into PostgreSQL, over failures of the job.

    python -m examples.word_count

A record with the word ERROR makes the job fail, twice, as a dependency that is down for a while
would. A fixed-delay restart (3 attempts, 10 s) brings it back: the offsets go back to the last
complete checkpoint, the state with them, and no word is counted twice. Kafka and PostgreSQL are
started for it unless `--bootstrap` and `--dsn` name some.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import uuid
from collections import Counter
from contextlib import ExitStack
from itertools import count as count_from
from pathlib import Path

import psycopg
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from coordinator import Attempt, CheckpointCoordinator, FixedDelay, run
from examples.streams import local_session, read_topic, write_topic
from sinks.postgres import PostgresSink
from sinks.testing.servers.kafka import KafkaServer
from sinks.testing.servers.postgres import PostgresServer

WORDS = ["to", "be", "or", "not", "that", "is", "the", "question"]
LINES = 4000
LINES_PER_BATCH = 500
ATTEMPTS = 3


def lines(count: int) -> list[str]:
    made = [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(5)) for i in range(count)]
    made[count * 3 // 5] += " ERROR"
    return made


def counts(spark: SparkSession, bootstrap: str, topic: str, *, failing: bool) -> DataFrame:
    """A running count of each word. While `failing`, the word ERROR raises."""
    source = read_topic(spark, bootstrap, topic, LINES_PER_BATCH)
    words = source.select(f.explode(f.split(f.col("value").cast("string"), " ")).alias("word"))
    if failing:
        broken = f.raise_error(f.lit("the dependency is down")).cast("string")
        words = words.select(
            f.when(f.col("word") == "ERROR", broken).otherwise(f.col("word")).alias("word")
        )
    return words.groupBy("word").count()


def offset(offsets: tuple[str, ...], topic: str) -> int:
    """The offset in the only partition of the only source."""
    return int(json.loads(offsets[0])[topic]["0"]) if offsets else 0


def ended(attempt: Attempt) -> str:
    if attempt.error is None:
        return "finished"
    return (
        "failed: the dependency is down"
        if "the dependency is down" in str(attempt.error)
        else str(attempt.error)
    )


def count_words(
    bootstrap: str, dsn: str, folder: Path, count: int = LINES, delay: float = 10.0
) -> None:
    """Count all words of `count` lines, and print what came of it.

    Tables and topic get fresh names.
    """
    topic = table = f"words_{uuid.uuid4().hex[:8]}"
    made = lines(count)
    write_topic(bootstrap, topic, made, partitions=1)
    spark = local_session()
    sink = PostgresSink(dsn, table, mode="upsert", keys=["word"], create_table=True)
    coordinator = CheckpointCoordinator(
        "word-count", [sink], (folder / "checkpoints").absolute().as_uri()
    )
    starts = count_from(1)

    def start() -> StreamingQuery:
        counted = counts(spark, bootstrap, topic, failing=next(starts) < ATTEMPTS)
        writer = coordinator.write_stream(counted).outputMode("update").trigger(availableNow=True)
        return writer.option("checkpointLocation", str(folder / "spark")).start()

    summary = run(start, FixedDelay(attempts=ATTEMPTS, delay=delay), coordinator)
    spark.stop()

    print("\nattempt  from offset  to offset  ended")
    for one in summary.attempts:
        begun_at = offset(one.offsets_before, topic)
        completed = offset(one.offsets_after, topic)
        print(f"{one.number:7d}  {begun_at:11d}  {completed:9d}  {ended(one)}")
    with psycopg.connect(dsn) as connection:
        query = sql.SQL("SELECT word, count FROM {} ORDER BY word").format(sql.Identifier(table))
        found: dict[str, int] = dict(connection.execute(query).fetchall())
    expected = Counter(word for line in made for word in line.split())
    print("\nword       counted  in the input")
    for word in sorted(expected):
        print(f"{word:9s} {found.get(word, 0):8d}  {expected[word]:12d}")
    wrong = [word for word in expected | found if found.get(word) != expected[word]]
    print(f"\n{len(wrong)} words counted wrongly", flush=True)
    if wrong:
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bootstrap", help="brokers, host:port,…; one is started if there is none")
    parser.add_argument("--dsn", help="a PostgreSQL database; a server is started if there is none")
    parser.add_argument("--lines", type=int, default=LINES)
    parser.add_argument("--delay", type=float, default=10.0, help="seconds between attempts")
    args = parser.parse_args()
    logging.basicConfig(format="%(levelname)s %(message)s")
    logging.getLogger("coordinator.restart").setLevel(logging.INFO)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bootstrap = args.bootstrap or stack.enter_context(KafkaServer()).bootstrap
        dsn = args.dsn or stack.enter_context(PostgresServer()).dsn
        count_words(bootstrap, dsn, folder, args.lines, args.delay)


if __name__ == "__main__":
    main()
