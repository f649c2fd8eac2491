"""The driver's part: which registered schema the values of a batch are written with."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.types as t

from sinks.arrow.types import is_list
from sinks.diagnosis import Finding, SchemaDiff
from sinks.errors import ConfigurationError, SchemaMismatch
from sinks.kafka.serialization.encoding import Writer
from sinks.kafka.serialization.registry import RefusedSchema, Registry
from sinks.kafka.serialization.schema import STEPS, Format, Merged, SchemaEvolution, change

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import RegisteredSchema, Schema

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Plan:
    """`version` and `schema_id` are of the subject's latest schema, 0 if it has none."""

    version: int
    schema_id: int
    before: str | None
    merged: Merged

    @property
    def steps(self) -> set[str]:
        first = {"add"} if self.before is None else set[str]()
        return first | {change.step for change in self.merged.changes}


class Values:
    """Of one sink. `writer` is the schema of the batch that `evolve` was last told of."""

    column, proof = "value", "schema"
    """`proof`: where a committable names the schema."""

    def __init__(
        self,
        sink: str,
        format: Format,
        registry: str | Mapping[str, Any],
        subject: str,
        evolution: SchemaEvolution,
        timeout: float,
    ) -> None:
        self.sink, self.format, self.subject, self.evolution, self.timeout = sink, format, subject, evolution, timeout
        self.settings = {"url": registry} if isinstance(registry, str) else dict(registry)
        self.writer: Writer | None = None

    def check(self, value: pa.DataType, used: Mapping[int, str]) -> None:
        """Raise ConfigurationError if `evolve` would, or if the registry gives another schema than ours for the numbers
        in `used`. Registers nothing."""
        with self._registry() as registry:
            self._require_same(registry, used)
            plan = self._plan(registry, value)
            self._require_allowed(plan)
            if plan.merged.changes and not registry.takes(plan.merged.text):
                raise self._incompatible(plan, registry.compatibility())

    def evolve(self, value: pa.DataType) -> None:
        """Choose the schema of these values, and register it if the subject's latest one lacks something for them."""
        with self._registry() as registry:
            plan = self._plan(registry, value)
            self._require_allowed(plan)
            schema_id, text = plan.schema_id, plan.merged.text
            if plan.steps:
                try:
                    schema_id = registry.register(text)
                except RefusedSchema as refused:
                    raise self._incompatible(plan, f"{registry.compatibility()}; it says: {refused}") from refused
                changes = "; ".join(change.statement for change in plan.merged.changes) or "its first version"
                logger.info("sink %r: subject %r has schema %d now: %s", self.sink, self.subject, schema_id, changes)
            self._require_same(registry, {schema_id: self.format.hash_of(text)})
        self.writer = Writer(self.format, schema_id, text)

    def diff(self, value: pa.DataType) -> SchemaDiff:
        with self._registry() as registry:
            plan = self._plan(registry, value)
            notes = [f"subject {self.subject} at {registry.url}: {self._version(plan)}"]
            unfit = list(plan.merged.unfit)
            if plan.steps and not unfit:
                notes.append(f"new schema: {self.format.shown(plan.merged.text)}")
                if plan.before is not None:
                    takes = registry.takes(plan.merged.text)
                    rule = registry.compatibility()
                    said = "compatible" if takes else "not compatible"
                    notes.append(f"the registry calls it {said} with the latest version (compatibility {rule})")
                    if not takes:
                        unfit.append(f"the registry refuses the new schema, by its compatibility {rule}")
        changes = plan.merged.changes
        if plan.before is None and not unfit:
            changes = (change("", "add", f"register the first version of {self.subject}"),)
        allowed = self._allowed()
        told = tuple(replace(each, automatic=each.step in allowed) for each in changes)
        return SchemaDiff(told, tuple(unfit), tuple(notes))

    def diagnose(self) -> Iterable[Finding]:
        with self._registry() as registry:
            latest, rule = registry.latest(), registry.compatibility()
        has = f"version {latest.version}" if latest else "no version yet"
        yield Finding.ok(f"the schema registry answers: subject {self.subject!r} has {has}, compatibility {rule}")

    @property
    def chosen(self) -> Writer:
        """By `evolve`."""
        if self.writer is None:
            raise RuntimeError(f"sink {self.sink!r}: no schema was chosen: evolve() comes before a transaction")
        return self.writer

    # ------------------------------------------------------------------ the parts
    def _registry(self) -> Registry:
        return Registry(self.settings, self.subject, self.format.kind, self.timeout)

    def _allowed(self) -> tuple[str, ...]:
        return STEPS[1 : STEPS.index(self.evolution) + 1]

    def _taken(self, registry: Registry) -> RegisteredSchema | None:
        """The version that is written."""
        return registry.latest()

    def _plan(self, registry: Registry, value: pa.DataType) -> _Plan:
        if not t.is_struct(value):
            raise SchemaMismatch(
                f"sink {self.sink!r}: column `{self.column}` is {value}, and must be a struct for {self.format.name}"
                + ("; without one, all other columns become its fields" if self.column == "value" else "")
            )
        latest = self._taken(registry)
        if latest is None:
            return _Plan(0, 0, None, self._merged(None, value))
        if _kind(latest.schema) != self.format.kind:
            raise ConfigurationError(
                f"sink {self.sink!r}: subject {self.subject!r} has schemas of {latest.schema.schema_type}, not "
                f"{self.format.name}: give another `subject`"
            )
        text = str(latest.schema.schema_str)
        if latest.schema.references:
            raise ConfigurationError(
                f"sink {self.sink!r}: the schema of subject {self.subject!r} refers to other subjects, which is not "
                "supported: register it with these types written out"
            )
        return _Plan(latest.version or 0, latest.schema_id or 0, text, self._merged(text, value))

    def _hash(self, schema: Schema) -> str:
        """One of another format has none that ours have."""
        return self.format.hash_of(str(schema.schema_str)) if _kind(schema) == self.format.kind else ""

    def _merged(self, registered: str | None, value: pa.StructType) -> Merged:
        merged = self.format.merged(registered, value, _record_name(self.subject))
        problem = "" if merged.unfit else self.format.problem_of(merged.text)
        return replace(merged, unfit=(problem,)) if problem else merged

    def _require_allowed(self, plan: _Plan) -> None:
        where = f"sink {self.sink!r}: subject {self.subject!r} has {self._version(plan)}"
        if plan.merged.unfit:
            raise SchemaMismatch(f"{where}. These rows do not fit: {'; '.join(plan.merged.unfit)}")
        if not plan.steps <= set(self._allowed()):
            needed = "widen" if "widen" in plan.steps else "add"
            what = "; ".join(change.statement for change in plan.merged.changes) or "it needs a first version"
            raise SchemaMismatch(
                f"{where}. For these rows: {what}. Register this schema, or set schema_evolution={needed!r} and the "
                f"sink does: {self.format.shown(plan.merged.text)}"
            )

    def _incompatible(self, plan: _Plan, rule: str) -> SchemaMismatch:
        what = "; ".join(change.statement for change in plan.merged.changes)
        return SchemaMismatch(
            f"sink {self.sink!r}: the schema registry does not take what these rows need into subject "
            f"{self.subject!r}: {what}. Its compatibility is {rule}. Drop or cast the columns, let the subject have "
            "another compatibility, or write to another subject and topic"
        )

    def _version(self, plan: _Plan) -> str:
        if plan.before is None:
            return "no schema"
        return f"version {plan.version}, schema {plan.schema_id}: {self.format.shown(plan.before)}"

    def _require_same(self, registry: Registry, used: Mapping[int, str]) -> None:
        for schema_id, wanted in used.items():
            found = registry.schema(schema_id)
            if found is None or self._hash(found) != wanted:
                now = "no schema" if found is None else f"another schema, {found.schema_str}"
                raise ConfigurationError(
                    f"sink {self.sink!r}: records of subject {self.subject!r} are written with the schema number "
                    f"{schema_id}, and the registry at {registry.url} has {now} under it: it was set back, or is "
                    "another registry, and readers cannot read these records, or read them wrongly. Nothing of this "
                    "batch was written. Restore the registry, or register the schema under its number (mode IMPORT); "
                    "if nobody needs these records, delete the topic and create it anew"
                )


