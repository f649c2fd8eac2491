"""What `coordinator doctor` says about a PostgreSQL server, beside what the sink asks of it anyway."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from psycopg import sql

from sinks.diagnosis import Finding, of_clock
from sinks.postgres.server import Connection, Server, row

_OLD = 3600
_PROBES = 6
_FEW = 8


def findings(connection: Connection, server: Server, wanted: str) -> Iterable[Finding]:
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
    yield from _pooler(server)


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


def _pooler(server: Server) -> Iterable[Finding]:
    """A pooler makes up the process id that it tells a client at connect, so it is not that of the session. In
    transaction mode, a session that was idle a moment ago serves another client: seen by holding a few transactions
    open while looking for its process id."""
    with ExitStack() as stack:
        first = stack.enter_context(server.lend())
        (pid,) = row(first, "SELECT pg_backend_pid()")
        if pid == first.info.backend_pid:
            yield Finding.ok("no pooler in between")
            return
        for _ in range(_PROBES):
            other = server.connect()
            stack.callback(other.close)
            other.execute("BEGIN")
            (others,) = row(other, "SELECT pg_backend_pid()")
            if others == pid:
                yield Finding.warning(
                    "a pooler in transaction mode is in between; the sink works through it, for it keeps nothing in a "
                    "session, but each task holds one of its server connections",
                    "give its pool (default_pool_size of PgBouncer) more connections than the job has cores, or "
                    "connect to the server itself",
                )
                return
        yield Finding.ok("a pooler is in between, in session mode")
