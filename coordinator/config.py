"""Settings of a coordinator, under the names that Flink has for them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sinks.options import seconds

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK_PREFIX = "spark.checkpointing."


class CheckpointingMode(str, Enum):
    EXACTLY_ONCE = "exactly_once"
    AT_LEAST_ONCE = "at_least_once"


class ExternalizedCheckpointCleanup(str, Enum):
    RETAIN_ON_CANCELLATION = "retain_on_cancellation"
    DELETE_ON_CANCELLATION = "delete_on_cancellation"


class StateBackend(str, Enum):
    """Spark's state store.

    `hashmap` keeps state on the heap (HDFS-backed), `rocksdb` on disk, with changelog.
    """

    HASHMAP = "hashmap"
    ROCKSDB = "rocksdb"


class Replay(str, Enum):
    """The origin of rows that the external system has lost after their checkpoint was complete."""

    RECOMPUTE = "recompute"
    SPOOL = "spool"


_LEAST = {
    "tolerable_failed_checkpoints": 0,
    "min_pause": 0,
    "retained_checkpoints": 2,  # the newest and its predecessor
    "request_poll_interval": 0,
    "verify_interval": 0,
    "history_size": 0,
}


@dataclass(frozen=True)
class CheckpointConfig:
    """The settings of checkpoints.

    Each time is a `sinks.options.Duration`: seconds, a timedelta, or a string such as "10 s", "5
    min". Raises ValueError on a value out of range, TypeError on a value of another type.

    * `interval`: Spark begins a batch at every multiple of this time; None: as soon as the batch
      before is done.
    * `mode`: AT_LEAST_ONCE lets every task commit by itself; a crash then duplicates rows.
    * `timeout`: a checkpoint that is not complete by then fails: it is canceled in Spark and
      aborted in every sink.
    * `tolerable_failed_checkpoints`: how many times in a row to retry a batch that fails before it
      is complete.
    * `min_pause`: the least time from the end of one checkpoint to the beginning of the next.
    * `retained_checkpoints`: how many complete checkpoints are kept in storage; at least 2.
    * `externalized_cleanup`: what `CheckpointCoordinator.cancel` does with the checkpoints in
      storage.
    * `storage`: where complete checkpoints are recorded; the same as the coordinator's argument.
    * `savepoint_dir`: where savepoints go if the call names no storage. Operators can ask for
      savepoints only there.
    * `checkpoint_location`: Spark's checkpointLocation, which `write_stream` then sets; required
      with Spark Connect.
    * `state_backend`: where Spark keeps the state of aggregations and joins; None leaves the
      session's setting.
    * `max_concurrent_checkpoints`: must be 1. A replay needs the batch, so foreachBatch returns
      only when all of the batch is visible.
    * `unaligned`: must be False. A micro-batch ends at one barrier for all partitions, so it is
      always aligned.
    * `require`: "exactly-once" stops the query before its first checkpoint if its `Guarantee` is
      weaker.
    * `commit_timeout`: the time that a complete checkpoint may take to become visible; then the
      query stops (`InDoubtError`).
    * `sweep_interval`: the time between sweeps for orphaned transactions while the query runs.
    * `heartbeat_interval`: the time between two heartbeats that the driver writes to storage, for
      operators.
    * `request_poll_interval`: how often the driver looks in storage for requests of operators, and
      writes there what it does; 0: it does not look, and writes only with each heartbeat.
    * `verify_interval`: how often the driver compares its row counts (docs/verify.md); 0: never.
    * `history_size`: how many checkpoints `coordinator history` has in storage; 0: none.
    * `metrics_address`: where Prometheus reads the metrics of the driver, PORT of loopback or
      HOST:PORT (extra `prometheus`); None: nowhere.
    * `replay`: if a decided transaction is lost, RECOMPUTE lets Spark compute its rows again, and
      stops if they differ. SPOOL keeps the rows of each checkpoint until it is visible, for queries
      that give other rows each time.
    * `spool_dir`: the storage where SPOOL keeps rows; default: checkpoint storage.
    * `adopt`: take over a query that ran without this coordinator, at its next batch. This also
      accepts source topics of Kafka that were deleted and created again, at the old offsets, for
      the first batch of a start.
    """

    interval: float | None = None
    mode: CheckpointingMode = CheckpointingMode.EXACTLY_ONCE
    timeout: float = 600.0
    tolerable_failed_checkpoints: int = 0
    min_pause: float = 0.0
    retained_checkpoints: int = 3
    externalized_cleanup: ExternalizedCheckpointCleanup = (
        ExternalizedCheckpointCleanup.RETAIN_ON_CANCELLATION
    )
    storage: str | None = field(default=None, repr=False)  # a password may be in it
    savepoint_dir: str | None = field(default=None, repr=False)
    checkpoint_location: str | None = None
    state_backend: StateBackend | None = None
    max_concurrent_checkpoints: int = 1
    unaligned: bool = False
    require: str | None = None
    commit_timeout: float = 600.0
    sweep_interval: float = 60.0
    heartbeat_interval: float = 30.0
    request_poll_interval: float = 2.0
    verify_interval: float = 60.0
    history_size: int = 1000
    metrics_address: str | None = None
    replay: Replay = Replay.RECOMPUTE
    spool_dir: str | None = field(default=None, repr=False)
    adopt: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None or "None" not in str(each.type):
                kind = str(each.type).removesuffix(" | None")
                object.__setattr__(self, each.name, _KINDS[kind](value, each.name))
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, not {getattr(self, name):g}")
        for name in (
            "interval",
            "timeout",
            "commit_timeout",
            "sweep_interval",
            "heartbeat_interval",
        ):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name} must be more than 0 seconds, not {value:g}")
        if problem := next(self._problems(), None):
            raise ValueError(problem)

    def _problems(self) -> Iterator[str]:
        if self.max_concurrent_checkpoints != 1:
            yield (
                f"max_concurrent_checkpoints must be 1, not {self.max_concurrent_checkpoints}: "
                "Spark hands over a batch"
                " again, for a replay, only as long as foreachBatch has not returned from it"
            )
        if self.unaligned:
            yield (
                "unaligned must be False: a micro-batch ends at the same barrier on all "
                "partitions, so there is no alignment to wait for and nothing in flight to store"
            )
        if self.replay is Replay.SPOOL and not self.exactly_once:
            yield (
                "replay='spool' is for transactions that are decided and lost; AT_LEAST_ONCE has "
                "none"
            )
        if self.spool_dir and self.replay is not Replay.SPOOL:
            yield "spool_dir is where replay='spool' keeps rows; without that it is not used"
        if self.require not in (None, "exactly-once"):
            yield f"require must be 'exactly-once' or nothing, not {self.require!r}"
        address = self.metrics_address
        if address and not (
            re.fullmatch(r"([^\s/]+:)?\d{1,5}", address) and int(address.split(":")[-1]) < 1 << 16
        ):
            yield f"metrics_address must be PORT or HOST:PORT, not {address!r}"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CheckpointConfig:
        """Make a config from a mapping, such as a section of a TOML file.

        Keys are the names above, also with dashes, and Flink's: `execution.checkpointing.NAME` or
        `NAME` alone. Raises ValueError on any other key.
        """
        settings: dict[str, Any] = {}
        for key, value in values.items():
            name = _field_name(key)
            if name in settings:
                raise ValueError(
                    f"checkpoint option {key!r} is given twice, under two names of {name!r}"
                )
            settings[name] = value
        return cls(**settings)

    @classmethod
    def from_toml(cls, file: str | Path, section: str = "checkpointing") -> CheckpointConfig:
        """Make a config from `[section]` of a TOML file.

        Without such a section, the config has the defaults.
        """
        with Path(file).open("rb") as stream:
            values = tomllib.load(stream).get(section, {})
        if not isinstance(values, dict):
            raise ValueError(f"{section!r} in {file} is not a section")
        return cls.from_dict(values)

    @classmethod
    def from_spark(cls, spark: SparkSession) -> CheckpointConfig:
        """Make a config from the session's settings `spark.checkpointing.NAME`.

        An example is `--conf spark.checkpointing.interval=10s`.
        """
        # Spark 3.5 has no `conf.getAll`. SET hides the values of passwords, so it gives names only.
        names = [row.key for row in spark.sql("SET").collect() if row.key.startswith(SPARK_PREFIX)]
        return cls.from_dict({name[len(SPARK_PREFIX) :]: spark.conf.get(name) for name in names})

    @property
    def exactly_once(self) -> bool:
        return self.mode is CheckpointingMode.EXACTLY_ONCE

    @property
    def spark_conf(self) -> dict[str, str]:
        """Return the settings of Spark's session that the state backend stands for."""
        if self.state_backend is None:
            return {}
        provider = "RocksDB" if self.state_backend is StateBackend.ROCKSDB else "HDFSBacked"
        prefix = "spark.sql.streaming.stateStore"
        package = "org.apache.spark.sql.execution.streaming.state"
        return {
            f"{prefix}.providerClass": f"{package}.{provider}StateStoreProvider",
            f"{prefix}.rocksdb.changelogCheckpointing.enabled": "true",
        }


