"""Runs the table of a topic and kills itself at a named point: ``ROOT SERVERS TOPIC POINT
[ADDRESS]``. With the address of a Spark Connect server the queries run there."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.kafka.topics import Topics
from tests.storage.crash_child import arm, session
from vt_dagster.runs.run import run_once
from vt_dagster.sources.kafka_source import KafkaSource
from vt_dagster.storage import parquet
from vt_dagster.storage.asset_store import stores_of


def main() -> None:
    root, servers, topic, point, *remote = sys.argv[1:]
    when, function = point.split(":")
    if function == "read":
        arm(KafkaSource, "read", when, lambda *_, **__: True)
    else:
        arm(parquet, "write", when, lambda rows, path, **_: path.endswith(function))
    from tests.kafka.test_faults import crash_table

    node = crash_table(Topics(servers), topic)
    spark = session(*remote or [None])
    run_once(node, stores_of(str(Path(root) / "warehouse"), spark))
    print("survived")


if __name__ == "__main__":
    main()
