"""A schema registry, asked for one subject: Confluent's interface, which others have too (Apicurio, Karapace)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sinks.errors import ConfigurationError
from sinks.extras import needs_extra

with needs_extra("avro"):
    from confluent_kafka.schema_registry import RegisteredSchema, Schema, SchemaRegistryClient
    from confluent_kafka.schema_registry.error import SchemaRegistryError

Answer = TypeVar("Answer")

_NOT_FOUND = 404
_CONFLICT = 409
_RETRIES = {"max.retries": 2, "retries.wait.ms": 200, "retries.max.wait.ms": 2000}


class RefusedSchema(Exception):
    """The registry does not take a schema into the subject: what it says about that."""


class Registry:
    """Answers what the registry has now: nothing is cached for longer than this object lives. A context manager."""

    def __init__(self, settings: Mapping[str, Any], subject: str, kind: str, timeout: float) -> None:
        """`settings` are SchemaRegistryClient's. Raises ConfigurationError where the client refuses them."""
        self.subject, self._kind = subject, kind
        self.url = re.sub("//[^/@]*@", "//", str(settings.get("url", "")))
        try:
            self._client = SchemaRegistryClient({**_RETRIES, "timeout": timeout, **settings})
        except (TypeError, ValueError, OSError) as error:
            raise ConfigurationError(f"schema_registry: {error}") from error

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.__exit__(*error)  # type: ignore[no-untyped-call]

    def latest(self) -> RegisteredSchema | None:
        """The subject's newest version."""
        return self._ask(lambda: self._client.get_latest_version(self.subject), "the latest version")

    def first(self) -> RegisteredSchema | None:
        """The subject's oldest version."""
        numbers = self._ask(lambda: self._client.get_versions(self.subject), "the versions")
        if not numbers:
            return None
        return self._ask(lambda: self._client.get_version(self.subject, min(numbers)), "a version")

    def schema(self, schema_id: int) -> Schema | None:
        """The one that has this number, in whatever subject."""
        return self._ask(lambda: self._client.get_schema(schema_id), f"the schema {schema_id}")

    def compatibility(self) -> str:
        """How far versions of the subject may differ: its own rule, or the registry's."""
        own = self._ask(lambda: self._client.get_compatibility(self.subject), "the compatibility")
        return str(own or self._ask(self._client.get_compatibility, "the compatibility") or "NONE")

    def takes(self, text: str) -> bool:
        """Whether the registry finds this schema compatible with the subject's latest version."""
        answer = self._ask(
            lambda: self._client.test_compatibility(self.subject, Schema(text, self._kind)),
            "whether a schema is compatible",
        )
        return answer is not False

    def register(self, text: str) -> int:
        """The number of the schema, which is the same for one that is registered already. Raises `RefusedSchema`."""
        try:
            return self._client.register_schema(self.subject, Schema(text, self._kind))
        except SchemaRegistryError as error:
            if error.http_status_code == _CONFLICT:
                raise RefusedSchema(error.error_message) from error
            raise self._failed("to register a schema", error) from error
        except Exception as error:
            raise self._failed("to register a schema", error) from error

    def _ask(self, question: Callable[[], Answer], what: str) -> Answer | None:
        """None for what is not there."""
        try:
            return question()
        except SchemaRegistryError as error:
            if error.error_code // 100 == _NOT_FOUND:  # 40401 and so on; a wrong address has 404 alone, or -1
                return None
            raise self._failed(f"for {what}", error) from error
        except Exception as error:  # of the HTTP client, which may be one of two
            raise self._failed(f"for {what}", error) from error

    def _failed(self, doing: str, error: Exception) -> ConfigurationError:
        return ConfigurationError(
            f"the schema registry at {self.url}, subject {self.subject!r}, cannot be asked {doing}: {error!r}. Check "
            "that it runs, the address with its path, and the user"
        )
