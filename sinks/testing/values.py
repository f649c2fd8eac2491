"""Rows arrive as they are: every column, every value, however many."""

from __future__ import annotations

import datetime
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from sinks.base import Sink
from sinks.errors import BadValue, ConfigurationError
from sinks.optional import Validating, commit_now
from sinks.testing.clauses import Ability, Clause
from sinks.testing.kit import LINEAGE, SCHEMA, SinkTests, closed_later, copy_of, in_pieces, rows
from sinks.testing.two_phases import at_least_once
from sinks.transaction import Checkpoint, Committable

_UTC = datetime.timezone.utc
SAMPLES: Mapping[pa.DataType, Sequence[Any]] = {
    pa.bool_(): [True, False, None],
    pa.int8(): [-128, 127, None],
    pa.int16(): [-(2**15), 2**15 - 1, None],
    pa.int32(): [-(2**31), 2**31 - 1, None],
    pa.int64(): [-(2**63), 2**63 - 1, None],
    pa.float32(): [0.5, -1.25, None],
    pa.float64(): [0.1, -1.7976931348623157e308, None],
    pa.string(): ["", "ü 日本 🙂", None],
    pa.binary(): [b"", b"\x00\xff", None],
    pa.date32(): [datetime.date(1, 1, 1), datetime.date(9999, 12, 31), None],
    pa.timestamp("us"): [
        datetime.datetime(1969, 12, 31, 23, 59, 59, 999999),
        datetime.datetime(2038, 1, 20),
        None,
    ],
    pa.timestamp("us", "UTC"): [datetime.datetime(2024, 10, 27, 0, 30, tzinfo=_UTC), None, None],
    pa.decimal128(20, 4): [Decimal("-9999999999999999.9999"), Decimal("0.0001"), None],
    pa.list_(pa.int64()): [[1, None, 3], [], None],
    pa.struct([("a", pa.int64()), ("b", pa.string())]): [
        {"a": 1, "b": None},
        {"a": None, "b": "x"},
        None,
    ],
}
"""Values of the types that Spark hands over, by type."""

TEXTS = [
    "",
    " ",
    " both ends ",
    "Ünïcödé",
    "日本語🙂e\u0301",
    "'; --",
    '"\\',
    "a\tb\nc\u2028\x85",
    "%s {} NULL",
    "\\N",
    "../a%2F=&+?#",
]
NUMBERS = [0.0, 0.1, -1 / 3, 1e-300, -1.7976931348623157e308, 2.0**53, 123456789.125]

COLUMNS = [
    "id",
    "select",
    "two words",
    'quo"te',
    "it's",
    "back`tick",
    "Größe",
    "100%s",
    ":bound",
    "$1",
    "com,ma",
    "x;--",
]
"""Names of columns that are no words of SQL, or have another meaning there."""

ODD: Sequence[str | float] = [
    "\0",
    "a\0b",
    "\r\n",
    "\n",
    "",
    math.nan,
    math.inf,
    -math.inf,
    -0.0,
    5e-324,
    sys.float_info.max,
]


@contextmanager
def in_another_zone() -> Iterator[None]:
    """Of this process: 14 hours from UTC."""
    before = os.environ.get("TZ")
    try:
        os.environ["TZ"] = "Pacific/Kiritimati"
        time.tzset()
        yield
    finally:
        os.environ.pop("TZ")
        os.environ |= {"TZ": before} if before is not None else {}
        time.tzset()


