"""What formats of a schema registry have in common: one seam, which `Avro` fills."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, ClassVar, Literal

import pyarrow as pa
import pyarrow.types as t

from sinks.arrow.types import is_list
from sinks.diagnosis import SchemaChange
from sinks.kafka.serialization.by_columns import Parts

SchemaEvolution = Literal["none", "add", "widen"]
STEPS: tuple[SchemaEvolution, ...] = ("none", "add", "widen")
"""Each does what those before it do."""


class ValidationError(ValueError):
    """A row that its schema does not take."""


Encode = Callable[[Any, IO[bytes]], None]
"""Writes one row, as `Writer` has it, or raises what is wrong with it."""


def change(field: str, step: str, what: str) -> SchemaChange:
    """What a registered schema needs for the rows. `step` is the `schema_evolution` that does it."""
    return SchemaChange(field, what, step, locks="nothing")


@dataclass(frozen=True)
class Merged:
    """A schema that takes the rows: the registered one with `changes`, or a first one. `unfit` is what none fixes."""

    text: str
    changes: tuple[SchemaChange, ...] = ()
    unfit: tuple[str, ...] = ()


class Format(ABC):
    """How values are written, and how schemas look. Without state: it travels to the tasks."""

    name: ClassVar[str]
    """As people call it."""
    kind: ClassVar[str]
    """As registries call it."""

    @abstractmethod
    def merged(self, registered: str | None, value: pa.StructType, name: str) -> Merged:
        """`registered` with room for rows of this type, or, without one, a schema that is called `name`."""

    @abstractmethod
    def essence(self, text: str) -> str:
        """What tells how bytes are read, and nothing else. A text that is no such schema is its own essence."""

    @abstractmethod
    def problem_of(self, text: str) -> str:
        """Why nothing can be written by this schema; "" if it can."""

    @abstractmethod
    def shown(self, text: str) -> str:
        """The schema as people write it."""

    @abstractmethod
    def at_once(self, text: str, rows: pa.StructArray) -> Parts:
        """What `encoder` makes of all rows, if their columns are plain. Raises RowByRow if they are not, or if a row is
        to be refused."""

    @abstractmethod
    def encoder(self, text: str, value: pa.StructType) -> Encode:
        """Of rows of this type, by a schema that takes them."""

    def hash_of(self, text: str) -> str:
        """Of all that tells how bytes are read by this schema."""
        return hashlib.sha256(self.essence(text).encode()).hexdigest()[:16]


def unnameable(kind: pa.DataType, language: str, ignored: str, path: str = "") -> Iterator[str]:
    """Names of fields that a format does not take: such as differ in capitals and the signs in `ignored` alone, too."""
    if t.is_struct(kind):
        names = Counter(alike(field.name, ignored) for field in kind)
        for field in kind:
            where = below(path, field.name)
            if not field.name.isascii() or not field.name.isidentifier():
                yield (
                    f"column {where!r}: a name in {language} has letters, digits and _ only, and no digit first: "
                    "rename it"
                )
            if names[alike(field.name, ignored)] > 1:
                yield f"column {where!r} comes twice, but for {' and '.join(['capitals', *ignored])}"
            yield from unnameable(field.type, language, ignored, where)
    elif is_list(kind):
        yield from unnameable(kind.value_type, language, ignored, path)
    elif t.is_map(kind):
        yield from unnameable(kind.key_type, language, ignored, path)
        yield from unnameable(kind.item_type, language, ignored, path)


def alike(name: str, ignored: str = "") -> str:
    """The same for names that are not told apart."""
    return name.lower().translate(dict.fromkeys(map(ord, ignored)))


def no_type(path: str, kind: pa.DataType, language: str) -> str:
    return f"column {path!r}: there is no type of {language} for {kind}; cast it to another"


def below(path: str, step: str) -> str:
    return f"{path}.{step}" if path else step


def is_int(kind: pa.DataType) -> bool:
    """Of at most 32 bits."""
    return bool(t.is_int8(kind) or t.is_int16(kind) or t.is_int32(kind))


def once(pairs: Sequence[tuple[Any, Any]]) -> Sequence[tuple[Any, Any]]:
    """The entries of a map. Raises ValidationError for a key that comes twice: readers would see one of them."""
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValidationError("a map has a key twice")
    return pairs
