"""The library as a user installs it: an sdist, the wheel made of it, and environments with nothing else in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from dataclasses import dataclass
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path, PurePath
from typing import Any

import pyspark
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
NOT_SOURCE = (".*", "__pycache__", "build", "dist", "*.egg-info", "metastore_db", "spark-warehouse", "artifacts")
ENVIRONMENT = {
    key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYSPARK", "SPARK_HOME"))
}
SPARK = Path(pyspark.__file__).parent
HERE = Path(sysconfig.get_path("purelib"))
"""Where pip has put the packages of the tests."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", "venv", {"base": str(self.folder)}))

    def install(self, *wanted: str) -> None:
        options = ["--quiet", "--disable-pip-version-check", "--no-compile"]
        run(sys.executable, "-m", "pip", "--python", self.python, "install", *options, *wanted)

    def library(self) -> Distribution:
        """This one, which has been installed here."""
        [metadata] = self.packages.glob("pyspark_exactly_once-*.dist-info")
        return PathDistribution(metadata)

    def link(self, *distributions: Distribution) -> None:
        """Those that the tests have: put there by pip, and compiled by Python."""
        for one in distributions:
            done = {PurePath("..")}  # where commands are
            for file in one.files or ():
                places = [*reversed(file.parents[:-1]), file]
                if places[0] in done or not done.isdisjoint(places):
                    continue
                # as a whole, unless it is a folder that several distributions share, which is no package
                packages = (place for place in places if (HERE / place / "__init__.py").exists())
                whole = next(packages, file)
                done.add(whole)
                (self.packages / whole).parent.mkdir(parents=True, exist_ok=True)
                (self.packages / whole).symlink_to(HERE / whole)

    def with_packages_of(self, other: Environment) -> None:
        self.packages.joinpath("other.pth").write_text(f"{other.packages}\n")

    def with_spark(self) -> None:
        """The Spark of the tests, as a cluster's: there already, and not installed by pip."""
        for folder in (SPARK, Path(str(sys.modules["py4j"].__file__)).parent):
            self.packages.joinpath(folder.name).symlink_to(folder)


def needs(library: Distribution, extra: str = "") -> list[Distribution]:
    """What its metadata ask for, directly and in turn, and nothing else; each in a version that they allow."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    asked = [(library, extra)]
    while asked:
        asking, extra = asked.pop()
        for wanted in map(Requirement, asking.requires or ()):
            if wanted.marker and not wanted.marker.evaluate({"extra": extra}):
                continue
            one = found[wanted.name] = distribution(wanted.name)
            assert wanted.specifier.contains(one.version, prereleases=True), f"{wanted}, and there is {one.version}"
            new = {(wanted.name, extra) for extra in ("", *wanted.extras)} - seen
            seen |= new
            asked += [(one, extra) for _, extra in new]
    return list(found.values())


def empty(folder: Path) -> Environment:
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    return Environment(folder)


def run(*command: str, **options: Any) -> str:
    """Standard output; fails with all that was printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, **({"env": ENVIRONMENT} | options))
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution, with the environment that builds beside it."""
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "copy", ignore=shutil.ignore_patterns(*NOT_SOURCE))
    builder = empty(folder / "builder")
    builder.install("hatchling>=1.27", "hatch-fancy-pypi-readme>=24.1")
    code = "from hatchling import build; print(build.build_sdist('..'))"
    archive = run(builder.python, "-c", code, cwd=folder / "copy").splitlines()[-1]
    with tarfile.open(folder / archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / archive.removesuffix(".tar.gz")


@pytest.fixture(scope="session")
def wheel(sdist: Path) -> Path:
    code = "from hatchling import build; print(build.build_wheel('..'))"
    name = run(Environment(sdist.parent / "builder").python, "-c", code, cwd=sdist).splitlines()[-1]
    return sdist.parent / name


@pytest.fixture(scope="session")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel without any extra, and what it needs."""
    environment = empty(tmp_path_factory.mktemp("base"))
    environment.install("--no-deps", str(wheel))
    environment.link(*needs(environment.library()))
    return environment


def with_extra(extra: str, base: Environment, folder: Path) -> Environment:
    environment = empty(folder)
    environment.with_packages_of(base)
    already = {one.name for one in needs(base.library())}
    environment.link(*(one for one in needs(base.library(), extra) if one.name not in already))
    return environment


@pytest.fixture(scope="session")
def with_postgres(base: Environment, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel with the extra `postgres`, on a machine where Spark is there already."""
    environment = with_extra("postgres", base, tmp_path_factory.mktemp("postgres"))
    environment.with_spark()
    return environment
