"""The checkpoint coordinator: the function for foreachBatch, and everything else that a user calls.

It hands each batch to `CheckpointProtocol.process`, one at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any

from coordinator.config import CheckpointConfig, ExternalizedCheckpointCleanup, Replay
from coordinator.errors import CheckpointError, InDoubtError, reason
from coordinator.listener import CheckpointListener, Listeners, Step
from coordinator.operations.attendants import Attendants
from coordinator.operations.savepoints.on_driver import DriverSavepoints
from coordinator.operations.savepoints.savepoint import Savepoint
from coordinator.operations.statistics.metrics import prometheus
from coordinator.operations.statistics.model import CheckpointHistory
from coordinator.operations.statistics.tracker import CheckpointStatisticsTracker
from coordinator.protocol.guarantee import Guarantee
from coordinator.protocol.ports import (
    MicroBatch,
    Query,
    Sink,
    check_together,
    dead_letter_writers,
    sinks_by_name,
)
from coordinator.protocol.protocol import CheckpointProtocol
from coordinator.spark.batch import RowTransfer, filter_py4j_log
from coordinator.spark.connect import batch_of, reduced
from coordinator.spark.internals import arrow_schema
from coordinator.spark.lifecycle import FairLock, QueryLifecycle
from coordinator.spark.preflight import require_packages, require_workers
from coordinator.storage import CheckpointStorage, deferred_storage, open_storage
from coordinator.store.job_store import JobStore
from coordinator.store.spool import Spool
from sinks import dead_letters
from sinks._util.log import get_logger
from sinks._util.machine import Clock, Thread, machine
from sinks.base import TwoPhaseCommitSink
from sinks.errors import ConfigurationError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

logger = get_logger(__name__)

refused_start: ContextVar[Exception | None] = ContextVar("refused_start", default=None)
"""The error that `write_stream` and `run` raise while a job file is imported.

So a look at a job file starts no second driver.
"""


@contextmanager
def _as_exception() -> Iterator[None]:
    """Turn exceptions such as SystemExit into errors.

    Py4J does not pass such exceptions on to Spark, which would wait forever.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        raise CheckpointError(f"{error!r} was raised in a batch") from error


