"""Topics as sources and targets of streams and tables; needs the extra ``vt-dagster[kafka]``.

The position is in the asset's log, not in a consumer group: a run takes ``[start, end)`` of each
partition as pinned when it starts, only of committed transactions. The sensor asks for a run with those
ranges when there are ``minimum_records``, or some have waited for ``maximum_wait``; ``lag_records`` and
``lag_seconds`` are metadata. What can happen, and what you see then:

- a run or its process dies, anywhere: the next one takes the same offsets, nothing twice, nothing lost;
- the broker does not answer: a skipped tick with the reason; a run that reads waits for it, or fails
  without a commit;
- the topic's retention took records that were not consumed: tick and run fail and name topic, partition
  and how many offsets; ``accept_gap: true`` in the run's config goes on and records the gap in the
  commit (``records_lost``);
- the topic was deleted and created anew: the same, told by the topic's id, even where the offsets look
  valid;
- partitions were added: they are read from offset 0, whatever ``start`` says;
- a poison message: quarantine with topic, partition, offset, reason and the bytes of key and value;
  others are unaffected;
- the schema registry is away, or knows no such schema: the run fails before it reads; a single message
  with an unknown schema goes to quarantine (``unknown_schema``);
- ``recorded_at="append_time"`` of a topic with its producers' times: pin and tick fail and say so;
- two sensors, a doubled tick, a lost cursor: the same run key, so one run.

A publication that was killed leaves out what the topic has got already. After a replay and a swap, what
consumed the old log refuses to go on with the new one until it is replayed too.
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
