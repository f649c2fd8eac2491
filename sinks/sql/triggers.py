"""What databases run for each row that goes into a table, and which may alter it or leave it out.

Each row of these queries is a name for a reader, and the definition.
"""

from __future__ import annotations

POSTGRES = """
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
"""The parameter, three times, is the table's name, quoted."""

MYSQL = """
SELECT CONCAT('trigger ', trigger_name), CONCAT(action_timing, ' ', event_manipulation, ' ', action_statement)
  FROM information_schema.triggers WHERE event_object_schema = %s AND event_object_table = %s
"""
"""A user without the right TRIGGER sees none."""
