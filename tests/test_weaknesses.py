"""What the built-in sinks tell of servers that may lose committed rows, on real ones."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType
from psycopg.conninfo import make_conninfo
from pymysql.constants import COMMAND

from coordinator import CheckpointConfig
from coordinator.protocol import guarantee
from coordinator.storage import open_storage
from sinks.kafka import KafkaSink
from sinks.mysql import MySQLSink
from sinks.mysql.connection import execute, is_mariadb, parameters
from sinks.optional import Diagnosable
from sinks.postgres import PostgresSink
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing.servers import debian
from sinks.testing.servers.kafka import KafkaService
from sinks.testing.servers.mariadb import MariaDBServer
from sinks.testing.servers.mysql import EmbeddedMySQL, MySQLServer, MySQLService
from sinks.testing.servers.postgres import PostgresService, postgres_service
from sinks.testing.table import eventually


def sinks(dsn: str, table: str) -> Iterator[Diagnosable[Any]]:
    """All that write to such a table."""
    for kind in (PostgresSink, SqlAlchemySink) if dsn.startswith("postgresql") else (MySQLSink,):
        sink: Diagnosable[Any] = kind(dsn, table)
        with contextlib.closing(sink):
            yield sink


@pytest.fixture(scope="module")
def unsynced() -> Iterator[PostgresService]:
    with postgres_service({"fsync": "off"}) as server:
        yield server


def test_postgres(unsynced: PostgresService) -> None:
    with unsynced.database() as dsn:
        with psycopg.connect(dsn) as connection:
            connection.execute("CREATE UNLOGGED TABLE quick (id bigint)")
            connection.execute("CREATE TABLE plain (id bigint)")
        fsync = "the server has fsync = off, so a crash of its machine may lose what was committed"
        for table in ("plain", "not_there_yet"):
            for sink in sinks(dsn, table):
                assert list(sink.weaknesses()) == [fsync]
        for sink in sinks(dsn, "quick"):
            assert list(sink.weaknesses()) == [fsync, "public.quick is UNLOGGED, so a crash of the server empties it"]


@contextlib.contextmanager
def standby(dsn: str) -> Iterator[None]:
    """What a standby says to its server, which has one from then on."""
    connection = psycopg.pq.PGconn.connect(make_conninfo(dsn, replication="true").encode())
    try:
        position = connection.exec_(b"IDENTIFY_SYSTEM").get_value(0, 2)
        assert position is not None
        assert connection.exec_(b"START_REPLICATION PHYSICAL " + position).status == psycopg.pq.ExecStatus.COPY_BOTH
        yield
    finally:
        connection.finish()


def test_standbys_of_postgres() -> None:
    with (
        postgres_service({}) as server,
        server.database() as dsn,
        contextlib.closing(PostgresSink(dsn, table="t")) as sink,
        contextlib.closing(open_storage(dsn)) as storage,
        psycopg.connect(dsn, autocommit=True) as connection,
    ):
        assert [*sink.weaknesses(), *storage.weaknesses()] == []
        connection.execute("SET synchronous_commit = local")  # this standby answers nothing
        with standby(dsn):
            [rows], [records] = sink.weaknesses(), storage.weaknesses()
            assert rows.startswith("its standbys are asynchronous (synchronous_standby_names is empty)")
            assert records.startswith("its standbys are asynchronous")
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
            eventually(lambda: not sink.weaknesses())
            connection.execute("ALTER ROLE CURRENT_USER SET synchronous_commit = local")
            sink.close()
            [rows] = sink.weaknesses()
            assert rows.startswith("its standbys are asynchronous (synchronous_commit is local)")
        connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
        connection.execute("SELECT pg_reload_conf()")


@contextlib.contextmanager
def replica(server: MySQLService, *, semi_synchronous: bool = False) -> Iterator[None]:
    """What a replica says to its server, which has one from then on: COM_BINLOG_DUMP (manual, "Replication
    Protocol")."""
    connection = server.connect()
    with connection.cursor() as cursor:
        cursor.execute("SET @master_binlog_checksum = 'NONE', @mariadb_slave_capability = 4")
        if semi_synchronous:
            cursor.execute("SET @rpl_semi_sync_slave = 1, @rpl_semi_sync_replica = 1")
        cursor.execute("SHOW MASTER STATUS" if is_mariadb(connection) else "SHOW BINARY LOG STATUS")
        [(file, position, *_)] = cursor.fetchall()
    try:
        dump = struct.pack("<IHI", position, 0, 77) + file.encode()
        connection._execute_command(COMMAND.COM_BINLOG_DUMP, dump)  # type: ignore[attr-defined]
        yield
    finally:
        connection._force_close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("server", "semi_synchronous"),
    [
        pytest.param(
            MySQLServer(),
            "INSTALL PLUGIN rpl_semi_sync_source SONAME 'semisync_source.so';"
            " SET GLOBAL rpl_semi_sync_source_enabled = ON",
            id="MySQL",
            marks=pytest.mark.skipif(not debian.available(), reason="MySQL is fetched from Debian's archive"),
        ),
        pytest.param(
            MariaDBServer({"log_bin": "binlog", "server_id": "1", "sync_binlog": "1"}),
            "SET GLOBAL rpl_semi_sync_master_enabled = ON",
            id="MariaDB",
        ),
    ],
)
def test_replicas_of_mysql(server: EmbeddedMySQL, semi_synchronous: str) -> None:
    with server, server.database() as dsn:
        with server.connect() as admin:  # who else has replicas is not for every user to see
            execute(admin, f"GRANT PROCESS ON *.* TO {parameters(dsn)['user']}")
        with (
            contextlib.closing(MySQLSink(dsn, "t")) as sink,
            contextlib.closing(open_storage(dsn)) as storage,
        ):
            assert [*sink.weaknesses(), *storage.weaknesses()] == []
            with replica(server):
                eventually(lambda: bool(sink.weaknesses()))
                [rows], [records] = sink.weaknesses(), storage.weaknesses()
                assert rows == "its replicas are asynchronous, so a failover may lose what was committed"
                assert records == "its replicas are asynchronous, so a failover may lose what was committed"
            with server.connect() as admin:
                for statement in semi_synchronous.split("; "):
                    execute(admin, statement)
            with replica(server, semi_synchronous=True):
                eventually(lambda: not sink.weaknesses())
                assert storage.weaknesses() == []


