from __future__ import annotations

import os
from pathlib import Path

import pytest

from sinks.errors import ConfigurationError
from sinks.sqlalchemy import SqlAlchemySink
from tests.foreign_keys import ForeignKeys, run_all
from tests.sqlalchemy_sink.test_dead_letters import Observer
from tests.sqlalchemy_sink.urls import url_of


class TestSQLite(ForeignKeys):
    make = SqlAlchemySink
    observe = Observer

    @pytest.fixture
    def dsn(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path / 'rows.db'}"

    def test_another_path_to_the_file_and_other_capitals(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        os.symlink(tmp_path / "rows.db", tmp_path / "link.db")
        db.run("CREATE TABLE other (id bigint, parent bigint REFERENCES PARENT (id))")
        parent = SqlAlchemySink(f"sqlite:///{tmp_path / 'link.db'}", "parent")
        with pytest.raises(ConfigurationError, match="REFERENCES PARENT"):
            run_all(tmp_path, SqlAlchemySink(dsn, "other"), parent)

    def test_a_key_without_a_name(self, tmp_path: Path, dsn: str, db: Observer) -> None:
        db.run("CREATE TABLE other (id bigint, parent bigint REFERENCES parent)")
        with pytest.raises(ConfigurationError, match=r"foreign key \(parent\) REFERENCES parent"):
            run_all(tmp_path, SqlAlchemySink(dsn, "other"), SqlAlchemySink(dsn, "parent"))


class TestPostgres(ForeignKeys):
    make = SqlAlchemySink
    observe = Observer

    @pytest.fixture
    def dsn(self, pg_database: str) -> str:
        return url_of(pg_database)
