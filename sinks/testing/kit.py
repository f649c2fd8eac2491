"""What an author tells the conformance kit of a sink, and the steps that its tests are made of."""

from __future__ import annotations

import inspect
import itertools
import json
import pickle
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from sinks.base import Sink, TwoPhaseCommitSink, commit_in_threads
from sinks.errors import SinkError
from sinks.optional import Auditable
from sinks.testing.clauses import Ability, Clause
from sinks.testing.driver import KILLED, NOT_UNPICKLED
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    CommitState,
    Committable,
    Fingerprint,
    Identity,
    TransactionContext,
    TransactionId,
)

Row = tuple[Any, ...]

__tracebackhide__ = True  # pytest shows the test that failed, not the steps that it is made of

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("amount", pa.float64())])
LINEAGE = "0badcafe"
_TRIES = 3  # of what raises: "ask again"
_numbers = itertools.count(1)


def rows(first: int, count: int) -> pa.Table:
    ids = list(range(first, first + count))
    return pa.table([ids, [f"user-{i}" for i in ids], [i + 0.5 for i in ids]], schema=SCHEMA)


def in_pieces(table: pa.Table) -> pa.Table:
    """Of which each record batch has one row."""
    return pa.concat_tables([table.slice(n, 1) for n in range(table.num_rows)])


_to_close: list[Sink] = []
_checked: dict[int, tuple[Sink, pa.Schema]] = {}
"""By the id of a sink of this test: itself, and the columns that it was last checked for."""

_open_sinks: dict[int, Sink] = {}
"""Those of this test that are open, by their ids: a driver stays so for all of its life."""
_checkpoints: dict[str, Checkpoint] = {}
"""Of transactions of this test, by the texts of their identities."""
_named: list[str] = []
"""The names of the sinks that the default of `named` has made in this test."""
_Call = tuple[type[Sink] | None, tuple[Any, ...], Mapping[str, Any]]
_made: dict[int, tuple[Sink, _Call]] = {}
"""By the id of a sink of this test: itself, and its class with the arguments of its constructor."""


def _new(kind: type[Sink], *arguments: Any, **more: Any) -> Sink:
    sink = object.__new__(kind)
    _made[id(sink)] = sink, (kind, arguments, more)
    return sink


def _made_by(sink: Sink) -> _Call:
    """Return the class of the sink and the arguments of its constructor, if it was called."""
    _, call = _made.get(id(sink), (sink, (None, (), {})))
    return call


TwoPhaseCommitSink.__new__ = _new  # type: ignore[method-assign, assignment]


def closed_later(sink: Sink) -> Sink:
    """The same; it is closed after the test."""
    _to_close.append(sink)
    return sink


def end_test() -> None:
    """Close what a test has made, and forget it."""
    while _to_close:
        with suppress(Exception):
            _to_close.pop().close()
    for known in (_checked, _made, _open_sinks, _checkpoints):
        known.clear()
    _named.clear()


def copy_of(sink: Sink) -> Sink:
    """The sink in another task or driver."""
    with Clause.PICKLED.guarding("pickle"):
        copy: Sink = pickle.loads(pickle.dumps(sink))
    _made.pop(id(copy), None)  # no constructor made it
    closed_later(copy)
    if id(sink) in _checked:
        _checked[id(copy)] = copy, _checked[id(sink)][1]
    assert copy.name == sink.name, Clause.PICKLED.broken(
        f"it is named {copy.name!a} there and {sink.name!a} here"
    )
    return copy


