"""Savepoints and metrics over HTTP, answered by the driver itself.

The standard library's server, with what it lacks for a door that anybody may knock at: a request is read within ten
seconds and 64 KiB in all, eight at a time, one savepoint at a time, and nothing is done before its sender is known.
"""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

from coordinator.errors import SavepointError
from coordinator.protocol.batch import Query
from coordinator.savepoints import access
from coordinator.savepoints.model import Savepoint
from coordinator.storage.uris import redacted, within

logger = logging.getLogger(__name__)

_BYTES, _SECONDS, _THREADS = 1 << 16, 10.0, 8
Exposition = Callable[[], tuple[str, bytes]]
"""The metrics for Prometheus, after their content type."""

_NONCE = re.compile(r"/identity\?nonce=([0-9a-f]{32,64})")


class Coordinator(Protocol):
    """What is asked of the coordinator."""

    @property
    def query(self) -> Query: ...
    def newest_checkpoint(self) -> dict[str, Any]: ...
    def trigger_savepoint(self, target: str) -> Savepoint: ...
    def stop_with_savepoint(self, query: Query, target: str) -> Savepoint: ...
    def cancel_with_savepoint(self, query: Query, target: str) -> Savepoint: ...


class HttpServer:
    """`POST /savepoints` with `{"target": URI, "stop": false, "cancel": false}`, `GET /checkpoints` and, with the extra
    `prometheus`, `GET /metrics`, all with the header `Authorization: Bearer TOKEN`; `GET /identity?nonce=HEX` proves
    that the driver has the token. Answers JSON (the metrics are text); an error is `{"error": text, "type": name}`.

    `targets` are the storages that savepoints may go to; one that is not named in a request goes to the first.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        host: str,
        port: int,
        targets: Sequence[str],
        token: str | None,
        file: Path,
        exposition: Exposition | None = None,
    ) -> None:
        """Listens at once; `port` 0 takes a free one. Without a `token` a new one is left in `file`."""
        if host in ("", "0.0.0.0", "::"):
            raise ValueError(f"host has to be the address that others reach this driver by, not {host!r}")
        host = "127.0.0.1" if host == "localhost" else host  # a name that stands for two addresses proves nothing
        self.coordinator, self.exposition = coordinator, exposition
        self._targets, self._file = tuple(targets), file
        self._saving = threading.Lock()
        self._server = _Server((host, port), self)
        place = f"[{host}]" if ":" in host else host
        self.place = f"{place}:{self._server.server_port}"
        self.address = f"http://{self.place}"
        try:
            self.token = access.given(token) or access.issue(file)
        except BaseException:
            self._server.server_close()
            raise
        self._thread = threading.Thread(target=self._server.serve_forever, name="coordinator-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        access.forget(self._file, self.token)

    def post_savepoint(self, body: Any) -> dict[str, Any]:
        kinds = {"target": str, "stop": bool, "cancel": bool}
        if not isinstance(body, dict) or any(not isinstance(v, kinds.get(k, ())) for k, v in body.items()):
            raise ValueError('the body has to be {"target": URI}, and may have "stop": true or "cancel": true')
        target, coordinator = self._allowed(body.get("target")), self.coordinator
        if not self._saving.acquire(blocking=False):
            raise SavepointError("a savepoint is being taken already; try again when it is done")
        try:
            if body.get("cancel"):
                return coordinator.cancel_with_savepoint(coordinator.query, target).summary()
            if body.get("stop"):
                return coordinator.stop_with_savepoint(coordinator.query, target).summary()
            return coordinator.trigger_savepoint(target).summary()
        finally:
            self._saving.release()

    def _allowed(self, target: str | None) -> str:
        if not self._targets:
            raise ValueError(
                "this driver takes savepoints to no place: set savepoint_dir in its CheckpointConfig, or call "
                "serve_http(targets=[…])"
            )
        found = self._targets[0] if target is None else within(target, self._targets)
        if found is None:
            places = ", ".join(map(redacted, self._targets))
            raise ValueError(f"{redacted(str(target))} is not in a place that this driver may save to: {places}")
        return found


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SECONDS

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Bounded(self.connection))
        self.door = self.server.door

    def do_GET(self) -> None:
        if not self._is_sent_here():
            return
        if nonce := _NONCE.fullmatch(self.path):
            self._answer(200, lambda: {"proof": access.proof(self.door.token, self.door.place, nonce[1])})
        elif self._is_known():
            if self.path == "/checkpoints":
                self._answer(200, self.door.coordinator.newest_checkpoint)
            elif self.path == "/metrics" and self.door.exposition:
                self._send_bytes(200, *self.door.exposition())
            else:
                metrics = "" if self.door.exposition else " (with the extra `prometheus`)"
                self._refuse(404, f"there are GET /checkpoints, GET /metrics{metrics} and POST /savepoints")

    def do_POST(self) -> None:
        if not self._is_sent_here() or not self._is_known():
            return
        length = self.headers.get("Content-Length", "")
        if self.path != "/savepoints":
            self._refuse(404, "POST goes to /savepoints")
        elif self.headers.get_content_type() != "application/json":
            self._refuse(415, "send application/json")
        elif not re.fullmatch("[0-9]{1,9}", length) or "Transfer-Encoding" in self.headers:
            self._refuse(411, "send one body with its Content-Length")
        elif int(length) > _BYTES // 2:
            self._refuse(413, "the body is too long")
        else:
            text = self.rfile.read(int(length))
            self._answer(201, lambda: self.door.post_savepoint(json.loads(text)))

    def _is_sent_here(self) -> bool:
        """No browser has a reason to ask, and a name that is not ours is how a web page gets at a driver."""
        if self.headers.get_all("Host") != [self.door.place]:
            self._refuse(421, "this is another host")
        elif "Origin" in self.headers or self.headers.get("Sec-Fetch-Site", "none") != "none":
            self._refuse(403, "not for web pages")
        else:
            return True
        return False

    def _is_known(self) -> bool:
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if access.same(given.decode("latin-1"), f"Bearer {self.door.token}"):
            return True
        self._refuse(401, "send the driver's token: Authorization: Bearer TOKEN")
        return False

    def _refuse(self, status: int, why: str) -> None:
        self._send(status, {"error": why})

    def _answer(self, status: int, call: Callable[[], Any]) -> None:
        try:
            body = call()
        except Exception as error:
            status = 400 if isinstance(error, (ValueError, TypeError, RecursionError)) else 500
            body = {"error": str(error), "type": type(error).__name__}
            logger.warning("%s: %s", self.command, error)
        self._send(status, body)

    def _send(self, status: int, body: Any) -> None:
        self._send_bytes(status, "application/json", json.dumps(body).encode())

    def _send_bytes(self, status: int, kind: str, data: bytes) -> None:
        logger.info("%s from %s: %d", self.command, self.client_address[0], status)
        self.connection.settimeout(_SECONDS)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """The request line, which may hold a secret, is not logged."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # what is asked is answered, also at the end
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], door: HttpServer) -> None:
        self.door = door
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._places = threading.BoundedSemaphore(_THREADS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without the look-up of a host name that the standard library does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a connection of %s broke", client_address[0], exc_info=True)


class _Bounded(io.RawIOBase):
    """A client's bytes: so many at most, and none after its time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._left, self._end = connection, _BYTES, time.monotonic() + _SECONDS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        seconds = self._end - time.monotonic()
        if seconds <= 0 or self._left <= 0:
            raise TimeoutError
        self._connection.settimeout(seconds)
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        return count
