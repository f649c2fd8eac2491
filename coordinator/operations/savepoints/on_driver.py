"""Savepoints that the driver of a running query takes, between two of its batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from coordinator.errors import SavepointError
from coordinator.operations.savepoints.savepoint import Savepoint
from coordinator.operations.savepoints.take import require_own_location, take_savepoint
from coordinator.protocol import decisions
from coordinator.protocol.ports import Query
from coordinator.protocol.protocol import CheckpointProtocol
from coordinator.spark.checkpoint_location import open_location
from coordinator.spark.lifecycle import FairLock, QueryLifecycle
from coordinator.storage import CheckpointStorage, storage_at


def _nothing() -> None:
    pass


class DriverSavepoints:
    """Takes the savepoints of one coordinator, for its user and for operators."""

    def __init__(
        self,
        protocol: CheckpointProtocol,
        lifecycle: QueryLifecycle,
        one_at_a_time: FairLock,
        cancel: Callable[[Query], None],
    ) -> None:
        """Take nothing yet.

        `one_at_a_time` keeps batches out while a savepoint is taken, and `cancel` ends a query
        permanently.
        """
        self._protocol = protocol
        self._lifecycle = lifecycle
        self._one_at_a_time = one_at_a_time
        self._cancel = cancel

    def take(
        self,
        target: str | CheckpointStorage,
        *,
        location: str | None = None,
        begin: Callable[[], None] = _nothing,
        stops: Query | None = None,
    ) -> Savepoint:
        """Wait for the end of the current batch, call `begin`, and save.

        `begin` may raise to refuse. `location` is the checkpointLocation, in place of that of the
        last batch. `stops` is a query to stop before its next batch.
        """
        with storage_at(target) as storage:
            with self._one_at_a_time:
                # Before `begin`, since the query may fail while that puts its note.
                ran = stops is not None and stops.isActive
                begin()
                savepoint = self._save(storage, location)
                if stops:
                    if ran and (failure := stops.exception()):
                        raise SavepointError(
                            f"the query failed while savepoint {savepoint.id} was taken: "
                            f"{failure}. The savepoint is whole, and a restart of the query goes "
                            "on past it"
                        )
                    self._lifecycle.hold()
            if stops:
                self._lifecycle.stop(stops)
        return savepoint

    def take_and_stop(self, query: Query, target: str | CheckpointStorage) -> Savepoint:
        """Take a savepoint, and stop the query there.

        Raises `CheckpointError` if a later run of the query is active.
        """
        return self.take(
            target, begin=partial(self._lifecycle.require_no_later_run, query), stops=query
        )

    def do_request(self, how: str, begin: Callable[[], None]) -> dict[str, Any]:
        """Take the savepoint that an operator requests, and return its summary.

        `how` is one of `requests.WAYS`. `begin` is called between two batches, and may raise to
        refuse.
        """
        from pyspark.sql.utils import is_remote

        place = self._protocol.config.savepoint_dir
        query = self._lifecycle.query
        run_id = self._lifecycle.run_id
        if not place:
            raise SavepointError(
                "this driver has no place for savepoints: set savepoint_dir in its CheckpointConfig"
            )
        if how != "trigger" and is_remote():
            raise SavepointError(
                "with Spark Connect a stop would end this process before it answers: ask without "
                "--stop or --cancel, or stop the query with query.stop() and say "
                "--checkpoint-location"
            )

        def begin_with_it() -> None:
            if (
                self._lifecycle.run_id != run_id
                or not query.isActive
                or self._protocol.newest is None
            ):
                raise SavepointError(
                    "the query has ended, or was started again, since this was asked for: ask again"
                )
            begin()

        savepoint = self.take(place, begin=begin_with_it, stops=None if how == "trigger" else query)
        if how == "cancel":
            self._cancel(query)
        return savepoint.summary()

    def _save(self, target: CheckpointStorage, location: str | None = None) -> Savepoint:
        """Copy the newest checkpoint, all of which is visible, into `target`."""
        protocol = self._protocol
        location = location or self._lifecycle.location
        if location is None:
            raise SavepointError(
                "no batch has come to this coordinator: wait for one, or pass checkpoint_location"
            )
        storage = protocol.store.storage
        known = protocol.load()
        if known:  # before the claim, which stops a driver that runs
            require_own_location(open_location(location), known.record)
        newest = protocol.claim_and_commit_newest() if known else None
        if newest is None:
            raise SavepointError(
                f"job {protocol.job!r} has no complete checkpoint in {storage.uri} yet"
            )
        decisions.require_visible(newest)
        # Another driver may have written to the storage.
        confirm = partial(protocol.fence.require_newest, "take a savepoint")
        confirm()
        return take_savepoint(
            target,
            newest.rounds,
            {
                name: f"{type(sink).__module__}.{type(sink).__qualname__}"
                for name, sink in protocol.sinks.items()
            },
            location,
            storage.uri,
            confirm,
        )
