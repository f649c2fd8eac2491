from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from coordinator.cli.doctor import _packages, of_storage
from coordinator.operations.jobfile import load_job
from coordinator.storage import open_storage
from coordinator.storage.base import MemoryStorage
from sinks.diagnosis import Severity
from sinks.mysql.connection import is_mariadb
from sinks.testing.servers.kafka import KafkaService
from sinks.testing.servers.postgres import PostgresService
from tests.cli.conftest import TABLE
from tests.cli.jobs import Job
from tests.mysql.observer import Observer

Findings = list[dict[str, Any]]


def about(findings: Findings, subject: str, severity: str | None = None) -> str:
    return "\n".join(
        f"{one['message']} => {one['fix']}"
        for one in findings
        if one["subject"].startswith(subject) and severity in (None, one["severity"])
    )


def test_a_sound_job(file_job: Job) -> None:
    findings = file_job.json("doctor")
    assert all(set(one) == {"subject", "severity", "message", "fix"} for one in findings)
    assert {one["severity"] for one in findings} == {"ok"}
    assert "one winner in each of 5 races" in about(findings, "storage file://")
    assert "an empty transaction was pre-committed and aborted" in about(findings, "sink files")
    assert "0 error(s), 0 warning(s)" in file_job.cli("doctor").stdout
    assert open_storage((file_job.folder / "checkpoints").as_uri()).list("") == []
    assert list((file_job.folder / "rows").iterdir()) == [], "a sink's proof of the abort is purged"


def test_findings_are_lines_that_a_terminal_takes(file_job: Job) -> None:
    file_job.file.write_text(file_job.file.read_text().replace("checkpoints", "check points"))
    first, *lines, last = file_job.cli("doctor").stdout.splitlines()
    assert re.match(r"ok       packages: \S", first)
    assert all(re.match(r"(ok       |warning  | {9})(\S.{,90}|\S+)$", line) for line in lines), lines
    assert any(line.startswith("         To fix it: nothing, before that start") for line in lines)
    assert last == "0 error(s), 1 warning(s)"


def test_a_sink_that_has_another_name_now(file_job: Job) -> None:
    file_job.run(1)
    file_job.file.write_text(file_job.file.read_text() + '\nname = "renamed"\n')
    findings = file_job.json("doctor", code=1)
    assert "written by sink(s) ['files'], which this coordinator does not have" in about(findings, "memories", "error")


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_where_a_lake_table_is(tmp_path: Path, kind: str) -> None:
    (tmp_path / "lake").mkdir()
    table = f'uri = "{tmp_path}/lake/rows"'
    if kind == "iceberg":
        catalog = f'type = "sql", uri = "sqlite:///{tmp_path}/catalog.db", warehouse = "file://{tmp_path}/lake"'
        table = f'table = "shop.rows"\ncatalog = {{ {catalog} }}'
    job = Job(tmp_path, f'type = "{kind}"\nname = "rows"\ncreate_table = true\n{table}')
    assert "the first batch creates it" in about(job.json("doctor"), "sink rows", "ok")
    job.run(1)
    assert f"{tmp_path}/lake/" in about(job.json("doctor"), "sink rows", "ok")


