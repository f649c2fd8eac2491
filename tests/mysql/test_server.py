"""The MariaDB that the other tests stand on."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pymysql
import pytest

from sinks.mysql.server import query
from sinks.testing.servers.mariadb import ExternalMySQL, MariaDBServer, mysql_service
from sinks.testing.table import eventually
from tests.mysql.play import Observer


@pytest.fixture(scope="module")
def server() -> Iterator[MariaDBServer]:
    """A server of this module's own, to be killed."""
    with MariaDBServer({"max_connections": "33"}) as server:
        yield server


def prepare(observer: Observer) -> None:
    observer.run("CREATE TABLE t (id int) ENGINE=InnoDB")
    for command in (
        "XA START 'tpc.x', 'y'",
        "INSERT INTO t VALUES (1)",
        "XA END 'tpc.x', 'y'",
        "XA PREPARE 'tpc.x', 'y'",
    ):
        observer.run(command)
    observer.close()


def test_settings_reach_the_server_and_commits_are_flushed(server: MariaDBServer) -> None:
    with server.connect() as connection:
        assert query(connection, "SELECT @@max_connections, @@innodb_flush_log_at_trx_commit") == [(33, 1)]


def test_the_password_is_asked_for(server: MariaDBServer) -> None:
    with pytest.raises(pymysql.OperationalError, match="Access denied"):
        server.connect(password="wrong")
    with pytest.raises(pymysql.OperationalError, match="Access denied"):
        server.connect(user="root", password="")


@pytest.mark.parametrize("how", ["kill", "restart"])
def test_prepared_branches_outlive_the_server_until_their_database_goes(server: MariaDBServer, how: str) -> None:
    with server.database() as dsn:
        prepare(Observer(dsn))
        port, pid = server.port, server.pid
        if how == "kill":
            server.kill()
            assert not server.running
            server.start()
        else:
            server.restart()
        assert (server.port, server.running) == (port, True)
        assert server.pid != pid
        with server.connect() as connection:
            assert [row[3] for row in query(connection, "XA RECOVER")] == [b"tpc.xy"]
    with server.connect() as connection:
        assert query(connection, "XA RECOVER") == []
        assert query(connection, "SHOW DATABASES LIKE 'test\\_%%'") == []


def test_a_crashed_server_is_started_to_drop_a_database(server: MariaDBServer) -> None:
    with server.database():
        server.kill()
    assert server.running


def test_nothing_is_left_when_it_is_closed() -> None:
    with MariaDBServer() as server:
        assert server._home is not None
        home, pid = server._home, server.pid
        assert "ready for connections" in server.log
    assert not home.exists()
    assert not psutil.pid_exists(pid)
    with pytest.raises(RuntimeError, match="not running"):
        server.pid  # noqa: B018


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "from sinks.testing.servers.mariadb import MariaDBServer; s = MariaDBServer(); s.start();"
        "print(s.pid, s._home, flush=True); input()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdin is not None
    pid, home = parent.stdout.readline().split()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    parent.stdin.close()
    eventually(lambda: not Path(home).exists())
    assert not psutil.pid_exists(int(pid))


def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(RuntimeError, match="no_such_setting"):
        MariaDBServer({"no_such_setting": "1"}).start()


def test_the_server_of_the_environment_is_not_ours_to_stop(
    server: MariaDBServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_MYSQL_DSN", server.dsn)
    with mysql_service() as external:
        assert isinstance(external, ExternalMySQL)
        with external.database() as dsn:
            Observer(dsn).close()
        for stop in (external.stop, external.kill):
            with pytest.raises(RuntimeError, match="not ours"):
                stop()
    assert server.running
