"""The two-phase-commit protocol on the driver.

`process` shows it as a whole; its steps follow in order. docs/protocol.md explains the numbers of
the steps and the rules (R1 to R20).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count
from typing import TypeVar

import pyarrow as pa

from coordinator.config import CheckpointConfig
from coordinator.errors import (
    CheckpointError,
    CheckpointFailed,
    CorruptRecord,
    ExternalSystemBehind,
    InDoubtError,
    SourceReplaced,
    StorageBehind,
    Superseded,
    reason,
)
from coordinator.listener import Listeners, Step
from coordinator.protocol import decisions, guarantee, memories
from coordinator.protocol.abort_rights import AbortRights
from coordinator.protocol.deadline import deadline
from coordinator.protocol.decisions import Action
from coordinator.protocol.fence import CommitPermit, Fence
from coordinator.protocol.guarantee import Guarantee
from coordinator.protocol.outages import Outages
from coordinator.protocol.ports import (
    Acks,
    MicroBatch,
    Sink,
    TopicIds,
    ask_to_commit,
    check_together,
    dead_letter_writers,
    places,
)
from coordinator.protocol.sweep import Sweeper, abort_or_leave
from coordinator.storage import StorageError
from coordinator.store.job_store import JobStore
from coordinator.store.records import (
    Claim,
    CompletedCheckpoint,
    Listing,
    Participant,
    Record,
    RecordKey,
)
from coordinator.store.spool import Spool, SpooledRows
from coordinator.task.task import LostRows, SinkTask
from sinks import dead_letters
from sinks._util.log import get_logger
from sinks._util.machine import Clock, machine
from sinks._util.progress import progress
from sinks.errors import ConfigurationError, SinkError
from sinks.optional import Auditable, JointCommitting, SchemaEvolving, Validating
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    CommitState,
    Committable,
    Identity,
    not_among,
)

logger = get_logger(__package__)

T = TypeVar("T")

STOP_GRACE_PERIOD = 5.0
"""Seconds that a complete checkpoint may take to become visible when its query is being stopped."""


class CheckpointProtocol:
    """The driver's side of the protocol.

    It is not for several threads: `CheckpointCoordinator` lets one in at a time.
    """

    def __init__(
        self,
        job: str,
        sinks: dict[str, Sink],
        store: JobStore,
        config: CheckpointConfig,
        listeners: Listeners,
        clock: Clock,
        spool: Spool | None = None,
    ) -> None:
        """Open nothing yet. `spool` keeps rows for replays."""
        self.job = job
        self.sinks = sinks
        self.store = store
        self.config = config
        self.listeners = listeners
        self.clock = clock
        self._guarantee: Guarantee | None = None
        self.fence = Fence(store)
        self.newest: CompletedCheckpoint | None = None
        """The newest complete checkpoint that this driver knows; None if there is none."""
        self._spool = spool
        self.run_id: str | None = None
        """Spark's id of the run that this driver serves; None before its first batch."""
        self._predecessors: Mapping[str, int] | None = None
        """The lineages before this one, for the field `Record.predecessors` of the next record."""
        self._topic_ids: TopicIds = ()
        """The ids of the source's Kafka topics.

        They must be the same at the next checkpoint (R19).
        """
        self._abort_rights = AbortRights()
        """The right to abort orphans. Like `fence`, it belongs to this generation."""
        self._checked_schemas: dict[str, pa.Schema] = {}
        """The schema that each sink's `check` was called with last."""
        self._evolved_schemas: dict[str, pa.Schema] = {}
        """The schema that each sink's `evolve` was called with last."""
        self._commit_times: dict[str, tuple[float, float]] = {}
        """The times of the first question and the last answer, by sink.

        They are of the `commit` of the newest checkpoint.
        """
        self._outages = Outages(job, clock)
        self._dead_letter_writers = dead_letter_writers(sinks)
        """The sinks whose tasks write dead letters, by the name of the dead-letter sink."""
        self._places = places(sinks)
        """What the sinks that commit as one have in common, by the name of the sink."""
        self._sweeper = Sweeper(job, sinks, config.sweep_interval, listeners, clock, self._outages)

    def process(self, batch: MicroBatch) -> None:
        """See one micro-batch through: when this returns, all of its rows are visible, once.

        For the first batch of a run, claim a generation before. From there on, this is a new
        driver, even in the same object.
        """
        try:
            starts = batch.run_id != self.run_id
            # 1. recover (with 2. inside it, before it commits); later batches need 2. alone: write,
            # finish or skip
            action = self._start_run(batch) if starts else self._choose_action(batch)
            if self._sweeper.is_due:
                self.sweep()  # 3. presumed abort
            if action is Action.WRITE:
                self._topic_ids = self._topic_ids_now(batch)
                record = self._pre_commit(batch)  # 4.-5. phase one
                permit = self.decide(record)  # 6.-7. THE COMMIT POINT
                # R12: the record may be adopted from another driver
                decisions.require_same_offsets(batch.facts, permit.complete.record)
                committed = self.commit(permit, batch)  # 8. phase two
                self._purge(self._replay_lost(committed, batch))
            else:
                if action is Action.FINISH and self.newest:
                    self._purge(self._replay_lost(self.newest, batch))
                # R10: Spark's stateful operators need the batch to run, even with nothing left to
                # write
                batch.drain()
            self.listeners.tell(Step.DONE, batch.facts.checkpoint_id)
        except Exception as error:
            self._require_not_superseded(batch, error)
            raise

    def _purge(self, visible: CompletedCheckpoint) -> None:
        """Delete what nobody needs once a checkpoint is visible.

        These are older proofs, and its spooled rows. A sink without rows in the checkpoint is not
        asked, because its newest proof may be all by which it remembers the job (R15).
        """
        for name in dict.fromkeys(sink for sink, _ in visible.committables):
            try:
                self.sinks[name].purge(self._checkpoint(visible.checkpoint_id))
            except Exception:
                logger.warning(
                    "sink %r could not purge old proofs; it is asked again", name, exc_info=True
                )
        if self._spool:
            self._spool.delete(self.store.lineage, visible.checkpoint_id, self._predecessors or ())

    def _require_not_superseded(self, batch: MicroBatch, error: Exception) -> None:
        """Raise `Superseded` or `StorageBehind` if another driver may have caused `error`.

        To a driver that was suspended meanwhile, what another driver does looks like any failure.
        """
        if (
            batch.active
            and self.fence.generation
            and not isinstance(error, (Superseded, StorageBehind))
        ):
            try:
                self.fence.require_newest("go on")
                has_started = batch.run_id == self.run_id
                if has_started and (
                    self.newest is None or self.newest.checkpoint_id < batch.facts.checkpoint_id
                ):
                    self._compare_memories_again(batch)
            except (Superseded, StorageBehind) as cause:
                raise cause from error
            except Exception:
                logger.debug("it cannot be told whether another driver is the cause", exc_info=True)

    # -------------------------------------------------- called by the coordinator, and by operators
    def claim_generation(
        self, next_heartbeat: float = 0.0, batch: MicroBatch | None = None
    ) -> None:
        """Become the newest driver, so that older ones stop.

        `next_heartbeat` is the number of seconds until the first heartbeat of this driver is due; 0
        if it will run no query. `batch` is the first of a run, if there is one. If the batch is
        refused in any case, it is refused before the claim, because the claim would stop a driver
        that works well.
        """
        self.fence = Fence(self.store)
        self.open_sinks()
        self._abort_rights = AbortRights()
        self._checked_schemas.clear()
        self._evolved_schemas.clear()
        self._sweeper.make_due()
        if batch:
            self._refuse_before_claim(batch)
        self.fence = Fence(self.store, self.store.claim_generation("", next_heartbeat))
        self.listeners.tell(Step.GENERATION_CLAIMED, generation=self.fence.generation)

    def _refuse_before_claim(self, batch: MicroBatch) -> None:
        """Refuse the first batch of a run before the claim, if it would be refused after it.

        If no driver runs, this does nothing: the claim stops nobody then, and lets `coordinator
        status` show the refusal.
        """
        # All of this is read once more after the claim (R14), because a running driver may change
        # it meanwhile.
        claim = self.store.follow_newest_claim()
        if not claim.generation or self._has_ended(claim):
            return
        newest = self.load()
        try:
            self._compare_with_spark(batch, newest)
        except Superseded:
            raise
        except CheckpointError:
            remembered = self._memories(batch)
            newest = self.load()
            retained = self.store.record_keys() if newest else []
            self._compare_memories(remembered, newest, retained, batch)  # this may find the cause
            raise

    def _has_ended(self, claim: Claim) -> bool:
        """Tell whether the driver of a claim says that it has ended.

        A driver whose last heartbeat cannot be read may run.
        """
        try:
            return bool(self.store.journal.last_heartbeat(claim).ended)
        except CorruptRecord:
            return False

    def open_sinks(self) -> None:
        """Open all sinks.

        Raises `CheckpointError` in place of an error that is not a sink's own, because that error
        would not name the sink.
        """
        for name, sink in self.sinks.items():
            try:
                sink.open()
            except (SinkError, CheckpointError):
                raise
            except Exception as error:
                raise CheckpointError(f"sink {name!r} cannot be opened: {reason(error)}") from error

    def recover_without_query(self) -> None:
        """Commit the newest checkpoint again, and sweep.

        Without a checkpoint nothing is swept, because it may be the wrong storage.
        """
        self.claim_generation()
        self.recover_newest()
        if self.newest:
            self.sweep()

    def claim_and_commit_newest(self) -> CompletedCheckpoint | None:
        """Return the newest complete checkpoint, committed as far as it can be.

        This claims a generation only if this driver knows no checkpoint, and reads again if storage
        has another one.
        """
        if self.newest is None:
            self.claim_generation()
        if self.newest is None or self.newest.checkpoint_id != self.store.listing().newest_complete:
            self.recover_newest()
        return self.newest

    def delete_checkpoints(self) -> None:
        """Delete all records.

        Raises `InDoubtError`, with nothing deleted, while a checkpoint is complete and not yet
        visible.
        """
        if self.newest:
            decisions.require_visible(self.newest)
            self.store.delete_older_than(self.newest.checkpoint_id + 1, self.store.listing())
            if self._spool:
                self._spool.delete(self.store.lineage)
            self.newest = None

    def close(self) -> None:
        self.store.storage.close()
        if self._spool:
            self._spool.close()

    # ------------------------------------------------------------------ 1. recover
    def _start_run(self, batch: MicroBatch) -> Action:
        """Recover, check the batch, and compute the guarantee.

        Returns what to do with the first batch of this run.
        """
        action = self.recover_newest(batch)
        self._topic_ids = (
            self.newest.record.topic_ids if self.newest and not self.config.adopt else ()
        )
        self._check_batch(action, batch)  # this may create what the sinks are asked about
        self.compute_guarantee(self.sinks, batch)
        level = logging.INFO if self.guarantee.exactly_once else logging.WARNING
        logger.log(level, "job %s: %s", self.job, self.guarantee)
        self.listeners.tell(
            Step.GUARANTEED,
            exactly_once=self.guarantee.exactly_once,
            weaknesses=self.guarantee.weaknesses,
        )
        self.run_id = batch.run_id
        return action

    @property
    def guarantee(self) -> Guarantee:
        """Return the guarantee as it was computed last, at first without asking a sink."""
        return self._guarantee or self.compute_guarantee({})

    def compute_guarantee(
        self, sinks: Mapping[str, Sink], batch: MicroBatch | None = None
    ) -> Guarantee:
        """Compute `guarantee` again.

        Raises `NotExactlyOnce` if the job requires more than it can have, and `StorageError` if the
        storage cannot be opened.
        """
        computed = guarantee.compute_guarantee(
            self.job, self.config, self.store.storage, sinks, batch
        )
        self._guarantee = computed
        return computed

    def recover_newest(self, batch: MicroBatch | None = None) -> Action:
        """Read the newest complete checkpoint, and commit it again.

        Before the commit, all memories are checked to fit together (R15). Returns what to do with
        the batch. Without a batch, this is SKIP, which then means nothing.
        """
        remembered = self._memories(batch)
        newest = self.load()
        retained = self.store.record_keys() if newest else []
        self._compare_memories(remembered, newest, retained, batch)
        if newest is None:
            self.fence.require_newest("commit")
        action = self._compare_with_spark(batch, newest) if batch else Action.SKIP
        if newest and remembered and not newest.record.restored_from:
            older = [key for key in retained if key.checkpoint_id < newest.checkpoint_id]
            self._commit_in_doubt_again(remembered, older, newest.record.newest_rows, batch)
        loaded, rounds = (newest.checkpoint_id, len(newest.rounds)) if newest else (-1, 0)
        record = newest.record if newest else None
        rows, dead_lettered = (record.rows, record.dead_lettered) if record else ({}, {})
        self.listeners.tell(
            Step.LOADED, checkpoint=loaded, rounds=rounds, rows=rows, dead_lettered=dead_lettered
        )
        self.newest = newest
        if not newest:
            return action
        self._abort_rights.grant()
        self.newest = self.commit(self.fence.permit(newest), batch)
        lost = Counter(sink for sink, _ in self.newest.lost_participants())
        committed = len(self.newest.committables) - len(self.newest.hidden_participants())
        self.listeners.tell(
            Step.RECOVERED, self.newest.checkpoint_id, committed=committed, lost=lost
        )
        if action is Action.WRITE:
            decisions.require_none_lost(self.newest)
        return action

    def _memories(self, batch: MicroBatch | None) -> memories.Memories:
        """Ask each sink what it remembers of the job."""
        # Records are read after the sinks are asked, so that each checkpoint that is committed by
        # then has a record.
        if not self.config.exactly_once:
            return {}
        return self._ask_sinks(
            "tell what is committed", lambda sink: sink.committed_checkpoints(self.job), batch
        )

    def _compare_with_spark(self, batch: MicroBatch, newest: CompletedCheckpoint | None) -> Action:
        """Return what to do with the batch, by what was read after Spark's call.

        Raises if its checkpointLocation and storage do not fit together (R12), and `Superseded` if
        another driver has continued there.
        """
        checkpoint_id = batch.facts.checkpoint_id
        if newest and newest.checkpoint_id >= checkpoint_id:
            # Spark deletes old entries of `commits`, so the newest possible ones are looked for.
            for done in sorted({checkpoint_id, max(checkpoint_id, newest.checkpoint_id - 1)}):
                if batch.is_done(done):
                    raise decisions.overtaken_error(self.job, checkpoint_id, done, batch.location)
        action = decisions.action_for(batch.facts, newest, adopt=self.config.adopt, reloaded=True)
        if newest and action is Action.WRITE:  # R12: its history is the same, not only its query
            decisions.require_same_offsets(batch.facts_of(newest.checkpoint_id), newest.record)
        if action is Action.SKIP:  # R12: done only with the same input
            decisions.require_same_offsets(batch.facts, self.store.get(checkpoint_id, 0))
        return action

    def _compare_memories(
        self,
        remembered: memories.Memories,
        newest: CompletedCheckpoint | None,
        retained: Sequence[RecordKey],
        batch: MicroBatch | None,
    ) -> None:
        """Raise if storage or a sink was restored to an older state (R15).

        `retained` are the records in storage.
        """
        adopt = self.config.adopt
        if self.config.exactly_once:
            self._predecessors = memories.predecessors(remembered, newest, self.store.lineage)
        else:
            self._predecessors = newest.record.predecessors if newest else None
        if newest:
            same_mode = newest.record.mode == self.config.mode.value
            known = self._known_up_to(newest.checkpoint_id if same_mode else math.inf)
            for name, memory in remembered.items():
                self._require_none_later(name, memory, known)
            base = self.store.get(retained[0].checkpoint_id, 0) if retained else None
            memories.require_restored(remembered, base or newest.record, self.store.storage.uri)
        else:
            before = batch.facts.checkpoint_id - 1 if batch and adopt else -1
            for name, memory in remembered.items():
                if max((memory or {}).values(), default=-1) > before:
                    self._require_none_later(name, memory, {})

    def _known_up_to(self, checkpoint_id: float) -> Mapping[str, float]:
        """Return the newest checkpoint that a sink may have of each lineage.

        This is `checkpoint_id` for this lineage, and what is known of the lineages before.
        """
        return {**(self._predecessors or {}), self.store.lineage: checkpoint_id}

    def _require_none_later(
        self, sink: str, remembered: Mapping[str, int] | None, known: Mapping[str, float]
    ) -> None:
        """Raise `StorageBehind` if a sink has committed an unknown checkpoint (R15).

        This is a checkpoint after those `known` by lineage, or one of another lineage. Raises
        `Superseded` if a newer driver may have committed it.
        """
        try:
            memories.require_none_later(
                sink, remembered, known, self.store.lineage, self.store.storage.uri
            )
        except StorageBehind:
            self.fence.displaced = True
            if self.fence.generation:
                # The cause may be a newer driver of this storage, perhaps of a restored savepoint.
                self.fence.require_newest("go on")
            raise

    def _commit_in_doubt_again(
        self,
        remembered: memories.Memories,
        visible: Sequence[RecordKey],
        newest_rows: Mapping[str, int],
        batch: MicroBatch | None,
    ) -> None:
        """Commit again what was visible, and is in doubt again.

        This happens if the sink's system was restored to a state before the commit. `visible` are
        records in storage, and `newest_rows` is as in `Record`, up to the last of them. Raises
        `ExternalSystemBehind` if rows are gone.
        """
        memories.require_records(remembered, newest_rows, self.store.lineage, visible)
        if not visible:
            return
        in_doubt = self._ask_sinks(
            "list what is in doubt", lambda sink: list(sink.in_doubt(self.job)), batch
        )
        wanted = memories.record_filter(remembered, chain(*in_doubt.values()), self.store.lineage)
        decided = self.store.read([key for key in visible if wanted(key.checkpoint_id)])
        again = memories.find_in_doubt_again(remembered, in_doubt, decided, self._places)
        for name, part in again:
            logger.warning(
                "checkpoint %d: sink %r has it in doubt again: committing it",
                part.checkpoint_id,
                name,
            )
            if lost := self.commit(self.fence.permit(part), batch).lost_participants():
                (behind, _), *_ = lost
                memory = remembered.get(behind, remembered[name])
                raise memories.external_system_behind_error(
                    behind, memories.newest_committed(memory, part), part.for_sinks([behind])
                )

    def _ask_sinks(
        self, doing: str, question: Callable[[Sink], T], batch: MicroBatch | None
    ) -> dict[str, T]:
        """Ask each sink, and return the answers by its name.

        If a sink that has something to commit does not answer, it is asked again within the commit
        timeout. Other failures are raised. `doing` is the question in words, for the log.
        """
        answers: dict[str, T] = {}
        started = self.clock.monotonic()
        tries = 0
        for name, sink in self.sinks.items():
            while name not in answers:
                try:
                    answers[name] = question(sink)
                    self._outages.record_success(f"sink {name!r}", doing)
                except ConfigurationError:
                    raise
                except Exception as error:
                    newest = self.load()
                    pending = newest.for_sinks([name]) if newest else None
                    if pending is None or not pending.committables:
                        if batch:
                            # If the setup is wrong, this raises an error that says so.
                            self._check_schemas(batch)
                        raise
                    tries += 1
                    self._outages.record_failure(f"sink {name!r}", doing, error)
                    if not self._wait_to_ask_again(tries, started, batch):
                        unanswered = dict.fromkeys(pending.committables, error)
                        waited = self.clock.monotonic() - started
                        raise decisions.still_in_doubt_error(pending, unanswered, waited) from error
        return answers

    def load(self) -> CompletedCheckpoint | None:
        newest = self.store.load_newest()
        decisions.require_sinks(newest, self.sinks)
        return newest

    # ------------------------------------------------------------------ 2. choose
    def _choose_action(self, batch: MicroBatch) -> Action:
        action = decisions.action_for(
            batch.facts, self.newest, adopt=self.config.adopt, reloaded=False
        )
        if action is Action.RELOAD:  # R9: what this driver knows may be old
            action = self.recover_newest(batch)
        self._check_batch(action, batch)
        return action

    def _check_batch(self, action: Action, batch: MicroBatch) -> None:
        """Check what may still refuse the batch. After this, transactions may be aborted."""
        if action is Action.WRITE:
            self._check_schemas(batch)
        self._abort_rights.grant()

    def _check_schemas(self, batch: MicroBatch) -> None:
        schemas = {name: self._schema(batch, name) for name in self.sinks}
        if self._checked_schemas == schemas:
            return
        for name, sink in self.sinks.items():
            if self._checked_schemas.get(name) != schemas[name]:
                sink.check(schemas[name])
        check_together(self.sinks.values())
        self._checked_schemas = schemas

    def _schema(self, batch: MicroBatch, name: str) -> pa.Schema:
        """Return the columns that a sink gets."""
        return (
            dead_letters.SCHEMA
            if name in self._dead_letter_writers
            else batch.schema(self.sinks[name])
        )

    # ------------------------------------------------------------------ 3. sweep
    @property
    def may_sweep(self) -> bool:
        """Tell whether the records say of each transaction in doubt what is decided (R16).

        Once this driver was told that another storage, driver or target is in place of its own, the
        records may not say so, and never will again.
        """
        return self._abort_rights.held and not self.fence.displaced

    def sweep(self) -> None:
        """Abort what is in doubt and no record names, once that is safe (R16)."""
        if self.may_sweep:
            self._sweeper.sweep(self.fence, known=self.newest)

    def _abort(self, own: Iterable[Committable], keep: Sequence[Committable] = ()) -> None:
        """Abort the driver's `own` transactions, except those to `keep`.

        What cannot be aborted is left to the next sweep. All of them are left to it if another
        driver may have given its own transactions the same names (R4).
        """
        if self.fence.has_namesake:
            return
        kept = [committable.transaction for committable in keep]
        by_sink: dict[str, list[Identity]] = {}
        for committable in own:
            by_sink.setdefault(committable.sink, []).append(committable.transaction)
        for name, transactions in by_sink.items():
            abort_or_leave(self.sinks[name], not_among(transactions, kept))

    # ------------------------------------------------------------------ 4.-5. phase one
    def _pre_commit(self, batch: MicroBatch) -> Record:
        """Write the batch, and return the record that will complete it.

        If this raises, nothing is visible or decided.
        """
        checkpoint_id = batch.facts.checkpoint_id
        errors = list[Exception]()
        while True:
            started = self.clock.milliseconds()
            acks = Acks()
            self.listeners.tell(Step.TRIGGERED, checkpoint_id, offsets=batch.facts.offsets)
            try:
                self._evolve(batch)
                with deadline(self.config.timeout, batch, self.clock):
                    acks = self._run(batch, len(errors))  # 4.
                    self._check_before_decision(batch, acks)  # 5.
                # No topic gets the id of an earlier one. If the id is the same before and after,
                # the tasks have read this very topic.
                self._topic_ids = self._topic_ids_now(batch)
                partitions = {name: acks.partitions[name] for name in self.sinks}
                return self._record(batch, acks, partitions, started)
            except InDoubtError:
                raise
            except (SourceReplaced, Superseded, StorageBehind):
                self._abort(acks.committables)
                raise
            except Exception as error:
                self._abort(acks.committables)
                self.listeners.tell(Step.FAILED, checkpoint_id, error=error)
                errors.append(error)
            self._retry_or_raise(batch, errors)

    def _retry_or_raise(self, batch: MicroBatch, errors: Sequence[Exception]) -> None:
        """Get ready for another try of the batch, or raise what stops the query.

        `errors` are those of all its tries so far.
        """
        checkpoint_id = batch.facts.checkpoint_id
        error = errors[-1]
        if not batch.active:  # the next start hands the batch over again
            raise error
        if not decisions.may_try_again(errors, tolerable=self.config.tolerable_failed_checkpoints):
            with suppress(CheckpointError):
                self.sweep()
            if isinstance(error, SinkError):
                raise error
            exactly_once = self.config.exactly_once
            raise decisions.failed_error(
                checkpoint_id, self.job, error, exactly_once=exactly_once
            ) from error
        logger.warning("checkpoint %d failed, trying again: %s", checkpoint_id, reason(error))
        action = self.recover_newest(batch)
        self.sweep()  # R8: an orphan may hold the lock
        if action is not Action.WRITE:
            raise Superseded(f"another driver completed checkpoint {checkpoint_id}") from error

    def _evolve(self, batch: MicroBatch) -> None:
        """Let sinks alter their tables for the columns of this batch.

        This is called after the commits and the sweep, because pre-committed transactions lock
        their tables. If a lock wait times out, the checkpoint fails as by any error of a task, and
        is tried again (R8).
        """
        for name, sink in self.sinks.items():
            if not isinstance(sink, SchemaEvolving) or not sink.evolves:
                continue
            schema = self._schema(batch, name)
            if self._evolved_schemas.get(name) != schema:
                self.fence.require_newest("alter a table")
                sink.evolve(schema)
                self._evolved_schemas[name] = schema

    def _run(
        self,
        batch: MicroBatch,
        attempt: int,
        round: int = 0,
        lost_rows: Mapping[str, LostRows] | None = None,
    ) -> Acks:
        """Run the tasks of the whole batch, or, as replay `round`, write `lost_rows` again.

        `lost_rows` are by sink. `attempt` is the number of tries that have failed.
        """
        checkpoint_id = batch.facts.checkpoint_id
        lineage = self.store.lineage
        tasks = {
            name: SinkTask(
                sink,
                self.job,
                lineage,
                checkpoint_id,
                self.fence.generation,
                round=round,
                attempt=attempt,
                # a replay is decided by its record in either mode
                exactly_once=self.config.exactly_once or lost_rows is not None,
                replay=lost_rows[name] if lost_rows else None,
                spooling=self._spool.spooling(lineage, checkpoint_id, name)
                if self._spool
                else None,
            )
            for name, sink in self.sinks.items()
            if name not in self._dead_letter_writers and (lost_rows is None or name in lost_rows)
        }
        ended: dict[str, float] = {}

        def has_ended(name: str) -> None:
            ended[name] = self.clock.monotonic()

        acks = batch.run(tasks, has_ended)
        ended |= {
            dead: ended[name] for dead, name in self._dead_letter_writers.items() if name in ended
        }
        return Acks(acks, ended)

    def _check_before_decision(self, batch: MicroBatch, acks: Acks) -> None:
        """Raise if anything speaks against the checkpoint.

        That may be the error of a task, the limits of dead letters, a target's memory, or a sink's
        `validate_all`.
        """
        if errors := acks.errors:
            raise errors[0]
        checkpoint_id = batch.facts.checkpoint_id
        rows = acks.rows
        decisions.require_few_dead_letters(checkpoint_id, rows, acks.all, self.sinks)
        self.listeners.tell(
            Step.PRE_COMMITTED,
            checkpoint_id,
            participants=len(acks.committables),
            rows=rows,
            bytes=acks.bytes,
            dead_lettered={
                name: rows[dead]
                for dead, name in self._dead_letter_writers.items()
                if rows.get(dead)
            },
            transactions={name: len(acks.committables_of(name)) for name in self.sinks},
            ended=acks.ended,
        )
        with self._abort_rights.suspend_while_pre_committed():
            self._compare_memories_again(batch)
        checkpoint = self._checkpoint(checkpoint_id)
        for names in self._jointly({each.sink for each in acks.committables}):
            shares = [(self.sinks[name], acks.committables_of(name)) for name in names]
            sink, committables = shares[0]
            if len(shares) > 1 and isinstance(sink, JointCommitting):
                sink.validate_jointly(checkpoint, shares)
            elif isinstance(sink, Validating):
                sink.validate_all(checkpoint, committables)
        self.listeners.tell(Step.VALIDATED, checkpoint_id)

    def _jointly(self, names: Collection[str]) -> list[list[str]]:
        """Put the sinks of these names together that commit as one, in the order of the sinks."""
        groups: dict[Hashable, list[str]] = {}
        for name in self.sinks:
            if name in names:
                groups.setdefault(self._places[name], []).append(name)
        return list(groups.values())

    def _compare_memories_again(self, batch: MicroBatch) -> None:
        """Check the sinks' memories, before the batch is decided (R15).

        The sinks must still have what was visible when the batch began, and nothing of another
        driver. After a failover that lost only commits, their transactions are in doubt again, and
        are committed as at a restart.
        """
        newest_rows = memories.newest_rows(self.newest)
        for name, sink in self.sinks.items() if self.config.exactly_once else ():
            remembered = sink.committed_checkpoints(self.job)
            self._require_none_later(
                name, remembered, self._known_up_to(batch.facts.checkpoint_id - 1)
            )
            self._require_not_behind(name, remembered, newest_rows, batch)

    def _require_not_behind(
        self,
        sink: str,
        memory: Mapping[str, int] | None,
        newest_rows: Mapping[str, int],
        batch: MicroBatch,
    ) -> None:
        """Commit again what was visible before the batch and is in doubt in its sink (R15).

        Raises `ExternalSystemBehind` if rows are gone. `newest_rows` is as in `Record`, of the
        batch.
        """
        if memory is not None and memory.get(self.store.lineage, -1) < newest_rows.get(sink, -1):
            visible = [
                key
                for key in self.store.record_keys()
                if key.checkpoint_id < batch.facts.checkpoint_id
            ]
            try:
                self._commit_in_doubt_again({sink: memory}, visible, newest_rows, batch)
            except ExternalSystemBehind:
                # Decided transactions whose record is no longer retained may be in doubt again.
                self.fence.displaced = True
                raise

    def _record(
        self,
        batch: MicroBatch,
        acks: Acks,
        partitions: Mapping[str, int],
        started: int,
        round: int = 0,
    ) -> Record:
        return Record(
            job=self.job,
            lineage=self.store.lineage,
            checkpoint_id=batch.facts.checkpoint_id,
            round=round,
            generation=self.fence.generation,
            query_id=batch.facts.query_id,
            offsets=batch.facts.offsets,
            partitions=partitions,
            committables=acks.committables,
            mode=self.config.mode.value,
            rows=acks.rows,
            triggered_at=started,
            completed_at=self.clock.milliseconds(),
            guarantee=str(self.guarantee),
            planned_at=batch.facts.planned_at,
            predecessors=self._predecessors,
            batch_rows=batch.rows,
            dead_letters=self._dead_letter_writers,
            row_hash=batch.row_hash,
            topic_ids=tuple(self._topic_ids),
            newest_rows={} if round else memories.newest_rows(self.newest),
        )

    def _topic_ids_now(self, batch: MicroBatch) -> TopicIds:
        """Ask the source for the ids of its topics, and compare them with the last ones (R19).

        If the source cannot tell, the query continues, and later ids are compared with the last
        known ones.
        """
        doing = "tell the ids of its topics"
        try:
            now = batch.topic_ids()
        except Exception as error:
            if not batch.active:
                raise
            self._outages.record_failure("the source", doing, error)
            return self._topic_ids
        self._outages.record_success("the source", doing)
        decisions.require_same_topics(batch.facts.checkpoint_id, self._topic_ids, now)
        return now

    # ------------------------------------------------------------------ 6.-7. the commit point
    def decide(self, record: Record, before: CompletedCheckpoint | None = None) -> CommitPermit:
        """Put the record, or adopt another driver's record if that is there already.

        Then look whether this driver may commit what is decided. `before` is the checkpoint that
        the record adds a round to.
        """
        try:  # 6.
            self.fence.require_newest("complete")  # R14: fence before the put
            with self._abort_rights.suspend_until_decided():
                decided = (
                    record
                    if self.store.put(record)
                    else self.store.get(record.checkpoint_id, record.round)
                )
        except (Superseded, StorageBehind):
            self._abort(record.committables)
            raise
        except StorageError as error:
            raise CheckpointFailed(
                f"the record of checkpoint {record.checkpoint_id} of job {self.job!r} could not be "
                f"written; start the query again when the storage answers: {error} [EO-RECORD]"
            ) from error
        if decided and decided is not record:
            self._abort(record.committables, keep=decided.committables)
        step = Step.REPLAY_COMPLETE if record.round else Step.COMPLETE
        self.listeners.tell(step, record.checkpoint_id, adopted=decided is not record)
        listing = self.store.listing()  # 7.
        # R1: the checkpoint must be the newest after the put.
        if decided is None or listing.newest_complete > record.checkpoint_id:
            self._abort(record.committables)
            raise Superseded(
                f"checkpoint {listing.newest_complete} of job {self.job!r} is complete already "
                f"while this driver was at {record.checkpoint_id}; it stops. Two drivers of one "
                "job were running."
            )
        complete = before.with_round(decided) if before else CompletedCheckpoint((decided,))
        permit = self.fence.permit(complete, listing)  # R14: fence after the put
        known = before or self.newest
        expected = {(record.checkpoint_id, record.round)} | (
            {(known.checkpoint_id, 0)} if known else set()
        )
        # A record is gone if storage was restored to an older state just now, or if it was wiped,
        # and our number is now a new driver's.
        if gone := expected.difference(listing.records):
            raise self.fence.storage_changed_error(
                "commit", f"the record of checkpoint {min(gone)[0]}"
            )
        self.newest = complete
        self._delete_older_records(listing)
        return permit

    def _delete_older_records(self, listing: Listing) -> None:
        """Keep `retained_checkpoints`. What cannot be deleted is left to the next checkpoint."""
        oldest = listing.newest_complete - self.config.retained_checkpoints + 1
        try:
            self.store.delete_older_than(oldest, listing)
        except StorageError as error:
            logger.warning(
                "could not delete old records; the next checkpoint tries again: %s", error
            )

    # ------------------------------------------------------------------ 8. phase two
    def commit(self, permit: CommitPermit, batch: MicroBatch | None = None) -> CompletedCheckpoint:
        """Commit what is not final, and ask the sinks again until the commit timeout.

        If the query of `batch` is being stopped, the time is `STOP_GRACE_PERIOD`, because the next
        start continues. What is lost is left to the caller.
        """
        checkpoint_id = permit.complete.checkpoint_id
        started = self.clock.monotonic()
        pending = permit.complete.pending_participants(self._places)
        by_sink = Counter(sink for sink, _ in pending)
        self._commit_times = {}
        self.listeners.tell(
            Step.COMMITTING, checkpoint_id, participants=len(pending), transactions=by_sink
        )
        for tries in count(1):
            permit, errors = self.commit_once(permit)
            self._tell_outages(errors)
            if not errors:
                break
            if not self._wait_to_ask_again(tries, started, batch):
                waited = self.clock.monotonic() - started
                raise decisions.still_in_doubt_error(permit.complete, errors, waited) from next(
                    iter(errors.values())
                )
            self.listeners.tell(Step.ASKING_AGAIN, checkpoint_id, tries=tries, errors=errors)
            self.sweep()  # R7: an orphan may be in the way
            # If storage is gone, what is decided becomes visible all the same.
            with suppress(StorageError, StorageBehind):
                # R14: A savepoint may have been restored meanwhile.
                permit = self.fence.permit(permit.complete)
        if batch and batch.facts.checkpoint_id > checkpoint_id:
            permit = permit.with_outcomes(decisions.expired_as_visible(permit.complete))
        decisions.require_known(permit.complete)
        self._require_not_replayed(permit.complete)
        return permit.complete

    def _require_not_replayed(self, complete: CompletedCheckpoint) -> None:
        """Raise `StorageBehind` if a sink already has rows in place of the lost ones (R15).

        A replay has written them whose record is no longer in storage.
        """
        for name in dict.fromkeys(sink for sink, _ in complete.lost_participants()):
            sink = self.sinks[name]
            if not isinstance(sink, Auditable):
                continue
            [holding] = sink.audit(self.job, [complete.audited_part(name)], quick=True).holdings
            if holding.unexpected:
                # A newer driver may have replayed the checkpoint just now.
                self.fence.require_newest("write what is lost again")
                self.fence.displaced = True
                raise memories.replayed_already_error(
                    name, holding.unexpected, complete, self.store.storage.uri
                )

    def _tell_outages(self, errors: Mapping[Participant, Exception]) -> None:
        for name in self.sinks:
            failed = [error for (sink, _), error in errors.items() if sink == name]
            if failed:
                self._outages.record_failure(f"sink {name!r}", "commit", failed[0])
            else:
                self._outages.record_success(f"sink {name!r}", "commit")

    def _wait_to_ask_again(self, tries: int, started: float, batch: MicroBatch | None) -> bool:
        """Wait for a random time, longer with each try. Returns False if there is no time left."""
        now = self.clock.monotonic()
        if now - started >= self.config.commit_timeout:
            return False
        end = now + machine.random.pause(tries, longest=10.0)
        while (left := end - now) > 0:
            if batch and not batch.active and now - started >= STOP_GRACE_PERIOD:
                return False
            self.clock.sleep(min(left, 0.2))
            now = self.clock.monotonic()
        return True

    def commit_once(
        self, permit: CommitPermit
    ) -> tuple[CommitPermit, Mapping[Participant, Exception]]:
        """Ask each sink once to commit what is not final, and sinks that commit as one together.

        Returns the permit with the new outcomes, and an error for each participant that could not
        answer.
        """
        complete = permit.complete
        decisions.require_own_transactions(complete, self.sinks)
        outcomes: dict[Participant, CommitOutcome] = {}
        errors: dict[Participant, Exception] = {}
        pending = complete.pending_participants(self._places)
        for names in self._jointly({sink for sink, _ in pending}):
            asked = [[each for each in pending if each[0] == name] for name in names]
            shares = [
                (self.sinks[name], [complete.committables[each] for each in own])
                for name, own in zip(names, asked, strict=True)
            ]
            asked_at = self.clock.monotonic()
            answered: Sequence[Sequence[CommitOutcome | Exception]]
            try:
                answered = ask_to_commit(self._checkpoint(complete.checkpoint_id), shares)
            except Exception as error:
                answered = [[error] * len(own) for own in asked]
            for name in names:
                first_asked_at, *_ = self._commit_times.get(name, (asked_at,))
                self._commit_times[name] = first_asked_at, self.clock.monotonic()
            answers = {
                participant: answer
                for own, those in zip(asked, answered, strict=True)
                for participant, answer in zip(own, those, strict=True)
            }
            final = not any(isinstance(answer, Exception) for answer in answers.values())
            for participant, answer in answers.items():
                if isinstance(answer, Exception):
                    errors[participant] = answer
                elif final or answer.state is CommitState.COMMITTED:
                    # Otherwise this participant is asked about again, with the others.
                    outcomes[participant] = answer
        return permit.with_outcomes(outcomes), errors

    # ------------------------------------------------------------------ replay
    def _replay_lost(self, complete: CompletedCheckpoint, batch: MicroBatch) -> CompletedCheckpoint:
        """Write again what the external system has lost, until all of the checkpoint is visible."""
        while complete.lost_participants():
            complete = self.commit(self._replay(complete, batch), batch)
        self.newest = complete
        self.listeners.tell(Step.COMMITTED, complete.checkpoint_id, asked=self._commit_times)
        return complete

    def _replay(self, complete: CompletedCheckpoint, batch: MicroBatch) -> CommitPermit:
        """Write the lost participants again, and decide them as the next round."""
        checkpoint_id = complete.checkpoint_id
        round = complete.next_round
        lost = complete.lost_participants()
        self.fence.require_newest("replay")  # R6: only the newest driver replays
        self._compare_memories_before_replay(complete, batch)
        self._check_schemas(batch)
        self._evolve(batch)  # a restored table lacks what was altered for them
        reasons = {
            f"{sink}/{subtask}": complete.outcomes[sink, subtask].reason
            for sink, subtask in sorted(lost)
        }
        logger.warning("checkpoint %d: writing lost transactions again: %s", checkpoint_id, reasons)
        by_sink = Counter(sink for sink, _ in lost)
        self.listeners.tell(
            Step.REPLAYING, checkpoint_id, lost=reasons, round=round, transactions=by_sink
        )
        spooled = (
            self._spool.rows_of(complete, lost, self._dead_letter_writers) if self._spool else {}
        )
        if not spooled:
            decisions.require_known_hash(complete.record, batch.row_hash, lost)
        recorded = complete.record.partitions

        def partitions_of(name: str) -> int:
            if spooled or recorded.get(name) == 1:
                return recorded[name]
            return batch.partitions(self.sinks[self._dead_letter_writers.get(name, name)])

        partitions = {name: partitions_of(name) for name in by_sink}
        decisions.require_same_layout(complete.record, partitions, lost)  # R13: the same layout
        lost_rows = self._lost_rows(complete, spooled)
        started = self.clock.milliseconds()
        acks = self._pre_commit_again(batch, complete, lost_rows)
        try:
            decisions.require_same_rows(
                lost, {(ack.sink, ack.subtask): ack for ack in acks.all if ack.committable}
            )
        except InDoubtError:
            self._abort(acks.committables)
            raise
        self.listeners.tell(Step.REPLAY_PRE_COMMITTED, checkpoint_id)
        return self.decide(self._record(batch, acks, partitions, started, round), complete)

    def _compare_memories_before_replay(
        self, complete: CompletedCheckpoint, batch: MicroBatch
    ) -> None:
        """Raise `StorageBehind` if another driver has committed in our place (R15).

        With a copy of this storage, another driver may have committed a later checkpoint, or this
        one. It has then aborted our transactions as orphans, and written their rows.
        """
        # A system that has lost transactions may have lost earlier commits with them.
        for name in (
            {sink for sink, _ in complete.lost_participants()} if self.config.exactly_once else ()
        ):
            remembered = self.sinks[name].committed_checkpoints(self.job)
            outcomes = complete.outcomes.items()
            has_rows = {
                sink for (sink, _), outcome in outcomes if outcome.state is CommitState.COMMITTED
            }
            has_rows |= {loss.sink for loss in complete.given_up}
            newest = complete.checkpoint_id if name in has_rows else complete.checkpoint_id - 1
            self._require_none_later(name, remembered, self._known_up_to(newest))
            self._require_not_behind(name, remembered, complete.record.newest_rows, batch)

    def _lost_rows(
        self, complete: CompletedCheckpoint, spooled: Mapping[str, SpooledRows]
    ) -> dict[str, LostRows]:
        """Return, by sink, the rows that its tasks have to write again.

        With them goes what the records say of its dead letters, even of those that were given up
        (R17).
        """
        lost = complete.lost_participants()
        lost_rows = dict[str, LostRows]()
        for name, sink in self.sinks.items():
            dead = sink.dead_letters.name if sink.dead_letters else None
            own = frozenset(subtask for lost_sink, subtask in lost if lost_sink == name)
            of_dead_letters = frozenset(subtask for lost_sink, subtask in lost if lost_sink == dead)
            if name not in self._dead_letter_writers and own | of_dead_letters:
                committables = [each for record in complete.rounds for each in record.committables]
                refused = {each.subtask: each.refused for each in committables if each.sink == dead}
                single_partition = complete.record.partitions.get(name) == 1
                lost_rows[name] = LostRows(
                    own, of_dead_letters, refused, single_partition, spooled.get(name)
                )
        return lost_rows

    def _pre_commit_again(
        self, batch: MicroBatch, complete: CompletedCheckpoint, lost_rows: Mapping[str, LostRows]
    ) -> Acks:
        """Run the tasks of a replay, and run them again if a lock blocked one (R8)."""
        blocked = list[Exception]()
        lost = complete.lost_participants()
        while True:
            with progress(
                f"checkpoint {batch.facts.checkpoint_id}: write {len(lost):,} lost transactions "
                "again"
            ):
                acks = self._run(batch, len(blocked), complete.next_round, lost_rows)
            if not acks.errors:
                return acks
            self._abort(acks.committables)
            blocked.append(acks.errors[0])
            if not decisions.may_try_again(blocked, tolerable=0):
                raise decisions.refused_again_error(batch.facts.checkpoint_id, blocked[-1])
            self.sweep()  # R8: an orphan may hold the lock
            # R15: Another driver may have held the lock, and committed.
            self._require_not_replayed(complete)

    def _checkpoint(self, checkpoint_id: int) -> Checkpoint:
        """Return the checkpoint as sinks are told of it."""
        oldest = max(0, checkpoint_id - self.config.retained_checkpoints)
        return Checkpoint(self.job, self.store.lineage, checkpoint_id, oldest)
