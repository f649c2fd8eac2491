"""A sink for Redis: rows appear in a stream when their checkpoint is committed, and not before.

docs/redis-sink-tutorial.md explains this file step by step. tests/test_redis_sink.py runs the
conformance kit over it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from sinks import Checkpoint, CommitOutcome, Committable, Identity, TransactionContext
from sinks.audit import Audit, Holding, Part
from sinks.errors import BadValue, CommittedError, SchemaMismatch, SinkError
from sinks.optional import Auditable, Diagnosable, DirectCommitting
from sinks.transaction import Fingerprint, TransactionId, token

TYPES = (pa.bool_(), pa.int32(), pa.int64(), pa.float64(), pa.string())
PAGE = 1000

# Each script gets the keys `states, rows, fingerprints, memory, stream`, and first the transaction.
# It answers with the state that it found, or for MOVE with the state that it left.
WRITE = """#!lua
local states, rows = unpack(KEYS)
local state = redis.call("HGET", states, ARGV[1]) or "missing"
if state == "open" then
    for n = 2, #ARGV do
        redis.call("RPUSH", rows, ARGV[n])
    end
end
return state
"""

PRE_COMMIT = """#!lua
local states, rows, fingerprints = unpack(KEYS)
local transaction, fingerprint = unpack(ARGV)
local state = redis.call("HGET", states, transaction) or "missing"
if state == "open" then
    redis.call("HSET", fingerprints, transaction, fingerprint)
    redis.call("HSET", states, transaction, "pre-committed")
end
return state
"""

MOVE = """#!lua
local states, rows, fingerprints, memory, stream = unpack(KEYS)
local transaction, wanted, lineage, checkpoint = unpack(ARGV)
local state = redis.call("HGET", states, transaction) or "missing"
if state ~= wanted then
    return state
end
local count = redis.call("LLEN", rows)
local newest = tonumber(redis.call("HGET", memory, lineage) or -1)
redis.call("XLEN", stream)
-- From here on the script changes keys, and no command fails.
for first = 0, count - 1, 1000 do
    for _, row in ipairs(redis.call("LRANGE", rows, first, first + 999)) do
        redis.call("XADD", stream, "*", "row", row, "transaction", transaction)
    end
end
redis.call("DEL", rows)
if wanted == "open" then
    redis.call("HDEL", states, transaction)
    return "visible"
end
redis.call("HSET", states, transaction, "committed")
if tonumber(checkpoint) > newest then
    redis.call("HSET", memory, lineage, checkpoint)
end
return "committed"
"""

ABORT = """#!lua
local states, rows = unpack(KEYS)
local state = redis.call("HGET", states, ARGV[1]) or "missing"
if state == "open" or state == "pre-committed" then
    redis.call("DEL", rows)
    redis.call("HSET", states, ARGV[1], "aborted")
end
return state
"""

FORGET = """#!lua
local states, rows, fingerprints = unpack(KEYS)
local state = redis.call("HGET", states, ARGV[1]) or "missing"
for n = 2, #ARGV do
    if state == ARGV[n] then
        redis.call("DEL", rows)
        redis.call("HDEL", fingerprints, ARGV[1])
        redis.call("HDEL", states, ARGV[1])
    end
