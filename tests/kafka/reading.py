"""What consumers see, and what the broker holds, without the sink."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition
from confluent_kafka.admin import AdminClient
from kafka.admin import KafkaAdminClient


def read(options: Mapping[str, Any], topic: str, isolation: str = "read_committed") -> list[Message]:
    """All records that a new consumer gets now: up to the first one that an open transaction holds back."""
    consumer = Consumer(
        {
            **options,
            "group.id": "reader",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # for which a broker keeps the answer that there is no more, by default 500
            "isolation.level": isolation,
            "auto.offset.reset": "earliest",
        }
    )
    try:
        partitions = partitions_of(consumer, topic)
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        ended: set[int] = set()
        messages: list[Message] = []
        deadline = time.monotonic() + 120
        while len(ended) < len(partitions):
            assert time.monotonic() < deadline, f"no end of {topic} after two minutes"
            message = consumer.poll(1)
            if message is None:
                continue
            error = message.error()
            if error is None:
                messages.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                partition = message.partition()
                assert partition is not None
                ended.add(partition)
            else:
                raise AssertionError(error)
        return messages
    finally:
        consumer.close()


def partitions_of(client: Consumer | AdminClient, topic: str) -> Mapping[int, Any]:
    """Once the broker that is asked has heard of the topic."""
    while not (partitions := client.list_topics(topic, timeout=120).topics[topic].partitions):
        time.sleep(0.02)
    return partitions


def settled(bootstrap: str, **options: Any) -> None:
    """Wait until the broker has written the markers of all transactions that it has decided."""
    admin = KafkaAdminClient(bootstrap_servers=bootstrap, **options)
    try:
        deadline = time.monotonic() + 120
        while any(admin.list_transactions(state_filters=["PrepareCommit", "PrepareAbort"]).values()):
            assert time.monotonic() < deadline, "transactions are still being ended"
            time.sleep(0.005)
    finally:
        admin.close()
