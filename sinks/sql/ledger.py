"""The ledger: what became of every transaction, in a table beside the target.

A participant's row (`committed` true) is written in the same transaction as its rows, so its presence proves the
commit. Its absence proves nothing until a tombstone (`committed` false) stands under the same primary key: the insert
waits for whoever is in flight, and then either meets the row or makes the loss final.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sinks.errors import ConfigurationError
from sinks.sql.names import label
from sinks.transaction import Checkpoint, token

if TYPE_CHECKING:
    from typing_extensions import Self

_KEPT_CHECKPOINTS = 100


@dataclass(frozen=True)
class Ledger(ABC):
    """The ledger table, as it travels to the tasks. `id` is random, and tells it from another one of the same name. It
    is the `lineage` of a row of its own, `IDENTITY`: who empties the table, takes it away."""

    IDENTITY: ClassVar[str] = "ledger"
    schema: Any
    name: str
    id: str

    @classmethod
    def find(cls, connection: Any, schema: Any, name: str) -> Self | None:
        """The table, if there is one, with its id. Raises ConfigurationError if it is something else than a ledger."""
        id = cls._look(connection, schema, name)
        return cls(schema, name, id) if id else None

    @classmethod
    def ensure(cls, connection: Any, schema: Any, name: str) -> Self:
        """Find the table or create it, or its id; safe against others that do the same. Outside a transaction."""
        id = cls._look(connection, schema, name)
        if id is None:
            cls._create(connection, schema, name)
        if not id:
            cls._put_id(connection, schema, name, uuid.uuid4().hex)
            id = cls._look(connection, schema, name)
        if not id:
            raise ConfigurationError(f"the ledger table {label(schema, name)} could not be created")
        return cls(schema, name, id)

    @classmethod
    @abstractmethod
    def _look(cls, connection: Any, schema: Any, name: str) -> str | None:
        """The table's id, "" if it has lost it; None if there is no table. Raises ConfigurationError as `find`."""

    @classmethod
    @abstractmethod
    def _create(cls, connection: Any, schema: Any, name: str) -> None:
        """Create the table, unless somebody else does at the same moment."""

    @classmethod
    @abstractmethod
    def _put_id(cls, connection: Any, schema: Any, name: str, id: str) -> None:
        """Insert the row `IDENTITY`, unless somebody else does at the same moment."""

    @property
    def label(self) -> str:
        """Its name, for a reader."""
        return label(self.schema, self.name)

    def proof(self) -> dict[str, Any]:
        """What a committable carries of the ledger: where to look, and how to know that it is still the same one."""
        return {"ledger": [self.schema, self.name], "ledger_id": self.id}

    def foreign(self, connection: Any, proof: Mapping[str, Any]) -> str | None:
        """Why this ledger cannot speak for a transaction that was pre-committed beside another one, or None."""
        there = self.find(connection, self.schema, self.name)  # it may have been made anew since `ensure`
        if not proof or (there and there.proof().items() <= proof.items()):
            return None
        place = proof["ledger"]
        return (
            f"the ledger {self.label} is not the one that was there at pre-commit "
            f"({place if isinstance(place, str) else '.'.join(place)}, id {proof.get('ledger_id')}); it was emptied or "
            "dropped, or the sink points elsewhere"
        )

    @abstractmethod
    def states(self, connection: Any, ids: Collection[str]) -> dict[str, bool]:
        """For those ids whose outcome is told: True is committed, False is a tombstone."""

    @abstractmethod
    def newest(self, connection: Any, job: str, sink: str) -> dict[str, int]:
        """By lineage, the newest checkpoint of a job and sink (as tokens) that has a row of a commit."""

    @abstractmethod
    def decide(self, connection: Any, ids: Collection[str], *, committed: bool) -> bool:
        """Write a row or a tombstone for each id that has none, in the caller's transaction. Returns whether that was
        each of them. Waits for others that write the same ids, within the limit for lock waits."""

    def prune(self, connection: Any, checkpoint: Checkpoint, sink: str) -> None:
        """Delete the rows of this job, lineage and sink that recovery will never ask for again."""
        before = checkpoint.oldest_retained - _KEPT_CHECKPOINTS
        self._delete(connection, token(checkpoint.job), checkpoint.lineage, token(sink), before)

    @abstractmethod
    def _delete(self, connection: Any, job: str, lineage: str, sink: str, before: int) -> None:
        """Delete the rows of checkpoints `before` this one whose outcome is told."""