class SinkTests:
    """Fixtures, hooks and steps. What has no default here is what an author has to give."""

    job = "conformance"
    cannot: ClassVar[Mapping[Ability, str]] = {}
    """What the sink cannot do, each with the reason."""
    longest_text: ClassVar[int] = 50_000
    """Characters of the longest value of `name` that the target takes."""
    refused: ClassVar[pa.Schema | None] = pa.schema(
        [*SCHEMA, ("no_such_column", pa.duration("ns")), ("nor_this_one", pa.duration("ns"))]
    )
    """Columns of which the target cannot take the last two. None: it takes any."""
    bad: ClassVar[Mapping[str, Any] | None] = None
    """Values with which the target refuses a row. None: the sink cannot name bad rows
    (`write_good_rows`)."""
    stops: ClassVar[int] = 6
    """Lines of a method at which it is stopped, at most."""
    many: ClassVar[int] = 120
    """Transactions of a checkpoint that are in doubt at once, as far as the system takes so
    many."""
    whole: ClassVar[bool] = False
    """Whether a checkpoint becomes visible as a whole, though the sink is not `WholeCommitting`."""
    types: ClassVar[Sequence[pa.DataType] | Mapping[pa.DataType, Sequence[Any]]] = ()
    """Arrow types that the sink takes, beside those of SCHEMA: their values arrive as they are.

    The kit has values of the types in `sinks.testing.values.SAMPLES`, so `tuple(SAMPLES)` names all
    of these. For any other type, give a dict of types with three values each, of which one may be
    None.
    """
    outage: ClassVar[Exception] = ConnectionError(
        "injected by the conformance kit: the system does not answer"
    )
    """What the client of the sink's system raises while that does not answer."""

    @pytest.fixture
    def sink(self) -> Sink:
        raise NotImplementedError(
            "override the fixture `sink`: a sink with a fresh, empty target for rows of SCHEMA"
        )

    def visible(self, sink: Any) -> Sequence[Mapping[str, Any]]:
        raise NotImplementedError(
            "override `visible`: each visible row as a dict, read without the sink"
        )

    # ------------------------------------------------------------------ hooks with a default
    def leftovers(self, sink: Any) -> Sequence[str]:
        """What lies about beside visible rows: temporary files, staging tables, open sessions.

        Default: not told.
        """
        return ()

    def named(self, sink: Any, name: str) -> Sink:
        """A sink of another name into the same target.

        Default: by its constructor, with the same arguments except `name`. If the constructor takes
        no `name`, it is a copy of which `name` is set.
        """
        kind, arguments, more = _made_by(sink)
        if kind is not None:
            with suppress(TypeError):
                bound = inspect.signature(kind).bind(*arguments, **more)
                if "name" in bound.signature.parameters:
                    bound.arguments["name"] = name
                    return kind(*bound.args, **bound.kwargs)
        other = copy_of(sink)
        other.name = name
        return other

    def sibling(self, sink: Sink) -> Sink:
        return self.of_name(sink, f"{sink.name}-2")

    def of_name(self, sink: Sink, name: str) -> Sink:
        """What `named` gives, closed after the test."""
        other = closed_later(self.named(sink, name))
        if type(self).named is SinkTests.named:
            _named.append(name)
        if other.name != name or other is sink:
            pytest.fail(
                f"`named` of {type(self).__name__} has to return another sink whose name is "
                f"{name!a}, and not {other!r}: override it for a sink whose constructor takes no "
                "`name`, or makes another one of it"
            )
        return other

    def made_anew(self, sink: Sink) -> Sink:
        """The sink as a job that starts again makes it.

        Default: by its constructor, with the same arguments.
        """
        kind, arguments, more = _made_by(sink)
        if kind is None:
            pytest.fail(
                f"`made_anew` of {type(self).__name__}: the fixture `sink` gives a copy of a sink, "
                "so its constructor is not known; return what the constructor makes, or override "
                "`made_anew`"
            )
        return closed_later(kind(*arguments, **more))

    def set_otherwise(self, sink: Any) -> Sequence[Sink]:
        """Sinks into the same target whose settings would have written the rows in another way.

        Default: none.
        """
        return ()

    def unseen(self, made: Committable, transaction_id: str) -> Identity | None:
        """The identity that `pre_commit` would have returned for a transaction that never began.

        `transaction_id` is the one of its context. `made` is the Committable that `pre_commit` of
        another transaction returned, so `made.transaction` is an identity to take as an example,
        and `made.proof` its proof. Default: None, which means that the kit replaces the
        `transaction_id` in the example. Override it if an identity has more in it that differs,
        such as a number that the system gives.
        """
        return None

    def accepting(self, sink: Any, schema: pa.Schema) -> Sink:
        """A sink whose target takes rows of `schema`, shown by `visible`.

        Default: the same, for targets of any.
        """
        return copy_of(sink)

    def evolving(self, sink: Any) -> Sink | None:
        """A sink like this one whose target takes new columns. Default: None, there is none."""
        return None

    def upserting(self, sink: Any) -> Sink | None:
        """A sink like this one that replaces rows by the key `id`. Default: None, there is none."""
        return None

    # ------------------------------------------------------------------ what the sink can do
    def needs(self, ability: Ability) -> None:
        """Skip the test if the sink says that it cannot."""
        if ability in self.cannot:
            pytest.skip(
                f"this sink cannot {ability.value.partition(' (')[0]}: {self.cannot[ability]}"
            )

    @pytest.fixture(autouse=True)
    def _two_phases(self, request: pytest.FixtureRequest) -> Iterator[None]:
        if not getattr(request.function, "at_least_once", False):
            self.needs(Ability.TWO_PHASE)
        yield
        end_test()

    # ------------------------------------------------------------------ the steps of a task
    def context(
        self,
        sink: Sink,
        schema: pa.Schema = SCHEMA,
        *,
        slot: int = -1,
        exactly_once: bool = True,
        **parts: Any,
    ) -> TransactionContext:
        """Of a transaction whose task attempt no other of this process has; `parts` are those of
        TransactionId."""
        number = next(_numbers)
        usual: dict[str, Any] = {
            "job": self.job,
            "lineage": LINEAGE,
            "checkpoint": 0,
            "sink": sink.name,
            "subtask": 0,
        }
        usual |= {"generation": 1, "round": 0, "attempt": 0, "task_attempt": number}
        name = TransactionId(**(usual | parts))
        return name.context(schema, number if slot < 0 else slot, exactly_once=exactly_once)

    def checked(self, sink: Sink, schema: pa.Schema = SCHEMA) -> None:
        """As a driver does it: once for the columns of a query, before its tasks get copies of the
        sink."""
        self.open(sink)
        _, last = _checked.get(id(sink), (sink, None))
        if schema != last:
            with Clause.CHECK.guarding(f"check({schema.names})"):
                sink.check(schema)
            _checked[id(sink)] = sink, schema

    def begun(
        self,
        sink: Sink,
        context: TransactionContext | None = None,
        clause: Clause = Clause.BEGIN,
        **parts: Any,
    ) -> Any:
        context = context or self.context(sink, **parts)
        self.checked(sink, context.schema)
        with clause.guarding(f"begin_transaction({context.transaction_id!r})"):
            return sink.begin_transaction(context)

    def write(
        self, sink: Sink, transaction: Any, table: pa.Table, clause: Clause = Clause.WRITE
    ) -> None:
        for batch in table.to_batches():
            with clause.guarding(f"write of {batch.num_rows} rows"):
                sink.write(transaction, batch)

    def written(
        self,
        sink: Sink,
        table: pa.Table,
        context: TransactionContext | None = None,
        clause: Clause = Clause.WRITE,
        **parts: Any,
    ) -> Any:
        """An open transaction with these rows."""
        of_begin = Clause.BEGIN if clause is Clause.WRITE else clause
        context = context or self.context(sink, table.schema, **parts)
        transaction = self.begun(sink, context, of_begin)
        self.write(sink, transaction, table, clause)
        return transaction

    def sealed(
        self,
        sink: Sink,
        transaction: Any,
        count: int,
        subtask: int = 0,
        clause: Clause = Clause.PRE_COMMIT,
        hash: int = 0,
    ) -> Committable:
        fingerprint = Fingerprint(count, hash)
        if isinstance(sink, Auditable):
            with Clause.FINGERPRINT.guarding(f"record_fingerprint of {fingerprint}"):
                sink.record_fingerprint(transaction, fingerprint)
        with clause.guarding("pre_commit"):
            committable = sink.snapshot_state(transaction)
        assert isinstance(committable.transaction, Mapping), Clause.IDENTITY.broken(
            f"an identity of type {type(committable.transaction).__name__}: "
            f"{committable.transaction!r}"
        )
        return committable.of(sink.name, subtask, fingerprint)

    def pre_committed(
        self,
        sink: Sink,
        table: pa.Table,
        context: TransactionContext | None = None,
        clause: Clause = Clause.PRE_COMMIT,
        hash: int = 0,
        **parts: Any,
    ) -> Committable:
        """What a task does, up to its ack. `hash` is that of its rows."""
        context = context or self.context(sink, table.schema, **parts)
        transaction = self.written(
            sink, table, context, Clause.WRITE if clause is Clause.PRE_COMMIT else clause
        )
        committable = self.sealed(
            sink, transaction, table.num_rows, parts.get("subtask", 0), clause, hash
        )
        self.close(sink)
        checkpoint = Checkpoint(context.job, context.lineage, context.checkpoint_id)
        _checkpoints[_text(committable.transaction)] = checkpoint
        return committable

    def rollback(self, sink: Sink, transaction: Any, clause: Clause = Clause.ROLLBACK) -> None:
        with clause.guarding("rollback"):
            sink.rollback(transaction)

    def open(self, sink: Sink) -> None:
        """Unless it is."""
        if id(sink) not in _open_sinks:
            with Clause.OPEN.guarding("open"):
                sink.open()
            _open_sinks[id(sink)] = sink

    def close(self, *sinks: Sink) -> None:
        for sink in sinks:
            _open_sinks.pop(id(sink), None)
            with Clause.CLOSE.guarding("close"):
                sink.close()

    def elsewhere(self, sink: Sink) -> Sink:
        """A copy of the sink, open, as another driver or task has it."""
        copy = copy_of(sink)
        self.open(copy)
        return copy

    def never_seen(self, sink: Sink, context: TransactionContext) -> Committable:
        """What pre-commit would answer for a transaction of this context, which never was."""
        contexts = [self.context(sink) for _ in range(2)]
        made = [self.pre_committed(sink, rows(900_000, 1), context) for context in contexts]
        for committable in made:
            self.abort(sink, committable)
        here, there, new = (c.transaction_id.rpartition(".")[2] for c in (*contexts, context))
        first, second, proof = map(_text, (made[0].transaction, made[1].transaction, made[0].proof))
        identity = self.unseen(made[0], context.transaction_id)
        if identity is None and first.replace(here, there) != second:
            pytest.skip("identities hold more than `context.transaction_id`: override `unseen`")
        identity = identity or json.loads(first.replace(here, new))
        return Committable(identity, json.loads(proof.replace(here, new))).of(
            sink.name, 0, Fingerprint(1)
        )

    # ------------------------------------------------------------------ the steps of a driver
    def answers(self, sink: Sink, *committables: Committable) -> list[CommitOutcome | Exception]:
        """Those of `commit_all`, asked once."""
        self.open(sink)
        answers = self.ask(sink, *committables)
        assert len(answers) == len(committables), Clause.COMMIT_ALL.broken(
            f"{len(answers)} outcomes for {len(committables)} committables"
        )
        for answer in answers:
            assert isinstance(answer, CommitOutcome | Exception), Clause.COMMIT_OUTCOME.broken(
                f"{answer!r}"
            )
            if isinstance(answer, Exception):
                forget(answer)
        others = [
            answer
            for answer in answers
            if answer not in (CommitOutcome.COMMITTED, CommitOutcome.HELD)
        ]
        assert others or CommitOutcome.HELD not in answers, Clause.HELD.broken(
            f"nothing else is wrong with {answers}"
        )
        return answers

    def ask(self, sink: Sink, *committables: Committable) -> list[Any]:
        """The same, of an open sink; and what is raised, for each.

        Requests to the system do not overlap: that has tests of its own, and would look different
        each time.
        """

        answers: list[Any] = []
        for checkpoint, group in itertools.groupby(committables, self.checkpoint_of):
            asked = list(group)
            try:
                if type(sink).commit_all is Sink.commit_all:
                    answers += commit_in_threads(sink, asked, threads=1)
                else:
                    answers += sink.notify_checkpoint_complete(checkpoint, asked)
            except Exception as error:
                answers += [error] * len(asked)
        return answers

    def checkpoint_of(self, committable: Committable) -> Checkpoint:
        """The checkpoint in which `pre_committed` made it."""
        return _checkpoints.get(_text(committable.transaction), Checkpoint(self.job, LINEAGE, 0))

    def outcomes(
        self, sink: Sink, *committables: Committable, clause: Clause = Clause.COMMIT
    ) -> list[CommitOutcome]:
        """Asked again while one of them is an exception."""
        for _ in range(_TRIES):
            answers = self.answers(sink, *committables)
            outcomes = [answer for answer in answers if isinstance(answer, CommitOutcome)]
            if len(outcomes) == len(committables):
                return outcomes
        error = next(answer for answer in answers if isinstance(answer, Exception))
        raise AssertionError(
            clause.broken(f"commit, asked {_TRIES} times, raised {_short(repr(error))}")
        ) from error

    def commit(
        self, sink: Sink, *committables: Committable, clause: Clause = Clause.COMMIT, when: str = ""
    ) -> None:
        """All have to be COMMITTED."""
        outcomes = self.outcomes(sink, *committables, clause=clause)
        assert all(o == CommitOutcome.COMMITTED for o in outcomes), clause.broken(
            f"{_described(outcomes)} {when}"
        )

    def abort(
        self, sink: Sink, committable: Committable, clause: Clause = Clause.ABORT, when: str = ""
    ) -> None:
        identity = json.loads(json.dumps(dict(committable.transaction)))
        self.open(sink)
        with clause.guarding(f"abort {when}"):
            sink.abort(identity)

    def doubts(self, sink: Sink, job: str = "") -> list[Identity]:
        self.open(sink)
        with Clause.IN_DOUBT.guarding("in_doubt"):
            return [dict(identity) for identity in sink.in_doubt(job or self.job)]

    def memory(self, sink: Sink, job: str = "") -> Mapping[str, int] | None:
        self.open(sink)
        with Clause.MEMORY.guarding("committed_checkpoints"):
            return sink.committed_checkpoints(job or self.job)

    def purge(
        self, sink: Sink, checkpoint: int, oldest: int, job: str = "", clause: Clause = Clause.PURGE
    ) -> None:
        with clause.guarding("purge"):
            sink.purge(Checkpoint(job or self.job, LINEAGE, checkpoint, oldest_retained=oldest))

    def sweep(self, sink: Sink, clause: Clause, when: str) -> None:
        """Abort what is in doubt; then nothing is."""
        for identity in self.doubts(sink):
            self.abort(sink, Committable(identity), clause, f"of what `in_doubt` lists {when}")
        self.expect_doubts(sink, clause, f"{when}, and a sweep")

    # ------------------------------------------------------------------ what has to be seen
    def expect_rows(self, sink: Sink, clause: Clause, when: str, *tables: pa.Table) -> None:
        """These rows are visible, each once, and no other."""
        with clause.guarding(f"{when}, `visible`"):
            seen = self.seen(sink, (tables[0].schema if tables else SCHEMA).names)
        expected = self.counted(*tables)
        difference = _difference(seen, expected)
        if _named:
            names = _short(", ".join(map(ascii, _named)))
            difference += (
                f" (`named` made {names}: override it in your kit if they have another target)"
            )
        assert seen == expected, clause.broken(f"{when}, {difference}")

    def expect_named(self, sink: Sink, when: str, *tables: pa.Table) -> None:
        """These rows are visible after a commit. If others are too, it ended more than it names."""
        more = self.seen(sink) > self.counted(*tables)
        self.expect_rows(sink, Clause.COMMIT_BY_NAME if more else Clause.NAMES, when, *tables)

    def expect_doubts(
        self, sink: Sink, clause: Clause, when: str, *committables: Committable, job: str = ""
    ) -> None:
        """These are in doubt, each once, and no other."""
        listed = Counter(map(_text, self.doubts(sink, job)))
        expected = Counter(_text(committable.transaction) for committable in committables)
        lacks = sorted((expected - listed).elements())
        more = sorted((listed - expected).elements())
        if lacks and not more and clause in (Clause.IN_DOUBT_JOB, Clause.IN_DOUBT_SINK):
            clause = Clause.IN_DOUBT
        faults = [f"lacks {_few(lacks)}"] * bool(lacks) + [
            f"lists {_few(more)} beside what it should"
        ] * bool(more)
        if lacks and len(lacks) == len(more):
            faults = [
                f"lists {_few(more)} for what pre_commit answered {_few(lacks)}; "
                f"{_unlike(lacks[0], more[0])}"
            ]
        assert listed == expected, clause.broken(f"{when}, `in_doubt` {', and '.join(faults)}")

    def expect_state(
        self, sink: Sink, clause: Clause, when: str, committable: Committable, *states: CommitState
    ) -> CommitOutcome:
        """What `commit` answers has one of these states; default: LOST."""
        (outcome,) = self.outcomes(sink, committable, clause=clause)
        assert outcome.state in (states or (CommitState.LOST,)), clause.broken(
            f"{when}, commit answers {outcome}"
        )
        return outcome

    def expect_memory(
        self, sink: Sink, clause: Clause, when: str, memory: Mapping[str, int] | None
    ) -> None:
        seen = self.memory(sink)
        assert seen == memory, clause.broken(
            f"{when}, committed_checkpoints is {seen} instead of {memory}"
        )

    def expect_remembered(self, sink: Sink, committable: Committable, when: str) -> None:
        """The memory names its checkpoint, which is the newest, if the sink has a memory."""
        memory = self.memory(sink)
        checkpoint = self.checkpoint_of(committable)
        right = memory is None or memory.get(checkpoint.lineage) == checkpoint.checkpoint_id
        assert right or not committable.remembered, Clause.MEMORY.broken(
            f"{when}, the rows of checkpoint {checkpoint.checkpoint_id} are visible, and "
            f"committed_checkpoints is {memory}"
        )

    def expect_retried(self, error: Exception, when: str) -> None:
        """Spark tries a task again that ended with this error, which is the system's."""
        final = isinstance(error, SinkError) and not error.retryable
        assert not final, Clause.RETRY.broken(f"{when} raised {type(error).__name__}: {error}")

    def expect_owned(self, sink: Sink, committable: Committable, which: str, job: str = "") -> None:
        """The sink knows it as its own."""
        identity = committable.transaction
        with Clause.OWNS.guarding(f"owns of {identity}, {which},"):
            owns = sink.owns(job or self.job, identity)
        assert owns, Clause.OWNS.broken(
            f"{owns!r} for job {job or self.job!a} and {identity}, {which}"
        )

    def expect_end(self, clause: Clause, who: str, ended: tuple[int, str], *expected: int) -> None:
        """The exit code of a process, with what it said; default: `KILLED`."""
        code, said = ended
        assert code != NOT_UNPICKLED, Clause.PICKLED.broken(
            f"another process cannot unpickle it; it said:\n{said}"
        )
        assert code in (expected or (KILLED,)), clause.broken(
            f"{who} ended with {code}; it said:\n{said}"
        )

    def expect_no_leftovers(
        self, sink: Sink, when: str, before: Sequence[str] = (), clause: Clause = Clause.LEFTOVERS
    ) -> None:
        left = sorted(set(self.leftovers(sink)) - set(before))
        assert left == [], clause.broken(f"{when}, there is {', '.join(left)}")

    def seen(self, sink: Sink, names: Sequence[str] = SCHEMA.names) -> Counter[Row]:
        seen = list(self.visible(sink))
        if not all(isinstance(row, Mapping) for row in seen):
            pytest.fail(
                f"`visible` of {type(self).__name__} has to return whole rows as dicts, not "
                f"{seen[:1]}"
            )
        return Counter(
            tuple(_hashable(row.get(name, "(no such column)")) for name in names) for row in seen
        )

    def counted(self, *tables: pa.Table) -> Counter[Row]:
        return Counter(
            tuple(map(_hashable, row.values())) for table in tables for row in table.to_pylist()
        )


