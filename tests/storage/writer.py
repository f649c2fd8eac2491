"""A process that fills the disk under a checkpoint storage."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from coordinator.storage import StorageError
from sinks.testing.storage_writer import is_whole, open_here, value_of


def fill(uri: str, size: int, folder: str) -> None:
    """Put until the disk is full, make room, and go on. Prints what happened, one word a line."""
    ballast = Path(folder, "ballast")
    ballast.write_bytes(bytes(400_000))
    storage = open_here(uri)
    keys = [f"full/{number:03}" for number in range(100)]
    written = []
    for key in keys:
        try:
            storage.put_if_absent(key, value_of("fill", key, size))
        except StorageError as error:
            print("refused", error)
            break
        written.append(key)
    print("written", len(written))
    print("listed", storage.list("full") == written)
    print("absent", storage.get(keys[len(written)]) is None)
    print("whole", all(is_whole(storage.get(key) or b"") for key in written))
    ballast.unlink()
    print("again", storage.put_if_absent("full/again", value_of("fill", "full/again", size)))


def put_amid(connection: Connection, uri: str, key: str) -> None:
    """Put a value, and wait in the middle of it to be told to go on; if it is refused, once more when told to."""
    storage, fsync = open_here(uri), os.fsync

    def waiting(descriptor: int) -> None:
        os.fsync = fsync
        connection.send("amid")
        connection.recv()
        fsync(descriptor)

    os.fsync = waiting  # type: ignore[assignment]
    try:
        connection.send(storage.put_if_absent(key, b"1"))
    except StorageError as error:
        connection.send(str(error))
        connection.recv()
        connection.send(storage.put_if_absent(key, b"1"))


if __name__ == "__main__":
    fill(sys.argv[1], int(sys.argv[2]), sys.argv[3])
