"""How staged rows get into the target, as far as databases agree on it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from sinks.errors import BadValue, SinkError
from sinks.sql.options import MergeOptions

_COUNTED_TOGETHER = 50


class Merge(MergeOptions):
    """The statements that do it. Staging tables are given as quoted names; `written` are the columns of the target that
    the batch has. A target has `label`, `uniques` (each with name and columns), `beyond` and `referenced_by`."""

    # ------------------------------------------------------------------ the database's own
    @abstractmethod
    def quoted(self, *names: str) -> str:
        """An identifier of one or more parts."""

    @abstractmethod
    def execute(self, connection: Any, statement: str) -> int:
        """Run a statement; returns how many rows it changed."""

    @abstractmethod
    def query(self, connection: Any, statement: str) -> list[tuple[Any, ...]]:
        """The rows of a SELECT."""

    @abstractmethod
    def move(self, connection: Any, target: Any, staging: Sequence[str], written: Sequence[str], rows: int) -> None:
        """Put the rows of all staging tables into the target, in the caller's transaction. Raises SinkError if there
        are not `rows` of them, the driver's error if the target refuses one."""

    @abstractmethod
    def matching(self, table: str, condition: str) -> str:
        """What follows FROM (…) AS staged for the rows to which `table`, as target, has one that meets `condition`."""

    # ------------------------------------------------------------------ before the decision
    def rights(self, target: Any, strategy: str) -> list[str]:
        """What the sink has to be allowed to do with the target."""
        upsert = self.mode == "upsert"
        needed = {
            "INSERT": True,
            "SELECT": strategy == "staged" and (upsert or target.uniques),
            "UPDATE": upsert,
            "DELETE": self.delete_marker,
        }
        return [right for right, is_needed in needed.items() if is_needed]

    def beyond(self, target: Any, written: Sequence[str]) -> list[str]:
        """What only the target itself can judge of rows. If there is any, a move is tried before the decision."""
        reasons = list(target.beyond)
        for unique in target.uniques:
            known = set(unique.columns) & set(written)
            if self.mode == "append":
                if known and not known >= set(unique.columns):
                    reasons.append(f"index {unique.name}")
            elif known and set(unique.columns) != set(self.keys):
                reasons.append(f"index {unique.name}")
        return reasons + (list(target.referenced_by) if self.mode == "upsert" else [])

    def clashes(self, connection: Any, target: Any, staging: Sequence[str], written: Sequence[str]) -> None:
        """Raise BadValue if the union of the rows breaks a unique index, as far as that can be told without writing."""
        if self.mode == "upsert":
            if not self.order_by:
                rule = "two changes of one key in a batch, and no order_by="
                self._twice(connection, target, staging, self.keys, rule)
            return
        for unique in target.uniques:
            if set(unique.columns) <= set(written):
                rule = f'unique index "{unique.name}"'
                self._twice(connection, target, staging, unique.columns, rule)
                self._taken(connection, target, staging, unique.columns, rule)

    def sample(self, connection: Any, target: Any, staging: Sequence[str], written: Sequence[str]) -> None:
        """Try to insert one row, where that tells more than a look at the table did. Default: it does not."""

    def _twice(self, connection: Any, target: Any, staging: Sequence[str], columns: Sequence[str], rule: str) -> None:
        names = self.listed(columns)
        known = " AND ".join(f"{self.quoted(column)} IS NOT NULL" for column in columns)
        rows = self.query(
            connection,
            f"SELECT {names}, count(*) FROM ({self.union(staging, names)}) AS staged WHERE {known}"
            f" GROUP BY {names} HAVING count(*) > 1 LIMIT 1",
        )
        for row in rows:
            raise BadValue(f"table {target.label}: {rule}: {_key(columns, row)} comes {row[-1]} times in the batch")

    def _taken(self, connection: Any, target: Any, staging: Sequence[str], columns: Sequence[str], rule: str) -> None:
        names = ", ".join(f"staged.{self.quoted(column)}" for column in columns)
        matching = self.matching(self.quoted(target.schema, target.name), self.equal("target", "staged", columns))
        staged = self.union(staging, self.listed(columns))
        for row in self.query(connection, f"SELECT {names} FROM ({staged}) AS staged {matching} LIMIT 1"):
            raise BadValue(f"table {target.label}: {rule}: {_key(columns, row)} is in the table already")

    # ------------------------------------------------------------------ pieces of statements
    def count(self, connection: Any, staging: Sequence[str], rows: int) -> None:
        """Raise SinkError if the staging tables do not hold so many rows."""
        found = 0
        for start in range(0, len(staging), _COUNTED_TOGETHER):
            counts = (f"(SELECT count(*) FROM {table})" for table in staging[start : start + _COUNTED_TOGETHER])
            ((some,),) = self.query(connection, f"SELECT {' + '.join(counts)}")
            found += int(some)
        if found != rows:
            raise SinkError(
                f"the staging tables hold {found} rows, and their tasks acknowledged {rows}: somebody changed one, or "
                "emptied the ledger after they were moved"
            )

    def changes(self, written: Sequence[str]) -> tuple[list[str], list[str]]:
        """The columns that tell the last change of each key and what it is, and those that order the changes."""
        extra = [column for column in (self.order_by, self.delete_marker) if column and column not in written]
        order = [column for column in (self.order_by, self.delete_marker) if column]  # of equals, a delete wins
        return [*written, *extra], order

    def listed(self, columns: Iterable[str]) -> str:
        return ", ".join(map(self.quoted, columns))

    def union(self, staging: Sequence[str], columns: str) -> str:
        return " UNION ALL ".join(f"SELECT {columns} FROM {table}" for table in staging)

    def equal(self, left: str, right: str, columns: Sequence[str]) -> str:
        return " AND ".join(f"{left}.{self.quoted(column)} = {right}.{self.quoted(column)}" for column in columns)


def _key(columns: Sequence[str], row: Sequence[object]) -> str:
    return f"({', '.join(columns)}) = ({', '.join(map(str, row[: len(columns)]))})"
