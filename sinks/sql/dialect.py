"""The SQL of one kind of database, as text.

It is how the database writes names, and the parts of the statements that move rows from staging
tables into the target. Nothing in here needs a server, so all of it is tested without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from sinks.sql.databases import MYSQL
from sinks.sql.table import ForeignKey, MergeOptions, Target, Unique

TargetT = TypeVar("TargetT", bound=Target)
ItemT = TypeVar("ItemT")
_INSERTED_TOGETHER = 1000
"""How many rows one INSERT of `insertions` has at most."""
_NULL_IS_SAID = (*MYSQL, "mssql")
"""Dialects in which a column may take no NULL unless it is declared as NULL. Other dialects do not
have this word."""


@dataclass(frozen=True)
class Move(Generic[TargetT]):
    """Staged rows on their way into the target, which is locked until the running transaction ends.

    `staging` are the names of the staging tables, and `tables` are the same names, quoted and with
    their schema. `written` are the columns of the rows that go into the target. `types` has every
    column of the rows, including the columns that only the merge looks at, with its type as the
    server writes it.
    """

    target: TargetT
    staging: Sequence[str]
    tables: Sequence[str]
    written: Sequence[str]
    types: Mapping[str, str]


class Dialect(Generic[TargetT]):
    """Write the SQL of one kind of database. The defaults are standard SQL.

    In statements %s stands for a parameter and %% for a percent sign. A statement without
    parameters is sent as it is.
    """

    name: str = ""
    """SQLAlchemy's name for the kind of database, by which `sinks.sql.databases` finds what is
    known of it; "" for one of which nothing is known."""
    SORTS_TEXTS: ClassVar[bool] = True
    """True if the database sorts by all of a long string."""
    INSERT_MISSING: ClassVar[str] = (
        "INSERT INTO {table} ({columns}) VALUES {rows} ON CONFLICT DO NOTHING"
    )
    """The INSERT that skips rows whose key is there, and waits for rows that are not committed."""
    NEWEST_FIRST: ClassVar[str] = "{} DESC"
    """Orders by a column, with NULL at the end."""
    POSITION: ClassVar[str] = ""
    """The expression that sorts the rows of a staging table as they were put in. If it is "",
    nothing does, and two changes of one key with an equal `order_by` are refused."""
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
        """Quote an identifier of one or more parts, of which the first may be empty.

        By default this is done as in standard SQL.
        """
        return ".".join('"' + name.replace('"', '""') + '"' for name in names if name)

    def quoted(self, columns: Iterable[str]) -> str:
        """Quote identifiers, and separate them by commas."""
        return ", ".join(self.quote(column) for column in columns)

    def column(self, name: str, kind: str, *, nullable: bool) -> str:
        """Declare a column for CREATE TABLE and ADD COLUMN."""
        null = " NULL" if self.name in _NULL_IS_SAID else ""
        return f"{self.quote(name)} {kind}{null if nullable else ' NOT NULL'}"

    def insertions(
        self, table: str, columns: Sequence[str], rows: Sequence[Sequence[object]]
    ) -> Iterator[tuple[str, list[object]]]:
        """Yield statements, with their parameters, that insert rows into a (quoted) table.

        Each row has its values in the order of `columns`. The statements leave out rows whose
        primary key the table has already.
        """
        for some in batches(rows, _INSERTED_TOGETHER):
            values = ", ".join([f"({marks(columns)})"] * len(some))
            statement = self.INSERT_MISSING.format(
                table=table, columns=", ".join(columns), rows=values
            )
            yield statement, [value for row in some for value in row]

    def into(self, target: TargetT, written: Sequence[str]) -> str:
        """Write the INSERT up to its rows."""
        return f"INSERT INTO {self.quote(target.schema, target.name)} ({self.quoted(written)})"

    def union(self, tables: Sequence[str], columns: str) -> str:
        """Select from all staging tables, of which there are as many as Spark has partitions."""
        return " UNION ALL ".join(f"SELECT {columns} FROM {table}" for table in tables)

    # ------------------------------------------------------------------ conditions
    def equal(self, left: str, right: str, columns: Sequence[str], *, nulls: bool = False) -> str:
        """Write the condition that two rows are equal in these columns.

        With `nulls`, NULL equals NULL, as in unique indexes that treat NULL as a value.
        """
        names = map(self.quote, columns)
        operator = "IS NOT DISTINCT FROM" if nulls else "="
        return " AND ".join(f"{left}.{name} {operator} {right}.{name}" for name in names)

    def clash(self, left: str, right: str, columns: Sequence[str], unique: Unique) -> str:
        """Write the condition under which a unique index does not take two rows together.

        `columns` are those columns of the index that both rows have. If they include both bounds of
        the index's period, the condition compares the periods; otherwise it leaves the bounds out.
        """
        period = unique.period or ()
        equal = [column for column in columns if column not in period]
        conditions = [self.equal(left, right, equal, nulls=unique.nulls_equal)] if equal else []
        if period and set(period) <= set(columns):
            begin, end = map(self.quote, period)
            conditions.append(f"{left}.{begin} < {right}.{end} AND {right}.{begin} < {left}.{end}")
        return " AND ".join(conditions) or "TRUE"

    def stays(self, rows: str) -> str:
        """Write the condition for rows that are no deletes."""
        return (
            f"{rows}.{self.quote(self.merge.delete_marker)} IS NOT TRUE"
            if self.merge.delete_marker
            else "TRUE"
        )

    def not_older(self, change: str = "last") -> str:
        """Write what a change must meet, in addition to the key, to replace the row `target`.

        With `keep_newer` the change must not be older than the row. Otherwise there is no such
        condition, and the text is empty.
        """
        if not self.merge.keep_newer:
            return ""
        by = self.quote(str(self.merge.order_by))
        return f" AND (target.{by} IS NULL OR target.{by} <= {change}.{by})"

    def _goes(self, rows: str) -> str:
        """Write the condition for rows that delete."""
        return f"{rows}.{self.quote(str(self.merge.delete_marker))} IS TRUE"

    # -------------------------------------------------------- which change of a key is the last one
    def last(self, move: Move[TargetT]) -> str:
        """Select the last change of each key from all staging tables.

        Of changes with an equal `order_by`, the one that came last in its partition wins. If such
        changes come from several partitions, validation has made sure that they are the same row.
        """
        names = self.quoted(self.looked_at(move))
        if not self.merge.order_by:  # validated: every key is there once
            return self.union(move.tables, names)
        staged = self.union(move.tables, f"{names}, {self.POSITION or 0} AS tpc_row")
        order = f"{self._newest_first(move)}, tpc_row DESC"
        place = (
            f"row_number() OVER (PARTITION BY {self.quoted(self.merge.keys)}"
            f" ORDER BY {order}) AS tpc_place"
        )
        ranked = f"SELECT {names}, {place} FROM ({staged}) AS staged"
        return f"SELECT {names} FROM ({ranked}) AS ranked WHERE tpc_place = 1"

    def duplicates(self, move: Move[TargetT], columns: Sequence[str]) -> str:
        """Select values of these columns that several staged rows have, and count the rows."""
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
            f"SELECT 1 FROM ({staged}) AS staged GROUP BY {alike}"
            " HAVING min(tpc_part) < max(tpc_part) LIMIT 1"
        )

    def ties(self, move: Move[TargetT]) -> str:
        """Select a key and an `order_by` by which nobody can tell the last change.

        These are the last changes of two or more partitions that are equal by `order_by` and are
        not the same row. The last column counts the changes.
        """
        groups = self._key_and_order(move)
        shown = ", ".join(map(self.AS_TEXT.format, groups))
        return (
            f"SELECT {shown}, count(*) FROM ({self._candidates(move)}) AS ranked"
            " WHERE tpc_place = 1 AND tpc_last = 1"
            f" GROUP BY {', '.join(groups)} HAVING {self._differ(move)} LIMIT 1"
        )

    def _key_and_order(self, move: Move[TargetT]) -> list[str]:
        keys = [self.grouped(move.target, key) for key in self.merge.keys]
        return [*keys, self.sorted_by(move, str(self.merge.order_by))]

    def _candidates(self, move: Move[TargetT]) -> str:
        """Select all staged changes, with marks by which the last change of each key is found.

        `tpc_place` is 1 if no change of the key is newer by `order_by`. `tpc_last` is 1 if no
        change of the key in the same partition is newer, or is equal and came later.
        """
        names = self.quoted(self.looked_at(move))
        keys = self.quoted(self.merge.keys)
        newest = self._newest_first(move)
        place = f"rank() OVER (PARTITION BY {keys} ORDER BY {newest}) AS tpc_place"
        last = (
            f"row_number() OVER (PARTITION BY {keys}, tpc_part"
            f" ORDER BY {newest}, tpc_row DESC) AS tpc_last"
        )
        return f"SELECT {names}, {place}, {last} FROM ({self._numbered(move, names)}) AS staged"

    def _differ(self, move: Move[TargetT]) -> str:
        """Write the condition for a group of changes that do not all come to the same.

        Two deletes come to the same.
        """
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
        """Write an expression that is equal for equal values of a column, and for no others."""
        return self.quote(column)

    def grouped(self, target: TargetT, column: str) -> str:
        """Write the expression by which equal values of a column are grouped."""
        return self.quote(column)

    def _numbered(self, move: Move[TargetT], names: str) -> str:
        """Select these columns of all staged rows, with the number of the row's staging table.

        The row's place in that table is selected too.
        """
        columns = f"{names}, {self.POSITION} AS tpc_row"
        numbered = [
            f"(SELECT {columns}, {n} AS tpc_part FROM {table}) AS t{n}"
            for n, table in enumerate(move.tables)
        ]
        return self.union(numbered, "*")

    def looked_at(self, move: Move[TargetT]) -> list[str]:
        """List the columns that are written, and the columns that only the merge looks at."""
        others = [column for column in (self.merge.order_by, self.merge.delete_marker) if column]
        return [*move.written, *(column for column in others if column not in move.written)]

    def _newest_first(self, move: Move[TargetT]) -> str:
        return self.NEWEST_FIRST.format(self.sorted_by(move, str(self.merge.order_by)))

    def sorted_by(self, move: Move[TargetT], column: str) -> str:
        """Write the expression by which the database sorts changes as Spark would.

        Strings are sorted byte by byte, where the database can do that.
        """
        return self.quote(column)

    # ------------------------------------------------------------------ deletes
    def deletes(self, move: Move[TargetT], last: str) -> str:
        """Write the DELETE of the rows whose change in `last` is a delete."""
        return self.DELETE.format(
            target=self.quote(move.target.schema, move.target.name),
            rows=f"({last}) AS last",
            condition=self._is_deleted(),
        )

    def deletes_of_leaves(self, move: Move[TargetT], last: str) -> str | None:
        """Write the DELETE of those rows to which no other row refers that the batch deletes.

        Return None if the table does not refer to itself.
        """
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
        """Write statements by which changed rows let go of the rows that they referred to.

        The batch may delete the rows that they referred to. For each foreign key of the table to
        itself, the changed rows refer to their new row if that is there already. Otherwise they
        refer to nothing, or, if the columns take no NULL, to themselves where the foreign key
        allows that. The statements change nothing unless the batch deletes a row.
        """
        if not self.merge.delete_marker:
            return []
        statements: list[str] = []
        nullable = {column.name for column in move.target.columns if column.nullable}
        table = self.quote(move.target.schema, move.target.name)
        deletes = f"EXISTS (SELECT 1 FROM ({last}) AS deletion WHERE {self._goes('deletion')})"
        for key in move.target.own_keys:
            if not key.columns or not set(key.columns) <= set(move.written):
                continue
            pairs = self._pairs(key)
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
        """Pair each (quoted) column with the column that it refers to."""
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
        """Write the condition for rows to which no other row refers that the batch deletes.

        Return "" if the table does not refer to itself.
        """
        table = self.quote(move.target.schema, move.target.name)
        conditions = []
        for key in move.target.own_keys:
            pairs = self._pairs(key)
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
        """Write conditions under which a change `taker` may take a value of the row `target`.

        There is one condition for each unique index other than that of the keys.
        """
        takes = []
        for unique in move.target.uniques:
            columns = [column for column in unique.columns if column in move.written]
            if columns and set(unique.columns) != set(self.merge.keys):
                takes.append(f"({self.clash('taker', 'target', columns, unique)})")
        return takes

    def hands_on_unique_value(self, move: Move[TargetT], last: str) -> str | None:
        """Write the condition for rows whose value of a unique index a change of another key takes.

        Such a row `target` has the change `last` of its own key. If the other change came first,
        the database would reject it, because this row has not given up the value yet. Return None
        if there can be no such row, or if rows of the table cannot be taken out and put in again,
        because foreign keys and triggers would treat that as a delete.
        """
        target = move.target
        keys = self.merge.keys
        takes = self.takes(move)
        if not takes or keeps_rows(target):
            return None
        other = f"NOT ({self.equal('taker', 'target', keys)}) AND {self.stays('taker')}"
        return (
            f"{self.equal('target', 'last', keys)}{self.not_older()}"
            f" AND EXISTS (SELECT 1 FROM ({last}) AS taker"
            f" WHERE ({' OR '.join(takes)}) AND {other})"
        )


def batches(items: Sequence[ItemT], size: int) -> Iterator[Sequence[ItemT]]:
    """Cut a list into parts of at most `size` items."""
    return (items[start : start + size] for start in range(0, len(items), size))


def marks(parameters: Sequence[object]) -> str:
    """Write the placeholders of a list of parameters."""
    return ", ".join(["%s"] * len(parameters))


def keeps_rows(target: Target) -> list[str]:
    """List what forbids that a row of the table is taken out and put in again.

    These are foreign keys that refer to the table, triggers and rules.
    """
    judges = [judge for judge in target.constraints if judge.startswith(("trigger ", "rule "))]
    return [*target.referenced_by, *judges]
