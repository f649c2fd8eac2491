"""The ledger: what became of every transaction, in a table beside the target.

The row of a partition (`committed` true) is written in the same transaction as the partition's
rows, so its presence proves the commit. Its absence proves nothing until a tombstone (`committed`
false) stands under the same primary key: the insert of a tombstone waits for a transaction that is
in flight, and then either meets its row or makes the loss final.

A second table, the witness, has each commit once more, from the same transaction. If the ledger
lacks one of the witness's commits, the ledger alone was restored to an older state, and proves no
loss.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic

import pyarrow as pa

from sinks.audit import Holding, Part
from sinks.errors import ConfigurationError
from sinks.sql.catalog import Catalog
from sinks.sql.databases import LEDGERS, MYSQL
from sinks.sql.dialect import batches, marks
from sinks.sql.names import label, witness_of
from sinks.sql.server import ConnectionT, Row
from sinks.transaction import Checkpoint, Fingerprint, Identity, TransactionId, token

if TYPE_CHECKING:
    from typing_extensions import Self

_KEPT_CHECKPOINTS = 100
_ASKED_TOGETHER = 1000
_DELETED_TOGETHER = 100
_ASK_ID = "SELECT {lineage} FROM {ledger} WHERE {transaction_id} = %s"
_OF_SINK = "{transaction_id} LIKE %s AND {sink} = %s"
"""The condition for rows of a job, a lineage or a checkpoint, and a sink. PostgreSQL and MySQL find
these rows by the primary key."""

LEDGER = pa.schema(
    [
        pa.field("transaction_id", pa.string(), nullable=False),
        pa.field("committed", pa.bool_(), nullable=False),
        *(pa.field(name, pa.string(), nullable=False) for name in ("job", "lineage", "sink")),
        pa.field("checkpoint", pa.int64(), nullable=False),
        pa.field("written", pa.int64()),
        pa.field("row_hash", pa.string()),
    ]
)
"""The last two columns have count and hash of a transaction's rows, or are null. The table also has
a column `at`, for people who read it."""
LEDGER_COLUMNS = tuple(LEDGER.names)
_KEY = "transaction_id"
_ASCII = "varchar(199) CHARACTER SET ascii COLLATE ascii_bin"
_WORDS = {"postgresql": 'text COLLATE "C"', **dict.fromkeys(MYSQL, _ASCII)}
"""The types of short strings that are compared byte by byte."""
_TIMES = {"postgresql": "timestamptz", "mssql": "datetime2", **dict.fromkeys(MYSQL, "datetime")}


@dataclass(frozen=True)
class Ledger(Generic[ConnectionT]):
    """The ledger table, as it travels to the tasks.

    `id` is random, and tells the table from another table of the same name. It is the `lineage` of
    the row with the key `IDENTITY`, so a table that was emptied has no ID.
    """

    IDENTITY: ClassVar[str] = "ledger"
    catalog: Catalog[ConnectionT, Any] = field(compare=False, repr=False)
    schema: str
    name: str
    id: str

    @classmethod
    def find(
        cls, catalog: Catalog[ConnectionT, Any], connection: ConnectionT, schema: str, name: str
    ) -> Self | None:
        """Find the ledger and its ID; return None if there is no ledger, or it has no ID.

        Raises ConfigurationError if the table is something other than a ledger.
        """
        ledger = cls(catalog, schema, name, "")
        id = ledger._id(connection) if ledger.exists(connection) else ""
        return replace(ledger, id=id) if id else None

    @classmethod
    def ensure(
        cls, catalog: Catalog[ConnectionT, Any], connection: ConnectionT, schema: str, name: str
    ) -> Self:
        """Find the ledger, or create the table or its ID.

        Several processes may do so at the same time. Call it outside a transaction.
        """
        new = cls(catalog, schema, name, uuid.uuid4().hex)
        for table in (new, new.witness):
            if not table.exists(connection):
                table._create(connection)
        if not (id := new._id(connection)):
            with catalog.server.transaction(connection):
                identity = (cls.IDENTITY, True, "-", new.id, "-", 0, None, None)
                catalog.server.insert_missing(connection, LEDGER_COLUMNS, {new.table: [identity]})
            id = new._id(connection)
        if not id:
            raise ConfigurationError(f"the ledger table {new.label} could not be created")
        return replace(new, id=id)

    def exists(self, connection: ConnectionT) -> bool:
        """Tell whether there is such a table.

        Raises ConfigurationError if it is something other than a ledger.
        """
        if question := self._question:
            columns = self.catalog.server.query(connection, *question)
        else:
            table = self.catalog.describe(connection, self.schema, self.name)
            columns = (
                [(name, name == _KEY and table.is_unique((name,))) for name in table.names]
                if table
                else []
            )
        self._judge(columns)
        return bool(columns)

    def require_intact(self, connection: ConnectionT) -> None:
        """Raise ConfigurationError if the ledger was altered, so that it no longer proves anything.

        The error comes at the latest with the next statement. Where reading a table keeps others
        from altering it until the transaction ends, the caller must have read the ledger before.
        """
        if question := self._question:
            self.catalog.server.defer(connection, *question, self._judge)
        else:
            self.exists(connection)

    @property
    def _question(self) -> tuple[str, list[str]] | None:
        """The query for the ledger's columns that tells which are its key, with its parameters.

        It is None for a database of which only `describe` tells.
        """
        ask = LEDGERS.get(self.catalog.dialect.name)
        return (ask, [self.schema, self.name] * (ask.count("%s") // 2)) if ask else None

    def _judge(self, columns: Sequence[Row]) -> None:
        keys = [name for name, is_key in columns if is_key]
        if columns and not (
            keys == [_KEY] and {name for name, _ in columns} >= set(LEDGER_COLUMNS)
        ):
            raise ConfigurationError(
                f"{self.label} exists and is not a ledger of this version (a table with "
                f"transactions, the primary key {_KEY}, and the columns "
                f"{', '.join(LEDGER_COLUMNS[1:])}): add what is missing, or choose another name "
                "with ledger=…"
            )

    def _create(self, connection: ConnectionT) -> None:
        catalog = self.catalog
        dialect = catalog.dialect
        columns: list[str] = []
        for column in LEDGER:
            word = _WORDS.get(dialect.name, "varchar(199)")
            kind = (
                word
                if column.type == pa.string()
                else catalog.declared(connection, column, key=False)
            )
            columns.append(dialect.column(column.name, kind, nullable=column.nullable))
        time = _TIMES.get(dialect.name, "timestamp")
        columns.append(f"{dialect.quote('at')} {time} DEFAULT CURRENT_TIMESTAMP NOT NULL")
        columns.append(f"PRIMARY KEY ({dialect.quote(_KEY)})")
        engine = " ENGINE=InnoDB" if dialect.name in MYSQL else ""
        catalog.create_table(connection, self.schema, self.name, columns, engine)

    def _id(self, connection: ConnectionT) -> str:
        rows = self._query(connection, _ASK_ID, [self.IDENTITY])
        return str(rows[0][0]) if rows else ""

    def require_same(self, connection: ConnectionT) -> None:
        """Raise ConfigurationError if this is not the ledger that the query looked at first.

        The ledger may have been emptied, altered or recreated since, or the connection leads to
        another database that has a ledger. If the table is gone, the driver's error is raised.
        """
        self.catalog.server.defer(connection, self._sql(_ASK_ID), [self.IDENTITY], self._require_id)
        self.require_intact(connection)

    def _require_id(self, rows: Sequence[Row]) -> None:
        there = str(rows[0][0]) if rows else ""
        if there != self.id:
            raise ConfigurationError(
                f"the ledger {self.label} is not the ledger that the query started with "
                f"(id {there or 'none'}, not {self.id}): it was emptied or recreated, or "
                f"{self.catalog.server} is another database. Check that it is the right one, "
                "then start the query again"
            )

    @property
    def witness(self) -> Self:
        """The table that has each commit a second time."""
        return replace(self, name=witness_of(self.name))

    @property
    def label(self) -> str:
        """The ledger's name, for a reader."""
        return label(self.schema, self.name)

    @property
    def table(self) -> str:
        """The ledger's name in a statement that has parameters.

        In such a statement % stands for itself only when doubled.
        """
        return self.catalog.dialect.quote(self.schema, self.name).replace("%", "%%")

    def _sql(self, template: str) -> str:
        return template.format(
            ledger=self.table, **{name: self.catalog.dialect.quote(name) for name in LEDGER_COLUMNS}
        )

    def _query(
        self, connection: ConnectionT, template: str, parameters: Sequence[object]
    ) -> list[Row]:
        return list(self.catalog.server.query(connection, self._sql(template), parameters))

    def proof(self) -> dict[str, object]:
        """Return what a committable carries of the ledger.

        It tells where to look for the ledger, and how to know that it is still the same one.
        """
        return {"ledger": [self.schema, self.name], "ledger_id": self.id}

    def foreign(self, connection: ConnectionT, proof: Mapping[str, object]) -> str | None:
        """Tell why this ledger cannot speak for a transaction of another ledger, or return None.

        `proof` says beside which ledger the transaction was pre-committed. An empty proof names
        none, so the result is None.
        """
        # the ledger may have been recreated since `ensure`
        there = self.find(self.catalog, connection, self.schema, self.name)
        if not proof:
            return None
        then = proof["ledger"]
        place = label(*then) if isinstance(then, list) else str(then)
        # SqlAlchemySink may leave the schema out
        if there and there.id == proof.get("ledger_id") and f".{self.label}".endswith(f".{place}"):
            return None
        return (
            f"the ledger {self.label} is not the one that was there at pre-commit ({place}, id "
            f"{proof.get('ledger_id')})"
        )

    def contradiction(
        self, connection: ConnectionT, proof: Mapping[str, object], *, witnessed: bool
    ) -> str | None:
        """Tell why a transaction cannot be called lost although the ledger has nothing of it.

        Return None if it can. `witnessed` says whether the witness has the transaction. The caller
        asks the witness before the ledger, since others commit meanwhile.
        """
        return self.foreign(connection, proof) or (self._set_back() if witnessed else None)

    def _set_back(self) -> str:
        return (
            f"the ledger {self.label} lacks rows of {self.witness.label} (the ledger alone was "
            "restored, or lost rows)"
        )

    def states(self, connection: ConnectionT, ids: Collection[str]) -> dict[str, bool]:
        """Return the outcome of those of the transactions that the ledger knows.

        True stands for a commit, and False for a tombstone.
        """
        states = dict[str, bool]()
        for some in batches(list(ids), _ASKED_TOGETHER):
            template = (
                "SELECT {transaction_id}, {committed}"
                f" FROM {{ledger}} WHERE {{transaction_id}} IN ({marks(some)})"
            )
            states |= {
                text: bool(committed) for text, committed in self._query(connection, template, some)
            }
        return states

    def newest(
        self, connection: ConnectionT, job: str, sink: str, *, is_witnessed: bool | None = None
    ) -> dict[str, int]:
        """Return, by lineage, the newest checkpoint of a job and sink that has a row of a commit.

        If `is_witnessed` is true, there is a witness; otherwise the database is asked whether there
        is one. Raises ConfigurationError if the witness has a newer checkpoint.
        """
        template = (
            "SELECT {lineage}, max({checkpoint})"
            f" FROM {{ledger}} WHERE {_OF_SINK} AND {{committed}} = %s"
            " GROUP BY {lineage}"
        )
        asked = [*_of_sink(job, sink), True]
        witnessed = dict[str, int]()
        if is_witnessed or self.witness.exists(connection):
            self.catalog.server.defer(
                connection, self.witness._sql(template), asked, witnessed.update
            )
        own = {lineage: int(newest) for lineage, newest in self._query(connection, template, asked)}
        if any(checkpoint > own.get(lineage, -1) for lineage, checkpoint in witnessed.items()):
            raise ConfigurationError(
                f"{self._set_back()}. If the rows of the newest checkpoint are in the table, copy "
                f"the missing rows of {self.witness.label} into the ledger. Otherwise restore the "
                "newer table. Nothing was changed"
            )
        return own

    def insert(
        self,
        connection: ConnectionT,
        transactions: Mapping[str, TransactionId],
        *,
        committed: bool,
        fingerprints: Mapping[str, Fingerprint] | None = None,
    ) -> bool:
        """Write a row or a tombstone under each key that has none, in the caller's transaction.

        Return whether no key had one before. If others write the same keys, the insert waits for
        them, within the limit for lock waits. `fingerprints` are those of the transactions' rows,
        as far as they are known.
        """
        stored = {key: rows.stored() for key, rows in (fingerprints or {}).items()}
        rows = [
            (
                key,
                committed,
                name.job,
                name.lineage,
                name.sink,
                name.checkpoint,
                *stored.get(key, (None, None)),
            )
            # two of us that write the same keys never deadlock, since the keys are sorted
            for key, name in sorted(transactions.items())
        ]
        insert = self.catalog.server.insert_missing
        if not committed:
            return insert(connection, LEDGER_COLUMNS, {self.table: rows}) == len(rows)
        both = {self.table: rows, self.witness.table: [(*row[:-2], None, None) for row in rows]}
        return insert(connection, LEDGER_COLUMNS, both) == 2 * len(rows)

    def holding(
        self,
        connection: ConnectionT,
        job: str,
        sink: str,
        part: Part,
        key: Callable[[Identity], str],
    ) -> Holding:
        """Return what the ledger has of a sink's part of a checkpoint.

        `key` returns the name by which the ledger knows a transaction.
        """
        template = (
            f"SELECT {{transaction_id}}, {{written}}, {{row_hash}} FROM {{ledger}} WHERE {_OF_SINK}"
            " AND {committed} = %s"
        )
        mine = [*_of_sink(job, sink, f"{part.lineage}.{part.checkpoint_id}"), True]
        stored = {
            text: (rows, hashed) for text, rows, hashed in self._query(connection, template, mine)
        }
        keys = [key(committable.transaction) for committable in part.committables]
        missing = [key for key in keys if key not in stored]
        for committable in part.committables if missing else ():
            if reason := self.foreign(connection, committable.proof):
                return Holding(remarks=(reason,))
        sums: Fingerprint | None = Fingerprint()
        for rows, hashed in (stored[key] for key in keys if key in stored):
            sums = (
                None
                if sums is None or rows is None
                else sums + Fingerprint(int(rows), int(hashed, 16))
            )
        return Holding(
            sums,
            differences=tuple(
                f"the ledger {self.label} does not say that {name} was committed"
                for name in missing
            ),
            remarks=() if sums else ("the ledger has no counts of it: an older version wrote it",),
            unexpected=tuple(sorted(stored.keys() - {*keys, *map(key, part.given_up)})),
        )

    def prune(self, connection: ConnectionT, checkpoint: Checkpoint, sink: str) -> None:
        """Delete the rows of this job, lineage and sink that recovery will never ask for again.

        The rows are deleted by their keys, a tenth of them at a time. In MySQL, a DELETE that looks
        for the rows would wait for what others have prepared. So would, in MariaDB, a DELETE of
        more than about a tenth of the table.
        """
        before = checkpoint.oldest_retained - _KEPT_CHECKPOINTS
        template = (
            f"SELECT {{transaction_id}} FROM {{ledger}} WHERE {_OF_SINK} AND {{checkpoint}} < %s"
        )
        mine = [*_of_sink(checkpoint.job, sink, checkpoint.lineage), before]
        for table in (self, self.witness):
            old = [text for (text,) in table._query(connection, template, mine)]
            for some in batches(old, min(len(old) // 10 + 1, _DELETED_TOGETHER)):
                those = f"DELETE FROM {{ledger}} WHERE {{transaction_id}} IN ({marks(some)})"
                self.catalog.server.execute(connection, table._sql(those), some)


def _of_sink(job: str, sink: str, part: str | None = None) -> list[object]:
    """Return the values that `_OF_SINK` takes.

    `part` is a lineage, or a lineage with a checkpoint.
    """
    return [f"{TransactionId.prefix(job, part)}%", token(sink)]
