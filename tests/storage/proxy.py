"""A TCP proxy that can cut connections at a chosen byte sequence, answer by itself, and change what passes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress


class Proxy:
    """Listens on `port` and forwards to `target`. With `cut_at` set, the next client chunk that holds it cuts its
    connection: before it is forwarded, or, with `after_answer`, when the server has answered it and the client has not
    heard. Then `on_cut` is called.

    `answers` holds what it answers instead of the server to the next chunks that have the first of a pair in them, and
    `changes` what it replaces in chunks of clients.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self.cut_at: bytes | None = None
        self.after_answer = False
        self.on_cut: Callable[[], object] = lambda: None
        self.cuts = 0
        self.answers: list[tuple[bytes, bytes]] = []
        self.changes: dict[bytes, bytes] = {}
        self.refuse = False
        self.refused = 0
        self._open: list[socket.socket] = []
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_all(self) -> None:
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_all()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.refuse:
                    self.refused += 1
                    client.close()
                    continue
                server = socket.create_connection(self._target)
                self._open += [client, server]
                copies = client.dup(), server.dup()
                silent = threading.Event()
                threading.Thread(target=self._up, args=(client, server, silent), daemon=True).start()
                threading.Thread(target=self._down, args=(*copies, silent), daemon=True).start()
                if self._closed:  # while this connection was opened, so that `close` did not see it
                    self.cut_all()

    def _up(self, client: socket.socket, server: socket.socket, silent: threading.Event) -> None:
        with suppress(OSError), client, server:
            while chunk := client.recv(65536):
                if self.answers and self.answers[0][0] in chunk:
                    client.sendall(self.answers.pop(0)[1])
                    client.shutdown(socket.SHUT_RDWR)
                    server.shutdown(socket.SHUT_RDWR)
                    return
                for before, after in self.changes.items():
                    chunk = chunk.replace(before, after)
                if self.cut_at is not None and self.cut_at in chunk:
                    self.cut_at = None
                    if self.after_answer:
                        silent.set()
                        server.sendall(chunk)
                        return  # `_down` cuts
                    self._cut(client, server)
                    return
                server.sendall(chunk)
            server.shutdown(socket.SHUT_WR)  # closing is not enough, because `_down` holds a copy

    def _down(self, client: socket.socket, server: socket.socket, silent: threading.Event) -> None:
        with suppress(OSError), client, server:
            try:
                while chunk := server.recv(65536):
                    if silent.is_set():
                        self._cut(client, server)
                        return
                    client.sendall(chunk)
            finally:
                client.shutdown(socket.SHUT_RDWR)  # the server ended it, perhaps by a reset

    def _cut(self, client: socket.socket, server: socket.socket) -> None:
        self.cuts += 1
        self.on_cut()
        client.shutdown(socket.SHUT_RDWR)
        server.shutdown(socket.SHUT_RDWR)
