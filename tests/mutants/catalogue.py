"""The bugs: each a text in one file of a folder, and what stands there instead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    folder: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Where one has to fail."""


QUICK = tuple(f"tests/protocol/test_{name}.py" for name in ("decisions", "rules", "protocol", "sweeps"))
PROTOCOL = (*QUICK, "tests/protocol", "tests/test_custom_sink.py")
TASK = ("tests/test_task.py", *PROTOCOL)
MEMORIES = ("tests/protocol/test_memories.py",)
SAVEPOINTS = ("tests/savepoint/test_lineages.py", "tests/savepoint/test_savepoints.py")
FILES = tuple(f"tests/storage/test_{name}" for name in ("failures.py::TestFile", "conformance.py", "failures.py"))
CLOUDS = ("tests/storage/test_clouds.py",)


def _of(room: str, *quicker: str) -> tuple[str, ...]:
    """The tests of a sink, the conformance kit last."""
    return tuple(f"tests/{room}/test_{name}.py" for name in (*quicker, "conformance"))


def _avro(test: str) -> tuple[str]:
    return (f"tests/kafka/test_avro.py::test_{test}",)


POSTGRES = _of("postgres", "sink", "proofs", "faults")
MYSQL = _of("mysql", "sink", "faults")
KAFKA = _of("kafka", "sink")
KAFKA_MEMORY = ("tests/kafka/test_memory.py",)
EVOLUTION = tuple(f"tests/{room}/test_evolution.py" for room in ("postgres", "mysql", "sqlalchemy_sink"))
SQLALCHEMY = _of("sqlalchemy_sink", "sink")
VERIFY = ("tests/cli/test_verify.py",)
KILLED = ("tests/spark/test_killed.py",)
FORMAT = tuple(
    f"tests/spark/test_format.py::test_{name}"
    for name in (
        "it_is_offered_twice",
        "a_superseded_driver_decides_nothing",
        "a_lost_transaction_is_not_replaced_by_other_rows",
    )
)
FILE_SINK = ("tests/test_custom_sink.py",)
KAFKA_CRASHES = ("tests/kafka/test_crashes.py",)
LETTERS = ("tests/kafka/test_dead_letters.py",)
DEAD_LETTERS = ("tests/test_task.py", "tests/postgres/test_dead_letters.py")
JSON = ("tests/test_from_json.py",)
ROW_HASHES = tuple(
    f"tests/spark/test_arrow.py::test_{name}"
    for name in ("rows_that_differ_have_other_hashes", "the_hash_of_version_0_1_stays_for_its_records")
)
PROTOBUF = ("tests/kafka/test_protobuf.py",)
SPOOL = ("tests/protocol/test_spool.py",)
VERSIONS = ("tests/postgres/test_versions.py",)

