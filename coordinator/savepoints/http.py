"""Savepoints over HTTP, answered by the driver itself."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from coordinator.protocol.batch import Query
from coordinator.savepoints.model import Savepoint, list_savepoints

logger = logging.getLogger(__name__)

_LIMIT = 1 << 16


class Coordinator(Protocol):
    """What is asked of the coordinator."""

    @property
    def query(self) -> Query: ...
    def newest_checkpoint(self) -> dict[str, Any]: ...
    def trigger_savepoint(self, target: str) -> Savepoint: ...
    def stop_with_savepoint(self, query: Query, target: str) -> Savepoint: ...
    def cancel_with_savepoint(self, query: Query, target: str) -> Savepoint: ...


class HttpServer:
    """`POST /savepoints` with `{"target": URI, "stop": false, "cancel": false}`, `GET /savepoints?target=URI` and
    `GET /checkpoints`. Answers JSON; an error is `{"error": text, "type": name}`.

    Whoever reaches it can write wherever the driver can, so it listens on loopback unless told otherwise. A POST must
    have the content type application/json, which no foreign web page can send from a browser.
    """

    def __init__(self, coordinator: Coordinator, host: str, port: int) -> None:
        """Listens at once; `port` 0 takes a free one."""
        self._coordinator = coordinator
        self._server = ThreadingHTTPServer((host, port), self._handler())
        self._server.daemon_threads = self._server.block_on_close = False  # what is asked is answered, also at the end
        self.address = f"http://{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="coordinator-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _post_savepoint(self, body: dict[str, Any]) -> dict[str, Any]:
        unknown = set(body) - {"target", "stop", "cancel"}
        if not isinstance(body.get("target"), str) or unknown:
            raise ValueError('the body has to be {"target": URI}, and may have "stop": true or "cancel": true')
        coordinator, target = self._coordinator, body["target"]
        if body.get("cancel"):
            return coordinator.cancel_with_savepoint(coordinator.query, target).summary()
        if body.get("stop"):
            return coordinator.stop_with_savepoint(coordinator.query, target).summary()
        return coordinator.trigger_savepoint(target).summary()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # seconds that a silent client is listened to

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                target = parse_qs(url.query).get("target")
                if url.path == "/checkpoints":
                    self._answer(200, server._coordinator.newest_checkpoint)
                elif url.path == "/savepoints" and target:
                    self._answer(200, lambda: [each.summary() for each in list_savepoints(target[0])])
                else:
                    self._answer(404, lambda: {"error": "there are /checkpoints and /savepoints?target=URI"})

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                if self.path != "/savepoints":
                    self._answer(404, lambda: {"error": "POST goes to /savepoints"})
                elif self.headers.get_content_type() != "application/json" or length > _LIMIT:
                    self._answer(415, lambda: {"error": "send some application/json"})
                else:
                    text = self.rfile.read(length)
                    self._answer(201, lambda: server._post_savepoint(json.loads(text)))

            def _answer(self, status: int, call: Callable[[], Any]) -> None:
                try:
                    body = call()
                except Exception as error:
                    status = 400 if isinstance(error, (ValueError, TypeError)) else 500
                    body = {"error": str(error), "type": type(error).__name__}
                    logger.warning("%s %s: %s", self.command, self.path, error)
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                logger.debug(format, *args)

        return Handler
