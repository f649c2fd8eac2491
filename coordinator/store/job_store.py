"""The claims and records of a job in checkpoint storage.

Only this module and `journal` (alive, statistics, request) know these keys. The keys of rows that
are kept for replays are in `spool`. Rules: docs/protocol.md#the-rules

* JOB/generation/NUMBER: one claim per driver incarnation or restore. The highest is the newest, and
  names the current lineage. Its token tells it from a claim that another driver makes of the same
  number, after this storage was emptied or restored to an older state.
* JOB/LINEAGE/checkpoint/N.ROUND: in round 0 the complete record of checkpoint N, in round r > 0 the
  replacements of a replay.
* JOB/loss/LINEAGE.N.ROUND: a copy of a record that gives participants up. It is never deleted.
* JOB/alive/GENERATION.NUMBER: the last heartbeat of a driver.
* JOB/statistics/N.COUNT.RANDOM: statistics of so many tries of checkpoints. No decision depends on
  them.
* JOB/request/TIME.RANDOM: what an operator asks of the driver, also below JOB/begun and JOB/answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from coordinator.errors import CheckpointError, CorruptRecord, Superseded
from coordinator.storage import CheckpointStorage, StorageError
from coordinator.store.encoding import corrupt_if_malformed, require_field_types, seal, unseal
from coordinator.store.folder import JobFolder, new_heartbeat
from coordinator.store.journal import Journal
from coordinator.store.records import (
    Claim,
    CompletedCheckpoint,
    Heartbeat,
    Listing,
    Record,
    RecordKey,
)
from sinks._util.machine import machine
from sinks._util.progress import progress

_RETAINED_CLAIMS = 10
_STALE_LISTINGS = 20
"""The number of listings in a row that contradict what is there.

