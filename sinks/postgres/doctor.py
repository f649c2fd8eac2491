"""What `coordinator doctor` says about a PostgreSQL server, beside what the sink asks of it anyway."""

from __future__ import annotations

from collections.abc import Iterable

from psycopg import sql

from sinks.diagnosis import Finding, of_clock
from sinks.postgres.server import Connection, row

_OLD = 3600
_FEW = 8


def findings(connection: Connection, wanted: str) -> Iterable[Finding]:
    version, level, limit, used = row(
        connection,
        "SELECT current_setting('server_version'), current_setting('synchronous_commit'),"
        " current_setting('max_prepared_transactions')::int, (SELECT count(*) FROM pg_prepared_xacts)::int",
    )
    yield Finding.ok(f"PostgreSQL {version}")
    if level == "off":
        yield Finding.ok("synchronous_commit is off; the sink sets it to local in its own transactions")
    yield from _prepared(limit, used, wanted)
    yield from _old(connection)
    yield from of_clock("the server", lambda: float(row(connection, "SELECT extract(epoch from clock_timestamp())")[0]))


def _prepared(limit: int, used: int, wanted: str) -> Iterable[Finding]:
    mend = f"ALTER SYSTEM SET max_prepared_transactions = {max(64, 2 * limit)}; then restart the server"
    if limit == 0:
        if wanted == "auto":
            yield Finding.ok("max_prepared_transactions is 0, so the sink uses the strategy staged")
    elif limit - used < _FEW and wanted != "staged":
        yield Finding.warning(
            f"{limit - used} of max_prepared_transactions = {limit} are free; each partition needs one", mend
        )
    else:
        yield Finding.ok(f"{limit - used} of max_prepared_transactions = {limit} are free")


def _old(connection: Connection) -> Iterable[Finding]:
    old = connection.execute(
        "SELECT gid, database, owner, extract(epoch from now() - prepared)::bigint FROM pg_prepared_xacts"
        " WHERE prepared < now() - make_interval(secs => %s) ORDER BY prepared LIMIT 5",
        [_OLD],
    ).fetchall()
    for gid, database, owner, age in old:
        name = sql.Literal(gid).as_string(connection)
        yield Finding.warning(
            f"transaction {gid} in database {database} has been prepared for {age / 3600:.1f} h: it holds locks, and "
            "VACUUM back",
            "coordinator in-doubt list (of its job)"
            if gid.startswith("tpc.")
            else f"ask who made it, then, as {owner}: COMMIT PREPARED {name}; or ROLLBACK PREPARED {name};",
        )
