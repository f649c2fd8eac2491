"""Arrow record batches as the text that LOAD DATA, or INSERT, reads: the hot path."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from sinks.arrow.types import bytes_of
from sinks.errors import BadValue
from sinks.mysql.server import listed, quoted
from sinks.mysql.types import Column, Form
from sinks.sql.encoder import Encoder


class RowEncoder(Encoder[Column]):
    null: ClassVar[str]
    """The text of NULL."""
    no_null = "NULL in a column that is NOT NULL"
    rows_at_once = 65_536

    @abstractmethod
    def statement(self, into: str) -> str:
        """The statement that takes rows into a (quoted) table."""

    @abstractmethod
    def _join(self, texts: list[pa.Array]) -> pa.Array:
        """The texts of each row in one."""

    def pieces(self, batch: pa.RecordBatch) -> Iterator[tuple[memoryview, int]]:
        """The rows of one batch as bytes, and how many they are."""
        for piece in self.slices(batch):
            yield from self._piece(piece)

    def _piece(self, batch: pa.RecordBatch) -> Iterator[tuple[memoryview, int]]:
        yield _bytes(self._join(self.converted(batch))), batch.num_rows
        self.rows += batch.num_rows


class LoadEncoder(RowEncoder):
    """For LOAD DATA LOCAL: a line for each row, a tab between fields."""

    null = "\\N"
    bytes_at_once = 16 * 2**20

    _SPECIAL = ("\\", "\t", "\n")  # the backslash comes first: it marks the others

    def statement(self, into: str) -> str:
        """In a session with NO_BACKSLASH_ESCAPES. What is no text goes through a variable."""
        fields, sets = [], []
        for index, column in enumerate(self.columns):
            wrap = {Form.HEX: "UNHEX({})", Form.BITS: "CAST({} AS UNSIGNED)"}.get(column.form)
            fields.append(f"@f{index}" if wrap else quoted(column.name))
            if wrap:
                sets.append(f"{quoted(column.name)} = {wrap.format(f'@f{index}')}")
        return (
            f"LOAD DATA LOCAL INFILE 'rows' INTO TABLE {into} CHARACTER SET utf8mb4"
            " FIELDS TERMINATED BY '\t' ESCAPED BY '\\' LINES TERMINATED BY '\n' "
            f"({', '.join(fields)})" + (f" SET {', '.join(sets)}" if sets else "")
        )

    def _join(self, texts: list[pa.Array]) -> pa.Array:
        ready = [
            self._escaped(text) if column.form is Form.TEXT else text
            for column, text in zip(self.columns, texts, strict=True)
        ]
        return _around("", _joined(ready, "\t", self.null), "\n")

    def _escaped(self, text: pa.Array) -> pa.Array:
        used = bytes_of(text)
        for special in self._SPECIAL:
            if (used == ord(special)).any():
                text = pc.replace_substring(text, special, f"\\{special}")
        return text


class InsertEncoder(RowEncoder):
    """For INSERT … VALUES in a session with NO_BACKSLASH_ESCAPES."""

    null = "NULL"
    bytes_at_once = 2**20

    def __init__(
        self,
        schema: pa.Schema,
        columns: Sequence[Column],
        table: str,
        *,
        rounding: bool = False,
        packet: int = 2**24,
    ) -> None:
        """`packet` is the server's max_allowed_packet, in bytes."""
        super().__init__(schema, columns, table, rounding=rounding)
        self._packet = packet
        self._most = packet - len(self.statement("x" * 300).encode())

    def _piece(self, batch: pa.RecordBatch) -> Iterator[tuple[memoryview, int]]:
        """In halves, where one statement would be too long for the server."""
        data = _bytes(self._join(self.converted(batch)))
        if len(data) < self._most:
            yield data, batch.num_rows
            self.rows += batch.num_rows
        elif batch.num_rows > 1:
            half = batch.num_rows // 2
            yield from self._piece(batch.slice(0, half))
            yield from self._piece(batch.slice(half))
        else:
            raise BadValue(
                f"table {self.table}: row {self.rows + 1} needs an INSERT of {len(data)} bytes, and the server takes "
                f"less than max_allowed_packet = {self._packet}: raise it, or set local_infile=ON at the server, with "
                "which rows come by LOAD DATA in pieces"
            )

    def statement(self, into: str) -> str:
        return f"INSERT INTO {into} ({listed([column.name for column in self.columns])}) VALUES "

    def _join(self, texts: list[pa.Array]) -> pa.Array:
        ready = [self._quoted(column.form, text) for column, text in zip(self.columns, texts, strict=True)]
        return _around("(", _joined(ready, ",", self.null), "),")

    @staticmethod
    def _quoted(form: Form, text: pa.Array) -> pa.Array:
        if form in (Form.NUMBER, Form.BITS):  # -0 without an exponent is the integer 0
            return pc.if_else(pc.equal(text, "-0"), pa.scalar("-0e0", text.type), text)
        if form is Form.TEXT and (bytes_of(text) == ord("'")).any():
            text = pc.replace_substring(text, "'", "''")
        return _around("X'" if form is Form.HEX else "'", text, "'")


def _around(before: str, text: pa.Array, after: str) -> pa.Array:
    """Null stays null."""
    marks = (pa.scalar(mark, text.type) for mark in (before, after, ""))
    return pc.binary_join_element_wise(next(marks), text, *marks)


def _joined(texts: list[pa.Array], separator: str, null: str) -> pa.Array:
    kind = pa.large_string() if any(pa.types.is_large_string(text.type) for text in texts) else pa.string()
    same = [text.cast(kind) for text in texts]
    return pc.binary_join_element_wise(
        *same, pa.scalar(separator, kind), null_handling="replace", null_replacement=null
    )


def _bytes(text: pa.Array) -> memoryview:
    return memoryview(bytes_of(text))  # type: ignore[arg-type]
