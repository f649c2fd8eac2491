"""What each storage does when it cannot do its work, and what it says."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.engine import make_url

from coordinator.storage import (
    CheckpointStorage,
    MissingStorage,
    StorageError,
    deferred_storage,
    existing_storages,
    open_storage,
    sql,
    storage_at,
)
from coordinator.storage.base import DeferredStorage, MemoryStorage
from coordinator.storage.sql import SQLStorage
from coordinator.storage.uris import redacted
from sinks.testing import storage_writer
from sinks.testing.table import eventually
from tests.storage import writer
from tests.storage.lost_puts import LostPuts
from tests.storage.patience import patiently
from tests.storage.proxy import Proxy


def _can_mount() -> bool:
    try:
        return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


needs_mount = pytest.mark.skipif(not _can_mount(), reason="mounting a small tmpfs needs root and unshare")


def in_small_tmpfs(folder: Path, command: list[str]) -> str:
    """What a command prints when `folder` is a tmpfs of 1 MB."""
    return in_mount("tmpfs -o size=1m", folder, command)


def in_mount(kind: str, folder: Path, command: list[str]) -> str:
    """What a command prints when `folder` is a mount of its own, in a mount namespace that ends with it."""
    folder.mkdir()
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'mount -t {kind} none "$0" && exec "$@"', str(folder), *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestOpen:
    def test_a_storage_is_returned_as_it_is(self):
        storage = open_storage("memory:as-it-is")
        assert open_storage(storage) is storage

    @pytest.mark.parametrize("form", ["{}", "file://{}", "file:{}", "file://localhost{}"])
    def test_forms_of_a_directory(self, tmp_path, form):
        storage = open_storage(form.format(tmp_path))
        assert storage.uri == f"file://{tmp_path}"
        storage.put_if_absent("a/b", b"1")
        assert (tmp_path / "a" / "b").read_bytes() == b"1"

    def test_odd_characters_in_a_directory(self, tmp_path):
        folder = tmp_path / "a #1?%20 ü"
        storage = open_storage(f"file://{quote(str(folder))}")
        assert storage.put_if_absent("k/1", b"1")
        assert storage.get("k/1") == b"1"
        assert storage.list("") == ["k/1"]
        assert (folder / "k" / "1").exists()

    @pytest.mark.parametrize(
        ("uri", "says"),
        [
            (
                "ftp://host/x",
                "unknown scheme 'ftp'.*Supported are file:///.*s3://.*hdfs://.*postgresql://.*memory:NAME",
            ),
            ("memory:", "no database URL"),
            ("", "neither a URI nor an absolute path.*Supported are"),
            ("checkpoints/orders", "neither a URI nor an absolute path"),
            ("file://checkpoints", "no absolute path.*three slashes"),
            ("file:checkpoints", "no absolute path"),
            ("file:///a?b", "no absolute path.*%3F"),
            ("sqlite:///checkpoints.db", "no absolute path.*four slashes"),
            ("sqlite://", "no absolute path.*memory:NAME"),
            ("oracle+cx_oracle://h/d", "cx_Oracle.*Install the package"),
        ],
    )
    def test_what_cannot_be_opened(self, uri, says):
        with pytest.raises(StorageError, match=says):
            open_storage(uri)
        with pytest.raises(StorageError, match=says):
            deferred_storage(uri).list("")

    @pytest.mark.parametrize(
        "uri",
        [
            "ftp://host/x",
            "checkpoints/orders",
            "file:///a?b",
            "sqlite://",
            "s3a://bucket/x",
            "s3://user@bucket/x",
            "hdfs://host:1",
            "postgresql://u:p@x@host/d",
        ],
    )
    def test_an_address_that_is_none_is_refused_before_anything_is_opened(self, uri):
        with pytest.raises(StorageError):
            deferred_storage(uri)

    def test_what_is_no_uri(self):
        with pytest.raises(TypeError, match="not int"):
            open_storage(1)  # type: ignore[arg-type]

    def test_an_error_can_be_pickled(self):
        error = StorageError("file:///a", "b", "cannot write", "Free space")
        again = pickle.loads(pickle.dumps(error))
        message = "checkpoint storage file:///a, key 'b': cannot write. Free space [EO-STORAGE]"
        assert str(again) == str(error) == message
        assert (again.uri, again.key, again.reason, again.advice) == ("file:///a", "b", "cannot write", "Free space")


class TestDeferred:
    def test_the_first_call_opens_it(self, tmp_path):
        uri = f"file://{tmp_path}/a/b"
        storage = deferred_storage(uri)
        storage.close()
        assert list(tmp_path.iterdir()) == []
        assert storage.put_if_absent("k/1", b"1")
        assert open_storage(uri).get("k/1") == b"1"
        assert storage.list("") == ["k/1"]
        assert deferred_storage(storage) is storage

    @pytest.mark.parametrize(
        "uri", ["{}/a/../b/", "file://{}/b/", "sqlite:///{}/x.db?timeout=3", "s3://bucket/x/", "memory:deferred"]
    )
    def test_its_uri_is_that_of_the_open_one(self, tmp_path, uri):
        with existing_storages():
            storage = deferred_storage(uri.format(tmp_path))
            assert storage.uri == open_storage(storage).uri == open_storage(uri.format(tmp_path)).uri

    def test_what_cannot_be_opened_yet_is_tried_again(self, tmp_path):
        blocking = tmp_path / "plain"
        blocking.write_text("")
        storage = deferred_storage(f"file://{blocking}")
        for call in (lambda: storage.get("a"), storage.clock, storage.weaknesses):
            with pytest.raises(StorageError, match="cannot make the directory"):
                call()
        blocking.unlink()
        assert storage.get("a") is None

    def test_what_looks_makes_nothing_though_it_looks_later(self, tmp_path):
        with existing_storages():
            storage = deferred_storage(f"file://{tmp_path}/a")
        assert storage.list("") == []
        assert isinstance(open_storage(storage), MissingStorage)
        assert not (tmp_path / "a").exists()
        storage.put_if_absent("k", b"1")
        assert (tmp_path / "a" / "k").read_bytes() == b"1"

    def test_only_who_named_it_closes_it(self):
        class Counted(MemoryStorage):
            closed = 0

            def close(self) -> None:
                self.closed += 1

        own = Counted("counted")
        storage = DeferredStorage(own.uri, lambda: own)
        with storage_at(storage) as same:
            assert same.list("") == []
        assert own.closed == 0
        storage.close()
        assert own.closed == 1


class TestSecrets:
    SECRET = "S3cr3tWord"

    def assert_hidden(self, error: BaseException) -> None:
        told = "".join(traceback.format_exception(error)) + repr(error)
        # the source line of the call is not part of the message
        assert self.SECRET not in told.replace("self.SECRET", ""), told

    def test_a_wrong_password(self, pg_database, caplog):
        dsn = make_url(pg_database).set(password=self.SECRET).render_as_string(hide_password=False)
        with psycopg.connect(pg_database, autocommit=True) as admin:
            admin.execute("CREATE ROLE login_only LOGIN PASSWORD 'another'")
        try:
            with pytest.raises(
                StorageError, match=r"password authentication failed.*Check user and password"
            ) as caught:
                open_storage(make_url(dsn).set(username="login_only").render_as_string(hide_password=False))
            assert "attempt" not in caplog.text, "a wrong password is no passing fault"
            self.assert_hidden(caught.value)
            assert "login_only" in str(caught.value)
        finally:
            with psycopg.connect(pg_database, autocommit=True) as admin:
                admin.execute("DROP ROLE login_only")

    def test_where_it_works(self, pg_database):
        storage = open_storage(pg_database)
        password = conninfo_to_dict(pg_database).get("password")
        assert password, "this test needs a server that asks for a password"
        assert str(password) not in storage.uri + repr(storage)
        storage.close()

    @pytest.mark.parametrize(
        "uri",
        [
            "postgresql://u:x@{}@127.0.0.1:1/d",
            "postgresql://u:{}@127.0.0.1:port/d",
            "postgresql://u:{}@127.0.0.1:1/d",
            "postgresql://127.0.0.1:1/d?user=u&password={}",
            "postgresql://127.0.0.1:1/d?sslpassword={}",
            "postgresql://u:{}@/d?host=/nowhere",
            "mysql+nodriver://u:{}@127.0.0.1/d",
            "nodb://u:{}@127.0.0.1/d",
            "host=h password={} port=1",
            "host=h password=p:{}",
            "u:{}",
            "{}",
            "nonsense://u:{}",
            "sqlite+pysqlcipher://:{}@/relative",
            "mysql://u:{}@127.0.0.1:1/d?local_infile=1",
            "mssql+pyodbc:///?odbc_connect=PWD%3D{}",
        ],
    )
    def test_urls_that_fail(self, uri):
        with pytest.raises(StorageError) as caught:
            open_storage(uri.format(self.SECRET))
        self.assert_hidden(caught.value)

    @pytest.mark.parametrize(
        "parameter", ["local_infile=1", "local_infile=0", "allow_local_infile_in_path=%2F", "client_flag=128"]
    )
    def test_no_server_is_given_files_of_this_machine(self, parameter):
        with pytest.raises(StorageError, match="would let the server read files of this machine"):
            open_storage(f"mysql://u@127.0.0.1:1/d?{parameter}")


class TestUris:
    @pytest.mark.parametrize(
        ("uri", "shown"),
        [
            ("postgresql://u:p@h/d?sslpassword=x&application_name=a", "postgresql://u:***@h/d?application_name=a"),
            ("postgresql://u@h/d", "postgresql://u@h/d"),
            ("postgresql://u:p@x@h/d", "postgresql:..."),
            ("mssql+pyodbc:///?odbc_connect=PWD%3Dx", "mssql+pyodbc:///"),
            ("host=h password=p:x", "..."),
            ("secret", "..."),
            ("s3://key:secret@bucket/x", "s3://..."),
            ("s3://bucket/x", "s3://bucket/x"),
            ("/a/b", "/a/b"),
        ],
    )
    def test_what_is_shown(self, uri, shown):
        assert redacted(uri) == shown


class TestFile:
    @pytest.fixture
    def storage(self, tmp_path: Path) -> CheckpointStorage:
        return open_storage(str(tmp_path / "root"))

    def test_a_path_below_a_file(self, tmp_path):
        (tmp_path / "plain").write_text("")
        for uri in (f"file://{tmp_path}/plain/storage", f"file://{tmp_path}/plain"):
            with pytest.raises(StorageError, match=r"cannot make the directory.*use another directory") as caught:
                open_storage(uri)
            assert caught.value.uri == uri

    @needs_mount
    def test_a_file_system_without_hard_links(self, tmp_path):
        """POSIX message queues are one: files can be made there, and nothing else."""
        script = (
            "import sys; from coordinator.storage import *\n"
            "try: open_storage(sys.argv[1])\n"
            "except StorageError as error: print(error)"
        )
        folder = tmp_path / "queues"
        told = in_mount("mqueue", folder, [sys.executable, "-c", script, str(folder)])
        assert "cannot make a hard link: Operation not permitted" in told
        assert "The file system must allow hard links" in told

    def test_opening_leaves_nothing(self, storage, tmp_path):
        assert os.listdir(tmp_path / "root") == []

    def test_a_directory_that_is_gone_is_not_made_anew(self, storage, tmp_path):
        """By the heartbeat of a driver that runs: an empty storage would tell less than none, and hide a mount."""
        storage.put_if_absent("a/1", b"1")
        shutil.rmtree(tmp_path / "root")
        assert (storage.get("a/1"), storage.list("")) == (None, [])
        with pytest.raises(StorageError, match=r"key 'a/2': cannot write 1 bytes: No such file.*bring it back"):
            storage.put_if_absent("a/2", b"2")
        assert not (tmp_path / "root").exists()

    def test_looking_writes_nothing(self, storage, tmp_path):
        """A disk may be full, or for reading only."""
        storage.put_if_absent("a/1", b"1")
        before = (tmp_path / "root").stat().st_mtime_ns
        with existing_storages():
            assert open_storage(str(tmp_path / "root")).get("a/1") == b"1"
        assert (tmp_path / "root").stat().st_mtime_ns == before

    @needs_mount
    def test_a_mount_that_became_read_only(self, tmp_path):
        script = (
            "import subprocess, sys; from coordinator.storage import *; storage = open_storage(sys.argv[1])\n"
            "storage.put_if_absent('a/1', b'1')\n"
            "subprocess.run(['mount', '-o', 'remount,ro', sys.argv[1]], check=True)\n"
            "for call in (lambda: storage.put_if_absent('a/2', b'2'), lambda: storage.delete('a/1')):\n"
            "    try: call()\n"
            "    except StorageError as error: print(error)\n"
            "print(storage.get('a/1'), storage.get('a/2'), storage.list(''))"
        )
        folder = tmp_path / "small"
        put, delete, then = in_small_tmpfs(folder, [sys.executable, "-c", script, str(folder)]).splitlines()
        assert put.startswith(
            f"checkpoint storage file://{folder}, key 'a/2': cannot write 1 bytes: Read-only file system"
        )
        assert "mount it for writing" in put
        assert delete.startswith(f"checkpoint storage file://{folder}, key 'a/1': cannot delete:")
        assert "Read-only file system" in delete
        assert then == "b'1' None ['a/1']"

    def test_what_a_killed_writer_left_is_no_key_and_goes_with_it(self, storage, tmp_path):
        storage.put_if_absent("a/1", b"1")
        left = tmp_path / "root" / "a" / "1#123"
        left.write_bytes(b"to")
        other = tmp_path / "root" / "a" / "10#4"
        other.write_bytes(b"to")
        assert storage.list("") == ["a/1"]
        storage.delete("a/1")
        assert not left.exists()
        assert other.exists()

    @pytest.mark.parametrize("killed", [True, False])
    def test_what_a_killed_writer_left_goes_when_it_is_opened_a_day_later(self, storage, tmp_path, killed):
        """One that lives, and is as slow as that, puts nothing, and may try again."""
        amid = storage_writer.Writer(os.environ, writer.put_amid, storage.uri, "a/1")
        assert amid.connection.recv() == "amid"
        if killed:
            amid.process.kill()
            amid.process.join()
        [left] = (tmp_path / "root" / "a").iterdir()
        foreign = tmp_path / "root" / "a" / "report#1"
        foreign.touch()
        os.utime(foreign, (1, 1))
        open_storage(storage.uri)
        assert left.exists(), "it may be another host's"
        os.utime(left, (1, 1))
        with existing_storages():
            open_storage(storage.uri)
        assert left.exists(), "a reader changes nothing"
        open_storage(storage.uri)
        assert os.listdir(left.parent) == [foreign.name]
        if not killed:
            amid.connection.send("go on")
            assert "No such file" in amid.connection.recv()
            assert storage.get("a/1") is None
            amid.connection.send("again")
            assert amid.connection.recv() is True
            assert storage.get("a/1") == b"1"

    def test_what_others_put_there_is_no_key(self, storage, tmp_path):
        storage.put_if_absent("a/1", b"1")
        (tmp_path / "root" / "a" / "not a key.txt").write_text("")
        assert storage.list("") == ["a/1"]

    def test_nothing_is_left_of_a_put(self, storage, tmp_path):
        storage.put_if_absent("a/1", b"1")
        storage.put_if_absent("a/1", b"2")
        assert os.listdir(tmp_path / "root" / "a") == ["1"]

    def test_a_key_below_a_key(self, storage):
        storage.put_if_absent("a/1", b"1")
        with pytest.raises(StorageError, match="key 'a/1/x': cannot write"):
            storage.put_if_absent("a/1/x", b"2")
        with pytest.raises(StorageError, match="key 'a': cannot write 1 bytes: Is a directory"):
            storage.put_if_absent("a", b"2")

    def test_fsync_of_the_value_before_and_of_its_folders_after_it_can_be_seen(self, storage, tmp_path, monkeypatch):
        root = tmp_path / "root"
        synced: list[tuple[str, bool]] = []
        fsync = os.fsync

        def watched(descriptor: int) -> None:
            fsync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            synced.append((str(path.relative_to(root)).partition("#")[0], (root / "job/r/1").exists()))

        monkeypatch.setattr(os, "fsync", watched)
        storage.put_if_absent("job/r/1", b"1")
        assert synced == [("job/r/1", False), ("job/r", True), ("job", True), (".", True)]
        synced.clear()
        storage.get("job/r/1")
        assert synced == [("job/r", True), ("job", True), (".", True)]

    def test_list_while_others_put_and_delete(self, storage):
        stop = threading.Event()
        failed: list[BaseException] = []

        def churn() -> None:
            number = 0
            try:
                while not stop.is_set():
                    storage.put_if_absent(f"c/{number}", b"1")
                    storage.delete(f"c/{number - 3}")
                    number += 1
            except BaseException as error:
                failed.append(error)

        storage.put_if_absent("c/stays", b"1")
        thread = threading.Thread(target=churn)
        thread.start()
        for _ in range(300):
            assert "c/stays" in storage.list("c")
        stop.set()
        thread.join()
        assert not failed


class TestLinksAndRights:
    """Below the directory nothing is reached through a link, and nobody else may read."""

    @pytest.fixture
    def outside(self, tmp_path: Path) -> Path:
        folder = tmp_path / "outside"
        folder.mkdir()
        (folder / "0000000001.0000000001").write_text("somebody else's")
        return folder

    @pytest.fixture
    def storage(self, tmp_path: Path) -> CheckpointStorage:
        return open_storage(str(tmp_path / "root"))

    def test_a_link_to_a_folder(self, storage, tmp_path, outside):
        storage.put_if_absent("job/1", b"1")
        (tmp_path / "root" / "job" / "alive").symlink_to(outside)
        key = "job/alive/0000000001.0000000001"
        assert storage.list("") == ["job/1", "job/alive"]
        for call in (lambda: storage.get(key), lambda: storage.delete(key), lambda: storage.list("job/alive")):
            with pytest.raises(StorageError, match="a link, which is not followed"):
                call()
        with pytest.raises(StorageError, match=r"key 'job/alive/2': cannot write.*a link, which is not followed"):
            storage.put_if_absent("job/alive/2", b"2")
        storage.delete("job/alive")
        assert storage.list("") == ["job/1"]
        assert [one.read_text() for one in outside.iterdir()] == ["somebody else's"]

    def test_a_link_to_a_file(self, storage, tmp_path, outside):
        storage.put_if_absent("job/1", b"1")
        target = outside / "0000000001.0000000001"
        (tmp_path / "root" / "job" / "2").symlink_to(target)
        assert storage.list("job") == ["job/1", "job/2"]
        assert not storage.put_if_absent("job/2", b"2")
        with pytest.raises(StorageError, match=r"key 'job/2': cannot read: .*symbolic link, which is not followed"):
            storage.get("job/2")
        storage.delete("job/2")
        assert storage.list("job") == ["job/1"]
        assert target.read_text() == "somebody else's"

    def test_a_pipe_holds_nobody_up(self, storage, tmp_path):
        storage.put_if_absent("job/1", b"1")
        os.mkfifo(tmp_path / "root" / "job" / "2")
        with pytest.raises(StorageError, match="key 'job/2': cannot read: it is a pipe"):
            storage.get("job/2")

    def test_the_directory_itself_may_be_a_link(self, tmp_path):
        (tmp_path / "real").mkdir()
        (tmp_path / "linked").symlink_to("real")
        assert open_storage(str(tmp_path / "linked")).put_if_absent("a/1", b"1")
        assert (tmp_path / "real" / "a" / "1").read_bytes() == b"1"

    def test_what_is_made_is_for_this_user(self, tmp_path):
        before = os.umask(0o022)
        try:
            open_storage(str(tmp_path / "root")).put_if_absent("job/1", b"1")
            open_storage(f"sqlite:///{tmp_path}/x.db").put_if_absent("job/1", b"1")
        finally:
            os.umask(before)
        made = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("root", "root/job", "root/job/1", "x.db")}
        assert made == {"root": 0o700, "root/job": 0o700, "root/job/1": 0o600, "x.db": 0o600}

    def test_folders_of_another_account(self):
        """Several accounts may share a directory: each sees what is its own."""
        with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # pytest's is closed to other accounts
            root, me = Path(directory), os.geteuid()
            (root / "another").mkdir(0)
            root.chmod(0o777)
            if me == 0:
                os.seteuid(65534)
            try:
                storage = open_storage(directory)
                storage.put_if_absent("job/1", b"1")
                assert storage.list("") == ["job/1"]
                for call in (lambda: storage.list("another"), lambda: storage.get("another/1")):
                    with pytest.raises(StorageError, match=r"Permission denied\. Use the account of the job"):
                        call()
                (root / "job").chmod(0)
                with pytest.raises(StorageError, match="Permission denied"):
                    storage.list("job")
            finally:
                os.seteuid(me)
                for folder in root.iterdir():
                    folder.chmod(0o700)

    def test_what_this_account_may_not_look_for_is_not_called_missing(self):
        """An operator would go on as if somebody had deleted it."""
        with tempfile.TemporaryDirectory(dir="/tmp") as directory:
            above, me = Path(directory, "x"), os.geteuid()
            uris = f"file://{above}/storage", f"sqlite:///{above}/a.db"
            for uri in uris:
                above.mkdir(exist_ok=True)
                open_storage(uri).put_if_absent("job/1", b"1")
            above.chmod(0)
            if me == 0:
                os.seteuid(65534)
            try:
                for uri, says in zip(uris, ("Permission denied", "unable to open"), strict=True):
                    with existing_storages(), pytest.raises(StorageError, match=says):
                        open_storage(uri).list("")
            finally:
                os.seteuid(me)
                above.chmod(0o700)


class TestSqlite:
    @pytest.mark.parametrize("below", ["plain/x.db", "missing/x.db"])
    def test_a_path_that_cannot_be(self, tmp_path, below):
        (tmp_path / "plain").write_text("")
        with pytest.raises(StorageError, match=r"unable to open database file.*Let this user"):
            open_storage(f"sqlite:///{tmp_path}/{below}")

    def test_a_file_that_is_no_database(self, tmp_path):
        (tmp_path / "x.db").write_bytes(b"not a database" * 100)
        with pytest.raises(StorageError, match=r"file is not a database"):
            open_storage(f"sqlite:///{tmp_path}/x.db")


@pytest.mark.parametrize("form", ["file://{}/s", "sqlite:///{}/s"])
def test_a_storage_that_was_set_back_under_a_driver_is_seen(tmp_path: Path, form: str) -> None:
    storage = open_storage(form.format(tmp_path))
    storage.put_if_absent("job/1", b"1")
    backup = tmp_path / "backup"
    (shutil.copytree if (tmp_path / "s").is_dir() else shutil.copy)(tmp_path / "s", backup)
    storage.put_if_absent("job/2", b"2")
    (tmp_path / "s").rename(tmp_path / "aside")
    backup.rename(tmp_path / "s")
    assert storage.list("job/") == ["job/1"]
    assert storage.put_if_absent("job/3", b"3")
    storage.close()


@needs_mount
@pytest.mark.parametrize(
    ("form", "size"), [("file://{}", 150_000), ("sqlite:///{}/x.db", 120_000)], ids=["file", "sqlite"]
)
def test_a_full_disk(tmp_path, form, size):
    folder = tmp_path / "small"
    printed = in_small_tmpfs(folder, [sys.executable, writer.__file__, form.format(folder), str(size), str(folder)])
    told = dict(line.split(" ", 1) for line in printed.splitlines())
    refused = told.pop("refused")
    assert f", key 'full/{int(told['written']):03}': cannot write {size} bytes: " in refused
    assert "Free space there" in refused
    assert int(told.pop("written")) >= 3
    assert told == {"listed": "True", "absent": "True", "whole": "True", "again": "True"}


class TestPostgres(LostPuts):
    PUT = b"INSERT INTO"

    @pytest.fixture
    def proxy(self, pg_database: str) -> Iterator[Proxy]:
        server = conninfo_to_dict(pg_database)
        proxy = Proxy((str(server["host"]), int(str(server["port"]))))
        yield proxy
        proxy.close()

    @pytest.fixture
    def storage(self, pg_database: str, proxy: Proxy) -> Iterator[SQLStorage]:
        uri = make_url(pg_database).set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        storage = SQLStorage(uri, retry_seconds=120.0)
        yield storage
        storage.close()

    @pytest.fixture
    def direct(self, pg_database: str) -> Iterator[CheckpointStorage]:
        storage = open_storage(pg_database)
        yield storage
        storage.close()

    def test_idle_connections_that_were_cut(self, storage, pg_database):
        storage.put_if_absent("a", b"1")
        with psycopg.connect(pg_database, autocommit=True) as admin:
            ended = admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            ).fetchall()
        assert ended
        assert storage.get("a") == b"1"
        assert storage.put_if_absent("a", b"1") is False

    def test_a_server_that_is_away_for_a_while(self, storage, proxy):
        proxy.refuse = True
        proxy.cut_all()
        with ThreadPoolExecutor(1) as thread:
            put = thread.submit(storage.put_if_absent, "a", b"1")
            eventually(lambda: proxy.refused >= 2)
            proxy.refuse = False
            assert put.result(120) is True
        assert storage.list("") == ["a"]

    def test_a_server_that_stays_away(self, pg_database, proxy):
        uri = make_url(pg_database).set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        storage = SQLStorage(uri, retry_seconds=1.0)
        proxy.refuse = True
        proxy.cut_all()
        started = time.monotonic()
        with pytest.raises(
            StorageError, match=r"key 'a': cannot write 1 bytes: .*connection.*Check that the server runs"
        ):
            storage.put_if_absent("a", b"1")
        assert time.monotonic() - started > 0.9
        for call in (lambda: storage.get("a"), lambda: storage.list("a"), lambda: storage.delete("a")):
            with pytest.raises(StorageError, match="Check that the server runs"):
                call()
        storage.close()

    def test_every_put_is_durable_even_if_the_database_says_otherwise(self, direct, pg_database):
        name = conninfo_to_dict(pg_database)["dbname"]
        for setting, runs_with in (("off", "local"), ("remote_apply", "remote_apply")):
            with psycopg.connect(pg_database, autocommit=True) as admin:
                admin.execute(f'ALTER DATABASE "{name}" SET synchronous_commit = {setting}')
            storage = SQLStorage(pg_database)
            with storage._engine.connect() as connection:
                assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == runs_with
            storage.close()

    def test_a_table_of_somebody_else(self, pg_database):
        with psycopg.connect(pg_database, autocommit=True) as admin:
            admin.execute("CREATE TABLE checkpoint_storage (key text, owner text NOT NULL)")
        with pytest.raises(StorageError, match=r"columns \['key', 'owner'\].*It belongs to something else"):
            open_storage(pg_database)

    def test_a_table_without_its_primary_key(self, pg_database):
        with psycopg.connect(pg_database, autocommit=True) as admin:
            admin.execute("CREATE TABLE checkpoint_storage (key text, value bytea, created timestamptz DEFAULT now())")
        with pytest.raises(StorageError, match=r"the primary key \[\], not .* and \[.key.\]"):
            open_storage(pg_database)

    def test_no_right_to_make_the_table(self, pg_database):
        with psycopg.connect(pg_database, autocommit=True) as admin:
            admin.execute("CREATE ROLE reader LOGIN PASSWORD 'p'")
            admin.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
        try:
            with pytest.raises(StorageError, match=r"cannot make the table.*permission denied.*Let this user"):
                open_storage(make_url(pg_database).set(username="reader", password="p").render_as_string(False))
        finally:
            with psycopg.connect(pg_database, autocommit=True) as admin:
                admin.execute("DROP ROLE reader")


class TestFrozen:
    """SIGSTOP: connections stay open, the system acknowledges every byte, and nothing answers."""

    @pytest.mark.parametrize(("kind", "timeouts"), [("postgres", ""), ("mariadb", "&read_timeout=1&write_timeout=1")])
    def test_every_call_ends(self, request, monkeypatch, kind, timeouts):
        """All bounds are shorter than by default, so that the test does not wait for those."""
        monkeypatch.setattr(sql, "_ANSWER_SECONDS", 1)
        server: Any = request.getfixturevalue(kind)
        with server.database() as dsn:
            dsn += f"?connect_timeout=2{timeouts}"
            storage = patiently(lambda: SQLStorage(dsn, retry_seconds=1))
            patiently(lambda: storage.put_if_absent("a", b"1"))
            processes = processes_of(storage)
            for process in processes:
                process.suspend()
            try:
                with ThreadPoolExecutor() as pool:
                    calls = [
                        pool.submit(fails, call)
                        for call in (
                            lambda: storage.put_if_absent("b", b"1"),
                            lambda: storage.get("a"),
                            lambda: storage.list(""),
                            lambda: storage.weaknesses(),
                            lambda: open_storage(dsn),
                        )
                    ]
                    for call in calls:
                        call.result()
            finally:
                for process in processes:
                    process.resume()
            assert patiently(lambda: storage.get("a")) == b"1"
            storage.close()


def processes_of(storage: SQLStorage) -> list[psutil.Process]:
    with storage._engine.connect() as connection:
        if connection.dialect.name == "postgresql":
            main = psutil.Process(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()).parent()
            assert main
        else:
            main = psutil.Process(int(Path(connection.exec_driver_sql("SELECT @@pid_file").scalar_one()).read_text()))
    return [main, *main.children(recursive=True)]


def fails(call: Callable[[], object]) -> None:
    with pytest.raises(StorageError):
        call()
