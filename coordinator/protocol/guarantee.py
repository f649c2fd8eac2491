"""The guarantee of a job: whether it is exactly-once, from its source, sinks, mode and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.config import CheckpointConfig, Replay
from coordinator.errors import NotExactlyOnce, reason
from coordinator.protocol.ports import MicroBatch, Sink
from coordinator.storage import CheckpointStorage, open_storage
from sinks._util.log import get_logger
from sinks.optional import Diagnosable

logger = get_logger(__name__)


@dataclass(frozen=True)
class Guarantee:
    """The guarantee of a job, which is exactly-once unless there are `weaknesses`.

    They say why rows may be lost or duplicated in spite of two-phase commit. Before the first
    batch, not everything was asked, so nothing is promised, and `complete` is false.
    """

    weaknesses: tuple[str, ...] = ()
    complete: bool = True

    @property
    def exactly_once(self) -> bool:
        return self.complete and not self.weaknesses

    def __str__(self) -> str:
        if self.weaknesses:
            return f"exactly-once: no, because {'; '.join(self.weaknesses)}"
        return "exactly-once: " + ("yes" if self.complete else "not known before the first batch")


def compute_guarantee(
    job: str,
    config: CheckpointConfig,
    storage: CheckpointStorage,
    sinks: Mapping[str, Sink],
    batch: MicroBatch | None = None,
) -> Guarantee:
    """Compute the guarantee of a job.

    `sinks` are those that are open, so that they can be asked. The guarantee is complete with all
    sinks and the query's first `batch`. Raises `NotExactlyOnce` if the job requires more than it
    can have, and `StorageError` if the storage cannot be opened.
    """
    open_storage(storage)
    reasons: list[str] = []
    if not config.exactly_once:
        reasons += [
            "the mode is AT_LEAST_ONCE: every task commits by itself, and a crash writes its rows "
            "again"
        ]
    asked: dict[str, CheckpointStorage | Diagnosable[Any]] = {
        f"checkpoint storage {storage.uri}": storage
    }
    if batch:
        reasons += batch.weaknesses(recomputed=config.replay is Replay.RECOMPUTE)
    asked |= {
        f"sink {name!r}": sink for name, sink in sinks.items() if isinstance(sink, Diagnosable)
    }
    for name, described in asked.items():
        try:
            reasons += [f"{name}: {why}" for why in described.weaknesses()]
        except Exception as error:
            if config.require:
                raise
            logger.warning("%s cannot tell how durable it is: %s", name, reason(error))
    if config.require and reasons:
        raise NotExactlyOnce(
            f"job {job!r} requires exactly-once, but cannot promise it: {'; '.join(reasons)}"
        )
    return Guarantee(tuple(reasons), complete=batch is not None)


def source_weaknesses(class_name: str, description: str) -> list[str]:
    """Return the weaknesses of a source by the name of its class in the JVM.

    Sources that are not named here keep Spark's contract: they give the rows of an offset range
    again.
    """
    if class_name == "TextSocketMicroBatchStream":
        return [f"the source {description} keeps no rows to read again after a crash"]
    if class_name == "MemoryStream":
        return [f"the source {description} is gone with the driver's process"]
    return []


CHECKED_SHUFFLES = tuple(
    f"spark.sql.shuffle.orderIndependentChecksum.{name}"
    for name in ("enabled", "enableFullRetryOnMismatch")
)
"""The settings by which Spark checks shuffle files that it computes again.

Spark compares them with the lost files, and fails a job that has used both. The settings are on by
default since Spark 4.2.
"""


def shuffle_weaknesses(*, checked: bool, deterministic: bool) -> list[str]:
    if checked or deterministic:
        return []
    return [
        "the query is not deterministic, and after the loss of an executor Spark may mix rows of "
        f"two computations; set {' and '.join(CHECKED_SHUFFLES)} to true (Spark 4.1 or later)"
    ]


def order_weaknesses(functions: Sequence[str]) -> list[str]:
    """Return a weakness for each of the query's `functions` that depends on the order of rows.

    An example is `first()`, which takes the row that happens to come first.
    """
    return [
        f"the query has {what}, whose result depends on the order of rows, which Spark does not "
        "fix: a transaction that is lost can then not be written again, and the query stops until "
        "its rows are given up"
        for what in functions
    ]


def checkpoint_location_weaknesses(location: str) -> list[str]:
    if location.rsplit("/", 1)[-1].startswith("temporary-"):
        return [
            f"Spark's checkpointLocation {location} is a temporary one; set "
            "option('checkpointLocation', …)"
        ]
    return []
