"""Real services for all tests. A service is started once, by the first test that asks for it."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from coordinator.operations import heartbeat
from sinks.testing.servers.common import free_port
from sinks.testing.servers.kafka import KafkaService, kafka_service
from sinks.testing.servers.mariadb import MariaDBServer
from sinks.testing.servers.mysql import MySQLService, mysql_can_be_had, mysql_service
from sinks.testing.servers.postgres import PostgresServer, PostgresService, postgres_service
from sinks.testing.servers.registry import ExternalRegistry, RegistryServer, schema_registry
from sinks.testing.servers.s3 import S3Server
from tests import jvm, leaks, reaper, servers, short_loop, signals, temporary
from tests.spark.workers import CONNECT, FILES, WORKERS

# Python workers must be those of this environment, also in sessions that a test starts itself.
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
signals.prepare()
temporary.prepare()
jvm.prepare()
heartbeat._LAST_WORD = 300.0  # tests look at once at what a driver has said last; a busy machine may take long for it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reverse", action="store_true", help="run the tests in reversed order")
    parser.addoption("--require-servers", action="store_true", help="fail each test whose server cannot be had")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        reaper.start()
    config.pluginmanager.register(leaks.Leaks())
    config.pluginmanager.register(servers.Servers(required=config.getoption("--require-servers")))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spare the short loop the files that it runs nothing of: to import them takes longer than some of its tests."""
    if config.option.markexpr != "short" or collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    return None if str(collection_path.relative_to(Path(__file__).parent)) in short_loop.FILES else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if marker := short_loop.marker(item):
            item.add_marker(marker)
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if whole and (unknown := short_loop.unknown(items)):
        raise pytest.UsageError(f"tests/short_loop.py names what is no test: {', '.join(unknown)}")
    _in_turn(items)
    if config.getoption("--reverse"):
        items.reverse()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays to the end: the garbage collector need not look at it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _in_turn(items: list[pytest.Item]) -> None:
    """First what one test process has to run as a whole, which takes longest, and the longest files, so that at the end
    no process of `make test` waits for the other. Of the rest, files that keep a processor busy with Spark are in turn
    with others, most of which wait for servers."""
    busy = {item.path for item in items if "spark" in _module(item.nodeid) or item.get_closest_marker("slow")}
    scopes: dict[bool, dict[str, int]] = {True: {}, False: {}}
    """The place of each in its row."""
    for item in items:
        row = scopes[item.path in busy]
        row.setdefault(_scope(item.nodeid), len(row))
    items.sort(
        key=lambda item: (
            TOGETHER.index(_together(item.nodeid)),
            LONGEST.index(_module(item.nodeid)) if _module(item.nodeid) in LONGEST else len(LONGEST),
            scopes[item.path in busy][_scope(item.nodeid)],
            item.path not in busy,
        )
    )


def _module(nodeid: str) -> str:
    return nodeid.partition(".py::")[0].removeprefix("tests/")


LONGEST = (
    "postgres/test_conformance",
    "kafka/test_reuse",
    "spark/test_full_disk",
    "spark/test_executors",
    "kafka/test_conformance",
    "iceberg/test_conformance",
    "files/test_conformance",
    "install/test_wheel",
    "kafka/test_crashes",
    "postgres/test_sink",
    "mysql/test_types",
    "kafka/test_sink",
    "sqlalchemy_sink/test_servers",
    "mysql/test_sink",
    "sqlalchemy_sink/test_conformance",
    "cli/test_runbook",
    "postgres/test_crashes",
    "mysql/test_messages",
    "lakes/test_lakes",
    "protocol/test_memories",
    "mysql/test_conformance",
    "postgres/test_messages",
    "kafka/test_memory",
    "simulation/test_kit",
)
"""More than twelve seconds of processor time for each file, or class of a conformance kit; the longest first."""


SESSION = frozenset(
    {
        "files/test_readers",
        "restart/test_run",
        "savepoint/test_spark",
        "spark/test_arrow",
        "spark/test_connect",
        "spark/test_controls",
        "spark/test_internals",
        "spark/test_layout",
        "spark/test_left_by_format",
        "spark/test_newer_spark",
        "spark/test_one_pass",
        "spark/test_setup",
        "spark/test_shared",
        "storage/test_hdfs",
        "test_config",
    }
)
"""What asks for the session `spark`."""

JOBS = frozenset({"spark/test_killed", "spark/test_mended_letters", "spark/test_spark"})
"""What runs jobs in a driver that goes on after them, besides each class `TestJobs`."""

TOGETHER = ("the session", "jobs", "")


def _together(nodeid: str) -> str:
    """Where each other test process would have to start Spark too."""
    if _module(nodeid) in JOBS or "::TestJobs::" in nodeid:
        return "jobs"
    return "the session" if _module(nodeid) in SESSION else ""


