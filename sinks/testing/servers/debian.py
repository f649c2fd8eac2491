"""Servers out of Debian's packages, fetched once by apt into the cache.

Nothing is installed and root is not needed.

A server runs with its release's own loader and libraries, so it does not matter which release this
machine has.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sinks._util.log import get_logger
from sinks.testing.servers.common import CannotBeHad, run
from sinks.testing.servers.maven import FETCH_TIMEOUT, cache_folder, fetched_once

logger = get_logger(__name__)

_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def program(package: str, suite: str, binary: str, files: Sequence[str]) -> Path:
    """The folder with `bin/` (the binary), `lib/` (its loader and libraries) and `files` (their
    paths in the packages).

    Downloaded at the first call, and checked by apt against the signed index of the archive.
    Processes that ask at the same time wait for the first. Raises CannotBeHad where there is no
    Debian, or no archive that answers.
    """
    folder = cache_folder() / "debian" / package
    fetched_once(
        folder,
        f"{package} from Debian's archive",
        lambda: _fetch(package, suite, binary, files, folder),
    )
    return folder


def available() -> bool:
    """Whether this machine has such programs, or can fetch them."""
    try:
        return any((cache_folder() / "debian").glob("*/bin")) or bool(_archive())
    except RuntimeError:
        return False


def command(folder: Path, binary: str) -> list[str]:
    """How to start the binary of such a folder."""
    [loader] = (folder / "lib").glob("ld-linux-*")
    return [
        str(loader),
        "--library-path",
        str(folder / "lib"),
        str(folder / "bin" / Path(binary).name),
    ]


def _fetch(package: str, suite: str, binary: str, files: Sequence[str], folder: Path) -> None:
    archive = _archive()
    logger.debug("apt fetches %s of %s into %s", package, suite, folder)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder.parent) as temporary:
        work = Path(temporary)
        try:
            _download(work, f"deb [signed-by={_KEYRING}] {archive} {suite} main\n", package)
        except RuntimeError as error:
            raise CannotBeHad(f"apt could not fetch {package} from {archive}.\n{error}") from None
        root = work / "root"
        installation = work / "installation"
        for deb in sorted((work / "archives").glob("*.deb")):
            run(["dpkg-deb", "--extract", str(deb), str(root)])
        for path in files:
            target = installation / path
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if (root / path).is_dir() else shutil.copy2)(root / path, target)
        (installation / "bin").mkdir(parents=True)
        shutil.copy2(root / binary, installation / "bin")
        (installation / "lib").mkdir()
        for library in _libraries(root, root / binary):
            shutil.copy2(library, installation / "lib")  # follows the links
        installation.rename(folder)


def _download(work: Path, source: str, package: str) -> None:
    """Into `work/archives`: the package with all that it depends on, as on a machine that has
    nothing."""
    (work / "sources.list").write_text(source)
    (work / "status").touch()
    for name in ("lists/partial", "archives/partial"):
        (work / name).mkdir(parents=True)
    settings = {
        "Dir::Etc::sourcelist": work / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State": work,
        "Dir::State::status": work / "status",
        "Dir::State::lists": work / "lists",
        "Dir::Cache": work,
        "Dir::Cache::archives": work / "archives",
        "Acquire::Languages": "none",
        "Acquire::Retries": 2,
        "Acquire::http::Timeout": 20,
        "Acquire::https::Timeout": 20,
        "APT::Update::Error-Mode": "any",  # else an archive that does not answer is a warning
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "true",
    }
    apt = ["apt-get", "--quiet", *(f"-o{name}={value}" for name, value in settings.items())]
    run([*apt, "update"], timeout=FETCH_TIMEOUT)
    run([*apt, "install", "--yes", "--download-only", package], timeout=FETCH_TIMEOUT)


def _archive() -> str:
    """The address of Debian's archive, or its mirror, that this machine is set up for."""
    release = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    if release.get("ID") != "debian" or not shutil.which("apt-get"):
        raise CannotBeHad(
            "it is fetched from Debian's archive by apt, and this machine is no Debian"
        )
    if platform.machine() != "x86_64":
        raise CannotBeHad("it is fetched for x86-64 only")
    form = ["--format", "$(RELEASE) $(COMPONENT) $(REPO_URI)", "Created-By: Packages"]
    for line in run(["apt-get", "indextargets", *form]).splitlines():
        suite, component, address = line.split(" ", 2)
        if (
            suite in {release.get("VERSION_CODENAME"), "stable", "testing", "unstable", "sid"}
            and component == "main"
        ):
            return address
    raise CannotBeHad("apt of this machine names no archive of Debian")


def _libraries(root: Path, binary: Path) -> list[str]:
    folders = {library.parent for library in root.glob("usr/lib/*-linux-gnu/*.so*")}
    [loader] = root.glob("usr/lib64/ld-linux-*")
    listed = run(
        [str(loader), "--library-path", ":".join(map(str, folders)), "--list", str(binary)]
    )
    return [str(loader), *(word for word in listed.split() if word.startswith(str(root)))]
