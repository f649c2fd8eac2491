"""The real systems: what a job writes to, how it can be harmed from outside, and what others see there."""

from __future__ import annotations

import json
import random
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
import pyarrow as pa
import pymysql
from confluent_kafka import Consumer, Message, TopicPartition
from kafka import TopicPartition as KafkaPartition
from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaError
from psycopg.conninfo import conninfo_to_dict

from sinks.base import TwoPhaseCommitSink
from sinks.dead_letters import Refusal
from sinks.kafka import KafkaSink
from sinks.kafka.errors import patiently
from sinks.kafka.producer import TransactionalProducer
from sinks.mysql import MySQLSink, xa
from sinks.mysql.connection import Connection, parameters, query, quoted
from sinks.postgres import PostgresSink
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing.servers.kafka import VERSION, KafkaServer
from sinks.testing.servers.mariadb import MariaDBServer
from sinks.testing.servers.mysql import EmbeddedMySQL, MySQLServer
from sinks.testing.servers.postgres import PostgresServer, jdbc_url
from sinks.transaction import token
from tests.chaos.network import Network
from tests.kafka.reading import read, settled
from tests.kafka.tasks import AsRecords

Row = tuple[int, float]
"""Id and amount."""

UNREADABLE = (psycopg.Error, pymysql.Error, KafkaError, OSError, AssertionError)
"""What reading a server raises while it is down."""

LOCK_TIMEOUT = 2.0

EVOLUTION = "evolution"
"""The mode in which rows get one more column amid the input, and the table with them."""


class System:
    """A server of ours, which the drivers reach through a network that we can harm."""

    def __init__(self, server: Any) -> None:
        self.server, self.network = server, Network()

    def connected(self, address: str) -> str:
        """The same address through the network."""
        host, port = self.network.target
        return address.replace(f"{host}:{port}", f"{host}:{self.network.port}")

    def crash(self) -> None:
        self.server.kill()
        self.server.start()

    def close(self) -> None:
        self.network.close()
        self.server.close()


class Target(ABC):
    """One sink and its table or topic, fresh for a round. All but `sink` goes past the sink and past the network."""

    name: str
    system: System
    atomic = False
    """A checkpoint becomes visible as a whole."""
    hot = False
    """Upserts: see `Input`."""
    dead_letters = False
    """Bad rows go elsewhere, and a reader looks there, too: each counts once, wherever it is."""

    @abstractmethod
    def sink(self, rng: random.Random) -> TwoPhaseCommitSink[Any]:
        """As the next driver gets it."""

    @abstractmethod
    def rows(self) -> Sequence[Row]:
        """All that a reader sees now, in one snapshot where the system has such. One of `UNREADABLE` if it is down."""

    def final(self) -> Sequence[Row]:
        """`rows`, after all that is decided has been carried out."""
        return self.rows()

    @abstractmethod
    def in_doubt(self, job: str) -> Sequence[Any]:
        """What the system itself lists as pre-committed."""

    @abstractmethod
    def roll_back(self, job: str, rng: random.Random) -> None:
        """An operator ends one of these, or all of a sink's."""

    def set_back(self, job: str, rng: random.Random) -> Callable[[], None] | None:
        """Let the system's memory of the job be an older one, if there is a way; returns what undoes it."""
        return None

    def peer(self) -> dict[str, str]:
        """Options of Spark's own writer into the same table or topic, if there is one."""
        raise ValueError(f"Spark has no writer to compare with {self.name}")

    @abstractmethod
    def close(self) -> None:
        """Release what `rows` holds open."""


