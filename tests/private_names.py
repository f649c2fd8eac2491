"""Names that begin with an underscore and are not a module's own, found in its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

OWN = ("coordinator", "sinks")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def taken_from_others(path: Path) -> Iterator[str]:
    """The names of attributes, and of what is imported, that are private to another package.

    An attribute counts as the module's own if the module defines or sets it somewhere: as a function, as a class, as a
    field, or on `self`.
    """
    tree = ast.parse(path.read_text())
    own = set(_defined(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not _is_self(node.value) and node.attr not in own:
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            if parts[0] not in OWN:
                yield from filter(is_private, [*parts, *(each.name for each in node.names)])
        elif isinstance(node, ast.Import):
            yield from (part for each in node.names for part in each.name.split(".") if is_private(part))


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
