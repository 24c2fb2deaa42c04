"""``make demo-kafka``: flights and weather through a Kafka broker that the demo starts and stops."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from assets import topology
from assets.demo import say
from assets.demo_all import LANDINGS, LATE
from assets.landing import DELIVERIES, landing_file, write_landing
from resources import DATA, LANDING, spark
from vt_dagster import build_asset
from vt_dagster.kafka import KafkaCluster, KafkaSink, KafkaSource, build_publication
from vt_dagster.orchestration.factory import build_resources
from vt_dagster.testing_kafka import KafkaBroker

PARTITIONS = 3


def run() -> None:
    """Publishes the year in parts; after each, one run consumes the new records."""
    started = time.monotonic()
    for old in ("kafka", "kafka_warehouse"):
        shutil.rmtree(DATA / old, ignore_errors=True)
    with KafkaBroker(DATA / "kafka") as broker:
        say(started, f"a Kafka broker runs on {broker.bootstrap_servers}")
        names = ("weather", "flights", "flights_with_weather")
        topics = [NewTopic(name, PARTITIONS, 1) for name in names]
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        for done in admin.create_topics(topics).values():
            done.result(timeout=30)
        assets = _assets(KafkaCluster(broker.bootstrap_servers))
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 20})
        for months in LANDINGS:
            write_landing(LANDING, months, LATE)
            sent = sum(_publish(producer, name, months) for name in ("weather", "flights"))
            say(started, f"published {sent:,} records of months {months[0]} to {months[-1]}")
            result = dg.materialize(
                assets,
                resources=build_resources(str(DATA / "kafka_warehouse"), spark),
                run_config={"loggers": {"console": {"config": {"log_level": "WARNING"}}}},
            )
            for event in result.get_asset_materialization_events():
                counts = {k: v.value for k, v in event.materialization.metadata.items()}
                said = [f"{n:,} {k.removeprefix('records_')}" for k, n in _numbers(counts)]
                say(started, f"  {event.materialization.label}: {', '.join(said)}")
    say(started, f"done; tables: {DATA / 'kafka_warehouse'}")


def _numbers(counts: dict[str, Any]) -> Iterator[tuple[str, int]]:
    return ((k, n) for k, n in counts.items() if k.startswith("records_") or k == "lag_records")


def _assets(cluster: KafkaCluster) -> list[dg.AssetsDefinition]:
    """The assets of weather, flights and their join as in the other demo, and its publication."""
    weather = replace(topology.weather, source=KafkaSource(cluster, "weather"))
    flights = replace(topology.flights, source=KafkaSource(cluster, "flights"))
    operator: Any = topology.flights_with_weather.operator
    joined = replace(
        topology.flights_with_weather, operator=replace(operator, left=flights, right=weather)
    )
    sink = KafkaSink(cluster, "flights_with_weather")
    return [*map(build_asset, (weather, flights, joined)), build_publication(joined, sink)]


def _lines(path: Path) -> list[str]:
    """The records of a file as JSON objects."""
    if path.suffix != ".csv":
        return path.read_text(encoding="utf-8").splitlines()
    rows = pd.read_csv(path).convert_dtypes()
    return str(rows.to_json(orient="records", lines=True)).splitlines()


def _publish(producer: Producer, name: str, months: Iterable[int]) -> int:
    sent = 0
    for month in months:
        if month not in DELIVERIES[name]:
            continue
        paths = [landing_file(LANDING, name, month)]
        if (name, month) == ("weather", LATE.lands):
            paths.insert(0, LATE.file(LANDING))
        for line in (line for path in paths for line in _lines(path)):
            origin = json.loads(line)["origin"]
            while True:
                try:
                    producer.produce(name, key=origin, value=line)
                    break
                except BufferError:
                    producer.poll(0.1)
            sent += 1
    assert producer.flush(60) == 0
    return sent
