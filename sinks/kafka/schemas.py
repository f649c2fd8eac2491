"""The columns of a KafkaSink that a registry's schemas describe: `value` and `key`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sinks.dead_letters import Refusal
from sinks.diagnosis import Finding, SchemaDiff
from sinks.kafka.columns import key_type, value_type
from sinks.kafka.serialization import STEPS, SchemaEvolution
from sinks.transaction import Committable

if TYPE_CHECKING:
    from sinks.kafka.serialization.values import ValueColumn

_TYPES = {"value": value_type, "key": key_type}


class Schemas:
    """The schemas of one sink, which needs none unless a column is written as Avro.

    `problems` say what is wrong with the settings.
    """

    def __init__(
        self,
        sink: str,
        topic: str | None,
        *,
        value_format: str | None,
        key_format: str | None,
        registry: str | Mapping[str, Any] | None,
        subject: str | None,
        key_subject: str | None,
        evolution: SchemaEvolution,
        timeout: float,
    ) -> None:
        given = {"value": value_format if value_format == "avro" else None, "key": key_format}
        subjects = {
            "value": subject or (topic and f"{topic}-value"),
            "key": key_subject or (topic and f"{topic}-key"),
        }
        formats = {column: format for column, format in given.items() if format}
        self.problems = [
            *_problems(formats, registry, subjects, evolution),
            *_key_problems(key_format, value_format),
        ]
        if subject and "value" not in formats:
            self.problems.append("subject belongs to value_format='avro'")
        if key_subject and not key_format:
            self.problems.append("key_subject belongs to key_format='avro'")
        self._columns: list[ValueColumn] = []
        if registry and not self.problems:
            from sinks.kafka.serialization.values import KeyColumn, ValueColumn

            for column, kind in (("key", KeyColumn), ("value", ValueColumn)):
                if column in formats:
                    self._columns.append(
                        kind(sink, registry, str(subjects[column]), evolution, timeout)
                    )

    def __bool__(self) -> bool:
        return bool(self._columns)

    @property
    def columns(self) -> list[str]:
        return [values.column for values in self._columns]

    def check(self, schema: pa.Schema, written: Callable[[str], Iterable[Committable]]) -> None:
        """Check the rows, and what the registry has of schemas that are in use, for each column.

        `written` gets the name of an entry in a proof. It returns the newest checkpoint's
        transactions that have the entry.
        """
        for values in self._columns:
            used = [committable.proof[values.proof] for committable in written(values.proof)]
            values.check(_TYPES[values.column](schema), {each["id"]: each["hash"] for each in used})

    def evolve(self, schema: pa.Schema) -> None:
        for values in self._columns:
            values.evolve(_TYPES[values.column](schema))

    def diff(self, schema: pa.Schema) -> SchemaDiff | None:
        diffs = [values.diff(_TYPES[values.column](schema)) for values in self._columns]
        return sum(diffs[1:], diffs[0]) if diffs else None

    def diagnose(self) -> Iterable[Finding]:
        for values in self._columns:
            yield from values.diagnose()

    @property
    def named(self) -> dict[str, Any]:
        """The schemas that a transaction's proof names."""
        return {values.proof: values.writer.named for values in self._columns}

    def encoded(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[Refusal]]:
        """Encode the columns, and return the batch with the rows that a schema does not take."""
        refused = list[Refusal]()
        for values in self._columns:
            at = batch.schema.get_field_index(values.column)
            made, bad = values.writer.encoded(batch.column(at))
            batch = batch.set_column(at, values.column, made)
            refused = [*refused, *bad]
        return batch, refused


def _problems(
    formats: Mapping[str, str],
    registry: object,
    subjects: Mapping[str, str | None],
    evolution: SchemaEvolution,
) -> Iterable[str]:
    if evolution not in STEPS:
        yield f"schema_evolution is one of {', '.join(map(repr, STEPS))}, not {evolution!r}"
    for column, format in formats.items():
        if not registry:
            yield f"{column}_format={format!r} needs schema_registry, the registry's URL"
        if subjects[column] is None:
            yield (
                f"{column}_format={format!r} needs a topic or a subject, by which the registry "
                "knows the schema"
            )
    if not formats and (registry or evolution != "none"):
        yield (
            "schema_registry and schema_evolution belong to value_format='avro' and "
            "key_format='avro'"
        )


def _key_problems(key_format: str | None, value_format: str | None) -> Sequence[str]:
    if key_format not in (None, "avro"):
        return [f"key_format is 'avro' or None, not {key_format!r}"]
    if key_format and value_format == "json":
        return [
            "value_format='json' makes JSON of keys: leave key_format out, or make JSON of the "
            "value in the query"
        ]
    return []
