"""A real MySQL or MariaDB for tests: `with MySQLServer() as server: server.connect()`.

MySQL runs from Debian's package (x86-64; fetched once, see `debian`), MariaDB from a jar
(`mariadb`). Both take a free loopback port and any user, can be stopped, restarted and crashed on
the same data and the same port, and die with the process that started them, even when that gets
SIGKILL.

`mysql_service` takes the server that the environment variable TEST_MYSQL_DSN names instead, MySQL
or MariaDB.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import pymysql

from sinks.mysql import xa
from sinks.mysql.connection import Connection, execute, is_mariadb, parameters, query, quoted
from sinks.testing.servers import debian
from sinks.testing.servers.common import (
    START_TIMEOUT,
    CannotBeHad,
    DatabaseServer,
    InContainer,
    Service,
    Unmanaged,
    docker_answers,
    run,
)
from sinks.testing.servers.maven import lock

PRIVILEGES = "SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, DROP, TRIGGER, CREATE TEMPORARY TABLES"
"""What docs/mysql.md lists for the user of a sink, on its database."""
_PASSWORD = "sesame"
_PACKAGE = "mysql-server-core"
_SUITE = "sid"
_BINARY = "usr/sbin/mysqld"
_SHARE = "usr/share/mysql"
_PLUGINS = "usr/lib/mysql/plugin"


class MySQLService(Service):
    """A running MySQL or MariaDB."""

    dsn: str
    """A mysql:// URL with user and password, without database. The user may do everything."""

    def connect(self, dsn: str | None = None, **options: Any) -> Connection:
        """A connection in autocommit mode, without database unless `dsn` names one."""
        chosen: dict[str, Any] = (
            {"autocommit": True, "charset": "utf8mb4"} | parameters(dsn or self.dsn) | options
        )
        return Connection(**chosen)

    @contextmanager
    def database(self) -> Iterator[str]:
        """The DSN of a fresh database, for a user of its own who has the privileges that
        docs/mysql.md lists and no others. The user `USER_admin`, with the same password, may do
        everything.

        Dropped at the end with all that is in it, with its users, and with the XA branches of this
        library in it. A server that the test left crashed is started for that.
        """
        name = f"test_{uuid.uuid4().hex[:12]}"
        with self.connect() as admin:
            execute(admin, f"CREATE DATABASE {quoted(name)} CHARACTER SET utf8mb4")
            dsn = self.add_user(admin, name, f"{PRIVILEGES} ON {quoted(name)}.*", name)
            self.add_user(admin, f"{name}_admin", "ALL ON *.*", name)
            if not is_mariadb(admin):
                execute(admin, f"GRANT XA_RECOVER_ADMIN ON *.* TO '{name}'@'%'")
        try:
            yield dsn
        finally:
            self.start()
            with self.connect() as admin:
                execute(admin, f"DROP USER IF EXISTS '{name}'@'%', '{name}_admin'@'%'")
                _end_sessions(admin, name)
                for identity in xa.prepared(admin, name):
                    # its session was killed and still ends it
                    with contextlib.suppress(pymysql.OperationalError):
                        execute(admin, f"XA ROLLBACK {xa.xid(identity, name)}")
                execute(admin, "SET SESSION lock_wait_timeout = 120")
                execute(admin, f"DROP DATABASE {quoted(name)}")

    def add_user(self, admin: Connection, user: str, privileges: str, database: str) -> str:
        """The DSN of a new user of a database.

        `privileges` come with what they are on: "SELECT ON shop.*".
        """
        execute(admin, f"CREATE USER '{user}'@'%' IDENTIFIED BY '{_PASSWORD}'")
        execute(admin, f"GRANT {privileges} TO '{user}'@'%'")
        return self.url(database, user, _PASSWORD)

    def url(self, database: str, user: str | None = None, password: str | None = None) -> str:
        """The DSN with a database, and another user if one is given."""
        url = urlsplit(self.dsn)
        parts = parameters(self.dsn)
        who = [user or parts["user"], parts.get("password", "") if password is None else password]
        account = ":".join(quote(part, safe="") for part in who)
        return urlunsplit(
            (
                "mysql",
                f"{account}@{parts['host']}:{parts['port']}",
                quote(database, safe=""),
                url.query,
                "",
            )
        )


def _end_sessions(admin: Connection, database: str) -> None:
    """End all sessions of a database, and return when they are gone, with their locks."""
    deadline = time.monotonic() + START_TIMEOUT
    sessions = "SELECT id FROM information_schema.processlist WHERE db = %s"
    while (left := query(admin, sessions, [database])) and time.monotonic() < deadline:
        for (session,) in left:
            with contextlib.suppress(pymysql.OperationalError):  # it may have gone by itself
                execute(admin, f"KILL {session}")
        time.sleep(0.01)


