"""What the server says about the target: columns, indexes, what judges rows, rights."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pymysql

from sinks.errors import ConfigurationError
from sinks.mysql.connection import Connection, execute, is_mariadb, listed, query, quoted
from sinks.mysql.failures import RIGHTS, SHAPE, code_of
from sinks.mysql.failures import describe as text_of
from sinks.mysql.types import MySQLColumn
from sinks.sql import target as targets
from sinks.sql.mysql import in_full, members_of
from sinks.sql.server import Row
from sinks.sql.target import Unique

_PART = re.compile(r"`((?:[^`]|``)+)`|([^`.\s;]+)")
_NAME = re.compile(rf"(?:{_PART.pattern})(?:\.(?:{_PART.pattern}))?")


@dataclass(frozen=True, kw_only=True)
class MySQLTarget(targets.Target[MySQLColumn]):
    """A table that rows go to. `local`: the server takes rows by LOAD DATA LOCAL, else only by INSERT, whose statements
    have less than `packet` bytes."""

    engine: str
    local: bool = False
    packet: int = 2**24

    @property
    def identifier(self) -> str:
        return quoted(self.schema, self.name)


def locate(connection: Connection, table: str) -> tuple[str, str]:
    """Database and name of a table as the user wrote it: `orders`, `shop.orders`, "`Daily Orders`". It need not exist.
    The database's name is as the server writes it, which may not care for capitals: transactions are found by it.

    Raises ConfigurationError if it is no table name.
    """
    if not _NAME.fullmatch(table):
        raise ConfigurationError(
            f"{table!r} is not a table name; write name or database.name, with backticks around a part that has "
            "special characters: shop.`Daily Orders`"
        )
    parts = [(ticked or plain).replace("``", "`") for ticked, plain in _PART.findall(table)]
    if len(parts) == 1:
        ((schema,),) = query(connection, "SELECT DATABASE()")
        parts = [schema, *parts]
    found = query(connection, "SELECT schema_name FROM information_schema.schemata WHERE schema_name = %s", parts[:1])
    return (found[0][0] if found else parts[0]), parts[1]


def describe(connection: Connection, schema: str, name: str, *, references: bool = True) -> MySQLTarget | None:
    """Read the target from the catalog; None if there is none, or none that this user may see. Who refers to it is
    left out without `references`: the server opens every table of the database to tell.

    Raises ConfigurationError if it is not a table."""
    found = query(
        connection,
        "SELECT table_schema, table_name, table_type, engine FROM information_schema.tables"
        " WHERE table_schema = %s AND table_name = %s",
        [schema, name],
    )
    if not found:
        return None
    schema, name, kind, engine = found[0]  # as the server writes them: it may not care for capitals
    if kind not in ("BASE TABLE", "SYSTEM VERSIONED"):
        raise ConfigurationError(f"{schema}.{name} is a {kind.lower()}; rows can only go to a table")
    where = [schema, name]
    checks = _checks(connection, where)
    json = _json(checks)
    columns = _described(connection, where, query(connection, _COLUMNS, where), json)
    uniques, special = _indexes(connection, where)
    constraints = [*special, *(f"generated column {column.name}" for column in columns if column.generated)]
    constraints += [f"check {check}" for check, _ in checks if check not in json]
    constraints += [row[0] for row in query(connection, _CONSTRAINTS, where * 3)]
    referring = query(connection, _REFERENCES, where) if references else []
    return MySQLTarget(
        schema,
        name,
        columns,
        uniques,
        tuple(constraints),
        tuple(f"foreign key {row[0]}" for row in referring),
        engine=engine or "",
    )


def lock(connection: Connection, target: MySQLTarget, written: Sequence[str]) -> pymysql.Error | None:
    """Take the table's metadata lock in the running transaction, by an INSERT of no rows: until its end nobody can
    ALTER or DROP the table. Returns the error of a table that has no such columns any more, or whose triggers the
    server refuses, and so is not locked."""
    nulls = ", ".join(["NULL"] * len(written))
    try:
        execute(connection, f"INSERT INTO {target.identifier} ({listed(written)}) SELECT {nulls} FROM DUAL WHERE 1 = 0")
    except pymysql.Error as error:
        if code_of(error) not in SHAPE:
            raise
        return error
    return None


def current(connection: Connection, target: MySQLTarget, written: Sequence[str]) -> MySQLTarget:
    """Columns and engine as the running transaction sees them, under the table's metadata lock. Raises
    ConfigurationError if it may not write such rows any more."""
    unlocked = lock(connection, target, written)
    where = [target.schema, target.name]
    engine = query(connection, _ENGINE, where)
    require_innodb(target, engine[0][0] if engine else None)
    rows = query(connection, _COLUMNS, where)
    json = _json(_checks(connection, where)) if any(row[1].lower() == "longtext" for row in rows) else ()
    found = replace(target, columns=_described(connection, where, rows, json))
    reasons = list(found.unfit(written))
    if unlocked and not reasons:
        reasons = [text_of(unlocked)]
    if reasons:
        raise changed(target, reasons)
    return found


def collation(connection: Connection, target: MySQLTarget) -> str:
    """Of columns that name none."""
    of_table = "SELECT table_collation FROM information_schema.tables WHERE table_schema = %s AND table_name = %s"
    ((name,),) = query(connection, of_table, [target.schema, target.name])
    return str(name)


def require_innodb(target: MySQLTarget, engine: str | None) -> None:
    """`engine` is what the table has now; None if it is gone. Raises ConfigurationError."""
    if engine is None:
        raise changed(target, [f"it is gone: create it again as it was, columns {', '.join(target.names)}"])
    if engine.lower() != "innodb":
        raise changed(
            target,
            [f"its engine is {engine}, which has no transactions: ALTER TABLE {target.identifier} ENGINE=InnoDB"],
        )


def changed(target: MySQLTarget, reasons: Sequence[str]) -> ConfigurationError:
    return ConfigurationError(f"table {target.label} was changed while the query ran: " + "; ".join(reasons))


_ENGINE = "SELECT engine FROM information_schema.tables WHERE table_schema = %s AND table_name = %s"
_COLUMNS = (
    "SELECT column_name, data_type, column_type, is_nullable = 'YES',"
    " column_default IS NOT NULL OR extra LIKE '%%auto_increment%%',"
    " coalesce(generation_expression, '') <> '', extra LIKE '%%auto_increment%%',"
    " coalesce(numeric_precision, 0), numeric_scale, coalesce(datetime_precision, 0),"
    " coalesce(character_octet_length, 0), coalesce(character_set_name, ''), coalesce(collation_name, '')"
    " FROM information_schema.columns WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position"
)
_CONSTRAINTS = (
    "SELECT CONCAT('foreign key ', constraint_name) FROM information_schema.referential_constraints"
    " WHERE constraint_schema = %s AND table_name = %s"
    " UNION ALL SELECT CONCAT('trigger ', trigger_name) FROM information_schema.triggers"
    " WHERE event_object_schema = %s AND event_object_table = %s"
    " UNION ALL SELECT DISTINCT 'partitions' FROM information_schema.partitions"
    " WHERE table_schema = %s AND table_name = %s AND partition_name IS NOT NULL"
)
_REFERENCES = (
    "SELECT CONCAT(constraint_name, ' of ', constraint_schema, '.', table_name)"
    " FROM information_schema.referential_constraints"
    " WHERE unique_constraint_schema = %s AND referenced_table_name = %s ORDER BY 1"
)


def _described(
    connection: Connection, where: list[str], rows: Iterable[Row], json: Collection[str]
) -> tuple[MySQLColumn, ...]:
    columns = []
    for column in (_column(row, json) for row in rows):
        if column.members:
            names = quoted(column.name), quoted(*where)
            members = in_full(column.members, *names, several=column.type == "set", query=partial(query, connection))
            column = replace(column, members=members)
        columns.append(column)
    return tuple(columns)


def _column(row: Row, json: Collection[str]) -> MySQLColumn:
    name, kind, declared, *facts, precision, scale, digits, length, charset, collation = row
    nullable, has_default, generated, counter = map(bool, facts)
    numbers = int(precision), None if scale is None else int(scale), int(digits), int(length)
    kind = "json" if name in json else kind.lower()
    members = members_of(declared) if kind in ("enum", "set") else ()
    return MySQLColumn(
        name, kind, declared, nullable, has_default, generated, counter, *numbers, charset, collation, members
    )


def _json(checks: Iterable[tuple[str, str]]) -> set[str]:
    """The columns that MariaDB knows as JSON."""
    return {column for column, clause in checks if clause == f"json_valid({quoted(column)})"}


def _checks(connection: Connection, where: list[str]) -> list[tuple[str, str]]:
    """Name and clause of each CHECK. In MariaDB one of a column is called like the column."""
    if is_mariadb(connection):
        statement = (
            "SELECT constraint_name, check_clause FROM information_schema.check_constraints"
            " WHERE constraint_schema = %s AND table_name = %s"
        )
    else:
        statement = (
            "SELECT constraint_name, check_clause FROM information_schema.check_constraints"
            " JOIN information_schema.table_constraints USING (constraint_schema, constraint_name)"
            " WHERE constraint_schema = %s AND table_name = %s AND enforced = 'YES'"
        )
    return [(name, clause) for name, clause in query(connection, statement, where)]


def _indexes(connection: Connection, where: list[str]) -> tuple[tuple[Unique, ...], list[str]]:
    """Unique indexes over whole columns, and the names of those whose verdict only the target can tell."""
    rows = query(
        connection,
        "SELECT index_name, column_name, sub_part FROM information_schema.statistics"
        " WHERE table_schema = %s AND table_name = %s AND non_unique = 0 ORDER BY index_name, seq_in_index",
        where,
    )
    columns: dict[str, list[str | None]] = {}
    for index, column, part in rows:
        columns.setdefault(index, []).append(column if part is None else None)  # None: a prefix, or an expression
    uniques = tuple(Unique(index, tuple(filter(None, of))) for index, of in columns.items() if None not in of)
    return uniques, [f"index {index}" for index, of in columns.items() if None in of]


def missing_rights(connection: Connection, schema: str, table: str, rights: Iterable[str], column: str) -> list[str]:
    """What this user may not do with a table, as the server says: EXPLAIN needs the rights of what it explains."""
    name = quoted(schema, table)
    statements = {
        "SELECT": f"SELECT {quoted(column)} FROM {name} WHERE 1 = 0",
        "INSERT": f"INSERT INTO {name} ({quoted(column)}) VALUES (NULL)",
        "UPDATE": f"UPDATE {name} SET {quoted(column)} = {quoted(column)} WHERE 1 = 0",
        "DELETE": f"DELETE FROM {name} WHERE 1 = 0",
    }
    problems = []
    for right in rights:
        try:
            query(connection, f"EXPLAIN {statements[right]}")
        except pymysql.Error as error:
            if code_of(error) in RIGHTS:
                problems.append(f"GRANT {right} ON {name} is missing: {text_of(error)}")
            elif not connection.open:
                raise
    return problems


def may_not_create(connection: Connection, schema: str, table: str) -> list[str]:
    """Why this user may not create and drop tables in a database; tried with the name of a table that is not there."""
    try:
        execute(connection, f"CREATE TABLE {quoted(schema, table)} (x int PRIMARY KEY) ENGINE=InnoDB")
        execute(connection, f"DROP TABLE {quoted(schema, table)}")
    except pymysql.Error as error:
        if code_of(error) not in RIGHTS:
            raise
        return [f"GRANT CREATE, DROP ON {quoted(schema)}.* is missing: {text_of(error)}"]
    return []
