"""What every sink into a table of a SQL database does, whichever database it is."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pyarrow as pa
import pytest

from sinks import CommitOutcome, Committable
from sinks.errors import (
    BadValue,
    CommittedError,
    ConfigurationError,
    SchemaMismatch,
    SinkError,
    TransactionEnded,
)
from sinks.sql.sink import AnyTableSink
from sinks.testing.table import (
    CHANGES,
    COMMITTED,
    SCHEMA,
    Database,
    batch,
    change,
    checkpoint,
    context,
    eventually,
    pre_commit,
    rows_of,
    why_unknown,
)
from sinks.transaction import CommitState, Fingerprint


class TableSuite:
    """Fixtures: `db` with a table `orders`, `keyed` with a primary key on it, and `sink`, one for
    each strategy."""

    make: Callable[..., AnyTableSink]
    held: Callable[..., AbstractContextManager[Any]]
    """Another session, by its DSN, with an open transaction that ran these statements."""
    sessions: Callable[[Any], int]
    """Counts other sessions in the database that is observed."""
    two_phase: str
    """The strategy in which each participant has a prepared transaction of its own."""
    alter_rows: Sequence[str]
    """Statements for a trigger `meddles` of `orders` that makes every name `meddled`."""
    spoil_ledger: Sequence[str]
    """Statements that leave the ledger its name, and nothing to rely on."""
    end_prepared: Callable[[Committable, Any, str], None]
    """What an operator does with a prepared transaction: COMMIT or ROLLBACK, in the database that
    is observed."""

    def test_rows_are_invisible_until_committed_and_then_there_once(
        self, db: Database, sink: AnyTableSink
    ) -> None:
        committables = [
            pre_commit(sink, rows_of(1, 2), subtask=0),
            pre_commit(sink, rows_of(3), rows_of(4), subtask=1),
        ]
        assert db.visible() == []
        assert db.pending() == 2
        sink.validate_all(checkpoint(), committables)
        assert db.visible() == []
        assert sink.commit_all(checkpoint(), committables) == [COMMITTED, COMMITTED]
        assert db.visible() == [(1, "row 1"), (2, "row 2"), (3, "row 3"), (4, "row 4")]
        assert db.pending() == 0
        sink.close()
        eventually(lambda: self.sessions(db) == 0)

    def test_a_start_tells_the_strategy_once(
        self, db: Database, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "sinks")
        sink = self.make(db)
        sink.probe_schema()
        sink.check(rows_of(1).schema)

        def told() -> list[str]:
            return [
                text for record in caplog.records if " writes to " in (text := record.getMessage())
            ]

        assert len(told()) == 1
        assert len(told()[0]) < 130
        sink.close()
        sink.check(rows_of(1).schema)
        assert told() == told()[:1] * 2

    def test_recovery_commits_what_the_other_strategy_wrote(self, db: Database) -> None:
        by_name = self.make(db, strategy=self.two_phase)
        by_table = self.make(db, strategy="staged")
        committables = [
            pre_commit(by_name, rows_of(1), subtask=0),
            pre_commit(by_table, rows_of(2), subtask=1),
        ]
        orphans = [
            pre_commit(by_name, rows_of(3), subtask=2),
            pre_commit(by_table, rows_of(4), subtask=3),
        ]
        assert len(list(by_name.in_doubt("job"))) == len(list(by_table.in_doubt("job"))) == 4
        assert by_table.commit_all(checkpoint(), committables) == [COMMITTED, COMMITTED]
        for orphan in orphans:
            by_name.abort(orphan.transaction)
        assert db.ids() == [1, 2]
        assert db.pending() == 0

    def test_what_an_operator_rolls_back_is_lost(self, db: Database) -> None:
        sink = self.make(db, strategy=self.two_phase)
        lost = pre_commit(sink, rows_of(1), subtask=0)
        intact = pre_commit(sink, rows_of(2), subtask=1)
        self.end_prepared(lost, db, "ROLLBACK")
        outcomes = sink.commit_all(checkpoint(), [lost, intact])
        assert outcomes[0].state is CommitState.LOST  # type: ignore[union-attr]
        assert outcomes[1] == COMMITTED
        assert sorted(db.ledger().values()) == [False, True]
        replay = pre_commit(sink, rows_of(1), subtask=0, round=1)
        assert sink.commit_all(checkpoint(), [replay]) == [COMMITTED]
        assert db.ids() == [1, 2]
        assert sink.commit(lost).state is CommitState.LOST

    def test_what_an_operator_commits_is_committed(self, db: Database) -> None:
        sink = self.make(db, strategy=self.two_phase)
        committable = pre_commit(sink, rows_of(1))
        self.end_prepared(committable, db, "COMMIT")
        assert sink.commit(committable) == COMMITTED
        with pytest.raises(CommittedError):
            sink.abort(committable.transaction)

    def test_two_drivers_commit_at_once(self, db: Database, sink: AnyTableSink) -> None:
        committables = [pre_commit(sink, rows_of(n), subtask=n) for n in range(8)]
        other = self.make(db, strategy=sink.strategy)
        start = threading.Barrier(2)

        def drive(driver: AnyTableSink) -> list[Any]:
            start.wait()
            return list(driver.commit_all(checkpoint(), committables))

        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(drive, (sink, other)))
        for answer in answers:  # an exception means: ask again
            assert all(outcome == COMMITTED or isinstance(outcome, Exception) for outcome in answer)
        assert sink.commit_all(checkpoint(), committables) == [COMMITTED] * 8
        assert db.ids() == list(range(8))
        assert db.pending() == 0

    def test_at_least_once_writes_at_once_and_leaves_no_trace(
        self, db: Database, sink: AnyTableSink
    ) -> None:
        transaction = sink.begin_transaction(context(sink))
        sink.write(transaction, rows_of(1))
        sink.commit_directly(transaction)
        assert db.ids() == [1]
        assert db.pending() == 0
        assert db.ledger() == {}

    def test_the_ledger_is_pruned_of_what_nobody_asks_for(
        self, db: Database, sink: AnyTableSink
    ) -> None:
        for number in (0, 1, 120):
            sink.commit_all(
                checkpoint(number), [pre_commit(sink, rows_of(number), checkpoint=number)]
            )
        sink.commit_all(checkpoint(159), [pre_commit(sink, rows_of(159), checkpoint=159)])
        sink.purge(checkpoint(159, oldest=157))
        assert sorted(int(name.split(".")[3]) for name in db.ledger()) == [120, 159]

    def test_a_dropped_staging_table_is_lost_and_holds_its_siblings(self, db: Database) -> None:
        sink = self.make(db, strategy="staged")
        lost = pre_commit(sink, rows_of(1), subtask=0)
        intact = pre_commit(sink, rows_of(2), subtask=1)
        db.run(f"DROP TABLE {lost.transaction['table']}")
        with pytest.raises(
            TransactionEnded,
            match=r"orders: 1 of 2 staging tables of checkpoint 0 are gone\. Of tpc_",
        ):
            sink.validate_all(checkpoint(), [lost, intact])
        for _ in range(2):
            outcomes = sink.commit_all(checkpoint(), [lost, intact])
            assert outcomes[0].state is CommitState.LOST  # type: ignore[union-attr]
            assert outcomes[1] == CommitOutcome.HELD
            assert db.ledger() == {lost.transaction["transaction_id"]: False}
            assert db.visible() == []
        replay = pre_commit(sink, rows_of(1), subtask=0, round=1)
        assert sink.commit_all(checkpoint(), [replay, intact]) == [COMMITTED, COMMITTED]
        assert db.ids() == [1, 2]
        assert db.pending() == 0

    def test_rows_that_a_subclass_leaves_out_are_missed_before_they_are_staged(
        self, db: Database
    ) -> None:
        sink = self.make(db, strategy="staged")
        transaction = sink.begin_transaction(context(sink, 0, 0, rows_of(1).schema))
        sink.write(transaction, rows_of(1))
        sink.record_fingerprint(transaction, Fingerprint(rows=2))
        with pytest.raises(SinkError, match="orders: 1 of 2 rows were staged"):
            sink.pre_commit(transaction)
        sink.rollback(transaction)
        assert db.pending() == 0

    def test_a_rollback_after_a_pre_commit_whose_answer_was_lost(
        self, db: Database, sink: AnyTableSink
    ) -> None:
        """Nothing waits for a sweep, with its locks."""
        transaction = sink.begin_transaction(context(sink))
        sink.write(transaction, rows_of(1))
        sink.pre_commit(transaction)
        sink.rollback(transaction)
        assert db.pending() == 0

    def test_no_row_goes_into_another_table_than_it_was_written_for(
        self, db: Database, sink: AnyTableSink
    ) -> None:
        """The sink was given another table while a checkpoint was in doubt: what is to be moved, or
        was rolled back and is to be written again, waits until it has the old one."""
        db.run("CREATE TABLE others (id bigint NOT NULL, name varchar(100))")
        staged = sink.strategy == "staged"
        first = pre_commit(sink, rows_of(1), subtask=0)
        second = pre_commit(sink, rows_of(2), subtask=1)
        if not staged:
            self.end_prepared(second, db, "ROLLBACK")
        elsewhere = self.make(db, strategy=sink.strategy, table="others", name=sink.name)
        for _ in range(2):
            outcomes = elsewhere.commit_all(checkpoint(), [first, second])
            reason = (
                r"written for .*orders \(append\), and the sink writes to .*others \(append\) now"
            )
            assert re.search(reason, why_unknown(outcomes[1]))
            assert (staged and why_unknown(outcomes[0]) != "") or outcomes[0] == COMMITTED
        outcomes = sink.commit_all(checkpoint(), [first, second])
        assert outcomes[0] == COMMITTED
        assert outcomes[1] == COMMITTED if staged else outcomes[1].state is CommitState.LOST  # type: ignore[union-attr]
        assert elsewhere.commit_all(checkpoint(), [first]) == [COMMITTED]
        assert (db.ids(), db.ids("others")) == ([1, 2] if staged else [1], [])

    def test_no_row_is_moved_in_another_way_than_it_was_written_for(self, keyed: Database) -> None:
        append = self.make(keyed, strategy="staged")
        upsert = self.make(keyed, mode="upsert", keys=["id"], order_by="id")
        committable = pre_commit(append, rows_of(1))
        (outcome,) = upsert.commit_all(checkpoint(), [committable])
        assert "orders (upsert by id; the last by id) now: give it" in why_unknown(outcome)
        assert append.commit_all(checkpoint(), [committable]) == [COMMITTED]

    def test_an_emptied_ledger_proves_nothing(self, db: Database, sink: AnyTableSink) -> None:
        """A replay would write what is committed a second time."""
        committable = pre_commit(sink, rows_of(1))
        assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
        db.run("TRUNCATE tpc_ledger")
        for asked in (sink, self.make(db, strategy=sink.strategy)):
            (outcome,) = asked.commit_all(checkpoint(), [committable])
            assert "not the one that was there at pre-commit" in why_unknown(outcome)
        later = pre_commit(asked, rows_of(2), checkpoint=1)
        assert asked.commit_all(checkpoint(1), [later]) == [COMMITTED]

    @pytest.mark.parametrize("partly", [False, True])
    def test_a_ledger_that_is_older_than_its_rows_proves_no_loss(
        self, db: Database, sink: AnyTableSink, partly: bool
    ) -> None:
        """It was restored from a dump by itself, or its newest rows were deleted."""
        committables = [pre_commit(sink, rows_of(n), subtask=n) for n in range(2)]
        assert sink.commit_all(checkpoint(), committables) == [COMMITTED, COMMITTED]
        lost = sorted(db.ledger())[partly:]
        db.run(f"DELETE FROM tpc_ledger WHERE transaction_id IN ({', '.join(map(repr, lost))})")
        if not partly:
            with pytest.raises(ConfigurationError, match="the ledger alone was restored"):
                sink.committed_checkpoints("job")
        for _ in range(2):
            *first, last = sink.commit_all(checkpoint(), committables)
            assert "the ledger alone was restored, or lost rows" in why_unknown(last)
            assert first == [COMMITTED] or not partly
        columns = "transaction_id, committed, job, lineage, sink, checkpoint"
        there = "transaction_id IN (SELECT transaction_id FROM tpc_ledger)"
        db.run(
            f"INSERT INTO tpc_ledger ({columns}) SELECT {columns}"
            f" FROM tpc_ledger_witness WHERE NOT {there}"
        )
        assert sink.commit_all(checkpoint(), committables) == [COMMITTED, COMMITTED]
        assert db.ids() == [0, 1]

    def test_a_new_trigger_is_refused_until_a_start_that_takes_it_as_meant(
        self, db: Database, sink: AnyTableSink
    ) -> None:
        staged = [pre_commit(sink, rows_of(1))] if sink.strategy == "staged" else []
        for statement in self.alter_rows:
            db.run(statement)
        with pytest.raises(
            ConfigurationError, match=r"trigger meddles.* is new.*may change or drop rows"
        ):
            sink.validate_all(checkpoint(), staged or [pre_commit(sink, rows_of(1))])
        for outcome in sink.commit_all(checkpoint(), staged):
            assert "trigger meddles" in why_unknown(outcome)
        transaction = sink.begin_transaction(context(sink))
        sink.write(transaction, rows_of(1))
        with pytest.raises(ConfigurationError, match="trigger meddles"):
            sink.commit_directly(transaction)
        sink.rollback(transaction)
        assert db.visible() == []
        started = self.make(db, strategy=sink.strategy)
        assert started.commit_all(
            checkpoint(1), [pre_commit(started, rows_of(2), checkpoint=1)]
        ) == [COMMITTED]
        assert db.visible() == [(2, "meddled")]

    def test_rows_do_not_go_into_another_database_that_took_the_place_of_the_first(
        self, db: Database, sink: AnyTableSink
    ) -> None:
        db.run(
            "UPDATE tpc_ledger SET lineage = 'of another database' WHERE transaction_id = 'ledger'"
        )
        for end in (sink.pre_commit, sink.commit_directly):
            transaction = sink.begin_transaction(context(sink))
            sink.write(transaction, rows_of(1))
            with pytest.raises(
                ConfigurationError, match="is not the ledger that the query started with"
            ):
                end(transaction)
            sink.rollback(transaction)
        assert db.visible() == []
        assert db.pending() == 0

    def test_a_ledger_that_was_altered_proves_nothing(
        self, db: Database, sink: AnyTableSink
    ) -> None:
        committable = pre_commit(sink, rows_of(1))
        if sink.strategy != "staged":
            assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
        for statement in self.spoil_ledger:
            db.run(statement)
        with pytest.raises(ConfigurationError, match="not a ledger of this version"):
            pre_commit(sink, rows_of(2), checkpoint=1)
        if sink.strategy == "staged":
            (outcome,) = sink.commit_all(checkpoint(), [committable])
            assert "not a ledger of this version" in str(outcome)
            assert db.visible() == []

    def test_what_is_staged_outlives_an_emptied_ledger(self, db: Database) -> None:
        sink = self.make(db, strategy="staged")
        committable = pre_commit(sink, rows_of(1))
        db.run("TRUNCATE tpc_ledger")
        assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
        assert db.ids() == [1]

    def test_rows_that_were_moved_are_not_moved_again_when_the_ledger_is_emptied(
        self, db: Database
    ) -> None:
        """A backup reads their staging table, so it was not dropped."""
        sink = self.make(db, strategy="staged", lock_timeout=1)
        committable = pre_commit(sink, rows_of(1))
        with self.held(db.dsn, f"SELECT * FROM {db.staging()[0]}"):
            assert sink.commit_all(checkpoint(), [committable]) == [COMMITTED]
        db.run("TRUNCATE tpc_ledger")
        (outcome,) = sink.commit_all(checkpoint(), [committable])
        assert "not the one that was there at pre-commit" in why_unknown(outcome)
        assert db.ids() == [1]
        db.run("TRUNCATE tpc_ledger_witness")
        (outcome,) = sink.commit_all(checkpoint(), [committable])
        assert "or emptied the ledger" in why_unknown(outcome)
        assert db.ids() == [1]

    def test_somebody_elses_table_is_no_ledger(self, db: Database) -> None:
        db.run("CREATE TABLE tpc_ledger (transaction_id bigint)")
        with pytest.raises(ConfigurationError, match=r"not a ledger.*ledger="):
            self.make(db)
        sink = self.make(db, ledger="mine")
        assert sink.commit_all(checkpoint(), [pre_commit(sink, rows_of(1))]) == [COMMITTED]

    def test_more_participants_than_are_dropped_together(self, db: Database) -> None:
        sink = self.make(db, strategy="staged")
        committables = [pre_commit(sink, rows_of(n), subtask=n) for n in range(130)]
        assert sink.commit_all(checkpoint(), committables) == [COMMITTED] * 130
        assert db.ids() == list(range(130))
        assert db.staging() == []

    def test_a_missing_column_is_a_schema_mismatch(self, db: Database) -> None:
        with pytest.raises(SchemaMismatch, match="surname"):
            self.make(db, check=pa.schema([("id", pa.int64()), ("surname", pa.string())]))

    @pytest.mark.parametrize("name", ["tpc_place", "TPC_PLACE", "Tpc_Row"])
    def test_a_column_with_a_name_of_the_sinks_own_is_refused(
        self, keyed: Database, name: str
    ) -> None:
        keyed.run(f"ALTER TABLE orders ADD COLUMN {name} int")
        schema = pa.schema([*rows_of(1).schema, (name, pa.int32())])
        with pytest.raises(
            ConfigurationError, match=f"column '{name}' has a name that the sink itself uses"
        ):
            self.make(keyed, check=schema, mode="upsert", keys=["id"])

    def test_a_key_twice_without_an_order_is_refused_before_the_decision(
        self, keyed: Database
    ) -> None:
        sink = self.make(keyed, mode="upsert", keys=["id"])
        committables = [
            pre_commit(sink, rows_of(1), subtask=0),
            pre_commit(sink, rows_of(1), subtask=1),
        ]
        with pytest.raises(BadValue, match=r"order_by.*\(id\) = \(1\) comes 2 times"):
            sink.validate_all(checkpoint(), committables)
        sink.validate_all(checkpoint(), committables[:1])

    def test_with_keep_newer_an_older_change_of_a_later_batch_is_dropped(
        self, db: Database
    ) -> None:
        db.run("CREATE TABLE stock (id bigint PRIMARY KEY, name varchar(50), at bigint)")
        options = {
            "mode": "upsert",
            "keys": ["id"],
            "order_by": "at",
            "delete_marker": "gone",
            "keep_newer": True,
        }
        # a row of the table without a value is older than every change
        options |= {"order_by_nulls": "first"}
        sink = self.make(db, table="stock", check=CHANGES, **options)
        first = [
            change(1, "stays", 5),
            change(2, "stays", 5),
            change(3, "equal", 5),
            change(4, "older", 5),
            change(5, "-", None),
        ]
        second = [
            change(1, "older", 4),
            change(2, "older", 4, True),
            change(3, "comes", 5),
            change(4, "comes", 6),
        ]
        second += [change(5, "comes", 1), change(6, "new", None), change(3, "older", None)]
        for number, changes in enumerate((first, second)):
            committables = [
                pre_commit(sink, batch([row], CHANGES), checkpoint=number, subtask=n)
                for n, row in enumerate(changes)
            ]
            sink.validate_all(checkpoint(number), committables)
            assert sink.commit_all(checkpoint(number), committables) == [COMMITTED] * len(changes)
        stays = [(1, "stays", 5), (2, "stays", 5)]
        comes = [(3, "comes", 5), (4, "comes", 6), (5, "comes", 1)]
        assert db.visible("stock") == [*stays, *comes, (6, "new", None)]
        db.run("ALTER TABLE stock DROP COLUMN at")
        with pytest.raises(
            ConfigurationError,
            match="keep_newer=True needs the column 'at' of order_by in the table",
        ):
            self.make(db, table="stock", check=CHANGES, **options)

    def test_an_upsert_written_at_least_once(self, keyed: Database) -> None:
        keyed.run("INSERT INTO orders VALUES (1, 'old')")
        sink = self.make(keyed, mode="upsert", keys=["id"])
        transaction = sink.begin_transaction(context(sink))
        sink.write(transaction, rows_of(1, 2))
        sink.commit_directly(transaction)
        assert keyed.visible() == [(1, "row 1"), (2, "row 2")]
        assert keyed.pending() == 0

    def test_a_key_that_is_null_is_a_bad_row(self, db: Database) -> None:
        """Also where column and index take NULL."""
        db.run("CREATE UNIQUE INDEX orders_name ON orders (name)")
        sink = self.make(db, mode="upsert", keys=["name"])
        with pytest.raises(BadValue, match='orders: row 2, column "name": a key cannot be NULL'):
            pre_commit(sink, batch([{"id": 1, "name": "a"}, {"id": 2, "name": None}], SCHEMA))

    def test_fingerprints_are_what_moves_are_counted_against(self, db: Database) -> None:
        sink = self.make(db, strategy="staged")
        committable = pre_commit(sink, rows_of(1)).of("orders", 0, Fingerprint(2, 0))
        (outcome,) = sink.commit_all(checkpoint(), [committable])
        assert "acknowledged 2" in why_unknown(outcome)

    def test_a_tombstone_stops_a_late_pre_commit(self, db: Database) -> None:
        sink = self.make(db, strategy=self.two_phase)
        transaction = sink.begin_transaction(context(sink))
        sink.write(transaction, rows_of(1))
        assert sink.commit(Committable(transaction.identity)).state is CommitState.LOST
        with pytest.raises(TransactionEnded, match="aborted"):
            sink.pre_commit(transaction)
        sink.rollback(transaction)
        assert db.pending() == 0

    def test_a_dropped_ledger_proves_nothing(self, db: Database, sink: AnyTableSink) -> None:
        done = pre_commit(sink, rows_of(1), subtask=0)
        sink.commit_all(checkpoint(), [done])
        db.run("DROP TABLE tpc_ledger")
        (first,) = sink.commit_all(checkpoint(), [done])
        assert isinstance(first, Exception)  # and the plan is made anew
        (outcome,) = sink.commit_all(checkpoint(), [done])
        assert "not the one that was there at pre-commit" in why_unknown(outcome)
        assert db.ids() == [1]

    def test_many_create_the_ledger_at_once(self, db: Database) -> None:
        sink = self.make(db, check=None)
        start = threading.Barrier(8)

        def create(_: int) -> Any:
            with sink._server.lend() as connection:
                start.wait()
                return sink._target.ensured_ledger(connection)

        for _ in range(5):
            db.run("DROP TABLE IF EXISTS tpc_ledger")
            with ThreadPoolExecutor(8) as pool:
                assert len(set(pool.map(create, range(8)))) == 1

    def test_a_truncated_staging_table_is_unknown_and_moves_nothing(self, db: Database) -> None:
        sink = self.make(db, strategy="staged")
        committables = [
            pre_commit(sink, rows_of(1), subtask=0),
            pre_commit(sink, rows_of(2), subtask=1),
        ]
        db.run(f"TRUNCATE {committables[0].transaction['table']}")
        for outcome in sink.commit_all(checkpoint(), committables):
            assert re.search(
                r"(hold 1 rows|1 rows went).* acknowledged 2.* drop the staging",
                why_unknown(outcome),
            )
        assert db.visible() == []
        assert len(db.staging()) == 2
        assert db.ledger() == {}
        db.run(f"DROP TABLE {committables[0].transaction['table']}")
        lost, held = sink.commit_all(checkpoint(), committables)
        assert (lost.state, held) == (CommitState.LOST, CommitOutcome.HELD)  # type: ignore[union-attr]

    def test_a_violation_after_the_decision_is_unknown_names_the_key_and_heals(
        self, db: Database
    ) -> None:
        db.run("ALTER TABLE orders ADD CONSTRAINT orders_once UNIQUE (id)")
        sink = self.make(db, strategy="staged")
        committables = [
            pre_commit(sink, rows_of(1), subtask=0),
            pre_commit(sink, rows_of(2), subtask=1),
        ]
        sink.validate_all(checkpoint(), committables)
        db.run("INSERT INTO orders VALUES (2, 'in the way')")
        for outcome in sink.commit_all(checkpoint(), committables):
            reason = why_unknown(outcome)
            assert "orders_once" in reason
            assert re.search(r"\(id\)=\(2\)|'2'", reason)
            assert "tpc_" not in reason.split("safe in")[0]
        assert db.visible() == [(2, "in the way")]
        db.run("DELETE FROM orders")
        assert sink.commit_all(checkpoint(), committables) == [COMMITTED, COMMITTED]
        assert db.ids() == [1, 2]

    def test_a_unique_value_twice_over_partitions_or_in_the_table(self, db: Database) -> None:
        db.run("ALTER TABLE orders ADD CONSTRAINT orders_once UNIQUE (id)")
        db.run("INSERT INTO orders VALUES (7, 'old')")
        sink = self.make(db, strategy="staged")
        twice = [pre_commit(sink, rows_of(1), subtask=0), pre_commit(sink, rows_of(1), subtask=1)]
        with pytest.raises(BadValue, match=r'"orders_once": \(id\) = \(1\) comes 2 times'):
            sink.validate_all(checkpoint(), twice)
        with pytest.raises(
            BadValue, match=r'"orders_once": \(id\) = \(7\) is in the table already'
        ):
            sink.validate_all(checkpoint(), [pre_commit(sink, rows_of(7))])

    @pytest.mark.parametrize("mode", ["append", "upsert"])
    def test_a_unique_index_over_defaults_that_are_the_same_in_each_row(
        self, keyed: Database, mode: Any
    ) -> None:
        """The batch has none of its columns, so that the second row clashes, before the
        decision."""
        keyed.run("ALTER TABLE orders ADD COLUMN region int DEFAULT 7")
        keyed.run("CREATE UNIQUE INDEX orders_regions ON orders (region)")
        sink = self.make(keyed, strategy="staged", mode=mode, keys=["id"] * (mode == "upsert"))
        first = pre_commit(sink, rows_of(1))
        sink.validate_all(checkpoint(), [first])
        assert sink.commit_all(checkpoint(), [first]) == [COMMITTED]
        with pytest.raises(BadValue):
            sink.validate_all(checkpoint(1), [pre_commit(sink, rows_of(2), checkpoint=1)])

    def test_a_lost_participant_of_an_upsert_holds_the_rest_until_its_replay(
        self, keyed: Database
    ) -> None:
        sink = self.make(
            keyed, check=CHANGES, mode="upsert", keys=["id"], order_by="at", delete_marker="gone"
        )
        older = pre_commit(sink, batch([change(1, "older", 1)], CHANGES), subtask=0)
        newer = pre_commit(sink, batch([change(1, "newer", 2)], CHANGES), subtask=1)
        keyed.run(f"DROP TABLE {older.transaction['table']}")
        outcomes = sink.commit_all(checkpoint(), [older, newer])
        assert [outcome.state for outcome in outcomes] == [CommitState.LOST, CommitState.HELD]  # type: ignore[union-attr]
        replay = pre_commit(sink, batch([change(1, "older", 1)], CHANGES), subtask=0, round=1)
        assert sink.commit_all(checkpoint(), [newer, replay]) == [COMMITTED, COMMITTED]
        assert keyed.visible() == [(1, "newer")]

    def test_the_last_change_of_a_key_wins_over_all_partitions(self, keyed: Database) -> None:
        options = {"mode": "upsert", "keys": ["id"], "order_by": "at", "delete_marker": "gone"}
        sink = self.make(keyed, check=CHANGES, order_by_nulls="first", **options)
        keyed.run("INSERT INTO orders VALUES (1, 'old'), (2, 'old'), (3, 'old'), (4, 'untouched')")
        first = [
            change(1, "second", 2),
            change(2, None, 9, True),
            change(5, "born", 1),
            change(6, "null", None),
        ]
        second = [
            change(1, "first", 1),
            change(2, "late", 8),
            change(3, None, 1, True),
            change(3, "back", 2, False),
            change(5, None, 2, True),
            change(6, "known", 0),
        ]
        committables = [
            pre_commit(sink, batch(rows, CHANGES), subtask=subtask)
            for subtask, rows in enumerate([first, second])
        ]
        sink.validate_all(checkpoint(), committables)
        assert sink.commit_all(checkpoint(), committables) == [COMMITTED, COMMITTED]
        assert keyed.visible() == [(1, "second"), (3, "back"), (4, "untouched"), (6, "known")]

    @pytest.mark.parametrize("gone", [False, True])
    def test_a_change_without_an_order_is_a_bad_row(self, keyed: Database, gone: bool) -> None:
        """It would win or lose against other changes of its key by chance. So would a delete."""
        options = {"mode": "upsert", "keys": ["id"], "order_by": "at", "delete_marker": "gone"}
        sink = self.make(keyed, check=CHANGES, **options)
        bad = batch([change(1, "good", 1), change(2, "bad", None, gone)], CHANGES)
        with pytest.raises(
            BadValue, match=r'row 2, column "at": NULL in the column of order_by.*begins id=2, name'
        ):
            pre_commit(sink, bad)
        transaction = sink.begin_transaction(context(sink, schema=CHANGES))
        (refused,) = sink.write_good_rows(transaction, bad, 10)
        assert refused.row == 1
        assert "order_by" in refused.error
        sink.pre_commit(transaction)
        pre_commit(
            self.make(keyed, check=CHANGES, order_by_nulls="first", **options), bad, subtask=1
        )

    @pytest.mark.parametrize("at", [5, None])
    def test_of_equal_changes_the_last_in_its_partition_wins(
        self, keyed: Database, at: int | None
    ) -> None:
        """As Kafka has them: eight updates of one key in a millisecond leave the eighth."""
        options = {"mode": "upsert", "keys": ["id"], "order_by": "at", "delete_marker": "gone"}
        sink = self.make(keyed, check=CHANGES, order_by_nulls="first", **options)
        updates = [
            change(key, f"v{n}" + "x" * (n % 3 * 20), at) for n in range(1, 9) for key in range(300)
        ]
        others = [change(900, None, at, True), change(900, "back", at), change(901, "there", at)]
        others += [change(901, None, at, True)]
        batches = [batch(rows, CHANGES) for rows in (updates[:1000], updates[1000:], others)]
        committables = [
            pre_commit(sink, *batches),
            pre_commit(sink, batch([change(-1, "other", at)], CHANGES), subtask=1),
        ]
        sink.validate_all(checkpoint(), committables)
        assert sink.commit_all(checkpoint(), committables) == [COMMITTED] * 2
        newest = [(key, "v8" + "x" * 40) for key in range(300)]
        assert keyed.visible() == [(-1, "other"), *newest, (900, "back")]

    def test_equal_changes_of_two_partitions_have_to_be_the_same(self, keyed: Database) -> None:
        """Nobody knows which partition's is newer.

        A source that delivers a change twice is none of that.
        """
        keyed.run("INSERT INTO orders VALUES (1, 'old'), (2, 'old'), (3, 'old')")
        options = {"mode": "upsert", "keys": ["id"], "order_by": "at", "delete_marker": "gone"}
        sink = self.make(keyed, check=CHANGES, **options)
        again = [
            change(1, "twice", 5),
            change(2, "as it was", 5, True),
            change(4, "new", 5),
            change(4, "newer", 6),
        ]
        first = [*again, change(3, "v1", 5), change(3, "v2", 5)]
        second = [
            *again[:1],
            change(2, None, 5, True),
            change(4, "other", 5),
            change(3, "v2", 5),
            change(5, "x", 5),
        ]
        same = [
            pre_commit(sink, batch(rows, CHANGES), subtask=n)
            for n, rows in enumerate((first, second))
        ]
        sink.validate_all(checkpoint(), same)
        assert sink.commit_all(checkpoint(), same) == [COMMITTED] * 2
        assert keyed.visible() == [(1, "twice"), (3, "v2"), (4, "newer"), (5, "x")]
        unlike = [change(1, "Twice", 5), change(1, "twice", 5, True), change(1, "twice ", 5)]
        for number, other in enumerate(unlike, 1):
            parts = ([change(7, "x", 1), change(1, "twice", 5)], [other])
            staged = [
                pre_commit(sink, batch(p, CHANGES), checkpoint=number, subtask=n)
                for n, p in enumerate(parts)
            ]
            told = (
                r"2 partitions have different changes of the key \(id\) = \(1\), all with at = 5\. "
                "Order by a column"
            )
            with pytest.raises(BadValue, match=told):
                sink.validate_all(checkpoint(number), staged)
        assert keyed.visible() == [(1, "twice"), (3, "v2"), (4, "newer"), (5, "x")]

    def test_nulls_of_order_by_are_asked_for_by_name(self, keyed: Database) -> None:
        with pytest.raises(
            ConfigurationError, match='order_by_nulls=\'last\' is not one of "error", "first"'
        ):
            self.make(
                keyed, check=None, mode="upsert", keys=["id"], order_by="id", order_by_nulls="last"
            )
        with pytest.raises(ConfigurationError, match="order_by_nulls='first' needs order_by"):
            self.make(keyed, check=None, mode="upsert", keys=["id"], order_by_nulls="first")

    @pytest.mark.parametrize("order_by", [None, "at"])
    def test_rows_swap_or_hand_on_the_value_of_another_unique_index(
        self, keyed: Database, order_by: str | None
    ) -> None:
        """What the batch does not have stays as it is."""
        schema = CHANGES if order_by else CHANGES.remove(2)
        keyed.run("ALTER TABLE orders ADD note varchar(10) DEFAULT 'new'")
        keyed.run("ALTER TABLE orders ADD CONSTRAINT named UNIQUE (name)")
        for id, name in enumerate("abcdefg", 1):
            keyed.run(f"INSERT INTO orders VALUES ({id}, '{name}', 'old {id}')")
        sink = self.make(
            keyed, mode="upsert", keys=["id"], order_by=order_by, delete_marker="gone", check=schema
        )
        changes = [
            *(change(1, "b", 2), change(2, "a", 2)),  # a swap
            *(change(3, "d", 2), change(4, "x", 2)),  # one gives up, another takes
            *(change(8, "e", 2), change(5, "y", 2)),  # a new one takes
            *(change(6, "g", 2), change(7, None, 2, True)),  # a deleted one gives up
        ]
        committables = [
            pre_commit(sink, batch([row], schema), subtask=n) for n, row in enumerate(changes)
        ]
        sink.validate_all(checkpoint(), committables)
        assert keyed.visible()[0] == (1, "a", "old 1")
        assert sink.commit_all(checkpoint(), committables) == [COMMITTED] * len(changes)
        assert keyed.visible() == [
            *(
                (1, "b", "old 1"),
                (2, "a", "old 2"),
                (3, "d", "old 3"),
                (4, "x", "old 4"),
                (5, "y", "old 5"),
            ),
            *((6, "g", "old 6"), (8, "e", "new")),
        ]
        clash = pre_commit(sink, batch([change(1, "x", 3)], schema), checkpoint=1)
        with pytest.raises(BadValue, match="named"):
            sink.validate_all(checkpoint(1), [clash])

    def test_a_row_that_others_refer_to_does_not_go_out_and_in(self, keyed: Database) -> None:
        """The server would take them along."""
        keyed.run("ALTER TABLE orders ADD CONSTRAINT named UNIQUE (name)")
        keyed.run("INSERT INTO orders VALUES (1, 'a'), (2, 'b')")
        keyed.run(
            "CREATE TABLE parts (id bigint PRIMARY KEY, FOREIGN KEY (id) REFERENCES orders (id) ON "
            "DELETE CASCADE)"
        )
        keyed.run("INSERT INTO parts VALUES (1), (2)")
        sink = self.make(keyed, mode="upsert", keys=["id"])
        rows = batch([{"id": 1, "name": "b"}, {"id": 2, "name": "a"}], rows_of(1).schema)
        with pytest.raises(BadValue, match="named"):
            sink.validate_all(checkpoint(), [pre_commit(sink, rows)])
        assert (keyed.visible(), keyed.ids("parts")) == ([(1, "a"), (2, "b")], [1, 2])

    def test_a_key_that_is_null_is_refused_in_the_task(self, db: Database) -> None:
        db.run("CREATE TABLE nullable (id bigint UNIQUE, name varchar(50))")
        changes = {"keys": ["id"], "order_by": "at", "delete_marker": "gone"}
        sink = self.make(db, table="nullable", check=CHANGES, mode="upsert", **changes)
        with pytest.raises(BadValue, match='"id"'):
            pre_commit(sink, batch([change(None, "x", 1, True)], CHANGES))
        assert db.pending() == 0

    def test_constraints_bind_rows_that_stay_not_rows_that_delete(self, keyed: Database) -> None:
        sink = self.make(
            keyed, check=CHANGES, mode="upsert", keys=["id"], order_by="at", delete_marker="gone"
        )
        with pytest.raises(BadValue, match="name"):
            pre_commit(sink, batch([change(1, None, 1, None)], CHANGES))
        pre_commit(sink, batch([change(1, None, 1, True)], CHANGES))

    def test_a_referenced_row_cannot_be_deleted_and_that_is_found_before_the_decision(
        self, keyed: Database
    ) -> None:
        keyed.run("INSERT INTO orders VALUES (1, 'x')")
        of_order = "CONSTRAINT of_order FOREIGN KEY (id) REFERENCES orders (id)"
        keyed.run(f"CREATE TABLE items (id bigint, {of_order})")
        keyed.run("INSERT INTO items VALUES (1)")
        sink = self.make(
            keyed, check=CHANGES, mode="upsert", keys=["id"], order_by="at", delete_marker="gone"
        )
        with pytest.raises(BadValue, match="of_order"):
            sink.validate_all(
                checkpoint(), [pre_commit(sink, batch([change(1, None, 1, True)], CHANGES))]
            )
        assert keyed.ids() == [1]

    def test_keys_only_and_keys_of_several_columns(self, db: Database) -> None:
        db.run("CREATE TABLE pairs (id bigint, name varchar(50), PRIMARY KEY (name, id))")
        db.run("INSERT INTO pairs VALUES (1, 'row 1')")
        sink = self.make(db, table="pairs", mode="upsert", keys=["id", "name"])
        assert sink.commit_all(checkpoint(), [pre_commit(sink, rows_of(1, 2))]) == [COMMITTED]
        assert db.visible("pairs") == [(1, "row 1"), (2, "row 2")]
