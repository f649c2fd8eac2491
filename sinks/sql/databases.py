"""Facts about kinds of databases, by SQLAlchemy's names for them.

They are what runs for each row, what lets a server lose what it has answered as committed, and how
a column is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sinks.diagnosis import SchemaChange

POSTGRES_PARTITIONS = """
SELECT inhrelid FROM relations JOIN pg_inherits ON inhparent = relations.oid
  JOIN pg_class c ON c.oid = inhrelid AND c.relispartition
"""
"""The query for the partitions of the `relations`. pg_partition_tree would lock each of them until
the end of the transaction, even of a prepared one."""
_POSTGRES_RELATIONS = f"""
WITH RECURSIVE target AS (
SELECT CAST(to_regclass(quote_ident(CAST(%s AS text)) || '.' || quote_ident(CAST(%s AS text))) AS
  oid) AS oid
), relations AS (SELECT oid FROM target UNION {POSTGRES_PARTITIONS})
"""
_POSTGRES_TRIGGERS = f"""{_POSTGRES_RELATIONS}
SELECT 'trigger ' || tgname || ' of ' || tgrelid::regclass, pg_get_triggerdef(t.oid) || md5(prosrc)
  FROM pg_trigger t JOIN relations ON tgrelid = relations.oid JOIN pg_proc p ON p.oid = tgfoid
 WHERE NOT tgisinternal AND tgenabled <> 'D' AND NOT EXISTS (SELECT FROM pg_trigger whole
  JOIN relations r ON r.oid = whole.tgrelid
 WHERE whole.tgenabled <> 'D' AND whole.oid::text = pg_catalog.to_jsonb(t) ->> 'tgparentid')
UNION ALL
SELECT 'rule ' || rulename, pg_get_ruledef(r.oid)
  FROM pg_rewrite r JOIN target ON ev_class = target.oid WHERE ev_enabled <> 'D'
UNION ALL
SELECT 'partition ' || c.oid::regclass || ', a foreign table,', ''
  FROM pg_class c JOIN relations ON c.oid = relations.oid WHERE relkind = 'f'
UNION ALL
SELECT 'that ' || c.oid::regclass || ' is UNLOGGED, so that a crash of the server empties it,', ''
  FROM pg_class c JOIN relations ON c.oid = relations.oid WHERE relpersistence = 'u'
"""

_MYSQL_TRIGGERS = """
SELECT CONCAT('trigger ', trigger_name), CONCAT(action_timing, ' ', event_manipulation, ' ',
  action_statement)
  FROM information_schema.triggers
 WHERE event_object_schema = COALESCE(NULLIF(%s, ''), DATABASE()) AND event_object_table = %s
"""

_SQLITE_TRIGGERS = """
SELECT 'trigger ' || name, sql FROM sqlite_master
 WHERE type = 'trigger' AND %s IN ('', 'main') AND tbl_name = %s COLLATE NOCASE
"""

MYSQL = ("mysql", "mariadb")
"""SQLAlchemy's two names for its dialect of MySQL and MariaDB."""

TRIGGERS = {
    "postgresql": _POSTGRES_TRIGGERS,
    "sqlite": _SQLITE_TRIGGERS,
    **dict.fromkeys(MYSQL, _MYSQL_TRIGGERS),
}
"""Queries for what runs for each row that goes into a table, and may alter the row or leave it out.
They return a name for a reader, and the definition. A trigger that every partition gets from the
table counts as the table's. The parameters are the table's schema and name. In MySQL a user without
the privilege TRIGGER sees none."""

COLLATIONS = (
    "SELECT collation_name FROM information_schema.columns"
    " WHERE table_schema = COALESCE(NULLIF(%s, ''), DATABASE()) AND table_name = %s"
)
"""The query of MySQL and MariaDB for the collation of each column, which is null if the column is
no text. The parameters are the table's schema and name."""
_WITH_ALL_CHARACTERS = ("utf8mb4", "utf16", "utf32", "gb18030")


