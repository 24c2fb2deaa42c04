"""The join of two streams gives the promised rows, however an arrival order is split into runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from tests.core.reference.stream_join import StreamJoin, as_here, as_kafka
from vt_dagster import Stream
from vt_dagster.conformance.runner import split_into_runs
from vt_dagster.conformance.scenario import Scenario, millis, record_of
from vt_dagster.conformance.steps import layout, nodes_of
from vt_dagster.core import arrival_order, stream_time
from vt_dagster.core.stream_stream_join import StreamJoinTime
from vt_dagster.runs import gate
from vt_dagster.runs import pin as arrivals
from vt_dagster.storage.schema_evolution import shape_of
from vt_dagster.testing import TopologyTestDriver

pytestmark = pytest.mark.usefixtures("few_rows")

Entry = dict[str, Any]
STREAMS = Path(__file__).parents[1] / "conformance" / "streams"
CASES = 10
OURS = {"loses_boundary", "cuts_at_zero", "alone_at_once", "delays"}
MS = timedelta(milliseconds=1)


def recorded() -> list[Entry]:
    found: list[Entry] = []
    for path in (STREAMS / "worked.json", STREAMS / "random" / "stream_stream_join.json"):
        found += json.loads(path.read_text(encoding="utf-8"))
    return [s for s in found if s["operator"] == "stream_stream_join" and "metrics" in s]


def test_model_agrees_with_kafka_streams_except_by_design() -> None:
    scenarios = recorded()
    assert len(scenarios) == 48
    shown: set[str] = set()
    for scenario in scenarios:
        kafka, here = as_kafka(scenario), as_here(scenario)
        dropped = scenario["metrics"]["dropped_records"]
        assert (kafka.emitted, kafka.dropped) == (scenario["expected"], dropped), scenario["name"]
        wanted = scenario["expected"], dropped
        if "by_design" in scenario:
            assert (here.emitted, here.dropped) != wanted, f"{scenario['name']} needs no by_design"
            assert set(scenario["by_design"]) == {"expected"}
            shown |= {w for w in OURS if as_here(scenario, **{w: True}).emitted != here.emitted}
            wanted = scenario["by_design"]["expected"], dropped
        assert (here.emitted, here.dropped) == wanted, scenario["name"]
    assert shown == OURS, "each difference of README has a scenario"


record = st.fixed_dictionaries(
    {
        "input": st.sampled_from(["left", "right"]),
        "key": st.sampled_from(["a", "a", "a", "b", None]),
        "value": st.sampled_from(["x", "y", "z", "x", "y", None]),
        "timestamp": st.integers(0, 30),
    }
)
window = st.tuples(st.integers(-3, 8), st.integers(-3, 8), st.integers(0, 8)).filter(
    lambda w: w[0] + w[1] >= 0
)
Case = tuple[tuple[int, int, int], list[Entry], set[int], int]


def case_of(longest: int) -> SearchStrategy[Case]:
    """A window with its grace, at most ``longest`` records, places to split runs, another grace."""
    cuts = st.sets(st.integers(1, longest - 1))
    return st.tuples(window, st.lists(record, max_size=longest), cuts, st.integers(0, 12))


def cases_of(number: int) -> SearchStrategy[list[Case]]:
    """This number of cases of few runs; without the simplest ones, which have hardly any records."""
    drawn = st.lists(case_of(4), min_size=number, max_size=number)
    return drawn.filter(lambda cases: sum(len(records) for _, records, *_ in cases) > number)


def scenario_of(number: int, kind: str, window: tuple[int, int, int], records: list[Entry]) -> Scenario:
    config = {"kind": kind, **dict(zip(("before", "after", "grace"), window, strict=True))}
    # Values differ, so that each result shows its records.
    told = [
        {**r, "value": None if r["value"] is None else f"{r['value']}{i}"}
        for i, r in enumerate(records)
    ]
    name = f"case {number}"
    return Scenario(name, Path(name), "stream_stream_join", config, told, [], None, None, None)


@pytest.mark.slow
@settings(
    max_examples=1,  # of many cases
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(cases=cases_of(CASES), turn=st.integers(1, 3))
def test_split_stream_join_gives_same_results(
    spark: SparkSession, cases: list[Case], turn: int
) -> None:
    """Runs are as long as the order of arrival allows, or split further. The model takes one record at
    a time. From some run on, all cases have another grace period."""
    layouts = [layout(scenario_of(i, "outer", w, records)) for i, (w, records, *_) in enumerate(cases)]
    others = [
        layout(scenario_of(i, "outer", (*w[:2], grace), records))
        for i, (w, records, _, grace) in enumerate(cases)
    ]
    nodes = nodes_of(layouts)
    driver = TopologyTestDriver(*nodes.values(), spark=spark)
    sources = {shape[1]: node.name for shape, node in nodes.items() if shape[0] == "stream"}
    joined = next(node.name for node in nodes.values() if node.inputs)
    runs = [
        split_runs(split_into_runs(each, "run"), at)
        for each, (_, _, at, _) in zip(layouts, cases, strict=True)
    ]
    steps = max(map(len, runs))
    for step in range(steps):
        if step == turn:
            redeclared(driver, *nodes_of(others).values())
        inputs: dict[str, list[Entry]] = {name: [] for name in sources.values()}
        for number, some in enumerate(runs):
            for i in some[step] if step < len(some) else ():
                taken = layouts[number].scenario.records[i]
                inputs[sources[taken["input"]]].append(record_of(number, taken))
        driver.run(inputs)
    found: list[Counter[Any]] = [Counter() for _ in cases]
    for row in driver.read(joined):
        found[row["scenario"]][row["key"], row["value"], millis(row["timestamp"])] += 1
    waiting = Counter(row["partition"] for row in driver.waiting(joined))
    for number, (each, (*_, grace)) in enumerate(zip(layouts, cases, strict=True)):
        records = [dict(r) for r in each.scenario.records]
        some = runs[number]
        told = StreamJoin(dict(each.scenario.config))
        if turn < steps:
            at = some[turn].start if turn < len(some) else len(records)
            told.feed(records[:at]).changed(at, grace)
            records = records[at:]
        told.feed(records)
        wanted = Counter((e["key"], e["value"], e["timestamp"]) for e in told.emitted)
        about = f"{each.scenario.config} {each.scenario.records} {some} {turn} {grace}"
        assert found[number] == wanted, about
        assert waiting[number] == len(told.unmatched), about
        assert driver.metrics(joined, number).get("dropped", 0) == told.dropped


def redeclared(driver: TopologyTestDriver, *nodes: Stream) -> None:
    """Continues with the existing tables, as a newly deployed code location does."""
    stores = driver._stores  # pyright: ignore[reportPrivateUsage]
    driver.nodes = {node.name: node for node in nodes}
    assert set(driver.nodes) == set(stores)
    for node in nodes:
        assert not node.changed_definition(shape_of(stores[node.name].node).specification)
        stores[node.name].node = node


@given(one=case_of(10), at=st.integers(0, 14))
def test_grace_change_keeps_emitted_rows(one: Case, at: int) -> None:
    """Emitted rows stay. No record is emitted twice without a match, or loses a match if it is in
    time."""
    window, records, _, grace = one
    told = scenario_of(0, "outer", window, records)
    join = StreamJoin(dict(told.config)).feed(records_of(told)[:at])
    said = list(join.emitted)
    join.changed(at, grace)
    join.feed(records_of(told)[at:])
    assert join.emitted[: len(said)] == said
    alone = Counter(e["value"] for e in join.emitted if "null" in e["value"])
    assert set(alone.values()) <= {1}
    now, taken = -1, list[Entry]()
    pairs: set[tuple[str, str]] = set()
    for i, r in enumerate(records_of(told)):
        now = max(now, r["timestamp"])
        if r["value"] is None or r["key"] is None:
            continue
        if r["timestamp"] >= now - (grace if i >= at else window[2]):
            for other in taken:
                left, right = (r, other) if r["input"] == "left" else (other, r)
                low, high = left["timestamp"] - window[0], left["timestamp"] + window[1]
                meet = other["key"] == r["key"] and other["input"] != r["input"]
                if meet and low <= right["timestamp"] <= high:
                    pairs.add((left["value"], right["value"]))
        taken.append(r)
    assert {f"({a},{b})" for a, b in pairs} <= {e["value"] for e in join.emitted}


def records_of(scenario: Scenario) -> list[Entry]:
    return [dict(r) for r in scenario.records]


def split_runs(runs: Sequence[range], at: set[int]) -> list[range]:
    """The same runs, split further."""
    found: list[range] = []
    for one in runs:
        ends = [one.start, *sorted(i for i in at if i in one and i > one.start), one.stop]
        found += [range(a, b) for a, b in pairwise(ends)]
    return found


ROWS = StructType(
    [
        StructField("k", StringType()),
        StructField("n", LongType()),
        StructField("timestamp", TimestampType()),
    ]
)

WANTED = """
with taken as (
    select *, max(ts) over (partition by side order by n) as head from records
), ordered as (
    select *, row_number() over (order by head, side, n) as place from taken
), timed as (
    select *,
        max(ts) over so_far as now,
        max(ts) filter (side = 0) over so_far as left_time,
        max(ts) filter (side = 1) over so_far as right_time
    from ordered
    window so_far as (order by place)
), pairs as (
    select l.n as l, r.n as r, l.place > r.place as by_left,
        if(by_left, l.ts < l.now - $grace, r.ts < r.now - $grace) as late,
        if(by_left, l.right_time, r.left_time) - ($before + $after + $grace) as horizon,
        if(by_left, r.ts, l.ts) as there,
        if(by_left, l.now, r.now) as now, l.ts + $after + $grace as ends, l.now as came,
        greatest(l.ts, r.ts) as ts
    from timed l join timed r on l.k = r.k and r.ts between l.ts - $before and l.ts + $after
    where l.side = 0 and r.side = 1
), matches as (
    select * from pairs where not late or there > horizon
), alone as (
    select n as l, null::bigint as r, ts from timed where side = 0 and n not in (
        select l from matches where by_left or (came <= ends and now <= ends)
    ) and ts + $after + $grace < (select max(ts) from records)
)
select l, r, ts from matches union all select l, r, ts from alone
"""


@pytest.mark.slow
@pytest.mark.parametrize("late", [True, False])
def test_stream_join_equals_interval_join_without_late_records(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Runs use the plans of large runs: chunks by order of arrival, and tiles of time. Without late
    records, there are two runs."""
    told: list[bool] = []
    in_time = StreamJoinTime.advance_if_none_late

    def telling(policy: StreamJoinTime, *about: Any) -> Any:
        told.append(in_time(policy, *about) is not None)
        return in_time(policy, *about)

    monkeypatch.setattr(StreamJoinTime, "advance_if_none_late", telling)
    for module, name, value in (
        (arrival_order, "HOUR", 1_000_000),
        (stream_time, "FINE", 3),
        (arrivals, "CHUNK", -1),
        (gate, "CHUNK", -1),
    ):
        monkeypatch.setattr(module, name, value)
    random = Random(3)
    jitter = [0, 0, -30, 40, -200, -900] if late else [0, 0, -30, 40]
    rows = [
        (side, n, random.choice("abcdefgh"), 10 * n + random.choice(jitter))
        for side in (0, 1)
        for n in range(500)
    ]
    lengths = {"before": 40, "after": 90, "grace": 100}
    orders, payments = (Stream(name, key="k", schema=ROWS) for name in ("orders", "payments"))
    about: Mapping[str, Any] = {what: ms * MS for what, ms in lengths.items()}
    selected = ("left.n", "right.n as found")
    driver = TopologyTestDriver(
        orders.left_join(payments, name="joined", select=selected, **about), spark=spark
    )
    # The query knows only one order of arrival: that of a single run.
    for taken in [range(500)] if late else [range(300), range(300, 500)]:
        driver.run(
            {
                name: [
                    {"k": k, "n": n, "timestamp": at + 1000}
                    for side, n, k, at in rows
                    if side == i and n in taken
                ]
                for i, name in enumerate(("orders", "payments"))
            }
        )
    with duckdb.connect() as connection:
        connection.execute("create table records (side int, n bigint, k varchar, ts bigint)")
        connection.executemany("insert into records values (?, ?, ?, ? + 1000)", rows)
        wanted = Counter(connection.execute(WANTED, lengths).fetchall())
    found = driver.read("joined")
    assert Counter((r["n"], r["found"], millis(r["timestamp"])) for r in found) == wanted
    alone = sum(r["found"] is None for r in found)
    assert min(alone, len(found) - alone) > 50, "each kind of result is there"
    assert (sum(r["is_late"] for r in found) > 50) == late
    assert told == [not late] * len(told)
    assert told
    assert [r["offset"] for r in found] == list(range(len(found)))
