"""The checkpoint coordinator: what a user does with the protocol of `coordinator.protocol`."""

from __future__ import annotations

import functools
import logging
import math
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from coordinator.config import CheckpointConfig, ExternalizedCheckpointCleanup, Replay
from coordinator.errors import CheckpointError, SavepointError
from coordinator.guarantee import Guarantee
from coordinator.heartbeat import Heartbeat
from coordinator.http.access import token_file
from coordinator.http.door import Door
from coordinator.listener import CheckpointListener, Listeners, Step
from coordinator.protocol import decisions
from coordinator.protocol.batch import BatchFacts, MicroBatch, Query, Sink
from coordinator.protocol.clock import Clock
from coordinator.protocol.dead_letters import with_dead_letters, writers
from coordinator.protocol.decisions import Complete
from coordinator.protocol.protocol import CheckpointProtocol
from coordinator.protocol.records import CheckpointStore
from coordinator.protocol.spool import Spool
from coordinator.savepoints import Savepoint, take_savepoint
from coordinator.savepoints.model import opened
from coordinator.spark.arrow import Passage
from coordinator.spark.connect import batch_of, reduced
from coordinator.spark.internals import StreamExecution, arrow_schema
from coordinator.spark.location import newest_commit
from coordinator.spark.preflight import require_packages, require_workers, tell_of_sockets
from coordinator.statistics.history import CheckpointHistory
from coordinator.statistics.metrics import exposition, open_telemetry, prometheus
from coordinator.statistics.tracker import CheckpointStatisticsTracker
from coordinator.storage import CheckpointStorage, StorageError, open_storage
from coordinator.ui.facts import JobFacts
from coordinator.ui.visitors import Visitors
from coordinator.verifier import Verifier
from sinks import dead_letters
from sinks.base import TwoPhaseCommitSink

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from coordinator.ui.page import Page

logger = logging.getLogger(__name__)

_WORKER_GRACE_PERIOD = 2.0
"""Seconds for Python workers to end after Spark has cancelled their tasks: until then one may still pre-commit."""
_BATCH_GRACE_PERIOD = 5.0
"""Seconds that a stop waits for the end of the batch under way."""
_IDLE_LOOKS = 3
"""How often in a row a stop finds no batch under way: between two batches there is none either, for a moment."""


