"""Which change of a key is the last one, and what one key is, as the server has it."""

from __future__ import annotations

import contextlib
from typing import Any

import pyarrow as pa
import pytest

from sinks.errors import BadValue, ConfigurationError
from sinks.mysql import MySQLSink
from sinks.testing.table import COMMITTED, batch, checkpoint, pre_commit
from tests.mysql.play import Observer

SCHEMA = pa.schema([("id", pa.int64()), ("at", pa.string()), ("note", pa.string())])
COLLATIONS = {
    "mysql_server": ["utf8mb4_bin", "utf8mb4_general_ci", "utf8mb4_0900_as_cs", "utf8mb4_0900_bin", "utf16_bin"],
    "mariadb": [
        *("utf8mb4_bin", "utf8mb4_general_ci", "utf8mb4_uca1400_as_cs", "utf8mb4_uca1400_nopad_ai_cs"),
        *("utf8mb4_nopad_bin", "utf16_bin"),
    ],
}
EACH = [
    pytest.param(server, collation, id=f"{server} {collation}", marks=[pytest.mark.large] * (server == "mariadb"))
    for server, collations in COLLATIONS.items()
    for collation in [*collations, "", "longblob"]
]


@pytest.mark.parametrize(("mysql", "kind"), EACH, indirect=["mysql"])
def test_the_last_of_long_texts_wins_or_they_are_refused(db: Observer, kind: str) -> None:
    """`kind` is the collation of the table's column; without one the table has no such column."""
    declared = {"": "", "longblob": ", at longblob"}.get(
        kind, f", at longtext CHARACTER SET {kind.partition('_')[0]} COLLATE {kind}"
    )
    db.run(f"CREATE TABLE notes (id bigint PRIMARY KEY, note varchar(9) COLLATE utf8mb4_bin{declared})")
    schema = SCHEMA if kind != "longblob" else SCHEMA.set(1, pa.field("at", pa.binary()))
    sink = MySQLSink(db.dsn, "notes", mode="upsert", keys=["id"], order_by="at")
    winners, number = [], 0
    with contextlib.closing(sink):
        sink.check(schema)
        for letter in ("x", "😀"):
            for length in (100, 640, 1000, 1300, 1370, 2050, 3000, 4090, 5000):
                number += 1
                texts = {last: letter * length + last for last in "acBCb"}
                values = {last: text.encode() if kind == "longblob" else text for last, text in texts.items()}
                rows = [{"id": 1, "at": at, "note": last} for last, at in values.items()]
                staged = [
                    pre_commit(sink, batch(part, schema), checkpoint=number, subtask=subtask)
                    for subtask, part in enumerate((rows, rows[::-1]))
                ]
                try:
                    sink.validate_all(checkpoint(number), staged)
                except BadValue as refused:
                    assert 'order_by column "at" is longer than 4096 bytes' in str(refused)  # noqa: PT017
                    assert length > 100
                    continue
                assert sink.commit_all(checkpoint(number), staged) == [COMMITTED, COMMITTED]
                [(winner,)] = db.run("SELECT note FROM notes")
                winners.append((letter, length, winner))
    last = "c" if kind in ("", "longblob") or kind.endswith("_bin") else ("C" if kind.endswith("_cs") else "cC")
    assert [winner for winner in winners if winner[2] not in last] == []
    assert len(winners) >= 3


@pytest.mark.parametrize("kind", ["double", "float"])
def test_negative_zero_is_the_key_zero(db: Observer, kind: str) -> None:
    """MariaDB groups them apart."""
    schema = pa.schema([("id", pa.float32()), ("note", pa.string())])
    db.run(f"CREATE TABLE notes (id {kind} PRIMARY KEY, note text)")
    rows = [{"id": 0.0, "note": "a"}, {"id": 1.5, "note": "b"}], [{"id": -0.0, "note": "c"}]
    upsert: dict[str, Any] = {"mode": "upsert", "keys": ["id"]}
    for options, rule in ((upsert, "two changes of one key"), ({}, "unique index")):
        with contextlib.closing(MySQLSink(db.dsn, "notes", strategy="staged", **options)) as sink:
            sink.check(schema)
            staged = [pre_commit(sink, batch(part, schema), subtask=n) for n, part in enumerate(rows)]
            with pytest.raises(BadValue, match=rf"{rule}.*\(id\) = \(-?0\.0\) comes 2 times"):
                sink.validate_all(checkpoint(), staged)


def test_no_order_by_json(db: Observer) -> None:
    """The server would sort documents by nothing."""
    db.run("CREATE TABLE notes (id bigint PRIMARY KEY, at json)")
    with (
        contextlib.closing(MySQLSink(db.dsn, "notes", mode="upsert", keys=["id"], order_by="at")) as sink,
        pytest.raises(ConfigurationError, match="order_by names the column 'at', which is json"),
    ):
        sink.check(SCHEMA)
