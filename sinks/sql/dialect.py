"""The SQL of one kind of database, as text: how it writes names, and the parts of the statements
that move rows from staging tables into the target. Nothing in here needs a server, so all of it is
tested without one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeAlias, TypeVar

from sinks.sql.databases import MYSQL
from sinks.sql.table import ForeignKey, MergeOptions, Target, Unique

TargetT = TypeVar("TargetT", bound=Target)
ItemT = TypeVar("ItemT")
Values: TypeAlias = Sequence[object]
"""The values of one row, in the order of the columns that are named beside."""
_INSERTED_TOGETHER = 1000
"""How many rows one INSERT of `insertions` has at most."""
_NULL_IS_SAID = (*MYSQL, "mssql")
"""Dialects in which a column that says nothing may take no NULL. Others know no such word."""


@dataclass(frozen=True)
class Move(Generic[TargetT]):
    """Staged rows on their way into the target, which is locked until the running transaction
    ends.

    `staging` are the names of the staging tables, and `tables` the same names, quoted and with
    their schema. `written` are the columns of the rows that go into the target. `types` has every
    column of the rows, also those that only the merge looks at, with its type as the server writes
    it.
    """

    target: TargetT
    staging: Sequence[str]
    tables: Sequence[str]
    written: Sequence[str]
    types: Mapping[str, str]


class Dialect(Generic[TargetT]):
    """Write the SQL of one kind of database.

    The defaults are standard SQL.

    In statements %s stands for a parameter and %% for a percent sign. A statement without
    parameters is taken as it is.
    """

    name: str = ""
    """SQLAlchemy's name for the kind of database, by which `sinks.sql.databases` finds what is
    known of it; "" for one of which nothing is known."""
    SORTS_TEXTS: ClassVar[bool] = True
    """Whether the database sorts by all of a long text."""
    INSERT_MISSING: ClassVar[str] = (
        "INSERT INTO {table} ({columns}) VALUES {rows} ON CONFLICT DO NOTHING"
    )
    """It skips rows whose key is there, and waits for those that are not committed yet."""
    NEWEST_FIRST: ClassVar[str] = "{} DESC"
    """Orders by a column, with NULL at the end."""
    POSITION: ClassVar[str] = ""
    """What sorts the rows of a staging table as they were put in. "" if nothing does: then two
    changes of one key with an equal `order_by` are refused."""
    AS_TEXT: ClassVar[str] = "{}"
    """A value for a message, where the driver cannot read each one that a column may hold."""
    DELETE: ClassVar[str] = "DELETE FROM {target} AS target USING {rows} WHERE {condition}"
    """Deletes the rows of the target for which there are such `rows`."""
    UPDATE: ClassVar[str] = "UPDATE {target} AS target SET {sets} FROM {rows} WHERE {condition}"
    """Changes the rows of the target for which there are such `rows`."""

    def __init__(self, merge: MergeOptions) -> None:
        """Write statements for tables whose rows are put in as `merge` says."""
        self.merge = merge

    # ---------------------------------------------------------- names, columns and plain statements
    def quote(self, *names: str) -> str:
        """An identifier of one or more parts, of which the first may be empty.

        Default: as in standard SQL.
        """
        return ".".join('"' + name.replace('"', '""') + '"' for name in names if name)

    def quoted(self, columns: Iterable[str]) -> str:
        """Identifiers, as a list."""
        return ", ".join(self.quote(column) for column in columns)

    def column(self, name: str, kind: str, *, nullable: bool) -> str:
        """A column for CREATE TABLE and ADD COLUMN."""
        null = " NULL" if self.name in _NULL_IS_SAID else ""
        return f"{self.quote(name)} {kind}{null if nullable else ' NOT NULL'}"

    def insertions(
        self, table: str, columns: Sequence[str], rows: Sequence[Values]
    ) -> Iterator[tuple[str, list[object]]]:
        """Yield statements, with their parameters, that insert those rows into the (quoted) table
        whose primary key no row has yet."""
        for some in batches(rows, _INSERTED_TOGETHER):
            values = ", ".join([f"({marks(columns)})"] * len(some))
            statement = self.INSERT_MISSING.format(
                table=table, columns=", ".join(columns), rows=values
            )
            yield statement, [value for row in some for value in row]

    def into(self, target: TargetT, written: Sequence[str]) -> str:
        """The INSERT, before its rows."""
        return f"INSERT INTO {self.quote(target.schema, target.name)} ({self.quoted(written)})"

    def union(self, tables: Sequence[str], columns: str) -> str:
        """A SELECT for each staging table, of which there are as many as Spark has partitions."""
        return " UNION ALL ".join(f"SELECT {columns} FROM {table}" for table in tables)

    # ------------------------------------------------------------------ conditions
    def equal(self, left: str, right: str, columns: Sequence[str], *, nulls: bool = False) -> str:
        """`nulls`: of indexes that take NULL for a value."""
        names = map(self.quote, columns)
        operator = "IS NOT DISTINCT FROM" if nulls else "="
        return " AND ".join(f"{left}.{name} {operator} {right}.{name}" for name in names)

    def clash(self, left: str, right: str, columns: Sequence[str], unique: Unique) -> str:
        """The condition for two rows that a unique index does not take together, as far as these
        columns of it tell. They have both bounds of its period, or the bounds are left out."""
        period = unique.period or ()
        equal = [column for column in columns if column not in period]
        conditions = [self.equal(left, right, equal, nulls=unique.nulls_equal)] if equal else []
        if period and set(period) <= set(columns):
            begin, end = map(self.quote, period)
            conditions.append(f"{left}.{begin} < {right}.{end} AND {right}.{begin} < {left}.{end}")
        return " AND ".join(conditions) or "TRUE"

    def stays(self, rows: str) -> str:
        """The condition for rows that are no deletes."""
        return (
            f"{rows}.{self.quote(self.merge.delete_marker)} IS NOT TRUE"
            if self.merge.delete_marker
            else "TRUE"
        )

    def not_older(self, change: str = "last") -> str:
        """With `keep_newer`, what a change has to meet beside the key to replace the row
        `target`."""
        if not self.merge.keep_newer:
            return ""
        by = self.quote(str(self.merge.order_by))
        return f" AND (target.{by} IS NULL OR target.{by} <= {change}.{by})"

    def _goes(self, rows: str) -> str:
        """The condition for rows that delete."""
        return f"{rows}.{self.quote(str(self.merge.delete_marker))} IS TRUE"

    # -------------------------------------------------------- which change of a key is the last one
    def last(self, move: Move[TargetT]) -> str:
        """The last change of each key, over all staging tables.

        Of equals that one which came last in its partition; validated: those of several partitions
        are the same row.
        """
        names = self.quoted(self.looked_at(move))
        if not self.merge.order_by:  # validated: every key is there once
            return self.union(move.tables, names)
        staged = self.union(move.tables, f"{names}, {self.POSITION or 0} AS tpc_row")
        order = f"{self._newest_first(move)}, tpc_row DESC"
        place = (
            f"row_number() OVER (PARTITION BY {self.quoted(self.merge.keys)} ORDER BY {order}) AS "
            "tpc_place"
        )
        ranked = f"SELECT {names}, {place} FROM ({staged}) AS staged"
        return f"SELECT {names} FROM ({ranked}) AS ranked WHERE tpc_place = 1"

    def duplicates(self, move: Move[TargetT], columns: Sequence[str]) -> str:
        """Select values of these columns that more than one staged row has, and how many rows have
        them."""
        keys = [self.grouped(move.target, column) for column in columns]
        names = ", ".join(keys)
        shown = ", ".join(map(self.AS_TEXT.format, keys))
        known = " AND ".join(f"{self.quote(column)} IS NOT NULL" for column in columns)
        staged = self.union(move.tables, self.quoted(columns))
        return (
            f"SELECT {shown}, count(*) FROM ({staged}) AS staged WHERE {known}"
            f" GROUP BY {names} HAVING count(*) > 1 LIMIT 1"
        )

    def taken(self, move: Move[TargetT], columns: Sequence[str]) -> str:
        """Select the values of these columns that a staged row has and the target has already."""
        names = ", ".join(self.AS_TEXT.format(f"staged.{self.quote(column)}") for column in columns)
        staged = f"({self.union(move.tables, self.quoted(columns))}) AS staged"
        target = f"{self.quote(move.target.schema, move.target.name)} AS target"
        return (
            f"SELECT {names} FROM {staged} JOIN {target} ON"
            f" {self.equal('target', 'staged', columns)} LIMIT 1"
        )

    def equals_in_two_partitions(self, move: Move[TargetT]) -> str:
        """Select one row if changes of two partitions have the same key and `order_by`."""
        staged = self._numbered(move, self.quoted([*self.merge.keys, str(self.merge.order_by)]))
        alike = ", ".join(self._key_and_order(move))
        return (
            f"SELECT 1 FROM ({staged}) AS staged GROUP BY {alike} HAVING min(tpc_part) <"
            " max(tpc_part) LIMIT 1"
        )

    def ties(self, move: Move[TargetT]) -> str:
        """Select key and `order_by` for which the last changes of two or more partitions are equal
        by `order_by` and are not the same row, and how many these are."""
        groups = self._key_and_order(move)
        shown = ", ".join(map(self.AS_TEXT.format, groups))
        return (
            f"SELECT {shown}, count(*) FROM ({self.candidates(move)}) AS ranked WHERE tpc_place ="
            " 1 AND tpc_last = 1"
            f" GROUP BY {', '.join(groups)} HAVING {self.differ(move)} LIMIT 1"
        )

    def _key_and_order(self, move: Move[TargetT]) -> list[str]:
        keys = [self.grouped(move.target, key) for key in self.merge.keys]
        return [*keys, self.sorted_by(move, str(self.merge.order_by))]

    def candidates(self, move: Move[TargetT]) -> str:
        """All staged changes.

        `tpc_place` is 1 if none of the key is newer by `order_by`, and `tpc_last` if none of the
        key and partition came later.
        """
        names = self.quoted(self.looked_at(move))
        keys = self.quoted(self.merge.keys)
        newest = self._newest_first(move)
        place = f"rank() OVER (PARTITION BY {keys} ORDER BY {newest}) AS tpc_place"
        last = (
            f"row_number() OVER (PARTITION BY {keys}, tpc_part ORDER BY {newest}, tpc_row DESC) AS "
            "tpc_last"
        )
        return f"SELECT {names}, {place}, {last} FROM ({self._numbered(move, names)}) AS staged"

    def differ(self, move: Move[TargetT]) -> str:
        """The condition for a group of changes that do not all come to the same. Two deletes do."""
        values = [
            self.compared(move.target, column)
            for column in move.written
            if column != self.merge.order_by
        ]
        if self.merge.delete_marker:
            deletes = f"{self.quote(self.merge.delete_marker)} IS TRUE"
            values = [f"CASE WHEN {deletes} THEN NULL ELSE {value} END" for value in values]
            values.append(f"CASE WHEN {deletes} THEN 1 ELSE 0 END")
        rules = (f"min({v}) <> max({v}) OR count({v}) BETWEEN 1 AND count(*) - 1" for v in values)
        return " OR ".join(rules)

    def compared(self, target: TargetT, column: str) -> str:
        """What equal values of any column have in common, and others have not."""
        return self.quote(column)

    def grouped(self, target: TargetT, column: str) -> str:
        """What equal values of a column are grouped by."""
        return self.quote(column)

    def _numbered(self, move: Move[TargetT], names: str) -> str:
        """These columns of all staged rows, with the number of their staging table and the place
        there."""
        columns = f"{names}, {self.POSITION} AS tpc_row"
        numbered = [
            f"(SELECT {columns}, {n} AS tpc_part FROM {table}) AS t{n}"
            for n, table in enumerate(move.tables)
        ]
        return self.union(numbered, "*")

    def looked_at(self, move: Move[TargetT]) -> list[str]:
        """The columns that are written, and those that only the merge looks at."""
        others = [column for column in (self.merge.order_by, self.merge.delete_marker) if column]
        return [*move.written, *(column for column in others if column not in move.written)]

    def _newest_first(self, move: Move[TargetT]) -> str:
        return self.NEWEST_FIRST.format(self.sorted_by(move, str(self.merge.order_by)))

    def sorted_by(self, move: Move[TargetT], column: str) -> str:
        """An expression by which changes are sorted as Spark would: of a text, byte by byte, where
        that can be had."""
        return self.quote(column)

    # ------------------------------------------------------------------ deletes
    def deletes(self, move: Move[TargetT], last: str) -> str:
        """Delete the rows whose change in `last` is a delete."""
        return self.DELETE.format(
            target=self.quote(move.target.schema, move.target.name),
            rows=f"({last}) AS last",
            condition=self._is_deleted(),
        )

    def deletes_of_leaves(self, move: Move[TargetT], last: str) -> str | None:
        """Delete those of them to which no other row refers that the batch deletes; None if the
        table does not refer to itself."""
        free = self._referred_by_none_that_goes(move, last)
        if not free:
            return None
        return self.DELETE.format(
            target=self.quote(move.target.schema, move.target.name),
            rows=f"({last}) AS last",
            condition=f"{self._is_deleted()} AND {free}",
        )

    def _is_deleted(self) -> str:
        return (
            f"{self._goes('last')} AND "
            f"{self.equal('target', 'last', self.merge.keys)}{self.not_older()}"
        )

    def move_away(self, move: Move[TargetT], last: str) -> list[str]:
        """Statements, for each foreign key of the table to itself, by which the changed rows let go
        of what they referred to, if the batch deletes anything: they refer to their new row, or to
        nothing if that is yet to come."""
        if not self.merge.delete_marker:
            return []
        statements: list[str] = []
        nullable = {column.name for column in move.target.columns if column.nullable}
        table = self.quote(move.target.schema, move.target.name)
        deletes = f"EXISTS (SELECT 1 FROM ({last}) AS deletion WHERE {self._goes('deletion')})"
        for key in move.target.own_keys:
            if not key.columns or not set(key.columns) <= set(move.written):
                continue
            pairs = [
                (self.quote(column), self.quote(own))
                for column, own in zip(key.columns, key.referred, strict=True)
            ]
            given = " AND ".join(f"target.{column} IS NOT NULL" for column, _ in pairs)
            moved = f"NOT COALESCE({self.equal('last', 'target', key.columns)}, FALSE)"
            same = f"{self.equal('target', 'last', self.merge.keys)}{self.not_older()}"
            due = f"{same} AND {self.stays('last')} AND {given} AND {moved} AND {deletes}"
            nothing = " OR ".join(f"last.{column} IS NULL" for column, _ in pairs)
            there = " AND ".join(f"parent.{own} = last.{column}" for column, own in pairs)
            new_rows = f"({last}) AS last LEFT JOIN {table} AS parent ON {there}"
            is_there = f"({nothing} OR parent.{pairs[0][1]} IS NOT NULL)"
            statements.append(
                self._set(
                    table,
                    {column: f"last.{column}" for column, _ in pairs},
                    new_rows,
                    f"{due} AND {is_there}",
                )
            )
            if set(key.columns) <= nullable:
                nothing_yet = {column: "NULL" for column, _ in pairs}
            elif set(key.referred) == set(self.merge.keys):
                # the row itself is there
                nothing_yet = {column: f"target.{own}" for column, own in pairs}
            else:
                continue
            statements.append(self._set(table, nothing_yet, f"({last}) AS last", due))
        return statements

    def _pairs(self, key: ForeignKey) -> list[tuple[str, str]]:
        """Each (quoted) column, and the one that it refers to."""
        return [
            (self.quote(column), self.quote(own))
            for column, own in zip(key.columns, key.referred, strict=True)
        ]

    def _set(self, table: str, values: Mapping[str, str], rows: str, condition: str) -> str:
        sets = ", ".join(f"{column} = {value}" for column, value in values.items())
        own_sets = ", ".join(f"target.{column} = {value}" for column, value in values.items())
        return self.UPDATE.format(
            target=table, sets=sets, own_sets=own_sets, rows=rows, condition=condition
        )

    def _referred_by_none_that_goes(self, move: Move[TargetT], last: str) -> str:
        """The condition for rows to which no other row refers that the batch deletes; "" if the
        table does not refer to itself."""
        table = self.quote(move.target.schema, move.target.name)
        conditions = []
        for key in move.target.own_keys:
            pairs = [
                (self.quote(column), self.quote(own))
                for column, own in zip(key.columns, key.referred, strict=True)
            ]
            if not pairs:
                continue
            columns = ", ".join(f"child.{column}" for column, _ in pairs)
            to_itself = " AND ".join(f"child.{column} = child.{own}" for column, own in pairs)
            # DISTINCT: MySQL reads the table that it deletes from only through a result of its own
            children = (
                f"SELECT DISTINCT {columns} FROM {table} AS child CROSS JOIN ({last}) AS gone"
                f" WHERE {self.equal('child', 'gone', self.merge.keys)} AND {self._goes('gone')}"
                f" AND NOT COALESCE({to_itself}, FALSE)"
            )
            refers = " AND ".join(f"held.{column} = target.{own}" for column, own in pairs)
            conditions.append(f"NOT EXISTS (SELECT 1 FROM ({children}) AS held WHERE {refers})")
        return " AND ".join(conditions)

    # --------------------------------------------------- values of unique indexes that rows hand on
    def takes(self, move: Move[TargetT]) -> list[str]:
        """Conditions, one for each other unique index, by which a change `taker` may get what the
        row `target` has."""
        takes = []
        for unique in move.target.uniques:
            columns = [column for column in unique.columns if column in move.written]
            if columns and set(unique.columns) != set(self.merge.keys):
                takes.append(f"({self.clash('taker', 'target', columns, unique)})")
        return takes

    def hands_on_unique_value(self, move: Move[TargetT], last: str) -> str | None:
        """The condition for rows `target`, with the change `last` of their key, whose value of
        another unique index a change of another key takes: one that is changed first would meet
        what the other is yet to give up. None if there can be none, or if a row cannot go in anew:
        foreign keys and triggers would take that for a delete."""
        target = move.target
        keys = self.merge.keys
        takes = self.takes(move)
        if not takes or keeps_rows(target):
            return None
        other = f"NOT ({self.equal('taker', 'target', keys)}) AND {self.stays('taker')}"
        return (
            f"{self.equal('target', 'last', keys)}{self.not_older()} AND EXISTS (SELECT 1 FROM "
            f"({last}) AS taker"
            f" WHERE ({' OR '.join(takes)}) AND {other})"
        )


def batches(items: Sequence[ItemT], size: int) -> Iterator[Sequence[ItemT]]:
    """Cut a list into parts of at most `size` items."""
    return (items[start : start + size] for start in range(0, len(items), size))


def marks(parameters: Sequence[object]) -> str:
    """Write the marks of a list of parameters."""
    return ", ".join(["%s"] * len(parameters))


def keeps_rows(target: Target) -> list[str]:
    """List the foreign keys, triggers and rules for which a row of the table cannot go out and come
    back."""
    judges = [judge for judge in target.constraints if judge.startswith(("trigger ", "rule "))]
    return [*target.referenced_by, *judges]
