"""The public names, with parameters and defaults, and the options of the command `coordinator`.

`python -m tests.public_api` writes them into `public_api.txt`, which `tests/test_public_api.py` compares. Types are
left out, because mypy checks them, and a type that becomes wider breaks no program.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Collection, Iterator
from enum import Enum
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import typer

from coordinator.cli.app import app

ROOT = Path(__file__).parents[1]
PINNED = ROOT / "tests" / "public_api.txt"
SINKS = ("delta", "files", "iceberg", "kafka", "mysql", "postgres", "sqlalchemy", "testing")
PACKAGES = ("coordinator", "sinks", *(f"sinks.{name}" for name in SINKS))


def public() -> list[str]:
    """Return a line for each public name."""
    named = _named()
    classes = {value for value in named.values() if inspect.isclass(value)}
    lines = {line for name, value in named.items() for line in _lines(name, value, classes)}
    return [*sorted(lines), *sorted(_commands("coordinator", typer.main.get_command(app)))]


def _named() -> dict[str, Any]:
    """Return what the reference and each `__all__` name, each by the shortest of its names."""
    names = set(re.findall(r"^::: (\S+)", (ROOT / "docs" / "reference.md").read_text(), re.M))
    for package in PACKAGES:
        names |= {f"{package}.{name}" for name in importlib.import_module(package).__all__}
    found: dict[int, tuple[str, Any]] = {}
    for name in sorted(names, key=lambda name: (name.count("."), name)):
        value = _value(name)
        for each, of in _defined(name, value) if isinstance(value, ModuleType) else [(name, value)]:
            found.setdefault(id(of), (each, of))
    return dict(found.values())


def _value(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, last = name.rpartition(".")
        return getattr(importlib.import_module(module), last)


def _defined(name: str, module: ModuleType) -> Iterator[tuple[str, Any]]:
    for each, value in vars(module).items():
        if not each.startswith("_") and getattr(value, "__module__", None) == name:
            yield f"{name}.{each}", value


def _lines(name: str, value: Any, classes: Collection[type]) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"{name}{_parameters(value)}"
        return
    if issubclass(value, Exception):
        yield f"{name}: {value.__base__.__name__ if value.__base__ else ''}"
    elif issubclass(value, Enum):
        yield f"{name}: {', '.join(member.name for member in value)}"
        return
    else:
        yield f"{name}{_parameters(value)}"
    if name.startswith("sinks.testing."):
        return  # docs/custom-sinks.md names what an author of a sink overrides
    elsewhere = {each for of in value.__mro__[1:] if of in classes for each in dir(of)}
    elsewhere |= set(inspect.signature(value).parameters)
    for of in value.__mro__:
        for each in vars(of) if of.__module__.startswith(("coordinator.", "sinks.")) else ():
            if not each.startswith("_") and each not in elsewhere:
                yield f"{name}.{each}{_parameters(inspect.getattr_static(value, each))}"


def _parameters(value: Any) -> str:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    value = inspect.unwrap(value)
    if not isinstance(value, (FunctionType, type)):
        return ""
    return str(inspect.Signature([_plain(each) for each in inspect.signature(value).parameters.values()]))


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
    default = parameter.default
    if default is not inspect.Parameter.empty:
        named = default.name if isinstance(default, Enum) else getattr(default, "__name__", None)
        default = _Text(named or repr(default))
    return parameter.replace(annotation=inspect.Parameter.empty, default=default)


class _Text(str):
    """A default as it is shown: without an address, and the same on each Python."""

    def __repr__(self) -> str:
        return str(self)


def _commands(name: str, command: Any) -> Iterator[str]:
    inner = getattr(command, "commands", {})
    for each, of in inner.items():
        yield from _commands(f"{name} {each}", of)
    if not inner:
        options = [option for each in command.params for option in each.opts]
        yield " ".join([f"$ {name}", *sorted(options)])


if __name__ == "__main__":
    PINNED.write_text("\n".join(public()) + "\n")
