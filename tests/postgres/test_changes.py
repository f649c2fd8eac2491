"""Tables that change while the query runs: rows arrive as they are, or the query stops with what to do."""

from __future__ import annotations

import datetime as dt
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from coordinator import Step
from sinks.errors import BadValue, ConfigurationError, SchemaMismatch, SinkError, TargetChanged
from sinks.postgres import PostgresSink
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing.conformance import example_input, ids
from sinks.testing.servers.postgres import PostgresService
from sinks.testing.table import (
    COMMITTED,
    SCHEMA,
    batch,
    checkpoint,
    context,
    eventually,
    pre_commit,
    rows_of,
    why_unknown,
)
from sinks.testing.table_crashes import At, run
from sinks.transaction import Fingerprint
from tests.postgres.observer import Observer, held

NUMBERS = pa.schema([("id", pa.int64()), ("amount", pa.float64())])


@pytest.fixture
def sink(db: Observer) -> Iterator[PostgresSink]:
    db.run("ALTER TABLE orders DROP name, ADD amount double precision")
    sink = PostgresSink(db.dsn, "orders", strategy="prepared", lock_timeout=300)
    sink.check(NUMBERS)
    yield sink
    sink.close()


def numbers(*rows: tuple[int, float]) -> pa.RecordBatch:
    return batch([{"id": id, "amount": amount} for id, amount in rows], NUMBERS)


# ---------------------------------------------------------------------- prepared: types that the participant sees
def test_rows_go_out_for_the_types_that_the_table_has_now(db: Observer, sink: PostgresSink) -> None:
    db.run("ALTER TABLE orders ALTER id TYPE numeric")
    committable = pre_commit(sink, numbers((20, 1.5)))
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    assert db.visible() == [(Decimal(20), 1.5)]


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE orders ALTER amount TYPE integer",
        "DROP TABLE orders; CREATE TABLE orders (id bigint, amount integer)",
    ],
)
def test_rows_that_do_not_fit_any_more_are_refused(db: Observer, sink: PostgresSink, change: str) -> None:
    db.run(change)
    with pytest.raises(SchemaMismatch, match='"amount": double does not go into integer: cast it'):
        pre_commit(sink, numbers((20, 1.0)))
    assert db.pending() == 0
    assert db.visible() == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("ALTER TABLE orders RENAME amount TO price", r'"amount" of the batch is not in the table'),
        ("ALTER TABLE orders ADD at timestamp NOT NULL", r'"at" of the table is NOT NULL without default'),
        ("DROP TABLE orders", "found the table changed"),
        (
            "DROP TABLE orders; CREATE VIEW orders AS SELECT 1 AS id, 2 AS amount",
            "a view|does not go into integer",
        ),
    ],
)
def test_other_changes_are_told(db: Observer, sink: PostgresSink, change: str, reason: str) -> None:
    db.run(change)
    with pytest.raises(ConfigurationError, match=reason):
        pre_commit(sink, numbers((20, 1.0)))
    assert db.pending() == 0


def test_a_change_that_is_just_being_made_is_waited_for(db: Observer, sink: PostgresSink) -> None:
    """Types are read under the lock, not before it."""
    written: list[Any] = []
    with held(db.dsn, "ALTER TABLE orders ALTER id TYPE numeric") as other:
        task = threading.Thread(target=lambda: written.append(pre_commit(sink, numbers((20, 1.5)))))
        task.start()
        waiting = "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'orders'::regclass"
        eventually(lambda: bool(db.run(waiting)))
        other.commit()
        task.join()
    assert sink.commit_all(checkpoint(), written) == [COMMITTED]
    assert db.visible() == [(Decimal(20), 1.5)]