def test_checkpoint_storage_in_postgres(unsynced: PostgresService) -> None:
    with (
        unsynced.database() as dsn,
        contextlib.closing(open_storage(dsn)) as storage,
    ):
        fsync = "the server has fsync = off, so a crash of its machine may lose what was committed"
        assert storage.weaknesses() == [fsync]
        with psycopg.connect(dsn) as connection:
            connection.execute("ALTER TABLE checkpoint_storage SET UNLOGGED")
        unlogged = "public.checkpoint_storage is UNLOGGED, so a crash of the server empties it"
        assert storage.weaknesses() == [fsync, unlogged]
        promise = guarantee.compute_guarantee("job", CheckpointConfig(), storage, {})
        assert promise.weaknesses == tuple(f"checkpoint storage {storage.uri}: {why}" for why in (fsync, unlogged))


def test_checkpoint_storage_in_mysql(mysql: MySQLService, mysql_database: str) -> None:
    with contextlib.closing(open_storage(mysql_database)) as storage:
        assert storage.weaknesses() == []
        connection = mysql.connect(mysql_database)
        connection.cursor().execute("ALTER TABLE checkpoint_storage ENGINE = MyISAM")
        connection.close()
        [engine] = storage.weaknesses()
        assert "is of the engine MyISAM" in engine


def test_mysql(mysql: MySQLService, mysql_database: str) -> None:
    for sink in sinks(mysql_database, "t"):
        assert list(sink.weaknesses()) == []
        connection = mysql.connect()
        cursor = connection.cursor()
        cursor.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
        try:
            [weakness] = sink.weaknesses()
            assert weakness.startswith("the server has innodb_flush_log_at_trx_commit = 2, so a crash of its machine")
        finally:
            cursor.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
            connection.close()


def test_a_binary_log_of_mysql_that_lags_behind(mysql_server: MySQLService) -> None:
    with (
        mysql_server.database() as dsn,
        contextlib.closing(MySQLSink(dsn, "t")) as sink,
        mysql_server.connect() as connection,
    ):
        cursor = connection.cursor()
        cursor.execute("SET GLOBAL sync_binlog = 0")
        try:
            [reason] = sink.weaknesses()
            assert reason.startswith("the server has sync_binlog = 0, so a crash of its machine may lose")
        finally:
            cursor.execute("SET GLOBAL sync_binlog = 1")


def test_kafka(kafka: KafkaService, kafka_topic: str) -> None:
    with contextlib.closing(KafkaSink(kafka.bootstrap, kafka_topic)) as sink:
        assert list(sink.weaknesses()) == []
        entry = ConfigEntry("unclean.leader.election.enable", "true", incremental_operation=AlterConfigOpType.SET)
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
        resource = ConfigResource(ResourceType.TOPIC, kafka_topic, incremental_configs=[entry])
        for future in admin.incremental_alter_configs([resource]).values():
            future.result(120)
        [weakness] = sink.weaknesses()
        assert "unclean.leader.election.enable = true" in weakness
    with contextlib.closing(KafkaSink(kafka.bootstrap, "not-there")) as sink:
        assert list(sink.weaknesses()) == []
