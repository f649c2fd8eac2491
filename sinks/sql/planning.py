"""What a sink asks of the server before it writes: can the table take the rows, and by which strategy."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from sinks.diagnosis import Finding
from sinks.errors import ConfigurationError, SchemaMismatch
from sinks.sql.ledger import Ledger
from sinks.sql.names import label

logger = logging.getLogger(__name__)

_KINDS = (
    pa.int64(),
    pa.int32(),
    pa.int16(),
    pa.string(),
    pa.float64(),
    pa.bool_(),
    pa.date32(),
    pa.timestamp("us", "UTC"),
    pa.timestamp("us"),
    pa.binary(),
    pa.decimal128(10, 2),
)


@dataclass(frozen=True)
class Planner(ABC):
    """The sink as the user configured it, without the connection. `place` says where the server is, for errors.

    What it finds is a plan for driver and tasks, which has `target`, `ledger` and `strategy`."""

    sink: str
    table: str
    place: str
    wanted: str
    merge: Any
    create_table: bool
    ledger: str

    LEDGER: ClassVar[type[Ledger]]
    UNSEEN: ClassVar[str] = ""
    ADVICE: ClassVar[str] = ""

    # ------------------------------------------------------------------ the database's own
    @abstractmethod
    def locate(self, connection: Any) -> tuple[Any, str]:
        """Schema and name of the table, which need not exist. Raises ConfigurationError if it is no table name."""

    @abstractmethod
    def describe(self, connection: Any, schema: Any, name: str) -> Any:
        """The target, with its `label` and the `names` of its columns; None if there is none."""

    @abstractmethod
    def similar(self, connection: Any, schema: Any, name: str) -> Sequence[str]:
        """Tables that may have been meant."""

    @abstractmethod
    def declared(self, field: pa.Field) -> Any:
        """The type that a created table has for this column. Raises SchemaMismatch."""

    @abstractmethod
    def create(self, connection: Any, schema: Any, name: str, columns: Sequence[tuple[pa.Field, Any]]) -> None:
        """Create the table, with the declared type of each column, and the keys as primary key."""

    @abstractmethod
    def mismatches(self, batch: pa.Schema, target: Any) -> list[str]:
        """Every reason why the columns do not fit."""

    @abstractmethod
    def problems(self, connection: Any, target: Any) -> Iterable[str]:
        """What else is in the way: the index that upserts need, the server, rights."""

    @abstractmethod
    def plan(self, connection: Any, target: Any, batch: pa.Schema | None) -> Any:
        """Choose the strategy. `batch` is None in recovery, before the first batch."""

    # ------------------------------------------------------------------ alike
    def check(self, connection: Any, batch: pa.Schema) -> Any:
        """The plan for rows of `batch`. Raises ConfigurationError (SchemaMismatch if it is only about columns) with all
        reasons at once."""
        schema, name = self.locate(connection)
        target = self.describe(connection, schema, name)
        if target is None:
            self._create(connection, schema, name, batch)
            target = self.describe(connection, schema, name)
        written = self.merge.written(batch.names, target.names)
        columns = self.mismatches(pa.schema([field for field in batch if field.name in written]), target)
        others = [*self.merge.problems(batch), *self.problems(connection, target)]
        if columns or others:
            kind = ConfigurationError if others else SchemaMismatch
            reasons = "".join(f"\n  - {reason}" for reason in [*others, *columns])
            raise kind(f"sink {self.sink!r} cannot write to table {target.label} ({self.place}):{reasons}")
        return self.plan(connection, target, batch)

    def load(self, connection: Any) -> Any:
        """The plan without a look at any rows. Raises ConfigurationError if there is no table."""
        schema, name = self.locate(connection)
        target = self.describe(connection, schema, name)
        if target is None:
            raise ConfigurationError(f"sink {self.sink!r}: there is no table {label(schema, name)} at {self.place}")
        return self.plan(connection, target, None)

    def diagnose(self, connection: Any) -> Iterable[Finding]:
        """What can be told without a batch."""
        schema, name = self.locate(connection)
        target = self.describe(connection, schema, name)
        if target is None and self.create_table:
            yield Finding.ok(f"the table {label(schema, name)} will be created with the first batch")
        elif target is None:
            others = self.similar(connection, schema, name)
            hint = f"; did you mean {' or '.join(others)}?" if others else ""
            yield Finding.error(
                f"there is no table {label(schema, name)} at {self.place}{self.UNSEEN}",
                f"create it, or set create_table = true{hint}",
            )
        else:
            problems = list(self.problems(connection, target))
            for problem in problems:
                what, _, mend = problem.partition(": ")
                yield Finding.error(what, mend or "mend what is named")
            if not problems:
                strategy = self.plan(connection, target, None).strategy
                yield Finding.ok(f"table {target.label} can be written by strategy {strategy}")

    def trial(self, connection: Any) -> tuple[pa.Schema, Any] | None:
        """A column of the table with a type that fits, and the plan for it; None if there is no table yet."""
        target = self.describe(connection, *self.locate(connection))
        if target is None:
            return None
        name = next(iter([*self.merge.keys, *target.names]))
        schemas = [pa.schema([(name, kind)]) for kind in _KINDS]
        schema = min(schemas, key=lambda schema: len(self.mismatches(schema, target)))
        return schema, self.plan(connection, target, schema)

    def find_ledger(self, connection: Any) -> tuple[Any, Ledger | None]:
        """The schema of table and ledger, and the ledger if there is one."""
        schema, _ = self.locate(connection)
        return schema, self.LEDGER.find(connection, schema, self.ledger)

    def ensure_ledger(self, connection: Any) -> Ledger:
        schema, _ = self.locate(connection)
        return self.LEDGER.ensure(connection, schema, self.ledger)

    def _create(self, connection: Any, schema: Any, name: str, batch: pa.Schema) -> None:
        if not self.create_table:
            others = self.similar(connection, schema, name)
            hint = f" Did you mean {' or '.join(others)}?" if others else ""
            raise ConfigurationError(
                f"sink {self.sink!r}: there is no table {label(schema, name)} at {self.place}{self.UNSEEN}.{hint} "
                f"Create it, or let create_table=True do so{self.ADVICE}"
            )
        if missing := [key for key in self.merge.keys if key not in batch.names]:
            raise SchemaMismatch(f"sink {self.sink!r}: the batch has no column {', '.join(missing)}, named in keys")
        columns = [(field, self._type_of(field)) for field in batch if field.name != self.merge.delete_marker]
        self.create(connection, schema, name, columns)
        logger.info("sink %r created table %s", self.sink, label(schema, name))

    def _type_of(self, field: pa.Field) -> Any:
        try:
            return self.declared(field)
        except SchemaMismatch as unfit:
            raise SchemaMismatch(f'sink {self.sink!r}: column "{field.name}": {unfit}') from None
