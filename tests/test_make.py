"""The commands of the Makefile do the same, whatever the shell is set to."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.short_loop import FILES, SHORT

ROOT = Path(__file__).parents[1]


def test_the_shells_own_spark_and_postgresql_are_not_used() -> None:
    elsewhere = {"PGSERVICE": "shop", "SPARK_HOME": "/opt/spark", "PYTHONPATH": "/opt/spark/python"}
    done = subprocess.run(
        ["make", "-f", "-", "show"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "SPARK_LOCAL_IP": "127.0.0.1", "NO_PROXY": "in.house"} | elsewhere,
        input="include Makefile\nshow: ; @env\n",
        capture_output=True,
        text=True,
    )
    seen = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert not elsewhere.keys() & seen.keys(), done.stderr
    assert seen["SPARK_LOCAL_IP"] == "127.0.0.1"
    assert seen["no_proxy"] == seen["NO_PROXY"] == "127.0.0.1,127.0.0.2,localhost,in.house"


@pytest.mark.parametrize(
    ("targets", "extras"),
    [([".venv/.demo"], ["demo"]), ([".venv/.ready"], ["dev"]), ([".venv/.demo", ".venv/.ready"], ["demo", "dev"])],
    ids=["demo", "tests", "tests after the demo"],
)
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_what_takes_minutes_is_told_before_it_begins(
    tmp_path: Path, installer: str, targets: list[str], extras: list[str]
) -> None:
    """The demo's packages are a part of those of the tests, in one environment, installed by uv where it is there."""
    for file in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    program(tmp_path / ".venv" / "bin" / "python", 'case "$*" in *install*) echo "pip installs $*";; esac')
    program(tmp_path / "bin" / "uv", 'echo "uv installs $*"')
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    told = []
    for target in targets:
        command = ["make", "--no-print-directory", target, *(["UV="] if installer == "pip" else [])]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        told += done.stdout.splitlines()
    for extra in extras:
        before, begun, *told = told
        assert "into .venv, once" in before
        assert "minutes" in before
        assert begun.startswith(f"{installer} installs")
        assert begun.endswith(f"--editable .[{extra}]")
    assert told == []


def test_the_demo_has_what_it_needs_where_the_tests_have(tmp_path: Path) -> None:
    for file in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    program(tmp_path / ".venv" / "bin" / "python", 'case "$*" in *install*) echo "pip installs $*";; esac')
    first, again = [
        subprocess.run(["make", target], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for target in (".venv/.ready", ".venv/.demo")
    ]
    assert "installs" in first
    assert "up to date" in again


def test_the_short_loop_has_a_test_for_each_kind_of_failure() -> None:
    """The page about tests has the same kinds."""
    page = (ROOT / "docs" / "testing.md").read_text()
    table = page[page.index("| failure |") :].partition("\n\n")[0]
    _, _, *rows = re.findall(r"^\| *(.+?) *\|.*\|$", table, re.MULTILINE)
    kinds = [re.sub(r"\[(.+?)\]\(.+?\)", r"\1", row) for row in rows]
    assert kinds == list(SHORT)
    for file in FILES:
        assert (ROOT / "tests" / file).exists()


def test_the_demo_has_the_modules_of_sparks_workers_compiled(tmp_path: Path) -> None:
    for file in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    program(tmp_path / ".venv" / "bin" / "python", 'case "$*" in *compile_modules*) echo compiled;; esac')
    told = subprocess.run(
        ["make", "--no-print-directory", ".venv/.demo"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert told.splitlines()[-1] == "compiled"


def program(file: Path, script: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
