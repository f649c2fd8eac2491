"""A real Redis for tests: `with RedisServer() as server: redis.Redis.from_url(server.url)`.

It is Debian's package (x86-64; fetched once, see `sinks.testing.servers.debian`), with the settings that
docs/redis-sink-tutorial.md asks for. It takes a free loopback port, can be crashed and started again on the same data,
and dies with the process that started it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import redis

from sinks.testing.servers import debian
from sinks.testing.servers.common import START_TIMEOUT, ServerProcess

_BINARY = "usr/bin/redis-server"


class RedisServer(ServerProcess):
    """A server of one process. `settings` are those of redis.conf, such as maxmemory."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.settings = {"appendonly": "yes", "appendfsync": "always", "save": ""} | dict(settings or {})

    @property
    def label(self) -> str:
        return "the Redis server"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def _command(self) -> Sequence[str]:
        program = debian.command(debian.program("redis-server", "trixie", _BINARY, []), _BINARY)
        own = {"port": f"{self.port}", "bind": "127.0.0.1", "dir": f"{self.home}"}
        return [*program, *(word for name, value in (own | self.settings).items() for word in (f"--{name}", value))]

    def _answers(self) -> bool:
        with redis.Redis.from_url(self.url, socket_timeout=START_TIMEOUT) as client:
            try:
                return bool(client.ping())
            except (redis.ConnectionError, redis.BusyLoadingError):
                return False