class CheckpointCoordinator:
    """The function for `foreachBatch` that makes its sinks exactly-once.

    `job` is the name of the job. It must not change, because records, transactions and ledgers
    carry it. `storage` is where complete checkpoints are recorded: `file:///…`, `s3://…`, a
    SQLAlchemy URL, … (default: `config.storage`). It is not Spark's checkpointLocation, and has to
    be outside of it. `clock` is for tests. One object serves one query at a time, over any number
    of starts. Errors are in `coordinator.errors`: each stops the query, and none loses or
    duplicates a row.

    The constructor only checks its arguments. The storage is opened when it is needed first: by
    `write_stream`, by the first batch, or by a method that reads it. Sinks are opened by
    `write_stream` or by the first batch.
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
        if "pyspark" in sys.modules:  # the command `coordinator` needs no Spark
            require_packages()
        self._arguments = (job, sinks, storage, config, listeners)
        """The arguments, from which Spark Connect's server recreates this object (`__reduce__`)."""
        if not job:
            raise ValueError(
                "a job needs a name: it is how a restarted driver finds its checkpoints again"
            )
        if not isinstance(sinks, Sequence) or not all(
            isinstance(sink, TwoPhaseCommitSink) for sink in sinks
        ):
            raise TypeError(f"sinks has to be a list of sinks, not {sinks!r}")
        if not sinks:
            raise ValueError("a coordinator needs at least one sink")
        self.sinks = sinks_by_name(sinks)
        written_by_others = dead_letter_writers(self.sinks)
        self._writing_sinks = {
            name: sink for name, sink in self.sinks.items() if name not in written_by_others
        }
        """The sinks with tasks of their own. Those of another sink write a dead-letter sink."""
        config = config or CheckpointConfig()
        storage = storage if storage is not None else config.storage
        if storage is None:
            raise ValueError(
                "a coordinator needs a storage for its checkpoints: storage='file:///…', or in the "
                "config"
            )
        only_exactly_once = [
            repr(name) for name, sink in self.sinks.items() if not sink.takes_at_least_once
        ]
        if only_exactly_once and not config.exactly_once:
            names = ", ".join(only_exactly_once)
            raise ValueError(f"{names} cannot be written in at-least-once mode, only exactly once")
        self.job = job
        self.config = config
        self._clock = clock or machine.clock
        self.statistics = CheckpointStatisticsTracker(job, self._clock, list(self.sinks))
        """Statistics of this driver's checkpoints."""
        self.storage = deferred_storage(storage)
        """The storage where complete checkpoints are recorded."""
        store = JobStore(self.storage, job, on_call=self.statistics.storage_called)
        self._protocol = CheckpointProtocol(
            job,
            self.sinks,
            store,
            config,
            Listeners(job, [self.statistics, *listeners]),
            self._clock,
            _spool(job, storage, config),
        )
        """The protocol, which only the thread that has `_one_at_a_time` may use."""
        self.last_error: Exception | None = None
        """The error that stopped the query. Spark passes on only its text."""
        self._lifecycle = QueryLifecycle(job, self.storage.uri, self._clock, config.min_pause)
        self._one_at_a_time = FairLock()
        self._savepoints = DriverSavepoints(
            self._protocol, self._lifecycle, self._one_at_a_time, self.cancel
        )
        self._attendants = Attendants(
            store,
            self.sinks,
            config,
            self.statistics,
            self._savepoints.do_request,
            lambda: self._protocol.fence.require_newest("do a request"),
        )
        self._preflight_done = False
        self._transfer = RowTransfer()
        self._sweep_thread: Thread | None = None
        self._closed = machine.threads.event()

    @property
    def guarantee(self) -> Guarantee:
        """Tell whether the job is exactly-once, as far as it is known.

        Before `write_stream` and the first batch, only the config and the storage are asked. Raises
        `StorageError`, and `NotExactlyOnce` if exactly-once is required.
        """
        return self._protocol.guarantee

    @property
    def history(self) -> CheckpointHistory:
        """Return the history of checkpoints in storage.

        The web page and `coordinator history` show it.
        """
        return self._attendants.history

    def write_stream(self, df: DataFrame) -> DataStreamWriter:
        """Return `df.writeStream.foreachBatch(self)`, with the settings of the config.

        These are the trigger, the state backend and the checkpointLocation. If the config has no
        checkpointLocation, set that option. Then start the query.

        Setup problems are raised here and not in the first batch: `WorkersNotReady`,
        `StorageError`, and one `ConfigurationError` for all sinks without a `transform` (in a
        classic session). `NotExactlyOnce` is raised if the config requires exactly-once, and the
        storage or one of these sinks cannot promise it.
        """
        from pyspark.sql.utils import is_remote

        if refusal := refused_start.get():
            raise refusal
        self._preflight(df)
        open_storage(self.storage)
        if not is_remote():  # with Connect the sinks may be out of the client's reach
            dead = dead_letter_writers(self.sinks)
            problems = []
            checked = dict[str, Sink]()
            for name, sink in self.sinks.items():
                if not sink.transform:
                    try:
                        with self._one_at_a_time:  # a sweep may use the sink
                            sink.open()
                            sink.check(dead_letters.SCHEMA if name in dead else arrow_schema(df))
                            checked[name] = sink
                    except ConfigurationError as problem:
                        problems.append(problem)
            try:
                with self._one_at_a_time:
                    check_together(checked.values())
            except ConfigurationError as problem:
                problems.append(problem)
            if problems:
                # No single problem's code stands for all of them.
                together = "\n".join([*map(str, problems), "[EO-CONFIG]"])
                raise problems[0] if len(problems) == 1 else ConfigurationError(together)
            with self._one_at_a_time:
                self._protocol.compute_guarantee(checked)
                self.statistics.guaranteed(self.guarantee.weaknesses, complete=False)
        for key, value in self.config.spark_conf.items():
            df.sparkSession.conf.set(key, value)
        writer = df.writeStream.foreachBatch(self)
        if not is_remote():  # with Connect the query does not need this object
            self._lifecycle.notice_start_of(writer)
        if self.config.checkpoint_location:
            writer = writer.option("checkpointLocation", self.config.checkpoint_location)
        interval = self.config.interval
        return (
            writer
            if interval is None
            else writer.trigger(processingTime=f"{interval * 1000:.0f} milliseconds")
        )

    # ------------------------------------------------------------------ called by Spark
    def __call__(self, df: DataFrame, batch_id: int) -> None:
        from pyspark.sql.utils import is_remote

        filter_py4j_log()
        try:
            location = self.config.checkpoint_location
            batch = batch_of(df, batch_id, location, self._transfer, self._writing_sinks)
            self._lifecycle.require_errors_passed_on(batch)
        except Exception as error:
            self.last_error = error
            raise
        try:
            if not is_remote():
                self._preflight(df)
            with _as_exception():
                self.process(batch)
            self.last_error = None
        except Exception as error:
            self.last_error = error
            self._lifecycle.failed(batch, error)
            if batch.active:
                raise
            newest = self._protocol.newest
            state = "not complete, and the next start writes it"
            if newest and newest.checkpoint_id >= batch_id:
                state = "complete, and the next start makes visible what is not"
            logger.info(
                "job %s: the query was stopped in the middle of batch %d: it is %s",
                self.job,
                batch_id,
                state,
            )
            logger.debug("it was cut off here", exc_info=True)
            batch.raise_stopped()
        if not (self._sweep_thread and self._sweep_thread.is_alive()):
            self._closed.clear()
            self._sweep_thread = machine.threads.start(
                self._sweep_while_quiet, name="checkpoint-sweeps"
            )

    @property
    def swallowed_error(self) -> CheckpointError | None:
        """Return the error of the last batch of an ended query, if Spark does not know of it.

        This is so if the function that calls this object caught the error.
        """
        return self._lifecycle.swallowed_error

    def _preflight(self, df: DataFrame) -> None:
        """Look once, before anything is written, for problems that would fail a batch.

        These are missing packages, and workers that are not ready. In a batch, they would show up
        deep in Spark's stacks. With Connect only the client looks, because the library is there
        where its server recreated this object.
        """
        if not self._preflight_done:
            require_packages()
            require_workers(df.sparkSession, list(self.sinks.values()))
            self._preflight_done = True

    def _sweep_while_quiet(self) -> None:
        """Sweep between batches, as long as the query runs.

        Until a sweep, a transaction that a task pre-commits late keeps its locks, and keeps readers
        of Kafka waiting. In a quiet stream the next batch, which would sweep, may be far away.
        """
        while not self._clock.wait(self._closed, self.config.sweep_interval):
            with self._one_at_a_time:
                try:
                    if self._closed.is_set() or not self._lifecycle.is_quiet:
                        return
                    self._protocol.sweep()
                except Exception:
                    logger.info(
                        "job %s sweeps no more until its next batch", self.job, exc_info=True
                    )
                    return

    def process(self, batch: MicroBatch) -> None:
        """Call `CheckpointProtocol.process`, for one batch at a time.

        Before the call, this waits for the pause between two batches, claims a generation for a new
        run, and begins its heartbeat.
        """
        self._lifecycle.pause(batch)
        with self._one_at_a_time:
            self._lifecycle.require_one_query(batch)
            try:
                self._lifecycle.admit(batch)
                if starts := batch.run_id != self._protocol.run_id:
                    # This raises before the claim, which would stop a driver that works well.
                    known = self.guarantee
                    self.statistics.guaranteed(known.weaknesses, complete=known.complete)
                    self._attendants.begin(batch.query)
                    self._protocol.claim_generation(self.config.heartbeat_interval, batch)
                # An earlier error, which the calling function caught, may have ended the heartbeat.
                if starts or not self._attendants.gives_heartbeats:
                    self._attendants.claimed(self._protocol.fence.generation, batch.query)
                self._protocol.process(batch)
            except Exception as error:
                if batch.active or isinstance(error, InDoubtError):
                    self._protocol.listeners.tell(
                        Step.HALTED, batch.facts.checkpoint_id, error=error
                    )
                self._attendants.end(
                    f"{type(error).__name__}: {error}" if batch.active else "the query was stopped"
                )
                raise
            self._lifecycle.finished(batch)

    def recover(self) -> None:
        """Settle the job without starting its query.

        This commits the newest complete checkpoint again, and aborts transactions that no record
        names. A query's first batch does the same. If storage has no checkpoint, nothing is
        aborted, because it may be the wrong storage.
        """
        with self._one_at_a_time:
            self._protocol.recover_without_query()

    # ------------------------------------------------------------------ savepoints
    @property
    def query(self) -> Query:
        """Return the query that last called this coordinator.

        Raises `SavepointError` before its first batch.
        """
        return self._lifecycle.query

    def trigger_savepoint(
        self, target: str | CheckpointStorage, checkpoint_location: str | None = None
    ) -> Savepoint:
        """Save the newest checkpoint in `target`, a storage.

        Call this from any thread: it waits for the current batch, and the next batch waits for it.
        If no query runs, or before its first batch, pass its `checkpoint_location`. Raises
        `SavepointError`, `InDoubtError`, `StorageError`.
        """
        return self._savepoints.take(target, location=checkpoint_location)

    def stop_with_savepoint(self, query: Query, target: str | CheckpointStorage) -> Savepoint:
        """Take a savepoint, and stop the query there: no further checkpoint becomes complete.

        Raises `CheckpointError` if a later run of the query is active.
        """
        return self._savepoints.take_and_stop(query, target)

    def cancel_with_savepoint(self, query: Query, target: str | CheckpointStorage) -> Savepoint:
        """Stop the query with a savepoint, then `cancel` it."""
        savepoint = self.stop_with_savepoint(query, target)
        self.cancel(query)
        return savepoint

    def register_metrics(self, registry: CollectorRegistry) -> None:
        """Add the metrics of this job to a registry of `prometheus-client`.

        They are those of `coordinator.operations.statistics.metrics`.
        `CheckpointConfig.metrics_address` serves them without this call.
        """
        prometheus(self.statistics, registry)

    def newest_checkpoint(self) -> dict[str, Any]:
        """Return the newest complete checkpoint in storage as JSON values, without committables.

        Returns {} if there is none.
        """
        newest = JobStore(self.storage, self.job).load_newest()
        if newest is None:
            return {}
        return {
            name: value for name, value in newest.record.to_json().items() if name != "committables"
        }

    # ------------------------------------------------------------------ the end of a query
    def stop(self, query: Query) -> None:
        """Stop the query between two batches.

        A batch that takes more than five seconds longer is cut off. Spark's own `query.stop()` does
        not wait: it interrupts Spark wherever it is, and Hadoop logs a stack if Spark was writing.
        """
        self._lifecycle.stop(query)

    def cancel(self, query: Query) -> None:
        """Stop the query permanently, and settle the job.

        What is complete is committed, everything else is aborted, and this object is closed. With
        `DELETE_ON_CANCELLATION` the job's checkpoints are then deleted from storage, so that its
        checkpointLocation cannot be used again. Raises `InDoubtError`, with nothing deleted, if a
        complete checkpoint could not be made visible, `Superseded` if another driver has taken the
        job over, and `CheckpointError` if a later run of the query is active.
        """
        self._lifecycle.require_no_later_run(query)
        self.stop(query)
        # This object has served a query.
        if self._protocol.run_id and self._protocol.fence.generation:
            # A recovery would stop a newer driver.
            self._protocol.fence.require_newest("cancel the job")
        self.recover()
        if self.config.externalized_cleanup is ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION:
            self._protocol.delete_checkpoints()
        self.close()

    def newest_offsets(self) -> tuple[str, ...]:
        """Return the source offsets up to which everything is complete, one JSON text per source.

        Returns () before the first checkpoint.
        """
        return tuple(self.newest_checkpoint().get("offsets", ()))

    def close(self) -> None:
        """Sweep a last time, and release what is held on the driver.

        After the sweep, a clean stop leaves nothing in doubt. This waits for the current batch. It
        sweeps nothing where storage may be the wrong one, or where the record of the last batch may
        yet land in it.
        """
        self._closed.set()
        self._attendants.close()
        with self._one_at_a_time:
            if self._protocol.may_sweep:
                self._lifecycle.wait_for_workers()
                try:
                    self._protocol.sweep()
                except Exception as error:
                    logger.warning(
                        "last sweep of job %s failed; the next start sweeps: %s",
                        self.job,
                        reason(error),
                    )
            for name, sink in self.sinks.items():
                try:
                    sink.close()
                except Exception:
                    logger.warning("sink %r could not be closed", name, exc_info=True)
            self._protocol.close()
            self._lifecycle.close()
            if self._lifecycle.queries:
                logger.info("job %s %s", self.job, self.statistics.totals())

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(type(self), self._arguments)

    def __enter__(self) -> CheckpointCoordinator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the query, then `close`.

        This raises what the query failed with, even if the block has caught it, and an error that
        the function around this object kept from Spark. An error that leaves the block goes before
        both. Spark's own exception, which passes on only the text of what stopped the query, gives
        way to the error itself.
        """
        failed = swallowed = None
        try:
            for query in self._lifecycle.queries:
                self.stop(query)
                failed = failed or (None if error else query.exception())
            swallowed = self.swallowed_error
        finally:
            self.close()
        if swallowed and not error:
            raise swallowed
        stopped_by = self.last_error
        raised = error or failed
        if stopped_by and raised:
            from pyspark.errors import StreamingQueryException

            if isinstance(raised, StreamingQueryException) and str(stopped_by) in str(raised):
                cause = stopped_by.__cause__
                raise stopped_by.with_traceback(None) from (
                    None if cause and "\n" in str(cause) else cause
                )
        if failed:
            raise failed


def _spool(job: str, storage: str | CheckpointStorage, config: CheckpointConfig) -> Spool | None:
    if config.replay is Replay.RECOMPUTE:
        return None
    uri = config.spool_dir or storage
    if not isinstance(uri, str):
        raise ValueError(
            "replay='spool' with a storage object needs spool_dir: executors open it by its URI"
        )
    return Spool(uri, job)
