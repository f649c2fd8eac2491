"""Checkpoint storage in HDFS, through the Hadoop client in the JVM of the Spark session.

This relies on what Hadoop 3.5 does. `create` shows a file before it is whole, so even without
overwrite it is no atomic put. `FileContext.rename` without OVERWRITE is one step of the name node,
fails if the target exists, and is answered when it is in the edit log. The client may repeat the
rename, since the name node remembers which client it gave which answer. A closed file is on the
disks of the data nodes only if the writer asked for that (SYNC_BLOCK).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from coordinator.spark.internals import gateway, hadoop_conf
from coordinator.storage.base import (
    CheckpointStorage,
    NoSuchStorage,
    StorageError,
    check_folder,
    check_key,
    is_key,
)

_FORM = "Write hdfs://HOST:PORT/DIRECTORY, or the name service of the cluster instead of HOST:PORT"
_RESTART = "the query can then be restarted, nothing torn was left"

_UNREACHABLE = f"Check that the name node runs and can be reached from the driver; {_RESTART}"

# Advice by the class of an exception in the JVM, which may be the cause of another exception.
_ADVICE = {
    "AccessControlException": "Let the user that runs the driver read and write this directory",
    "ConnectException": _UNREACHABLE,
    "ConnectTimeoutException": _UNREACHABLE,
    "EOFException": _UNREACHABLE,
    "SocketTimeoutException": _UNREACHABLE,
    "UnknownHostException": f"Check the host. {_FORM}",
    "SafeModeException": f"Wait until the name node leaves safe mode; {_RESTART}",
    "BlockMissingException": f"Check that the data nodes run; {_RESTART}",
    "DSQuotaExceededException": f"Raise the space quota; {_RESTART}",
    "NSQuotaExceededException": f"Raise the name quota; {_RESTART}",
    "ParentNotDirectoryException": "A part of the path is a file; use another directory",
    "FileAlreadyExistsException": "The path is a file; use another directory",
}

# At most puts the block is not reported yet when the client looks first. By default the client
# looks again 400 ms later, and a put took 110 to 180 ms on a mini cluster. With this delay it took
# 20 to 40 ms. The higher number of retries makes up for the shorter delay.
_CLIENT = {
    "dfs.client.block.write.locateFollowingBlock.initial.delay.ms": "20",
    "dfs.client.block.write.locateFollowingBlock.retries": "10",
}


class HadoopStorage(CheckpointStorage):
    """Storage in HDFS, with one file for each key.

    The URI is `hdfs://HOST:PORT/DIRECTORY`, or a `viewfs://` that leads to HDFS. The directory is
    made if it is missing, unless `make` is False.

    A put writes `KEY#RANDOM`, has it synced to the disks of the data nodes, and renames it to
    `KEY`, which fails if that exists: the one atomic step, so that no torn value can ever stand
    under a key. A killed writer leaves `KEY#RANDOM` behind. That is no key, so `list` passes over
    it, and `delete(KEY)` removes it.

    Hadoop's client repeats calls after transient errors, and gives up when core-site.xml and
    hdfs-site.xml tell it to.
    """

    def __init__(self, uri: str, *, make: bool = True) -> None:
        """Connect, and make the directory if it is missing.

        Raises StorageError without a classic Spark session in this process, or if the directory
        cannot be made.
        """
        self.uri = address_of_directory(uri)
        parts = urlsplit(self.uri)
        try:
            session = SparkSession.active()
            java = gateway(session)
        except PySparkException as error:
            raise StorageError(
                self.uri,
                "",
                "no Spark session with a JVM runs in this process",
                "Start the session before the coordinator is used. Spark Connect has no JVM on "
                "this side: use storage that needs none. For commands, let a job FILE.py start it",
            ) from error
        self._fs: Any = java.jvm.org.apache.hadoop.fs
        options = self._fs.Options
        flag = self._fs.CreateFlag
        with self._errors("cannot make the directory"):
            conf = hadoop_conf(session)
            for name, value in _CLIENT.items():
                conf.set(name, value)
            where = java.jvm.java.net.URI.create(f"{parts.scheme}://{parts.netloc}")
            self._files: Any = self._fs.FileContext.getFileContext(where, conf)
            root = self._fs.Path(self.uri)
            permissions = self._fs.permission.FsPermission
            if not self._files.util().exists(root):
                if not make:
                    raise NoSuchStorage(self.uri, "", "there is no such directory")
                # The directories above it, which are made too, stay open to other users.
                self._files.mkdir(root, permissions.getDirDefault(), True)
                self._files.setPermission(root, permissions("700"))
            self._files.mkdir(root, permissions("700"), True)
            behind = self._files.resolvePath(root).toUri().getScheme()
            self._folder = root.toUri().getPath() + "/"
            # SHOULD_REPLICATE: no erasure coding, which cannot sync
            self._flags = java.jvm.java.util.EnumSet.of(
                flag.CREATE, flag.SYNC_BLOCK, flag.SHOULD_REPLICATE
            )
            self._options = java.new_array(options.CreateOpts, 2)
            self._options[0] = options.CreateOpts.createParent()
            self._options[1] = options.CreateOpts.perms(permissions("600"))
            self._no_overwrite = java.new_array(options.Rename, 0)
        if behind != "hdfs":
            raise StorageError(
                self.uri,
                "",
                f"it leads to {behind}://, which has no atomic put-if-absent",
                "Use a mount of HDFS",
            )

    def put_if_absent(self, key: str, value: bytes) -> bool:
        with self._errors(f"cannot write {len(value)} bytes", check_key(key)):
            path = self._path(key)
            staged = self._path(f"{key}#{uuid4().int}")
            try:
                with closing(self._files.create(staged, self._flags, self._options)) as stream:
                    stream.write(value)
                self._files.rename(staged, path, self._no_overwrite)
            except Py4JJavaError as error:
                with suppress(Py4JError, OSError):
                    self._files.delete(staged, False)
                if _class(error) == "FileAlreadyExistsException":
                    return False
                with suppress(StorageError):  # the answer may have got lost
                    if (current := self.get(key)) is not None:
                        return current == value
                raise
            return True

    def get(self, key: str) -> bytes | None:
        value: bytes | None = None
        with self._errors("cannot read", check_key(key)), _if_missing():
            path = self._path(key)
            with closing(self._files.open(path)) as stream:
                value = stream.readAllBytes()
            self._make_durable(path)
        return value

    def list(self, prefix: str) -> list[str]:
        folder = check_folder(prefix)
        names = []
        files = None
        with self._errors(f"cannot list {folder!r}"):
            with _if_missing():
                files = self._files.util().listFiles(self._path(folder), True)
            while files and files.hasNext():
                names.append(files.next().getPath().toUri().getPath()[len(self._folder) :])
        return sorted(name for name in names if is_key(name))

    def delete(self, key: str) -> None:
        with self._errors("cannot delete", check_key(key)), _if_missing():
            self._files.delete(self._path(key), False)
            for status in self._files.util().globStatus(self._path(f"{key}#*")) or ():
                self._files.delete(status.getPath(), False)

    def _path(self, name: str) -> Any:
        return self._fs.Path(f"{self.uri}/{name}".rstrip("/"))

    def _make_durable(self, path: Any) -> None:
        """Wait until the rename of a file is in the name node's edit log.

        The name node shows a rename before that. So this makes an edit that changes nothing, which
        is answered when all edits before it are in the log. A user without write permission acts
        upon no record, and need not wait.
        """
        try:
            self._files.setTimes(path, self._files.getFileStatus(path).getModificationTime(), -1)
        except Py4JJavaError as error:
            if _class(error) != "AccessControlException":
                raise

    @contextmanager
    def _errors(self, action: str, key: str = "") -> Iterator[None]:
        try:
            yield
        except (Py4JJavaError, PySparkException) as error:
            # PySpark translates some exceptions, such as IllegalArgumentException.
            text = str(error)
            if isinstance(error, Py4JJavaError):
                text = f"{_class(error)}: {error.java_exception.getMessage()}"
            reason = text.partition("\n")[0]
            advice = next((advice for name, advice in _ADVICE.items() if name in reason), "")
            raise StorageError(self.uri, key, f"{action}: {reason}", advice) from error
        except (Py4JError, OSError) as error:
            raise StorageError(
                self.uri,
                key,
                f"{action}: the JVM of the Spark session is gone",
                f"Start the session again; {_RESTART}",
            ) from error


def address_of_directory(uri: str) -> str:
    """Return the URI of the storage. Raises StorageError for parts that do not belong in it."""
    parts = urlsplit(uri)
    if "@" in parts.netloc:  # repeats nothing: it may hold a password
        raise StorageError(f"{parts.scheme}://...", "", "a user is not allowed in the URI", _FORM)
    if not parts.netloc or not parts.path.strip("/"):
        raise StorageError(uri, "", "no host or no directory", _FORM)
    return uri.rstrip("/")


@contextmanager
def _if_missing() -> Iterator[None]:
    """Pass over the error that a file or folder does not exist."""
    try:
        yield
    except Py4JJavaError as error:
        if _class(error) != "FileNotFoundException":
            raise


def _class(error: Py4JJavaError) -> str:
    """Return the class name of the exception in the JVM, without its package."""
    return str(error.java_exception.getClass().getSimpleName())
