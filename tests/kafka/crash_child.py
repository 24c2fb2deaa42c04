"""Runs the table of a topic in processes that kill themselves at a named point: ``[ROOT SERVERS TOPIC
POINT ADDRESS]…``. If ADDRESS is a Spark Connect server, the queries run there; if it is ``local``,
Spark dies with the process."""

from __future__ import annotations

from pathlib import Path

from tests.kafka.topics import Topics
from tests.storage.crash_child import arm, killed, session
from vt_dagster.runs.run import run_once
from vt_dagster.sources.kafka_source import KafkaSource
from vt_dagster.storage import parquet
from vt_dagster.storage.asset_store import stores_of


def run(root: str, servers: str, topic: str, point: str, address: str) -> None:
    from tests.kafka.test_faults import crash_table

    when, function = point.split(":")
    if function == "read":
        arm(KafkaSource, "read", when, lambda *_, **__: True)
    else:
        arm(parquet, "write", when, lambda rows, path, **_: path.endswith(function))
    spark = session(None if address == "local" else address)
    run_once(crash_table(Topics(servers), topic), stores_of(str(Path(root) / "warehouse"), spark))


if __name__ == "__main__":
    import tests.kafka.test_faults  # noqa: F401  # imported once, not in each fork

    killed(run)
