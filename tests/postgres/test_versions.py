"""What earlier states of version 0.1 have left, with something in doubt, is finished by this one: claims without signs
of life, records without the fields that came later, ledgers without sums, staged rows without a word on their
columns."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coordinator.balance import Verdict, take_balance
from coordinator.errors import CorruptRecord
from coordinator.heartbeat import State, look_for_driver
from coordinator.protocol.records import CheckpointStore
from coordinator.storage import open_storage
from coordinator.wording import of_driver
from sinks.postgres import PostgresSink
from sinks.sql.options import MergeOptions
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing.table_crashes import run
from tests.postgres.play import Observer

JOB, LINEAGE, SINK = "job-5e8c990220", "c8e5a274", "orders-1c168adb00"
LEDGER_ID = "63c962fc19344682a71a2815190836c9"
QUERY = "99f5e5ea-6ae5-4dfe-9275-ff23ef81a297"
CLAIM: Mapping[str, Any] = {"job": "job", "lineage": LINEAGE, "address": ""}
RECORDS: tuple[Mapping[str, Any], ...] = (
    {"triggered_at": 1795407041184, "completed_at": 1795407041317},
    {
        "triggered_at": 1795407041378,
        "completed_at": 1795407041475,
        "guarantee": "exactly-once: yes",
        "restored_from": "",
        "accepted": [],
        "planned_at": 0,
    },
)
"""What is not alike in the records of checkpoints 0, by a still older state, and 1."""
HASHES = (("99a32d144585857e", "7fc574f5dc24e474"), ("ccc8c3ce8284c59f", "acccb51679db222a"))
PROOF: Mapping[str, Any] = {"ledger": ["public", "tpc_ledger"], "ledger_id": LEDGER_ID}
INPUT = [
    [
        pa.table({"id": pa.array(ids, pa.int64()), "name": [f"n{id}" if id % 3 else None for id in ids]})
        for ids in ([10 * n, 10 * n + 1], [10 * n + 2, 10 * n + 3])
    ]
    for n in range(3)
]
IDS = [10 * n + i for n in range(3) for i in range(4)]
LEDGER = (
    'CREATE TABLE tpc_ledger (transaction_id text COLLATE "C" PRIMARY KEY, committed boolean NOT NULL, job text'
    " NOT NULL, lineage text NOT NULL, sink text NOT NULL, checkpoint bigint NOT NULL,"
    " at timestamptz NOT NULL DEFAULT now())"
)


def transaction(checkpoint: int, subtask: int, attempt: int | None = None) -> str:
    return f"tpc.{JOB}.{LINEAGE}.{checkpoint}.{SINK}.{subtask}.g1r0t0a{subtask + 1 if attempt is None else attempt}"


def staging(transaction_id: str) -> str:
    return f"tpc_{hashlib.sha256(transaction_id.encode()).hexdigest()[:20]}"


def in_ledger(*transactions: str) -> str:
    """A statement."""
    rows = [f"('{name}', true, '{JOB}', '{LINEAGE}', '{SINK}', {name.split('.')[3]})" for name in transactions]
    return (
        f"INSERT INTO tpc_ledger (transaction_id, committed, job, lineage, sink, checkpoint) VALUES {', '.join(rows)}"
    )


def values(checkpoint: int, subtask: int) -> str:
    rows = INPUT[checkpoint][subtask].to_pylist()
    return ", ".join(f"({row['id']}, {repr(row['name']) if row['name'] else 'NULL'})" for row in rows)


def leave(folder: Path, identities: Mapping[tuple[int, int], Mapping[str, str]], proof: Mapping[str, Any]) -> None:
    """Storage, after the record of checkpoint 1 and before its commits; and the query's logs."""

    def put(key: str, body: Mapping[str, Any]) -> None:
        text = json.dumps(body, sort_keys=True)
        path = folder / "storage" / JOB / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"format": 1, "sha256": hashlib.sha256(text.encode()).hexdigest(), "body": body}))

    put("generation/0000000001", CLAIM)
    for n, more in enumerate(RECORDS):
        committables = [
            {
                "sink": "orders",
                "subtask": subtask,
                "transaction": identities[n, subtask],
                "proof": proof,
                "fingerprint": {"rows": 2, "hash": HASHES[n][subtask]},
            }
            for subtask in range(2)
        ]
        record = {
            "job": "job",
            "lineage": LINEAGE,
            "checkpoint_id": n,
            "round": 0,
            "generation": 1,
            "query_id": QUERY,
            "offsets": [f'{{"end":{n}}}'],
            "partitions": {"orders": 2},
            "committables": committables,
            "mode": "exactly_once",
            "rows": {"orders": 4},
        }
        put(f"{LINEAGE}/checkpoint/{n:020d}.000000", {**record, **more})
    for log, numbers in (("offsets", (0, 1)), ("commits", (0,))):
        (folder / "query" / log).mkdir(parents=True)
        for n in numbers:
            (folder / "query" / log / str(n)).write_text(f'v1\n{{}}\n{{"end":{n}}}' if log == "offsets" else "")
    (folder / "query" / "metadata").write_text(json.dumps({"id": QUERY}))


