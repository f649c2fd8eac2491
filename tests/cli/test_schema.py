"""`coordinator schema diff` says what would be altered, and alters nothing."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coordinator.cli.targets import schema_of
from tests.cli.jobs import Job

SPARKS = {
    "type": "struct",
    "fields": [
        {"name": "id", "type": "long", "nullable": False, "metadata": {}},
        {"name": "price", "type": "decimal(12,4)", "nullable": True, "metadata": {}},
        {"name": "name", "type": "varchar(60)", "nullable": True, "metadata": {}},
        {"name": "tags", "type": {"type": "array", "elementType": "string", "containsNull": True}, "nullable": True},
        {"name": "at", "type": "timestamp", "nullable": True, "metadata": {}},
    ],
}
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("price", pa.decimal128(12, 4)),
        ("name", pa.string()),
        ("tags", pa.list_(pa.string())),
        ("at", pa.timestamp("us", "UTC")),
    ]
)


def test_the_same_schema_in_three_forms(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(SPARKS))
    pq.write_table(SCHEMA.empty_table(), tmp_path / "s.parquet")
    assert schema_of(str(tmp_path / "s.json")).equals(SCHEMA, check_metadata=True)
    assert schema_of(str(tmp_path / "s.parquet")) == SCHEMA
    flat = "id bigint, price DECIMAL(12, 4), `name` varchar(60), at timestamp"
    assert schema_of(flat).equals(SCHEMA.remove(3), check_metadata=True)


def test_what_is_no_schema_is_told(file_job: Job) -> None:
    assert "there is no type 'bigger'" in file_job.cli("schema", "diff", "id bigger", code=2).stderr
    assert (
        "not understood from 'tags array<string>'"
        in file_job.cli("schema", "diff", "id long, tags array<string>", code=2).stderr
    )
    assert "no columns to compare" in file_job.cli("schema", "diff", "id long").stdout


@pytest.mark.parametrize(("evolution", "automatic"), [("none", False), ("add", True)])
def test_statements_and_who_runs_them(tmp_path: Path, pg_database: str, evolution: str, automatic: bool) -> None:
    job = Job(
        tmp_path,
        f'type = "postgres"\ndsn = "{pg_database}"\ntable = "orders"\nschema_evolution = "{evolution}"',
    )
    with psycopg.connect(pg_database, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int, amount double precision)")
        found = job.json("schema", "diff", "id bigint, amount date, note string", code=1)
        assert [(c["column"], c["automatic"]) for c in found["changes"]] == [("note", automatic)]
        assert ["amount" in each["reason"] for each in found["unfit"]] == [True]
        shown = job.cli("schema", "diff", "id bigint, amount date, note string", "--sink", "orders", code=1)
        assert "ADD COLUMN IF NOT EXISTS" in shown.stdout
        assert 'no statement can change this: column "amount"' in shown.stdout
        assert connection.execute("SELECT count(*) FROM pg_attribute WHERE attname = 'note'").fetchone() == (0,)
        for change in found["changes"]:
            connection.execute(change["statement"].encode())
        assert "takes these rows as it is" in job.cli("schema", "diff", "id bigint, note string").stdout


def test_a_database_that_does_not_answer_is_told(tmp_path: Path) -> None:
    job = Job(tmp_path, 'type = "postgres"\ndsn = "postgresql://127.0.0.1:1/shop"\ntable = "orders"')
    told = job.cli("schema", "diff", "id long", code=1).stderr
    assert "cannot be read: cannot connect to PostgreSQL" in told
