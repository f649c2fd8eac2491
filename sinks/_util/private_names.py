"""Names in other packages that sinks use, and that these packages do not promise to keep.

Each sink lists these names in one place. If an installed version lacks one of them, an error says
the number of the version, and what to install, before a query writes anything.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from types import CodeType
from typing import Any

from sinks.errors import ConfigurationError

_NAME = re.compile(r"([\w.]+)(?:\((.+)\))?")


@dataclass
class PrivateNames:
    """The names of one package that sinks use.

    `supported` is what pip takes behind the package's name. A name is written in full as
    `module.Class.attribute`. If calls pass parameters by name, these follow, as in
    `module.function(one, another)`.
    """

    package: str
    supported: str
    names: tuple[str, ...]
    _is_there: bool = field(default=False, init=False)

    @contextmanager
    def imports(self) -> Iterator[None]:
        """Explain an ImportError of a name that the installed version lacks.

        A package that is not installed at all is left to `needs_extra`.
        """
        try:
            yield
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError) and "." not in (error.name or ""):
                raise
            raise ImportError(self._refusal(str(error)), name=error.name) from error

    def check(self) -> None:
        """Raise ConfigurationError if the installed version lacks a name, or a parameter."""
        if self._is_there:
            return
        missing = [name for name in self.names if not is_there(name)]
        if missing:
            raise ConfigurationError(
                self._refusal(f"it has no {', '.join(missing)}") + " [EO-PACKAGE]"
            )
        self._is_there = True

    def _refusal(self, why: str) -> str:
        return (
            f"{self.package} {version(self.package)} is not supported: {why}. This library uses "
            f"parts of {self.package} that are not public. Install a version that it was tested "
            f"with (pip install '{self.package}{self.supported}'), or a newer release of this "
            "library"
        )


def is_there(name: str) -> bool:
    """Return whether the installed packages have a name as `PrivateNames` writes it."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"not a name: {name!r}")
    path, parameters = match.groups()
    try:
        found = _found(path)
    except (AttributeError, ImportError):
        return False
    if parameters is None:
        return True
    return set(parameters.split(", ")) <= inspect.signature(found).parameters.keys()


def _found(path: str) -> Any:
    """Return what a dotted path names.

    Raises AttributeError or ImportError if there is no such thing.
    """
    parts = path.split(".")
    module = importlib.import_module(parts[0])
    while len(parts) > 1 and hasattr(module, "__path__"):
        try:
            module = importlib.import_module(".".join([module.__name__, parts[1]]))
        except ModuleNotFoundError:
            break
        del parts[1]
    found: Any = module
    for part in parts[1:]:
        if isinstance(found, type) and not hasattr(found, part) and part in _set_by_init(found):
            return None
        found = getattr(found, part)
    return found


def _set_by_init(kind: type) -> tuple[str, ...]:
    """Return the attributes that `__init__` names.

    Attributes that only instances have are among them.
    """
    init = inspect.unwrap(kind.__init__)  # type: ignore[misc]
    code = getattr(init, "__code__", None)
    return code.co_names if isinstance(code, CodeType) else ()
