"""FileSink: which files there are, when they appear, and what is rejected."""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from obstore.store import LocalStore

from sinks.audit import Part
from sinks.errors import BadValue, CommittedError, ConfigurationError, TransactionEnded
from sinks.files import FileSink
from sinks.files.layout import NO_VALUE, folder_of
from sinks.lake.files import ObjectFiles, files_at
from sinks.testing import SCHEMA, rows
from sinks.testing.servers.s3 import S3Server
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    CommitState,
    Committable,
    Fingerprint,
    TransactionContext,
    TransactionId,
)
from tests.files.reading import hidden_of, names_of, rows_below

JOB = "orders"
LINEAGE = "0badcafe"
COMMITTED = CommitOutcome.COMMITTED


def context(sink: FileSink, schema: pa.Schema = SCHEMA, subtask: int = 0, checkpoint: int = 0) -> TransactionContext:
    return TransactionId(JOB, LINEAGE, checkpoint, sink.name, subtask, 1, 0, 0, 0).context(schema)


def pre_committed(sink: FileSink, table: pa.Table, subtask: int = 0, checkpoint: int = 0) -> Committable:
    sink.check(table.schema)
    transaction = sink.begin_transaction(context(sink, table.schema, subtask, checkpoint))
    for batch in table.to_batches():
        sink.write(transaction, batch)
    return sink.snapshot_state(transaction).of(sink.name, subtask, Fingerprint(table.num_rows))


def committed(sink: FileSink, *made: Committable, checkpoint: int = 0) -> Sequence[CommitOutcome | Exception]:
    return sink.commit_all(Checkpoint(JOB, LINEAGE, checkpoint), made)


def state(outcome: CommitOutcome | Exception) -> CommitState:
    assert isinstance(outcome, CommitOutcome), outcome
    return outcome.state


def names(folder: Path) -> list[str]:
    return names_of(LocalStore(folder))


def ids(folder: Path) -> list[int]:
    return sorted(row["id"] for row in rows_below(folder))


def by_shop(shops: Iterable[str | None]) -> pa.Table:
    values = list(shops)
    return pa.table({"id": range(len(values)), "shop": pa.array(values, pa.string())})


# ---------------------------------------------------------------------- which files
def test_a_file_names_lineage_checkpoint_and_partition(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, name="lake")
    committed(sink, pre_committed(sink, rows(0, 2), subtask=7, checkpoint=12), checkpoint=12)
    [name] = names(tmp_path)
    found = TransactionId.find(name)
    assert (found.lineage, found.checkpoint, found.subtask) == (LINEAGE, 12, 7)
    assert re.fullmatch(r"part-tpc\..*-0\.zstd\.parquet", name)


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"compression": "none"}, r"a0-0\.parquet"),
        ({"compression": "gzip"}, r"a0-0\.gz\.parquet"),
        ({"format": "jsonl"}, r"a0-0\.jsonl"),
        ({"format": "jsonl", "compression": "gzip"}, r"a0-0\.jsonl\.gz"),
    ],
)
def test_names_end_as_readers_expect(tmp_path: Path, options: dict[str, Any], end: str) -> None:
    sink = FileSink(tmp_path, **options)
    committed(sink, pre_committed(sink, rows(0, 2)))
    [name] = names(tmp_path)
    assert re.search(f"{end}$", name)
    assert ids(tmp_path) == [0, 1]


def test_files_have_at_most_so_many_rows(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, max_rows_per_file=4, partition_by=["shop"])
    committed(sink, pre_committed(sink, by_shop("aaaaaabbb")))
    assert [name.partition("/")[0] for name in names(tmp_path)] == ["shop=a", "shop=a", "shop=b"]
    assert ids(tmp_path) == list(range(9))


def test_large_transactions_become_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinks.lake.buffer._ENOUGH", 10_000)
    sink = FileSink(tmp_path)
    committed(sink, pre_committed(sink, pa.concat_tables([rows(1000 * n, 1000) for n in range(3)])))
    assert len(names(tmp_path)) == 3
    assert ids(tmp_path) == list(range(3000))


def test_partition_folders_are_those_of_hive(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, partition_by=["shop"])
    committed(sink, pre_committed(sink, by_shop(["a/b", "50%", "ü ö", "a=b", None, "a\tb"])))
    folders = {name.partition("/")[0] for name in names(tmp_path)}
    expected = {"shop=a%2Fb", "shop=50%25", "shop=ü ö", "shop=a%3Db", f"shop={NO_VALUE}", "shop=a%09b"}
    assert folders == expected
    assert [row["shop"] for row in sorted(rows_below(tmp_path), key=lambda row: row["id"])] == [
        *("a/b", "50%", "ü ö", "a=b", None, "a\tb")
    ]
    assert folder_of({"a:b": "1"}) == "a%3Ab=1/"


