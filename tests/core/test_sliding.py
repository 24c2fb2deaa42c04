"""The kernel of sliding windows agrees with the model on many random records, without Spark."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pyarrow as pa
import pytest

from tests.core.random_scenarios import scenarios
from vt_dagster.columns import WINDOW_END, WINDOW_START
from vt_dagster.core import windowed_aggregate
from vt_dagster.core.windowed_aggregate import CLOSED, FRESH, HORIZON, KEYED, KIND, MERGED

Row = dict[str, Any]
BATCH = 3


def micros(ms: int) -> int:
    return ms * 1000


def records_of(scenario: Row) -> list[Row]:
    """A scenario's records in order of arrival, in the kernel's input format."""
    window = scenario["config"]["window"]
    time: int | None = None
    rows: list[Row] = []
    for i, record in enumerate(scenario["records"]):
        counts = record["key"] is not None and record["value"] is not None
        at = record["timestamp"]
        if counts:
            time = at if time is None else max(time, at)
        rows.append(
            {
                "key": record["key"],
                "order": i,
                FRESH: True,
                KEYED: counts,
                WINDOW_START: micros(at),
                windowed_aggregate.YOUNG: micros(at),
                windowed_aggregate.LENGTH: micros(window["size"]),
                HORIZON: None if time is None else micros(time - window["grace"]),
                windowed_aggregate.HIDDEN: None,
                "n": 1,
            }
        )
    return rows


def batches(rows: list[Row]) -> list[Any]:
    """The rows by key, in batches of a fixed size, which may split a key."""
    by_key = sorted(rows, key=lambda r: (r["key"] or "", r["key"] is None, r["order"]))
    made: list[Row] = []
    for _, group in groupby(by_key, key=lambda r: (r["key"] or "", r["key"] is None)):
        members = list(group)
        last = len(members) - 1
        made += [r | {"_first": i == 0, "_last": i == last} for i, r in enumerate(members)]
    schema = pa.schema(
        [(c, pa.bool_() if c in (FRESH, KEYED) else pa.int64()) for c in rows[0] if c != "key"]
        + [("key", pa.string()), ("_first", pa.bool_()), ("_last", pa.bool_())]
    )
    return [
        pa.RecordBatch.from_pylist(made[i : i + BATCH], schema=schema)
        for i in range(0, len(made), BATCH)
    ]


def results_of(scenario: Row) -> tuple[list[tuple[Any, ...]], int]:
    """The results of both kernels for a scenario, in order, and the number of dropped records."""
    rows = records_of(scenario)
    window = scenario["config"]["window"]
    kept = window.get("retention") or 2 * window["size"] + window["grace"]
    largest: dict[int, int | None] = {}
    for batch in windowed_aggregate._largest(iter(batches(rows))):
        largest |= {r["order"]: r[windowed_aggregate.LARGEST] for r in batch.to_pylist()}
    newest: int | None = None
    for row in rows:
        row[windowed_aggregate.HIDDEN] = None if newest is None else newest - micros(kept)
        found = largest[row["order"]]
        newest = newest if found is None else max(found, -(10**18) if newest is None else newest)
    passed = ["key", "order"]
    out: list[Row] = []
    for batch in windowed_aggregate._sliding_merge(iter(batches(rows)), passed, ["n"], ["sum"]):
        out += batch.to_pylist()
    out.sort(key=lambda r: (r["order"], r["_turn"]))
    results = [
        (r["order"], r["key"], r["n"], r["timestamp"], r[WINDOW_START], r[WINDOW_END])
        for r in out
        if r[KIND] == MERGED
    ]
    return results, sum(r[KIND] == CLOSED for r in out)


@pytest.mark.parametrize("seed", range(3))
def test_the_kernel_agrees_with_the_model(seed: int) -> None:
    from tests.core.reference_model import complete

    compared = 0
    for scenario in scenarios(seed, "windowed_aggregate", configs=40, sequences=4, sliding=True):
        plain = {"config": scenario["config"] | {"suppress": None, "aggregate": "count"}}
        known = complete(scenario | plain)
        if "expected_error" in known:
            continue
        expected = [
            (
                e["trigger"],
                e["key"],
                int(e["value"]),
                *(micros(e[c]) for c in ("timestamp", "window_start", "window_end")),
            )
            for e in known["expected"]
        ]
        found, dropped = results_of(scenario)
        assert found == expected, scenario["name"]
        assert dropped == known["metrics"]["dropped_records"], scenario["name"]
        compared += 1
    assert compared > 100
