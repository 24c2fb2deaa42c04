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
from vt_dagster.provenance.explain_request import Explanation, Log
from vt_dagster.topology.specification import (
    ColumnSpec,
    MapValuesSpec,
    SessionWindowSpec,
    Specification,
    StreamAggregateSpec,
    StreamStreamJoinSpec,
    TableAggregateSpec,
    TumblingWindowSpec,
    WindowedAggregateSpec,
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


def test_table_of_the_same_name_with_another_prefix(tmp_path: Path) -> None:
    """A table that a run only looked up is the one whose rows it read, also if another one with its
    name is beside the asset."""
    for place in ("fx", "shop"):
        write(tmp_path / place / "rates", _VALUES, 1, 0, [], kind="table", log=f"log of {place}")
    write(tmp_path / "shop" / "priced", _VALUES, 1, 0, [], read_logs={"rates": "log of fx"})
    found = Log.open(str(tmp_path), "shop/priced").input("rates")
    assert found is not None
    assert found.name == "fx/rates"
    write(tmp_path / "shop" / "dear", _VALUES, 1, 0, [], read_logs={"rates": "another"})
    found = Log.open(str(tmp_path), "shop/dear").input("rates")
    assert found is not None
    assert found.name == "shop/rates"


def write(
    log: Path,
    /,
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
        inputs: the end offset in each input, of both of its partitions.
        more: further fields of the commit.
    """
    logs, recorded = {name: f"log of {name}" for name in inputs or ()}, MICROS + batch * _MINUTE
    said = document(log.name, batch, recorded, {0: end}, {}, kind=kind, made_by=made_by, logs=logs)
    said["shape"] |= {"key": [*key], "columns": [*types]}
    said["inputs"] = {name: {0: until, 1: until} for name, until in (inputs or {}).items()}
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


def cut(end: int, minute: float, partition: int = 0) -> dict[str, Any]:
    """The field of a commit after a truncation of the records before an offset, up to a time."""
    found = {"batch": 1, "recorded_at": MICROS + _MINUTE, "next_offset": {partition: end}, "base": ""}
    until = {partition: MICROS + round(minute * _MINUTE)}
    return {"truncation": found | {"stream_time": until, "log_retention": 0}}


def by_value(
    window: TumblingWindowSpec | SessionWindowSpec,
) -> tuple[WindowedAggregateSpec, tuple[str, ...], dict[str, pa.DataType]]:
    """Counts the records of ``s`` by a new key, their value. Returns the specification, the key of its
    rows, and the types of their columns."""
    counted = WindowedAggregateSpec(
        source="s",
        group_key=(ColumnSpec("g", "v"),),
        aggregates=(ColumnSpec("n", "count(*)"),),
        window=window,
    )
    types = {"g": pa.string(), "window_start": _TIME, "window_end": _TIME, "n": pa.int64()}
    return counted, ("g", "window_start", "window_end"), types


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


def test_session_whose_results_a_truncation_kept(tmp_path: Path) -> None:
    """The number of a record in its session is known if only results of earlier sessions are gone."""
    for batch, minute in enumerate((0, 100, 102), 1):
        offset = batch - 1
        write(tmp_path / "c", _VALUES, batch, batch, [(offset, minute, {"k": "a", "v": "1"})])
    window = SessionWindowSpec(gap=timedelta(minutes=5), grace=timedelta(0))
    sums = WindowedAggregateSpec(source="c", aggregates=(ColumnSpec("s", "sum(v)"),), window=window)
    key = ("k", "window_start", "window_end")
    types = {"k": pa.string(), "window_start": _TIME, "window_end": _TIME, "s": pa.int64()}

    def row(offset: int, start: int, end: int, value: int | None) -> tuple[int, int, dict[str, Any]]:
        bounds = {"window_start": moment(start), "window_end": moment(end)}
        return offset, end, {"k": "a", **bounds, "s": value}

    results = [[], [row(1, 100, 100, 1)], [row(2, 100, 100, None), row(3, 100, 102, 2)]]
    for name, until in (("apart", 0), ("near", 100)):
        for batch, (end, rows) in enumerate(zip((1, 2, 4), results, strict=True), 1):
            truncated = cut(1, until) if batch == 3 else {}
            about: dict[str, Any] = {"kind": "table", "key": key, "made_by": sums, **truncated}
            write(tmp_path / name, types, batch, end, rows, inputs={"c": batch}, **about)
        found, made_of, notes = told(tmp_path, name, 3)
        assert made_of == ["c 0:1", "c 0:2"]
        told_number = "record number 2 of its session" in found.decisions[0].because
        assert told_number == (name == "apart")
        assert ("results of near are gone: its log was truncated" in notes) == (name == "near")


def test_map_values_of_a_truncated_record(tmp_path: Path) -> None:
    """Another record of its key and time is not named as the input of a result."""
    write(tmp_path / "s", _VALUES, 2, 2, [(1, 5, {"k": "a", "v": "2"})], **cut(1, 5))
    shout = MapValuesSpec(source="s", select=(ColumnSpec("w", "concat(v, '!')"),))
    rows = [(place, 5, {"k": "a", "w": f"{place + 1}!"}) for place in range(2)]
    types = {"k": pa.string(), "w": pa.string()}
    write(tmp_path / "m", types, 1, 2, rows, made_by=shout, inputs={"s": 2})
    _, made_of, notes = told(tmp_path, "m", 0)
    assert made_of == []
    assert "records of s that its run consumed are gone: its log was truncated" in notes
    # Neither another partition's records nor older ones matter.
    kept = [(place, 5, {"k": "a", "v": str(place)}) for place in range(2)]
    for name, truncated in (("other", cut(1, 5, partition=1)), ("older", cut(2, 4))):
        first = 2 * (name == "older")
        there = [(first + place, *rest) for place, *rest in kept]
        write(tmp_path / name, _VALUES, 2, first + 2, there, **truncated)
        again = shout.model_copy(update={"source": name})
        end = {name: first + 2}
        write(tmp_path / f"of_{name}", types, 1, 2, rows, made_by=again, inputs=end)
        found, made_of, _ = told(tmp_path, f"of_{name}", 0)
        assert (made_of, found.notes) == ([f"{name} 0:{first}"], ())


def test_match_that_was_truncated(tmp_path: Path) -> None:
    """A row of a left join is not called one without a match if the other side's records are gone."""
    write(tmp_path / "o", _VALUES, 2, 1, [(0, 5, {"k": "a", "v": "o"})])
    write(tmp_path / "p", _VALUES, 2, 1, [], **cut(1, 5))
    hour = timedelta(hours=1)
    join = StreamStreamJoinSpec(
        left="o", right="p", kind="left", select=(ColumnSpec("v", "left.v"),), before=hour, after=hour
    )
    rows = [(0, 5, {"k": "a", "v": "o"})]
    write(tmp_path / "j", _VALUES, 1, 1, rows, made_by=join, inputs={"o": 1, "p": 1})
    found, made_of, notes = told(tmp_path, "j", 0)
    assert (made_of, found.rules) == (["o 0:0"], ()), notes
    assert "whether it had a match is not known" in notes
    # Of a join with itself, the records of one log are gone.
    own = StreamStreamJoinSpec(
        left="p", right="p", kind="inner", select=(ColumnSpec("v", "left.v"),), before=hour, after=hour
    )
    write(tmp_path / "own", _VALUES, 1, 1, rows, made_by=own, inputs={"p": 1})
    found, _, _ = told(tmp_path, "own", 0)
    assert len(found.notes) == 2, found.notes


def test_equal_match_that_was_truncated(tmp_path: Path) -> None:
    """Of two equal results, one may be of records that are gone."""
    write(tmp_path / "o", _VALUES, 2, 1, [(0, 5, {"k": "a", "v": "o"})])
    write(tmp_path / "p", _VALUES, 2, 2, [(1, 4, {"k": "a", "v": "p"})], **cut(1, 5))
    hour = timedelta(hours=1)
    join = StreamStreamJoinSpec(
        left="o", right="p", kind="inner", select=(ColumnSpec("v", "left.v"),), before=hour, after=hour
    )
    rows = [(place, 5, {"k": "a", "v": "o"}) for place in range(2)]
    write(tmp_path / "j", _VALUES, 1, 2, rows, made_by=join, inputs={"o": 1, "p": 2})
    found, made_of, notes = told(tmp_path, "j", 0)
    assert (made_of, found.rules) == ([], ())
    assert "its run has equal results" in notes


def test_number_of_a_record_in_a_truncated_group(tmp_path: Path) -> None:
    """The note that earlier records are gone does not depend on whether the trigger is known. Records
    after the trigger are not named."""
    rows = [(place, place, {"k": "a", "v": "1"}) for place in (1, 2, 3)]
    write(tmp_path / "s", _VALUES, 2, 4, rows, **cut(1, 0))
    counted = StreamAggregateSpec(source="s", aggregates=(ColumnSpec("n", "count(*)"),))
    types = {"k": pa.string(), "n": pa.int64()}
    about: dict[str, Any] = {"kind": "table", "made_by": counted}
    write(tmp_path / "c", types, 1, 1, [(0, 0, {"k": "a", "n": 1})], inputs={"s": 1}, **about)
    results = [(place, place, {"k": "a", "n": place + 1}) for place in (1, 3)]
    write(tmp_path / "c", types, 2, 4, results, inputs={"s": 4}, **about)
    found, _, notes = told(tmp_path, "c", 1)
    assert rules.TRIGGERED.name not in found.rules
    assert "records of s that earlier runs consumed are gone: its log was truncated" in notes


def test_group_by_a_new_key_of_erased_records(tmp_path: Path) -> None:
    """An erase removes records of several groups by a new key. So the record's number in its group is
    not known, nor which record of a run is the last one."""
    rows = [(place, place, {"k": "b", "v": "x"}) for place in (1, 3)]
    erased = {"erased": {0: 3}, "erased_before": {0: 5}}
    write(tmp_path / "s", _VALUES, 1, 5, rows, **erased)
    new_key = (ColumnSpec("g", "v"),)
    aggregates = (ColumnSpec("n", "count(*)"),)
    each = StreamAggregateSpec(source="s", group_key=new_key, aggregates=aggregates)
    last = each.model_copy(update={"emit": "per_run"})
    types = {"g": pa.string(), "n": pa.int64()}

    def count(offset: int, number: int) -> tuple[int, int, dict[str, Any]]:
        return offset, number - 1, {"g": "x", "n": number}

    about: dict[str, Any] = {"kind": "table", "key": ("g",)}
    for name, by in (("each", each), ("last", last)):
        write(tmp_path / name, types, 1, 1, [count(0, 1)], inputs={"s": 1}, made_by=by, **about)
    write(tmp_path / "each", types, 2, 2, [count(1, 2)], inputs={"s": 2}, made_by=each, **about)
    write(tmp_path / "last", types, 2, 2, [count(1, 4)], inputs={"s": 4}, made_by=last, **about)
    write(tmp_path / "last", types, 3, 3, [count(2, 5)], inputs={"s": 5}, made_by=last, **about)
    found, made_of, notes = told(tmp_path, "each", 1)
    assert (made_of, found.rules[0]) == (["s 0:1"], rules.TRIGGERED.name)
    assert "record number" not in found.decisions[0].because
    assert notes == "records of s were erased: which of them its group had is not known"
    found, made_of, notes = told(tmp_path, "last", 1)
    assert made_of == ["s 0:1", "s 0:3"]
    assert rules.TRIGGERED.name not in found.rules
    assert "its run consumed were erased: which one triggered it is not known" in notes


def test_windows_by_a_new_key_of_erased_records(tmp_path: Path) -> None:
    """The number of a record is that of the window's own count."""
    erased = {"erased": {0: 2}, "erased_before": {0: 4}}
    rows = [(place, place, {"k": "b", "v": "x"}) for place in (1, 2)]
    write(tmp_path / "s", _VALUES, 1, 4, rows, **erased)
    hours = TumblingWindowSpec(size=timedelta(hours=1), grace=timedelta(0))
    counted, key, types = by_value(hours)
    about: dict[str, Any] = {"kind": "table", "key": key, "made_by": counted}
    for batch, end in enumerate((2, 3, 4), 1):
        made = [place for place in range(end) if place >= end - 1 or batch == 1]
        some = [
            (n, n, {"g": "x", "window_start": moment(0), "window_end": moment(60), "n": n + 1})
            for n in made
        ]
        write(tmp_path / "w", types, batch, end, some, inputs={"s": end}, **about)
    found, made_of, _ = told(tmp_path, "w", 2)
    assert made_of == ["s 0:1", "s 0:2"]
    assert "s 0:2, record number 3 of its window" in found.decisions[0].because
    found, _, notes = told(tmp_path, "w", 3)
    assert rules.TRIGGERED.name not in found.rules
    assert "its run consumed were erased" in notes


def test_windows_of_truncated_records(tmp_path: Path) -> None:
    """The trigger of a window is not known if neither its earlier records nor its earlier results are
    all there. The limit is told also if some records of a window without a row are left."""
    rows = [(place, place, {"k": "a", "v": "1"}) for place in (1, 2)]
    write(tmp_path / "s", _VALUES, 2, 3, rows, **cut(1, 2))
    hours = TumblingWindowSpec(size=timedelta(hours=1), grace=timedelta(0))
    counted = WindowedAggregateSpec(source="s", aggregates=(ColumnSpec("n", "count(*)"),), window=hours)
    key = ("k", "window_start", "window_end")
    types = {"k": pa.string(), "window_start": _TIME, "window_end": _TIME, "n": pa.int64()}
    hour = {"window_start": moment(0), "window_end": moment(60)}
    about: dict[str, Any] = {"kind": "table", "key": key, "made_by": counted}
    write(tmp_path / "w", types, 1, 2, [], inputs={"s": 2}, **about)
    result = (2, 2, {"k": "a", **hour, "n": 3})
    write(tmp_path / "w", types, 2, 3, [result], inputs={"s": 3}, **about, **cut(2, 1))
    found, made_of, notes = told(tmp_path, "w", 2)
    assert (made_of, found.made_of_in_all) == (["s 0:1"], 1)
    assert rules.TRIGGERED.name not in found.rules
    assert "records of s that earlier runs consumed are gone" in notes
    write(tmp_path / "none", types, 1, 0, [], inputs={"s": 3}, **about)
    missing = explain("none", key=("a", *hour.values()), warehouse=str(tmp_path))
    assert missing.rules == (rules.WINDOW_CLOSED.name,)
    assert "records of s in this window may be gone: its log was" in " ".join(missing.notes)


def test_window_with_a_part_of_the_results_of_its_run(tmp_path: Path) -> None:
    """Without ``count(*)``, the place among the results that are left tells no trigger."""
    rows = [(place, place, {"k": "a", "v": "1"}) for place in range(3)]
    write(tmp_path / "s", _VALUES, 1, 3, rows)
    hours = TumblingWindowSpec(size=timedelta(hours=1), grace=timedelta(0))
    sums = WindowedAggregateSpec(source="s", aggregates=(ColumnSpec("n", "sum(v)"),), window=hours)
    key = ("k", "window_start", "window_end")
    types = {"k": pa.string(), "window_start": _TIME, "window_end": _TIME, "n": pa.int64()}
    hour = {"window_start": moment(0), "window_end": moment(60)}
    about: dict[str, Any] = {"kind": "versioned", "key": key}
    left = [
        (n, n, {"k": "a", **hour, "n": n + 1, "valid_to": end})
        for n, end in ((0, moment(2)), (2, None))
    ]
    base = tmp_path / "w" / "bases" / "then"
    write(base, types | {"valid_to": _TIME}, 1, 3, left, **about)
    removed = cut(3, 2)
    removed["truncation"]["base"] = "then/log"
    about |= {"made_by": sums, "inputs": {"s": 3}}
    write(tmp_path / "w", types, 1, 3, [], **about)
    write(tmp_path / "w", types, 2, 3, [], **about, **removed)
    found, made_of, notes = told(tmp_path, "w", 2)
    assert (made_of, rules.TRIGGERED.name in found.rules) == ([], False)
    assert "other results of its run are gone: its log was truncated" in notes


def test_sessions_by_a_new_key_of_erased_records(tmp_path: Path) -> None:
    """The erased record made the session: no remaining one is named instead."""
    rows = [(n, minute, {"k": f"b{n}", "v": "x"}) for n, minute in ((1, 1), (2, 3))]
    write(tmp_path / "s", _VALUES, 1, 3, rows, erased={0: 1}, erased_before={0: 3})
    window = SessionWindowSpec(gap=timedelta(minutes=5), grace=timedelta(0))
    by_session, key, types = by_value(window)
    first = {"g": "x", "window_start": moment(1), "window_end": moment(1)}
    made = [(0, 1, {**first, "n": 1}), (1, 1, {**first, "n": None}), (2, 1, {**first, "n": 2})]
    made += [(3, 1, {**first, "n": None}), (4, 3, {**first, "window_end": moment(3), "n": 3})]
    write(tmp_path / "w", types, 1, 5, made, inputs={"s": 3}, kind="table", key=key, made_by=by_session)
    for offset in (0, 2, 4):
        found, _, notes = told(tmp_path, "w", offset)
        assert rules.TRIGGERED.name not in found.rules
        assert "its run consumed were erased: which one triggered it is not known" in notes
