"""One real broker for all tests; one test kills it and starts it again."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.kafka.topics import Topics
from vt_dagster.testing_kafka import KafkaBroker

OF_TOKENS = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required"
CLUSTER = uuid.UUID(bytes=b"\xf8" * 16)
"""As the id of a cluster, it begins with a dash, as one of 64 ids does."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent) + os.sep
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.kafka)


class Broker(KafkaBroker):
    """A broker with three listeners: a plain one, one for TLS and a password, and one for tokens."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, user=("alice", "sesame-4711"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.token_servers = f"127.0.0.1:{free.getsockname()[1]}"

    def _prepare(self, settings: Path, command: Sequence[str]) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(uuid, "uuid4", lambda: CLUSTER)
            super()._prepare(settings, command)
        text = settings.read_text()
        for where in ("listeners", "advertised.listeners"):
            text = text.replace(f"\n{where}=", f"\n{where}=TOKENS://{self.token_servers},")
        text = text.replace("SASL_SSL:SASL_SSL", "SASL_SSL:SASL_SSL,TOKENS:SASL_PLAINTEXT")
        of = "listener.name.tokens"
        text += f"{of}.sasl.enabled.mechanisms=OAUTHBEARER\n"
        login = f'{OF_TOKENS} unsecuredLoginStringClaim_sub="broker";'
        settings.write_text(f"{text}{of}.oauthbearer.sasl.jaas.config={login}\n")


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture
def topics(broker: Broker) -> Topics:
    return Topics(broker.bootstrap_servers)
