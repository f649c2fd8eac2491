"""Schedules of one kind, with each moment once, in place of moments that are drawn.

A fault that needs one moment among fifty is found here in a second, where a thousand random schedules miss it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.simulation.scenario import Scenario, Settings
from tests.simulation.scheduler import Event
from tests.simulation.simulation import CALLS, ROLES

TWO = (("one", "prepared", 1), ("two", "prepared", 2))
END = 300
"""A gap that no process fills: the event happens when all have ended."""
KINDS = ("prepared", "whole", "lake", "kafka", "letters")


def one(kind: str) -> tuple[tuple[str, str, int], ...]:
    return (("one", kind, 1),)


def back(chosen: int, moment: int, *, while_running: bool = False, own_moment: bool = False) -> int:
    """Return the argument of "set back": 1 storage, 2 location, 4 and 8 targets; the moment in 64ths of all ticks."""
    return (chosen - 1) + 15 * (moment + 64 * ((0 if while_running else 1) + 4 * (0 if own_moment else 1)))


def of(events: list[Event], **settings: Any) -> Scenario:
    own = {name: settings.pop(name) for name in list(settings) if name in Settings.__dataclass_fields__}
    return Scenario(events=tuple(events), settings=Settings(**own), **settings)


def crashes() -> Iterator[Scenario]:
    """A driver dies at each moment, with its tasks or without, and the next one starts."""
    for gap in range(60):
        for kind in KINDS:
            yield of([(gap, "crash", gap % 2), (0, "driver", 1)], sinks=one(kind), partitions=1 + gap % 2)


def crashes_of_two() -> Iterator[Scenario]:
    for gap in range(90):
        yield of([(gap, "crash", gap % 2), (0, "roll back", gap), (0, "driver", 1)], sinks=TWO, partitions=2)


def second_driver() -> Iterator[Scenario]:
    """A second driver starts at each moment. The first one goes on when the second has ended, or in its middle."""
    for gap in range(56):
        for kind in ("prepared", "whole", "kafka"):
            yield of([(gap, "driver", 1), (END, "switch", 0)], sinks=one(kind))
            yield of([(gap, "driver", 1), (8 + gap % 13, "switch", 0), (5 + gap % 7, "switch", 1)], sinks=one(kind))


def plans_in_one_moment() -> Iterator[Scenario]:
    """Two drivers plan a batch at the same moment, and the later one overwrites the plan of the other."""
    for gap in range(50):
        for calls in (1, 2, 3, 4, 9):
            for other in (0, 1):
                events = [
                    (gap, "driver", 1 + 4 * other),
                    (calls, "switch", 0),
                    (3 * calls, "switch", 1),
                    (END, "driver", 1),
                ]
                yield of(events, log_is_overwritten=True, units=5)


def stale_start() -> Iterator[Scenario]:
    """A driver plans its batch, and is suspended before its first calls, until the other one has ended."""
    for gap in range(60):
        for calls in (1, 2, 3, 5, 8, 12):
            events = [(END, "driver", 3), (gap, "driver", 1), (calls, "switch", 0)]
            yield of(events, sinks=one(KINDS[gap % len(KINDS)]), units=9)


def driver_of_before_a_restore() -> Iterator[Scenario]:
    """The query is started in the old checkpointLocation after a restore, by mistake."""
    for gap in range(50):
        saved = [(END, "save", 0), (END, "restore", 0)]
        yield of([*saved, (END, "driver", 1), (END, "old driver", 1), (gap, "switch", 0)])
        yield of([*saved, (gap, "old driver", 1), (20, "switch", 0)])
        yield of([*saved, (END, "driver", 1), (gap, "old driver", 1), (END, "switch", 0)])


def old_history() -> Iterator[Scenario]:
    """After a restore the query takes as many batches as before it, of other sizes, and the old location is used."""
    for batches in range(3):
        for old_step in (0, 1):
            for gap in (*range(0, 40, 4), END):
                later = [(END, "driver", batches + 4 * old_step), (END, "restore", 1)]
                events = [(END, "save", 0), *later, (END, "driver", batches + 4 * (1 - old_step))]
                yield of([*events, (gap, "old driver", 0), (END, "switch", 0)], units=12)


def copies() -> Iterator[Scenario]:
    """A driver runs with a copy of storage, in the middle of the first one, which goes on after it or after its end."""
    for gap in range(56):
        for kind in ("prepared", "whole", "lake"):
            yield of([(gap, "copy", 0)], sinks=one(kind))
            yield of([(gap, "copy", 1), (0, "until decided", 1), (gap % 3, "crash", 0)], sinks=one(kind), units=6)


def restored_again() -> Iterator[Scenario]:
    """A restore is done again with other options, before the query continues or after it."""
    for later in (0, 1):
        saved = [(END, "save", 0), (END, "driver", later), (END, "restore", later)]
        yield of([*saved, (END, "restore again", 0)])
        yield of([*saved, (END, "driver", 0), (END, "restore again", 0)])
        yield of([(END, "save", 0), (END, "restore", later), (END, "restore again", 0)])


def called_again() -> Iterator[Scenario]:
    """The user's function calls the coordinator again for a batch that failed."""
    for gap in range(60):
        for fault in (0, 1):
            yield of([(gap, "fault", fault)], calls_again=True, sinks=TWO, commit_timeout=0.5)
            yield of([(gap, "down", 8 * (gap % 9)), (9, "fault", fault)], calls_again=True, commit_timeout=0.5)