def test_the_types_stay_until_the_participant_ends(db: Observer, sink: PostgresSink) -> None:
    transaction = sink.begin_transaction(context(sink, schema=NUMBERS))
    with pytest.raises(psycopg.errors.LockNotAvailable):
        db.run("SET lock_timeout = 100; ALTER TABLE orders ALTER id TYPE numeric")
    sink.write(transaction, numbers((20, 1.5)))
    assert sink.commit_all(checkpoint(), [sink.pre_commit(transaction)]) == [COMMITTED]
    assert db.visible() == [(20, 1.5)]


@pytest.mark.parametrize("strategy", ["prepared", "staged"])
def test_rounding_is_refused(db: Observer, strategy: Any) -> None:
    db.run("ALTER TABLE orders ADD price numeric(5,2), ADD at timestamp(0)")
    schema = pa.schema([("id", pa.int64()), ("price", pa.decimal128(10, 3)), ("at", pa.timestamp("us"))])
    rows = batch([{"id": 1, "price": Decimal("1.125"), "at": dt.datetime(2026, 1, 1, 0, 0, 0, 600_000)}], schema)
    sink = PostgresSink(db.dsn, "orders", strategy=strategy)
    sink.check(schema)
    with pytest.raises(BadValue, match=r'row 1, column "price": .*rounded to numeric\(5,2\): cast it in Spark'):
        pre_commit(sink, rows)
    sink.close()


# ---------------------------------------------------------------------- staged: before the decision, and after it
CHANGES = {
    "renamed": ("RENAME amount TO price", 'no column "amount" any more: name it so again', "RENAME price TO amount"),
    "dropped": ("DROP amount", 'no column "amount" any more', "ADD amount double precision"),
    "type": (
        "ALTER amount TYPE integer",
        r"was double precision and is integer: change it back",
        "ALTER amount TYPE double precision",
    ),
    "check": ("ADD CHECK (id < 0)", "orders_id_check", "DROP CONSTRAINT orders_id_check"),
    "not null": ("ALTER amount SET NOT NULL", '"amount"', "ALTER amount DROP NOT NULL"),
    "unique": ("ADD CONSTRAINT one UNIQUE (id)", '"one".* (7|twice|2 times)', "DROP CONSTRAINT one"),
    "new column": ("ADD more integer NOT NULL", '"more" is NOT NULL.*give it a default', "ALTER more SET DEFAULT 0"),
    "gone": ("RENAME TO elsewhere", "not there any more|there is no table", "elsewhere RENAME TO orders"),
    "privilege": ("", "GRANT INSERT ON", ""),
    "policy": ("ENABLE ROW LEVEL SECURITY", "row-level security", "DISABLE ROW LEVEL SECURITY"),
}


@pytest.fixture
def writer(db: Observer) -> Iterator[str]:
    """A role that is no superuser."""
    role = f"writer_{db.run('SELECT current_database()')[0][0]}"
    db.run(f"CREATE ROLE {role}; GRANT CREATE, USAGE ON SCHEMA public TO {role}; GRANT ALL ON orders TO {role}")
    yield role
    db.run(f"DROP OWNED BY {role}; DROP ROLE {role}")


def staging(db: Observer, role: str, **merge: Any) -> PostgresSink:
    as_role = {"options": f"-c role={role}"}
    return PostgresSink(db.dsn, "orders", strategy="staged", lock_timeout=5, connect_options=as_role, **merge)


