"""The driver's part: it chooses the registered schema that a batch's values are written with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.types as t

from sinks._util.log import get_logger
from sinks.arrow.types import is_list
from sinks.diagnosis import Finding, SchemaChange, SchemaDiff
from sinks.errors import ConfigurationError, SchemaMismatch
from sinks.kafka.serialization import STEPS, SchemaEvolution
from sinks.kafka.serialization.avro import Merged, hash_of, merged, shown
from sinks.kafka.serialization.encoding import AvroWriter
from sinks.kafka.serialization.registry import KIND, RefusedSchema, Registry

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import RegisteredSchema, Schema

logger = get_logger(__name__)


@dataclass(frozen=True)
class _Plan:
    """A step by which a subject's schema takes the rows.

    `version`, `schema_id` and `before` are those of the schema that the subject has. They are 0, 0
    and None if it has none.
    """

    version: int
    schema_id: int
    before: str | None
    merged: Merged

    @property
    def steps(self) -> set[str]:
        return {"add"} if self.before is None else {change.step for change in self.merged.changes}

    @property
    def changes(self) -> str:
        return "; ".join(change.statement for change in self.merged.changes)

    @property
    def shown(self) -> str:
        if self.before is None:
            return "no schema"
        return f"version {self.version}, schema {self.schema_id}: {shown(self.before)}"


class ValueColumn:
    """The column `value` of one sink."""

    column = "value"
    proof = "schema"
    """The entry of a committable's proof that names the schema."""
    otherwise = "Cast the columns in Spark, or let a `value_serializer` write the values"

    def __init__(
        self,
        sink: str,
        registry: str | Mapping[str, Any],
        subject: str,
        evolution: SchemaEvolution,
        timeout: float,
    ) -> None:
        self.subject = subject
        self._where = f"sink {sink!r}: subject {subject!r}"
        self._settings = {
            "timeout": timeout,
            **({"url": registry} if isinstance(registry, str) else registry),
        }
        self._allowed = STEPS[1 : STEPS.index(evolution) + 1]
        self._writer: AvroWriter | None = None

    def check(self, value: pa.DataType, used: Mapping[int, str]) -> None:
        """Check the rows and the schemas in use against the registry, and register nothing.

        `used` has hashes of schemas by their numbers. Raises SchemaMismatch or ConfigurationError
        if `evolve` would, or if the registry has another schema under one of these numbers.
        """
        with self._registry() as registry:
            self._require_same(registry, used)
            plan = self._plan(registry, value)
            self._require_allowed(plan)
            if plan.merged.changes and not registry.takes(plan.merged.text):
                raise self._incompatible(plan, registry.compatibility())

    def evolve(self, value: pa.DataType) -> None:
        """Choose the schema of these values.

        If the subject's latest schema lacks something for them, register a new version. Raises
        SchemaMismatch if the rows do not fit, or need a step that `schema_evolution` does not
        allow.
        """
        with self._registry() as registry:
            plan = self._plan(registry, value)
            self._require_allowed(plan)
            schema_id = plan.schema_id
            text = plan.merged.text
            if plan.steps:
                try:
                    schema_id = registry.register(text)
                except RefusedSchema as refused:
                    raise self._incompatible(
                        plan, f"{registry.compatibility()}; it says: {refused}"
                    ) from refused
                logger.info(
                    "%s has schema %d now: %s",
                    self._where,
                    schema_id,
                    plan.changes or "its first version",
                )
            self._require_same(registry, {schema_id: hash_of(text)})
        self._writer = AvroWriter(schema_id, text)

    def diff(self, value: pa.DataType) -> SchemaDiff:
        with self._registry() as registry:
            plan = self._plan(registry, value)
            notes = [f"subject {self.subject} at {registry.url}: {plan.shown}"]
            changes = plan.merged.changes
            unfit = list(plan.merged.unfit)
            if unfit:
                notes.append(self.otherwise)
            if plan.steps and not unfit:
                notes.append(f"new schema: {shown(plan.merged.text)}")
                if plan.before is None:
                    first = f"register the first version of {self.subject}"
                    changes = (SchemaChange("", first, "add", locks="nothing"),)
                else:
                    takes = registry.takes(plan.merged.text)
                    rule = registry.compatibility()
                    verdict = "compatible" if takes else "not compatible"
                    notes.append(
                        f"the registry calls it {verdict} with the latest version (compatibility "
                        f"{rule})"
                    )
                    if not takes:
                        unfit.append(
                            f"the registry refuses the new schema, by its compatibility {rule}"
                        )
        automatic = (replace(change, automatic=change.step in self._allowed) for change in changes)
        return SchemaDiff(tuple(automatic), tuple(unfit), tuple(notes))

    def diagnose(self) -> Iterable[Finding]:
        with self._registry() as registry:
            latest = registry.latest()
            rule = registry.compatibility()
        has = f"version {latest.version}" if latest else "no version yet"
        yield Finding.ok(
            f"the schema registry answers: subject {self.subject!r} has {has}, compatibility {rule}"
        )

    @property
    def writer(self) -> AvroWriter:
        """The schema that the last `evolve` chose."""
        if self._writer is None:
            raise RuntimeError(
                f"{self._where}: no schema was chosen: evolve() comes before a transaction"
            )
        return self._writer

    # ------------------------------------------------------------------ the parts
    def _registry(self) -> Registry:
        return Registry(self._settings, self.subject)

    def _written(self, registry: Registry) -> RegisteredSchema | None:
        """Return the version that values are written with, or None if the subject has none."""
        return registry.latest()

    def _plan(self, registry: Registry, value: pa.DataType) -> _Plan:
        if not t.is_struct(value):
            raise SchemaMismatch(
                f"{self._where}: column `{self.column}` is {value}, and must be a struct for Avro"
                + (
                    "; without one, all other columns become its fields"
                    if self.column == "value"
                    else ""
                )
            )
        registered = self._written(registry)
        if registered is None:
            return _Plan(0, 0, None, self._merged(None, value))
        if _kind(registered.schema) != KIND:
            raise ConfigurationError(
                f"{self._where} has schemas of {registered.schema.schema_type}, not Avro: give "
                "another `subject`"
            )
        if registered.schema.references:
            raise ConfigurationError(
                f"{self._where}: its schema refers to other subjects, which is not supported: "
                "register it with these types written out"
            )
        text = str(registered.schema.schema_str)
        return _Plan(
            registered.version or 0, registered.schema_id or 0, text, self._merged(text, value)
        )

    def _merged(self, registered: str | None, value: pa.StructType) -> Merged:
        return merged(registered, value, _record_name(self.subject))

    def _require_allowed(self, plan: _Plan) -> None:
        if plan.merged.unfit:
            raise SchemaMismatch(
                f"{self._where} has {plan.shown}. These rows do not fit: "
                f"{'; '.join(plan.merged.unfit)}. {self.otherwise}"
            )
        if not plan.steps <= set(self._allowed):
            needed = "widen" if "widen" in plan.steps else "add"
            raise SchemaMismatch(
                f"{self._where} has {plan.shown}. For these rows: "
                f"{plan.changes or 'it needs a first version'}. Register this schema, or set "
                f"schema_evolution={needed!r} and the sink does: {shown(plan.merged.text)}"
            )

    def _incompatible(self, plan: _Plan, rule: str) -> SchemaMismatch:
        return SchemaMismatch(
            f"{self._where}: the schema registry does not take what these rows need: "
            f"{plan.changes}. Its compatibility is {rule}. Drop or cast the columns, let the "
            "subject have another compatibility, or write to another subject and topic"
        )

    def _require_same(self, registry: Registry, used: Mapping[int, str]) -> None:
        for schema_id, wanted in used.items():
            schema = registry.schema(schema_id)
            if schema is None or _kind(schema) != KIND or hash_of(str(schema.schema_str)) != wanted:
                now = "no schema" if schema is None else f"another schema, {schema.schema_str}"
                raise ConfigurationError(
                    f"{self._where} has records with the schema number {schema_id}, and the "
                    f"registry at {registry.url} has {now} under it. Restore the registry, or "
                    "register the schema under its number (mode IMPORT). Nothing of this batch "
                    "was written [EO-REGISTRY-BEHIND]"
                )


