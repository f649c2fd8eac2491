"""`coordinator new-sink`: what it writes passes its own test, in a folder that has nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from coordinator.cli.app import app
from tests.kit_run import run_kit


def new_sink(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["new-sink", *arguments])


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.large)], ids=["short", "whole"])
def test_the_skeleton_passes_its_test(tmp_path: Path, whole: bool) -> None:
    also = [] if whole else ["Validating", "Auditable"]
    result = new_sink("AuditLog", "--folder", str(tmp_path), *(f"--with={one}" for one in also))
    assert result.exit_code == 0
    assert {file.name for file in tmp_path.iterdir()} == {"audit_log_sink.py", "test_audit_log_sink.py"}
    texts = [file.read_text() for file in tmp_path.iterdir()]
    assert all("AuditLogSink" in text and "keleton" not in text for text in texts)
    test = tmp_path / "test_audit_log_sink.py"
    assert result.stdout == f"python -m pytest {test}\n"
    run_kit(tmp_path, test.name, whole=whole)


@pytest.mark.parametrize("also", [[], ["Auditable"], ["Validating"], ["Validating", "Auditable"]], ids="-".join)
def test_a_sink_has_the_optional_classes_that_were_asked_for(also: list[str], tmp_path: Path) -> None:
    assert new_sink("redis", "--folder", str(tmp_path), *(f"--with={one}" for one in also)).exit_code == 0
    text = (tmp_path / "redis_sink.py").read_text()
    assert [one for one in ("Auditable", "Validating") if one in text] == also[::-1]
    assert ("def audit" in text, "def validate_all" in text) == ("Auditable" in also, "Validating" in also)
    ruff = [sys.executable, "-m", "ruff"]
    config = Path(__file__).parents[2] / "pyproject.toml"
    for check in (["check", "--ignore=I001"], ["format", "--check"]):
        done = subprocess.run([*ruff, *check, "--config", config, tmp_path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("redis", "redis_sink.py"),
        ("redis-sink", "redis_sink.py"),
        ("audit_log", "audit_log_sink.py"),
        ("S3Tables", "s3_tables_sink.py"),
    ],
)
def test_names(name: str, written: str, tmp_path: Path) -> None:
    assert new_sink(name, "--folder", str(tmp_path)).exit_code == 0
    assert (tmp_path / written).exists()
    assert (tmp_path / f"test_{written}").exists()


@pytest.mark.parametrize("name", ["", "sink", "3com", "a b", "../a", "a.b", "ü", "a--b", "-"])
def test_a_name_that_is_none(name: str, tmp_path: Path) -> None:
    result = new_sink("--folder", str(tmp_path), "--", name)
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "names no system: letters first" in result.stderr


@pytest.mark.parametrize("there", ["redis_sink.py", "test_redis_sink.py"])
def test_nothing_is_overwritten(there: str, tmp_path: Path) -> None:
    (tmp_path / there).write_text("mine")
    result = new_sink("redis", "--folder", str(tmp_path))
    assert (result.exit_code, [file.name for file in tmp_path.iterdir()]) == (1, [there])
    assert f"{tmp_path / there} exists already; nothing was written" in result.stderr
    assert (tmp_path / there).read_text() == "mine"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    result = new_sink("redis", "--folder", str(tmp_path / "missing"))
    assert result.exit_code == 2
    assert f"there is no folder {tmp_path / 'missing'}" in result.stderr
