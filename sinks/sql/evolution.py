"""What a table lacks for the rows of a batch, columns and room in those that it has; and how a database alters it: the
statements, what each locks, and whether it rewrites all rows.

Sources: PostgreSQL's manual, ALTER TABLE, "Notes" (a type that is binary coercible and has no other limits needs no
rewrite; `varchar_support` and `numeric_support` of its source say which limits those are); MySQL's manual, "Online DDL
Operations" (innodb-online-ddl-operations, Column Operations); MariaDB's documentation, "InnoDB Online DDL Operations
with the INSTANT Alter Algorithm". Of PostgreSQL and MariaDB tests compare with what the server does.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pyarrow as pa
import pyarrow.types as at

from sinks.diagnosis import VARCHAR, SchemaChange
from sinks.errors import TransactionBlocked
from sinks.sql.server import Server

SchemaEvolution = Literal["none", "add", "widen"]
STEPS: tuple[SchemaEvolution, ...] = ("none", "add", "widen")
"""Each does what those before it do."""

_BITS = {
    "tinyint": 8,
    "smallint": 16,
    "mediumint": 24,
    "int": 32,
    "integer": 32,
    "bigint": 64,
    "real": 32,
    "float": 32,  # MySQL's; PostgreSQL's catalog has no such name
    "double": 64,
    "double precision": 64,
}
_DECIMALS = ("decimal", "numeric")
_TEXTS = ("varchar", "character varying")
_NAMES = "|".join(sorted([*_BITS, *_DECIMALS, *_TEXTS], key=len, reverse=True))
_TYPE = re.compile(rf"({_NAMES})(?: ?\((\d+)(?:, ?(\d+))?\))?((?: .*)?)", re.IGNORECASE)


@dataclass(frozen=True)
class Shape:
    """What a type of numbers or text has room for: `size` is in bits, digits before the point, or characters."""

    family: Literal["integer", "float", "decimal", "text"]
    size: int
    scale: int = 0

    @property
    def precision(self) -> int:
        return self.size + self.scale

    def widened(self, needed: Shape) -> Shape | None:
        """With room for both; None if there is already, or another kind of type is needed."""
        wider = Shape(self.family, max(self.size, needed.size), max(self.scale, needed.scale))
        return None if self.family != needed.family or wider == self else wider


def shape_of(declared: str) -> Shape | None:
    """Of a type in SQL. None for one that is never widened: of another kind, without a limit, `unsigned` and the like,
    or MySQL's tinyint(1), which is a boolean."""
    shape, more = _parsed(declared)
    return None if more else shape


def _parsed(declared: str) -> tuple[Shape | None, str]:
    """And what stands behind it: `unsigned`, a collation."""
    match = _TYPE.fullmatch(declared)
    if match is None:
        return None, ""
    name, first, second, more = match[1].lower(), match[2], match[3], match[4]
    if name in _DECIMALS:
        scale = int(second or 0)
        return (Shape("decimal", int(first) - scale, scale) if first else None), more
    if name in _TEXTS:
        return (Shape("text", int(first)) if first else None), more
    if name.endswith("int") or name == "integer":
        return (None if (name, first) == ("tinyint", "1") else Shape("integer", _BITS[name])), more
    return (None if first else Shape("float", _BITS[name])), more


def holds(now: str, then: str) -> bool:
    """Whether a column of the type `now` takes, as they are, all values that were written for the type `then`."""
    if now == then:
        return True
    (wide, more), (narrow, before) = _parsed(now), _parsed(then)
    if wide is None or narrow is None or more != before or wide.family != narrow.family:
        return False
    return narrow.widened(wide) == wide


def needed(field: pa.Field) -> Shape | None:
    """What the values of a batch's column need at most. Strings need no length, unless Spark knows one."""
    kind = field.type
    if at.is_signed_integer(kind):
        return Shape("integer", kind.bit_width)
    if at.is_floating(kind):
        return Shape("float", max(32, kind.bit_width))
    if at.is_decimal(kind):
        return Shape("decimal", kind.precision - kind.scale, kind.scale)
    known = (field.metadata or {}).get(VARCHAR.encode())
    return shape_of(known.decode()) if known else None


def lacking(batch: Iterable[pa.Field], table: Iterable[str]) -> Iterator[pa.Field]:
    """Fields that the table has no column for. One that differs from a column by capitals alone is a mistake more often
    than not, and left to be told."""
    known = {name.lower() for name in table}
    for field in batch:
        if field.name.lower() not in known:
            known.add(field.name.lower())
            yield field


