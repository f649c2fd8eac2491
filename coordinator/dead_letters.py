"""Dead letters that are put through their sink again, exactly once (`coordinator dead-letters replay`).

A replay is a checkpoint of a job of its own, which stands beside the one that streams: the same two sinks and the same
storage, but its own lineage, generations and transactions. Its input are letters, and its offsets name all that were
ever put through. So the record that decides that rows are written is also the mark that their letters were, and what
is refused again is a letter of this checkpoint.
"""

from __future__ import annotations

import copy
import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NoReturn

import pyarrow as pa

from coordinator.config import CheckpointConfig, Replay
from coordinator.errors import CheckpointError, CheckpointLocationMismatch, DeadLetterError
from coordinator.listener import CheckpointListener, Listeners
from coordinator.protocol.batch import BatchFacts, Sink, TopicIds
from coordinator.protocol.clock import Clock
from coordinator.protocol.dead_letters import with_dead_letters
from coordinator.protocol.protocol import CheckpointProtocol
from coordinator.protocol.records import CheckpointStore, Record
from coordinator.protocol.spool import Spool
from coordinator.storage import CheckpointStorage, open_storage
from sinks.dead_letters import MOST, has_one_of
from sinks.spark_types import schema_of_json
from sinks.sql.from_json import from_json, loads, members
from sinks.task import HASH_COLUMN, Ack, SinkTask

_QUERY = "dead letters"
"""In place of the id of a query."""
_TRIES = 5
_KEYS = ("lineage", "checkpoint", "partition", "row_number")


@dataclass(frozen=True, order=True)
class LetterId:
    """Which row was refused. `lineage` is of one job only. As text, and on the command line, joined by dots."""

    lineage: str
    checkpoint: int
    partition: int
    row_number: int

    def __str__(self) -> str:
        return ".".join(map(str, (self.lineage, self.checkpoint, self.partition, self.row_number)))


@dataclass(frozen=True)
class Letter:
    """`columns` are those of its table. `mended`: the row in place of the one there, as `loads` gives it."""

    id: LetterId
    columns: Mapping[str, Any] = field(compare=False)
    replayed: bool
    mended: Any = None

    @property
    def row(self) -> str:
        if self.mended is not None:
            return json.dumps(self.mended, default=str)
        return _text(self.columns["row"])

    def values(self, schema: pa.Schema) -> list[Any]:
        """Of its columns, as `loads` gives them. Raises `DeadLetterError`."""
        try:
            row = loads(self.row) if self.mended is None else self.mended
            if self.mended is None and not isinstance(self.columns["row"], str):
                json.loads(self.row, parse_float=_cut_off)
            known = members(row, schema.names)
            values = [known[name] for name in schema.names]
            for name, value in zip(schema.names, values, strict=True):
                try:
                    from_json([value], schema.field(name).type)
                except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
                    raise ValueError(f"column {name!r}: {error}") from error
        except ValueError as error:
            columns = ", ".join(f"{one.name} {one.type}" for one in schema)
            raise DeadLetterError(
                f"letter {self.id} cannot be put through: its row is not of the columns that its row_schema names, "
                f"{columns}: {error}. Mend it in its table, or in a file for --from. Nothing was changed."
            ) from error
        return values


def _cut_off(number: str) -> NoReturn:
    raise ValueError(f"{number} may have had more digits: the column `row` is JSON, make it a text")


@dataclass(frozen=True)
class Replayed:
    """What became of letters that were to be put through again. `before`: those that had been, by an earlier replay;
    `reasons`: class and text of the first errors of those that were refused again; `gaps`: why there may have been
    more letters of these names than their sink could tell."""

    written: int = 0
    refused: int = 0
    before: int = 0
    reasons: tuple[tuple[str, str], ...] = ()
    gaps: tuple[str, ...] = ()


