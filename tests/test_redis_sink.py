"""The sink of docs/redis-sink-tutorial.md, on a real Redis: the kit of the page, and what the kit cannot see."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import redis

from examples.redis_sink import RedisSink
from sinks import Checkpoint, CommitOutcome, Committable
from sinks.errors import BadValue, ConfigurationError
from sinks.transaction import TransactionId
from tests.kit_run import run_kit
from tests.redis_server import RedisServer

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "redis_sink.py"
PAGE = ROOT / "docs" / "redis-sink-tutorial.md"
SCHEMA = pa.schema([("id", pa.int64())])
LINEAGE = "0badcafe"
STREAM = "orders"


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(shared: RedisServer) -> RedisServer:
    """An empty server, which a test may kill."""
    shared.start()
    with redis.Redis.from_url(shared.url) as client:
        client.flushall()
    return shared


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        yield client


@pytest.fixture
def sink(server: RedisServer) -> Iterator[RedisSink]:
    sink = RedisSink(server.url, STREAM)
    sink.open()
    yield sink
    sink.close()


def written(sink: RedisSink, count: int, checkpoint: int = 0, subtask: int = 0, job: str = "shop") -> Any:
    name = TransactionId(job, LINEAGE, checkpoint, sink.name, subtask, 1, 0, 0, task_attempt=0)
    transaction = sink.begin_transaction(name.context(SCHEMA))
    sink.write(transaction, pa.record_batch([pa.array(range(count))], schema=SCHEMA))
    return transaction


def pre_committed(sink: RedisSink, count: int, **parts: Any) -> Committable:
    return sink.pre_commit(written(sink, count, **parts))


def ids(client: Any) -> list[int]:
    return [json.loads(entry["row"])["id"] for _, entry in client.xrange(STREAM)]


def code_of_the_page() -> dict[str, str]:
    files: dict[str, str] = {}
    for name, code in re.findall(r"```python\n# (\w+\.py).*?\n(.*?)```", PAGE.read_text(), re.S):
        files[name] = files.get(name, "") + code + "\n"
    return files


def test_the_page_shows_the_whole_example() -> None:
    assert sorted(code_of_the_page()) == ["redis_sink.py", "test_redis_sink.py"]
    _, example = EXAMPLE.read_text().split('"""\n\n', 1)
    shown, there = (
        [line for line in text.splitlines() if line] for text in (code_of_the_page()["redis_sink.py"], example)
    )
    assert shown == there


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.large)], ids=["short", "whole"])
def test_the_sink_passes_the_kit(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    for name, text in code_of_the_page().items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("REDIS_URL", server.url)
    run_kit(tmp_path, "test_redis_sink.py", whole=whole)


def test_what_the_server_acknowledged_survives_its_crash(server: RedisServer, sink: RedisSink, client: Any) -> None:
    first = pre_committed(sink, 3)
    server.kill()
    server.start()
    assert list(sink.in_doubt("shop")) == [first.transaction]
    assert sink.commit(first) == CommitOutcome.COMMITTED
    aborted = pre_committed(sink, 2, checkpoint=1)
    sink.abort(aborted.transaction)
    server.kill()
    server.start()
    assert ids(client) == [0, 1, 2]
    assert sink.committed_checkpoints("shop") == {LINEAGE: 0}
    assert sink.commit(first) == CommitOutcome.COMMITTED
    assert sink.commit(aborted).state.value == "lost"
    assert ids(client) == [0, 1, 2]


def test_more_rows_than_lua_unpacks(sink: RedisSink, client: Any) -> None:
    """Its `unpack` ends at some 8,000 values."""
    assert sink.commit(pre_committed(sink, 20_000)) == CommitOutcome.COMMITTED
    assert ids(client) == list(range(20_000))


def test_a_server_without_memory_refuses_a_commit_as_a_whole(sink: RedisSink, client: Any) -> None:
    made = pre_committed(sink, 2000)
    client.config_set("maxmemory", "1mb")
    try:
        with pytest.raises(redis.OutOfMemoryError):
            sink.commit(made)
        assert ids(client) == []
        assert list(sink.in_doubt("shop")) == [made.transaction]
        assert sink.committed_checkpoints("shop") == {}
    finally:
        client.config_set("maxmemory", "0")
    assert sink.commit(made) == CommitOutcome.COMMITTED
    assert ids(client) == list(range(2000))


@pytest.mark.parametrize("kind", ["stream", "memory"])
def test_a_key_of_another_type_stops_a_commit_before_its_first_change(sink: RedisSink, client: Any, kind: str) -> None:
    made = pre_committed(sink, 3)
    key = STREAM if kind == "stream" else sink._key("memory", TransactionId.parse(made.transaction["id"]).job)
    client.set(key, "of somebody else")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        sink.commit(made)
    assert list(sink.in_doubt("shop")) == [made.transaction]
    client.delete(key)
    assert sink.commit(made) == CommitOutcome.COMMITTED
    assert ids(client) == [0, 1, 2]


def test_rows_go_to_the_stream_that_they_were_written_for(server: RedisServer, sink: RedisSink, client: Any) -> None:
    made = pre_committed(sink, 3)
    renamed = RedisSink(server.url, "other", name=sink.name)
    renamed.open()
    assert renamed.commit(made) == CommitOutcome.COMMITTED
    renamed.close()
    assert ids(client) == [0, 1, 2]
    assert not client.exists("other")


def test_jobs_outside_ascii_are_told_apart(sink: RedisSink) -> None:
    first, second = (pre_committed(sink, 1, job=job) for job in ("注文", "請求"))
    for job, mine, other in (("注文", first, second), ("請求", second, first)):
        assert list(sink.in_doubt(job)) == [mine.transaction]
        assert sink.owns(job, mine.transaction)
        assert not sink.owns(job, other.transaction)
    assert sink.commit(first) == CommitOutcome.COMMITTED
    assert sink.committed_checkpoints("請求") == {}


def test_purge_leaves_no_key_of_old_transactions(sink: RedisSink, client: Any) -> None:
    written(sink, 1, subtask=1)  # its task died
    sink.abort(pre_committed(sink, 1, subtask=2).transaction)
    for number in (0, 1):
        sink.commit(pre_committed(sink, 1, checkpoint=number))
    sink.purge(Checkpoint("shop", LINEAGE, 1, oldest_retained=1))
    newest = pre_committed(sink, 1, checkpoint=2)
    assert client.keys("tpc:rows:*") == [f"tpc:rows:{newest.transaction['id']}"]
    for key in client.keys("tpc:states:*") + client.keys("tpc:fingerprints:*"):
        assert sorted(TransactionId.parse(id).checkpoint for id in client.hkeys(key)) == [1, 2]
    assert sink.committed_checkpoints("shop") == {LINEAGE: 1}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_lacks_are_refused(sink: RedisSink, value: float) -> None:
    schema = pa.schema([("amount", pa.float64())])
    transaction = written(sink, 1)
    with pytest.raises(BadValue, match="NaN or an infinity"):
        sink.write(transaction, pa.record_batch([[value]], schema=schema))


def test_two_columns_of_a_name_are_refused(sink: RedisSink) -> None:
    """JSON would have one of them."""
    with pytest.raises(ConfigurationError, match="2 columns are named id"):
        sink.check(pa.schema([*SCHEMA, *SCHEMA]))


def test_a_cluster_is_refused() -> None:
    with RedisServer({"cluster-enabled": "yes"}) as server:
        sink = RedisSink(server.url, STREAM)
        sink.open()
        try:
            with pytest.raises(ConfigurationError, match="part of a cluster"):
                sink.check(SCHEMA)
        finally:
            sink.close()


def test_settings_that_lose_rows_are_told(sink: RedisSink, client: Any) -> None:
    assert sink.weaknesses() == []
    others = {"appendfsync": "everysec", "maxmemory-policy": "allkeys-lru"}
    before = {setting: client.config_get(setting)[setting] for setting in others}
    for setting, value in others.items():
        client.config_set(setting, value)
    try:
        assert sink.weaknesses() == [
            "appendfsync is 'everysec' and not 'always', so an acknowledged write may be lost in a crash",
            "maxmemory-policy is 'allkeys-lru' and not 'noeviction', so Redis may delete keys of this sink",
        ]
    finally:
        for setting, value in before.items():
            client.config_set(setting, value)


def test_an_account_that_may_not_see_the_settings(server: RedisServer, client: Any) -> None:
    client.acl_setuser("writer", enabled=True, passwords=["+sesame"], keys=["*"], commands=["+@all", "-config"])
    sink = RedisSink(server.url.replace("//", "//writer:sesame@"), STREAM)
    sink.open()
    [weakness] = sink.weaknesses()
    sink.close()
    assert weakness.startswith("Redis does not show its settings")