def change(db: Observer, role: str, name: str, *, back: bool = False) -> None:
    what = CHANGES[name][2 if back else 0]
    if name == "privilege":
        db.run(f"GRANT INSERT ON orders TO {role}" if back else f"REVOKE INSERT ON orders FROM {role}")
    else:
        db.run(f"ALTER TABLE {'' if what.startswith('elsewhere') else 'orders '}{what}")


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_refused_before_the_decision_or_told_after_it_and_mended(
    db: Observer, writer: str, name: str
) -> None:
    db.run("ALTER TABLE orders DROP name, ADD amount double precision")
    sink = staging(db, writer)
    sink.check(NUMBERS)
    rows = batch([{"id": 7, "amount": 1.5}, {"id": 7, "amount": None}], NUMBERS)
    committables = [pre_commit(sink, rows)]

    change(db, writer, name)
    with pytest.raises(SinkError, match=CHANGES[name][1]):
        sink.validate_all(checkpoint(), committables)
    sink.close()

    for restarted in (sink, staging(db, writer)):  # the driver that decided, and one that starts anew
        [outcome] = restarted.commit_all(checkpoint(), committables)
        reason = why_unknown(outcome)
        if name != "unique":  # its two rows are told by the constraint itself
            assert re.search(CHANGES[name][1], reason), reason
        assert committables[0].transaction["table"] in reason
        assert "is unknown" not in reason
        if name != "gone":
            assert db.run("SELECT count(*) FROM orders") == [(0,)]
        restarted.close()

    change(db, writer, name, back=True)
    mended = staging(db, writer)
    for _ in range(2):
        assert mended.commit_all(checkpoint(), committables) == [COMMITTED]
    assert db.run("SELECT id FROM orders") == [(7,), (7,)]
    assert db.pending() == 0
    mended.close()


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize("change", ["DROP amount", "RENAME amount TO price"])
def test_a_staging_table_that_somebody_alters_moves_no_nulls(db: Observer, mode: Any, change: str) -> None:
    db.run("ALTER TABLE orders DROP name, ADD amount double precision, ADD PRIMARY KEY (id)")
    sink = PostgresSink(db.dsn, "orders", strategy="staged", mode=mode, keys=["id"] if mode == "upsert" else [])
    sink.check(NUMBERS)
    committables = [pre_commit(sink, numbers((n, 1.5)), subtask=n) for n in range(2)]
    db.run(f"ALTER TABLE {committables[0].transaction['table']} {change}")
    with pytest.raises(SinkError, match="was altered by somebody"):
        sink.validate_all(checkpoint(), committables)
    reason = why_unknown(sink.commit_all(checkpoint(), committables)[0])
    assert "was altered by somebody" in reason
    assert "Nothing was moved" in reason
    assert db.visible() == []
    sink.close()


def test_staging_tables_have_the_types_of_now(db: Observer) -> None:
    db.run("ALTER TABLE orders DROP name, ADD amount double precision")
    sink = PostgresSink(db.dsn, "orders", strategy="staged")
    sink.check(NUMBERS)
    db.run("ALTER TABLE orders ALTER id TYPE numeric")
    committables = [pre_commit(sink, numbers((20, 1.5)))]
    sink.validate_all(checkpoint(), committables)
    assert sink.commit_all(checkpoint(), committables) == [COMMITTED]
    assert db.visible() == [(Decimal(20), 1.5)]
    db.run("ALTER TABLE orders ALTER amount TYPE date USING NULL")
    with pytest.raises(SchemaMismatch, match="double does not go into date"):
        pre_commit(sink, numbers((20, 1.5)))
    sink.close()


def test_what_shows_with_the_first_row_only_is_found_before_the_decision(db: Observer, writer: str) -> None:
    db.run("ALTER TABLE orders ADD number bigserial")
    sink = staging(db, writer)
    sink.check(SCHEMA)
    committables = [pre_commit(sink, rows_of(1))]
    with pytest.raises(ConfigurationError, match="permission denied for sequence"):
        sink.validate_all(checkpoint(), committables)
    db.run(f"GRANT USAGE ON SEQUENCE orders_number_seq TO {writer}")
    sink.validate_all(checkpoint(), committables)
    assert db.visible() == []
    sink.close()


