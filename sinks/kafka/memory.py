"""What the brokers remember of a job: the newest checkpoint that became visible.

Each transaction carries an offset of a consumer group of the job's own. It becomes the group's if,
and only if, the records of the transaction become visible. So a start can tell that checkpoint
storage was restored to an older state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kafka.errors import CoordinatorNotAvailableError

from sinks.kafka.connection import (
    GROUP,
    TRANSACTION,
    Connections,
    coordinator_request,
    listed,
    raised,
    transactions_request,
)
from sinks.kafka.errors import NotYetKnown
from sinks.kafka.internals import (
    AddOffsetsToTxnRequest,
    OffsetFetchRequest,
    TxnOffsetCommitRequest,
)
from sinks.transaction import Identity

PARTITION = 0
_METADATA = re.compile(r"lineage=(\w*)(?: round=(\d+))?")


@dataclass(frozen=True)
class Mark:
    """The checkpoint that a transaction is part of, and its replay if that is above 0.

    It is stored as an offset of partition `PARTITION` of a topic of the job.
    """

    group: str
    lineage: str
    checkpoint: int
    round: int = 0

    @property
    def offset(self) -> int:
        """The next one to be committed, as with any consumer group."""
        return self.checkpoint + 1

    @property
    def metadata(self) -> str:
        return f"lineage={self.lineage}" + (f" round={self.round}" if self.round else "")


def newest_marks(offsets: Iterable[tuple[int, str]]) -> dict[str, tuple[int, int]]:
    """Return by lineage the newest checkpoint that a group has an offset of, and the round of that.

    An offset that anyone else has set is passed over.
    """
    marks: dict[str, tuple[int, int]] = {}
    for offset, metadata in offsets:
        match = _METADATA.fullmatch(metadata.rstrip("\0"))  # confluent-kafka writes a NUL behind it
        if match:
            lineage = match[1]
            its = offset - 1, int(match[2] or 0)
            marks[lineage] = max(its, marks.get(lineage, its))
    return marks


class GroupMemory:
    """The offsets of jobs' consumer groups, as the brokers of one cluster have them."""

    def __init__(self, connections: Connections) -> None:
        self._net = connections

    def add_offset(
        self, identity: Identity, mark: Mark, topic: str, *, by_itself: bool
    ) -> Future[None]:
        """Add an offset to a transaction, for the mark's group, and do not wait.

        `by_itself`: the group need not be added before.
        """
        done = Future[None]()
        added = self._net.start(self._add_offset, identity, mark, topic, by_itself)
        added.add_callback(done.set_result).add_errback(done.set_exception)
        return done

    async def _add_offset(
        self, identity: Identity, mark: Mark, topic: str, by_itself: bool
    ) -> None:
        if not by_itself:
            add = AddOffsetsToTxnRequest(group_id=mark.group, max_version=3, **identity)
            await self._net.ask_coordinator(TRANSACTION, identity["transactional_id"], add)
        offsets = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
        partition = offsets.TxnOffsetCommitRequestPartition(
            partition_index=PARTITION,
            committed_offset=mark.offset,
            committed_metadata=mark.metadata,
        )
        request = TxnOffsetCommitRequest(
            group_id=mark.group,
            topics=[offsets(name=topic, partitions=[partition])],
            max_version=5 if by_itself else 3,
            **identity,
        )
        await self._net.ask_coordinator(GROUP, mark.group, request)

    def settled_offsets(self, group: str, prefix: str) -> list[tuple[int, str]]:
        """Return offsets and metadata that a consumer group has committed, without what open
        transactions carry for it. Empty if there is no such group.

        Raises `NotYetKnown` while a commit of transactional ids with this prefix is under way: what
        is decided reaches the group with the brokers' markers, some milliseconds after EndTxn.
        """
        return self._net.ask(lambda: self._settled_offsets(group, prefix))

    async def _settled_offsets(self, group: str, prefix: str) -> list[tuple[int, str]]:
        """Ask the group's coordinator for the offsets, once all other brokers agree on it.

        A broker that was frozen answers with outdated offsets until it learns that another broker
        coordinates the group. So all other brokers have to name the broker that is asked for the
        offsets.
        """
        node = raised((await self._net.coordinators_of(GROUP, [group]))[group])

        def requests(broker: int) -> list[Any]:
            who = [] if broker == node else [coordinator_request(GROUP, [group])]
            return [transactions_request("PrepareCommit"), *who]

        answers = await self._net.ask_all(requests)
        if busy := listed((deciding for deciding, *_ in answers.values()), prefix):
            raise NotYetKnown(f"the brokers have not finished the commit of {', '.join(busy)}")
        if any(
            answer.coordinators[0].node_id != node
            for _, *others in answers.values()
            for answer in others
        ):
            self._net.forget_coordinator(GROUP, group)
            raise CoordinatorNotAvailableError(
                f"the brokers do not agree who coordinates group {group}"
            )
        asked = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group, topics=None)
        offsets = OffsetFetchRequest(groups=[asked], min_version=8, max_version=8)
        topics = (await self._net.ask_coordinator(GROUP, group, offsets)).groups[0].topics
        return [
            (each.committed_offset, each.metadata or "")
            for topic in topics
            for each in topic.partitions
        ]
