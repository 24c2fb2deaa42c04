"""Explanations of logs that the tests write without Spark, in the format that runs write."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from tests.log_writer import LogWriter
from vt_dagster import rules
from vt_dagster.provenance.explain import explain
from vt_dagster.topology.specification import ColumnSpec, StreamStreamJoinSpec


def test_streams_with_shared_column_names(tmp_path: Path) -> None:
    """``right.*`` omits the columns that the left side has, so the row has the left record's value."""
    LogWriter(tmp_path, "orders", kind="stream").run([("a", "of the order", 1)], recorded=2)
    LogWriter(tmp_path, "payments", kind="stream").run([("a", "of the payment", 3)], recorded=4)
    join = StreamStreamJoinSpec(
        left="orders",
        right="payments",
        kind="inner",
        select=(ColumnSpec("*", "left.*"), ColumnSpec("*", "right.*")),
        before=timedelta(0),
        after=timedelta(hours=1),
    )
    logs = {name: f"log of {name}" for name in ("orders", "payments")}
    pairs = LogWriter(tmp_path, "pairs", kind="stream", made_by=join, logs=logs)
    pairs.run([("a", "of the order", 3)], recorded=5)
    found = explain("pairs", key="a", warehouse=str(tmp_path))
    assert found.operator == "stream_stream_join"
    assert [str(one.record) for one in found.made_of] == ["orders 0:0", "payments 0:0"]
    assert rules.MATCHED.name in found.rules
