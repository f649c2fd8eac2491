"""KafkaSink as a user of a broker who has some of the rights."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from sinks.errors import ConfigurationError
from sinks.kafka import KafkaSink
from sinks.kafka.cluster import Cluster
from sinks.testing.servers.kafka import KafkaServer
from sinks.transaction import CommitOutcome, CommitState
from tests.kafka.play import LINEAGE, TEXTS, begun, pre_commit, sink_of, texts
from tests.kafka.test_sink import outcome

USERS = ("ann", "bob", "cid")


@pytest.fixture(scope="module")
def secured() -> Iterator[KafkaServer]:
    with KafkaServer(users=USERS) as server:
        yield server


def test_sasl_ssl_with_scram(secured: KafkaServer) -> None:
    """Producer and the driver's client both come in, with one set of options."""
    with secured.topic() as topic:
        sink = sink_of(secured, topic)
        sink.check(TEXTS)
        committable = pre_commit(sink, texts("a"))
        assert list(sink.in_doubt("job")) == [dict(committable.transaction)]
        elsewhere: KafkaSink = pickle.loads(pickle.dumps(sink))
        assert elsewhere.commit(committable) == CommitOutcome.COMMITTED
        elsewhere.close()
        sink.close()


def test_a_wrong_password(secured: KafkaServer) -> None:
    with secured.topic() as topic:
        sink = sink_of(secured, topic, options={"sasl.password": "wrong"}, timeout=5)
        with pytest.raises(ConfigurationError) as caught:
            sink.check(TEXTS)
        assert "wrong" not in str(caught.value)
        sink.close()


def test_rights_that_are_missing_and_withdrawn(secured: KafkaServer) -> None:
    with secured.topic() as topic:
        sink = sink_of(secured, topic, user="ann", timeout=60)
        with pytest.raises(ConfigurationError, match=topic):
            sink.check(TEXTS)
        for operation in ("describe", "write", "read"):
            secured.allow("ann", "topic", topic, operation)
        secured.allow("ann", "group", "*", "read")
        with pytest.raises(ConfigurationError, match="transactional id"):
            sink.check(TEXTS)
        for operation in ("describe", "write"):
            secured.allow("ann", "transactional_id", "*", operation)
        sink.check(TEXTS)
        transaction = begun(sink, texts("a"))
        transaction.flush(60)
        secured.withdraw("ann", "topic", topic, "write")
        sink.write(transaction, texts("b"))
        with pytest.raises(ConfigurationError, match="may not write to the topic"):
            sink.pre_commit(transaction)
        sink.rollback(transaction)
        secured.allow("ann", "topic", topic, "write")
        committable = pre_commit(sink, texts("c"))
        secured.withdraw("ann", "transactional_id", "*", "write")
        answer = sink.commit(committable)
        assert answer.state is CommitState.UNKNOWN
        assert "ACLs" in answer.reason
        secured.allow("ann", "transactional_id", "*", "write")
        assert outcome(sink, committable) == CommitOutcome.COMMITTED
        sink.close()


def test_rights_on_the_group(secured: KafkaServer) -> None:
    with secured.topic() as topic:
        for operation in ("describe", "write"):
            secured.allow("cid", "topic", topic, operation)
            secured.allow("cid", "transactional_id", "*", operation)
        sink = sink_of(secured, topic, user="cid", timeout=60)
        with pytest.raises(ConfigurationError, match="Read on groups with the prefix"):
            sink.committed_checkpoints("job")
        with pytest.raises(ConfigurationError, match="may not read topic"):
            sink.check(TEXTS)
        secured.allow("cid", "topic", topic, "read")
        with pytest.raises(ConfigurationError, match="Read on groups"):
            sink.check(TEXTS)
        with pytest.raises(ConfigurationError, match="Read on groups"):
            pre_commit(sink, texts("a"))
        without = sink_of(secured, topic, user="cid", timeout=60, remember=False)
        without.check(TEXTS)
        committable = pre_commit(without, texts("a"))
        assert without.commit(committable) == CommitOutcome.COMMITTED
        assert without.committed_checkpoints("job") is None
        secured.allow("cid", "group", "*", "read")
        sink.check(TEXTS)
        assert sink.committed_checkpoints("job") is None
        assert sink.commit(pre_commit(sink, texts("b"), checkpoint=3)) == CommitOutcome.COMMITTED
        assert sink.committed_checkpoints("job") == {LINEAGE: 3}
        sink.close()
        without.close()


def test_a_right_that_lacks_is_told_late(secured: KafkaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offset is refused after the records were taken."""
    add_offset = Cluster._add_offset

    async def late(cluster: Cluster, *arguments: Any) -> None:
        await cluster._manager._net.sleep(1)
        await add_offset(cluster, *arguments)

    monkeypatch.setattr(Cluster, "_add_offset", late)
    with secured.topic() as topic:
        for operation in ("describe", "write", "read"):
            secured.allow("bob", "topic", topic, operation)
            secured.allow("bob", "transactional_id", "*", operation)
        sink = sink_of(secured, topic, user="bob", timeout=60)
        transaction = begun(sink, texts("a"))
        with pytest.raises(ConfigurationError, match="Read on groups"):
            sink.pre_commit(transaction)
        assert transaction.delivered
        sink.rollback(transaction)
        assert list(sink.in_doubt("job")) == []
        sink.close()


def test_passwords_are_not_logged(secured: KafkaServer) -> None:
    for user in ("admin", *USERS):
        assert secured.client_options(user)["sasl.password"] not in secured.broker().log
