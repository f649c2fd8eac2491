"""What a run tells of a server that it is waiting for, and of one that it cannot have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

UNREACHABLE = (
    '<ivysettings><settings defaultResolver="nowhere"/><resolvers>'
    '<ibiblio name="nowhere" m2compatible="true" root="http://127.0.0.1:9/"/></resolvers></ivysettings>'
)


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A run that does not reach Maven Central."""
    settings = folder / "ivysettings.xml"
    settings.write_text(UNREACHABLE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TEST_"))}
    environment |= {"IVY_SETTINGS": str(settings), "TEST_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}"]
    return subprocess.run(
        [*command, "tests/needing_servers.py", *options],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_a_server_that_cannot_be_had_skips_its_tests_and_is_told_once(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2")
    assert done.returncode == 0, done.stdout
    assert re.findall("fetching kafka.*", done.stderr) == ["fetching kafka_2.13 4.2.1 from Maven Central"]
    told = [line for line in done.stdout.splitlines() if "skipped" in line]
    assert re.fullmatch(
        "4 tests were skipped, because Kafka cannot be had: org.apache.kafka:kafka_2.13:.* could not be fetched from "
        "Maven Central; IVY_SETTINGS may name an ivysettings.xml with a mirror",
        told[0],
    )
    assert told[1] == "1 test was skipped for other reasons; -rs lists them"
    assert re.search("1 passed, 5 skipped", told[2])
    assert len(told) == 3


def test_a_server_that_is_required_fails_its_tests_with_all_that_is_known(tmp_path: Path) -> None:
    done = run(tmp_path, "--require-servers")
    assert done.returncode == 1
    assert "The end of what Ivy said" in done.stdout
    assert re.search("1 failed, 1 passed, 1 skipped, 3 errors", done.stdout)
