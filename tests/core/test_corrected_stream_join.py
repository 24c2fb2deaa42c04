"""After any runs a corrected join of two streams has the rows of one run over everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from tests.core.reference.run import joined
from tests.core.reference.stream_join import Entry, Row, StreamJoin
from tests.core.test_stream_stream_join import Case, case, pieces, records_of, scenario_of
from vt_dagster import Stream
from vt_dagster.conformance.side_by_side import cut
from vt_dagster.conformance.steps import layout, nodes_of
from vt_dagster.conformance.topology import millis, record_of
from vt_dagster.testing import TopologyTestDriver

CASES = 16
MS = timedelta(milliseconds=1)


class InTime(StreamJoin):
    """A join in which what is too late finds nothing."""

    def found(self, row: Row) -> list[Row]:
        return super().found(row) if row.time >= self.now - self.grace else []


def rows_of(join: StreamJoin, grace: int) -> Counter[Any]:
    """What the rows are, by the model of a join whose grace period is the promise: its results, and
    what of the others has been let go by ``grace``."""
    rows = Counter((e["key"], e["value"], e["timestamp"]) for e in join.emitted)
    for row in join.unmatched:
        if row.time + join.fore[row.side] + grace < join.looked:
            left, right = (row.value, None) if row.side == "left" else (None, row.value)
            rows[row.key, joined(left, right), row.time] += 1
    return rows


@pytest.mark.slow
@settings(
    max_examples=1,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(cases=st.lists(case, min_size=CASES, max_size=CASES))
def test_runs_end_as_one_run(spark: SparkSession, cases: list[Case]) -> None:
    """The last number of a case is how much longer than the grace period the promise is."""
    layouts = [layout(scenario_of(i, "outer", w, records)) for i, (w, records, *_) in enumerate(cases)]
    nodes = nodes_of(layouts)
    plain = next(node for node in nodes.values() if node.inputs)
    promise = {i: (w[2] + longer) * MS for i, (w, _, _, longer) in enumerate(cases)}
    about = {n: getattr(plain.operator, n) for n in ("before", "after", "grace", "select")}
    left, right = plain.inputs
    assert isinstance(left, Stream)
    assert isinstance(right, Stream)
    rows = left.outer_join(right, name="rows", corrected_for=promise, **about)
    sources = {shape[1]: node.name for shape, node in nodes.items() if shape[0] == "stream"}

    def inputs_of(taken: dict[int, Sequence[int]]) -> dict[str, list[Entry]]:
        found: dict[str, list[Entry]] = {name: [] for name in sources.values()}
        for number, some in taken.items():
            for i in some:
                record = layouts[number].scenario.records[i]
                found[sources[record["input"]]].append(record_of(number, record))
        return found

    split, whole = (TopologyTestDriver(rows, spark=spark) for _ in range(2))
    runs = [pieces(cut(each, "run"), at) for each, (_, _, at, _) in zip(layouts, cases, strict=True)]
    for step in range(max(map(len, runs))):
        split.run(inputs_of({n: some[step] for n, some in enumerate(runs) if step < len(some)}))
    whole.run(inputs_of({n: range(len(each.scenario.records)) for n, each in enumerate(layouts)}))
    found, at_once, late = by_case(split), by_case(whole), listed(split)
    waiting = Counter(row["partition"] for row in split.waiting("rows"))
    for number, (window, _, _, longer) in enumerate(cases):
        records, grace = records_of(layouts[number].scenario), window[2]
        config = {**layouts[number].scenario.config, "grace": grace + longer}
        told = InTime(dict(config)).feed(records)
        about = f"{config} {longer} {records} {runs[number]}"
        assert found[number] == rows_of(told, grace), about
        alone = sum(found[number][row] for row in found[number] if "null" in row[1])
        waits = [u for u in told.unmatched if u.time + told.fore[u.side] + grace >= told.looked]
        assert waiting[number] == len(waits), about
        assert alone <= len(records)
        assert late[number] == late_of(records, grace + longer), about
        # What arrives in another order may be late in one and not in the other, but for what is young.
        edge = told.now - grace - longer + max(0, *window[:2], window[0] + window[1])
        assert young(found[number], edge) == young(at_once[number], edge), about


def by_case(driver: TopologyTestDriver) -> dict[int, Counter[Any]]:
    found: dict[int, Counter[Any]] = {n: Counter() for n in range(CASES)}
    for row in driver.table("rows"):
        found[row["scenario"]][row["key"], row["value"], millis(row["timestamp"])] += 1
    return found


def listed(driver: TopologyTestDriver) -> dict[int, Counter[int]]:
    """The times of the records in quarantine."""
    found: dict[int, Counter[int]] = {n: Counter() for n in range(CASES)}
    rows = driver._stores["rows"].quarantine()  # pyright: ignore[reportPrivateUsage]
    if rows is None:
        return found
    for row in rows.selectExpr("partition", "unix_millis(timestamp) as at").collect():
        found[row["partition"]][row["at"]] += 1
    return found


def late_of(records: list[Entry], promise: int) -> Counter[int]:
    found, now = Counter[int](), -1
    for r in records:
        now = max(now, r["timestamp"])
        if r["key"] is not None and r["value"] is not None and r["timestamp"] < now - promise:
            found[r["timestamp"]] += 1
    return found


def young(rows: Counter[Any], edge: int) -> Counter[Any]:
    return Counter({row: n for row, n in rows.items() if row[2] >= edge})
