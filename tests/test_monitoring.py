"""What docs/monitoring.md ships agrees with what a driver tells, by a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.operations.inspection.balance import COLUMNS, Balance, Counts, Line, Verdict
from coordinator.operations.statistics.metrics import COUNTERS, GAUGES, HISTOGRAMS
from sinks.testing.servers.common import ServerProcess, free_port
from sinks.testing.servers.maven import cache_folder
from sinks.testing.table import eventually
from tests.protocol.job import Job

DOCS = Path(__file__).parents[1] / "docs"
ALERTS, DASHBOARD, PAGE = DOCS / "alerts.yaml", DOCS / "grafana-dashboard.json", DOCS / "monitoring.md"
UNITS = {"s": "_seconds", "By": "_bytes", "": ""}


def series() -> set[str]:
    """What Prometheus stores."""
    names = {metric: metric.name.replace(".", "_") + UNITS[metric.unit] for metric in [*COUNTERS, *HISTOGRAMS, *GAUGES]}
    told = {f"{names[metric]}_total" for metric in COUNTERS} | {names[metric] for metric in GAUGES}
    return told | {names[metric] + part for metric in HISTOGRAMS for part in ("_bucket", "_sum", "_count")}


def named(text: str) -> set[str]:
    return set(re.findall(r"\bcheckpointing_\w+", text))


@pytest.mark.parametrize("file", [ALERTS, DASHBOARD], ids=["alerts", "dashboard"])
def test_alerts_and_dashboard_ask_for_what_there_is(file: Path) -> None:
    assert named(file.read_text())
    assert named(file.read_text()) <= series()


def test_the_page_names_every_metric() -> None:
    stored = {re.sub("_(bucket|sum|count)$", "", name) for name in series()}
    assert named(PAGE.read_text()) == stored
    for metric in [*COUNTERS, *HISTOGRAMS, *GAUGES]:
        assert f"`{metric.name}`" in PAGE.read_text()


# ---------------------------------------------------------------------- with a real server
@pytest.fixture(scope="module")
def binaries() -> Path:
    """The folder of Debian's `prometheus` and `promtool`."""
    if found := shutil.which("prometheus"):
        return Path(found).parent
    folder = cache_folder() / "prometheus"
    if not (folder / "usr/bin/prometheus").exists():
        if not (shutil.which("apt-get") and shutil.which("dpkg")):
            pytest.skip("there is no Prometheus, and no apt-get to fetch it")
        folder.mkdir(parents=True, exist_ok=True)
        fetched = subprocess.run(
            ["apt-get", "download", "-q", "prometheus"], cwd=folder, capture_output=True, text=True, timeout=120
        )
        packages = list(folder.glob("prometheus_*.deb"))
        if fetched.returncode or not packages:
            pytest.skip(f"apt-get has no Prometheus: {fetched.stderr.strip()[-200:]}")
        subprocess.run(["dpkg", "-x", packages[0], folder], check=True, timeout=60)
    return folder / "usr/bin"


class Prometheus(ServerProcess):
    """Reads one driver."""

    def __init__(self, binaries: Path, place: str) -> None:
        super().__init__()
        self._binary, self._place = binaries / "prometheus", place

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _command(self) -> Sequence[str]:
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},  # a scrape may take as long
            "rule_files": [str(ALERTS)],
            "scrape_configs": [{"job_name": "spark", "static_configs": [{"targets": [self._place]}]}],
        }
        file = self.home / "prometheus.yml"
        file.write_text(json.dumps(config))  # which is YAML
        storage = self.home / "tsdb"
        return [
            str(self._binary),
            f"--config.file={file}",
            f"--storage.tsdb.path={storage}",
            f"--web.listen-address={self.address}",
        ]

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=60).close()
        except OSError:
            return False
        return True

    def ask(self, expression: str) -> list[dict[str, Any]]:
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://{self.address}/api/v1/query?{query}", timeout=60) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return result

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []

        def asked() -> bool:
            found[:] = self.ask(expression)
            return bool(found)

        eventually(asked)
        return found


@pytest.mark.large
@pytest.mark.parametrize("before", ["0x9", "_x9"], ids=["0 was seen", "0 was not seen"])
def test_alerts_see_the_first_of_anything(binaries: Path, tmp_path: Path, before: str) -> None:
    first = [
        ("TransactionsLost", 'checkpointing_transactions_total{job_name="j",sink="s",outcome="lost"}'),
        ("CheckpointsFail", 'checkpointing_checkpoints_total{job_name="j",status="failed"}'),
    ]
    told = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": series, "values": f"{before} 1x90"} for _, series in first],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
                        "eval_time": at,
                        "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                    }
                    for name, _ in first
                    for at, fires in (("8m", False), ("15m", True), ("90m", False))
                ],
            }
        ],
    }
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps(told))
    checked = subprocess.run([binaries / "promtool", "test", "rules", file], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.large
def test_prometheus_reads_a_driver(binaries: Path, tmp_path: Path) -> None:
    checked = subprocess.run([binaries / "promtool", "check", "rules", ALERTS], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    counts: Counts = {**dict.fromkeys(COLUMNS, 9), "ledger": 8}
    lost = Line(7, "", "files", counts, Verdict.DIFFERS, ("the ledger has 8 row(s)",), ())
    books = Balance((lost,), {}, {})
    job = Job(tmp_path)
    place = f"127.0.0.1:{free_port()}"
    with (
        job.coordinator(config={"metrics_address": place}) as coordinator,
        Prometheus(binaries, place) as prometheus,
    ):
        job.query(2).run(coordinator)
        [newest] = prometheus.wait_for('checkpointing_checkpoint_last{job_name="job"} == 1')
        assert newest["metric"]["job"] == "spark"
        # the storage in memory is what this job's guarantee lacks
        [alert] = prometheus.wait_for('ALERTS{alertname="NotExactlyOnce"}')
        assert alert["metric"]["job_name"] == "job"
        coordinator.statistics.verified(books)
        [alert] = prometheus.wait_for('ALERTS{alertname="RowCountsDiffer"}')
        assert alert["metric"]["sink"] == "files"
        panels = json.loads(DASHBOARD.read_text())["panels"]
        for expression in [target["expr"] for panel in panels for target in panel["targets"]]:
            prometheus.ask(expression.replace("$job", "job"))  # an error is an HTTP status
        written = sum(table.num_rows for batch in job.input[:2] for table in batch)
        prometheus.wait_for(f'checkpointing_rows_total{{job_name="job",sink="files"}} == {written}')
