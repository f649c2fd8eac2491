"""The services that the other tests stand on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import psycopg
import pytest

from sinks.testing.servers import common
from sinks.testing.servers.postgres import (
    VERSIONS,
    ExternalPostgres,
    PostgresServer,
    PostgresService,
    jdbc_url,
    postgres_service,
)
from sinks.testing.servers.s3 import S3Server


@pytest.fixture
def server(own_postgres: PostgresServer) -> PostgresServer:
    return own_postgres


def _gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _wait_until_gone(*pids: int, seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while not all(map(_gone, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_settings_reach_the_server(postgres: PostgresService, postgres_unprepared: PostgresService) -> None:
    for service, prepared in ((postgres, "64"), (postgres_unprepared, "0")):
        with service.connect() as connection:
            assert connection.execute("SHOW max_prepared_transactions").fetchone() == (prepared,)


def test_fsync_is_on(server: PostgresServer) -> None:
    with server.connect() as connection:
        assert connection.execute("SHOW fsync").fetchone() == ("on",)


def test_password_is_asked_for(server: PostgresServer) -> None:
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        server.connect(password="wrong")


def test_connections_autocommit_unless_told_otherwise(server: PostgresServer) -> None:
    with server.connect() as connection:
        assert connection.autocommit
    with server.connect(autocommit=False) as connection:
        assert not connection.autocommit


def test_kill_keeps_what_was_committed_or_prepared(server: PostgresServer) -> None:
    with server.database() as dsn:
        connection = server.connect(dsn)
        connection.execute("CREATE TABLE t (a int)")
        connection.execute("INSERT INTO t VALUES (1)")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO t VALUES (2)")
        connection.execute("PREPARE TRANSACTION 'pre-committed'")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO t VALUES (3)")

        port, postmaster = server.port, server.pid
        family = [child.pid for child in psutil.Process(postmaster).children(recursive=True)]
        assert connection.info.backend_pid in family
        server.kill()
        assert not server.running
        assert all(map(_gone, [postmaster, *family]))
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
        with pytest.raises(RuntimeError, match=r"call start\(\) first"):
            _ = server.pid

        server.start()
        assert server.port == port
        assert server.pid != postmaster
        assert "was not properly shut down; automatic recovery in progress" in server.log
        with server.connect(dsn) as again:
            assert again.execute("SELECT a FROM t").fetchall() == [(1,)]
            assert again.execute("SELECT gid FROM pg_prepared_xacts").fetchall() == [("pre-committed",)]
            again.execute("COMMIT PREPARED 'pre-committed'")
            assert again.execute("SELECT a FROM t ORDER BY a").fetchall() == [(1,), (2,)]


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_restart_on_the_same_port(server: PostgresServer, mode: str) -> None:
    port, postmaster = server.port, server.pid
    server.restart(mode)
    assert server.port == port
    assert server.pid != postmaster
    server.connect().close()


def test_start_after_the_postmaster_died_by_itself(server: PostgresServer) -> None:
    postmaster = server.pid
    family = [child.pid for child in psutil.Process(postmaster).children(recursive=True)]
    os.kill(postmaster, signal.SIGQUIT)
    assert _wait_until_gone(postmaster, *family)
    server.start()
    server.connect().close()


def test_start_of_a_running_server_changes_nothing(server: PostgresServer) -> None:
    postmaster = server.pid
    server.start()
    assert server.pid == postmaster


def test_databases_are_apart_and_dropped_with_their_prepared_transactions(server: PostgresServer) -> None:
    with server.database() as one, server.database() as other:
        left_open = server.connect(one)
        left_open.execute("CREATE TABLE t (a int)")
        left_open.execute("BEGIN")
        left_open.execute("INSERT INTO t VALUES (1)")
        left_open.execute("PREPARE TRANSACTION 'it''s left'")
        with server.connect(other) as connection:
            assert connection.execute("SELECT to_regclass('t')").fetchone() == (None,)
    with server.connect() as admin:
        assert admin.execute("SELECT datname FROM pg_database WHERE datname LIKE 'test%'").fetchall() == []
        assert admin.execute("SELECT gid FROM pg_prepared_xacts").fetchall() == []
    left_open.close()


def test_database_is_dropped_after_a_test_that_left_the_server_crashed(server: PostgresServer) -> None:
    with server.database():
        server.kill()
    with server.connect() as admin:
        assert admin.execute("SELECT datname FROM pg_database WHERE datname LIKE 'test%'").fetchall() == []


LARGE = pytest.mark.large


@pytest.mark.parametrize(
    "version", ["13", *(pytest.param(version, marks=LARGE) for version in VERSIONS if version > "13")]
)
def test_each_major_version_starts(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_POSTGRES_VERSION", version)
    with PostgresServer() as server, server.database() as dsn, server.connect(dsn) as connection:
        assert connection.info.server_version // 10_000 == int(version)


def test_a_version_that_is_not_there_fails_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server only could not be had, they would be skipped."""
    monkeypatch.setenv("TEST_POSTGRES_VERSION", "12")
    with pytest.raises(ValueError, match="no Postgres 12 for tests, but 13, 14"):
        PostgresServer()


def test_bad_setting_is_told_with_the_log() -> None:
    with pytest.raises(RuntimeError, match="unrecognized configuration parameter"), PostgresServer({"no_such": "1"}):
        pass


def test_nothing_is_left_after_exit() -> None:
    with PostgresServer() as server:
        home = server.home
        family = [server.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True))]
        assert home.is_dir()
    assert _wait_until_gone(*family)
    assert not home.exists()


def test_nothing_is_left_after_sigkill_of_the_owner() -> None:
    program = (
        "import time; from sinks.testing.servers.postgres import PostgresServer; server = PostgresServer();"
        "server.start(); print(server.pid, server.home, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    try:
        assert owner.stdout is not None
        pid, home = owner.stdout.readline().split()
        postmaster = psutil.Process(int(pid))
        processes = [*postmaster.children(recursive=True), postmaster, *psutil.Process(owner.pid).children()]
        assert len(processes) > 3
    finally:
        owner.kill()
        owner.communicate()
    assert _wait_until_gone(*(process.pid for process in processes))
    assert not Path(home).exists()


def test_server_from_the_environment(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_POSTGRES_DSN", server.dsn)
    with postgres_service({"max_prepared_transactions": "64"}) as service:
        assert isinstance(service, ExternalPostgres)
        assert (service.dsn, service.user, service.password) == (server.dsn, server.user, server.password)
        with service.database() as dsn, service.connect(dsn) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
        with pytest.raises(RuntimeError, match="not ours to stop"):
            service.restart()
    assert server.running
    assert isinstance(postgres_service({"max_prepared_transactions": "9"}), PostgresServer)


def test_jdbc_url_holds_no_password(server: PostgresServer) -> None:
    assert server.jdbc_url == f"jdbc:postgresql://127.0.0.1:{server.port}/postgres"
    with server.database() as dsn:
        assert server.password in dsn
        assert server.password not in jdbc_url(dsn)


def test_a_port_that_another_server_has_taken_meanwhile(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another test process had chosen the same one. That server answers, too."""
    chosen = iter([s3.port, common.free_port()])
    monkeypatch.setattr(common, "free_port", lambda: next(chosen))
    with S3Server() as other:
        assert other.port != s3.port
        assert other.running
