"""PostgreSQL's description of the target: columns, constraints, indexes and privileges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pyarrow as pa
from psycopg import errors, sql

from sinks.errors import ConfigurationError, SchemaMismatch
from sinks.postgres.columns import Check, PostgresColumn, PostgresTarget, SpecialUnique, target_type
from sinks.postgres.connection import Connection, Rows, row
from sinks.postgres.server import PostgresServer
from sinks.sql.catalog import LEDGER_PRIVILEGES, Catalog, ColumnTypes, by_table
from sinks.sql.databases import (
    HOMES,
    POSTGRES_FOREIGN_KEYS,
    POSTGRES_OBSTACLES,
    POSTGRES_PARTITIONS,
)
from sinks.sql.server import ambiguous
from sinks.sql.table import ForeignKey, Unique

_LEDGER_BYTES = 62
"""The most bytes that the name of a ledger may have. The name of its witness is longer."""


class PostgresCatalog(Catalog[Connection, PostgresTarget]):
    NO_TABLE_HINT = " (a name with capitals needs double quotes)"

    server: PostgresServer

    def locate(self, connection: Connection, table: str) -> tuple[str, str]:
        """Find schema and name of a table as the user wrote it.

        The user may write `orders`, `shop.orders` or `"Shop"."Orders"`. The table need not exist.
        Raises ConfigurationError if this is no table name, or there is no schema for it.
        """
        try:
            (parts,) = row(connection, "SELECT parse_ident(%s)", table)
        except (
            errors.InvalidParameterValue,
            errors.InvalidName,
            errors.FeatureNotSupported,
            errors.SyntaxError,
        ) as error:
            raise ConfigurationError(
                f"{table!r} is not a table name ({error.diag.message_primary}); write name or "
                "schema.name, with double quotes around a part that has capitals or special "
                'characters: shop."Daily Orders"'
            ) from error
        if len(parts) > 2:
            raise ConfigurationError(f"{table!r} has {len(parts)} parts; write name or schema.name")
        if len(parts) == 2:
            return parts[0], parts[1]
        schemas = [schema for (schema,) in connection.execute(HOMES, parts).fetchall()]
        if len(schemas) > 1:
            raise ambiguous(table, schemas)
        schema = schemas[0] if schemas else row(connection, "SELECT current_schema()::text")[0]
        if schema is None:
            raise ConfigurationError(
                f"table {table!r}: no schema of the search_path exists; write schema.name"
            )
        return schema, parts[0]

    def describe(self, connection: Connection, schema: str, name: str) -> PostgresTarget | None:
        with self.server.reading(connection):
            return describe(connection, schema, name)

    def column_types(
        self, connection: Connection, schema: str, tables: Sequence[str]
    ) -> ColumnTypes:
        rows = connection.execute(
            "SELECT relname::text, attname::text, format_type(atttypid, atttypmod)"
            " FROM pg_attribute"
            " JOIN pg_class c ON c.oid = attrelid JOIN pg_namespace n ON n.oid = relnamespace"
            " WHERE nspname = %s AND relname = ANY(%s) AND attnum > 0 AND NOT attisdropped"
            " ORDER BY attnum",
            [schema, list(tables)],
        ).fetchall()
        return by_table(rows)

    def problems(
        self, connection: Connection, target: PostgresTarget, ledger: str
    ) -> Iterable[str]:
        yield from target.unwritable
        if len(ledger.encode()) > _LEDGER_BYTES:
            yield (
                f"ledger={ledger!r} is cut by PostgreSQL to the name of its witness: give it a "
                "shorter name"
            )

    def mismatches(self, batch: pa.Schema, target: PostgresTarget) -> list[str]:
        reasons = super().mismatches(batch, target)
        if self.merge.keys:
            fixed = sorted(
                target.always_identity.intersection(batch.names).difference(self.merge.keys)
            )
            why = (
                "is GENERATED ALWAYS AS IDENTITY, so an upsert cannot change it: make it BY "
                "DEFAULT, or leave it out"
            )
            reasons += [f"column {name!r} {why}" for name in fixed]
        return reasons

    def missing_privileges(
        self,
        connection: Connection,
        target: PostgresTarget,
        privileges: Sequence[str],
        ledgers: Iterable[str] = (),
        create: bool = False,
    ) -> list[str]:
        """Tell which statements an owner has to run so that this role may do what the sink does."""
        place = sql.Identifier(target.schema).as_string()
        needed = {target.name: privileges} | dict.fromkeys(ledgers, LEDGER_PRIVILEGES)
        names = {name: sql.Identifier(target.schema, name).as_string() for name in needed}
        pairs = [
            (names[table], privilege)
            for table, privileges in needed.items()
            for privilege in privileges
        ]
        role, usage, may_create, missing = row(
            connection,
            "SELECT quote_ident(current_user), has_schema_privilege(place, 'USAGE'),"
            " has_schema_privilege(place, 'CREATE'),"
            " CASE WHEN has_schema_privilege(place, 'USAGE')"
            " THEN ARRAY(SELECT string_agg(wanted, ', ') || ' ON ' || name"
            " FROM unnest(%s::text[], %s::text[]) AS needed (name, wanted)"
            " WHERE NOT has_table_privilege(name, wanted)"
            " GROUP BY name) END FROM (SELECT %s::text AS place) AS named",
            [name for name, _ in pairs],
            [privilege for _, privilege in pairs],
            target.schema,
        )
        wanted = [f"CREATE ON SCHEMA {place}"] if create and not may_create else []
        grants = [*wanted, *missing] if usage else [f"USAGE ON SCHEMA {place}"]
        return [
            f"a right is missing; an owner has to run: GRANT {grant} TO {role}" for grant in grants
        ]

    def declared(self, connection: Connection, field: pa.Field, *, key: bool) -> str:
        (longest,) = row(connection, "SELECT current_setting('max_identifier_length')::int")
        if (length := len(field.name.encode())) > longest:
            raise SchemaMismatch(
                f"its name has {length} bytes, and PostgreSQL cuts names after {longest}: rename "
                "it in Spark"
            )
        return target_type(field.type)


def describe(connection: Connection, schema: str, name: str) -> PostgresTarget | None:
    """Read the target from the catalog; return None if there is none.

    Raises ConfigurationError if it is not a table.
    """
    relation = connection.execute(
        "SELECT c.oid::bigint, relkind::text, relpersistence::text"
        " FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
        " WHERE nspname = %s AND relname = %s",
        [schema, name],
    ).fetchone()
    if relation is None:
        return None
    oid, kind, persistence = relation
    if kind not in "rp":
        what = "a view" if kind in "vm" else "no plain table"
        raise ConfigurationError(f"{schema}.{name} is {what}; rows can only go to a table")
    if persistence == "t":
        raise ConfigurationError(
            f"{schema}.{name} is a temporary table; no other session can see it"
        )
    obstacles = connection.defer(POSTGRES_OBSTACLES, [schema, name])
    foreign_keys = connection.defer(POSTGRES_FOREIGN_KEYS, [schema, name])
    facts = connection.defer(_FACTS, {"oid": oid})
    checks = connection.defer(_CHECKS, [sql.Identifier(schema, name).as_string()])
    indexes = connection.defer(_INDEXES, [oid])
    columns = _columns(connection, sql.Identifier(schema, name))
    about = {kind: tuple(text for of, text in facts if of == kind) for kind, _ in facts}
    uniques, special = _judged(indexes)
    if "heir" in about:
        uniques = ()
        special = [*special, "indexes that do not bind rows of tables that inherit"]
    special_uniques = tuple(
        SpecialUnique(tuple(columns), tuple(expressions), tuple(reads), nulls_equal)
        for _, columns, unique, _, what, nulls_equal, *_, expressions, reads in indexes
        if unique and what in ("partial", "over an expression")
    )
    others = tuple(
        (tuple(reads), f"{name} is {what or 'deferrable'}")
        for name, _, unique, arbiter, what, *_, reads in indexes
        if unique and (what or not arbiter)
    )
    names = tuple(column.name for column in columns)
    heirs = about.get("heir", ())
    others += tuple(
        (names, f"the table {heir} inherits from it, whose rows no index of it binds")
        for heir in heirs
    )
    special += [f"generated column {column.name}" for column in columns if column.generated]
    return PostgresTarget(
        schema,
        name,
        columns=columns,
        uniques=uniques,
        constraints=(*special, *about.get("judge", ())),
        referenced_by=about.get("reference", ()),
        foreign_keys=tuple(ForeignKey(*key) for key in foreign_keys),
        checks=_checks(checks),
        unwritable=(*(text for (text,) in obstacles), *about.get("obstacle", ())),
        keyless="keyless" in about,
        other_uniques=others,
        special_uniques=special_uniques,
        lacks_characters=connection.info.parameter_status("server_encoding") != "UTF8",
        long_indexes=tuple(tuple(held) for *_, held, is_long, _, _ in indexes if is_long),
    )


_FACTS = f"""
WITH RECURSIVE relations AS (SELECT CAST(%(oid)s AS oid) AS oid UNION {POSTGRES_PARTITIONS})
SELECT 'obstacle', 'it has the rule ' || rulename || ', which COPY passes over: make it a trigger'
  FROM pg_rewrite
 WHERE ev_class = %(oid)s AND ev_type = '3' AND ev_enabled <> 'D'
