"""What several ask of the catalogs of PostgreSQL and MySQL."""

from __future__ import annotations

_POSTGRES_TRIGGERS = """
WITH relations AS (SELECT to_regclass(%s) AS oid UNION SELECT relid FROM pg_partition_tree(to_regclass(%s)))
SELECT 'trigger ' || tgname || ' of ' || tgrelid::regclass, pg_get_triggerdef(t.oid) || md5(prosrc)
  FROM pg_trigger t JOIN relations ON tgrelid = relations.oid JOIN pg_proc p ON p.oid = tgfoid
 WHERE NOT tgisinternal AND tgenabled <> 'D'
UNION ALL
SELECT 'rule ' || rulename, pg_get_ruledef(r.oid)
  FROM pg_rewrite r WHERE ev_class = to_regclass(%s) AND ev_enabled <> 'D'
UNION ALL
SELECT 'partition ' || c.oid::regclass || ', a foreign table,', ''
  FROM pg_class c JOIN relations ON c.oid = relations.oid WHERE relkind = 'f'
UNION ALL
SELECT 'that ' || c.oid::regclass || ' is UNLOGGED, so that a crash of the server empties it,', ''
  FROM pg_class c JOIN relations ON c.oid = relations.oid WHERE relpersistence = 'u'
"""

_MYSQL_TRIGGERS = """
SELECT CONCAT('trigger ', trigger_name), CONCAT(action_timing, ' ', event_manipulation, ' ', action_statement)
  FROM information_schema.triggers
 WHERE event_object_schema = COALESCE(NULLIF(%s, ''), DATABASE()) AND event_object_table = %s
"""

MYSQL = ("mysql", "mariadb")
"""SQLAlchemy's two names for its dialect of MySQL and MariaDB."""

TRIGGERS = {"postgresql": _POSTGRES_TRIGGERS, **dict.fromkeys(MYSQL, _MYSQL_TRIGGERS)}
"""What runs for each row that goes into a table, and may alter it or leave it out: a name for a reader, and the
definition. The parameters are the table's schema and name; of PostgreSQL its quoted name, three times. In MySQL a user
without the right TRIGGER sees none."""

HOMES = """
SELECT nspname::text FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
 WHERE relname = %s AND relkind IN ('r', 'p', 'v', 'm', 'f') AND nspname = ANY(current_schemas(false))
 ORDER BY array_position(current_schemas(false), nspname)
"""
"""Schemas of the search_path that have a table of this name, in its order."""

DEFERRED = """
SELECT nspname::text, conname::text FROM pg_constraint c JOIN pg_namespace n ON n.oid = connamespace
WHERE conrelid = %s::regclass AND condeferred
  AND (contype IN ('p', 'u', 'x') OR contype = 'f' AND confrelid <> conrelid)
"""
"""Schema and name of constraints that judge rows at the end of a transaction, unless they are told to do so at once:
keys, exclusions, and references to other tables. What a later row of the table may mend has to wait: its references to
itself, and triggers."""

GTID_UNSAFE = 1785
"""ER_GTID_UNSAFE_NON_TRANSACTIONAL_TABLE of MySQL."""
REFUSED_BY_GTID = (
    "a trigger writes into a table without transactions, itself or by what it calls, which the server refuses for the"
    f" sake of its GTIDs (error {GTID_UNSAFE}): make that table InnoDB, or drop the trigger"
)

SORTED_BYTES = 4096
"""So many bytes of what its collation makes of a text does MySQL sort by; an index holds 3,072 at most. With more of
them it may need more memory to sort than it gives, since some collations fill up what is shorter."""