class KeyColumn(ValueColumn):
    """The column `key` of one sink.

    Equal keys must be equal bytes as long as the topic lives. Otherwise they change their
    partition, and compaction keeps both. So the schema is the subject's first version, which
    nothing changes, and which stays the schema of the topic's records.
    """

    column = "key"
    proof = "key_schema"
    otherwise = "Cast the columns in Spark, or give the keys as bytes, without `key_format`"
    _used: tuple[int, ...] = ()

    def check(self, value: pa.DataType, used: Mapping[int, str]) -> None:
        self._used = tuple(used)
        super().check(value, used)

    def evolve(self, value: pa.DataType) -> None:
        super().evolve(value)
        self._used = (self.writer.schema_id,)

    def _written(self, registry: Registry) -> RegisteredSchema | None:
        return registry.first()

    def _merged(self, registered: str | None, value: pa.StructType) -> Merged:
        merged = super()._merged(registered, value)
        other = [
            f"column {name!r} is a map, whose entries come in any order"
            for name in _maps(value, "key")
        ]
        other += [
            f"{change.statement}: a key's schema is never changed" for change in merged.changes
        ]
        unfit = [f"{each}, so equal keys would be other bytes" for each in other]
        return replace(merged, changes=(), unfit=(*merged.unfit, *unfit))

    def _require_allowed(self, plan: _Plan) -> None:
        super()._require_allowed(plan)
        if plan.before is not None and self._used and plan.schema_id not in self._used:
            raise ConfigurationError(
                f"{self._where} has {plan.shown} first, and the topic's keys are written with the "
                f"schema number {self._used[0]}: equal keys would be other bytes. Restore the "
                "subject's first version, or write to another topic [EO-REGISTRY-BEHIND]"
            )


def _maps(kind: pa.DataType, path: str) -> Iterator[str]:
    if t.is_map(kind):
        yield path
    elif t.is_struct(kind):
        for field in kind:
            yield from _maps(field.type, f"{path}.{field.name}")
    elif is_list(kind):
        yield from _maps(kind.value_type, f"{path}[]")


def _kind(schema: Schema) -> str:
    return schema.schema_type or KIND  # registries that know no other leave it out


def _record_name(subject: str) -> str:
    name = re.sub(r"\W", "_", subject.removesuffix("-value").removesuffix("-key"), flags=re.ASCII)
    return name if not name[:1].isdigit() else f"_{name}"
