"""MySQL's and MariaDB's description of the target: columns, constraints, indexes and privileges."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pymysql
from pymysql.constants import ER

from sinks.errors import ConfigurationError
from sinks.mysql.columns import MySQLColumn, MySQLTarget, members_of, target_type
from sinks.mysql.connection import (
    DENIED,
    SHAPE,
    Connection,
    code_of,
    error_text,
    execute,
    is_mariadb,
    listed,
    query,
    quoted,
)
from sinks.mysql.dialect import ROW, MySQLDialect
from sinks.mysql.server import MySQLServer
from sinks.sql.catalog import LEDGER_PRIVILEGES, Catalog, ColumnTypes, by_table
from sinks.sql.databases import TRIGGERS, lacks_characters
from sinks.sql.dialect import marks
from sinks.sql.names import witness_of
from sinks.sql.server import Row
from sinks.sql.table import ForeignKey, Unique

_REFERENCES = (
    "SELECT CONCAT(constraint_name, ' of ', constraint_schema, '.', table_name)"
    " FROM information_schema.referential_constraints"
    " WHERE unique_constraint_schema = %s AND referenced_table_name = %s ORDER BY 1"
)
_LONGEST_NAME = 64
_PART = re.compile(r"`((?:[^`]|``)+)`|([^`.\s;]+)")
_NAME = re.compile(rf"(?:{_PART.pattern})(?:\.(?:{_PART.pattern}))?")
_PROBE = "tpc_rights"
"""The table that is made to see whether tables can be made. It has one name, so if a driver is
killed and leaves the table, the next driver drops it."""


class MySQLCatalog(Catalog[Connection, MySQLTarget]):
    NO_TABLE_HINT = ", or none that this user may see"

    server: MySQLServer

    def __init__(self, server: MySQLServer, dialect: MySQLDialect) -> None:
        super().__init__(server, dialect)
        self._known: MySQLTarget | None = None

    # ------------------------------------------------------------------ what is there
    def locate(self, connection: Connection, table: str) -> tuple[str, str]:
        """Find database and name of a table as the user wrote it.

        The user may write `orders`, `shop.orders` or "`Daily Orders`". The table need not exist.
        The database's name is returned as the server writes it, which may not distinguish capitals,
        because transactions are found by it. Raises ConfigurationError if this is no table name.
        """
        if not _NAME.fullmatch(table):
            raise ConfigurationError(
                f"{table!r} is not a table name; write name or database.name, with backticks "
                "around a part that has special characters: shop.`Daily Orders`"
            )
        parts = [(ticked or plain).replace("``", "`") for ticked, plain in _PART.findall(table)]
        if len(parts) == 1:
            ((schema,),) = query(connection, "SELECT DATABASE()")
            parts = [schema, *parts]
        schemas = query(
            connection,
            "SELECT schema_name FROM information_schema.schemata WHERE schema_name = %s",
            parts[:1],
        )
        return (schemas[0][0] if schemas else parts[0]), parts[1]

    def describe(self, connection: Connection, schema: str, name: str) -> MySQLTarget | None:
        """Read the table; return None if there is none.

        Which tables refer to it is asked for upserts alone, since the server opens every table of
        the database to tell.
        """
        triggers = connection.defer(TRIGGERS[self.dialect.name], [schema, name])
        referring = (
            connection.defer(_REFERENCES, [schema, name]) if self.merge.mode == "upsert" else []
        )
        target = self._read(connection, schema, name)
        return target and replace(
            target,
            constraints=(*target.constraints, *sorted(dict(triggers))),
            triggers=dict(triggers),
            referenced_by=tuple(f"foreign key {key}" for (key,) in referring),
        )

    def _read(self, connection: Connection, schema: str, name: str) -> MySQLTarget | None:
        self._known = read(connection, schema, name, self._known)
        return self._known

    def current(
        self, connection: Connection, known: MySQLTarget, written: Sequence[str]
    ) -> MySQLTarget:
        """Return the target as the running transaction sees it, under its metadata lock.

        Raises ConfigurationError if such rows can no longer be written.
        """
        not_locked = ""
        connection.defer(locking(known.identifier, written))
        try:
            target = self._read(connection, known.schema, known.name)
        except pymysql.Error as error:
            if code_of(error) not in SHAPE:
                raise
            not_locked = error_text(error)
            target = self._read(connection, known.schema, known.name)
        reasons = [*no_innodb(known, target.engine if target else None)]
        if target and not reasons:
            reasons = [*target.unfit(written)] or [not_locked] * bool(not_locked)
        if reasons or not target:
            raise ConfigurationError(
                f"table {known.label} was changed while the query ran: {'; '.join(reasons)}"
            )
        return target

    def column_types(
        self, connection: Connection, schema: str, tables: Sequence[str]
    ) -> ColumnTypes:
        """Read the columns, where the type of a string has its collation behind it."""
        if not tables:
            return {}
        rows = query(
            connection,
            "SELECT table_name, column_name, column_type, coalesce(collation_name, '')"
            " FROM information_schema.columns"
            f" WHERE table_schema = %s AND column_name <> %s AND table_name IN ({marks(tables)})"
            " ORDER BY ordinal_position",
            [schema, ROW, *tables],
        )
        return by_table(
            (table, name, f"{kind} {collation}".rstrip()) for table, name, kind, collation in rows
        )

    # ------------------------------------------------------------------ what is wrong with it
    def problems(self, connection: Connection, target: MySQLTarget, ledger: str) -> Iterable[str]:
        yield from no_innodb(target, target.engine)
        if len(witness_of(ledger)) > _LONGEST_NAME:
            yield (
                f"ledger={ledger!r} leaves no room for the name of its witness: give it a shorter "
                "name"
            )

    def missing_privileges(
        self,
        connection: Connection,
        target: MySQLTarget,
        privileges: Sequence[str],
        ledgers: Iterable[str] = (),
        create: bool = False,
    ) -> Iterator[str]:
        """Yield the privileges that the user lacks, in the words of the server.

        EXPLAIN needs the privileges of the statement that it explains. The sink tries whether
        tables can be made.
        """
        schema = target.schema
        needed = [(target.name, target.names[0], privileges)]
        for name, column, privileges in [
            *needed,
            *((ledger, "transaction_id", LEDGER_PRIVILEGES) for ledger in ledgers),
        ]:
            name = quoted(schema, name)
            column = quoted(column)
            statements = {
                "SELECT": f"SELECT {column} FROM {name} WHERE 1 = 0",
                "INSERT": f"INSERT INTO {name} ({column}) VALUES (NULL)",
                "UPDATE": f"UPDATE {name} SET {column} = {column} WHERE 1 = 0",
                "DELETE": f"DELETE FROM {name} WHERE 1 = 0",
            }
            for privilege in privileges:
                try:
                    query(connection, f"EXPLAIN {statements[privilege]}")
                except pymysql.Error as error:
                    if code_of(error) in DENIED:
                        yield f"GRANT {privilege} ON {name} is missing: {error_text(error)}"
                    elif not connection.open:
                        raise
        probe = quoted(schema, _PROBE)
        create_probe = f"CREATE TABLE IF NOT EXISTS {probe} (x int PRIMARY KEY) ENGINE=InnoDB"
        try:
            for statement in [create_probe, f"DROP TABLE IF EXISTS {probe}"] * create:
                execute(connection, statement)
        except pymysql.Error as error:
            if code_of(error) not in DENIED:
                raise
            yield f"GRANT CREATE, DROP ON {quoted(schema)}.* is missing: {error_text(error)}"

    # ------------------------------------------------------------------ creating and altering
    def declared(self, connection: Connection, field: pa.Field, *, key: bool) -> str:
        return target_type(field.type, key=key)

    def table_options(self, connection: Connection) -> str:
        # otherwise MariaDB before 10.10 gives a timestamp ON UPDATE
        with contextlib.suppress(pymysql.Error):
            execute(connection, "SET SESSION explicit_defaults_for_timestamp = 1")
        # blanks at the end count too
        bytewise = "utf8mb4_nopad_bin" if is_mariadb(connection) else "utf8mb4_0900_bin"
        return f" ENGINE=InnoDB CHARACTER SET utf8mb4 COLLATE {bytewise}"

    def definition(self, connection: Connection, target: MySQLTarget, field: pa.Field) -> str:
        """Write name and type of a nullable column for ADD COLUMN.

        A string gets the table's collation if that is of utf8mb4, which has a place for all
        characters that Spark has.
        """
        kind = target_type(field.type)
        if kind == "longtext" and "CHARSET=utf8mb4" not in target.definition:
            kind += " CHARACTER SET utf8mb4"
        return self.dialect.column(field.name, kind, nullable=True)


def definition(connection: Connection, schema: str, name: str) -> str:
    """Return the CREATE TABLE of a table, without its next AUTO_INCREMENT number.

    Return "" for a table that is not there, or that this user may not read.
    """
    try:
        text: str = query(connection, f"SHOW CREATE TABLE {quoted(schema, name)}")[0][1]
    except pymysql.Error as error:
        if code_of(error) not in {*DENIED, ER.NO_SUCH_TABLE, ER.BAD_DB_ERROR}:
            raise
        return ""
    return re.sub(r" AUTO_INCREMENT=\d+", "", text)


def read(
    connection: Connection, schema: str, name: str, known: MySQLTarget | None = None
) -> MySQLTarget | None:
    """Read the target, without triggers.

    Return None if there is none, or none that this user may see. If the table is still defined as
    in `known`, return that. Raises ConfigurationError if it is not a table.
    """
    text = definition(connection, schema, name)
    if known and text and (known.schema, known.name, known.definition) == (schema, name, text):
        return known
    tables = query(connection, _TABLE, [schema, name])
    if not tables:
        return None
    # as the server writes them: it may not care for capitals
    schema, name, kind, engine, row_format = tables[0]
    if kind not in ("BASE TABLE", "SYSTEM VERSIONED"):
        raise ConfigurationError(
            f"{schema}.{name} is a {kind.lower()}; rows can only go to a table"
        )
    json = [column.replace("``", "`") for column in _JSON.findall(text)]
    rows = query(connection, _COLUMNS, [schema, name])
    columns = tuple(_column(row, json) for row in rows)
    ends = {column for column, *_, expression, _ in rows if expression == "ROW END"}
    uniques, others = _indexes(connection, schema, name, ends, _periods(text))
    constraints = [f"index {index}" for index in others]
    lines = [_JSON.sub("", line).strip(" ,") for line in text.splitlines()]
    constraints += (
        [line for line in lines if _JUDGES.search(line)] if text else ["what cannot be read"]
    )
    # in other row formats a page holds less
    constraints += [f"row format {row_format}"] * (row_format not in ("Dynamic", None))
    return MySQLTarget(
        schema,
        name,
        columns=columns,
        uniques=uniques,
        constraints=tuple(constraints),
        foreign_keys=tuple(_foreign_keys(schema, lines)),
        other_uniques=tuple(
            _of_other_index(index, parts, columns, lines) for index, parts in others.items()
        ),
        engine=engine or "",
        definition=text,
        lacks_characters=lacks_characters(column.collation for column in columns),
    )


def locking(table: str, written: Sequence[str]) -> str:
    """Write a statement that takes the metadata lock of a (quoted) table.

    Until the end of the running transaction nobody can ALTER or DROP the table then. If such rows
    can no longer go in, the statement fails with a code of SHAPE, and locks nothing.
    """
    nulls = ", ".join(["NULL"] * len(written))
    return f"INSERT INTO {table} ({listed(written)}) SELECT {nulls} FROM DUAL WHERE 1 = 0"


def no_innodb(target: MySQLTarget, engine: str | None) -> Iterable[str]:
    """Yield why the table has no transactions: it is gone, or has another engine than InnoDB.

    `engine` is what the table has now; None if it is gone.
    """
    if engine is None:
        yield f"it is gone: create it again as it was, columns {', '.join(target.names)}"
    elif engine.lower() != "innodb":
        yield (
            f"its engine is {engine}, which has no transactions: ALTER TABLE {target.identifier} "
            "ENGINE=InnoDB"
        )


_TABLE = (
    "SELECT table_schema, table_name, table_type, engine, row_format FROM information_schema.tables"
    " WHERE table_schema = %s AND table_name = %s"
)
_COLUMNS = (
    "SELECT column_name, data_type, column_type, is_nullable = 'YES',"
    # MariaDB writes the word for no default, and texts in quotes
    " column_default IS NOT NULL /*M! AND column_default <> 'NULL' */"
    " OR extra LIKE '%%auto_increment%%',"
    " coalesce(generation_expression, '') <> '',"
    " extra LIKE '%%auto_increment%%' OR coalesce(column_default, '') REGEXP"
    " '(uuid|rand|nextval)[(]',"
    " coalesce(numeric_precision, 0), numeric_scale, coalesce(datetime_precision, 0),"
    " coalesce(character_octet_length, 0), coalesce(collation_name, ''),"
    " coalesce(generation_expression, ''), extra"
    " FROM information_schema.columns"
    " WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position"
)
_JUDGES = re.compile(
    r" CHECK \(|GENERATED ALWAYS|FOREIGN KEY|PARTITION BY|PERIOD FOR|DEFAULT \(.*`|KEY .*[(,]\("
)
"""The last two alternatives are a default out of other columns, and an index over an expression."""
_IDENTIFIER = "`((?:[^`]|``)+)`"
_FOREIGN_KEY = re.compile(
    rf"CONSTRAINT {_IDENTIFIER} FOREIGN KEY \((.+?)\)"
    rf" REFERENCES (?:{_IDENTIFIER}\.)?{_IDENTIFIER} \((.+?)\)"
)
_JSON = re.compile(r" CHECK \(json_valid\(`((?:[^`]|``)+)`\)\)")
"""The constraint that makes a text JSON in MariaDB."""
_ON_UPDATE = re.compile(r"\bon update (\w+(?:\(\d*\))?)", re.IGNORECASE)
_PERIOD = re.compile(rf"PERIOD FOR {_IDENTIFIER} \({_IDENTIFIER}, {_IDENTIFIER}\)")
_WITHOUT_OVERLAPS = re.compile(
    rf"KEY(?: {_IDENTIFIER})? \((?:.*,)?{_IDENTIFIER} WITHOUT OVERLAPS\)"
)


def _column(row: Row, json: Collection[str]) -> MySQLColumn:
    name, kind, declared, *facts, precision, scale, digits, length, collation, _, extra = row
    nullable, has_default, generated, counter = map(bool, facts)
    numbers = int(precision), None if scale is None else int(scale), int(digits), int(length)
    kind = "json" if name in json else kind.lower()
    members = members_of(declared) if kind == "enum" else ()
    renewed = _ON_UPDATE.search(extra or "")
    return MySQLColumn(
        name,
        kind,
        declared,
        nullable,
        has_default,
        generated,
        counter,
        *numbers,
        collation,
        members,
        renewed[1] if renewed else "",
    )


def _foreign_keys(database: str, lines: Iterable[str]) -> Iterator[ForeignKey]:
    """Read the foreign keys out of the lines of CREATE TABLE.

    A foreign key to a table of the same database does not name the database.
    """
    for match in filter(None, map(_FOREIGN_KEY.match, lines)):
        name, columns, schema, table, referred = match.groups()
        lists = (
            tuple(map(_plain, re.findall(_IDENTIFIER, names))) for names in (columns, referred)
        )
        yield ForeignKey(_plain(name), _plain(schema or database), _plain(table), *lists)


def _plain(quoted: str) -> str:
    return quoted.replace("``", "`")


def _periods(definition: str) -> dict[str, tuple[str, str]]:
    """Return, for each index WITHOUT OVERLAPS, the columns where its period begins and ends.

    MariaDB has such indexes, and its catalog shows these columns as any other columns of the index.
    """
    unquoted = [[_plain(name) for name in found] for found in _PERIOD.findall(definition)]
    bounds = {period: (begin, end) for period, begin, end in unquoted}
    indexes = [[_plain(name) for name in found] for found in _WITHOUT_OVERLAPS.findall(definition)]
    return {index or "PRIMARY": bounds[period] for index, period in indexes if period in bounds}


def _indexes(
    connection: Connection,
    schema: str,
    name: str,
    ends: Collection[str],
    periods: Mapping[str, tuple[str, str]],
) -> tuple[tuple[Unique, ...], dict[str, list[str]]]:
    """Return the unique indexes over whole columns, and the other unique indexes.

    Only the target can tell the verdict of the others. They come with the columns of which they
    have a prefix; an index without such columns is over expressions. `ends` are columns in which a
    versioned table has the end of a row: MariaDB adds them to each unique index, for the rows of
    the past, and all present rows have the same value there. `periods` are the result of
    `_periods`.
    """
    rows = query(
        connection,
        "SELECT index_name, column_name, sub_part, index_type FROM information_schema.statistics"
        " WHERE table_schema = %s AND table_name = %s AND non_unique = 0"
        " ORDER BY index_name, seq_in_index",
        [schema, name],
    )
    columns: dict[str, list[str | None]] = {}
    hashes = {index for index, _, _, kind in rows if kind == "HASH"}
    """MariaDB has such indexes of strings that are longer than a sort compares, so an upsert by
    them would take two keys for one."""
    for index, column, part, _ in rows:
        if column not in ends:
            # None: a prefix, or an expression
            columns.setdefault(index, []).append(column if part is None else None)
    uniques = tuple(
        Unique(
            index,
            tuple(filter(None, of)),
            index not in hashes and index not in periods,
            period=periods.get(index),
        )
        for index, of in columns.items()
        if None not in of
    )
    special = [index for index, of in columns.items() if None in of]
    return uniques, {
        index: [column for of, column, part, _ in rows if of == index and part] for index in special
    }


def _of_other_index(
    index: str, prefixes: Collection[str], columns: Iterable[MySQLColumn], lines: Iterable[str]
) -> tuple[tuple[str, ...], str]:
    """Return the columns that a unique index over prefixes or expressions reads, and what it is."""
    _, _, parts = next((line for line in lines if f"KEY {quoted(index)} (" in line), "").partition(
        " ("
    )
    reads = tuple(c.name for c in columns if c.name in prefixes or quoted(c.name) in parts)
    return (
        reads,
        f"{index} is over {'a prefix of ' + ', '.join(prefixes) if prefixes else 'an expression'}",
    )
