"""The values that checkpoint storage holds of a job.

These are records of checkpoints, claims of drivers, and listings.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from coordinator.store.encoding import corrupt_if_malformed, require_field_types
from sinks.audit import Part
from sinks.transaction import CommitOutcome, CommitState, Committable, Identity


@dataclass(frozen=True)
class Acceptance:
    """A participant that an operator gave up, so that the job continues without it.

    `outcome` is "lost" or "unknown" (then its rows may be visible or not), and `rows` how many rows
    there were.
    """

    sink: str
    subtask: int
    transaction: Identity
    rows: int
    outcome: str
    who: str
    why: str


ANY_LINEAGE = "*"
"""The key of `Record.predecessors` that stands for any other lineage."""


@dataclass(frozen=True)
class Record:
    """One decision on a checkpoint.

    In round 0, the checkpoint is complete with these committables. In later rounds, they replace
    lost ones.

    * `offsets` are the source offsets of Spark's offset log, one JSON text per source, and
      `planned_at` is the time in it.
    * `partitions` is the layout: the number of partitions per sink, in round 0 of every sink of the
      job.
    * `triggered_at` and `completed_at` are milliseconds since the epoch (0: unknown).
    * `guarantee` is the text of the job's `Guarantee`.
    * `batch_rows` counts the rows of Spark's batch, before the sinks' transforms, None if they were
      not counted. `rows` counts those that came to each sink.
    * `restored_from` is the savepoint that the base of a new lineage stands for. All of it is
      visible, so it has no committables.
    * `accepted` (in rounds > 0) names participants that are given up: no round replaces them.
    * `predecessors` are the lineages of the job before this one, with the newest checkpoint that
      the external systems may have of each. None, or the key `ANY_LINEAGE`, stands for whatever
      they have at the next start.
    * `dead_letters` has, by dead-letter sink, the sink that refused its rows.
    * `row_hash` (of round 0) is the way in which the rows of fingerprints and dead letters were
      hashed. A replay has to hash them in the same way.
    * `topic_ids` has, per source, the ids of the Kafka topics that it read, by name; () if they are
      not known.
    * `newest_rows` (of round 0) has, by sink, the newest checkpoint before this one with rows that
      its system remembers, in this lineage. Of a base, it is the newest up to its savepoint, in the
      savepoint's lineage, if the savepoint is of the same job.
    """

    job: str
    lineage: str
    checkpoint_id: int
    round: int
    generation: int
    query_id: str
    offsets: tuple[str, ...]
    partitions: Mapping[str, int]
    committables: tuple[Committable, ...]
    mode: str
    rows: Mapping[str, int]
    triggered_at: int
    completed_at: int
    guarantee: str = ""
    restored_from: str = ""
    accepted: tuple[Acceptance, ...] = ()
    planned_at: int = 0
    predecessors: Mapping[str, int] | None = None
    batch_rows: int | None = None
    dead_letters: Mapping[str, str] = field(default_factory=dict)
    row_hash: str = ""
    topic_ids: tuple[Mapping[str, str], ...] = ()
    newest_rows: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {
            "committables": [committable.to_json() for committable in self.committables],
            "accepted": [asdict(acceptance) for acceptance in self.accepted],
        }

    @property
    def dead_lettered(self) -> dict[str, int]:
        """Return the number of rows that each sink has refused, by its name."""
        return {name: self.rows.get(dead, 0) for dead, name in self.dead_letters.items()}

    @classmethod
    def from_json(cls, body: Mapping[str, Any], where: str) -> Record:
        with corrupt_if_malformed(where):
            return require_field_types(
                cls(
                    **dict(body)
                    | {
                        "offsets": tuple(body["offsets"]),
                        "committables": tuple(
                            Committable.from_json(value) for value in body["committables"]
                        ),
                        "accepted": tuple(Acceptance(**value) for value in body["accepted"]),
                        "topic_ids": tuple(body["topic_ids"]),
                    }
                )
            )


Participant = tuple[str, int]
"""The name of a sink, and the number of a partition of its rows."""


@dataclass(frozen=True)
class CompletedCheckpoint:
    """A complete checkpoint as this process knows it.

    It has the records of all its rounds, and the final outcomes seen so far.
    """

    rounds: tuple[Record, ...]
    outcomes: Mapping[Participant, CommitOutcome] = field(default_factory=dict)

    @property
    def record(self) -> Record:
        return self.rounds[0]

    @property
    def checkpoint_id(self) -> int:
        return self.record.checkpoint_id

    @property
    def next_round(self) -> int:
        """Return the round that a replay would write (R3).

        It is one after the newest, whose outcomes are final here.
        """
        return self.rounds[-1].round + 1

    @cached_property
    def committables(self) -> Mapping[Participant, Committable]:
        """Return the current committable of each participant.

        It is that of round 0, unless a later round has replaced it or given it up.
        """
        current: dict[Participant, Committable] = {}
        for record in self.rounds:
            current |= {
                (committable.sink, committable.subtask): committable
                for committable in record.committables
            }
            for given_up in record.accepted:
                current.pop((given_up.sink, given_up.subtask), None)
        return current

    @property
    def newest_rows(self) -> Mapping[str, int]:
        """Return the field `newest_rows` of the next `Record`.

        It is as in this checkpoint's record, with the checkpoint itself added.
        """
        remembered = {
            sink for (sink, _), committable in self.committables.items() if committable.remembered
        }
        return {**self.record.newest_rows, **dict.fromkeys(remembered, self.checkpoint_id)}

    def pending_participants(self, places: Mapping[str, Hashable]) -> list[Participant]:
        """Return the participants that the sinks have to be asked about, again if necessary.

        If a sink has to be asked about one participant, it is asked about all that it has committed
        before, too, because its system may have been restored to an older state meanwhile (R20).
        Those that are lost are left out until they are replaced, and those that are HELD for them
        wait as long. Sinks of an equal place count as one: `places` has it by the sink's name.
        """

        def place(participant: Participant) -> Hashable:
            return places.get(participant[0], participant[0])

        waiting = set(map(place, self.lost_participants()))

        def is_open(participant: Participant) -> bool:
            state = self._state(participant)
            return state is None or (
                state is CommitState.HELD and place(participant) not in waiting
            )

        asked = {place(participant) for participant in self.committables if is_open(participant)}
        return [
            participant
            for participant in self.committables
            if is_open(participant)
            or (place(participant) in asked and self._state(participant) is CommitState.COMMITTED)
        ]

    def lost_participants(self) -> dict[Participant, Committable]:
        return {
            participant: committable
            for participant, committable in self.committables.items()
            if self._state(participant) is CommitState.LOST
        }

    def hidden_participants(self) -> list[Participant]:
        """Return the participants that are not known to be visible."""
        return [
            participant
            for participant in self.committables
            if self._state(participant) is not CommitState.COMMITTED
        ]

    def for_sinks(self, sinks: Collection[str]) -> CompletedCheckpoint:
        """Return the part of these sinks in this checkpoint.

        It has the same rounds, without the committables of other sinks.
        """

        def restrict(record: Record) -> Record:
            own = (committable for committable in record.committables if committable.sink in sinks)
            return replace(record, committables=tuple(own))

        return CompletedCheckpoint(tuple(map(restrict, self.rounds)))

    @property
    def given_up(self) -> list[Acceptance]:
        return [loss for record in self.rounds for loss in record.accepted]

    def audited_part(self, sink: str) -> Part:
        """Return the part of one sink as `Auditable.audit` gets it."""
        given_up = [loss.transaction for loss in self.given_up if loss.sink == sink]
        committables = list(self.for_sinks([sink]).committables.values())
        return Part(
            self.record.lineage, self.checkpoint_id, committables, given_up, self.rounds[-1].round
        )

    def with_outcomes(self, outcomes: Mapping[Participant, CommitOutcome]) -> CompletedCheckpoint:
        return replace(self, outcomes={**self.outcomes, **outcomes})

    def with_round(self, replay: Record) -> CompletedCheckpoint:
        """Return the checkpoint with one more round, `replay`.

        The outcomes of the participants that it replaces are open again.
        """
        replaced = {(committable.sink, committable.subtask) for committable in replay.committables}
        replaced |= {(loss.sink, loss.subtask) for loss in replay.accepted}
        outcomes = {
            participant: outcome
            for participant, outcome in self.outcomes.items()
            if participant not in replaced
        }
        return CompletedCheckpoint((*self.rounds, replay), outcomes)

    def _state(self, participant: Participant) -> CommitState | None:
        outcome = self.outcomes.get(participant)
        return outcome.state if outcome else None


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat, by which a process shows that it works.

    `who` is the host and the process. `at` is the time in milliseconds since the epoch by its
    clock, and `storage_at` the time in seconds by the storage's clock, if the storage has one.
    `next` is the number of seconds until another heartbeat is due, 0 for a process that runs no
    query. `ended` says why the query has ended, and `now` what the process does, as
    `CheckpointStatisticsTracker.activity` tells it.
    """

    who: str = ""
    at: int = 0
    storage_at: float | None = None
    next: float = 0.0
    ended: str = ""
    now: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the heartbeat without `now`, which those in claims and requests lack."""
        return {name: value for name, value in vars(self).items() if name != "now"}


@dataclass(frozen=True)
class Claim:
    """A generation, and the lineage that it is in.

    The default is for a job that nobody has claimed yet. `address` is None if a restore or an
    operator's command has claimed the generation, and "" if a driver has (in an older version: its
    HTTP address). `sign` is the claimer's first heartbeat. `token` is a random text that no other
    claim has ("" in claims of version 0.2).
    """

    generation: int = 0
    lineage: str = ""
    address: str | None = ""
    sign: Heartbeat = Heartbeat()
    token: str = ""


class RecordKey(NamedTuple):
    """The place of a record in its lineage."""

    checkpoint_id: int
    round: int


@dataclass(frozen=True)
class Listing:
    """A listing of a job's folder in storage: its generations, and the records of the lineage."""

    generations: Sequence[int]
    records: Sequence[RecordKey]

    @property
    def newest_generation(self) -> int:
        return max(self.generations, default=0)

    @property
    def newest_complete(self) -> int:
        """Return the id of the newest complete checkpoint, -1 if there is none."""
        return max((key.checkpoint_id for key in self.records if key.round == 0), default=-1)
