"""The standard library's server, with what it lacks for a door that anybody may knock at: a request is read within ten
seconds and 64 KiB in all, eight at a time, and only what names this server as its `Host` is answered."""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

logger = logging.getLogger(__name__)

_BYTES, _SECONDS, _THREADS = 1 << 16, 10.0, 8


class RequestRefused(Exception):
    """Answered with a status and the reason."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(status, why)
        self.status, self.why = status, why


@dataclass(frozen=True)
class Answer:
    status: int
    kind: str
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_json(cls, status: int, body: Any) -> Answer:
        return cls(status, "application/json", json.dumps(body).encode())


class Request:
    """`target` is what was asked for, `path` and `query` its parts. Nothing of it can be trusted."""

    def __init__(self, method: str, target: str, headers: Message, stream: io.BufferedIOBase) -> None:
        self.method, self.target, self.headers, self._stream = method, target, headers, stream
        self.path, _, query = target.partition("?")
        self.query = _fields(query)

    def header(self, name: str) -> str:
        return str(self.headers.get(name, ""))

    def cookie(self, name: str) -> str:
        try:
            return SimpleCookie(self.header("Cookie"))[name].value
        except (CookieError, KeyError):
            return ""

    def form(self) -> dict[str, str]:
        return _fields(self.body("application/x-www-form-urlencoded").decode("utf-8", "replace"))

    def body(self, kind: str) -> bytes:
        length = self.header("Content-Length")
        if self.headers.get_content_type() != kind:
            raise RequestRefused(415, f"send {kind}")
        if not re.fullmatch("[0-9]{1,9}", length) or "Transfer-Encoding" in self.headers:
            raise RequestRefused(411, "send one body with its Content-Length")
        if int(length) > _BYTES // 2:
            raise RequestRefused(413, "the body is too long")
        try:
            return self._stream.read(int(length))
        except TimeoutError:
            raise RequestRefused(408, "the body did not come in time") from None


def _fields(text: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=50))
    except ValueError:
        raise RequestRefused(400, "too many fields") from None


class Server:
    """Listens at once, and answers from a thread of its own after `begin`; `port` 0 takes a free one."""

    def __init__(self, host: str, port: int) -> None:
        if host in ("", "0.0.0.0", "::"):
            raise ValueError(f"host has to be the address that this machine is reached by, not {host!r}")
        host = "127.0.0.1" if host == "localhost" else host  # a name that stands for two addresses proves nothing
        self._server = _Server((host, port))
        self.port = self._server.server_port
        self.place = f"{f'[{host}]' if ':' in host else host}:{self.port}"
        self.address = f"http://{self.place}"
        self._server.place = self.place
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="coordinator-http", daemon=True
        )

    def begin(self, answer: Callable[[Request], Answer]) -> None:
        self._server.answer = answer
        self._thread.start()

    def close(self) -> None:
        if self._thread.ident is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SECONDS

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Bounded(self.connection))

    def do_GET(self) -> None:
        self._send(self._answer())

    def do_POST(self) -> None:
        self._send(self._answer())

    def _answer(self) -> Answer:
        try:
            if self.headers.get_all("Host") != [self.server.place]:  # a name that is not ours: DNS rebinding
                raise RequestRefused(421, "this is another host")
            return self.server.answer(Request(self.command, self.path, self.headers, self.rfile))
        except RequestRefused as refused:
            return Answer.of_json(refused.status, {"error": refused.why})
        except Exception as error:
            status = 400 if isinstance(error, (ValueError, TypeError, RecursionError)) else 500
            logger.warning("%s: %s", self.command, error)
            return Answer.of_json(status, {"error": str(error), "type": type(error).__name__})

    def _send(self, answer: Answer) -> None:
        logger.info("%s from %s: %d", self.command, self.client_address[0], answer.status)
        self.connection.settimeout(_SECONDS)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.data)))
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.data)

    def log_message(self, format: str, *args: Any) -> None:
        """The request line, which may hold a secret, is not logged."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # what is asked is answered, also at the end
    request_queue_size = 16
    place: str
    answer: Callable[[Request], Answer]

    def __init__(self, address: tuple[str, int]) -> None:
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
