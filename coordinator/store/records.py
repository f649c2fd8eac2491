"""The records of a job in checkpoint storage, and the only code that knows these keys (those of rows that are kept for
replays are in `spool`). Rules: docs/protocol.md#the-rules

JOB/generation/NUMBER               one claim per driver incarnation or restore; the highest is the newest, and names
                                    the current lineage. Its token tells it from a claim that another driver makes of
                                    the same number, after this storage was emptied or set back
JOB/LINEAGE/checkpoint/N.ROUND      round 0: the complete record of checkpoint N; round r > 0: replacements of a replay
JOB/loss/LINEAGE.N.ROUND            copy of a record that gives participants up; never deleted
JOB/alive/GENERATION.NUMBER         the last sign of life of a driver
JOB/statistics/N.COUNT.RANDOM       statistics of so many tries of checkpoints; no decision depends on them
JOB/request/TIME.RANDOM             what an operator asks of the driver; also below JOB/begun and JOB/answer
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from coordinator.errors import CheckpointError, CorruptRecord, Superseded, WrongJob
from coordinator.storage import CheckpointStorage, StorageError
from coordinator.storage.base import TimedStorage
from coordinator.store.encoding import fitting, seal, understood, unseal
from sinks._util.progress import progress
from sinks.audit import Part
from sinks.transaction import CommitOutcome, CommitState, Committable, Identity, token

logger = logging.getLogger(__name__)

_RETAINED_CLAIMS = 10
_STALE_LISTINGS = 20
"""After so many listings in a row that contradict what is there, the storage is taken for an inconsistent one."""
_STATISTICS = re.compile(r"/(\d+)\.(\d+)\.[0-9a-f]+$")
_NOTE = re.compile(r"\d{15}\.[0-9a-f]{16}")


@dataclass(frozen=True)
class Acceptance:
    """A participant of the complete checkpoint that the job goes on without, because an operator said so. `outcome` is
    "lost" or "unknown" (then its rows may be visible or not), `rows` how many there were."""

    sink: str
    subtask: int
    transaction: Identity
    rows: int
    outcome: str
    who: str
    why: str


ANY = "*"
"""Among `Record.predecessors`: any other lineage."""


@dataclass(frozen=True)
class Record:
    """One decision: a checkpoint is complete with these committables (round 0), or these replace lost ones.

    `offsets` are the source offsets of Spark's offset log, one JSON text per source, and `planned_at` the time in it.
    `partitions` is the layout: number of partitions per sink, in round 0 of every sink of the job. Times are
    milliseconds since the epoch (0: unknown). `guarantee` is the text of the job's `Guarantee`. `batch_rows` are those
    of Spark's batch, before the sinks' transforms, None if they were not counted; `rows` those that came to each sink.
    `restored_from` is the savepoint that the base of a new lineage stands for: it is all visible, so it has no
    committables. `accepted` (in rounds > 0) names participants that are given up: no round replaces them.
    `predecessors` are the lineages of the job before this one, and the newest checkpoint that the external systems may
    have of each; None, or with the key `ANY`: whatever they have at the next start. `dead_letters`: by sink of dead
    letters, the sink that refused its rows. `row_hash` (of round 0): how the rows of fingerprints and dead letters were
    hashed; a replay has to hash them so again. `topic_ids`: per source, those of the Kafka topics that it read, by
    name; () if they are not known. `newest_rows` (of round 0): by sink, the newest checkpoint before this one with rows
    that its system remembers, in this lineage; of a base, the newest up to its savepoint, in that one's, if that is of
    the same job.
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
        """Rows that a sink has refused, by its name."""
        return {name: self.rows.get(dead, 0) for dead, name in self.dead_letters.items()}

    @classmethod
    def from_json(cls, body: Mapping[str, Any], where: str) -> Record:
        with understood(where):
            return fitting(
                cls(
                    **dict(body)
                    | {
                        "offsets": tuple(body["offsets"]),
                        "committables": tuple(Committable.from_json(value) for value in body["committables"]),
                        "accepted": tuple(Acceptance(**value) for value in body["accepted"]),
                        "topic_ids": tuple(body["topic_ids"]),
                    }
                )
            )


Participant = tuple[str, int]
"""Sink name and subtask."""