def lacks_characters(collations: Iterable[str | None]) -> bool:
    """Tell whether columns of MySQL or MariaDB with these collations lack characters of Unicode.

    A column that is not text has no collation, and counts as complete.
    """
    return any(
        collation and not collation.startswith(_WITH_ALL_CHARACTERS) for collation in collations
    )


DATABASES = {
    # a copy of the server's files has its system_identifier too, and was not started at that moment
    "postgresql": (
        "SELECT 'postgresql', CAST(extract(epoch from pg_postmaster_start_time()) AS text),"
        " CAST(oid AS bigint)"
        " FROM pg_database WHERE datname = current_database()"
    ),
    **dict.fromkeys(
        MYSQL,
        "SELECT 'mysql', @@hostname, @@port, @@datadir, @@server_id,"
        " /*M! '' *//*!80000 @@server_uuid */",
    ),
}
"""Queries that any user can run, and that tell a database from every other one. If a server's
tables are known by their databases, they tell the server from every other one."""

LEDGERS = {
    "postgresql": (
        "SELECT attname::text, relkind IN ('r', 'p') AND EXISTS (SELECT FROM pg_index"
        " WHERE indrelid = c.oid AND indisprimary AND attnum = ANY(indkey)) FROM pg_attribute"
        " JOIN pg_class c ON c.oid = attrelid JOIN pg_namespace n ON n.oid = relnamespace"
        " WHERE nspname = %s AND relname = %s AND attnum > 0 AND NOT attisdropped"
    ),
    **dict.fromkeys(
        MYSQL,
        "SELECT column_name, column_key = 'PRI' AND 'InnoDB' = (SELECT engine"
        " FROM information_schema.tables"
        " WHERE table_schema = %s AND table_name = %s) FROM information_schema.columns"
        " WHERE table_schema = %s AND table_name = %s",
    ),
}
"""Queries for the columns of a table. They say of each column whether it is in the primary key of a
table that has transactions. The parameters are the table's schema and name, as often as they
come."""

POSTGRES_OBSTACLES = f"""{_POSTGRES_RELATIONS}
SELECT 'it has row-level security for this role: let the role pass it (BYPASSRLS)'
  FROM target WHERE row_security_active(target.oid)
UNION ALL
SELECT c.oid::regclass || ' is a foreign table, whose rows do not belong to the transaction here'
  FROM pg_class c JOIN relations ON c.oid = relations.oid WHERE relkind = 'f'
UNION ALL
SELECT 'it is a view, so its rows may go into a foreign table: name the table behind it'
  FROM pg_class c JOIN target ON c.oid = target.oid WHERE relkind IN ('v', 'm')
"""
"""The query for what keeps rows out of a table, with an error or silently. The parameters are the
table's schema and name."""

POSTGRES_FOREIGN_KEYS = f"""{_POSTGRES_RELATIONS}, keys AS (
SELECT conname, confrelid AS referred,
  ARRAY(SELECT attname::text FROM unnest(conkey) WITH ORDINALITY AS of (number, place)
   JOIN pg_attribute ON attrelid = conrelid AND attnum = number ORDER BY place) AS columns,
  ARRAY(SELECT attname::text FROM unnest(confkey) WITH ORDINALITY AS of (number, place)
   JOIN pg_attribute ON attrelid = confrelid AND attnum = number ORDER BY place) AS referred_columns
  FROM pg_constraint c JOIN relations ON conrelid = relations.oid
 WHERE contype = 'f' AND coalesce((pg_catalog.to_jsonb(c) ->> 'conenforced')::boolean, true)
), whole AS (
SELECT * FROM keys
UNION SELECT conname, inhparent, columns, referred_columns FROM whole
  JOIN pg_inherits ON inhrelid = referred
  JOIN pg_class c ON c.oid = inhparent AND c.relkind = 'p'
)
SELECT DISTINCT conname::text, nspname::text, relname::text, columns, referred_columns
  FROM whole JOIN pg_class c ON c.oid = referred
    JOIN pg_namespace n ON n.oid = relnamespace ORDER BY 1, 2, 3
"""
"""The query for the foreign keys of a table and its partitions. It returns schema and name of each
table that they refer to, or of which that table is a partition, then their columns, and the columns
there. The parameters are the table's schema and name."""