class DeadLetters:
    """Those of one sink of a job, until `close`. For one thread; others may do the same at the same time."""

    def __init__(
        self,
        job: str,
        sink: Sink,
        storage: str | CheckpointStorage,
        config: CheckpointConfig,
        listeners: Sequence[CheckpointListener] = (),
    ) -> None:
        """`storage` and `config` are those of the job. Raises ValueError for a sink without dead letters."""
        sink = copy.deepcopy(sink)  # a query may use the other at the same time
        if sink.dead_letters is None:
            raise ValueError(f"sink {sink.name!r} has no dead letters")
        self.job, self.sink, self.dead = job, sink, sink.dead_letters
        sink.max_dead_letters = MOST
        self.replay_job = replay_job(job, sink.name)
        self.gaps: tuple[str, ...] = ()
        """Why letters may be missing among those that were found last: what their sink has said."""
        self._storage, self._config, self._listeners = storage, config, listeners

    # ------------------------------------------------------------------ to look
    def find(self, wanted: Sequence[str] = (), most: int | None = None) -> list[Letter] | None:
        """Letters whose id begins with one of `wanted` (all, if that is empty), newest first, each once. None if their
        sink cannot tell them. Changes nothing."""
        return self._find(self._through(), wanted, most)

    def _through(self) -> _Through:
        store = CheckpointStore(open_storage(self._storage), self.replay_job)
        try:
            rounds = store.load_newest()
        finally:
            if store.storage is not self._storage:
                store.storage.close()
        return _Through.of(rounds[0] if rounds else None)

    def _find(self, through: _Through, wanted: Sequence[str], most: int | None = None) -> list[Letter] | None:
        asked = [
            {"job": job, "sink": self.sink.name, **where}
            for where in [_where(text) for text in wanted] or [{}]
            for job in (self.job, self.replay_job)
        ]
        told = self.dead.find_letters(asked, most)
        if told is None:
            return None
        self.gaps = told.gaps
        found: dict[LetterId, Letter] = {}
        for one in filter(has_one_of(asked), told.letters):  # a collation may take two texts for one
            letter = _letter(one, through)
            if found.setdefault(letter.id, letter).columns is not one and not _same(found[letter.id], letter):
                raise DeadLetterError(
                    f"two different letters in {self.dead!r} have the id {letter.id}: the job was not "
                    "exactly-once, or somebody has copied rows there. Delete one of them. Nothing was changed."
                )
        return sorted(found.values(), key=lambda one: (one.columns["time"], one.id), reverse=True)[:most]

    def unfinished(self) -> int:
        """Transactions of a replay that are in doubt: of one that runs, or was cut off."""
        for sink in (self.sink, self.dead):
            sink.open()
        return sum(len(list(sink.in_doubt(self.replay_job))) for sink in (self.sink, self.dead))

    # ------------------------------------------------------------------ to put through
    def finish(self) -> None:
        """See to it that what a replay has decided is visible, and that nothing of one that was cut off stays."""
        with self._protocol() as protocol:
            if _finish(protocol, str(uuid.uuid4())) or not protocol.store.newest_generation():
                return
            protocol.recover()
            for sink in protocol.sinks.values() if not protocol.newest else ():
                for transaction in list(sink.in_doubt(self.replay_job)):
                    protocol.abort_quietly(sink, transaction)  # the first replay was cut off before its record

    def replay(self, wanted: Sequence[str] = (), mended: Mapping[str, Any] | None = None) -> Replayed:
        """Put letters through the sink: those whose id begins with one of `wanted` (all, if that is empty), or those of
        `mended`, with these rows in place of their own. Those that were put through before are left out. When
        this returns, each row is visible once, in the sink's target or, refused again, as a new letter.

        Raises `DeadLetterError`, with nothing changed, for what cannot be put through as it is; `Superseded` when
        another replay of this sink has begun meanwhile; and the errors of a checkpoint."""
        own, told = set[LetterId](), Replayed()
        for tries in range(_TRIES):
            try:
                for one in self._replay(wanted, mended, own):
                    told = replace(one, written=told.written + one.written, refused=told.refused + one.refused)
                return told
            except CheckpointLocationMismatch:  # another replay has decided this checkpoint, with other letters
                if tries == _TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def _replay(
        self, wanted: Sequence[str], mended: Mapping[str, Any] | None, own: set[LetterId]
    ) -> Iterator[Replayed]:
        with self._protocol() as protocol:
            run_id = str(uuid.uuid4())
            through = _Through.of(_finish(protocol, run_id))
            chosen = self.choose(wanted, mended, through)
            before = sum(letter.replayed and letter.id not in own for letter in chosen)
            named = mended is not None or (wanted and all(len(_where(text)) == len(_KEYS) for text in wanted))
            gaps = () if named else self.gaps
            yield Replayed(before=before, gaps=gaps)
            for batch in _batches([letter for letter in chosen if not letter.replayed], run_id):
                through = through.with_all(letter.id for letter in batch.letters)
                number = protocol.newest.checkpoint_id + 1 if protocol.newest else 0
                batch.ask(number, through)
                protocol.process(batch)
                own.update(letter.id for letter in batch.letters)
                assert protocol.newest
                record = protocol.newest.record
                refused = [one for c in record.committables for one in c.refused]
                reasons = tuple((one.error_class, one.error) for one in refused[:3])
                yield Replayed(record.rows.get(self.sink.name, 0), len(refused), before, reasons, gaps)

    def choose(
        self, wanted: Sequence[str], mended: Mapping[str, Any] | None, through: _Through | None = None
    ) -> list[Letter]:
        """What `replay` would take, put through before or not, oldest first. Raises `DeadLetterError`."""
        through = through or self._through()
        if mended is not None:
            wanted = sorted({name.rpartition(".")[0] or name for name in mended})
        found = self._find(through, wanted)
        if found is None:
            raise DeadLetterError(
                f"{self.dead!r} cannot tell its letters, so they cannot be put through from here: read them by a query "
                "of its own (docs/dead-letters.md)"
            )
        by_name = {str(letter.id): letter for letter in found}
        if mended is not None:
            self._require_all([name for name in mended if name not in by_name])
            by_name = {name: replace(by_name[name], mended=row) for name, row in mended.items()}
        known = _Through({}).with_all(letter.id for letter in found)
        self._require_all([name for name in wanted if not known.has(name) and not through.has(name)])
        for batch in _batches([letter for letter in by_name.values() if not letter.replayed]):
            batch.rows_of()
        return sorted(by_name.values(), key=lambda letter: letter.id)

    def _require_all(self, missing: Sequence[str]) -> None:
        if missing:
            why = "".join(f" ({gap})" for gap in self.gaps)
            raise DeadLetterError(f"there is no letter {missing[0]} in {self.dead!r}{why}. Nothing was changed.")

    @contextmanager
    def _protocol(self) -> Iterator[CheckpointProtocol]:
        if not self._config.exactly_once:
            raise DeadLetterError(
                f"job {self.job!r} writes at least once, so a row may have two letters, and a replay would not be "
                "exactly-once. Nothing was changed."
            )
        for sink in (self.sink, self.dead):
            sink.reach_within(self._config.timeout + self._config.commit_timeout)  # a command may have said less
        with self.protocol() as protocol:
            try:
                yield protocol
            finally:
                if protocol.newest or protocol.has_swept:
                    with suppress(Exception):  # the next replay sweeps
                        protocol.sweep()

    @contextmanager
    def protocol(self) -> Iterator[CheckpointProtocol]:
        """That of the job that replays are checkpoints of. Raises `DeadLetterError` without a place for their rows."""
        where = self._config.spool_dir or self._storage
        if not isinstance(where, str):
            raise DeadLetterError("a replay keeps its rows by the URI of a storage: give the job one, or a spool_dir")
        try:
            spool = Spool(where, self.replay_job)
        except ValueError as error:
            raise DeadLetterError(f"a replay keeps its rows until they are visible: {error}") from error
        store = CheckpointStore(open_storage(self._storage), self.replay_job)
        protocol = CheckpointProtocol(
            self.replay_job,
            with_dead_letters([self.sink]),
            store,
            replace(self._config, replay=Replay.SPOOL, spool_dir=where, adopt=False),
            Listeners(self.replay_job, self._listeners),
            Clock(),
            claim=lambda _: store.claim_generation(),
            spool=spool,
        )
        try:
            yield protocol
        finally:
            protocol.close()

    def close(self) -> None:
        for sink in (self.sink, self.dead):
            with suppress(Exception):
                sink.close()

    def __enter__(self) -> DeadLetters:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def replay_job(job: str, sink: str) -> str:
    """The name of the job that replays of a sink's dead letters are checkpoints of."""
    return f"{job}/dead-letters/{sink}"


