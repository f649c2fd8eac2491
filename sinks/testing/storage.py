"""The suite for checkpoint storages: what `coordinator.storage.CheckpointStorage` promises.

class TestMyStorage(ProcessConformance):
    @pytest.fixture
    def uri(self, tmp_path):
        # an empty storage, which `open_storage` opens in any process
        return f"mine://{tmp_path}"
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import pytest

from coordinator.storage import CheckpointStorage, StorageError, open_storage
from sinks.testing.faults import meet
from sinks.testing.lines import lines
from sinks.testing.storage_writer import Writer, is_whole, race, run_on, value_of

Reopen = Callable[[], CheckpointStorage]


class StorageConformance:
    """What every storage must do.

    A subclass gives `reopen`, which opens the same storage once more.
    """

    keys_of_threads = 50
    """For which eight threads race."""

    @pytest.fixture
    def reopen(self) -> Callable[[], CheckpointStorage]:
        raise NotImplementedError

    @pytest.fixture
    def storage(self, reopen: Callable[[], CheckpointStorage]) -> Iterator[CheckpointStorage]:
        storage = reopen()
        yield storage
        storage.close()

    def test_a_value_is_read_back_by_oneself_and_by_others(
        self, storage: CheckpointStorage, reopen: Reopen
    ) -> None:
        assert storage.put_if_absent("job/1/record", b"value") is True
        other = reopen()
        for reader in (storage, other):
            assert reader.get("job/1/record") == b"value"
            assert reader.list("job") == ["job/1/record"]
        other.close()

    def test_a_value_outlives_close(self, storage: CheckpointStorage, reopen: Reopen) -> None:
        storage.put_if_absent("a", b"1")
        storage.close()
        storage.close()
        again = reopen()
        assert again.get("a") == b"1"
        again.close()

    @pytest.mark.parametrize(
        "value", [b"", b"\0", bytes(range(256)) * 5, b"'; \\ %s {}\r\n"], ids=repr
    )
    def test_any_bytes(self, storage: CheckpointStorage, value: bytes) -> None:
        assert storage.put_if_absent("a", value) is True
        got = storage.get("a")
        assert type(got) is bytes
        assert got == value

    def test_five_megabytes(self, storage: CheckpointStorage) -> None:
        value = os.urandom(5_000_000)
        assert storage.put_if_absent("job/large", value) is True
        assert storage.get("job/large") == value

    def test_the_first_put_stays(self, storage: CheckpointStorage) -> None:
        assert storage.put_if_absent("a/1", b"first") is True
        assert storage.put_if_absent("a/1", b"second") is False
        assert storage.put_if_absent("a/1", b"first") is False
        assert storage.get("a/1") == b"first"

    def test_an_absent_key(self, storage: CheckpointStorage) -> None:
        assert storage.get("nowhere/at/all") is None
        storage.delete("nowhere/at/all")
        assert storage.list("nowhere") == []
        assert storage.list("") == []

    def test_list_is_sorted_and_holds_to_folders(self, storage: CheckpointStorage) -> None:
        inside = [
            "a/1/x",
            "a/1/B",
            "a/1/b",
            "a/1/0-9",
            "a/1/10",
            "a/1/9",
            "a/1/deep/er",
            "a/1/_",
            "a/1/x.y",
        ]
        outside = [
            "a/10",
            "a/10x/x",
            "a/1-/x",
            "a/1.5/x",
            "a/0",
            "A/1/x",
            "b/a/1/x",
            "aa/1/x",
            "a_1/x",
        ]
        for key in inside + outside:
            assert storage.put_if_absent(key, b"")
        assert storage.list("a/1") == sorted(inside)
        assert storage.list("a/1/") == sorted(inside)
        assert storage.list("a/1/deep") == ["a/1/deep/er"]
        assert storage.list("") == sorted(inside + outside)

    def test_a_pattern_sign_is_no_pattern(self, storage: CheckpointStorage) -> None:
        storage.put_if_absent("a_b/1", b"")
        storage.put_if_absent("acb/1", b"")
        assert storage.list("a_b") == ["a_b/1"]

    def test_case_counts(self, storage: CheckpointStorage) -> None:
        assert storage.put_if_absent("job/Key", b"upper") is True
        assert storage.put_if_absent("job/key", b"lower") is True
        assert storage.get("job/Key") == b"upper"

    def test_delete_frees_the_key(self, storage: CheckpointStorage) -> None:
        storage.put_if_absent("a/1", b"1")
        storage.put_if_absent("a/2", b"2")
        storage.delete("a/1")
        assert storage.get("a/1") is None
        assert storage.list("a") == ["a/2"]
        assert storage.put_if_absent("a/1", b"new") is True
        assert storage.get("a/1") == b"new"

    @pytest.mark.parametrize(
        "key",
        ["", "/a", "a/", "a//b", ".", "..", "a/../b", "a/.", "a b", "a#1", "ä", "a\n", "a%2Fb",
         "a\\b", "a/*", "\0", "s" * 201, "/".join(["s" * 100] * 6)],
        ids=lambda key: repr(key)[:20],
    )  # fmt: skip
    def test_what_is_no_key(self, storage: CheckpointStorage, key: str) -> None:
        with pytest.raises(ValueError, match="not a key"):
            storage.put_if_absent(key, b"")
        with pytest.raises(ValueError, match="not a key"):
            storage.get(key)
        with pytest.raises(ValueError, match="not a key"):
            storage.delete(key)
        if key not in ("", "a/"):
            with pytest.raises(ValueError, match="not a key"):
                storage.list(key)

    def test_the_longest_key(self, storage: CheckpointStorage) -> None:
        key = "/".join(["s" * 200, "t" * 200, "u" * 110])
        assert len(key) == 512
        assert storage.put_if_absent(key, b"1") is True
        assert storage.list("s" * 200) == [key]
        assert storage.get(key) == b"1"

    def test_threads_race_for_each_key(self, storage: CheckpointStorage) -> None:
        won: list[tuple[str, str]] = []
        start = threading.Barrier(8)

        def run(name: str) -> None:
            start.wait()
            for key in (f"race/{number}" for number in range(self.keys_of_threads)):
                if storage.put_if_absent(key, value_of(name, key, 100)):
                    won.append((key, name))

        threads = [threading.Thread(target=run, args=(str(number),)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(key for key, _ in won) == storage.list("race")
        assert len(won) == self.keys_of_threads
        for key, name in won:
            assert storage.get(key) == value_of(name, key, 100)

    def test_a_put_beside_another(self, storage: CheckpointStorage, reopen: Reopen) -> None:
        """One is stopped at any line of its own, and another one puts under the same key, and reads
        it. However fast the storage is, they meet."""
        other = reopen()
        storage.put_if_absent("beside/a", b"")
        stops = lines(storage, lambda: storage.put_if_absent("beside/trial", b"1"), 20)
        for number, stop in enumerate(stops):
            key = f"beside/{number}"
            values = [value_of(name, key, 100) for name in ("first", "second")]

            def put_and_get(key: str, value: bytes) -> tuple[bool, bytes | None]:
                return other.put_if_absent(key, value), other.get(key)

            first = partial(storage.put_if_absent, key, values[0])
            second = partial(put_and_get, key, values[1])
            put, answer = meet(storage, stop, first, second)
            puts = [put, answer[0] if isinstance(answer, tuple) else answer]
            when = (
                f"with a put under {key!r} at {stop}, and another one meanwhile, they answer {puts}"
            )
            won = [value for value, of in zip(values, puts, strict=True) if of is True]
            failed = any(isinstance(of, StorageError) for of in puts)
            assert len(won) == 1 or (failed and not won), (
                f"{when}: one of them has to answer True, and the other one False, because a key "
                "is put atomically among all processes"
            )
            if isinstance(answer, tuple):
                assert answer[1] in values, (
                    f"{when}; then the other one got {answer[1]!r}, which is no whole value"
                )
            for reader in (storage, other):
                found = reader.get(key)
                assert not won or found == won[0], f"{when}; then the value is {found!r}"
        other.close()


class ProcessConformance(StorageConformance):
    """What a storage that several processes share must do besides. A subclass gives `uri`."""

    writers = 8
    keys = 200
    """For which the writers race."""
    kills = 8
    """Of one writer, for each size of values."""

    @pytest.fixture
    def uri(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def reopen(self, uri: str) -> Callable[[], CheckpointStorage]:
        return lambda: open_storage(uri)

    @pytest.fixture
    def environment(self, uri: str) -> dict[str, str]:
        """The writers find the library where the tests found it, and the store where `uri`
        leads."""
        return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

    def test_processes_race_for_each_key(
        self, uri: str, reopen: Reopen, environment: Mapping[str, str]
    ) -> None:
        """They also meet in making the storage, which none has opened before."""
        writers = [Writer(environment, race, uri, str(number)) for number in range(self.writers)]
        for writer in writers:
            assert writer.connection.recv() == "ready"
        won: list[tuple[str, str]] = []
        for number in range(self.keys):
            key = f"race/{number}"
            first = number % self.writers
            # on one processor, whoever is told first may well win
            for writer in writers[first:] + writers[:first]:
                writer.connection.send(key)
            won += [
                (key, str(name)) for name, writer in enumerate(writers) if writer.connection.recv()
            ]
        for writer in writers:
            writer.connection.send("")
            assert list(writer.messages()) == []
        assert [writer.process.exitcode for writer in writers] == [0] * self.writers
        storage = reopen()
        assert (
            sorted(key for key, _ in won)
            == storage.list("race")
            == sorted(f"race/{n}" for n in range(self.keys))
        )
        assert len({name for _, name in won}) > 1, "there was no race"
        for key, name in won:
            assert storage.get(key) == value_of(name, key, 2_000)
        storage.close()

    @pytest.mark.parametrize("size", [500, 1_000_000], ids=["small", "1MB"])
    def test_a_killed_writer_leaves_whole_values_only(
        self, uri: str, reopen: Reopen, environment: Mapping[str, str], size: int
    ) -> None:
        storage = reopen()
        for attempt in range(self.kills):
            writer = Writer(environment, run_on, uri, str(attempt), size)
            first = writer.connection.recv()
            time.sleep(0.02 + 0.013 * attempt)
            assert writer.process.pid
            os.killpg(writer.process.pid, signal.SIGKILL)  # with its JVM, if it has one
            sent = [first, *writer.messages()]
            listed = storage.list(f"run/{attempt}")
            assert set(sent) <= set(listed)
            for key in listed:
                value = storage.get(key)
                assert value is not None
                assert is_whole(value), f"torn: {key} has {len(value)} bytes"
            after = f"run/{attempt}/{len(listed)}"
            deadline = time.monotonic() + 120
            while storage.get(after) is None:  # the put that was cut off can be done by another
                if storage.put_if_absent(after, value_of("after", after, size)):
                    break
                assert time.monotonic() < deadline
            value = storage.get(after)
            assert value is not None
            assert is_whole(value)
            for key in storage.list(f"run/{attempt}"):
                storage.delete(key)
        for key in storage.list("run"):  # a server can still do what a dead writer had sent
            storage.delete(key)
        assert storage.list("run") == []
        storage.close()