def test_what_shows_with_the_first_row_that_stays_is_found_before_the_decision(db: Observer, writer: str) -> None:
    """A partition of deletes alone tells nothing."""
    db.run("ALTER TABLE orders ADD PRIMARY KEY (id), ADD number bigserial")
    schema = pa.schema([*SCHEMA, ("at", pa.int64()), ("gone", pa.bool_())])
    sink = staging(db, writer, mode="upsert", keys=["id"], order_by="at", delete_marker="gone")
    sink.check(schema)
    changes = [[{"id": n, "name": "a", "at": 1, "gone": n == 0}] for n in range(2)]
    committables = [pre_commit(sink, batch(its, schema), subtask=n) for n, its in enumerate(changes)]
    with pytest.raises(ConfigurationError, match="permission denied for sequence"):
        sink.validate_all(checkpoint(), committables)
    sink.close()


@pytest.mark.parametrize("strategy", ["prepared", "staged"])
def test_a_new_and_empty_database_is_told_at_once(db: Observer, postgres: PostgresService, strategy: Any) -> None:
    sink = PostgresSink(db.dsn, "orders", strategy=strategy)
    sink.check(SCHEMA)
    committable = pre_commit(sink, rows_of(1))
    with postgres.database() as dsn:
        empty = PostgresSink(dsn, "orders", strategy=strategy)
        for outcome in (empty.commit_all(checkpoint(), [committable])[0], empty.commit(committable)):
            assert "there is no table public.orders" in why_unknown(outcome)
        empty.close()
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    sink.close()


@pytest.mark.parametrize("strategy", ["prepared", "staged"])
def test_a_trigger_that_was_meant_and_does_something_else_now(db: Observer, strategy: Any) -> None:
    swallow = "CREATE OR REPLACE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN %s; END$$"
    db.run(swallow % "NEW")
    db.run("CREATE TRIGGER t BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION f()")
    sink = PostgresSink(db.dsn, "orders", strategy=strategy)
    sink.check(SCHEMA)
    sink.validate_all(checkpoint(), [pre_commit(sink, rows_of(1))])
    db.run(swallow % "NULL")
    with pytest.raises(ConfigurationError, match="trigger t of orders is new or was altered"):
        sink.validate_all(checkpoint(1), [pre_commit(sink, rows_of(2), checkpoint=1)])
    sink.close()


@pytest.mark.parametrize("strategy", ["prepared", "staged"])
def test_a_new_partition_has_the_triggers_of_its_table(db: Observer, strategy: Any) -> None:
    db.run("CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'")
    db.run("CREATE TABLE parts (id bigint, name text) PARTITION BY RANGE (id)")
    db.run("CREATE TRIGGER t BEFORE INSERT ON parts FOR EACH ROW EXECUTE FUNCTION f()")
    db.run("CREATE TABLE few PARTITION OF parts FOR VALUES FROM (0) TO (10)")
    db.run("CREATE TRIGGER off BEFORE INSERT ON parts FOR EACH ROW EXECUTE FUNCTION f()")
    db.run("ALTER TABLE parts DISABLE TRIGGER off")
    sink, own = PostgresSink(db.dsn, "parts", strategy=strategy), PostgresSink(db.dsn, "few", strategy=strategy)
    sink.check(SCHEMA)
    own.check(SCHEMA)
    db.run("CREATE TABLE more PARTITION OF parts FOR VALUES FROM (10) TO (20)")
    committables = [pre_commit(sink, rows_of(1, 11))]
    sink.validate_all(checkpoint(), committables)
    assert sink.commit_all(checkpoint(), committables) == [COMMITTED]
    db.run("CREATE TRIGGER u BEFORE INSERT ON more FOR EACH ROW EXECUTE FUNCTION f()")
    with pytest.raises(TargetChanged, match=r"table public\.parts .* trigger u of more is new"):
        sink.validate_all(checkpoint(1), [pre_commit(sink, rows_of(2), checkpoint=1)])
    if db.connection.info.server_version >= 150000:  # before, those of partitions are internal
        db.run("DROP TRIGGER u ON more")
        db.run("ALTER TABLE more ENABLE TRIGGER off")
        with pytest.raises(TargetChanged, match=r"table public\.parts .* trigger off of more is new"):
            sink.validate_all(checkpoint(1), [pre_commit(sink, rows_of(4), checkpoint=1)])
    db.run("CREATE TRIGGER v BEFORE INSERT ON parts FOR EACH ROW EXECUTE FUNCTION f()")
    with pytest.raises(TargetChanged, match=r"table public\.few .* trigger v of few is new"):
        own.validate_all(checkpoint(), [pre_commit(own, rows_of(3))])
    sink.close()
    own.close()


