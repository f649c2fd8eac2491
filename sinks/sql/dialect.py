"""What one database does in its own way. All else of a sink into its tables is concrete, and written over this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import pyarrow as pa

from sinks.diagnosis import Finding
from sinks.errors import SchemaMismatch, SinkError
from sinks.sql.ddl import Ddl
from sinks.sql.encoder import mismatches
from sinks.sql.errors import Fault
from sinks.sql.ledger import Ledger
from sinks.sql.options import MergeOptions
from sinks.sql.server import C, Server
from sinks.sql.target import Column, Target
from sinks.sql.transaction import T
from sinks.transaction import Identity, TransactionContext

Declared = TypeVar("Declared")


TargetT = TypeVar("TargetT", bound=Target[Column])


@dataclass(frozen=True)
class Plan(Generic[C, TargetT]):
    """What the driver found out about the server, carried to the tasks in the sink's pickle."""

    target: TargetT
    ledger: Ledger[C]
    strategy: str


@dataclass(frozen=True)
class Writers:
    """Which transaction wrote the rows of a table: those of the ledger by their keys in it (`of`), how many rows each
    of them has there now, and how many `others` have that began after the oldest that was asked for."""

    of: Mapping[str, str]
    rows: Mapping[str, int]
    others: int


class NotDone(SinkError):
    """The server answered that it has ended a prepared transaction, and has not."""


