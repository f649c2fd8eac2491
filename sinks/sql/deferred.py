"""Constraints of PostgreSQL that judge rows at the end of a transaction, unless they are told to do so at once."""

DEFERRED = """
SELECT nspname::text, conname::text FROM pg_constraint c JOIN pg_namespace n ON n.oid = connamespace
WHERE conrelid = %s::regclass AND condeferred
  AND (contype IN ('p', 'u', 'x') OR contype = 'f' AND confrelid <> conrelid)
"""
"""Schema and name of keys, exclusions, and references to other tables. What a later row of the table may mend has to
wait: its references to itself, and triggers."""
