"""SQLAlchemy's URLs of fresh databases, and engines that read them past the sink."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from sinks.mysql.connection import used_by

DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}


def url_of(dsn: str) -> str:
    scheme, _, rest = dsn.partition("://")
    return f"{DRIVERS[scheme]}://{rest}"


def observing(url: str, **options: Any) -> sa.Engine:
    """Of a user who may do everything, while the sink's in MySQL may not."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "mysql":
        return sa.create_engine(url, **options)
    engine = sa.create_engine(parsed.set(username=f"{parsed.username}_admin"), **options)
    used_by(engine)
    return engine