def test_values_of_partition_columns_of_each_type(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 2], "day": [datetime.date(2024, 1, 31), None], "ok": [True, False]})
    sink = FileSink(tmp_path, partition_by=["day", "ok"])
    committed(sink, pre_committed(sink, table))
    assert {name.rpartition("/")[0] for name in names(tmp_path)} == {
        "day=2024-01-31/ok=true",
        f"day={NO_VALUE}/ok=false",
    }
    assert sorted(rows_below(tmp_path), key=lambda row: row["id"]) == table.to_pylist()


# ---------------------------------------------------------------------- when they appear
def test_files_appear_one_after_the_other_and_each_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that dies between two of them is asked again, and shows the others."""
    sink = FileSink(tmp_path, max_rows_per_file=2)
    made = pre_committed(sink, rows(0, 6))
    seen = list[list[int]]()
    move = ObjectFiles.move

    def watched(files: ObjectFiles, source: str, target: str) -> bool:
        seen.append(ids(tmp_path))
        if len(seen) == 3:
            raise ConnectionError
        return move(files, source, target)

    monkeypatch.setattr(ObjectFiles, "move", watched)
    assert [type(outcome) for outcome in committed(sink, made)] == [ConnectionError]
    assert seen == [[], [0, 1], [0, 1, 2, 3]]
    assert list(sink.in_doubt(JOB)) == []
    with pytest.raises(CommittedError):
        sink.abort(made.transaction)
    assert committed(FileSink(tmp_path, name=sink.name), made) == [COMMITTED]
    assert ids(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert hidden_of(LocalStore(tmp_path)) == []


def test_the_marker_says_which_checkpoint_is_visible_as_a_whole(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, success_marker=True)
    marker = tmp_path / "_SUCCESS"
    first, lost = (pre_committed(sink, rows(10 * n, 2), subtask=n, checkpoint=4) for n in range(2))
    sink.abort(lost.transaction)
    assert [state(one) for one in committed(sink, first, lost, checkpoint=4)] == [
        CommitState.COMMITTED,
        CommitState.LOST,
    ]
    assert not marker.exists()
    again = pre_committed(sink, rows(10, 2), subtask=2, checkpoint=4)
    assert committed(sink, again, checkpoint=4) == [COMMITTED]
    assert json.loads(marker.read_text()) == {"job": JOB, "lineage": LINEAGE, "checkpoint": 4}
    assert ids(tmp_path) == [0, 1, 10, 11]


def test_nobody_but_readers_may_take_files(tmp_path: Path) -> None:
    """A file that is missing before the decision is written again. After it, the query stops."""
    sink = FileSink(tmp_path)
    early, late, taken = (pre_committed(sink, rows(10 * n, 2), subtask=n) for n in range(3))
    staged = {TransactionId.find(path.name).subtask: path for path in tmp_path.rglob("staged/*")}
    staged[0].unlink()
    [lost] = committed(sink, early)
    assert state(lost) is CommitState.LOST
    assert isinstance(lost, CommitOutcome)
    assert "staged" in lost.reason
    staged[1].unlink()
    mark = next(path for path in tmp_path.rglob("pre-committed/*") if TransactionId.find(path.name).subtask == 1)
    decided = mark.parents[1] / "decided" / mark.name
    decided.write_bytes(mark.read_bytes())
    [unknown] = committed(sink, late)
    assert state(unknown) is CommitState.UNKNOWN
    assert isinstance(unknown, CommitOutcome)
    assert f"{late.proof['files'][0]['path']} becomes visible" in unknown.reason
    assert committed(sink, taken) == [COMMITTED]
    (tmp_path / taken.proof["files"][0]["path"]).unlink()  # as a job does that archives what it has read
    assert committed(sink, taken) == [COMMITTED]
    assert ids(tmp_path) == []


def test_a_driver_that_does_not_see_what_tasks_wrote_writes_again(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "a", name="lake")
    made = pre_committed(sink, rows(0, 2))
    elsewhere = FileSink(tmp_path / "b", name="lake")
    elsewhere.check(SCHEMA)
    checkpoint = Checkpoint(JOB, LINEAGE, 0)
    with pytest.raises(TransactionEnded, match=r"its rows were written for .*/a, and the sink writes to .*/b now"):
        elsewhere.validate_all(checkpoint, [made])
    [outcome] = committed(elsewhere, made)
    assert state(outcome) is CommitState.UNKNOWN
    next((tmp_path / "a").rglob("pre-committed/*")).unlink()
    with pytest.raises(TransactionEnded, match="or executors do not share the folder"):
        sink.validate_all(checkpoint, [made])


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "rows")
    made = pre_committed(sink, rows(0, 2))
    os.rename(tmp_path / "rows", tmp_path / "unmounted")
    sink = FileSink(tmp_path / "rows")
    assert list(sink.in_doubt(JOB)) == []
    assert sink.committed_checkpoints(JOB) == {}
    [error] = committed(sink, made)
    assert isinstance(error, ConfigurationError)
    assert "mount or restore it" in str(error)
    assert not (tmp_path / "rows").exists()
    os.rename(tmp_path / "unmounted", tmp_path / "rows")
    assert committed(sink, made) == [COMMITTED]


# ---------------------------------------------------------------------- memory and audit
def test_the_memory_outlives_a_purge(tmp_path: Path) -> None:
    sink = FileSink(tmp_path)
    for checkpoint in range(12):
        done = pre_committed(sink, rows(10 * checkpoint, 1), checkpoint=checkpoint)
        sink.abort(pre_committed(sink, rows(900, 1), subtask=1, checkpoint=checkpoint).transaction)
        committed(sink, done, checkpoint=checkpoint)
        sink.purge(Checkpoint(JOB, LINEAGE, checkpoint, oldest_retained=checkpoint - 2))
    assert sink.committed_checkpoints(JOB) == {LINEAGE: 11}
    decided = [TransactionId.find(path.name).checkpoint for path in tmp_path.rglob("decided/*")]
    assert sorted(decided) == [9, 9, 10, 10, 11, 11]


def test_an_audit_tells_of_files_that_somebody_altered(tmp_path: Path) -> None:
    sink = FileSink(tmp_path)
    made = [pre_committed(sink, rows(10 * n, 3 + n), subtask=n) for n in range(2)]
    committed(sink, *made)
    [whole] = sink.audit(JOB, [Part(LINEAGE, 0, made)]).holdings
    assert (whole.rows, whole.unexpected, whole.remarks) == (7, (), ())
    [part] = sink.audit(JOB, [Part(LINEAGE, 0, made[:1])]).holdings
    assert (part.rows, part.unexpected) == (3, (made[1].transaction["transaction"],))
    path = tmp_path / made[0].proof["files"][0]["path"]
    path.write_bytes(path.read_bytes()[:-1])
    [torn] = sink.audit(JOB, [Part(LINEAGE, 0, made)]).holdings
    assert torn.rows is None
    assert path.name in torn.remarks[0]


# ---------------------------------------------------------------------- what is rejected
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"format": "csv"}, 'format is "parquet" or "jsonl", not \'csv\''),
        ({"compression": "zip"}, "compression of parquet is one of zstd, snappy, gzip, lz4, none, not 'zip'"),
        ({"format": "jsonl", "compression": "zstd"}, "compression of jsonl is one of none, gzip, not 'zstd'"),
        ({"max_rows_per_file": 0}, "max_rows_per_file must be a whole number from 1, not 0"),
        ({"max_rows_per_file": "9"}, "max_rows_per_file must be a whole number from 1, not '9'"),
        ({"path": "s3://user:secret@bucket/x"}, "credentials belong into storage_options"),
    ],
)
def test_options_that_do_not_go(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(told)) as raised:
        FileSink(**{"path": "/no", **options})
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("partition_by", "told"),
    [
        (["name", "name"], "a partition column is named twice"),
        (["nothing"], "there is no column 'nothing' to partition by"),
        (["amount"], "partition column 'amount' is not a string, integer, date or boolean"),
        (["id", "name", "amount", "_day"], "all columns are partition columns"),
        (["_day"], "partition column '_day' begins with '_', and readers pass over"),
    ],
)
def test_columns_that_files_cannot_be_partitioned_by(tmp_path: Path, partition_by: Sequence[str], told: str) -> None:
    schema = pa.schema([*SCHEMA, ("_day", pa.string())])
    with pytest.raises(ConfigurationError, match=told):
        FileSink(tmp_path / "x", partition_by=partition_by).check(schema)
    assert not (tmp_path / "x").exists()


def test_files_that_do_not_go_together(tmp_path: Path) -> None:
    FileSink(tmp_path).check(SCHEMA)
    other = FileSink(tmp_path, format="jsonl", partition_by=["name"])
    with pytest.raises(ConfigurationError) as raised:
        other.check(pa.schema([("id", pa.string()), ("NAME", pa.string())]))
    for told in (
        "format is 'jsonl', and was 'parquet' for the files that are there: use another folder",
        "partition_by is ['name'], and was [] for the files",
        "column 'id' is string, and bigint in the files: cast it in Spark",
        "column 'NAME' is 'name' in the files: rename it in Spark",
    ):
        assert told in str(raised.value)
    found = [finding.message for finding in other.diagnose(JOB)]
    assert any("format is 'jsonl', and was 'parquet'" in message for message in found)


@pytest.mark.parametrize("log", ["_spark_metadata/0", "_delta_log/0.json"])
def test_folders_whose_readers_look_elsewhere(tmp_path: Path, log: str) -> None:
    (tmp_path / log).parent.mkdir()
    (tmp_path / log).write_text("")
    with pytest.raises(ConfigurationError, match=f"it has the folder {log.partition('/')[0]}, so "):
        FileSink(tmp_path).check(SCHEMA)


def test_new_columns_are_added_and_narrower_ones_widened(tmp_path: Path) -> None:
    sink = FileSink(tmp_path)
    committed(sink, pre_committed(sink, rows(0, 1)))
    wider = pa.table({"id": pa.array([1], pa.int32()), "more": ["x"]})
    committed(sink, pre_committed(sink, wider, subtask=1))
    older = FileSink(tmp_path)
    committed(older, pre_committed(older, rows(2, 1), subtask=2))
    found = sorted(rows_below(tmp_path), key=lambda row: row["id"])
    assert [row.get("more", "(none)") for row in found] == ["(none)", "x", None]
    assert [row["name"] for row in found] == ["user-0", None, "user-2"]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("", "column 'shop': '' in a partition column, which readers take for NULL"),
        (NO_VALUE, f"column 'shop': '{NO_VALUE}' in a partition column, which readers take for NULL"),
        ("x" * 300, "column 'shop': a string of 300 characters is too long to name a folder"),
        (b"\xff", "column 'shop': the text is not UTF-8"),
    ],
)
def test_values_that_cannot_name_a_folder(tmp_path: Path, value: str | bytes, told: str) -> None:
    sink = FileSink(tmp_path, partition_by=["shop"])
    shops = pa.array([b"a", value.encode() if isinstance(value, str) else value, None], pa.binary()).view(pa.string())
    batch = pa.RecordBatch.from_arrays([pa.array([1, 2, 3]), shops], ["id", "shop"])
    sink.check(batch.schema)
    transaction = sink.begin_transaction(context(sink, batch.schema))
    with pytest.raises(BadValue, match=re.escape(f"partition 0: row 2 of a batch, {told}")):
        sink.write(transaction, batch)
    [refused] = sink.write_good_rows(transaction, batch, 9)
    assert (refused.row, refused.error) == (1, told)
    assert committed(sink, sink.snapshot_state(transaction)) == [COMMITTED]
    assert ids(tmp_path) == [1, 3]


def test_a_text_that_is_not_utf8_is_refused_in_any_column(tmp_path: Path) -> None:
    for format in ("parquet", "jsonl"):
        sink = FileSink(tmp_path / format, format=format)
        batch = pa.RecordBatch.from_arrays([pa.array([b"\xff"], pa.binary()).view(pa.string())], ["name"])
        sink.check(batch.schema)
        with pytest.raises(BadValue, match="column 'name': the text is not UTF-8"):
            sink.write(sink.begin_transaction(context(sink, batch.schema)), batch)


@pytest.mark.parametrize("name", ["allow_http", "AZURE_ALLOW_HTTP"])
def test_options_of_the_client_of_azure_are_taken(name: str) -> None:
    account = {"AZURE_STORAGE_ACCOUNT_NAME": "shop", "AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0"}
    assert files_at("az://rows/orders", account | {name: "true"}).folder is None


def test_a_store_that_ignores_conditions_is_told(s3: S3Server, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = FileSink(f"{s3_bucket}/rows")
    assert sink.weaknesses() == ()
    monkeypatch.setattr("obstore.put", lambda *args, **options: None)
    [told] = sink.weaknesses()
    assert "ignores the condition of a put" in told