# ---------------------------------------------------------------------- statements
# A prepared transaction is told by the lock on its own number: it has no process any more.
_HOLDERS = """
SELECT DISTINCT CASE WHEN gid IS NULL
       THEN concat('session ', l.pid, ' of ', usename, ' (', application_name, ', ', state, ') since ',
                   date_trunc('second', xact_start))
       ELSE concat('the prepared transaction ', gid, ' of ', owner, ' since ', date_trunc('second', prepared)) END
  FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
  LEFT JOIN (pg_locks own JOIN pg_prepared_xacts ON transactionid = transaction)
    ON own.virtualtransaction = l.virtualtransaction AND own.pid IS NULL AND l.pid IS NULL
 WHERE l.locktype = 'relation' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
   AND (l.relation = to_regclass(%s) OR l.relation IN (SELECT relid FROM pg_partition_tree(to_regclass(%s))))
 ORDER BY 1
"""
_INTEGERS = {8: "tinyint", 16: "smallint", 24: "mediumint", 32: "int", 64: "bigint"}


@dataclass(frozen=True)
class Existing:
    """A column that may be widened: its type, and all that a statement that alters it has to say again."""

    declared: str
    more: str = ""
    octets: int = 1
    """Bytes of a character."""
    copied: range = range(0)
    """Lengths in bytes of texts that take one byte for their length, and are copied if that becomes two."""


class Ddl:
    """Of a database of which nothing more is known than that it has ADD COLUMN. `table` is quoted."""

    WIDENS: ClassVar[bool] = False
    ADD: ClassVar[str] = "ADD COLUMN"
    ADD_LOCKS: ClassVar[str] = "what the database locks for ALTER TABLE: see its manual"

    def __init__(self, server: Server) -> None:
        self.server = server

    @contextmanager
    def alone(self, connection: Any, schema: str, name: str) -> Iterator[None]:
        """Nobody else alters the table meanwhile, as far as the database can say so."""
        with self.server.transaction(connection):
            yield

    def add(self, connection: Any, table: str, column: str, definition: str) -> SchemaChange:
        statement = f"ALTER TABLE {table} {self.ADD} {definition}"
        return SchemaChange(column, statement, "add", self.ADD_LOCKS, self._adding_rewrites(connection, table))

    def _adding_rewrites(self, connection: Any, table: str) -> bool:
        return False

    def existing(self, connection: Any, schema: str, name: str) -> Mapping[str, Existing]:
        """The columns that `widen` takes."""
        return {}

    def widen(self, table: str, column: str, existing: Existing, before: Shape, to: Shape) -> SchemaChange | None:
        """None if the database has no such type."""
        return None

    def holders(self, connection: Any, schema: str, name: str) -> list[str]:
        """Who may hold a lock on the table now."""
        return []


class SqliteDdl(Ddl):
    ADD_LOCKS = "the database for a moment: only its schema is written"


class ShortAddDdl(Ddl):
    """Oracle and SQL Server have no word COLUMN there."""

    ADD = "ADD"


class PostgresDdl(Ddl):
    WIDENS = True
    ADD = "ADD COLUMN IF NOT EXISTS"
    ADD_LOCKS = "ACCESS EXCLUSIVE for a moment: only the catalog is written"

    @contextmanager
    def alone(self, connection: Any, schema: str, name: str) -> Iterator[None]:
        with self.server.transaction(connection):
            self.server.execute(connection, f"LOCK TABLE {self.server.quote(schema, name)} IN ACCESS EXCLUSIVE MODE")
            yield

    def existing(self, connection: Any, schema: str, name: str) -> Mapping[str, Existing]:
        """With the collation, which ALTER TYPE sets back to the type's unless it is said again."""
        rows = self.server.query(
            connection,
            "SELECT attname, format_type(atttypid, atttypmod), CASE WHEN attcollation <> typcollation"
            " THEN concat(' COLLATE ', quote_ident(nspname), '.', quote_ident(collname)) ELSE '' END"
            " FROM pg_attribute JOIN pg_type t ON t.oid = atttypid"
            " LEFT JOIN (pg_collation c JOIN pg_namespace n ON n.oid = collnamespace) ON c.oid = attcollation"
            " WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped AND attgenerated = ''"
            " ORDER BY attnum",
            [self.server.quote(schema, name)],
        )
        return {str(column): Existing(declared, collation) for column, declared, collation in rows}

    def widen(self, table: str, column: str, existing: Existing, before: Shape, to: Shape) -> SchemaChange | None:
        kind = {
            "integer": "integer" if to.size == 32 else _INTEGERS.get(to.size, ""),
            "float": "double precision",
            "decimal": f"numeric({to.precision},{to.scale})",
            "text": f"varchar({to.size})",
        }[to.family]
        rewrites = to.family in ("integer", "float") or to.scale != before.scale
        locks = (
            "ACCESS EXCLUSIVE until all rows and indexes are rewritten: nobody can read or write the table meanwhile"
            if rewrites
            else self.ADD_LOCKS
        )
        quoted = self.server.quote(column)
        statement = f"ALTER TABLE {table} ALTER COLUMN {quoted} TYPE {kind}{existing.more}"
        return SchemaChange(column, statement, "widen", locks, rewrites)

    def holders(self, connection: Any, schema: str, name: str) -> list[str]:
        table = self.server.quote(schema, name)
        rows = self.server.query(connection, _HOLDERS, [table, table])
        return [str(text) for (text,) in rows]


