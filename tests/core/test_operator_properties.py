"""Properties of every operator, for any records in any order, split into runs or not.

As in ``test_split_invariance``, each partition is a separate experiment with its own durations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from tests.core.test_split_invariance import (
    PARTITIONS,
    SOURCE,
    Record,
    by_case,
    careful,
    cuts,
    durations,
    each_case,
    heads,
    ms,
    placed,
    tails,
)
from tests.core.test_stream_stream_join import MS, redeclared
from vt_dagster.core import table_joins
from vt_dagster.runs import gate, pin
from vt_dagster.runs.pin import Arrival
from vt_dagster.testing import TopologyTestDriver
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.operators import Materialized, UntilTimeLimit, UntilWindowCloses
from vt_dagster.topology.windows import HoppingWindow, SessionWindow, SlidingWindow, TumblingWindow

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

pytestmark = pytest.mark.slow

record = st.fixed_dictionaries(
    {
        "key": st.sampled_from(["a", "b", "c"]),
        "value": st.sampled_from(["a|1", "a|2", "b|7", "c|9", "none", None]),
        "timestamp": st.integers(0, 40),
    }
)
of_each_case = each_case(st.lists(record, max_size=8))
positive = st.lists(st.integers(1, 15), min_size=PARTITIONS, max_size=PARTITIONS)

HEAD = "cast(nullif(substring_index(value, '|', 1), value) as string)"
NUMBER = "try_cast(substring_index(value, '|', -1) as bigint)"
GROUP = ("case", f"{HEAD} as group")


def by_group(table: Table, name: str, **more: Any) -> Table:
    grouped = table.group_by(*GROUP, partition_by="case")
    return grouped.aggregate(
        {"rows": "count(*)", "total": f"sum({NUMBER})", "mean": f"avg({NUMBER})"}, name=name, **more
    )


def log_of(driver: TopologyTestDriver, name: str) -> dict[int, list[Record]]:
    return by_case(driver.read(name))


FEW = {"sessions", "sliding", "early_sliding"}
"""Windows and a suppress. The test of closed windows below and ``test_calendar_windows`` split fixed
windows into runs; ``test_random_chains`` splits tables."""


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.endurance)])
@careful
@given(
    retention=durations,
    lengths=positive,
    grace=durations,
    records=of_each_case,
    first=cuts,
)
def test_unary_operators_are_split_invariant(
    spark: SparkSession,
    few: bool,
    retention: list[int],
    lengths: list[int],
    grace: list[int],
    records: list[list[Record]],
    first: list[int],
) -> None:
    versioned = VersionedTable("versioned", history_retention=ms(retention), **SOURCE)
    plain = Table("plain", **SOURCE)
    stream = Stream("stream", **SOURCE)
    size, after = ms(lengths), ms(grace)
    half = ms((n + 1) // 2 for n in lengths)
    keyed = stream.group_by()
    tumbling = keyed.windowed_by(TumblingWindow(size, after))
    windows = {
        "tumbling": tumbling.aggregate({"n": "count(*)", "most": "max(value)"}, name="tumbling"),
        "hopping": keyed.windowed_by(HoppingWindow(size, half, after)).count(name="hopping"),
        "sessions": keyed.windowed_by(SessionWindow(size, after)).count(name="sessions"),
        "sliding": keyed.windowed_by(SlidingWindow(size, after)).count(name="sliding"),
        "by_value": stream.group_by("case", "value", partition_by="case")
        .windowed_by(TumblingWindow(size, after))
        .count(name="by_value"),
    }
    nodes = [
        versioned.filter(f"{HEAD} = 'a'", name="filtered"),
        plain.filter_not(f"{HEAD} = 'a'", name="plain_filtered"),
        versioned.map_values("upper(value) as value", name="mapped", materialized=Materialized()),
        by_group(versioned, "of_versioned"),
        by_group(plain, "of_plain"),
        by_group(plain, "kept", materialized=Materialized(ms(retention))),
        plain.to_stream(name="changes").to_table(
            name="again", materialized=Materialized(ms(retention))
        ),
        *windows.values(),
        windows["tumbling"].suppress(UntilWindowCloses(), name="final"),
        windows["sessions"].suppress(UntilWindowCloses(), name="final_sessions"),
        windows["sliding"].suppress(UntilWindowCloses(), name="final_sliding"),
        windows["sliding"].suppress(UntilTimeLimit(size, 2), name="early_sliding"),
        plain.suppress(UntilTimeLimit(size), name="limited"),
    ]
    if few:
        nodes = [n for n in nodes if n.name in FEW]
    whole, split = (TopologyTestDriver(*nodes, spark=spark) for _ in range(2))
    sources = [name for name, node in whole.nodes.items() if not node.inputs]
    whole.run(dict.fromkeys(sources, placed(records)))
    for part in (heads(records, first), tails(records, first)):
        split.run(dict.fromkeys(sources, part))
    for node in nodes:
        assert log_of(split, node.name) == log_of(whole, node.name), node.name
        assert split.metrics(node.name) == whole.metrics(node.name), node.name


def merged(lefts: Sequence[Record], rights: Sequence[Record]) -> list[tuple[str, Record]]:
    """The order in which a task processes the records of two inputs: the smaller head first."""
    left, right = list(lefts), list(rights)
    order: list[tuple[str, Record]] = []
    while left or right:
        if not right or (left and left[0]["timestamp"] <= right[0]["timestamp"]):
            order.append(("left", left.pop(0)))
        else:
            order.append(("right", right.pop(0)))
    return order


@pytest.mark.endurance  # test_random_chains splits joins of tables at random
@pytest.mark.parametrize("kind", ["versioned", "plain"])
@careful
@given(
    retention=durations,
    lefts=of_each_case,
    rights=of_each_case,
    first=cuts,
    kept=durations,
)
def test_table_joins_are_split_invariant(
    spark: SparkSession,
    kind: str,
    retention: list[int],
    lefts: list[list[Record]],
    rights: list[list[Record]],
    first: list[int],
    kept: list[int],
) -> None:
    """A run with all records uses the plans of large runs, which broadcast a few right changes."""
    select = ("left.value as l", "right.value as r")
    more: dict[str, Any] = {"history_retention": ms(retention)} if kind == "versioned" else {}
    make = VersionedTable if kind == "versioned" else Table
    left, right = (make(side, **SOURCE, **more) for side in ("left", "right"))
    refers: dict[str, Any] = {"foreign_key": ("case", HEAD), "select": select}
    joins: list[Table] = [
        left.join(right, name="inner", select=select),
        left.left_join(right, name="left_join", select=select),
        left.outer_join(right, name="outer", select=select, materialized=Materialized(ms(kept))),
        left.join(right, name="fk_inner", **refers),
        left.left_join(right, name="fk_left", **refers),
    ]
    whole, split = (TopologyTestDriver(*joins, spark=spark) for _ in range(2))
    cases = [merged(*both) for both in zip(lefts, rights, strict=True)]

    def feed(driver: TopologyTestDriver, spans: list[list[tuple[str, Record]]]) -> None:
        of = {
            side: placed([[r for name, r in span if name == side] for span in spans])
            for side in ("left", "right")
        }
        driver.run(of)

    broadcast = patch.object(table_joins, "_while_both_last", wraps=table_joins._while_both_last)
    with patch.object(Arrival, "single_task", False), broadcast as called:
        feed(whole, cases)
    assert called.call_count == 2 * any(map(any, (lefts, rights)))
    feed(split, [case[:n] for case, n in zip(cases, first, strict=True)])
    feed(split, [case[n:] for case, n in zip(cases, first, strict=True)])
    for join in joins:
        logs = log_of(whole, join.name)
        assert log_of(split, join.name) == logs, join.name
        if kind == "versioned":
            for rows in logs.values():
                for key in {r["key"] for r in rows}:
                    times = [r["timestamp"] for r in rows if r["key"] == key]
                    assert all(a <= b for a, b in pairwise(times)), join.name


@careful
@given(retention=durations, records=of_each_case, first=cuts)
def test_aggregate_of_versioned_table_equals_aggregate_of_current_rows(
    spark: SparkSession, retention: list[int], records: list[list[Record]], first: list[int]
) -> None:
    table = VersionedTable("table", history_retention=ms(retention), **SOURCE)
    driver = TopologyTestDriver(by_group(table, "groups"), spark=spark)
    for part in (heads(records, first), tails(records, first)):
        driver.run({"table": part})
        expected: dict[tuple[int, str], list[int]] = {}
        for row in driver.table("table"):
            head, _, number = row["value"].partition("|")
            if number:
                expected.setdefault((row["case"], head), []).append(int(number))
        found = {(r["case"], r["group"]): r for r in driver.table("groups")}
        assert {k for k, r in found.items() if r["rows"]} == set(expected)
        for key, row in found.items():
            numbers = expected.get(key, [])
            mean = sum(numbers) / len(numbers) if numbers else None
            assert (row["rows"], row["total"], row["mean"]) == (len(numbers), sum(numbers), mean)


@careful
@given(lengths=positive, grace=durations, records=of_each_case, first=cuts, second=cuts)
def test_until_window_closes_emits_each_closed_window_once_like_batch_job(
    spark: SparkSession,
    lengths: list[int],
    grace: list[int],
    records: list[list[Record]],
    first: list[int],
    second: list[int],
) -> None:
    stream = Stream("stream", **SOURCE)
    windows = stream.group_by().windowed_by(TumblingWindow(ms(lengths), ms(grace)))
    final = windows.count(name="counts").suppress(UntilWindowCloses(), name="final")
    driver = TopologyTestDriver(final, spark=spark)
    rest = [case[n:] for case, n in zip(records, first, strict=True)]
    for part in (heads(records, first), heads(rest, second), tails(rest, second)):
        driver.run({"stream": part})
    for case, rows in log_of(driver, "final").items():
        time = -1
        counts: Counter[tuple[str, int]] = Counter()
        for r in records[case]:
            time = max(time, r["timestamp"])
            start = r["timestamp"] // lengths[case] * lengths[case]
            if start + lengths[case] > time - grace[case]:
                counts[r["key"], start] += 1
        closed = {
            (key, start): n
            for (key, start), n in counts.items()
            if start + lengths[case] <= time - grace[case]
        }
        found = [
            ((r["key"], (r["window_start"] - EPOCH) // timedelta(milliseconds=1)), r["count"])
            for r in rows
        ]
        assert len(found) == len(dict(found)), "a window was released twice"
        assert dict(found) == closed


@pytest.mark.parametrize("rows", ["few", "many"])
def test_longer_grace_does_not_reopen_windows(spark: SparkSession, rows: str) -> None:
    """A closed window keeps its result: the state no longer has its records."""
    stream = Stream("stream", **SOURCE)

    def results(grace: int) -> list[Table]:
        windows = {
            "tumbling": TumblingWindow(10 * MS, grace * MS),
            "hopping": HoppingWindow(10 * MS, 5 * MS, grace * MS),
            "sessions": SessionWindow(5 * MS, grace * MS),
            "sliding": SlidingWindow(5 * MS, grace * MS),
        }
        counts = [
            stream.group_by().windowed_by(window).count(name=name) for name, window in windows.items()
        ]
        final = [one.suppress(UntilWindowCloses(), name=f"{one.name}_final") for one in counts]
        return [*counts, *final]

    def run(driver: TopologyTestDriver, *times: int) -> dict[str, Counter[tuple[int, int, int]]]:
        told = [{"case": 0, "key": "a", "value": "x", "timestamp": time} for time in times]
        driver.run({"stream": told})
        return {
            name: Counter(
                (row["count"], *((row[end] - EPOCH) // MS for end in ("window_start", "window_end")))
                for row in driver.table(name)
            )
            for name in driver.nodes
            if name != "stream"
        }

    driver = TopologyTestDriver(*results(0), spark=spark)
    with pytest.MonkeyPatch.context() as patched:
        if rows == "many":
            for module in (pin, gate):
                patched.setattr(module, "CHUNK", -1)
        before = run(driver, 100, 101, 103, 120)
        redeclared(driver, stream, *results(100))
        # All windows of these had closed; the second run knows it from the first one's commit.
        assert run(driver, 104) == run(driver, 99, 105) == before
        after = run(driver, 119, 300)
    assert after["tumbling"] == before["tumbling"] + Counter([(1, 300, 310)])
    hopping = Counter([(2, 115, 125), (1, 295, 305), (1, 300, 310)])
    assert after["hopping"] == before["hopping"] - Counter([(1, 115, 125)]) + hopping
    sessions = Counter([(2, 119, 120), (1, 300, 300)])
    assert after["sessions"] == before["sessions"] - Counter([(1, 120, 120)]) + sessions
    sliding = Counter([(2, 115, 120), (1, 120, 125), (1, 295, 300)])
    assert after["sliding"] == before["sliding"] - Counter([(1, 115, 120)]) + sliding
    log = log_of(driver, "tumbling_final")[0]
    assert [row["count"] for row in log] == [3, 1]
