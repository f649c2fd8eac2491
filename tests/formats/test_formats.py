from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pytest

from coordinator import describe_savepoint, restore_savepoint
from coordinator.operations.heartbeat import look_for_driver
from coordinator.operations.inspection.balance import take_balance
from coordinator.operations.savepoints.savepoint import list_savepoints
from coordinator.operations.statistics.model import load_history
from coordinator.storage import open_storage
from coordinator.store.encoding import FORMAT
from coordinator.store.job_store import JobStore
from tests.formats import HERE, WORLDS, World, batch, leave, pack, shapes, unpack

STORED = sorted(HERE.glob("format-*.json"))
GIVEN_UP = (0, 5)


@pytest.fixture(params=WORLDS)
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    kind, strategy = WORLDS[request.param]
    service = {"postgresql": "postgres", "mariadb": "mariadb"}.get(request.param.partition(" ")[0])
    with request.getfixturevalue(service).database() if service else nullcontext("") as dsn:
        yield kind(tmp_path, dsn, strategy)


@pytest.fixture(params=STORED, ids=lambda path: path.stem)
def world(request: pytest.FixtureRequest, empty: World) -> World:
    unpack(json.loads(request.param.read_text())[request.node.callspec.params["empty"]], empty)
    return empty


def other_rows(n: int) -> list[pa.Table]:
    return [table.set_column(0, "id", pa.array([-1, -2])) for table in batch(n)]


def expected(batches: int) -> list[int]:
    every = [id for n in range(batches) for table in batch(n) for id in table["id"].to_pylist()]
    return sorted(id for id in every if id not in GIVEN_UP)


def test_what_an_older_format_has_in_doubt_is_finished(world: World) -> None:
    """Where rows are staged, another transaction is lost by now. The query gives other rows, so that it is written
    again from the spool."""
    if world.strategy == "staged":
        assert world.ids() == expected(3)
        world.lose_one()
    world.run([*(other_rows(n) for n in range(4)), batch(4)])
    assert world.ids() == expected(5)


def test_what_an_older_format_says_to_operators(world: World) -> None:
    store = JobStore(open_storage(world.storage), "job")
    driver = look_for_driver(store)
    assert driver
    assert driver.sign.who.startswith("host host, process ")
    assert [[each.round for each in complete.rounds] for complete in store.history()] == [[0], [0], [0, 1]]
    assert [(loss.accepted[0].who, loss.accepted[0].why) for loss in store.losses([])] == [("ann", "gone")]
    assert {one.checkpoint_id for one in load_history(store, [])} >= {0, 1, 2}
    lines = take_balance(store, {"orders": world.sink()}, quick=True).lines
    assert [line.checkpoint for line in lines if line.verdict.value == "balanced"] == [2]


@pytest.mark.parametrize("empty", ["sqlite staged"], indirect=True)
def test_a_savepoint_of_an_older_format_is_restored(world: World) -> None:
    [savepoint] = list_savepoints(f"file://{world.folder / 'savepoints'}")
    assert describe_savepoint(savepoint.uri).checkpoint_id == 1
    query, storage = world.folder / "query", world.folder / "storage"
    shutil.rmtree(query)
    shutil.rmtree(storage)
    restore_savepoint(savepoint.uri, str(query), storage=world.storage, allow_later_checkpoints=True)
    world.run([batch(n) for n in range(4)])
    assert sorted(set(world.ids())) == expected(4)


def test_what_this_version_writes_is_what_is_stored_of_its_format(request: pytest.FixtureRequest, empty: World) -> None:
    """A field that older readers do not know takes a new format: raise `encoding.FORMAT`, then store what later ones
    have to read by `python -m tests.formats`. Before a format is released, it may be stored anew."""
    leave(empty)
    stored = json.loads((HERE / f"format-{FORMAT}.json").read_text())[request.node.callspec.params["empty"]]
    assert shapes(pack(empty)) == shapes(stored)
    assert max(int(path.stem.partition("-")[2]) for path in STORED) == FORMAT
