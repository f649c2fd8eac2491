"""Two people put the same letter through again, each mended in a way of his own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from coordinator.dead_letters import Replayed
from sinks.dead_letters import FoundLetters
from sinks.postgres import PostgresSink
from sinks.sql.from_json import loads
from sinks.testing.table_crashes import run
from tests.dead_letters import batch, letters_of
from tests.postgres.play import Observer

_after_look: list[Callable[[], object]] = []


class Looked(PostgresSink):
    def find_letters(self, wanted: Sequence[Mapping[str, object]] = ({},), most: int | None = None) -> FoundLetters:
        found = super().find_letters(wanted, most)
        if _after_look:
            _after_look.pop()()
        return found


def test_one_is_written_and_the_other_is_not_told_that_his_was(tmp_path: Path, pg_database: str) -> None:
    def sink(kind: type[PostgresSink] = PostgresSink) -> PostgresSink:
        return PostgresSink(pg_database, "good", dead_letters=kind(pg_database, "dead", create_table=True))

    with (
        closing(Observer(pg_database)) as db,
        letters_of(sink(Looked), tmp_path) as one,
        letters_of(sink(), tmp_path) as other,
    ):
        db.run("CREATE TABLE good (id bigint PRIMARY KEY, name varchar(20), amount float)")
        run(tmp_path, sink(), [batch(0)])
        letter = (other.find() or [])[0]
        row = loads(letter.row)
        ways = [{str(letter.id): row | {"name": name}} for name in ("one", "other")]
        _after_look.append(lambda: other.replay(mended=ways[1]))
        assert one.replay(mended=ways[0]) == Replayed(before=1)
        assert db.run("SELECT name FROM good WHERE id = %s", [row["id"]]) == [("other",)]
