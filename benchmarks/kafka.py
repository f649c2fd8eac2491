"""KafkaSink beside its peers and its limits, in one run: `make bench`, or

    python -m benchmarks.kafka [--rows 1000000] [--runs 5] [--only throughput,small]
        [--shapes small,large] [--flink]

Sections: throughput, small, steps, tail, paced, participants, memory. The tables that are printed
are Markdown.
"""

from __future__ import annotations

import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from unittest.mock import patch

import confluent_kafka
import pyarrow as pa
from kafka.net.connection import KafkaConnection
from pyspark.sql import DataFrame

from benchmarks import direct, flink, memory
from benchmarks import spark as sparks
from benchmarks.bench import (
    FEW,
    Bench,
    command_line,
    heading,
    report,
    save,
    say,
    show,
    tell,
    working_folder,
)
from benchmarks.measure import Contender, rounds, spread
from benchmarks.topic import JVM, PARTITIONS, SETTINGS, Topic, content
from sinks import Checkpoint, CommitOutcome, Committable
from sinks.kafka import KafkaSink
from sinks.testing.servers.kafka import VERSION, KafkaServer
from sinks.testing.servers.maven import maven_jars
from sinks.testing.servers.spark_kafka import SPARK_KAFKA
from sinks.transaction import TransactionId

_FIELDS = ", ".join(
    f"',\"measurement_{number:02d}\":', xxhash64(i, {number})" for number in range(25)
)
SHAPES = {
    "small": ['concat(\'{"id":\', i, \',"name":"user\', i, \'","amount":1.5}\') AS value'],
    "large": ["concat('user', i) AS key", f"concat('{{\"id\":', i, {_FIELDS}, '}}') AS value"],
}
"""Spark expressions over a number `i`: values of 46 bytes without keys, as Flink's program writes
them, and of 1 kB with keys."""
ROWS_OF_LARGE = 4
"""The large shape has one row for so many of the small one."""

COMPRESSIONS = ("none", "lz4")
TUNED = {
    "linger__ms": "20",
    "batch__size": str(1 << 20),
    "buffer__memory": str(256 << 20),
    "max__request__size": str(8 << 20),
}
"""Options of the Java producer."""

SECTIONS = ("throughput", "small", "steps", "tail", "paced", "participants", "memory")
PAUSE = 5.0
"""Seconds that the slow broker of the memory section does not answer."""

EXACTLY_ONCE = "exactly-once"
AT_LEAST_ONCE = "at-least-once"
DEFAULT_SPARK = "Spark's Kafka sink, defaults"
TUNED_SPARK = "Spark's Kafka sink, tuned"
COUNT = "mapInArrow, rows counted"
DIRECT = "sink without Spark, 1 producer"


