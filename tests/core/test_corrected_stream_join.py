"""A corrected join of two streams has the rows of a single run, however it is split into runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from tests.core.reference.run import joined
from tests.core.reference.stream_join import Entry, Row, StreamJoin
from tests.core.test_stream_stream_join import (
    Case,
    cases_of,
    records_of,
    redeclared,
    scenario_of,
    split_runs,
)
from vt_dagster import Stream
from vt_dagster.conformance.runner import split_into_runs
from vt_dagster.conformance.scenario import millis, record_of
from vt_dagster.conformance.steps import layout, nodes_of
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.runs import gate
from vt_dagster.runs import pin as arrivals
from vt_dagster.testing import TopologyTestDriver

CASES = 10
other = st.tuples(st.integers(0, 8), st.integers(0, 12))
"""Another grace period, and how much longer than it ``corrected_for`` is."""
MS = timedelta(milliseconds=1)
KEYED = StructType([StructField("k", StringType()), StructField("timestamp", TimestampType())])


@dataclass
class InTime(StreamJoin):
    """A model in which records that are too late find nothing. Its ``grace`` is ``corrected_for``.

    Args:
        soon: the grace period, after which a record without a match has a row until it finds one.
        edge: records before this time were too late at some point, and remain so.
        late: the times of records that were too late.
        told: the arrivals of unmatched records that had a row before the grace period changed.
    """

    soon: int = 0
    edge: float = -inf
    told: set[int] = field(default_factory=set[int])
    late: Counter[int] = field(default_factory=Counter[int])

    def take(self, i: int, side: str, key: str | None, value: str | None, time: int) -> None:
        self.edge = max(self.edge, self.now - self.grace)
        if None not in (key, value) and time < self.edge:
            self.late[time] += 1
        super().take(i, side, key, value, time)

    def found(self, row: Row) -> list[Row]:
        return super().found(row) if row.time >= self.edge else []

    def becomes(self, i: int, soon: int, promise: int) -> None:
        """Continues with another grace period and another ``corrected_for``."""
        self.told |= {row.arrival for row in self.unmatched if not self.waits_for_one(row)}
        self.soon = soon
        self.changed(i, promise)

    def waits_for_one(self, row: Row) -> bool:
        """Whether an unmatched record has no row yet."""
        over = row.time + self.fore[row.side] + self.soon < self.looked
        return row.arrival not in self.told and not over

    def rows(self) -> Counter[Any]:
        """The matches, and the rows of unmatched records whose grace period is over."""
        rows = Counter((e["key"], e["value"], e["timestamp"]) for e in self.emitted)
        for row in self.unmatched:
            if not self.waits_for_one(row):
                left, right = (row.value, None) if row.side == "left" else (None, row.value)
                rows[row.key, joined(left, right), row.time] += 1
        return rows

    def final(self, row: tuple[Any, ...]) -> bool:
        """Whether a row can no longer change."""
        return row[2] < self.edge - max(self.fore.values())


NEVER = 9
"""More than the number of runs of a case."""


@pytest.mark.slow
@settings(
    max_examples=1,  # of many cases
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    cases=cases_of(CASES - 2),
    others=st.lists(other, min_size=CASES - 2, max_size=CASES - 2),
    turn=st.sampled_from((1, 2, NEVER)),
)
def test_split_runs_equal_single_run(
    spark: SparkSession, cases: list[Case], others: list[tuple[int, int]], turn: int
) -> None:
    """The last number of a case is how much longer than the grace period ``corrected_for`` is. From
    some run on, or never, all cases have other values of both, and runs use the plans of large runs."""
    cases, others = [*map(case_with_retraction, ("left", "right")), *cases], [(0, 12), (0, 12), *others]
    layouts = [layout(scenario_of(i, "outer", w, records)) for i, (w, records, *_) in enumerate(cases)]
    nodes = nodes_of(layouts)
    before = [(w[2], w[2] + longer) for w, *_, longer in cases]
    after = [(soon, soon + longer) for soon, longer in others]
    sources = {shape[1]: node.name for shape, node in nodes.items() if shape[0] == "stream"}

    def inputs_of(taken: dict[int, Sequence[int]]) -> dict[str, list[Entry]]:
        found: dict[str, list[Entry]] = {name: [] for name in sources.values()}
        for number, some in taken.items():
            for i in some:
                record = layouts[number].scenario.records[i]
                found[sources[record["input"]]].append(record_of(number, record))
        return found

    plain = next(node for node in nodes.values() if node.inputs)
    first, then = (corrected(plain, lengths) for lengths in (before, after))
    split, whole = (TopologyTestDriver(first, spark=spark) for _ in range(2))
    runs = [
        split_runs(split_into_runs(each, "run"), at)
        for each, (_, _, at, _) in zip(layouts, cases, strict=True)
    ]
    steps = max(map(len, runs))
    was: dict[int, set[Any]] = {}
    with pytest.MonkeyPatch.context() as patch:
        for step in range(steps):
            if step == turn:
                was = final_rows(split.table("rows"))
                redeclared(split, *plain.inputs, then)
                for module in (arrivals, gate):
                    patch.setattr(module, "CHUNK", -1)
            split.run(inputs_of({n: some[step] for n, some in enumerate(runs) if step < len(some)}))
    at_once: dict[int, Counter[Any]] = {}
    if turn >= steps:  # only then both have the same lengths
        whole.run(inputs_of({n: range(len(each.scenario.records)) for n, each in enumerate(layouts)}))
        at_once = by_case(whole.table("rows"))
    joined_rows = split.table("rows")
    found, late, final = by_case(joined_rows), quarantined_times(split), final_rows(joined_rows)
    waiting = Counter(row["partition"] for row in split.waiting("rows"))
    for number, (each, lengths) in enumerate(zip(layouts, before, strict=True)):
        records, some = records_of(each.scenario), runs[number]
        soon, promise = lengths
        told = InTime({**each.scenario.config, "grace": promise}, soon=soon)
        about = f"{each.scenario.config} {lengths} {after[number]} {turn} {records} {some}"
        at = some[turn].start if turn < min(steps, len(some)) else len(records)
        told.feed(records[:at])
        if turn < steps:
            assert was[number] == {row for row in told.rows() if told.final(row)}, about
            told.becomes(at, *after[number])
        told.feed(records[at:])
        rows = told.rows()
        assert found[number] == rows, about
        assert final[number] == {row for row in rows if told.final(row)}, about
        assert was.get(number, set()) <= final[number], about
        assert waiting[number] == sum(map(told.waits_for_one, told.unmatched)), about
        assert late[number] == told.late, about
        alone = Counter(row[1] for row in rows.elements() if "null" in row[1])
        assert set(alone.values()) <= {1}, about
        # In another order of arrival, other records may be too late; so only young rows are compared.
        if turn >= steps:
            w = cases[number][0]
            edge = told.now - promise + max(0, *w[:2], w[0] + w[1])
            assert rows_from(rows, edge) == rows_from(at_once[number], edge), about


def case_with_retraction(alone: str) -> Case:
    """A case in which one side's record has a row without a match, which a later run takes back."""
    match = "left" if alone == "right" else "right"
    told = [(alone, "a", 5), (match, "b", 9), (match, "a", 6)]
    records = [{"input": i, "key": k, "value": "x", "timestamp": at} for i, k, at in told]
    return (2, 2, 0), records, {1, 2}, 12


