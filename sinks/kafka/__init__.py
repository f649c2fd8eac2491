"""Exactly-once into Kafka.

Needs confluent-kafka and kafka-python: `pip install` with the extra `kafka`.
"""

from sinks._util.extras import needs_extra

with needs_extra("kafka"):
    from sinks.kafka.sink import KafkaSink

__all__ = ["KafkaSink"]
