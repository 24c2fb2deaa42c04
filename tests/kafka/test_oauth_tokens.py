"""A cluster with tokens (OAUTHBEARER): from a Python function, or from an OAuth server."""

from __future__ import annotations

import base64
import json
import logging
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from tests.kafka.conftest import OF_TOKENS, Broker
from tests.kafka.topics import SCHEMA, Topics, records
from tests.market import materialized, messages, run
from vt_dagster import Stream, build_asset
from vt_dagster.errors import SourceError
from vt_dagster.kafka import KafkaCluster, KafkaSink, KafkaSource, build_publication
from vt_dagster.sources.kafka_cluster import token_of
from vt_dagster.sources.kafka_sink import advice_for, producing
from vt_dagster.spark.jars import resolve_broker_jars

pytestmark = pytest.mark.usefixtures("few_rows")

PROVIDER = f"{__name__}:token"
SECRET = "oauth-sesame-4711"
TOKENS: list[str] = []


def token() -> tuple[str, float]:
    """A token without a signature, which a broker for tests accepts."""
    now = time.time()
    parts = {"alg": "none"}, {"sub": "alice", "iat": now, "exp": now + 3600, "nonce": SECRET}
    texts = [base64.urlsafe_b64encode(json.dumps(p).encode()).decode().rstrip("=") for p in parts]
    TOKENS.append(".".join([*texts, ""]))
    return TOKENS[-1], now + 3600


def failing() -> tuple[str, float]:
    raise ValueError(f"no token with {SECRET}")


def expired() -> tuple[str, float]:
    return token()[0], time.time() - 60


def short() -> tuple[str, float]:
    return token()[0], time.time() + 0.5


def in_millis() -> tuple[str, int]:
    return "a token", int(time.time() * 1000)


def alone() -> str:
    return SECRET


def cluster(servers: str, provider: str = PROVIDER, **more: Any) -> KafkaCluster:
    login = {"sasl.jaas.config": f'{OF_TOKENS} unsecuredLoginStringClaim_sub="alice";'}
    about: dict[str, Any] = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "OAUTHBEARER"}
    return KafkaCluster(servers, token_provider=provider, java_options=login, **about, **more)


@pytest.fixture(scope="module")
def expired_publication(broker: Broker) -> Iterator[Future[Any]]:
    """The outcome of a record that is published after the token expired. Kafka's client waits ten
    seconds for another token, while other tests run."""
    target = Topics(broker.bootstrap_servers).create()
    row = {"partition": 0, "key": b"a", "value": b"1", "millis": 1, "place": "p"}
    send = producing(cluster(broker.token_servers, f"{__name__}:short"), target, "h")

    def publish() -> Any:
        time.sleep(0.6)  # until the token has expired
        return [*send(iter([pa.RecordBatch.from_pylist([row])]))]

    with ThreadPoolExecutor(1) as beside:
        yield beside.submit(publish)