def _finish(protocol: CheckpointProtocol, run_id: str) -> Record | None:
    """Become the newest driver, and see the newest checkpoint through, whose record is returned; None: there is none,
    and nothing was done."""
    newest, seen = protocol.store.load_newest(), -1
    while newest and newest[0].checkpoint_id > seen:
        seen = newest[0].checkpoint_id
        protocol.process(_Batch.again(newest[0], run_id))
        assert protocol.newest
        newest = protocol.newest.rounds
    return newest[0] if newest else None


# ---------------------------------------------------------------------- letters
def _where(text: str) -> dict[str, object]:
    """Columns of the letters whose id begins so. Raises `DeadLetterError`."""
    lineage, *numbers = text.split(".")
    if not lineage or len(numbers) > 3 or not all(number.isdecimal() for number in numbers):
        raise DeadLetterError(f"{text!r} is no letter: write LINEAGE[.CHECKPOINT[.PARTITION[.ROW]]], as show has it")
    return dict(zip(_KEYS, (lineage, *map(int, numbers)), strict=False))


def _letter(columns: Mapping[str, Any], through: _Through) -> Letter:
    if not columns.get("lineage"):
        raise DeadLetterError(
            f"a letter of checkpoint {columns.get('checkpoint')} has no lineage: without it nobody can tell whether it "
            "was put through before. Nothing was changed."
        )
    lineage, *numbers = (columns[name] for name in _KEYS)
    id = LetterId(str(lineage), *map(int, numbers))
    return Letter(id, columns, id in through)