class PostgresTarget(Target):
    def __init__(self, system: System, dsn: str, mode: str) -> None:
        self.system, self.dsn, self.mode = system, dsn, mode
        self.name, self.atomic, self.hot = f"postgres_{mode}", mode != "prepared", mode == "upsert"
        self._reader: psycopg.Connection[Any] | None = None

    def sink(self, rng: random.Random) -> TwoPhaseCommitSink[Any]:
        options: dict[str, Any] = {"strategy": "prepared" if self.mode == "prepared" else "staged"}
        options |= {"schema_evolution": "add"} if self.mode == EVOLUTION else {}
        if self.hot:
            options |= {"mode": "upsert", "keys": ["id"], "order_by": rng.choice(("amount", None))}
        dsn = self.system.connected(self.dsn)
        return PostgresSink(dsn, self.name, create_table=True, lock_timeout=LOCK_TIMEOUT, **options)

    def rows(self) -> Sequence[Row]:
        try:
            if self._reader is None:
                self._reader = psycopg.connect(self.dsn, autocommit=True)
            return self._reader.execute(self._select(self._reader)).fetchall()
        except psycopg.errors.UndefinedTable:
            return []
        except psycopg.Error:
            self.close()
            raise

    def _select(self, reader: psycopg.Connection[Any]) -> str:
        return f"SELECT id, amount FROM {self.name}"

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def in_doubt(self, job: str) -> list[tuple[str, str]]:
        listing = (
            "SELECT 'ROLLBACK PREPARED', quote_literal(gid) FROM pg_prepared_xacts WHERE database = current_database()"
            " UNION ALL SELECT 'DROP TABLE', relname FROM pg_class"
            " WHERE relkind = 'r' AND relname ~ '^tpc_[0-9a-f]{20}$'"
        )
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            return connection.execute(listing).fetchall()

    def roll_back(self, job: str, rng: random.Random) -> None:
        found = self.in_doubt(job)
        chosen = rng.sample(found, rng.choice((1, len(found)))) if found else []
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            for how, what in chosen:
                with suppress(psycopg.Error):  # it has just ended, or somebody moves it
                    connection.execute("SET lock_timeout = '1s'")
                    connection.execute(f"{how} {what}")

    def peer(self) -> dict[str, str]:
        parts = conninfo_to_dict(self.dsn)
        return {
            "url": jdbc_url(self.dsn),
            "user": str(parts["user"]),
            "password": str(parts["password"]),
            "dbtable": self.name,
            "driver": "org.postgresql.Driver",
        }


BAD = 5
"""What is left of the id of a bad row, divided by 11: a target with dead letters refuses one in eleven."""
_IS_BAD = f"id % 11 = {BAD}"
_OF_ROWS = (("id", "SIGNED"), ("amount", "DOUBLE"))


class PostgresWithDeadLetters(PostgresTarget):
    dead_letters = True

    def __init__(self, system: System, dsn: str) -> None:
        super().__init__(system, dsn, "prepared")
        self.name, self._dead = "postgres_with_dead_letters", "dead_letters"
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(
                f"CREATE TABLE {self.name} (id bigint, name text, amount float8, CHECK (NOT ({_IS_BAD})))"
            )

    def sink(self, rng: random.Random) -> TwoPhaseCommitSink[Any]:
        dsn = self.system.connected(self.dsn)
        dead = PostgresSink(dsn, self._dead, create_table=True, lock_timeout=LOCK_TIMEOUT)
        return PostgresSink(dsn, self.name, lock_timeout=LOCK_TIMEOUT, dead_letters=dead)

    def _select(self, reader: psycopg.Connection[Any]) -> str:
        """A letter that is none counts for nothing, so its row is a lost one."""
        if reader.execute("SELECT to_regclass(%s)", [self._dead]).fetchone() == (None,):
            return super()._select(reader)
        return super()._select(reader) + (
            f" UNION ALL SELECT id, amount FROM {self._dead},"
            f' json_to_record("row"::json) AS bad (id bigint, amount float8) WHERE {_IS_BAD}'
        )


class SqlAlchemyTarget(PostgresTarget):
    """The tables of PostgreSQL, by SqlAlchemySink."""

    def sink(self, rng: random.Random) -> SqlAlchemySink:
        options: dict[str, Any] = {"schema_evolution": "add"} if self.mode == EVOLUTION else {}
        if self.hot:
            options = {"mode": "upsert", "keys": ["id"], "order_by": rng.choice(("amount", None))}
        url = self.system.connected(self.dsn).replace("postgresql://", "postgresql+psycopg://")
        return SqlAlchemySink(url, self.name, create_table=True, **options)


