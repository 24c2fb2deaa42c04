"""Topics as sources and targets of streams and tables; needs the extra ``vt-dagster[kafka]``."""

from vt_dagster.factory import build_publication
from vt_dagster.storage.formats import Avro, Debezium, Json, Protobuf, Raw, SchemaRegistry
from vt_dagster.storage.kafka import HEADERS, KafkaSource
from vt_dagster.storage.kafka_cluster import KafkaCluster
from vt_dagster.storage.kafka_sink import KafkaSink

__all__ = [
    "HEADERS",
    "Avro",
    "Debezium",
    "Json",
    "KafkaCluster",
    "KafkaSink",
    "KafkaSource",
    "Protobuf",
    "Raw",
    "SchemaRegistry",
    "build_publication",
]
