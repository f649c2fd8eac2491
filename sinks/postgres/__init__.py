"""Exactly-once into PostgreSQL. Needs psycopg 3: `pip install` with the extra `postgres`."""

from sinks._util.extras import needs_extra

with needs_extra("postgres"):
    from sinks.postgres.sink import PostgresSink

__all__ = ["PostgresSink"]
