"""Each rule is shown by a recorded scenario or by a test, and is described in the documentation."""

from __future__ import annotations

import re
import sys
from datetime import timedelta
from typing import Any

import pytest
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

from tests.test_layers import CONFORMANCE, ROOT
from vt_dagster import (
    FilesSource,
    SnapshotSource,
    Stream,
    TumblingWindow,
    UntilWindowCloses,
    VersionedTable,
)
from vt_dagster.conformance.scenario import read_scenarios
from vt_dagster.core.arrival_order import Outcome
from vt_dagster.core.source_records import Reason
from vt_dagster.orchestration.metadata import definition_metadata
from vt_dagster.rules import METRICS, RULES, Rule

sys.path.insert(0, str(ROOT / "docs" / "_made"))
import tables  # pyright: ignore[reportMissingImports]

SHOWN = {
    "applied": "kip889-validity-interval",
    "late": "kip889-grace-rejects-old-writes",
    "duplicate": "test_value_is_remembered_for_within",
    "lost_tie": "test_tie_break_is_independent_of_arrival_order",
    "carried": "test_late_value_carries_into_later_versions",
    "unknown_columns": "test_record_with_unknown_columns_is_quarantined",
    "covered": "test_snapshot_then_changes",
    "nothing_new": "test_debezium_deletions",
    "waiting": "kip923-probe-left-in-buffer",
    "dropped": "kip914-probe-stream-join-nulls-inner-versioned",
    "no_result": "kip914-filter-unversioned",
    "again": "test_rows_follow_table_corrections",
    "too_late": "test_no_correction_after_corrected_for",
    "change": "test_rows_follow_table_corrections",
    "kept": "kip328-final-results",
    "quarantined": "test_each_reason_has_source_position_and_content",
    "unreadable": "test_each_reason_has_source_position_and_content",
    "unreadable_file": "test_unreadable_file_fails_run_or_is_quarantined",
    "unknown_schema": "test_avro_with_registry",
    "null_recorded_at": "test_rows_are_recorded_at_column_time",
    "future_recorded_at": "test_rows_are_recorded_at_column_time",
    "null_key": "kip889-probe-null-key",
    "null_timestamp": "test_each_reason_has_source_position_and_content",
    "future_timestamp": "test_each_reason_has_source_position_and_content",
    "impossible_timestamp": "test_failing_expression_quarantines_record",
    "null_partition": "test_failing_expression_quarantines_record",
    "null_tombstone": "test_failing_expression_quarantines_record",
    "broken_contract": "test_rows_failing_check_are_quarantined",
    "duplicate_key": "test_bad_dump_rows_are_quarantined",
    "out_of_order": "kip914-aggregate-count-versioned",
    "triggered": "test_named_records_alone_give_row",
    "replaced": "kip889-put-replaces-same-timestamp",
    "repeated": "test_explain_repeated_record",
    "as_of": "kip889-validity-interval",
    "next": "test_explain_on_delta",
    "nearest": "test_explain_on_delta",
    "first_version": "test_explain_on_delta",
    "other_time": "kip889-validity-interval",
    "recorded_since": "test_explain_late_table_record",
    "latest": "kip889-motivation-unversioned",
    "no_match": "kip914-probe-stream-join-nulls-left-versioned",
    "matched": "stream-join-asymmetric-bounds",
    "too_old": "test_explain_version_beyond_max_age",
    "deleted": "kip914-probe-tombstones-left-versioned",
    "ended": "test_explain_ended_version",
    "horizon": "kip914-expired-lookup-left",
    "expired": "kip889-expired-get",
    "released": "kip923-dequeue-boundary",
    "window_closed": "kip328-grace-boundary",
    "suppressed": "kip328-window-final-once",
    "corrected": "test_explain_late_table_record",
}
"""For each rule, the name of a scenario recorded from Kafka Streams, or of a test."""


def test_each_rule_is_shown() -> None:
    scenarios = {s.name for s in read_scenarios([CONFORMANCE])}
    tests = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert set(SHOWN) == set(RULES)
    assert set(SHOWN.values()) - scenarios - tests == set()


@pytest.mark.parametrize("names", [Outcome, Reason])
def test_outcomes_and_reasons_are_rules(names: type) -> None:
    told = {value for name, value in vars(names).items() if name.isupper()}
    assert told
    assert told <= set(RULES)


@pytest.mark.parametrize("rule", RULES.values(), ids=str)
def test_documentation_describes_each_rule(rule: Rule) -> None:
    assert f"| `{rule.name}` | {rule.description} |" in tables.rules()
    page = (ROOT / "docs" / "reference" / "rules.md").read_text(encoding="utf-8")
    assert "<!-- made: rules -->" in page


def test_metrics_are_described_by_rules() -> None:
    """If a number of a materialization counts what a rule decided, its description is the rule's."""
    kinds = {"k": StringType(), "n": IntegerType(), "timestamp": TimestampType()}
    values = StructType([StructField(name, kind) for name, kind in kinds.items()])
    about: dict[str, Any] = {"key": "k", "schema": values}
    orders = Stream("orders", **about, unique_by="n", within=timedelta(days=1))
    hourly = (
        orders.group_by()
        .windowed_by(TumblingWindow(timedelta(hours=1)))
        .aggregate({"orders": "count(*)"}, name="hourly")
    )
    sources = {"source": FilesSource("rates"), "start": SnapshotSource("dump", dump_time="modified")}
    rates = VersionedTable(
        "rates", **about, history_retention=timedelta(days=1), tie_break="n", **sources
    )
    parts = VersionedTable(
        "parts", **about, history_retention=timedelta(days=1), ignore_null_updates=True
    )
    joined = orders.left_join(
        rates, name="joined", select=["left.*", "right.n as rate"], corrected_for=timedelta(hours=1)
    )
    final = hourly.suppress(UntilWindowCloses(), name="final")
    dumps = VersionedTable(
        "dumps",
        **about,
        history_retention=timedelta(days=1),
        source=SnapshotSource("dumps", dump_time="modified"),
    )
    told = {
        node.name: str(definition_metadata(node)["vt_dagster/numbers"].md_str)
        for node in (orders, hourly, rates, parts, dumps, joined, final)
    }
    told = {name: set(re.findall(r"- `(\w+)`: (.+)", text)) for name, text in told.items()}
    every = set().union(*told.values())
    assert every == {(name, METRICS[name].description) for name, _ in every}
    assert {name for name, _ in every} == set(METRICS)
    closed, released = RULES["window_closed"].description, RULES["released"].description
    assert ("late_records_dropped", closed) in told["hourly"] - told["final"]
    assert ("suppression_emit", released) in told["final"] - told["hourly"]