def store(folder: Path) -> CheckpointStore:
    return CheckpointStore(open_storage(f"file://{folder / 'storage'}"), "job")


@pytest.fixture
def db(pg_database: str) -> Iterator[Observer]:
    """With checkpoint 0."""
    with closing(Observer(pg_database)) as db:
        db.run("CREATE TABLE orders (id bigint NOT NULL, name text)")
        db.run(LEDGER)
        db.run(f"INSERT INTO tpc_ledger VALUES ('ledger', true, '-', '{LEDGER_ID}', '-', 0)")
        for subtask in range(2):
            db.run("BEGIN")
            db.run(f"INSERT INTO orders VALUES {values(0, subtask)}")
            db.run(in_ledger(transaction(0, subtask)))
            db.run("COMMIT")
        yield db


def test_prepared_transactions(tmp_path: Path, pg_database: str, db: Observer) -> None:
    """One is in doubt, one was rolled back from outside, and one was of a task that Spark tried again."""
    names = {(n, subtask): {"gid": transaction(n, subtask)} for n in range(2) for subtask in range(2)}
    leave(tmp_path, names, {**PROOF, "xid": 4_000_000_000})
    orphan = transaction(1, 1, attempt=9)
    for name, rows in ((transaction(1, 0), values(1, 0)), (orphan, "(99, 'twice')")):
        db.run("BEGIN")
        db.run(f"INSERT INTO orders VALUES {rows}")
        db.run(in_ledger(name))
        db.run(f"PREPARE TRANSACTION '{name}'")
    sink = PostgresSink(pg_database, "orders", strategy="prepared")
    driver = look_for_driver(store(tmp_path))
    assert driver
    assert driver.state is State.UNKNOWN
    assert "an older version" in of_driver(driver)
    run(tmp_path, sink, INPUT)
    assert (db.ids(), db.prepared()) == (IDS, [])
    told = db.ledger()
    assert [told.get(transaction(1, subtask)) for subtask in range(2)] == [True, False]
    assert sum(told.values()) == 6
    assert take_balance(store(tmp_path), {"orders": sink}).verdict is Verdict.BALANCED


