"""Spark's own Kafka source and sink for a local session: `.config("spark.jars",
spark_kafka_jars())`.

In production Spark fetches them itself:
`spark.jars.packages=org.apache.spark:spark-sql-kafka-0-10_2.13:VERSION`, with Spark's own version.
Tests and examples name each jar, so that no session needs the network twice, and because the token
provider is not to be had in that version everywhere.
"""

from __future__ import annotations

from sinks.testing.servers.maven import maven_jars

SPARK_KAFKA = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
)
"""The connector for the Spark that this is developed on, and what it needs beside Spark's own
jars."""


def spark_kafka_jars() -> str:
    """The value of `spark.jars`.

    Raises RuntimeError when they cannot be had; downloaded at the first call.
    """
    return ",".join(map(str, maven_jars(*SPARK_KAFKA, transitive=False)))
