"""Explanations of logs that the tests write without Spark, in the format that runs write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, write_deltalake

from tests.log_writer import MICROS, LogWriter, document, moment
from vt_dagster import rules
from vt_dagster.provenance.explain import explain
from vt_dagster.provenance.explain_request import Explanation
from vt_dagster.topology.specification import (
    ColumnSpec,
    Specification,
    StreamStreamJoinSpec,
    TableAggregateSpec,
)

_TIME = pa.timestamp("us", "UTC")
_MINUTE = 60_000_000


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


def write(
    log: Path,
    types: Mapping[str, Any],
    batch: int,
    end: int,
    rows: Sequence[tuple[int, float, Mapping[str, Any]]],
    *,
    kind: str = "stream",
    key: Sequence[str] = ("k",),
    made_by: Specification | None = None,
    inputs: Mapping[str, int] | None = None,
    **more: Any,
) -> None:
    """Writes a commit, recorded at the minute of its batch.

    Args:
        types: the types of the user's columns.
        end: the next offset.
        rows: the rows as (offset, minute, values); values of None = a tombstone.
        inputs: the end offset in each input.
        more: further fields of the commit.
    """
    logs, recorded = {name: f"log of {name}" for name in inputs or ()}, MICROS + batch * _MINUTE
    said = document(log.name, batch, recorded, {0: end}, {}, kind=kind, made_by=made_by, logs=logs)
    said["shape"] |= {"key": [*key], "columns": [*types]}
    said["inputs"] = {name: {0: until} for name, until in (inputs or {}).items()}
    said["taken"] = {name: {0: (0, until)} for name, until in (inputs or {}).items()}
    found = [
        {
            **values,
            "timestamp": moment(minute),
            "partition": 0,
            "offset": offset,
            "is_tombstone": all(values[c] is None for c in values if c not in key),
            "is_latest": True,
            "recorded_at": moment(batch),
        }
        for offset, minute, values in rows
    ]
    ours = {"timestamp": _TIME, "partition": pa.int32(), "offset": pa.int64()}
    ours |= {"is_tombstone": pa.bool_(), "is_latest": pa.bool_(), "recorded_at": _TIME}
    told = json.dumps({"vt_dagster": said | more})
    write_deltalake(
        str(log / "log"),
        pa.Table.from_pylist(found, pa.schema([*types.items(), *ours.items()])),
        mode="append",
        commit_properties=CommitProperties(custom_metadata={"userMetadata": told}),
    )


def cut(end: int, minute: float) -> dict[str, Any]:
    """The field of a commit after a truncation of the records before an offset, up to a time."""
    found = {"batch": 1, "recorded_at": MICROS + _MINUTE, "next_offset": {0: end}, "base": ""}
    return {
        "truncation": found | {"stream_time": {0: MICROS + round(minute * _MINUTE)}, "log_retention": 0}
    }


def told(warehouse: Path, name: str, offset: int) -> tuple[Explanation, list[str], str]:
    """Returns a record's explanation, its inputs, and its notes."""
    found = explain(name, offset=(0, offset), warehouse=str(warehouse))
    return found, [str(one.record) for one in found.made_of], " ".join(found.notes)


_VALUES = {"k": pa.string(), "v": pa.string()}


def test_erased_record_of_another_group_changes_no_explanation(tmp_path: Path) -> None:
    old = pa.struct([("v", pa.string()), ("timestamp", _TIME)])
    values = _VALUES | {"old": old}

    def row(key: str, value: str, before: str | None = None) -> dict[str, Any]:
        was = None if before is None else {"v": before, "timestamp": moment(0)}
        return {"k": key, "v": value, "old": was}

    rates = tmp_path / "rates"
    write(rates, values, 1, 2, [(0, 0, row("a", "x")), (1, 1, row("a", "y", "x"))], kind="table")
    erased = {"erased": {0: 1}, "erased_before": {0: 4}}
    write(rates, values, 2, 4, [(2, 5, row("b", "x"))], kind="table", **erased)
    operator = TableAggregateSpec(
        source="rates", group_key=(ColumnSpec("g", "v"),), aggregates=(ColumnSpec("n", "count(*)"),)
    )
    counts = {"g": pa.string(), "n": pa.int64(), "old": pa.struct([("n", pa.int64())])}
    about: dict[str, Any] = {"kind": "table", "key": ("g",), "made_by": operator}

    def count(offset: int, minute: int, group: str, number: int) -> tuple[int, int, dict[str, Any]]:
        return offset, minute, {"g": group, "n": number, "old": None}

    first = [count(0, 0, "x", 1), count(1, 1, "x", 0), count(2, 1, "y", 1)]
    write(tmp_path / "sizes", counts, 1, 3, first, inputs={"rates": 2}, **about)
    second = [count(3, 5, "x", 1), count(4, 6, "z", 1)]
    write(tmp_path / "sizes", counts, 2, 5, second, inputs={"rates": 4}, **about)
    found, made_of, _ = told(tmp_path, "sizes", 3)
    assert (made_of, found.rules[0], found.notes) == (["rates 0:2"], "triggered", ())