class MySQLTarget(Target):
    def __init__(self, system: System, dsn: str, mode: str) -> None:
        self.system, self.dsn, self.mode = system, dsn, mode
        self.name, self.atomic, self.hot = f"mysql_{mode}", mode != "xa", mode == "upsert"
        self._reader: Any = None

    def sink(self, rng: random.Random) -> MySQLSink:
        options: dict[str, Any] = {"strategy": "xa" if self.mode == "xa" else "staged"}
        options |= {"schema_evolution": "add"} if self.mode == EVOLUTION else {}
        if self.hot:
            options |= {"mode": "upsert", "keys": ["id"], "order_by": rng.choice(("amount", None))}
        dsn = self.system.connected(self.dsn)
        return MySQLSink(dsn, self.name, create_table=True, lock_timeout=LOCK_TIMEOUT, **options)

    def rows(self) -> Sequence[Row]:
        try:
            if self._reader is None:
                self._reader = self._connect()
            return [(id, amount) for id, amount in query(self._reader, self._select())]
        except pymysql.ProgrammingError:  # no such table yet, or no letters
            return []
        except (pymysql.Error, OSError):
            self.close()
            raise

    def _select(self) -> str:
        return f"SELECT id, amount FROM {self.name}"

    def close(self) -> None:
        if self._reader is not None:
            with suppress(pymysql.Error, OSError):
                self._reader.close()
            self._reader = None

    def in_doubt(self, job: str) -> list[str]:
        with closing(self._connect()) as connection:
            tables = query(
                connection,
                "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()"
                " AND table_name REGEXP '^tpc_[0-9a-f]{20}$'",
            )
            found = [f"DROP TABLE {quoted(name)}" for (name,) in tables]
            schema = str(parameters(self.dsn)["database"])
            return found + [f"XA ROLLBACK {xa.xid(branch, schema)}" for branch in xa.prepared(connection, schema)]

    def roll_back(self, job: str, rng: random.Random) -> None:
        found = self.in_doubt(job)
        chosen = rng.sample(found, rng.choice((1, len(found)))) if found else []
        with closing(self._connect()) as connection:
            query(connection, "SET SESSION lock_wait_timeout = 1")
            for statement in chosen:
                with suppress(pymysql.Error):  # it has just ended, or its session still holds it
                    query(connection, statement)

    def _connect(self) -> Any:
        return Connection(autocommit=True, charset="utf8mb4", **parameters(self.dsn))


class MySQLWithDeadLetters(MySQLTarget):
    dead_letters = True

    def __init__(self, system: System, dsn: str) -> None:
        super().__init__(system, dsn, "xa")
        self.name, self._dead = "mysql_with_dead_letters", "dead_letters"
        columns = f"(id bigint, name text, amount double, CHECK (NOT ({_IS_BAD})))"
        with closing(self._connect()) as connection:
            query(connection, f"CREATE TABLE {self.name} {columns}")

    def sink(self, rng: random.Random) -> MySQLSink:
        dsn = self.system.connected(self.dsn)
        dead = MySQLSink(dsn, self._dead, create_table=True, strategy="xa", lock_timeout=LOCK_TIMEOUT)
        return MySQLSink(dsn, self.name, strategy="xa", lock_timeout=LOCK_TIMEOUT, dead_letters=dead)

    def _select(self) -> str:
        """A letter that is none counts for nothing, so its row is a lost one."""
        id, amount = (f"CAST(JSON_VALUE(`row`, '$.{name}') AS {kind}) AS {name}" for name, kind in _OF_ROWS)
        letters = f"SELECT {id}, {amount} FROM {self._dead}"
        return f"{super()._select()} UNION ALL SELECT id, amount FROM ({letters}) AS bad WHERE {_IS_BAD}"