def between_two_calls() -> Iterator[Scenario]:
    """Two drivers, which change at each pair of moments around claim, put and commit."""
    for gap in range(12, 40):
        for other in range(0, 36, 2):
            yield of([(gap, "driver", 1), (other, "switch", 0), (gap % 5, "switch", 1), (3, "switch", 0)])


def zombie_and_restore() -> Iterator[Scenario]:
    """A savepoint is restored in the middle of a driver, and a new driver starts; then the old one goes on."""
    for gap in range(48):
        for kind in ("prepared", "whole"):
            events = [(END, "save", 0), (END, "driver", 1), (gap, "restore", 0), (100, "driver", 0), (60, "switch", 0)]
            yield of(events, sinks=one(kind))


def two_restores() -> Iterator[Scenario]:
    for gap in range(0, 40, 2):
        for other in range(0, 21, 3):
            events = [
                (END, "save", 0),
                (END, "driver", 1),
                (END, "save", 0),
                (END, "restore", 4 + gap % 2),
                (gap, "restore", 0),
                (other, "switch", 1),
                (END, "driver", 0),
            ]
            yield of(events)


def restore_killed() -> Iterator[Scenario]:
    """A restore dies at each moment. It is called again, or something else is."""
    for gap in range(40):
        for later in (0, 1):
            save = [(END, "save", 0), (END, "driver", later)]
            yield of([*save, (END, "restore", later), (gap, "crash", 0), (0, "driver", 0), (20, "restore", later)])
            yield of([*save, (END, "restore", later), (gap, "driver", 0), (25, "switch", 0)])


def restore_and_driver() -> Iterator[Scenario]:
    """A driver of the earlier lineage starts in the middle of a restore."""
    for gap in range(4, 44):
        for switch in (6, 14, 22):
            yield of(
                [(END, "save", 0), (END, "restore", 0), (gap, "driver", 1), (switch, "switch", 0), (9, "switch", 0)]
            )


