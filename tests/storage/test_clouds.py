"""Storage in object stores, on an S3-compatible server."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError
from obstore.store import S3Store

from coordinator.storage import CheckpointStorage, StorageError, existing_storages, open_storage
from coordinator.storage.objects import _RACERS, ObjectStorage, open_bucket
from sinks.testing.servers.s3 import PAGE, S3Server
from sinks.testing.storage import ProcessConformance
from sinks.testing.table import eventually
from tests.storage.lost_puts import LostPuts
from tests.storage.patience import patiently
from tests.storage.proxy import Proxy


class TestS3(ProcessConformance):
    keys = 60  # of which eight writers put each: two milliseconds of processor time a put
    keys_of_threads = 15
    kills = 4

    @pytest.fixture
    def uri(self, s3_bucket: str) -> str:
        return f"{s3_bucket}/check points/ü"

    def test_more_keys_than_one_answer_lists(self, storage):
        keys = [f"a/{number}" for number in range(PAGE + 5)]
        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(lambda key: storage.put_if_absent(key, b""), keys))
        assert storage.list("") == sorted(keys)


class TestUris:
    @pytest.mark.parametrize(
        "uri", ["s3://key:S3cr3t@bucket/x", "gs://S3cr3t@bucket/x", "az://c/x?sig=S3cr3t", "s3://b/x#S3cr3t"]
    )
    def test_secrets_are_refused_and_not_repeated(self, uri):
        with pytest.raises(StorageError, match=r"not allowed in the URI\. Write .*://.*/PREFIX; .*_\* \S+$") as caught:
            open_storage(uri)
        assert "S3cr3t" not in "".join(traceback.format_exception(caught.value)).replace(repr(uri), "")

    @pytest.mark.parametrize(
        ("uri", "says"),
        [
            ("s3:///x", r"Unable to recognise URL.*Write s3://BUCKET/PREFIX"),
            ("s3://bucket//x", r"empty path segment.*Write s3://BUCKET/PREFIX"),
            ("gs://", r"Write gs://BUCKET/PREFIX; .*GOOGLE_\*"),
            ("s3://buc ket/x", r"invalid domain character.*Write s3://BUCKET/PREFIX"),
        ],
    )
    def test_what_is_no_bucket(self, uri, says):
        with pytest.raises(StorageError, match=says):
            open_storage(uri)

    @pytest.mark.parametrize(
        ("uri", "says"),
        [
            ("s3a://key:S3cr3t@bucket/x", r"Hadoop's s3a has no put-if-absent.*Write s3://BUCKET/PREFIX"),
            ("abfss://c@account.dfs.core.windows.net/x", r"Hadoop's abfss has no.*Write az://CONTAINER/PREFIX"),
            ("webhdfs://h/x", r"Hadoop's webhdfs has no.*Write hdfs://HOST:PORT/PATH"),
        ],
    )
    def test_hadoop_without_an_atomic_put(self, uri, says):
        with pytest.raises(StorageError, match=says) as caught:
            open_storage(uri)
        assert "S3cr3t" not in str(caught.value)

    def test_azure_without_an_account(self, monkeypatch):
        for name in [name for name in os.environ if name.startswith("AZURE_")]:
            monkeypatch.delenv(name)
        with pytest.raises(StorageError, match=r"Account must be specified\. No usable credentials.*AZURE_\*"):
            open_storage("az://container/x")

    def test_google_that_cannot_be_reached(self, monkeypatch, tmp_path):
        account = tmp_path / "account.json"
        account.write_text(
            '{"gcs_base_url": "http://127.0.0.1:1", "disable_oauth": true,'
            ' "client_email": "", "private_key": "", "private_key_id": ""}'
        )
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
        monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
        with pytest.raises(StorageError, match=r"cannot list: .*error sending request.*endpoint in GOOGLE_\*"):
            open_bucket("gs://bucket/x", retry_seconds=0.5)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """A server of this module's own, to be killed and frozen."""
    with S3Server() as server:
        yield server


