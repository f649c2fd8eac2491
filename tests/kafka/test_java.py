"""Java's own consumer reads what the sink writes."""

from __future__ import annotations

import os
import subprocess
from datetime import datetime, timedelta, timezone

import pyarrow as pa
import pytest

from sinks.kafka.record_batch import CODECS
from sinks.testing.servers.common import java
from sinks.testing.servers.kafka import JARS, VERSION, KafkaService
from sinks.testing.servers.maven import maven_jars
from tests.kafka.reading import settled
from tests.kafka.tasks import pre_commit, sink_of

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
MOMENT = datetime.now(timezone.utc).replace(microsecond=0)


def console_consumer(kafka: KafkaService, topic: str, count: int) -> list[str]:
    """What it prints of the topic's records: it checks the sum of every record batch that it takes apart."""
    shown = [f"print.{what}=true" for what in ("timestamp", "partition", "headers", "key")]
    jars = maven_jars(*JARS, f"org.apache.kafka:kafka-tools:{VERSION}")
    done = subprocess.run(
        [
            *(java(), "-cp", os.pathsep.join(map(str, jars)), "org.apache.kafka.tools.consumer.ConsoleConsumer"),
            *("--bootstrap-server", kafka.bootstrap, "--topic", topic, "--from-beginning"),
            *("--max-messages", str(count), "--timeout-ms", "240000", "--isolation-level", "read_committed"),
            *(option for setting in [*shown, "null.literal=NULL"] for option in ("--formatter-property", setting)),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.large
def test_every_compression_key_header_and_tombstone(kafka: KafkaService, kafka_topic: str) -> None:
    """More than one block of Snappy and LZ4, and a batch that does not get smaller."""
    expected = list[str]()
    for name in CODECS:
        keys = [None if n % 7 == 0 else f"{name} {n}" for n in range(3000)]
        values = [None if n % 5 == 0 else f"{name} value {n} {'x' * (n % 90)}" for n in range(3000)]
        headers = [[("h", str(n).encode()), ("empty", b""), ("null", None)] if n % 3 == 0 else [] for n in range(3000)]
        moments = [MOMENT + timedelta(milliseconds=n * (-1) ** n) for n in range(3000)]
        columns = {
            "key": keys,
            "value": values,
            "headers": pa.array([[{"key": k, "value": v} for k, v in some] for some in headers], HEADERS),
            "timestamp": pa.array(moments, pa.timestamp("us", "UTC")),
            "partition": pa.array([n % 3 for n in range(3000)], pa.int32()),
        }
        sink = sink_of(kafka, kafka_topic, options={"compression.type": name})
        sink.commit(pre_commit(sink, pa.RecordBatch.from_pydict(columns)))
        sink.close()
        for n, (key, value, some, at) in enumerate(zip(keys, values, headers, moments, strict=True)):
            shown = ",".join(f"{k}:{'NULL' if v is None else v.decode()}" for k, v in some) or "NO_HEADERS"
            when = f"CreateTime:{round(at.timestamp() * 1000)}"
            expected.append("\t".join([when, f"Partition:{n % 3}", shown, key or "NULL", value or "NULL"]))
    settled(kafka.bootstrap)
    assert sorted(console_consumer(kafka, kafka_topic, len(expected))) == sorted(expected)