UNION ALL
SELECT 'judge', 'constraint ' || conname FROM pg_constraint c WHERE conrelid = %(oid)s
   AND (contype = 'f' OR contype = 'c' AND (NOT convalidated OR coalesce(0 >= ANY(conkey), false)
     OR EXISTS (
SELECT FROM pg_depend JOIN pg_proc p ON refclassid = 'pg_proc'::regclass AND p.oid = refobjid
 WHERE classid = 'pg_constraint'::regclass AND objid = c.oid AND provolatile <> 'i')))
UNION ALL
SELECT 'judge', 'trigger ' || tgname FROM pg_trigger
 WHERE tgrelid = %(oid)s AND NOT tgisinternal AND tgenabled <> 'D'
UNION ALL
SELECT 'judge', 'rule ' || rulename FROM pg_rewrite WHERE ev_class = %(oid)s AND ev_enabled <> 'D'
UNION ALL
SELECT 'judge', 'index of a partition' FROM pg_partitioned_table WHERE partrelid = %(oid)s
UNION ALL
SELECT 'judge', 'trigger ' || tgname || ' of a partition' FROM pg_trigger
  JOIN relations ON tgrelid = relations.oid
 WHERE relations.oid <> %(oid)s AND NOT tgisinternal AND tgenabled <> 'D'