def _scope(nodeid: str) -> str:
    """What one test process runs as a whole: a file, a class of a conformance kit, or a family of schedules."""
    file = nodeid.partition("::")[0]
    if file.startswith(("tests/simulation/test_families", "tests/simulation/test_seeds")):
        return nodeid
    return _together(nodeid) or (nodeid.rpartition("::")[0] if file.endswith("_conformance.py") else file)


SERVERS = {
    "kafka": ("kafka/", "services/test_kafka", "cli/test_doctor", "cli/test_runbook"),
    "mysql": ("mysql/", "storage/test_failures"),
    "registry": ("kafka/test_avro", "kafka/test_registry", "kafka/test_serializers"),
    "both": ("cli/test_in_doubt", "cli/test_verify", "jobs", "test_several_sinks", "test_weaknesses"),
}
"""Where the tests are that ask for one of these fixtures."""

AT_MOST = {"kafka": 2, "mysql": 2, "registry": 1}
"""Test processes that start such a server, while the others have something else to do."""


def _servers(scope: str) -> set[str]:
    found = {name for name, places in SERVERS.items() if scope.removeprefix("tests/").startswith(places)}
    return found - {"both"} | {"kafka", "mysql"} if "both" in found else found


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            self.workqueue.move_to_end(self._next(node), last=False)
            super()._assign_work_unit(node)

        def _next(self, node: Any) -> str:
            """What needs the servers that this process has; else the first that needs no further one too many."""
            running = {each: set().union(*map(_servers, work)) for each, work in self.assigned_work.items()}
            started = Counter(server for servers in running.values() for server in servers)

            def unsuited(scope: str) -> tuple[bool, bool]:
                new = _servers(scope) - running[node]
                return any(started[server] >= AT_MOST[server] for server in new), bool(new) or not _servers(scope)

            return str(min(self.workqueue, key=unsuited))

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresService]:
    """PostgreSQL that takes prepared transactions."""
    with postgres_service({"max_prepared_transactions": "64"}) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_unprepared() -> Iterator[PostgresService]:
    """PostgreSQL as most servers are: PREPARE TRANSACTION is off."""
    with postgres_service({"max_prepared_transactions": "0"}) as server:
        yield server


@pytest.fixture(scope="session")
def own_postgres(postgres: PostgresService) -> Iterator[PostgresServer]:
    """One that tests may stop and kill; each leaves it running."""
    if isinstance(postgres, PostgresServer):
        yield postgres
        return
    with PostgresServer({"max_prepared_transactions": "64"}) as server:
        yield server


@pytest.fixture
def pg_database(postgres: PostgresService) -> Iterator[str]:
    """The DSN of a fresh database on `postgres`."""
    with postgres.database() as dsn:
        yield dsn


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaService]:
    """A broker that ends transactions soon after their time is up."""
    with kafka_service() as server:
        yield server


@pytest.fixture
def kafka_topic(kafka: KafkaService) -> Iterator[str]:
    """A fresh topic of three partitions."""
    with kafka.topic(partitions=3) as topic:
        yield topic


@pytest.fixture(scope="session")
def mysql_server() -> Iterator[MySQLService]:
    """MySQL, or the server of TEST_MYSQL_DSN."""
    with mysql_service() as server:
        yield server


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDBServer]:
    with MariaDBServer() as server:
        yield server


@pytest.fixture
def mysql(request: pytest.FixtureRequest) -> MySQLService:
    """MySQL or, where it cannot be had, MariaDB."""
    server: MySQLService = request.getfixturevalue("mysql_server" if mysql_can_be_had() else "mariadb")
    return server


@pytest.fixture
def mysql_database(mysql: MySQLService) -> Iterator[str]:
    """The DSN of a fresh database on `mysql`."""
    with mysql.database() as dsn:
        yield dsn


@pytest.fixture(scope="session")
def registry() -> Iterator[RegistryServer | ExternalRegistry]:
    """A schema registry. Nobody stops it; who wants to has one of their own."""
    with schema_registry() as server:
        yield server


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """An S3-compatible server. Nobody stops it; who wants to has one of their own."""
    with S3Server() as server:
        yield server


@pytest.fixture
def s3_bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a fresh bucket on `s3`, which the environment variables lead to."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3.make_bucket()}"


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A quiet local session on two cores, beside a Spark Connect server."""
    folder: Path = tmp_path_factory.mktemp("spark")
    session = (
        SparkSession.builder.master("local[2]")
        .appName("tests")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraJavaOptions", f"-Dderby.system.home={folder}")
        .config("spark.local.dir", str(folder / "local"))
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.streaming.forceDeleteTempCheckpointLocation", "true")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config(map=CONNECT)
        .config("spark.connect.grpc.binding.address", "127.0.0.1")
        .config("spark.connect.grpc.binding.port", f"{free_port()}")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config(map=WORKERS | FILES)
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
