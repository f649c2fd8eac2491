"""Checkpoint storage in a local or shared folder.

obstore has a store for folders too, but it never calls fsync (seen with strace). A record that was
read, and acted upon, could therefore be empty or gone after a power loss. It also follows links.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from coordinator.storage.base import (
    CheckpointStorage,
    NoSuchStorage,
    StorageError,
    check_folder,
    check_key,
    is_key,
    is_missing,
)

_ADVICE = {
    errno.ENOSPC: "Free space there; the query can then be restarted, nothing torn was left",
    errno.EDQUOT: "Raise the disk quota; the query can then be restarted, nothing torn was left",
    errno.EACCES: (
        "Use the account of the job, and let it write there: what a job makes is for its account "
        "alone"
    ),
    errno.EPERM: (
        "The file system must allow hard links, and the user that runs the driver to make them"
    ),
    errno.ENOSYS: "The file system does not know hard links; use another one or a database",
    errno.ENOTSUP: "The file system does not know hard links; use another one or a database",
    errno.EROFS: (
        "The file system is mounted read-only; mount it for writing or use another directory"
    ),
    errno.ENOENT: (
        "The directory was deleted or unmounted since it was opened: bring it back, as it was"
    ),
    errno.ENOTDIR: (
        "A part of the path is a file, or a link, which is not followed; use another directory"
    ),
    errno.EEXIST: "The path is a file; use another directory",
    errno.ELOOP: (
        "It is a symbolic link, which is not followed: see who put it there, and remove it"
    ),
}


_STAGED = re.compile(r".+#\d{30,}")
_ABANDONED = 86400.0
"""Seconds after which a staged file counts as abandoned.

