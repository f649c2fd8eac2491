"""What the driver answers over HTTP: savepoints, metrics, the newest checkpoint, and the web page."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from coordinator.errors import SavepointError
from coordinator.http import access
from coordinator.http.server import Answer, Request, RequestRefused, Server
from coordinator.protocol.batch import Query
from coordinator.savepoints.model import Savepoint
from coordinator.storage.uris import redacted, within

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


class Door:
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
        """Listens at once; `port` 0 takes a free one. Without a `token` a new one is left in `file`. Answers from
        `begin` on."""
        self.coordinator, self.exposition = coordinator, exposition
        self._targets, self._file = tuple(targets), file
        self._saving = threading.Lock()
        self._server = Server(host, port)
        self.place, self.address = self._server.place, self._server.address
        try:
            self.token = access.given(token) or access.issue(file)
        except BaseException:
            self._server.close()
            raise

    def begin(self) -> None:
        self._server.begin(self.answer)

    def close(self) -> None:
        self._server.close()
        access.forget(self._file, self.token)

    def answer(self, request: Request) -> Answer:
        if "Origin" in request.headers or request.headers.get("Sec-Fetch-Site", "none") != "none":
            raise RequestRefused(403, "not for web pages")
        if request.method == "GET" and (nonce := _NONCE.fullmatch(request.target)):
            return Answer.of_json(200, {"proof": access.proof(self.token, self.place, nonce[1])})
        given = request.header("Authorization").encode("latin-1", "replace").decode("latin-1")
        if not access.same(given, f"Bearer {self.token}"):
            raise RequestRefused(401, "send the driver's token: Authorization: Bearer TOKEN")
        asked = request.method, request.target
        if asked == ("GET", "/checkpoints"):
            return Answer.of_json(200, self.coordinator.newest_checkpoint())
        if asked == ("GET", "/metrics") and self.exposition:
            return Answer(200, *self.exposition())
        if asked == ("POST", "/savepoints"):
            return Answer.of_json(201, self.post_savepoint(json.loads(request.body("application/json"))))
        metrics = "" if self.exposition else " (with the extra `prometheus`)"
        raise RequestRefused(404, f"there are GET /checkpoints, /metrics{metrics}, and POST /savepoints")

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
