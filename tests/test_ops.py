"""Graphs of the typed ops commit what the single op of ``build_asset`` commits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import DataFrame, SparkSession

import vt_dagster
from tests.market import Market, checks, materialized, messages, record, run
from vt_dagster import (
    FilesSource,
    HoppingWindow,
    SessionWindow,
    SlidingWindow,
    SparkResource,
    TopologyError,
    TumblingWindow,
    UntilWindowCloses,
    build_asset,
    build_definitions,
    build_resources,
    ops,
)
from vt_dagster.columns import OUTCOME, RECORDED_AT
from vt_dagster.core.arrival_order import Outcome
from vt_dagster.core.processor_registry import PROCESSORS, processor_of
from vt_dagster.orchestration.metadata import KINDS, steps_of
from vt_dagster.runs.pin import Store
from vt_dagster.runs.run import run_once
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.commit_log import Commit
from vt_dagster.testing.driver import MemoryStore
from vt_dagster.topology.model import Stream

pytestmark = pytest.mark.usefixtures("few_rows")

HOUR = timedelta(hours=1)
ROOT = Path(__file__).parent.parent


def graph_of(node: Stream, between: Any = None) -> dg.AssetsDefinition:
    """The asset of a node as a graph of its steps. ``between`` is the function of an op between buffer
    and join: it gets the released and the waiting records, and returns the waiting ones."""
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
    """Returns some nodes for each op of ``vt_dagster.ops``."""
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


def results_in_memory(market: Market) -> Callable[[Stream], Store]:
    """Keeps sources in the warehouse and all other nodes in memory: the same runs, in less time."""
    on_disk, made = stores_of(str(market.warehouse), market.spark), dict[str, MemoryStore]()

    def store(node: Stream) -> Store:
        if node.source is not None:
            return on_disk(node)
        return made.setdefault(node.name, MemoryStore(node, market.spark))

    return store


def log_of(store: Store) -> list[str]:
    """Returns the rows of a log, sorted, read without Spark."""
    if isinstance(store, AssetStore):
        rows = vt_dagster.read(store.node.name, warehouse=store.warehouse, what="log")
    else:
        assert isinstance(store, MemoryStore)
        rows = store.rows
    columns = sorted({*rows.column_names} - {RECORDED_AT, "cause"})
    texts = [json.dumps(row, default=str) for row in rows.select(columns).to_pylist()]
    return [str(columns), *sorted(texts)]


def commit_fields(store: Store) -> dict[str, Any]:
    """Returns the fields of the last commit except names, recording times and versions."""
    head = store.head()
    assert head is not None
    commit = head.commit
    fields = ("batch", "next_offset", "stream_time", "emitted_up_to", "counts", "totals", "watermarks")
    return {name: getattr(commit, name) for name in fields}


def land(market: Market, number: int) -> None:
    """Lands one of two arrivals, with late records, records that wait, and a tombstone."""
    prices, rates, sales = (
        (
            [("a", "p1", "1 00:00"), ("a", "p2", "1 02:00"), ("b", "q1", "1 01:00")],
            [("a", "r1", "1 00:00"), ("p1", "r2", "1 00:00")],
            [("a", "s1", "1 01:00"), ("b", "s2", "1 03:30"), ("a", "s3", "1 04:00")],
        ),
        (
            [("a", "p3", "1 03:45"), ("b", None, "1 05:00"), ("a", "p0", "1 01:30")],
            [("a", "r3", "1 04:00"), ("b", "r4", "1 05:00")],
            [
                *(("a", "s4", "1 02:00"), ("b", "s5", "1 06:00")),
                *(("c", "s6", "1 05:30"), ("a", "s7", "1 06:30")),
            ],
        ),
    )[number]
    for name, rows in (("prices", prices), ("rates", rates), ("sales", sales)):
        if rows:
            market.land(name, f"{number}.jsonl", *(record(*row) for row in rows))


WAITING = ("stream_table_join", "no_grace", "corrected_join")
OVER_RUNS = ("stream_table_join", "corrected_join")
"""Nodes whose graphs make several runs; the graphs of all others make one."""


def test_graph_commits_same_as_asset(spark: SparkSession, tmp_path: Path) -> None:
    """A graph and an asset of a stream-table join commit the same rows, order, counts and times, in two
    runs and one without new records. The counts add up, with records that waited before; so do those of
    sources."""
    market = Market(tmp_path, spark)
    bad = FilesSource(str(market.root / "landing" / "sales"), max_bad_share=1.0)
    market.sales = replace(market.sales, source=bad)
    tied = replace(market.prices, name="tied", tie_break="v", new_version_on=["v"])
    stores = results_in_memory(market)
    assets, graphs = every_kind(market, "asset_"), every_kind(market, "graph_")
    seen: list[tuple[int, int, set[str]]] = []

    def look(released: DataFrame, waiting: DataFrame) -> DataFrame:
        outcomes = [row[OUTCOME] for row in released.select(OUTCOME).collect()]
        seen.append((len(outcomes), waiting.count(), {*outcomes}))
        return waiting

    made: list[Any] = [build_asset(market.prices), build_asset(market.sales)]
    for name in OVER_RUNS:
        made.append(graph_of(graphs[f"graph_{name}"], look if name == WAITING[0] else None))
    waited = set[str]()
    for number in range(3):
        if number < 2:
            land(market, number)
            market.land("sales", f"{number}_more.jsonl", record(None, "s", "1 00:00"), "{")
        result = run(made, market.warehouse, instance=market.instance, raise_on_error=True)
        run_once(tied, stores)
        for name in OVER_RUNS:
            node = assets[f"asset_{name}"]
            last = stores(node).head()
            before = 0 if last is None else last.commit.counts.get(Outcome.WAITING, 0)
            commit = run_once(node, stores).commit
            assert (commit is None) == (number == 2)
            if commit is not None:
                assert require_counts_add_up(node, commit, before), name
                waited |= {name} if before else set()
        for node in (market.prices, market.sales, tied):
            head = stores(node).head()
            assert head is not None
            assert require_counts_add_up(node, head.commit), node.name
    assert waited == {*OVER_RUNS}
    for name in OVER_RUNS:
        one, twin = stores(assets[f"asset_{name}"]), market.store(graphs[f"graph_{name}"])
        assert log_of(one) == log_of(twin), name
        assert commit_fields(one) == commit_fields(twin), name
    # s1 is released, s2 and s3 wait; s4 is late; at the end two records still wait.
    assert [one[:2] for one in seen] == [(1, 2), (4, 2), (0, 2)]
    assert seen[1][2] == {"applied", "late"}
    assert not result.get_asset_materialization_events(), "nothing was new"


def require_counts_add_up(node: Stream, commit: Commit, before: int = 0) -> bool:
    """The text of the run must have the numbers of records that came in and that waited before.

    Returns:
        whether the counts have parts; these must then add up.
    """
    counts, counting = commit.counts, processor_of(node).plan().counts
    parts, said = counting.parts(counts), counting.text(counts)
    numbers = [int(n) for n in re.findall(r"(\d+) ", said.partition(";")[0])]
    if not parts:
        assert numbers == [counts["in"]], said
        assert said.startswith(f"{counts['in']} in; {counts['out']} out"), said
        return False
    came = [counts["in"], before] if before else [counts["in"]]
    assert numbers[: len(came)] == came, (node.name, said)
    assert sum(came) == sum(numbers[len(came) :]) == sum(parts.values()), (node.name, said)
    assert (" waiting before = " in said) == bool(before)
    return True


def one_per_op_sequence(nodes: dict[str, Stream]) -> dict[str, Stream]:
    """Picks a node of each sequence of ops and of each operator, and its inputs, but no ``OVER_RUNS``.

    Several operators, or several windows, use the same op function.
    """
    chosen = {steps_of(node): node for node in reversed(nodes.values())}.values()
    kinds = {type(node.operator): node for node in reversed(nodes.values())}.values()
    kept = {up.name for node in (*chosen, *kinds) for up in (node, *node.inputs)}
    kept -= {name for name in kept if name.endswith(OVER_RUNS)}
    return {name: node for name, node in nodes.items() if name in kept}


def test_graph_of_each_operator_equals_plain_run(spark: SparkSession, tmp_path: Path) -> None:
    """A graph commits what a run without Dagster commits, and the counts of that run add up."""
    market = Market(tmp_path, spark)
    land(market, 1)
    stores = results_in_memory(market)
    for source in (market.prices, market.rates, market.sales):
        run_once(source, stores)
    assets, graphs = (one_per_op_sequence(every_kind(market, sign)) for sign in ("asset_", "graph_"))
    summed = set[str]()
    for node in assets.values():
        commit = run_once(node, stores).commit
        assert commit is not None
        summed |= {node.name} if require_counts_add_up(node, commit) else set()
    run(map(graph_of, graphs.values()), market.warehouse, raise_on_error=True)
    for (name, node), twin in zip(assets.items(), graphs.values(), strict=True):
        one, other = stores(node), market.store(twin)
        assert log_of(one) == log_of(other), name
        assert commit_fields(one) == commit_fields(other), name
    everything = every_kind(market, "any_")
    shown = [*graphs.values(), *(everything[f"any_{name}"] for name in OVER_RUNS)]
    assert {type(node.operator) for node in shown} == set(PROCESSORS)
    assert {steps_of(node) for node in shown} == {steps_of(node) for node in everything.values()}
    assert summed == {f"asset_{name}" for name in WAITING} & {*assets}


def test_each_operator_has_an_op(tmp_path: Path) -> None:
    """Each registered operator has a public op with a docstring, which takes only nodes that use it."""
    market = Market(tmp_path, None)  # type: ignore[arg-type]
    nodes = every_kind(market, "")
    assert {k for kinds in KINDS.values() for k in kinds} == {k.__name__ for k in PROCESSORS}
    for word in KINDS:
        op = getattr(ops, f"{word}_op")
        assert f"{word}_op" in ops.__all__
        assert op.__doc__
        assert op.__name__ == f"{word}_op"
        for node in (n for n in nodes.values() if n.operator is not None):
            if f"{word}_op" in steps_of(node):
                made = op(node)
                assert made.name == f"{word}_{node.name}"
                assert made.output_defs[0].dagster_type.unique_name == f"{node.name}_results"
            else:
                with pytest.raises(TopologyError, match=" -> ".join(steps_of(node))):
                    op(node)
    with pytest.raises(TopologyError, match="got the result of an operator; take one of its inputs"):
        ops.read_op(nodes["no_grace"])
    with pytest.raises(TopologyError, match="read it with read_op"):
        ops.filter_op(market.prices)
    with pytest.raises(TopologyError, match=r"no_grace.*got grace_buffer_op"):
        ops.grace_buffer_op(nodes["no_grace"])
    released, waiting = ops.grace_buffer_op(nodes["inner"]).output_defs
    assert (released.name, waiting.name) == ("released", "waiting")
    assert released.dagster_type.unique_name == "sales_considered"


def test_ops_must_not_change_buffer_records(spark: SparkSession, tmp_path: Path) -> None:
    """If an op drops the waiting records, returns the released ones twice, or drops a column, the run
    fails before its commit."""
    market = Market(tmp_path, spark)
    land(market, 0)
    for source in (market.prices, market.sales):
        run_once(source, stores_of(str(market.warehouse), spark))
    changes: dict[str, Callable[[DataFrame, DataFrame], DataFrame]] = {
        "(1 applied)": lambda released, waiting: waiting.limit(0),
        "(2 applied)": lambda released, waiting: released,
        "lacks v": lambda released, waiting: waiting.drop("v"),
    }
    for got, change in changes.items():
        result = run([graph_of(market.priced, change)], market.warehouse)
        assert not result.success
        said = messages(result)
        assert got in said
        assert (
            "correct the op before" in said
            or "pass both outputs of the buffer to the join unchanged" in said
        )
        assert market.store(market.priced).head() is None


def test_graph_replaces_asset(spark: SparkSession, tmp_path: Path) -> None:
    """The graph has the asset's spec, checks and downstream assets. A graph with the key of no node is
    refused."""
    market = Market(tmp_path, spark)
    land(market, 0)
    table = market.priced.to_table(name="last", group="shop")
    graph = graph_of(market.priced)
    plain = build_asset(market.priced).specs_by_key[dg.AssetKey("priced")]
    ours = graph.specs_by_key[dg.AssetKey("priced")]
    for told_of in ("description", "metadata", "kinds", "code_version", "owners", "group_name"):
        assert getattr(ours, told_of) == getattr(plain, told_of), told_of
    assert {d.asset_key for d in ours.deps} == {d.asset_key for d in plain.deps}
    assert plain.metadata["vt_dagster/ops"] == (
        "read_logs_op -> grace_buffer_op -> stream_table_join_op -> write_op"
    )
    spark_resource = vt_dagster.SparkResource(master="local[2]")
    where: Any = {"warehouse": str(market.warehouse), "spark": spark_resource}
    defs = dg.Definitions.merge(
        build_definitions(table, graph_assets=[graph], **where),
        dg.Definitions(executor=dg.in_process_executor),
    )
    result = defs.resolve_implicit_global_asset_job_def().execute_in_process()
    assert result.success
    assert materialized(result, "priced")["records_waiting"] == 2
    assert materialized(result, "last")["records_in"] == 1
    assert "priced:every_record_is_accounted_for" in checks(result)
    (buffer,) = [e for e in result.all_events if e.is_successful_output and "grace" in e.step_key][:1]
    outputs = {
        e.step_output_data.output_name: {k: v.value for k, v in e.step_output_data.metadata.items()}
        for e in result.all_events
        if e.is_successful_output and e.step_key == buffer.step_key
    }
    assert outputs == {"released": {"records_applied": 1}, "waiting": {"records_waiting": 2}}
    with pytest.raises(TopologyError, match=r"priced: expected one graph asset at most for each of"):
        build_definitions(market.rates, graph_assets=[graph], **where)
    with pytest.raises(TopologyError, match="got a second one"):
        build_definitions(market.priced, graph_assets=[graph, graph], **where)


def test_op_is_called_directly(market: Market) -> None:
    """As in a user's test, with a context without a run."""
    resources = build_resources(str(market.warehouse), SparkResource(master="local[2]"))
    with dg.build_op_context(resources=resources) as context:
        records, arrival = ops.read_op(market.prices)(context)
        assert (arrival.empty, records.count()) == (True, 0)
