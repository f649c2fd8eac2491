"""Plays a scenario against the real code, and returns what is wrong."""

from __future__ import annotations

import json
import math
import re
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

from typer import Exit

from coordinator.config import CheckpointConfig
from coordinator.coordinator import CheckpointCoordinator
from coordinator.errors import (
    CheckpointError,
    CheckpointGap,
    CheckpointLocationMismatch,
    CorruptRecord,
    ExternalSystemBehind,
    QueryNotAdopted,
    StorageBehind,
    UnknownSink,
    WrongJob,
)
from coordinator.storage import StorageError
from coordinator.store.encoding import seal
from coordinator.store.records import ANY_LINEAGE
from sinks.errors import SinkError, TooManyDeadLetters
from tests.simulation.judge import (
    COMMANDS,
    OUTSIDE,
    Before,
    first_unit,
    judge,
    not_promised,
    wrong_at_the_end,
    wrong_command,
    wrong_requests,
    wrong_stop,
)
from tests.simulation.machine import simulated_machine
from tests.simulation.memory import Memory
from tests.simulation.operators import Operator
from tests.simulation.real_code import led_into
from tests.simulation.scenario import Scenario, Settings
from tests.simulation.scheduler import INTERRUPT, Process, Runaway, Scheduler
from tests.simulation.spark import ADOPTED, SimQuery, SimWriter
from tests.simulation.storage import SimStorage
from tests.simulation.targets import Kafka
from tests.simulation.world import (
    JOB,
    SAVEPOINTS,
    SPOOL,
    STORAGE,
    ConcurrentLog,
    JobFailed,
    Unreachable,
    World,
    short,
)

EXPECTED = (CheckpointError, StorageError, SinkError, Unreachable, ConcurrentLog, JobFailed, Exit)
"""What may end a process. Any other exception is a fault, in any process."""
ALARMS = (
    StorageBehind,
    ExternalSystemBehind,
    CheckpointGap,
    QueryNotAdopted,
    CheckpointLocationMismatch,
    CorruptRecord,
    UnknownSink,
    WrongJob,
)
"""What a driver may say only if a memory is older than the others."""
BEFORE_THE_CLAIM = (CheckpointGap, QueryNotAdopted, CheckpointLocationMismatch, UnknownSink)
"""Refusals that storage and Spark's log alone give. A driver learns of them before it stops another one."""


def _is_deciding(driver: Process) -> bool:
    """Tell whether a driver acts by what it has read of the targets' memories, so that it may decide or abort."""
    began, looked, put = (driver.local.get(what, 0) for what in ("tasks began at", "looked at", "put at"))
    return bool(looked > max(began, put))


@dataclass
class Result:
    """What came of a scenario."""

    faults: list[str]
    """What is wrong, [] if nothing is."""
    limits: list[str]
    """What went wrong and is not promised (docs/failures.md)."""
    refusal: BaseException | None
    """What a driver said at the end; None if it made each row visible once."""
    why: str
    """The judge's reason."""
    ends: list[str]
    """How each process has ended."""
    causes: Mapping[str, int]
    ticks: int
    trace: list[str] = field(default_factory=list)


ROLES = ("driver", "command", "request", "task")
"""Who can be let go on: the main thread of a driver, a command, a driver's thread for a request, a task."""
CALLS = {
    "record": "put .*/checkpoint/",
    "claim": "put .*/generation/",
    "list": "in_doubt$",
    "pre-commit": "pre_commit",
    "commit": " commit ",
    "abort": " abort ",
    "begun": "put .*/begun/",
    "answer": "put .*/answer/",
    "withdrawal": "delete .*/request/",
    "savepoint": "put .*/_metadata",
    "unlock": "lets others go on",
}
"""The calls that events can wait for."""


def role_of(process: Process) -> str:
    if process.kind == "thread":
        return "request" if process.name.endswith("/checkpoint-requests") else ""
    return "command" if process.kind in COMMANDS else process.kind


class Restore(NamedTuple):
    """A restore of a savepoint, as an operator calls it, perhaps several times."""

    uri: str
    location: str
    later: bool
    """Whether the rows of later checkpoints were deleted."""
    end: int
    """The end of the savepoint's input."""
    fewer_sinks: bool
    """Whether all sinks but the first were taken out of the job."""


def play(scenario: Scenario, *, trace: bool = False) -> Result:
    return Simulation(scenario, trace=trace).play()


