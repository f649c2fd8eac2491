"""The commit of transactions that tasks left open, and what became of each: told by the answer to EndTxn, unless a
topic was made anew or a part of a transaction is gone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sinks.kafka.cluster import Answer, Cluster, Logs
from sinks.kafka.errors import NotYetKnown
from sinks.kafka.outcome import made_anew, of_commit, places_of
from sinks.progress import progress
from sinks.transaction import CommitOutcome, CommitState, Committable, Identity

logger = logging.getLogger(__name__)

_ENDED_TOGETHER = 1000
"""Requests that are under way at once."""
_WITNESS_THREADS = 8


@dataclass(frozen=True)
class Commit:
    """Of one sink. `servers` and `target` are for people; `patiently` asks again while the brokers are at work."""

    sink: str
    brokers: Cluster
    servers: str
    target: str
    patiently: Callable[[Callable[[], Any]], Any]

    def of(self, committables: Sequence[Committable]) -> Sequence[CommitOutcome | Exception]:
        names, places = topics_of(committables), places_of_all(committables)
        here, ids, logs = self.patiently(lambda: self.brokers.ids_and_logs(names, places))
        if there := {committable.proof["cluster"] for committable in committables} - {here}:
            unknown = CommitOutcome.unknown(  # this one may have a transaction of that name too
                f"it was written to the cluster {', '.join(there)}, and {self.servers} is {here}: point the "
                "sink at the old one"
            )
            return [unknown] * len(committables)
        outcomes = {at: self._without_its_topic(c, ids) for at, c in enumerate(committables) if made_anew(c, ids)}
        others = [at for at in range(len(committables)) if at not in outcomes]
        if outcomes:
            places = places_of_all(committables[at] for at in others)
            logs = self.patiently(lambda: self.brokers.logs(places))
        outcomes |= self._interrupted(committables, others, logs)
        others = [at for at in range(len(committables)) if at not in outcomes]
        outcomes |= zip(others, self._end([committables[at] for at in others]), strict=True)
        ids = self.brokers.topic_ids(names)  # one may have been made anew while the requests were under way
        for at in others:
            if outcomes[at] == CommitOutcome.COMMITTED and (topic := made_anew(committables[at], ids)):
                outcomes[at] = CommitOutcome.unknown(
                    f"it was committed while its topic {topic!r} was deleted: it is unknown whether anybody has read "
                    "its records. Look for them in the topic: all of them are there, or none"
                )
        return [self._to_the_same(c, outcomes[at]) for at, c in enumerate(committables)]

    def _to_the_same(self, committable: Committable, outcome: CommitOutcome | Exception) -> CommitOutcome | Exception:
        """What is lost is written again, to the topic of now."""
        mismatch = committable.target_mismatch(self.target)
        if mismatch and isinstance(outcome, CommitOutcome) and outcome.state is CommitState.LOST:
            return CommitOutcome.unknown(f"{outcome.reason}; {mismatch}")
        return outcome

    def _without_its_topic(self, committable: Committable, ids: Mapping[str, str | None]) -> CommitOutcome | Exception:
        """A topic that it wrote to is gone, and its records there too. If it was committed before, that is as with any
        topic that somebody deletes; else it is aborted, so that all of it is written again."""
        topic, name = made_anew(committable, ids), committable.transaction["transactional_id"]
        try:
            if self.brokers.has_committed(committable.transaction):
                logger.warning("topic %r was deleted after %s was committed", topic, name)
                return CommitOutcome.COMMITTED
            if ids[str(topic)] is None:
                return NotYetKnown(
                    f"{name}: there is no topic {topic!r} any more: create it, and its rows are written again"
                )
            return self._aborted(
                committable, f"its topic {topic!r} was deleted and made anew after its rows were written"
            )
        except Exception as error:
            return error

    def _interrupted(
        self, committables: Sequence[Committable], among: Sequence[int], logs: Logs
    ) -> dict[int, CommitOutcome | Exception]:
        """Those that are open, but not whole, are aborted, so that all of each is written again: an EndTxn would say
        that they are committed."""
        ended = {among[at]: why for at, why in in_part([committables[at] for at in among], logs).items()}
        names = {at: committables[at].transaction["transactional_id"] for at in ended}
        states = self.brokers.states(names.values())
        outcomes: dict[int, CommitOutcome | Exception] = {}
        for at, why in ended.items():
            if states.get(names[at]) == ongoing(committables[at]):
                try:
                    outcomes[at] = self._aborted(committables[at], why)
                except Exception as error:
                    outcomes[at] = error
        return outcomes

    def _aborted(self, committable: Committable, why: str) -> CommitOutcome:
        (answer,) = self.brokers.end([committable.transaction], commit=False)
        if answer == 0:
            return CommitOutcome.lost(f"{why}, so {committable.transaction['transactional_id']} was aborted")
        return of_commit(self.brokers, committable, answer)

    def _end(self, committables: Sequence[Committable]) -> Sequence[CommitOutcome | Exception]:
        answers: list[Answer] = []
        with progress(f"sink {self.sink}: commit", len(committables), "transactions") as advance:
            for start in range(0, len(committables), _ENDED_TOGETHER):
                some = [committable.transaction for committable in committables[start : start + _ENDED_TOGETHER]]
                answers += self.brokers.end(some, commit=True)
                advance(len(some))

        def outcome(committable: Committable, answer: Answer) -> CommitOutcome | Exception:
            try:
                return of_commit(self.brokers, committable, answer)
            except Exception as error:
                return error

        if all(answer == 0 for answer in answers):
            return [CommitOutcome.COMMITTED] * len(answers)
        with ThreadPoolExecutor(_WITNESS_THREADS, f"witness-{self.sink}") as pool:
            return list(pool.map(outcome, committables, answers))


def topics_of(committables: Iterable[Committable]) -> set[str]:
    return {name for one in committables for name in one.proof.get("topic_ids", ())}


def places_of_all(committables: Iterable[Committable]) -> set[tuple[str, int]]:
    return {place for one in committables for place in places_of(one)}


def in_part(committables: Sequence[Committable], logs: Logs) -> dict[int, str]:
    """Which of these are open in a part of their partitions, or have a part of their records, and why; their
    coordinator does not know of it, and would commit the rest. Or all of it is ended."""
    found: dict[int, str] = {}
    for at, one in enumerate(committables):
        producer = one.transaction["producer_id"], one.transaction["producer_epoch"]
        for place, first in places_of(one).items():
            where, start = f"{place[0]}-{place[1]}", logs.starts.get(place, first)
            if producer not in logs.open_in.get(place, {producer}):
                found[at] = f"somebody has ended it in {where} alone (kafka-transactions.sh abort)"
            elif start > first:
                found[at] = (
                    f"{where} begins at offset {start} now, so its records from {first} on are gone: somebody has "
                    "deleted them (kafka-delete-records.sh), or retention has, which goes by their timestamps"
                )
    return found


def ongoing(committable: Committable) -> tuple[Identity, str]:
    """As `Cluster.states` has it."""
    return dict(committable.transaction), "Ongoing"
