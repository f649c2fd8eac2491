"""One simulated world: its memories, and what really happened in it, whatever any memory says later."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from coordinator.errors import CheckpointError
from coordinator.storage import StorageError
from coordinator.store.job_store import JobStore
from coordinator.store.records import Claim
from sinks.transaction import TransactionId
from tests.simulation.memory import Memory
from tests.simulation.requests import Requests
from tests.simulation.scheduler import Process, Scheduler

if TYPE_CHECKING:
    from tests.simulation.scenario import Scenario
    from tests.simulation.scheduler import Process
    from tests.simulation.targets import SimSink, Target, Transaction

JOB = "job"
STORAGE = "main"
SPOOL = "spool"
SAVEPOINTS = "savepoints"


_NUMBERS = count()
_WORLDS: WeakValueDictionary[int, World] = WeakValueDictionary()


def _world_of(number: int) -> World:
    return _WORLDS[number]


class Unreachable(ConnectionError):
    """A call to a target failed. It may have taken effect."""


class JobFailed(Exception):
    """Spark: a task has failed too often."""


class ConcurrentLog(Exception):
    """Spark: another run of the query has written this file of the checkpointLocation."""


class Saved(NamedTuple):
    tick: int
    """When the savepoint was complete."""
    location: str
    """The checkpointLocation that was saved."""


@dataclass(frozen=True)
class Listing:
    """What a process was told of the transactions in doubt of one sink, and what storage said at that moment."""

    names: tuple[str, ...]
    decided: frozenset[str]
    """Those that a record names."""
    lineage: str
    generation: int
    newest: int
    """The newest complete checkpoint."""
    causes: tuple[int, int]
    """What had come from outside until then."""


class World:
    """The memories, and the facts that the judge knows and no process does."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler) -> None:
        self.scenario = scenario
        self.scheduler = scheduler
        self.units = scenario.units
        """The units of input that there are. Unit u is the rows 2u and 2u + 1."""
        self.storages: dict[str, Memory] = defaultdict(self._memory)
        self.locations: dict[str, Memory] = defaultdict(self._memory)
        self.targets: dict[str, Target] = {}
        self.location_names: list[tuple[int, str]] = [(0, "a")]
        """The checkpointLocations that the query was started with, each with the tick from which on."""
        self.job_sinks = list(scenario.sinks)
        """The sinks that the job has. A restore of a savepoint may take some out."""
        self.sinks_now = list(scenario.sinks)
        """The sinks that a driver starts with now."""
        self.settings = scenario.settings
        """The settings that a driver starts with now."""
        self.changed_from = self.units + 1000
        """The unit from which on the source gives other rows than before."""
        self.topic = 1
        """The id of the source's topic. It has another one when it was deleted and created again."""
        self.topic_created_at = 0
        self.topic_read: dict[str, int] = {}
        """The topic that the checkpoints of each lineage were read from."""
        self.source_calls_that_fail = 0
        self.first_units: dict[str, int] = {}
        """The unit of input with which each sink began."""
        self.planned: dict[tuple[int, int], int] = {}
        """The first unit of input of each plan of a batch, by the batch and the time of the plan."""
        self.decided_rows: dict[tuple[str, str, int, int], tuple[int, ...]] = {}
        """The rows of each participant (sink, lineage, checkpoint, subtask) as they were decided first."""
        self.claims: list[tuple[int, int]] = []
        """The tick and the number of each claim of a generation."""
        self.storage_restored_at = 0
        """The tick of the newest restore of checkpoint storage."""
        self.damaged: dict[str, tuple[int, bytes]] = {}
        """The records that somebody has altered, with the tick when it was done."""
        self.handed_over = 0
        """The number of batches that Spark has handed to a coordinator."""
        self.epochs = 0
        self.speculative = 0
        """The number of tasks that get a speculative copy from now on."""
        self.decisions_to_come = 0
        """The number of records after which events happen again."""
        self.decided = False
        """Whether a record was ever put."""
        self.named: set[tuple[str, str]] = set()
        """The transactions, by sink, that a record has named in any storage at any time."""
        self.rows_of: dict[tuple[str, str], tuple[int, ...]] = {}
        """The rows that each transaction ever had."""
        self.given_up: dict[str, set[int]] = {}
        """The rows, by sink, that an operator has discarded."""
        self.by_hand: set[tuple[str, str]] = set()
        """The transactions that an operator commits though no record names them."""
        self.decided_by: dict[tuple[str, str], tuple[Process | None, int]] = {}
        """The process that has decided each transaction, and the tick when it did."""
        self.current: dict[tuple[str, str, int, int], str] = {}
        """The transaction that has the rows of each participant, as it was decided last; none if they are given up."""
        self.aborted_by: dict[tuple[str, str], tuple[str, int]] = {}
        """The lineage and the generation of the driver that has aborted each transaction."""
        self.violations: list[str] = []
        """What was wrong at the very moment when it happened."""
        self.causes: Counter[str] = Counter()
        """What came from outside: only with a cause may a driver refuse to continue."""
        self.restored_at: dict[str, str] = {}
        """The checkpointLocation that each lineage of a restore belongs to."""
        self.savepoints: list[tuple[str, int, int]] = []
        """The address, the checkpoint and the end of the input of each savepoint."""

        self.saved: dict[str, Saved] = {}
        """The savepoints that were ever complete, by their address."""
        self.committed_by: dict[tuple[str, str], Process] = {}
        """The process that has committed each transaction last, by sink."""
        self.spoiled: set[str] = set()
        """The addresses of savepoints that somebody has damaged."""
        self.requests = Requests(self)
        self.cut_off: dict[Any, float] = {}
        """Until when a process, or everybody (None), cannot reach any storage."""
        self.unreadable: set[tuple[str, str]] = set()
        """The objects, by storage and key, that can be seen and not read."""
        self.events = 0
        """The number of events that have happened."""
        self.was_suspended = False
        """Whether time has passed at which nobody gave heartbeats."""

        self._number = next(_NUMBERS)
        _WORLDS[self._number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a sink in another simulated process is in the same world."""
        return _world_of, (self._number,)

    # ------------------------------------------------------------------ memories
    def _memory(self) -> Memory:
        return Memory(lambda: self.scheduler.ticks)

    def storage(self, name: str) -> Memory:
        return self.storages[name]

    def location(self, name: str) -> Memory:
        return self.locations[name]

    def target(self, name: str) -> Target:
        if name not in self.targets:
            from tests.simulation.targets import Target

            self.targets[name] = Target(self, name, self._memory())
        return self.targets[name]

    @property
    def location_name(self) -> str:
        """The checkpointLocation that an operator starts the query with."""
        return self.location_names[-1][1]

    def memories(self) -> dict[str, Memory]:
        """Return all that a backup can hold, by what it is called in `causes`."""
        return {
            "storage": self.storage(STORAGE),
            "spool": self.storage(SPOOL),
            "location": self.location(self.location_name),
            **{f"target {name}": target.memory for name, target in sorted(self.targets.items())},
        }

    @property
    def was_restored(self) -> bool:
        """Whether any memory was restored to an older state, or deleted."""
        return bool(self.causes["restored"])

    @property
    def partitions(self) -> int:
        return self.settings.partitions

    # ------------------------------------------------------------------ sinks
    def sinks(self) -> list[SimSink]:
        from tests.simulation.targets import KINDS

        return [KINDS[kind](self, name, every) for name, kind, every in self.sinks_now]

    def all_sinks(self) -> list[SimSink]:
        """Return the sinks of the scenario, with those of their dead letters."""
        from tests.simulation.targets import SimSink

        own = self.sinks()
        letters = [sink.dead_letters for sink in own if isinstance(sink.dead_letters, SimSink)]
        return [*own, *letters]

    # ------------------------------------------------------------------ what happens
    def record_was_put(self, key: str, value: bytes) -> None:
        if "/checkpoint/" not in key:
            return
        body = json.loads(value)["body"]
        self.decided = True
        if self.decisions_to_come:
            self.decisions_to_come -= 1
            self.scheduler.holds_events = self.decisions_to_come > 0
        process = self.scheduler.current
        if process:
            process.local["put at"] = self.scheduler.ticks
            process.local["commits since put"] = 0
        first_unit = self.planned.get((body["checkpoint_id"], body["planned_at"]), 0)
        for sink in body["partitions"]:
            self.first_units[sink] = min(first_unit, self.first_units.get(sink, first_unit))
        for committable in body["committables"]:
            name = name_of(committable["transaction"])
            self.named.add((committable["sink"], name))
            self.decided_by[committable["sink"], name] = process, self.scheduler.ticks
            if self.aborted_by.get((committable["sink"], name)) == (body["lineage"], body["generation"]):
                self.violations.append(f"decided: {short(name)}, which the same driver had aborted")
            participant = committable["sink"], body["lineage"], body["checkpoint_id"], committable["subtask"]
            self.current[participant] = name
            if not body["round"]:  # it may be planned anew, after storage was restored
                self.decided_rows[participant] = self.rows_of.get((committable["sink"], name), ())
        if not body["restored_from"]:
            self._judge_decision(body)
        for loss in body["accepted"]:
            self.participant_was_given_up(body, loss)
            rows = self.rows_of.get((loss["sink"], name_of(loss["transaction"])), ())
            self.given_up.setdefault(loss["sink"], set()).update(map(id_of, rows))
            self.current.pop((loss["sink"], body["lineage"], body["checkpoint_id"], loss["subtask"]), None)
            if f"rows {name_of(loss['transaction'])}" in self.target(loss["sink"]).memory.values:
                self.violations.append(f"given up: {short(name_of(loss['transaction']))}, which is visible")
        self.requests.record_was_put(process)
        location = process.local.get("location") if process else None
        if location and self.restored_at.get(body["lineage"], location) != location:
            # A person has started the query with the location of before a restore, and it goes on there.
            self.causes["old location"] += 1

    def _judge_decision(self, body: dict[str, Any]) -> None:
        """Say what is wrong with a record at the moment when it is put."""
        process = self.scheduler.current
        if process is None or process.kind == "packet":
            return
        what = f"checkpoint {body['checkpoint_id']}, round {body['round']}"
        self.require_newest(f"decides {what}", calls=3)
        self.require_own_claim(f"decides {what}", calls=3)
        process.local.setdefault("decided", []).append((body["lineage"], body["checkpoint_id"]))
        if process.local.get("claimed a lower number"):
            self.violations.append(f"claim: {process.name} decides {what}, and its number was not the newest")
        letters: Counter[str] = Counter()
        for committable in body["committables"]:
            letters[committable["sink"]] += len(
                self.rows_of.get((committable["sink"], name_of(committable["transaction"])), ())
            )
        for sink, rows in letters.items():
            if sink.endswith("-dead") and rows > self.scenario.most_letters:
                self.violations.append(f"letters: {what} is decided with {rows} of them")
        if not body["round"] and not process.local.get("source was silent"):
            self._judge_topic(body["lineage"], process.local.get("tasks ended at", 0), what)
        for key, (when, damaged) in self.damaged.items():
            before = int(key.rpartition("/")[2].partition(".")[0])
            same_lineage = f"/{body['lineage']}/" in key
            still_there = self.storage(STORAGE).values.get(key) == damaged
            if still_there and same_lineage and process.owner.started_at > when and before >= body["checkpoint_id"] - 1:
                self.violations.append(f"damage: {what} is decided after the record of {before}, which was altered")

    def _judge_topic(self, lineage: str, tasks_ended_at: int, what: str) -> None:
        read = self.topic if self.topic_created_at <= tasks_ended_at else self.topic - 1
        if read != self.topic_read.setdefault(lineage, read):
            self.violations.append(f"topic: {what} is decided over another topic than the checkpoint before")

    def require_newest(self, what: str, calls: int) -> None:
        """Note a violation if a driver does something that only the newest one may do.

        It must have looked for a newer claim within its newest `calls` calls.
        """
        process = self.scheduler.current
        own = process.local.get("generation") if process else None
        if process is None or own is None or process.owner.kind != "driver":
            return
        for tick, number in self.claims:
            if number > own and process.made_calls_since(tick) > calls and not self.was_restored:
                self.violations.append(
                    f"superseded: {process.name} {what} in generation {own}, long after generation {number} was claimed"
                )
                return

    def require_newest_since_commit(self, what: str) -> None:
        """Note a violation if a driver does what it may do only if it was the newest after its last commit."""
        process = self.scheduler.current
        own = process.local.get("generation") if process else None
        if process is None or own is None or self.was_restored:
            return
        committed_at = process.local.get("asked to commit at", 0)
        if newer := [number for tick, number in self.claims if number > own and tick < committed_at]:
            self.violations.append(
                f"superseded: {process.name} {what} in generation {own}, after {newer[0]} was claimed"
            )

    def batch_is_done(self, n: int, planned_at: int) -> None:
        """Note a violation if Spark is told that a batch is done, and that is another one, or not all of it visible."""
        history = self.history()
        newest = history[-1] if history else None
        if newest is None or newest.checkpoint_id != n:  # an older record may be one that a zombie has put again (R1)
            return
        if newest.record.planned_at not in (0, planned_at):
            self.violations.append(f"another plan: batch {n} is done by a record of a batch that was planned otherwise")
        if self.was_restored or self.causes["copied"]:
            return
        for committable in newest.committables.values():
            name = name_of(committable.transaction)
            if f"rows {name}" not in self.target(committable.sink).memory.values:
                self.violations.append(
                    f"not visible: batch {n} is done, and {committable.sink} {short(name)} is not visible"
                )

    def require_own_claim(self, what: str, calls: int) -> None:
        """Note a violation if a driver does something though its claim is not in storage any more.

        It must have looked for its claim within its newest `calls` calls.
        """
        process = self.scheduler.current
        claim = process.local.get("claim") if process else None
        if process is None or claim is None or process.owner.kind != "driver":
            return
        key, value = claim
        is_there = self.storage(STORAGE).values.get(key) == value
        if (
            not is_there
            and process.made_calls_since(self.storage_restored_at) > calls
            and process.local["generation"] > self.newest_claim() - 9
        ):
            self.violations.append(f"displaced: {process.name} {what}, long after its claim was gone")

    def newest_claim(self) -> int:
        keys = [key for key in self.storage(STORAGE).values if "/generation/" in key]
        return max((int(key.rpartition("/")[2]) for key in keys), default=0)

    def participant_was_given_up(self, body: Mapping[str, Any], loss: Mapping[str, Any]) -> None:
        """Note that a record gives up the rows of a participant, and a violation if it must not.

        It must not if no operator has asked for that, if the rows are not lost, or while a transaction of another sink
        waits for its commit. What became of that one has to be known first (R3).
        """
        process = self.scheduler.current
        if process is None or process.kind == "packet":
            return
        process.local["gave up"] = True
        if self.was_restored:
            return
        sink, wanted = loss["sink"], process.local.get("accepts", ())
        if f"{sink}/{loss['subtask']}" not in wanted and "all" not in wanted:
            self.violations.append(f"given up: {sink}/{loss['subtask']}, which nobody has asked for")
        transaction = self.target(sink).transaction(name_of(loss["transaction"]))
        if transaction and transaction.state in ("prepared", "committed"):
            self.violations.append(f"given up: {sink} {loss['transaction']}, which is {transaction.state}")
        of_checkpoint = [each for each in self.history() if each.checkpoint_id == body["checkpoint_id"]]
        for (other, _), committable in of_checkpoint[0].committables.items() if of_checkpoint else ():
            there = self.target(other).transaction(name_of(committable.transaction))
            if other != sink and there and there.state == "prepared":
                self.violations.append(f"given up: {sink} {loss['transaction']}, before {other} has answered")

    def claim_was_put(self, key: str, value: bytes) -> None:
        process = self.scheduler.current
        number = int(key.rpartition("/")[2])
        newest = max((other for _, other in self.claims), default=0)
        self.claims.append((self.scheduler.ticks, number))
        if process:
            process.local["generation"] = number
            process.local["claim"] = key, value
            process.local.pop("told", None)
            process.local["claimed a lower number"] = number < newest and not self.was_restored
            if process.kind == "abort":
                process.local["decided at the claim"] = self.decided_names()
                seen = {name for listed in process.local.get("listings", {}).values() for name in listed[-1].names}
                if process.local.get("chosen", "") not in seen | {""}:
                    self.violations.append(f"claim: {process.name} shuts drivers out for what is not in doubt")

    def savepoint_was_put(self, uri: str, value: bytes) -> None:
        record = json.loads(value)["body"]["records"][0]
        end = json.loads(record["offsets"][0])[0]
        self.savepoint_must_be_visible(uri, end)
        self.savepoints.append((uri, record["checkpoint_id"], end))
        location = str(json.loads(value)["body"]["checkpoint_location"])
        self.saved[uri] = Saved(self.scheduler.ticks, location.removeprefix("loc:"))
        self.requests.savepoint_was_put(uri)

    def savepoint_must_be_visible(self, uri: str, end: int) -> None:
        """Note it if rows of a savepoint are not visible. Nobody commits them after a restore."""
        from tests.simulation.targets import ids_for

        if self.was_restored or self.causes["rows deleted"]:
            return
        for sink in self.all_sinks():
            given_up = self.given_up.get(sink.name, set())
            first = max(self.first_units.get(sink.name, end), 1 if self.scenario.adopt else 0)
            wanted = ids_for(sink, first, end) - given_up
            if hidden := sorted(wanted - self.target(sink.name).visible().keys()):
                self.violations.append(f"saved: {uri}, though rows {hidden} of {sink.name} are not visible")

    def restore_was_begun(self, uri: str, mark: bytes) -> None:
        self.restored_at[json.loads(mark)["body"]["lineage"]] = uri.removeprefix("loc:")

    @property
    def outside(self) -> tuple[int, int]:
        return self.causes["restored"], self.causes["savepoint restored"]

    def is_asked_to_commit(self) -> None:
        if process := self.scheduler.current:
            process.local["asked to commit at"] = self.scheduler.ticks
            process.local["held by orphans"] = False
            process.local["commits since put"] = process.local.get("commits since put", 0) + 1

    def commit_was_held_by(self, sink: str, names: set[str]) -> None:
        """Note whether the newest commit of a process has failed because orphans hold a lock."""
        if process := self.scheduler.current:
            process.local["held by orphans"] = not any((sink, name) in self.named for name in names)

    def looks_at_memory(self) -> None:
        """Note when a driver looks at what a target remembers. Before a decision that is after its tasks."""
        if process := self.scheduler.current:
            process.local["looked at"] = self.scheduler.ticks

    def about_to_commit(self, target: Target, prepared: Mapping[str, Transaction]) -> None:
        if self.scheduler.current is None:  # the conformance kit, in which no record names anything
            return
        process = self.scheduler.running
        seen = target.visible()
        if self._record_was_gone() and not self.decided_names() & prepared.keys():
            self.violations.append(f"undecided: {target.name} is asked to commit, and the record was gone before")
        for name, transaction in prepared.items():
            self.committed_by[target.name, name] = process.owner
            was_named = (target.name, name) in self.named
            if not was_named and (target.name, name) not in self.by_hand:
                self.violations.append(
                    f"undecided: {target.name} {short(name)} was committed, and no record ever named it"
                )
            participant = target.name, transaction.lineage, transaction.checkpoint, transaction.subtask
            decided = self.decided_rows.get(participant)
            if decided is not None and sorted(decided) != sorted(transaction.rows) and was_named:
                self.violations.append(
                    f"other rows: {target.name} {short(name)} has {transaction.rows}, decided were {decided}"
                )
            self.require_newest(f"commits {short(name)}", calls=14)
            ids = set(map(id_of, transaction.rows))
            if twice := sorted(seen.keys() & ids):
                self.violations.append(f"duplicated: rows {twice} of {target.name} by {short(name)}")
            seen.update(ids)

    def _record_was_gone(self) -> bool:
        """Tell whether storage was restored after a driver's put and before its next call, a look at the records.

        Once it has begun to commit, it does not have to stop.
        """
        process = self.scheduler.current
        if process is None or process.local.get("commits since put") != 1:
            return False
        put_at = process.local.get("put at", self.storage_restored_at)
        next_call = min((tick for tick in process.recent if tick > put_at), default=0)
        return bool(put_at < self.storage_restored_at <= next_call)

    def listed_in_doubt(self, sink: str, names: list[str]) -> None:
        """Note what is decided at the moment when a process lists what is in doubt.

        The process must not abort that (I6).
        """
        process = self.scheduler.current
        if process is None:
            return
        listings = process.local.setdefault("listings", {}).setdefault(sink, [])
        if not names:
            listings.append(Listing((), frozenset(), "", 0, -1, self.outside))
            return
        store = self.job_store()
        try:
            claim = store.follow_newest_claim()
            newest = store.listing().newest_complete
        except (CheckpointError, StorageError):
            claim, newest = Claim(), -1
        decided = self.decided_names() & frozenset(names)
        listings.append(Listing(tuple(names), decided, claim.lineage, claim.generation, newest, self.outside))

    def _judge_abort_of_decided(self, target: Target, name: str, transaction: Transaction) -> None:
        """Say what is wrong if a driver aborts what it, or another driver, has decided."""
        process = self.scheduler.running
        own = process.local.get("generation")
        by, when = self.decided_by.get((target.name, name), (None, 0))
        if transaction.state != "prepared":
            return  # it was ended before, perhaps before it was decided
        if by and by is not process.owner and process.made_calls_since(when) > 1 and name in self.decided_names():
            self.violations.append(f"aborted: {target.name} {short(name)}, which {by.name} had decided")
        participant = target.name, transaction.lineage, transaction.checkpoint, transaction.subtask
        is_current = self.current.get(participant) == name
        checkpoints = (number for _, lineage, number, _ in self.current if lineage == transaction.lineage)
        newest = max(checkpoints, default=-1)
        is_retained = transaction.checkpoint > newest - self.settings.retained  # by R16, older ones are not asked for
        if by is process.owner and is_current and is_retained and own == max(number for _, number in self.claims):
            self.violations.append(f"aborted: {target.name} {short(name)}, which this driver had decided")
        if own and "#" not in name:
            self.aborted_by[target.name, name] = TransactionId.parse(name).lineage, own

    def about_to_abort(self, target: Target, name: str, transaction: Transaction) -> None:
        process = self.scheduler.current
        if process is None:
            return
        if told := process.local.get("told"):
            self.violations.append(f"displaced: {process.name} aborts {short(name)}, after it was told {told}")
        if process.owner.kind == "driver":
            self._judge_abort_of_decided(target, name, transaction)
        own = process.local.get("generation") if process.owner.kind in ("driver", "abort") else None
        if own and "#" not in name and TransactionId.parse(name).generation > own and not self.was_restored:
            self.violations.append(
                f"aborted: {target.name} {short(name)} of a newer driver, by the driver of generation {own}"
            )
        if (
            transaction.state == "prepared"
            and name in process.local.get("decided at the claim", ())
            and not self.was_restored
        ):
            self.violations.append(f"aborted: {target.name} {short(name)}, which was decided before the fence")
        [*_, listed] = process.local.get("listings", {}).get(target.name, [None])
        if listed is None or transaction.state != "prepared" or listed.causes != self.outside:
            return
        if name in listed.decided:
            self.violations.append(f"aborted: {target.name} {short(name)}, which was decided before it was listed")
        if process.kind == "abort":
            self._judge_abort_after_a_restore(target, name, transaction)
        if process.kind == "abort" and own is None and "#" not in name and not self.was_restored:
            id = TransactionId.parse(name)
            is_open = id.checkpoint > listed.newest or (id.checkpoint == listed.newest and id.round > 0)
            if is_open and (id.lineage, id.generation) == (listed.lineage, listed.generation):
                self.violations.append(
                    f"aborted: {target.name} {short(name)} of the newest driver, by a command that has claimed nothing"
                )

    def _judge_abort_after_a_restore(self, target: Target, name: str, transaction: Transaction) -> None:
        """Say what is wrong if a careful operator aborts what a record named, though storage lacks that record.

        He must not if a target shows that it has a later checkpoint than storage.
        """
        lineages = {record.lineage for record in (complete.record for complete in self.history())}
        newest = max((complete.checkpoint_id for complete in self.history()), default=-1)
        if (target.name, name) not in self.named or (lineages and transaction.lineage not in lineages):
            return
        if self.restored_at or self.scheduler.alive("driver"):
            return
        ahead = [
            other
            for other in self.targets.values()
            for _, each in other.transactions()
            if each.state == "committed" and (each.lineage, each.checkpoint > newest) == (transaction.lineage, True)
        ]
        if ahead and transaction.checkpoint > newest:
            shows = f"{ahead[0].name} shows that storage is older"
            self.violations.append(f"aborted: {target.name} {short(name)}, which was decided, and {shows}")

    def reaches_storage(self) -> bool:
        """Tell whether the running process reaches storage now."""
        process = self.scheduler.current
        owner = process.owner if process else None
        return all(self.cut_off.get(whom, 0.0) <= self.scheduler.now for whom in (owner, None))

    # ------------------------------------------------------------------ for the judge
    def job_store(self) -> JobStore:
        """Return the records as they are now. To read them is no call that a schedule knows of."""
        from tests.simulation.storage import Snapshot

        return JobStore(Snapshot(self.storage(STORAGE).values), JOB)

    def decided_names(self) -> frozenset[str]:
        """Return the transactions that the records in storage name now."""
        named = [committable for complete in self.history() for committable in complete.committables.values()]
        return frozenset(name_of(committable.transaction) for committable in named)

    def history(self) -> list[Any]:
        try:
            return self.job_store().history()
        except (CheckpointError, StorageError):
            return []


CHANGED = 1000
"""What is added to an id when the source gives another row in its place."""


def id_of(row: int) -> int:
    """Return the id of a row, whichever of its contents the source has given."""
    return row % CHANGED


def name_of(identity: Any) -> str:
    """Return the name of a transaction in the simulated targets."""
    return str(identity["name"]) if "name" in identity else f"{identity['pooled']}#{identity['epoch']}"


def short(name: str) -> str:
    return name if "#" in name else ".".join(name.split(".")[2:])