@pytest.mark.parametrize("strategy", ["prepared", "staged"])
def test_a_table_that_a_crash_would_empty_from_now_on(db: Observer, strategy: Any) -> None:
    db.run("DROP TABLE orders")
    db.run("CREATE TABLE orders (id bigint, name text) PARTITION BY RANGE (id)")
    db.run("CREATE TABLE few PARTITION OF orders FOR VALUES FROM (0) TO (100)")
    sink = PostgresSink(db.dsn, "orders", strategy=strategy)
    sink.check(SCHEMA)
    db.run("ALTER TABLE few SET UNLOGGED")
    with pytest.raises(ConfigurationError, match=r"that few is UNLOGGED, .* is new"):
        sink.validate_all(checkpoint(), [pre_commit(sink, rows_of(1))])
    assert sink.weaknesses() == ["public.few is UNLOGGED, so a crash of the server empties it"]
    db.run("ALTER TABLE few SET LOGGED")
    committables = [pre_commit(sink, rows_of(1))]
    if strategy == "staged":
        db.run("ALTER TABLE orders DETACH PARTITION few")
        reason = why_unknown(sink.commit_all(checkpoint(), committables)[0])
        assert re.search(
            r"Partition key of the failing row .*; attach a partition that takes it, or change the bounds of one",
            reason,
        )
        db.run("ALTER TABLE orders ATTACH PARTITION few FOR VALUES FROM (0) TO (100)")
    assert sink.commit_all(checkpoint(), committables) == [COMMITTED]
    sink.close()


def test_a_rule_that_would_send_rows_elsewhere(db: Observer) -> None:
    """COPY obeys no rules, INSERT does."""
    sink = PostgresSink(db.dsn, "orders", strategy="staged")
    sink.check(SCHEMA)
    committables = [pre_commit(sink, rows_of(1))]
    sink.validate_all(checkpoint(), committables)
    db.run("CREATE RULE nowhere AS ON INSERT TO orders DO INSTEAD NOTHING")
    assert "it has the rule nowhere" in why_unknown(sink.commit_all(checkpoint(), committables)[0])
    db.run("DROP RULE nowhere ON orders")
    assert sink.commit_all(checkpoint(), committables) == [COMMITTED]
    assert db.ids() == [1]
    sink.close()


def test_a_partition_that_is_a_foreign_table(db: Observer) -> None:
    db.run("CREATE TABLE parts (id bigint, name text) PARTITION BY RANGE (id)")
    db.run("CREATE TABLE here PARTITION OF parts FOR VALUES FROM (0) TO (10)")
    sink = PostgresSink(db.dsn, "parts", strategy="staged")
    sink.check(SCHEMA)
    committables = [pre_commit(sink, rows_of(1))]
    db.run("CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s FOREIGN DATA WRAPPER w")
    db.run("CREATE FOREIGN TABLE there PARTITION OF parts FOR VALUES FROM (10) TO (20) SERVER s")
    with pytest.raises(ConfigurationError, match=r"changed while the query ran: there is a foreign table"):
        sink.validate_all(checkpoint(), committables)
    with pytest.raises(ConfigurationError, match="there is a foreign table"):
        sink.check(SCHEMA)
    sink.close()