end
return state
"""


@dataclass
class Handle:
    """An open transaction in its task."""

    id: str
    fingerprint: Fingerprint = field(default_factory=Fingerprint)


class RedisSink(DirectCommitting[Handle], Auditable[Handle], Diagnosable[Handle]):
    system = "Redis"

    def __init__(self, url: str, stream: str, name: str | None = None) -> None:
        super().__init__(name=name or stream)
        self.url = url
        self.stream = stream
        self._client: Any = None

    def open(self) -> None:
        if self._client is None:
            self._client = redis.Redis.from_url(
                self.url, decode_responses=True, retry=Retry(NoBackoff(), 0), socket_timeout=60
            )

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_client": None}

    def check(self, schema: pa.Schema) -> None:
        problems = [
            f"column {field.name} is {field.type}" for field in schema if field.type not in TYPES
        ]
        if problems:
            problems.append(f"the sink takes {', '.join(map(str, TYPES))}")
        problems += [
            f"{count} columns are named {name}"
            for name, count in Counter(schema.names).items()
            if count > 1
        ]
        if self._client.info("cluster")["cluster_enabled"]:
            problems.append("the server is part of a cluster, where a script has one hash slot")
        if problems:
            raise SchemaMismatch(f"stream {self.stream}: {'; '.join(problems)}")

    # ------------------------------------------------------------------ names
    def _key(self, kind: str, job: str) -> str:
        """Return the key of what the sink keeps for a job, whose name is given as its token."""
        return f"tpc:{kind}:{job}:{token(self.name)}"

    def _run(self, script: str, id: str, *arguments: object, stream: str = "") -> str:
        """Run a script about a transaction of this sink."""
        job = TransactionId.parse(id).job
        keys = [
            self._key("states", job),
            f"tpc:rows:{id}",
            self._key("fingerprints", job),
            self._key("memory", job),
            stream or self.stream,
        ]
        return str(self._client.eval(script, len(keys), *keys, id, *arguments))

    # ------------------------------------------------------------------ in the task
    def begin_transaction(self, context: TransactionContext) -> Handle:
        id = context.transaction_id
        if not self._client.hsetnx(self._key("states", token(context.job)), id, "open"):
            raise SinkError(f"transaction {id} was begun before, and no name is used twice")
        return Handle(id)

    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        for first in range(0, batch.num_rows, PAGE):
            rows = batch.slice(first, PAGE).to_pylist()
            try:
                texts = [json.dumps(row, allow_nan=False) for row in rows]
            except ValueError as error:
                raise BadValue(
                    f"stream {self.stream}: a row has NaN or an infinity, which JSON lacks"
                ) from error
            self._require("open", self._run(WRITE, transaction.id, *texts), transaction)

    def record_fingerprint(self, transaction: Handle, fingerprint: Fingerprint) -> None:
        transaction.fingerprint = fingerprint

    def pre_commit(self, transaction: Handle) -> Committable:
        fingerprint = json.dumps(transaction.fingerprint.to_json())
        self._require("open", self._run(PRE_COMMIT, transaction.id, fingerprint), transaction)
        return Committable({"id": transaction.id}, proof={"stream": self.stream})

    def commit_directly(self, transaction: Handle) -> None:
        self._require("visible", self._move(transaction.id, "open", self.stream), transaction)

    def rollback(self, transaction: Handle) -> None:
        self._run(FORGET, transaction.id, "open", "pre-committed")

    def _require(self, wanted: str, state: str, transaction: Handle) -> None:
        if state != wanted:
            raise SinkError(
                f"transaction {transaction.id} is {state}: another process ended it while its "
                "task was at work"
            )

    # ------------------------------------------------------------------ on the driver
    def commit(self, committable: Committable) -> CommitOutcome:
        id = committable.transaction["id"]
        state = self._move(id, "pre-committed", self._stream_of(committable))
        if state == "committed":
            return CommitOutcome.COMMITTED
        where = f"in {self._key('states', TransactionId.parse(id).job)} of Redis"
        if state == "aborted":
            return CommitOutcome.lost(f"{id} is marked as aborted {where}")
        return CommitOutcome.unknown(f"{id} is {state} {where}: look for its rows in the stream")

    def _move(self, id: str, wanted: str, stream: str) -> str:
        name = TransactionId.parse(id)
        return self._run(MOVE, id, wanted, name.lineage, name.checkpoint, stream=stream)

    def _stream_of(self, committable: Committable) -> str:
        return str(committable.proof.get("stream", self.stream))

    def abort(self, transaction: Identity) -> None:
        id = transaction["id"]
        if self._run(ABORT, id) == "committed":
            raise CommittedError(f"{id} is committed, and its rows are in the stream")

    def in_doubt(self, job: str) -> Iterable[Identity]:
        return [{"id": id} for id, state in self._states(job).items() if state == "pre-committed"]

    def _states(self, job: str) -> Mapping[str, str]:
        states: Mapping[str, str] = self._client.hgetall(self._key("states", token(job)))
        return states

    def owns(self, job: str, transaction: Identity) -> bool:
        try:
            name = TransactionId.parse(transaction["id"])
        except (KeyError, TypeError, ValueError):
            return False
        return (name.job, name.sink) == (token(job), token(self.name))

    def committed_checkpoints(self, job: str) -> Mapping[str, int]:
        memory = self._client.hgetall(self._key("memory", token(job)))
        return {lineage: int(checkpoint) for lineage, checkpoint in memory.items()}

    def purge(self, checkpoint: Checkpoint) -> None:
        for id in self._states(checkpoint.job):
            name = TransactionId.parse(id)
            if name.lineage == checkpoint.lineage and name.checkpoint < checkpoint.oldest_retained:
                self._run(FORGET, id, "open", "committed", "aborted")

    # ------------------------------------------------------------------ for operators
    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        states = self._states(job)
        stored = self._client.hgetall(self._key("fingerprints", token(job)))
        prints = {
            id: Fingerprint.from_json(json.loads(stored[id]))
            for id, state in states.items()
            if state == "committed" and id in stored
        }
        streams = {self._stream_of(each) for part in parts for each in part.committables}
        there = None if quick else sum(map(self._count_rows, streams), Counter[str]())
        return Audit([self._holding(part, prints, there) for part in parts])

    def _count_rows(self, stream: str) -> Counter[str]:
        """Return how many rows of each transaction the stream has."""
        counts = Counter[str]()
        start = "-"
        while page := self._client.xrange(stream, min=start, count=PAGE):
            counts.update(entry.get("transaction", "") for _, entry in page)
            start = f"({page[-1][0]}"
        return counts

    def _holding(
        self, part: Part, prints: Mapping[str, Fingerprint], there: Counter[str] | None
    ) -> Holding:
        ids = [committable.transaction["id"] for committable in part.committables]
        known = {*ids, *(identity["id"] for identity in part.given_up)}
        mine = {
            id
            for id in prints
            for name in [TransactionId.parse(id)]
            if (name.lineage, name.checkpoint) == (part.lineage, part.checkpoint_id)
        }
        return Holding(
            fingerprint=sum((prints[id] for id in ids if id in mine), Fingerprint()),
            rows=None if there is None else sum(there[id] for id in ids),
            remarks=("the stream was not read",) if there is None else (),
            unexpected=tuple(sorted(mine - known)),
        )

    def weaknesses(self) -> Sequence[str]:
        wanted = {
            "appendonly": ("yes", "rows exist in memory only"),
            "appendfsync": ("always", "an acknowledged write may be lost in a crash"),
            "maxmemory-policy": ("noeviction", "Redis may delete keys of this sink"),
        }
        try:
            found = self._client.config_get(*wanted)
        except redis.ResponseError as error:
            return [f"Redis does not show its settings: {error}"]
        return [
            f"{setting} is {found.get(setting)!r} and not {value!r}, so {risk}"
            for setting, (value, risk) in wanted.items()
            if found.get(setting) != value
        ]

    def probe_schema(self) -> pa.Schema:
        return pa.schema([("id", pa.int64())])