@pytest.mark.parametrize(
    ("module", "version", "told"),
    [
        ("pandas", None, "cannot run a sink's tasks without pandas"),
        ("pandas", "1.5.3", "1.5.3"),
        ("pyarrow", "4.0.0", "4.0.0"),
        ("pyspark", "3.4.4", "pyspark 3.4.4 is too old"),
    ],
)
def test_packages_that_do_not_suit_spark(
    file_job: Job, module: str, version: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version is None:
        monkeypatch.setitem(sys.modules, module, None)
    else:
        monkeypatch.setattr(f"{module}.__version__", version)
    found = list(_packages())
    assert told in " ".join(one.message for one in found if one.severity is Severity.ERROR)
    assert all(one.fix.startswith("pip install") for one in found if one.severity is Severity.ERROR)
    with pytest.raises(ImportError, match=re.escape(told)):
        load_job(str(file_job.file))


def test_postgres(pg_job: Job, pg_database: str) -> None:
    findings = pg_job.json("doctor")
    told = about(findings, "sink orders")
    assert "PostgreSQL 1" in told
    assert "public.orders can be written by strategy prepared" in told
    assert "max_prepared_transactions = 64 are free" in told
    assert "the clock of the server agrees" in told
    assert "an empty transaction was pre-committed and aborted" in told
    with psycopg.connect(pg_database) as connection:
        assert connection.execute("SELECT count(*) FROM tpc_ledger WHERE job <> '-'").fetchone() == (0,)
    pg_job.file.write_text(pg_job.file.read_text().replace('"prepared"', '"staged"'))
    told = about(pg_job.json("doctor"), "sink orders")
    assert "an empty transaction was pre-committed and aborted" in told
    with psycopg.connect(pg_database) as connection:
        staging = connection.execute("SELECT relname FROM pg_class WHERE relname ~ '^tpc_[0-9a-f]{20}$'").fetchall()
        assert staging == []
        assert connection.execute("SELECT count(*) FROM tpc_ledger WHERE job <> '-'").fetchone() == (0,)


def test_postgres_that_cannot_do_it(
    tmp_path: Path, postgres_unprepared: PostgresService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with postgres_unprepared.database() as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        monkeypatch.setenv("ORDERS_DSN", dsn)
        connection.execute(TABLE)
        section = 'type = "postgres"\ndsn = "${ORDERS_DSN}"\ntable = "orders"\n'
        errors = about(Job(tmp_path, section + 'strategy = "prepared"').json("doctor", code=1), "sink orders", "error")
        assert "max_prepared_transactions" in errors
        assert "restart the server" in errors
        findings = Job(tmp_path, section).json("doctor")
        assert "so the sink uses the strategy staged" in about(findings, "sink orders")

        connection.execute("DROP ROLE IF EXISTS reader")
        connection.execute("CREATE ROLE reader LOGIN PASSWORD 'hidden-word'")
        login = conninfo_to_dict(dsn)
        place = f"postgresql://reader:hidden-word@{login['host']}:{login['port']}/{login['dbname']}"
        monkeypatch.setenv("ORDERS_DSN", place)
        result = Job(tmp_path, section).cli("doctor", "--json", code=1)
        assert "GRANT" in result.stdout
        assert "hidden-word" not in result.output
        connection.execute("DROP ROLE reader")


def test_postgres_out_of_reach_or_without_table(tmp_path: Path, pg_database: str) -> None:
    section = 'type = "postgres"\ndsn = "postgresql://u:hidden-word@127.0.0.1:1/d"\ntable = "orders"\n'
    result = Job(tmp_path, section).cli("doctor", "--json", code=1)
    assert "cannot connect to PostgreSQL at host=127.0.0.1" in result.stdout
    assert "hidden-word" not in result.output
    section = f'type = "postgres"\ndsn = "{pg_database}"\ntable = "ordres"\n'
    errors = about(Job(tmp_path, section).json("doctor", code=1), "sink ordres", "error")
    assert "there is no table public.ordres" in errors
    assert "create it, or set create_table = true" in errors
    findings = Job(tmp_path, section + "create_table = true").json("doctor")
    assert "will be created" in about(findings, "sink ordres")


def test_an_old_prepared_transaction_is_reported(
    pg_job: Job, pg_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinks.postgres.prepared._OLD_SECONDS", 0)
    with psycopg.connect(pg_database, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute("INSERT INTO orders VALUES (1)")
        connection.execute("PREPARE TRANSACTION 'somebody''s'")
        warnings = about(pg_job.json("doctor", "--strict", code=1), "sink orders", "warning")
        connection.execute("ROLLBACK PREPARED 'somebody''s'")
    assert "ROLLBACK PREPARED 'somebody''s'" in warnings


def test_mysql(tmp_path: Path, mysql_database: str) -> None:
    connection = Observer(mysql_database).connection
    product = "MariaDB 1" if is_mariadb(connection) else "MySQL 9"
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE orders (id bigint PRIMARY KEY, name text) ENGINE=InnoDB")
        section = f'type = "mysql"\ndsn = "{mysql_database}"\ntable = "orders"\n'
        for strategy in ("xa", "staged"):
            told = about(Job(tmp_path, f'{section}strategy = "{strategy}"').json("doctor"), "sink orders")
            assert product in told
            assert f"can be written by strategy {strategy}" in told
            assert "an empty transaction was pre-committed and aborted" in told
            cursor.execute("SELECT count(*) FROM tpc_ledger WHERE job <> '-'")
            assert cursor.fetchone() == (0,)
        cursor.execute("XA RECOVER")
        assert not [row for row in cursor.fetchall() if b"doctor" in bytes(str(row), "utf-8")]
        cursor.execute("CREATE TABLE plain (id bigint) ENGINE=MyISAM")
        findings = Job(tmp_path, section.replace('"orders"', '"plain"')).json("doctor", code=1)
        assert "which has no transactions" in about(findings, "sink plain", "error")
    connection.close()


def test_kafka(tmp_path: Path, kafka: KafkaService, kafka_topic: str) -> None:
    section = f'type = "kafka"\nbootstrap_servers = "{kafka.bootstrap}"\ntopic = "{kafka_topic}"\n'
    findings = Job(tmp_path, section).json("doctor")
    told = about(findings, f"sink {kafka_topic}")
    assert "a transaction was begun and aborted" in told
    assert "1 broker(s), Kafka 4" in told
    assert "the transaction log has one copy" in about(findings, f"sink {kafka_topic}", "warning")
    findings = Job(tmp_path, section + "transaction_timeout = 90000").json("doctor", code=1)
    errors = about(findings, f"sink {kafka_topic}", "error")
    assert "the sink's transaction_timeout is above the broker's transaction.max.timeout.ms: lower it" in errors
    findings = Job(tmp_path, section.replace(kafka_topic, "no-such-topic")).json("doctor", code=1)
    assert "there is no topic 'no-such-topic'" in about(findings, "sink no-such-topic", "error")


def test_sqlite_and_a_database_as_storage(tmp_path: Path, pg_database: str) -> None:
    section = f'type = "sqlalchemy"\nurl = "sqlite:///{tmp_path}/a.db"\ntable = "t"\ncreate_table = true\n'
    job = Job(tmp_path, section)
    storage = (tmp_path / "checkpoints").as_uri()
    job.file.write_text(job.file.read_text().replace(storage, pg_database))
    job.run(1)
    findings = job.json("doctor")
    assert "an empty transaction was pre-committed and aborted" in about(findings, "sink t")
    assert "the clock of the storage agrees" in about(findings, "storage postgresql")


def test_a_storage_that_does_not_keep_its_word() -> None:
    class Forgetful(MemoryStorage):
        def put_if_absent(self, key: str, value: bytes) -> bool:
            self._values[key] = value
            return True

        def clock(self) -> float | None:
            return time.time() - 3600

    storage = Forgetful("doctor-forgetful")
    storage.uri = "test:"
    (finding,) = of_storage(storage)
    assert finding.severity is Severity.ERROR
    assert "8 of 8 writers of one key won" in finding.message

    class Late(MemoryStorage):
        def clock(self) -> float | None:
            return time.time() - 3600

    findings = {finding.severity: finding.message for finding in of_storage(Late("doctor-late"))}
    assert "is 3600 s behind" in findings[Severity.WARNING]
    assert "gone with the driver" in findings[Severity.ERROR]
