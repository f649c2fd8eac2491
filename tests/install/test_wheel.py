"""The wheel works where nothing else is installed, and the README's own first pipeline with it."""

from __future__ import annotations

import re
import subprocess
import time
import zipfile
from collections.abc import Iterator
from contextlib import closing
from email.parser import Parser
from pathlib import Path

import psycopg
import pytest

import coordinator
from tests.install.conftest import ENVIRONMENT, ROOT, SPARK, Environment, empty, run, with_extra

README = (ROOT / "README.md").read_text()


def test_the_sdist_has_changelog_and_docs(sdist: Path) -> None:
    for file in (
        "CHANGELOG.md",
        "LICENSE",
        "README.md",
        "docs/protocol.md",
        "examples/word_count.py",
        "tests/conftest.py",
    ):
        assert (sdist / file).is_file()


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("/METADATA")]
        about = Parser().parsestr(archive.read(name).decode())
        needed = {
            "coordinator/py.typed",
            "coordinator/errors.md",
            "sinks/py.typed",
            "sinks/testing/servers/pins.sha256",
            "coordinator/cli/skeleton/sink.py",
        }
        needed |= {"coordinator/operations/ui/templates/base.html", "coordinator/operations/ui/static/live.js"}
        assert needed <= set(archive.namelist())
    assert about["Version"] == coordinator.__version__
    assert about["License-Expression"] == "Apache-2.0"
    without_extras = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert all(re.search(r"[>=]=", line) for line in about.get_all("Requires-Dist", []) if "pyspark-" not in line)
    assert not [line for line in without_extras if line.startswith("pyspark")], "clusters have Spark already"
    description = about.get_payload()
    assert isinstance(description, str)
    assert "# Exactly-once sinks for PySpark" in description
    links = re.findall(r"\]\(([^)]*)\)", description)
    assert all(link.startswith("https://") for link in links), "on an index a relative link leads nowhere"


@pytest.mark.parametrize(
    ("extra", "sink"),
    [
        ("", "sinks.sqlalchemy"),
        ("", "sinks.files"),
        *((name, f"sinks.{name}") for name in ("postgres", "mysql", "kafka", "delta", "iceberg")),
    ],
)
def test_each_extra_is_enough_for_its_sink(extra: str, sink: str, base: Environment, tmp_path: Path) -> None:
    environment = with_extra(extra, base, tmp_path / "venv") if extra else base
    code = f"import sys, coordinator, {sink}; print(coordinator.__file__, 'pyspark' in sys.modules)"
    place, has_spark = run(environment.python, "-c", code, cwd=tmp_path).split()
    assert str(base.packages) in place
    assert has_spark == "False"


