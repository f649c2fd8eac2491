"""The SQL that sinks write for a move, as text: no server is needed to see it."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
import sqlalchemy as sa

from sinks.arrow.convert import Convert, same
from sinks.mysql.columns import MySQLColumn, MySQLTarget
from sinks.mysql.dialect import MySQLDialect
from sinks.postgres.columns import PostgresColumn, PostgresTarget
from sinks.postgres.dialect import PostgresDialect
from sinks.sql.dialect import Dialect, Move, TargetT
from sinks.sql.table import Column, ForeignKey, MergeOptions, Target, Unique
from sinks.sqlalchemy.dialect import SqlAlchemyDialect

UPSERT = MergeOptions.of("upsert", ["id"], "at")
DELETES = MergeOptions.of("upsert", ["id"], "at", "gone")
KEEPS_NEWER = MergeOptions.of("upsert", ["id"], "at", keep_newer=True)
TYPES = {"id": "bigint", "name": "text", "at": "bigint"}


class AnyColumn(Column):
    def conversion(self, arrow: pa.DataType) -> Convert:
        return same


def target() -> Target:
    columns = tuple(AnyColumn(name, kind) for name, kind in TYPES.items())
    return Target("shop", "orders", columns)


def postgres_target() -> PostgresTarget:
    columns = tuple(PostgresColumn(name, kind) for name, kind in TYPES.items())
    return PostgresTarget("shop", "orders", columns=columns, checks=())


def mysql_target() -> MySQLTarget:
    columns = tuple(MySQLColumn(name, kind) for name, kind in TYPES.items())
    return MySQLTarget("shop", "orders", columns=columns, engine="InnoDB")


def move_into(table: TargetT, *staging: str) -> Move[TargetT]:
    return Move(table, staging, [f'"shop"."{name}"' for name in staging], list(TYPES), TYPES)


def test_names_are_quoted() -> None:
    assert Dialect[Target](UPSERT).quote("shop", 'a "b"') == '"shop"."a ""b"""'
    assert Dialect[Target](UPSERT).quote("", "orders") == '"orders"'
    assert PostgresDialect(UPSERT).quote("Shop", 'a"b%') == '"Shop"."a""b%"'
    assert MySQLDialect(UPSERT).quote("shop", "a`b") == "`shop`.`a``b`"


@pytest.mark.parametrize("url", ["sqlite:///file", "postgresql+psycopg://host/db"])
def test_sqlalchemy_quotes_what_needs_it_and_doubles_no_percent_sign(url: str) -> None:
    dialect = SqlAlchemyDialect(sa.make_url(url), UPSERT)
    assert dialect.quote("shop", "Or%der") == 'shop."Or%der"'


def test_many_rows_are_inserted_by_several_statements() -> None:
    statements = list(Dialect[Target](UPSERT).insertions('"ledger"', ["a", "b"], [(n, "x") for n in range(1001)]))
    assert [len(values) for _, values in statements] == [2000, 2]
    assert statements[1] == ('INSERT INTO "ledger" (a, b) VALUES (%s, %s) ON CONFLICT DO NOTHING', [1000, "x"])


def test_the_last_change_of_a_key_is_chosen_over_all_staging_tables() -> None:
    last = PostgresDialect(UPSERT).last(move_into(postgres_target(), "one", "two"))
    assert last == (
        'SELECT "id", "name", "at" FROM (SELECT "id", "name", "at", row_number() OVER (PARTITION BY "id"'
        ' ORDER BY "at" DESC NULLS LAST, tpc_row DESC) AS tpc_place FROM'
        ' (SELECT "id", "name", "at", ctid AS tpc_row FROM "shop"."one"'
        ' UNION ALL SELECT "id", "name", "at", ctid AS tpc_row FROM "shop"."two") AS staged) AS ranked'
        " WHERE tpc_place = 1"
    )


def test_postgres_inserts_or_updates() -> None:
    statement = PostgresDialect(KEEPS_NEWER).upsert(move_into(postgres_target(), "one"), "LAST")
    assert statement == (
        'INSERT INTO "shop"."orders" AS target ("id", "name", "at") SELECT "id", "name", "at" FROM (LAST) AS last'
        ' WHERE TRUE ON CONFLICT ("id") DO UPDATE SET "name" = excluded."name", "at" = excluded."at"'
        ' WHERE true AND (target."at" IS NULL OR target."at" <= excluded."at")'
    )


def test_mysql_updates_and_then_inserts_what_is_missing() -> None:
    dialect = MySQLDialect(DELETES)
    move = move_into(mysql_target(), "one")
    assert dialect.update(move, "LAST") == (
        "UPDATE `shop`.`orders` AS target JOIN (LAST) AS last ON target.`id` = last.`id`"
        " SET target.`name` = last.`name`, target.`at` = last.`at` WHERE last.`gone` IS NOT TRUE"
    )
    assert dialect.insert(move, "LAST") == (
        "INSERT INTO `shop`.`orders` (`id`, `name`, `at`) SELECT last.`id`, last.`name`, last.`at` FROM (LAST) AS last"
        " LEFT JOIN `shop`.`orders` AS target ON target.`id` = last.`id`"
        " WHERE last.`gone` IS NOT TRUE AND target.`id` IS NULL"
    )


def test_rows_to_which_others_refer_are_deleted_after_these() -> None:
    dialect = Dialect[Target](DELETES)
    plain = move_into(target(), "one")
    assert dialect.deletes_of_leaves(plain, "LAST") is None
    refers = move_into(replace(target(), foreign_keys=(ForeignKey("up", "shop", "orders", ("name",), ("id",)),)), "one")
    leaves = dialect.deletes_of_leaves(refers, "LAST")
    assert leaves
    assert leaves.startswith(dialect.deletes(refers, "LAST"))
    assert 'NOT EXISTS (SELECT 1 FROM (SELECT DISTINCT child."name" FROM "shop"."orders" AS child' in leaves


def test_a_value_that_another_row_takes_is_looked_for_only_where_rows_can_go_in_anew() -> None:
    unique = (Unique("orders_pkey", ("id",)), Unique("by_name", ("name",)))
    dialect = Dialect[Target](UPSERT)
    given_up = dialect.hands_on_unique_value(move_into(replace(target(), uniques=unique), "one"), "LAST")
    assert given_up
    assert 'taker."name" = target."name"' in given_up
    assert dialect.hands_on_unique_value(move_into(target(), "one"), "LAST") is None
    bound = replace(target(), uniques=unique, referenced_by=("foreign key of items",))
    assert dialect.hands_on_unique_value(move_into(bound, "one"), "LAST") is None
