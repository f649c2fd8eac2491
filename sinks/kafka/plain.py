"""`PlainProducer`: a record at a time through `confluent_kafka.Producer`, for what the native way cannot do."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pyarrow as pa
from confluent_kafka import (
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.serialization import MessageField, SerializationContext

from sinks.errors import BadValue, ConfigurationError
from sinks.kafka.memory import PARTITION, Mark
from sinks.kafka.messages import milliseconds
from sinks.kafka.producer import (
    LOOK_TIMEOUT,
    MARK_TIMEOUT,
    METADATA_TIMEOUT,
    NO_TOPIC,
    STATS_INTERVAL_MS,
    TransactionalProducer,
    failure,
)

logger = logging.getLogger(__name__)


class PlainProducer(TransactionalProducer):
    """All columns: `key`, `value`, `topic`, `partition`, `headers` and `timestamp`; options that are functions
    (`oauth_cb` and the like); and values that a serializer makes."""

    def __init__(
        self,
        options: Mapping[str, Any],
        transactional_id: str,
        default_topic: str | None,
        mark: Mark | None = None,
        value_serializer: Callable[[], Callable[[Any, SerializationContext], bytes | None]] | None = None,
    ) -> None:
        super().__init__(transactional_id, default_topic, mark)
        self._serialize = value_serializer and value_serializer()
        self._options = dict(options)
        own = {
            "transactional.id": transactional_id,
            "statistics.interval.ms": STATS_INTERVAL_MS,
            "stats_cb": self._statistics,
            "error_cb": self._error,
            "on_delivery": self._delivery,
        }
        try:
            self._client = Producer({**options, **own}, logger=logger)
        except (KafkaException, TypeError, ValueError) as error:
            raise ConfigurationError(f"confluent-kafka refuses the options: {error}") from None
        self._admin: AdminClient | None = None
        self._timed = set[str]()
        """Topics of records with timestamps of their own."""
        self._fatal = False
        """Whether librdkafka has given up: nothing is acknowledged any more."""

    def begin(self, timeout: float) -> None:
        try:
            self._cluster = self._client.list_topics(self.default_topic or "", timeout=timeout).cluster_id or ""
            self._client.init_transactions(timeout)
            self._client.begin_transaction()
        except KafkaException as error:
            raise self._explained(error, "begin_transaction") from error
        if self.default_topic:
            self._begin_mark(self.default_topic)

    def _send_mark(self, mark: Mark, topic: str) -> KafkaError | None:
        offsets = [TopicPartition(topic, PARTITION, mark.offset, mark.metadata)]
        try:
            self._client.send_offsets_to_transaction(offsets, _group_metadata(mark.group), MARK_TIMEOUT)
        except KafkaException as error:
            found: KafkaError = error.args[0]
            return found
        return None

    def _check_mark(self, answer: Any) -> None:
        if answer is not None:
            raise self._explained(KafkaException(answer), "send_offsets_to_transaction")

    def write(self, batch: pa.RecordBatch) -> None:
        if (at := batch.schema.get_field_index("timestamp")) >= 0:
            batch = batch.set_column(at, "timestamp", milliseconds(batch.column(at)))
        rows = batch.to_pylist()
        for row in rows:
            topic = self._topic_of(row)
            if topic not in self.topic_ids:
                others = {self._topic_of(row) for row in rows} - self.topic_ids.keys()
                self._learn_ids(topic, list(others))
            self._produce(topic, row)
        self._serve(self._client.poll, 0)
        self._raise_failure()

    def _topic_of(self, row: Mapping[str, Any]) -> str:
        topic: str | None = self.default_topic if row.get("topic") is None else row["topic"]
        assert topic is not None
        return topic

    def _produce(self, topic: str, row: Mapping[str, Any]) -> None:
        value = row.get("value")
        if self._serialize and value is not None:
            value = self._serialized(topic, value)
        record: dict[str, Any] = {"key": row.get("key"), "value": value}
        if row.get("partition") is not None:
            record["partition"] = row["partition"]
        if row.get("headers"):
            record["headers"] = [(header["key"], header["value"]) for header in row["headers"]]
        if row.get("timestamp") is not None:
            record["timestamp"] = row["timestamp"]
            self._timed.add(topic)
        asked = False
        while True:
            try:
                self._client.produce(topic, **record)
            except BufferError:
                self._serve(self._client.poll, 0.1)
                self._look_for_topics()
                self._raise_failure()
                continue
            except KafkaException as error:
                if error.args[0].code() != KafkaError._UNKNOWN_PARTITION:
                    raise self._explained(error, f"a record for topic {topic!r}") from error
                count = self.partitions(topic, row["partition"])  # librdkafka learns it, too
                if asked or row["partition"] >= count:
                    raise BadValue(
                        f"topic {topic!r} has no partition {row['partition']}, which a row asks for: it has {count}"
                    ) from None
                asked = True
                continue
            self.sent += 1
            return

    def partitions(self, topic: str, wanted: int) -> int:
        about = self._client.list_topics(topic, timeout=METADATA_TIMEOUT).topics[topic]
        if about.error is not None:
            raise failure(about.error.name(), about.error.str(), f"partitions of topic {topic!r}")
        return len(about.partitions)

    def _learn_ids(self, topic: str, names: Sequence[str]) -> None:
        """Ask for the ids of `names`, all at once. A producer cannot be asked for them: a client of its own is. Raises
        what is wrong with `topic`; another one is asked for again when a record goes there."""
        if self._admin is None:
            self._admin = AdminClient(self._options)
        asked = self._admin.describe_topics(TopicCollection(list(names)), request_timeout=METADATA_TIMEOUT)
        for name in names:
            try:
                self._topic_has(name, str(asked[name].result(METADATA_TIMEOUT).topic_id))
            except KafkaException as error:
                if name == topic:
                    raise self._explained(error, f"the id of topic {topic!r}") from error

    def _serialized(self, topic: str, value: Any) -> bytes | None:
        assert self._serialize is not None
        try:
            return self._serialize(value, SerializationContext(topic, MessageField.VALUE))
        except Exception as error:
            raise BadValue(f"the serializer refuses a value for topic {topic!r}: {error!r}") from error

    def flush(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self._is_awaited() and time.monotonic() < deadline:
            self._serve(self._client.flush, 0.5)
            self._look_for_topics()
        self._check_delivered()

    def _is_awaited(self) -> bool:
        return super()._is_awaited() and not self._fatal

    def _is_missing(self, topic: str) -> bool:
        try:
            error = self._client.list_topics(topic, timeout=LOOK_TIMEOUT).topics[topic].error
        except KafkaException:  # no broker answers
            return False
        return error is not None and error.name() in NO_TOPIC

    def _poll(self) -> None:
        self._serve(self._client.poll, 0.1)

    def _commit(self, timeout: float) -> None:
        try:
            self._client.commit_transaction(timeout)
        except KafkaException as error:
            raise self._explained(error, "commit_transaction") from error

    def abort(self, timeout: float) -> None:
        if not hasattr(self, "_client"):
            return  # it was sealed and closed: the sweep finds it
        self._settle()
        try:
            self._client.abort_transaction(timeout)
        except KafkaException as error:
            logger.warning("transaction %s is left to the sweep: %s", self.transactional_id, error)

    def close(self) -> None:
        """Not `Producer.close`, which aborts: the collected object leaves the transaction as it is."""
        self._await_mark()
        self._admin = None
        if hasattr(self, "_client"):
            del self._client

    # ------------------------------------------------------------------ callbacks
    def _serve(self, call: Callable[[float], object], timeout: float) -> None:
        """Run the callbacks. A fatal error leaves them as a KafkaException, or, if another callback follows, as a
        SystemError. confluent-kafka never frees it, and so not what its traceback holds: the client, whose threads
        would stay busy for ever."""
        try:
            call(timeout)
        except KafkaException as error:
            self._fatal = True
            raise self._explained(error.with_traceback(None), "the producer") from error
        except SystemError as error:
            self._fatal = True
            error.__traceback__ = None
            if isinstance(error.__cause__, KafkaException):
                raise self._explained(error.__cause__, "the producer") from error
            raise failure("_FATAL", "fatal error, see the log", f"the producer of {self.transactional_id}") from error

    def _statistics(self, text: str) -> None:
        if self._producer is None:
            self._learn_producer(json.loads(text))

    def _error(self, error: KafkaError) -> None:
        if error.fatal():
            self._failure = self._failure or failure(error.name(), error.str(), f"producer {self.transactional_id}")
        logger.warning("producer %s: %s", self.transactional_id, error.str())

    def _delivery(self, error: KafkaError | None, message: Message) -> None:
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        if error is not None:
            self._failed(error.name(), error.str(), topic or "", 1)
            return
        assert topic is not None
        assert partition is not None
        span = self._spans.get((topic, partition))
        if span and offset == span[1]:  # once a record, so without a call
            span[1] += 1
            self.delivered += 1
        else:
            self._delivered_at(topic, partition, -1 if offset is None else offset, 1)
        if topic in self._timed and message.timestamp()[0] == TIMESTAMP_LOG_APPEND_TIME:
            self._failure = self._failure or ConfigurationError(
                f"topic {topic!r} puts its own time in place of the records' timestamps (message.timestamp.type = "
                "LogAppendTime): set CreateTime, or leave the column `timestamp` out"
            )

    def _explained(self, error: KafkaException, call: str) -> Exception:
        if self._failure is not None:
            return self._failure
        told: KafkaError = error.args[0]
        return self._cause(told.name(), failure(told.name(), told.str(), f"{call} of {self.transactional_id}"))


@cache
def _group_metadata(group: str) -> Any:
    """How confluent-kafka names a group without members; only a consumer tells it, which connects to nobody here."""
    consumer = Consumer({"group.id": group, "log_level": 0})
    try:
        return consumer.consumer_group_metadata()
    finally:
        consumer.close()