@pytest.mark.parametrize("extra", ["postgres", "mysql", "kafka", "delta", "iceberg"])
def test_a_sink_without_its_extra_names_it(extra: str, base: Environment, tmp_path: Path) -> None:
    code = f"import sinks.{extra}"
    done = subprocess.run([base.python, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode == 1
    assert f"Install this library with its extra `{extra}`" in done.stderr.splitlines()[-1]


def test_the_command_without_spark(base: Environment, tmp_path: Path) -> None:
    without = subprocess.run([base.folder / "bin" / "coordinator"], capture_output=True, text=True, env=ENVIRONMENT)
    assert without.returncode == 1
    assert "extra `cli`" in without.stderr
    environment = with_extra("cli", base, tmp_path / "venv")
    command = [environment.python, "-m", "coordinator.cli"]
    assert run(*command, "--version") == f"pyspark-exactly-once {coordinator.__version__}\n"
    job = tmp_path / "job.toml"
    job.write_text(
        f'job = "orders"\nstorage = "{(tmp_path / "storage").as_uri()}"\n'
        f'[[sinks]]\ntype = "sqlalchemy"\nurl = "sqlite:///{tmp_path}/orders.db"\ntable = "orders"\n'
    )
    told = subprocess.run([*command, "doctor", "--job", str(job)], capture_output=True, text=True, env=ENVIRONMENT)
    assert "no pyspark here" in told.stdout


@pytest.mark.parametrize("name", ["sinks", "coordinator"])
def test_a_package_of_the_same_name(name: str, base: Environment, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("")
    code = "from coordinator import CheckpointCoordinator"
    done = subprocess.run([base.python, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode == 1
    assert str(tmp_path / f"{name}.py") in done.stderr.splitlines()[-1]


# ---------------------------------------------------------------------- the first pipeline
LONGEST_END = 40
"""Lines that Spark and this library may print from start to end, beside one for each checkpoint. An error deep in
Spark's stacks has more."""


def program() -> str:
    """Return the program of README, which runs until there is a file `enough` instead of for half a minute."""
    section = README.split("## A first pipeline")[1]
    found = re.search(r"```python\n(.*?)```", section, re.S)
    assert found
    assert "    query.awaitTermination(30)\n" in found[1]
    until = "    import os\n    while not os.path.exists('enough'):\n        query.awaitTermination(1)\n"
    return found[1].replace("    query.awaitTermination(30)\n", until)


class Pipeline:
    def __init__(self, environment: Environment, home: Path, dsn: str) -> None:
        self.environment, self.home, self.dsn = environment, home, dsn
        self.started: list[subprocess.Popen[bytes]] = []
        self.log = home / "log"  # of the newest start; the JVM of one that was killed goes on writing for a while

    def start(self, **variables: str) -> subprocess.Popen[bytes]:
        script = self.home / "first.py"
        script.write_text(program())
        # SPARK_HOME, as on a cluster: the archive of classes is for Spark's jars in their own place
        environment = ENVIRONMENT | {"DSN": self.dsn, "HOME": str(self.home), "SPARK_HOME": str(SPARK)}
        environment |= {"SPARK_LOCAL_IP": "127.0.0.1"} | variables
        self.log = self.log.with_suffix(f"{self.log.suffix}.next")
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [self.environment.python, script], env=environment, stdout=log, stderr=log, cwd=self.home
            )
        self.started.append(process)
        return process

    def close(self) -> None:
        """End what a test that failed has left, because the program would not end by itself."""
        for process in self.started:
            process.kill()
            process.wait()

    def rows(self) -> tuple[int, int, int]:
        """How many there are, how many different ones, and how many there should be."""
        try:
            with psycopg.connect(self.dsn) as connection:
                found = connection.execute(
                    "SELECT count(*), count(DISTINCT value), max(value) + 1 FROM numbers"
                ).fetchone()
        except psycopg.errors.UndefinedTable:
            return 0, 0, 0
        assert found
        return int(found[0]), int(found[1]), int(found[2] or 0)

    def started_until(self, rows: int) -> subprocess.Popen[bytes]:
        """The program, when there are so many rows."""
        process = self.start()
        deadline = time.monotonic() + 900
        while self.rows()[0] < rows:
            assert process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)
        return process


@pytest.fixture
def pipeline(with_postgres: Environment, tmp_path: Path, pg_database: str) -> Iterator[Pipeline]:
    with closing(Pipeline(with_postgres, tmp_path, pg_database)) as started:
        yield started


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.large)], ids=["", "killed before"])
def test_the_first_pipeline(pipeline: Pipeline, killed: bool) -> None:
    before = 0
    if killed:
        process = pipeline.started_until(2000)
        process.kill()
        process.wait()
        before = pipeline.rows()[0]
    process = pipeline.started_until(before + 1)
    (pipeline.home / "enough").touch()
    assert process.wait(400) == 0, pipeline.log.read_text()
    rows, different, expected = pipeline.rows()
    assert rows == different == expected > before
    told = pipeline.log.read_text()
    begins = r"[1-9]\d*" if killed else "0"
    assert re.search(rf"job numbers wrote checkpoints {begins} to \d+; rows: [\d,]+ into numbers", told), told
    assert "Traceback" not in told
    assert "Py4JException" not in told
    ours = [line for line in told.splitlines() if " completed in " not in line and not line.startswith("\tat ")]
    assert len(ours) < LONGEST_END, told  # Hadoop may log by a stack that it was interrupted
    with psycopg.connect(pipeline.dsn) as connection:
        assert (
            connection.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()").fetchall() == []
        )
    assert (pipeline.home / "numbers" / "checkpoints").is_dir()


def test_the_postgresql_to_try_with(base: Environment, with_postgres: Environment, tmp_path: Path) -> None:
    environment = with_extra("testing", base, tmp_path / "venv")
    environment.packages.joinpath("postgres.pth").write_text(f"{with_postgres.packages}\n")
    found = re.search(r"venv/bin/pip install '\.\[testing\]'\n    venv/bin/(.*?)\n\n", README, re.S)
    assert found
    command = f"exec {environment.folder}/bin/" + found[1].replace("\n    ", "\n")
    with subprocess.Popen(
        ["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT, text=True
    ) as server:
        assert server.stdout
        said = server.stdout.readline()
        dsn = said.removeprefix("export DSN=").strip()
        psycopg.connect(dsn).close()
        server.communicate("\n")
    assert server.returncode == 0
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(dsn)


@pytest.mark.large  # tests/spark/test_setup.py has it with less
@pytest.mark.slow
def test_workers_without_the_library(pipeline: Pipeline, tmp_path: Path) -> None:
    bare = empty(tmp_path / "bare")
    failed = pipeline.start(PYSPARK_PYTHON=bare.python)
    assert failed.wait(400) == 1
    told = pipeline.log.read_text().splitlines()
    assert f"{bare.python} says ModuleNotFoundError: No module named 'sinks'" in told[-1]
    assert f"PYSPARK_PYTHON={pipeline.environment.python}" in told[-1]
    assert len(told) < LONGEST_END
    assert not (tmp_path / "numbers" / "spark").exists(), "the query was started"
