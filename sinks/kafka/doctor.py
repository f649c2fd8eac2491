"""What `coordinator doctor` says about Kafka brokers and a topic, beside what the sink asks of them anyway."""

from __future__ import annotations

from collections.abc import Iterable

from sinks.diagnosis import Finding
from sinks.kafka.cluster import Cluster

_BROKER = (
    "transaction.max.timeout.ms",
    "transaction.state.log.replication.factor",
    "transaction.state.log.min.isr",
)


def of_brokers(cluster: Cluster, transaction_timeout_ms: int) -> Iterable[Finding]:
    brokers = cluster.brokers()
    yield Finding.ok(f"{len(brokers)} broker(s), Kafka {cluster.version()}")
    settings = cluster.configs("BROKER", str(brokers[0]), _BROKER)
    if not settings:
        yield Finding.warning(
            "the principal may not read the brokers' settings",
            "kafka-acls --add --allow-principal … --operation DescribeConfigs --cluster",
        )
        return
    cap = int(settings["transaction.max.timeout.ms"])
    if transaction_timeout_ms > cap:
        yield Finding.error(
            f"transaction_timeout is {transaction_timeout_ms} ms, and the brokers allow {cap} ms",
            f"transaction_timeout = {cap // 1000} in the sink, or transaction.max.timeout.ms at the brokers",
        )
    else:
        yield Finding.ok(
            f"a pre-committed transaction lives {transaction_timeout_ms // 1000} s (the brokers allow {cap // 1000} s)"
        )
    yield from _replicas(
        "the transaction log", int(settings[_BROKER[1]]), int(settings[_BROKER[2]]), "transaction.state.log.…"
    )


def of_topic(cluster: Cluster, topic: str) -> Iterable[Finding]:
    about = cluster.topic(topic)
    if about is None:
        yield Finding.ok(f"the topic {topic!r} will be created")
        return
    replicas = min(len(partition["replica_nodes"]) for partition in about["partitions"])
    settings = cluster.configs("TOPIC", topic, ("min.insync.replicas",))
    yield Finding.ok(f"topic {topic!r} has {len(about['partitions'])} partition(s), and may be written")
    if settings:
        insync = int(settings["min.insync.replicas"])
        yield from _replicas(f"topic {topic!r}", replicas, insync, "replicas and min.insync.replicas")


def _replicas(what: str, replicas: int, insync: int, settings: str) -> Iterable[Finding]:
    if replicas < 2 or insync < 2:
        yield Finding.warning(
            f"{what} has {replicas} replica(s), of which {insync} must have a record: the loss of one disk may lose "
            "acknowledged records",
            f"3 replicas, and 2 in sync ({settings})",
        )
    elif insync == replicas:
        yield Finding.warning(
            f"{what} has {replicas} replicas, and all must have a record: no broker may be down",
            f"3, and 2 ({settings})",
        )
    else:
        yield Finding.ok(f"{what} has {replicas} replicas, of which {insync} must have a record")
