"""Recorded scenarios run through real assets: files, Dagster, Delta, two runs or more.

``test_assets_conformance`` runs all worked scenarios as partitions of one topology. Here each of some
random scenarios has separate assets, and so separate segments, retention and quarantine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.market import lines, messages, run
from vt_dagster import FilesSource, Stream, VersionedTable, build_asset
from vt_dagster.conformance import steps
from vt_dagster.conformance.scenario import read_scenarios
from vt_dagster.conformance.scenario import source as bare_source
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.topology.model import topological

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
SCENARIOS = Path(__file__).parent / "conformance" / "random"
PICKED = [
    "table-table-join-1-03-3",  # inner, one side versioned, versioned result
    "foreign-key-join-1-05-4",  # left, both sides versioned
    "table-aggregate-1-09-1",  # a custom aggregator, versioned table and result
    "windowed-aggregate-1-01-1",  # sessions, final results
    "table-suppress-1-02-1",  # until a time limit
    "chain-1-07-1",  # map_values, aggregate
]


def cut(records: Sequence[Mapping[str, Any]]) -> list[Sequence[Mapping[str, Any]]]:
    """Splits records into runs in which a task processes them in their recorded order; into two runs
    where one would do."""
    inputs = sorted({r["input"] for r in records})
    runs: list[list[Mapping[str, Any]]] = [[]]
    for record in records:
        longer = [*runs[-1], record]
        newest: dict[int, int] = {}
        order: list[tuple[int, int]] = []
        for r in longer:
            side = inputs.index(r["input"])
            newest[side] = max(newest.get(side, -1), r["timestamp"])
            order.append((newest[side], side))
        if order == sorted(order):
            runs[-1] = longer
        else:
            runs.append([record])
    if len(runs) == 1:
        half = len(records) // 2
        return [records[:half], records[half:]]
    return list(runs)


def stamp(millis: int) -> str:
    """Converts a scenario's time to a time in a file."""
    return (EPOCH + timedelta(milliseconds=millis)).isoformat()


def millis(moment: datetime) -> int:
    """Converts Spark's time, which is in UTC but has no time zone, to a scenario's time."""
    return (moment.replace(tzinfo=timezone.utc) - EPOCH) // timedelta(milliseconds=1)


@pytest.mark.endurance  # test_assets_conformance.py and random chains cover each operator
@pytest.mark.parametrize("name", PICKED)
def test_operator_assets_equal_kafka_streams(name: str, spark: SparkSession, tmp_path: Path) -> None:
    operator = "_".join(name.split("-")[:-3])
    found = read_scenarios([SCENARIOS / f"{operator}.json"])
    scenario = next(s for s in found if s.name == name)

    def source(kind: type[Stream], asset: str, **more: Any) -> Any:
        more.setdefault("source", FilesSource(str(tmp_path / asset), max_bad_share=1))
        return bare_source(kind, asset, **more)

    layout = steps.layout(scenario)
    nodes = steps.nodes_of([layout], source)
    sources = {
        step["input"]: nodes[layout.shapes[i]]
        for i, step in layout.steps.items()
        if step["op"] in ("table", "stream")
    }
    output = nodes[layout.shapes[layout.output]]
    every = topological([output])
    warehouse = tmp_path / "warehouse"
    for number, records in enumerate(cut(scenario.records)):
        for of, node in sources.items():
            rows = [
                {
                    "scenario": 0,
                    "key": r["key"],
                    "value": r["value"],
                    "timestamp": stamp(r["timestamp"]),
                }
                for r in records
                if r["input"] == of
            ]
            (tmp_path / node.name).mkdir(exist_ok=True)
            if rows:
                (tmp_path / node.name / f"{number}.jsonl").write_text(lines(*rows), "utf-8")
        result = run(map(build_asset, every), warehouse)
        assert result.success, messages(result)

    log = AssetStore(str(warehouse), output, spark).read("log").orderBy("offset").collect()
    got = [
        {
            "key": r["key"],
            "value": None if r["is_tombstone"] else str(r[layout.value]),
            "timestamp": millis(r["timestamp"]),
        }
        for r in log
    ]
    expected = [{k: e[k] for k in ("key", "value", "timestamp")} for e in scenario.expected]
    assert got == expected
    if scenario.final_store is not None and layout.stored is not None:
        node = nodes[layout.shapes[layout.stored]]
        what = "versions" if isinstance(node, VersionedTable) else "current"
        rows = AssetStore(str(warehouse), node, spark).read(what).collect()
        kept = sorted(
            (r["key"], millis(r["timestamp"]), str(r[layout.value]))
            for r in rows
            if not r["is_tombstone"]
        )
        wanted = sorted((e["key"], e["valid_from"], e["value"]) for e in scenario.final_store)
        assert kept == wanted
