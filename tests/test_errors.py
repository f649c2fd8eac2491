"""Every error that is raised on purpose ends with one code, and docs/errors.md has a section on each code."""

from __future__ import annotations

import ast
import importlib
import json
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sinks.errors
from coordinator import ExactlyOnceError
from coordinator.cli.app import app
from coordinator.cli.output import USAGE
from coordinator.errors import CheckpointError, CheckpointFailed, InDoubtError, JobFailed, SavepointError, reason
from coordinator.operations.jobfile import JobFileError
from coordinator.protocol.decisions import failed_error, refused_again_error
from coordinator.storage import StorageError
from coordinator.task.task import Ack
from sinks.dead_letters import Refusal, too_many
from sinks.errors import BadValue, ConfigurationError, SchemaMismatch, SinkError, TransactionBlocked
from tests.test_structure import MODULES

PAGE = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
SECTIONS = re.findall(r"^### (.*)", PAGE, re.M)
CODE = re.compile(r"\[(EO(?:-[A-Z0-9]+)+)\]")
INHERITING = {"NotEnded", "Unfit"}
"""Errors that one folder of `sinks` has for itself, with the code of their base class."""
PARTS = {"_in_doubt", "Fault", "OperationalError", "lost", "unknown"}
"""Functions and classes beside the exceptions that take messages, or parts of them."""
SIGNALS = {
    "Fenced",
    "NotMovable",
    "NotYetKnown",
    "Outrun",
    "RefusedSchema",
    "RefusedValue",
    "RowByRow",
    "StagedRowsChanged",
    "TargetRefuses",
    "ValidationError",
}
"""Exceptions that a module raises for another one, which catches them."""


def classes() -> Iterator[type[Exception]]:
    """All exceptions of the library, without its conformance kit."""
    for name in sorted(MODULES):
        if not name.startswith("sinks.testing") and not name.endswith("__main__"):
            for kind in vars(importlib.import_module(name)).values():
                if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == name:
                    yield kind


def named_codes() -> set[str]:
    """Codes that a message in the code names."""
    return {
        code
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for code in CODE.findall(node.value)
    }


def test_every_error_has_the_base_class_and_a_code() -> None:
    found = list(classes())
    assert len(found) > 35
    without_base = {kind.__name__ for kind in found if not issubclass(kind, ExactlyOnceError)}
    assert without_base <= SIGNALS
    without_code = {kind.__name__ for kind in found if issubclass(kind, ExactlyOnceError) and "code" not in vars(kind)}
    assert without_code <= INHERITING


def test_a_message_has_at_most_forty_words() -> None:
    """What stands for values does not count. The page has the rest."""
    names = {kind.__name__ for kind in classes()} | PARTS
    counted = {}
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
        constants = {
            ast.unparse(each.targets[0]): each.value
            for each in tree.body
            if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant | ast.JoinedStr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names:
                parts = [*ast.walk(node)]
                named = [constants[each.id] for each in parts if isinstance(each, ast.Name) and each.id in constants]
                parts += [each for value in named for each in ast.walk(value)]
                texts = [each.value for each in parts if isinstance(each, ast.Constant) and isinstance(each.value, str)]
                prose = CODE.sub("", " ".join(texts))
                counted[f"{module}:{node.lineno}"] = len(re.findall(r"[^\W\d_][\w.']*", prose))
    assert len(counted) > 350
    assert {place: words for place, words in counted.items() if words > 40} == {}


def test_no_two_classes_have_one_code() -> None:
    codes = Counter(vars(kind)["code"] for kind in classes() if "code" in vars(kind))
    assert set(codes.values()) == {1}


def test_every_code_has_a_section_and_every_section_a_code() -> None:
    assert len(set(SECTIONS)) == len(SECTIONS)
    assert set(SECTIONS) == {vars(kind)["code"] for kind in classes() if "code" in vars(kind)} | named_codes()


def test_the_page_lists_the_codes_of_each_class() -> None:
    rows = re.findall(r"^\| `(\w+)` \| \[(.*?)\]\(.*?\) \|(.*)\|$", PAGE, re.M)
    assert {name: code for name, code, _ in rows} == {
        kind.__name__: vars(kind)["code"] for kind in classes() if "code" in vars(kind)
    }
    more = re.findall(r"\[(EO-.*?)\]", " ".join(others for *_, others in rows))
    assert len(set(more)) == len(more)
    assert set(more) == set(SECTIONS) - {code for _, code, _ in rows}


def test_the_tree_is_drawn_in_the_docstring() -> None:
    drawn: dict[str, tuple[str, str]] = {}
    above = ["Exception"]
    for indent, name, code in re.findall(r"^    ( *)(\w+) +(EO-\S+)$", sinks.errors.__doc__ or "", re.M):
        del above[len(indent) // 2 + 1 :]
        drawn[name] = (above[-1], code)
        above.append(name)
    own = [kind for kind in classes() if "code" in vars(kind)]
    assert drawn == {kind.__name__: (str(kind.__base__ and kind.__base__.__name__), vars(kind)["code"]) for kind in own}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SchemaMismatch("column a is missing"), "column a is missing [EO-SCHEMA]"),
        (CheckpointError("called twice [EO-CALL-TWICE]"), "called twice [EO-CALL-TWICE]"),
        (InDoubtError("lost\n  - a\nStart again.", [{"a": 1}]), "lost\n  - a\nStart again.\n[EO-IN-DOUBT]"),
        (
            StorageError("file:///a", "b", "cannot write"),
            "checkpoint storage file:///a, key 'b': cannot write [EO-STORAGE]",
        ),
        (JobFileError("job.toml lacks job"), "job.toml lacks job [EO-JOB-FILE]"),
    ],
)
def test_the_code_is_at_the_end_of_the_message(error: ExactlyOnceError, text: str) -> None:
    assert str(error) == text
    assert error.code == CODE.findall(text)[0]
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.code) == (type(error), text, error.code)


