"""KafkaSink as a user of a broker who has some of the permissions."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from kafka.errors import KafkaError

from sinks.errors import ConfigurationError
from sinks.kafka import KafkaSink
from sinks.kafka.memory import GroupMemory
from sinks.testing.servers.kafka import KafkaServer
from sinks.testing.table import eventually
from sinks.transaction import CommitOutcome, CommitState
from tests.kafka.tasks import LINEAGE, TEXTS, begun, pre_commit, sink_of, texts
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


def test_certificates_are_renewed_while_a_driver_runs(tmp_path: Path) -> None:
    """The driver keeps its client for as long as the query runs; connections come and go."""
    authority = Authority(tmp_path)
    settings = {
        "connections.max.idle.ms": "500",
        "listener.name.client.ssl.client.auth": "required",
        "listener.name.client.ssl.truststore.location": str(authority.file),
        "listener.name.client.ssl.truststore.type": "PEM",
    }
    own = {"ssl.certificate.location": str(tmp_path / "own.pem"), "ssl.key.location": str(tmp_path / "own.key")}
    authority.issue(tmp_path / "own", timedelta(minutes=10))
    with Certified(settings, users=USERS, own=own) as server:
        life = 4.0
        authority.issue(tmp_path / "own", timedelta(seconds=life))
        while not _answers(sink := sink_of(server, "orders", timeout=4)):  # on a busy machine it was over before
            sink.close()
            life *= 2
            authority.issue(tmp_path / "own", timedelta(seconds=life))
        (tmp_path / "own.key").write_text("half of a")
        time.sleep(life + 1)
        assert not any(_answers(sink) for _ in range(9))  # errors after which is asked again
        authority.issue(tmp_path / "own", timedelta(minutes=10))
        eventually(lambda: _answers(sink))
        sink.close()


def _answers(sink: KafkaSink) -> bool:
    try:
        return bool(sink._brokers.cluster_id())
    except KafkaError:
        return False


class Certified(KafkaServer):
    """Asks clients for a certificate, and has one for its own."""

    def __init__(self, settings: Mapping[str, str], users: Sequence[str], own: Mapping[str, str]) -> None:
        super().__init__(settings, users=users)
        self._own = dict(own)

    def _credentials(self, user: str) -> dict[str, str]:
        return super()._credentials(user) | self._own


class Authority:
    """Of clients' certificates."""

    def __init__(self, folder: Path) -> None:
        self.file, self._key = folder / "clients.pem", ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "clients")])
        self.file.write_bytes(self._signed(self._name, self._key, timedelta(days=1), authority=True))

    def issue(self, place: Path, life: timedelta) -> None:
        """A key and a certificate, `place`.key and `place`.pem."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "client")])
        form = PrivateFormat.PKCS8, NoEncryption()
        place.with_suffix(".key").write_bytes(key.private_bytes(Encoding.PEM, *form))
        place.with_suffix(".pem").write_bytes(self._signed(name, key, life, authority=False))

    def _signed(self, name: x509.Name, key: ec.EllipticCurvePrivateKey, life: timedelta, *, authority: bool) -> bytes:
        now = datetime.now(timezone.utc)
        made = x509.CertificateBuilder(self._name, name, key.public_key(), x509.random_serial_number(), now, now + life)
        made = made.add_extension(x509.BasicConstraints(authority, None), critical=True)
        return made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)


def test_permissions_that_are_missing_and_withdrawn(secured: KafkaServer) -> None:
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


def test_a_topic_that_may_not_be_created(secured: KafkaServer) -> None:
    secured.allow("ann", "topic", "nowhere", "describe")
    sink = sink_of(secured, "nowhere", user="ann", create_topic=True)
    with pytest.raises(ConfigurationError, match=r"topic 'nowhere' cannot be created: .*Authorization failed"):
        sink.check(TEXTS)
    sink.close()


def test_permissions_on_the_group(secured: KafkaServer) -> None:
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


def test_a_permission_that_is_missing_is_told_late(secured: KafkaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offset is refused after the records were taken."""
    add_offset, producers = GroupMemory._add_offset, list[Any]()

    async def late(memory: GroupMemory, *arguments: Any) -> None:
        while not (producers and producers[0].delivered):
            await memory._net.client._loop.sleep(0.05)
        await add_offset(memory, *arguments)

    monkeypatch.setattr(GroupMemory, "_add_offset", late)
    with secured.topic() as topic:
        for operation in ("describe", "write", "read"):
            secured.allow("bob", "topic", topic, operation)
            secured.allow("bob", "transactional_id", "*", operation)
        sink = sink_of(secured, topic, user="bob", timeout=60)
        transaction = begun(sink, texts("a"))
        producers.append(transaction)
        with pytest.raises(ConfigurationError, match="Read on groups"):
            sink.pre_commit(transaction)
        assert transaction.delivered
        sink.rollback(transaction)
        assert list(sink.in_doubt("job")) == []
        sink.close()


def test_passwords_are_not_logged(secured: KafkaServer) -> None:
    for user in ("admin", *USERS):
        assert secured.client_options(user)["sasl.password"] not in secured.broker().log
