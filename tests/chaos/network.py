"""The network between the driver and a server: a TCP proxy whose connections can be cut, slowed down and half-open."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress


class Network:
    """Listens on `port` and forwards to `target`. A client sees a target that refuses as a connection that ends."""

    def __init__(self) -> None:
        self.target: tuple[str, int] = ("127.0.0.1", 0)
        self.delay = 0.0
        """Seconds that each chunk waits, in either direction."""
        self._lock = threading.Lock()
        self._flows: list[_Flow] = []
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Every connection ends now; new ones are let through."""
        with self._lock:
            flows, self._flows = self._flows, []
        _cut(flows)

    def half_open(self, seconds: float) -> None:
        """Whatever is sent on the connections of now vanishes, and neither end is told for so long. New ones work."""
        with self._lock:
            flows, self._flows = self._flows, []
        for flow in flows:
            flow.silent = True
        timer = threading.Timer(seconds, _cut, [flows])
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self.target)
                except OSError:
                    client.close()
                    continue
                flow = _Flow(self, client, server)
                with self._lock:
                    self._flows = [one for one in self._flows if not one.over] + [flow]
                if self._closed:  # while this connection was opened, so that `close` did not see it
                    self.cut()


def _cut(flows: list[_Flow]) -> None:
    for flow in flows:
        flow.cut()


class _Flow:
    """One connection: two sockets and a thread for each direction."""

    def __init__(self, network: Network, client: socket.socket, server: socket.socket) -> None:
        self._network, self._ends = network, (client, server)
        self.silent = self.over = False
        for end in self._ends:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pumps = [
            threading.Thread(target=self._pump, args=ends, daemon=True) for ends in ((client, server), (server, client))
        ]
        for pump in self._pumps:
            pump.start()

    def cut(self) -> None:
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(65536):
                if self._network.delay:
                    time.sleep(self._network.delay)
                if not self.silent:
                    sink.sendall(chunk)
        if self.silent:
            return  # the other end is not to hear that this one has gone; `cut` comes later
        self.cut()
        if self.over:
            for end in self._ends:
                end.close()
        self.over = True
