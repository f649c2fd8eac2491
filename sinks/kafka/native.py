"""`NativeProducer`: Arrow buffers go to librdkafka as they are."""

from __future__ import annotations

import ctypes
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sinks.errors import BadValue, ConfigurationError
from sinks.kafka import librdkafka as rd
from sinks.kafka.memory import PARTITION, Mark
from sinks.kafka.messages import by_topic, messages
from sinks.kafka.options import DEFAULTS
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

_LEVELS = [logging.CRITICAL] * 3 + [
    logging.ERROR,
    logging.WARNING,
    logging.INFO,
    logging.INFO,
    logging.DEBUG,
]  # syslog's


class NativeProducer(TransactionalProducer):
    """Columns `key`, `value`, `topic` and `partition`. librdkafka copies the records into its queue, which bounds the
    memory (`queue.buffering.max.messages`, `queue.buffering.max.kbytes`)."""

    def __init__(
        self, options: Mapping[str, str], transactional_id: str, default_topic: str | None, mark: Mark | None = None
    ) -> None:
        super().__init__(transactional_id, default_topic, mark)
        self._servers = options["bootstrap.servers"]
        self._topics: dict[str, tuple[int, int]] = {}
        self._handle = self._queue = 0
        self._threads: list[threading.Thread] = []
        self._closing = False
        text = ctypes.create_string_buffer(512)
        conf = rd.lib.conf_new()
        own = {
            "transactional.id": transactional_id,
            "statistics.interval.ms": str(STATS_INTERVAL_MS),
            "log.queue": "true",
        }
        for name, value in {**options, **own}.items():
            if rd.lib.conf_set(conf, name.encode(), value.encode(), text, len(text)):
                rd.lib.conf_destroy(conf)
                raise ConfigurationError(f"librdkafka refuses the option {name}: {text.value.decode()}")
        rd.lib.conf_set_events(conf, rd.EVENT_DELIVERY | rd.EVENT_STATS | rd.EVENT_ERROR | rd.EVENT_LOG)
        self._handle = rd.lib.new(rd.PRODUCER, conf, text, len(text))
        if not self._handle:
            rd.lib.conf_destroy(conf)
            raise ConfigurationError(f"librdkafka refuses the options: {text.value.decode()}")
        self._queue = rd.lib.queue_get_main(self._handle)
        rd.lib.set_log_queue(self._handle, None)
        self._in_turn = options.get("partitioner") == DEFAULTS["partitioner"]
        self._turn = random.randrange(1 << 16)

    def begin(self, timeout: float) -> None:
        # Asked first, these wait for a broker: init_transactions would try once and sleep for half a second, clusterid
        # for one. For all topics, i.e. no handle: with one, librdkafka sleeps all the same.
        self._metadata(None, timeout)
        cluster = rd.lib.clusterid(self._handle, _ms(timeout))
        if not cluster:
            self._serve(0)
            self._raise_failure()
            raise failure("_TRANSPORT", f"{timeout:g} s at {self._servers}", f"begin {self.transactional_id}")
        self._cluster = ctypes.string_at(cluster).decode()
        rd.lib.mem_free(self._handle, cluster)
        self._check(rd.lib.init_transactions(self._handle, _ms(timeout)), "init_transactions")
        self._check(rd.lib.begin_transaction(self._handle), "begin_transaction")
        if self.default_topic:
            self._begin_mark(self.default_topic)

    def _send_mark(self, mark: Mark, topic: str) -> int | None:
        group, offsets = rd.lib.consumer_group_metadata_new(mark.group.encode()), rd.lib.topic_partition_list_new(1)
        metadata = ctypes.create_string_buffer(mark.metadata.encode())
        entry = rd.lib.topic_partition_list_add(offsets, topic.encode(), PARTITION).contents
        entry.offset = mark.offset
        entry.metadata, entry.metadata_size = ctypes.addressof(metadata), len(mark.metadata)
        try:
            error: int | None = rd.lib.send_offsets_to_transaction(self._handle, offsets, group, _ms(MARK_TIMEOUT))
            return error
        finally:
            entry.metadata, entry.metadata_size = None, 0  # it is ours, and not to be freed with the list
            rd.lib.topic_partition_list_destroy(offsets)
            rd.lib.consumer_group_metadata_destroy(group)

    def _check_mark(self, answer: Any) -> None:
        self._check(answer, "send_offsets_to_transaction")

    def write(self, batch: pa.RecordBatch) -> None:
        for topic, rows in by_topic(batch, self.default_topic):
            assert topic is not None
            self._produce(topic, messages(rows))
        self._serve(0)
        self._raise_failure()

    def _produce(self, topic: str, rows: npt.NDArray[np.void]) -> None:
        wanted = int(rows["partition"].max(initial=0))
        if wanted >= (partitions := self.partitions(topic, wanted)):
            raise BadValue(f"topic {topic!r} has no partition {wanted}, which a row asks for: it has {partitions}")
        handle, _ = self._topics[topic]
        partition, flags = rd.ANY_PARTITION, rd.MSG_COPY | rd.MSG_PARTITION
        if self._in_turn and not rows["key"].any() and (rows["partition"] == rd.ANY_PARTITION).all():
            # a whole batch into one partition, then the next: larger requests, and no partitioner for each record
            partition, flags = self._turn % partitions, rd.MSG_COPY
            self._turn += 1
        while len(rows):
            taken = rd.lib.produce_batch(handle, partition, flags, rows.ctypes.data, len(rows))
            self.sent += taken
            if taken == len(rows):
                return
            left = np.ascontiguousarray(rows[rows["err"] != 0])
            other = left[left["err"] != rd.QUEUE_FULL]
            if len(other):
                self._serve(0)
                raise self._cause(_name(int(other[0]["err"])), _refused(topic, other[0]))
            left["err"] = 0
            rows = left
            self._serve(100)
            self._look_for_topics()
            self._raise_failure()

    def partitions(self, topic: str, wanted: int) -> int:
        """They are known before a record is produced: one for a certain partition would make librdkafka add the
        partition -1 to the transaction, which fails it."""
        if topic not in self._topics:
            self._topics[topic] = rd.lib.topic_new(self._handle, topic.encode(), None), 0
        handle, partitions = self._topics[topic]
        if wanted >= partitions:
            error, partitions = self._metadata(handle, METADATA_TIMEOUT)
            if error:
                raise failure(_name(error), _text(rd.lib.err2str(error)), f"partitions of topic {topic!r}")
            self._topics[topic] = handle, partitions
        if topic not in self.topic_ids:
            self._topic_has(topic, self._id_of(topic, METADATA_TIMEOUT))
        return partitions

    def _id_of(self, topic: str, timeout: float) -> str:
        names, count = (ctypes.c_char_p * 1)(topic.encode()), ctypes.c_size_t()
        asked, queue = rd.lib.TopicCollection_of_topic_names(names, 1), rd.lib.queue_new(self._handle)
        try:
            rd.lib.DescribeTopics(self._handle, asked, None, queue)
            event = rd.lib.queue_poll(queue, _ms(timeout))
            if not event:
                raise RuntimeError(f"no Kafka broker told the id of topic {topic!r} within {timeout:g} s")
            try:
                if error := rd.lib.event_error(event):
                    text = _text(rd.lib.event_error_string(event))
                    raise failure(_name(error), text, f"the id of topic {topic!r}")
                result = rd.lib.event_DescribeTopics_result(event)
                (about,) = rd.lib.DescribeTopics_result_topics(result, count)[: count.value]
                if error := rd.lib.error_code(rd.lib.TopicDescription_error(about)):
                    raise failure(_name(error), _text(rd.lib.err2str(error)), f"the id of topic {topic!r}")
                return _text(rd.lib.Uuid_base64str(rd.lib.TopicDescription_topic_id(about)))
            finally:
                rd.lib.event_destroy(event)
        finally:
            rd.lib.queue_destroy(queue)
            rd.lib.TopicCollection_destroy(asked)

    def _metadata(self, topic: int | None, timeout: float) -> tuple[int, int]:
        """Error code and number of partitions of a topic; without one, it only waits for a broker."""
        found = ctypes.POINTER(rd.Metadata)()
        error = rd.lib.metadata(self._handle, 0, topic, found, _ms(timeout))
        partitions = 0
        if not error:
            if topic is not None:
                about = found.contents.topics[0]
                error, partitions = about.err, about.partition_cnt
            rd.lib.metadata_destroy(found)
        return error, partitions

    def flush(self, timeout: float) -> None:
        """Delivery reports are served here while librdkafka flushes in a thread, as its documentation asks for."""
        deadline = time.monotonic() + timeout

        def goes_on() -> bool:
            return not self._closing and self._is_awaited() and time.monotonic() < deadline

        def flush() -> None:
            while goes_on() and rd.lib.flush(self._handle, 100):
                pass

        thread = self._beside(flush, "kafka-flush")
        while goes_on():
            self._serve(100)
            self._look_for_topics()
        thread.join()
        self._check_delivered()

    def _is_missing(self, topic: str) -> bool:
        error, _ = self._metadata(self._topics[topic][0], LOOK_TIMEOUT)
        return _name(error) in NO_TOPIC

    def _poll(self) -> None:
        self._serve(100)

    def _commit(self, timeout: float) -> None:
        self._check(rd.lib.commit_transaction(self._handle, _ms(timeout)), "commit_transaction")

    def abort(self, timeout: float) -> None:
        if not self._handle:
            return  # it was sealed and closed: the sweep finds it
        self._settle()
        # It waits until the delivery reports of purged records were taken.
        abort = self._beside(partial(self._abort, timeout), "kafka-abort")
        while abort.is_alive():
            self._serve(50)

    def _abort(self, timeout: float) -> None:
        try:
            self._check(rd.lib.abort_transaction(self._handle, _ms(timeout)), "abort_transaction")
        except Exception as error:
            logger.warning("transaction %s is left to the sweep: %s", self.transactional_id, error)

    def _beside(self, call: Callable[[], None], name: str) -> threading.Thread:
        """A thread that uses the handle. Whatever is raised meanwhile, `close` waits for it."""
        thread = threading.Thread(target=call, name=name)
        self._threads.append(thread)
        thread.start()
        return thread

    def close(self) -> None:
        self._closing = True
        for thread in self._threads:
            while thread.is_alive():
                self._serve(50)
        self._await_mark()
        for handle, _ in self._topics.values():
            rd.lib.topic_destroy(handle)
        self._topics.clear()
        if self._queue:
            rd.lib.queue_destroy(self._queue)
        if self._handle:
            rd.lib.destroy(self._handle)
        self._handle = self._queue = 0

    # ------------------------------------------------------------------ events
    def _serve(self, timeout_ms: int) -> None:
        """Take all events that are there; waits for the first one."""
        while event := rd.lib.queue_poll(self._queue, timeout_ms):
            timeout_ms = 0
            try:
                self._take(rd.lib.event_type(event), event)
            finally:
                rd.lib.event_destroy(event)

    def _take(self, kind: int, event: int) -> None:
        if kind == rd.EVENT_DELIVERY:
            self._delivery(event)
        elif kind == rd.EVENT_STATS:
            if self._producer is None:
                self._learn_producer(json.loads(rd.lib.event_stats(event)))
        elif kind == rd.EVENT_ERROR:
            error, text = rd.lib.event_error(event), _text(rd.lib.event_error_string(event))
            if rd.lib.event_error_is_fatal(event):
                self._failure = self._failure or failure(_name(error), text, f"producer {self.transactional_id}")
            logger.warning("producer %s: %s", self.transactional_id, text)
        elif kind == rd.EVENT_LOG:
            facility, text_pointer, level = ctypes.c_char_p(), ctypes.c_char_p(), ctypes.c_int()
            rd.lib.event_log(event, facility, text_pointer, level)
            logger.log(_LEVELS[level.value], "%s: %s", _text(facility.value), _text(text_pointer.value))

    def _delivery(self, event: int) -> None:
        """One report for records of one partition, which share an outcome."""
        count, error = rd.lib.event_message_count(event), rd.lib.event_error(event)
        message = rd.lib.event_message_next(event).contents
        if error:
            self._failed(_name(error), _text(rd.lib.event_error_string(event)), self._topic_of(message), count)
            return
        self._delivered_at(self._topic_of(message), message.partition, message.offset, count)

    def _topic_of(self, message: rd.Message) -> str:
        return _text(rd.lib.topic_name(message.rkt))

    def _check(self, error: int | None, call: str) -> None:
        if not error:
            return
        name, text = _name(rd.lib.error_code(error)), _text(rd.lib.error_string(error))
        rd.lib.error_destroy(error)
        self._serve(0)
        self._raise_failure()
        raise failure(name, text, f"{call} of {self.transactional_id}")


def _refused(topic: str, row: Any) -> Exception:
    name, text = _name(int(row["err"])), _text(rd.lib.err2str(int(row["err"])))
    what = f"a record of {int(row['len']) + int(row['key_len'])} bytes for topic {topic!r}"
    return failure(name, text, what)


def _name(error: int) -> str:
    return _text(rd.lib.err2name(error))


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