MUTANTS = (
    # ------------------------------------------------------------------ the protocol
    Mutant("no fence before a replay (R6)", "coordinator", 'self.fence.require_newest("replay")', "pass", PROTOCOL),
    Mutant(
        "no fence before the put",
        "coordinator",
        'self.fence.require_newest("complete")  # R14: fence before the put',
        "pass",
        PROTOCOL,
    ),
    Mutant(
        "no fence between put, or load, and commit (R14)",
        "coordinator",
        'self.require_newest("commit", listing)',
        "pass",
        PROTOCOL + SAVEPOINTS,
    ),
    Mutant(
        "no fence after the load of nothing (R14)",
        "coordinator",
        'self.fence.require_newest("commit")',
        "pass",
        PROTOCOL + SAVEPOINTS,
    ),
    Mutant("no fence in the sweep", "coordinator", 'fence.require_newest("sweep")', "pass", PROTOCOL),
    Mutant(
        "a newer checkpoint is not looked for after the put (R1)",
        "coordinator",
        "if decided is None or listing.newest_complete > record.checkpoint_id:",
        "if decided is None:",
        PROTOCOL,
    ),
    Mutant(
        "commit before the decision is put",
        "coordinator",
        "            permit = self.decide(record)",
        "            self.commit(self.fence.permit(Complete((record,))))\n            permit = self.decide(record)",
        PROTOCOL,
    ),
    Mutant(
        "storage that is older than the ledger (R15)",
        "coordinator",
        "memories.require_not_ahead(remembered, newest, place)",
        "pass",
        MEMORIES,
    ),
    Mutant(
        "a topic that was made anew while the tasks ran (R19)",
        "coordinator",
        "self._read_from_them(self._pre_commit(batch), batch)",
        "replace(self._pre_commit(batch), topic_ids=self._topic_ids)",
        PROTOCOL,
    ),
    Mutant(
        "ids of topics that nobody tells are forgotten (R19)",
        "coordinator",
        "            return self._topic_ids\n",
        "            return ()\n",
        PROTOCOL,
    ),
    Mutant(
        "adopt takes every topic that is made anew (R19)",
        "coordinator",
        "decisions.require_same_topics(batch.facts.checkpoint_id, self._topic_ids, now)",
        "self.config.adopt or decisions.require_same_topics(batch.facts.checkpoint_id, self._topic_ids, now)",
        PROTOCOL,
    ),
    Mutant(
        "a topic is known by its name",
        "coordinator",
        "str(found[topic].topicId().toString())",
        "str(found[topic].name())",
        ("tests/spark/test_killed.py::test_a_topic_that_is_made_anew_is_not_read_on",),
    ),
    Mutant(
        "an empty storage beside a ledger that names the job (R15)",
        "coordinator",
        "memories.require_no_other_history(remembered, place, next_checkpoint=adopted)",
        "pass",
        MEMORIES,
    ),
    Mutant(
        "rows of a lineage that storage does not know (R15)",
        "coordinator",
        "if (found := _of_another_history(memory, before, lineage)) is None:",
        "if True:",
        MEMORIES,
    ),
    Mutant(
        "a system of before the savepoint that was restored (R15)",
        "coordinator",
        "memories.require_restored(remembered, history[0], place)",
        "pass",
        MEMORIES,
    ),
    Mutant(
        "what is gone from the external system is passed over (R15)",
        "coordinator",
        "            if gone and memory is not None:",
        "            if False:",
        MEMORIES,
    ),
    Mutant(
        "an external system that is set back under the query (R15)",
        "coordinator",
        "        self._require_remembered()",
        "        pass",
        MEMORIES,
    ),
    Mutant(
        "a sweep spares only what the newest record names (R16)",
        "coordinator",
        "history = fence.store.history() if listed else []",
        "history = [fence.store.load_newest()] if listed else []",
        MEMORIES,
    ),
    Mutant(
        "a start that is refused sweeps (R16)",
        "coordinator",
        "        if self._agreed:",
        "        if True:",
        MEMORIES,
    ),
    Mutant(
        "a batch that was planned anew is the one in storage (R12)",
        "coordinator",
        "elif batch.planned_at and record.planned_at not in (0, batch.planned_at):",
        "elif False:",
        PROTOCOL,
    ),
    Mutant(
        "a finished batch is not run for Spark's state (R10)",
        "coordinator",
        "batch.drain()  # R10",
        "pass  # R10",
        PROTOCOL,
    ),
    Mutant(
        "nothing is swept",
        "coordinator",
        "orphans = unnamed(listed, named)",
        "orphans = unnamed(listed, listed)",
        PROTOCOL,
    ),
    Mutant(
        "what a record names is swept too",
        "coordinator",
        "orphans = unnamed(listed, named)",
        "orphans = listed",
        PROTOCOL,
    ),
    Mutant(
        "swept although the records vanished",
        "coordinator",
        "if records_exist and listed and not history:",
        "if False:",
        PROTOCOL,
    ),
    Mutant(
        "aborted after a put of which nobody knows whether it landed",
        "coordinator",
        "            # The put may still land,",
        "            self._abort(record.committables)\n            # The put may still land,",
        PROTOCOL,
    ),
    Mutant("no sweep while asking again (R7)", "coordinator", "self.sweep()  # R7", "pass  # R7", PROTOCOL),
    Mutant(
        "a lock of an orphan fails the checkpoint (R8)",
        "coordinator",
        "again = error.retryable and blocked < RETRIES_WHEN_BLOCKED",
        "again = False",
        PROTOCOL,
    ),
    Mutant(
        "a task's error is passed over",
        "coordinator",
        "        if errors := acks.errors:\n            raise errors[0]\n",
        "",
        PROTOCOL,
    ),
    Mutant(
        "outcomes are final while one could not answer (R3)",
        "coordinator",
        "final = not any(isinstance(answer, Exception) for answer in answers)",
        "final = True",
        PROTOCOL,
    ),
    Mutant(
        "sinks that are not there any more are passed over",
        "coordinator",
        "if unknown := sorted(written - set(sinks)):",
        "if unknown := sorted(written & set()):",
        PROTOCOL,
    ),
    Mutant(
        "retention deletes the checkpoint before the newest",
        "coordinator",
        "oldest = permit.complete.checkpoint_id - self.config.retained_checkpoints + 1",
        "oldest = permit.complete.checkpoint_id",
        PROTOCOL,
    ),
    Mutant(
        "two calls for one batch are not told apart",
        "coordinator",
        "elif done and not batch.same_rows(done):",
        "elif False:",
        ("tests/protocol", "tests/spark/test_controls.py"),
    ),
    # ------------------------------------------------------------------ its decisions
    Mutant(
        "another query's checkpoint is taken for one's own",
        "coordinator",
        "if batch.query_id != c.query_id:",
        "if False:",
        PROTOCOL,
    ),
    Mutant("a storage that was wiped", "coordinator", "if n == 0 or adopt:", "if True:", PROTOCOL),
    Mutant(
        "a gap between the checkpoints",
        "coordinator",
        "if n > c.checkpoint_id + 1 or (n == c.checkpoint_id + 1 and newest.lost()):",
        "if n == c.checkpoint_id + 1 and newest.lost():",
        PROTOCOL,
    ),
    Mutant(
        "on to the next batch with transactions lost",
        "coordinator",
        "if n > c.checkpoint_id + 1 or (n == c.checkpoint_id + 1 and newest.lost()):",
        "if n > c.checkpoint_id + 1:",
        PROTOCOL,
    ),
    Mutant(
        "a batch of other offsets counts as done (R12)",
        "coordinator",
        "elif (record.offsets, record.query_id) != (batch.offsets, batch.query_id):",
        "elif False:",
        PROTOCOL,
    ),
    Mutant(
        "a batch of other files counts as done (R12)",
        "coordinator",
        "record.planned_at not in (0, batch.planned_at)",
        "False",
        PROTOCOL,
    ),
    Mutant("a replay in another layout (R13)", "coordinator", "        if then != now:", "        if False:", PROTOCOL),
    Mutant(
        "a replay of other rows",
        "coordinator",
        "if p not in acks or acks[p].fingerprint != c.fingerprint",
        "if p not in acks",
        PROTOCOL,
    ),
    Mutant(
        "an unknown outcome is passed over",
        "coordinator",
        "    if unknown:\n        raise InDoubtError(",
        "    if False:\n        raise InDoubtError(",
        PROTOCOL,
    ),
    Mutant(
        "nothing lost is replayed", "coordinator", "        while complete.lost():", "        while False:", PROTOCOL
    ),
    Mutant(
        "a checkpoint that is not visible is saved, or deleted",
        "coordinator",
        "    if hidden:\n        raise InDoubtError(",
        "    if False:\n        raise InDoubtError(",
        (*QUICK, "tests/protocol", *SAVEPOINTS),
    ),
    Mutant(
        "what is committed can be given up",
        "coordinator",
        "outcome.state not in (CommitState.LOST, CommitState.UNKNOWN)",
        "False",
        ("tests/protocol", "tests/cli/test_resolve.py"),
    ),
    # ------------------------------------------------------------------ its records
    Mutant(
        "a generation is claimed twice",
        "coordinator",
        "        if there.newest_generation != claim.generation:\n            return False\n",
        "",
        (*QUICK, "tests/protocol", *SAVEPOINTS),
    ),
    Mutant(
        "the newest is not looked for again (R9)",
        "coordinator",
        "if rounds and self.look().newest_complete == newest:",
        "if rounds:",
        PROTOCOL,
    ),
    Mutant("a record of another job", "coordinator", "        if job != self.job:", "        if False:", PROTOCOL),
    Mutant("a record that was changed", "coordinator", ".hexdigest() != checksum:", ".hexdigest() == 0:", PROTOCOL),
    Mutant(
        "a put that was repeated is taken for another driver's",
        "coordinator",
        " or self._calls.get(key) == data",
        "",
        PROTOCOL,
    ),
    Mutant(
        "a restore that another driver overtook",
        "coordinator",
        "            if not self._claim(Claim(fence + 1, base.lineage, None, self._sign())):",
        "            self._claim(Claim(fence + 1, base.lineage, None, self._sign()))\n            if False:",
        SAVEPOINTS,
    ),
    # ------------------------------------------------------------------ the task
    Mutant(
        "a task commits what it should pre-commit",
        "sinks",
        "        elif not exactly_once:",
        "        elif True:",
        TASK,
    ),
    Mutant(
        "a task that fails leaves its transaction",
        "sinks",
        "                self.sink.rollback(self._transaction)",
        "                pass",
        TASK,
    ),
    Mutant(
        "a replay writes all partitions",
        "sinks",
        "return self.again is None or subtask in self.again.own",
        "return True",
        TASK,
    ),
    Mutant(
        "fingerprints only count",
        "sinks",
        "self.fingerprint.add(rows.num_rows, pc.sum(hashes).as_py())",
        "self.fingerprint.add(rows.num_rows, 0)",
        TASK,
    ),
    # ------------------------------------------------------------------ storages
    Mutant(
        "file: a second put replaces", "coordinator/storage", "os.link(staged, path)", "os.replace(staged, path)", FILES
    ),
    Mutant("file: not durable", "coordinator/storage", "os.fsync(file.fileno())", "pass", FILES),
    Mutant("file: names are not durable", "coordinator/storage", "    os.fsync(descriptor)", "    pass", FILES),
    Mutant(
        "file: half-written values are listed",
        "coordinator/storage",
        "self._retrying()(names) if is_key(name))",
        "self._retrying()(names))",
        FILES,
    ),
    Mutant(
        "sql: a second put succeeds",
        "coordinator/storage",
        'return retrying.statistics["attempt_number"] > 1 and self.get(key) == value',
        "return True",
        FILES,
    ),
    Mutant("sql: other folders are listed", "coordinator/storage", ", _TABLE.c.key < end)", ")", FILES),
    Mutant(
        "cloud: a second put replaces",
        "coordinator/storage",
        'obstore.put(self._store, key, value, mode="create")',
        'obstore.put(self._store, key, value, mode="overwrite")',
        CLOUDS,
    ),
    Mutant(
        "cloud: a repeated put is taken for the first",
        "coordinator/storage",
        'return retrying.statistics["attempt_number"] > 1 and found == value',
        'return retrying.statistics["attempt_number"] > 1',
        CLOUDS,
    ),
    Mutant(
        "cloud: a put whose answer got lost is taken for another's",
        "coordinator/storage",
        'return retrying.statistics["attempt_number"] > 1 and found == value',
        "return False",
        CLOUDS,
    ),
    Mutant(
        "memory: a second put replaces",
        "coordinator/storage",
        "            if key in self._values:\n                return False\n",
        "",
        FILES,
    ),
    # ------------------------------------------------------------------ schema evolution
    Mutant(
        "a superseded driver alters the table",
        "coordinator",
        'self.fence.require_newest("alter a table")',
        "pass",
        EVOLUTION,
    ),
    Mutant(
        "the table is altered before what is in doubt is swept",
        "coordinator",
        """        if call is Call.WRITE:
            self._check_schemas(batch)
""",
        """        if call is Call.WRITE:
            self._check_schemas(batch)
            self._evolve(batch)
""",
        EVOLUTION,
    ),
    Mutant(
        "the table is altered for what it was before the lock",
        "sinks/sql",
        "                due = changes()\n",
        "",
        EVOLUTION,
    ),
    Mutant(
        "rows that were staged for a narrower column are refused",
        "sinks/sql",
        "return narrow.widened(wide) == wide",
        "return False",
        EVOLUTION,
    ),
    Mutant(
        "ALTER TYPE without the collation",
        "sinks/sql",
        '{existing.more}"\n        return SchemaChange(column, statement, "widen", locks, rewrites)',
        '"\n        return SchemaChange(column, statement, "widen", locks, rewrites)',
        EVOLUTION,
    ),
    Mutant(
        "MODIFY without the rest of the column",
        "sinks/sql",
        "{_ticked(column)} {kind}{existing.more}",
        "{_ticked(column)} {kind}",
        EVOLUTION,
    ),
    # ------------------------------------------------------------------ table sinks
    Mutant(
        "lost without a tombstone",
        "sinks",
        "        if committed is None:\n            proof = committable",
        "        if False:\n            proof = committable",
        POSTGRES,
    ),
    Mutant(
        "aborted although committed",
        "sinks",
        "if not ended and ledger.states(connection, [key]).get(key):",
        "if not ended and False:",
        POSTGRES,
    ),
    Mutant(
        "pre-committed although it was aborted",
        "sinks",
        "if not ledger.insert(transaction.connection, {key: TransactionId.parse(text)}, committed=True, sums=sums):",
        "if ledger.insert(transaction.connection, {key: TransactionId.parse(text)}, committed=True) and False:",
        POSTGRES,
    ),
    Mutant(
        "another ledger speaks for a transaction",
        "sinks",
        "if reason := ledger.foreign(connection, proof) or self.dialect.contradiction(connection, proof):",
        "if reason := None:",
        POSTGRES,
    ),
    Mutant(
        "what somebody made of a staging table's columns is moved",
        "sinks/sql",
        'committable.proof.get("columns", columns_digest(there)) != columns_digest(there)',
        "False",
        ("tests/postgres/test_changes.py",),
    ),
    Mutant(
        "SqlAlchemySink: what somebody made of the staging table's columns is moved",
        "sinks/sqlalchemy",
        "digests.get(staging.name, columns_digest(given)) != columns_digest(given)",
        "False",
        SQLALCHEMY,
    ),
    Mutant(
        "Kafka: transactions that were ended are decided",
        "sinks/kafka",
        "        if ended:\n",
        "        if False:\n",
        KAFKA_CRASHES,
    ),
    Mutant(
        "a part of a staged checkpoint is moved",
        "sinks",
        "if intact and not outcomes and all(states.values()):",
        "if intact:",
        POSTGRES,
    ),
    Mutant(
        "PostgreSQL: an upsert passes over rows of tables that inherit",
        "sinks/postgres",
        "if self.merge.keys and target.heirs:",
        "if False:",
        ("tests/postgres/test_sink.py",),
    ),
    Mutant(
        "PostgreSQL: COPY passes over the rules of a table",
        "sinks/postgres",
        "        if target.rules:\n",
        "        if False:\n",
        ("tests/postgres/test_sink.py",),
    ),
    Mutant(
        "SqlAlchemySink: an engine that commits by itself is taken",
        "sinks/sqlalchemy",
        'if (level := _isolation(options)) in ("AUTOCOMMIT", "READ UNCOMMITTED"):',
        'if (level := _isolation(options)) == "NONE":',
        ("tests/sqlalchemy_sink/test_sink.py",),
    ),
    Mutant(
        "MySQL: an upsert lets the server put the time into a key",
        "sinks/mysql",
        'changes += [(column, "target") for column in own]',
        "changes += []",
        ("tests/mysql/test_sink.py",),
    ),
    Mutant(
        "MySQL: texts are read by another name of characters than they are written in",
        "sinks/mysql",
        "if self.init_command:",
        "if False:",
        ("tests/mysql/test_sink.py",),
    ),
    Mutant(
        "MySQL: the last change is told by an enumeration",
        "sinks/sql",
        'in ("enum", "set"):',
        "in ():",
        ("tests/mysql/test_sink.py",),
    ),
    Mutant(
        "Kafka: a header without a key becomes another",
        "sinks/kafka",
        "if len(bad := without_headers(batch)):",
        "if len(bad := pa.array([])):",
        ("tests/kafka/test_sink.py",),
    ),
    Mutant(
        "Kafka: keys of maps are what Spark has in its memory",
        "sinks/kafka",
        "if not isinstance(kind.keyType, (BooleanType, NumericType, StringType)):",
        "if False:",
        ("tests/spark/test_arrow.py",),
    ),
    Mutant(
        "what is staged for one table is moved into another",
        "sinks/sql",
        "if not states.get(text) and (astray := c.astray(self.aim(plan))):",
        "if astray := None:",
        SQLALCHEMY,
    ),
    Mutant(
        "what was rolled back in one table is written again into another",
        "sinks/sql",
        "if astray := committable.astray(self.aim(plan)):",
        "if astray := None:",
        POSTGRES,
    ),
    Mutant(
        "Kafka: what was lost of one topic is written again to another",
        "sinks/kafka",
        "astray = committable.astray(self._target)",
        "astray = None",
        KAFKA,
    ),
    Mutant(
        "another ledger speaks for a staging table",
        "sinks",
        "                if reason := ledger.foreign(connection, c.proof):",
        "                if reason := None:",
        POSTGRES,
    ),
    Mutant(
        "PostgreSQL: the server's own memory is not asked",
        "sinks/postgres",
        'if status != "committed":',
        "if True:",
        POSTGRES,
    ),
    Mutant(
        "PostgreSQL: committed, not prepared",
        "sinks/postgres",
        'transaction.seal(sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(self.key(transaction.identity))))',
        'transaction.seal("COMMIT")',
        POSTGRES,
    ),
    Mutant(
        "PostgreSQL: another sink's transactions are listed",
        "sinks/postgres",
        "for (gid,) in rows if of_sink(gid, sink)]",
        "for (gid,) in rows]",
        POSTGRES,
    ),
    Mutant(
        "a tombstone does not stop a row",
        "sinks/sql",
        "return self.server.insert_missing(connection, self.table, rows, columns) == len(rows)",
        "return self.server.insert_missing(connection, self.table, rows, columns) is not None",
        POSTGRES,
    ),
    Mutant(
        "verify: a row counts whoever wrote it last",
        "sinks/postgres",
        "written AS (SELECT xmin::text AS writer, count(*) AS rows",
        "written AS (SELECT (SELECT min(writer) FROM known) AS writer, count(*) AS rows",
        VERIFY,
    ),
    Mutant(
        "verify: a transaction that no record names is not seen",
        "sinks/sql",
        "for key in sorted(entries.keys() - known)",
        "for key in sorted(known - known)",
        VERIFY,
    ),
    Mutant(
        "verify: aborted records count",
        "sinks/kafka",
        "if not any(id == name[0] and first <= at < end for id, at in aborted):",
        "if True:",
        VERIFY,
    ),
    Mutant(
        "verify: fewer rows than acknowledged balance",
        "coordinator",
        "if held is not None and held != committed:",
        "if held is not None and held > committed:",
        ("tests/protocol/test_balance.py",),
    ),
    Mutant(
        "a ledger without columns for counts is written to as if it had them",
        "sinks/sql",
        "if sums and self.has_sums:",
        "if sums:",
        VERIFY,
    ),
    Mutant(
        "a trigger that is new is taken as meant",
        "sinks/sql",
        "new = sorted(name for name, definition in triggers.items() if self.triggers.get(name) != definition)",
        "new = list[str]()",
        POSTGRES,
    ),
    Mutant(
        "another database takes the place of the first",
        "sinks/sql",
        "if (there := self._id(connection)) != self.id:",
        "if (there := self._id(connection)) is None:",
        POSTGRES,
    ),
    Mutant(
        "an older change replaces a newer row in spite of keep_newer",
        "sinks/sql",
        'return f" AND (target.{by} IS NULL OR target.{by} <= {change}.{by})"',
        'return ""',
        POSTGRES,
    ),
    Mutant(
        "MySQL: branches of other jobs are listed",
        "sinks/mysql",
        "if name.startswith(prefix) and of_sink(name, sink)]",
        "]",
        MYSQL,
    ),
    Mutant(
        "MySQL: branches of other databases are listed",
        "sinks/mysql",
        "if form == format_of(schema):",
        "if form:",
        MYSQL,
    ),
    Mutant(
        "MySQL: a branch that its session still has is taken for gone",
        "sinks/mysql",
        "if dict(identity) not in prepared(connection, schema):",
        "if True:",
        MYSQL,
    ),
    Mutant(
        "SQLAlchemy: nothing in doubt is listed",
        "sinks/sqlalchemy",
        "rows = _ledger(ledger).staged(connection, token(job), token(sink)) if ledger else {}",
        "rows: dict[str, str] = {}",
        SQLALCHEMY,
    ),
    # ------------------------------------------------------------------ rollback and purge
    Mutant(
        "a sink is not asked to purge",
        "coordinator",
        "self.sinks[name].purge(self._about(visible.checkpoint_id))",
        "pass",
        PROTOCOL,
    ),
    Mutant(
        "files: what was written stays after a rollback",
        "examples",
        'for prefix in (".open-", "."):\n            (self.folder / f"{prefix}',
        'for prefix in (".",):\n            (self.folder / f"{prefix}',
        FILE_SINK,
    ),
    Mutant(
        "files: the proof that may still be asked for is purged",
        "examples",
        "name.checkpoint < checkpoint.oldest_retained",
        "name.checkpoint <= checkpoint.oldest_retained",
        FILE_SINK,
    ),
    Mutant(
        "tables: what pre-commit had sealed stays after a rollback",
        "sinks/sql",
        "        if transaction.sealing:\n            self.abort(",
        "        if False:\n            self.abort(",
        POSTGRES,
    ),
    Mutant(
        "tables: the proof that may still be asked for is purged",
        "sinks/sql",
        "before = checkpoint.oldest_retained - _KEPT_CHECKPOINTS",
        "before = checkpoint.oldest_retained + 1",
        ("tests/postgres/test_proofs.py",),
    ),
    Mutant(
        "Kafka: a rollback leaves the transaction open",
        "sinks/kafka",
        "            transaction.abort(self.timeout)\n        finally:",
        "            pass\n        finally:",
        KAFKA,
    ),
    # ------------------------------------------------------------------ Spark
    Mutant(
        "Spark: a sink's transform is passed over",
        "coordinator/spark",
        "return sink.transform(self._df) if sink.transform else self._df",
        "return self._df",
        ("tests/spark/test_shared.py", *KILLED),
    ),
    Mutant(
        "Spark: a task is known by its number among all tasks",
        "sinks",
        "task.partitionId(), task.taskAttemptId()",
        "task.taskAttemptId(), task.taskAttemptId()",
        KILLED,
    ),
    Mutant(
        "Spark: two executors compute a partition for two sinks",
        "coordinator/spark",
        "if len(tasks) > 1:  # else",
        "if False:  # else",
        ("tests/spark/test_executors.py",),
    ),
    Mutant(
        "Spark: a checkpoint that expired goes on",
        "coordinator/spark",
        "self._df.sparkSession.sparkContext.cancelJobsWithTag(self._job_tag)",
        "pass",
        ("tests/spark/test_controls.py",),
    ),
    # ------------------------------------------------------------------ Kafka
    Mutant(
        "Kafka: fenced is taken for lost",
        "sinks/kafka",
        "return witnessed(cluster, committable, for_code(answer).message)",
        'return CommitOutcome.lost("fenced")',
        KAFKA,
    ),
    Mutant(
        "Kafka: fenced is taken for committed",
        "sinks/kafka",
        "return witnessed(cluster, committable, for_code(answer).message)",
        "return CommitOutcome.COMMITTED",
        KAFKA,
    ),
    Mutant(
        "Kafka: the witness is asked before its record can be read",
        "sinks/kafka",
        "if offset >= found.last_stable_offset:",
        "if False:",
        KAFKA,
    ),
    Mutant(
        "Kafka: another producer's record is the witness",
        "sinks/kafka",
        'or (batch.producer_id, batch.producer_epoch) != (identity["producer_id"], identity["producer_epoch"])',
        "or False",
        KAFKA,
    ),
    Mutant(
        "Kafka: an aborted record is the witness of a commit",
        "sinks/kafka",
        "if any(one.producer_id == identity",
        "if False and any(one.producer_id == identity",
        KAFKA,
    ),
    Mutant(
        "Kafka: another cluster's transaction is committed",
        "sinks/kafka",
        "for committable in committables} - {here}:",
        "for committable in committables if False} - {here}:",
        KAFKA,
    ),
    Mutant(
        "Kafka: aborted although committed",
        "sinks/kafka",
        "if state and state[1] in COMMITTED_STATES:",
        "if False:",
        KAFKA,
    ),
    Mutant(
        "Kafka: a copy of a task fences the original",
        "sinks/kafka",
        "{context.subtask}.{context.slot}",
        "{context.subtask}.0",
        KAFKA,
    ),
    Mutant(
        "Kafka: transactions carry no offset (R15)", "sinks/kafka", "mark if marked else None", "None", KAFKA_MEMORY
    ),
    Mutant(
        "Kafka: the group is read before the markers are written",
        "sinks/kafka",
        'if busy := self._brokers.listed(_prefix(job, self.name), "PrepareCommit"):',
        "if busy := []:",
        KAFKA_MEMORY,
    ),
    Mutant(
        "Kafka: what at-least-once writes counts as decided",
        "sinks/kafka",
        "marked = self.remember and context.exactly_once",
        "marked = self.remember",
        KAFKA_MEMORY,
    ),
    # ------------------------------------------------------------------ format("exactly_once")
    Mutant(
        "format: who decides claims a generation of its own",
        "coordinator",
        "Fence(self.store, prepared.generation)",
        "Fence(self.store, self.store.claim_generation())",
        FORMAT,
    ),
    Mutant(
        "format: who decides sweeps before",
        "coordinator",
        "self._see_through(self._what_is_asked(batch), batch)",
        "self._see_through([self._what_is_asked(batch), self.sweep()][0], batch)",
        FORMAT,
    ),
    Mutant(
        "format: what is visible is written again",
        "coordinator",
        "return replace(found, needed=False)",
        "return found",
        FORMAT,
    ),
    Mutant(
        "format: what a record may name is aborted", "coordinator", "if mine and None in messages:", "if mine:", FORMAT
    ),
    Mutant(
        "format: all rows have the same hash",
        "coordinator",
        'pa.array(hashes.view("int64"))',
        'pa.array(0 * hashes.view("int64"))',
        FORMAT,
    ),
    Mutant(
        "format: a job file that is changed while a batch runs",
        "coordinator",
        "if (now := self._setup()) != prepared.setup:",
        "if (now := self._setup()) is None:",
        ("tests/spark/test_format.py::test_a_job_file_that_is_changed_while_a_batch_runs",),
    ),
    Mutant(
        "format: what tasks of the last batch have left stays",
        "coordinator",
        "self.sweep()  # what tasks that died have left: another batch may not come",
        "pass",
        ("tests/spark/test_format.py::test_what_the_first_try_of_a_task_has_left_is_aborted_with_its_batch",),
    ),
    # ------------------------------------------------------------------ rows that are written again
    Mutant(
        "row hash: NULLs are passed over",
        "sinks",
        "        return [is_null, value]\n",
        "        return [value]\n",
        ROW_HASHES,
    ),
    Mutant(
        "row hash: 0.0 and -0.0 are the same",
        "sinks",
        'return [is_null, value, functions.when(value == 0, value.cast("string"))]',
        "return [is_null, value]",
        ROW_HASHES,
    ),
    Mutant(
        "row hash: the one of version 0.1 is forgotten",
        "sinks",
        "_hash(df) if how else _hash_of_version_0_1(df)",
        "_hash(df)",
        ROW_HASHES,
    ),
    Mutant(
        "a replay hashes rows in another way than its checkpoint",
        "coordinator",
        "return self.newest.record.row_hash if number and self.newest else batch.row_hashes[0]",
        "return batch.row_hashes[0]",
        ("tests/protocol/test_rules.py",),
    ),
    Mutant(
        "rows that were hashed in an unknown way are written again",
        "coordinator",
        "    if record.row_hash not in known:",
        "    if False:",
        ("tests/protocol/test_rules.py",),
    ),
    Mutant(
        "spool: rows of another attempt are written again",
        "coordinator",
        "return end == [str(rows), text] and int(number) == len(keys) - 1",
        "return bool(end)",
        SPOOL,
    ),
    Mutant(
        "spool: rows that somebody altered are written again",
        "coordinator",
        'if data is None or f"{zlib.crc32(data):08x}" != key.split(".")[5]:',
        "if data is None:",
        SPOOL,
    ),
    # ------------------------------------------------------------------ dead letters
    Mutant(
        "a replay separates rows as the target says now (R17)",
        "sinks",
        "        if self.again:\n            recorded",
        "        if self.again and own is None:\n            recorded",
        DEAD_LETTERS,
    ),
    Mutant(
        "more dead letters than a checkpoint may have",
        "coordinator",
        "        if refused > allowed(limit, read):",
        "        if False:",
        DEAD_LETTERS,
    ),
    Mutant(
        "more dead letters than a participant may have",
        "sinks",
        "        if len(dead.refused) + len(refused) > most:",
        "        if False:",
        DEAD_LETTERS,
    ),
    Mutant(
        "what a failed task has written of dead letters stays",
        "sinks",
        "            for share in shares:\n                share.undo()",
        "            for share in shares[:1]:\n                share.undo()",
        DEAD_LETTERS,
    ),
    Mutant(
        "letters are not marked as put through (R18)",
        "coordinator",
        "through = through.with_all(letter.id for letter in batch.letters)",
        "pass",
        DEAD_LETTERS,
    ),
    Mutant(
        "letters are put through a second time (R18)",
        "coordinator",
        "_batches([letter for letter in chosen if not letter.replayed], run_id)",
        "_batches(chosen, run_id)",
        DEAD_LETTERS,
    ),
    Mutant(
        "a letter that is mended otherwise is taken for the same (R18)",
        "coordinator",
        'rows = hashlib.sha256("\\n".join(f"{letter.id} {letter.row}" for',
        'rows = hashlib.sha256("\\n".join(f"{letter.id}" for',
        ("tests/postgres/test_mended_letters.py",),
    ),
    Mutant(
        "two letters of one id are taken for one",
        "coordinator",
        "is not one and not _same(found[letter.id], letter):",
        "is not one and False:",
        DEAD_LETTERS,
    ),
    Mutant(
        "in doubt of a replay is not looked at",
        "coordinator",
        "for name in writers(coordinator.sinks).values():\n            store = CheckpointStore(own",
        "for name in ():\n            store = CheckpointStore(own",
        ("tests/cli/test_in_doubt.py",),
    ),
    Mutant(
        "mended: a number that is too large becomes Infinity",
        "sinks/sql",
        "if math.isinf(number) or",
        "if False and",
        JSON,
    ),
    Mutant(
        "mended: true is the number 1",
        "sinks/sql",
        "if type(value) not in (int, Decimal):",
        "if not isinstance(value, (int, Decimal)):",
        JSON,
    ),
    Mutant("mended: a zone is cut off", "sinks/sql", "    if zone:\n", "    if False:\n", JSON),
    Mutant(
        "mended: of a column that comes twice the last wins",
        "sinks/sql",
        "if len(found) < len(pairs):",
        "if False:",
        JSON,
    ),
    Mutant(
        "PostgreSQL: a deferred key judges rows at the end",
        "sinks/postgres",
        "            self._judge_now()\n",
        "            pass\n",
        ("tests/postgres/test_dead_letters.py",),
    ),
    Mutant(
        "SqlAlchemySink: a deferred key judges rows at the end",
        "sinks/sqlalchemy",
        "            self._judge_now()\n",
        "            pass\n",
        ("tests/sqlalchemy_sink/test_dead_letters.py",),
    ),
    Mutant(
        "Kafka: letters that a transaction holds up are passed over",
        "sinks/kafka",
        "return cluster.log_starts(topic, partitions), stable, told",
        "return cluster.log_starts(topic, partitions), stable, []",
        LETTERS,
    ),
    Mutant(
        "Kafka: letters that were removed are passed over",
        "sinks/kafka",
        "for at, start in begins.items() if start]",
        "for at, start in begins.items() if start < 0]",
        LETTERS,
    ),
    Mutant(
        "Kafka: letters of aborted transactions are shown",
        "sinks/kafka",
        '"isolation.level": "read_committed",\n            "auto',
        '"isolation.level": "read_uncommitted",\n            "auto',
        LETTERS,
    ),
    Mutant(
        "Kafka: the oldest letters are taken for the newest",
        "sinks/kafka",
        "self.found[at] = letters + self.found.get(at, deque())",
        "self.found[at] = self.found.get(at, letters) + letters",
        LETTERS,
    ),
    # ------------------------------------------------------------------ partitions and schemas of Kafka
    Mutant(
        "Kafka: what was ended in one partition is decided",
        "sinks/kafka",
        "        ended = ended or [committables[at] for at in self._ended_in_a_partition(committables)]\n",
        "",
        KAFKA_CRASHES,
    ),
    Mutant(
        "Kafka: what was ended in one partition is committed",
        "sinks/kafka",
        "outcomes |= self._interrupted(committables, [at for at in range(len(committables)) if at not in outcomes])",
        "pass",
        KAFKA_CRASHES,
    ),
    Mutant(
        "a registry that was set back",
        "sinks/kafka",
        "if found is None or self._hash(found) != wanted:",
        "if False:",
        ("tests/kafka/test_registry.py",),
    ),
    Mutant(
        "a schema is registered that schema_evolution does not allow",
        "sinks/kafka",
        "        if not plan.steps <= set(self._allowed()):",
        "        if False:",
        _avro("none_registers_nothing_and_says_what_differs"),
    ),
    Mutant(
        "Avro: keys by the newest schema",
        "sinks/kafka",
        "return registry.first()",
        "return registry.latest()",
        _avro("keys_stay_the_same_bytes_by_the_subjects_first_version"),
    ),
    Mutant(
        "Avro: a map, whose order is any, in a key",
        "sinks/kafka",
        'for name in _maps(value, "key")]',
        "for name in ()]",
        _avro("keys_without_an_order_are_refused"),
    ),
    Mutant(
        "Avro: null is written as false",
        "sinks/kafka",
        "            if strict:\n",
        "            if False:\n",
        _avro("null_is_not_written_as_false"),
    ),
    Mutant(
        "Avro: a null struct of fields that may not be null",
        "sinks/kafka",
        ".with_type(again(field.type)).with_nullable(True) for",
        ".with_type(again(field.type)) for",
        _avro("a_null_struct_of_fields_that_may_not_be_null"),
    ),
    Mutant(
        "Protobuf: the number of a field that was removed is given away",
        "sinks/kafka",
        "max([0, *used, *(field.number for field in once)]) + 1",
        "max([0, *used]) + 1",
        PROTOBUF,
    ),
    Mutant(
        "Protobuf: a field that comes back gets another number",
        "sinks/kafka",
        "            if field.name == name:\n                if field.number in used",
        "            if False:\n                if field.number in used",
        PROTOBUF,
    ),
    Mutant(
        "Protobuf: null is written as zero",
        "sinks/kafka",
        "                elif required:",
        "                elif False:",
        PROTOBUF,
    ),
    Mutant(
        "Protobuf: a null among elements is left out",
        "sinks/kafka",
        'raise ValidationError("an element is null, which an array of Protobuf cannot hold")',
        "values = [one for one in values if one is not None]",
        PROTOBUF,
    ),
    # ------------------------------------------------------------------ what older versions have written
    Mutant(
        "a claim without a sign of life is not read",
        "coordinator",
        'SignOfLife(**body.get("sign", {}))',
        'SignOfLife(**body["sign"])',
        VERSIONS,
    ),
    Mutant(
        "a record without fields that came later is not read",
        "coordinator",
        'for value in body.get("accepted", ())',
        'for value in body["accepted"]',
        VERSIONS,
    ),
    Mutant(
        "a record without a time of planning is taken for another batch's",
        "coordinator",
        "elif batch.planned_at and record.planned_at not in (0, batch.planned_at):",
        "elif batch.planned_at and record.planned_at != batch.planned_at:",
        QUICK,
    ),
    Mutant(
        "a staging table of which no columns were told is not moved",
        "sinks/sql",
        'committable.proof.get("columns", columns_digest(there))',
        'committable.proof["columns"]',
        VERSIONS,
    ),
    Mutant(
        "SqlAlchemySink: a staging table of which no columns were told is not moved",
        "sinks/sqlalchemy",
        'for c in committables if "columns" in c.proof}',
        "for c in committables}",
        VERSIONS,
    ),
    Mutant(
        "Kafka: nobody tells that a topic was deleted while rows went there",
        "sinks/kafka",
        "for topic in missing & self._missing:",
        "for topic in ():",
        ("tests/kafka/test_sink.py::test_a_topic_that_is_deleted_while_rows_go_there_is_told",),
    ),
    Mutant(
        "Kafka: a committable without ids of topics is not settled",
        "sinks/kafka",
        'committable.proof.get("topic_ids", {}).items()',
        'committable.proof["topic_ids"].items()',
        ("tests/kafka/test_versions.py",),
    ),
    Mutant(
        "Kafka: a committable without offsets of its records is not settled",
        "sinks/kafka",
        'spans = proof.get("spans") or {',
        'spans = proof["spans"] or {',
        ("tests/kafka/test_versions.py",),
    ),
)
