"""What is used of kafka-python without being its public API is there, and a kafka-python without it is refused."""

from __future__ import annotations

import ast
import asyncio
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaConnectionError
from kafka.net.manager import KafkaConnectionManager

from sinks._util.private_names import is_there
from sinks.errors import ConfigurationError
from sinks.kafka import KafkaSink, internals
from sinks.kafka.cluster import Cluster
from sinks.kafka.connection import Connections
from sinks.kafka.internals import KAFKA_PYTHON
from sinks.testing.servers.kafka import KafkaService
from tests.private_names import taken_from_others

HERE = Path(internals.__file__)
PUBLIC = {"kafka", "kafka.admin", "kafka.errors", "kafka.net.sasl.oauth"}
"""The modules that kafka-python documents."""


def of_kafka_python(path: Path) -> Iterator[tuple[str, str]]:
    """Each module of kafka-python that a file imports from, with the name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names if each.name.split(".")[0] == "kafka")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kafka":
            yield from ((str(node.module), each.name) for each in node.names)


IMPORTED = [f"{module}.{name}" for module, name in of_kafka_python(HERE) if module not in PUBLIC]
MOVED = {"kafka.net.selector.NetworkSelector", "kafka.net.backend.selector.NetworkSelector"}
"""In kafka-python 3.0, and in 3.1."""


@pytest.mark.parametrize("name", [*sorted(set(IMPORTED) - MOVED), *KAFKA_PYTHON.names])
def test_it_is_there(name: str) -> None:
    assert is_there(name), f"kafka-python changed this: {name}"


def test_the_event_loop_is_in_one_of_its_two_places() -> None:
    assert set(IMPORTED) >= MOVED
    assert [is_there(name) for name in MOVED].count(True) == 1


def test_a_name_that_is_not_there_is_seen() -> None:
    """Or the tests above could not fail."""
    manager = "kafka.net.manager.KafkaConnectionManager"
    assert is_there(f"{manager}.closed")  # of instances alone
    assert is_there(f"{manager}.send(request, node_id)")
    for name in (f"{manager}.nothing", f"{manager}.send(nothing)", "kafka.net.nothing", "nothing.at.all"):
        assert not is_there(name)


def test_no_other_module_uses_what_is_not_public() -> None:
    others = [path for path in HERE.parent.rglob("*.py") if path != HERE]
    assert len(others) > 10
    found = {path.name: {module for module, _ in of_kafka_python(path)} - PUBLIC for path in others}
    assert {name: modules for name, modules in found.items() if modules} == {}
    private = {path.name: list(taken_from_others(path)) for path in HERE.parent.rglob("*.py")}
    assert {name: each for name, each in private.items() if each} == {}


def test_the_version_is_among_those_that_the_message_names(pytestconfig: pytest.Config) -> None:
    text = (pytestconfig.rootpath / "pyproject.toml").read_text()
    assert f'"{KAFKA_PYTHON.package}{KAFKA_PYTHON.supported}"' in text


# ---------------------------------------------------------------------- another kafka-python
def refusal(what: str) -> str:
    version = re.escape(importlib.metadata.version("kafka-python"))
    return rf"kafka-python {version} is not supported: {what}.*pip install 'kafka-python>=3\.0,<3\.1'\)"


@pytest.fixture
def without_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(KafkaConnectionManager, "send")
    monkeypatch.setattr(KAFKA_PYTHON, "_is_there", False)


@pytest.mark.usefixtures("without_send")
def test_a_sink_over_one_that_lacks_a_method_is_not_made() -> None:
    with pytest.raises(ConfigurationError, match=refusal(r"it has no .*KafkaConnectionManager\.send\(request")):
        KafkaSink("localhost:1", "orders")


@pytest.mark.usefixtures("without_send")
def test_a_sink_that_comes_to_a_machine_with_another_one_does_not_connect() -> None:
    """It was made by the driver."""
    with pytest.raises(ConfigurationError, match=refusal(r"it has no .*KafkaConnectionManager\.send\(request")):
        Cluster({"bootstrap_servers": ["localhost:1"]}, timeout=1).connect()


@pytest.mark.parametrize(
    "gone",
    [
        pytest.param("del kafka.net.compat.KafkaNetClient", id="class"),
        pytest.param("sys.modules['kafka.protocol.producer.produce'] = None", id="module"),
    ],
)
def test_one_that_lacks_what_is_imported_is_named(gone: str) -> None:
    program = f"import sys, kafka.net.compat; {gone}; import sinks.kafka"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode
    assert re.search("ImportError: " + refusal(""), ended.stderr.splitlines()[-1])


# ---------------------------------------------------------------------- connections
def test_the_client_is_bounded_above_its_requests_where_kafka_python_bounds_calls(
    kafka: KafkaService, kafka_topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in 3.1, which would refuse a timeout above 60 s."""
    monkeypatch.setitem(KafkaAdminClient.DEFAULT_CONFIG, "default_api_timeout_ms", 60_000)
    with closing(KafkaSink(kafka.bootstrap, kafka_topic, timeout=90)) as sink:
        assert sink._brokers.cluster_id()
        assert sink._brokers.net.client.admin.config["default_api_timeout_ms"] == 900_000


def test_a_question_that_is_under_way_does_not_connect_a_closed_sink_again(kafka: KafkaService) -> None:
    connections = Connections({"bootstrap_servers": kafka.bootstrap.split(",")}, timeout=60)
    connections.connect()
    connections.close()
    with pytest.raises(KafkaConnectionError, match="the sink was closed"):
        asyncio.run(connections.ask_all(lambda _: []))
    assert not connections.is_open
