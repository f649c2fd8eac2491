"""One set of options, librdkafka's, for both clients: the producer of the tasks and the driver's admin client."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from typing import Any

from sinks.errors import ConfigurationError

DEFAULTS = {
    "partitioner": "murmur2_random",  # as the Java clients, and so Spark's own sink: keys stay in their partitions
    "linger.ms": "20",
    "batch.num.messages": "100000",  # so that batch.size, 1 MB, is what bounds batches of small records, too
    "reconnect.backoff.ms": "20",  # half of it passes before the first connection
    "queue.buffering.max.messages": "500000",
    "queue.buffering.max.kbytes": "131072",
}

_OURS = {
    "transactional.id": "it is made from the names of job and sink",
    "transaction.timeout.ms": "use transaction_timeout=…, in seconds",
    "bootstrap.servers": "use bootstrap_servers=…",
    "metadata.broker.list": "use bootstrap_servers=…",
    "enable.idempotence": "a transaction needs it",
    "acks": "a transaction needs all",
    "request.required.acks": "a transaction needs all",
    "statistics.interval.ms": "the sink learns the producer's epoch from the statistics",
    "stats_cb": "the sink learns the producer's epoch from the statistics",
    "on_delivery": "the sink counts the deliveries",
    "delivery.report.only.error": "the sink counts the deliveries",
    "logger": "it cannot travel to the executors; the sink logs to sinks.kafka",
}

_ADMIN = {
    "client.id": "client_id",
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "sasl.kerberos.service.name": "sasl_kerberos_name",
}


def option_problems(options: Mapping[str, Any], transaction_timeout: float) -> list[str]:
    """What is wrong with them: those that the sink sets itself."""
    found = [f"the option {name} is not to be set: {why}" for name, why in _OURS.items() if name in options]
    if transaction_timeout < 1:
        found.append("transaction_timeout is in seconds and at least 1")
    return found


def producer_options(bootstrap: str, options: Mapping[str, Any], transaction_timeout: float) -> dict[str, Any]:
    """librdkafka's configuration, without the transactional id. Functions stay functions, all else becomes text."""
    texts = {
        name: value if callable(value) else str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
    }
    return {
        **DEFAULTS,
        **texts,
        "bootstrap.servers": bootstrap,
        "transaction.timeout.ms": str(int(transaction_timeout * 1000)),
    }


def admin_options(bootstrap: str, options: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """kafka-python's configuration: who we are and whom we trust, from librdkafka's options; `own` goes on top."""
    made: dict[str, Any] = {"bootstrap_servers": bootstrap.split(",")}
    made |= {_ADMIN[name]: value for name, value in options.items() if name in _ADMIN}
    if "security_protocol" in made:
        made["security_protocol"] = str(made["security_protocol"]).upper()
    mechanism = made.get("sasl_mechanism", "")
    if mechanism == "OAUTHBEARER" and "sasl_oauth_token_provider" not in own:
        if not callable(options.get("oauth_cb")):
            raise ConfigurationError(
                "the driver's client cannot fetch OAUTHBEARER tokens as librdkafka does: give oauth_cb in options, or "
                "a sasl_oauth_token_provider of kafka-python in admin"
            )
        made["sasl_oauth_token_provider"] = _token_provider(options["oauth_cb"], options.get("sasl.oauthbearer.config"))
    if made.get("security_protocol") in ("SSL", "SASL_SSL") and "ssl_context" not in own:
        made["ssl_context"] = _ssl_context(options)
    return made | dict(own)


def _ssl_context(options: Mapping[str, Any]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.get("ssl.ca.location"), cadata=options.get("ssl.ca.pem"))
        if "ssl.certificate.location" in options:
            context.load_cert_chain(
                options["ssl.certificate.location"], options.get("ssl.key.location"), options.get("ssl.key.password")
            )
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"the certificates named in ssl.… options cannot be read: {error}") from None
    if other := {"ssl.certificate.pem", "ssl.key.pem", "ssl.keystore.location"} & set(options):
        raise ConfigurationError(
            f"the driver's client cannot use {sorted(other)}: give ssl.certificate.location and ssl.key.location (PEM "
            "files), or an ssl_context in admin"
        )
    if str(options.get("ssl.endpoint.identification.algorithm", "https")).lower() == "none":
        context.check_hostname = False
    if str(options.get("enable.ssl.certificate.verification", "true")).lower() == "false":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _token_provider(callback: Callable[[Any], Any], config: Any) -> Any:
    from kafka.net.sasl.oauth import AbstractTokenProvider

    class Provider(AbstractTokenProvider):  # type: ignore[misc]
        def token(self) -> str:
            return str(callback(config or "")[0])

    return Provider()