def _same(one: Letter, other: Letter) -> bool:
    return all(one.columns.get(name) == other.columns.get(name) for name in ("row", "row_schema"))


def _text(value: Any) -> str:
    """Of a column that should be a text, and may be JSON in a table of the user's own."""
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class _Through:
    """All letters that were ever put through: row numbers by the rest of the id."""

    rows: Mapping[str, frozenset[int]]

    @classmethod
    def of(cls, record: Record | None) -> _Through:
        ranges = json.loads(record.offsets[0])["through"] if record else {}
        return cls({key: frozenset(_numbers(text)) for key, text in ranges.items()})

    def to_json(self) -> str:
        ranges = {key: _ranges(rows) for key, rows in sorted(self.rows.items())}
        return json.dumps({"through": ranges}, separators=(",", ":"))

    def __contains__(self, id: LetterId) -> bool:
        return id.row_number in self.rows.get(_place(id), ())

    def has(self, name: str) -> bool:
        """Whether there is one whose id begins so."""
        place, _, number = name.rpartition(".")
        return any(one == name or one.startswith(f"{name}.") for one in self.rows) or (
            place in self.rows and int(number) in self.rows[place]
        )

    def with_all(self, ids: Iterable[LetterId]) -> _Through:
        rows = {key: set(numbers) for key, numbers in self.rows.items()}
        for id in ids:
            rows.setdefault(_place(id), set()).add(id.row_number)
        return _Through({key: frozenset(numbers) for key, numbers in rows.items()})


def _place(id: LetterId) -> str:
    return str(id).rpartition(".")[0]


def _ranges(numbers: Iterable[int]) -> str:
    """
    >>> _ranges([7, 1, 2, 3])
    '1-3,7'
    """
    runs = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    bounds = [[number for _, number in run] for _, run in runs]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in bounds)


