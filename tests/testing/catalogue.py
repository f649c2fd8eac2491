"""Broken sinks by the clause that they break, and the test of the kit that has to say so."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sinks.testing import Clause
from tests.testing.shelf import Kit, Shelf


@dataclass(frozen=True)
class Broken:
    sink: type[Shelf]
    clause: Clause
    test: Callable[..., None]
    options: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.clause.name}-{self.sink.__name__}"


_ENTERED: list[Broken] = []
SinkT = TypeVar("SinkT", bound=type[Shelf])


def breaks(clause: Clause, test: str, **options: Any) -> Callable[[SinkT], SinkT]:
    """`test` of the kit, with these parameters, has to fail by `clause`."""

    def entered(sink: SinkT) -> SinkT:
        method = getattr(Kit, f"test_{test}")
        usual = {"count": 1} if "count" in inspect.signature(method).parameters else {}
        _ENTERED.append(Broken(sink, clause, method, usual | options))
        return sink

    return entered


def catalogue() -> list[Broken]:
    from tests.testing import (
        broken_and_misnamed,
        broken_answers,
        broken_at_scale,
        broken_at_the_begin,
        broken_beside,
        broken_by_others,
        broken_by_outsiders,
        broken_drivers,
        broken_for_ever,
        broken_quietly,
        broken_restarts,
        broken_tasks,
    )

    assert broken_and_misnamed
    assert broken_answers
    assert broken_at_scale
    assert broken_at_the_begin
    assert broken_beside
    assert broken_by_others
    assert broken_by_outsiders
    assert broken_drivers
    assert broken_for_ever
    assert broken_quietly
    assert broken_restarts
    assert broken_tasks
    return _ENTERED
