"""The right to abort what no record names (R16), which a driver has to earn.

Rules: docs/protocol.md#the-rules
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class AbortRights:
    """The one owner of the right to abort transactions that no record names.

    A driver gets the right when storage, Spark and the sinks are known to fit together (R15). It
    loses the right while a record may yet name transactions that no record names now.
    """

    def __init__(self) -> None:
        self._granted = False
        self._undecided = False

    def grant(self) -> None:
        """Give the right, because storage, Spark and the sinks fit together."""
        self._granted = True

    @property
    def held(self) -> bool:
        return self._granted and not self._undecided

    @contextmanager
    def suspend_while_pre_committed(self) -> Iterator[None]:
        """Suspend the right in the block.

        The batch is pre-committed, and its record is yet to come.
        """
        before = self._undecided
        self._undecided = True
        try:
            yield
        finally:
            self._undecided = before

    @contextmanager
    def suspend_until_decided(self) -> Iterator[None]:
        """Suspend the right while the block puts a record.

        If the block fails, the right stays suspended permanently, because the put may still land.
        """
        self._undecided = True
        yield
        self._undecided = False
