"""What the services for tests share, and the servers among them that are started here."""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil
from typing_extensions import Self

from sinks._util.log import get_logger
from sinks._util.progress import progress, shown_by

logger = get_logger(__name__)

# the last would leave a file in /tmp
QUICK_JVM = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")

START_TIMEOUT = 300.0
"""Seconds until a server that does not answer is given up. Crash recovery is part of it."""

# Outlives its parent. Each line it reads is the whole list of the servers that run now, or "done"
# for nothing to clean up. At the end of file, when the parent is gone, it sends them the signal,
# and removes the folder when they are gone.
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


class CannotBeHad(RuntimeError):
    """A server, or a part of one, is not on this machine and cannot be fetched.

    The first line is a sentence.
    """


def version_of(product: str, version: str | None, versions: Collection[str]) -> str | None:
    """The version that is given, or else the one that the environment variable TEST_PRODUCT_VERSION
    names. Raises ValueError for one that is not among `versions`."""
    chosen = version or os.environ.get(f"TEST_{product.upper()}_VERSION") or None
    if chosen is not None and chosen not in versions:
        raise ValueError(f"there is no {product} {chosen} for tests, but {', '.join(versions)}")
    return chosen


@contextlib.contextmanager
def waiting_for(doing: str) -> Iterator[None]:
    """Log every few seconds that this still takes place."""
    with shown_by(logger.info), progress(doing):
        yield


@contextlib.contextmanager
def named(server: str) -> Iterator[None]:
    """Name the server in the error that it cannot be had."""
    try:
        yield
    except CannotBeHad as error:
        raise CannotBeHad(f"{server} cannot be had: {error}") from None


