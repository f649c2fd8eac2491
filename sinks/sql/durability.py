"""What lets a database lose what it has answered as committed: the same questions, whoever asks by whichever driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sinks.sql.server import Row

_POSTGRES = (
    "SELECT 'the server has ' || name || ' = off, so a crash of its machine may lose what was committed'"
    " FROM pg_settings WHERE name IN ('fsync', 'full_page_writes') AND setting = 'off' ORDER BY 1",
    # Any role sees that there are WAL senders; those of logical replication, which are no standbys, have a slot.
    "SELECT 'its standbys are asynchronous (' || CASE WHEN current_setting('synchronous_standby_names') = ''"
    " THEN 'synchronous_standby_names is empty' ELSE 'synchronous_commit is ' || current_setting('synchronous_commit')"
    " END || '), so a failover may lose what was committed'"
    " WHERE EXISTS (SELECT FROM pg_stat_replication WHERE state IS DISTINCT FROM 'backup' AND pid NOT IN"
    " (SELECT active_pid FROM pg_replication_slots WHERE slot_type = 'logical' AND active))"
    " AND (current_setting('synchronous_standby_names') = ''"
    " OR current_setting('synchronous_commit') IN ('off', 'local'))",
)
_POSTGRES_TABLE = (
    "SELECT nspname || '.' || relname || ' is UNLOGGED, so a crash of the server empties it'"
    " FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace,"
    " to_regclass(concat_ws('.', quote_ident(nullif(CAST(%s AS text), '')), quote_ident(CAST(%s AS text)))) AS target"
    " WHERE relpersistence = 'u' AND (c.oid = target OR c.oid IN (SELECT relid FROM pg_partition_tree(target)))"
    " ORDER BY 1"
)
_MYSQL = (
    "SELECT CONCAT('the server has ', name, ' = ', value, ', so a crash of its machine may lose what was committed')"
    " FROM (SELECT 'innodb_flush_log_at_trx_commit' AS name, CAST(@@innodb_flush_log_at_trx_commit AS char) AS value"
    " UNION ALL SELECT 'sync_binlog', IF(@@log_bin, CAST(@@sync_binlog AS char), '1')"  # what it lacks is rolled back
    " UNION ALL SELECT 'innodb_doublewrite', CAST(@@innodb_doublewrite AS char)) AS settings"
    " WHERE value <> '1'"
    " AND NOT (name = 'innodb_doublewrite' AND UPPER(value) IN ('ON', 'FAST', 'DETECT_AND_RECOVER'))",
    # A replica is a thread that sends the binary log; users without the right PROCESS see none. The comments are SQL
    # for MariaDB alone and for MySQL alone.
    "SELECT 'its replicas are asynchronous, so a failover may lose what was committed' FROM DUAL"
    " WHERE EXISTS (SELECT 1 FROM information_schema.processlist WHERE LEFT(command, 11) = 'Binlog Dump')"
    " AND NOT EXISTS (SELECT 1 FROM"
    " /*M! information_schema.global_status *//*!80000 performance_schema.global_status */"
    " WHERE LOWER(variable_name) IN ('rpl_semi_sync_master_status', 'rpl_semi_sync_source_status')"
    " AND variable_value = 'ON')",
)
_MYSQL_TABLE = (
    "SELECT CONCAT(table_schema, '.', table_name, ' is of the engine ', engine, ', which may lose rows in a crash')"
    " FROM information_schema.tables WHERE table_schema = COALESCE(NULLIF(%s, ''), DATABASE()) AND table_name = %s"
    " AND engine <> 'InnoDB'"
)
_QUESTIONS = {
    "postgresql": (_POSTGRES, _POSTGRES_TABLE),
    "mysql": (_MYSQL, _MYSQL_TABLE),
    "mariadb": (_MYSQL, _MYSQL_TABLE),
}


def weaknesses(database: str, ask: Callable[[str, Sequence[str]], Sequence[Row]], schema: str, table: str) -> list[str]:
    """Sentences about the server and the table, which need not exist; none of a kind of database that is not known
    here. `schema` may be "" for the one that the database takes. `ask` runs a query with its %s parameters."""
    of_server, of_table = _QUESTIONS.get(database, ((), ""))
    rows = [row for question in of_server for row in ask(question, ())]
    rows += ask(of_table, (schema, table)) if of_table else ()
    return [str(sentence) for (sentence,) in rows]