_FLINK_NAMES = {
    "dir": "storage",
    "externalized-checkpoint-retention": "externalized_cleanup",
    "num-retained": "retained_checkpoints",
    "unaligned.enabled": "unaligned",
    "state.backend.type": "state_backend",
    "state.checkpoints.dir": "storage",
    "state.savepoints.dir": "savepoint_dir",
    "state.checkpoints.num-retained": "retained_checkpoints",
}


def _field_name(key: str) -> str:
    short = key.removeprefix("execution.checkpointing.")
    name = _FLINK_NAMES.get(short) or short.replace("-", "_")
    known = [each.name for each in fields(CheckpointConfig)]
    if name not in known:
        near = get_close_matches(name, known, n=1)
        raise ValueError(
            f"{key!r} is no checkpoint option"
            + (f"; did you mean {near[0]!r}?" if near else f". There are {known}")
        )
    return name


def _integer(value: object, name: str) -> int:
    if isinstance(value, str) and re.fullmatch(r"\d+", value.strip()):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    return value


def _boolean(value: object, name: str) -> bool:
    known = {"true": True, "false": False}
    if not isinstance(value, bool) and str(value).lower() not in known:
        raise TypeError(f"{name} must be true or false, not {value!r}")
    return known[str(value).lower()]


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name} must be a text, not {value!r}")
    return value


_Choice = TypeVar("_Choice", bound=Enum)


def _choice(kind: type[_Choice]) -> Any:
    def choose(value: object, name: str) -> _Choice:
        if isinstance(value, kind):
            return value
        try:
            return kind(str(value).lower().replace("-", "_"))
        except ValueError:
            raise ValueError(
                f"{name} must be one of {[each.name for each in kind]}, not {value!r}"
            ) from None

    return choose


_KINDS: dict[str, Any] = {
    "float": seconds,
    "int": _integer,
    "bool": _boolean,
    "str": _text,
    "CheckpointingMode": _choice(CheckpointingMode),
    "ExternalizedCheckpointCleanup": _choice(ExternalizedCheckpointCleanup),
    "StateBackend": _choice(StateBackend),
    "Replay": _choice(Replay),
}