class KafkaBench(Bench):
    def __init__(
        self, server: KafkaServer, options: Namespace, folder: Path, stack: ExitStack
    ) -> None:
        super().__init__(
            server.broker(), options, folder, stack, maven_jars(*SPARK_KAFKA, transitive=False)
        )
        self.server = server

    def rows(self, shape: str, count: int, partitions: int = sparks.CORES) -> DataFrame:
        return sparks.numbers(self.spark, count, partitions).selectExpr(*SHAPES[shape])

    def topic(self, stack: ExitStack) -> str:
        return stack.enter_context(self.server.topic(PARTITIONS))

    # ------------------------------------------------------------------ sections
    def throughput(self, shape: str, compression: str) -> None:
        """From df to committed, against Spark's own Kafka sink, and against what bounds it."""
        count = self.options.rows // (ROWS_OF_LARGE if shape == "large" else 1)
        with ExitStack() as stack:
            rows = (
                self.spark.range(count).selectExpr("id AS i").selectExpr(*SHAPES[shape]).toArrow()
            )
            topic = Topic(self.server, self.topic(stack), content(rows))
            contenders = self._contenders(stack, topic, shape, rows, compression)
            peers: list[Contender] = []
            if self.options.flink and (shape, compression) == ("small", "none"):
                peers += flink.kafka(stack, self.options.flink, self.server.bootstrap, count, topic)
            contenders += peers
            warm = rounds(contenders, self.options.runs, self.options.warm, tell, self.server_pid)
        by_name = {contender.name: contender for contender in contenders}
        ours = by_name[EXACTLY_ONCE]
        tuned = by_name[TUNED_SPARK]
        aims = [
            ("exactly-once over Spark's tuned sink", ours, tuned, 1.4),
            ("exactly-once over at-least-once", ours, by_name[AT_LEAST_ONCE], 0.95),
        ]
        bases = [(TUNED_SPARK, tuned), ("mapInArrow bound", by_name[COUNT])]
        if peers:
            best_flink = min(peers, key=lambda c: median(c.seconds))
            aims.append(
                ("exactly-once over Flink's exactly-once, best setting", ours, best_flink, 1.25)
            )
            bases.append(("best Flink", best_flink))
        size = rows["value"].nbytes // count
        turns = f"{self.options.runs} rounds after {warm}"
        title = f"{shape}, compression {compression}: {count:,} rows of {size} bytes, {turns}"
        report(title, count, contenders, bases, aims)

    def _contenders(
        self, stack: ExitStack, topic: Topic, shape: str, rows: pa.Table, compression: str
    ) -> list[Contender]:
        server = self.server.bootstrap
        count = rows.num_rows
        works = dict[str, sparks.Work]()
        options = {"compression.type": compression}
        for name, mode in ((EXACTLY_ONCE, "exactly_once"), (AT_LEAST_ONCE, "at_least_once")):
            job = f"{shape}-{compression}-{mode}"
            works[name] = self.coordinator(
                stack, job, KafkaSink(server, topic.name, options=options), mode
            )
        works[DEFAULT_SPARK] = sparks.kafka(server, topic.name, compression__type=compression)
        works[TUNED_SPARK] = sparks.kafka(
            server, topic.name, compression__type=compression, **TUNED
        )
        contenders = [
            Contender(
                name, self.stream(stack, self.rows(shape, count), work).run, check=topic.check
            )
            for name, work in works.items()
        ]
        counted = self.stream(stack, self.rows(shape, count), sparks.count_in_python(count))
        sink = KafkaSink(server, topic.name, name=f"direct-{shape}-{compression}", options=options)
        feeders = direct.Feeders(sink, rows, 1, self.folder)
        stack.callback(feeders.close)
        return [
            *contenders,
            Contender(COUNT, counted.run),
            Contender(DIRECT, feeders.run, check=topic.check),
        ]

    def small(self) -> None:
        """What a checkpoint of 0 or 100 rows adds to foreachBatch with the same Spark job."""
        with ExitStack() as stack:
            topic = self.topic(stack)
            groups = []
            for rows in self.options.small_rows:
                works: dict[str, sparks.Work] = {
                    "Spark job alone, without Python": sparks.rows_only,
                    "Spark job alone": sparks.job_only,
                }
                for name, mode in (
                    (EXACTLY_ONCE, "exactly_once"),
                    (AT_LEAST_ONCE, "at_least_once"),
                ):
                    sink = KafkaSink(self.server.bootstrap, topic)
                    works[name] = self.coordinator(stack, f"small-{rows}-{mode}", sink, mode)
                works[DEFAULT_SPARK] = sparks.kafka(self.server.bootstrap, topic)
                groups.append(
                    [
                        Contender(
                            f"{rows} rows: {name}",
                            self.stream(stack, self.rows("small", rows), work).run,
                        )
                        for name, work in works.items()
                    ]
                )
            self.small_checkpoints(groups)

    def few(self, stack: ExitStack) -> dict[str, sparks.Stream]:
        topic = self.topic(stack)
        sink = KafkaSink(self.server.bootstrap, topic)
        works: dict[str, sparks.Work] = {
            DEFAULT_SPARK: sparks.kafka(self.server.bootstrap, topic),
            EXACTLY_ONCE: self.coordinator(stack, f"few-{topic}", sink),
        }
        rows = self.rows("small", FEW)
        return {name: self.stream(stack, rows, work) for name, work in works.items()}

    def questions(self, run: Callable[[], object]) -> int:
        """Requests of this process to brokers; those of tasks are not among them."""
        send = KafkaConnection._send_request
        with patch.object(
            KafkaConnection, "_send_request", autospec=True, side_effect=send
        ) as sent:
            run()
        return int(sent.call_count)

    def participants(self) -> None:
        """How long many participants take to commit, and until consumers see all of them."""
        visible = list[float]()
        count = self.options.participants
        with ExitStack() as stack:
            batch = pa.RecordBatch.from_pydict({"value": ["x" * 46]})
            name = self.topic(stack)
            topic = Topic(self.server, name, (count, count * content(pa.table(batch))[1]))
            sink = KafkaSink(self.server.bootstrap, name)
            stack.callback(sink.close)
            checkpoint = Checkpoint("many", "bench", 0)
            ready: list[Committable] = []

            def prepare() -> None:
                with ThreadPoolExecutor(16) as pool:
                    ready[:] = pool.map(
                        lambda subtask: _open_transaction(sink, subtask, batch), range(count)
                    )

            def run() -> float:
                start = time.perf_counter()
                outcomes = sink.notify_checkpoint_complete(checkpoint, ready)
                seconds = time.perf_counter() - start
                topic.settle()
                visible.append(time.perf_counter() - start)
                if any(outcome != CommitOutcome.COMMITTED for outcome in outcomes):
                    raise RuntimeError(f"not committed: {outcomes}")
                return seconds

            contender = Contender(f"{count:,} participants", run, prepare, topic.check)
            runs = min(self.options.runs, 3)
            rounds([contender], runs, 1, tell)
        cells = [
            spread(contender.seconds),
            spread(visible[-runs:]),
            f"{median(contender.load):.1f}",
        ]
        title = f"Commit of {count:,} participants, {runs} rounds (aim at 1,000: < 1.5 s)"
        show(title, ["s until all are committed", "s until consumers have all", "load"], [cells])

    def memory(self) -> None:
        """Whether a task's memory grows with its partition, also when the broker does not keep up.

        Restarts Spark, for fresh Python workers.
        """
        self.stop_spark()
        spark = sparks.session(self.jars, **memory.FRESH_WORKERS)
        cases = [
            (100_000, False),
            (2_000_000, False),
            (8_000_000, False),
            (2_000_000, True),
            (8_000_000, True),
        ]
        found: dict[tuple[int, bool], list[float]] = {case: [] for case in cases}
        try:
            with ExitStack() as stack:
                topic = self.topic(stack)
                for run in range(min(self.options.runs, 3)):
                    for rows, paused in cases:
                        folder = self.folder / f"memory-{run}-{rows}-{paused}"
                        sink = KafkaSink(
                            self.server.bootstrap, topic, name=f"memory-{run}-{rows}-{paused}"
                        )
                        df = sparks.numbers(spark, rows, 1).selectExpr(*SHAPES["small"])
                        with _paused(self.server, folder / "begun") if paused else nullcontext():
                            peak = memory.peak(df, sink, folder)
                        tell(
                            f"round {run + 1} peak with {rows:,} rows{', broker paused' * paused}: "
                            f"{peak:.1f} MiB"
                        )
                        found[rows, paused].append(peak)
        finally:
            spark.stop()
        lines = [
            [f"{rows:,}", "paused" if paused else "running", spread(found[rows, paused], "{:.1f}")]
            for rows, paused in cases
        ]
        title = f"Peak memory of a task's Python worker, MiB (the broker paused: for {PAUSE:.0f} s)"
        show(title, ["rows of the partition", "broker", "MiB"], lines)


