"""Publishes logs in processes that kill themselves at a named point: ``[ROOT SERVERS ORIGIN TARGET
POINT ADDRESS]…``. ADDRESS is a Spark Connect server."""

from __future__ import annotations

from tests.kafka.topics import SCHEMA, Topics
from tests.storage.crash_child import arm, killed
from vt_dagster import Stream
from vt_dagster.kafka import KafkaSink, KafkaSource
from vt_dagster.sources.kafka_sink import Publication
from vt_dagster.spark.session import build_session
from vt_dagster.storage import parquet


def run(root: str, servers: str, origin: str, target: str, point: str, address: str) -> None:
    arm(parquet, "write", point.split(":")[0], lambda rows, path, **_: path.endswith("log"))
    cluster = Topics(servers).cluster
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=KafkaSource(cluster, origin))
    spark = build_session("crash", remote=address)
    warehouse = f"{root}/warehouse"
    Publication(warehouse, "s_to_kafka", node, KafkaSink(cluster, target), spark).run()


if __name__ == "__main__":
    killed(run)