def storage_while_running() -> Iterator[Scenario]:
    """Storage is restored to an older state, or emptied, under a driver, and another one starts."""
    for gap in range(4, 60, 2):
        for moment in range(0, 64, 6):
            argument = back(1, moment, while_running=True)
            yield of([(gap, "set back", argument), (0, "driver", 1), (25, "switch", 0)])
        yield of([(gap, "set back", back(1, 0, while_running=True)), (0, "driver", 1), (gap // 2, "switch", 0)], seed=2)


def namesakes() -> Iterator[Scenario]:
    """Storage is restored to the end of an earlier driver, so the next one gets the number of the one that runs."""
    for gap in range(8, 40, 2):
        for moment in range(36, 64, 2):
            first = [(END, "driver", 1), (gap, "set back", back(1, moment, while_running=True))]
            yield of([*first, (0, "driver", 1), (8 + moment % 17, "switch", 0), (9, "switch", 1)])
            both = [(END, "driver", 1), (gap, "set back", back(5, moment, while_running=True))]
            yield of([*both, (0, "driver", 0), (0, "until decided", 0), (0, "crash", 0)])


def restore_and_storage() -> Iterator[Scenario]:
    """Storage is restored to an older state in the middle of a restore, and a driver gets the number of its claim."""
    for gap in range(4, 44):
        for moment in (30, 50, 60):
            back_to = (gap, "set back", back(1, moment, while_running=True))
            yield of([(END, "save", 0), (END, "restore", 0), back_to, (0, "driver", 0), (END, "switch", 0)])


def records_that_vanish() -> Iterator[Scenario]:
    """Storage loses its newest records while their driver asks a target to commit, and sweeps meanwhile."""
    for number in (0, 1):
        for calls in range(1, 12, 2):
            for moment in range(24, 64, 4):
                decided = [(0, "until decided", number), (0, "down", 8 * calls)]
                yield of([*decided, (calls % 4 + 3, "set back", back(1, moment, while_running=True))], partitions=2)


def storage_emptied_alone() -> Iterator[Scenario]:
    """Storage is restored to an older state under a driver that runs alone."""
    for gap in range(4, 64):
        for moment in (0, 20, 40, 55):
            yield of([(gap, "set back", back(1, moment, while_running=True))])


def target_while_running() -> Iterator[Scenario]:
    for gap in range(8, 60, 2):
        for moment in range(0, 64, 6):
            for chosen in (4, 8):
                yield of([(gap, "set back", back(chosen, moment, while_running=True)), (100, "driver", 1)], sinks=TWO)


def target_back_in_phase_two() -> Iterator[Scenario]:
    """A target is restored to a state of just before, between any two commits of its participants, once or twice."""
    for number in (0, 1):
        for after in range(1, 16):
            for moment in (0, *range(36, 64, 3)):
                argument = back(4, moment, while_running=True)
                events = [(0, "until decided", number), (after, "set back", argument)]
                yield of(events, sinks=TWO, partitions=2)
                yield of([*events, (after + moment % 9, "set back", argument)], sinks=TWO, partitions=2)


def lost(number: int, *, after: int = 0, which: int = 0) -> list[Event]:
    """A decided transaction is rolled back: its driver dies so many calls after it has put the record N."""
    return [(0, "until decided", number), (after, "crash", 0), (0, "roll back", which)]


def commits_that_fail() -> Iterator[Scenario]:
    """The target does not answer for some calls after the decision, so the driver asks again, and sweeps meanwhile."""
    for gap in range(16):
        for switch in (3, 5, 8, 12):
            down = [(0, "until decided", gap % 2), (0, "down", 8 * 11), (gap, "driver", 1)]
            yield of([*down, (switch, "switch", 0)], sinks=one(KINDS[gap % len(KINDS)]))
    for number in (0, 1):
        for after in range(8):
            for calls in range(5):
                for kind in KINDS:
                    events = [(0, "until decided", number), (after, "down", 8 * calls)]
                    yield of(events, sinks=one(kind), partitions=1 + calls % 2)
                    yield of([*events, (4 + calls, "driver", 1)], sinks=one(kind), partitions=2, commit_timeout=0.5)


def long_runs() -> Iterator[Scenario]:
    """A query runs for many checkpoints, with and without empty batches, so that what is not purged piles up."""
    for kind in KINDS:
        for retained in (2, 3):
            yield of([(END, "driver", 3)], sinks=one(kind), units=16, retained=retained, empty=retained == 3)


def losses_given_up() -> Iterator[Scenario]:
    """An operator gives rows up while a driver replays them."""
    for gap in range(50):
        lost_rows = lost(1, after=gap % 3)
        yield of([*lost_rows, (0, "driver", 1), (gap, "resolve", 1)], sinks=TWO)
        yield of([*lost_rows, (0, "resolve", 1), (gap, "driver", 1), (9, "switch", 0)], sinks=one("letters"))


def rolled_back_when_decided() -> Iterator[Scenario]:
    """A decided transaction is rolled back after the crash of its driver, once or twice."""
    for gap in range(14, 60):
        for kind in KINDS:
            again = [(gap // 2, "crash", 1), (0, "roll back", 1), (0, "driver", 1)]
            yield of(
                [(gap, "crash", 0), (0, "roll back", gap), (0, "driver", 1), *again], sinks=one(kind), partitions=2
            )


def moved_on_with_losses() -> Iterator[Scenario]:
    """A decided transaction is rolled back, and Spark's log has its batch as done, since it was of another moment."""
    for gap in range(14, 60, 2):
        for chosen in (4, 12, 8):
            for moment in (30, 40, 50, 60):
                yield of([(gap, "crash", 0), (0, "driver", 0), (END, "set back", back(chosen, moment))], sinks=TWO)


def replay_then_storage() -> Iterator[Scenario]:
    """A replay, or a loss that is given up; then storage is restored to a state before it."""
    for gap in range(0, 45, 2):
        for kind in ("prepared", "whole", "kafka", "letters"):
            for then in ("driver", "resolve"):
                for moment in (20, 30, 40, 50, 60):
                    if (gap + moment) % 4 == 0:
                        events = [
                            (14 + gap % 16, "crash", 0),
                            (0, "roll back", 0),
                            (0, then, 1),
                            (gap, "crash", 0),
                            (0, "set back", back(1, moment)),
                            (0, "driver", 1),
                        ]
                        yield of(events, sinks=one(kind))


def second_driver_while_replaying() -> Iterator[Scenario]:
    """A second driver starts at each moment of a replay, and the first one goes on after it."""
    for gap in range(56):
        for kind in ("prepared", "whole", "letters"):
            first = [*lost(1), (0, "driver", 1)]
            yield of([*first, (gap, "driver", 1), (END, "switch", 0)], sinks=one(kind))
            yield of([*first, (gap, "driver", 1), (5 + gap % 19, "switch", 0), (9, "switch", 1)], sinks=one(kind))


def overtaken_in_a_replay() -> Iterator[Scenario]:
    """Another driver claims between the decision of a checkpoint, which is lost at once, and its replay."""
    for gap in range(6):
        for switch in range(10, 30, 2):
            yield of([(0, "until decided", 1), (0, "roll back", 0), (gap, "driver", 1), (switch, "switch", 0)])


def storage_of_before_a_replay() -> Iterator[Scenario]:
    """A driver dies after a replay, and storage is restored to each moment of it."""
    for after in range(7):
        for moment in range(34, 64):
            for kind in ("prepared", "whole", "kafka", "letters"):
                replayed = [*lost(1), (0, "driver", 1), (0, "until decided", 0), (after, "crash", 0)]
                yield of([*replayed, (0, "set back", back(1, moment))], sinks=one(kind), partitions=1 + moment % 2)


def target_of_before_a_loss() -> Iterator[Scenario]:
    """A driver dies after a replay, and the target is restored to before the loss: it has what was replaced again."""
    for after in (0, 2, 4):
        for moment in range(30, 64, 2):
            replayed = [*lost(1), (0, "driver", 1), (0, "until decided", 0), (after, "crash", 0)]
            yield of([*replayed, (0, "set back", back(4, moment)), (0, "driver", 1)], locks=True)


def lost_answers() -> Iterator[Scenario]:
    """Each call fails once: not done, done without an answer, or done later."""
    for gap in range(70):
        for fault in (0, 1, 2):
            yield of([(gap, "fault", fault), (2, "driver", 1), (30, "switch", 0)], sinks=TWO)
            if gap % 2:
                roll_back = [(0, "roll back", 0), (0, "driver", 1), (gap // 2, "fault", 2), (9, "switch", 1)]
                yield of([(gap, "fault", fault), *roll_back], sinks=one("whole"))
                busy = {"tolerable": 1, "commit_timeout": 0.5}
                down = [(1, "fault", fault), (5, "down", 8), (20, "driver", 1)]
                yield of([(gap, "fault", fault), *down], sinks=one("kafka"), **busy)


def late_packets() -> Iterator[Scenario]:
    """A put fails, lands after its driver has ended, and before or after the next driver."""
    for gap in range(70):
        for switch in (0, 4, 12, 24):
            yield of([(gap, "fault", 2), (switch, "switch", 1), (0, "driver", 1), (switch, "switch", 0)])


def late_tasks() -> Iterator[Scenario]:
    """A driver dies, its tasks live on and pre-commit later."""
    for gap in range(8, 50):
        for switch in (6, 14, 26):
            for kind in ("prepared", "kafka"):
                events = [(gap, "crash", 1), (0, "driver", 1), (switch, "switch", 0), (7, "switch", 1)]
                yield of(events, sinks=one(kind), partitions=2)


def speculative_tasks() -> Iterator[Scenario]:
    for gap in range(6, 40):
        for kind in ("prepared", "whole", "kafka"):
            yield of([(0, "speculate", 1), (gap, "switch", 1), (3, "switch", 2), (5, "crash", 1)], sinks=one(kind))


def set_back_twice() -> Iterator[Scenario]:
    for moment in range(0, 64, 4):
        for chosen in (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 13, 14):
            what = ("abort orphans", "resolve", "recover", "driver")[moment // 4 % 4]
            again = back(1 + (chosen + moment) % 15, 63 - moment)
            events = [
                (26, "crash", 0),
                (0, "driver", 1),
                (END, "set back", back(chosen, moment)),
                (0, what, 1),
                (100, "set back", again),
                (0, what, 1),
            ]
            yield of(events, sinks=TWO, units=5)


def each_memory() -> Iterator[Scenario]:
    """Each set of memories, restored to each moment, after drivers that ended well; retention has deleted records."""
    for moment in range(0, 64, 2):
        for chosen in range(1, 16):
            events = [(END, "driver", 2), (END, "driver", 1), (END, "set back", back(chosen, moment))]
            kind = KINDS[moment // 2 % len(KINDS)]
            yield of(events, sinks=(("one", kind, 1), ("two", "prepared", 2)), units=5, empty=moment % 3 == 0)


def quiet_sink() -> Iterator[Scenario]:
    """A sink gets rows only now and then, so its newest proof is old."""
    for moment in range(0, 64, 4):
        for chosen in (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 13, 14):
            kind = ("prepared", "kafka")[moment % 8 // 4]
            events = [(END, "driver", 2), (END, "driver", 1), (END, "set back", back(chosen, moment))]
            yield of(events, sinks=(("one", "prepared", 1), ("two", kind, 3)), units=5, empty=True)


def savepoint_and_memories() -> Iterator[Scenario]:
    for moment in range(0, 64, 2):
        for chosen in (4, 5, 6, 7, 12):
            saved = [(END, "save", 0), (END, "driver", 1), (END, "save", 0)]
            then = [(END, "restore", 4), (END, "driver", 0), (END, "set back", back(chosen, moment))]
            yield of([*saved, *then], sinks=TWO)
            first = [(END, "save", 0), (END, "driver", 0), (END, "set back", back(chosen, moment))]
            yield of([*first, (END, "restore", 0), (END, "driver", 0)], sinks=TWO)


def later_rows_deleted() -> Iterator[Scenario]:
    for moment in range(0, 64, 3):
        for chosen in (1, 3, 4, 5, 7):
            restored = [(END, "save", 0), (END, "driver", 1), (END, "restore", 1), (END, "driver", 0)]
            yield of([*restored, (END, "set back", back(chosen, moment))])


def fence() -> Iterator[Scenario]:
    """A second driver, and an operator who fences, in the middle of each other."""
    for gap in range(12, 60, 2):
        switches = [(12, "switch", 1), (9, "switch", 0)]
        yield of([(gap, "driver", 1), (gap // 2, "abort orphans", 1), *switches, (9, "switch", 1)], sinks=TWO)
        yield of([(gap, "driver", 1), (gap // 3, "abort one", 8), *switches], locks=True)
        yield of([(gap, "abort orphans", 0), *switches], sinks=one("whole"))
        yield of([(gap, "abort orphans", 1), (gap % 11, "switch", 0), (9, "switch", 1)], partitions=2)


def commands_while_running() -> Iterator[Scenario]:
    """Each command of an operator in the middle of a driver, who goes on after it, or in its middle."""
    for gap in range(0, 60, 2):
        for command in ("list", "abort orphans", "abort one", "resolve", "recover", "save"):
            yield of([(gap, command, 8), (gap % 17, "switch", 0), (7, "switch", 1)], sinks=TWO)


def commands_after_a_crash() -> Iterator[Scenario]:
    for gap in range(6, 60):
        for command in ("abort orphans", "resolve", "recover", "save"):
            crash = [(gap, "crash", gap % 2), (0, "roll back", gap), (0, command, gap % 2)]
            yield of([*crash, (END if gap % 4 else 5, "driver", 1)], partitions=2)


def memories_of_a_resolve() -> Iterator[Scenario]:
    """A memory is restored in the middle of a command."""
    for gap in range(40):
        for chosen in (1, 4):
            lost = [(30, "crash", 0), (0, "roll back", gap), (0, "resolve", gap % 2)]
            yield of([*lost, (gap, "set back", back(chosen, 25, while_running=True))])


def requests() -> Iterator[Scenario]:
    """An operator asks a running driver for a savepoint, and perhaps to stop or to cancel."""
    for gap in range(0, 70, 2):
        for way in ("request", "cancel"):
            for argument in (0, 1):
                yield of([(gap, way, argument)], pause=3.0, units=5)
                yield of([(gap, way, argument), (gap % 19, "crash", argument), (0, "driver", 1)], pause=3.0, units=5)
                yield of([(gap, way, argument), (gap % 23, "driver", 1), (31, "switch", 0)], pause=3.0, units=5)


def request_and_restore() -> Iterator[Scenario]:
    for gap in range(0, 60, 3):
        for argument in (0, 1):
            events = [(gap, "request", argument), (END, "driver", 1), (gap, "restore", 0), (END, "driver", 0)]
            yield of(events, pause=3.0, units=5)


def sweeps_while_quiet() -> Iterator[Scenario]:
    """The sweeps between two batches, and the heartbeat, while another driver or an operator is at work."""
    for gap in range(10, 90, 2):
        yield of([(gap, "driver", 1), (gap // 2, "switch", 0), (20, "switch", 1)], pause=70.0)
        yield of([(gap, "crash", 1), (0, "driver", 1), (5, "switch", 0)], pause=70.0, partitions=2)


def spool() -> Iterator[Scenario]:
    for gap in range(6, 60):
        for kind in ("letters", "prepared", "whole"):
            again = [(gap // 2, "crash", 0), (0, "roll back", 1)]
            events = [(gap, "crash", 1), (0, "roll back", 0), (0, "driver", 1), *again]
            yield of(events, sinks=one(kind), replay="spool", partitions=1 + gap % 2)


def adoption() -> Iterator[Scenario]:
    for gap in range(0, 60, 2):
        yield of([(gap, "crash", 0), (0, "driver", 0), (gap // 2, "driver", 0), (5, "switch", 0)], adopt=True)
        yield of([(gap, "crash", 0), (0, "set back", back(1 + gap % 7, gap)), (0, "driver", 0)], adopt=True)


def kafka_timeouts() -> Iterator[Scenario]:
    for gap in range(12, 60):
        yield of([(gap, "crash", 0), (0, "time", 3), (0, "driver", 1), (gap // 3, "time", 3)], sinks=one("kafka"))
        yield of([(gap, "crash", 0), (0, "time", 3), (0, "expire", 1), (0, "driver", 1)], sinks=one("kafka"))
        yield of([(gap, "time", 3), (0, "driver", 1), (gap // 3, "switch", 0)], sinks=one("kafka"))


def partitions_change() -> Iterator[Scenario]:
    """The number of partitions changes while decided transactions are lost (R13)."""
    for gap in range(14, 60):
        for kind in ("prepared", "whole", "letters"):
            lost = [(gap, "crash", 0), (0, "roll back", gap), (0, "setting", 4 + 5 * 4 * (gap % 3)), (0, "driver", 1)]
            yield of(lost, sinks=one(kind), partitions=2)


def sinks_change() -> Iterator[Scenario]:
    """A sink is taken out of the job, or added, in the middle of what it has in doubt."""
    for gap in range(0, 90, 2):
        yield of([(gap, "crash", 0), (0, "sinks", 1), (0, "driver", 1)], sinks=TWO)
        yield of(
            [(0, "sinks", 1), (0, "crash all", 0), (0, "driver", 1), (gap, "sinks", 0), (END, "driver", 1)], sinks=TWO
        )
        rare = (("one", "prepared", 1), ("two", "prepared", 3))
        yield of([(gap, "crash", 0), (END, "driver", 2), (0, "sinks", 1), (0, "driver", 1)], sinks=rare, units=5)


def other_rows() -> Iterator[Scenario]:
    """The source gives other rows when decided transactions are lost."""
    for gap in range(14, 60):
        for kind in ("prepared", "whole", "kafka", "letters"):
            events = [(gap, "crash", 0), (0, "roll back", gap), (0, "input", 0), (0, "driver", 1)]
            yield of(events, sinks=one(kind), partitions=1 + gap % 2, replay=("recompute", "spool")[gap % 4 == 0])


def other_topic() -> Iterator[Scenario]:
    """The source's topic is deleted and created again at each moment; the source may be silent before it."""
    for gap in range(60):
        yield of([(gap, "topic", 0)], topics=True)
        yield of([(gap, "topic", 0)], topics=True, adopt=True)
        yield of([(gap, "topic", 0), (0, "crash", 0), (0, "driver", 1)], topics=True)
        yield of([(gap, "source down", 1), (12, "topic", 0), (END, "driver", 1)], topics=True, units=5)
        yield of([(gap, "crash", 0), (0, "source down", 2), (0, "driver", 0), (END, "topic", 0)], topics=True, units=5)


def damage() -> Iterator[Scenario]:
    """The newest record is altered, or of another job, or of a newer version."""
    for gap in range(10, 60, 2):
        for how in (0, 1, 2):
            yield of([(gap, "crash", 0), (0, "damage", how), (0, "driver", 1)])
            yield of([(gap, "crash", 0), (0, "damage", how), (0, "resolve", 0), (0, "abort orphans", 1)], partitions=2)


def older_version() -> Iterator[Scenario]:
    """A job of an older version is continued, from each moment."""
    for gap in range(10, 60, 2):
        yield of([(gap, "crash", 0), (0, "old record", 0), (0, "driver", 1)])
        yield of([(gap, "crash", 0), (0, "roll back", 0), (0, "old record", 0), (0, "driver", 1)], sinks=one("whole"))


def letters_beyond_the_limit() -> Iterator[Scenario]:
    for gap in range(0, 40, 2):
        yield of([(gap, "crash", 0), (0, "driver", 1)], sinks=one("letters"), most_letters=0)


def locks() -> Iterator[Scenario]:
    """What a dead driver's tasks have prepared locks rows, or the table, for the next driver."""
    for gap in range(13, 17):
        for switch in range(14, 30):
            for kind in ("prepared", "whole", "evolving"):
                late = [(gap, "crash", 1), (0, "driver", 1), (switch, "switch", 0)]
                yield of(late, sinks=one(kind), locks=True, partitions=2)
    for gap in range(8, 50):
        for kind in ("prepared", "whole", "evolving"):
            late = [(gap, "crash", 1), (0, "driver", 1), (6 + gap % 17, "switch", 0), (9, "switch", 1)]
            yield of(late, sinks=one(kind), locks=True, partitions=2)
            yield of(
                [(gap, "crash", 0), (0, "driver", 1)], sinks=one(kind), locks=True, partitions=2, commit_timeout=0.5
            )
            yield of([(gap, "driver", 1), (8 + gap % 11, "switch", 0), (9, "switch", 1)], sinks=one(kind), locks=True)


def repeated_puts() -> Iterator[Scenario]:
    """A put is done, its answer gets lost, and the client puts again."""
    for gap in range(60):
        yield of([(gap, "fault", 3)])
        yield of([(gap, "crash", 0), (0, "roll back", 0), (0, "driver", 1), (gap // 2, "fault", 3)])
        yield of([(END, "save", 0), (END, "restore", 0), (gap, "fault", 3), (END, "driver", 1)])


def stops() -> Iterator[Scenario]:
    for gap in range(4, 60):
        yield of([(gap, "stop", 0), (gap % 7, "down", 8 * 11), (0, "driver", 1)], commit_timeout=30.0, sinks=TWO)
        yield of([(gap, "down", 8 * (gap % 12)), (gap % 13, "stop", 0)], sinks=TWO, commit_timeout=0.5)


# ---------------------------------------------------------------------- what operators and users ask for
QUIET = 30
"""The tick at which a driver with a pause waits for its second batch."""
WAYS = (("request", 0), ("request", 1), ("cancel", 0))
"""The requests of operators: a savepoint, and perhaps a stop there."""


def until(call: str) -> Event:
    """Return the event that holds the next ones until somebody is about to make a call of `simulation.CALLS`."""
    return 0, "until call", list(CALLS).index(call)


def resume(role: str, gap: int = 0) -> Event:
    """Return the event that lets a process of `simulation.ROLES` go on."""
    return gap, "resume", ROLES.index(role)


def requests_and_dead_drivers() -> Iterator[Scenario]:
    """The driver dies at each moment of a request, while its command lives on or died before, and the next starts."""
    for gap in range(1, 56):
        for number, (way, argument) in enumerate(WAYS):
            if (gap + number) % 3 == 0:
                yield of([(QUIET, way, argument), (gap, "crash", 0), (0, "driver", 1)], pause=3.0, units=5)
            dead = [(QUIET, way, argument), (6, "crash", 0), (gap, "crash", 0), (0, "driver", 1)]
            yield of(dead, pause=3.0, units=5)


def requests_withdrawn() -> Iterator[Scenario]:
    """A command ends at each moment of its request: by Ctrl-C, or since the driver is suspended for long."""
    for gap in range(4, 52):
        for way, argument in WAYS:
            yield of([(QUIET, way, argument), (gap, "interrupt", 0), (gap % 5, "switch", 0)], pause=3.0, units=5)
    for gap in range(14):
        for begun in range(5):
            way, argument = WAYS[(gap + begun) % 3]
            suspended = [resume("command"), (0, "time", 2), resume("request", gap=gap), resume("command", gap=begun)]
            yield of([(QUIET, way, argument + 2), until("begun"), *suspended], pause=3.0, units=5)


def requests_that_are_old() -> Iterator[Scenario]:
    """Time passes at each moment of a request whose command died, or not."""
    for gap in range(4, 40):
        for way, argument in WAYS:
            yield of([(QUIET, way, argument), (gap, "time", 1), (gap % 7, "switch", 2)], pause=3.0, units=5)
            if gap < 12:
                for how_long in (1, 2):
                    dead = [(QUIET, way, argument), (gap, "crash", 0), (0, "time", how_long)]
                    yield of(dead, pause=3.0, units=5)


def requests_and_storage() -> Iterator[Scenario]:
    """The driver, or everybody, cannot reach storage from each moment of a request on, for a while."""
    for gap in range(7, 56):
        for way, argument in WAYS:
            if gap % 3 == 0:
                yield of([(QUIET, way, argument + 2), (gap, "cut off", 2 + 4 * (gap % 2))], pause=150.0)
            yield of([(QUIET, way, argument + 2), (6, "crash", 0), (gap - 6, "cut off", 2)], pause=150.0)
            yield of([(QUIET, way, argument), (gap, "fault", gap % 3)], pause=3.0, units=5)


def requests_damaged() -> Iterator[Scenario]:
    """A request is damaged, and another one comes."""
    for gap in range(4, 24, 2):
        for damage in (0, 1, 2):
            for way, argument in WAYS:
                yield of([(QUIET, "request", 0), (gap, "spoil", damage), (0, way, argument)], pause=3.0, units=5)
    for damage in (0, 1, 2):
        for way, argument in WAYS:
            dead = [(QUIET, "request", 1), (6, "crash", 0), (0, "spoil", damage), (2, way, argument)]
            yield of(dead, pause=150.0)


def requests_and_next_driver() -> Iterator[Scenario]:
    """A second driver starts in the middle of a request, and both go on."""
    for gap in range(7, 50, 2):
        for way, argument in WAYS:
            for switch in (6, 18, 34):
                then = [(gap, "driver", 1), (switch, "switch", 1), (7, "switch", 3), (9, "switch", 0)]
                yield of([(QUIET, way, argument), *then], pause=3.0, units=5)


def stops_of_users() -> Iterator[Scenario]:
    """A user stops a query with a savepoint: the one that runs, or the one of an earlier run in the same process."""
    again = 64 * 3 + 1
    for gap in range(40):
        for which in (0, 4):
            stop = (gap, "stop with savepoint", which)
            yield of([(END, "driver", again), (0, "until decided", 2), stop], pause=1.0, units=10)
            if gap % 3 == 0:
                yield of([(END, "driver", again), (0, "until decided", 0), (2 * gap, *stop[1:])], pause=1.0, units=10)
    for gap in range(2, 40):
        yield of([(QUIET, "stop with savepoint", 0), (gap, "fail", 0)], pause=3.0, units=5)
        yield of([(QUIET, "stop with savepoint", 0), (gap, "crash", 0), (0, "driver", 1)], pause=3.0, units=5)


def stops_and_next_batch() -> Iterator[Scenario]:
    """The next batch comes at each moment of a stop with a savepoint."""
    for gap in range(40):
        for way, argument in (*WAYS[1:], ("stop with savepoint", 0)):
            begun = until("savepoint") if gap >= 20 else until("begun")
            asked = [(QUIET, way, argument), begun, resume("driver", gap=gap % 20), (9, "switch", gap)]
            yield of(asked, pause=3.0, units=5)
    for way, argument in (*WAYS[1:], ("stop with savepoint", 0)):
        yield of([(QUIET, way, argument), until("savepoint"), until("unlock"), resume("driver")], pause=3.0, units=5)


def failures_in_requests() -> Iterator[Scenario]:
    """The query fails at each moment of a request."""
    for gap in range(6, 50):
        for way, argument in WAYS:
            yield of([(QUIET, way, argument), (gap, "fail", 0), (0, "driver", 0)], pause=3.0, units=5)


def lists_while_committing() -> Iterator[Scenario]:
    """Transactions in doubt are listed while a driver commits, which takes its time."""
    for gap in range(22, 48, 2):
        for wait in range(0, 12, 2):
            slow = [(gap, "slow", 8 * 11 + 4), (0, "slow", 8 * 11 + 5)]
            yield of([*slow, (wait, "list", 0)], sinks=TWO, partitions=3)
            yield of([*slow, (wait, "resolve", 0)], sinks=(("one", "whole", 1), ("two", "prepared", 1)))


def fence_and_next_driver() -> Iterator[Scenario]:
    """An operator fences after a crash, and in the middle of that a driver starts."""
    for gap in range(1, 6):
        for switch in range(4):
            for last in ("list", "pre-commit", "record", "commit"):
                fenced = [(38, "crash", 0), (0, "abort orphans", 1), until("claim"), (gap, "driver", 1)]
                then = [until(last), resume("command", gap=switch), resume("driver", gap=4 * gap)]
                yield of([*fenced, *then], sinks=TWO)
    for gap in range(0, 24, 2):
        for fence in (0, 8):
            yield of([(17 + gap, "crash", 0), (0, "abort one", fence), (gap, "driver", 1), (20, "switch", 0)])


def target_after_a_restore() -> Iterator[Scenario]:
    """A target is restored to an older state between the restore of a savepoint and the start of the query."""
    for moment in range(0, 64, 2):
        for chosen in (4, 5, 12):
            for later in (0, 1):
                restored = [(END, "save", 0), (END, "driver", later), (END, "restore", later)]
                yield of([*restored, (END, "set back", back(chosen, moment)), (0, "driver", 0)], sinks=TWO)


def savepoints_damaged() -> Iterator[Scenario]:
    """An object of a savepoint is damaged before a restore, or in its middle; or the savepoint is deleted."""
    for damage in (0, 1, 2, 4, 5, 6):
        yield of([(END, "save", 0), (END, "spoil", damage), (END, "list savepoints", 0), (END, "restore", 0)])
        for gap in range(24):
            then = [(gap, "spoil", damage), (40, "restore", 0), (END, "driver", 0)]
            yield of([(END, "save", 0), (END, "restore", 0), *then])
    for gap in range(24):
        two = [(END, "save", 0), (END, "driver", 0), (END, "save", 0)]
        yield of([*two, (END, "dispose", gap), (gap, "crash", 0), (0, "list savepoints", 0), (END, "restore", 0)])
        yield of([*two, (END, "dispose", gap), (END, "list savepoints", 0), (END, "restore", 0)])
        yield of([*two, (END, "restore", 4), (gap, "dispose", 1), (END, "restore", 0), (END, "driver", 0)])


def restore_and_decision() -> Iterator[Scenario]:
    """A driver decides, and an operator asks, in the middle of the restore of a savepoint."""
    for gap in range(44):
        for call in ("record", "commit"):
            started = [(END, "save", 0), (END, "driver", 0), until(call), (0, "restore", 0), resume("driver", gap=gap)]
            yield of([*started, resume("command", gap=1 + gap % 3)])
    for gap in range(40):
        decided = [(END, "save", 0), (END, "driver", 0), until("record"), (0, "restore", 0), until("record")]
        then = [resume("driver"), (1, "resolve", 0), (gap, "switch", 1), (20, "switch", 0)]
        yield of([*decided, *then])


def sinks_taken_out() -> Iterator[Scenario]:
    """A savepoint is restored into a job with fewer sinks, or sinks are taken out after the restore."""
    for batches in range(8):
        restored = [(END, "save", 0), (END, "restore", 0), (END, "sinks", 1), (0, "driver", batches)]
        yield of([*restored, (END, "sinks", 0), (0, "driver", 0)], sinks=TWO, units=6)
    for gap in range(0, 40, 2):
        for later in (0, 1):
            out = 64 * 7 + later
            saved = [(END, "save", 0), (END, "driver", later), (END, "restore", out)]
            yield of([*saved, (gap, "crash", 0), (0, "restore", out), (END, "driver", 0)], sinks=TWO)
            yield of([*saved, (gap, "crash", 0), (0, "driver", 0), (8, "restore", out)], sinks=TWO)


def losses_by_name() -> Iterator[Scenario]:
    """An operator gives up one participant by its name, which is lost or not."""
    for gap in range(20, 50, 2):
        for which in range(4):
            lost = [(gap, "crash", 0), (0, "roll back", gap // 2), (0, "resolve one", which)]
            yield of([*lost, (gap % 21, "driver", 0), (9, "switch", 0)], sinks=TWO, partitions=2)
            yield of([*lost, (gap % 19, "crash", 0), (0, "resolve", 1)], sinks=(("one", "whole", 1),), partitions=2)
    for gap in range(50):
        lost = [(44, "crash", 0), (0, "roll back", gap % 4), (0, "resolve", 1)]
        yield of([*lost, (gap, "down", gap % 2)], sinks=TWO, partitions=2)
    for gap in range(30):
        lost = [until("commit"), (0, "crash", 0), (0, "roll back", 0), (0, "driver", 1), until("record")]
        then = [(0, "resolve", 1), until("claim"), resume("driver", gap=gap), resume("command", gap=1)]
        yield of([*lost, *then], partitions=2)


def fence_and_decision() -> Iterator[Scenario]:
    """An operator aborts a transaction of a driver, with a fence or without, while that driver decides."""
    for gap in range(44):
        for fence in (0, 8):
            named = [until("record"), (0, "abort one", fence), resume("driver", gap=gap)]
            yield of([(26, "switch", 0), *named, resume("command", gap=1 + gap % 16)], sinks=TWO)
    for gap in range(20, 60, 2):
        yield of([(gap, "abort one", 8 + 48 + gap // 2 % 8), resume("driver", gap=gap)], sinks=TWO)


def commands_after_a_set_back() -> Iterator[Scenario]:
    """Each command after a memory was restored to an older state."""
    for moment in range(0, 64, 2):
        for chosen in (1, 4, 5):
            for command, argument in (("list", 0), ("abort orphans", 0), ("abort orphans", 1), ("resolve", 0)):
                ran = [(END, "driver", 1), (30, "crash", 0), (0, "set back", back(chosen, moment))]
                yield of([*ran, (0, command, argument), (END, "driver", 0)], sinks=TWO, retained=3, units=5)


def savepoints_by_users() -> Iterator[Scenario]:
    """The command takes a savepoint after a crash, in doubt or lost, and the job is restored from it."""
    for gap in range(18, 50, 2):
        for kind in ("prepared", "whole", "kafka"):
            saved = [(gap, "crash", gap % 4 // 2), (0, "roll back", gap), (0, "save", 0)]
            yield of([*saved, (END, "restore", 0), (END, "driver", 0)], sinks=one(kind), partitions=2)
            yield of([(gap, "crash", 1), (0, "save", 0), (gap % 23, "driver", 1), (9, "switch", 0)], sinks=one(kind))


FAMILIES: dict[str, Callable[[], Iterator[Scenario]]] = {
    family.__name__: family
    for family in (
        crashes,
        crashes_of_two,
        second_driver,
        plans_in_one_moment,
        stale_start,
        driver_of_before_a_restore,
        old_history,
        copies,
        restored_again,
        called_again,
        between_two_calls,
        zombie_and_restore,
        two_restores,
        restore_killed,
        restore_and_driver,
        storage_while_running,
        namesakes,
        restore_and_storage,
        records_that_vanish,
        storage_emptied_alone,
        target_while_running,
        target_back_in_phase_two,
        commits_that_fail,
        long_runs,
        losses_given_up,
        rolled_back_when_decided,
        moved_on_with_losses,
        replay_then_storage,
        second_driver_while_replaying,
        overtaken_in_a_replay,
        storage_of_before_a_replay,
        target_of_before_a_loss,
        lost_answers,
        late_packets,
        late_tasks,
        speculative_tasks,
        set_back_twice,
        each_memory,
        quiet_sink,
        savepoint_and_memories,
        later_rows_deleted,
        fence,
        commands_while_running,
        commands_after_a_crash,
        memories_of_a_resolve,
        requests,
        request_and_restore,
        sweeps_while_quiet,
        spool,
        adoption,
        kafka_timeouts,
        partitions_change,
        sinks_change,
        other_rows,
        other_topic,
        damage,
        older_version,
        letters_beyond_the_limit,
        locks,
        repeated_puts,
        stops,
        requests_and_dead_drivers,
        requests_withdrawn,
        requests_that_are_old,
        requests_and_storage,
        requests_damaged,
        requests_and_next_driver,
        stops_of_users,
        stops_and_next_batch,
        failures_in_requests,
        lists_while_committing,
        fence_and_next_driver,
        target_after_a_restore,
        savepoints_damaged,
        restore_and_decision,
        sinks_taken_out,
        losses_by_name,
        fence_and_decision,
        commands_after_a_set_back,
        savepoints_by_users,
    )
}


def scenarios(*names: str, every: int = 1) -> Iterator[Scenario]:
    """Yield the scenarios of some families, or of all. `every` leaves some moments out: it takes each so-manieth.

    In every other scenario, each task writes to all sinks.
    """
    for name in names or FAMILIES:
        for number, scenario in enumerate(FAMILIES[name]()):
            if number % every == 0:
                yield replace(scenario, kind=name, one_pass=number // every % 2 == 1)
