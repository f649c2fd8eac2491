"""The protocol for `format("exactly_once")`: Spark itself runs the tasks of a checkpoint, between two calls that may
come in two processes, `prepare` and `conclude`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.errors import CheckpointError
from coordinator.protocol import decisions
from coordinator.protocol.batch import MicroBatch, Sink
from coordinator.protocol.decisions import Action
from coordinator.protocol.fence import Fence
from coordinator.protocol.protocol import CheckpointProtocol
from coordinator.protocol.records import Claim
from sinks.errors import SinkError
from sinks.task import LostRows, SinkTask


@dataclass(frozen=True)
class Prepared:
    """What `prepare` has found, for the tasks and for `conclude`. `replay`: as in `SinkTask`; `predecessors`: as in
    `Record`; `setup`: what the job file described then; `token`: as in `Claim`."""

    checkpoint_id: int
    query_id: str
    lineage: str
    generation: int
    predecessors: Mapping[str, int] | None = None
    needed: bool = True
    """Whether there is anything left to write."""
    round: int = 0
    replay: LostRows | None = None
    setup: str = ""
    token: str = ""

    @property
    def claim(self) -> Claim:
        return Claim(self.generation, self.lineage, token=self.token)

    def task(self, sink: Sink, job: str) -> SinkTask:
        return SinkTask(sink, job, self.lineage, self.checkpoint_id, self.generation, self.round, replay=self.replay)


class TwoProcessProtocol(CheckpointProtocol):
    """The protocol of a job with one sink. Each checkpoint is a driver of its own: it claims a generation, and recovers
    what the one before may have left. What fails is not tried again here, but by the next start of the query."""

    job_file_digest = ""
    """Tells what the job file holds from what it held before."""

    def prepare(self, batch: MicroBatch) -> Prepared:
        """All that comes before the tasks: recover, compare, sweep, alter the table if the sink evolves."""
        setup = self._setup()
        self.claim_generation(self.config.timeout, batch)
        action = self._start_run(batch)
        self.sweep()
        facts, fence = batch.facts, self.fence
        prepared = Prepared(
            facts.checkpoint_id,
            facts.query_id,
            self.store.lineage,
            fence.generation,
            self._predecessors,
            setup=setup,
            token=fence.claim.token,
        )
        if action is Action.WRITE:
            self._evolve(batch)
            return prepared
        newest = self.newest if action is Action.FINISH else None
        if newest is None or not newest.lost():
            return replace(prepared, needed=False)
        decisions.require_known_hash(newest.record, batch.row_hash, newest.lost())
        fence.require_newest("replay")  # R6
        self._check_schemas(batch)
        self._evolve(batch)
        [replay] = self._lost_rows(newest, {}).values()
        return replace(prepared, round=newest.next_round, replay=replay)

    def conclude(self, prepared: Prepared, batch: MicroBatch) -> None:
        """All that comes after the tasks: the commit point, and phase two. `batch.run` hands over what the tasks have
        answered, once. Sweeps nothing before the commit point, since no record names the checkpoint's own yet."""
        if (now := self._setup()) != prepared.setup:
            raise CheckpointError(
                f"the job file was changed while batch {prepared.checkpoint_id} ran: it was {prepared.setup}; now it "
                f"is {now}. This run of the batch decides nothing. Start the query again, with the former file if its "
                "rows are to go where they were written"
            )
        self._undecided = prepared.needed
        self.open_sinks()
        self.store.follow_newest_claim()
        self.fence, self._predecessors = Fence(self.store, prepared.claim), prepared.predecessors
        self.fence.require_newest("complete")
        if newest := self.load():
            self.newest = newest
            if self.newest.checkpoint_id == prepared.checkpoint_id:
                self.newest = self.commit(self.fence.permit(self.newest), batch)  # tells what is lost
        self._write_or_finish(self._choose_action(batch), batch)
        self._undecided = False
        self.sweep()  # what tasks that died have left: another batch may not come

    def _setup(self) -> str:
        """What the job file describes, in words. Called before anything is opened, which may add to it."""
        [sink] = self.sinks.values()
        return f"job {self.job!r}, {sink!r}, storage {self.store.storage.uri}, job file {self.job_file_digest[:12]}"

    def _retry_or_raise(self, batch: MicroBatch, errors: Sequence[Exception]) -> None:
        if isinstance(errors[-1], (SinkError, CheckpointError)):
            raise errors[-1]
        raise decisions.failed_error(batch.facts.checkpoint_id, self.job, errors[-1], exactly_once=True) from errors[-1]
