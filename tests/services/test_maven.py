"""Jars are fetched once, by Ivy, from where the user's settings say: here from a Maven repository in a folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sinks.testing.servers.common import CannotBeHad
from sinks.testing.servers.maven import maven_jars

PROGRAM = """
import logging, sys
from sinks.testing.servers.maven import maven_jars
logging.basicConfig(level=logging.INFO)
print(*maven_jars(*sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that downloads go to. `org.example:app:1` needs `org.example:library:2`."""
    repository = tmp_path / "repository"
    _publish(repository, "library", "2")
    _publish(repository, "app", "1", needs=("library", "2"))
    settings = tmp_path / "ivysettings.xml"
    settings.write_text(
        '<ivysettings><settings defaultResolver="folder"/><resolvers>'
        f'<ibiblio name="folder" m2compatible="true" checksums="" root="{repository.as_uri()}"/>'
        "</resolvers></ivysettings>"
    )
    monkeypatch.setenv("IVY_SETTINGS", str(settings))
    monkeypatch.setenv("TEST_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _publish(repository: Path, artifact: str, version: str, needs: tuple[str, str] | None = None) -> None:
    folder = repository / "org" / "example" / artifact / version
    folder.mkdir(parents=True)
    (folder / f"{artifact}-{version}.jar").write_text(f"the jar of {artifact}")
    coordinates = "<groupId>org.example</groupId><artifactId>{}</artifactId><version>{}</version>"
    dependency = f"<dependency>{coordinates.format(*needs)}</dependency>" if needs else ""
    (folder / f"{artifact}-{version}.pom").write_text(
        f"<project><modelVersion>4.0.0</modelVersion>{coordinates.format(artifact, version)}"
        f"<dependencies>{dependency}</dependencies></project>"
    )


def test_jars_come_with_what_they_need() -> None:
    jars = maven_jars("org.example:app:1")
    assert [jar.name for jar in jars] == ["app-1.jar", "library-2.jar"]
    assert [jar.read_text() for jar in jars] == ["the jar of app", "the jar of library"]


def test_jars_come_alone_when_asked_for() -> None:
    assert [jar.name for jar in maven_jars("org.example:app:1", transitive=False)] == ["app-1.jar"]


def test_jars_are_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    jars = maven_jars("org.example:app:1")
    monkeypatch.setenv("JAVA_HOME", "/there/is/no/java")
    assert maven_jars("org.example:app:1") == jars


def test_processes_that_ask_at_once_fetch_once(cache: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "org.example:app:1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for _ in range(3)
    ]
    answers = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({jars for jars, _ in answers}) == 1
    assert sum("fetching app 1" in log for _, log in answers) == 1
    assert [path.suffix for path in sorted((cache / "jars").iterdir())].count(".lock") == 1


def test_what_cannot_be_had_is_told_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who asked at the same time tries it once more."""
    for _ in range(2):
        with pytest.raises(
            CannotBeHad, match=r"(?s)org\.example:app:9 could not be fetched from .*IVY_SETTINGS.*not found"
        ):
            maven_jars("org.example:app:9")
        monkeypatch.setenv("JAVA_HOME", "/there/is/no/java")
    assert [path.suffix for path in (cache / "jars").iterdir()] == [".lock"]


def test_a_jar_with_another_content_is_refused(cache: Path) -> None:
    _publish(cache.parent / "repository", "mysql-connector-j", "9.4.0")
    with pytest.raises(RuntimeError, match=r"mysql-connector-j-9\.4\.0\.jar is not what it was: its SHA-256 is"):
        maven_jars("org.example:mysql-connector-j:9.4.0")
    assert [path.suffix for path in (cache / "jars").iterdir()] == [".lock"]
