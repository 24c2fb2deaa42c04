"""Topics into tables, compared with a bare append of the same topic and with Kafka Streams.

Kafka Streams needs a JDK (``java GraceJoin.java``). This program starts the broker.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import uuid
from datetime import timedelta
from pathlib import Path
from time import perf_counter

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from measure import Outputs, Result, compare, take_turns
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType

from vt_dagster import Stream, VersionedTable
from vt_dagster.columns import TIMESTAMP as AT
from vt_dagster.columns import VALID_FROM, VALID_TO
from vt_dagster.kafka import KafkaCluster, KafkaSource
from vt_dagster.runs.run import run_once
from vt_dagster.spark.jars import resolve_maven_jars
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.testing_kafka import KafkaBroker

PARTITIONS = 4
KEYS = 10_000
RETENTION, GRACE = timedelta(days=365), timedelta(seconds=60)
SCHEMA = StructType(
    [StructField("k", StringType()), StructField("n", LongType()), StructField("millis", LongType())]
)
APPEND = "Kafka source -> Delta append"
TABLE_FLOOR = "parsed, sorted by key once, written as log and as view: by Spark alone"
JOIN_FLOOR = "parsed, written as log; read, joined by key and interval, written: by Spark alone"
STREAMS = "Kafka Streams, exactly once, 2 threads, out to a topic"
STREAMS_JARS = ("org.apache.kafka:kafka-streams:4.1.1",)
SPAN = 5_000_000
"""Milliseconds of event time in each topic."""


def fill(spark: SparkSession, cluster: KafkaCluster, topic: str, rows: int) -> None:
    """Writes records in order of time, except every fifth, which is 20 s late."""
    n = F.col("id")
    key = F.concat(F.lit("k"), F.pmod(F.xxhash64(n), F.lit(KEYS)))
    late = F.when(n % 5 == 0, 20_000).otherwise(0)
    millis = F.lit(1_700_000_000_000) + n * (SPAN // rows) - late
    value = F.to_json(F.struct(key.alias("k"), n.alias("n"), millis.alias("millis")))
    (
        spark.range(0, rows, 1, 1)
        .select(key.alias("key"), value.alias("value"))
        .write.format("kafka")
        .options(**cluster.spark_options())
        .option("topic", topic)
        .save()
    )


def write(rows: DataFrame, path: str) -> None:
    rows.write.format("delta").mode("append").save(path)


def streams(servers: str, topics: list[str], expected: int) -> dict[str, float]:
    """Runs Kafka Streams, and returns the seconds from its start to its last result."""
    classpath = ":".join(str(jar) for jar in resolve_maven_jars(*STREAMS_JARS))
    with tempfile.TemporaryDirectory() as state:
        done = subprocess.run(
            [
                *("java", "-Xmx2g", "-cp", classpath, str(Path(__file__).with_name("GraceJoin.java"))),
                *(servers, *topics, str(expected)),
                *(str(p // timedelta(milliseconds=1)) for p in (RETENTION, GRACE)),
                *(state, f"bench-{uuid.uuid4().hex}"),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
    found = re.search(r"joined (\d+) seconds ([\d.]+)", done.stdout)
    if found is None or int(found[1]) < expected:
        raise AssertionError(
            f"expected {expected} results of Kafka Streams: {done.stdout}{done.stderr}"
        )
    return {"joined": float(found[2])}


def run(
    spark: SparkSession, rows: int, versions: int, repeat: int, outputs: Outputs
) -> tuple[list[Result], list[str]]:
    """Times the first runs of table, stream and join."""
    with tempfile.TemporaryDirectory() as folder, KafkaBroker(folder) as broker:
        cluster = KafkaCluster(broker.bootstrap_servers)
        names = ["stream", "table", "out"]
        admin = AdminClient({"bootstrap.servers": cluster.servers})
        for future in admin.create_topics([NewTopic(n, PARTITIONS, 1) for n in names]).values():
            future.result(timeout=30)
        fill(spark, cluster, "stream", rows)
        fill(spark, cluster, "table", versions)

        def source(topic: str) -> KafkaSource:
            return KafkaSource(cluster, topic, max_records_per_run=None)

        about = {"key": "k", "schema": SCHEMA, "timestamp": "timestamp_millis(millis)"}
        table = VersionedTable("table", **about, history_retention=RETENTION, source=source("table"))
        stream = Stream("stream", **about, source=source("stream"))
        joined = stream.left_join(
            table, name="joined", grace_period=GRACE, select=["left.*", "right.n as version"]
        )

        def ours() -> dict[str, float]:
            warehouse, parts = outputs.fresh("kafka"), {}
            for node in (table, stream, joined):
                start = perf_counter()
                run_once(node, stores_of(warehouse, spark))
                parts[node.name] = perf_counter() - start
            return parts

        def messages(topic: str) -> DataFrame:
            rows = spark.read.format("kafka").options(**cluster.spark_options())
            return rows.option("subscribe", topic).load()

        def append(topic: str) -> float:
            start = perf_counter()
            write(messages(topic), outputs.fresh(f"append_{topic}"))
            return perf_counter() - start

        def records(topic: str) -> DataFrame:
            parsed = F.from_json(F.col("value").cast("string"), SCHEMA).alias("record")
            rows = messages(topic).select(parsed, "partition", "offset")
            at = F.timestamp_millis("record.millis").alias(AT)
            return rows.select("record.*", at, "partition", "offset")

        def floor() -> dict[str, float]:
            """The least that the runs need Spark for: no outcomes, gate, quarantine, positions or order
            of results. The versions to join are prepared."""
            start = perf_counter()
            rows = records("table").repartition(PARTITIONS, "k").sortWithinPartitions("k", AT)
            rows.persist()
            for name in ("log", "view"):
                write(rows, outputs.fresh(f"floor_{name}"))
            rows.unpersist()
            parts, start = {"table": perf_counter() - start}, perf_counter()
            write(records("stream"), outputs.fresh("floor_stream"))
            consumed = spark.read.format("delta").load(outputs.path("floor_stream"))
            there = spark.read.format("delta").load(outputs.path("versions"))
            there = there.select(
                F.col("k").alias("of"), F.col("n").alias("version"), VALID_FROM, VALID_TO
            )
            of_key, not_over = (
                F.col("k") == F.col("of"),
                F.coalesce(F.col(AT) < F.col(VALID_TO), F.lit(True)),
            )
            valid = of_key & (F.col(AT) >= F.col(VALID_FROM)) & not_over
            found = consumed.join(there.hint("shuffle_hash"), valid, "left")
            write(found.drop("of", VALID_FROM, VALID_TO), outputs.fresh("floor_joined"))
            return parts | {"stream": perf_counter() - start}

        expected = 0

        def peer() -> dict[str, float]:
            return streams(cluster.servers, names, expected)

        ours()
        head = AssetStore(outputs.path("kafka"), joined, spark).head()
        assert head is not None
        expected = head.commit.totals["out"]
        versions_of = AssetStore(outputs.path("kafka"), table, spark).read("versions")
        write(versions_of, outputs.fresh("versions"))
        times = take_turns(
            {
                "ours": ours,
                APPEND: lambda: {"stream": append("stream"), "table": append("table")},
                "floor": floor,
                STREAMS: peer,
            },
            repeat,
        )
    both = [a + b for a, b in zip(times["ours: stream"], times["ours: joined"], strict=True)]
    of_table = (f"topic of {versions:,} records -> versioned table", versions, times["ours: table"])
    of_join = (f"topic of {rows:,} records -> stream -> join with grace", rows, both)
    results = [
        compare(*of_table, APPEND, times[f"{APPEND}: table"], 2.0),
        compare(*of_table, TABLE_FLOOR, times["floor: table"], None),
        compare(*of_join, APPEND, times[f"{APPEND}: stream"], 3.0),
        compare(*of_join, JOIN_FLOOR, times["floor: stream"], None),
        compare(
            f"both topics ({rows + versions:,} records) -> join with grace",
            rows + versions,
            times["ours"],
            STREAMS,
            times[f"{STREAMS}: joined"],
            0.33,
        ),
    ]
    waiting = head.commit.totals["waiting"]
    notes = [
        f"{r.name}: {r.rows / r.seconds:,.0f} records/s, {r.peer}: {r.rows / r.peer_seconds:,.0f}"
        for r in results
    ]
    notes.append(f"join with grace: Kafka Streams gave the same number of results; {waiting:,} wait")
    return results, notes
