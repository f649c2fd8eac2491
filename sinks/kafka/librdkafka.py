"""librdkafka's C interface, as far as a transactional producer needs it: the library inside confluent-kafka.

Only functions and structures of its public header `rdkafka.h` are used; its ABI is stable within major version 2.
`unusable()` tells whether the installed library is one that this module knows.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from confluent_kafka import cimpl

VERSIONS = range(0x02000000, 0x03000000)

PRODUCER = 0
MSG_COPY, MSG_PARTITION = 0x2, 0x8
ANY_PARTITION = -1
EVENT_DELIVERY, EVENT_LOG, EVENT_ERROR, EVENT_STATS = 0x1, 0x4, 0x8, 0x40
QUEUE_FULL = -184


class Message(ctypes.Structure):
    """`rd_kafka_message_t`."""

    _fields_ = [
        ("err", ctypes.c_int),
        ("rkt", ctypes.c_void_p),
        ("partition", ctypes.c_int32),
        ("payload", ctypes.c_void_p),
        ("len", ctypes.c_size_t),
        ("key", ctypes.c_void_p),
        ("key_len", ctypes.c_size_t),
        ("offset", ctypes.c_int64),
        ("private", ctypes.c_void_p),
    ]


MESSAGE = np.dtype(Message)


class TopicMetadata(ctypes.Structure):
    """`rd_kafka_metadata_topic_t`."""

    _fields_ = [
        ("topic", ctypes.c_char_p),
        ("partition_cnt", ctypes.c_int),
        ("partitions", ctypes.c_void_p),
        ("err", ctypes.c_int),
    ]


class Metadata(ctypes.Structure):
    """`rd_kafka_metadata_t`."""

    _fields_ = [
        ("broker_cnt", ctypes.c_int),
        ("brokers", ctypes.c_void_p),
        ("topic_cnt", ctypes.c_int),
        ("topics", ctypes.POINTER(TopicMetadata)),
    ]


class TopicPartition(ctypes.Structure):
    """`rd_kafka_topic_partition_t`."""

    _fields_ = [
        ("topic", ctypes.c_char_p),
        ("partition", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("metadata", ctypes.c_void_p),
        ("metadata_size", ctypes.c_size_t),
        ("opaque", ctypes.c_void_p),
        ("err", ctypes.c_int),
        ("private", ctypes.c_void_p),
    ]


_Handle, _Text, _Int, _Size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t

_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "version": (_Int,),
    "version_str": (_Text,),
    "err2str": (_Text, _Int),
    "err2name": (_Text, _Int),
    "conf_new": (_Handle,),
    "conf_set": (_Int, _Handle, _Text, _Text, _Text, _Size),
    "conf_set_events": (None, _Handle, _Int),
    "conf_destroy": (None, _Handle),
    "new": (_Handle, _Int, _Handle, _Text, _Size),
    "destroy": (None, _Handle),
    "set_log_queue": (_Int, _Handle, _Handle),
    "clusterid": (_Handle, _Handle, _Int),
    "mem_free": (None, _Handle, _Handle),
    "queue_get_main": (_Handle, _Handle),
    "queue_poll": (_Handle, _Handle, _Int),
    "queue_destroy": (None, _Handle),
    "event_type": (_Int, _Handle),
    "event_error": (_Int, _Handle),
    "event_error_string": (_Text, _Handle),
    "event_error_is_fatal": (_Int, _Handle),
    "event_log": (_Int, _Handle, ctypes.POINTER(_Text), ctypes.POINTER(_Text), ctypes.POINTER(_Int)),
    "event_stats": (_Text, _Handle),
    "event_message_count": (_Size, _Handle),
    "event_message_next": (ctypes.POINTER(Message), _Handle),
    "event_destroy": (None, _Handle),
    "metadata": (_Int, _Handle, _Int, _Handle, ctypes.POINTER(ctypes.POINTER(Metadata)), _Int),
    "metadata_destroy": (None, ctypes.POINTER(Metadata)),
    "topic_new": (_Handle, _Handle, _Text, _Handle),
    "topic_name": (_Text, _Handle),
    "topic_destroy": (None, _Handle),
    "produce_batch": (_Int, _Handle, ctypes.c_int32, _Int, _Handle, _Int),
    "queue_new": (_Handle, _Handle),
    "TopicCollection_of_topic_names": (_Handle, ctypes.POINTER(_Text), _Size),
    "TopicCollection_destroy": (None, _Handle),
    "DescribeTopics": (None, _Handle, _Handle, _Handle, _Handle),
    "event_DescribeTopics_result": (_Handle, _Handle),
    "DescribeTopics_result_topics": (ctypes.POINTER(_Handle), _Handle, ctypes.POINTER(_Size)),
    "TopicDescription_topic_id": (_Handle, _Handle),
    "TopicDescription_error": (_Handle, _Handle),
    "Uuid_base64str": (_Text, _Handle),
    "flush": (_Int, _Handle, _Int),
    "topic_partition_list_new": (_Handle, _Int),
    "topic_partition_list_add": (ctypes.POINTER(TopicPartition), _Handle, _Text, ctypes.c_int32),
    "topic_partition_list_destroy": (None, _Handle),
    "consumer_group_metadata_new": (_Handle, _Text),
    "consumer_group_metadata_destroy": (None, _Handle),
    "send_offsets_to_transaction": (_Handle, _Handle, _Handle, _Handle, _Int),
    "init_transactions": (_Handle, _Handle, _Int),
    "begin_transaction": (_Handle, _Handle),
    "commit_transaction": (_Handle, _Handle, _Int),
    "abort_transaction": (_Handle, _Handle, _Int),
    "error_code": (_Int, _Handle),
    "error_string": (_Text, _Handle),
    "error_destroy": (None, _Handle),
}


class _Library:
    """Every function of `_FUNCTIONS`, without its prefix `rd_kafka_`. Calls release the GIL."""

    def __init__(self) -> None:
        library = ctypes.CDLL(cimpl.__file__)  # symbols are looked up in what it is linked with, too
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = library[f"rd_kafka_{name}"]
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)


def unusable() -> str | None:
    """Why the installed library cannot be called like this, or None."""
    if lib is None:
        return "librdkafka's functions were not found in confluent-kafka"
    if lib.version() not in VERSIONS:
        return f"librdkafka {lib.version_str().decode()} is not of major version 2"
    if ctypes.sizeof(_Handle) != 8:
        return "not a 64-bit machine"
    return None


try:
    lib: Any = _Library()
except (AttributeError, OSError):
    lib = None
