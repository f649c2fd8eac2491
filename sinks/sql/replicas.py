"""Whether a server waits for its replicas, which sinks and checkpoint storage both ask."""

from __future__ import annotations

ASYNCHRONOUS_IN_MYSQL = (
    "EXISTS (SELECT 1 FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%')"
    " AND NOT EXISTS (SELECT 1 FROM"
    " /*M! information_schema.global_status *//*!80000 performance_schema.global_status */"
    " WHERE LOWER(variable_name) IN ('rpl_semi_sync_master_status', 'rpl_semi_sync_source_status')"
    " AND variable_value = 'ON')"
)
"""A condition: there are replicas, and none is waited for. A replica is a thread that sends the binary log; users
without the right PROCESS see none. The comments are SQL for MariaDB alone and for MySQL alone."""