UNION ALL
SELECT 'judge', 'bounds of a partition' FROM pg_class WHERE oid = %(oid)s AND relispartition
UNION ALL
SELECT 'reference', pg_catalog.format('foreign key %%s of %%s', conname, conrelid::regclass)
  FROM pg_constraint c
 WHERE contype = 'f' AND confrelid = %(oid)s AND NOT EXISTS (
SELECT FROM pg_constraint whole WHERE whole.oid = c.conparentid AND whole.confrelid = c.confrelid)
UNION ALL
SELECT 'reference', pg_catalog.format('foreign key %%s of %%s', conname, conrelid::regclass)
  FROM pg_constraint
  JOIN relations ON confrelid = relations.oid WHERE contype = 'f' AND conparentid = 0
    AND relations.oid <> %(oid)s
UNION ALL
SELECT 'keyless', '' FROM pg_class c WHERE oid = %(oid)s AND relreplident <> 'f'
   AND EXISTS (SELECT FROM pg_publication WHERE pubupdate OR pubdelete) AND NOT EXISTS (SELECT
     FROM pg_index
 WHERE indrelid = c.oid AND (relreplident = 'd' AND indisprimary OR relreplident = 'i'
   AND indisreplident))
UNION ALL
SELECT 'keyless', '' FROM pg_publication_rel p WHERE prrelid = %(oid)s
   AND (pg_catalog.to_jsonb(p) ->> 'prqual' IS NOT NULL
     OR pg_catalog.to_jsonb(p) ->> 'prattrs' IS NOT NULL)