A writer that is slower gets an error, and leaves nothing under the key.
"""


class FileStorage(CheckpointStorage):
    """Storage in a directory, `file:///DIRECTORY`, with one file for each key.

    With `make`, the directory is made if it is missing, and hard links are tried. What is made is
    for the user alone (0700 and 0600). `list("")` passes over folders that this user may not read.
    No link below the directory is followed.

    A put writes `KEY#RANDOM`, fsyncs it, hard-links it to `KEY` (which fails if that exists: the
    one atomic step, so that no torn value can ever stand under a key) and fsyncs the directories. A
    reader fsyncs them too before it hands out a value, because the writer may have died in between.
    A killed writer leaves `KEY#RANDOM` behind. That is no key, so `list` passes over it. It is
    removed by `delete(KEY)`, or when the storage is opened with `make` a day later.

    Several hosts may share the directory if its file system has hard links and close-to-open
    consistency (NFS has).
    """

    def __init__(self, directory: str | Path, *, make: bool = True) -> None:
        self._root = Path(os.path.abspath(directory))
        self.uri = self._root.as_uri()
        if not make:
            if is_missing(self._root):
                raise NoSuchStorage(self.uri, "", "there is no such directory")
            return
        with self._errors("cannot make the directory"):
            self._root.mkdir(0o700, parents=True, exist_ok=True)
            for parent in self._root.parents:
                with suppress(PermissionError):  # not ours to read, so not made by us
                    fsync_directory(parent)
        self._require_hard_links()
        self._remove_abandoned()

    def _remove_abandoned(self) -> None:
        """Remove the files that killed writers have left.

        The search ends after a second, because there may be much else in the folder.
        """
        end = time.monotonic() + 1
        with suppress(OSError), _directory(self._root) as root:
            for folder, path in takewhile(lambda _: time.monotonic() < end, _files_below(root)):
                name = _name(path)
                with suppress(OSError):  # gone
                    if _STAGED.fullmatch(name):
                        written_at = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
                        if time.time() - written_at > _ABANDONED:
                            os.unlink(name, dir_fd=folder)

    def _require_hard_links(self) -> None:
        staged = self._root / f".link-{uuid.uuid4().hex}"
        linked = staged.with_suffix(".2")
        with self._errors("cannot make a hard link"):
            try:
                staged.touch(0o600, exist_ok=False)
                os.link(staged, linked)
                with suppress(FileExistsError):
                    os.link(staged, linked)
                    raise OSError(errno.ENOTSUP, "a second link of one name is not refused")
            finally:
                linked.unlink(missing_ok=True)
                staged.unlink(missing_ok=True)

    def put_if_absent(self, key: str, value: bytes) -> bool:
        with (
            self._errors(f"cannot write {len(value)} bytes", key),
            self._folders(check_key(key), make=True) as folders,
        ):
            here = folders[-1]
            name = _name(key)
            staged = f"{name}#{uuid.uuid4().int}"
            try:
                descriptor = os.open(
                    staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=here
                )
                with open(descriptor, "wb") as file:
                    file.write(value)
                    file.flush()
                    os.fsync(descriptor)
                os.link(staged, name, src_dir_fd=here, dst_dir_fd=here, follow_symlinks=False)
            except FileExistsError:
                with suppress(FileNotFoundError):
                    if stat.S_ISDIR(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode):
                        raise IsADirectoryError(
                            errno.EISDIR, "Is a directory: keys are below it"
                        ) from None
                return False
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(staged, dir_fd=here)
            _fsync(folders)
            return True

    def get(self, key: str) -> bytes | None:
        with (
            self._errors("cannot read", check_key(key)),
            suppress(FileNotFoundError),
            self._folders(key) as folders,
        ):
            descriptor = os.open(
                _name(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folders[-1]
            )
            try:
                mode = os.fstat(descriptor).st_mode
                if stat.S_ISDIR(mode):
                    return None
                if not stat.S_ISREG(mode):
                    raise OSError(errno.EINVAL, "it is a pipe, a socket or a device")
                with open(descriptor, "rb", closefd=False) as file:
                    value = file.read()
            finally:
                os.close(descriptor)
            _fsync(folders)
            return value
        return None

    def list(self, prefix: str) -> list[str]:
        folder = check_folder(prefix)
        with (
            self._errors(f"cannot list {folder!r}"),
            suppress(FileNotFoundError),
            self._folders(folder) as folders,
        ):
            return sorted(key for _, key in _files_below(folders[-1], folder) if is_key(key))
        return []

    def delete(self, key: str) -> None:
        """Remove the file of a key, or a link of that name, but not what the link leads to."""
        with (
            self._errors("cannot delete", check_key(key)),
            suppress(FileNotFoundError),
            self._folders(key) as folders,
        ):
            name = _name(key)
            for entry in os.listdir(folders[-1]):
                if entry == name or entry.startswith(f"{name}#"):
                    with suppress(FileNotFoundError):
                        os.unlink(entry, dir_fd=folders[-1])

    @contextmanager
    def _folders(self, key: str, *, make: bool = False) -> Iterator[Sequence[int]]:
        """Open the storage's directory and each directory below it, down to the key's own.

        Yields their descriptors in this order.
        """
        with ExitStack() as stack:
            folders = [stack.enter_context(_directory(self._root))]
            for name in key.split("/")[:-1]:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=folders[-1])
                folders.append(stack.enter_context(_directory(name, folders[-1])))
            yield folders

    @contextmanager
    def _errors(self, action: str, key: str = "") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                self.uri, key, f"{action}: {error.strerror}", _ADVICE.get(error.errno or 0, "")
            ) from error


def _name(key: str) -> str:
    return key.rpartition("/")[2]


@contextmanager
def _directory(path: Path | str, within: int | None = None) -> Iterator[int]:
    """Open a directory, and yield its descriptor.

    A link is refused where the directory is `within` another one.
    """
    no_link = 0 if within is None else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | no_link, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _files_below(folder: int, prefix: str = "") -> Iterator[tuple[int, str]]:
    """Yield each file below a folder: the descriptor of its own folder, and its path."""
    with os.scandir(folder) as entries:
        for entry in entries:
            path = prefix + entry.name
            if not entry.is_dir(follow_symlinks=False):
                yield folder, path
            elif is_key(path):
                if not prefix and not os.access(
                    path, os.R_OK | os.X_OK, dir_fd=folder, effective_ids=True
                ):
                    continue  # another account's job or savepoint
                with suppress(FileNotFoundError), _directory(entry.name, folder) as below:
                    yield from _files_below(below, f"{path}/")


def _fsync(folders: Sequence[int]) -> None:
    for folder in reversed(folders):
        os.fsync(folder)


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    with _directory(path) as descriptor:
        os.fsync(descriptor)
