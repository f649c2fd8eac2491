"""Run by tests/services/test_told.py, where Kafka cannot be had."""

from __future__ import annotations

import pytest

from sinks.testing.servers.kafka import KafkaServer, KafkaService


@pytest.mark.parametrize("number", range(3))
def test_in_a_fixture(kafka: KafkaService, number: int) -> None:
    raise AssertionError(f"Kafka was found at {kafka.bootstrap}")


def test_in_the_test() -> None:
    with KafkaServer() as server:
        raise AssertionError(f"Kafka was found at {server.bootstrap}")


def test_without_a_server() -> None:
    pass


def test_that_does_not_apply() -> None:
    pytest.skip("of another sink")
