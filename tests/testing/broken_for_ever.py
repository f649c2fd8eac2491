"""Broken so that a job stops and cannot go on: memories, audits, owners, names and columns."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from sinks import Checkpoint, CommitOutcome, Committable, Identity, TransactionContext
from sinks.audit import Audit, Part
from sinks.errors import ConfigurationError
from sinks.testing import SCHEMA, Clause
from sinks.transaction import TransactionId, token
from tests.testing.broken_drivers import PURGED, REMEMBERED, SILENT
from tests.testing.broken_tasks import CHECKED
from tests.testing.catalogue import breaks
from tests.testing.shelf import Handle, Shelf

COMMITTED = CommitOutcome.COMMITTED


# ---------------------------------------------------------------------- memory
@breaks(Clause.MEMORY, REMEMBERED)
class RemembersSixDigits(Shelf):
    """As a name or a key that is sorted as text."""

    digits = 6

    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        newest: dict[str, str] = {}
        for path in self.paths(job, "done"):
            name = TransactionId.parse(path.stem)
            text = f"{name.checkpoint:0{self.digits}}"
            newest[name.lineage] = max(text, newest.get(name.lineage, ""))
        return {lineage: int(text) for lineage, text in newest.items()}


@breaks(Clause.MEMORY, REMEMBERED)
class RemembersNineDigits(RemembersSixDigits):
    digits = 9


@breaks(Clause.MEMORY, REMEMBERED)
class RemembersThirtyOneBits(Shelf):
    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        memory = super().committed_checkpoints(job) or {}
        return {lineage: min(number, 2**31 - 1) for lineage, number in memory.items()}


@breaks(Clause.PURGE, PURGED)
class PurgesBySixDigits(Shelf):
    def purge(self, checkpoint: Checkpoint) -> None:
        for path in [*self.paths(checkpoint.job, "open"), *self.paths(checkpoint.job, "gone")]:
            name = TransactionId.find(path.stem)
            old = f"{name.checkpoint:06}" < f"{checkpoint.oldest_retained:06}"
            if name.lineage == checkpoint.lineage and old:
                path.unlink(missing_ok=True)


class _Marks(Shelf):
    """Remembers by a mark for each checkpoint, which is a request of its own."""

    def mark(self, name: str) -> None:
        (self.folder / "marks").mkdir(exist_ok=True)
        (self.folder / "marks" / f"{name}.mark").touch()

    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        newest: dict[str, int] = {}
        for path in (self.folder / "marks").glob(f"{TransactionId.prefix(job)}*.mark"):
            name = TransactionId.parse(path.stem)
            if name.sink != token(self.name):
                continue
            newest[name.lineage] = max(name.checkpoint, newest.get(name.lineage, 0))
        return newest


@breaks(Clause.MEMORY, SILENT)
class MarksAfterTheRowsMoved(_Marks):
    """Whoever is killed between leaves no mark, and the next commit finds the rows moved."""

    def commit(self, committable: Committable) -> CommitOutcome:
        name = committable.transaction["name"]
        if not self.path(name, "ready").exists():
            return self.of_gone(name)
        self.path(name, "ready").rename(self.path(name, "done"))
        self.mark(name)
        return COMMITTED


@breaks(Clause.MEMORY, SILENT, count=3)
class MarksAfterAllRowsMoved(_Marks):
    def commit_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> Sequence[Any]:
        names = [each.transaction["name"] for each in committables]
        moved = []
        for name in names:
            if self.path(name, "ready").exists():
                self.path(name, "ready").rename(self.path(name, "done"))
                moved.append(name)
        for name in moved:
            self.mark(name)
        return [self.of_gone(name) for name in names]


# ---------------------------------------------------------------------- audit
AUDITED = "the_audit_counts_what_is_visible"


class _Unexpected(Shelf):
    """Tells what it has of a checkpoint that the record does not name."""

    states: Sequence[str] = ("done",)

    def others(self, job: str, part: Part) -> Iterable[TransactionId]:
        for state in self.states:
            for path in self.paths(job, state):
                yield TransactionId.parse(path.stem)

    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        holdings = []
        for part, holding in zip(parts, super().audit(job, parts, quick=quick).holdings, strict=True):
            named = {TransactionId.parse(each.transaction["name"]) for each in part.committables}
            there = {name for name in self.others(job, part) if self.counts(name, part)}
            holdings.append(replace(holding, unexpected=tuple(sorted(map(str, there - named)))))
        return Audit(holdings)

    def counts(self, name: TransactionId, part: Part) -> bool:
        return (name.lineage, name.checkpoint) == (part.lineage, part.checkpoint_id)


@breaks(Clause.AUDIT, AUDITED)
class DoesNotExpectWhatIsAborted(_Unexpected):
    states = ("done", "gone")


@breaks(Clause.AUDIT, AUDITED)
class DoesNotExpectWhatIsInDoubt(_Unexpected):
    states = ("done", "ready")


@breaks(Clause.AUDIT, AUDITED)
class DoesNotExpectOtherLineages(_Unexpected):
    def counts(self, name: TransactionId, part: Part) -> bool:
        return name.checkpoint == part.checkpoint_id


@breaks(Clause.AUDIT, AUDITED)
class DoesNotExpectOtherSinks(_Unexpected):
    def others(self, job: str, part: Part) -> Iterable[TransactionId]:
        paths = self.folder.glob(f"{TransactionId.prefix(job)}*.done")
        return [TransactionId.parse(path.stem) for path in paths]


# ---------------------------------------------------------------------- owns
OWNED = "owns_knows_its_own_whatever_became_of_it"


@breaks(Clause.OWNS, "names_that_look_alike_are_not_the_same", ours="a:b+c", theirs="a+b:c")
class OwnsByThePlainName(Shelf):
    """Which is the beginning of its token, if all of it is fit for a name."""

    def owns(self, job: str, transaction: Identity) -> bool:
        return str(transaction.get("name")).startswith(f"tpc.{job}")


class _OwnsByState(Shelf):
    states: Sequence[str]

    def owns(self, job: str, transaction: Identity) -> bool:
        name = str(transaction.get("name"))
        return any(self.path(name, state).exists() for state in self.states)


@breaks(Clause.OWNS, OWNED)
class OwnsWhatIsReady(_OwnsByState):
    """It is asked before a commit, isn't it?"""

    states = ("ready",)


