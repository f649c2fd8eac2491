"""What a registry's answers are taken for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from sinks.errors import ConfigurationError
from sinks.kafka.serialization.registry import Registry
from sinks.testing.servers.kafka import KafkaService
from tests.kafka.subject import AnyRegistry
from tests.kafka.test_avro import OLD, Avro, of_ids
from tests.kafka.test_crashes import run


class Forgotten(BaseHTTPRequestHandler):
    """A registry that was set back to before its first schema."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"error_code": 40403, "message": "Schema not found"}')

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def forgotten() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Forgotten) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_registry_that_was_set_back_is_noticed_before_a_row_is_written(
    kafka: KafkaService, kafka_topic: str, registry: AnyRegistry, forgotten: str, tmp_path: Path
) -> None:
    """`make test-all` has one that is down, and one that gives the number to another schema."""
    subject = Avro(kafka, kafka_topic, registry.url)
    run(subject.sink(), tmp_path, [[OLD]])
    with (
        closing(subject.sink(schema_registry=forgotten)) as sink,
        pytest.raises(ConfigurationError, match=r"has no schema under it\. Restore the registry"),
    ):
        run(sink, tmp_path, [[OLD], [of_ids(3)]])
    assert subject.ids() == [1, 2]


def test_a_password_is_in_no_error_and_no_log(caplog: pytest.LogCaptureFixture, registry: AnyRegistry) -> None:
    caplog.set_level(logging.DEBUG)
    settings = {"url": "http://user:pass@word@127.0.0.1:9", "max.retries": 0}
    with Registry(settings, "orders-value") as down, pytest.raises(ConfigurationError) as caught:
        down.latest()
    assert "word" not in str(caught.value)
    assert "http://127.0.0.1:9" in str(caught.value)
    for user in "us%25er", "us%25er@corp.example":
        with Registry({"url": registry.url.replace("//", f"//{user}:pass%40word@")}, "orders-value") as answers:
            answers.compatibility()
            assert answers._client._rest_client.auth == (unquote(user), "pass@word")
    with pytest.raises(ConfigurationError, match=r"basic\.auth\.user\.info configured with"):
        Registry({"url": "http://a:b@127.0.0.1:9", "basic.auth.user.info": "a:c"}, "orders-value")
    assert registry.url in caplog.text
    assert "word" not in caplog.text
