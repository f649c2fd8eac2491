"""Exactly-once into any database that SQLAlchemy knows and that has transactions."""

from sinks.sqlalchemy.sink import SqlAlchemySink

__all__ = ["SqlAlchemySink"]
