"""A schema registry, asked for one subject.

The interface is Confluent's, which other registries have as well, such as Apicurio and Karapace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import unquote

from sinks._util.extras import needs_extra
from sinks.errors import ConfigurationError

with needs_extra("avro"):
    from confluent_kafka.schema_registry import RegisteredSchema, Schema, SchemaRegistryClient
    from confluent_kafka.schema_registry.error import SchemaRegistryError

T = TypeVar("T")

KIND = "AVRO"
"""The name of Avro in registries."""
_NOT_FOUND = 404
_CONFLICT = 409
_RETRIES = {"max.retries": 2, "retries.wait.ms": 200, "retries.max.wait.ms": 2000}


class RefusedSchema(Exception):
    """A schema that the registry does not take into the subject, with the registry's reason."""


class Registry:
    """One subject of a schema registry, as it is now; a context manager.

    Nothing is cached for longer than this object lives. Each method raises ConfigurationError if
    the registry cannot be asked.
    """

    def __init__(self, settings: Mapping[str, Any], subject: str) -> None:
        """Set up the client with settings of SchemaRegistryClient.

        Raises ConfigurationError if the client refuses them.
        """
        self.subject = subject
        given = str(settings.get("url", ""))
        own = dict[str, str]()
        self.url = re.sub("//[^/]*@", "//", given)
        user = re.match("[^/,]*//([^/,]*:[^/,]*)@", given)  # the client takes the first URL's
        # in the URL, it would be logged with each request
        if user and "basic.auth.user.info" not in settings:
            own = {"url": self.url, "basic.auth.user.info": unquote(user[1])}
        try:
            self._client = SchemaRegistryClient({**_RETRIES, **settings, **own})
        except (TypeError, ValueError, OSError) as error:
            raise ConfigurationError(f"schema_registry: {error}") from error

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.__exit__(*error)  # type: ignore[no-untyped-call]

    def latest(self) -> RegisteredSchema | None:
        """Return the subject's newest version."""
        return self._ask(
            "for the latest version", lambda: self._client.get_latest_version(self.subject)
        )

    def first(self) -> RegisteredSchema | None:
        """Return the subject's oldest version."""
        numbers = self._ask("for the versions", lambda: self._client.get_versions(self.subject))
        if not numbers:
            return None
        return self._ask(
            "for a version", lambda: self._client.get_version(self.subject, min(numbers))
        )

    def schema(self, schema_id: int) -> Schema | None:
        """Return the schema that has this number, in any subject."""
        return self._ask(f"for the schema {schema_id}", lambda: self._client.get_schema(schema_id))

    def compatibility(self) -> str:
        """Return how far versions of the subject may differ, by its own rule or the registry's."""
        what = "for the compatibility"
        own = self._ask(what, lambda: self._client.get_compatibility(self.subject))
        return str(own or self._ask(what, self._client.get_compatibility) or "NONE")

    def takes(self, text: str) -> bool:
        """Ask whether a schema is compatible with the subject's latest version."""
        schema = Schema(text, KIND)
        what = "whether a schema is compatible"
        return (
            self._ask(what, lambda: self._client.test_compatibility(self.subject, schema))
            is not False
        )

    def register(self, text: str) -> int:
        """Register a schema, and return its number.

        If the schema is registered already, its number stays the same. Raises `RefusedSchema`.
        """
        schema = Schema(text, KIND)
        schema_id = self._ask(
            "to register a schema", lambda: self._client.register_schema(self.subject, schema)
        )
        if schema_id is None:
            raise RefusedSchema("it has no such subject")
        return schema_id

    def _ask(self, what: str, question: Callable[[], T]) -> T | None:
        """Ask a question, and return None for what does not exist.

        `what` is what is asked, for the message of the error.
        """
        try:
            return question()
        except Exception as error:
            # of the registry, or of the HTTP client, which may be one of two
            if isinstance(error, SchemaRegistryError) and error.http_status_code == _CONFLICT:
                raise RefusedSchema(error.error_message) from error
            if isinstance(error, SchemaRegistryError) and error.error_code // 100 == _NOT_FOUND:
                return None  # 40401 and so on; a wrong address has 404 alone, or -1
            raise ConfigurationError(
                f"the schema registry at {self.url}, subject {self.subject!r}, cannot be asked "
                f"{what}: {error!r}. Check that it runs, the address with its path, and the user "
                "[EO-REGISTRY]"
            ) from error