POSTGRES_MAY_REST = "SET LOCAL idle_in_transaction_session_timeout = 0"
"""The statement by which a task may wait for its next rows between two statements."""
JUDGE_NOW = {"postgresql": "SET CONSTRAINTS ALL IMMEDIATE"}
"""Statements by which constraints judge rows now that they would otherwise judge at COMMIT."""
JUDGE_LATER = {"postgresql": "SET CONSTRAINTS ALL DEFERRED"}
"""Statements by which constraints that can be deferred judge no rows before `JUDGE_NOW`."""


# seconds; the server ends a transaction of ours whose process is stopped, and frees its locks
_IDLE_LIMIT = 10


def postgres_settings(lock_timeout: float) -> str:
    """Write the statement that configures the running transaction, and not the session.

    A pooler may give the session to somebody else. The settings are:

    * At its end the transaction is at least flushed locally, whatever the user's default is.
    * A wait for a lock has a limit, `lock_timeout` in seconds, and so has the time from one
      statement to the next.
    * A statement and a transaction have no limit: the transaction lasts as long as the partition.
    * The server gives up a client whose machine is gone after a minute, even in the middle of a
      COPY.
    """
    limits = {
        "lock_timeout": f"{max(1, round(lock_timeout * 1000))}ms",
        "idle_in_transaction_session_timeout": f"{max(_IDLE_LIMIT, round(lock_timeout))}s",
        "statement_timeout": "0",
        "transaction_timeout": "0",  # from PostgreSQL 17 on
        "tcp_keepalives_idle": "20",
        "tcp_keepalives_interval": "10",
        "tcp_keepalives_count": "4",
    }
    values = ", ".join(f"('{name}', '{limit}')" for name, limit in limits.items())
    return (
        "SELECT set_config(name, value, true) FROM (VALUES"
        " ('synchronous_commit', replace(current_setting('synchronous_commit'), 'off', 'local')),"
        f" {values}"
        ") AS settings (name, value) WHERE current_setting(name, true) IS NOT NULL"
    )


HOMES = """
SELECT nspname::text FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
 WHERE relname = %s AND relkind IN ('r', 'p', 'v', 'm', 'f')
   AND nspname = ANY(current_schemas(false))
 ORDER BY pg_catalog.array_position(current_schemas(false), nspname)
"""
"""The query for the schemas of the search_path that have a table of this name, in the order of the
search_path."""

