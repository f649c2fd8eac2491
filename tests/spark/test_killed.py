"""SIGKILL to driver, JVM and Python workers at once, under every sink and at every step.

A start of Spark costs more than all that a query does here. So many queries run in one driver, each stands still where
it is to be hit, and when all of them do, the whole process group is killed; in `make test-all` twice. Then they go on
to their ends. What needs Kafka as a source, and no kill of the driver, follows in the driver that is left.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coordinator import CheckpointConfig, CheckpointListener, Replay, Step
from coordinator.operations.inspection.balance import Verdict, take_balance
from coordinator.protocol.ports import sinks_by_name
from coordinator.storage import open_storage
from coordinator.store.job_store import JobStore
from examples.custom_sink import FileSink
from sinks.base import TwoPhaseCommitSink
from sinks.kafka import KafkaSink
from sinks.mysql import MySQLSink
from sinks.postgres import PostgresSink
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing import Hooked
from sinks.testing.driver import die
from sinks.testing.servers.kafka import KafkaServer, KafkaService
from sinks.testing.servers.mysql import MySQLService
from sinks.testing.servers.postgres import PostgresService
from sinks.testing.servers.spark_kafka import spark_kafka_jars
from sinks.testing.table import Database
from tests.kafka.reading import read, settled
from tests.kafka.tasks import anew
from tests.mysql.observer import Observer as MySQLObserver
from tests.postgres.observer import Observer as PostgresObserver
from tests.spark.job import KILLED, KillGroupTogether, Once, SparkJob, write_input
from tests.spark.kafka import (
    JOB,
    PARTITIONS,
    RECORDS,
    IntoKafka,
    IntoPostgres,
    KafkaSource,
    Target,
    every_record_once,
    finish,
    into_either,
    reading,
    write_records,
)
from tests.spark.kafka import into_kafka as into_kafka
from tests.spark.kafka import source as source
from tests.spark.kafka import target as target
from tests.spark.test_shared import with_random_id
from tests.spark.test_spark import ROCKSDB, count_by_remainder, visible


@dataclass
class Kill:
    step: Step
    checkpoint_id: int
    in_doubt: int
    """Transactions that it leaves."""
    rows: int
    """Those that are visible then, by as many ids, or counted."""


@dataclass
class Query:
    sinks: Sequence[TwoPhaseCommitSink[Any]]
    kills: tuple[Kill, Kill]
    found: Callable[[], Mapping[int, int]]
    """How often an id is visible, or how many ids were counted under a key."""
    options: Mapping[str, Any] = field(default_factory=dict)
    only: int = 1
    """Which of the kills it is, if there is one."""
    worker_killed: bool = False
    """In the end, between pre-commit and ack."""
    after_the_first: Callable[[], None] = lambda: None
    alone: Callable[[Callable[..., SparkJob]], None] | None = None
    """How it goes on after the second, if not with the others."""

    def expected(self, ids: Sequence[int]) -> Mapping[int, int]:
        """What `found` says in the end; `ids` are in the files."""
        if self.options.get("shape") is count_by_remainder:
            return Counter(id % 10 for id in ids)
        return Counter(range(RECORDS) if "source" in self.options else ids)


@dataclass
class Place:
    """Of one query. A database of its own: pruning a ledger waits for the prepared branches of others that share it."""

    name: str
    folder: Path
    postgres: Database
    mysql: Database
    kafka: KafkaService
    topic: str
    source: KafkaSource

    def files(self, name: str = "rows") -> FileSink:
        (self.folder / name).mkdir()
        return FileSink(self.folder / name, name=name)

    def table(self, **options: Any) -> PostgresSink:
        return PostgresSink(self.postgres.dsn, "orders", create_table=True, **options)

    def mysql_table(self, **options: Any) -> MySQLSink:
        return MySQLSink(self.mysql.dsn, "orders", create_table=True, **options)

    def in_table(self, database: Database) -> Mapping[int, int]:
        return Counter(database.ids("orders"))

    def counted(self, database: Database) -> Mapping[int, int]:
        return dict(database.visible("orders"))

    def in_topic(self) -> Mapping[int, int]:
        settled(self.kafka.bootstrap)
        messages = read(self.kafka.client_options(), self.topic)
        return Counter(json.loads(message.value() or b"")["id"] for message in messages)


def in_files(*sinks: FileSink) -> Mapping[int, int]:
    first, *others = (Counter(row["id"] for row in visible(sink)) for sink in sinks)
    assert all(other == first for other in others)
    return first


COUNTED = {"shape": count_by_remainder, "output_mode": "update"}


def one_sink(place: Place) -> Query:
    sink = place.files()
    return Query([sink], (Kill(Step.PRE_COMMITTED, 1, 3, 150), Kill(Step.DONE, 1, 0, 300)), lambda: in_files(sink))


def two_sinks(place: Place) -> Query:
    sinks = [place.files(), place.files("others")]
    return Query(sinks, (Kill(Step.COMPLETE, 1, 6, 150), Kill(Step.COMMITTED, 2, 0, 450)), lambda: in_files(*sinks))


def state(place: Place, conf: Mapping[str, str] = ROCKSDB) -> Query:
    """R10: the restart has nothing to write for that batch, yet Spark needs it to run for the state store."""
    sink = place.files()

    def newest() -> dict[int, int]:
        found: dict[int, int] = {}
        for row in visible(sink):
            found[row["key"]] = max(found.get(row["key"], 0), row["count"])
        assert len(visible(sink)) == 10 * sum(found.values()) / 150, "each checkpoint emits each key once"
        return found

    kills = Kill(Step.DONE, 1, 0, 300), Kill(Step.COMPLETE, 2, 2, 300)
    return Query([sink], kills, newest, {"conf": conf} | COUNTED, only=0)


def default_state(place: Place) -> Query:
    return state(place, {})


def withdraw_one(sink: FileSink, job: str) -> None:
    sink.abort(min(sink.in_doubt(job), key=str))


def lost(place: Place) -> Query:
    """A transaction is replayed from the same partition."""
    sink = place.files()
    kills = Kill(Step.COMPLETE, 1, 3, 150), Kill(Step.REPLAY_COMPLETE, 1, 1, 250)
    return Query([sink], kills, lambda: in_files(sink), after_the_first=lambda: withdraw_one(sink, place.name))


def spooled(place: Place) -> Query:
    """A transaction is replayed from rows that were kept: a second computation gives others."""
    sink = place.table(strategy="prepared")
    kills = Kill(Step.COMPLETE, 1, 3, 150), Kill(Step.REPLAY_COMPLETE, 1, 1, 250)
    options = {
        "transforms": {sink.name: with_random_id},
        "config": CheckpointConfig(replay=Replay.SPOOL),
    }

    def withdraw() -> None:
        sink.abort(next(iter(sink.in_doubt(place.name))))

    return Query([sink], kills, lambda: place.in_table(place.postgres), options, only=0, after_the_first=withdraw)


ONE_PARTITION = {"spark.sql.files.maxPartitionBytes": "100000000", "spark.sql.files.minPartitionNum": "1"}


def other_layout(place: Place) -> Query:
    """R13: a replay under another partition layout stops, and names the settings."""
    sink = place.files()
    kills = Kill(Step.PRE_COMMITTED, 0, 3, 0), Kill(Step.COMPLETE, 1, 3, 150)

    def refused(job: Callable[..., SparkJob]) -> None:
        withdraw_one(sink, place.name)
        other = job(conf=ONE_PARTITION)
        assert other.run() == 1
        assert "was written in 3 partitions, and the batch now has 1" in other.output()
        last = job()
        assert last.run() == 0, last.output()

    return Query([sink], kills, lambda: in_files(sink), alone=refused)


def one_partition(place: Place) -> Query:
    """R13: what was written as one partition is written again as one, though the batch now has three."""
    sink = place.table(strategy="prepared")
    kills = Kill(Step.PRE_COMMITTED, 1, 1, 150), Kill(Step.COMPLETE, 2, 1, 300)

    def replayed(job: Callable[..., SparkJob]) -> None:
        sink.abort(next(iter(sink.in_doubt(place.name))))
        last = job(conf={})
        assert last.run() == 0, last.output()

    return Query([sink], kills, lambda: place.in_table(place.postgres), {"conf": ONE_PARTITION}, alone=replayed)


AT_ONCE = Kill(Step.PRE_COMMITTED, 0, 3, 0), Kill(Step.COMPLETE, 1, 3, 150)


def postgres(place: Place) -> Query:
    sink = place.table(strategy="prepared")
    return Query([sink], AT_ONCE, lambda: place.in_table(place.postgres), worker_killed=True)


def dead_letters(place: Place) -> Query:
    """The table takes no id that is divisible by 7. A worker is killed between the two pre-commits of its task."""
    place.postgres.run("CREATE TABLE orders (id bigint CHECK (id % 7 <> 0), name text, amount float8)")
    letters = PostgresSink(place.postgres.dsn, "letters", create_table=True)
    sink = place.table(strategy="prepared", dead_letters=letters)

    def found() -> Mapping[int, int]:
        bad = Counter(json.loads(row)["id"] for (row,) in place.postgres.run("SELECT row FROM letters"))
        assert all(id % 7 == 0 for id in bad)
        return bad + Counter(place.in_table(place.postgres))

    return Query([sink], (Kill(Step.PRE_COMMITTED, 0, 6, 0), Kill(Step.COMPLETE, 1, 6, 150)), found, worker_killed=True)


def postgres_staged(place: Place) -> Query:
    sink = place.table(strategy="staged")
    return Query([sink], AT_ONCE, lambda: place.in_table(place.postgres), worker_killed=True)


def postgres_upsert(place: Place) -> Query:
    sink = place.table(mode="upsert", keys=["key"])
    kills = Kill(Step.COMPLETE, 1, 2, 150), Kill(Step.PRE_COMMITTED, 2, 2, 300)
    return Query([sink], kills, lambda: place.counted(place.postgres), COUNTED)


def mysql(place: Place) -> Query:
    sink = place.mysql_table(strategy="xa")
    return Query([sink], AT_ONCE, lambda: place.in_table(place.mysql), worker_killed=True)


def mysql_staged(place: Place) -> Query:
    sink = place.mysql_table(strategy="staged")
    return Query([sink], AT_ONCE, lambda: place.in_table(place.mysql), worker_killed=True)


def mysql_upsert(place: Place) -> Query:
    sink = place.mysql_table(mode="upsert", keys=["key"])
    kills = Kill(Step.COMPLETE, 1, 2, 150), Kill(Step.PRE_COMMITTED, 2, 2, 300)
    return Query([sink], kills, lambda: place.counted(place.mysql), COUNTED)


def sqlite(place: Place) -> Query:
    file = place.folder / "shop.db"
    sink = SqlAlchemySink(f"sqlite:///{file}", "orders", create_table=True)

    def found() -> Mapping[int, int]:
        with closing(sqlite3.connect(file)) as connection:
            return Counter(id for (id,) in connection.execute("SELECT id FROM orders"))

    return Query([sink], AT_ONCE, found, worker_killed=True)


FROM_KAFKA = Kill(Step.PRE_COMMITTED, 0, 3, 0), Kill(Step.COMPLETE, 1, 3, 144)
"""An aborted record and a marker are among the first fifty offsets of each partition."""


def kafka_to_kafka(place: Place) -> Query:
    sink = KafkaSink(place.kafka.bootstrap, place.topic)
    options = {"source": place.source, "shape": IntoKafka.shape}
    return Query([sink], FROM_KAFKA, place.in_topic, options, only=0, worker_killed=True)


def kafka_to_postgres(place: Place) -> Query:
    sink, options = place.table(strategy="prepared"), {"source": place.source, "shape": IntoPostgres.shape}
    return Query([sink], FROM_KAFKA, lambda: place.in_table(place.postgres), options, worker_killed=True)


def as_event(df: Any) -> Any:
    from pyspark.sql import functions

    return df.select(functions.to_json(functions.struct("id")).alias("value"))


def without_amount(df: Any) -> Any:
    return df.drop("amount")


def by_remainder(df: Any) -> Any:
    return df.selectExpr("id % 10 AS remainder", "id")


def projections(place: Place) -> Query:
    """One stream, of which each of three systems gets its own columns."""
    sinks: list[TwoPhaseCommitSink[Any]] = [
        KafkaSink(place.kafka.bootstrap, place.topic, name="topic"),
        place.table(name="one"),
        place.mysql_table(name="other"),
    ]
    transforms = {"topic": as_event, "one": without_amount, "other": by_remainder}

    def found() -> Mapping[int, int]:
        ids = place.in_topic()
        assert ids == place.in_table(place.postgres) == place.in_table(place.mysql)
        return ids

    kills = Kill(Step.PRE_COMMITTED, 0, 9, 0), Kill(Step.COMMITTING, 1, 9, 150)
    return Query(sinks, kills, found, {"transforms": transforms}, worker_killed=True)


SHORT = state, spooled, other_layout, dead_letters, kafka_to_kafka, projections
"""Into files, both databases and topics, and with each kind of replay."""

FILES = one_sink, two_sinks, default_state, lost, one_partition
FURTHER_TABLES = sqlite, postgres, postgres_staged, postgres_upsert, mysql, mysql_staged, mysql_upsert
FURTHER = (*FILES, *FURTHER_TABLES, kafka_to_postgres)


def in_doubt(query: Query, job: str) -> int:
    found = 0
    for sink in sinks_by_name(query.sinks).values():
        sink.open()
        with closing(sink):
            found += len(list(sink.in_doubt(job)))
    return found


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("queries", "kills"),
    [
        pytest.param(SHORT, 1, id="once"),
        pytest.param(SHORT, 2, id="twice", marks=pytest.mark.large),
        pytest.param(FURTHER, 2, id="further", marks=pytest.mark.large),
    ],
)
def test_killed_and_restarted(
    tmp_path: Path,
    postgres: PostgresService,
    mysql: MySQLService,
    kafka: KafkaService,
    source: KafkaSource,
    queries: Sequence[Callable[[Place], Query]],
    kills: int,
) -> None:
    with ExitStack() as stack:
        running: dict[Path, Query] = {}
        places: list[Place] = []
        for make in queries:
            folder = tmp_path / make.__name__
            folder.mkdir()
            ids = write_input(folder / "input")
            place = Place(
                make.__name__,
                folder,
                stack.enter_context(closing(PostgresObserver(stack.enter_context(postgres.database())))),
                stack.enter_context(closing(MySQLObserver(stack.enter_context(mysql.database())))),
                kafka,
                stack.enter_context(kafka.topic(3)),
                source,
            )
            places.append(place)
            running[folder] = make(place)

        for number in range(kills):
            hits = {folder: number if kills == 2 else query.only for folder, query in running.items()}
            killed_together(running, hits, tmp_path / f"meeting{number}")
            for folder, query in running.items():
                kill = query.kills[hits[folder]]
                assert in_doubt(query, folder.name) == kill.in_doubt, folder.name
                assert sum(query.found().values()) == kill.rows, folder.name
                if hits[folder] == 0:
                    query.after_the_first()

        first, *others = (job(folder, query) for folder, query in running.items() if not query.alone)
        first.beside = others
        assert first.run(500) == 0, first.output()
        for folder, query in running.items():
            if query.alone:
                query.alone(partial(job, folder, query))
            assert query.found() == query.expected(ids), folder.name
            assert in_doubt(query, folder.name) == 0, folder.name
            store = JobStore(open_storage(f"file://{folder / 'storage'}"), folder.name)
            books = take_balance(store, sinks_by_name(query.sinks))
            asked = not any(isinstance(sink, FileSink) for sink in query.sinks)
            assert books.verdict is (Verdict.BALANCED if asked else Verdict.UNKNOWN), books.to_json()
            assert (folder / "killed").exists() is query.worker_killed, folder.name
        for place in places:
            assert place.postgres.pending() == place.mysql.pending() == 0, place.name


def killed_together(queries: Mapping[Path, Query], hits: Mapping[Path, int], meeting: Path) -> None:
    meeting.mkdir()
    first, *others = (
        job(each, query, KillGroupTogether(kill.step, kill.checkpoint_id, meeting, len(queries), each.name))
        for each, query in queries.items()
        for kill in [query.kills[hits[each]]]
    )
    first.beside = others
    assert first.run(500) == KILLED, first.output()


def job(folder: Path, query: Query, *listeners: CheckpointListener, **options: Any) -> SparkJob:
    sinks = query.sinks
    if query.worker_killed and not listeners:
        sinks = [Hooked(sink, "pre_commit", after=True, hook=Once(folder / "killed", die)) for sink in sinks]
    options = dict(query.options) | options
    options["conf"] = {"spark.jars": spark_kafka_jars()} | options.get("conf", {})
    return SparkJob(folder, sinks, folder.name, listeners=listeners, **options)


@dataclass
class Asking(CheckpointListener):
    """Has something done outside, by a file, at each of these moments once; goes on when the file is gone."""

    request: Path
    moments: list[tuple[Step, int]]

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if (step, checkpoint_id) in self.moments:
            self.moments.remove((step, checkpoint_id))
            self.request.touch()
            deadline = time.monotonic() + 300
            while self.request.exists() and time.monotonic() < deadline:
                time.sleep(0.01)


@pytest.mark.large  # tests/kafka/test_crashes.py has it with less
@into_either
@pytest.mark.chaos
def test_broker_killed_while_the_job_goes_on(
    kafka: KafkaService, tmp_path: Path, source: KafkaSource, target: Target
) -> None:
    """Between two micro-batches, under the tasks, and between the decision and the commit."""
    if not isinstance(kafka, KafkaServer):
        pytest.skip(kafka.unmanaged)
    crash = Asking(tmp_path / "request", [(Step.DONE, 0), (Step.TRIGGERED, 1), (Step.COMPLETE, 2)])
    config = CheckpointConfig(commit_timeout=300, tolerable_failed_checkpoints=3)
    only, crashes = reading(tmp_path, source, target, listeners=[crash], config=config), 0

    def restart_the_broker() -> None:
        nonlocal crashes
        if crash.request.exists():
            kafka.kill()
            crash.request.unlink()
            kafka.start()
            crashes += 1

    assert only.run(500, restart_the_broker) == 0, only.output()
    assert crashes == 3
    every_record_once(target)


def test_a_topic_that_is_made_anew_is_not_read_on(kafka: KafkaService, tmp_path: Path, into_kafka: IntoKafka) -> None:
    """R19. Spark would begin it at the offsets of the old one. What the error says to do then is done, both ways."""
    folders = [tmp_path / name for name in ("old", "new")]
    for folder in folders:
        folder.mkdir()
    request = tmp_path / "request"
    with kafka.topic(PARTITIONS) as topic:
        write_records(kafka, topic, range(RECORDS))
        source = KafkaSource(kafka.bootstrap, topic)

        def job(folder: Path = folders[0], name: str = JOB, **options: Any) -> SparkJob:
            made = reading(folder, source, into_kafka, **options)
            made.job = name
            return made

        def make_anew() -> None:
            if request.exists():
                anew(kafka, topic)
                write_records(kafka, topic, range(RECORDS, 2 * RECORDS))
                request.unlink()

        amid_the_second = job(listeners=[Asking(request, [(Step.PRE_COMMITTED, 1)])])
        assert amid_the_second.run(meanwhile=make_anew) == 1
        again = job()
        assert again.run() == 1
        for refused in (amid_the_second, again):
            assert f"SourceReplaced: topic '{topic}' was deleted and created again" in refused.output()
        first = into_kafka.ids()
        assert 0 < first.total() < RECORDS
        assert into_kafka.in_doubt() == 0

        from_the_beginning = job(folders[1], "another-job")
        assert from_the_beginning.run() == 0, from_the_beginning.output()
        assert into_kafka.ids() == first + Counter(range(RECORDS, 2 * RECORDS))

        going_on = job(config=CheckpointConfig(adopt=True))
        assert going_on.run() == 0, going_on.output()
        passed_over = first.total()
        assert into_kafka.ids().total() == first.total() + RECORDS + RECORDS - passed_over


def fail() -> None:
    raise OSError("the disk hiccupped")


@pytest.mark.slow
def test_task_that_fails_after_writing_and_succeeds_on_retry(
    tmp_path: Path, source: KafkaSource, into_kafka: IntoKafka
) -> None:
    """The second attempt has a pooled transactional id of its own."""
    sink = Hooked(into_kafka.sink, "write", after=True, hook=Once(tmp_path / "failed", fail))
    finish(reading(tmp_path, source, into_kafka, sink), into_kafka)
    assert (tmp_path / "failed").exists()
