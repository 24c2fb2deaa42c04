"""Kafka topics as sources and sinks of streams and tables; needs the extra ``vt-dagster[kafka]``.

The consumed offsets are stored in the asset's log, not in a consumer group. A run pins a range
``[start, end)`` per partition when it starts and reads only committed transactions. The sensor requests
a run with these ranges when ``minimum_records`` have arrived, or when a record has waited for
``maximum_wait``. ``lag_records`` and ``lag_seconds`` are metadata of the asset. Failures:

- A run or its process dies at any point: the next run takes the same offsets. No record is lost or
  consumed twice.
- The broker does not answer: the tick is skipped with the reason. A run that is reading waits for the
  broker, or fails without a commit.
- Retention deleted records before they were consumed: the tick and the run fail and name the topic, the
  partition and the number of offsets. ``accept_gap: true`` in the run config continues and records the
  gap in the commit (``records_lost``).
- The topic was deleted and recreated: as above. The topic id shows it, even if the offsets look valid.
- Partitions were added: they are read from offset 0, whatever ``start`` is.
- A poison message: the quarantine gets its topic, partition, offset, reason and the bytes of key and
  value. Other messages are unaffected.
- The schema registry is down, or has no such subject: the run fails before it reads. A single message
  with an unknown schema goes to quarantine (``unknown_schema``).
- ``recorded_at="append_time"`` on a topic with ``CreateTime``: the run and the tick fail with an error.
- Two sensors, a repeated tick, a lost cursor: the run key is the same, so there is one run.

A publication that was killed skips the records that the topic already has. After a replay and a swap,
a consumer of the old log refuses the new one until the consumer is replayed too.
"""

from vt_dagster.orchestration.factory import build_publication
from vt_dagster.sources.kafka_cluster import KafkaCluster
from vt_dagster.sources.kafka_sink import KafkaSink
from vt_dagster.sources.kafka_source import HEADERS, KafkaSource
from vt_dagster.sources.message_formats import Avro, Debezium, Json, Protobuf, Raw, SchemaRegistry

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
