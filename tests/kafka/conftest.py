"""One real broker for all tests that do not stop it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kafka.topics import Topics
from vt_dagster.testing_kafka import KafkaBroker


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.kafka)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A broker with a plain listener, and one that wants TLS and a password."""
    with KafkaBroker(tmp_path_factory.mktemp("broker"), user=("alice", "sesame-4711")) as running:
        yield running


@pytest.fixture
def topics(broker: KafkaBroker) -> Topics:
    return Topics(broker.bootstrap_servers)
