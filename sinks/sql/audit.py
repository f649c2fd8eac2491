"""What a database has of rows that are visible: by its ledger, and by the table itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic

from sinks.audit import Audit, Holding, Part
from sinks.progress import progress
from sinks.sql.backend import Backend, TargetT
from sinks.sql.ledger import Entry, Ledger
from sinks.sql.server import C
from sinks.sql.transaction import T
from sinks.transaction import Fingerprint, Identity, token

_COUNTED = (
    "the rows of the table were counted, not compared: what a column had before it was dropped is not missed, even if"
    " the column is there again"
)
_UNDER_SAVEPOINTS = "a sink with dead letters writes under savepoints, so the table does not tell who wrote a row"
_NO_SUMS = "the ledger has no counts of it: an older version wrote it"


@dataclass(frozen=True)
class Auditor(Generic[C, TargetT, T]):
    """Asks by one connection. `key` tells what the ledger knows a transaction by; `column` is the one that has the
    checkpoint of each row."""

    connection: C
    backend: Backend[C, TargetT, T]
    ledger: Ledger[C]
    key: Callable[[Identity], str]
    column: str | None

    def audit(self, job: str, sink: str, parts: Sequence[Part], target: TargetT | None) -> Audit:
        """Without a `target` the table is not asked."""
        found = []
        with progress(f"sink {sink}: read the ledger {self.ledger.label}", len(parts), "checkpoints") as advance:
            for part in parts:
                found.append(self._by_ledger(token(job), token(sink), part))
                advance(1)
        if target is None or not parts:
            return Audit(found)
        if self.backend.merge.mode == "upsert":
            why = "upserts replace rows, so a table has not as many as there were changes: it was not asked"
            return Audit(found, remarks=(why,))
        try:
            with progress(f"sink {sink}: count the rows of {target.label}"):
                return self._by_column(target, parts, found) if self.column else self._by_writer(target, parts, found)
        except Exception as error:  # a sink that only appends need not have the right to read
            return Audit(found, untold=(f"{target.label} cannot be read: {error}",))

    def _by_column(self, target: TargetT, parts: Sequence[Part], found: Sequence[Holding]) -> Audit:
        backend, marks = self.backend, [mark_of(part.lineage, part.checkpoint_id) for part in parts]
        column = backend.quote(str(self.column)).replace("%", "%%")
        table = backend.quote(target.schema, target.name).replace("%", "%%")
        those = ", ".join(["%s"] * len(marks))
        statement = f"SELECT {column}, count(*) FROM {table} WHERE {column} IN ({those}) GROUP BY {column}"
        with backend.transaction(self.connection, undo=True):
            rows = {str(mark): int(count) for mark, count in backend.query(self.connection, statement, marks)}
        held = [replace(one, held=rows.get(mark, 0)) for one, mark in zip(found, marks, strict=True)]
        return Audit(held, remarks=(_COUNTED,))

    def _by_writer(self, target: TargetT, parts: Sequence[Part], found: Sequence[Holding]) -> Audit:
        keys = [self._keys(part) for part in parts]
        writers = self.backend.writers(self.connection, target, self.ledger, [key for some in keys for key in some])
        if writers is None:
            return Audit(found, remarks=(f"{target.label} does not tell who wrote a row: it was not asked",))
        by_part = [{writers.of[key] for key in some if key in writers.of} for some in keys]
        if any(count > 1 for count in Counter(writer for some in by_part for writer in some).values()):
            why = f"{target.label} and its ledger were restored since: it does not tell any more who wrote a row"
            return Audit(found, remarks=(why,))
        known = [all(key in writers.of for key in some) for some in keys]  # else nobody can tell which rows are its own
        held = [sum(writers.rows.get(writer, 0) for writer in some) for some in by_part]
        told = [all(c.proof.get("writers") != "untold" for c in part.committables) for part in parts]
        counted = [
            replace(one, held=rows if all_known and is_told else None)
            for one, rows, all_known, is_told in zip(found, held, known, told, strict=True)
        ]
        if not all(told):
            return Audit(counted, remarks=(_UNDER_SAVEPOINTS,))
        differences = (_of_others(target.label, writers.others),) if writers.others else ()
        return Audit(counted, differences, remarks=(_COUNTED,))

    def _keys(self, part: Part) -> list[str]:
        return [self.key(committable.transaction) for committable in part.committables]

    def _by_ledger(self, job: str, sink: str, part: Part) -> Holding:
        keys = self._keys(part)
        entries = self.ledger.committed(self.connection, job, sink, part.lineage, part.checkpoint_id)
        missing = [key for key in keys if key not in entries]
        for committable in part.committables if missing else ():
            if reason := self.ledger.foreign(self.connection, committable.proof):
                return Holding(remarks=(reason,))
        differences = [f"the ledger {self.ledger.label} does not say that {key} was committed" for key in missing]
        unnamed = sorted(entries.keys() - {*keys, *map(self.key, part.given_up)})
        kept = _sum(entries, [key for key in keys if key in entries])
        remarks = () if kept else (_NO_SUMS,)
        return Holding(kept, differences=tuple(differences), remarks=remarks, unnamed=tuple(unnamed))


def mark_of(lineage: str, checkpoint: int) -> str:
    """What a checkpoint column has."""
    return f"{lineage}.{checkpoint}"


def _sum(entries: Mapping[str, Entry], keys: Sequence[str]) -> Fingerprint | None:
    total = Fingerprint()
    for key in keys:
        rows = entries[key]
        if rows is None:
            return None
        total += rows
    return total


def _of_others(table: str, rows: int) -> str:
    return (
        f"{rows:,} row(s) of {table} were inserted or changed, since the oldest of these checkpoints, by transactions "
        "that the ledger does not know (an ALTER TABLE that rewrites the table, or a restore, changes all)"
    )
