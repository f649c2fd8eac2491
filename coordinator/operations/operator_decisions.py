"""Questions and decisions of an operator on a job's newest checkpoint.

Rules: docs/protocol.md#the-rules
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from coordinator.config import CheckpointConfig
from coordinator.errors import CheckpointError, Superseded
from coordinator.listener import Listeners
from coordinator.protocol import decisions
from coordinator.protocol.fence import Fence
from coordinator.protocol.ports import Sink
from coordinator.protocol.protocol import CheckpointProtocol
from coordinator.protocol.sweep import abort_or_leave
from coordinator.store.job_store import JobStore
from coordinator.store.records import CompletedCheckpoint, Participant
from sinks._util.log import get_logger
from sinks._util.machine import machine
from sinks.transaction import CommitState

logger = get_logger("coordinator.protocol")


def protocol_of(
    store: JobStore, sinks: dict[str, Sink], config: CheckpointConfig
) -> CheckpointProtocol:
    """Return the protocol for one command of an operator.

    It serves no query, and no listener is told of its steps.
    """
    return CheckpointProtocol(store.job, sinks, store, config, Listeners(store.job), machine.clock)


def ask(
    protocol: CheckpointProtocol,
) -> tuple[CompletedCheckpoint | None, Mapping[Participant, Exception]]:
    """Ask once what became of each participant of the newest complete checkpoint.

    This commits what can be committed. Returns the checkpoint, and an error for each participant
    that could not answer.

    It claims no generation, so a running driver is not disturbed. Only in the middle of a restore
    does it claim one, because the restore has stopped all drivers, and may have read the records
    already (R14).
    """
    protocol.open_sinks()
    claim = protocol.store.follow_newest_claim()
    fence = Fence(protocol.store, claim)
    if claim.address is None:
        protocol.claim_generation()
        fence = protocol.fence
    newest = protocol.load()
    if newest is None:
        return None, {}
    try:
        permit = fence.permit(newest)
    except Superseded as error:
        raise Superseded(
            f"another driver, or a restore, of job {protocol.job!r} has started just now; look "
            "again"
        ) from error
    permit, errors = protocol.commit_once(permit)
    return permit.complete, errors


def accept_loss(
    protocol: CheckpointProtocol, participants: Sequence[Participant], *, who: str, why: str
) -> CompletedCheckpoint:
    """Give up lost or unknown participants of the newest complete checkpoint.

    The job then continues without them: a replay record names them, who gave them up and why, and
    no replacement. Participants that were held for them are committed. This claims a generation, so
    a running driver of this job stops.

    Raises CheckpointError for participants that are anything else, InDoubtError while a participant
    cannot answer (R3), and Superseded if another driver has decided meanwhile.
    """
    protocol.claim_generation()
    complete, errors = ask(protocol)
    if complete is None:
        raise CheckpointError(f"there is no complete checkpoint of job {protocol.job!r} in storage")
    if errors:
        raise decisions.still_in_doubt_error(complete, errors, 0)
    accepted = decisions.accept(complete, participants, who, why)
    now = protocol.clock.milliseconds()
    record = replace(
        complete.record,
        round=complete.next_round,
        generation=protocol.fence.generation,
        committables=(),
        rows={},
        triggered_at=now,
        completed_at=now,
        accepted=accepted,
    )
    permit = protocol.decide(record, complete)
    if permit.complete.rounds[-1] is not record:
        raise Superseded(f"another driver has decided round {record.round} meanwhile; look again")
    lines = [
        f"{loss.sink}/{loss.subtask}, {loss.rows} rows, by {loss.who}: {loss.why}"
        for loss in accepted
    ]
    logger.warning(
        "job %s, checkpoint %d: given up: %s", protocol.job, record.checkpoint_id, "; ".join(lines)
    )
    for loss in accepted:
        if loss.outcome == CommitState.UNKNOWN.value:
            abort_or_leave(protocol.sinks[loss.sink], [loss.transaction])
    permit, _ = protocol.commit_once(permit)
    protocol.newest = permit.complete
    return permit.complete
