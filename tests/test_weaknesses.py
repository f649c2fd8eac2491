"""What the built-in sinks tell of servers that may lose committed rows, on real ones."""

from __future__ import annotations

import contextlib

import psycopg
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType

from coordinator import CheckpointConfig, guarantee
from coordinator.storage import open_storage
from sinks.kafka import KafkaSink
from sinks.mysql import MySQLSink
from sinks.postgres import PostgresSink
from sinks.testing.servers.kafka import KafkaService
from sinks.testing.servers.mariadb import MySQLService
from sinks.testing.servers.postgres import postgres_service


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
            future.result(30)
        [weakness] = sink.weaknesses()
        assert "unclean.leader.election.enable = true" in weakness
    with contextlib.closing(KafkaSink(kafka.bootstrap, "not-there")) as sink:
        assert list(sink.weaknesses()) == []
