"""SQLAlchemy's URLs of fresh databases, and engines that read them past the sink."""

from __future__ import annotations


def url_of(dsn: str) -> str:
    return dsn.replace("postgresql://", "postgresql+psycopg://")
