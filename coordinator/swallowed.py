"""What a function around the coordinator may do, which Spark calls in its place: keep errors from Spark, or hand over
two DataFrames for one batch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from coordinator.errors import CheckpointError
from coordinator.protocol import decisions
from coordinator.protocol.batch import BatchFacts, MicroBatch
from coordinator.protocol.decisions import Complete
from coordinator.protocol.records import CheckpointStore
from coordinator.spark.internals import StreamExecution
from coordinator.spark.location import newest_commit
from coordinator.storage import StorageError

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger(__name__)


class SwallowedErrorGuard:
    """Refuses to go on where rows of a batch before are missing, and Spark takes it for done."""

    def __init__(self, store: CheckpointStore, *, adopt: bool) -> None:
        self._store, self._adopt = store, adopt
        self._raised: tuple[MicroBatch, Exception] | None = None
        """What the last call ended with, if it was no stop: Spark fails the query with it, and no other batch comes."""
        self._done: MicroBatch | None = None

    def require_passed_on(self, batch: MicroBatch) -> None:
        """Spark has got the error of the batch before."""
        if self._raised:
            before, error = self._raised
            if before.run_id == batch.run_id and before.facts != batch.facts:
                raise self._kept_from_spark(before, error)
        self._raised = None

    def require_once(self, batch: MicroBatch) -> None:
        """A second call in one run finds the checkpoint complete. With the same rows that does no harm."""
        done, n = self._done, batch.facts.checkpoint_id
        if done and (done.run_id, done.facts.checkpoint_id) != (batch.run_id, n):
            self._done = None  # Spark keeps what its DataFrame was computed from as long as that is known
        elif done and not batch.same_rows(done):
            try:
                self._store.keep_second_call(n)
            except StorageError as error:
                logger.warning("the next start will not say that rows of batch %d are missing: %s", n, error)
            raise decisions.second_call(n, self._store.job, asked=n)

    def done(self, batch: MicroBatch) -> None:
        self._done = batch

    def raised(self, batch: MicroBatch, error: Exception) -> None:
        self._raised = batch, error

    def unheard(self, ended: StreamingQuery | None, location: str | None) -> CheckpointError | None:
        """An error that Spark did not get: in the run that the last batch came in; or before a run that has `ended`
        without a batch. `location`: as configured."""
        if self._raised and not self._raised[0].query.exception():
            return self._kept_from_spark(*self._raised)
        if ended:
            try:
                self._require_all_batches(ended, location)
            except CheckpointError as error:
                return error
            except Exception:
                job = self._store.job
                logger.info("job %s: Spark's log and the checkpoints could not be compared", job, exc_info=True)
        return None

    def _require_all_batches(self, query: StreamingQuery, location: str | None) -> None:
        """Spark takes none for done that is not complete."""
        from pyspark.sql import is_remote

        if not is_remote():
            location = StreamExecution.of(query).location
        if location is not None:
            facts = BatchFacts(newest_commit(location) + 1, query.id, ())
            store = CheckpointStore(self._store.storage, self._store.job)
            rounds = store.load_newest()
            newest = Complete(rounds) if rounds else None
            if newest is None or facts.checkpoint_id > newest.checkpoint_id:
                decisions.on_call(facts, newest, adopt=self._adopt, reloaded=True)
            if newest and store.had_second_call(newest.checkpoint_id) and not self._adopt:
                raise decisions.second_call(newest.checkpoint_id, store.job, asked=facts.checkpoint_id)

    def _kept_from_spark(self, batch: MicroBatch, error: Exception) -> CheckpointError:
        kept = CheckpointError(
            f"batch {batch.facts.checkpoint_id} failed, and Spark takes it for done, since the function that calls the "
            f"coordinator of job {self._store.job!r} has kept the error: {type(error).__name__}: {error}. Rows of it "
            "are missing. Let the errors of the coordinator pass. To have Spark hand the batch over again: "
            f"{decisions.hand_over_again(batch.facts.checkpoint_id)}, and start the query again."
        )
        kept.__cause__ = error
        return kept
