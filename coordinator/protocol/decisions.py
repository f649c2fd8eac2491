"""The protocol's decisions: pure functions of facts that were read.

Nothing here reads or writes anything. Rules: docs/protocol.md#the-rules
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto

from coordinator.errors import (
    CheckpointError,
    CheckpointFailed,
    CheckpointGap,
    CheckpointLocationMismatch,
    CorruptRecord,
    InDoubtError,
    QueryNotAdopted,
    ReplayMismatch,
    SourceReplaced,
    Superseded,
    UnknownSink,
    reason,
)
from coordinator.protocol.ports import BatchFacts, Sink, TopicIds
from coordinator.store.records import Acceptance, CompletedCheckpoint, Participant, Record
from coordinator.task.task import Ack
from sinks.dead_letters import allowed, too_many
from sinks.errors import BadValue, SinkError
from sinks.optional import DeadLettering
from sinks.transaction import CommitOutcome, CommitState, Committable, Fingerprint, shown


class Action(Enum):
    """The ways to deal with a batch that Spark hands over."""

    WRITE = auto()  # the next checkpoint: run the protocol
    FINISH = auto()  # this checkpoint is complete: see to it that all of it is visible
    SKIP = auto()  # it and a later one are complete, so it is visible
    # What was loaded is older than what Spark knows, or not all of it is visible, so the newest
    # checkpoint is read again.
    RELOAD = auto()


def action_for(
    batch: BatchFacts, newest: CompletedCheckpoint | None, *, adopt: bool, reloaded: bool
) -> Action:
    """Decide what to do with a batch that Spark hands over.

    `reloaded` means that the newest checkpoint was read after this call came in.
    """
    n = batch.checkpoint_id
    if newest is None:
        if n == 0 or adopt:
            return Action.WRITE
        if not reloaded:
            return Action.RELOAD
        raise QueryNotAdopted(
            f"Spark asks for batch {n}, but storage holds no checkpoint of this job. If storage "
            "was wiped, restore it. If the query ran without a coordinator, start once with "
            "CheckpointConfig(adopt=True). Otherwise your function around the coordinator left "
            "out batches."
        )
    c = newest.record
    if batch.query_id != c.query_id:
        raise CheckpointLocationMismatch(
            f"the newest checkpoint {c.checkpoint_id} was written by query {c.query_id}, but query "
            f"{batch.query_id} asks for batch {n}: Spark's checkpointLocation was replaced. Start "
            "with the old checkpointLocation, or give the job a new name to process the input "
            "from the start."
        )
    if not reloaded and (
        n not in (c.checkpoint_id, c.checkpoint_id + 1) or newest.hidden_participants()
    ):
        return Action.RELOAD
    if n > c.checkpoint_id + 1:
        raise CheckpointGap(
            f"Spark asks for batch {n}, but the newest complete checkpoint in storage is "
            f"{c.checkpoint_id}. If storage is older than Spark's checkpointLocation, restore it. "
            "Otherwise your function around the coordinator left batches out, or "
            "StreamingCheckpointManager.repartition added one, which is not supported."
        )
    if n == c.checkpoint_id + 1:
        return Action.WRITE
    if n < c.checkpoint_id:
        return Action.SKIP
    require_same_offsets(batch, c)
    return Action.FINISH


def overtaken_error(job: str, n: int, done: int, location: str) -> Superseded:
    return Superseded(
        f"another driver of job {job!r} has gone on from here: this one asks for batch {n}, and "
        f"commits/{done} is in Spark's checkpointLocation {location} by now. It stops, and has "
        "written nothing of the batch. Run one driver for each job."
    )


def require_own_plan(batch: BatchFacts, planned_at: int, location: str) -> None:
    """Raise `Superseded` if the log has another driver's plan of the batch.

    `planned_at` is when this driver has planned it. Two drivers may write the same file of the log
    where a file system renames over another file.
    """
    if batch.planned_at not in (0, planned_at):
        raise Superseded(
            f"offsets/{batch.checkpoint_id} in {location} is of another driver, which has planned "
            "this batch at the same time; this one stops. Two drivers of one job were running."
        )


def require_none_lost(newest: CompletedCheckpoint) -> None:
    """Raise `InDoubtError` if the newest checkpoint has lost transactions.

    This is called when Spark asks for the next batch, so that the checkpoint cannot be replayed any
    more.
    """
    if lost := newest.lost_participants():
        n = newest.checkpoint_id
        raise InDoubtError(
            f"checkpoint {n} has lost transactions, but Spark has moved on to batch {n + 1}. To "
            f"make Spark hand the batch over again, {hand_over_again(n)}. Then start the query. "
            "[EO-LOST]",
            [dict(committable.transaction) for committable in lost.values()],
        )


def hand_over_again(n: int) -> str:
    """Describe how a person gets Spark to hand over batch `n` again."""
    return (
        f"delete commits/{n} and all later files of commits/ and offsets/ in Spark's "
        f"checkpointLocation, with their hidden checksum files (.{n}.crc)"
    )


def require_same_offsets(batch: BatchFacts, record: Record | None) -> None:
    """Raise `CheckpointLocationMismatch` unless the record is of this very batch.

    Only then the batch counts as done (R12). A batch that Spark has planned again is another one
    even with the same offsets, because a file source only counts its batches, and the time fires
    timers of stateful queries.
    """
    if record is None:
        known = "is no longer retained, so its input cannot be compared"
    elif (record.offsets, record.query_id) != (batch.offsets, batch.query_id):
        known = f"has other offsets: {', '.join(record.offsets)}"
    elif batch.planned_at and record.planned_at not in (0, batch.planned_at):
        known = "is of a batch that Spark planned at another time: its files and timers may differ"
    else:
        return
    raise CheckpointLocationMismatch(
        f"batch {batch.checkpoint_id} is complete in storage, but its record {known}; Spark now "
        f"reads {', '.join(batch.offsets)}. Spark's checkpointLocation is older than the one that "
        "was used last, or another copy. Start with that one. Treating this batch as done would "
        "lose rows."
    )


def require_same_topics(n: int, before: TopicIds, now: TopicIds) -> None:
    """Raise `SourceReplaced` unless batch `n` continues in the topics of the batch before (R19).

    A new topic does no harm, because Spark reads it from its beginning.
    """
    pairs = zip(before, now, strict=False)
    replaced = sorted(
        {topic for then, ids in pairs for topic in then.keys() & ids if then[topic] != ids[topic]}
    )
    if replaced:
        raise SourceReplaced(
            f"topic {', '.join(map(repr, replaced))} was deleted and created again (it has another "
            f"id), and batch {n} would skip its first records. Start with a new job name and "
            "checkpointLocation, or, to read on at the old offsets, once with "
            "CheckpointConfig(adopt=True)."
        )


def expired_as_visible(complete: CompletedCheckpoint) -> dict[Participant, CommitOutcome]:
    """Return as committed the participants whose rows and proof the target's retention has removed.

    This is called when Spark asks for a later batch, so that all of this checkpoint was visible.
    """
    outcomes = complete.outcomes.items()
    return {
        participant: CommitOutcome.COMMITTED for participant, outcome in outcomes if outcome.expired
    }


def require_known(complete: CompletedCheckpoint) -> None:
    """Raise `InDoubtError` if the outcomes that the sinks have answered settle nothing.

    This is so if an outcome is unknown, or if an outcome is HELD and none is lost.
    """
    named = complete.committables
    outcomes = complete.outcomes
    unknown = [p for p in named if p in outcomes and outcomes[p].state is CommitState.UNKNOWN]
    if unknown:
        raise _in_doubt(
            f"checkpoint {complete.checkpoint_id} is complete, but the outcome of these "
            "transactions is unknown:",
            {p: (named[p], f": {outcomes[p].reason}") for p in unknown},
            "Do what each line says, or commit or roll back the transaction in the external "
            "system. Then start the query again. To continue without these rows, run coordinator "
            "resolve. [EO-UNKNOWN]",
        )
    held = [p for p in named if p in outcomes and outcomes[p].state is CommitState.HELD]
    if held and not complete.lost_participants():
        raise _in_doubt(
            f"checkpoint {complete.checkpoint_id}: the sink answers HELD, but no transaction is "
            "lost:",
            {p: (named[p], "") for p in held},
            "This is a defect of the sink; its `commit_all` may answer HELD only beside LOST or "
            "UNKNOWN.",
        )


def still_in_doubt_error(
    complete: CompletedCheckpoint, errors: Mapping[Participant, Exception], waited: float
) -> InDoubtError:
    return _in_doubt(
        f"checkpoint {complete.checkpoint_id} is complete, but {waited:.0f} s later it is still "
        "not known to be visible:",
        {p: (complete.committables[p], f": {error}") for p, error in errors.items()},
        "Nothing is lost. Start the query again when the external system answers: it commits them. "
        "A larger CheckpointConfig.commit_timeout waits longer. [EO-IN-DOUBT]",
    )


def require_same_layout(
    record: Record, partitions: Mapping[str, int], lost: Iterable[Participant]
) -> None:
    """Raise `ReplayMismatch` unless the batch has the recorded partition layout.

    Only in the layout in which they were written can the lost partitions be written again (R13).
    """
    for sink in sorted({sink for sink, _ in lost}):
        then = record.partitions.get(sink)
        now = partitions.get(sink)
        if then != now:
            raise ReplayMismatch(
                f"checkpoint {record.checkpoint_id} of sink {sink!r} was written in {then} "
                f"partitions, and the batch now has {now}, so its lost transactions cannot be "
                "written again. Start the query with the earlier spark.sql.shuffle.partitions, "
                "spark.default.parallelism or cores, and spark.sql.files.maxPartitionBytes. "
                "[EO-REPLAY-PARTITIONS]",
                [dict(c.transaction) for c in record.committables if c.sink == sink],
            )


def require_known_hash(record: Record, known: str, lost: Mapping[Participant, Committable]) -> None:
    """Raise `ReplayMismatch` if the rows were hashed in another way.

    A replay must be able to tell whether it writes the same rows.
    """
    if record.row_hash != known:
        raise _in_doubt(
            "lost transactions cannot be replayed, because another version of this library hashed "
            f"their rows differently ({record.row_hash!r}; here: {known!r}):",
            {p: (c, "") for p, c in lost.items()},
            "Start the query with that version, as you did before, until this checkpoint is "
            "visible. Nothing was changed. [EO-REPLAY-VERSION]",
            ReplayMismatch,
        )


def require_same_rows(
    lost: Mapping[Participant, Committable], acks: Mapping[Participant, Ack]
) -> None:
    """Raise `ReplayMismatch` unless the replay has written exactly the lost rows."""
    now = {p: acks[p].fingerprint if p in acks else Fingerprint() for p in lost}
    different = {
        p: (c, f": {c.fingerprint} then, {now[p]} now")
        for p, c in lost.items()
        if now[p] != c.fingerprint
    }
    if different:
        raise _in_doubt(
            "lost transactions cannot be replayed, because the batch now has other rows in their "
            "partitions:",
            different,
            "Make the query deterministic, or restore its source, and start it again. Nothing was "
            "changed. To continue without the lost rows, run coordinator resolve.",
            ReplayMismatch,
        )


def refused_again_error(checkpoint: int, error: Exception) -> Exception:
    """Explain a row that a replay cannot write.

    Either the row was good when its checkpoint was decided, or it is a different row.
    """
    if not isinstance(error, BadValue):
        return error
    return BadValue(
        f"{error}\nThis was a replay of checkpoint {checkpoint}, which is decided: somebody rolled "
        "back rows that the target had accepted. If the table or topic was made stricter, undo "
        "that and start the query again. Otherwise run coordinator resolve. [EO-REPLAY-REFUSED]"
    )


def accept(
    complete: CompletedCheckpoint, chosen: Iterable[Participant], who: str, why: str
) -> tuple[Acceptance, ...]:
    """Give up participants whose transactions are lost or unknown.

    Raises `CheckpointError` for any other participant.
    """
    accepted = []
    for participant in chosen:
        committable = complete.committables.get(participant)
        outcome = complete.outcomes.get(participant)
        if (
            committable is None
            or outcome is None
            or outcome.state not in (CommitState.LOST, CommitState.UNKNOWN)
        ):
            state = outcome.state.value if outcome else "not known" if committable else "not there"
            raise CheckpointError(
                f"sink {participant[0]!r}, subtask {participant[1]} of checkpoint "
                f"{complete.checkpoint_id} is {state}: only lost and unknown transactions can be "
                "given up"
            )
        transaction = dict(committable.transaction)
        rows = committable.fingerprint.rows
        accepted.append(Acceptance(*participant, transaction, rows, outcome.state.value, who, why))
    return tuple(accepted)


def require_sinks(newest: CompletedCheckpoint | None, sinks: Iterable[str]) -> None:
    """Raise `UnknownSink` if a sink of the newest checkpoint is missing.

    This is so even if no rows came to the sink. Its target would lack what the other sinks get from
    here on, and what it has left in doubt would stay.
    """
    if newest and (unknown := sorted(set(newest.record.partitions) - set(sinks))):
        raise UnknownSink(
            f"checkpoint {newest.checkpoint_id} was written by sink(s) {unknown}, which this "
            f"coordinator does not have (it has {sorted(sinks)}). A sink's name must be stable "
            "over restarts. To take a sink out, or its dead_letters=, restore a savepoint with "
            "allow_non_restored=True."
        )


def require_own_transactions(complete: CompletedCheckpoint, sinks: Mapping[str, Sink]) -> None:
    """Raise `CorruptRecord` if a record names a transaction that is not this job's.

    It must be one of this library, job and sink, because a commit by name would end somebody else's
    transaction.
    """
    for participant, committable in complete.committables.items():
        sink = sinks.get(committable.sink)
        if sink and not sink.owns(complete.record.job, committable.transaction):
            raise CorruptRecord(
                f"the record of checkpoint {complete.checkpoint_id} of job {complete.record.job!r} "
                f"was altered: {describe(participant, committable)} is no transaction of this job "
                "and sink. Restore the record from a backup of the storage. Nothing was committed "
                "or aborted."
            )


def require_few_dead_letters(
    n: int, rows: Mapping[str, int], acks: Sequence[Ack], sinks: Mapping[str, Sink]
) -> None:
    """Raise `TooManyDeadLetters` if a sink refused more rows than it may.

    `rows` is the number of rows of checkpoint `n`, by sink.
    """
    for name, sink in sinks.items():
        if not (isinstance(sink, DeadLettering) and sink.dead_letters):
            continue
        dead = sink.dead_letters.name
        limit = sink.max_dead_letters
        refused = rows.get(dead, 0)
        read = refused + rows.get(name, 0)
        if refused > allowed(limit, read):
            named = [
                row
                for ack in acks
                if ack.sink == dead and ack.committable
                for row in ack.committable.refused
            ]
            reasons = [(row.error_class, row.error) for row in named[:3]]
            raise too_many(
                name, f"{refused:,} of the {read:,} rows of checkpoint {n}", limit, reasons
            )


RETRIES_WHEN_BLOCKED = 2


def may_try_again(errors: Sequence[Exception], *, tolerable: int) -> bool:
    """Tell whether to write the batch again, under new names, after a failed try to pre-commit.

    `errors` are those of all tries so far. A task that was blocked is tried again, since an orphan
    may hold its lock (R8: read the newest again, sweep, then try again). Other errors of a sink are
    not tried again.
    """
    *earlier, error = errors
    blocked = sum(isinstance(each, SinkError) for each in earlier)
    if isinstance(error, SinkError):
        return error.retryable and blocked < RETRIES_WHEN_BLOCKED
    return len(earlier) - blocked < tolerable


def failed_error(
    checkpoint_id: int, job: str, error: Exception, *, exactly_once: bool
) -> CheckpointFailed:
    return CheckpointFailed(
        f"checkpoint {checkpoint_id} of job {job!r} failed before it was complete; "
        + ("nothing of it is visible" if exactly_once else "some of it may be visible")
        + f": {reason(error)}"
    )


def require_visible(complete: CompletedCheckpoint) -> None:
    """Raise `InDoubtError` unless all participants of a checkpoint are known to be committed."""
    if hidden := complete.hidden_participants():
        raise _in_doubt(
            f"checkpoint {complete.checkpoint_id} is complete, but these are not visible:",
            {p: (complete.committables[p], "") for p in hidden},
            "Start the query again: it commits them, or writes them again.",
        )


def describe(participant: Participant, committable: Committable) -> str:
    return (
        f"sink {participant[0]!r}, subtask {participant[1]}, transaction "
        f"{shown(committable.transaction)}"
    )


def _in_doubt(
    head: str,
    lines: Mapping[Participant, tuple[Committable, str]],
    tail: str,
    kind: type[InDoubtError] = InDoubtError,
) -> InDoubtError:
    """Make an error that lists participants.

    `lines` has the committable of each, and what to say of it.
    """
    described = [
        f"  - {describe(participant, named)}{what}" for participant, (named, what) in lines.items()
    ]
    return kind(
        "\n".join([head, *described, tail]),
        [dict(named.transaction) for named, _ in lines.values()],
    )