@dataclass(frozen=True)
class CompletedCheckpoint:
    """A complete checkpoint as this process knows it: its records of all rounds, what they name together, and the final
    outcomes seen so far."""

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
        """R3: the successor of the round whose outcomes are final here."""
        return self.rounds[-1].round + 1

    @cached_property
    def named(self) -> Mapping[Participant, Committable]:
        """The participants' current committables: those of round 0, replaced or given up round by round."""
        current: dict[Participant, Committable] = {}
        for record in self.rounds:
            current |= {(c.sink, c.subtask): c for c in record.committables}
            for given_up in record.accepted:
                current.pop((given_up.sink, given_up.subtask), None)
        return current

    @property
    def newest_rows(self) -> Mapping[str, int]:
        """As in `Record`, up to this checkpoint."""
        remembered = {sink for (sink, _), committable in self.named.items() if committable.remembered}
        return {**self.record.newest_rows, **dict.fromkeys(remembered, self.checkpoint_id)}

    def pending(self) -> list[Participant]:
        """Participants that have to be asked (again). Those HELD for a lost sibling wait for its replacement."""
        waiting = {sink for sink, _ in self.lost()}
        return [
            p
            for p in self.named
            if self._state(p) is None or (self._state(p) is CommitState.HELD and p[0] not in waiting)
        ]

    def lost(self) -> dict[Participant, Committable]:
        return {p: c for p, c in self.named.items() if self._state(p) is CommitState.LOST}

    def hidden(self) -> list[Participant]:
        """Those that are not known to be visible."""
        return [p for p in self.named if self._state(p) is not CommitState.COMMITTED]

    def only(self, sink: str) -> CompletedCheckpoint:
        """The same without the other sinks."""
        return CompletedCheckpoint(
            tuple(replace(r, committables=tuple(c for c in r.committables if c.sink == sink)) for r in self.rounds)
        )

    @property
    def given_up(self) -> list[Acceptance]:
        return [loss for record in self.rounds for loss in record.accepted]

    def part(self, sink: str) -> Part:
        """What `Auditable.audit` gets of one sink."""
        given_up = [loss.transaction for loss in self.given_up if loss.sink == sink]
        named = list(self.only(sink).named.values())
        return Part(self.record.lineage, self.checkpoint_id, named, given_up, self.rounds[-1].round)

    def with_outcomes(self, outcomes: Mapping[Participant, CommitOutcome]) -> CompletedCheckpoint:
        return replace(self, outcomes={**self.outcomes, **outcomes})

    def with_round(self, replay: Record) -> CompletedCheckpoint:
        """The checkpoint with one more round, `replay`. The outcomes of the participants that it replaces are open
        again."""
        fresh = {(c.sink, c.subtask) for c in replay.committables} | {(a.sink, a.subtask) for a in replay.accepted}
        return CompletedCheckpoint(
            (*self.rounds, replay), {p: outcome for p, outcome in self.outcomes.items() if p not in fresh}
        )

    def _state(self, participant: Participant) -> CommitState | None:
        outcome = self.outcomes.get(participant)
        return outcome.state if outcome else None


@dataclass(frozen=True)
class SignOfLife:
    """A process shows that it works. `who`: host and process; `at`: the time in milliseconds since the epoch by its
    clock; `storage_at`: in seconds by the storage's clock, if that has one. `next`: seconds until another sign is due,
    0 for a process that runs no query. `ended`: why the query has ended. `now`: what it does, as
    `CheckpointStatisticsTracker.activity` tells it."""

    who: str = ""
    at: int = 0
    storage_at: float | None = None
    next: float = 0.0
    ended: str = ""
    now: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Without `now`, which the signs in claims and requests lack."""
        return {name: value for name, value in vars(self).items() if name != "now"}


@dataclass(frozen=True)
class Claim:
    """A generation, and the lineage that it is in; the default is for a job that nobody has claimed yet. `address`:
    None if a restore or an operator's command has claimed it, "" if a driver has (an older version: its HTTP address).
    `sign`: the claimer's first sign of life. `token`: a random text that no other claim has ("": by version 0.2)."""

    generation: int = 0
    lineage: str = ""
    address: str | None = ""
    sign: SignOfLife = SignOfLife()
    token: str = ""


