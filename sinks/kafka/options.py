"""One set of options, under librdkafka's names.

They are for the producers in tasks, and for the driver's questions.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kafka.errors import KafkaConnectionError

from sinks._util.log import get_logger
from sinks.errors import ConfigurationError
from sinks.kafka.record_batch import CODECS

logger = get_logger(__name__)

_PEM = (
    "give ssl.certificate.location and ssl.key.location (PEM files), or an ssl_context in "
    "client_options"
)
_OURS = {
    "transactional.id": "it is made from the names of job and sink",
    "transaction.timeout.ms": "use transaction_timeout=…, in seconds",
    "bootstrap.servers": "use bootstrap_servers=…",
    "enable.idempotence": "a transaction needs it",
    "acks": "a transaction needs all",
    "partitioner": "keys go by Java's murmur2; for another way, give rows a column `partition`",
    **dict.fromkeys(("ssl.certificate.pem", "ssl.key.pem", "ssl.keystore.location"), _PEM),
}
_CLIENT = {
    "client.id": "client_id",
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "sasl.kerberos.service.name": "sasl_kerberos_service_name",
}
_VERIFICATION = "enable.ssl.certificate.verification"
_SECURITY = (
    "oauth_cb",
    "sasl.oauthbearer.config",
    "ssl.ca.location",
    "ssl.ca.pem",
    "ssl.certificate.location",
    "ssl.key.location",
    "ssl.key.password",
    "ssl.endpoint.identification.algorithm",
    _VERIFICATION,
)

_NUMBERS = {
    "batch.size": 1_000_000,
    "message.max.bytes": 1_000_000,
    "queue.buffering.max.kbytes": 65_536,
}
_IGNORED = {"linger.ms": "a record batch is sent when it is full (batch.size) or the task ends"}
_KNOWN = (*_CLIENT, *_SECURITY, *_NUMBERS, "compression.type")


@dataclass(frozen=True)
class ProducerOptions:
    compression: str
    batch_bytes: int
    """The bytes of a record batch, at most."""
    largest: int
    """The bytes of key, value and headers of a record, at most."""
    buffer_bytes: int
    """The bytes of rows and record batches that the brokers have not acknowledged, at most."""
    transaction_timeout_ms: int


def option_problems(options: Mapping[str, Any], transaction_timeout: float) -> Iterable[str]:
    """List what is wrong with the options.

    They may be options that the sink sets itself, unknown options, or impossible values. The
    transaction timeout is in seconds.
    """
    for name in options:
        if name in _OURS:
            yield f"the option {name} is not to be set: {_OURS[name]}"
        elif name in _IGNORED:
            logger.warning("the option %s changes nothing: %s", name, _IGNORED[name])
        elif name not in _KNOWN:
            known = ", ".join(sorted(_KNOWN))
            yield (
                f"there is no option {name}: there are {known}, and kafka-python's, which "
                "client_options={…} takes"
            )
    for name in _NUMBERS:
        if name in options and not (str(options[name]).isdecimal() and int(options[name]) > 0):
            yield f"the option {name} is a whole number above 0, not {options[name]!r}"
    if (compression := options.get("compression.type", "none")) not in CODECS:
        yield f"compression.type is one of {', '.join(CODECS)}, not {compression!r}"
    if not 1 <= transaction_timeout < 2**31 / 1000:
        yield "transaction_timeout must be between 1 and 2,147,483 seconds"


def producer_options(options: Mapping[str, Any], transaction_timeout: float) -> ProducerOptions:
    batch, message, kilobytes = (
        int(options.get(name, default)) for name, default in _NUMBERS.items()
    )
    compression = options.get("compression.type", "none")
    return ProducerOptions(
        compression, batch, message, kilobytes << 10, int(transaction_timeout * 1000)
    )


def client_options(
    bootstrap: str, options: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return kafka-python's configuration, with `own` on top.

    Raises ConfigurationError if two options contradict each other, or if a certificate cannot be
    read.
    """
    made: dict[str, Any] = {"bootstrap_servers": bootstrap.split(",")}
    made |= {_CLIENT[name]: value for name, value in options.items() if name in _CLIENT}
    if "security_protocol" in made:
        made["security_protocol"] = str(made["security_protocol"]).upper()
    mechanism = made.get("sasl_mechanism", "")
    if mechanism == "OAUTHBEARER" and "sasl_oauth_token_provider" not in own:
        if not callable(options.get("oauth_cb")):
            raise ConfigurationError(
                "the sink cannot fetch OAUTHBEARER tokens by itself: give oauth_cb in options, or "
                "a sasl_oauth_token_provider of kafka-python in client_options"
            )
        made["sasl_oauth_token_provider"] = _token_provider(
            options["oauth_cb"], options.get("sasl.oauthbearer.config")
        )
    own_ssl = [name for name in own if name.startswith("ssl_")]
    twice = [name for name in options if name.startswith("ssl.") or name == _VERIFICATION]
    if own_ssl and twice and "ssl_context" not in own:
        raise ConfigurationError(
            f"{', '.join(twice)} of options and {', '.join(own_ssl)} of client_options both say "
            "how to trust the brokers: write all of it in one of them"
        )
    if made.get("security_protocol") in ("SSL", "SASL_SSL") and not own_ssl:
        made["ssl_context"] = _ssl_context(options)
    return made | dict(own)


def _ssl_context(options: Mapping[str, Any]) -> ssl.SSLContext:
    """Return a TLS context that reads its files again for each connection.

    Somebody may renew the files while a driver runs.
    """
    authorities = options.get("ssl.ca.location")
    key = options.get("ssl.key.location")
    unreadable = "the certificates named in ssl.… options cannot be read"

    def read() -> None:
        if authorities:
            context.load_verify_locations(authorities)
        if "ssl.certificate.location" in options:
            context.load_cert_chain(
                options["ssl.certificate.location"], key, options.get("ssl.key.password")
            )

    def wrapped(*args: Any, **how: Any) -> ssl.SSLSocket:
        try:
            read()
        except OSError as error:
            raise KafkaConnectionError(f"{unreadable}: {error}") from error
        return wrap(*args, **how)

    try:
        context = ssl.create_default_context(cafile=authorities, cadata=options.get("ssl.ca.pem"))
        wrap = context.wrap_socket
        context.wrap_socket = wrapped  # type: ignore[method-assign]
        read()
    except OSError as error:
        raise ConfigurationError(f"{unreadable}: {error}") from None
    if str(options.get("ssl.endpoint.identification.algorithm", "https")).lower() == "none":
        context.check_hostname = False
    if str(options.get(_VERIFICATION, "true")).lower() == "false":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _token_provider(callback: Callable[[Any], Any], config: Any) -> Any:
    from kafka.net.sasl.oauth import AbstractTokenProvider

    class Provider(AbstractTokenProvider):  # type: ignore[misc]
        def token(self) -> str:
            try:
                return str(callback(config or "")[0])
            except Exception as error:
                # so it is asked again
                raise KafkaConnectionError(f"oauth_cb gave no token: {error!r}") from error

    return Provider()
