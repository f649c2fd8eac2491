"""MySQL's errors and warnings in the words of the sinks: what happened, in which table and row, and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import pymysql
from pymysql.constants import ER

from sinks.errors import BadValue
from sinks.sql.errors import Fault, explained
from sinks.sql.questions import GTID_UNSAFE, REFUSED_BY_GTID

XA_UNKNOWN = 1397  # XAER_NOTA
_XA_ROLLED_BACK = {1613, 1614}  # XA_RBTIMEOUT, XA_RBDEADLOCK
BLOCKED = {ER.LOCK_WAIT_TIMEOUT, ER.LOCK_DEADLOCK, 3572, *_XA_ROLLED_BACK}
RIGHTS = {1044, 1142, 1143, 1227, 1370}
_CHANGED = {ER.NO_SUCH_TABLE, ER.BAD_FIELD_ERROR, ER.BAD_DB_ERROR}
SHAPE = {
    *_CHANGED,
    1364,
    1906,
    3105,
    GTID_UNSAFE,
}  # no such table or column; no value for one; a value for a generated one (two codes); one without transactions
_NO_LOCAL = {1148, 3948, 4166}  # LOAD DATA LOCAL is off
_TOO_LARGE = 1153
_OF_THE_CLIENT = range(2000, 3000)
"""Codes of errors that no server has sent."""
# Refused rows, as far as PyMySQL takes them for something else: no such column, no default, SIGNAL, bad function
# arguments, no partition, invalid JSON, CHECK of MySQL and of MariaDB, strings of another character set
_REFUSED = {ER.BAD_FIELD_ERROR, 1292, 1364, 1366, 1411, 1526, 1644, 1690, 3140, 3819, 4025, 4078}
_ROW = re.compile(r" at row (\d+)")


def code_of(error: pymysql.Error) -> int:
    code = error.args[0] if error.args else 0
    return code if isinstance(code, int) else 0


@dataclass
class Writing:
    """What an error has to tell about: the table, who was writing (`where`), names of staging tables and the name that
    the user knows instead (`aliases`), and how many rows had gone `before` those of the running statement."""

    table: str
    where: str
    aliases: Mapping[str, str] = field(default_factory=dict)
    before: int = 0

    def explained(self) -> AbstractContextManager[None]:
        """The server's errors as SinkErrors."""
        return explained(self._fault, f"table {self.table}: {self.where}")

    def _fault(self, error: Exception) -> Fault | None:
        found = fault(error)
        return found and replace(found, text=self.said(found.text), reason=self._alone(found.text))

    def refused(self, warnings: Sequence[tuple[Any, ...]], sent: int, took: int) -> BadValue:
        """Why rows are refused that the server took with warnings (as SHOW WARNINGS lists them), or skipped."""
        told = "; ".join(self.said(str(message)) for _, _, message in warnings[:3]) or "the server says no more"
        more = f" (and {len(warnings) - 3} or more others)" if len(warnings) > 3 else ""
        skipped = f"; it took {took} of {sent} rows" if took != sent else ""
        return BadValue(
            f"table {self.table}: {self.where} was refused, since the server would alter or skip rows: "
            f"{told}{more}{skipped}"
        ).because("; ".join(self._alone(str(message)) for _, _, message in warnings[:3]))

    def said(self, text: str) -> str:
        """A message of the server, with the names that the user knows and rows counted from the first one."""
        return _ROW.sub(lambda row: f" at row {self.before + int(row[1])}", self._known(text))

    def _alone(self, text: str) -> str:
        """Without the row."""
        return _ROW.sub("", self._known(text))

    def _known(self, text: str) -> str:
        for name, known in self.aliases.items():
            text = text.replace(name, known)
        return text


def fault(error: Exception) -> Fault | None:
    """None for a lost connection, and what is no error of the server."""
    if not isinstance(error, pymysql.Error) or code_of(error) in _OF_THE_CLIENT:
        return None
    text, code = describe(error), code_of(error)
    if code in BLOCKED:
        backup = ", or a backup has FLUSH TABLES WITH READ LOCK"
        return Fault("blocked", text, advice=f"{backup}; lock_timeout= of the sink is the limit")
    if code in RIGHTS:
        return Fault("right", text)
    if code in _CHANGED:
        return Fault("gone" if code == ER.NO_SUCH_TABLE else "changed", text)
    if code == GTID_UNSAFE:
        return Fault("server", text)
    if code in _NO_LOCAL:
        return Fault(
            "server",
            text,
            advice="LOAD DATA LOCAL is switched off now: start the query again, and rows go in by INSERT",
        )
    if code == _TOO_LARGE:
        return Fault("refused", f"a row is above max_allowed_packet of the server: {text}")
    return Fault("refused" if refuses(error) else "other", text)


def refuses(error: pymysql.Error) -> bool:
    """Whether the server refuses rows, so that asking again cannot help."""
    return isinstance(error, pymysql.IntegrityError | pymysql.DataError) or code_of(error) in _REFUSED


def describe(error: pymysql.Error) -> str:
    """The server's message in one line; what it means, where it speaks of GTIDs."""
    if code_of(error) == GTID_UNSAFE:
        return REFUSED_BY_GTID
    return " ".join(str(error.args[-1] if error.args else "").split()) or repr(error)