UNION ALL
SELECT 'heir', inhrelid::regclass::text FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid
 WHERE inhparent = %(oid)s AND NOT relispartition
ORDER BY 1, 2
"""
"""The query for facts about a table, each with its kind:

* `obstacle`: what keeps rows out of the table at all;
* `judge`: what may refuse a row and is not judged by a staging table (the indexes of partitions are
  not looked at one by one);
* `reference`: what refers to the table;
* `keyless`: a publication may refuse upserts into the table;
* `heir`: a table that inherits from it.
"""
_CHECKS = """
SELECT conname::text, pg_get_expr(conbin, conrelid),
       ARRAY(SELECT attname::text FROM pg_attribute WHERE attrelid = conrelid
         AND attnum = ANY(conkey))
  FROM pg_constraint
 WHERE conrelid = to_regclass(%s) AND contype = 'c' AND convalidated
   AND NOT coalesce(0 >= ANY(conkey), false)
 ORDER BY conname
"""


# A domain by the type that it is of, an array by its element's; both may be there several times
# over. Modifiers are those of the innermost domain (domain.c, typecmds.c), or of the column.
_COLUMNS = """
WITH RECURSIVE inner_type AS (
SELECT attnum, atttypid AS type, atttypmod AS modifier, 0 AS depth, 0::oid AS element, false AS
  required
  FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped
UNION ALL
SELECT attnum, CASE typtype WHEN 'd' THEN typbasetype ELSE typelem END,
       CASE WHEN typtype = 'd' AND modifier = -1 THEN typtypmod ELSE modifier END, depth + 1,
       CASE typtype WHEN 'd' THEN element ELSE typelem END,
       required OR typtype = 'd' AND element = 0 AND typnotnull
  FROM inner_type JOIN pg_type t ON t.oid = type
 WHERE typtype = 'd' OR typcategory = 'A' AND typelem <> 0 AND element = 0
)
SELECT DISTINCT ON (attnum) attname::text, b.typname || CASE WHEN element <> 0 THEN '[]'
  ELSE '' END,
       format_type(atttypid, atttypmod), NOT (attnotnull OR required),
       atthasdef OR attidentity <> '' OR t.typdefault IS NOT NULL, attgenerated <> '',
       attidentity <> '' OR EXISTS (SELECT FROM pg_attrdef WHERE adrelid = attrelid
         AND adnum = attnum
   AND pg_get_expr(adbin, adrelid) ~ '(nextval|uuid|random)[a-z0-9_]*[(]'),
       coalesce(e.typtype, b.typtype)::text, format_type(b.oid, modifier),
       CASE WHEN attcollation <> t.typcollation
            THEN pg_catalog.format(' COLLATE %%I.%%I', nspname, collname) ELSE '' END,
       attidentity = 'a'
  FROM inner_type JOIN pg_attribute a USING (attnum) JOIN pg_type t ON t.oid = atttypid
    JOIN pg_type b ON b.oid = type
  LEFT JOIN pg_type e ON e.oid = element
  LEFT JOIN (pg_collation c JOIN pg_namespace n ON n.oid = collnamespace) ON c.oid = attcollation
 WHERE attrelid = to_regclass(%s) ORDER BY attnum, depth DESC