_POSTGRES = (
    "SELECT 'the server has ' || name ||"
    " ' = off, so a crash of its machine may lose what was committed'"
    " FROM pg_settings WHERE name IN ('fsync', 'full_page_writes') AND setting = 'off' ORDER BY 1",
    # Any role sees that there are WAL senders; those of logical replication, which are no standbys,
    # have a slot.
    "SELECT 'its standbys are asynchronous (' || CASE WHEN"
    " current_setting('synchronous_standby_names') = ''"
    " THEN 'synchronous_standby_names is empty' ELSE 'synchronous_commit is ' ||"
    " current_setting('synchronous_commit')"
    " END || '), so a failover may lose what was committed'"
    " WHERE EXISTS (SELECT FROM pg_stat_replication"
    " WHERE state IS DISTINCT FROM 'backup' AND pid NOT IN"
    " (SELECT active_pid FROM pg_replication_slots WHERE slot_type = 'logical' AND active))"
    " AND (current_setting('synchronous_standby_names') = ''"
    " OR current_setting('synchronous_commit') IN ('off', 'local'))",
)
_POSTGRES_TABLE = (
    "WITH RECURSIVE relations AS (SELECT CAST(to_regclass(pg_catalog.concat_ws('.',"
    " quote_ident(nullif(CAST(%s AS text), '')), quote_ident(CAST(%s AS text)))) AS oid) AS oid"
    f" UNION {POSTGRES_PARTITIONS})"
    " SELECT nspname || '.' || relname || ' is UNLOGGED, so a crash of the server empties it'"
    " FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
    " JOIN relations ON relations.oid = c.oid"
    " WHERE relpersistence = 'u' ORDER BY 1"
)
_MYSQL = (
    "SELECT CONCAT('the server has ', name, ' = ', value,"
    " ', so a crash of its machine may lose what was committed')"
    " FROM (SELECT 'innodb_flush_log_at_trx_commit' AS name, CAST(@@innodb_flush_log_at_trx_commit"
    " AS char) AS value"
    # what it lacks is rolled back
    " UNION ALL SELECT 'sync_binlog', IF(@@log_bin, CAST(@@sync_binlog AS char), '1')"
    " UNION ALL SELECT 'innodb_doublewrite', CAST(@@innodb_doublewrite AS char)) AS settings"
    " WHERE value <> '1'"
    " AND NOT (name = 'innodb_doublewrite'"
    " AND UPPER(value) IN ('ON', 'FAST', 'DETECT_AND_RECOVER'))",
    # A replica is a thread that sends the binary log; users without the privilege PROCESS see none.
    # The comments are SQL for MariaDB alone and for MySQL alone.
    "SELECT 'its replicas are asynchronous, so a failover may lose what was committed' FROM DUAL"
    " WHERE EXISTS (SELECT 1 FROM information_schema.processlist"
    " WHERE LEFT(command, 11) = 'Binlog Dump')"
    " AND NOT EXISTS (SELECT 1 FROM"
    " /*M! information_schema.global_status *//*!80000 performance_schema.global_status */"
    " WHERE LOWER(variable_name) IN ('rpl_semi_sync_master_status', 'rpl_semi_sync_source_status')"
    " AND variable_value = 'ON')",
)
_MYSQL_TABLE = (
    "SELECT CONCAT(table_schema, '.', table_name, ' is of the engine ', engine,"
    " ', which may lose rows in a crash')"
    " FROM information_schema.tables"
    " WHERE table_schema = COALESCE(NULLIF(%s, ''), DATABASE()) AND table_name = %s"
    " AND engine <> 'InnoDB'"
)
_WEAKNESSES = {
    "postgresql": (_POSTGRES, _POSTGRES_TABLE),
    **dict.fromkeys(MYSQL, (_MYSQL, _MYSQL_TABLE)),
}


def weaknesses(
    database: str,
    query: Callable[[str, Sequence[str]], Sequence[Sequence[object]]],
    schema: str,
    table: str,
) -> list[str]:
    """List sentences about what lets the server or the table lose committed rows.

    The table need not exist. `schema` may be "" for the one that the database takes. `query` runs a
    statement with its %s parameters. For a kind of database that is not known here the list is
    empty.
    """
    of_server, of_table = _WEAKNESSES.get(database, ((), ""))
    rows = [row for statement in of_server for row in query(statement, ())]
    rows += query(of_table, (schema, table)) if of_table else ()
    return [str(sentence) for (sentence,) in rows]


_ADD = {"postgresql": "ADD COLUMN IF NOT EXISTS", "oracle": "ADD", "mssql": "ADD"}
"""How ALTER TABLE adds a column, by SQLAlchemy's name for the kind of database. The others use
standard SQL."""
_LOCKS = {
    "sqlite": "the database for a moment: only its schema is written",
    "postgresql": "ACCESS EXCLUSIVE for a moment: only the catalog is written",
    **dict.fromkeys(
        MYSQL,
        "the table's metadata for a moment: only the dictionary is written (ALGORITHM=INSTANT), "
        "unless the table is compressed or has a full-text index: then all rows are",
    ),
}


def addition(
    dialect: str, table: str, column: str, definition: str, *, automatic: bool
) -> SchemaChange:
    """Return the change that adds a column to a table.

    `table` is quoted, and `definition` has the column's name and type.
    """
    statement = f"ALTER TABLE {table} {_ADD.get(dialect, 'ADD COLUMN')} {definition}"
    locks = _LOCKS.get(dialect, "what the database locks for ALTER TABLE: see its manual")
    return SchemaChange(column, statement, "add", locks, automatic)