@breaks(Clause.OWNS, OWNED)
class OwnsWhatIsNotAborted(_OwnsByState):
    states = ("ready", "done")


@breaks(Clause.OWNS, OWNED)
class OwnsWhatIsThere(_OwnsByState):
    """And not what was purged, or lost with the target."""

    states = ("ready", "done", "gone")


# ---------------------------------------------------------------------- names that are too long
LONG = "the_longest_names"


class _LimitsNames(Shelf):
    """Names a folder by the job, as far as the system lets it."""

    def named(self, name: str) -> bytes:
        raise NotImplementedError

    def begin_transaction(self, context: TransactionContext) -> Handle:
        if len(self.named(context.job)) > 255:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        return super().begin_transaction(context)


@breaks(Clause.NAMES, LONG, characters="🙂")
class QuotesItsJob(_LimitsNames):
    """As a URL has it: twelve characters for one."""

    def named(self, name: str) -> bytes:
        return quote(name, safe="").encode()


@breaks(Clause.NAMES, LONG, characters="🙂")
class TakesItsJobAsItIs(_LimitsNames):
    """Four bytes for one character."""

    def named(self, name: str) -> bytes:
        return name.encode()


# ---------------------------------------------------------------------- columns
@breaks(Clause.CHECK, CHECKED)
class RefusesWhatIsNotNullable(Shelf):
    def check(self, schema: pa.Schema) -> None:
        super().check(schema)
        if strange := [field.name for field in schema if not field.nullable]:
            raise ConfigurationError(f"columns {strange} of the shelf are nullable")


@breaks(Clause.CHECK, CHECKED)
class ComparesMetadata(Shelf):
    def check(self, schema: pa.Schema) -> None:
        super().check(schema)
        known = {field.name: field for field in SCHEMA}
        if strange := [f.name for f in schema if not f.equals(known[f.name].with_nullable(f.nullable), True)]:
            raise ConfigurationError(f"columns {strange} are other ones than the shelf has")


@breaks(Clause.WRITE, "columns_that_are_not_nullable_arrive")
class ExpectsABitForNulls(Shelf):
    """As a format does in which a column that cannot be null is another one."""

    def write(self, transaction: Handle, batch: pa.RecordBatch) -> None:
        if strange := [field.name for field in batch.schema if not field.nullable]:
            raise TypeError(f"columns {strange} have no bits for nulls")
        super().write(transaction, batch)
