"""A schema registry for tests: `with RegistryServer() as server: SchemaRegistryClient({"url":
server.url})`.

Apicurio Registry, from Maven Central (`sinks.testing.servers.maven`), with Confluent's interface,
on a free loopback port. It keeps everything in memory: after `kill` and `start` it knows nothing,
and gives its numbers once more. `schema_registry` takes the one that the environment variable
SCHEMA_REGISTRY_URL names instead.
"""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Sequence

from sinks.testing.servers.common import ServerProcess, Unmanaged, small_jvm
from sinks.testing.servers.maven import maven_archive

VERSION = "2.6.13.Final"
"""The last series whose runnable form is on Maven Central."""


class RegistryServer(ServerProcess):
    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/apis/ccompat/v7"

    def _command(self) -> Sequence[str]:
        home = maven_archive(f"io.apicurio:apicurio-registry-app:{VERSION}", "all")
        return [
            *small_jvm(self.home, "384m"),
            "-Dquarkus.http.host=127.0.0.1",
            f"-Dquarkus.http.port={self.port}",
            "-jar",
            str(home / f"apicurio-registry-app-{VERSION}-runner.jar"),
        ]

    def _answers(self) -> bool:
        return _answers(self.url)


class ExternalRegistry(Unmanaged):
    """One that somebody else runs."""

    unmanaged = "the schema registry of SCHEMA_REGISTRY_URL is not ours to stop"

    def __init__(self, url: str) -> None:
        self.url = url

    def start(self) -> None:
        if not _answers(self.url):
            raise RuntimeError(
                f"the schema registry of SCHEMA_REGISTRY_URL, {self.url}, does not answer"
            )


def schema_registry() -> RegistryServer | ExternalRegistry:
    """The one that SCHEMA_REGISTRY_URL names, else one of our own."""
    url = os.environ.get("SCHEMA_REGISTRY_URL")
    return ExternalRegistry(url) if url else RegistryServer()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/subjects", timeout=5).close()
    except OSError:
        return False
    return True
