"""`KafkaSink`: exactly-once into Kafka topics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
from kafka.errors import GroupAuthorizationFailedError, KafkaError

from sinks.audit import Audit, Holding, Part
from sinks.base import Sink
from sinks.dead_letters import SCHEMA, DeadLetters, Refusal, without
from sinks.diagnosis import Finding, InDoubt, SchemaDiff
from sinks.errors import BadValue, CommittedError, ConfigurationError, TransactionEnded
from sinks.kafka import columns, dead_letters
from sinks.kafka.access import BrokerAccess
from sinks.kafka.audit import audit
from sinks.kafka.cluster import COMMITTED_STATES, Cluster
from sinks.kafka.commit import (
    ASK_THE_WITNESS,
    INVALID_TXN_STATE,
    Commit,
    in_part,
    made_anew,
    ongoing,
    places_of_all,
    topics_of,
)
from sinks.kafka.errors import NO_PERMISSION_ON_GROUP, NotYetKnown
from sinks.kafka.internals import KAFKA_PYTHON
from sinks.kafka.memory import Mark, newest_marks
from sinks.kafka.options import option_problems, producer_options
from sinks.kafka.producer import TransactionalProducer
from sinks.kafka.schemas import Schemas
from sinks.kafka.serialization import SchemaEvolution
from sinks.kafka.target_topic import TargetTopic
from sinks.kafka.value_serializer import SerializerFactory, serialize_values
from sinks.optional import (
    Auditable,
    DeadLettering,
    Diagnosable,
    DirectCommitting,
    SchemaEvolving,
    Validating,
)
from sinks.options import Duration, no_flags, seconds_of_sink
from sinks.projection import Projection
from sinks.transaction import (
    Checkpoint,
    CommitOutcome,
    Committable,
    Identity,
    TransactionContext,
    TransactionId,
    shown,
    token,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


Transform = Callable[["DataFrame"], "DataFrame"]


class KafkaSink(
    DeadLettering[TransactionalProducer],
    SchemaEvolving[TransactionalProducer],
    Validating[TransactionalProducer],
    DirectCommitting[TransactionalProducer],
    Auditable[TransactionalProducer],
    Diagnosable[TransactionalProducer],
):
    """A sink that writes records into one topic, or into the topics that a column `topic` names.

    The columns are those of Spark's Kafka sink. They are `value` and `key` (string or binary; a
    null value is a tombstone), `topic` (string), `partition` (int), `headers` (array of struct<key:
    string, value: binary>), and `timestamp`.

    Each task writes one Kafka transaction and leaves it open, and the driver ends it by EndTxn.
    Consumers with `isolation.level=read_committed` see the records only then, and wait for them
    until then.
    """

    system = "Kafka"

    def __init__(
        self,
        bootstrap_servers: str,
        topic: str | None = None,
        *,
        name: str | None = None,
        options: Mapping[str, Any] | None = None,
        transaction_timeout: Duration = 900.0,
        create_topic: bool = False,
        value_format: Literal["json", "avro"] | None = None,
        schema_registry: str | Mapping[str, Any] | None = None,
        subject: str | None = None,
        key_format: Literal["avro"] | None = None,
        key_subject: str | None = None,
        schema_evolution: SchemaEvolution = "none",
        value_serializer: SerializerFactory | None = None,
        timeout: Duration = 30.0,
        transform: Callable[[DataFrame], DataFrame] | None = None,
        client_options: Mapping[str, Any] | None = None,
        remember: bool = True,
        dead_letters: Sink | None = None,
        max_dead_letters: int | float = 1000,
    ) -> None:
        """Set up the sink; nothing is connected yet.

        * `topic` is for rows without a column `topic`. `name` (default: the topic, or "kafka") is
          the sink's uid.
        * `options` have librdkafka's names: `security.protocol`, `sasl.…`, `ssl.…`,
          `compression.type` … (docs/kafka.md has all).
        * `transaction_timeout` is how long the broker keeps a transaction open after a task's first
          record, in seconds, or as a string such as "15 min". If the broker aborts a transaction
          after the commit decision, its rows are written again, so nothing is lost. The timeout
          must be below the broker's transaction.max.timeout.ms (15 minutes by default).
        * `create_topic` creates a missing `topic` with the brokers' defaults.
        * `value_format="json"` makes JSON of a `value` or `key` of struct, map or array type.
          Without a column `value`, all other columns become its fields.
        * `value_format="avro"` writes `value`, which is a struct or the struct of all other
          columns, as a record of Avro in Confluent's wire format. `schema_registry` is the
          registry's URL, or settings of confluent-kafka's SchemaRegistryClient. `subject` (default:
          `topic` + "-value") has the schema. With `schema_evolution="none"` that schema has to take
          the rows; "add" registers new nullable fields, and a first version; "widen" also registers
          wider numbers. See docs/schema-registry.md
        * `key_format="avro"` writes `key`, which is a struct, as a record of Avro, by the first
          version of `key_subject` (default: `topic` + "-key"), which never changes. Unless
          `schema_evolution` is "none", the sink registers that version.
        * `value_serializer` is a function without arguments, called once in each task. It returns a
          serializer like those of confluent-kafka's schema registry client (Avro, Protobuf, JSON
          Schema), which is called with each value (a struct is a dict) and a SerializationContext,
          and returns bytes.
        * `timeout` is how long a request to a broker may take, in seconds, or as a string such as
          "30 s".
        * `client_options` are options of kafka-python's client, which connects to the brokers. All
          options travel to the executors, so they must be picklable.
        * `remember` says whether transactions carry an offset of the consumer group `tpc.JOB.SINK`.
          By the offset, a start notices that checkpoint storage was restored to an older state. The
          principal needs the permission Read on the topic and on groups of that prefix.
        * `dead_letters` is a sink for rows that no topic takes. `max_dead_letters` is the most of
          them in a checkpoint, or, as a float, their largest share of its rows.

        Raises ConfigurationError for options that the sink sets itself, and for a kafka-python that
        the sink cannot use.
        """
        KAFKA_PYTHON.check()
        if value_format in _FORMATS:
            transform = _in_format(transform, columns.KafkaColumns(value_format == "json"))
        super().__init__(
            name=name or topic or "kafka",
            transform=transform,
            dead_letters=dead_letters,
            max_dead_letters=max_dead_letters,
        )
        self.bootstrap_servers = bootstrap_servers
        self.topic = topic
        self.create_topic = create_topic
        self.timeout = seconds_of_sink(self.name, timeout, "timeout")
        transaction_timeout = seconds_of_sink(self.name, transaction_timeout, "transaction_timeout")
        self.value_serializer = value_serializer
        self.remember = remember
        problems = list(option_problems(options or {}, transaction_timeout))
        problems += no_flags(create_topic=create_topic, remember=remember)
        if self.timeout <= 0:
            problems.append("timeout must be more than 0 seconds")
        if value_format not in (None, *_FORMATS):
            problems.append(
                f"value_format is one of {', '.join(map(repr, _FORMATS))} or None, not "
                f"{value_format!r}"
            )
        self._schemas = Schemas(
            self.name,
            topic,
            value_format=value_format,
            key_format=key_format,
            registry=schema_registry,
            subject=subject,
            key_subject=key_subject,
            evolution=schema_evolution,
            timeout=self.timeout,
        )
        self.evolves = bool(self._schemas)
        problems += self._schemas.problems
        if value_format == "avro" and value_serializer:
            problems.append(
                "values are written by value_format='avro' or by a value_serializer, not by both"
            )
        if value_serializer and dead_letters:
            problems.append(
                "what a value_serializer refuses fails the checkpoint: it takes no dead_letters"
            )
        if problems:
            raise ConfigurationError(f"sink {self.name!r}: " + "; ".join(problems))
        self._producer_options = producer_options(options or {}, transaction_timeout)
        self._access = BrokerAccess(
            bootstrap_servers, options or {}, client_options or {}, self.timeout
        )
        self._target = TargetTopic(
            self._access,
            topic,
            sink=self.name,
            create_topic=create_topic,
            remember=remember,
            options=self._producer_options,
        )
        self._committed: Sequence[Committable] = ()
        """The committables that `commit_all` got last."""

    # ------------------------------------------------------------------ set-up
    def check(self, schema: pa.Schema) -> None:
        """Check the columns, the brokers, the topic and the transaction timeout.

        A missing topic is created if the sink has `create_topic`. The sink begins a transaction
        without records, and aborts it, to see whether the brokers accept the timeout. Raises
        ConfigurationError with what is wrong, or SchemaMismatch if only columns are wrong.
        """
        if schema == SCHEMA and self.value_serializer:
            raise ConfigurationError(
                f"sink {self.name!r}: dead letters are bytes already: leave value_serializer out"
            )
        schema = dead_letters.RECORDS if schema == SCHEMA else schema
        serialized = [*self._schemas.columns, *(["value"] if self.value_serializer else [])]
        columns.check(self.name, schema, self.topic, serialized)
        self._target.check()
        self._schemas.check(schema, self._written_last)
        self._target.read_limit()

    def evolve(self, schema: pa.Schema) -> None:
        self._schemas.evolve(schema)

    def schema_diff(self, schema: pa.Schema) -> SchemaDiff | None:
        return self._schemas.diff(schema)

    def _written_last(self, named: str) -> Iterable[Committable]:
        """Return the newest checkpoint's transactions that have `named` in their proof.

        A topic that was recreated has no such records, so its transactions are left out.
        """
        written = [committable for committable in self._committed if named in committable.proof]
        ids = self._brokers.topics.ids(topics_of(written)) if written else {}
        return [committable for committable in written if not made_anew(committable, ids)]

    def weaknesses(self) -> Sequence[str]:
        return self._target.weaknesses()

    # ------------------------------------------------------------------ in the task
    def begin_transaction(self, context: TransactionContext) -> TransactionalProducer:
        """Begin a transaction under a transactional id of the sink's pool.

        The same few ids serve all checkpoints, because a broker keeps each id for days. Raises what
        keeps the brokers from answering within twice the sink's `timeout`.
        """
        pooled = f"{_prefix(context.job, self.name)}{context.subtask}.{context.slot}"
        round = TransactionId.parse(context.transaction_id).round
        mark = Mark(_group(context.job, self.name), context.lineage, context.checkpoint_id, round)
        marked = self.remember and context.exactly_once
        producer = self._target.producer(pooled, mark if marked else None)
        producer.serialize = self.value_serializer and self.value_serializer()
        try:
            producer.begin(2 * self.timeout)  # as in `BrokerAccess.patiently`
        except BaseException:
            producer.close()
            self._access.leave_nothing()
            raise
        return producer

    def write(self, transaction: TransactionalProducer, batch: pa.RecordBatch) -> None:
        rows, refused = self._as_records(batch)
        if refused:
            bad = min(refused, key=lambda refusal: refusal.row)
            raise BadValue(
                f"sink {self.name!r}: row {bad.row + 1} of a batch: {bad.error}"
            ).because(bad.error, bad.error_class)
        if transaction.serialize:
            rows = serialize_values(
                rows, transaction.serialize, sink=self.name, default_topic=self.topic
            )
        transaction.write(rows)

    def _as_records(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[Refusal]]:
        """Return the rows as they are produced, and the rows that cannot be produced."""
        if batch.schema == SCHEMA:
            return dead_letters.records(batch), []
        refused = list(columns.refused(batch, self.topic))
        batch, bad = self._schemas.encoded(batch)
        return batch, [*refused, *bad]

    def write_good_rows(
        self, transaction: TransactionalProducer, batch: pa.RecordBatch, most: int
    ) -> Sequence[Refusal]:
        """Write the rows that the columns alone do not rule out, and return the others.

        Nothing is produced if all rows, or more than `most`, are ruled out.
        """
        rows, unwritable = self._as_records(batch)
        by_row = {refusal.row: refusal for refusal in unwritable}
        left = without(batch.num_rows, unwritable)
        others = rows.take(left) if unwritable else rows
        for refusal in dead_letters.refused(others, self.topic, transaction):
            row = left[refusal.row].as_py()
            by_row.setdefault(row, replace(refusal, row=row))
        refused = [by_row[row] for row in sorted(by_row)]
        if len(refused) < batch.num_rows and len(refused) <= most:
            transaction.write(rows.take(without(batch.num_rows, refused)) if refused else rows)
        return refused

    def pre_commit(self, transaction: TransactionalProducer) -> Committable:
        sealed = transaction.seal(self._delivery_timeout)
        transaction.close()
        remembered = self.remember and self.topic is not None
        proof = {
            **sealed.proof,
            "target": str(self._target),
            "remembered": remembered,
            **self._schemas.named,
        }
        return replace(sealed, proof=proof)

    def rollback(self, transaction: TransactionalProducer) -> None:
        try:
            transaction.abort(self.timeout)
        finally:
            transaction.close()
            self._access.leave_nothing()

    def commit_directly(self, transaction: TransactionalProducer) -> None:
        """Commit the task's own transaction, in at-least-once mode."""
        transaction.commit(self._delivery_timeout)
        transaction.close()

    @property
    def _delivery_timeout(self) -> float:
        return self._producer_options.transaction_timeout_ms / 1000

    # ------------------------------------------------------------------ on the driver
    def validate_all(self, checkpoint: Checkpoint, committables: Sequence[Committable]) -> None:
        """Raise TransactionEnded if a transaction is not open any more, or not whole.

        If somebody ended the transaction before the commit decision, its rows are written again,
        and nothing is asked of the query.
        """
        names = [committable.transaction["transactional_id"] for committable in committables]
        places = places_of_all(committables)
        states, logs = self._access.patiently(lambda: self._brokers.states_and_logs(names, places))
        why = (
            f"the brokers have ended it after transaction_timeout ({self._delivery_timeout:g} s; "
            "raise it, if batches take longer), an operator or another driver of this job has, or "
            "a topic that it wrote to was deleted or made anew"
        )
        closed = [
            at
            for at, committable in enumerate(committables)
            if states.get(names[at]) != ongoing(committable)
        ]
        ended = dict.fromkeys(closed, why) or in_part(committables, logs)
        if ended:
            at, why = next(iter(ended.items()))
            raise TransactionEnded(
                f"sink {self.name!r}: {len(ended)} of {len(committables)} transactions of "
                f"checkpoint {checkpoint.checkpoint_id} are not open any more, or not whole. Of "
                f"{shown(committables[at].transaction)}: {why}"
            )

    def commit(self, committable: Committable) -> CommitOutcome:
        (outcome,) = self._commit([committable])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def commit_all(
        self, checkpoint: Checkpoint, committables: Sequence[Committable]
    ) -> Sequence[CommitOutcome | Exception]:
        """Commit all transactions, with all requests in flight at once.

        The rows become visible some milliseconds after the answers, by the brokers' markers.
        """
        self._committed = committables
        return self._commit(committables)

    def _commit(self, committables: Sequence[Committable]) -> Sequence[CommitOutcome | Exception]:
        return Commit(
            self.name,
            self._brokers,
            self.bootstrap_servers,
            str(self._target),
            self._access.patiently,
        ).of(committables)

    def abort(self, transaction: Identity) -> None:
        (answer,) = self._brokers.end([transaction], commit=False)
        if isinstance(answer, Exception):
            raise answer
        name = transaction["transactional_id"]
        if answer == INVALID_TXN_STATE:
            state = self._brokers.states([name]).get(name)
            if state and state[1] in COMMITTED_STATES:
                raise CommittedError(
                    f"transaction {shown(transaction)} is committed: the coordinator has it as "
                    f"{state[1]}"
                )
        elif answer and answer not in ASK_THE_WITNESS:
            raise NotYetKnown(f"{name} could not be aborted: the broker answered {answer}")

    def owns(self, job: str, transaction: Identity) -> bool:
        return str(transaction.get("transactional_id")).startswith(_prefix(job, self.name))

    def in_doubt(self, job: str) -> Iterable[Identity]:
        return self._brokers.ongoing(_prefix(job, self.name))

    def committed_checkpoints(self, job: str) -> Mapping[str, int] | None:
        """Return the newest checkpoint of each lineage that the consumer group has an offset of.

        Return None if the group has no offset. Nobody ever wrote one, it has expired, or it was
        deleted with the topic.
        """
        return {
            lineage: checkpoint for lineage, (checkpoint, _) in self._rounds(job).items()
        } or None

    def _rounds(self, job: str) -> Mapping[str, tuple[int, int]]:
        """Return by lineage the newest checkpoint and its newest round.

        Raises ConfigurationError if the principal may not read the consumer group.
        """
        if not self.remember:
            return {}
        group = _group(job, self.name)
        prefix = _prefix(job, self.name)
        try:
            return newest_marks(
                self._access.patiently(lambda: self._brokers.memory.settled_offsets(group, prefix))
            )
        except GroupAuthorizationFailedError as error:
            raise ConfigurationError(f"sink {self.name!r}: {NO_PERMISSION_ON_GROUP}") from error

    # ------------------------------------------------------------------ for operators
    def set_answer_timeout(self, seconds: float) -> None:
        self._access.set_answer_timeout(seconds)

    def diagnose(self, job: str) -> Iterable[Finding]:
        try:
            self._target.check()
        except ConfigurationError as error:
            what, _, fix = str(error).partition(". ")
            yield Finding.error(what, fix or "see what the message names")
            if isinstance(error.__cause__, KafkaError):  # nobody answers
                return
        else:
            yield Finding.ok("a transaction was begun and aborted")
        yield from self._target.findings()
        yield from self._schemas.diagnose()
        yield from super().diagnose(job)

    def inspect(self, transactions: Sequence[Identity]) -> Sequence[InDoubt]:
        names = [transaction["transactional_id"] for transaction in transactions]
        about = zip(transactions, names, self._brokers.ages(names), strict=True)
        return [
            InDoubt(identity, subtask=int(name.split(".")[-2]), age=age)
            for identity, name, age in about
        ]

    def audit(self, job: str, parts: Sequence[Part], *, quick: bool = False) -> Audit:
        """Count the records by the record batches in the log, and by what the brokers remember.

        With `quick`, the log is not read.
        """
        if quick:
            counted = Audit([Holding(remarks=("the log was not read",))] * len(parts))
        else:
            counted = audit(self._brokers, parts, min(self.timeout, self._access.seconds_left))
        rounds = self._rounds(job)

        def not_among(part: Part) -> tuple[str, ...]:
            checkpoint, round = rounds.get(part.lineage, (-1, 0))
            later = checkpoint == part.checkpoint_id and round > part.round
            return (f"a transaction of its replay {round}",) if later else ()

        together = zip(counted.holdings, parts, strict=True)
        return replace(
            counted,
            holdings=[replace(holding, unexpected=not_among(part)) for holding, part in together],
        )

    def read_dead_letters(self, job: str, sink: str, most: int) -> DeadLetters | None:
        """Return the newest dead letters that a consumer gets from the topic now.

        Return None if the sink has no topic of its own.
        """
        if self.topic is None:
            return None
        return dead_letters.read_dead_letters(self._brokers, self.topic, (job, sink), most)

    # ------------------------------------------------------------------ life
    @property
    def _brokers(self) -> Cluster:
        return self._access.cluster

    def close(self) -> None:
        self._access.close()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_committed": ()}

    def __repr__(self) -> str:
        return (
            f"KafkaSink(name={self.name!r}, topic={self.topic!r}, "
            f"bootstrap_servers={self.bootstrap_servers!r})"
        )


_FORMATS = ("json", "avro")


def _in_format(before: Transform | None, after: columns.KafkaColumns) -> Transform:
    """Return the transform that makes the columns of a `value_format` after the user's own one."""
    if before is None or isinstance(before, Projection):
        return replace(after, before=before)
    return lambda df: after(before(df))


def _group(job: str, sink: str) -> str:
    return f"tpc.{token(job)}.{token(sink)}"


def _prefix(job: str, sink: str) -> str:
    return f"{_group(job, sink)}."