class Dialect(ABC, Generic[C, TargetT, T]):
    """The target and the errors of one kind of database, and its two-phase transactions. `strategy` is the one that the
    user asked for."""

    UNSEEN: ClassVar[str] = ""
    """What is added to "there is no table"."""
    ADVICE: ClassVar[str] = ""
    """What is added to "create it"."""
    CHECK: ClassVar[str] = "host, port, database, user, password and rights"
    """What a user who is not let in has to look at."""
    TWO_PHASE: ClassVar[str]
    """The name of the strategy in which each participant has a transaction of its own on the table."""
    KEY: ClassVar[str] = ""
    """What the ledger knows a two-phase transaction by, in its identity."""

    def __init__(self, server: Server[C], merge: MergeOptions, strategy: str) -> None:
        self.server = server
        self.merge = merge
        self.strategy = strategy

    # ------------------------------------------------------------------ the target
    @abstractmethod
    def locate(self, connection: C, table: str) -> tuple[str, str]:
        """Schema and name of the table, which need not exist. Raises ConfigurationError if it is no table name."""

    def homes(self, connection: C, table: str) -> Sequence[str]:
        """Schemas that the database looks into, in its order, for a table whose schema the user left out, and that have
        it. Default: it looks into one only."""
        return ()

    @abstractmethod
    def describe(self, connection: C, schema: str, name: str) -> TargetT | None:
        """The table, None if there is none. Raises ConfigurationError if it is something else."""

    @abstractmethod
    def similar(self, connection: C, schema: str, name: str) -> Sequence[str]:
        """Tables that may have been meant."""

    @abstractmethod
    def create(self, connection: C, schema: str, name: str, fields: Sequence[pa.Field]) -> None:
        """Create the table, with the keys as primary key."""

    @property
    @abstractmethod
    def ddl(self) -> Ddl[C]:
        """How it alters the table."""

    @abstractmethod
    def definition(self, connection: C, target: TargetT, field: pa.Field) -> str:
        """Name and type of a nullable column for ADD COLUMN, of the type that a created table has. Raises
        SchemaMismatch."""

    @abstractmethod
    def problems(self, connection: C, target: TargetT, ledger: str) -> Iterable[str]:
        """What else is in the way: the index that upserts need, the server, rights."""

    @abstractmethod
    def choose(self, connection: C, target: TargetT) -> tuple[str, str]:
        """The strategy and the reason for it."""

    def unfit_server(self, connection: C) -> str | None:
        """Why the sink cannot work with this server at all. Default: it can with any."""
        return None

    def findings(self, connection: C) -> Iterable[Finding]:
        """What `coordinator doctor` is to say about this kind of server. Default: nothing."""
        return ()

    # ------------------------------------------------------------------ errors
    @abstractmethod
    def fault(self, error: Exception) -> Fault | None:
        """What an error of the server is about; None for a lost connection, and what is no error of the server."""

    def misconfigured(self, error: Exception) -> str | None:
        """What an error means to somebody who sets up the sink; None to let it pass."""
        fault = self.fault(error)
        if fault and fault.kind == "blocked":
            where = f"table or ledger at {self.server}"
            return f"somebody locks {where} for longer than the sink waits: {fault.text}{fault.advice}"
        if fault and fault.kind == "right":
            return f"the user lacks a right at {self.server}: {fault.text}"
        said = self.unreachable(error)
        return None if said is None else f"{said}. Check {self.CHECK}, and that the server runs"

    @abstractmethod
    def unreachable(self, error: Exception) -> str | None:
        """The driver's words where the server could not be reached, without the password."""

    # ------------------------------------------------------------------ two-phase transactions
    @abstractmethod
    def begin(self, plan: Plan[C, TargetT], context: TransactionContext) -> T:
        """Open the participant's transaction, whose rows go into the target itself."""

    @abstractmethod
    def end(self, connection: C, ledger: Ledger[C], how: str, identity: Identity, proof: Mapping[str, object]) -> bool:
        """COMMIT or ROLLBACK what is prepared; False if nothing is under this name. `proof`: of the committable. Raises
        ConfigurationError if the sink may not, NotDone where the server answered and did not do it, and the driver's
        errors to be asked again."""

    @abstractmethod
    def prepared(self, connection: C, schema: str, job: str, sink: str) -> Iterable[Identity]:
        """What is prepared of this job and sink."""

    def key(self, identity: Identity) -> str:
        """What the ledger knows a prepared transaction by."""
        return str(identity[self.KEY])

    def evidence(self, transaction: T) -> dict[str, object]:
        """What a committable carries beside the ledger's proof. `transaction_id` is needed where `key` is another."""
        return {}

    def contradiction(self, connection: C, proof: Mapping[str, object]) -> str | None:
        """Why a transaction of which the ledger has nothing can nevertheless not be called lost."""
        return None

    def writers(self, connection: C, target: TargetT, ledger: Ledger[C], keys: Sequence[str]) -> Writers | None:
        """Who wrote the rows of the table, in one snapshot of it and of the ledger. None, the default, for a database
        that does not keep it."""
        return None

    # ------------------------------------------------------------------ alike
    def mismatches(self, batch: pa.Schema, target: TargetT) -> list[str]:
        """Every reason why the columns do not fit."""
        return mismatches(batch, target.columns, rounding=self.merge.rounds)

    def aim(self, target: TargetT) -> str:
        """Where rows go, and how: what committables are compared by."""
        return f"{target.label} ({self.merge})"

    def quoted(self, columns: Iterable[str]) -> str:
        """Identifiers, as a list."""
        return ", ".join(self.server.quote(column) for column in columns)

    def rights(self, target: TargetT, strategy: str) -> list[str]:
        """What the sink has to be allowed to do with the target."""
        upsert = self.merge.mode == "upsert"
        needed = {
            "INSERT": True,
            "SELECT": strategy == "staged" and (upsert or target.uniques),
            "UPDATE": upsert,
            "DELETE": self.merge.delete_marker,
        }
        return [right for right, is_needed in needed.items() if is_needed]


def declarations(
    fields: Iterable[pa.Field], declare: Callable[[pa.Field], Declared]
) -> list[tuple[pa.Field, Declared]]:
    """Each field with the type that a created table has for it. Raises SchemaMismatch that names the column."""
    found = []
    for field in fields:
        try:
            found.append((field, declare(field)))
        except SchemaMismatch as unfit:
            raise SchemaMismatch(f'column "{field.name}": {unfit}') from None
    return found
