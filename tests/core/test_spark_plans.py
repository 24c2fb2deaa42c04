"""Spark's plans have no more columns, windows, shuffles and sorts than necessary."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, StringType, StructField, StructType, TimestampType

from vt_dagster.core import stream_table_join, table_store
from vt_dagster.core.arrival_order import by_partition
from vt_dagster.core.as_of_join import JoinStrategy, Tiles
from vt_dagster.core.log_columns import log_schema, view_schema
from vt_dagster.core.processor import Input, RunContext
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.core.source_records import difference
from vt_dagster.core.stream_time import Bounds, Chunk
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.spark.settings import settings
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.operators import UntilWindowCloses
from vt_dagster.topology.windows import SessionWindow, TumblingWindow

SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("price", DoubleType()),
        StructField("grade", StringType()),
        StructField("timestamp", TimestampType()),
    ]
)
ABOUT: dict[str, Any] = {"key": "k", "schema": SCHEMA, "source": FilesSource("nowhere")}
WEEK = timedelta(days=7)


def rates(name: str) -> VersionedTable:
    return VersionedTable(name, history_retention=WEEK, **ABOUT)


def plan(rows: Any) -> str:
    return rows._jdf.queryExecution().executedPlan().toString()


def count(text: str) -> dict[str, int]:
    """The numbers of shuffles, sorts and window functions of a plan."""
    signs = {"shuffles": "Exchange hash", "sorts": "Sort [", "windows": "windowspecdefinition("}
    return {name: text.count(sign) for name, sign in signs.items()}


def results_of(spark: SparkSession, node: Stream, **large: Any) -> DataFrame:
    assert node.operator is not None
    empty = [spark.createDataFrame([], log_schema(one)) for one in node.operator.inputs]
    inputs = [Input(rows, **large) for rows in empty]
    return processor_of(node, single_task=not large).results(inputs, RunContext.nothing())


def test_dump_is_shuffled_and_sorted_once(spark: SparkSession) -> None:
    """One shuffle serves the check for duplicate keys and the join. Only the differing rows are
    shuffled once more, for their order."""
    held = spark.createDataFrame([], "k string, price double")
    dump = spark.createDataFrame(
        [], "k string, price double, _source string, _position bigint, _reason string"
    )
    rows = difference(dump, held, key=["k"], compared=["price"], buckets=4)
    assert count(plan(rows)) == {"shuffles": 3, "sorts": 3, "windows": 3}


@pytest.mark.parametrize("strategy", ["broadcast", Tiles(40, 0, 10**15, 2)], ids=["broadcast", "tiled"])
def test_join_prunes_unused_columns(spark: SparkSession, strategy: JoinStrategy) -> None:
    """Spark prunes fields from the structs of both sides only if all expressions in them are cheap."""
    stream = spark.createDataFrame(
        [], f"{SCHEMA.simpleString()[7:-1]},partition:int,_arrival:bigint,_outcome:string"
    )
    versions = spark.createDataFrame([], view_schema(rates("rates")))
    joined = stream_table_join.join(
        stream,
        versions,
        kind="left",
        stream_key=["k"],
        table_key=["k"],
        columns=[("k", "left.k"), ("doubled", "right.price * 2"), ("since", "right.valid_from")],
        horizon=F.lit(0).cast("timestamp"),
        strategy=strategy,
    )
    chosen: Any = joined.select("k", "doubled", "since")
    text: str = chosen._jdf.queryExecution().optimizedPlan().toString()
    assert "struct(" not in text
    above = [line for line in text.splitlines() if "LogicalRDD" not in line]
    assert not [line for line in above if "grade" in line or "offset" in line], text


def test_table_join_shuffles_by_partition_and_key_only(spark: SparkSession) -> None:
    """The plan shuffles each side by partition, for stream time, and both by key; no more. The store of
    a plain table finds the largest time so far in one pass with the row that a result replaces."""
    sides, select = (rates("left"), rates("right")), ["left.*", "right.price as other"]
    once = plan(results_of(spark, sides[0].join(sides[1], name="b", select=select, emit="per_run")))
    each = plan(results_of(spark, sides[0].join(sides[1], name="b", select=select)))
    assert count(once) == {"shuffles": 3, "sorts": 3, "windows": 8}
    assert count(each) == {"shuffles": 3, "sorts": 3, "windows": 6}
    assert (once.count("- Window ["), each.count("- Window [")) == (6, 4)


def test_large_join_per_run_shuffles_last_changes_by_key(spark: SparkSession) -> None:
    joined = rates("left").join(
        rates("right"), name="both", select=["left.*", "right.price as other"], emit="per_run"
    )
    chosen = plan(results_of(spark, joined, few_keys=True))
    assert chosen.count("BroadcastHashJoin [_on0") == 2


def test_large_foreign_key_join_shuffles_left_by_key_only(spark: SparkSession) -> None:
    """The other shuffles are by chunks of each side, for stream time, and of the few right changes by
    their key."""
    rated = rates("left").left_join(
        rates("right"), foreign_key="grade", name="rated", select=["left.*", "right.price as other"]
    )
    chosen = plan(results_of(spark, rated, broadcastable=True, most_of_key=1))
    by = {key: chosen.count(f"Exchange hashpartitioning({key}#") for key in ("_left0", "k", "_on0")}
    # Twice: before a key's first change, and from each change on.
    assert by == {"_left0": 1, "k": 2, "_on0": 0}
    assert "LeftOuter, BuildRight" in chosen


def test_history_join_reads_each_history_once(spark: SparkSession) -> None:
    """The join finds begins and ends of versions in one pass over each history."""
    joined = rates("left").join(rates("right"), name="both", history="complete", select=["left.*"])
    assert joined.operator is not None
    sides = [(log_schema(one), view_schema(one)) for one in joined.operator.inputs]
    inputs = [Input(*(spark.createDataFrame([], kind) for kind in both)) for both in sides]
    told = plan(processor_of(joined, single_task=True).results(inputs, RunContext.nothing()))
    assert told.count("LeftSemi") == 2


@pytest.mark.parametrize("about", [{"grace": WEEK}, {"grace": timedelta(0), "corrected_for": WEEK}])
def test_left_stream_join_finds_unmatched_records_once(
    spark: SparkSession, about: dict[str, Any]
) -> None:
    """One anti-join finds the records to emit and those that wait, also in a run of many records, where
    their chunks by time are found first."""
    orders, payments = (Stream(name, **ABOUT) for name in ("orders", "payments"))
    paid = orders.left_join(
        payments, name="paid", within=timedelta(hours=1), select=["left.*"], **about
    )
    assert plan(results_of(spark, paid, few_keys=False)).count("LeftAnti") == 1


def test_versioned_put_computes_each_window_once(spark: SparkSession) -> None:
    """A versioned put needs three windows: stream time, newest time so far, replaced row."""
    table = rates("rates")
    names = "partition:int,_arrival:bigint,is_tombstone:boolean,_outcome:string"
    records = spark.createDataFrame([], f"{SCHEMA.simpleString()[7:-1]},{names}")
    put = processor_of(table, single_task=True).results([Input(records)], RunContext.nothing())
    assert count(plan(put)) == {"shuffles": 2, "sorts": 2, "windows": 3}


def test_partial_updates_add_two_sorts_by_key(spark: SparkSession) -> None:
    """Spark recomputes a frame that ends with the key for each row. A key of 100,000 records would take
    hours, so one sort is descending."""
    table = VersionedTable("rates", history_retention=WEEK, **ABOUT, only_columns=["price"])
    names = "partition:int,_arrival:bigint,is_tombstone:boolean,_outcome:string"
    names += ",provided_columns:array<string>"
    records = spark.createDataFrame([], f"{SCHEMA.simpleString()[7:-1]},{names}")
    put = plan(processor_of(table, single_task=True).results([Input(records)], RunContext.nothing()))
    assert count(put) == {"shuffles": 3, "sorts": 4, "windows": 4}
    frames = set(re.findall(r"specifiedwindowframe\(\w+, ([^,]+), ([^)]+)", put))
    assert not [begin for begin, end in frames if "following" in end and "preceding" not in begin]
    # The ties of both columns are found in one sort.
    table = replace(table, tie_break="price")
    put = plan(processor_of(table, single_task=True).results([Input(records)], RunContext.nothing()))
    assert count(put) == {"shuffles": 4, "sorts": 5, "windows": 6}


def test_sessions_are_sorted_by_key_once(spark: SparkSession) -> None:
    """Sessions sort by partition for stream time, by key, and by key and session for their store. With
    bounds of stream time, they do not sort by partition."""
    window = SessionWindow(timedelta(hours=1))
    sessions = Stream("orders", **ABOUT).group_by().windowed_by(window).count(name="sessions")
    of_few = plan(results_of(spark, sessions))
    assert count(of_few) == {"shuffles": 3, "sorts": 3, "windows": 4}
    assert sessions.operator is not None
    inputs = [Input(spark.createDataFrame([], log_schema(sessions.operator.inputs[0])))]
    bounds = Bounds([Chunk(0, 0, None, 1, 1, 1, 1.0, exact=False)])
    bounds = replace(bounds, frame=spark.createDataFrame(*bounds.rows))
    context = replace(RunContext.nothing(), bounds=bounds)
    of_many = plan(processor_of(sessions).results(inputs, context))
    assert count(of_many) == {"shuffles": 2, "sorts": 2, "windows": 3}


def test_last_update_needs_one_sort(spark: SparkSession) -> None:
    """For ``row_number() = 1``, Spark would also sort before the shuffle."""
    stream = Stream("orders", **ABOUT)
    hourly = (
        stream.group_by()
        .windowed_by(TumblingWindow(timedelta(hours=1)))
        .aggregate({"n": "count(*)"}, name="hourly")
    )
    final = plan(results_of(spark, hourly.suppress(UntilWindowCloses(), name="final")))
    assert (count(final)["shuffles"], "WindowGroupLimit" in final) == (1, False)
    plain = Table("plain", **ABOUT)
    folded = plan(
        table_store.fold(plain, None, spark.createDataFrame([], log_schema(plain)), by_partition({}))
    )
    assert count(folded) == {"shuffles": 1, "sorts": 1, "windows": 1}


def test_view_of_few_keys_sorts_only_last_rows(spark: SparkSession) -> None:
    plain = Table("plain", **ABOUT)
    log = spark.createDataFrame([], log_schema(plain))
    current = table_store.fold(plain, None, log, by_partition({}), few_keys=True)
    assert current.columns == [name for name in log.columns if name not in ("is_latest", "old")]
    folded = plan(current)
    assert count(folded) == {"shuffles": 2, "sorts": 1, "windows": 1}
    assert "BroadcastHashJoin" in folded
    assert "SortAggregate" not in folded


def test_sums_of_doubles_meet_their_state_once(spark: SparkSession) -> None:
    """The state of the groups is joined before the window that sums, and its rows stay in order for the
    window that finds the last update."""
    prices = Table("prices", **ABOUT)
    node = prices.group_by("grade").aggregate({"total": "sum(price)"}, name="totals")
    processor = processor_of(node, single_task=True)
    inputs = [Input(spark.createDataFrame([], log_schema(prices)))]
    ordered, nothing = processor.in_order(inputs), RunContext.nothing()
    state = processor.state_after(processor.process(ordered, inputs, nothing), nothing)
    assert state is not None
    context = replace(nothing, state=spark.createDataFrame([], state.schema))
    with settings(spark, {"spark.sql.autoBroadcastJoinThreshold": "-1"}):
        found = plan(processor.process(ordered, inputs, context))
    assert found.count("SortMergeJoin") == 1
    assert {**count(found), "windows": None} == {"shuffles": 3, "sorts": 4, "windows": None}