def _numbers(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


# ---------------------------------------------------------------------- batches
def _batches(letters: Sequence[Letter], run_id: str = "") -> Iterator[_Batch]:
    """One schema each, and not more than may be refused again."""
    for letter in letters:
        if letter.columns.get("row_schema") is None:
            raise DeadLetterError(
                f"letter {letter.id} has no row_schema, which says of what types its row is (Spark has no name for one "
                "of them): write its row by hand, and delete the letter. Nothing was changed."
            )
    by_schema = sorted(letters, key=lambda letter: (_text(letter.columns["row_schema"]), letter.id))
    for text, group in groupby(by_schema, lambda letter: _text(letter.columns["row_schema"])):
        together = list(group)
        for start in range(0, len(together), MOST):
            yield _Batch(text, together[start : start + MOST], run_id)


class _Query:
    isActive = False  # noqa: N815 - Spark's name
    status: Mapping[str, Any] = {"isTriggerActive": False}

    def exception(self) -> None: ...
    def stop(self) -> None: ...


class _Batch:
    """Letters of one schema, as a micro-batch of one partition."""

    location, active, query = "", True, _Query()
    row_hashes = ("sha256",)

    def __init__(self, schema: str, letters: Sequence[Letter], run_id: str) -> None:
        self.facts = BatchFacts(-1, _QUERY, ())
        self.run_id = run_id
        self.letters = letters
        self.rows: int | None = len(letters)
        self._schema_text, self._schema = schema, schema_of_json(json.loads(schema))
        self._attempts = 0

    @classmethod
    def again(cls, record: Record, run_id: str) -> _Batch:
        """The one that a record has decided. Its rows are in the spool."""
        batch = cls(record.offsets[1], [], run_id)
        batch.facts = BatchFacts(record.checkpoint_id, record.query_id, record.offsets)
        return batch

    def ask(self, number: int, through: _Through) -> None:
        """Become the batch of that checkpoint. The offsets have what the letters say, too: a replay with the same
        letters, mended otherwise, is another one."""
        rows = hashlib.sha256("\n".join(f"{letter.id} {letter.row}" for letter in self.letters).encode()).hexdigest()
        offsets = (through.to_json(), self._schema_text, json.dumps({"rows": rows}))
        self.facts = BatchFacts(number, _QUERY, offsets)

    def rows_of(self) -> pa.RecordBatch:
        """With the row hash. Raises `DeadLetterError`."""
        values = [letter.values(self._schema) for letter in self.letters]
        columns = [from_json([row[at] for row in values], one.type) for at, one in enumerate(self._schema)]
        hashes = [hashlib.sha256(f"{letter.id} {letter.row}".encode()).digest()[:8] for letter in self.letters]
        numbers = pa.array([int.from_bytes(digest, "big", signed=True) for digest in hashes], pa.int64())
        schema = self._schema.append(pa.field(HASH_COLUMN, pa.int64()))
        return pa.RecordBatch.from_arrays([*columns, numbers], schema=schema)

    def schema(self, sink: Sink) -> pa.Schema:
        return self._schema

    def partitions(self, sink: Sink) -> int:
        return 1

    def run(self, tasks: Mapping[str, SinkTask], ended: Callable[[str], None], row_hash: str) -> dict[str, list[Ack]]:
        if not self.letters:
            raise CheckpointError(
                f"what the replay {self.facts.checkpoint_id} of dead letters has written was rolled back, and its rows "
                "are not kept any more. Restore the storage that keeps them."
            )
        return self._run(tasks, ended, [self.rows_of()])

    def run_alone(self, tasks: Mapping[str, SinkTask], ended: Callable[[str], None]) -> dict[str, list[Ack]]:
        return self._run(tasks, ended, [])

    def _run(
        self, tasks: Mapping[str, SinkTask], ended: Callable[[str], None], rows: Sequence[pa.RecordBatch]
    ) -> dict[str, list[Ack]]:
        acks: dict[str, list[Ack]] = {}
        for name, task in tasks.items():
            self._attempts += 1
            acks[name] = [copy.deepcopy(task).run(rows, 0, self._attempts)]  # opens and closes sinks of its own
            ended(name)
        return acks

    def cancel(self) -> None: ...

    def weaknesses(self, *, recomputed: bool) -> list[str]:
        return []

    def topic_ids(self) -> TopicIds:
        return ()

    def drain(self) -> None: ...

    def same_rows(self, other: Any) -> bool:
        return self is other

    def raise_stopped(self) -> NoReturn:
        raise AssertionError("nobody stops it")
