"""The kit's tests in the order in which pytest runs them, since the first failure is what an author reads."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sinks.base import Sink
from sinks.testing import SinkContract
from sinks.testing.kit import SinkTests, end_test


class Failure(NamedTuple):
    test: str
    message: str

    @property
    def clause(self) -> str:
        return self.message.partition(":")[0]


def tests_in_order(kit: type[SinkTests]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the parameters of each test: those of base classes first, as pytest has it."""
    names = dict.fromkeys(name for base in reversed(kit.__mro__) for name in vars(base) if name.startswith("test_"))
    for name in names:
        marks = getattr(getattr(kit, name), "pytestmark", [])
        choices = [list(_parameters(*mark.args)) for mark in marks if mark.name == "parametrize"]
        for chosen in itertools.product(*choices):
            yield name, {key: value for each in chosen for key, value in each.items()}


def _parameters(names: str | tuple[str, ...], values: list[Any]) -> Iterator[dict[str, Any]]:
    for value in values:
        if isinstance(names, str):
            yield {names: value}
        else:
            yield dict(zip(names, value, strict=True))


def first_failure(
    kit: type[SinkTests], make: Callable[[Path], Sink], folder: Path, of: type[SinkTests] = SinkContract
) -> Failure | None:
    """Run the tests of `of` in order, each with a target of its own, up to the first one that fails."""
    for number, (name, parameters) in enumerate(tests_in_order(of)):
        place = folder / f"{number}" / "shelf"
        place.mkdir(parents=True)
        test = getattr(kit(), name)
        extra = {"tmp_path": place.parent} if "tmp_path" in inspect.signature(test).parameters else {}
        try:
            test(make(place), **parameters, **extra)
        except pytest.skip.Exception:
            pass
        except (Exception, pytest.fail.Exception) as error:
            return Failure(name, str(error) or repr(error))
        finally:
            end_test()
    return None
