from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from sinks.errors import BadValue, ConfigurationError
from sinks.postgres import PostgresSink
from sinks.sqlalchemy import SqlAlchemySink
from sinks.testing.table_crashes import run
from tests.foreign_keys import ForeignKeys, run_all
from tests.postgres.observer import Observer
from tests.self_references import partition
from tests.sqlalchemy_sink.urls import url_of


@pytest.fixture
def dsn(pg_database: str) -> str:
    return pg_database


class TestPostgres(ForeignKeys):
    make = PostgresSink
    observe = Observer

    def test_a_table_of_that_name_in_another_database(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        """It is another table."""
        db.run("INSERT INTO parent VALUES (1, 1), (2, 2)")
        name = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
        db.run(f"CREATE DATABASE {name}_too")
        try:
            other = psycopg.conninfo.make_conninfo(dsn, dbname=f"{name}_too")
            run_all(tmp_path, PostgresSink(dsn, "child"), PostgresSink(other, "parent", create_table=True))
            assert db.ids("child") == [1, 2]
        finally:
            db.run(f"DROP DATABASE {name}_too WITH (FORCE)")

    def test_a_deferrable_key_is_refused_too(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        db.run("ALTER TABLE child ALTER CONSTRAINT has_parent DEFERRABLE INITIALLY DEFERRED")
        sinks = [self.sink(dsn, table, strategy="prepared") for table in ("parent", "child")]
        with pytest.raises(ConfigurationError, match="has_parent"):
            run_all(tmp_path, *sinks)

    def test_other_names_of_one_table(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        """Another sink, another DSN, a dead letter, a partition."""
        other = psycopg.conninfo.make_conninfo(dsn, application_name="other")
        parents: list[PostgresSink | SqlAlchemySink] = [
            PostgresSink(other, "public.parent", name="other"),
            SqlAlchemySink(url_of(dsn), "parent", name="other"),
        ]
        for parent in parents:
            with pytest.raises(ConfigurationError, match=r"has_parent .* sink 'other'"):
                run_all(tmp_path / str(parent), PostgresSink(dsn, "child"), parent)
        db.run("DROP TABLE child, parent")
        db.run("CREATE TABLE parent (id bigint PRIMARY KEY, parent bigint) PARTITION BY RANGE (id)")
        db.run("CREATE TABLE parents PARTITION OF parent FOR VALUES FROM (0) TO (99)")
        db.run("CREATE TABLE child (id bigint, parent bigint CONSTRAINT whole REFERENCES parent)")
        db.run("CREATE TABLE half (id bigint, parent bigint CONSTRAINT part REFERENCES parents)")
        for child, named, key in (
            ("child", "parents", "whole"),
            ("half", "parent", "part"),
            ("half", "parents", "part"),
        ):
            with pytest.raises(ConfigurationError, match=key):
                run_all(tmp_path / child / named, PostgresSink(dsn, named), PostgresSink(dsn, child))

    def test_dead_letters_that_refer_to_good_rows(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        db.run("CREATE TABLE dead (row_number bigint CONSTRAINT of_good REFERENCES parent, error text)")
        sink = PostgresSink(dsn, "parent", dead_letters=PostgresSink(dsn, "dead", schema_evolution="add"))
        with pytest.raises(ConfigurationError, match=r"sink 'dead': .*of_good"):
            run_all(tmp_path, sink)

    def test_the_row_of_another_partition_is_named_where_it_is_missed(
        self, tmp_path: Path, dsn: str, db: Observer
    ) -> None:
        """By the strategy that writes each partition by itself."""
        self.bosses(db)
        with pytest.raises(BadValue, match=r'has_boss needs may be in another partition: use strategy="staged"'):
            run(tmp_path, self.sink(dsn, "emp", strategy="prepared"), [[partition([(2, 1)]), partition([(1, None)])]])

    def test_without_the_right_to_make_staging_tables_rows_are_prepared(
        self, tmp_path: Path, dsn: str, db: Observer
    ) -> None:
        self.bosses(db)
        run(tmp_path, self.sink(dsn, "emp"), [[partition([(1, None)])]])
        name = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
        db.run(f"CREATE ROLE {name}_writer LOGIN PASSWORD 'x'")
        try:
            db.run(f"GRANT SELECT, INSERT, DELETE ON emp, tpc_ledger, tpc_ledger_witness TO {name}_writer")
            limited = psycopg.conninfo.make_conninfo(dsn, user=f"{name}_writer", password="x")
            sink = self.sink(limited, "emp")
            run(tmp_path, sink, [[partition([(1, None)])], [partition([(2, 1)])]])
            assert db.ids("emp") == [1, 2]
        finally:
            db.run(f"DROP OWNED BY {name}_writer")
            db.run(f"DROP ROLE {name}_writer")