@pytest.mark.usefixtures("expired_publication")  # starts here, and waits while the tests run
def test_token_function_serves_both_clients(
    broker: Broker,
    tmp_path: Path,
    spark: SparkSession,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The function also gives the tokens of Python's client, which publishes. Spark's client has its
    own login. No token appears in a file, log or message."""
    caplog.set_level(logging.INFO)
    topics = Topics(broker.bootstrap_servers)
    origin, target = topics.create(), topics.create()
    topics.produce(origin, records(range(7)))
    good = cluster(broker.token_servers)
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=KafkaSource(good, origin))
    published = build_publication(node, KafkaSink(good, target), name="published")
    said = [repr(good), repr(node)]
    home = tmp_path / "dagster_home"
    home.mkdir()
    with dg.DagsterInstance.local_temp(str(home)) as instance:
        done = run([build_asset(node), published], tmp_path / "warehouse", instance=instance)
        assert done.success, messages(done)
        assert materialized(done, "s")["records_applied"] == 7
        assert len(topics.consume(target)) == 7
        said += [str(r) for r in instance.all_logs(done.run_id)]
        wrong = KafkaSource(cluster(broker.token_servers, f"{__name__}:failing"), origin)
        broken = Stream("b", key="k", schema=SCHEMA, timestamp="at", source=wrong)
        failed = run([build_asset(broken)], tmp_path / "warehouse", instance=instance)
        assert not failed.success
        assert "to return a token and its expiry, got a ValueError" in messages(failed)
        said += [messages(failed), *(str(r) for r in instance.all_logs(failed.run_id))]
    header = TOKENS[0].partition(".")[0]  # the same in each token
    captured = capfd.readouterr()
    said += [captured.out, captured.err, caplog.text]
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    for secret in (SECRET, header):
        assert [text[:300] for text in said if secret in text] == []
        assert [str(p) for p in files if secret.encode() in p.read_bytes()] == []


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("failing", "to return a token and its expiry, got a ValueError; call it by hand"),
        ("nothing_here", "got a AttributeError"),
        ("expired", "to return a token that is valid now, got one that has expired 60 s ago"),
        ("in_millis", "which looks like milliseconds; divide it by 1000"),
        ("alone", "to return (token, expiry), a text and epoch seconds, got str"),
    ],
)
def test_invalid_token_function_is_refused(name: str, told: str) -> None:
    with pytest.raises(SourceError) as refused:
        token_of(f"{__name__}:{name}")
    assert told in str(refused.value)
    assert SECRET not in str(refused.value)


def test_oauth_server_settings_of_both_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test only compares settings: there is no OAuth server that signs tokens for tests."""
    monkeypatch.setenv("TEST_CLIENT_SECRET", 'a"b')
    made = KafkaCluster(
        "b:9093",
        security_protocol="SASL_SSL",
        sasl_mechanism="OAUTHBEARER",
        username="client",
        password=dg.EnvVar("TEST_CLIENT_SECRET"),
        token_endpoint="https://idp/token",
        token_scope="kafka",
        java_options={"sasl.login.connect.timeout.ms": "5000"},
    )
    python = {n: v for n, v in made.client_settings().items() if n.startswith("sasl")}
    assert python == {
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "client",
        "sasl.oauthbearer.client.secret": 'a"b',
        "sasl.oauthbearer.token.endpoint.url": "https://idp/token",
        "sasl.oauthbearer.scope": "kafka",
    }
    from confluent_kafka.admin import AdminClient

    AdminClient({**made.client_settings(), "log_level": 0})  # librdkafka accepts all settings
    java = {n: v for n, v in made.spark_options().items() if "sasl" in n}
    handler = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler"
    login = f'{OF_TOKENS} clientId="client" clientSecret="a\\"b" scope="kafka";'
    assert java == {
        "kafka.sasl.mechanism": "OAUTHBEARER",
        "kafka.sasl.oauthbearer.token.endpoint.url": "https://idp/token",
        "kafka.sasl.login.callback.handler.class": handler,
        "kafka.sasl.jaas.config": login,
        "kafka.sasl.login.connect.timeout.ms": "5000",
    }
    jar = next(j for j in resolve_broker_jars() if Path(j).name.startswith("kafka-clients"))
    assert f"{handler.replace('.', '/')}.class" in zipfile.ZipFile(jar).namelist()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {},
            "expected token_endpoint or token_provider with sasl_mechanism='OAUTHBEARER', got neither",
        ),
        ({"token_endpoint": "https://idp", "token_provider": PROVIDER}, "OAUTHBEARER', got both"),
        ({"token_provider": "token"}, "expected token_provider to be an import path 'module:function'"),
        ({"token_provider": PROVIDER}, "expected java_options with token_provider"),
        ({"token_endpoint": "https://idp"}, "expected username and password"),
        (
            {"token_endpoint": "https://idp", "sasl_mechanism": "PLAIN"},
            "need sasl_mechanism='OAUTHBEARER'",
        ),
    ],
    ids=["neither", "both", "no path", "no java", "no client", "other mechanism"],
)
def test_refused_when_declared(change: dict[str, Any], told: str) -> None:
    about: dict[str, Any] = {"security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER"}
    with pytest.raises(SourceError) as refused:
        KafkaCluster("b:9093", **{**about, **change})
    assert told in str(refused.value)


def test_token_expired_during_publication(expired_publication: Future[Any]) -> None:
    ((failed,),) = (one.to_pylist() for one in expired_publication.result(60))
    assert failed["records"] == 1
    assert failed["partition"] is None
    assert "lower max_records_per_run" in advice_for(failed["error"])
