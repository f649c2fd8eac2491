"""What the embedded servers share: a process, a free port, a folder, an account that is not root, and a watchdog."""

from __future__ import annotations

import logging
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import psutil
from typing_extensions import Self

logger = logging.getLogger(__name__)

# Outlives its parent. Each line it reads is the whole list of the servers that run now, or "done" for nothing to clean
# up. At the end of file, when the parent is gone, it sends them the signal, and removes the folder when they are gone.
_WATCHDOG = """
servers=
while read -r line; do servers=$line; done
[ "$servers" = done ] && exit 0
alive() { for server in $servers; do kill -0 "$server" 2>/dev/null && return 0; done; return 1; }
if [ -n "$servers" ]; then
    kill -"$1" $servers
    for _ in 1 2 3 4 5 6 7 8 9 10; do alive || break; sleep 1; done
    alive && kill -KILL $servers 2>/dev/null
fi
rm -rf "$0" || { sleep 2; rm -rf "$0"; }
"""


class Watchdog:
    """Sees to it that servers die with this process, even when that gets SIGKILL, and that their folder goes too.

    `stop_signal` is what they get then, as in `kill -s`; ten seconds later it is KILL.
    """

    def __init__(self, folder: Path, stop_signal: str = "KILL") -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG, str(folder), stop_signal],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, *pids: int) -> None:
        """These servers, and no others, run now."""
        self._tell(" ".join(map(str, pids)))

    def close(self) -> None:
        """The servers are stopped and the folder is removed: nothing is left to do. May run again."""
        if self._process.poll() is None:
            self._tell("done")
            self._process.communicate()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()


class ServerProcess(ABC):
    """A server that is one process with one port and a folder. A context manager: started on entry, gone after exit.

    It dies with the process that started it, also by SIGKILL.
    """

    start_timeout = 60.0
    """Seconds until a server that does not answer is given up."""

    def __init__(self) -> None:
        self.port = 0
        self.home = Path()
        """Its folder, from the first start to `close`."""
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None

    @abstractmethod
    def _command(self) -> Sequence[str]:
        """What to run, so that it listens on `port`; asked at each start."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether the server can be used."""

    @property
    def running(self) -> bool:
        """Also while it is paused."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server, or resume it, and return when it answers. Raises RuntimeError if it does not."""
        if self.running:
            self.resume()
            return
        if self._watchdog is None:
            self.home = Path(tempfile.mkdtemp(prefix=f"{type(self).__name__.lower()}-"))
            self._watchdog = Watchdog(self.home)
            self.port = free_port()
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.home,
                start_new_session=True,
            )
        self._watchdog.watch(self._process.pid)
        deadline = time.monotonic() + self.start_timeout
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                log_end = (self.home / "log").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{type(self).__name__} did not start; the end of its log:\n{log_end}")
            time.sleep(0.05)

    def kill(self) -> None:
        """Crash the server: SIGKILL. Returns when it is gone. `start` starts it again on the same port."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Freeze the server: SIGSTOP. Its connections stay open and nothing answers until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop the server and remove its folder."""
        self.kill()
        if self._watchdog is not None:
            shutil.rmtree(self.home, ignore_errors=True)
            self._watchdog.close()
            self._watchdog = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise RuntimeError(f"{type(self).__name__} is not running: call start() first")
        os.kill(self._process.pid, number)


def free_port() -> int:
    """Below the ports that outgoing connections get, so that none of those takes it while the server is down."""
    for port in random.sample(range(15000, 32000), 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port on 127.0.0.1 between 15000 and 32000")


def alive(process: psutil.Process) -> bool:
    """A zombie that its new parent has not reaped yet is dead."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def unprivileged() -> pwd.struct_passwd | None:
    """The account for a server that root may not run: None for one's own, `nobody` when that is root."""
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def traversable(path: Path) -> bool:
    """Whether every user may enter this folder."""
    return all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents))


def temporary_folder(account: pwd.struct_passwd | None = None) -> str:
    """A folder for temporary files that `account` may enter; None is one's own."""
    candidates = [tempfile.gettempdir(), "/tmp", "/var/tmp"]
    if account is None:
        return candidates[0]
    for folder in candidates:
        if os.path.isdir(folder) and traversable(Path(folder).resolve()):
            return folder
    raise RuntimeError(f"no temporary folder among {candidates} that user {account.pw_name!r} may enter: set TMPDIR")


def docker_answers() -> bool:
    """Whether testcontainers is installed and reaches a Docker engine."""
    try:
        import docker

        return bool(docker.from_env(timeout=5).ping())
    except Exception as error:
        logger.debug("no Docker engine: %s", error)
        return False
