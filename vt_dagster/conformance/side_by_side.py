"""Scenarios of every operator but the store: runs those of one shape side by side, and compares."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from vt_dagster.conformance.scenario import (
    Entry,
    Granularity,
    Job,
    Outcome,
    Scenario,
    compare,
    compare_state,
    settle,
)
from vt_dagster.conformance.steps import Layout, Shape, inputs_of, layout, nodes_of
from vt_dagster.conformance.topology import by_scenario, final_store, millis, record_of, text
from vt_dagster.core.arrival import Fate
from vt_dagster.core.processors import processor_of
from vt_dagster.errors import RefusedRecordsError, VtDagsterError
from vt_dagster.testing import TopologyTestDriver
from vt_dagster.topology.model import Stream, VersionedTable


def side_by_side(
    scenarios: Sequence[Scenario], granularity: Granularity, results: Mapping[Scenario, Outcome]
) -> list[Job]:
    """Scenarios as partitions of as few topologies as pays.

    ``record``: a run is one record; but where only the records of a stream trigger results, those of
    tables before it come along. That is as good as one record a run: the tables take theirs first.

    ``run``: a run is as many records of one input as follow each other, and then as many of the stream
    that is joined with it; of a join of two source tables as many as a task would take in the recorded
    order. That keeps the order of arrival. Where nothing is held back the log must be
    the same, order included. A run that releases what was held back does so after its last record,
    with the same tables as after each of its records: what it emits must be the same set as what its
    records trigger one by one. Scenarios that count after each record (``Layout.one_by_one``) go
    record by record.
    """

    def job(group: Sequence[Layout]) -> Job:
        def run(spark: SparkSession) -> None:
            try:
                _Group(group, granularity, spark).run(results)
            except (PySparkException, VtDagsterError) as error:
                first = str(error).strip().split("\n", 1)[0]
                for each in group:
                    message = f"  run: expected none / got the error {type(error).__name__}: {first}"
                    settle(results[each.scenario], [message])

        return Job(_cost(group), run)

    return [job(g) for g in _grouped([layout(s) for s in scenarios], granularity)]


def _cost(group: Sequence[Layout]) -> int:
    return max(len(each.scenario.records) for each in group) * len(
        {s for e in group for s in e.shapes.values()}
    )


def _grouped(layouts: Sequence[Layout], granularity: Granularity) -> list[list[Layout]]:
    """Layouts that run together: those of the same shape, and those that share enough of it.

    A group costs as many node runs as its longest scenario has records, times its nodes.
    """
    alike: dict[tuple[Any, ...], list[Layout]] = defaultdict(list)
    for each in layouts:
        slow = granularity == "run" and each.one_by_one
        alike[(slow, *each.shapes.values())].append(each)
    found: list[tuple[bool, int, set[Shape], list[Layout]]] = []
    for (slow, *shapes), some in sorted(
        alike.items(), key=lambda item: -max(len(e.scenario.records) for e in item[1])
    ):
        own = max(len(e.scenario.records) for e in some)
        costs = [
            (longest * len(set(shapes) - theirs), i)
            for i, (other, longest, theirs, _) in enumerate(found)
            if other == slow and set(shapes) & theirs
        ]
        if costs and min(costs)[0] <= own * len(shapes):
            _, _, theirs, group = found[min(costs)[1]]
            theirs |= set(shapes)
            group += some
        else:
            found.append((slow, own, set(shapes), list(some)))
    return [group for *_, group in found]


def _cut(each: Layout, granularity: Granularity) -> list[range]:
    """The runs of a scenario, as ranges of its records."""
    records = each.scenario.records
    streams = {s["input"] for s in each.steps.values() if s["op"] == "stream"}
    joined = each.steps[each.output]["op"] == "stream_table_join"
    many = granularity == "run" and not each.one_by_one
    if many and _joins_sources(each):
        return _in_task_order(each)

    def together(one: Mapping[str, Any], next_one: Mapping[str, Any]) -> bool:
        of_stream = one["input"] in streams
        if next_one["input"] == one["input"]:
            return many or (joined and not of_stream)
        return joined and not of_stream and next_one["input"] in streams

    cuts = [i for i in range(1, len(records)) if not together(records[i - 1], records[i])]
    return [range(a, b) for a, b in pairwise([0, *cuts, len(records)]) if b > a]


def _joins_sources(each: Layout) -> bool:
    """Whether the only node with two inputs is a join of two source tables."""
    joins = [inputs for s in each.steps.values() if len(inputs := inputs_of(s)) == 2]
    return [[each.steps[i]["op"] for i in inputs] for inputs in joins] == [["table", "table"]]


def _in_task_order(each: Layout) -> list[range]:
    """Runs in which a task, which takes the smaller head of its inputs, keeps the recorded order.

    A run orders what is in the logs of its inputs, so a record that its table refuses does not count.
    """
    records = each.scenario.records
    tables = {s["input"]: s["table"] for s in each.steps.values() if s["op"] == "table"}
    cuts: list[int] = []
    newest: dict[str, int] = {}
    stream_time: dict[str, int] = {}
    last: tuple[int, str] = (-1, "")
    for i, record in enumerate(records):
        side = record["input"]
        if not _accepts(tables[side], record, stream_time.get(side)):
            continue
        stream_time[side] = max(stream_time.get(side, -1), record["timestamp"])
        time = max(newest.get(side, -1), record["timestamp"])
        if (time, side) < last:
            cuts.append(i)
            newest, time = {}, record["timestamp"]
        newest[side], last = time, (time, side)
    return [range(a, b) for a, b in pairwise([0, *cuts, len(records)]) if b > a]


def _accepts(table: Mapping[str, Any], record: Mapping[str, Any], stream_time: int | None) -> bool:
    """Whether a source table takes a record: it has a key, and is not too old (FORMAT 4.1.1, 4.2.1)."""
    if record["key"] is None:
        return False
    if not table["versioned"] or stream_time is None:
        return True
    return record["timestamp"] >= stream_time - table["history_retention"]


class _Group:
    """Scenarios as partitions of one topology, and what came out of each."""

    def __init__(self, group: Sequence[Layout], granularity: Granularity, spark: SparkSession) -> None:
        self.layouts = group
        self.granularity: Granularity = granularity
        self.nodes = nodes_of(group)
        self.driver = TopologyTestDriver(*self.nodes.values(), spark=spark)
        self.cuts = [_cut(each, granularity) for each in group]
        self.entries: dict[int, list[Entry]] = defaultdict(list)
        self.failed_at: dict[int, int] = {}

    def run(self, results: Mapping[Scenario, Outcome]) -> None:
        outputs = {self._node(e, e.output): e for e in self.layouts}
        for step in range(max(map(len, self.cuts))):
            cuts = {n: cut[step] for n, cut in enumerate(self.cuts) if step < len(cut)}
            self._step(cuts)
            for name in outputs:
                for number, rows in by_scenario(self.driver.read(name)).items():
                    each = self.layouts[number]
                    if self._node(each, each.output) == name:
                        last = cuts[number][-1]
                        self.entries[number] += [_entry(r, each.value, last) for r in rows]
        stores = self._stores()
        for number, each in enumerate(self.layouts):
            settle(results[each.scenario], self._differences(number, stores))

    def _node(self, each: Layout, step: str) -> str:
        return self.nodes[each.shapes[step]].name

    def _step(self, cuts: dict[int, range]) -> None:
        """One run of every scenario that has not failed; those that fail now are left out of it."""
        while True:
            inputs: dict[str, list[Entry]] = defaultdict(list)
            for number, cut in cuts.items():
                each = self.layouts[number]
                homes = _sources(each)
                for i in cut if number not in self.failed_at else ():
                    record = each.scenario.records[i]
                    for shape in homes.get(record["input"], ()):
                        inputs[self.nodes[shape].name].append(record_of(number, record))
            try:
                self.driver.run(inputs)
            except RefusedRecordsError as error:
                self.failed_at |= {n: cuts[n][-1] for n in error.partitions}
            else:
                return

    def _stores(self) -> dict[str, dict[int, list[Entry]]]:
        """What the stores hold that scenarios look into, by node and scenario."""
        stores: dict[str, dict[int, list[Entry]]] = {}
        for each in self.layouts:
            node = None if each.stored is None else self.nodes[each.shapes[each.stored]]
            if node is not None and node.name not in stores:
                view = self.driver.versions if isinstance(node, VersionedTable) else self.driver.table
                stores[node.name] = by_scenario(view(node.name))
        return stores

    def _differences(self, number: int, stores: Mapping[str, dict[int, list[Entry]]]) -> list[str]:
        each = self.layouts[number]
        ends = {i: cut[-1] for cut in self.cuts[number] for i in cut}
        expected: list[Entry] = list(each.scenario.expected)
        got = self.entries[number]
        if self.granularity == "run":
            expected = [{**e, "trigger": ends[e["trigger"]]} for e in expected]
            if each.holds_back and not each.one_by_one:
                expected, got = _as_set(expected), _as_set(got)
        found = [] if each.stored is None else stores[self._node(each, each.stored)].get(number, [])
        dropped = sum(self._dropped(self.nodes[s], number) for s in set(each.shapes.values()))
        differences = compare("entry", expected, got)
        failed_at = self.failed_at.get(number)
        return differences + compare_state(each.scenario, final_store(found), dropped, failed_at)

    def _dropped(self, node: Stream, partition: int) -> int:
        """What a node adds to Kafka's dropped-records-total."""
        fates = Counter(self.driver.metrics(node.name, partition))
        # Late records of a join with grace are joined at once.
        late = fates[Fate.LATE] if processor_of(node).drops_late else 0
        return late + fates[Fate.QUARANTINED] + fates[Fate.DROPPED]


def _sources(each: Layout) -> dict[str, set[Shape]]:
    """The sources that take the records of an input."""
    found: dict[str, set[Shape]] = defaultdict(set)
    for name, step in each.steps.items():
        if "input" in step:
            found[step["input"]].add(each.shapes[name])
    return found


def _entry(row: Entry, value: str, trigger: int) -> Entry:
    entry = {
        "trigger": trigger,
        "key": row["key"],
        "value": None if row["is_tombstone"] else text(row[value]),
        "timestamp": millis(row["timestamp"]),
    }
    ends = ("window_start", "window_end")
    return entry | {end: millis(row[end]) for end in ends if end in row}


def _as_set(entries: Iterable[Entry]) -> list[Entry]:
    """The entries of each run in an order of their own, so that lists compare as sets."""

    def order(entry: Entry) -> tuple[Any, ...]:
        ends = (entry.get("window_start", 0), entry.get("window_end", 0))
        return (entry["trigger"], entry["timestamp"], entry["key"] or "", entry["value"] or "", *ends)

    return sorted(entries, key=order)
