"""What a storage, a target or Spark remembers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Memory:
    """Values by key, with every state that they ever had, so that a backup of any moment can be restored."""

    def __init__(self, ticks: Callable[[], int]) -> None:
        self.values: dict[str, Any] = {}
        self._ticks = ticks
        self._states: list[tuple[int, dict[str, Any]]] = [(0, {})]

    def put(self, key: str, value: Any) -> None:
        self.values[key] = value
        self.keep()

    def remove(self, key: str) -> None:
        if self.values.pop(key, None) is not None:
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