class KafkaTarget(Target):
    name = "kafka"

    def __init__(self, system: System, topic: str) -> None:
        self.system, self.topic, self.topics = system, topic, [topic]
        self._reader: Consumer | None = None
        self._seen: list[Message] = []

    def sink(self, rng: random.Random) -> KafkaSink:
        bootstrap = self.system.connected(self.system.server.bootstrap)
        return AsRecords(bootstrap, self.topic, name="kafka", transaction_timeout=rng.choice((2, 60)), timeout=10)

    def rows(self) -> Sequence[Row]:
        """What one read_committed consumer has got so far."""
        if self._reader is None:
            options = {
                **self.system.server.client_options(),
                "group.id": "reader",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "log_level": 0,
            }
            self._reader = Consumer(options)
            self._reader.assign([TopicPartition(topic, number, 0) for topic in self.topics for number in range(3)])
        for message in self._reader.consume(10_000, timeout=0.05):
            if message.error() is None:
                self._seen.append(message)
        return self._of(self._seen)

    def _of(self, messages: Sequence[Message]) -> Sequence[Row]:
        return [_row(message.value()) for message in messages]

    def final(self) -> Sequence[Row]:
        settled(self.system.server.bootstrap)
        options = self.system.server.client_options()
        return self._of([message for topic in self.topics for message in read(options, topic)])

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def in_doubt(self, job: str) -> list[str]:
        listed = self._asked(lambda admin: admin.list_transactions(state_filters=["Ongoing"]))
        return [one.transactional_id for ones in listed.values() for one in ones]

    def _asked(self, question: Callable[[KafkaAdminClient], Any]) -> Any:
        """Of a client that knows no coordinator from before; again, while one moves."""

        def once() -> Any:
            with closing(KafkaAdminClient(bootstrap_servers=self.system.server.bootstrap)) as admin:
                return question(admin)

        return patiently(once, 30)

    def roll_back(self, job: str, rng: random.Random) -> None:
        sink = KafkaSink(self.system.server.bootstrap, self.topic, name="kafka")
        with closing(sink):
            found = list(sink.in_doubt(job))
            for identity in rng.sample(found, rng.choice((1, len(found)))) if found else []:
                with suppress(Exception):  # committed just now
                    sink.abort(identity)

    def set_back(self, job: str, rng: random.Random) -> Callable[[], None] | None:
        """Its offsets alone; the records stay. An offset that an open transaction carries would lose to one put now."""
        if self.in_doubt(job):
            return None
        settled(self.system.server.bootstrap)
        group, place = f"tpc.{token(job)}.{token(self.name)}", KafkaPartition(self.topic, 0)
        now = self._asked(lambda admin: admin.list_group_offsets(group)[group].get(place))
        if now is None:
            return None

        def put(offset: int) -> None:
            self._asked(lambda admin: admin.alter_group_offsets(group, {place: now._replace(offset=offset)}))

        put(rng.randint(max(1, now.offset - 3), now.offset))
        return lambda: put(now.offset)

    def peer(self) -> dict[str, str]:
        return {"kafka.bootstrap.servers": self.system.server.bootstrap, "topic": self.topic}


class KafkaWithDeadLetters(KafkaTarget):
    """The topic has no partition for a bad row; a reader looks at it and at the topic of letters."""

    dead_letters = True

    def __init__(self, system: System, topic: str, dead: str) -> None:
        super().__init__(system, topic)
        self._dead = dead
        self.topics = [topic, dead]

    def sink(self, rng: random.Random) -> KafkaSink:
        bootstrap, timeout = self.system.connected(self.system.server.bootstrap), rng.choice((2, 60))
        dead = KafkaSink(bootstrap, self._dead, name="letters", transaction_timeout=timeout, timeout=10)
        options: dict[str, Any] = {"transaction_timeout": timeout, "timeout": 10, "dead_letters": dead}
        return AsPlacedRecords(bootstrap, self.topic, name="kafka", **options)


class AsPlacedRecords(AsRecords):
    """Bad rows ask for a partition that is not there."""

    def _records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        bad = [99 if id % 11 == BAD else id % 3 for id in batch["id"].to_pylist()]
        wanted = pa.array(bad, pa.int32())
        return super()._records(batch).append_column("partition", wanted)

    def write_good_rows(
        self, transaction: TransactionalProducer, batch: pa.RecordBatch, most: int
    ) -> Sequence[Refusal]:
        return super().write_good_rows(transaction, self._records(batch), most)


def _row(value: bytes | None) -> Row:
    row = json.loads(value or b"")
    return row["id"], row["amount"]


class NoServer:
    port = 0

    def kill(self) -> None:
        pass

    start = close = kill


class Services:
    """Starts each server when a rig asks for it first, and stops all at the end. `kafka`: the version of that."""

    def __init__(self, kafka: str = VERSION) -> None:
        self.kafka = kafka
        self._stack = ExitStack()
        self._systems: dict[str, System] = {}

    def __enter__(self) -> Services:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def system(self, name: str) -> System:
        if name not in self._systems:
            self._systems[name] = system = _brokers(self.kafka) if name == "kafka" else _SYSTEMS[name]()
            self._stack.callback(system.close)
        return self._systems[name]


def _database(server: PostgresServer | EmbeddedMySQL) -> System:
    system = System(server)
    server.start()
    system.network.target = ("127.0.0.1", server.port)
    return system


def _brokers(version: str) -> System:
    """Clients connect to the address that the broker tells them, so it has to tell that of the network."""
    system = System(None)
    told = {
        "advertised.listeners": f"CLIENT://127.0.0.1:{system.network.port}",
        "inter.broker.listener.name": "CLIENT",
    }
    system.server = KafkaServer(told, version=version)
    system.server.start()
    system.network.target = ("127.0.0.1", system.server.broker().port)
    return system


