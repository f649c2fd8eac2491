"""Processes that write to a checkpoint storage, started by the tests."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from typing import Any

from coordinator.storage import CheckpointStorage, open_storage
from sinks.testing.driver import fork


def value_of(writer: str, key: str, size: int) -> bytes:
    """A value that tells its writer and key, and whether it is whole."""
    head = f"{writer} {key} {size} ".encode()
    return head + b"x" * (size - len(head) - 4) + b" end"


def is_whole(value: bytes) -> bool:
    writer, key, size = value.split(b" ", 3)[:3]
    return value == value_of(writer.decode(), key.decode(), int(size))


class Writer:
    """A process with a group of its own, which does `work(connection, …)`."""

    def __init__(
        self, environment: Mapping[str, str], work: Callable[..., None], *arguments: Any
    ) -> None:
        self.connection, theirs = Pipe()
        self.process: BaseProcess = fork(
            _work, dict(environment), work, theirs, *arguments, preload=__name__
        )
        theirs.close()

    def messages(self) -> Iterator[Any]:
        """What it sends, until it has ended."""
        try:
            while True:
                yield self.connection.recv()
        except (EOFError, OSError):  # or it was killed in the middle
            self.process.join()
            self.connection.close()


def _work(environment: Mapping[str, str], work: Callable[..., None], *arguments: Any) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    work(*arguments)


def race(connection: Connection, uri: str, writer: str) -> None:
    """Put a value under each key that it is told, and answer whether the key was won."""
    storage = open_here(uri)
    connection.send("ready")
    while key := connection.recv():
        connection.send(storage.put_if_absent(key, value_of(writer, key, 2_000)))
    storage.close()


def run_on(connection: Connection, uri: str, writer: str, size: int) -> None:
    """Put under ever new keys, telling each when it is done, until killed."""
    storage = open_here(uri)
    for number in itertools.count():
        key = f"run/{writer}/{number}"
        storage.put_if_absent(key, value_of(writer, key, size))
        connection.send(key)


def open_here(uri: str) -> CheckpointStorage:
    """With a JVM, if it takes one."""
    if uri.startswith("hdfs:"):
        small_session()
    return open_storage(uri)


def small_session() -> None:
    """A Spark session, for its JVM."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[1]")
    for name, value in {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
    }.items():
        builder = builder.config(name, value)
    builder.getOrCreate()
