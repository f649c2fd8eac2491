"""Jars and archives from Maven Central, fetched once by the Ivy that pyspark ships.

They are kept in the folder `.cache` of the working folder, or in the one that the environment
variable TEST_CACHE_DIR names. IVY_SETTINGS may name an ivysettings.xml with other repositories,
such as a company's mirror, as spark.jars.ivySettings does for Spark.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO
from xml.sax.saxutils import quoteattr

import psutil

from sinks._util.log import get_logger
from sinks.testing.servers.common import CannotBeHad, java, run, waiting_for

logger = get_logger(__name__)

FETCH_TIMEOUT = 600.0
"""Seconds until Ivy is given up."""


def cache_folder() -> Path:
    """Where downloads are kept. Made if it is missing."""
    folder = Path(os.environ.get("TEST_CACHE_DIR") or ".cache").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def maven_jars(*coordinates: str, transitive: bool = True) -> list[Path]:
    """The jars of these artifacts ("group:artifact:version"), `transitive` with all that they need
    at run time.

    Downloaded at the first call. Processes that ask at the same time wait for one of them; one that
    dies leaves no half of a download behind. Raises CannotBeHad, with what Ivy said, when an
    artifact cannot be fetched.
    """
    what = "\n".join([*sorted(coordinates), f"transitive={transitive}"])
    _, artifact, version = coordinates[0].split(":")
    folder = (
        cache_folder()
        / "jars"
        / f"{artifact}-{version}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"
    )
    _once(folder, coordinates, _module(coordinates, "default" if transitive else "master"))
    return sorted(folder.glob("*.jar"))


def maven_archive(coordinate: str, classifier: str) -> Path:
    """The folder with what is in the artifact's tar.gz of this classifier. Else as `maven_jars`."""
    _, artifact, version = coordinate.split(":")
    folder = cache_folder() / "jars" / f"{artifact}-{version}-{classifier}"
    _once(folder, (coordinate,), _module((coordinate,), "master", classifier), unpack=True)
    return folder


def _once(folder: Path, coordinates: tuple[str, ...], module: str, *, unpack: bool = False) -> None:
    _, artifact, version = coordinates[0].split(":")
    fetched_once(
        folder,
        f"{artifact} {version} from Maven Central",
        lambda: _fetch(coordinates, module, folder, unpack=unpack),
    )


def fetched_once(folder: Path, what: str, fetch: Callable[[], None]) -> None:
    """Call `fetch`, which makes the folder, unless the folder is there.

    Processes that ask at the same time wait for one of them. If that one fails, the others fail
    with the same error, so that a network that does not answer is waited for once.
    """
    if folder.is_dir():
        return
    folder.parent.mkdir(exist_ok=True)
    with lock(folder.with_name(f"{folder.name}.lock")) as file:
        if folder.is_dir():
            return
        if os.fstat(file.fileno()).st_mtime > psutil.Process().create_time() and (
            failed := file.read()
        ):
            raise CannotBeHad(failed)
        logger.info("fetching %s", what)
        try:
            with waiting_for(f"fetching {what}"):
                fetch()
        except CannotBeHad as error:
            file.truncate(0)
            file.write(str(error))
            raise


def unpacked_once(folder: Path, unpack: Callable[[Path], None]) -> Path:
    """The folder that `unpack` fills at the first call.

    Processes that ask at the same time wait for one of them; one that dies leaves no half behind.
    """
    if folder.is_dir():
        return folder
    with lock(folder.with_name(f"{folder.name}.lock")):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(prefix="unpack-", dir=folder.parent) as temporary:
                part = Path(temporary) / folder.name
                part.mkdir()
                unpack(part)
                part.rename(folder)
    return folder


def _fetch(coordinates: tuple[str, ...], text: str, folder: Path, *, unpack: bool) -> None:
    logger.debug("Ivy fetches %s into %s", ", ".join(coordinates), folder)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder.parent) as temporary:
        work = Path(temporary)
        module = work / "ivy.xml"
        module.write_text(text)
        jars = work / "jars"
        jars.mkdir()
        command = [java(), "-jar", str(_ivy()), "-ivy", str(module), "-cache", str(work / "ivy")]
        command += ["-retrieve", str(jars / "[artifact]-[revision](-[classifier]).[ext]")]
        if settings := os.environ.get("IVY_SETTINGS"):
            command += ["-settings", settings]
        try:
            said = run(command, timeout=FETCH_TIMEOUT, cwd=work)
            if not any(jars.iterdir()):
                raise RuntimeError(said[-3000:])
        except RuntimeError as error:
            raise CannotBeHad(
                f"{', '.join(coordinates)} could not be fetched from Maven Central; IVY_SETTINGS "
                f"may name an ivysettings.xml with a mirror.\nThe end of what Ivy said:\n{error}"
            ) from None
        for file in jars.iterdir():
            _require_pinned(file)
        if unpack:
            [archive] = jars.iterdir()
            with tarfile.open(archive) as tar:
                tar.extractall(jars, filter="data")
            archive.unlink()
        jars.rename(folder)


def _require_pinned(file: Path) -> None:
    """Raises RuntimeError for a file that `pins.sha256` knows by its name, and not with this
    content."""
    lines = (Path(__file__).parent / "pins.sha256").read_text().splitlines()
    known = {name: checksum for checksum, name in map(str.split, lines)}
    checksum = hashlib.sha256(file.read_bytes()).hexdigest()
    if known.get(file.name, checksum) != checksum:
        raise RuntimeError(
            f"{file.name} is not what it was: its SHA-256 is {checksum}, and {known[file.name]} is "
            "pinned"
        )


def _module(coordinates: tuple[str, ...], scope: str, classifier: str = "") -> str:
    """An ivy.xml of a module that depends on these artifacts.

    `scope` is a configuration that Ivy gives Maven's modules: master is the artifact alone, default
    also what it needs at run time. With `classifier`, the tar.gz of that is meant.
    """
    dependencies = ""
    for coordinate in coordinates:
        group, artifact, version = map(quoteattr, coordinate.split(":"))
        file = (
            f'<artifact name={artifact} type="tar.gz" ext="tar.gz" m:classifier="{classifier}"/>'
            * bool(classifier)
        )
        dependencies += (
            f'<dependency org={group} name={artifact} rev={version} conf="default->{scope}">'
        )
        dependencies += f"{file}</dependency>"
    return (
        '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven"><info '
        'organisation="local" module="jars"/><configurations><conf '
        f'name="default"/></configurations><dependencies>{dependencies}</dependencies></ivy-module>'
    )


def _ivy() -> Path:
    spec = find_spec("pyspark")  # not imported: that takes a second
    if spec is None or not spec.submodule_search_locations:
        raise CannotBeHad("jars are fetched by the Ivy that pyspark ships: pip install pyspark")
    return next(Path(spec.submodule_search_locations[0]).glob("jars/ivy-*.jar"))


@contextmanager
def lock(path: Path) -> Iterator[TextIO]:
    """One process at a time; let go by the system when the process dies.

    Yields the open file, at its begin.
    """
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file
