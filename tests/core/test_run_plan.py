"""The steps of a run of each operator, checked in its plan alone."""

from datetime import timedelta

import pytest
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

from tests import full_topology
from vt_dagster import Stream, VersionedTable
from vt_dagster.core.processor import RunPlan, RunTimes
from vt_dagster.core.processor_registry import PROCESSORS, processor_of

SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("n", IntegerType()),
        StructField("timestamp", TimestampType()),
    ]
)
MS = timedelta(milliseconds=1)
MILLI = 1000
"""A millisecond in microseconds, the unit of a plan's times."""

STREAM = Stream("orders", key="k", schema=SCHEMA)
OTHER = Stream("payments", key="k", schema=SCHEMA)
TABLE = VersionedTable("rates", key="k", schema=SCHEMA, history_retention=1000 * MS)


def plan_of(node: Stream, times: RunTimes = RunTimes()) -> RunPlan:  # noqa: B008
    return processor_of(node).plan(times)


def test_each_operator_has_a_plan_without_spark() -> None:
    sources = full_topology.sources()
    nodes = full_topology.operators(sources)
    assert {type(node.operator) for node in nodes} == {*PROCESSORS}
    for node in [*sources.values(), *nodes]:
        plan = plan_of(node)
        assert {up.name for up in plan.consumed} <= {up.name for up in node.inputs}
        assert [one.rescan_from for one in plan.inputs] == [None] * len(plan.inputs)
        assert {"in", "late"} <= {*plan.counts.shown}


@pytest.mark.parametrize(("emitted", "again"), [(60, 60), (100, None), (None, None)])
def test_join_rescans_from_waiting_records(emitted: int | None, again: int | None) -> None:
    node = STREAM.left_join(TABLE, name="priced", select=["left.*"], grace_period=40 * MS)
    done = {} if emitted is None else {0: emitted}
    plan = plan_of(node, RunTimes(stream_time={0: 100}, emitted_up_to=done))
    assert [(one.node, one.rescan_from) for one in plan.inputs] == [(STREAM, again)]
    assert (plan.looked_up, plan.reads_own_table) == (TABLE, False)


def test_corrected_join_rescans_from_oldest_table_change() -> None:
    node = STREAM.left_join(TABLE, name="priced", select=["left.*"], corrected_for=90 * MS)
    quiet = plan_of(node, RunTimes(stream_time={0: 100}, emitted_up_to={0: 100}))
    assert [one.rescan_from for one in quiet.inputs] == [None, None]
    assert (quiet.corrects_after, quiet.reads_own_table) == (None, False)
    changed = {"changed": {0: 70, 1: 50}}
    plan = plan_of(node, RunTimes(stream_time={0: 100}, emitted_up_to={0: 100}, advanced=changed))
    assert [one.rescan_from for one in plan.inputs] == [49, 49]
    assert (plan.corrects_after, plan.reads_own_table) == (49, True)


def test_corrected_forward_join_rescans_from_before_table_change() -> None:
    """The run re-reads records up to ``max_age`` before the change, and versions up to ``max_age``
    before these records."""
    node = STREAM.left_join(
        TABLE, name="priced", select=["left.*"], at="nearest", max_age=3 * MS, corrected_for=90 * MS
    )
    plan = plan_of(node, RunTimes(advanced={"changed": {0: 70 * MILLI, 1: 50 * MILLI}}))
    assert [one.rescan_from for one in plan.inputs] == [47 * MILLI - 1, 44 * MILLI - 1]
    assert plan.corrects_after == 47 * MILLI - 1


def test_stream_join_rescans_each_side_within_match_range() -> None:
    node = STREAM.left_join(OTHER, name="paid", before=3 * MS, after=7 * MS, grace=20 * MS)
    plan = plan_of(node, RunTimes(stream_time={0: 100 * MILLI, 1: 500 * MILLI}))
    assert [one.rescan_from for one in plan.inputs] == [73 * MILLI - 1, 77 * MILLI - 1]


def test_log_of_both_sides_is_read_from_earlier_offset() -> None:
    node = STREAM.left_join(STREAM, name="near", before=3 * MS, after=7 * MS, grace=20 * MS)
    plan = plan_of(node, RunTimes(stream_time={0: 100 * MILLI}))
    assert plan.rescan_from("orders") == 73 * MILLI - 1
    assert plan.rescan_from("payments") is None
