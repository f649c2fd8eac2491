"""Exactly-once into PostgreSQL. Needs psycopg 3: `pip install` with the extra `postgres`."""

from sinks.postgres.sink import PostgresSink

__all__ = ["PostgresSink"]