def test_row_level_security_that_would_hide_rows_from_deletes(db: Observer, writer: str) -> None:
    """A DELETE passes over the rows that the role may not see, without a word."""
    db.run("ALTER TABLE orders ADD PRIMARY KEY (id); INSERT INTO orders VALUES (1, 'one')")
    schema = pa.schema([*SCHEMA, ("gone", pa.bool_())])
    sink = PostgresSink(
        db.dsn,
        "orders",
        mode="upsert",
        keys=["id"],
        delete_marker="gone",
        connect_options={"options": f"-c role={writer}"},
    )
    sink.check(schema)
    committables = [pre_commit(sink, batch([{"id": 1, "name": None, "gone": True}], schema))]
    db.run("ALTER TABLE orders ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON orders USING (false) WITH CHECK (true)")
    with pytest.raises(ConfigurationError, match="row-level security"):
        sink.validate_all(checkpoint(), committables)
    assert "row-level security" in why_unknown(sink.commit_all(checkpoint(), committables)[0])
    with pytest.raises(ConfigurationError, match="row-level security"):
        sink.check(schema)
    sink.close()


def test_a_type_that_changes_amid_a_participant_that_is_staged_at_least_once(db: Observer) -> None:
    db.run("ALTER TABLE orders DROP name, ADD amount double precision")
    sink = PostgresSink(db.dsn, "orders", strategy="staged")
    sink.check(NUMBERS)
    transaction = sink.begin_transaction(context(sink, schema=NUMBERS))
    sink.write(transaction, numbers((1, 1.5)))
    db.run("ALTER TABLE orders ALTER amount TYPE integer")
    with pytest.raises(ConfigurationError, match="was double precision and is integer"):
        sink.commit_directly(transaction)
    sink.rollback(transaction)
    assert db.visible() == []
    sink.close()


# ---------------------------------------------------------------------- waits, settings and names
def test_a_locked_ledger_or_table_holds_up_nothing_for_longer_than_the_limit(db: Observer) -> None:
    db.run("CREATE TABLE parts (id bigint, name text) PARTITION BY LIST (id)")
    sink = PostgresSink(db.dsn, "parts", lock_timeout=0.3)
    sink.check(SCHEMA)
    with held(db.dsn, "LOCK TABLE tpc_ledger, parts IN ACCESS EXCLUSIVE MODE"):
        with pytest.raises(psycopg.errors.LockNotAvailable):
            list(sink.in_doubt("job"))
        with pytest.raises(ConfigurationError, match=r"for longer than the sink waits: .*lock_timeout"):
            sink.check(SCHEMA)
    sink.check(SCHEMA)
    sink.close()


@pytest.mark.parametrize("strategy", ["prepared", "staged"])
@pytest.mark.parametrize("setting", ["default_transaction_read_only = on", "transaction_timeout = 2000"])
def test_settings_of_the_database_that_do_not_hold_for_the_sink(db: Observer, strategy: Any, setting: str) -> None:
    if "timeout" in setting:
        db.needs(17, "transaction_timeout")
    ((name,),) = db.run("SELECT current_database()")
    db.run(f"ALTER DATABASE {name} SET {setting}")
    sink = PostgresSink(db.dsn, "orders", strategy=strategy)
    sink.check(SCHEMA)
    transaction = sink.begin_transaction(context(sink))
    sink.write(transaction, rows_of(1))
    if "timeout" in setting:
        time.sleep(2.5)
    committable = sink.pre_commit(transaction).of("orders", 0, Fingerprint(1, 0))
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    sink.close()


@pytest.mark.parametrize("strategy", ["prepared", "staged"])
def test_percent_signs_in_names(db: Observer, strategy: Any) -> None:
    db.run('CREATE SCHEMA "50%"; CREATE TABLE "50%"."100%s" (id bigint, name text)')
    sink = PostgresSink(db.dsn, '"50%"."100%s"', strategy=strategy, ledger="%s")
    sink.check(SCHEMA)
    committable, orphan = [pre_commit(sink, rows_of(n), subtask=n) for n in range(2)]
    sink.validate_all(checkpoint(), [committable])
    sink.abort(orphan.transaction)
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    assert list(sink.in_doubt("job")) == []
    assert db.run('SELECT id FROM "50%"."100%s"') == [(0,)]
    sink.close()