def test_an_error_that_wraps_another_one_has_one_code() -> None:
    inner = ConfigurationError("no such table")
    repeated = SinkError(f"sink 'a': {inner}. Create it")
    assert str(repeated) == "sink 'a': no such table. Create it [EO-CONFIG]"
    assert str(SavepointError(str(repeated))) == str(repeated)
    failed = failed_error(3, "orders", StorageError("file:///a", "", "No space left"), exactly_once=True)
    assert isinstance(failed, CheckpointFailed)
    assert (failed.code, str(failed).count("EO-")) == ("EO-STORAGE", 1)
    given_up = JobFailed(f"failed at attempt 3: {reason(failed)}")
    assert (given_up.code, str(given_up).count("EO-")) == ("EO-STORAGE", 1)
    in_doubt = InDoubtError(f"not visible: {TransactionBlocked('a lock')}\nStart again. [EO-IN-DOUBT]")
    assert str(in_doubt) == "not visible: a lock\nStart again.\n[EO-IN-DOUBT]"
    lines = ConfigurationError("sink 'a':\n  - run: GRANT UPDATE ON t TO app")
    assert str(SinkError(f"{lines}. Start again")).splitlines()[1:] == [
        "  - run: GRANT UPDATE ON t TO app. Start again",
        "[EO-CONFIG]",
    ]


def test_a_more_special_code_wins_over_that_of_the_cause() -> None:
    assert refused_again_error(3, BadValue("row 1")).args[0].endswith("[EO-REPLAY-REFUSED]")
    refused = Refusal.of(0, BadValue("row 1 is too long"))
    assert refused.error == "row 1 is too long", "a letter is about the row"
    error = too_many("orders", "9 rows", 3, [(refused.error_class, refused.error)])
    assert (error.code, str(error).count("EO-")) == ("EO-DEAD-LETTERS", 1)


def test_an_error_of_0_2_1_is_read() -> None:
    old = {"type": "SchemaMismatch", "message": "column a is missing", "retryable": False}
    error = SinkError.from_json(old)
    assert (type(error), str(error)) == (SchemaMismatch, "column a is missing [EO-SCHEMA]")
    unknown = SinkError.from_json({"type": "Throttled", "message": "slow down", "retryable": True})
    assert (str(unknown), unknown.retryable) == ("Throttled: slow down [EO-SINK]", True)
    stored = json.loads(Ack("orders", 0).to_json()) | {"error": old}
    assert str(Ack.from_json(json.dumps(stored)).error) == "column a is missing [EO-SCHEMA]"


def test_0_2_1_reads_an_error() -> None:
    """That version makes the class `type` with `message`, which it shows as it is, and looks at these keys only."""
    value = json.loads(json.dumps(SchemaMismatch("column a is missing").to_json()))
    assert value == {"type": "SchemaMismatch", "message": "column a is missing [EO-SCHEMA]", "retryable": False}


def test_an_error_has_one_code_after_several_processes() -> None:
    error: SinkError = ConfigurationError("the registry cannot be asked [EO-REGISTRY]")
    for _ in range(3):
        error = SinkError.from_json(json.loads(json.dumps(error.to_json())))
    assert (type(error), error.code) == (ConfigurationError, "EO-REGISTRY")
    assert str(error) == "the registry cannot be asked [EO-REGISTRY]"

    class Throttled(SinkError):
        """Of a process that another one does not have."""

        retryable = True

    again = SinkError.from_json(Throttled("slow down").to_json())
    assert str(again) == "Throttled: slow down [EO-SINK]"


def test_a_code_is_explained() -> None:
    for given in ("EO-SCHEMA", "[eo-schema]"):
        told = CliRunner().invoke(app, ["explain", given])
        assert told.exit_code == 0
        assert told.stdout.startswith("EO-SCHEMA\n\nThe columns of the batch do not fit the target")
        assert "](" not in told.stdout, "a terminal shows no links"
        assert "EO-TARGET-CHANGED" not in told.stdout, "the next section"
    unknown = CliRunner().invoke(app, ["explain", "EO-SHEMA"])
    assert (unknown.exit_code, unknown.stderr) == (
        USAGE,
        "There is no error code EO-SHEMA. A code looks like EO-SCHEMA.\n",
    )
