"""Exactly-once into MySQL and MariaDB. Needs PyMySQL: `pip install` with the extra `mysql`."""

from sinks._util.extras import needs_extra

with needs_extra("mysql"):
    from sinks.mysql.sink import MySQLSink

__all__ = ["MySQLSink"]
