"""The producer beside a leader that loses requests and answers, refuses some, and takes each sequence number once."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict, deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from kafka.errors import KafkaConnectionError, KafkaTimeoutError, NodeNotReadyError, for_code
from kafka.record import MemoryRecords

from sinks.errors import BadValue, ConfigurationError
from sinks.kafka import producer as module
from sinks.kafka.memory import Mark
from sinks.kafka.options import producer_options
from sinks.kafka.producer import TransactionalProducer
from sinks.kafka.topics import Place

NOT_LEADER, NOT_ENOUGH_REPLICAS, OUT_OF_ORDER, CONCURRENT, MISSING = 6, 19, 45, 51, 3
PARTITIONS = 3


class Brokers:
    """Two nodes. What a node is sent on one connection it takes in that order; when the connection is lost, so are the
    answers, and some of the requests."""

    def __init__(self, seed: int, faults: float = 0.0, *, fences: bool = True) -> None:
        self.random, self.faults, self.fences = random.Random(seed), faults, fences
        self.log: defaultdict[tuple[str, int], list[bytes]] = defaultdict(list)
        self.next: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.bases: defaultdict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
        self.leaders = dict.fromkeys(range(PARTITIONS), 1)
        self.added: set[tuple[str, int]] = set()
        self.most_under_way = self.under_way = self.requests = 0
        self.additions = 0
        self.id = "id"
        self.lock = threading.Lock()
        self.answers: defaultdict[int, deque[tuple[Any, Any]]] = defaultdict(deque)
        self.ended: list[bool] = []

    def begin(
        self, transactional_id: str, timeout_ms: int, topic: str | None = None
    ) -> tuple[dict[str, Any], Place | None, bool]:
        identity = {"transactional_id": transactional_id, "producer_id": 7, "producer_epoch": 3}
        return identity, self.place(topic) if topic else None, self.fences

    @property
    def topics(self) -> Brokers:
        return self

    def place(self, topic: str) -> Place | None:
        return Place("cluster", self.id, dict(self.leaders)) if self.id else None

    def largest_batch(self, topic: str) -> int | None:
        return None

    def add_partitions(self, identity: Any, places: Any) -> None:
        assert not self.fences
        if self._happens():
            raise for_code(CONCURRENT)()
        self.added.update(places)
        self.additions += 1

    def end(self, identities: Any, *, commit: bool) -> list[int]:
        self.ended.append(commit)
        return [0]

    def _happens(self) -> bool:
        return self.random.random() < self.faults

    def produce(
        self, node: int, transactional_id: str, batches: Any, timeout_ms: int, answered: Any, *, adds: bool
    ) -> None:
        assert adds is self.fences
        self.requests += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        if self._happens():
            self.leaders = {number: self.random.choice([1, 2]) for number in range(PARTITIONS)}
        lost = self._happens() and self.random.choice(["request", "answer", "paused"])
        answer: Any = KafkaConnectionError("lost")
        if lost == "paused":
            answer = NodeNotReadyError("paused")
        elif lost != "request":
            responses = [
                SimpleNamespace(name=name, partition_responses=[self._append(node, name, *batch) for batch in some])
                for name, some in batches.items()
            ]
            answer = answer if lost else SimpleNamespace(responses=responses)

        if lost == "paused":
            self._tell(answered, answer)
        else:
            self.answers[node].append((answered, answer))
            threading.Timer(self.random.choice([0.0, 0.0, 0.002]), self._next_answer, [node]).start()

    def _next_answer(self, node: int) -> None:
        """In the order of the requests. With one that is lost, so are all that are under way on this connection."""
        with self.lock:
            if self.answers[node]:
                answered, answer = self.answers[node].popleft()
                self._tell(answered, answer)
                while isinstance(answer, KafkaConnectionError) and self.answers[node]:
                    self._tell(self.answers[node].popleft()[0], answer)

    def _tell(self, answered: Any, answer: Any) -> None:
        self.under_way -= 1
        answered(answer)

    def _append(self, node: int, name: str, number: int, data: bytes) -> Any:
        place = name, number
        batch = MemoryRecords(data).next_batch()
        assert (batch.producer_id, batch.producer_epoch) == (7, 3)
        values, first = [record.value for record in batch], batch.base_sequence
        code = offset = -1
        seen = [base for begins, count, base in self.bases[place][-5:] if (begins, count) == (first, len(values))]
        if self.leaders[number] != node:
            code = NOT_LEADER
        elif not self.fences and place not in self.added:
            code = 48
        elif seen:
            code, offset = 0, seen[0]
        elif self.bases[place] and first != self.next[place]:  # of a producer that it does not know it takes any first
            code = OUT_OF_ORDER
        elif self._happens():
            code = self.random.choice([NOT_ENOUGH_REPLICAS, CONCURRENT, MISSING])
        else:
            code, offset = 0, len(self.log[place])
            self.bases[place].append((first, len(values), offset))
            self.log[place] += values
            self.next[place] = first + len(values)
        time = batch.max_timestamp if seen else -1  # as Kafka's UnifiedLog answers for what it has already
        return SimpleNamespace(
            index=number, error_code=code, error_message=None, base_offset=offset, log_append_time_ms=time
        )


def made(brokers: Any, **options: Any) -> TransactionalProducer:
    names = {name.replace("_", "."): value for name, value in options.items()}
    producer = TransactionalProducer(brokers, producer_options(names, 60), "id", "topic")
    producer.begin(5)
    return producer


def rows(*numbers: int, partition: int | None = None) -> pa.RecordBatch:
    columns = {
        "value": [f"{number:06d}" for number in numbers],
        "partition": pa.array([number % PARTITIONS if partition is None else partition for number in numbers]),
    }
    return pa.RecordBatch.from_pydict(columns)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.004)


@pytest.mark.parametrize("fences", [True, False], ids=["partitions join by themselves", "partitions are added"])
@pytest.mark.parametrize("seed", range(6))
def test_every_row_once_and_in_order_whatever_gets_lost(seed: int, fences: bool) -> None:
    brokers = Brokers(seed, faults=0.2, fences=fences)
    producer = made(brokers, batch_size=400)
    for start in range(0, 3000, 100):
        some = rows(*range(start, start + 100))
        producer.write(some.append_column("timestamp", pa.array(range(1, 101), pa.timestamp("ms", "UTC"))))
    proof = producer.seal(60).proof
    for number in range(PARTITIONS):
        expected = [f"{n:06d}".encode() for n in range(3000) if n % PARTITIONS == number]
        assert brokers.log["topic", number] == expected
    spans = {("topic", number): (first, end) for number, first, end, _ in proof["spans"]["topic"]}
    assert spans == {("topic", number): (0, 1000) for number in range(PARTITIONS)}
    assert brokers.most_under_way > 1
    assert producer.sent == producer.delivered == 3000


def test_a_leader_that_misses_what_it_has_acknowledged_fails_the_task() -> None:
    brokers = Brokers(0)
    producer = made(brokers)
    producer.write(rows(1, partition=0))
    producer.flush(5)
    brokers.next["topic", 0] = 0
    producer.write(rows(2, partition=0))
    with pytest.raises(RuntimeError, match="not taken"):
        producer.flush(5)
    producer.abort(5)
    assert brokers.ended == [False]


def test_a_leader_that_misses_all_of_it_fails_the_task() -> None:
    """It does not know the producer, and takes what comes next; its log ends before what was acknowledged."""
    brokers = Brokers(0)
    producer = made(brokers)
    producer.write(rows(1, partition=0))
    producer.flush(5)
    brokers.bases.clear()
    brokers.log.clear()
    producer.write(rows(2, partition=0))
    with pytest.raises(RuntimeError, match=r"topic-0 has lost records .* at offset 0, .* end at 1"):
        producer.flush(5)


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        (10, BadValue, "batch.size"),
        (29, ConfigurationError, "may not write to the topic"),
        (47, RuntimeError, "taken its place"),
        (2, RuntimeError, "not taken"),
    ],
)
def test_what_cannot_be_settled_fails_the_task(
    code: int, kind: type[Exception], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Brokers._append

    def refuse(self: Brokers, *place: Any) -> Any:
        about = append(self, *place)
        about.error_code = code
        return about

    producer = made(Brokers(0))
    monkeypatch.setattr(Brokers, "_append", refuse)
    producer.write(rows(1))
    with pytest.raises(kind, match=reason):
        producer.seal(5)
    with pytest.raises(kind, match=reason):
        producer.write(rows(2))


def test_a_flush_ends_when_nobody_answers() -> None:
    brokers = Brokers(0)
    producer = made(brokers)
    brokers.produce = lambda *_, **__: None  # type: ignore[method-assign]
    producer.write(rows(1, 2))
    with pytest.raises(KafkaTimeoutError, match="2 of 2 records were not acknowledged in time"):
        producer.flush(0.3)


def test_a_mark_that_nobody_takes_fails_the_task() -> None:
    brokers: Any = Brokers(0)
    brokers.memory = SimpleNamespace(add_offset=lambda *_, **__: Future())
    producer = TransactionalProducer(brokers, producer_options({}, 1), "id", "topic", Mark("group", "", 0))
    producer.begin(5)
    producer.write(rows(1))
    with pytest.raises(KafkaTimeoutError, match="did not take the offset of id in time"):
        producer.seal(5)


def test_what_is_under_way_is_bounded() -> None:
    brokers = Brokers(0)
    held: list[Any] = []

    def hold(*arguments: Any, adds: bool) -> None:
        held.append((Brokers.produce, (brokers, *arguments), adds))

    brokers.produce = hold  # type: ignore[method-assign,assignment]
    producer = made(brokers, batch_size=10_000, queue_buffering_max_kbytes=100)

    def write() -> None:
        for start in range(0, 40_000, 1000):
            producer.write(rows(*range(start, start + 1000), partition=0))

    thread = threading.Thread(target=write)
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive()
    assert producer._encoded < 64_000
    assert len(held) <= 5
    while thread.is_alive() or producer.delivered < 39_000:
        while held:
            call, arguments, adds = held.pop(0)
            call(*arguments, adds=adds)
        time.sleep(0.001)
        if not thread.is_alive():
            producer._take(0.01)
            producer._send()
    assert brokers.log["topic", 0][:39_000] == [f"{n:06d}".encode() for n in range(39_000)]


def test_no_more_is_under_way_than_a_leader_knows_again() -> None:
    """A leader that has taken a record batch, and whose answer is late, has to recognize it when it comes again."""
    brokers = Brokers(0)
    producer = made(brokers, batch_size=400)
    producer.write(rows(0, partition=0))
    producer.flush(5)  # the first record batch goes alone
    brokers._next_answer = lambda node: None  # type: ignore[method-assign]
    answers = brokers.answers[1]
    producer.write(rows(*range(1, 1000), partition=0))
    producer._encode(*producer._partitions.values())
    producer._send()
    assert len(answers) == 5
    late = answers.popleft()
    while answers:
        brokers._tell(*answers.popleft())
    producer._send()
    assert not answers
    brokers._tell(*late)
    while producer.delivered < 1000:
        producer._send()
        while answers:
            brokers._tell(*answers.popleft())
    assert brokers.log["topic", 0] == [f"{n:06d}".encode() for n in range(1000)]


def test_a_rare_partition_keeps_no_more_than_its_rows_in_memory() -> None:
    producer = made(Brokers(0), queue_buffering_max_kbytes=4096)
    before = pa.total_allocated_bytes()
    for _ in range(30):
        count = 20_000
        producer.write(
            pa.RecordBatch.from_pydict(
                {"value": [b"x" * 50] * count, "partition": pa.array([1] + [0] * (count - 1), pa.int32())}
            )
        )
    assert pa.total_allocated_bytes() - before < 16 << 20
    producer.flush(30)


def test_many_partitions_join_the_transaction_by_one_request() -> None:
    brokers = Brokers(0, fences=False)
    producer = made(brokers)
    producer.write(rows(*range(30)))
    producer.flush(5)
    assert brokers.additions == 1


def test_rows_without_keys_go_where_there_is_a_leader() -> None:
    brokers = Brokers(0)
    brokers.leaders[1] = -1
    producer = made(brokers, batch_size=2000)
    producer.write(pa.RecordBatch.from_pydict({"value": [f"{n:06d}" for n in range(1000)]}))
    producer.flush(5)
    assert not brokers.log["topic", 1]
    assert len(brokers.log["topic", 0]) + len(brokers.log["topic", 2]) == 1000


def test_what_may_come_late_is_fenced_where_no_broker_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its leader would take it into a transaction that no coordinator knows."""
    monkeypatch.setattr(module, "_SETTLE_TIMEOUT", 0.1)
    brokers = Brokers(0, fences=False)
    producer = made(brokers)
    brokers.produce = lambda *_, **__: None  # type: ignore[method-assign]
    fenced: list[Any] = []
    brokers.fence = fenced.append  # type: ignore[attr-defined]
    producer.write(rows(1, 2))
    with pytest.raises(KafkaTimeoutError):
        producer.flush(0.1)
    producer.abort(5)
    assert (fenced, brokers.ended) == ([producer._identity], [])


def test_rows_without_keys_go_in_turn_a_batch_at_a_time() -> None:
    brokers = Brokers(0)
    producer = made(brokers, batch_size=2000)
    for start in range(0, 3000, 10):
        producer.write(pa.RecordBatch.from_pydict({"value": [f"{n:06d}" for n in range(start, start + 10)]}))
    producer.flush(5)
    counts = [len(brokers.log["topic", number]) for number in range(PARTITIONS)]
    assert sum(counts) == 3000
    assert max(counts) - min(counts) < 200
    assert 30 < brokers.requests < 60


def test_a_topic_that_is_made_anew_fails_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers(0)
    producer = made(brokers)
    producer.write(rows(1))
    producer.flush(5)
    brokers.id, brokers.leaders = "another", dict.fromkeys(range(PARTITIONS), 2)
    producer.write(rows(2))
    with pytest.raises(RuntimeError, match="deleted and made anew while rows went there"):
        producer.flush(5)
