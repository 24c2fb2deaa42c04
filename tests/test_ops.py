"""Graphs of the typed ops: what they commit is what the one op of ``build_asset`` commits."""

from __future__ import annotations

import ast
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import DataFrame, SparkSession

import vt_dagster
from tests.market import Market, materialized, messages, record, run
from vt_dagster import (
    HoppingWindow,
    SessionWindow,
    SlidingWindow,
    TopologyError,
    TumblingWindow,
    UntilWindowCloses,
    build_asset,
    build_checks,
    build_definitions,
    ops,
)
from vt_dagster.columns import FATE, RECORDED_AT
from vt_dagster.core.processors import PROCESSORS
from vt_dagster.orchestration.steps import KINDS, steps_of
from vt_dagster.topology.model import Stream

HOUR = timedelta(hours=1)
ROOT = Path(__file__).parent.parent


def graph_of(node: Stream, between: Any = None) -> dg.AssetsDefinition:
    """The asset of a node as a graph of its steps, with an op between its buffer and its join: of what
    was released and what waits it gives what waits."""
    steps = steps_of(node)
    buffer = ops.grace_buffer_op(node) if "grace_buffer_op" in steps else None
    operate = getattr(ops, steps[-2])(node)
    read, write = ops.read_logs_op(node), ops.write_op(node)
    kept = dg.Out(io_manager_key=ops.OP_MEMORY)
    look = None if between is None else dg.op(name=f"look_{node.name}", out=kept)(between)

    @dg.graph_asset(**ops.graph_arguments(node))
    def graph(**after: Any) -> Any:
        taken = read(**after)
        logs = {name: getattr(taken, name) for name in taken._fields}
        if buffer is not None:
            released, waiting = buffer(**logs)
            waiting = waiting if look is None else look(released, waiting)
            logs = {"released": released, "waiting": waiting, "arrival": taken.arrival}
        return write(operate(**logs), taken.arrival)

    return graph


def every_kind(market: Market, sign: str) -> dict[str, Stream]:
    """Of each word of ``vt_dagster.ops`` some nodes."""
    prices, rates, sales = market.prices, market.rates, market.sales
    by_price = sales.select_key("v", name=f"{sign}select_key")
    changes = prices.to_stream(name=f"{sign}to_stream")
    both = ["left.*", "right.v as w"]
    match: Any = {"select": both, "within": timedelta(hours=2)}
    windows = {
        "tumbling": TumblingWindow(HOUR, grace=HOUR),
        "hopping": HoppingWindow(2 * HOUR, HOUR, grace=HOUR),
        "session": SessionWindow(HOUR, grace=HOUR),
        "sliding": SlidingWindow(HOUR, grace=HOUR),
    }
    counted = {
        name: sales.group_by().windowed_by(window).count(name=f"{sign}{name}")
        for name, window in windows.items()
    }
    joined: Any = {"select": both, "grace_period": HOUR}
    made = {
        "stream_table_join": sales.left_join(prices, name=f"{sign}stream_table_join", **joined),
        "inner": sales.join(prices, name=f"{sign}inner", **joined),
        "no_grace": sales.join(rates, name=f"{sign}no_grace", select=both),
        "corrected_join": sales.left_join(
            prices, name=f"{sign}corrected_join", corrected_for=timedelta(days=1), **joined
        ),
        "corrected_stream_join": sales.outer_join(
            changes, name=f"{sign}corrected_stream_join", corrected_for=timedelta(days=1), **match
        ),
        "stream_join": sales.outer_join(changes, name=f"{sign}stream_join", grace=HOUR, **match),
        "table_join": prices.left_join(rates, name=f"{sign}table_join", select=both),
        "itself": rates.join(rates, name=f"{sign}itself", select=both),
        "foreign_key_join": prices.left_join(
            rates, name=f"{sign}foreign_key_join", select=both, foreign_key="v"
        ),
        "history_join": prices.outer_join(
            sales.to_table(
                name=f"{sign}to_table",
                materialized=vt_dagster.Materialized(history_retention=timedelta(days=1)),
            ),
            name=f"{sign}history_join",
            select=["left.k as k", "left.v", "right.v as w"],
            history="complete",
        ),
        "filter": prices.filter("v > 'p'", name=f"{sign}filter"),
        "filter_not": rates.filter_not("v > 'p'", name=f"{sign}filter_not"),
        "map_values": prices.map_values("upper(v) as v", name=f"{sign}map_values"),
        "aggregate": rates.group_by("v").count(name=f"{sign}aggregate"),
        "stream_aggregate": sales.group_by().count(name=f"{sign}stream_aggregate"),
        "merge": sales.merge(changes, name=f"{sign}merge"),
        "flat_map_values": sales.flat_map_values(
            "array(v, 'x')", column="w", name=f"{sign}flat_map_values"
        ),
        **counted,
        "suppress": counted["tumbling"].suppress(UntilWindowCloses(), name=f"{sign}suppress"),
    }
    more = {up.name: up for node in made.values() for up in node.inputs if up.name.startswith(sign)}
    return {by_price.name: by_price, **more, **{node.name: node for node in made.values()}}


