"""Modules import each other in one direction only (imports for types count), and keep to what others show them."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("coordinator", "sinks")
    for path in (ROOT / package).rglob("*.py")
}
LAYERS = (
    ("coordinator.cli", "coordinator.__main__"),
    ("sinks.testing",),
    ("coordinator",),
    (
        "coordinator.jobfile",
        "coordinator.operations.jobfile",
        "coordinator.operations.restart",
        "coordinator.operations.ui",
    ),
    ("coordinator.coordinator",),
    ("coordinator.operations",),
    ("coordinator.spark",),
    ("coordinator.protocol",),
    ("coordinator.store",),
    ("coordinator.storage",),
    ("coordinator.task",),
    ("coordinator.config", "coordinator.errors", "coordinator.import_check", "coordinator.listener"),
    ("sinks.sqlalchemy",),
    ("sinks.postgres", "sinks.mysql", "sinks.kafka", "sinks.delta", "sinks.iceberg", "sinks.files"),
    ("sinks.sql", "sinks.lake"),
    ("sinks",),
    ("sinks.arrow",),
    ("sinks._util",),
    ("sinks.errors",),
)
"""Modules, and packages with all that has no layer of its own. A module imports from its own layer and those below."""
UPWARDS = {
    (
        "coordinator.storage.hadoop",
        "coordinator.spark.internals",
    ): "HDFS is reached through the JVM of the Spark session",
}
OF_PYSPARK = re.compile(r"\._(jvm|jdf|jsq|jsparkSession|gateway)$")
"""The only way to Spark's JVM, for one module only."""


def imported(module: str) -> Iterator[str]:
    """What a module imports at any depth. A package stands for its own `__init__` alone."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)


def test_no_import_circle() -> None:
    graph = {module: {name for name in imported(module) if name in MODULES} - {module} for module in MODULES}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' <- '.join(error.args[1])}")


def layer(module: str) -> int:
    """The number of a module's layer, from the top."""
    names = {name: number for number, names in enumerate(LAYERS) for name in names}
    while module not in names:
        module = module.rpartition(".")[0]
    return names[module]


def test_no_module_imports_from_a_layer_above() -> None:
    imports = {(module, name) for module in MODULES for name in imported(module) if name in MODULES}
    up = {(module, name) for module, name in imports if layer(name) < layer(module) and name.count(".")}
    assert up == set(UPWARDS)


def outside(node: ast.Attribute, own: set[str]) -> bool:
    """Whether a private member is taken from an object that is not one's own, nor of a class of this module."""
    of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    return node.attr.startswith("_") and not node.attr.startswith("__") and not of_itself and node.attr not in own


def test_no_private_member_of_the_coordinator_is_used_by_another_module() -> None:
    """`tests/test_private_names.py` looks at those of `sinks`, which also takes private names of other packages."""
    found = []
    for module in (name for name in MODULES if name.split(".")[0] == "coordinator"):
        tree = ast.parse(MODULES[module].read_text())
        own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and not outside(node, set())}
        own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        found += [
            f"{module}:{node.lineno} {ast.unparse(node)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and outside(node, own)
        ]
    internals = "coordinator.spark.internals:"
    assert [one for one in found if not (OF_PYSPARK.search(one) and one.startswith(internals))] == []


def test_only_the_fence_gives_a_permit_to_commit() -> None:
    makers = [name for name, path in MODULES.items() if "CommitPermit(" in path.read_text()]
    assert makers == ["coordinator.protocol.fence"]


OWN_TIME = ("coordinator.operations.restart", "coordinator.operations.ui")
"""They run beside a job, and not as a part of one."""


def test_what_decides_takes_time_randomness_and_threads_from_the_machine() -> None:
    """A simulation replaces the machine. What is taken from Python itself would not happen the same way again."""
    rooms = ("coordinator.protocol", "coordinator.store", "coordinator.task", "coordinator.operations")
    modules = [m for m in MODULES if m.startswith(rooms) and not m.startswith(OWN_TIME)]
    modules += ["coordinator.coordinator", "coordinator.spark.lifecycle", "sinks.base", "sinks._util.threads"]
    taken = {(m, name) for m in modules for name in imported(m)} & {
        (m, name) for m in modules for name in ("time", "random", "secrets", "uuid", "threading")
    }
    assert taken == set()