class Startable(ABC):
    """A context manager: started on entry, gone after exit."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OneProcess:
    """A server of one (main) process of ours."""

    _process: subprocess.Popen[bytes] | None

    @property
    def label(self) -> str:
        """What errors and log lines call it."""
        return type(self).__name__

    @property
    def pid(self) -> int:
        """Of the main process. Raises RuntimeError when the server is not running."""
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"{self.label} is not running: call start() first")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Also while it is paused."""
        return self._process is not None and self._process.poll() is None

    def pause(self) -> None:
        """Freeze the server: SIGSTOP.

        Its connections stay open and nothing answers until `resume`.
        """
        freeze(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class Service(Startable):
    """A running server, or several, and how to reach it."""

    unmanaged: str = ""
    """Why it cannot be stopped, restarted or killed from here; empty if it can."""

    @property
    @abstractmethod
    def running(self) -> bool:
        """Whether the (main) process of every server is alive."""

    @abstractmethod
    def start(self) -> None:
        """Start what does not run, and return when it takes connections."""

    @abstractmethod
    def stop(self) -> None:
        """Stop in good order and keep the data."""

    @abstractmethod
    def kill(self) -> None:
        """Crash: SIGKILL to all processes. Returns when they are gone. `start` recovers."""

    @abstractmethod
    def close(self) -> None:
        """Stop and remove the data."""

    def restart(self) -> None:
        self.stop()
        self.start()


class Unmanaged(Service):
    """What somebody else runs. `start` checks that it answers."""

    @property
    def running(self) -> bool:
        return True

    def stop(self) -> None:
        raise RuntimeError(self.unmanaged)

    def kill(self) -> None:
        raise RuntimeError(self.unmanaged)

    def close(self) -> None:
        """Nothing to release."""


class InContainer(Unmanaged):
    """What runs in a Docker container, through testcontainers."""

    unmanaged = "it runs in a container: stop and kill are for the embedded one"
    _container: Any

    def close(self) -> None:
        self._container.stop()


class Watchdog:
    """Sees to it that servers die with this process, even when that gets SIGKILL, and that their
    folder goes too.

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
        """The servers are stopped and the folder is removed: nothing is left to do.

        May run again.
        """
        if self._process.poll() is None:
            self._tell("done")
            self._process.communicate()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()


class ServerProcess(OneProcess, Startable):
    """A server of one (main) process with one port and a folder.

    It dies with the process that started it, even when that gets SIGKILL.
    """

    PORT_TAKEN: ClassVar[str] = "Address already in use"
    """What its log says when somebody else has the port."""
    STOP_SIGNAL: ClassVar[str] = "KILL"
    """What the watchdog sends."""

    def __init__(self) -> None:
        self.port = 0
        self._account: pwd.struct_passwd | None = None
        self._home: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None

    @abstractmethod
    def _command(self) -> Sequence[str]:
        """What to run, so that it listens on `port`; asked at each start."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether the server can be used."""

    def _initialise(self, home: Path) -> None:
        """Fill its new folder."""

    @property
    def home(self) -> Path:
        """Its folder, from the first start to `close`. Raises RuntimeError when there is none."""
        if self._home is None:
            raise RuntimeError(f"{self.label} has no folder yet: call start() first")
        return self._home

    @property
    def log(self) -> str:
        """All that the server has written to its log."""
        return log_in(self._home)

    def start(self) -> None:
        """Start the server, or resume it, and return when it answers.

        Raises RuntimeError if it does not.
        """
        if self.running:
            self.resume()
            return
        self._forget()  # it may have died by itself
        with named(self.label):
            self._start()

    def _start(self) -> None:
        if self._home is None:
            prefix = f"{type(self).__name__.lower()}-"
            self._home = Path(tempfile.mkdtemp(prefix=prefix, dir=temporary_folder(self._account)))
            self._watchdog = Watchdog(self._home, self.STOP_SIGNAL)
            try:
                self._initialise(self._home)
            except BaseException:
                self.close()
                raise
        for attempts in [0] if self.port else range(4, -1, -1):
            chosen = self.port
            self.port = self.port or free_port()
            try:
                self._launch()
                return
            except RuntimeError:
                self.port = chosen
                # nobody took the port in between
                if not attempts or self.PORT_TAKEN not in self.log:
                    raise

    def kill(self) -> None:
        """Crash the server: SIGKILL.

        Returns when it is gone. `start` starts it again on the same port.
        """
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()

    def close(self) -> None:
        """Stop the server and remove its folder."""
        self.kill()
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = None
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None

    def _as_account(self) -> dict[str, Any]:
        if self._account is None:
            return {}
        return {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}

    def _launch(self) -> None:
        assert self._watchdog is not None
        self._process = spawn(self._command(), self.home, **self._as_account())
        self._watchdog.watch(self._process.pid)
        with waiting_for(f"starting {self.label}"):
            self._await_answer()
        logger.info("%s runs on port %d as pid %d", self.label, self.port, self._process.pid)

    def _await_answer(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT
        while not (listens(self._process.pid, self.port) and self._answers()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(
                    f"{self.label} did not start; the end of its log:\n{self.log[-3000:]}"
                )
            time.sleep(0.02)

    def _forget(self) -> None:
        """The server is gone."""
        if self._process is not None:
            self._process = None
            assert self._watchdog is not None
            self._watchdog.watch()


class DatabaseServer(ServerProcess, Service):
    """An embedded server with data of its own."""

    PRODUCT: ClassVar[str]
    UNREACHABLE: ClassVar[type[Exception]]
    """What `connect` raises while it does not answer."""

    def __init__(self, settings: Mapping[str, str] | None) -> None:
        super().__init__()
        self.settings = dict(settings or {})
        self._secret = secrets.token_urlsafe(12)
        """The password of the user whom `_initialise` makes, and `_command` puts into `dsn`."""

    @abstractmethod
    def connect(self, dsn: str | None = None, **options: Any) -> Any: ...

    @property
    def label(self) -> str:
        return f"the {self.PRODUCT} server"

    def _stop(self, by: signal.Signals, why_not: str = "") -> None:
        if self._process is None:
            return
        self._process.send_signal(by)  # to none that has ended
        try:
            self._process.wait(START_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"{self.label} did not stop within {START_TIMEOUT:.0f} s {why_not}"
            ) from None
        self._forget()

    def _answers(self) -> bool:
        try:
            self.connect(connect_timeout=5).close()
        except self.UNREACHABLE:
            return False
        return True


def spawn(command: Sequence[str], home: Path, **account: Any) -> subprocess.Popen[bytes]:
    """A server that writes to the log in this folder."""
    with (home / "log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=home,
            start_new_session=True,
            **account,
        )


def log_in(home: Path | None) -> str:
    path = home and home / "log"
    return path.read_text(errors="replace") if path and path.exists() else ""


def run(
    command: Sequence[str],
    *,
    timeout: float = START_TIMEOUT,
    input: str = "",
    cwd: Path | str = "/",
    **account: Any,
) -> str:
    """What a program writes to its end.

    Raises RuntimeError, with the end of that, when it fails or does not end.
    """
    try:
        done = subprocess.run(
            command,
            input=input,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            cwd=cwd,
            **account,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[0]} did not end within {timeout:.0f} s") from None
    if done.returncode:
        raise RuntimeError(
            f"{command[0]} failed with status {done.returncode}:\n{done.stdout[-3000:]}"
        )
    return str(done.stdout)


def java(program: str = "java") -> str:
    """Java, or another of its programs: of JAVA_HOME, else the one on the PATH."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / program) if home else program


def small_jvm(home: Path, most: str) -> list[str]:
    """The beginning of the command line of a Java that starts quickly and takes at most this
    memory."""
    return [java(), "-Xms64m", f"-Xmx{most}", *QUICK_JVM, f"-Djava.io.tmpdir={home}"]


def freeze(pid: int) -> None:
    """SIGSTOP, and wait until every thread stands still: on a busy machine some go on for a
    moment."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 120
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} does not stop")
        time.sleep(0.01)


def docker_answers() -> bool:
    """Whether testcontainers is installed and reaches a Docker engine."""
    try:
        import docker

        return bool(docker.from_env(timeout=5).ping())
    except Exception as error:
        logger.debug("no Docker engine: %s", error)
        return False


def free_port() -> int:
    """Below the ports that outgoing connections get, so that none of those takes it while the
    server is down."""
    for port in random.sample(range(15000, 32000), 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port on 127.0.0.1 between 15000 and 32000")


def listens(pid: int, port: int) -> bool:
    """Whether this process has the port.

    Two that chose the same one may both find that a server answers there.
    """
    try:
        process = psutil.Process(pid)
        connections = (
            process.net_connections if hasattr(process, "net_connections") else process.connections
        )
        return any(
            each.status == psutil.CONN_LISTEN and each.laddr.port == port
            for each in connections("tcp")
        )
    except psutil.NoSuchProcess:
        return False


def alive(process: psutil.Process) -> bool:
    """A zombie that its new parent has not reaped yet is dead."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def unprivileged() -> pwd.struct_passwd | None:
    """The account for a server that root may not run: None for one's own, `nobody` when that is
    root."""
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
    raise RuntimeError(
        f"no temporary folder among {candidates} that user {account.pw_name!r} may enter: set "
        "TMPDIR"
    )
