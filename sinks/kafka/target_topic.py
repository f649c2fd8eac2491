"""The topic that a sink writes to: found or created, and tried with a transaction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kafka.errors import BrokerResponseError, KafkaError
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random

from sinks.diagnosis import Finding
from sinks.errors import ConfigurationError
from sinks.kafka.access import BrokerAccess
from sinks.kafka.errors import Fenced
from sinks.kafka.memory import Mark
from sinks.kafka.options import ProducerOptions
from sinks.kafka.producer import TransactionalProducer
from sinks.transaction import token

_COPIES = "transaction.state.log.replication.factor", "transaction.state.log.min.isr"


class TargetTopic:
    """Find or create the topic, see that transactions may be begun, and make their producers.

    It holds the limit of a record batch that the topic had last, which travels to the tasks. A sink
    whose rows name their topics has no topic of its own.
    """

    def __init__(
        self,
        access: BrokerAccess,
        topic: str | None,
        *,
        sink: str,
        create_topic: bool,
        remember: bool,
        options: ProducerOptions,
    ) -> None:
        """Keep the options of the sink named `sink`; nothing is connected yet."""
        self._access = access
        self._topic = topic
        self._sink = sink
        self._create_topic = create_topic
        self._remember = remember
        self._options = options
        self._limits: dict[str, int] = {}
        """Bytes of a record batch that the topic takes."""

    def __str__(self) -> str:
        return f"topic {self._topic!r}" if self._topic else "the topics that rows name"

    def producer(self, transactional_id: str, mark: Mark | None) -> TransactionalProducer:
        """Make the producer of one transaction."""
        how = self._options, transactional_id, self._topic, mark, self._limits
        return TransactionalProducer(self._access.cluster, *how)

    def read_limit(self) -> None:
        """Ask how large a record batch the topic takes."""
        if self._topic and (limit := self._access.cluster.topics.largest_batch(self._topic)):
            self._limits = {self._topic: limit}

    # ------------------------------------------------------------------ whether rows can go there
    def check(self) -> None:
        """See that the brokers answer, that the topic is there (or create it), and that a
        transaction may be begun: begin one, without records, and abort it.

        Raises ConfigurationError with what is wrong, because of a KafkaError if nobody answers.
        """
        try:
            problem = self._access.patiently(self._problem)
            self._access.patiently(lambda: self._access.cluster.ongoing("tpc."))
        except KafkaError as error:
            raise ConfigurationError(
                f"sink {self._sink!r}: the brokers at {self._access.bootstrap_servers} cannot be "
                f"asked: {error!r}. Check the address, the security options, and that the brokers "
                "run [EO-KAFKA-BROKERS]"
            ) from error
        if problem:
            raise ConfigurationError(f"sink {self._sink!r}: {problem}")
        again = Retrying(
            retry=retry_if_exception_type(Fenced),
            wait=wait_random(0, 0.1),
            stop=stop_after_attempt(20),
            reraise=True,
        )
        try:
            again(self._begin_and_abort)
        except ConfigurationError as error:
            raise ConfigurationError(f"sink {self._sink!r}: {error}") from None
        except RuntimeError as error:
            raise ConfigurationError(
                f"sink {self._sink!r}: no transaction could be begun: {error}"
            ) from error

    def _begin_and_abort(self) -> None:
        """Begin a transaction, and abort it.

        It is fenced while a sink of the same name is checked elsewhere: another job's to this
        topic, or by an operator.
        """
        name = f"tpc.check.{token(self._sink)}"
        producer = self.producer(name, Mark(name, "", -1) if self._remember else None)
        try:
            producer.begin(self._access.timeout)
            try:
                producer.end_mark()
            finally:
                producer.abort(self._access.timeout)
        finally:
            producer.close()

    def _problem(self) -> str:
        """Tell why no records can go to the topic; a missing topic may be created."""
        cluster = self._access.cluster
        if self._topic is None:
            cluster.cluster_id()
            return ""
        topic = self._topic
        about = cluster.topics.describe(topic)
        named = f"topic {topic!r}"
        if about is None and self._create_topic:
            try:
                self._access.patiently(lambda: cluster.topics.create(topic))
            except BrokerResponseError as error:
                return f"{named} cannot be created: {error}"
            return ""
        if about is None:
            return (
                f"there is no {named} at {self._access.bootstrap_servers}, or the principal may "
                "not see it; create it, or set create_topic=True"
            )
        operations = about["authorized_operations"]
        if "WRITE" not in operations:
            return (
                f"the principal may not write to {named}; it may "
                f"{', '.join(operations) or 'do nothing'}"
            )
        if self._remember and "READ" not in operations:
            return (
                f"the principal may not read {named}, which the group needs that remembers the "
                "job's checkpoints (ACL: Read on the topic; or remember=False, and a checkpoint "
                "storage that was set back goes unnoticed)"
            )
        return ""

    # ------------------------------------------------------------------ for operators
    def weaknesses(self) -> Sequence[str]:
        """List why acknowledged records may be lost."""
        return self._access.cluster.topics.may_lose(self._topic) if self._topic else ()

    def findings(self) -> Iterator[Finding]:
        """Yield what the brokers themselves tell an operator."""
        cluster = self._access.cluster
        brokers = cluster.brokers()
        yield Finding.ok(f"{len(brokers)} broker(s), Kafka {cluster.version()}")
        copies = cluster.broker_settings(brokers[0], _COPIES)
        if min(map(int, copies.values()), default=2) < 2:
            of = ", ".join(f"{setting} = {value}" for setting, value in copies.items())
            yield Finding.warning(
                f"the transaction log has one copy ({of}): the loss of one disk may lose decided "
                "transactions",
                "3 replicas, and 2 in sync",
            )
