"""What a visitor of the repository meets: forms, workflows, the hooks of pre-commit, and extras."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # comes with moto[server]

from tests.public_api import public

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def loaded(file: Path) -> dict[Any, Any]:
    return dict(yaml.safe_load(file.read_text()))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_form_begins_with_what_the_doctor_says(form: Path) -> None:
    body = loaded(form)["body"]
    first = body[0]["attributes"]["label"]
    assert first == "Output of `coordinator doctor --json`"
    assert body[0]["validations"] == {"required": True}
    assert {part["type"] for part in body} <= {"textarea", "input"}
    assert len({part["id"] for part in body}) == len(body)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_commands_of_forms_are_there(form: Path) -> None:
    commands = {tuple(line.split()[2:]) for line in public() if line.startswith("$ ")}
    named = re.findall(r"`coordinator ([\w-]+)((?: --[\w-]+)*)", form.read_text())
    assert named
    for command, options in named:
        assert any(found[0] == command and set(options.split()) <= set(found) for found in commands), command


def test_workflows_call_commands_of_this_repository() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    steps = [step for file in WORKFLOWS for job in loaded(file)["jobs"].values() for step in job["steps"]]
    run = [step["run"] for step in steps if "run" in step]
    assert ".ci/run" in run
    assert "make lint" in run
    for command in run:
        made = re.match(r"make ([\w-]+)", command)
        assert not made or made[1] in targets, command
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


def test_the_nightly_run_takes_every_package_with_an_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    bound = {re.split(r"[\[<>=]", one)[0] for one in wanted if re.search(r"<\d", one)} - {"pyspark"}
    steps = loaded(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"]["newest"]["steps"]
    [upgrade] = [step["run"] for step in steps if "install --upgrade" in step.get("run", "")]
    assert set(upgrade.partition("--upgrade ")[2].split()) == bound


def test_hooks_call_the_ruff_of_make_lint() -> None:
    [repo] = loaded(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"
    assert [hook["entry"].removesuffix(" --force-exclude") for hook in repo["hooks"]] == [
        ".venv/bin/ruff check",
        ".venv/bin/ruff format --check",
    ]


def test_the_extra_all_has_every_other_one_for_a_cluster() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [everything] = extras["all"]
    named = set(re.findall(r"\w+", everything.partition("[")[2]))
    assert named == set(extras) - {"all", "spark", "testing", "demo", "dev"}