@cache
def config_of(settings: Settings, adopt: bool) -> CheckpointConfig:
    listens = settings.pause > 0
    return CheckpointConfig(
        retained_checkpoints=settings.retained,
        commit_timeout=settings.commit_timeout,
        sweep_interval=60.0,
        verify_interval=0,
        history_size=0,
        request_poll_interval=0.5 if listens else 0,
        savepoint_dir=f"sim:{SAVEPOINTS}",
        tolerable_failed_checkpoints=settings.tolerable,
        replay=settings.replay,  # type: ignore[arg-type]
        spool_dir=f"sim:{SPOOL}" if settings.replay == "spool" else None,
        adopt=adopt,
    )


class Simulation:
    def __init__(self, scenario: Scenario, *, trace: bool = False) -> None:
        self.scenario = scenario
        self.scheduler = Scheduler(scenario.seed, scenario.events, self._perform)
        self.world = World(scenario, self.scheduler)
        self.operator = Operator(self.world)
        self.faults: list[str] = []
        self.limits: list[str] = []
        self.ends: list[str] = []
        self.scheduler.when_ended = self._process_ended
        if trace:
            self.scheduler.trace = []
        self._number = 0
        self._restores = 0
        self._pending_restore: Restore | None = None
        """A restore that was begun and not finished."""
        self._restored: Restore | None = None
        """The newest restore that was finished."""
        self._procedures: list[tuple[int, int]] = []
        """The first and last tick of what an operator does as one: nobody restores a memory to its middle."""
        self._rows_deleted_at = 0
        self._survivors: list[Process] = []
        """Drivers whose storage was restored to an older state while they ran."""
        self._undo: tuple[list[tuple[Memory, dict[str, Any]]], str, int] | None = None
        """What the only restore of a memory has changed, so that it can be put back."""

    # ------------------------------------------------------------------ processes
    def _coordinator(self, *, adopt: bool = False, storage: str = STORAGE) -> CheckpointCoordinator:
        config = config_of(self.world.settings, adopt)
        return CheckpointCoordinator(JOB, self.world.sinks(), SimStorage(self.world, storage), config)

    def _drive(
        self, batches: int, step: int, boundary: int, starts: int = 1, location: str = "", storage: str = STORAGE
    ) -> None:
        """Be the process of a driver, which starts the query so many times, one after the other."""
        world = self.world
        settings = world.settings
        local = self.scheduler.running.local
        adopt = self.scenario.adopt and not world.decided
        with self._coordinator(adopt=adopt, storage=storage) as coordinator:
            queries: list[SimQuery] = []
            local.update({"coordinator": coordinator, "queries": queries, "location": location or world.location_name})
            local["restored before"] = world.causes["restored"]
            for _ in range(starts):
                query = SimQuery(
                    world,
                    local["location"],
                    batches=batches,
                    step=step,
                    partitions=settings.partitions,
                    pause=settings.pause,
                )
                if boundary:
                    query.between[boundary % 3 + 1] = self._save_between if boundary % 2 else self._sweep_between
                queries.append(query)
                local["query"] = query
                writer: Any = SimWriter(query)
                coordinator._lifecycle.notice_start_of(writer)  # as `write_stream` does it
                writer.start()
                query.run(coordinator)
        for function in local.get("at exit", ()):
            function()

    def _save_between(self, coordinator: CheckpointCoordinator) -> None:
        coordinator.trigger_savepoint(f"sim:{SAVEPOINTS}")

    def _sweep_between(self, coordinator: CheckpointCoordinator) -> None:
        coordinator._protocol.sweep()

    def _recover(self) -> None:
        with self._coordinator() as coordinator:
            coordinator.recover()

    def _restore(self, restore: Restore) -> None:
        world = self.world
        self._pending_restore = restore
        if restore.later:  # even when it is called again, because a target may have been restored since
            for target in world.targets.values():
                target.delete_rows(2 * restore.end)
        sinks = world.job_sinks
        if restore.fewer_sinks:
            world.job_sinks = world.sinks_now = sinks[:1]
        try:
            self.operator.restore(restore.uri, restore.location, later=restore.later, fewer_sinks=restore.fewer_sinks)
        except BaseException as error:
            world.job_sinks = world.sinks_now = sinks
            if isinstance(error, Exit) and not restore.later:
                self._pending_restore = None
            raise
        world.location_names.append((self.scheduler.ticks, restore.location))
        self._pending_restore = None
        self._restored = restore
        if restore.later:
            self._procedures.append((self._rows_deleted_at, self.scheduler.ticks + 1))

    def _stop_by_user(self, driver: Process, query: SimQuery) -> None:
        """Stop a query with a savepoint, as a thread of the user's program does it."""
        world = self.world
        active = [other for other in driver.local["queries"] if other.isActive]
        coordinator = driver.local["coordinator"]
        savepoint = coordinator.stop_with_savepoint(query, f"sim:{SAVEPOINTS}")
        self.faults += wrong_stop(world, self.scheduler.running, query, savepoint.uri)
        for other in active:
            world.requests.is_stopped(driver, other, savepoint.uri)

    def _spawn(self, kind: str, work: Callable[[], Any]) -> Process:
        self._number += 1
        process = self.scheduler.spawn(f"{kind}-{self._number}", kind, work)
        others = [
            other
            for other in self.scheduler.alive()
            if other is not process and other.kind not in ("task", "packet", "thread")
        ]
        if kind != "list" and any(not survivor.ended for survivor in self._survivors):
            self.world.causes["two copies"] += 1  # of a storage: one was restored under its driver
        for each in (process, *others) if others else ():
            each.local["met"] = True
        process.local["before"] = Before.of(self.world)
        self.scheduler.current = process
        return process

    def _process_ended(self, process: Process) -> None:
        error = process.error
        if process.kind not in ("task", "thread"):
            end = "killed" if process.dead else type(error).__name__ if error else "done"
            self.ends.append(f"{process.name}: {end}")
        if isinstance(error, Runaway):
            self.faults.append(f"no end: {error}")
        elif isinstance(error, KeyboardInterrupt) and process.local.get("interrupted"):
            pass
        elif error is not None and not isinstance(error, EXPECTED):
            where = "".join(traceback.format_exception(error)[-4:])
            self.faults.append(f"bare {type(error).__name__}: {error} in {process.name}\n{where}")
        elif isinstance(error, ALARMS) and process.kind == "driver":
            name = type(error).__name__
            if self._is_false_alarm(process):
                self.faults.append(f"false alarm: {name}: {str(error)[:300]} in {process.name}")
            elif not any(self.world.causes[cause] for cause in (*OUTSIDE, "savepoint restored")):
                self.faults.append(f"wrong cause: nothing came from outside: {name}: {str(error)[:300]}")
            if isinstance(error, BEFORE_THE_CLAIM) and (other := self._shut_out_by(process)):
                self.faults.append(f"shut out: {process.name} was refused, and {other.name} has to stop: {name}")
        elif not process.dead:
            self.faults += [f"{fault} ({process.name})" for fault in wrong_command(self.world, process)]

    def _shut_out_by(self, refused: Process) -> Process | None:
        """Return the driver that runs and has to stop because a refused one has claimed a generation."""
        # What is wrong with a later batch than its first one, a driver cannot know before its claim.
        if not refused.local.get("generation") or refused.local.get("has done a batch"):
            return None
        newest = max((number for when, number in self.world.claims if when <= refused.started_at), default=0)
        for other in self.scheduler.alive("driver"):
            is_suspended = max(other.recent, default=0) <= refused.started_at
            runs = other is not refused and "query" in other.local and other.local["query"].isActive
            if runs and is_suspended and other.local.get("generation") == newest:
                return other
        return None

    def _is_false_alarm(self, process: Process) -> bool:
        """Tell whether a driver that met nobody else has refused without need."""
        world = self.world
        undisturbed = (
            not process.local.get("met")
            and process.local["location"] == world.location_name
            and process.local["restored before"] == world.causes["restored"]
        )
        return undisturbed and judge(world).continues

    # ------------------------------------------------------------------ events
    def _perform(self, kind: str, argument: int) -> None:
        """Make an event happen. In a state where it cannot happen, it does nothing."""
        self.world.events += 1
        starts = kind in ("driver", "resolve", "resolve one", "save", "recover", "request", "cancel")
        if self._pending_restore and self._pending_restore.later and starts:
            return  # rows were deleted: no careful operator starts anything before the restore is done
        getattr(self, "_event_" + kind.replace(" ", "_"))(argument)

    def _event_switch(self, argument: int) -> None:
        ready = [process for process in self.scheduler.alive() if process.runnable]
        if ready:
            self.scheduler.current = ready[argument % len(ready)]

    def _event_driver(self, argument: int) -> None:
        starts = 2 if argument // 64 % 4 == 3 else 1
        self._spawn("driver", partial(self._drive, 1 + argument % 4, argument // 4 % 2, argument // 8 % 8, starts))

    def _event_until_decided(self, argument: int) -> None:
        """Hold the following events until so many more records are put."""
        self.world.decisions_to_come = 1 + argument % 4
        self.scheduler.holds_events = True

    def _event_old_driver(self, argument: int) -> None:
        """Start the query in the checkpointLocation of before the newest restore, by mistake."""
        if len(self.world.location_names) > 1:
            location = self.world.location_names[-2][1]
            self._spawn("driver", partial(self._drive, 1 + argument % 4, 0, 0, location=location))

    def _event_until_call(self, argument: int) -> None:
        """Hold the following events until a process comes to a call of one kind, and is about to make it."""
        self.scheduler.awaited_call = re.compile(tuple(CALLS.values())[argument % len(CALLS)])
        self.scheduler.holds_events = True

    def _event_resume(self, argument: int) -> None:
        """Let a driver, a command, the thread of a request, or a task go on. If it sleeps, all others sleep as long."""
        whose = ROLES[argument % len(ROLES)]
        found = [process for process in self.scheduler.alive() if role_of(process) == whose]
        found = [process for process in found if process.runnable or process.wakes_at < math.inf]
        if found:
            process = found[argument // len(ROLES) % len(found)]
            if not process.runnable:
                self.scheduler.now = process.wakes_at
            self.scheduler.current = process

    def _event_copy(self, argument: int) -> None:
        """Start a driver with a copy of storage, in the same checkpointLocation, by mistake."""
        world = self.world
        world.causes["copied"] += 1
        name = f"copy {world.causes['copied']}"
        world.storage(name).restore(dict(world.storage(STORAGE).values))
        if any(map(_is_deciding, self.scheduler.alive("driver"))):
            world.causes["two copies"] += 1  # both decide, or abort, at the same moment
        self._spawn("driver", partial(self._drive, 1 + argument % 4, argument // 4 % 2, 0, storage=name))

    def _event_crash(self, argument: int) -> None:
        victim = self.scheduler.current
        if victim is None or victim.ended:
            return
        victim = victim.owner
        if victim.kind == "task" and victim.parent and argument % 4:
            victim = victim.parent
        if victim.kind != "packet":
            self.scheduler.kill(victim, with_tasks=argument % 2 == 0)

    def _event_crash_all(self, argument: int) -> None:
        self._stop_all(with_tasks=argument % 2 == 0)

    def _event_stop(self, argument: int) -> None:
        for process in self.scheduler.alive("driver"):
            if query := process.local.get("query"):
                query.isActive = False

    def _event_fault(self, argument: int) -> None:
        """Let the next call of the running process fail."""
        process = self.scheduler.current
        if process and not process.ended:
            process.fault = ("lost", "landed", "late", "repeated")[argument % 4]

    def _event_down(self, argument: int) -> None:
        names = sorted(self.world.targets)
        if names:
            self.world.targets[names[argument % len(names)]].calls_that_fail = 1 + argument // 8 % 12

    def _event_speculate(self, argument: int) -> None:
        self.world.speculative += 1 + argument % 2

    def _event_roll_back(self, argument: int) -> None:
        prepared = [(target, name) for target in self.world.targets.values() for name in target.in_state("prepared")]
        if prepared:
            target, name = prepared[argument % len(prepared)]
            target.roll_back(name)

    def _event_time(self, argument: int) -> None:
        """Let time pass in which nobody acts. A process alone is suspended by any event that starts another one."""
        self.world.was_suspended = True
        self.scheduler.now += (20.0, 70.0, 200.0, 2000.0)[argument % 4]
        for target in self.world.targets.values():
            Kafka.time_out(target)

    def _event_expire(self, argument: int) -> None:
        """Let brokers forget the offsets of groups, or else the transactions that were aborted."""
        for target in self.world.targets.values():
            if argument % 2:
                self.world.causes["expired"] += 1
                target.forget([name for name in target.in_state("aborted") if "#" in name])
                continue
            if "group" in target.memory.values:
                target.memory.remove("group")
                self.world.causes["expired"] += 1

    def _event_setting(self, argument: int) -> None:
        settings = self.world.settings
        self.world.causes["partitions"] += argument % 5 == 4
        self.world.settings = (
            replace(settings, retained=2 + argument // 4 % 3),
            replace(settings, replay=("recompute", "spool")[argument // 4 % 2]),
            replace(settings, pause=(0.0, 1.0, 70.0)[argument // 4 % 3]),
            replace(settings, tolerable=argument // 4 % 2),
            replace(settings, partitions=1 + argument // 4 % 3),
        )[argument % 5]

    def _event_sinks(self, argument: int) -> None:
        """Take the last sink out of the job, or bring all of them back."""
        self.world.causes["sinks"] += 1
        every = self.world.job_sinks
        self.world.sinks_now = list(every[:-1] if argument % 2 and len(every) > 1 else every)

    def _event_topic(self, argument: int) -> None:
        """Delete the source's topic, and create it again."""
        if self.scenario.topics:
            self.world.topic += 1
            self.world.topic_created_at = self.scheduler.ticks
            self.world.causes["topic"] += 1

    def _event_source_down(self, argument: int) -> None:
        self.world.source_calls_that_fail = 1 + argument % 3

    def _event_input(self, argument: int) -> None:
        """From some unit on the source gives other rows when it is asked again."""
        self.world.changed_from = min(self.world.changed_from, argument % (self.world.units + 1))
        self.world.causes["input"] += 1

    def _event_damage(self, argument: int) -> None:
        """Alter the newest record, as a person or a broken disk does it."""
        world = self.world
        memory = world.storage(STORAGE)
        keys = [key for key in memory.values if "/checkpoint/" in key]
        if not keys:
            return
        key = keys[-1]
        sealed = json.loads(memory.values[key])
        if argument % 3 == 0:
            sealed["body"]["completed_at"] += 1
        elif argument % 3 == 1:
            sealed = json.loads(seal(sealed["body"] | {"job": "another"}))
        else:
            sealed["format"] += 1
        memory.put(key, json.dumps(sealed).encode())
        world.damaged[key] = self.scheduler.ticks, memory.values[key]
        world.causes["damaged"] += 1

    def _event_old_record(self, argument: int) -> None:
        """Let the newest record be one of an older version, which did not note when Spark had planned the batch."""
        memory = self.world.storage(STORAGE)
        if keys := [key for key in memory.values if "/checkpoint/" in key]:
            body = json.loads(memory.values[keys[-1]])["body"]
            del body["planned_at"]
            memory.put(keys[-1], seal(body))

    def _event_list(self, argument: int) -> None:
        self._spawn("list", self.operator.list_in_doubt)

    def _event_abort_orphans(self, argument: int) -> None:
        self._spawn("abort", partial(self.operator.abort_orphans, fence=bool(argument % 2)))

    def _event_abort_one(self, argument: int) -> None:
        names = [
            name
            for target in self.world.targets.values()
            for name, transaction in target.transactions()
            if "#" not in name and (transaction.state == "prepared" or argument // 16 % 4 == 3)
        ]
        if names:
            name = names[argument % len(names)]
            self._spawn("abort", partial(self.operator.abort_one, name, fence=bool(argument // 8 % 2)))

    def _event_resolve(self, argument: int) -> None:
        self._spawn("resolve", partial(self.operator.resolve, ["all"] if argument % 2 else None))

    def _event_resolve_one(self, argument: int) -> None:
        """Give up one participant of the newest checkpoint, whether it is lost or not."""
        history = self.world.history()
        participants = sorted(history[-1].committables) if history else []
        if participants:
            sink, subtask = participants[argument % len(participants)]
            self._spawn("resolve", partial(self.operator.resolve, [f"{sink}/{subtask}"]))

    def _event_recover(self, argument: int) -> None:
        self._spawn("recover", self._recover)

    def _event_save(self, argument: int) -> None:
        self._spawn("save", self.operator.save)

    def _event_request(self, argument: int) -> None:
        way, timeout = ("trigger", "stop")[argument % 2], ("60 s", "10 min")[argument // 2 % 2]
        self._spawn("request", partial(self.operator.request, way, timeout))

    def _event_cancel(self, argument: int) -> None:
        self._spawn("request", partial(self.operator.request, "cancel", ("60 s", "10 min")[argument // 2 % 2]))

    def _event_interrupt(self, argument: int) -> None:
        """Let a person end a command with Ctrl-C."""
        commands = self.scheduler.alive(*COMMANDS)
        if commands:
            command = commands[argument % len(commands)]
            command.fault, command.local["interrupted"] = INTERRUPT, True
            self.scheduler.current = command

    def _event_restore(self, argument: int) -> None:
        """Restore a savepoint, or call an unfinished restore again."""
        world = self.world
        if self._pending_restore:
            restore = self._pending_restore
        elif world.savepoints:
            uri, _, end = world.savepoints[argument // 4 % len(world.savepoints)]
            later = bool(argument % 2) and uri not in world.spoiled
            self._restores += 1
            location = f"r{self._restores}"
            fewer_sinks = argument // 64 % 8 == 7 and len(world.sinks_now) > 1
            restore = Restore(uri, location, later, end, fewer_sinks)
            if later:  # as the runbook says: stop the query, delete the later rows, restore
                self._stop_all(with_tasks=bool(argument // 2 % 2))
                world.causes["rows deleted"] += 1
                self._rows_deleted_at = self.scheduler.ticks
                world.savepoints = [each for each in world.savepoints if each[2] <= end]
        else:
            return
        world.causes["savepoint restored"] += 1
        self._spawn("restore", partial(self._restore, restore))

    def _event_list_savepoints(self, argument: int) -> None:
        self._spawn("list savepoints", self.operator.list_savepoints)

    def _event_dispose(self, argument: int) -> None:
        """Delete a savepoint, but none that a restore needs which was begun."""
        pending = self._pending_restore.uri if self._pending_restore else ""
        uris = [uri for uri, _, _ in self.world.savepoints if uri != pending]
        if uris:
            uri = uris[argument % len(uris)]
            self._spawn("dispose", partial(self.operator.dispose, uri))

    def _event_spoil(self, argument: int) -> None:
        """Alter, delete or hide an object of a savepoint, or a request."""
        world = self.world
        objects = [(SAVEPOINTS, key) for key in sorted(world.storage(SAVEPOINTS).values)]
        objects += [(STORAGE, key) for key in sorted(world.storage(STORAGE).values) if "/request/" in key]
        if not objects:
            return
        name, key = objects[argument // 4 % len(objects)]
        memory = world.storage(name)
        if name == SAVEPOINTS:
            world.spoiled.add(f"sim:{SAVEPOINTS}/{key.partition('/')[0]}")
        if argument % 4 == 0:
            value = memory.values[key]
            memory.put(key, value[: len(value) // 2] + b"?" + value[len(value) // 2 + 1 :])
        elif argument % 4 == 1:
            memory.remove(key)
        else:
            world.unreadable.add((name, key))

    # ------------------------------------------------------------------ networks, and Spark
    def _event_cut_off(self, argument: int) -> None:
        """Keep a process, or everybody, from reaching any storage for some time."""
        process = self.scheduler.current
        whom = process.owner if process and not process.ended and argument // 4 % 2 == 0 else None
        self.world.cut_off[whom] = self.scheduler.now + (5.0, 20.0, 80.0, 200.0)[argument % 4]

    def _event_slow(self, argument: int) -> None:
        """Let the next calls that write into a target take longer."""
        names = sorted(self.world.targets)
        if names:
            target = self.world.targets[names[argument % len(names)]]
            target.slow_calls, target.slowness = 1 + argument // 8 % 12, (0.05, 0.3, 0.7, 2.0)[argument // 2 % 4]

    def _event_fail(self, argument: int) -> None:
        """Let the queries fail outside of their batches."""
        for process in self.scheduler.alive("driver"):
            if query := process.local.get("query"):
                query.fail()

    def _event_stop_with_savepoint(self, argument: int) -> None:
        """Let the user's program stop one of the queries that it has started, perhaps one that has ended."""
        drivers = [process for process in self.scheduler.alive("driver") if process.local.get("queries")]
        if drivers:
            driver = drivers[argument % len(drivers)]
            queries = driver.local["queries"]
            query = queries[argument // 4 % len(queries)]
            work = partial(self._stop_by_user, driver, query)
            self.scheduler.current = self.scheduler.spawn(f"{driver.name}/user", "thread", work, driver)

    def _event_restore_again(self, argument: int) -> None:
        """Call a finished restore again, with other options."""
        if self._restored and not self._pending_restore:
            self._stop_all(with_tasks=True)
            self._spawn("restore", partial(self._restore_otherwise, self._restored))

    def _restore_otherwise(self, before: Restore) -> None:
        later = not before.later
        self.operator.restore(before.uri, before.location, later=later, fewer_sinks=before.fewer_sinks)
        base = self.world.history()[0].record
        if (ANY_LINEAGE in (base.predecessors or {})) != later:
            self.faults.append("options: a restore was done again with other options, which it has ignored")

    def _stop_all(self, *, with_tasks: bool) -> None:
        for process in self.scheduler.alive():
            if process.kind not in ("task", "packet", "thread") and not process.ended:
                self.scheduler.kill(process, with_tasks=with_tasks)
        if with_tasks:
            for process in self.scheduler.alive("task", "packet"):
                self.scheduler.kill(process, with_tasks=True)

    def _event_set_back(self, argument: int) -> None:
        """Restore some memories to one moment, or each to its own, usually while nothing runs."""
        world = self.world
        chosen, argument = 1 + argument % 15, argument // 15
        moment, argument = self.scheduler.ticks * (argument % 64) // 64, argument // 64
        for begin, end in self._procedures:
            moment = end if begin <= moment < end else moment
        while_running = argument % 4 == 0
        own_moment = moment // 2 if argument // 4 % 4 == 0 else moment
        runs = bool(self.scheduler.alive("driver"))
        if not while_running:
            self._stop_all(with_tasks=True)
        undo = [(memory, dict(memory.values)) for memory in world.memories().values()]
        was_right = not while_running and not runs and judge(world).continues
        changed = False
        if chosen & 1:
            storage = world.storage(STORAGE)
            changed |= storage.restore(storage.at(moment))
            world.storage_restored_at = self.scheduler.ticks
            world.storage(SPOOL).restore(world.storage(SPOOL).at(moment))
            if while_running and runs:
                self._survivors += self.scheduler.alive("driver")
        if chosen & 2:
            name = next(name for when, name in reversed(world.location_names) if when <= moment)
            if name != world.location_name:
                world.location_names.append((self.scheduler.ticks, name))
            location = world.location(name)
            changed |= location.restore(location.at(own_moment))
        for bit, name in zip((4, 8), sorted(world.targets), strict=False):
            if chosen & bit:
                changed |= self._set_target_back(name, own_moment)
        if changed:
            world.causes["restored"] += 1
        back = [(memory, values) for memory, values in undo if memory.values != values]
        once = was_right and world.causes["restored"] == 1
        self._undo = (back, world.location_name, len(world.named)) if once else None

    def _set_target_back(self, name: str, moment: int) -> bool:
        world = self.world
        target = world.targets[name]
        changed = target.memory.restore(target.memory.at(moment))
        if changed and not target.visible():
            world.causes["target emptied"] += 1
        states = {
            (transaction.lineage, transaction.checkpoint, transaction.state)
            for transaction_name, transaction in target.transactions()
            if (name, transaction_name) in world.named
        }
        if any((lineage, n, "committed") in states for lineage, n, state in states if state == "prepared"):
            world.causes["partial"] += 1
        world.causes["target"] += 1
        return changed

    # ------------------------------------------------------------------ to the end
    def play(self) -> Result:
        refusal: BaseException | None = None
        why = ""
        with ExitStack() as stack:
            stack.enter_context(simulated_machine(self.scheduler))
            stack.enter_context(led_into(self.world, self._coordinator))
            try:
                refusal, why = self._play()
            except Runaway as error:
                self.faults.append(f"no end: {error}")
            finally:
                self.scheduler.limit = self.scheduler.ticks + self.scheduler.LIMIT
                self._stop_all(with_tasks=True)
        return Result(
            faults=self._excused([*self.world.violations, *self.faults, *wrong_requests(self.world)]),
            limits=self.limits,
            refusal=refusal,
            why=why,
            ends=self.ends,
            causes=+self.world.causes,
            ticks=self.scheduler.ticks,
            trace=self.scheduler.trace or [],
        )

    def _play(self) -> tuple[BaseException | None, str]:
        world = self.world
        if self.scenario.adopt:
            location = world.location("a")
            location.values.update(ADOPTED)
            location.keep()
        self._spawn("driver", partial(self._drive, 2, 0, self.scenario.boundary))
        self.scheduler.run()
        for target in world.targets.values():
            target.calls_that_fail = target.slow_calls = 0
        world.cut_off.clear()
        world.settings = replace(world.settings, pause=0.0)
        world.source_calls_that_fail = 0
        world.sinks_now = list(world.job_sinks)
        self.scheduler.limit = self.scheduler.ticks + self.scheduler.LIMIT
        for _ in range(3):
            if self._pending_restore:  # after a crash, call it again
                self._spawn("restore", partial(self._restore, self._pending_restore))
                self.scheduler.run()
        world.units += 1  # more input comes, so Spark has a batch to hand over
        verdict = judge(world)
        kept = self._decided_and_prepared()
        refusal = self._continue_to_the_end()
        if refusal is None:
            self.faults += wrong_at_the_end(world)
        else:
            self._judge_refusal(refusal, verdict.continues, kept)
        return refusal, verdict.why

    def _continue_to_the_end(self) -> BaseException | None:
        """Start the query until it has had a batch, and recover. Returns what it refuses with, if it does."""
        for _ in range(4):
            before = self.world.handed_over
            process = self._spawn("driver", partial(self._drive, 100, 0, 0))
            self.scheduler.run()
            if process.error is None and self.world.handed_over > before:
                break
            if process.error is None:  # Spark had nothing to hand over, so nobody has looked at the memories
                self.world.units += 1
        if process.error is None:
            process = self._spawn("recover", self._recover)
            self.scheduler.run()
        return process.error

    def _decided_and_prepared(self) -> set[tuple[str, str]]:
        """Return what is decided in the current lineage, and prepared, before a driver continues."""
        world = self.world
        store = world.job_store()
        lineage = store.follow_newest_claim().lineage
        return world.named & {
            (target.name, name)
            for target in world.targets.values()
            for name, transaction in target.transactions()
            if transaction.state == "prepared" and transaction.lineage == lineage
        }

    def _judge_refusal(self, refusal: BaseException, continues: bool, kept: set[tuple[str, str]]) -> None:
        world = self.world
        said = f"{type(refusal).__name__}: {str(refusal)[:400]}"
        if not isinstance(refusal, EXPECTED):
            self.faults.append(f"bare at the end: {said}")
        elif self._is_for_letters(refusal):
            return
        elif not any(world.causes[cause] for cause in OUTSIDE):
            self.faults.append(f"refused, though nothing came from outside: {said}")
        elif continues:
            self.faults.append(f"refused without need: {said}")
        kinds = {kind for _, kind, _ in self.scenario.sinks}
        once = self._undo and world.causes["restored"] == 1 and self._undo[2] == len(world.named)
        if once and not kinds & {"kafka", "forgetful"}:
            for target, name in sorted(kept):
                transaction = world.targets[target].transaction(name)
                if transaction is None or transaction.state == "aborted":
                    self.faults.append(f"refused, but had aborted decided {target} {short(name)}: {said}")
        if self._undo and world.causes["restored"] == 1 and not self.faults:
            self._put_back()

    def _is_for_letters(self, refusal: BaseException) -> bool:
        """Tell whether the job stops since its next batch has more dead letters than it may have."""
        return isinstance(refusal, TooManyDeadLetters) and self.scenario.most_letters == 0

    def _put_back(self) -> None:
        """Put back what was restored to an older state. The starts that refused meanwhile must have done no harm."""
        assert self._undo
        memories, location, named = self._undo
        if location != self.world.location_name or named != len(self.world.named):
            return  # somebody has continued from there
        for memory, values in memories:
            memory.restore(values)
        if not judge(self.world).continues:
            return
        self.limits.append("put back")
        process = self._spawn("driver", partial(self._drive, 100, 0, 0))
        self.scheduler.run()
        if process.error is not None and self._is_for_letters(process.error):
            return
        if process.error is not None:
            name = type(process.error).__name__
            self.faults.append(f"refused after all was put back: {name}: {str(process.error)[:300]}")
            return
        self._spawn("recover", self._recover)
        self.scheduler.run()
        self.faults += [f"after all was put back, {fault}" for fault in wrong_at_the_end(self.world)]

    def _excused(self, faults: list[str]) -> list[str]:
        left = []
        for fault in faults:
            limit = not_promised(
                self.world, fault, restore_pending=bool(self._pending_restore and self._pending_restore.later)
            )
            if limit:
                self.limits.append(limit)
            else:
                left.append(fault)
        return left


__all__ = ["Counter", "Result", "Simulation", "first_unit", "play"]