def test_staged_rows(tmp_path: Path, pg_database: str, db: Observer) -> None:
    """Those of one participant were dropped by somebody, so the others wait until they are written again."""
    ids = {(n, subtask): transaction(n, subtask) for n in range(2) for subtask in range(2)}
    leave(tmp_path, {at: {"transaction_id": id, "table": f"public.{staging(id)}"} for at, id in ids.items()}, PROOF)
    table = staging(ids[1, 0])
    db.run(f"CREATE TABLE {table} (id bigint NOT NULL, name text)")
    db.run(f"COMMENT ON TABLE {table} IS '{ids[1, 0]}'")
    db.run(f"INSERT INTO {table} VALUES {values(1, 0)}")
    sink = PostgresSink(pg_database, "orders", strategy="staged")
    run(tmp_path, sink, INPUT)
    assert (db.ids(), db.staging()) == (IDS, [])
    assert db.ledger()[ids[1, 1]] is False
    assert take_balance(store(tmp_path), {"orders": sink}).verdict is Verdict.BALANCED


def test_staged_rows_of_any_database(tmp_path: Path) -> None:
    ids = {(n, subtask): transaction(n, subtask) for n in range(2) for subtask in range(2)}
    table = "tpc_cffff3b93d1b1c31460f"
    identities = {at: {"transaction_id": id, "staging": table} for at, id in ids.items()}
    leave(tmp_path, identities, {"ledger": "tpc_ledger", "ledger_id": LEDGER_ID})
    with closing(sqlite3.connect(tmp_path / "rows.db", isolation_level=None)) as db:
        db.executescript(
            f"""
            CREATE TABLE orders (id bigint NOT NULL, name text);
            INSERT INTO orders VALUES {values(0, 0)}, {values(0, 1)};
            CREATE TABLE {table} (tpc_participant VARCHAR(32) NOT NULL, id BIGINT NOT NULL, name TEXT);
            CREATE INDEX {table}_by ON {table} (tpc_participant);
            CREATE TABLE tpc_ledger (
                transaction_id VARCHAR(199) NOT NULL, committed BOOLEAN, job VARCHAR(64) NOT NULL,
                lineage VARCHAR(64) NOT NULL, sink VARCHAR(64) NOT NULL, checkpoint BIGINT NOT NULL,
                staging VARCHAR(64), at DATETIME DEFAULT CURRENT_TIMESTAMP NOT NULL, PRIMARY KEY (transaction_id));
            INSERT INTO tpc_ledger VALUES ('ledger', 1, '-', '{LEDGER_ID}', '-', 0, NULL, '2026-11-22 00:00:00');
            {in_ledger(*ids.values())};
            UPDATE tpc_ledger SET staging = '{table}' WHERE checkpoint >= 0 AND sink <> '-';
            UPDATE tpc_ledger SET committed = NULL WHERE checkpoint = 1;
            """
        )
        for subtask in range(2):
            tag = staging(ids[1, subtask]).removeprefix("tpc_")
            db.execute(f"INSERT INTO {table} SELECT '{tag}', * FROM (VALUES {values(1, subtask)})")
        sink = SqlAlchemySink(f"sqlite:///{tmp_path / 'rows.db'}", "orders", strategy="staged")
        run(tmp_path, sink, INPUT)
        assert [id for (id,) in db.execute("SELECT id FROM orders ORDER BY 1")] == IDS
        assert db.execute("SELECT count(*) FROM tpc_ledger WHERE committed AND sink <> '-'").fetchone() == (6,)
    assert take_balance(store(tmp_path), {"orders": sink}).verdict is Verdict.UNTOLD  # as that ledger has no sums


def test_a_claim_of_before_lineages_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CLAIM", {"job": "job"})
    leave(tmp_path, {(n, subtask): {"gid": transaction(n, subtask)} for n in range(2) for subtask in range(2)}, PROOF)
    with pytest.raises(
        CorruptRecord, match=r"generation/0000000001 .* lacks or misuses a field: KeyError\('lineage'\)"
    ):
        store(tmp_path).claim_generation()


def test_options_are_told_in_committables_as_ever() -> None:
    """By another text, what is in doubt would count as written for another target."""
    options = MergeOptions("upsert", ("id", "day"), "version", "deleted", keep_newer=True)
    assert str(MergeOptions()) == "append"
    assert str(options) == "upsert by id, day; the last by version; deletes by deleted; newer rows stay"
