"""What the server says about the target: columns, indexes, what judges rows, rights."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pymysql

from sinks.errors import ConfigurationError
from sinks.mysql.failures import RIGHTS, code_of
from sinks.mysql.failures import describe as text_of
from sinks.mysql.server import Connection, execute, is_mariadb, query, quoted, setting
from sinks.mysql.types import Column, target_type

_PART = re.compile(r"`((?:[^`]|``)+)`|([^`.\s;]+)")
_NAME = re.compile(rf"(?:{_PART.pattern})(?:\.(?:{_PART.pattern}))?")


@dataclass(frozen=True)
class Unique:
    """A unique index over whole columns."""

    name: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Target:
    """A table that rows go to.

    `beyond` names what judges a row there and cannot be judged in a staging table: foreign keys, triggers and the like.
    """

    schema: str
    name: str
    engine: str
    columns: tuple[Column, ...]
    uniques: tuple[Unique, ...]
    beyond: tuple[str, ...]
    referenced_by: tuple[str, ...]

    @property
    def identifier(self) -> str:
        return quoted(self.schema, self.name)

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]


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


def similar(connection: Connection, name: str) -> list[str]:
    """Tables whose name differs only in case or database, as hints."""
    rows = query(
        connection,
        "SELECT table_schema, table_name FROM information_schema.tables WHERE LOWER(table_name) = LOWER(%s)"
        " ORDER BY 1, 2 LIMIT 5",
        [name],
    )
    return [f"{schema}.{table}" for schema, table in rows]


def weaknesses(connection: Connection) -> list[str]:
    """What lets a crash lose rows that were committed."""
    wanted = {"innodb_flush_log_at_trx_commit": ("1",), "innodb_doublewrite": ("1", "ON", "fast")}
    found = {name: setting(connection, name) for name in wanted}
    return [
        f"the server has {name} = {value}, so a crash of its machine may lose rows"
        for name, value in found.items()
        if value not in wanted[name]
    ]


def describe(connection: Connection, schema: str, name: str) -> Target | None:
    """Read the target from the catalog; None if there is none, or none that this user may see.

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
    json = {column for column, clause in checks if clause == f"json_valid({quoted(column)})"}
    columns = tuple(_column(row, json) for row in query(connection, _COLUMNS, where))
    uniques, special = _indexes(connection, where)
    beyond = [*special, *(f"generated column {column.name}" for column in columns if column.generated)]
    beyond += [f"check {check}" for check, _ in checks if check not in json]
    beyond += [row[0] for row in query(connection, _BEYOND, where * 3)]
    references = query(connection, _REFERENCES, where)
    return Target(
        schema,
        name,
        engine or "",
        columns,
        uniques,
        tuple(beyond),
        tuple(f"foreign key {row[0]}" for row in references),
    )


_COLUMNS = (
    "SELECT column_name, data_type, column_type, is_nullable = 'YES',"
    " column_default IS NOT NULL OR extra LIKE '%%auto_increment%%', coalesce(generation_expression, '') <> '',"
    " coalesce(numeric_precision, 0), numeric_scale, coalesce(datetime_precision, 0),"
    " coalesce(character_octet_length, 0), coalesce(character_set_name, ''), coalesce(collation_name, '')"
    " FROM information_schema.columns WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position"
)
_BEYOND = (
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


def _column(row: Sequence[object], json: Collection[str]) -> Column:
    name, kind, declared, nullable, default, generated, precision, scale, digits, length, charset, collation = row
    assert isinstance(name, str)
    return Column(
        name,
        "json" if name in json else str(kind).lower(),
        str(declared),
        bool(nullable),
        bool(default),
        bool(generated),
        int(str(precision)),
        None if scale is None else int(str(scale)),
        int(str(digits)),
        int(str(length)),
        str(charset),
        str(collation),
    )


def extra_column(name: str, arrow: pa.DataType) -> Column:
    """A column that only a staging table has."""
    declared = target_type(arrow).replace("boolean", "tinyint(1)")
    kind, *numbers = re.findall(r"\w+", declared)
    text = ("utf8mb4", "utf8mb4_bin") if kind == "longtext" else ("", "")
    precision, scale = map(int, numbers) if kind == "decimal" else (0, None)
    return Column(
        name,
        kind,
        declared,
        precision=precision,
        scale=scale,
        digits=6 if declared.endswith("(6)") else 0,
        charset=text[0],
        collation=text[1],
    )


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