class Values(SinkTests):
    def _expect_round_trip(
        self,
        sink: Sink,
        what: str,
        table: pa.Table,
        batches: int = 1_000,
        already: Sequence[pa.Table] = (),
    ) -> None:
        transaction = self.begun(
            sink, self.context(sink, table.schema, exactly_once=self._two_phase)
        )
        for batch in table.to_batches(batches):
            with Clause.WRITE.guarding(f"write of {what}"):
                sink.write(transaction, batch)
        if self._two_phase:
            self.commit(sink, self.sealed(sink, transaction, table.num_rows), when=f"of {what}")
        else:
            commit_now(sink, transaction, Checkpoint(self.job, LINEAGE, 0))
        self.expect_rows(sink, Clause.WRITE, what, table, *already)

    def _expect_round_trip_unless_refused(self, sink: Sink, what: str, table: pa.Table) -> None:
        try:
            sink.open()
            sink.check(table.schema)
        except ConfigurationError:
            return
        except Exception as error:
            raise AssertionError(
                Clause.CHECK_REFUSES.broken(f"check of {what} raised {error!r}")
            ) from error
        self._expect_round_trip(sink, what, table)

    def _offered(
        self, sink: Sink, table: pa.Table, clause: Clause, what: str, **parts: Any
    ) -> Committable | None:
        """What a task answers to these rows.

        None: BadValue refuses them, and they are rolled back.
        """
        transaction = self.begun(
            sink, self.context(sink, table.schema, exactly_once=self._two_phase, **parts)
        )
        try:
            for batch in table.to_batches():
                sink.write(transaction, batch)
            if self._two_phase:
                return self.sealed(
                    sink, transaction, table.num_rows, parts.get("subtask", 0), clause
                )
            commit_now(sink, transaction, Checkpoint(self.job, LINEAGE, 0))
        except Exception as raised:
            error = raised.__cause__ if isinstance(raised, AssertionError) else raised
            if error is None:
                raise
            if not isinstance(error, BadValue):
                raise AssertionError(clause.broken(f"{what} raised {error!r}")) from error
            self.rollback(sink, transaction)
            return None
        finally:
            self.close(sink)
        return Committable({})

    @property
    def _two_phase(self) -> bool:
        return Ability.TWO_PHASE not in self.cannot

    @at_least_once
    def test_texts_and_numbers_arrive_as_they_are(self, sink: Sink) -> None:
        ids = [-(2**63), -1, 0, 2**31, 2**53 + 1, 2**63 - 1]
        count = max(len(ids), len(TEXTS), len(NUMBERS)) + 1
        table = pa.table(
            [
                ids + list(range(1, count - len(ids) + 1)),
                [*TEXTS, "x" * self.longest_text],
                NUMBERS + [float(n) for n in range(count - len(NUMBERS))],
            ],
            schema=SCHEMA,
        )
        self._expect_round_trip(
            sink, f"texts up to {self.longest_text} characters, extremes of numbers", table
        )

    @at_least_once
    def test_nulls_arrive_as_nulls(self, sink: Sink) -> None:
        self.needs(Ability.NULLS)
        table = pa.table(
            [[1, 2, 3, 4], [None, "", None, "null"], [None, 0.0, 1.5, None]], schema=SCHEMA
        )
        self._expect_round_trip(sink, "nulls beside empty texts and zeros", table)
        alone = pa.table([[5, 6, 7], [None, None, "x"], [None, 0.5, None]], schema=SCHEMA)
        self._expect_round_trip(
            sink, "record batches whose first row has nulls", alone, 1, already=[table]
        )

    @at_least_once
    def test_many_rows_in_several_batches_arrive(self, sink: Sink) -> None:
        table = rows(0, 10_002)
        table = table.set_column(1, "name", pc.utf8_rpad(table["name"], 200, "."))
        self._expect_round_trip(
            sink, "10,002 rows, 2 MB, in record batches of 10,001", table, 10_001
        )
        pieces = in_pieces(rows(20_000, self.many))
        self._expect_round_trip(
            sink, f"{self.many} record batches of one row", pieces, already=[table]
        )

    @at_least_once
    @pytest.mark.parametrize("value", ODD, ids=repr)
    def test_odd_values_arrive_as_they_are_or_are_refused(
        self, sink: Sink, value: str | float
    ) -> None:
        """NULL beside them, and usual rows before."""
        if repr(value) == "-0.0":
            self.needs(Ability.NEGATIVE_ZERO)
        name, amount = (value, 0.5) if isinstance(value, str) else ("x", value)
        beside = [] if Ability.NULLS in self.cannot else [(3, None, None)]
        table = pa.table(
            [
                list(column)
                for column in zip((1, "x", 1.5), (2, name, amount), *beside, strict=True)
            ],
            SCHEMA,
        )
        done = self._offered(sink, table, Clause.BAD_VALUE, repr(value))
        if done is None:
            self.expect_rows(sink, Clause.BAD_VALUE, f"after {value!r} was refused")
            self.expect_doubts(sink, Clause.BAD_VALUE, f"after {value!r} was refused")
            return
        if self._two_phase:
            self.commit(sink, done, when=f"of a row with {value!r}, which its task has written")
        self.expect_rows(sink, Clause.WRITE, f"a row with {value!r}", table)

    @at_least_once
    def test_columns_in_another_order(self, sink: Sink) -> None:
        """Than the target has, as after a change of the query."""
        table = rows(0, 5).select(["amount", "id", "name"])
        accepting = self.accepting(sink, table.schema)
        self.checked(accepting, SCHEMA)
        self._expect_round_trip(accepting, "columns in another order than before", table)

    @at_least_once
    def test_columns_that_are_not_nullable_arrive(self, sink: Sink) -> None:
        """As those of a query that computes them."""
        schema = pa.schema([field.with_nullable(False) for field in SCHEMA])
        self._expect_round_trip(sink, "columns that are not nullable", rows(0, 5).cast(schema))

    @at_least_once
    def test_columns_of_any_name_arrive_or_are_refused(self, sink: Sink) -> None:
        table = pa.table({name: [n, n + 100] for n, name in enumerate(COLUMNS)})
        accepting = closed_later(self.accepting(sink, table.schema))
        self._expect_round_trip_unless_refused(accepting, f"columns {', '.join(COLUMNS)}", table)

    @at_least_once
    def test_columns_of_another_type_arrive_or_are_refused(self, sink: Sink) -> None:
        """Than the target has: texts where it has numbers, which some systems would turn into
        these."""
        self.checked(sink)
        table = pa.table({"id": ["007", "8"], "name": ["x", "y"], "amount": ["1.50", "1e3"]})
        self._expect_round_trip_unless_refused(
            copy_of(sink), "texts in `id` and `amount`, which took numbers", table
        )

    @at_least_once
    def test_part_of_a_larger_batch_arrives_alone(self, sink: Sink) -> None:
        """Arrow hands over slices: their buffers hold more rows than they have, and bits of
        others."""
        table = rows(0, 50)
        if Ability.NULLS not in self.cannot:
            nulls = pa.array([n % 3 == 0 for n in range(50)])
            for at, name in ((1, "name"), (2, "amount")):
                table = table.set_column(at, name, pc.if_else(nulls, None, table[name]))
        self._expect_round_trip(sink, "a slice of a larger record batch", table.slice(7, 5))

    @at_least_once
    def test_texts_that_are_a_dictionary_arrive_or_are_refused(self, sink: Sink) -> None:
        names = pa.array(["b", "a", "b", "b", "c"])
        table = rows(0, 5).set_column(1, "name", names.dictionary_encode())
        accepting = closed_later(self.accepting(sink, table.schema))
        self._expect_round_trip_unless_refused(
            accepting, "a column that is dictionary-encoded", table
        )

    @at_least_once
    def test_equal_rows_arrive_as_often_as_they_come(self, sink: Sink) -> None:
        """In a batch, in two participants, and in the next checkpoint."""
        table = pa.concat_tables([rows(1, 1)] * 3).combine_chunks()
        self._expect_round_trip(sink, "three equal rows", table)
        twice = pa.concat_tables([rows(2, 2)] * 2)
        self._expect_round_trip(sink, "two equal record batches", twice, already=[table])
        if self._two_phase:
            self.commit(
                sink, *(self.pre_committed(sink, table, subtask=p, checkpoint=1) for p in range(2))
            )
            seen = "the same rows in two participants of the next one"
            self.expect_rows(sink, Clause.WRITE, seen, twice, *[table] * 3)

    @at_least_once
    def test_values_of_every_type_that_it_takes_arrive(self, sink: Sink) -> None:
        """All rows of a batch, and a part of it."""
        if not self.types:
            pytest.skip("this kit names no further `types` that the sink takes")
        values = dict(self.types if isinstance(self.types, Mapping) else SAMPLES)
        unknown = [str(kind) for kind in self.types if len(values.get(kind, ())) != 3]
        if unknown:
            pytest.fail(
                f"`types` of {type(self).__name__} names {', '.join(unknown)}, and the kit has no "
                "values of that. Give three values of each type: types = {**SAMPLES, pa.time64("
                '"us"): [datetime.time(1), datetime.time.max, None]}, with SAMPLES of '
                "sinks.testing.values"
            )
        names = [f"c{n}" for n in range(len(self.types))]
        schema = pa.schema([("id", pa.int64()), *zip(names, self.types, strict=True)])
        table = pa.table([[0, 1, 2], *(values[kind] for kind in self.types)], schema=schema)
        accepting = self.accepting(sink, schema)
        for part, already in ((table, []), (table.slice(1), [table])):
            what = f"values of {', '.join(map(str, self.types))}, {part.num_rows} of 3 rows"
            with in_another_zone():
                self._expect_round_trip(accepting, what, part, already=already)

    def test_an_upsert_replaces_rows(self, sink: Sink) -> None:
        upserting = self._upserting(sink)
        made = list[Committable]()
        for number, table in enumerate([rows(0, 3), _renamed(rows(1, 3))]):
            made.append(self.pre_committed(upserting, table, checkpoint=number))
            self.commit(upserting, made[-1], clause=Clause.UPSERT)
        shown = [rows(0, 1), _renamed(rows(1, 3))]
        self.expect_rows(upserting, Clause.UPSERT, "after an upsert", *shown)
        emptier: dict[str, tuple[str | None, float | None]] = {
            "an empty text and a zero": ("", 0.0),
            "lesser values": ("a", -1.0),
        }
        if Ability.NULLS not in self.cannot:
            emptier["nulls"] = None, None
        for number, (what, (name, amount)) in enumerate(emptier.items(), 2):
            last = pa.table([[1], [name], [amount]], schema=SCHEMA)
            shown = [rows(0, 1), last, _renamed(rows(2, 2))]
            self.commit(
                upserting,
                self.pre_committed(upserting, last, checkpoint=number),
                clause=Clause.UPSERT,
            )
            self.expect_rows(upserting, Clause.UPSERT, f"after an upsert of {what}", *shown)
        self.commit(
            copy_of(upserting), made[0], clause=Clause.IDEMPOTENT, when="again, after the upsert"
        )
        self.expect_rows(
            upserting, Clause.IDEMPOTENT, "after a commit, an upsert, and that commit again", *shown
        )

    def test_upserts_of_rows_whose_key_is_null(self, sink: Sink) -> None:
        upserting = self._upserting(sink)
        shown = [rows(0, 3)]
        self.commit(upserting, self.pre_committed(upserting, shown[0]), clause=Clause.UPSERT)
        for number in (1, 2):
            table = rows(10 * number, 3).set_column(
                0, SCHEMA.field("id"), [[None, None, 10 * number]]
            )
            shown += [table] * bool(self._upserted(upserting, Clause.UPSERT_NULL, number, table))
            when = (
                f"after {number} upserts with two rows whose key is null, {len(shown) - 1} of them "
                "not refused"
            )
            self.expect_rows(upserting, Clause.UPSERT_NULL, when, *shown)

    def test_upserts_of_one_key_in_one_checkpoint(self, sink: Sink) -> None:
        """In a record batch, in two of them, in two participants; of these, either may win a key,
        for ever."""
        upserting = self._upserting(sink)
        shown = list[pa.Table]()
        for number, where in enumerate(
            ("a record batch", "two record batches", "two participants")
        ):
            first = rows(10 * number, 3)
            last = pa.table(
                [[10 * number + 1, 10 * number + 2], ["a", "z"], [-1.0, 1e9]], schema=SCHEMA
            )
            both = pa.concat_tables([first, last])
            parts = [first, last] if number == 2 else [both if number else both.combine_chunks()]
            when = f"with two keys twice in {where}"
            made = self._upserted(upserting, Clause.UPSERT_TWICE, number, *parts)
            shown += [rows(10 * number, 1), last] if made else []
            if number == 2 and made:
                seen = self.seen(upserting)
                pairs = [(last.slice(n, 1), first.slice(n + 1, 1)) for n in range(2)]
                shown[-1:] = [new if self.counted(new) <= seen else old for new, old in pairs]
            self.expect_rows(upserting, Clause.UPSERT_TWICE, when, *shown)
            self.commit(upserting, *reversed(made), clause=Clause.IDEMPOTENT, when=f"again, {when}")
            self.expect_rows(upserting, Clause.IDEMPOTENT, f"{when}, and committed again", *shown)

    def _upserting(self, sink: Sink) -> Sink:
        upserting = self.upserting(sink)
        if upserting is None:
            pytest.skip("this kit has no sink that replaces rows: it does not override `upserting`")
        return closed_later(upserting)

    def _upserted(
        self, sink: Sink, clause: Clause, checkpoint: int, *parts: pa.Table
    ) -> list[Committable]:
        """Of these partitions of a checkpoint, which is committed; none if BadValue refuses it
        before the decision."""
        made = list[Committable]()
        what = f"an upsert of {sum(part.num_rows for part in parts)} rows"
        for subtask, table in enumerate(parts):
            done = self._offered(sink, table, clause, what, checkpoint=checkpoint, subtask=subtask)
            made += [done] if done else []
        refused = len(made) < len(parts)
        if isinstance(sink, Validating) and not refused:
            self.open(sink)
            try:
                sink.validate_all(Checkpoint(self.job, LINEAGE, checkpoint), made)
            except BadValue:
                refused = True
            except Exception as error:
                raise AssertionError(
                    clause.broken(f"validate_all of {what} raised {error!r}")
                ) from error
        if not refused:
            self.commit(sink, *made, clause=clause)
            return made
        for committable in made:
            self.abort(sink, committable, clause)
        self.expect_doubts(sink, clause, f"after {what} was refused")
        return []


def _renamed(table: pa.Table) -> pa.Table:
    return table.set_column(
        1, SCHEMA.field("name"), [[f"new {name}" for name in table["name"].to_pylist()]]
    )