def corrected(plain: Any, lengths: Sequence[tuple[int, int]]) -> Any:
    """The join with the grace period and ``corrected_for`` of each case."""
    graces, promises = ({i: n * MS for i, n in enumerate(some)} for some in zip(*lengths, strict=True))
    left, right = plain.inputs
    about = {n: getattr(plain.operator, n) for n in ("before", "after", "select")}
    return left.outer_join(right, name="rows", grace=graces, corrected_for=promises, **about)


def by_case(rows: Sequence[dict[str, Any]]) -> dict[int, Counter[Any]]:
    found: dict[int, Counter[Any]] = {n: Counter() for n in range(CASES)}
    for row in rows:
        found[row["scenario"]][row_summary(row)] += 1
    return found


def final_rows(rows: Sequence[dict[str, Any]]) -> dict[int, set[Any]]:
    """The rows that can no longer change; no two rows have the same values."""
    found: dict[int, set[Any]] = {n: set() for n in range(CASES)}
    for row in rows:
        if row["is_final"]:
            found[row["scenario"]].add(row_summary(row))
    return found


def row_summary(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["key"], row["value"], millis(row["timestamp"])


def quarantined_times(driver: TopologyTestDriver) -> dict[int, Counter[int]]:
    """The times of the records in quarantine."""
    found: dict[int, Counter[int]] = {n: Counter() for n in range(CASES)}
    rows = driver._stores["rows"].quarantine()  # pyright: ignore[reportPrivateUsage]
    if rows is None:
        return found
    for row in rows.selectExpr("partition", "unix_millis(timestamp) as at").collect():
        found[row["partition"]][row["at"]] += 1
    return found


def rows_from(rows: Counter[Any], edge: float) -> Counter[Any]:
    return Counter({row: n for row, n in rows.items() if row[2] >= edge})


def test_longer_corrected_for_keeps_too_late_records_too_late() -> None:
    """A record that was too late by the previous ``corrected_for`` stays so by a longer one."""
    left, right = (Stream(name, key="k", schema=KEYED) for name in ("left", "right"))

    def told(longer: int, oldest: int, marks: dict[str, dict[int, int]]) -> Any:
        node = left.left_join(right, name="rows", after=5 * MS, corrected_for=longer * MS)
        found = {"partition": 0, "_side": 0, "_chunk": 0, "time": 110_000, "oldest": oldest}
        policy = processor_of(node).plan().stream_time
        assert policy is not None
        rows = policy.advance_if_none_late([{**found, "valid": 110_000}], {0: 100_000}, marks)
        return rows and policy.watermarks(rows, marks)["final"][0]

    before = told(20, 90_000, {})
    assert before == 110_000 - 20_000 - 5_000
    assert told(60, 90_000, {"final": {0: before}}) == before
    assert told(60, 89_999, {"final": {0: before}}) is None
    assert told(60, 89_999, {}) == 110_000 - 60_000 - 5_000
