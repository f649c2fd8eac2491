"""The two-phase-commit protocol: `_process` and `_checkpoint` are it on one screen, the rest are their steps."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from coordinator import guarantee
from coordinator.config import CheckpointConfig
from coordinator.errors import (
    CheckpointError,
    CheckpointFailed,
    InDoubtError,
    NotExactlyOnce,
    Superseded,
    UnknownSink,
)
from coordinator.guarantee import Guarantee
from coordinator.listener import CheckpointListener, Step
from coordinator.protocol import decisions
from coordinator.protocol.batch import MicroBatch, Sink
from coordinator.protocol.deadline import deadline
from coordinator.protocol.decisions import Call, Complete, Participant
from coordinator.protocol.records import CheckpointStore, Listing, Record
from coordinator.storage import StorageError
from sinks.errors import CommittedError, SinkError
from sinks.task import Ack, SinkTask
from sinks.transaction import Checkpoint, CommitOutcome, CommitState, Committable, Identity, unnamed

logger = logging.getLogger(__package__)

_RETRIES_WHEN_BLOCKED = 2
_PATIENCE = 5.0
"""Seconds that a complete checkpoint may take to become visible when its query is being stopped."""


class CheckpointProtocol:
    """One driver's part in it. Not for several threads: `CheckpointCoordinator` lets one in at a time."""

    def __init__(
        self,
        job: str,
        sinks: dict[str, Sink],
        store: CheckpointStore,
        config: CheckpointConfig,
        listeners: list[CheckpointListener],
    ) -> None:
        self.job = job
        self.sinks = sinks
        self.config = config
        self._store = store
        self._listeners = listeners
        self._run_id: str | None = None
        self._address = ""
        self._generation = 0
        self._newest: Complete | None = None
        self._checked: dict[str, pa.Schema] = {}
        self._swept_at = -math.inf
        self.guarantee = self._promise()

    def _process(self, batch: MicroBatch) -> None:
        if batch.run_id != self._run_id:
            self._become_newest()
            self._load_and_commit(batch)
            self.guarantee = self._promise(batch)
            self._run_id = batch.run_id
        call = self._decide(batch, reloaded=False)
        if call is Call.RELOAD:
            self._load_and_commit(batch)
            call = self._decide(batch, reloaded=True)
        if call is Call.WRITE:
            self._check_schemas(batch)
        if time.monotonic() - self._swept_at > self.config.sweep_interval:
            self._sweep()
        if call is Call.WRITE:
            self._newest = self._make_visible(batch, self._checkpoint(batch))
        else:
            if call is Call.FINISH and self._newest:
                self._newest = self._make_visible(batch, self._newest)
            batch.drain()  # R10: Spark's stateful operators need the batch to run, even with nothing left to write
        self._tell(Step.DONE, batch.facts.checkpoint_id)

    def _become_newest(self) -> None:
        for sink in self.sinks.values():
            sink.open()
        self._checked.clear()
        self._swept_at = -math.inf
        self._generation = self._store.claim_generation(self._address)
        self._tell(Step.GENERATION_CLAIMED, generation=self._generation)

    def _promise(self, batch: MicroBatch | None = None) -> Guarantee:
        """What is known before the query runs, or with its first batch and the sinks open. Raises `NotExactlyOnce`."""
        reasons = guarantee.of_settings(self.config, self._store.storage.uri)
        if batch:
            reasons += batch.weaknesses()
            for name, sink in self.sinks.items():
                try:
                    reasons += [f"sink {name!r}: {why}" for why in sink.weaknesses()]
                except Exception:
                    if self.config.require:
                        raise
                    logger.warning("sink %r cannot tell how durable its target is", name, exc_info=True)
        promise = Guarantee(tuple(reasons))
        if self.config.require and not promise.exactly_once:
            raise NotExactlyOnce(f"job {self.job!r} is to be exactly-once, but is not: {'; '.join(reasons)}")
        if batch:
            logger.log(logging.INFO if promise.exactly_once else logging.WARNING, "job %s: %s", self.job, promise)
            self._tell(Step.GUARANTEED, exactly_once=promise.exactly_once, reasons=promise.reasons)
        return promise

    def _decide(self, batch: MicroBatch, *, reloaded: bool) -> Call:
        call = decisions.on_call(batch.facts, self._newest, adopt=self.config.adopt, reloaded=reloaded)
        if call is Call.SKIP:
            decisions.require_same_offsets(batch.facts, self._store.get(batch.facts.checkpoint_id, 0))
        return call

    def _load_and_commit(self, batch: MicroBatch | None = None) -> None:
        rounds = self._load()
        self._tell(Step.LOADED, checkpoint=rounds[0].checkpoint_id if rounds else -1, rounds=len(rounds))
        self._newest = Complete(rounds) if rounds else None
        self._require_newest("commit")  # R14: what was put after a restore may have been read
        if self._newest:
            self._newest = self._commit(self._newest, batch)
            lost = [decisions.describe(p, c) for p, c in self._newest.lost().items()]
            self._tell(Step.RECOVERED, self._newest.checkpoint_id, committed=self._newest.committed(), lost=lost)

    def _load(self) -> tuple[Record, ...]:
        rounds = self._store.load_newest()
        written = {c.sink for record in rounds for c in record.committables}
        if rounds and rounds[0].restored_from:
            written |= set(rounds[0].partitions)
        if unknown := sorted(written - set(self.sinks)):
            raise UnknownSink(
                f"checkpoint {rounds[0].checkpoint_id} was written by sink(s) {unknown}, which this coordinator "
                f"does not have (it has {sorted(self.sinks)}). A sink's name must be stable over restarts."
            )
        return rounds

    def _checkpoint(self, batch: MicroBatch) -> Complete:
        """Write and pre-commit the batch, and complete it. Fails with nothing visible and nothing decided."""
        failures = blocked = 0
        while True:
            started = milliseconds()
            self._tell(Step.TRIGGERED, batch.facts.checkpoint_id, offsets=batch.facts.offsets)
            acks: list[tuple[str, Ack]] = []
            try:
                with deadline(self.config.timeout, batch):
                    acks = self._run(batch, attempt=failures + blocked)
                    self._validate(batch, acks)
            except (Superseded, InDoubtError):
                raise
            except Exception as error:
                self._abort(acks)
                self._tell(Step.FAILED, batch.facts.checkpoint_id, error=error)
                if not batch.active:
                    raise
                if isinstance(error, SinkError) and error.retryable and blocked < _RETRIES_WHEN_BLOCKED:
                    blocked += 1  # R8: an orphan may hold the lock; settling and sweeping frees it
                elif not isinstance(error, SinkError) and failures < self.config.tolerable_failed_checkpoints:
                    failures += 1
                else:
                    with suppress(CheckpointError):
                        self._sweep()
                    if isinstance(error, SinkError):
                        raise
                    raise CheckpointFailed(
                        f"checkpoint {batch.facts.checkpoint_id} of job {self.job!r} failed before it was complete; "
                        + ("nothing of it is visible" if self.config.exactly_once else "some of it may be visible")
                        + f": {type(error).__name__}: {error}"
                    ) from error
                logger.warning("checkpoint %d failed, trying again: %s", batch.facts.checkpoint_id, error)
                self._load_and_commit(batch)
                self._sweep()
                if decisions.on_call(batch.facts, self._newest, adopt=self.config.adopt, reloaded=True) != Call.WRITE:
                    raise Superseded(f"another driver completed checkpoint {batch.facts.checkpoint_id}") from error
                continue
            return self._complete(batch, acks, started)

    def _complete(self, batch: MicroBatch, acks: list[tuple[str, Ack]], started: int) -> Complete:
        """The commit point: put the record, unless somebody else did."""
        counted = Counter(name for name, _ in acks)  # every partition acknowledges, also one without rows
        partitions = {name: counted[name] for name in self.sinks}
        record = self._record(batch, acks, 0, started, partitions)
        complete = Complete((self._put(record, acks),))
        decisions.require_same_offsets(batch.facts, complete.record)
        return complete

    def _make_visible(self, batch: MicroBatch, complete: Complete) -> Complete:
        """Commit until all of the checkpoint is visible, writing again what the external system lost."""
        while True:
            complete = self._commit(complete, batch)
            lost = decisions.settle(complete)
            if not lost:
                self._tell(Step.COMMITTED, complete.checkpoint_id)
                return complete
            complete = self._replay(batch, complete, lost)

    def _replay(self, batch: MicroBatch, complete: Complete, lost: Sequence[Participant]) -> Complete:
        round = complete.rounds[-1].round + 1  # R3: the successor of the round whose outcomes are final here
        self._require_newest("replay")  # R6
        self._check_schemas(batch)
        reasons = {f"{sink}/{subtask}": complete.outcomes[sink, subtask].reason for sink, subtask in lost}
        logger.warning("checkpoint %d: writing lost transactions again: %s", complete.checkpoint_id, reasons)
        self._tell(Step.REPLAYING, complete.checkpoint_id, lost=reasons, round=round)
        sinks = [self.sinks[name] for name in {sink for sink, _ in lost}]
        partitions = {sink.name: batch.partitions(sink) for sink in sinks}
        decisions.require_same_layout(complete.record, partitions, lost)
        started, blocked = milliseconds(), 0
        while True:
            acks = self._run(batch, attempt=blocked, round=round, lost=lost)
            errors = _errors(acks)
            if not errors:
                break
            self._abort(acks)
            if not errors[0].retryable or blocked == _RETRIES_WHEN_BLOCKED:
                raise errors[0]
            blocked += 1
            self._sweep()
        try:
            decisions.require_same_rows(complete.lost(), {(s, a.subtask): a for s, a in acks if a.committable})
        except InDoubtError:
            self._abort(acks)
            raise
        self._tell(Step.REPLAY_PRE_COMMITTED, complete.checkpoint_id)
        return complete.superseded_by(self._put(self._record(batch, acks, round, started, partitions), acks))

    # ------------------------------------------------------------------ its steps
    def _run(
        self,
        batch: MicroBatch,
        *,
        attempt: int,
        round: int = 0,
        lost: Sequence[Participant] | None = None,
    ) -> list[tuple[str, Ack]]:
        """Pre-commit on all participants (or the lost ones), and collect their acks."""
        names = self.sinks if lost is None else {sink for sink, _ in lost}
        tasks = {
            name: SinkTask(
                self.sinks[name],
                self.job,
                self._store.lineage,
                batch.facts.checkpoint_id,
                self._generation,
                round,
                attempt,
                None if lost is None else frozenset(subtask for sink, subtask in lost if sink == name),
                self.config.exactly_once or lost is not None,  # a replay is decided by its record in either mode
            )
            for name in names
        }
        return [(name, ack) for name, acks in batch.run(tasks).items() for ack in acks]

    def _validate(self, batch: MicroBatch, acks: list[tuple[str, Ack]]) -> None:
        if errors := _errors(acks):
            raise errors[0]
        self._tell(
            Step.PRE_COMMITTED,
            batch.facts.checkpoint_id,
            participants=sum(ack.committable is not None for _, ack in acks),
            rows=_rows(acks),
        )
        for name, sink in self.sinks.items():
            if committables := [ack.committable for n, ack in acks if n == name and ack.committable]:
                sink.validate_all(self._about(batch.facts.checkpoint_id), committables)
        self._tell(Step.VALIDATED, batch.facts.checkpoint_id)

    def _put(self, record: Record, acks: list[tuple[str, Ack]]) -> Record:
        """Decide by put-if-absent; answers the record that decides. One listing after it serves R1 (stop if a newer
        checkpoint is complete), R14 and retention."""
        step = Step.REPLAY_COMPLETE if record.round else Step.COMPLETE
        try:
            self._require_newest("complete")
            decided: Record | None = record
            if not self._store.put(record):
                decided = self._store.get(record.checkpoint_id, record.round)
                if decided:
                    self._abort(acks, keep=decided.committables)
        except Superseded:
            self._abort(acks)
            raise
        except StorageError as error:
            # The put may still land, so nothing is aborted: the next recovery commits or sweeps what is pre-committed.
            raise CheckpointFailed(
                f"the record of checkpoint {record.checkpoint_id} of job {self.job!r} could not be written; start the "
                f"query again when the storage answers: {error}"
            ) from error
        self._tell(step, record.checkpoint_id, adopted=decided is not record)
        there = self._store.look()
        if decided is None or there.newest_complete > record.checkpoint_id:
            self._abort(acks)
            raise Superseded(
                f"checkpoint {there.newest_complete} of job {self.job!r} is complete already while this driver was at "
                f"{record.checkpoint_id}; it stops. Two drivers of one job were running."
            )
        # R14: a restore looks for records after it has claimed, so one of both sees the other
        self._require_newest("commit", there)
        try:
            self._store.delete_older_than(record.checkpoint_id - self.config.retained_checkpoints + 1, there)
        except StorageError:
            logger.warning("could not delete old records; the next checkpoint tries again", exc_info=True)
        return decided

    def _commit(self, complete: Complete, batch: MicroBatch | None) -> Complete:
        """Ask for every outcome that is not final, again and again within the commit timeout; but not long when the
        query of `batch` is being stopped, since the next start does the same."""
        self._tell(Step.COMMITTING, complete.checkpoint_id, participants=len(complete.pending()))
        errors: dict[Participant, Exception] = {}
        started = time.monotonic()

        def pause(seconds: float) -> None:
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                if batch and not batch.active and time.monotonic() - started > _PATIENCE:
                    raise _AskAgain
                time.sleep(min(left, 0.2))

        try:
            for attempt in Retrying(
                stop=stop_after_delay(self.config.commit_timeout),
                wait=wait_random_exponential(multiplier=0.1, max=10),
                retry=retry_if_exception_type(_AskAgain),
                sleep=pause,
                reraise=True,
            ):
                with attempt:
                    if errors:
                        self._sweep()  # R7: what is in the way may be an orphan
                    complete, errors = self._ask(complete)
                    if errors:
                        logger.warning(
                            "checkpoint %d: asking again for %d transaction(s), e.g. %s",
                            complete.checkpoint_id,
                            len(errors),
                            next(iter(errors.values())),
                        )
                        raise _AskAgain
        except _AskAgain:
            waited = time.monotonic() - started
            raise decisions.still_asked(complete, errors, waited) from next(iter(errors.values()))
        decisions.settle(complete)
        return complete

    def _ask(self, complete: Complete) -> tuple[Complete, dict[Participant, Exception]]:
        """Ask once for every outcome that is not final, and tell who could not answer."""
        about = self._about(complete.checkpoint_id)
        outcomes: dict[Participant, CommitOutcome] = {}
        errors: dict[Participant, Exception] = {}
        for name, sink in self.sinks.items():
            asked = [p for p in complete.pending() if p[0] == name]
            told = _notify(sink, about, [complete.named[p] for p in asked])
            final = not any(isinstance(outcome, Exception) for outcome in told)
            for participant, outcome in zip(asked, told, strict=True):
                if isinstance(outcome, Exception):
                    errors[participant] = outcome
                elif final or outcome.state is CommitState.COMMITTED:  # the rest is asked again together
                    outcomes[participant] = outcome
        return complete.told(outcomes), errors

    def _sweep(self) -> None:
        """Abort every pre-committed transaction of this job that no record names (presumed abort). Generation and
        records are read after the listing: a newer driver, and every decision that could be meant by then, is seen.
        What cannot be listed or aborted now is left to the next sweep: nothing but locks and resources depends on it.
        """
        aborted: dict[str, list[dict[str, Any]]] = {}
        self._swept_at = time.monotonic()
        for name, sink in self.sinks.items():
            try:
                listed = list(sink.in_doubt(self.job))
            except Exception:
                self._swept_at = -math.inf
                logger.warning("sweep of sink %r failed and will be tried again", name, exc_info=True)
                continue
            try:
                self._require_newest("sweep")
                rounds = self._store.load_newest() if listed else ()
                if self._newest and listed and not rounds:
                    raise StorageError(self._store.storage.uri, "", "the records of this job vanished")
            except StorageError:
                self._swept_at = -math.inf
                logger.warning("the records cannot be read, so nothing is swept; tried again later", exc_info=True)
                continue
            for transaction in unnamed(listed, [c.transaction for record in rounds for c in record.committables]):
                try:
                    sink.abort(transaction)
                    aborted.setdefault(name, []).append(dict(transaction))
                except CommittedError:
                    pass  # listed, then committed by whoever it belongs to
                except Exception:
                    self._swept_at = -math.inf
                    logger.warning("could not abort %s; left to the next sweep", dict(transaction), exc_info=True)
        if aborted:
            logger.info("job %s: aborted orphaned transactions %s", self.job, aborted)
        self._tell(Step.SWEPT, aborted=aborted)

    def _abort(self, acks: list[tuple[str, Ack]], keep: Sequence[Committable] = ()) -> None:
        """Abort one's own transactions but those that a record names. What fails is left to the next sweep."""
        for name, sink in self.sinks.items():
            own = [ack.committable for n, ack in acks if n == name and ack.committable]
            for transaction in unnamed([c.transaction for c in own], [c.transaction for c in keep]):
                self._abort_quietly(sink, transaction)

    def _abort_quietly(self, sink: Sink, transaction: Identity) -> None:
        try:
            sink.abort(transaction)
        except Exception:
            logger.warning("could not abort %s; left to the next sweep", dict(transaction), exc_info=True)

    def _require_newest(self, what: str, there: Listing | None = None) -> None:
        newest = there.newest_generation if there else self._store.newest_generation()
        if newest > self._generation:
            raise Superseded(
                f"generation {newest} of job {self.job!r} has started; this driver (generation {self._generation}) may "
                f"not {what} any more. Two drivers of one job were running."
            )

    def _check_schemas(self, batch: MicroBatch) -> None:
        for name, sink in self.sinks.items():
            schema = batch.schema(sink)
            if self._checked.get(name) != schema:
                sink.check(schema)
                self._checked[name] = schema

    def _record(
        self,
        batch: MicroBatch,
        acks: list[tuple[str, Ack]],
        round: int,
        started: int,
        partitions: Mapping[str, int],
    ) -> Record:
        return Record(
            self.job,
            self._store.lineage,
            batch.facts.checkpoint_id,
            round,
            self._generation,
            batch.facts.query_id,
            batch.facts.offsets,
            partitions,
            tuple(ack.committable for _, ack in acks if ack.committable),
            self.config.mode.value,
            _rows(acks),
            started,
            milliseconds(),
            str(self.guarantee),
            planned_at=batch.facts.planned_at,
        )

    def _about(self, checkpoint_id: int) -> Checkpoint:
        oldest = max(0, checkpoint_id - self.config.retained_checkpoints)
        return Checkpoint(self.job, self._store.lineage, checkpoint_id, oldest)

    def _tell(self, step: Step, checkpoint_id: int = -1, **facts: Any) -> None:
        logger.debug("job %s checkpoint %d: %s %s", self.job, checkpoint_id, step.value, facts)
        for listener in self._listeners:
            try:
                listener.on_step(step, checkpoint_id, facts)
            except Exception:
                logger.exception("listener %r failed at %s", listener, step)


class _AskAgain(Exception):
    """Some participant answered with an exception instead of an outcome."""


def _notify(
    sink: Sink, checkpoint: Checkpoint, committables: Sequence[Committable]
) -> Sequence[CommitOutcome | Exception]:
    try:
        return sink.notify_checkpoint_complete(checkpoint, committables)
    except Exception as error:
        return [error] * len(committables)


def _errors(acks: list[tuple[str, Ack]]) -> list[SinkError]:
    """Those that trying again cannot mend come first."""
    return sorted((ack.error for _, ack in acks if ack.error), key=lambda error: error.retryable)


def _rows(acks: list[tuple[str, Ack]]) -> dict[str, int]:
    rows: dict[str, int] = {}
    for name, ack in acks:
        rows[name] = rows.get(name, 0) + ack.fingerprint.rows
    return rows


def milliseconds() -> int:
    """Now, since the epoch."""
    return time.time_ns() // 1_000_000
