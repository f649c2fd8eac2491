"""The meaning of Kafka's errors for a sink, and whether to ask again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kafka.errors import KafkaError, UnknownBrokerIdError
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from sinks.errors import BadValue, ConfigurationError

T = TypeVar("T")

NO_PERMISSION_ON_GROUP = (
    "the principal may not use the consumer group that remembers the job's checkpoints (ACL: Read "
    "on groups with the prefix 'tpc.'; or remember=False, and a checkpoint storage that was set "
    "back goes unnoticed)"
)
NO_TOPIC = "the topic does not exist"
_REFUSED = "the brokers refuse user name, password or certificate"
_TOO_LARGE = (
    "a record is larger than the producer's message.max.bytes or the topic's max.message.bytes, or "
    "a record batch is (lower options={'batch.size': …}, in bytes; or start again, if the topic's "
    "limit was lowered meanwhile)"
)


class Fenced(RuntimeError):
    """A transaction that was ended before its producer ended it.

    Somebody else may also have taken its transactional id.
    """


_FENCED = (
    "the broker has ended this transaction: it was open for longer than the sink's "
    "transaction_timeout, or another attempt or driver of this job has taken its place"
)
_MEANINGS: dict[str, tuple[type[Exception], str]] = {
    "TOPIC_AUTHORIZATION_FAILED": (
        ConfigurationError,
        "the principal may not write to the topic (ACL: Write and Describe on the topic, and Read "
        "unless remember=False)",
    ),
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": (
        ConfigurationError,
        "the principal may not use the transactional id (ACL: Write and Describe on transactional "
        "ids with the prefix 'tpc.')",
    ),
    "GROUP_AUTHORIZATION_FAILED": (ConfigurationError, NO_PERMISSION_ON_GROUP),
    "CLUSTER_AUTHORIZATION_FAILED": (
        ConfigurationError,
        "the principal lacks a permission on the cluster (ACL: IdempotentWrite)",
    ),
    "INVALID_TRANSACTION_TIMEOUT": (
        ConfigurationError,
        "the sink's transaction_timeout is above the broker's transaction.max.timeout.ms: lower "
        "it, or raise the broker's",
    ),
    "UNKNOWN_TOPIC_OR_PARTITION": (ConfigurationError, NO_TOPIC),
    **dict.fromkeys(
        ("SASL_AUTHENTICATION_FAILED", "UNSUPPORTED_SASL_MECHANISM"), (ConfigurationError, _REFUSED)
    ),
    **dict.fromkeys(("MESSAGE_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE"), (BadValue, _TOO_LARGE)),
    "INVALID_RECORD": (
        BadValue,
        "the broker refuses a record of this kind in this topic (a compacted topic needs keys)",
    ),
    "INVALID_TIMESTAMP": (
        BadValue,
        "the timestamp of a record is out of the range that the topic allows",
    ),
    **dict.fromkeys(
        ("PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH", "INVALID_TXN_STATE"), (Fenced, _FENCED)
    ),
    **dict.fromkeys(("INVALID_PRODUCER_ID_MAPPING", "UNKNOWN_PRODUCER_ID"), (Fenced, _FENCED)),
    "TRANSACTION_ABORTABLE": (Fenced, _FENCED),
}


class NotYetKnown(Exception):
    """An outcome that the brokers cannot tell now. The caller asks again."""

    retriable = True


def failure(error: Exception, what: str) -> Exception:
    """Return the exception that an error of Kafka means for the sink.

    It is a SinkError if another try cannot help. `what` is what failed, and begins the message.
    """
    name = name_of(error)
    if name in _MEANINGS:
        kind, meaning = _MEANINGS[name]
        return kind(f"{what}: {meaning} ({error if kind is ConfigurationError else name})")
    return RuntimeError(f"{what}: {error!r}")


def name_of(error: Exception) -> str:
    """Return Kafka's name of an error that a broker sent, or the type's name of any other error."""
    return str(getattr(error, "message", "") or type(error).__name__)


def is_passing(error: BaseException) -> bool:
    """Tell whether another try may help."""
    return isinstance(error, UnknownBrokerIdError) or bool(getattr(error, "retriable", False))


def patiently(question: Callable[[], T], seconds: float) -> T:
    """Ask again while a coordinator moves or is at work, for at most this many seconds.

    Raises the last error.
    """
    again = Retrying(
        retry=retry_if_exception(is_passing),
        wait=wait_exponential(multiplier=0.003, max=0.2),
        stop=stop_after_delay(seconds),
        reraise=True,
    )
    return again(question)


def ask(what: str, seconds: float, question: Callable[[], T]) -> T:
    """Ask as `patiently` does, and raise the sink's exception for an error of Kafka.

    `what` is what is asked, and begins the message.
    """
    try:
        return patiently(question, seconds)
    except KafkaError as error:
        raise failure(error, what) from error