class RecordKey(NamedTuple):
    """Which record of a lineage."""

    checkpoint_id: int
    round: int


@dataclass(frozen=True)
class Listing:
    """What storage holds of a job: its generations, and the records of the lineage."""

    generations: Sequence[int]
    records: Sequence[RecordKey]

    @property
    def newest_generation(self) -> int:
        return max(self.generations, default=0)

    @property
    def newest_complete(self) -> int:
        """Id of the newest complete checkpoint, -1 if there is none."""
        return max((key.checkpoint_id for key in self.records if key.round == 0), default=-1)


def jobs_in(storage: CheckpointStorage) -> list[str]:
    """The names of all jobs that were ever started on a storage."""
    claims = {key.partition("/")[0]: key for key in storage.list("") if "/generation/" in key}
    names = []
    for root, key in claims.items():
        with suppress(StorageError):
            try:
                if (data := storage.get(key)) is not None:
                    names.append(str(unseal(data, key)["job"]))
            except (CorruptRecord, KeyError):
                names.append(f"{root} (its claim cannot be read)")
    return sorted(names)


class JobStore:
    """What storage holds of one job, in its current lineage (that of the newest claim seen) or in the one given."""

    def __init__(
        self,
        storage: CheckpointStorage,
        job: str,
        lineage: str = "",
        on_call: Callable[[str, float], None] | None = None,
    ) -> None:
        """`on_call`: as in `TimedStorage`."""
        self.storage = storage
        self._calls = TimedStorage(storage, on_call) if on_call else storage
        self.job = job
        self._root = token(job)
        self.lineage = lineage
        """ "" before the first claim."""

    def listing(self, folder: str = "") -> Listing:
        """List the job, or one of its folders, now."""
        claims, records = f"{self._root}/generation/", f"{self._root}/{self.lineage}/checkpoint/"
        generations, round_keys = list[int](), list[RecordKey]()
        for key in self._calls.list(f"{self._root}/{folder}"):
            try:
                if key.startswith(claims):
                    generations.append(int(key.removeprefix(claims)))
                elif key.startswith(records):
                    id, round = key.removeprefix(records).split(".")
                    round_keys.append(RecordKey(int(id), int(round)))
            except ValueError as error:
                raise CorruptRecord(
                    f"{key!r} in {self.storage.uri} is no file of this library: move it out of there"
                ) from error
        return Listing(generations, round_keys)

    # ------------------------------------------------------------------ generations
    def claim_generation(self, address: str | None = None, next_sign: float = 0.0) -> Claim:
        """Become the newest of this job, in its current lineage: older drivers stop. Never hands out a number twice, as
        long as the storage is not emptied or set back: then `holds` tells. `address`: as in `Claim`; `next_sign`:
        seconds until a `sign`."""
        newest, stale = self.newest_claim(), 0
        while stale < _STALE_LISTINGS:
            lineage = newest.lineage or secrets.token_hex(4)
            claim = self._new_claim(newest.generation + 1, lineage, address, next_sign)
            if self._claim(claim):
                self.lineage = claim.lineage
                return claim
            before, newest = newest, self.newest_claim()
            stale = stale + 1 if newest == before else 0
        key = self._generation_key(newest.generation + 1)
        raise self._stale(
            key, f"it is there, but {stale} listings in a row show no generation after {newest.generation}"
        )

    def begin_lineage(self, base: Record, allow: Callable[[], None]) -> None:
        """Make `base` the newest checkpoint, and its lineage the current one: drivers of the lineage before may not
        complete a checkpoint any more. `allow` may raise to refuse, with no driver in the way of what it reads; what it
        has seen still holds when the lineage changes. May be called again with the same base. Raises Superseded if a
        driver or another restore has started meanwhile."""
        begins = self.newest_claim().lineage != base.lineage
        if begins:
            fence = self.claim_generation()
            allow()
        self.lineage = base.lineage
        if not (self.put(base) if begins else self._has(base)):
            raise CorruptRecord(
                f"the lineage {base.lineage} has another base than the one that is restored, or none any more: restore "
                "it with the same options as the first time, or into an empty checkpointLocation"
            )
        if begins and not (self.holds(fence) and self._claim(self._new_claim(fence.generation + 1, base.lineage))):
            raise Superseded(
                f"a driver of job {self.job!r}, another restore or an operator's command has started during the "
                "restore. See that nothing else runs, and restore again."
            )

    def newest_generation(self) -> int:
        return self.listing("generation/").newest_generation

    def newest_claim(self) -> Claim:
        for _ in range(_STALE_LISTINGS):
            number = self.newest_generation()
            if not number:
                return Claim()
            if claim := self.claim_of(number):  # None: so many have been claimed since that it is deleted
                return claim
        shown = f"{_STALE_LISTINGS} listings in a row show it, but it is not there"
        raise self._stale(self._generation_key(number), shown)

    def follow_newest_claim(self) -> Claim:
        """The newest claim, whose lineage is read from now on. Claims nothing."""
        claim = self.newest_claim()
        self.lineage = claim.lineage
        return claim

    def holds(self, claim: Claim) -> bool:
        """Whether this very claim is in storage: neither gone, nor another one of the same number."""
        found = self.claim_of(claim.generation)
        return found is not None and found.token == claim.token

    def claim_of(self, generation: int) -> Claim | None:
        """The claim of a number; None if it is not there."""
        key = self._generation_key(generation)
        body = self._read(key)
        if body is None:
            return None
        with understood(self._where(key)):
            lineage, address, sign = body["lineage"], body["address"], SignOfLife(**body["sign"])
            return fitting(Claim(generation, lineage, address, sign, body.get("token", "")))

    def _new_claim(self, generation: int, lineage: str, address: str | None = None, next_sign: float = 0.0) -> Claim:
        return Claim(generation, lineage, address, self._sign(next_sign), secrets.token_hex(8))

    def _claim(self, claim: Claim) -> bool:
        body = {key: value for key, value in vars(claim).items() if key != "generation"}
        body |= {"sign": claim.sign.to_json(), "job": self.job}
        if not self._calls.put_if_absent(self._generation_key(claim.generation), seal(body)):
            return False
        listing = self.listing("generation/")
        if listing.newest_generation != claim.generation:
            return False
        with suppress(StorageError):  # they do no harm
            for old in listing.generations:
                if old <= claim.generation - _RETAINED_CLAIMS:
                    self._calls.delete(self._generation_key(old))
        return True

    def _generation_key(self, number: int) -> str:
        return f"{self._root}/generation/{number:010d}"

    # ------------------------------------------------------------------ signs of life
    def sign(
        self, generation: int, number: int, next: float, ended: str = "", now: Mapping[str, Any] | None = None
    ) -> None:
        """Give the sign `number` of a generation. It takes the place of all before."""
        folder = f"{self._root}/alive"
        key = f"{folder}/{generation:010d}.{number:010d}"
        self._calls.put_if_absent(key, seal({"sign": self._sign(next, ended).to_json(), "now": now or {}}))
        for old in self._calls.list(folder):
            if old < key:
                self._calls.delete(old)

    def last_sign(self, claim: Claim) -> SignOfLife:
        """The newest sign of the driver that holds the claim; the claim itself is its first."""
        folder = f"{self._root}/alive"
        own = f"{folder}/{claim.generation:010d}."
        while keys := [key for key in self._calls.list(folder) if key.startswith(own)]:
            if (data := self._calls.get(keys[-1])) is not None:  # None: a newer one has just taken its place
                body = unseal(data, self._where(keys[-1]))
                with understood(self._where(keys[-1])):
                    return fitting(SignOfLife(**body["sign"], now=body.get("now", {})))
        return claim.sign

    # ------------------------------------------------------------------ statistics
    def add_statistics(self, new: Sequence[Mapping[str, Any]], *, together: int, keep: int) -> None:
        """Put them with those of the newest object, if it has fewer than `together`, and delete the oldest objects that
        are not needed for the newest `keep`. Two drivers at once leave some twice, and lose none."""
        objects = self.statistics()
        number, count, newest = objects[-1] if objects else (0, 0, "")
        before: list[Mapping[str, Any]] = []
        if count >= together:
            newest = ""
        elif newest:
            try:
                before = self.statistics_in(newest)
            except CorruptRecord as error:
                logger.warning("statistics of job %s go on beside what cannot be read: %s", self.job, error)
                newest = ""
        number += not newest
        count = len(before) + len(new)
        key = f"{self._root}/statistics/{number:010d}.{count:06d}.{secrets.token_hex(4)}"
        self._calls.put_if_absent(key, seal({"job": self.job, "checkpoints": [*before, *new]}))
        if newest:
            self._calls.delete(newest)
        for _, older, old in reversed([each for each in objects if each[2] != newest]):
            if count >= keep:
                self._calls.delete(old)
            count += older

    def statistics(self) -> list[tuple[int, int, str]]:
        """Number, count and key of each object, oldest first; what else is there is passed over. An object never
        changes."""
        keys = self._calls.list(f"{self._root}/statistics")
        matches = [(_STATISTICS.search(key), key) for key in keys]
        return [(int(name[1]), int(name[2]), key) for name, key in matches if name]

    def statistics_in(self, key: str) -> list[Mapping[str, Any]]:
        """Oldest first; some may be in another object, too."""
        body = self._read(key)
        if body is None:
            return []
        with understood(self._where(key)):
            return [dict(checkpoint) for checkpoint in body["checkpoints"]]

    # ------------------------------------------------------------------ notes between operators and drivers
    def note_of_now(self) -> tuple[str, SignOfLife]:
        """The id of a new note, which begins with the milliseconds since the epoch, and who puts it when."""
        sign = self._sign()
        return f"{sign.at:015d}.{secrets.token_hex(8)}", sign

    def put_note(self, folder: str, id: str, body: Mapping[str, Any]) -> None:
        """Put a note, unless it is there. `folder`: request, begun or answer."""
        self._calls.put_if_absent(f"{self._root}/{folder}/{id}", seal({"job": self.job, "note": body}))

    def notes(self, folder: str) -> list[str]:
        """The ids, oldest first; what else is there is passed over."""
        ids = [key.rpartition("/")[2] for key in self._calls.list(f"{self._root}/{folder}")]
        return [id for id in ids if _NOTE.fullmatch(id)]

    def note(self, folder: str, id: str) -> Mapping[str, Any] | None:
        key = f"{self._root}/{folder}/{id}"
        body = self._read(key)
        if body is None:
            return None
        if not isinstance(note := body.get("note"), dict):
            raise CorruptRecord(f"{self._where(key)} is no note of this library")
        return note

    def delete_note(self, folder: str, id: str) -> None:
        self._calls.delete(f"{self._root}/{folder}/{id}")

    def _sign(self, next: float = 0.0, ended: str = "") -> SignOfLife:
        who = f"host {socket.gethostname()}, process {os.getpid()}"
        return SignOfLife(who, time.time_ns() // 1_000_000, self.storage.clock(), next, ended)

    # ------------------------------------------------------------------ records
    def put(self, record: Record) -> bool:
        """Put-if-absent. True also if what is there is this very record (a put that was retried)."""
        key, data = self._record_key(record.checkpoint_id, record.round), seal(record.to_json())
        won = self._calls.put_if_absent(key, data) or self._has(record)
        if won:
            with suppress(StorageError):  # `delete_older_than` tries again
                self._keep_loss(record)
        return won

    def _has(self, record: Record) -> bool:
        return self._calls.get(self._record_key(record.checkpoint_id, record.round)) == seal(record.to_json())

    def get(self, checkpoint_id: int, round: int) -> Record | None:
        """The record of a checkpoint (round 0), or of one of its replays."""
        key = self._record_key(checkpoint_id, round)
        record = self._record_at(key)
        if record and (record.lineage, record.checkpoint_id, record.round) != (self.lineage, checkpoint_id, round):
            raise CorruptRecord(f"{self._where(key)} is the record of another checkpoint: it was copied or renamed.")
        return record

    def _record_at(self, key: str) -> Record | None:
        body = self._read(key)
        return Record.from_json(body, self._where(key)) if body is not None else None

    def load_newest(self) -> CompletedCheckpoint | None:
        """The newest complete checkpoint; None if there is none (R9: read again when retention cut in). A reader need
        not claim a generation before."""
        if not (self.lineage or self.follow_newest_claim().lineage):
            return None
        highest, stale = -1, 0
        while stale < _STALE_LISTINGS:
            newest = self.listing().newest_complete
            if newest < 0:
                return None
            rounds: list[Record] = []
            while record := self.get(newest, len(rounds)):
                rounds.append(record)
            if rounds and self.listing().newest_complete == newest:
                return CompletedCheckpoint(tuple(rounds))
            highest, stale = max(newest, highest), 0 if newest > highest else stale + 1
        shown = f"{stale} listings in a row show it as the newest record, but it is not there, or not the newest"
        raise self._stale(self._record_key(newest, 0), shown)

    def history(self, wanted: Callable[[int], bool] = lambda _: True) -> list[CompletedCheckpoint]:
        """Retained complete checkpoints, oldest first: the newest, and those before it whose
        id is `wanted`. A reader need not claim."""
        newest = self.load_newest()
        if not newest:
            return []
        older = [key for key in self.record_keys() if key.checkpoint_id < newest.checkpoint_id]
        return [*self.read([key for key in older if wanted(key.checkpoint_id)]), newest]

    def find(self, checkpoint_id: int) -> CompletedCheckpoint | None:
        """One retained checkpoint. A reader need not claim."""
        return next(iter(self.read([key for key in self.record_keys() if key.checkpoint_id == checkpoint_id])), None)

    def read(self, keys: Sequence[RecordKey]) -> list[CompletedCheckpoint]:
        """The checkpoints of some of the `record_keys`; else as `history`."""
        by_id: dict[int, list[Record]] = {}
        with progress("read the records", len(keys), "records") as advance:
            for key in keys:
                if record := self.get(*key):  # None: retention was quicker
                    by_id.setdefault(key.checkpoint_id, []).append(record)
                advance(1)
        return [CompletedCheckpoint(tuple(rounds)) for rounds in by_id.values() if rounds[0].round == 0]

    def record_keys(self) -> list[RecordKey]:
        """The keys of all records, oldest first. A reader need not claim."""
        return sorted(self.listing().records) if self.lineage or self.follow_newest_claim().lineage else []

    # ------------------------------------------------------------------ old records, and losses
    def delete_older_than(self, checkpoint_id: int, listing: Listing) -> None:
        for key in listing.records:
            if key.checkpoint_id < checkpoint_id:
                with suppress(CorruptRecord):  # it stays, since it may tell of a loss: see `losses`
                    if key.round and (replay := self.get(*key)):  # who put it may have died before it kept the loss
                        self._keep_loss(replay)
                    self._calls.delete(self._record_key(*key))

    def losses(self, bad: list[str]) -> list[Record]:
        """Every record, of any lineage, that gives participants up, oldest first. `bad` gets a sentence on each that
        cannot be read."""
        losses = {}
        replays = [self._record_key(*key) for key in self.record_keys() if key.round]
        for key in [*self._calls.list(f"{self._root}/loss"), *replays]:
            try:
                record = self._record_at(key)
                if record and record.accepted:
                    losses[record.lineage, record.checkpoint_id, record.round] = record
            except (CheckpointError, StorageError) as error:
                bad.append(str(error))
        return sorted(losses.values(), key=lambda record: record.completed_at)

    def _keep_loss(self, record: Record) -> None:
        if record.accepted:
            name = f"{record.lineage}.{record.checkpoint_id:020d}.{record.round:06d}"
            self._calls.put_if_absent(f"{self._root}/loss/{name}", seal(record.to_json()))

    def _record_key(self, checkpoint_id: int, round: int) -> str:
        return f"{self._root}/{self.lineage}/checkpoint/{checkpoint_id:020d}.{round:06d}"

    def _read(self, key: str) -> dict[str, Any] | None:
        data = self._calls.get(key)
        if data is None:
            return None
        body = unseal(data, self._where(key))
        if (job := body.get("job")) != self.job:
            raise WrongJob(
                f"{self._where(key)} belongs to job {job!r}, not to {self.job!r}. Give every job its own name, and "
                "do not copy records between jobs."
            )
        return body

    def _stale(self, key: str, what: str) -> StorageError:
        advice = "Listings have to show what is there; use a storage that is consistent, and start again"
        return StorageError(self.storage.uri, key, what, advice)

    def _where(self, key: str) -> str:
        return f"record {key} in {self.storage.uri}"