class TestFailures(LostPuts):
    PUT = b"if-none-match"

    @pytest.fixture
    def bucket(self, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        return server.make_bucket()

    @pytest.fixture
    def direct(self, bucket: str) -> CheckpointStorage:
        return open_bucket(f"s3://{bucket}/x", retry_seconds=1.0)

    @pytest.fixture
    def proxy(self, server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
        proxy = Proxy(("127.0.0.1", server.port))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield proxy
        proxy.close()

    @pytest.fixture
    def storage(self, direct: CheckpointStorage, proxy: Proxy) -> CheckpointStorage:
        """The same as `direct`, through the proxy."""
        return open_bucket(direct.uri, retry_seconds=120.0)

    def assert_all_fail(self, storage: CheckpointStorage, says: str) -> None:
        for action, call in {
            "write 1 bytes": lambda: storage.put_if_absent("a", b"1"),
            "read": lambda: storage.get("a"),
            "list 'a/'": lambda: storage.list("a"),
            "delete": lambda: storage.delete("a"),
        }.items():
            with pytest.raises(StorageError, match=rf"cannot {action}: .*{says}"):
                call()

    # ------------------------------------------------------------------ the store as it is set up
    def test_no_bucket(self, bucket):
        with pytest.raises(
            StorageError, match=r"storage s3://nowhere/x: cannot list: .*NoSuchBucket: .* Create the bucket"
        ):
            open_storage("s3://nowhere/x")

    @pytest.mark.parametrize("action", ["s3:PutObject", "s3:GetObject", "s3:DeleteObject"])
    def test_a_right_is_missing(self, server, bucket, direct, action):
        direct.put_if_absent("a", b"1")
        server.deny(bucket, action)
        call = {
            "s3:PutObject": lambda: direct.put_if_absent("b", b"2"),
            "s3:GetObject": lambda: direct.get("a"),
            "s3:DeleteObject": lambda: direct.delete("a"),
        }[action]
        with pytest.raises(
            StorageError, match=r"key '.': cannot .*Check the credentials in AWS_\*; they need permission"
        ):
            call()

    def test_a_store_that_may_not_be_written_is_not_opened(self, server, bucket):
        server.deny(bucket, "s3:PutObject")
        with pytest.raises(StorageError, match=r"cannot write: .*403.*Check the credentials"):
            open_storage(f"s3://{bucket}/x")

    def test_looking_takes_no_right_to_write(self, server, bucket, direct):
        direct.put_if_absent("a", b"1")
        server.deny(bucket, "s3:PutObject")
        with existing_storages():
            storage = open_storage(f"s3://{bucket}/x")
        assert (storage.list(""), storage.get("a")) == (["a"], b"1")

    def test_no_credentials(self, bucket, monkeypatch):
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        with pytest.raises(StorageError, match=r"Missing AccessKeyId\. No usable credentials were found"):
            open_storage(f"s3://{bucket}/x")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
        with pytest.raises(
            StorageError, match=r"No usable credentials were found: set the environment variables AWS_\*"
        ):
            open_bucket(f"s3://{bucket}/x", retry_seconds=0.5)

    def test_http_is_not_allowed_unless_told(self, bucket, monkeypatch):
        monkeypatch.delenv("AWS_ALLOW_HTTP")
        with pytest.raises(StorageError, match=r"Only https is allowed; .* ALLOW_HTTP=true in AWS_\*"):
            open_storage(f"s3://{bucket}/x")

    def test_a_bucket_of_another_region(self, storage, proxy):
        proxy.answers.append((b"GET", b"HTTP/1.1 301 Moved Permanently\r\ncontent-length: 0\r\n\r\n"))
        with pytest.raises(StorageError, match=r"Set AWS_REGION to the region of the bucket"):
            storage.list("")

    def test_a_store_that_ignores_the_condition_is_refused(self, bucket, proxy):
        proxy.changes[b"if-none-match"] = b"x-none-match-"
        with pytest.raises(StorageError, match=r"ignores the header If-None-Match: \*\. Use a store"):
            open_storage(f"s3://{bucket}/x")

    def test_opening_leaves_nothing_that_is_a_key(self, bucket, direct):
        open_storage(direct.uri)
        assert direct.list("") == []
        names = [entry["path"] for chunk in obstore.list(S3Store(bucket)) for entry in chunk]
        assert names == []

    def test_a_store_that_looks_first_and_puts_then_is_refused(self, bucket, proxy):
        """Each of the puts at once passes the look, and overwrites the other."""
        real = obstore.put
        looked = threading.Barrier(_RACERS)

        def look_then_put(store, name, data, **options):
            with contextlib.suppress(FileNotFoundError):
                obstore.head(store, name)
                raise AlreadyExistsError("there")
            looked.wait(120)
            return real(store, name, data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(obstore, "put", look_then_put)
            with pytest.raises(StorageError, match=r"accepts 4 of 4 puts of one name at once"):
                open_storage(f"s3://{bucket}/x")

    def test_a_store_that_is_busy_when_it_is_opened(self, bucket, proxy):
        proxy.answers.append((b"if-none-match", b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\n\r\n"))
        assert open_storage(f"s3://{bucket}/x").put_if_absent("a", b"1") is True
        assert proxy.answers == []

    def test_a_store_that_has_no_conditional_puts_is_refused(self, bucket, proxy):
        answer = (b"if-none-match", b"HTTP/1.1 501 Not Implemented\r\ncontent-length: 0\r\n\r\n")
        proxy.answers += [answer] * _RACERS
        with pytest.raises(StorageError, match=r"501.*The store has no conditional puts"):
            open_storage(f"s3://{bucket}/x")

    def test_a_store_of_ones_own(self, bucket, direct):
        storage = ObjectStorage("s3://elsewhere", S3Store(bucket, prefix="x"))
        assert storage.put_if_absent("a", b"1") is True
        assert direct.get("a") == b"1"

    def test_a_session_token_that_the_store_repeats_stays_hidden(self, storage, proxy):
        body = (
            b'<?xml version="1.0"?><Error><Code>SignatureDoesNotMatch</Code><Message>Wrong</Message>'
            b"<CanonicalRequest>x-amz-security-token:S3cr3t</CanonicalRequest></Error>"
        )
        proxy.answers.append((b"GET", b"HTTP/1.1 403 Forbidden\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)))
        with pytest.raises(StorageError, match=r"SignatureDoesNotMatch: Wrong\. Check the credentials") as caught:
            storage.get("a")
        told = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
        assert "S3cr3t" not in told.replace(Path(__file__).read_text(), "")

    @pytest.mark.parametrize(
        ("code", "says"),
        [
            ("RequestTimeTooSkewed", "RequestTimeTooSkewed. See that the clock of the driver's machine is right"),
            ("AccessDenied", "AccessDenied. Check the credentials"),
        ],
    )
    def test_a_clock_that_is_wrong(self, storage, proxy, code, says):
        body = f"<Error><Code>{code}</Code></Error>".encode()
        proxy.answers.append((b"GET", b"HTTP/1.1 403 Forbidden\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)))
        with pytest.raises(StorageError, match=re.escape(says)):
            storage.get("a")

    # ------------------------------------------------------------------ puts that go wrong on their way
    def test_a_put_that_the_store_has_waited_for_in_vain(self, storage, direct, proxy):
        body = b"<Error><Code>RequestTimeout</Code></Error>"
        late = b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        proxy.answers.append((b"if-none-match", late))
        assert storage.put_if_absent("a", b"mine") is True
        assert direct.get("a") == b"mine"

    def test_a_conflict_is_no_value(self, storage, direct, proxy):
        """S3 answers 409 while the key is being deleted; obstore takes it for a value."""
        conflict = b"HTTP/1.1 409 Conflict\r\ncontent-length: 0\r\n\r\n"
        proxy.answers += [(b"if-none-match", conflict)] * 2
        assert storage.put_if_absent("a", b"mine") is True
        assert proxy.answers == []
        assert direct.get("a") == b"mine"

    def test_a_conflict_that_does_not_end(self, direct, proxy):
        storage = open_bucket(direct.uri, retry_seconds=0.5)
        proxy.answers += [(b"if-none-match", b"HTTP/1.1 409 Conflict\r\ncontent-length: 0\r\n\r\n")] * 100
        with pytest.raises(StorageError, match=r"key 'a': cannot write 4 bytes: .*409 Conflict"):
            storage.put_if_absent("a", b"mine")
        assert direct.get("a") is None

    # ------------------------------------------------------------------ the server is away
    def test_a_server_that_is_away_for_a_while(self, storage, proxy):
        proxy.refuse = True
        proxy.on_cut = lambda: None
        with ThreadPoolExecutor(1) as thread:
            put = thread.submit(storage.put_if_absent, "a", b"1")
            eventually(lambda: proxy.refused >= 2)
            proxy.refuse = False
            assert put.result(120) is True
        assert storage.list("") == ["a"]

    def test_a_server_that_was_killed_and_one_that_lost_the_bucket(self, server, direct):
        server.kill()
        self.assert_all_fail(direct, r"Check that the store, or the endpoint in AWS_\*, can be reached")
        server.start()
        for call in (lambda: direct.put_if_absent("a", b"1"), lambda: direct.get("a"), lambda: direct.list("")):
            with pytest.raises(StorageError, match=r"NoSuchBucket.*Create the bucket"):
                call()

    def test_a_frozen_server(self, server, direct, monkeypatch):
        monkeypatch.setenv("AWS_TIMEOUT", "1s")
        impatient = patiently(lambda: open_bucket(direct.uri, retry_seconds=1.0))
        server.pause()
        try:
            self.assert_all_fail(impatient, r"Check that the store, or the endpoint in AWS_\*, can be reached")
        finally:
            server.resume()
        direct.put_if_absent("a", b"1")
        assert direct.get("a") == b"1"
