"""What a database answers, in the words of the sinks: what happened, where, and what to do.

A database says what kind of answer an error of its driver is (`Backend.fault`); what that means is told here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from sinks.errors import BadValue, ConfigurationError, SinkError, TransactionBlocked
from sinks.sql.names import STAGING

Kind: TypeAlias = Literal["blocked", "right", "gone", "changed", "server", "refused", "other"]


@dataclass(frozen=True)
class Fault:
    """What an error is about: a bounded wait for a lock ran out (`blocked`), the user lacks a `right`, a table is
    `gone` or `changed`, the `server` is not set up for what is asked, a row is `refused`, or `other`.

    `text` are the server's words in one line, and `reason` (default: `text`) why a row is refused without saying in
    which place. `at` says for which row, or lock. `advice` goes beyond what each error of the kind is told with."""

    kind: Kind
    text: str
    at: str = ""
    advice: str = ""
    reason: str = ""

    def explained(self, who: str, error: Exception) -> SinkError | None:
        """None for what the driver's own error says best."""
        if self.kind == "blocked":
            return TransactionBlocked(
                f"{who} waited for a lock{self.at} until its limit, or in a circle ({self.text}). Somebody else's open "
                "transaction holds it, or an orphaned one of this job (the coordinator aborts those and tries again), "
                f"or two partitions of this batch write the same unique value{self.advice}"
            )
        if self.kind == "right":
            return ConfigurationError(f"{who} lacks a right: {self.text}")
        if self.kind in ("gone", "changed"):
            return ConfigurationError(f"{who} found the table changed since it was checked: {self.text}")
        if self.kind == "server":
            return ConfigurationError(f"{who} failed: {self.text}. {self.advice}".removesuffix(". "))
        if self.kind == "refused":
            return BadValue(f"{who} was refused{self.at}: {self.text}").because(
                self.reason or self.text, type(error).__name__
            )
        return None


@contextmanager
def explained(judge: Callable[[Exception], Fault | None], table: str, who: str) -> Iterator[None]:
    """The server's errors in this block as SinkErrors, where they are about rows, rights, locks or the set-up. They
    name the table in place of a staging table, and `who` was at work."""
    try:
        yield
    except SinkError:
        raise
    except Exception as error:
        if (fault := judge(error)) is None:
            raise
        fault = replace(fault, text=STAGING.sub(table, fault.text))
        explanation = fault.explained(f"table {table}: {who}", error)
        if explanation is None:
            raise
        raise explanation from error
