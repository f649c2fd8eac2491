"""What the server says about the target: columns, constraints, indexes, rights."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from psycopg import errors, sql

from sinks.errors import ConfigurationError, SchemaMismatch
from sinks.postgres.connection import Connection, row
from sinks.postgres.types import PostgresColumn
from sinks.sql import target as targets
from sinks.sql.target import Unique

_KINDS = {
    "v": "a view",
    "m": "a materialized view",
    "f": "a foreign table, whose rows do not belong to the transaction here",
    "S": "a sequence",
    "i": "an index",
    "I": "an index",
    "c": "a composite type",
    "t": "a TOAST table",
}


@dataclass(frozen=True)
class Check:
    """A CHECK constraint and the columns that it reads."""

    name: str
    expression: str
    columns: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PostgresTarget(targets.Target[PostgresColumn]):
    """A table, or partitioned table, that rows go to."""

    oid: int
    declarations: dict[str, str]
    always_identity: frozenset[str]
    checks: tuple[Check, ...]
    row_security: bool
    rules: tuple[str, ...] = ()
    """On INSERT. COPY passes them over."""
    heirs: tuple[str, ...] = ()
    """Tables that inherit from it and are no partitions: no index of it binds their rows."""

    @property
    def judges(self) -> bool:
        return bool(super().judges or self.checks)

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.name)

    def overriding(self, written: Iterable[str]) -> str:
        """The clause that lets INSERT write identity columns that are GENERATED ALWAYS, as COPY does."""
        return " OVERRIDING SYSTEM VALUE" if self.always_identity & set(written) else ""


def locate(connection: Connection, table: str) -> tuple[str, str]:
    """Schema and name of a table as the user wrote it: `orders`, `shop.orders`, `"Shop"."Orders"`. It need not exist.

    Raises ConfigurationError if it is no table name, or there is no schema for it.
    """
    try:
        parts, schema, name = row(
            connection,
            "SELECT parse_ident(%s), nspname::text, relname::text FROM (SELECT to_regclass(%s)::oid AS oid) AS named"
            " LEFT JOIN (pg_class c JOIN pg_namespace n ON n.oid = relnamespace) ON c.oid = named.oid",
            table,
            table,
        )
    except (errors.InvalidParameterValue, errors.InvalidName, errors.FeatureNotSupported, errors.SyntaxError) as error:
        raise ConfigurationError(
            f"{table!r} is not a table name ({error.diag.message_primary}); write name or schema.name, with "
            'double quotes around a part that has capitals or special characters: shop."Daily Orders"'
        ) from error
    if len(parts) > 2:
        raise ConfigurationError(f"{table!r} has {len(parts)} parts; write name or schema.name")
    if name is not None:
        return schema, name
    if len(parts) == 2:
        return parts[0], parts[1]
    (schema,) = row(connection, "SELECT current_schema()::text")
    if schema is None:
        raise ConfigurationError(f"table {table!r}: no schema of the search_path exists; write schema.name")
    return schema, parts[0]


def describe(connection: Connection, schema: str, name: str) -> PostgresTarget | None:
    """Read the target from the catalog; None if there is none. Raises ConfigurationError if it is not a table."""
    found = connection.execute(
        "SELECT c.oid::bigint, relkind::text, relpersistence::text, row_security_active(c.oid)"
        " FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = %s AND relname = %s",
        [schema, name],
    ).fetchone()
    if found is None:
        return None
    oid, kind, persistence, row_security = found
    if kind not in "rp":
        raise ConfigurationError(f"{schema}.{name} is {_KINDS.get(kind, 'not a table')}; rows can only go to a table")
    if persistence == "t":
        raise ConfigurationError(f"{schema}.{name} is a temporary table; no other session can see it")
    columns, declarations, always = _columns(connection, oid)
    uniques, special = _indexes(connection, oid)
    constraints = [*special, *(f"generated column {column.name}" for column in columns if column.generated)]
    constraints += [row[0] for row in connection.execute(_CONSTRAINTS, {"oid": oid}).fetchall()]
    if row_security:
        constraints.append("row-level security")
    checks = connection.execute(
        "SELECT conname::text, pg_get_expr(conbin, conrelid), ARRAY(SELECT attname::text FROM pg_attribute"
        " WHERE attrelid = conrelid AND attnum = ANY(conkey)) FROM pg_constraint"
        " WHERE conrelid = %s AND contype = 'c' AND convalidated AND NOT coalesce(0 >= ANY(conkey), false)"
        " ORDER BY conname",
        [oid],
    ).fetchall()
    references = connection.execute(
        "SELECT format('foreign key %%s of %%s', conname, conrelid::regclass) FROM pg_constraint"
        " WHERE contype = 'f' AND confrelid = %s AND conparentid = 0 ORDER BY 1",
        [oid],
    ).fetchall()
    rules = (
        "SELECT rulename::text FROM pg_rewrite WHERE ev_class = %s AND ev_type = '3' AND ev_enabled <> 'D' ORDER BY 1"
    )
    heirs = (
        "SELECT inhrelid::regclass::text FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid"
        " WHERE inhparent = %s AND NOT relispartition ORDER BY 1"
    )
    return PostgresTarget(
        schema,
        name,
        columns,
        uniques,
        tuple(constraints),
        tuple(row[0] for row in references),
        oid=oid,
        declarations=declarations,
        always_identity=always,
        checks=tuple(Check(check, expression, tuple(reads)) for check, expression, reads in checks),
        row_security=row_security,
        rules=tuple(row[0] for row in connection.execute(rules, [oid]).fetchall()),
        heirs=tuple(row[0] for row in connection.execute(heirs, [oid]).fetchall()),
    )


_CONSTRAINTS = """
WITH relations AS (SELECT %(oid)s::oid AS oid UNION SELECT relid::oid FROM pg_partition_tree(%(oid)s::oid::regclass))
SELECT 'foreign key ' || conname FROM pg_constraint, relations
 WHERE conrelid = relations.oid AND contype = 'f' AND conparentid = 0
