"""Spark's checkpointLocation, file by file.

It is in a local directory, or in any file system that Hadoop knows.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from coordinator.errors import SavepointError
from coordinator.protocol.ports import BatchFacts
from coordinator.spark.internals import gateway, hadoop_conf
from coordinator.storage.files import fsync_directory

_PIECE = 1 << 20


def open_location(uri: str) -> CheckpointLocation:
    """Open a checkpointLocation.

    A path or `file:` URI is read and written here, any other URI through the JVM of the Spark
    session. As in Spark, nothing in a URI is escaped: `%20` is no space.
    """
    path = re.sub(r"^file:(//(localhost)?(?=/))?", "", uri)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", path):
        return _HadoopDirectory(uri)
    return _Directory(Path(os.path.abspath(path)))


class _Directory:
    """A checkpointLocation in a local directory.

    Paths are relative to it, with '/' between their parts. Hidden files and folders (a dot before
    the name: temporary files, the checksums of Hadoop's local file system, folders of other
    programs) are passed over.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.uri = f"file://{root}"

    def files(self) -> list[str]:
        """List the paths of all files, sorted; none if there is no such directory.

        The list may lack files that vanish meanwhile.
        """
        paths = []
        for folder, inner, names in os.walk(self._root, onerror=_require_listed):
            for name in (*inner, *names):
                self._require_no_link(Path(folder, name))
            paths += [Path(folder, name) for name in names]
        return _shown(path.relative_to(self._root).as_posix() for path in paths)

    def has(self, path: str) -> bool:
        return (self._root / path).exists()

    def read(self, path: str) -> Iterator[bytes]:
        """Yield the content of a file, in pieces. Raises FileNotFoundError."""
        with (self._root / path).open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece

    def write(self, path: str, pieces: Iterable[bytes]) -> None:
        """Put a file there, durably and as a whole, in place of a file of that name.

        Only one writer may run at a time. What a killed writer leaves is removed by the next write.
        """
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        for folder in Path(path).parents:
            self._require_no_link(self._root / folder)
        staged = target.with_name(f".{target.name}.tmp")
        staged.unlink(missing_ok=True)
        with staged.open("xb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(target)
        for folder in (target.parent, *target.parent.parents):
            fsync_directory(folder)
            if folder == self._root.parent:
                break

    def _require_no_link(self, path: Path) -> None:
        if path != self._root and path.is_symlink():
            raise SavepointError(
                f"{path} is a symbolic link: savepoints neither follow it nor write through it. "
                "Put what it leads to in its place, or take another checkpointLocation"
            )


@contextmanager
def _os_errors() -> Iterator[None]:
    """Turn the JVM's exceptions in the block into OSErrors."""
    from py4j.protocol import Py4JJavaError

    try:
        yield
    except Py4JJavaError as error:
        java = error.java_exception
        kind = (
            FileNotFoundError
            if java.getClass().getSimpleName() == "FileNotFoundException"
            else OSError
        )
        raise kind(str(java.toString())) from error


def _require_listed(error: OSError) -> None:
    """Raise the error of a folder that cannot be listed, unless there is nothing to save in it.

    There is nothing in a folder that is gone meanwhile, nor in `lost+found`, which a file system
    has at its root.
    """
    if not isinstance(error, FileNotFoundError) and Path(error.filename).name != "lost+found":
        raise error


class _HadoopDirectory:
    """A checkpointLocation in a file system of Hadoop."""

    def __init__(self, uri: str) -> None:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        try:
            session = SparkSession.active()
            self._path: Any = gateway(session).jvm.org.apache.hadoop.fs.Path
        except PySparkException as error:
            raise SavepointError(
                f"{uri} takes a Spark session in this process: let a job FILE.py start it"
            ) from error
        self.uri = uri.rstrip("/")
        with _os_errors():
            self._fs: Any = self._path(self.uri).getFileSystem(hadoop_conf(session))

    @_os_errors()
    def files(self) -> list[str]:
        root = self._fs.makeQualified(self._path(self.uri)).toUri().getPath().rstrip("/") + "/"
        paths = []
        if self._fs.exists(self._path(self.uri)):
            entries = self._fs.listFiles(self._path(self.uri), True)
            while entries.hasNext():
                paths.append(str(entries.next().getPath().toUri().getPath()).removeprefix(root))
        return _shown(paths)

    @_os_errors()
    def has(self, path: str) -> bool:
        return bool(self._fs.exists(self._path(f"{self.uri}/{path}")))

    def read(self, path: str) -> Iterator[bytes]:
        with _os_errors():
            stream = self._fs.open(self._path(f"{self.uri}/{path}"))
            with closing(stream):
                while piece := bytes(stream.readNBytes(_PIECE)):
                    yield piece

    @_os_errors()
    def write(self, path: str, pieces: Iterable[bytes]) -> None:
        target = self._path(f"{self.uri}/{path}")
        staged = self._path(f"{target.getParent().toString()}/.{target.getName()}.tmp")
        with closing(self._fs.create(staged, True)) as stream:
            for piece in pieces:
                stream.write(piece)
            stream.hsync()
        self._fs.delete(target, False)
        if not self._fs.rename(staged, target):
            raise OSError(f"could not rename {staged.toString()} to {target.toString()}")


def _shown(paths: Iterable[str]) -> list[str]:
    return sorted(path for path in paths if "/." not in f"/{path}")


CheckpointLocation: TypeAlias = _Directory | _HadoopDirectory


def newest_commit(files: Iterable[str]) -> int:
    """Return the newest batch that Spark considers finished, -1 if there is none.

    `files` are those of a checkpointLocation.
    """
    commits = (file.removeprefix("commits/") for file in files)
    return max((int(number) for number in commits if number.isdecimal()), default=-1)


def facts_in(log: str, batch_id: int, query_id: str) -> BatchFacts:
    """Parse a file of Spark's offset log.

    Its lines are its version, the batch's time and settings, and the offsets of each source.
    """
    _, settings, *offsets = log.split("\n")
    planned_at = json.loads(settings or "{}").get("batchTimestampMs", 0)
    return BatchFacts(batch_id, query_id, tuple(offsets), planned_at)
