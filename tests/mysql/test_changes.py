"""A table that is altered, dropped and made anew while the query runs: rows arrive as they are, or not at all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pymysql
import pytest

from coordinator import CheckpointConfig, CheckpointCoordinator, Step
from coordinator.errors import InDoubtError
from sinks.errors import BadValue, ConfigurationError, SinkError
from sinks.mysql import MySQLSink
from sinks.mysql.connection import Connection, execute, is_mariadb
from sinks.testing import KILLED, Driver, LocalQuery
from sinks.testing.conformance import example_input, ids
from sinks.testing.driver import KillAt
from sinks.testing.servers.mysql import MySQLService
from sinks.testing.table import COMMITTED, batch, checkpoint, context, pre_commit, why_unknown
from tests.mysql.observer import Observer

_made: list[MySQLSink] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while _made:
        _made.pop().close()


def table(db: Observer, kind: str, value: Any, arrow: pa.DataType, **options: Any) -> tuple[MySQLSink, pa.RecordBatch]:
    """A sink that has checked a table `t` with a column `v` of this type, and a row for it."""
    db.run(f"CREATE TABLE t (id bigint NOT NULL, v {kind}) ENGINE=InnoDB")
    rows = batch([{"id": 1, "v": value}], pa.schema([("id", pa.int64()), ("v", arrow)]))
    sink = again(db, **options)
    sink.check(rows.schema)
    return sink, rows


def again(db: Observer, **options: Any) -> MySQLSink:
    sink = MySQLSink(db.dsn, "t", **{"lock_timeout": 60, **options})
    _made.append(sink)
    return sink


UTC = pa.timestamp("us", "UTC")
CHANGES: dict[str, tuple[str, pa.DataType, Any, str, str]] = {
    "rounded": ("double", pa.float64(), 1.5, "MODIFY v int", "does not go into int|is int"),
    "other clock": ("timestamp(6) NULL", UTC, 10**6, "MODIFY v datetime", "does not go into datetime|is datetime"),
    "blanks": ("varchar(5)", pa.string(), "a ", "MODIFY v char(5)", "CHAR drops|is char"),
    "cut": ("datetime(6)", pa.timestamp("us"), 1, "MODIFY v datetime", "would be rounded|is datetime"),
    "counter": ("bigint NULL", pa.int64(), None, "MODIFY v bigint AUTO_INCREMENT, ADD KEY (v)", "NULL"),
    "engine": ("bigint", pa.int64(), 1, "ENGINE=MyISAM", "MyISAM"),
    "renamed": ("bigint", pa.int64(), 1, "RENAME COLUMN v TO w", '"v"'),
    "dropped column": ("bigint", pa.int64(), 1, "DROP COLUMN v", '"v"'),
    "more": ("bigint", pa.int64(), 1, "ADD COLUMN more int NOT NULL", '"more"'),
    "generated": ("bigint", pa.int64(), 1, "DROP COLUMN v, ADD COLUMN v bigint AS (id)", "generated|derived"),
}


@pytest.mark.parametrize("strategy", ["xa", "staged"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_no_longer_fits_is_refused_by_the_next_participant(db: Observer, strategy: Any, change: str) -> None:
    kind, arrow, value, alter, reason = CHANGES[change]
    sink, rows = table(db, kind, value, arrow, strategy=strategy)
    db.run(f"ALTER TABLE t {alter}")
    with pytest.raises(SinkError, match=reason):
        pre_commit(sink, rows)
    assert db.pending() == 0
    assert db.visible("t") == []


@pytest.mark.parametrize("strategy", ["xa", "staged"])
def test_what_still_fits_is_written_in_the_new_type(db: Observer, strategy: Any) -> None:
    sink, rows = table(db, "bigint", 20, pa.int64(), strategy=strategy)
    for alter in ("MODIFY v decimal(20, 3)", "MODIFY v int unsigned", "MODIFY v bit(8)"):
        db.run(f"ALTER TABLE t {alter}")
        committables = [pre_commit(sink, rows)]
        sink.validate_all(checkpoint(), committables)
        assert sink.commit_all(checkpoint(), committables) == [COMMITTED]
    assert db.run("SELECT v + 0 FROM t") == [(20,)] * 3


@pytest.mark.parametrize("strategy", ["xa", "staged"])
def test_a_table_made_anew_with_other_types(db: Observer, strategy: Any) -> None:
    sink, rows = table(db, "date", 1, pa.date32(), strategy=strategy)
    db.run("DROP TABLE t")
    db.run("CREATE TABLE t (v int, id bigint) ENGINE=InnoDB")
    with pytest.raises(SinkError, match="does not go into int"):
        pre_commit(sink, rows)


def test_a_participant_keeps_the_table_as_it_saw_it(db: Observer) -> None:
    sink, rows = table(db, "bigint", 20, pa.int64(), strategy="xa")
    transaction = sink.begin_transaction(context(sink, schema=rows.schema))
    db.run("SET SESSION lock_wait_timeout = 1")
    for alter in ("MODIFY v int", "ENGINE=MyISAM"):
        with pytest.raises(pymysql.OperationalError, match="Lock wait timeout"):
            db.run(f"ALTER TABLE t {alter}")
    sink.write(transaction, rows)
    committable = sink.pre_commit(transaction)
    assert sink.commit(committable) == COMMITTED
    db.run("ALTER TABLE t ENGINE=MyISAM")
    assert db.visible("t") == [(1, 20)]


# ---------------------------------------------------------------------- staged: before the decision, and after it
LATER = CHANGES | {
    "check": ("bigint", pa.int64(), 1, "ADD CONSTRAINT small CHECK (v < 0)", "small"),
    "unique": ("bigint", pa.int64(), 1, "ADD UNIQUE only_one (v)", "only_one"),
    "not null": ("bigint", pa.int64(), None, "MODIFY v bigint NOT NULL", "cannot be null|Data truncated|NULL"),
}


@pytest.mark.parametrize("change", LATER)
def test_what_changes_before_the_decision_is_refused_by_it(db: Observer, change: str) -> None:
    kind, arrow, value, alter, reason = LATER[change]
    sink, rows = table(db, kind, value, arrow, strategy="staged")
    committables = [pre_commit(sink, rows, subtask=n) for n in range(2)]
    db.run(f"ALTER TABLE t {alter}")
    with pytest.raises((ConfigurationError, BadValue), match=reason):
        sink.validate_all(checkpoint(), committables)


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize("change", ["DROP COLUMN v", "RENAME COLUMN v TO w"])
def test_a_staging_table_that_somebody_alters_moves_no_nulls(db: Observer, mode: Any, change: str) -> None:
    options = {"strategy": "staged", "mode": mode, "keys": ["id"] if mode == "upsert" else []}
    db.run("CREATE TABLE t (id bigint PRIMARY KEY, v bigint) ENGINE=InnoDB")
    sink = again(db, **options)
    schema = pa.schema([("id", pa.int64()), ("v", pa.int64())])
    sink.check(schema)
    committables = [pre_commit(sink, batch([{"id": n, "v": 7}], schema), subtask=n) for n in range(2)]
    db.run(f"ALTER TABLE {committables[0].transaction['table']} {change}")
    with pytest.raises(SinkError, match="was altered by somebody"):
        sink.validate_all(checkpoint(), committables)
    reason = why_unknown(sink.commit_all(checkpoint(), committables)[0])
    assert "was altered by somebody" in reason
    assert "Nothing was moved" in reason
    assert db.visible("t") == []


BACK = {
    "renamed": "RENAME COLUMN w TO v",
    "dropped column": "ADD COLUMN v bigint",
    "engine": "ENGINE=InnoDB",
    "more": "MODIFY more int NULL",
    "check": "DROP CONSTRAINT small",
    "unique": "DROP INDEX only_one",
    "counter": "MODIFY v bigint NULL, DROP KEY v",
    "generated": "DROP COLUMN v, ADD COLUMN v bigint",
}


@pytest.mark.parametrize("change", LATER)
def test_what_changes_after_the_decision_is_said_with_where_the_rows_are(db: Observer, change: str) -> None:
    kind, arrow, value, alter, reason = LATER[change]
    sink, rows = table(db, kind, value, arrow, strategy="staged")
    committables = [pre_commit(sink, rows, subtask=n) for n in range(2)]
    sink.validate_all(checkpoint(), committables)
    db.run(f"ALTER TABLE t {alter}")
    for driver in (sink, again(db, strategy="staged")):
        for outcome in driver.commit_all(checkpoint(), committables):
            said = why_unknown(outcome)
            assert any(word in said for word in reason.split("|")), said
            assert f"safe in the staging tables {committables[0].transaction['table']} and 1 more" in said
            assert "table changed since" not in said
    assert db.visible("t") == []
    db.run(f"ALTER TABLE t {BACK.get(change, f'MODIFY v {kind}')}")
    assert driver.commit_all(checkpoint(), committables) == [COMMITTED] * 2
    assert len(db.visible("t")) == 2
    assert db.staging() == []


def test_a_type_that_changes_amid_a_participant_that_is_staged_at_least_once(db: Observer) -> None:
    sink, rows = table(db, "double", 1.5, pa.float64(), strategy="staged")
    transaction = sink.begin_transaction(context(sink, schema=rows.schema))
    sink.write(transaction, rows)
    db.run("ALTER TABLE t MODIFY v int")
    with pytest.raises(ConfigurationError, match='column "v" was double and is int'):
        sink.commit_directly(transaction)
    sink.rollback(transaction)
    assert db.visible("t") == []


@pytest.mark.parametrize("strategy", ["xa", "staged"])
@pytest.mark.parametrize(
    "setting", ["init_connect = 'SET autocommit = 0'", "completion_type = 1", "completion_type = 2"]
)
def test_settings_of_the_server_that_do_not_hold_for_the_sink(
    db: Observer, mysql: MySQLService, strategy: Any, setting: str
) -> None:
    """init_connect is for users who are no administrators."""
    db.run("CREATE TABLE t (id bigint NOT NULL) ENGINE=InnoDB")
    rows = batch([{"id": 1}], pa.schema([("id", pa.int64())]))
    with mysql.connect() as admin:
        try:
            execute(admin, f"SET GLOBAL {setting}")
            sink = MySQLSink(db.dsn, "t", strategy=strategy)
            _made.append(sink)
            sink.check(rows.schema)
            committables = [pre_commit(sink, rows)]
            sink.validate_all(checkpoint(), committables)
            assert sink.commit_all(checkpoint(), committables) == [COMMITTED]
            assert db.ids("t") == [1]
        finally:
            execute(admin, "SET GLOBAL init_connect = DEFAULT, GLOBAL completion_type = DEFAULT")


def test_a_privilege_taken_away(db: Observer, mysql: MySQLService) -> None:
    user, everything = f"u{db.schema[-8:]}", f"SELECT, INSERT, DELETE, CREATE, DROP ON {db.schema}.*"
    with mysql.connect() as admin:
        dsn = mysql.add_user(admin, user, everything, db.schema)
        try:
            db.run("CREATE TABLE t (id bigint NOT NULL) ENGINE=InnoDB")
            sink = MySQLSink(dsn, "t", strategy="staged")
            _made.append(sink)
            rows = batch([{"id": 1}], pa.schema([("id", pa.int64())]))
            sink.check(rows.schema)
            committables = [pre_commit(sink, rows)]
            execute(admin, f"REVOKE INSERT ON {db.schema}.* FROM {user}@'%'")
            sink.close()
            with pytest.raises(ConfigurationError, match="lacks a right: INSERT command denied"):
                sink.validate_all(checkpoint(), committables)
            (outcome,) = sink.commit_all(checkpoint(), committables)
            assert "INSERT command denied" in why_unknown(outcome)
            assert "safe in the staging table" in why_unknown(outcome)
            execute(admin, f"GRANT {everything} TO {user}@'%'")
            sink.close()
            assert sink.commit_all(checkpoint(), committables) == [COMMITTED]
            assert db.ids("t") == [1]
        finally:
            execute(admin, f"DROP USER {user}@'%'")


def test_a_dropped_table_is_to_be_made_again(db: Observer) -> None:
    sink, rows = table(db, "bigint", 20, pa.int64(), strategy="staged")
    committables = [pre_commit(sink, rows)]
    definition = db.run("SHOW CREATE TABLE t")[0][1]
    db.run("DROP TABLE t")
    with pytest.raises(ConfigurationError, match=r"it is gone: create it again as it was, columns id, v"):
        sink.validate_all(checkpoint(), committables)
    for driver in (sink, again(db, strategy="staged")):
        (outcome,) = driver.commit_all(checkpoint(), committables)
        assert f"safe in the staging table {committables[0].transaction['table']}" in why_unknown(outcome)
    db.run(definition)
    assert driver.commit_all(checkpoint(), committables) == [COMMITTED]
    assert db.visible("t") == [(1, 20)]


@pytest.mark.parametrize(
    ("change", "back"),
    [
        ("ALTER TABLE orders DROP COLUMN amount", "ALTER TABLE orders ADD COLUMN amount double"),
        ("RENAME TABLE orders TO old", "RENAME TABLE old TO orders"),
    ],
)
def test_after_a_kill_and_the_mend_the_next_start_moves_every_row_once(
    db: Observer, tmp_path: Path, change: str, back: str
) -> None:
    db.run("ALTER TABLE orders ADD amount double")
    input = example_input(3)
    sink = MySQLSink(db.dsn, "orders", strategy="staged")
    storage, config = f"file://{tmp_path / 'storage'}", CheckpointConfig(commit_timeout=120)
    driver = Driver("job", sink, storage, tmp_path / "query", input, [KillAt(Step.COMPLETE, checkpoint_id=1)])
    assert driver.run() == KILLED
    db.run(change)

    def start() -> None:
        with CheckpointCoordinator("job", [sink], storage, config) as coordinator:
            LocalQuery(tmp_path / "query", input).run(coordinator)

    for _ in range(2):
        with pytest.raises(InDoubtError, match="rows are safe in the staging table") as caught:
            start()
        assert "it is unknown whether" not in str(caught.value)
    db.run(back)
    start()
    assert Counter(db.ids()) == Counter(ids(input))
    assert db.staging() == []


NOTES_TABLE = "CREATE TABLE notes (id bigint) ENGINE=InnoDB"
TRIGGER = "CREATE TRIGGER noted AFTER INSERT ON t FOR EACH ROW INSERT INTO notes VALUES (NEW.id)"
UNSAFE = "violates GTID consistency"


def require_gtids(connection: Connection) -> None:
    if is_mariadb(connection):
        pytest.skip("MariaDB has no enforce_gtid_consistency")


@pytest.mark.parametrize("strategy", ["xa", "staged"])
def test_a_trigger_that_the_server_refuses_for_its_gtids(db: Observer, strategy: Any) -> None:
    require_gtids(db.connection)
    sink, rows = table(db, "bigint", 20, pa.int64(), strategy=strategy)
    db.run(NOTES_TABLE.replace("InnoDB", "MyISAM"))
    db.run(TRIGGER)
    sink.close()
    sink = again(db, strategy=strategy)
    sink.check(rows.schema)
    with pytest.raises(ConfigurationError, match=UNSAFE):
        sink.validate_all(checkpoint(), [pre_commit(sink, rows)])
    assert db.run("SELECT * FROM notes") == []
    db.run("ALTER TABLE notes ENGINE=InnoDB")
    committables = [pre_commit(sink, rows)]
    sink.validate_all(checkpoint(), committables)
    assert sink.commit_all(checkpoint(), committables) == [COMMITTED]
    assert db.run("SELECT * FROM notes") == [(1,)]


def test_a_table_that_a_trigger_writes_to_loses_its_transactions(db: Observer) -> None:
    """A trigger on UPDATE, which no INSERT of no rows shows."""
    require_gtids(db.connection)
    db.run("CREATE TABLE t (id bigint PRIMARY KEY, v bigint) ENGINE=InnoDB")
    db.run("INSERT INTO t VALUES (1, 0)")
    db.run(NOTES_TABLE)
    db.run(TRIGGER.replace("AFTER INSERT", "AFTER UPDATE"))
    sink, rows = (
        again(db, mode="upsert", keys=["id"]),
        batch([{"id": 1, "v": 7}], pa.schema([("id", pa.int64()), ("v", pa.int64())])),
    )
    sink.check(rows.schema)
    committables = [pre_commit(sink, rows)]
    db.run("ALTER TABLE notes ENGINE=MyISAM")
    with pytest.raises(ConfigurationError, match=UNSAFE):
        sink.validate_all(checkpoint(), committables)
    [outcome] = sink.commit_all(checkpoint(), committables)
    assert re.search(f"{UNSAFE}.*rows are safe in the staging table", why_unknown(outcome))
    assert (db.visible("t"), db.run("SELECT * FROM notes")) == ([(1, 0)], [])
    db.run("ALTER TABLE notes ENGINE=InnoDB")
    assert sink.commit_all(checkpoint(), committables) == [COMMITTED]
    assert (db.visible("t"), db.run("SELECT * FROM notes")) == ([(1, 7)], [(1,)])