UNION ALL
SELECT 'exclusion constraint ' || conname FROM pg_constraint, relations
 WHERE conrelid = relations.oid AND contype = 'x' AND conparentid = 0
UNION ALL
SELECT 'check ' || conname || ' of partition ' || conrelid::regclass FROM pg_constraint, relations
 WHERE conrelid = relations.oid AND contype = 'c' AND coninhcount = 0 AND conrelid <> %(oid)s
UNION ALL
SELECT 'check ' || conname || ' of the whole row' FROM pg_constraint
 WHERE conrelid = %(oid)s AND contype = 'c' AND 0 >= ANY(conkey)
UNION ALL
SELECT 'check ' || conname || ' (NOT VALID)' FROM pg_constraint
 WHERE conrelid = %(oid)s AND contype = 'c' AND NOT convalidated
UNION ALL
SELECT 'index ' || c.relname || ' of partition ' || indrelid::regclass
  FROM pg_index JOIN pg_class c ON c.oid = indexrelid JOIN relations ON indrelid = relations.oid
 WHERE indisunique AND indrelid <> %(oid)s AND NOT c.relispartition
UNION ALL
SELECT 'trigger ' || tgname FROM pg_trigger, relations
 WHERE tgrelid = relations.oid AND NOT tgisinternal AND tgenabled <> 'D' AND tgparentid = 0
UNION ALL
SELECT 'rule ' || rulename FROM pg_rewrite WHERE ev_class = %(oid)s AND ev_enabled <> 'D'
UNION ALL
SELECT 'partitions of ' || partrelid::regclass FROM pg_partitioned_table, relations
 WHERE partrelid = relations.oid AND partdefid = 0
"""


# A domain by the type that it is of, an array by its element's; both may be there several times over. Modifiers are
# those of the innermost domain (domain.c, typecmds.c), or of the column.
_COLUMNS = """
WITH RECURSIVE inner_type AS (
SELECT attnum, atttypid AS type, atttypmod AS modifier, 0 AS depth, 0::oid AS element, false AS required
  FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped
UNION ALL
SELECT attnum, CASE typtype WHEN 'd' THEN typbasetype ELSE typelem END,
       CASE WHEN typtype = 'd' AND modifier = -1 THEN typtypmod ELSE modifier END, depth + 1,
       CASE typtype WHEN 'd' THEN element ELSE typelem END,
       required OR typtype = 'd' AND element = 0 AND typnotnull
  FROM inner_type JOIN pg_type t ON t.oid = type
 WHERE typtype = 'd' OR typcategory = 'A' AND typelem <> 0 AND element = 0
)
SELECT DISTINCT ON (attnum) attname::text, CASE WHEN element <> 0 THEN '_' ELSE '' END || b.typname,
       format_type(atttypid, atttypmod), NOT (attnotnull OR required),
       atthasdef OR attidentity <> '' OR t.typdefault IS NOT NULL, attgenerated <> '',
       coalesce(e.typtype, b.typtype)::text, element::bigint, format_type(b.oid, modifier), t.typtype = 'd',
       CASE WHEN attcollation <> t.typcollation THEN format(' COLLATE %%I.%%I', nspname, collname) ELSE '' END,
       attidentity = 'a'
  FROM inner_type JOIN pg_attribute a USING (attnum) JOIN pg_type t ON t.oid = atttypid JOIN pg_type b ON b.oid = type
  LEFT JOIN pg_type e ON e.oid = element
  LEFT JOIN (pg_collation c JOIN pg_namespace n ON n.oid = collnamespace) ON c.oid = attcollation
 WHERE attrelid = %s ORDER BY attnum, depth DESC