def test_a_check_that_was_dropped_refuses_no_more_rows(db: Observer) -> None:
    db.run("ALTER TABLE orders ADD CONSTRAINT small CHECK (id < 10)")
    sink = PostgresSink(db.dsn, "orders", strategy="staged")
    sink.check(SCHEMA)
    db.run("ALTER TABLE orders DROP CONSTRAINT small")
    committable = pre_commit(sink, rows_of(10))
    sink.validate_all(checkpoint(), [committable])
    assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
    sink.close()


def test_a_check_of_the_whole_row_is_tried_before_the_decision(db: Observer) -> None:
    db.run("ALTER TABLE orders ADD CONSTRAINT whole CHECK (orders IS NOT NULL)")
    sink = PostgresSink(db.dsn, "orders", strategy="staged")
    sink.check(SCHEMA)
    sink.validate_all(checkpoint(), [pre_commit(sink, rows_of(1))])
    with pytest.raises(BadValue, match='constraint "whole"'):
        sink.validate_all(checkpoint(), [pre_commit(sink, batch([{"id": 1, "name": None}], SCHEMA))])
    sink.close()


def test_a_domain_judges_rows_that_delete(db: Observer) -> None:
    db.run("CREATE DOMAIN known AS text NOT NULL CHECK (value <> ''); ALTER TABLE orders ALTER name TYPE known")
    db.run("ALTER TABLE orders ADD PRIMARY KEY (id); INSERT INTO orders VALUES (1, 'one')")
    schema = pa.schema([*SCHEMA, ("gone", pa.bool_())])
    sink = PostgresSink(db.dsn, "orders", mode="upsert", keys=["id"], delete_marker="gone")
    sink.check(schema)
    with pytest.raises(BadValue, match="known"):
        pre_commit(sink, batch([{"id": 1, "name": None, "gone": True}], schema))
    committables = [pre_commit(sink, batch([{"id": 1, "name": "one", "gone": True}], schema), checkpoint=1)]
    sink.validate_all(checkpoint(1), committables)
    assert sink.commit_all(checkpoint(1), committables) == [COMMITTED]
    assert db.visible() == []
    sink.close()


def test_a_name_that_the_server_would_cut(db: Observer) -> None:
    sink = PostgresSink(db.dsn, "new", create_table=True)
    with pytest.raises(SchemaMismatch, match="70 bytes, and PostgreSQL cuts names after 63: rename it in Spark"):
        sink.check(pa.schema([("ä" * 35, pa.int64())]))
    sink.close()


# ---------------------------------------------------------------------- another table of the same name
@pytest.mark.parametrize("kind", [PostgresSink, SqlAlchemySink])
def test_a_table_of_the_same_name_in_an_earlier_schema_gets_no_rows(tmp_path: Path, db: Observer, kind: Any) -> None:
    url = db.dsn.replace("postgresql://", "postgresql+psycopg://") if kind is SqlAlchemySink else db.dsn

    def in_the_way() -> None:
        db.run('CREATE SCHEMA "postgres"')
        db.run('CREATE TABLE "postgres".orders (LIKE public.orders)')

    db.run("ALTER TABLE orders ADD amount double precision")
    run(tmp_path, kind(url, "orders"), example_input(4), At(Step.COMPLETE, in_the_way))
    with closing(kind(url, "orders")) as sink, pytest.raises(ConfigurationError, match="write the schema too"):
        sink.committed_checkpoints("job")
    run(tmp_path, kind(url, "public.orders", name="orders"), example_input(5))
    assert Counter(db.ids("public.orders")) == Counter(ids(example_input(5)))
    assert db.ids('"postgres".orders') == []