def log_of(market: Market, node: Stream) -> list[tuple[Any, ...]]:
    rows = market.store(node).read("log").drop(RECORDED_AT)
    columns = sorted(c for c in rows.columns if c != "cause")
    return sorted((tuple(map(str, row)) for row in rows.select(*columns).collect()))


def told(market: Market, node: Stream) -> dict[str, Any]:
    """What a commit says but for names, times and versions."""
    head = market.store(node).head()
    assert head is not None
    commit = head.commit
    fields = ("batch", "next_offset", "stream_time", "released", "counts", "totals", "marks")
    return {name: getattr(commit, name) for name in fields}


def land(market: Market, number: int) -> None:
    """Three arrivals: late records, ones that wait, tombstones, no key; the last of one record."""
    prices, rates, sales = (
        (
            [("a", "p1", "1 00:00"), ("a", "p2", "1 02:00"), ("b", "q1", "1 01:00")],
            [("a", "r1", "1 00:00"), ("p1", "r2", "1 00:00")],
            [("a", "s1", "1 01:00"), ("b", "s2", "1 03:30"), ("a", "s3", "1 04:00")],
        ),
        (
            [("a", "p3", "1 03:45"), ("b", None, "1 05:00"), ("a", "p0", "1 01:30")],
            [("a", "r3", "1 04:00"), ("b", "r4", "1 05:00")],
            [("a", "s4", "1 02:00"), ("b", "s5", "1 06:00"), ("c", "s6", "1 05:30"), ("a", "s7", "1 06:30")],
        ),
        ([], [], [("a", "s8", "1 09:00")]),
    )[number]
    for name, rows in (("prices", prices), ("rates", rates), ("sales", sales)):
        if rows:
            market.land(name, f"{number}.jsonl", *(record(*row) for row in rows))


def test_a_graph_commits_what_the_asset_commits(spark: SparkSession, tmp_path: Path) -> None:
    """All kinds of operators, over three runs and one without news: rows, order, counts, times."""
    market = Market(tmp_path, spark)
    assets, graphs = every_kind(market, "asset_"), every_kind(market, "graph_")
    sources = [build_asset(node) for node in (market.prices, market.rates, market.sales)]
    made = [*sources, *map(build_asset, assets.values())]
    seen: list[tuple[int, int, set[str]]] = []

    def look(released: DataFrame, waiting: DataFrame) -> DataFrame:
        fates = {row[FATE] for row in released.select(FATE).distinct().collect()}
        seen.append((released.count(), waiting.count(), fates))
        return waiting

    for name, node in graphs.items():
        made.append(graph_of(node, look if name == "graph_stream_table_join" else None))
    for number in range(4):
        if number < 3:
            land(market, number)
        result = run(made, market.warehouse, instance=market.instance, raise_on_error=True)
    for (name, node), twin in zip(assets.items(), graphs.values(), strict=True):
        assert log_of(market, node) == log_of(market, twin), name
        assert told(market, node) == told(market, twin), name
    assert {kind for node in graphs.values() for kind in [type(node.operator)]} == set(PROCESSORS)
    # By hand: s1 and s3's predecessor go out; s4 comes too late; at the end s8 alone waits.
    assert [one[:2] for one in seen] == [(1, 2), (4, 2), (2, 1), (0, 1)]
    assert seen[1][2] == {"applied", "late"}
    made_of = {e.asset_key for e in result.get_asset_materialization_events()}
    assert made_of == set(), "nothing was new"
