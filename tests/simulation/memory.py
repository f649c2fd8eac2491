"""What a storage, a target or Spark remembers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any


class Memory:
    """Values by key, with every state that they ever had, so that a backup of any moment can be restored."""

    def __init__(self, ticks: Callable[[], int]) -> None:
        self.values: dict[str, Any] = {}
        self.lock = threading.RLock()
        """For what happens in one step. Simulated processes share a thread, so only real threads ever wait for it."""
        self._ticks = ticks
        self._states: list[tuple[int, dict[str, Any]]] = [(0, {})]

    def put(self, key: str, value: Any) -> None:
        self.put_all({key: value})

    def put_all(self, values: Mapping[str, Any]) -> None:
        """Put several values in one step."""
        self.values.update(values)
        self.keep()

    def remove(self, *keys: str) -> None:
        if there := self.values.keys() & set(keys):
            for key in there:
                del self.values[key]
            self.keep()

    def keep(self) -> None:
        """Keep the values as they are now as the newest state."""
        self._states.append((self._ticks(), dict(self.values)))

    def at(self, tick: int) -> dict[str, Any]:
        """Return the values as they were after that tick."""
        return next((values for when, values in reversed(self._states) if when <= tick), {})

    def restore(self, values: dict[str, Any]) -> bool:
        """Take an earlier state for the present one. Returns whether that changes anything."""
        changed = self.values != values
        self.values = dict(values)
        self.keep()
        return changed
