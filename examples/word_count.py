"""Words from Kafka, counted with state, exactly-once into PostgreSQL, over failures of the job.

    python -m examples.word_count

A record with the word ERROR makes the job fail, twice, as a dependency that is down for a while would. A fixed-delay
restart (3 attempts, 10 s) brings it back: the offsets go back to the last complete checkpoint, the state with them, and
no word is counted twice. Kafka and PostgreSQL are started for it unless `--bootstrap` and `--dsn` name some.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import uuid
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg import sql
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from coordinator import CheckpointCoordinator
from examples.streams import local_session, read_topic, write_topic
from sinks.postgres import PostgresSink
from sinks.testing.servers.kafka import KafkaServer
from sinks.testing.servers.postgres import PostgresServer

WORDS = ["to", "be", "or", "not", "that", "is", "the", "question"]
LINES = 4000
LINES_PER_BATCH = 500
ATTEMPTS = 3


@dataclass
class Attempt:
    """One start of the query: the offset it began at, the last one it completed, and how it ended."""

    number: int
    begun_at: int
    completed: int
    ended: str


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
        words = words.select(f.when(f.col("word") == "ERROR", broken).otherwise(f.col("word")).alias("word"))
    return words.groupBy("word").count()


def last_offset(checkpoint_location: Path, topic: str) -> int:
    """Where Spark would go on: the offset after the last batch that it knows to be done."""
    done = [int(path.name) for path in (checkpoint_location / "commits").glob("[0-9]*")]
    if not done:
        return 0
    *_, offsets = (checkpoint_location / "offsets" / str(max(done))).read_text().splitlines()
    return int(json.loads(offsets)[topic]["0"])


def run(bootstrap: str, dsn: str, folder: Path, count: int = LINES, delay: float = 10.0) -> list[Attempt]:
    """Count all words of `count` lines; returns the attempts. Tables and topic get fresh names."""
    topic = table = f"words_{uuid.uuid4().hex[:8]}"
    made = lines(count)
    write_topic(bootstrap, topic, made, partitions=1)
    spark = local_session()
    sink = PostgresSink(dsn, table, mode="upsert", keys=["word"], create_table=True)
    coordinator = CheckpointCoordinator("word-count", [sink], (folder / "checkpoints").absolute().as_uri())
    attempts: list[Attempt] = []

    def attempt(number: int) -> None:
        location = folder / "spark"
        begun_at = last_offset(location, topic)
        writer = counts(spark, bootstrap, topic, failing=number < ATTEMPTS).writeStream.outputMode("update")
        query = writer.foreachBatch(coordinator).option("checkpointLocation", str(location))
        try:
            query.trigger(availableNow=True).start().awaitTermination()
            ended = "finished"
        except StreamingQueryException as error:
            ended = "failed: the dependency is down" if "the dependency is down" in str(error) else str(error)
            raise
        finally:
            attempts.append(Attempt(number, begun_at, last_offset(location, topic), ended))

    def tell(state: RetryCallState) -> None:
        print(f"attempt {state.attempt_number} failed; the next one starts in {delay:g} s", flush=True)

    with coordinator:
        for again in Retrying(
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_fixed(delay),
            retry=retry_if_exception_type(StreamingQueryException),
            before_sleep=tell,
            reraise=True,
        ):
            with again:
                attempt(again.retry_state.attempt_number)
    spark.stop()

    print("\nattempt  from offset  to offset  ended")
    for one in attempts:
        print(f"{one.number:7d}  {one.begun_at:11d}  {one.completed:9d}  {one.ended}")
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
    return attempts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", help="brokers, host:port,…; one is started if there is none")
    parser.add_argument("--dsn", help="a PostgreSQL database; a server is started if there is none")
    parser.add_argument("--lines", type=int, default=LINES)
    parser.add_argument("--delay", type=float, default=10.0, help="seconds between attempts")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bootstrap = args.bootstrap or stack.enter_context(KafkaServer()).bootstrap
        dsn = args.dsn or stack.enter_context(PostgresServer()).dsn
        run(bootstrap, dsn, folder, args.lines, args.delay)


if __name__ == "__main__":
    main()
