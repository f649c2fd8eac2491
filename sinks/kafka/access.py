"""How a sink reaches its brokers.

Connections are made when the sink first needs them, and tasks leave them to each other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sinks._util.idle_connections import put_back, take
from sinks.kafka.cluster import Cluster
from sinks.kafka.errors import patiently
from sinks.kafka.options import client_options

T = TypeVar("T")


class BrokerAccess:
    """The brokers of a sink, and the time that the sink waits for them.

    A pickled copy is for a task. It takes the connections that the last task of its process with
    the same settings left there, and leaves its own.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        options: Mapping[str, Any],
        client_options: Mapping[str, Any],
        timeout: float,
    ) -> None:
        """Keep the options of a sink; nothing is connected yet."""
        self.bootstrap_servers = bootstrap_servers
        self.timeout = timeout
        self._options = dict(options)
        self._client_options = dict(client_options)
        self._cluster: Cluster | None = None
        self._in_task = False
        self._answer_seconds = self._reached_by = math.inf

    @property
    def cluster(self) -> Cluster:
        """The brokers; the first use of the property makes the object that connects to them."""
        if self._cluster is None:
            self._reached_by = time.monotonic() + self._answer_seconds
            self._cluster = take(self._place) if self._in_task and self._place else None
        if self._cluster is None:
            configured = client_options(self.bootstrap_servers, self._options, self._client_options)
            self._cluster = Cluster(configured, self.timeout, self._reached_by)
        return self._cluster

    def set_answer_timeout(self, seconds: float) -> None:
        """Limit how long the brokers may take for all answers, from the next connection on."""
        self._answer_seconds = seconds

    @property
    def seconds_left(self) -> float:
        """The seconds that the brokers may still take for their answers."""
        return self._reached_by - time.monotonic()

    def patiently(self, question: Callable[[], T]) -> T:
        """Ask, and ask again while the brokers are at work.

        A broker that is frozen takes one request's time, and then is no longer among the brokers
        that are asked. A first connection to an only address is tried again by kafka-python, for
        one `timeout`.
        """
        cluster = self.cluster
        if "," not in self.bootstrap_servers:
            cluster.connect()
        return patiently(question, min(2 * self.timeout, self.seconds_left))

    def close(self) -> None:
        """Leave the connections to the next task, or close them."""
        cluster = self._cluster
        self._cluster = None
        if cluster is not None and self._in_task and self._place:
            put_back(self._place, cluster)
        elif cluster is not None:
            cluster.close()

    @property
    def _place(self) -> tuple[object, ...] | None:
        """The key under which tasks with the same settings leave connections to each other.

        There is none for settings that are objects.
        """
        settings = [
            *self._options.items(),
            *((f"client {name}", value) for name, value in self._client_options.items()),
        ]
        if not all(isinstance(value, str | int | float) for _, value in settings):
            return None
        return "Kafka", self.bootstrap_servers, self.timeout, *sorted(settings)

    def leave_nothing(self) -> None:
        """Close the connections of a task that failed, so that the next task has others."""
        if self._in_task and self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cluster": None, "_in_task": True}