class EmbeddedMySQL(MySQLService, DatabaseServer):
    """A server of ours. `settings` are those of the server, such as innodb_buffer_pool_size."""

    PORT_TAKEN = "Can't start server: Bind on TCP/IP port"
    UNREACHABLE = pymysql.OperationalError

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        super().__init__({"innodb_buffer_pool_size": "64M"} | dict(settings or {}))

    def stop(self) -> None:
        self._stop(signal.SIGTERM)

    def _options(self) -> list[str]:
        return [
            f"--datadir={self.home / 'data'}",
            f"--tmpdir={self.home}",
            *(["--user=root"] if os.geteuid() == 0 else []),
            *(f"--{name}={value}" for name, value in self.settings.items()),
        ]

    def _listening(self) -> list[str]:
        files = [f"--socket={self.home / 'socket'}", f"--pid-file={self.home / 'pid'}"]
        return ["--bind-address=127.0.0.1", f"--port={self.port}", *files, "--skip-name-resolve"]


class MySQLServer(EmbeddedMySQL):
    """MySQL itself, with a binary log and GTIDs, as most installations have them, and LOAD DATA
    LOCAL switched on."""

    PRODUCT = "MySQL"

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        own = {
            "local_infile": "ON",
            "gtid_mode": "ON",
            "enforce_gtid_consistency": "ON",
            "mysqlx": "OFF",
        }
        own |= {"innodb_redo_log_capacity": "48M", "secure_file_priv": ""}
        own |= {"performance_schema": "OFF"}  # takes a third of a start
        # a login is proven by the server's key, which takes less time than TLS
        own |= {"tls_version": ""}
        super().__init__(own | dict(settings or {}))

    def _initialise(self, home: Path) -> None:
        self._install = mysql_installation()
        shutil.copytree(_new_data(self._install), home / "data")
        (home / "users.sql").write_text(
            "DROP USER IF EXISTS root@localhost;\n"  # needs no password
            f"CREATE USER IF NOT EXISTS 'tester'@'127.0.0.1' IDENTIFIED BY '{self._secret}';\n"
            "GRANT ALL ON *.* TO 'tester'@'127.0.0.1' WITH GRANT OPTION;\n"
        )

    def _command(self) -> list[str]:
        key = quote(str(self.home / "data" / "public_key.pem"), safe="/")
        self.dsn = f"mysql://tester:{self._secret}@127.0.0.1:{self.port}/?server_public_key={key}&ssl_disabled=true"
        users = f"--init-file={self.home / 'users.sql'}"
        return [*_program(self._install), *self._options(), *self._listening(), users]


def mysql_installation() -> Path:
    """The folder of MySQL's binary, messages and plugins, unpacked once into the cache.

    Raises CannotBeHad where they cannot be fetched.
    """
    try:
        files = [f"{_SHARE}/english", f"{_SHARE}/charsets", f"{_PLUGINS}/semisync_source.so"]
        return debian.program(_PACKAGE, _SUITE, _BINARY, files)
    except CannotBeHad as error:
        why, _, more = str(error).partition("\n")
        raise CannotBeHad(
            f"{why.rstrip('.')}; TEST_MYSQL_DSN may name a server that runs.\n{more}"
        ) from None


def _program(install: Path) -> list[str]:
    return [
        *debian.command(install, _BINARY),
        "--no-defaults",
        f"--lc-messages-dir={install / _SHARE}",
        f"--character-sets-dir={install / _SHARE / 'charsets'}",
        f"--plugin-dir={install / _PLUGINS}",
    ]


def _new_data(install: Path) -> Path:
    """The data of a server that has never run; making them takes seconds, a copy does not."""
    folder = install / "data"
    with lock(install / "data.lock"):
        if not folder.is_dir():
            made = install / "data.part"
            shutil.rmtree(made, ignore_errors=True)
            account = ["--user=root"] if os.geteuid() == 0 else []
            run([*_program(install), *account, "--initialize-insecure", f"--datadir={made}"])
            (made / "auto.cnf").unlink()  # each server makes an id of its own
            made.rename(folder)
    return folder


class ExternalMySQL(MySQLService, Unmanaged):
    """A server that somebody else runs. `database` needs the privilege to create databases."""

    unmanaged = "the server of TEST_MYSQL_DSN is not ours to stop"

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.start()

    def start(self) -> None:
        self.connect().close()


class ContainerMySQL(InContainer, ExternalMySQL):
    """MySQL in a container."""

    def __init__(self, image: str = "mysql:8.4") -> None:
        from testcontainers.community.mysql import MySqlContainer

        # the default plugin gives the whole password, which takes verified TLS
        native = "--mysql-native-password=ON --authentication-policy=mysql_native_password,,"
        self._container = MySqlContainer(image, username="root", password="tester").with_command(
            f"--local-infile=1 {native}"
        )
        self._container.start()
        host = self._container.get_container_host_ip()
        port = self._container.get_exposed_port(3306)
        super().__init__(f"mysql://root:tester@{host}:{port}/")


def mysql_can_be_had() -> bool:
    """Whether `mysql_service` finds a server."""
    return bool(os.environ.get("TEST_MYSQL_DSN")) or debian.available() or docker_answers()


def mysql_service(settings: Mapping[str, str] | None = None) -> MySQLService:
    """The server that TEST_MYSQL_DSN names, else MySQL with these settings: from Debian's package,
    or in a container. Where there is none of them, its start raises CannotBeHad."""
    if dsn := os.environ.get("TEST_MYSQL_DSN"):
        return ExternalMySQL(dsn)
    if not debian.available() and docker_answers():
        return ContainerMySQL()
    return MySQLServer(settings)
