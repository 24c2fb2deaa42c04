"""A cluster with TLS and a password works, and the password appears in no file, log or message."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,  # pyright: ignore[reportPrivateImportUsage]
    ScramMechanism,  # pyright: ignore[reportPrivateImportUsage]
    UserScramCredentialUpsertion,  # pyright: ignore[reportPrivateImportUsage]
)
from pyspark.sql import DataFrame, SparkSession

from tests.kafka.pipeline import Pipeline
from tests.kafka.topics import SCHEMA, Topics, records
from tests.market import materialized, messages, run
from vt_dagster import Stream, build_asset, build_sensor
from vt_dagster.errors import SourceError
from vt_dagster.kafka import KafkaCluster, KafkaSink, KafkaSource, build_publication
from vt_dagster.runs.run import Run, run_once
from vt_dagster.sources import kafka_cluster
from vt_dagster.sources.kafka_sink import Publication, advice_for, producing
from vt_dagster.storage.asset_store import stores_of
from vt_dagster.testing_kafka import KafkaBroker

pytestmark = pytest.mark.usefixtures("few_rows")

PASSWORD = "sesame-4711"


@pytest.fixture
def secure_cluster(broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch) -> KafkaCluster:
    monkeypatch.setenv("TEST_KAFKA_PASSWORD", PASSWORD)
    return KafkaCluster(
        broker.secure_servers,
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-256",
        username="alice",
        password=dg.EnvVar("TEST_KAFKA_PASSWORD"),
        ca_location=str(broker.ca_location),
    )


def all_log_output(instance: dg.DagsterInstance, run_id: str) -> str:
    return "\n".join(str(record) for record in instance.all_logs(run_id))


def test_password_is_in_no_file_log_or_message(
    secure_cluster: KafkaCluster,
    topics: Topics,
    tmp_path: Path,
    spark: SparkSession,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)  # at DEBUG, Py4J logs each call with its arguments
    origin, target = topics.create(), topics.create()
    topics.produce(origin, [*records(range(20)), {"value": b"poison"}])
    node = Stream(
        "s", key="k", schema=SCHEMA, timestamp="at", source=KafkaSource(secure_cluster, origin)
    )
    assets = [build_asset(node), build_publication(node, KafkaSink(secure_cluster, target))]
    home = tmp_path / "dagster_home"
    home.mkdir()
    said = [repr(secure_cluster), repr(node), str(node.source)]
    with dg.DagsterInstance.local_temp(str(home)) as instance:
        done = run(assets, tmp_path / "warehouse", instance=instance)
        assert done.success, messages(done)
        assert materialized(done, "s")["records_applied"] == 20
        assert len(topics.consume(target)) == 20
        said.append(all_log_output(instance, done.run_id))
        # a wrong password, an unknown authority, a variable that is not set: messages without secrets
        monkeypatch.setattr(kafka_cluster, "_SECONDS", 3.0)  # no answer comes, however long it waits
        for wrong, said_of_it in (
            ({"password": "wrong-secret-0815"}, "SASL authentication error: Authentication failed"),
            ({"ca_location": None}, "certificate verify failed"),
            ({"password": dg.EnvVar("NO_SUCH_VARIABLE")}, "NO_SUCH_VARIABLE"),
        ):
            cluster = replace(secure_cluster, **wrong)
            source = KafkaSource(cluster, origin)
            broken = Stream("b", key="k", schema=SCHEMA, timestamp="at", source=source)
            failed = run([build_asset(broken)], tmp_path / "warehouse", instance=instance)
            assert not failed.success
            assert said_of_it in messages(failed)
            said += [messages(failed), all_log_output(instance, failed.run_id)]
        said.append(str(tick(node, tmp_path)))
    spark.read.format("kafka").options(**secure_cluster.spark_options()).option(
        "subscribe", origin
    ).load().explain(True)
    captured = capfd.readouterr()
    said += [captured.out, captured.err, caplog.text]
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) > 10
    for secret in (PASSWORD, "wrong-secret-0815"):
        assert [str(p) for p in files if secret.encode() in p.read_bytes()] == []
        assert [text for text in said if secret in text] == []


def tick(node: Stream, root: Path) -> Any:
    pipeline = Pipeline(root, None)  # pyright: ignore[reportArgumentType]
    assert build_sensor(node)
    return pipeline.tick(node)


def test_missing_password_is_refused() -> None:
    with pytest.raises(SourceError, match="expected username and password"):
        KafkaCluster("localhost:9092", security_protocol="SASL_SSL")


TLS: dict[str, Any] = {"security_protocol": "SSL"}


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"username": "u", "password": "p"}, "'SASL_PLAINTEXT' with username and password, got 'PLA"),
        ({**TLS, "username": "u"}, "'SASL_SSL' or 'SASL_PLAINTEXT' with username, got 'SSL'"),
        ({"ca_location": "ca.pem"}, "'SSL' or 'SASL_SSL' with ca_location, got 'PLAINTEXT'"),
        ({**TLS, "key_location": "k.pem"}, "certificate_location and key_location, got only key_loc"),
        ({**TLS, "certificate_location": "c.pem"}, "got only certificate_location"),
        ({**TLS, "key_password": "p"}, "expected key_location with key_password, got none"),
        ({"bootstrap_servers": ""}, "expected bootstrap_servers to be host:port"),
        ({"bootstrap_servers": "a:9092,b"}, "got 'a:9092,b'; correct it"),
        ({"bootstrap_servers": "http://a:9092"}, "got 'http://a:9092'; correct it"),
    ],
)
def test_settings_without_effect_are_refused(about: dict[str, Any], said: str) -> None:
    with pytest.raises(SourceError) as refused:
        KafkaCluster(**{"bootstrap_servers": "a:9092", **about})
    assert said in str(refused.value)


def test_addresses_of_a_cluster() -> None:
    for servers in (
        "a:9092",
        "a:9092,",
        "a:9092, b.example-1.com:9093",
        "[::1]:9092",
        "SASL_SSL://a:9092",
    ):
        assert KafkaCluster(servers).servers == servers
    assert KafkaCluster(dg.EnvVar("SERVERS")).bootstrap_servers == dg.EnvVar("SERVERS")


@pytest.mark.parametrize(
    ("about", "said"),
    [
        (
            {"options": {"no.such": "x"}},
            'got: No such configuration property: "no.such"; correct',
        ),
        ({"options": {"socket.timeout.ms": "soon"}}, "Invalid value for configuration property"),
        ({**TLS, "ca_location": "nowhere.pem"}, "ca_location: cannot read nowhere.pem: No such file"),
        ({**TLS, "certificate_location": "a.pem", "key_location": "b.pem"}, "cannot read a.pem"),
        ({**TLS, "ca_location": "/bin/sh"}, "ca_location: expected /bin/sh to be in PEM"),
        (
            {"security_protocol": "SASL_PLAINTEXT", "username": "", "password": ""},
            "sasl.username and sasl.password must be set",
        ),
    ],
)
def test_settings_that_client_refuses(about: dict[str, Any], said: str) -> None:
    with pytest.raises(SourceError) as refused:
        KafkaCluster("127.0.0.1:9", **about).topics(["t"])
    assert said in str(refused.value)


def test_password_change_during_run(
    broker: KafkaBroker, topics: Topics, tmp_path: Path, spark: SparkSession
) -> None:
    """The password changes between a run's pin and its read, and before a publication reads its topic
    or sends. The next run, with the new password, continues."""

    def let_in(password: str) -> None:
        scram = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
        user = UserScramCredentialUpsertion("bob", scram, password.encode())
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        for done in admin.alter_user_scram_credentials([user]).values():
            done.result(30)

    def cluster(password: str, **options: str) -> KafkaCluster:
        return KafkaCluster(
            broker.secure_servers,
            security_protocol="SASL_SSL",
            sasl_mechanism="SCRAM-SHA-256",
            username="bob",
            password=password,
            ca_location=str(broker.ca_location),
            options=options,
        )

    let_in("first")
    origin, target = topics.create(), topics.create()
    topics.produce(origin, records(range(5)))
    topics.produce(target, records([7]))
    stores = stores_of(str(tmp_path), spark)

    def node(password: str) -> Stream:
        source = KafkaSource(cluster(password), origin)
        return Stream("s", key="k", schema=SCHEMA, timestamp="at", source=source)

    pinned = Run.pin(node("first"), stores)
    let_in("second")
    with pytest.raises(SourceError, match=r"Authentication failed .* correct username and password"):
        pinned.commit(pinned.operate(pinned.read()))
    assert run_once(node("second"), stores).commit is not None

    class Changing(Publication):
        """Changes the password before the publication reads its topic."""

        def _send(self, messages: DataFrame) -> dict[int, int]:
            let_in("third")
            return super()._send(messages)

    sink = KafkaSink(cluster("second"), target)
    with pytest.raises(SourceError, match=r"Authentication failed .* correct username and password"):
        Changing(str(tmp_path), "out", node("second"), sink, spark).run()
    batch = pa.RecordBatch.from_pylist(
        [{"partition": 0, "key": "a", "value": "{}", "millis": 1, "place": "s/0/0/x"}]
    )
    hasty = cluster("second", **{"delivery.timeout.ms": "2000"})
    ((failed,),) = (one.to_pylist() for one in producing(hasty, target, "h")(iter([batch])))
    assert "Message timed out" in failed["error"]
    assert advice_for(failed["error"]) == "correct username and password of the cluster"
    sink = KafkaSink(cluster("third"), target)
    assert Publication(str(tmp_path), "out", node("third"), sink, spark).run() is not None
    assert len(topics.consume(target)) == 6