def told(module: str) -> Iterator[str]:
    """Texts that may reach people: messages, and the docstrings of commands."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if not isinstance(node, ast.Expr):
            yield from (str(each.value) for each in ast.iter_child_nodes(node) if isinstance(each, ast.Constant))
        if isinstance(node, ast.FunctionDef) and module.startswith("coordinator.cli."):
            yield ast.get_docstring(node) or ""


def test_messages_name_no_file_that_only_the_repository_has() -> None:
    """Who installed a wheel has no docs/: messages say themselves what to do, or name a command."""
    files = re.compile(r"\bdocs/|\b(README|CHANGELOG|CONTRIBUTING)\b")
    assert [(module, text) for module in MODULES for text in told(module) if files.search(text)] == []


@pytest.mark.parametrize("module", sorted(MODULES))
def test_it_can_be_imported(module: str) -> None:
    if not module.endswith("__main__"):
        importlib.import_module(module)


@pytest.mark.parametrize("file", ["conftest.py", "short_loop.py"])
def test_no_test_is_named_there_that_is_gone(file: str) -> None:
    tests = ROOT / "tests"
    files = {path.relative_to(tests).with_suffix("").as_posix(): path.read_text() for path in tests.rglob("test_*.py")}
    functions = "".join([*files.values(), *(path.read_text() for path in (ROOT / "sinks" / "testing").rglob("*.py"))])

    def is_there(name: str, contract: str) -> bool:
        if name in files:
            return f"class {contract}(" in files[name] or not contract
        return any(path.endswith(f"/{name}") for path in files) or f"def {name}(" in functions

    named = re.findall(r'"((?:\w+/)?test_\w+)(?:\.py)?(?:::(\w+))?', (tests / file).read_text())
    assert named
    assert [each for each in named if not is_there(*each)] == []


EFFECTS = """
import gc, importlib, json, logging, os, signal, sys, threading, warnings
from contextlib import suppress

modules, others = json.loads(sys.stdin.read())


def is_ours(name):
    return name.partition(".")[0] in ("coordinator", "sinks")


def of_process():
    loggers = {"root": logging.root} | logging.root.manager.loggerDict
    foreign = {name: one for name, one in loggers.items() if isinstance(one, logging.Logger) and not is_ours(name)}
    return {
        "factory of log records": logging.getLogRecordFactory(),
        "class of loggers": logging.getLoggerClass(),
        **{
            f"logger {name}": (one.level, one.disabled, one.propagate, list(one.filters), list(one.handlers))
            for name, one in foreign.items()
        },
        "filters of warnings": list(warnings.filters),
        **{f"environment variable {name}": value for name, value in os.environ.items()},
        "frozen objects": gc.get_freeze_count(),
        "garbage collector": (gc.isenabled(), gc.get_threshold()),
        **{f"handler of signal {number}": signal.getsignal(number) for number in signal.valid_signals()},
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook),
        "threads": threading.enumerate(),
        "path of imports": list(sys.path),
    }


for name in others:  # they may do to the process what they like
    with suppress(Exception):
        importlib.import_module(name)
before = of_process()
for name in modules:
    importlib.import_module(name)
after = of_process()
for what in after:
    if what.startswith("logger "):  # one that was only asked for
        before.setdefault(what, (logging.NOTSET, False, True, [], []))
changed = [what for what in {**before, **after} if before.get(what) != after.get(what)]
loggers = logging.root.manager.loggerDict
own = {name: one for name, one in loggers.items() if isinstance(one, logging.Logger) and is_ours(name)}
print(json.dumps({
    "changed": changed,
    "others": [name for name in sys.modules if not is_ours(name)],
    "levels and handlers": [name for name, one in own.items() if one.level or one.handlers or not one.propagate],
    "unfiltered": [name for name, one in own.items() if not one.filters],
}))
"""


@pytest.fixture(scope="module")
def imported_by_themselves() -> dict[str, Any]:
    """What imports of all modules change in a process that has imported everything else before."""
    modules = sorted(name for name in MODULES if not name.endswith("__main__"))
    others: list[str] = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", EFFECTS],
            input=json.dumps([modules, others]),
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        others = found["others"]
    return found


def test_no_import_changes_what_others_see_of_the_process(imported_by_themselves: dict[str, Any]) -> None:
    assert imported_by_themselves["changed"] == []


def test_each_logger_makes_its_records_printable_and_leaves_the_rest_to_users(
    imported_by_themselves: dict[str, Any],
) -> None:
    assert imported_by_themselves["unfiltered"] == []
    assert imported_by_themselves["levels and handlers"] == []