After these, the storage counts as inconsistent.
"""


def jobs_in(storage: CheckpointStorage) -> list[str]:
    """Return the names of all jobs that were ever started on a storage."""
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
    """The claims and records of one job, in one lineage.

    This is the given lineage, or otherwise the current one, that of the newest claim seen.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        job: str,
        lineage: str = "",
        on_call: Callable[[str, float], None] | None = None,
    ) -> None:
        """Open nothing yet. `on_call` is as in `TimedStorage`."""
        self.storage = storage
        self.job = job
        self._folder = JobFolder(storage, job, on_call)
        self.journal = Journal(self._folder)
        self.lineage = lineage
        """The lineage, "" before the first claim."""

    def listing(self, folder: str = "") -> Listing:
        """List the job, or one of its folders, now."""
        claims = f"{self._folder.root}/generation/"
        records = f"{self._folder.root}/{self.lineage}/checkpoint/"
        generations = list[int]()
        round_keys = list[RecordKey]()
        for key in self._folder.timed_storage.list(f"{self._folder.root}/{folder}"):
            try:
                if key.startswith(claims):
                    generations.append(int(key.removeprefix(claims)))
                elif key.startswith(records):
                    id, round = key.removeprefix(records).split(".")
                    round_keys.append(RecordKey(int(id), int(round)))
            except ValueError as error:
                raise CorruptRecord(
                    f"{key!r} in {self.storage.uri} is no file of this library: move it out of "
                    "there"
                ) from error
        return Listing(generations, round_keys)

    # ------------------------------------------------------------------ generations
    def claim_generation(self, address: str | None = None, next_heartbeat: float = 0.0) -> Claim:
        """Become the newest driver of this job, in its current lineage, so that older drivers stop.

        No number is given twice, as long as the storage is not emptied or restored to an older
        state. If it is, `holds` tells the claims apart. `address` is as in `Claim`, and
        `next_heartbeat` is the number of seconds until the next heartbeat.
        """
        newest = self.newest_claim()
        stale = 0
        while stale < _STALE_LISTINGS:
            lineage = newest.lineage or machine.random.token(4)
            claim = self._new_claim(newest.generation + 1, lineage, address, next_heartbeat)
            if self._claim(claim):
                self.lineage = claim.lineage
                return claim
            before = newest
            newest = self.newest_claim()
            stale = stale + 1 if newest == before else 0
        key = self._generation_key(newest.generation + 1)
        raise self._folder.stale_listing_error(
            key,
            f"it is there, but {stale} listings in a row show no generation after "
            f"{newest.generation}",
        )

    def begin_lineage(self, base: Record, allow: Callable[[], None]) -> None:
        """Make `base` the newest checkpoint, and its lineage the current one.

        Drivers of the lineage before can then complete no checkpoint any more. `allow` may raise to
        refuse, with no driver in the way of what it reads. What it has seen still holds when the
        lineage changes. This may be called again with the same base. Raises Superseded if a driver
        or another restore has started meanwhile.
        """
        begins = self.newest_claim().lineage != base.lineage
        if begins:
            fence = self.claim_generation()
            allow()
        self.lineage = base.lineage
        if not (self.put(base) if begins else self._has(base)):
            raise CorruptRecord(
                f"the lineage {base.lineage} has another base than the one that is restored, or "
                "none any more: restore it with the same options as the first time, or into an "
                "empty checkpointLocation"
            )
        if begins and not (
            self.holds(fence) and self._claim(self._new_claim(fence.generation + 1, base.lineage))
        ):
            raise Superseded(
                f"a driver of job {self.job!r}, another restore or an operator's command has "
                "started during the restore. See that nothing else runs, and restore again."
            )

    def newest_generation(self) -> int:
        return self.listing("generation/").newest_generation

    def newest_claim(self) -> Claim:
        for _ in range(_STALE_LISTINGS):
            number = self.newest_generation()
            if not number:
                return Claim()
            # It is None if so many generations have been claimed since that the claim was deleted.
            if claim := self.claim_of(number):
                return claim
        shown = f"{_STALE_LISTINGS} listings in a row show it, but it is not there"
        raise self._folder.stale_listing_error(self._generation_key(number), shown)

    def follow_newest_claim(self) -> Claim:
        """Return the newest claim, whose lineage is read from now on. This claims nothing."""
        claim = self.newest_claim()
        self.lineage = claim.lineage
        return claim

    def holds(self, claim: Claim) -> bool:
        """Tell whether this very claim is in storage.

        It may be gone, or another claim may have its number.
        """
        found = self.claim_of(claim.generation)
        return found is not None and found.token == claim.token

    def claim_of(self, generation: int) -> Claim | None:
        """Return the claim of a number; None if it is not there."""
        key = self._generation_key(generation)
        body = self._folder.read(key)
        if body is None:
            return None
        with corrupt_if_malformed(self._folder.describe(key)):
            lineage = body["lineage"]
            address = body["address"]
            sign = Heartbeat(**body["sign"])
            return require_field_types(
                Claim(generation, lineage, address, sign, body.get("token", ""))
            )

    def _new_claim(
        self, generation: int, lineage: str, address: str | None = None, next_heartbeat: float = 0.0
    ) -> Claim:
        return Claim(
            generation,
            lineage,
            address,
            new_heartbeat(self.storage, next_heartbeat),
            machine.random.token(8),
        )

    def _claim(self, claim: Claim) -> bool:
        body = {key: value for key, value in vars(claim).items() if key != "generation"}
        body |= {"sign": claim.sign.to_json(), "job": self.job}
        if not self._folder.timed_storage.put_if_absent(
            self._generation_key(claim.generation), seal(body)
        ):
            return False
        listing = self.listing("generation/")
        if listing.newest_generation != claim.generation:
            return False
        with suppress(StorageError):  # old claims do no harm
            for old in listing.generations:
                if old <= claim.generation - _RETAINED_CLAIMS:
                    self._folder.timed_storage.delete(self._generation_key(old))
        return True

    def _generation_key(self, number: int) -> str:
        return f"{self._folder.root}/generation/{number:010d}"

    # ------------------------------------------------------------------ records
    def put(self, record: Record) -> bool:
        """Put a record, unless there is one under its key.

        Returns True even then if it is this very record, because a put that was retried finds the
        record that it has put.
        """
        key = self._record_key(record.checkpoint_id, record.round)
        data = seal(record.to_json())
        won = self._folder.timed_storage.put_if_absent(key, data) or self._has(record)
        if won:
            with suppress(StorageError):  # `delete_older_than` tries again
                self._keep_loss(record)
        return won

    def _has(self, record: Record) -> bool:
        key = self._record_key(record.checkpoint_id, record.round)
        return self._folder.timed_storage.get(key) == seal(record.to_json())

    def get(self, checkpoint_id: int, round: int) -> Record | None:
        """Return the record of a checkpoint (round 0), or of one of its replays.

        Returns None if it is not there.
        """
        key = self._record_key(checkpoint_id, round)
        record = self._record_at(key)
        if record and (record.lineage, record.checkpoint_id, record.round) != (
            self.lineage,
            checkpoint_id,
            round,
        ):
            raise CorruptRecord(
                f"{self._folder.describe(key)} is the record of another checkpoint: it was copied "
                "or renamed."
            )
        return record

    def _record_at(self, key: str) -> Record | None:
        body = self._folder.read(key)
        return Record.from_json(body, self._folder.describe(key)) if body is not None else None

    def load_newest(self) -> CompletedCheckpoint | None:
        """Return the newest complete checkpoint; None if there is none.

        If retention deletes it meanwhile, this reads again (R9). A reader need not claim a
        generation before.
        """
        if not (self.lineage or self.follow_newest_claim().lineage):
            return None
        highest = -1
        stale = 0
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
        shown = (
            f"{stale} listings in a row show it as the newest record, but it is not there, or not "
            "the newest"
        )
        raise self._folder.stale_listing_error(self._record_key(newest, 0), shown)

    def history(self, wanted: Callable[[int], bool] = lambda _: True) -> list[CompletedCheckpoint]:
        """Return retained complete checkpoints, oldest first.

        These are the newest one, and those before it whose id is `wanted`. A reader need not claim
        a generation.
        """
        newest = self.load_newest()
        if not newest:
            return []
        older = [key for key in self.record_keys() if key.checkpoint_id < newest.checkpoint_id]
        return [*self.read([key for key in older if wanted(key.checkpoint_id)]), newest]

    def find(self, checkpoint_id: int) -> CompletedCheckpoint | None:
        """Return one retained checkpoint; None if it is not there.

        A reader need not claim a generation.
        """
        return next(
            iter(
                self.read([key for key in self.record_keys() if key.checkpoint_id == checkpoint_id])
            ),
            None,
        )

    def read(self, keys: Sequence[RecordKey]) -> list[CompletedCheckpoint]:
        """Return the checkpoints of some of the `record_keys`, oldest first."""
        by_id: dict[int, list[Record]] = {}
        with progress("read the records", len(keys), "records") as advance:
            for key in keys:
                if record := self.get(*key):  # None: retention was quicker
                    by_id.setdefault(key.checkpoint_id, []).append(record)
                advance(1)
        return [
            CompletedCheckpoint(tuple(rounds)) for rounds in by_id.values() if rounds[0].round == 0
        ]

    def record_keys(self) -> list[RecordKey]:
        """Return the keys of all records, oldest first. A reader need not claim a generation."""
        return (
            sorted(self.listing().records)
            if self.lineage or self.follow_newest_claim().lineage
            else []
        )

    # ------------------------------------------------------------------ old records, and losses
    def delete_older_than(self, checkpoint_id: int, listing: Listing) -> None:
        for key in listing.records:
            if key.checkpoint_id < checkpoint_id:
                with suppress(CorruptRecord):  # it stays, as it may tell of a loss: see `losses`
                    # The driver that put the record may have died before it kept the loss.
                    if key.round and (replay := self.get(*key)):
                        self._keep_loss(replay)
                    self._folder.timed_storage.delete(self._record_key(*key))

    def losses(self, bad: list[str]) -> list[Record]:
        """Return every record, of any lineage, that gives participants up, oldest first.

        `bad` gets a sentence on each record that cannot be read.
        """
        losses = {}
        replays = [self._record_key(*key) for key in self.record_keys() if key.round]
        for key in [*self._folder.timed_storage.list(f"{self._folder.root}/loss"), *replays]:
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
            self._folder.timed_storage.put_if_absent(
                f"{self._folder.root}/loss/{name}", seal(record.to_json())
            )

    def _record_key(self, checkpoint_id: int, round: int) -> str:
        return f"{self._folder.root}/{self.lineage}/checkpoint/{checkpoint_id:020d}.{round:06d}"