class Keys(Values):
    """Equal keys have to be equal bytes for as long as the topic lives, or they change their partition, and compaction
    keeps both. So the schema is the subject's first version, which nothing changes, and stays the one that the topic's
    records have."""

    column, proof = "key", "key_schema"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._used: tuple[int, ...] = ()

    def check(self, value: pa.DataType, used: Mapping[int, str]) -> None:
        self._used = tuple(used)
        super().check(value, used)

    def evolve(self, value: pa.DataType) -> None:
        super().evolve(value)
        if self.writer:
            self._used = (self.writer.schema_id,)

    def _taken(self, registry: Registry) -> RegisteredSchema | None:
        return registry.first()

    def _merged(self, registered: str | None, value: pa.StructType) -> Merged:
        merged = super()._merged(registered, value)
        other = [f"column {name!r} is a map, whose entries come in any order" for name in _maps(value, "key")]
        if registered is not None:
            other += [f"{change.statement}: a key's schema is never changed" for change in merged.changes]
        unfit = [f"{each}, so equal keys would be other bytes" for each in other]
        return replace(merged, changes=(), unfit=(*merged.unfit, *unfit)) if unfit else merged

    def _require_allowed(self, plan: _Plan) -> None:
        super()._require_allowed(plan)
        if plan.before is not None and self._used and plan.schema_id not in self._used:
            raise ConfigurationError(
                f"sink {self.sink!r}: subject {self.subject!r} has {self._version(plan)} first, and the topic's keys "
                f"are written with the schema number {self._used[0]}: equal keys would be other bytes. Restore the "
                "subject's first version, or write to another topic"
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
    return schema.schema_type or "AVRO"  # as registries do that knew no other


def _record_name(subject: str) -> str:
    name = re.sub(r"\W", "_", subject.removesuffix("-value").removesuffix("-key"), flags=re.ASCII)
    return name if not name[:1].isdigit() else f"_{name}"