def _open_transaction(sink: KafkaSink, subtask: int, batch: pa.RecordBatch) -> Committable:
    name = TransactionId("many", "bench", 0, sink.name, subtask, 1, 0, 0, 0)
    transaction = sink.begin_transaction(name.context(batch.schema))
    sink.write(transaction, batch)
    return sink.snapshot_state(transaction)


@contextmanager
def _paused(server: KafkaServer, begun: Path) -> Iterator[None]:
    """Freeze the broker for a while once the file `begun` is there."""

    def pause() -> None:
        while not begun.exists():
            time.sleep(0.01)
        time.sleep(0.5)
        server.broker().pause()
        time.sleep(PAUSE)
        server.broker().resume()

    thread = threading.Thread(target=pause)
    thread.start()
    yield
    thread.join()


def main(arguments: list[str] | None = None) -> None:
    parser = command_line("benchmarks.kafka", __doc__, SECTIONS, list(SHAPES))
    some = parser.some_of(COMPRESSIONS)
    parser.add_argument(
        "--compressions", type=some, default=list(COMPRESSIONS), help=f"of {','.join(COMPRESSIONS)}"
    )
    options = parser.options(arguments)
    with ExitStack() as stack:
        server = stack.enter_context(KafkaServer(SETTINGS, jvm=JVM))
        librdkafka = f"librdkafka {confluent_kafka.libversion()[0]}"
        about = heading(
            ("confluent-kafka", "kafka-python"),
            f"{librdkafka}, Kafka {VERSION} with {' '.join(JVM)}",
        )
        say(about)
        bench = KafkaBench(server, options, working_folder(stack), stack)
        for section in options.only:
            if section == "throughput":
                for shape in options.shapes:
                    for compression in options.compressions:
                        bench.throughput(shape, compression)
            else:
                getattr(bench, section)()
        save(options.json, about)


if __name__ == "__main__":
    main()