_SYSTEMS: Mapping[str, Callable[[], System]] = {
    "postgres": lambda: _database(PostgresServer({"max_prepared_transactions": "64"})),
    "mysql": lambda: _database(MySQLServer()),
    "mariadb": lambda: _database(MariaDBServer()),
    "folder": lambda: System(NoServer()),
}


@contextmanager
def _table(
    server: str,
    plain: Callable[[System, str, str], Target],
    with_letters: Callable[[System, str], Target],
    services: Services,
    mode: str,
) -> Iterator[Target]:
    system = services.system(server)
    with system.server.database() as dsn:
        target = with_letters(system, dsn) if mode == "dead-letters" else plain(system, dsn, mode)
        with closing(target):
            yield target


@contextmanager
def _topic(services: Services, mode: str) -> Iterator[Target]:
    system = services.system("kafka")
    topic = f"chaos_{uuid.uuid4().hex[:12]}"
    with ExitStack() as stack:
        # of a clock that is wrong: retention would remove what it dates back, and Kafka 4 refuses what it dates forth
        any_time = {"retention.ms": "-1"}
        if not services.kafka.startswith("3."):
            any_time["message.timestamp.after.max.ms"] = str(2**63 - 1)
        stack.enter_context(system.server.topic(3, any_time, name=topic))
        target = KafkaTarget(system, topic)
        if mode == "dead-letters":
            dead = stack.enter_context(system.server.topic(3, any_time, name=f"{topic}_dead"))
            target = KafkaWithDeadLetters(system, topic, dead)
        yield stack.enter_context(closing(target))


@contextmanager
def _lake(kind: str, services: Services, mode: str) -> Iterator[Target]:
    from tests.chaos.lakes import LakeTarget  # 0.4 s of processor time

    with TemporaryDirectory() as folder:
        yield LakeTarget(services.system("folder"), kind, Path(folder), mode)


@contextmanager
def _files(services: Services, mode: str) -> Iterator[Target]:
    from tests.chaos.files import FolderTarget

    with TemporaryDirectory() as folder:
        yield FolderTarget(services.system("folder"), Path(folder) / "rows")


MODES: Mapping[str, tuple[str, ...]] = {
    "postgres": ("prepared", "staged", "upsert", "dead-letters", EVOLUTION),
    "kafka": ("append", "dead-letters"),
    "mysql": ("xa", "staged", "upsert", "dead-letters", EVOLUTION),
    "mariadb": ("xa", "staged", "upsert", "dead-letters", EVOLUTION),
    "sqlalchemy": ("staged", "upsert", EVOLUTION),
    "delta": ("append", EVOLUTION),
    "iceberg": ("append", EVOLUTION),
    "files": ("append",),
    "all": ("append", "mixed", "lakes"),
}
"""The rigs: a sink in each of its modes, or several in one checkpoint."""

_MAKERS: Mapping[str, Callable[[Services, str], Any]] = {
    "postgres": partial(_table, "postgres", PostgresTarget, PostgresWithDeadLetters),
    "mysql": partial(_table, "mysql", MySQLTarget, MySQLWithDeadLetters),
    "mariadb": partial(_table, "mariadb", MySQLTarget, MySQLWithDeadLetters),
    "sqlalchemy": partial(_table, "postgres", SqlAlchemyTarget, PostgresWithDeadLetters),
    "kafka": _topic,
    "delta": partial(_lake, "delta"),
    "iceberg": partial(_lake, "iceberg"),
    "files": _files,
}
_ALL = {
    "append": {"kafka": "append", "postgres": "prepared", "mysql": "xa"},
    "mixed": {"postgres": "staged", "kafka": "append", "mysql": "staged"},
    "lakes": {"delta": "append", "kafka": "append", "iceberg": "append", "files": "append", "postgres": "staged"},
}

WORLDS = {
    "cut": 6,
    "delay": 2,
    "operator": 8,
    "disk": 4,
    "clock": 4,
    "source": 3,
    "second": 4,
    "crash": 1,
    "half-open": 1,
}
"""Weights of the faults beside kills."""


def worlds(sink: str) -> dict[str, int]:
    return WORLDS | ({"expire": 2} if sink in ("kafka", "all") else {})


@contextmanager
def targets(services: Services, sink: str, mode: str) -> Iterator[list[Target]]:
    """Fresh tables and topics for one round."""
    parts = _ALL[mode] if sink == "all" else {sink: mode}
    with ExitStack() as stack:
        yield [stack.enter_context(_MAKERS[name](services, one)) for name, one in parts.items()]