class CheckpointCoordinator:
    """The function for `foreachBatch` that makes its sinks exactly-once.

    `job` names the job for ever: its records, transactions and ledgers carry it. `storage` is where the complete
    checkpoints are recorded (`file:///…`, `s3://…`, any SQLAlchemy URL, …: `coordinator.storage.open_storage`), best
    outside Spark's checkpointLocation; without it, `config.storage`. `clock` is for tests that wait for nothing.
    One object serves one query at a time, over any number of starts. Raises the errors in `coordinator.errors`; each
    stops the query, and none has lost or doubled a row.
    """

    def __init__(
        self,
        job: str,
        sinks: Sequence[Sink],
        storage: str | CheckpointStorage | None = None,
        config: CheckpointConfig | None = None,
        listeners: Sequence[CheckpointListener] = (),
        *,
        clock: Clock | None = None,
    ) -> None:
        if "pyspark" in sys.modules:  # the command `coordinator` does without
            require_packages()
        self._made_of = (job, sinks, storage, config, listeners)
        if not job:
            raise ValueError("a job needs a name: it is how a restarted driver finds its checkpoints again")
        if not isinstance(sinks, Sequence) or not all(isinstance(one, TwoPhaseCommitSink) for one in sinks):
            raise TypeError(f"sinks has to be a list of sinks, not {sinks!r}")
        if not sinks:
            raise ValueError("a coordinator needs at least one sink")
        self.sinks = with_dead_letters(sinks)
        config = config or CheckpointConfig()
        storage = storage if storage is not None else config.storage
        if storage is None:
            raise ValueError("a coordinator needs a storage for its checkpoints: storage='file:///…', or in the config")
        self._storage, self._shared = storage, len(sinks) > 1
        self.job = job
        self.config = config
        self._clock = clock or Clock()
        self.statistics = CheckpointStatisticsTracker(job, self._clock, list(self.sinks))
        """Of this driver's checkpoints."""
        store = CheckpointStore(open_storage(storage), job, told=self.statistics.storage_called)
        self.history = CheckpointHistory(store, config.history_size)
        self.statistics.reporters += [self.history, *open_telemetry(self.statistics)]
        self.protocol = CheckpointProtocol(
            job,
            self.sinks,
            store,
            config,
            Listeners(job, [self.statistics, *listeners]),
            self._clock,
            claim=self._claim,
            spool=_spool(job, storage, config),
        )
        """For tools, while no query runs: it is not for several threads."""
        self.statistics.guaranteed(self.guarantee.reasons)  # a recovery ends before the batch tells the rest
        self.last_error: Exception | None = None
        """What stopped the query: Spark passes on its text only."""
        self._raised: tuple[MicroBatch, Exception] | None = None
        """What the last call ended with, if it was no stop: Spark fails the query with it, and no other batch comes."""
        self._finished_at = self._cut_off_at = -math.inf
        self._one_at_a_time = threading.RLock()
        self._ready = False
        self._passage = Passage(config.rows_on_driver)
        self._query: Query | None = None
        self._started: StreamingQuery | None = None
        """What `write_stream` led to last."""
        self._done: MicroBatch | None = None
        self._location: str | None = None
        self._stopping = self._held_back = False
        self._sweeper = threading.Thread()
        self._closed = threading.Event()
        self._http: Door | None = None
        self._heartbeat = Heartbeat(store, config.heartbeat_interval, self.history.flush)
        self._verifier = Verifier(store, self.sinks, config.verify_interval, self.statistics.verified)

    def _claim(self, query: Query | None) -> int:
        address = self._http.address if self._http else ""
        if query is None:
            return self.protocol.store.claim_generation(address)
        generation = self.protocol.store.claim_generation(address, self.config.heartbeat_interval, self.sinks)
        self._heartbeat.begin(generation, query)
        self._verifier.begin(query)
        return generation

    @property
    def guarantee(self) -> Guarantee:
        return self.protocol.guarantee

    def write_stream(self, df: DataFrame) -> DataStreamWriter:
        """`df.writeStream` into this coordinator, with the trigger, the state backend and the checkpointLocation of the
        config. Without one there, set the option checkpointLocation; then start it.

        Raises here, and not in the first batch, what is wrong with the set-up: `WorkersNotReady`, and the sinks'
        `ConfigurationError` (of those without a `transform`, in a classic session)."""
        from pyspark.sql import is_remote

        self._prepare(df)
        if not is_remote():  # else the sinks are reached from the server
            dead = writers(self.sinks)
            for name, sink in self.sinks.items():
                if not sink.transform:
                    sink.open()
                    sink.check(dead_letters.SCHEMA if name in dead else arrow_schema(df))
        for key, value in self.config.spark_conf.items():
            df.sparkSession.conf.set(key, value)
        writer = df.writeStream.foreachBatch(self)
        if not is_remote():  # else the query goes on without this object
            self._notice_start_of(writer)
        if self.config.checkpoint_location:
            writer = writer.option("checkpointLocation", self.config.checkpoint_location)
        interval = self.config.interval
        return writer if interval is None else writer.trigger(processingTime=f"{interval * 1000:.0f} milliseconds")

    def _notice_start_of(self, writer: DataStreamWriter) -> None:
        start = writer.start

        @functools.wraps(start)
        def noticed(*arguments: Any, **options: Any) -> StreamingQuery:
            self._started = query = start(*arguments, **options)
            if getattr(self._query, "runId", None) != query.runId:
                self._query = None  # of the run before
            return query

        writer.start = noticed  # type: ignore[method-assign]

    # ------------------------------------------------------------------ called by Spark
    def __call__(self, df: DataFrame, batch_id: int) -> None:
        from pyspark.sql import is_remote

        batch = batch_of(df, batch_id, self.config.checkpoint_location, self._passage, shared=self._shared)
        if self._raised and self._raised[0].run_id == batch.run_id and self._raised[0].facts != batch.facts:
            raise self._kept_from_spark(*self._raised)
        self._raised = None
        try:
            if not is_remote():
                self._prepare(df)
            self.process(batch)
        except Exception as error:
            self.last_error, self._cut_off_at = error, self._clock.monotonic()
            if batch.active:
                self._raised = batch, error
                raise
            logger.info("batch %d was cut off, since the query is being stopped; the next start has it", batch_id)
            logger.debug("it was cut off here", exc_info=True)
            batch.raise_stopped()
        if not self._sweeper.is_alive():
            self._closed.clear()
            self._sweeper = threading.Thread(target=self._sweep_while_quiet, name="checkpoint-sweeps", daemon=True)
            self._sweeper.start()

    def unheard(self, query: StreamingQuery | None) -> CheckpointError | None:
        """Of a query that has ended: an error that the function which called this object has kept from Spark, in this
        run or, if no batch has come in it, in one before."""
        if self._raised and not self._raised[0].query.exception():
            return self._kept_from_spark(*self._raised)
        if query and getattr(self._query, "runId", None) != query.runId:
            try:
                self._require_all_batches(query)
            except CheckpointError as error:
                return error
            except Exception:
                logger.info("job %s: Spark's log and the checkpoints could not be compared", self.job, exc_info=True)
        return None

    def _require_all_batches(self, query: StreamingQuery) -> None:
        """Spark takes none for done that is not complete."""
        from pyspark.sql import is_remote

        location = self.config.checkpoint_location
        if not is_remote():
            location = StreamExecution.of(query).location
        if location is not None:
            facts = BatchFacts(newest_commit(location) + 1, query.id, ())
            store = CheckpointStore(self.protocol.store.storage, self.job)
            rounds = store.load_newest()
            newest = Complete(rounds) if rounds else None
            if newest is None or facts.checkpoint_id > newest.checkpoint_id:
                decisions.on_call(facts, newest, adopt=self.config.adopt, reloaded=True)
            if newest and store.had_second_call(newest.checkpoint_id) and not self.config.adopt:
                raise decisions.second_call(newest.checkpoint_id, self.job, asked=facts.checkpoint_id)

    def _kept_from_spark(self, batch: MicroBatch, error: Exception) -> CheckpointError:
        kept = CheckpointError(
            f"batch {batch.facts.checkpoint_id} failed, and Spark takes it for done, since the function that calls the "
            f"coordinator of job {self.job!r} has kept the error: {type(error).__name__}: {error}. Rows of it are "
            "missing. Let the errors of the coordinator pass. To have Spark hand the batch over again: "
            f"{decisions.hand_over_again(batch.facts.checkpoint_id)}, and start the query again."
        )
        kept.__cause__ = error
        return kept

    def _prepare(self, df: DataFrame) -> None:
        """Once, and before anything is written: what a batch would fail on, deep in Spark's stacks. With Connect in the
        client alone, since the server's worker has this library, or could not have made this object anew."""
        from pyspark.sql import is_remote

        if not self._ready:
            require_packages()
            require_workers(df.sparkSession, list(self.sinks.values()))
            if not is_remote():
                tell_of_sockets(df.sparkSession)
            self._ready = True

    def _sweep_while_quiet(self) -> None:
        """As long as the query runs: what pre-commits late holds its locks, and readers of Kafka, up until it is swept,
        and in a quiet stream the next batch may be far away."""
        while not self._clock.wait(self._closed, self.config.sweep_interval):
            with self._one_at_a_time:
                try:
                    if self._closed.is_set() or not self._done or not self._done.active:
                        return
                    self.protocol.sweep()
                except Exception:
                    logger.info("job %s sweeps no more until its next batch", self.job, exc_info=True)
                    return

    def process(self, batch: MicroBatch) -> None:
        """See one micro-batch through: when this returns, all of its rows are visible, once."""
        not_before = self._finished_at + self.config.min_pause
        while batch.active and not self._stopping and (pause := not_before - self._clock.monotonic()) > 0:
            self._clock.sleep(min(pause, 0.2))
        with self._one_at_a_time:
            self._query, self._location = batch.query, batch.location
            while self._stopping and batch.active:
                self._held_back = True
                self._clock.sleep(0.05)
            self._held_back = False
            if not batch.active:
                batch.raise_stopped()
            try:
                self._require_once(batch)
                self.protocol.process(batch)
            except Exception as error:
                if batch.active:
                    self.protocol.listeners.tell(Step.HALTED, batch.facts.checkpoint_id, error=error)
                self._heartbeat.end(f"{type(error).__name__}: {error}" if batch.active else "the query was stopped")
                raise
            self._done = batch
            self._finished_at = self._clock.monotonic()

    def _require_once(self, batch: MicroBatch) -> None:
        """A second call in one run finds the checkpoint complete. With the same rows that does no harm."""
        done, n = self._done, batch.facts.checkpoint_id
        if done and (done.run_id, done.facts.checkpoint_id) != (batch.run_id, n):
            self._done = None  # Spark keeps what its DataFrame was computed from as long as that is known
        elif done and not batch.same_rows(done):
            try:
                self.protocol.store.keep_second_call(n)
            except StorageError as error:
                logger.warning("the next start will not say that rows of batch %d are missing: %s", n, error)
            raise decisions.second_call(n, self.job, asked=n)

    def recover(self) -> None:
        """Commit the newest complete checkpoint again, and abort what no record names: what a query's first batch does
        by itself. For settling a job without starting its query. With no checkpoint in storage nothing is aborted,
        since that storage may be the wrong one."""
        with self._one_at_a_time:
            self.protocol.recover()

    # ------------------------------------------------------------------ savepoints
    @property
    def query(self) -> Query:
        """The query that this coordinator was last called by. Raises `SavepointError` before its first batch."""
        if self._query is None:
            raise SavepointError("the query has not had a batch since it was started; try again when it has")
        return self._query

    def trigger_savepoint(self, target: str | CheckpointStorage, checkpoint_location: str | None = None) -> Savepoint:
        """Save the newest checkpoint in `target`, a storage. From any thread: it waits for the batch under way, and the
        next batch waits for it. Without a running query, or before its first batch, say which `checkpoint_location` it
        has. Raises `SavepointError`, `InDoubtError`, `StorageError`."""
        with opened(target) as storage, self._one_at_a_time:
            return self._save(storage, checkpoint_location)

    def _save(self, target: CheckpointStorage, location: str | None = None) -> Savepoint:
        location = location or self._location or self.config.checkpoint_location
        if location is None:
            raise SavepointError("no batch has come yet: pass checkpoint_location, or wait for one")
        newest, storage = self.protocol.reload_newest(), self.protocol.store.storage
        if newest is None:
            raise SavepointError(f"job {self.job!r} has no complete checkpoint in {storage.uri} yet")
        decisions.require_visible(newest)

        def confirm() -> None:  # another driver may have written there meanwhile
            self.protocol.fence.require_newest("take a savepoint")

        confirm()
        return take_savepoint(
            target,
            newest.rounds,
            {name: f"{type(sink).__module__}.{type(sink).__qualname__}" for name, sink in self.sinks.items()},
            location,
            storage.uri,
            confirm,
        )

    def stop_with_savepoint(self, query: Query, target: str | CheckpointStorage) -> Savepoint:
        """Take a savepoint, and stop the query there: no further checkpoint becomes complete."""
        with opened(target) as storage, self._one_at_a_time:
            savepoint = self._save(storage)
            self._stopping = True
        self.stop(query)
        return savepoint

    def cancel_with_savepoint(self, query: Query, target: str | CheckpointStorage) -> Savepoint:
        """`stop_with_savepoint`, then `cancel`."""
        savepoint = self.stop_with_savepoint(query, target)
        self.cancel(query)
        return savepoint

    def serve_http(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        targets: Sequence[str] | None = None,
        token: str | None = None,
        *,
        public_page: bool = False,
    ) -> str:
        """Answer the requests of `coordinator.http.door` until `close`; returns the address. Call it before the
        query starts: each start leaves the address in checkpoint storage (`CheckpointStore.newest_claim`).

        `targets`: storages that savepoints may be taken to, and folders below; by default `config.savepoint_dir` alone.
        `token`: what a caller has to show, of 32 characters at least; by default the variable COORDINATOR_TOKEN, or a
        new one in a file that the same user's commands find. `public_page`: whoever reaches the address may
        look at the web page (extra `ui`); to do something there takes the token all the same."""
        if self._http is None:
            if targets is None:
                targets = [self.config.savepoint_dir] if self.config.savepoint_dir else []
            file = token_file(self.job, self.protocol.store.storage.uri)
            self._http = Door(self, host, port, targets, token, file, exposition(self.statistics))
            self._http.begin(self._page(self._http, public=public_page))
        return self._http.address

    def _page(self, door: Door, *, public: bool) -> Page | None:
        """None without the extra `ui`."""
        try:
            from coordinator.ui.page import Page
        except ModuleNotFoundError:
            return None
        visitors = Visitors(door.address, door.token, public=public)
        return Page(self.facts(live=True), visitors, door.post_savepoint)

    def facts(self, *, live: bool) -> JobFacts:
        """What the web page shows. `live`: by the driver itself."""
        return JobFacts(
            self.job,
            self.protocol.store.storage,
            self.sinks,
            self.config,
            self.statistics,
            self.history,
            lambda: self.guarantee,
            live,
        )

    def register_metrics(self, registry: CollectorRegistry) -> None:
        """Let a registry of `prometheus-client` show the metrics of `coordinator.statistics.metrics`, from now on. The
        driver's own HTTP server does so at /metrics, for those who have the token."""
        self.statistics.reporters.append(prometheus(self.statistics, registry))

    def newest_checkpoint(self) -> dict[str, Any]:
        """The newest complete checkpoint in storage as JSON values, without committables; {} if there is none."""
        rounds = CheckpointStore(self.protocol.store.storage, self.job).load_newest()
        return {k: v for k, v in rounds[0].to_json().items() if k != "committables"} if rounds else {}

    # ------------------------------------------------------------------ life
    def stop(self, query: Query) -> None:
        """Stop the query between two batches, if the one under way ends within five seconds, else amid it.
        `query.stop()` interrupts Spark wherever it is: Hadoop logs a stack where that is a write of Spark's own log."""
        self._stopping = True
        try:
            end, idle = self._clock.monotonic() + _BATCH_GRACE_PERIOD, 0
            while idle < _IDLE_LOOKS and self._clock.monotonic() < end:
                idle = 0 if self._is_busy(query) else idle + 1
                self._clock.sleep(0.02)
            query.stop()
        finally:
            self._stopping = False

    def _is_busy(self, query: Query) -> bool:
        """Whether a batch is under way that will come back, or be held back, here."""
        if not (self._query or self._started) or self._held_back or not query.isActive:
            return False
        return bool(query.status["isTriggerActive"])

    def cancel(self, query: Query) -> None:
        """Stop the query for good: what is complete is committed, the rest aborted, and this object closed. With
        `DELETE_ON_CANCELLATION` its checkpoints are then deleted from storage, so that its checkpointLocation cannot be
        used again. Raises `InDoubtError`, with nothing deleted, if a complete checkpoint could not be made visible."""
        self.stop(query)
        self.recover()
        if self.config.externalized_cleanup is ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION:
            self.protocol.delete_checkpoints()
        self.close()

    def newest_offsets(self) -> tuple[str, ...]:
        """The source offsets up to which all is complete, one JSON text per source; () before the first checkpoint."""
        return tuple(self.newest_checkpoint().get("offsets", ()))

    def close(self) -> None:
        """Sweep a last time, so that a clean stop leaves nothing in doubt, and release what is held on the driver.
        Waits for the batch under way. Sweeps nothing where neither a record was found nor a sweep has come before: the
        storage may be the wrong one."""
        self._closed.set()
        self._verifier.end()
        self._heartbeat.end("the coordinator was closed")
        http, self._http = self._http, None
        if http:
            http.close()
        with self._one_at_a_time:
            if self.protocol.newest or self.protocol.has_swept:
                self._clock.sleep(max(0, self._cut_off_at + _WORKER_GRACE_PERIOD - self._clock.monotonic()))
                try:
                    self.protocol.sweep()
                except Exception as error:
                    logger.warning("last sweep of job %s failed; the next start sweeps: %s", self.job, error)
            for name, sink in self.sinks.items():
                try:
                    sink.close()
                except Exception:
                    logger.warning("sink %r could not be closed", name, exc_info=True)
            self.protocol.close()
            if self._query or self._started:
                logger.info("job %s %s", self.job, self.statistics.totals())

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(type(self), self._made_of)

    def __enter__(self) -> CheckpointCoordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the query, then `close`. Raises what the query failed with, also if the block has caught that, and what
        the function around this object kept from Spark. An error that leaves the block goes before both. Spark's own,
        which passes on the text of what stopped the query, gives way to that error itself."""
        failed = unheard = None
        try:
            for query in (self._started, self._query):
                if query:  # the first also if no batch of it has come; the second also if somebody else started it
                    self.stop(query)
                    failed = None if error else query.exception()
            unheard = self.unheard(self._started)
        finally:
            self.close()
        if unheard and not error:
            raise unheard
        stopped_by, raised = self.last_error, error or failed
        if stopped_by and raised:
            from pyspark.errors import StreamingQueryException

            if isinstance(raised, StreamingQueryException) and str(stopped_by) in str(raised):
                cause = stopped_by.__cause__
                raise stopped_by.with_traceback(None) from (None if cause and "\n" in str(cause) else cause)
        if failed:
            raise failed


def _spool(job: str, storage: str | CheckpointStorage, config: CheckpointConfig) -> Spool | None:
    if config.replay is Replay.RECOMPUTE:
        return None
    uri = config.spool_dir or storage
    if not isinstance(uri, str):
        raise ValueError("replay='spool' with a storage object needs spool_dir: executors open it by its URI")
    return Spool(uri, job)