def forget(*errors: object) -> None:
    """What the frames of these hold, such as cursors and locks, is let go of: nobody keeps an
    exception for long."""
    for error in errors:
        while isinstance(error, BaseException):
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
            error = error.__cause__ or error.__context__


def _hashable(value: Any) -> Any:
    if value is None or isinstance(value, (int, str)):
        return value  # most are such, and to ask for a Mapping takes longer
    if isinstance(value, Mapping):
        return tuple((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, float) and (value == 0 or value != value):
        return repr(value)  # NaN is not itself, and -0.0 is 0.0
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _text(identity: Mapping[str, Any]) -> str:
    return json.dumps(
        {str(name): value for name, value in identity.items()}, sort_keys=True, default=repr
    )


def _unlike(expected: str, listed: str) -> str:
    here = json.loads(expected)
    there = json.loads(listed)
    unlike = [name for name in {**here, **there} if here.get(name, ...) != there.get(name, ...)]
    return ", ".join(
        f"{name!r} is {there.get(name, 'missing')!a} instead of {here.get(name, 'missing')!a}"
        for name in unlike
    )


def _few(texts: Sequence[str]) -> str:
    return ", ".join(texts[:3]) + f" and {len(texts) - 3} more" * (len(texts) > 3)


def _short(text: str, length: int = 200) -> str:
    return text if len(text) <= length else f"{text[:length]}… ({len(text)} characters)"


def _described(outcomes: Sequence[CommitOutcome]) -> str:
    return ", ".join(f"{o.state.name} ({o.reason})" if o.reason else o.state.name for o in outcomes)


def _difference(seen: Counter[Row], expected: Counter[Row]) -> str:
    """What is missing, what is doubled, and what is there and should not be."""
    missing = expected - seen
    more = seen - expected
    doubled = [row for row in more if row in expected]
    strange = [row for row in more if row not in expected]
    parts = []
    for what, unequal in (
        ("lost", list(missing)),
        ("visible twice", doubled),
        ("visible, unexpected", strange),
    ):
        if unequal:
            parts.append(
                f"{len(unequal)} rows {what}: {_short(ascii(unequal[0]))}"
                + " and others" * (len(unequal) > 1)
            )
    return "; ".join(parts)
