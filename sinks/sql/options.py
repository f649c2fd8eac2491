"""The options of a sink that writes into one table: how rows get in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

Mode = Literal["append", "upsert"]


@dataclass(frozen=True)
class MergeOptions:
    """What to do with rows: append them, or keep the last one of each key (by `order_by`), which replaces the row of
    that key, or deletes it if `delete_marker` is true in it. With `keep_newer` a change that is older, by `order_by`,
    than the row that the table has is dropped."""

    mode: str = "append"
    keys: tuple[str, ...] = ()
    order_by: str | None = None
    delete_marker: str | None = None
    keep_newer: bool = False

    @classmethod
    def of(cls, mode: str, keys: Sequence[str] | str, *others: Any) -> MergeOptions:
        """A single key may be given as it is."""
        return cls(mode, tuple([keys] if isinstance(keys, str) else keys), *others)

    def __str__(self) -> str:
        """Committables keep it, and are compared by it in later versions: the same options, the same text, for ever."""
        if self.mode == "append":
            return self.mode
        parts = [f"{self.mode} by {', '.join(self.keys)}"]
        parts += [f"the last by {self.order_by}"] if self.order_by else []
        parts += [f"deletes by {self.delete_marker}"] if self.delete_marker else []
        return "; ".join([*parts, *["newer rows stay"] * self.keep_newer])

    def contradictions(self, strategy: str, two_phase: str) -> Iterable[str]:
        """What cannot be meant, told without asking the server. `two_phase` is the name of the strategy in which each
        participant has a transaction of its own on the table, which is for appends only."""
        known = [name for name in ("auto", two_phase, "staged") if name]
        if strategy not in known:
            yield f"strategy={strategy!r} is not one of " + ", ".join(f'"{name}"' for name in known)
        if self.mode not in ("append", "upsert"):
            yield f'mode={self.mode!r} is not one of "append", "upsert"'
        if self.mode == "upsert":
            if not self.keys:
                yield 'mode="upsert" needs keys=[…], the columns of a unique index'
            if strategy == two_phase:
                yield 'mode="upsert" needs strategy="staged": two prepared transactions with one key block each other'
            if self.keep_newer and not self.order_by:
                yield "keep_newer=True needs order_by, the column that tells which change is newer"
        elif self.keys or self.order_by or self.delete_marker or self.keep_newer:
            yield 'keys, order_by, delete_marker and keep_newer belong to mode="upsert"'
        if len(set(self.keys)) < len(self.keys):
            yield f"keys={list(self.keys)} names a column twice"
        if self.delete_marker in {*self.keys, self.order_by} - {None}:
            yield f"delete_marker={self.delete_marker!r} is a key or the order_by column too"

    def problems(self, schema: pa.Schema, target: Collection[str]) -> Iterable[str]:
        """Why rows of `schema`, or a table with the columns `target`, are not what the options speak of."""
        for role, column in [
            *(("keys", key) for key in self.keys),
            ("order_by", self.order_by),
            ("delete_marker", self.delete_marker),
        ]:
            if column is not None and column not in schema.names:
                yield f"{role} names column {column!r}, which the batch has not"
        if self.delete_marker in schema.names and not pa.types.is_boolean(schema.field(self.delete_marker).type):
            kind = schema.field(self.delete_marker).type
            yield f"delete_marker {self.delete_marker!r} is {kind}, and must be boolean"
        if self.keep_newer and self.order_by not in target:
            yield f"keep_newer=True needs the column {self.order_by!r} of order_by in the table, to compare with"

    def written(self, columns: Sequence[str], target: Collection[str]) -> list[str]:
        """Those of the batch's columns that go into a table with the columns `target`."""
        extra = {self.delete_marker} | ({self.order_by} if self.order_by not in target else set())
        return [column for column in columns if column not in extra]


APPEND = MergeOptions()
