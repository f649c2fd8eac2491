"""What the built-in sinks tell of servers that may lose committed rows, on real ones."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

import psycopg
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType
from psycopg.conninfo import make_conninfo
from pymysql.constants import COMMAND

from coordinator import CheckpointConfig, guarantee
from coordinator.storage import open_storage
from sinks.kafka import KafkaSink
from sinks.mysql import MySQLSink
from sinks.postgres import PostgresSink
from sinks.testing.servers.kafka import KafkaService
from sinks.testing.servers.mariadb import MariaDBServer, MySQLService
from sinks.testing.servers.postgres import postgres_service
from sinks.testing.table import eventually


def test_postgres() -> None:
    with postgres_service({"fsync": "off"}) as server, server.database() as dsn:
        with psycopg.connect(dsn) as connection:
            connection.execute("CREATE UNLOGGED TABLE quick (id bigint)")
            connection.execute("CREATE TABLE plain (id bigint)")
        fsync = "the server has fsync = off, so a crash of its machine may lose rows"
        with contextlib.closing(PostgresSink(dsn, table="plain")) as sink:
            assert list(sink.weaknesses()) == [fsync]
        with contextlib.closing(PostgresSink(dsn, table="quick")) as sink:
            assert list(sink.weaknesses()) == [fsync, "public.quick is UNLOGGED, so a crash of the server empties it"]
        with contextlib.closing(PostgresSink(dsn, table="not_there_yet")) as sink:
            assert list(sink.weaknesses()) == [fsync]


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
def replica(server: MySQLService, dsn: str, *, semi_synchronous: bool = False) -> Iterator[None]:
    """What a replica says to its server, which has one from then on: COM_BINLOG_DUMP (manual, "Replication
    Protocol")."""
    connection = server.connect(dsn)
    with connection.cursor() as cursor:
        cursor.execute("SET @master_binlog_checksum = 'NONE', @mariadb_slave_capability = 4")
        if semi_synchronous:
            cursor.execute("SET @rpl_semi_sync_slave = 1")
        cursor.execute("SHOW MASTER STATUS")
        [(file, position, *_)] = cursor.fetchall()
    try:
        dump = struct.pack("<IHI", position, 0, 77) + file.encode()
        connection._execute_command(COMMAND.COM_BINLOG_DUMP, dump)  # type: ignore[attr-defined]
        yield
    finally:
        connection._force_close()  # type: ignore[attr-defined]


def test_replicas_of_mysql() -> None:
    with (
        MariaDBServer({"log_bin": "binlog", "server_id": "1"}) as server,
        server.database() as dsn,
        contextlib.closing(MySQLSink(dsn, "t")) as sink,
        contextlib.closing(open_storage(dsn)) as storage,
    ):
        assert [*sink.weaknesses(), *storage.weaknesses()] == []
        with replica(server, dsn):
            eventually(lambda: bool(sink.weaknesses()))
            [rows], [records] = sink.weaknesses(), storage.weaknesses()
            assert rows == "its replicas are asynchronous, so a failover may lose rows"
            assert records == "its replicas are asynchronous, so a failover may lose the newest records"
            with server.connect(dsn) as connection:
                connection.cursor().execute("SET GLOBAL rpl_semi_sync_master_enabled = ON")
            with replica(server, dsn, semi_synchronous=True):
                eventually(lambda: not sink.weaknesses())
                assert storage.weaknesses() == []


def test_checkpoint_storage_in_postgres() -> None:
    with (
        postgres_service({"fsync": "off"}) as server,
        server.database() as dsn,
        contextlib.closing(open_storage(dsn)) as storage,
    ):
        fsync = "the server has fsync = off, so a crash of its machine may lose records"
        assert storage.weaknesses() == [fsync]
        with psycopg.connect(dsn) as connection:
            connection.execute("ALTER TABLE checkpoint_storage SET UNLOGGED")
        unlogged = "the table checkpoint_storage is UNLOGGED, so a crash of the server empties it"
        assert storage.weaknesses() == [fsync, unlogged]
        promise = guarantee.promise("job", CheckpointConfig(), storage, {})
        assert promise.reasons == tuple(f"checkpoint storage {storage.uri}: {why}" for why in (fsync, unlogged))


def test_checkpoint_storage_in_mysql(mariadb: MySQLService, mysql_database: str) -> None:
    with contextlib.closing(open_storage(mysql_database)) as storage:
        assert storage.weaknesses() == []
        connection = mariadb.connect(mysql_database)
        connection.cursor().execute("ALTER TABLE checkpoint_storage ENGINE = MyISAM")
        connection.close()
        [engine] = storage.weaknesses()
        assert "is of the engine MyISAM" in engine


def test_mysql(mariadb: MySQLService, mysql_database: str) -> None:
    with contextlib.closing(MySQLSink(mysql_database, "t")) as sink:
        assert list(sink.weaknesses()) == []
        connection = mariadb.connect(mysql_database)
        cursor = connection.cursor()
        cursor.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
        try:
            assert list(sink.weaknesses()) == [
                "the server has innodb_flush_log_at_trx_commit = 2, so a crash of its machine may lose rows"
            ]
        finally:
            cursor.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
            connection.close()


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