"""


def _columns(connection: Connection, table: sql.Identifier) -> tuple[PostgresColumn, ...]:
    rows = connection.execute(_COLUMNS, [table.as_string()] * 2).fetchall()
    return tuple(PostgresColumn(*row) for row in rows)


def _checks(rows: Rows) -> tuple[Check, ...]:
    return tuple(Check(name, expression, tuple(columns)) for name, expression, columns in rows)


def lock(connection: Connection, target: PostgresTarget) -> None:
    """Let nobody change the table until the caller's transaction ends.

    The lock is that of an INSERT, and is taken with the next statement.
    """
    connection.defer(f"LOCK TABLE ONLY {target.identifier.as_string()} IN ROW EXCLUSIVE MODE")


def current(connection: Connection, target: PostgresTarget) -> PostgresTarget:
    """Return the target with the columns and checks that it has now.

    Raises ConfigurationError if it is gone.
    """
    checks = connection.defer(_CHECKS, [target.identifier.as_string()])
    if columns := _columns(connection, target.identifier):
        return replace(target, columns=columns, checks=_checks(checks))
    raise ConfigurationError(f"table {target.label} changed while the query ran: it is gone")


_INDEXES = (
    "SELECT c.relname::text,"
    " ARRAY(SELECT attname::text FROM pg_catalog.unnest(indkey[0:indnkeyatts - 1]) WITH ORDINALITY"
    " AS k (n, i)"
    " JOIN pg_attribute ON attrelid = indrelid AND attnum = n"
    " ORDER BY i), indisunique, indimmediate,"
    " CASE WHEN indisunique AND NOT indisvalid THEN 'not valid'"
    " WHEN indpred IS NOT NULL THEN 'partial'"
    " WHEN indexprs IS NOT NULL THEN 'over an expression'"
    " WHEN indisexclusion THEN 'a constraint that no two rows overlap' WHEN EXISTS (SELECT"
    " FROM unnest(indkey, indcollation) AS k (n, equality)"
    " JOIN pg_attribute ON attrelid = indrelid AND attnum = n"
    " JOIN pg_collation l ON l.oid IN (attcollation, equality) WHERE attcollation <> equality"
    " AND NOT collisdeterministic) THEN 'of another collation than its column' ELSE '' END,"
    # from PostgreSQL 15 on
    " coalesce((pg_catalog.to_jsonb(pg_index) ->> 'indnullsnotdistinct')::boolean, false),"
    " ARRAY(SELECT attname::text FROM pg_attribute"
    " WHERE attrelid = indrelid AND attnum = ANY(indkey)),"
    " EXISTS (SELECT FROM pg_attribute"
    " WHERE attrelid = indrelid AND attnum = ANY(indkey) AND attlen = -1"
    " AND atttypid <> 'numeric'::regtype),"
    " ARRAY(SELECT pg_get_indexdef(indexrelid, i, true)"
    " FROM pg_catalog.generate_series(1, indnkeyatts::int) AS i"
    " WHERE indkey[i - 1] = 0 ORDER BY i),"
    " ARRAY(SELECT attname::text FROM pg_attribute"
    " WHERE attrelid = indrelid AND (attnum = ANY(indkey) OR attnum IN"
    " (SELECT refobjsubid FROM pg_depend"
    " WHERE classid = 'pg_class'::regclass AND objid = indexrelid"
    " AND refobjid = indrelid)))"  # also of expressions
    " FROM pg_index JOIN pg_class c ON c.oid = indexrelid WHERE indrelid = %s ORDER BY 1"
)


def _judged(rows: Rows) -> tuple[tuple[Unique, ...], list[str]]:
    """Return the unique indexes over plain columns, and names of the indexes that are special.

    Only the target can tell the verdict of a special index: it is over expressions, or partial, or
    other values are equal in it than in the column, or the like.
    """
    uniques = tuple(
        Unique(name, tuple(columns), arbiter, nulls_equal)
        for name, columns, unique, arbiter, special, nulls_equal, *_ in rows
        if unique and not special
    )
    return uniques, [f"index {row[0]}" for row in rows if row[4]]
