"""Storage in HDFS, through the JVM of the Spark session, on a mini cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest
from pyspark.sql import SparkSession

from coordinator.operations.requests import ask_driver
from coordinator.storage import CheckpointStorage, MissingStorage, StorageError, existing_storages, open_storage
from coordinator.store.job_store import JobStore
from sinks.testing.servers.hdfs import HdfsServer
from sinks.testing.storage import ProcessConformance
from tests.protocol.job import Job
from tests.storage.patience import patiently
from tests.storage.proxy import Proxy


@pytest.fixture(scope="module")
def server() -> Iterator[HdfsServer]:
    with HdfsServer() as server:
        yield server


@pytest.mark.slow
class TestHdfs(ProcessConformance):
    """One class, so that one worker of a parallel run has the cluster."""

    writers = 2  # each with a JVM
    keys = 40
    keys_of_threads = 4  # eight puts for each, of 70 ms of processor time
    kills = 1

    @pytest.fixture
    def uri(self, server: HdfsServer, spark: SparkSession) -> str:
        return f"{server.uri}/test/{uuid4().hex}"

    @pytest.fixture
    def settings(self, spark: SparkSession) -> Iterator[Callable[[str, str], None]]:
        """Sets options of the session, which Hadoop's client gets too, until the end of the test."""
        names = []

        def set(name: str, value: str) -> None:
            names.append(name)
            spark.conf.set(name, value)

        yield set
        for name in names:
            spark.conf.unset(name)

    @pytest.mark.large
    def test_processes_race_for_each_key(self, uri, reopen, environment):
        super().test_processes_race_for_each_key(uri, reopen, environment)

    @pytest.mark.large
    @pytest.mark.chaos
    @pytest.mark.parametrize("size", [1_000_000])
    def test_a_killed_writer_leaves_whole_values_only(self, uri, reopen, environment, size):
        super().test_a_killed_writer_leaves_whole_values_only(uri, reopen, environment, size)

    # ------------------------------------------------------------------ what is there, and what is durable
    def test_what_a_killed_writer_left_is_no_key_and_goes_with_it(self, storage, spark):
        files, path = storage._files, storage._path
        unfinished = files.create(path("a/1#123"), storage._flags, storage._options)
        unfinished.write(b"to")
        files.create(path("a/10#4"), storage._flags, storage._options).close()
        assert storage.get("a/1") is None
        assert storage.list("") == []
        assert storage.put_if_absent("a/1", b"whole") is True
        assert storage.get("a/1") == b"whole"
        storage.delete("a/1")
        left = [status.getPath().getName() for status in files.util().listStatus(path("a"))]
        assert left == ["10#4"]

    def test_nothing_is_left_of_a_put(self, storage):
        storage.put_if_absent("a/1", b"1")
        storage.put_if_absent("a/1", b"2")
        assert [s.getPath().getName() for s in storage._files.util().listStatus(storage._path("a"))] == ["1"]

    def test_what_is_made_is_for_this_user(self, storage):
        storage.put_if_absent("job/1", b"1")
        permissions = [storage._files.getFileStatus(storage._path(name)).getPermission() for name in ("", "job/1")]
        assert list(map(str, permissions)) == ["rwx------", "rw-------"]

    def test_folders_above_stay_open_to_others(self, storage, uri):
        nested: Any = open_storage(f"{uri}-above/x/storage")
        folders = [
            nested._files.getFileStatus(storage._fs.Path(f"{uri}-above{each}")) for each in ("", "/x", "/x/storage")
        ]
        assert [str(one.getPermission()) for one in folders] == ["rwxr-xr-x", "rwxr-xr-x", "rwx------"]

    def test_looking_makes_nothing(self, storage, uri):
        with existing_storages():
            missing = open_storage(f"{uri}-mistyped")
            assert isinstance(missing, MissingStorage)
            assert missing.list("") == []
            assert not isinstance(open_storage(uri), MissingStorage)
        assert not storage._files.util().exists(storage._fs.Path(f"{uri}-mistyped"))

    @pytest.mark.large
    def test_an_operator_asks_a_driver_by_it(self, storage, tmp_path):
        job, options = Job(tmp_path, batches=2), {"savepoint_dir": f"file://{tmp_path}/savepoints"}
        with job.coordinator(storage=storage, config=options | {"request_poll_interval": 0.2}) as coordinator:
            job.quiet(2).run(coordinator)
            taken = ask_driver(JobStore(storage, "job"), "trigger")
        assert taken["checkpoint"] == 1

    def test_a_key_below_a_key(self, storage):
        storage.put_if_absent("a/1", b"1")
        with pytest.raises(StorageError, match=r"key 'a/1/x': cannot write 1 bytes: ParentNotDirectoryException"):
            storage.put_if_absent("a/1/x", b"2")
        with pytest.raises(StorageError, match=r"key 'a': cannot write 1 bytes: .*must both be directories"):
            storage.put_if_absent("a", b"2")

    def test_a_reader_waits_until_the_edit_log_has_what_it_read(self, storage, spark, uri):
        jvm = spark._jvm
        assert jvm is not None
        file_system = jvm.org.apache.hadoop.fs.FileSystem.get(
            jvm.java.net.URI.create(uri), spark._jsparkSession.sessionState().newHadoopConf()
        )
        name_node = file_system.getClient().getNamenode()
        storage.put_if_absent("a", b"1")
        status = storage._files.getFileStatus(storage._path("a")).toString()
        before = name_node.getCurrentEditLogTxid()
        assert storage.get("a") == b"1"
        assert name_node.getCurrentEditLogTxid() == before + 1, "an edit, which is synced after all before it"
        assert storage._files.getFileStatus(storage._path("a")).toString() == status, "that changes nothing"

    def test_values_outlive_a_killed_name_node(self, server, storage, settings, reopen):
        storage.put_if_absent("a", b"1")
        settings("ipc.client.connect.max.retries", "1")
        settings("ipc.client.connect.retry.interval", "100")
        impatient = reopen()
        server.kill()
        try:
            unreachable = r"(EOF|Connect)Exception: .*\. Check that the name node runs"
            self.assert_all_fail(impatient, unreachable)
            with pytest.raises(StorageError, match=rf"cannot make the directory: {unreachable}"):
                reopen()
        finally:
            server.start()
        assert storage.get("a") == b"1"
        assert storage.put_if_absent("a", b"2") is False
        assert storage.put_if_absent("b", b"2") is True

    # ------------------------------------------------------------------ what goes wrong
    def test_a_frozen_name_node(self, server, storage, settings, reopen):
        settings("ipc.client.rpc-timeout.ms", "1000")
        impatient = patiently(reopen)
        server.pause()
        try:
            self.assert_all_fail(impatient, r"SocketTimeoutException: .*\. Check that the name node runs")
        finally:
            server.resume()
        patiently(lambda: impatient.put_if_absent("b", b"1"))
        assert storage.get("b") == b"1"

    def test_a_put_whose_answer_is_lost_is_known_as_ones_own(self, server, storage, uri):
        with self.through_a_proxy(server, uri) as (proxied, proxy):
            seen: list[bytes | None] = []
            proxy.cut_at, proxy.after_answer, proxy.on_cut = b"rename2", True, lambda: seen.append(storage.get("a"))
            assert proxied.put_if_absent("a", b"mine") is True
            assert seen == [b"mine"], "the value was there before the connection was cut"
            assert proxy.cuts == 1

    def test_a_put_that_did_not_arrive(self, server, storage, uri):
        with self.through_a_proxy(server, uri) as (proxied, proxy):
            proxy.cut_at = b"rename2"
            with pytest.raises(StorageError, match=r"key 'a': cannot write 4 bytes"):
                proxied.put_if_absent("a", b"mine")
            proxy.cut_at, proxy.on_cut = b"rename2", lambda: storage.put_if_absent("b", b"theirs")
            assert proxied.put_if_absent("b", b"mine") is False
            assert proxy.cuts == 2
            assert storage.list("") == ["b"]

    def test_permissions_are_missing(self, spark, storage, reopen, uri):
        storage.put_if_absent("a", b"1")
        with self.another_user(spark):
            other = reopen()
            for call in (lambda: other.get("a"), lambda: other.put_if_absent("b", b"2"), lambda: other.delete("a")):
                with pytest.raises(
                    StorageError, match=r"AccessControlException: .*\. Let the user that runs the driver"
                ):
                    call()
            with pytest.raises(StorageError, match=r"cannot make the directory: AccessControlException"):
                open_storage(f"{uri}/below")

    def test_a_path_below_a_file(self, storage, uri):
        storage.put_if_absent("a", b"1")
        with pytest.raises(StorageError, match=r"cannot make the directory: .*use another directory"):
            open_storage(f"{uri}/a")

    @pytest.mark.parametrize(
        ("uri", "says"),
        [
            ("hdfs://127.0.0.1:8020/", r"no host or no directory\. Write hdfs://HOST:PORT/DIRECTORY"),
            ("hdfs://u:S3cr3t@h/x", r"storage hdfs://\.\.\.: a user is not allowed in the URI"),
            ("hdfs:///x", r"no host or no directory\. Write hdfs://HOST:PORT/DIRECTORY"),
            ("hdfs://no-such-host.invalid/x", r"cannot make the directory: .*UnknownHostException.*\. Check the host"),
        ],
    )
    def test_what_is_no_directory(self, spark, uri, says):
        with pytest.raises(StorageError, match=says) as caught:
            open_storage(uri)
        assert "S3cr3t" not in str(caught.value)

    def test_viewfs(self, spark, server, settings, tmp_path, uri):
        settings("fs.viewfs.mounttable.here.link./hdfs", uri)
        settings("fs.viewfs.mounttable.here.link./local", tmp_path.as_uri())
        storage = open_storage("viewfs://here/hdfs/below")
        assert storage.put_if_absent("a/1", b"1") is True
        assert storage.put_if_absent("a/1", b"2") is False
        assert storage.list("") == ["a/1"]
        assert open_storage(f"{uri}/below").get("a/1") == b"1"
        with pytest.raises(StorageError, match=r"it leads to file://, which has no atomic put-if-absent"):
            open_storage("viewfs://here/local/below")

    @pytest.mark.large  # test_no_jvm is of a session that has none
    def test_the_jvm_is_gone(self, uri, environment):
        script = (
            "import os, sys; from pyspark import SparkContext; from coordinator.storage import *\n"
            "from sinks.testing.storage_writer import small_session; small_session()\n"
            "storage = open_storage(sys.argv[1])\n"
            "java = SparkContext._gateway.proc; java.kill(); java.wait()\n"
            "for call, arguments in {'put_if_absent': ('a', b'1'), 'get': ('a',), 'list': ('',)}.items():\n"
            "    try: getattr(storage, call)(*arguments)\n"
            "    except StorageError as error: print(error, flush=True)\n"
            "os._exit(0)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, uri],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        told = [line for line in done.stdout.splitlines() if "the JVM of the Spark session is gone" in line]
        assert len(told) == 3, done.stdout + done.stderr[-1500:]
        assert "key 'a': cannot write 1 bytes: " in told[0]

    def assert_all_fail(self, storage: CheckpointStorage, says: str) -> None:
        for action, call in {
            "write 1 bytes": lambda: storage.put_if_absent("z", b"1"),
            "read": lambda: storage.get("a"),
            "list ''": lambda: storage.list(""),
            "delete": lambda: storage.delete("a"),
        }.items():
            with pytest.raises(StorageError, match=rf"cannot {action}: {says}"):
                call()

    @contextmanager
    def through_a_proxy(self, server: HdfsServer, uri: str) -> Iterator[tuple[CheckpointStorage, Proxy]]:
        proxy = Proxy(("127.0.0.1", server.port))
        try:
            yield open_storage(uri.replace(str(server.port), str(proxy.port))), proxy
        finally:
            proxy.close()

    @contextmanager
    def another_user(self, spark: SparkSession) -> Iterator[None]:
        jvm: Any = spark._jvm
        users = jvm.org.apache.hadoop.security.UserGroupInformation
        oneself = users.getLoginUser()
        users.setLoginUser(users.createRemoteUser("somebody"))
        try:
            yield
        finally:
            users.setLoginUser(oneself)


CONNECT = """
import os
os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
from pyspark.sql.connect.session import SparkSession
SparkSession._set_default_and_active_session(SparkSession("sc://127.0.0.1:1"))
"""


@pytest.mark.parametrize("session", ["", CONNECT], ids=["none", "connect"])
def test_no_jvm(session):
    script = session + (
        "import os\nfrom coordinator.storage import *\n"
        "try: open_storage('hdfs://127.0.0.1:1/x')\n"
        "except StorageError as error: print(error, flush=True)\n"
        "os._exit(0)"  # a Connect session would say goodbye to its server
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert "no Spark session with a JVM runs in this process. Start the session before" in done.stdout, done.stderr
    assert "Spark Connect has no JVM on this side: use storage that needs none" in done.stdout