"""


def _columns(connection: Connection, oid: int) -> tuple[tuple[PostgresColumn, ...], dict[str, str], frozenset[str]]:
    rows = connection.execute(_COLUMNS, [oid, oid]).fetchall()
    columns = tuple(PostgresColumn(*row[:10]) for row in rows)
    return columns, {row[0]: row[2] + row[10] for row in rows}, frozenset(row[0] for row in rows if row[11])


def lock(connection: Connection, target: PostgresTarget) -> None:
    """Nobody changes the table until the caller's transaction ends: the lock of an INSERT."""
    connection.execute(sql.SQL("LOCK TABLE ONLY {} IN ROW EXCLUSIVE MODE").format(target.identifier))


def current(connection: Connection, target: PostgresTarget) -> PostgresTarget:
    """The target with the columns that it has now. Raises ConfigurationError if it is no table any more."""
    found = connection.execute(
        "SELECT c.oid, relkind::text FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
        " WHERE nspname = %s AND relname = %s",
        [target.schema, target.name],
    ).fetchone()
    if found is None or found[1] not in "rp":
        what = "gone" if found is None else f"{_KINDS.get(found[1], 'no table')} now"
        raise ConfigurationError(f"table {target.label} changed while the query ran: it is {what}")
    columns, declarations, always = _columns(connection, found[0])
    return replace(target, oid=found[0], columns=columns, declarations=declarations, always_identity=always)


def changed(mismatch: SchemaMismatch, then: Iterable[PostgresColumn], now: Iterable[PostgresColumn]) -> SchemaMismatch:
    """The same, with how the columns differ from what they were when the query looked at them first."""
    before, after = ({column.name: column for column in columns} for columns in (then, now))
    told = [f'column "{name}" is gone' for name in before if name not in after]
    told += [f'column "{name}" is new' for name in after if name not in before]
    for name in before:
        if name in after and before[name] != after[name]:
            a, b = (_declared(columns[name]) for columns in (before, after))
            told.append(f'column "{name}" was {a} and is {b}')
    return SchemaMismatch(f"{mismatch}. The table changed while the query ran: {', '.join(told)}")


def _declared(column: PostgresColumn) -> str:
    return column.declared + ("" if column.nullable else " NOT NULL") + (" with default" if column.has_default else "")


def foreign_partitions(connection: Connection, target: PostgresTarget) -> list[str]:
    """Partitions whose rows a foreign server commits by itself."""
    rows = connection.execute(
        "SELECT c.oid::regclass::text FROM pg_partition_tree(%s::oid::regclass) JOIN pg_class c ON c.oid = relid"
        " WHERE relkind = 'f' ORDER BY 1",
        [target.oid],
    ).fetchall()
    return [name for (name,) in rows]


def _indexes(connection: Connection, oid: int) -> tuple[tuple[Unique, ...], list[str]]:
    """Unique indexes over plain columns, and the names of those indexes whose verdict only the target can tell."""
    rows = connection.execute(
        "SELECT c.relname::text,"
        " ARRAY(SELECT attname::text FROM unnest(indkey[0:indnkeyatts - 1]) WITH ORDINALITY AS k (n, i)"
        " JOIN pg_attribute ON attrelid = indrelid AND attnum = n ORDER BY i),"
        " indisunique, indimmediate AND indisvalid, indexprs IS NOT NULL OR indpred IS NOT NULL,"
        " coalesce((to_jsonb(pg_index) ->> 'indnullsnotdistinct')::boolean, false)"  # from PostgreSQL 15 on
        " FROM pg_index JOIN pg_class c ON c.oid = indexrelid WHERE indrelid = %s AND NOT indisexclusion ORDER BY 1",
        [oid],
    ).fetchall()
    uniques = tuple(
        Unique(name, tuple(columns), arbiter)
        for name, columns, unique, arbiter, special, nulls_equal in rows
        if unique and not special and not nulls_equal
    )
    return uniques, [f"index {row[0]}" for row in rows if row[4] or (row[2] and row[5])]


def missing_rights(
    connection: Connection, schema: str, table: str, rights: Collection[str], *, create: bool
) -> list[str]:
    """The statements that an owner has to run so that this role may do what the sink does."""
    place, name = (sql.Identifier(*names).as_string(connection) for names in ((schema,), (schema, table)))
    role, usage, may_create, missing = row(
        connection,
        "SELECT quote_ident(current_user), has_schema_privilege(place, 'USAGE'), has_schema_privilege(place, 'CREATE'),"
        " CASE WHEN has_schema_privilege(place, 'USAGE') THEN ARRAY(SELECT wanted FROM unnest(%s::text[]) AS wanted"
        " WHERE NOT has_table_privilege(%s, wanted)) END FROM (SELECT %s::text AS place) AS named",
        list(rights),
        name,
        schema,
    )
    if not usage:
        return [f"GRANT USAGE ON SCHEMA {place} TO {role}"]
    statements = [f"GRANT CREATE ON SCHEMA {place} TO {role}"] if create and not may_create else []
    if missing:
        statements.append(f"GRANT {', '.join(missing)} ON {name} TO {role}")
    return statements
