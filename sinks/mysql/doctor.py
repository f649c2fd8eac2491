"""What `coordinator doctor` says about a MySQL or MariaDB server, beside what the sink asks of it anyway."""

from __future__ import annotations

from collections.abc import Iterable

from sinks.diagnosis import Finding, of_clock
from sinks.mysql.server import Connection, is_mariadb, query, setting


def findings(connection: Connection, *, xa: bool, no_xa: str | None) -> Iterable[Finding]:
    """`xa`: whether the sink would use XA branches, and `no_xa` why it cannot."""
    ((version,),) = query(connection, "SELECT VERSION()")
    mariadb = is_mariadb(connection)
    yield Finding.ok(f"{'MariaDB' if mariadb else 'MySQL'} {version}")
    if no_xa:
        grant = "GRANT XA_RECOVER_ADMIN ON *.* TO CURRENT_USER; or keep the strategy staged"
        yield Finding.warning(f"{no_xa}; the strategy is staged", grant)
    elif xa and setting(connection, "xa_detach_on_prepare") == "OFF":
        yield Finding.error(
            "xa_detach_on_prepare is OFF, so a prepared transaction stays with its connection",
            "SET PERSIST xa_detach_on_prepare = ON;",
        )
    if setting(connection, "local_infile") not in ("1", "ON"):
        yield Finding.warning(
            "local_infile is OFF: rows go in by INSERT, which takes more time than LOAD DATA",
            "SET GLOBAL local_infile = ON; and in the server's option file",
        )
    if setting(connection, "log_bin") in ("1", "ON"):
        yield Finding.ok(f"the binary log is on, format {setting(connection, 'binlog_format')}")
        if (sync := setting(connection, "sync_binlog")) != "1":
            yield Finding.warning(
                f"sync_binlog is {sync}: after a crash of its machine, replicas may have other rows than the server",
                "SET GLOBAL sync_binlog = 1; and in the server's option file",
            )
    yield from of_clock("the server", lambda: float(query(connection, "SELECT UNIX_TIMESTAMP(NOW(6))")[0][0]))
