"""What each released format of records has left behind, with something in doubt, as files that later versions read.

`python -m tests.formats` stores what this version leaves, as `format-N.json` beside this file; N is `encoding.FORMAT`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import socket
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from coordinator import (
    CheckpointConfig,
    CheckpointCoordinator,
    CheckpointListener,
    Replay,
    Step,
    restore_savepoint,
)
from coordinator.operations import operator_decisions
from sinks.base import Sink
from sinks.delta import DeltaSink
from sinks.mysql import MySQLSink, xa
from sinks.postgres import PostgresSink
from sinks.sql.sink import TableSink
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing import KILLED, Driver, LocalQuery
from sinks.testing.driver import KillAt
from sinks.testing.table import Database
from tests.mysql.observer import Observer as MySQLObserver
from tests.postgres.observer import Observer as PostgresObserver

HERE = Path(__file__).parent
FOLDERS = ("storage", "spool", "query", "savepoints", "orders")
_SEALED = re.compile(r"storage/|savepoints/.*/_metadata|query/_restored")
_BINARY = re.compile(r"spool/|savepoints/.*/\d+$|orders/.*\.parquet$")


def batch(n: int) -> list[pa.Table]:
    return [pa.table({"id": pa.array([10 * n + p, 10 * n + p + 5]), "name": [f"n{n}", None]}) for p in range(3)]


class World:
    """A job into a database, whose rows are spooled."""

    make: Callable[..., TableSink]
    observe: Callable[[str], Database]

    def __init__(self, folder: Path, dsn: str, strategy: str) -> None:
        self.folder, self.dsn, self.strategy = folder, dsn, strategy

    def sink(self) -> Sink:
        return self.make(self.dsn, "orders", strategy=self.strategy, create_table=True)

    @property
    def storage(self) -> str:
        return f"file://{self.folder / 'storage'}"

    @property
    def config(self) -> CheckpointConfig:
        return CheckpointConfig(replay=Replay.SPOOL, spool_dir=f"file://{self.folder / 'spool'}")

    def coordinator(self) -> CheckpointCoordinator:
        return CheckpointCoordinator("job", [self.sink()], self.storage, self.config)

    def run(self, input: Sequence[Sequence[pa.Table]]) -> None:
        with self.coordinator() as coordinator:
            LocalQuery(self.folder / "query", input).run(coordinator)

    def killed(self, batches: int, *listeners: CheckpointListener) -> None:
        input = [batch(n) for n in range(batches)]
        query = self.folder / "query"
        driver = Driver("job", self.sink(), self.storage, query, input, listeners, self.config)
        assert driver.run() == KILLED

    def lose_one(self) -> None:
        with closing(self.sink()) as sink:
            sink.abort(min(sink.in_doubt("job"), key=str))

    def ids(self) -> list[int]:
        with closing(self.observe(self.dsn)) as db:
            return db.ids()

    # ------------------------------------------------------------------ the database as statements
    def dumped(self) -> list[str]:
        """And what is prepared, which is committed for it, one after the other."""
        with closing(self.observe(self.dsn)) as db:
            made = [text for table in self._tables(db) for text in self._definition(db, table)]
            before = self._rows(db)
            made += before
            for begin, commit, *prepare in self._prepared(db):
                db.run(commit)
                rows = self._rows(db)
                made += [begin, *(row for row in rows if row not in before), *prepare]
                before = rows
        return made

    def load(self, statements: Sequence[str]) -> None:
        with closing(self.observe(self.dsn)) as db:
            for statement in statements:
                db.run(statement)

    def _tables(self, db: Database) -> list[str]:
        return ["orders", "tpc_ledger", *db.staging()]

    def _rows(self, db: Database) -> list[str]:
        return [text for table in self._tables(db) for text in self._inserts(db, table)]

    def _definition(self, db: Database, table: str) -> Iterator[str]:
        raise NotImplementedError

    def _inserts(self, db: Database, table: str) -> Iterator[str]:
        raise NotImplementedError

    def _prepared(self, db: Database) -> Iterator[tuple[str, ...]]:
        """Of each transaction: how one begins, how it is committed, how one is prepared."""
        raise NotImplementedError

    @property
    def names(self) -> dict[str, str]:
        """What is another one in each run, and what stands for it in what is stored."""
        return {self.dsn.rpartition("/")[2].partition("?")[0]: "DATABASE"}


class Delta(World):
    """The table is a folder, `orders`."""

    @property
    def _table(self) -> str:
        return str(self.folder / "orders")

    def sink(self) -> Sink:
        return DeltaSink(self._table, create_table=True)

    def ids(self) -> list[int]:
        return sorted(DeltaTable(self._table).to_pyarrow_table()["id"].to_pylist())

    def dumped(self) -> list[str]:
        return []

    def load(self, statements: Sequence[str]) -> None:
        assert not statements

    @property
    def names(self) -> dict[str, str]:
        return {self._table: "TABLE"}


class SQLite(World):
    make = SqlAlchemySink

    def __init__(self, folder: Path, dsn: str, strategy: str) -> None:
        super().__init__(folder, f"sqlite:///{folder / 'rows.db'}", strategy)

    def sink(self) -> Sink:
        return self.make(self.dsn, "orders", create_table=True)

    def ids(self) -> list[int]:
        with closing(sqlite3.connect(self.folder / "rows.db")) as db:
            return [id for (id,) in db.execute("SELECT id FROM orders ORDER BY id")]

    def dumped(self) -> list[str]:
        with closing(sqlite3.connect(self.folder / "rows.db")) as db:
            return list(db.iterdump())

    def load(self, statements: Sequence[str]) -> None:
        with closing(sqlite3.connect(self.folder / "rows.db")) as db:
            db.executescript("\n".join(statements))

    @property
    def names(self) -> dict[str, str]:
        return {}


class Postgres(World):
    make = PostgresSink
    observe = PostgresObserver

    def _definition(self, db: Database, table: str) -> Iterator[str]:
        columns = db.run(
            "SELECT concat_ws(' ', quote_ident(attname), format_type(atttypid, atttypmod), 'COLLATE '"
            " || quote_ident(collname), CASE WHEN attnotnull THEN 'NOT NULL' END, 'DEFAULT '"
            " || pg_get_expr(adbin, adrelid)) FROM pg_attribute"
            " JOIN pg_type t ON t.oid = atttypid LEFT JOIN pg_attrdef ON (adrelid, adnum) = (attrelid, attnum)"
            " LEFT JOIN pg_collation c ON c.oid = attcollation AND attcollation <> typcollation"
            f" WHERE attrelid = '{table}'::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
        )
        keys = db.run(
            "SELECT pg_get_constraintdef(oid) FROM pg_constraint"
            f" WHERE conrelid = '{table}'::regclass AND contype = 'p'"
        )
        yield f"CREATE TABLE {table} ({', '.join(text for (text,) in columns + keys)})"
        [(comment,)] = db.run(f"SELECT quote_literal(obj_description('{table}'::regclass))")
        if comment:
            yield f"COMMENT ON TABLE {table} IS {comment}"

    def _inserts(self, db: Database, table: str) -> Iterator[str]:
        names = db.run(
            f"SELECT string_agg(format('quote_nullable(%I::text)', attname), ', ' ORDER BY attnum) FROM pg_attribute"
            f" WHERE attrelid = '{table}'::regclass AND attnum > 0 AND NOT attisdropped"
        )
        for (row,) in db.run(f"SELECT concat_ws(', ', {names[0][0]}) FROM {table} ORDER BY 1"):
            yield f"INSERT INTO {table} VALUES ({row})"

    def _prepared(self, db: Database) -> Iterator[tuple[str, ...]]:
        for gid in db.prepared():
            yield "BEGIN", f"COMMIT PREPARED '{gid}'", f"PREPARE TRANSACTION '{gid}'"


class MySQL(World):
    make = MySQLSink
    observe = MySQLObserver

    def _definition(self, db: Database, table: str) -> Iterator[str]:
        [(_, text)] = db.run(f"SHOW CREATE TABLE {table}")
        yield str(text)

    def _inserts(self, db: Database, table: str) -> Iterator[str]:
        [(names,)] = db.run(
            "SELECT group_concat('QUOTE(`', column_name, '`)' ORDER BY ordinal_position) FROM"
            f" information_schema.columns WHERE table_schema = DATABASE() AND table_name = '{table}'"
        )
        for (row,) in db.run(f"SELECT concat_ws(', ', {names}) FROM {table} ORDER BY 1"):
            yield f"INSERT INTO {table} VALUES ({row})"

    def _prepared(self, db: Database) -> Iterator[tuple[str, ...]]:
        with closing(self.sink()) as sink:
            for identity in sink.in_doubt("job"):
                if "gtrid" in identity:
                    name = f"'{identity['gtrid']}', '{identity['bqual']}', FORMAT"
                    commit = f"XA COMMIT {xa.xid(identity, self._schema)}"
                    yield f"XA START {name}", commit, f"XA END {name}", f"XA PREPARE {name}"

    def load(self, statements: Sequence[str]) -> None:
        """A connection forgets what it has prepared when it ends."""
        super().load([text.replace(", FORMAT", f", {xa.format_of(self._schema)}") for text in statements])

    @property
    def _schema(self) -> str:
        return next(iter(self.names))


WORLDS: Mapping[str, tuple[type[World], str]] = {
    "delta": (Delta, "prepared"),
    "sqlite staged": (SQLite, "staged"),
    "postgresql prepared": (Postgres, "prepared"),
    "postgresql staged": (Postgres, "staged"),
    "mariadb xa": (MySQL, "xa"),
    "mariadb staged": (MySQL, "staged"),
}


class LosesOne(CheckpointListener):
    """Of a checkpoint, as soon as it is decided."""

    def __init__(self, world: World, checkpoint: int) -> None:
        self.world, self.checkpoint = world, checkpoint

    def on_step(self, step: Step, checkpoint_id: int, facts: Mapping[str, Any]) -> None:
        if (step, checkpoint_id) == (Step.COMPLETE, self.checkpoint):
            self.world.lose_one()


def leave(world: World) -> None:
    """An accepted loss of checkpoint 0; a savepoint of 1, which was restored; 3 was decided, and a replay
    of it, which is not visible."""
    world.killed(1, KillAt(Step.COMPLETE))
    world.lose_one()
    with world.coordinator() as coordinator:
        operator_decisions.accept_loss(coordinator._protocol, [("orders", 0)], who="ann", why="gone")
    world.run([batch(n) for n in range(2)])
    query = str(world.folder / "query")
    with world.coordinator() as coordinator:
        savepoint = coordinator.trigger_savepoint(f"file://{world.folder / 'savepoints'}", query)
    shutil.rmtree(query)
    restore_savepoint(savepoint.uri, query, storage=world.storage)
    world.run([batch(n) for n in range(3)])
    world.killed(4, LosesOne(world, 3), KillAt(Step.REPLAY_COMPLETE))


def pack(world: World) -> dict[str, Any]:
    """Without the names of this machine."""
    files, names = {}, world.names | {str(world.folder): "/job", socket.gethostname(): "host"}
    for path in sorted(path for folder in FOLDERS for path in (world.folder / folder).rglob("*") if path.is_file()):
        name, data = path.relative_to(world.folder).as_posix(), path.read_bytes()
        if _BINARY.match(name):
            files[name] = base64.b64encode(data).decode()
        elif not name.endswith(".log"):
            files[name] = (_renamed if _SEALED.match(name) else _replaced)(data.decode(), names)
    return {"files": files, "sql": [_replaced(text, names) for text in world.dumped()]}


def unpack(packed: Mapping[str, Any], world: World) -> None:
    names = {stored: name for name, stored in world.names.items()}
    for name, text in packed["files"].items():
        path = world.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not _BINARY.match(name) and any(stored in text for stored in names):
            text = (_renamed if _SEALED.match(name) else _replaced)(text, names)
        path.write_bytes(base64.b64decode(text) if _BINARY.match(name) else text.encode())
    world.load([_replaced(text, names) for text in packed["sql"]])


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """What is sealed, with other names in it, under the format that it has."""
    sealed = json.loads(text)
    body = _replaced(json.dumps(sealed["body"], sort_keys=True), names)
    checksum = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({"format": sealed["format"], "sha256": checksum, "body": json.loads(body)})


def _replaced(text: str, names: Mapping[str, str]) -> str:
    for name, other in names.items():
        text = text.replace(name, other)
    return text


ADDED = {("generation", "token")}
"""By folder, fields that are newer than the format: its first versions pass over them, and they may be missing."""


def shapes(packed: Mapping[str, Any]) -> dict[str, set[str]]:
    """By what a file is, the names of all fields in it; and the statements that make tables."""
    found: dict[str, set[str]] = {}
    for name, text in packed["files"].items():
        if _SEALED.match(name):
            kind = re.sub(r"[^/]*\d[^/]*", "*", name)
            names = _names(json.loads(text)["body"])
            added = {field for folder, field in ADDED if f"/{folder}/" in name}
            found.setdefault(kind, set()).update(names - added)
    made = [text[: text.rindex(")")] for text in packed["sql"] if text.startswith("CREATE")]
    return found | {"tables": {re.sub(r"tpc_[0-9a-f]{20}|tpc\.[a-z0-9.-]+", "tpc_*", text) for text in made}}


def _names(value: Any, before: str = "") -> set[str]:
    """Of a body; what is below lists of objects, too."""
    names = set()
    for name, inner in value.items():
        names.add(before + name)
        for one in [inner] if name in ("sign", "fingerprint", "proof") else inner if isinstance(inner, list) else []:
            if isinstance(one, dict):
                names |= _names(one, f"{before}{name}.")
    return names