class MySqlDdl(Ddl):
    """Of MySQL and MariaDB. DDL commits, so each statement is a step of its own."""

    WIDENS = True
    ADD_LOCKS = "the table's metadata for a moment: only the dictionary is written (ALGORITHM=INSTANT)"

    @contextmanager
    def alone(self, connection: Any, schema: str, name: str) -> Iterator[None]:
        """Among sinks: MySQL's LOCK TABLES takes a right of its own, and ends with the ALTER's commit."""
        lock = f"tpc alter {hashlib.sha256(self.server.quote(schema, name).encode()).hexdigest()[:20]}"
        ((got,),) = self.server.query(connection, "SELECT GET_LOCK(%s, @@lock_wait_timeout)", [lock])
        if not got:
            raise TransactionBlocked(f"another driver has been altering the table {name} for longer than lock_timeout")
        try:
            yield
        finally:
            with contextlib.suppress(Exception):  # it ends with the connection
                self.server.query(connection, "SELECT RELEASE_LOCK(%s)", [lock])

    def _adding_rewrites(self, connection: Any, table: str) -> bool:
        """In a compressed table, or one with a full-text index, which are rebuilt."""
        text = self._definition(connection, table)
        return "ROW_FORMAT=COMPRESSED" in text or "  FULLTEXT " in text

    def _definition(self, connection: Any, table: str) -> str:
        ((_, text, *_),) = self.server.query(connection, f"SHOW CREATE TABLE {table}")
        return str(text)

    def existing(self, connection: Any, schema: str, name: str) -> Mapping[str, Existing]:
        """What follows the type in SHOW CREATE TABLE is said again, since MODIFY drops what is not. A column that it
        writes in more than one line, or with a backslash, is left out."""
        table = self.server.quote(schema, name)
        rows = self.server.query(
            connection,
            "SELECT column_name, column_type, coalesce(character_octet_length, 0),"
            " coalesce(character_maximum_length, 0) FROM information_schema.columns"
            " WHERE table_schema = coalesce(nullif(%s, ''), database()) AND table_name = %s"
            " ORDER BY ordinal_position",
            [schema, name],
        )
        lines = self._definition(connection, table).splitlines()
        ((version,),) = self.server.query(connection, "SELECT VERSION()")
        copied = range(128 if "mariadb" in str(version).lower() else 0, 256)
        found = {}
        for column, declared, octets, length in rows:
            begin = f"  {_ticked(column)} {declared}"
            for line in lines:
                more = line.removeprefix(begin).removesuffix(",")
                if line.startswith(begin) and "\\" not in more and more.count("'") % 2 == 0:
                    found[str(column)] = Existing(declared, more, int(octets) // (int(length) or 1) or 1, copied)
        return found

    def widen(self, table: str, column: str, existing: Existing, before: Shape, to: Shape) -> SchemaChange | None:
        kind = {
            "integer": _INTEGERS.get(to.size, ""),
            "float": "double",
            "decimal": f"decimal({to.precision},{to.scale})" if to.precision <= 65 and to.scale <= 30 else "",
            "text": f"varchar({to.size})",
        }[to.family]
        if not kind:
            return None
        stays = before.size * existing.octets not in existing.copied or to.size * existing.octets < 256
        in_place = to.family == "text" and stays
        locks = (
            "the table's metadata for a moment: only the dictionary is written (ALGORITHM=INPLACE or INSTANT)"
            if in_place
            else "writers until all rows are copied (ALGORITHM=COPY; MariaDB from 11.2 on lets them write)"
        )
        statement = f"ALTER TABLE {table} MODIFY COLUMN {_ticked(column)} {kind}{existing.more}"
        return SchemaChange(column, statement, "widen", locks, not in_place)

    def holders(self, connection: Any, schema: str, name: str) -> list[str]:
        """Open transactions of the whole server, of any table: no right and no setting is sure to tell more. Those that
        are not prepared take the right PROCESS."""
        branches = [row[3] for row in self.server.query(connection, "XA RECOVER")]
        holders = [f"the prepared branch {b.decode() if isinstance(b, bytes) else b}" for b in branches]
        try:
            sessions = self.server.query(
                connection,
                "SELECT trx_mysql_thread_id, trx_started FROM information_schema.innodb_trx"
                " WHERE trx_mysql_thread_id NOT IN (0, CONNECTION_ID())",
            )
        except Exception:
            if not holders:
                raise
            sessions = []
        return holders + [f"session {number} with a transaction since {since}" for number, since in sessions]


DDL: Mapping[str, type[Ddl]] = {
    "sqlite": SqliteDdl,
    "postgresql": PostgresDdl,
    "mysql": MySqlDdl,
    "mariadb": MySqlDdl,
    "oracle": ShortAddDdl,
    "mssql": ShortAddDdl,
}
"""By SQLAlchemy's name for the kind of database; `Ddl` for others."""


def _ticked(column: str) -> str:
    """As SHOW CREATE TABLE writes it, also where it needs no quotes."""
    return "`" + column.replace("`", "``") + "`"
