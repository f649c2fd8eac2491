"""CheckpointConfig: from code, mapping, TOML and Spark's settings, under our names and Flink's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from coordinator import CheckpointConfig, CheckpointingMode, ExternalizedCheckpointCleanup, StateBackend


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(10, 10.0), (0.5, 0.5), ("10", 10.0), ("10 s", 10.0), ("500ms", 0.5), ("5 min", 300.0), ("2 hours", 7200.0)],
)
def test_times(given: Any, seconds: float) -> None:
    assert CheckpointConfig(interval=given).interval == seconds


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"interval": 0}, "interval must be more than 0 seconds, not 0"),
        ({"interval": "10 parsecs"}, "interval must be a time such as 10, '10 s' or '5 min', not '10 parsecs'"),
        ({"timeout": -1}, "timeout must be more than 0"),
        ({"interval": float("nan")}, "interval must be a finite number of seconds, not nan"),
        ({"commit_timeout": float("inf")}, "commit_timeout must be a finite number of seconds, not inf"),
        ({"commit_timeout": 0}, "commit_timeout must be more than 0"),
        ({"sweep_interval": 0}, "sweep_interval must be more than 0"),
        ({"min_pause": -1}, "min_pause must be >= 0, not -1"),
        ({"tolerable_failed_checkpoints": -1}, "must be >= 0, not -1"),
        ({"retained_checkpoints": 1}, "must be >= 2"),
        ({"mode": "at most once"}, "mode must be one of ['EXACTLY_ONCE', 'AT_LEAST_ONCE'], not 'at most once'"),
        ({"state_backend": "forst"}, "one of ['HASHMAP', 'ROCKSDB']"),
        ({"max_concurrent_checkpoints": 2}, "only as long as foreachBatch has not returned"),
        ({"require": "at-least-once"}, "require must be 'exactly-once' or nothing"),
        ({"unaligned": True}, "no alignment to wait for"),
        ({"metrics_address": "localhost"}, "metrics_address must be PORT or HOST:PORT, not 'localhost'"),
        ({"metrics_address": "http://localhost:9464"}, "must be PORT or HOST:PORT"),
        ({"metrics_address": "99999"}, "must be PORT or HOST:PORT"),
    ],
)
def test_values_out_of_range(option: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        CheckpointConfig(**option)


@pytest.mark.parametrize(
    "option",
    [{"interval": True}, {"timeout": None}, {"retained_checkpoints": "many"}, {"adopt": "perhaps"}, {"storage": 5}],
)
def test_values_of_another_type(option: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(option))} must be"):
        CheckpointConfig(**option)


def test_flinks_names_mean_ours() -> None:
    config = CheckpointConfig.from_dict(
        {
            "execution.checkpointing.interval": "10s",
            "execution.checkpointing.mode": "AT_LEAST_ONCE",
            "execution.checkpointing.timeout": "2 min",
            "execution.checkpointing.min-pause": "5s",
            "execution.checkpointing.max-concurrent-checkpoints": 1,
            "execution.checkpointing.tolerable-failed-checkpoints": 3,
            "execution.checkpointing.externalized-checkpoint-retention": "DELETE_ON_CANCELLATION",
            "execution.checkpointing.num-retained": 4,
            "execution.checkpointing.dir": "file:///checkpoints",
            "execution.checkpointing.unaligned.enabled": "false",
            "state.backend.type": "rocksdb",
        }
    )
    assert config == CheckpointConfig(
        interval=10,
        mode=CheckpointingMode.AT_LEAST_ONCE,
        timeout=120,
        min_pause=5,
        tolerable_failed_checkpoints=3,
        externalized_cleanup=ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION,
        retained_checkpoints=4,
        storage="file:///checkpoints",
        state_backend=StateBackend.ROCKSDB,
    )


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="'intervall' is no checkpoint option; did you mean 'interval'"):
        CheckpointConfig.from_dict({"intervall": 3})
    with pytest.raises(ValueError, match=r"'rows_on_driver' is no checkpoint option\. There are"):
        CheckpointConfig.from_dict({"rows_on_driver": 1000})
    with pytest.raises(ValueError, match="given twice"):
        CheckpointConfig.from_dict({"min-pause": 3, "min_pause": 4})


def test_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[checkpointing]\ninterval = "1 min"\nmin-pause = 2\nrequire = "exactly-once"\n')
    config = CheckpointConfig.from_toml(file)
    assert (config.interval, config.min_pause, config.require) == (60, 2, "exactly-once")
    assert CheckpointConfig.from_toml(file, section="other") == CheckpointConfig()


def test_from_the_sessions_settings(spark: SparkSession) -> None:
    session = spark.newSession()
    session.conf.set("spark.checkpointing.interval", "3s")
    session.conf.set("spark.checkpointing.tolerable-failed-checkpoints", "2")
    session.conf.set("spark.checkpointing.adopt", "true")
    config = CheckpointConfig.from_spark(session)
    assert config == CheckpointConfig(interval=3, tolerable_failed_checkpoints=2, adopt=True)
