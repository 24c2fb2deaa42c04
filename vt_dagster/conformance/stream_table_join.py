"""Scenarios of the stream-table join, with grace and without, on versioned tables and others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pyspark.sql import SparkSession

from vt_dagster.conformance.scenario import (
    Entry,
    Granularity,
    Outcome,
    Scenario,
    compare,
    compare_state,
    settle,
)
from vt_dagster.conformance.topology import by_scenario, final_store, millis, ms, record_of, source
from vt_dagster.core.arrival import Fate
from vt_dagster.model import Stream, Table, VersionedTable
from vt_dagster.testing import TopologyTestDriver


def join_of(kind: str, table: Table, grace: Any) -> Stream:
    stream = source(Stream, "stream", null_key="keep")
    join = stream.join if kind == "inner" else stream.left_join
    value = "concat('(', left.value, ',', coalesce(right.value, 'null'), ')') as value"
    name = f"{kind}{'_at_once' if grace is None else '_no_grace' if grace == ms(0) else '_grace'}"
    return join(table, name=name, select=(value, "left.index"), grace_period=grace)


def stream_table_joins(
    scenarios: Sequence[Scenario], granularity: Granularity, results: Mapping[Scenario, Outcome]
) -> list[Callable[[SparkSession], None]]:
    """Join scenarios as partitions of one topology for each kind of table, with grace or without.

    ``record``: a run is one stream record, with the table records between the last one and it: a
    table never triggers a result, so this is as good as one record a run.

    ``run``: a run is as many table records and then as many stream records as follow each other. A
    run applies its table records first, so arrival order is kept, and every stream record meets the
    table contents that it meets alone. Without grace the log must be the same, order included. With
    grace a run releases after its last record, with the same table contents as after each of its
    stream records: what it emits must be the same set as what its records trigger one by one.
    """
    groups: dict[tuple[bool, bool], list[Scenario]] = defaultdict(list)
    for s in scenarios:
        groups[s.config["table"]["versioned"], bool(s.config["grace"])].append(s)

    def job(group: Sequence[Scenario]) -> Callable[[SparkSession], None]:
        return lambda spark: _run_joins(spark, group, granularity, results)

    return [job(group) for group in groups.values()]


def _cut(records: Sequence[Mapping[str, Any]], granularity: Granularity) -> list[range]:
    """The runs of a join scenario, as ranges of its records."""
    cuts = [
        i
        for i in range(1, len(records))
        if records[i - 1]["input"] == "stream"
        and (granularity == "record" or records[i]["input"] == "table")
    ]
    edges = [0, *cuts, len(records)]
    return [range(a, b) for a, b in pairwise(edges) if b > a]


def _topology(scenarios: Sequence[Scenario]) -> dict[int, Stream]:
    """For each scenario its join: one table and one stream, and every join that is asked for."""
    configs = {i: s.config for i, s in enumerate(scenarios)}
    table: Table = source(Table, "table")
    if configs[0]["table"]["versioned"]:
        retention = {i: ms(c["table"]["history_retention"]) for i, c in configs.items()}
        table = source(VersionedTable, "table", history_retention=retention)
    graces = {i: ms(c["grace"]) for i, c in configs.items() if c["grace"]}
    return {
        i: join_of(c["kind"], table, graces or (None if c["grace"] is None else ms(0)))
        for i, c in configs.items()
    }


def _run_joins(
    spark: SparkSession,
    scenarios: Sequence[Scenario],
    granularity: Granularity,
    results: Mapping[Scenario, Outcome],
) -> None:
    joins = _topology(scenarios)
    names = {n.name: n for n in joins.values()}
    driver = TopologyTestDriver(*names.values(), spark=spark)
    held_back = bool(scenarios[0].config["grace"])
    runs = [_cut(s.records, granularity) for s in scenarios]
    entries: dict[int, list[Entry]] = defaultdict(list)
    for step in range(max(map(len, runs))):
        inputs: dict[str, list[Entry]] = {"table": [], "stream": []}
        for number, (scenario, cut) in enumerate(zip(scenarios, runs, strict=True)):
            for i in cut[step] if step < len(cut) else ():
                record = scenario.records[i]
                inputs[record["input"]].append(record_of(number, i, record))
        driver.run(inputs)
        for name in names:
            for number, rows in by_scenario(driver.read(name)).items():
                if joins[number].name == name:
                    last = runs[number][step][-1] if step < len(runs[number]) else -1
                    entries[number] += [_entry(r, last if held_back else r["index"]) for r in rows]
    view = driver.versions if scenarios[0].config["table"]["versioned"] else driver.table
    stores = by_scenario(view("table"))
    for number, scenario in enumerate(scenarios):
        expected, got = list(scenario.expected), entries[number]
        if held_back and granularity == "run":
            ends = {i: cut[-1] for cut in runs[number] for i in cut}
            expected = _as_set({**e, "trigger": ends[e["trigger"]]} for e in expected)
            got = _as_set(got)
        differences = compare("entry", expected, got)
        dropped = _dropped(driver, joins[number].name, number)
        store = final_store(stores[number])
        settle(results[scenario], differences + compare_state(scenario, store, dropped, None))


def _entry(row: Entry, trigger: int) -> Entry:
    return {
        "trigger": trigger,
        "key": row["key"],
        "value": row["value"],
        "timestamp": millis(row["timestamp"]),
    }


def _as_set(entries: Iterable[Entry]) -> list[Entry]:
    """The entries of each run in an order of their own, so that lists compare as sets."""
    return sorted(
        entries, key=lambda e: (e["trigger"], e["timestamp"], e["key"] or "", e["value"] or "")
    )


def _dropped(driver: TopologyTestDriver, join: str, partition: int) -> int:
    """Kafka's dropped-records-total: refused and keyless table records, useless stream records."""
    table = Counter(driver.metrics("table", partition))
    stream = Counter(driver.metrics(join, partition))
    return table[Fate.LATE] + table[Fate.QUARANTINED] + stream[Fate.DROPPED]
