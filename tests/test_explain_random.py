"""Explanations of random rows of random chains of all operators: the named records give the row, and no
other record changes it.

The model of ``tests.core.reference`` runs an operator alone: once with the records that the explanation
names, and once with all input records up to the last of these. The test runs in ``make endurance``
only; ``test_explain`` and ``test_explain_operators`` explain rows of each operator for every change.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.core.reference_model import complete
from tests.explain_random_chains import Explained, random_chains, run_chains
from vt_dagster import read
from vt_dagster.conformance.scenario import millis
from vt_dagster.provenance.explain import Explainer
from vt_dagster.provenance.explain_request import Explanation
from vt_dagster.storage.commit_log import Commit, commits
from vt_dagster.topology.model import Stream, Table, VersionedTable

WINDOWS, ROWS = range(6), 3000
SEEDS = (
    *(6, 14, 29, 62, 129, 206, 215, 224, 230, 254),
    *(256, 471, 647, 751, 797, 1534, 1631, 1632, 1732, 1881),
)
"""Seeds of chains of 18 shapes that share nodes, as in ``test_random_chains``: 522 rows in all."""
AGES = 10**12
"""Milliseconds, more than the length of any history."""
IN_ORDER = [("partition", "ascending"), ("offset", "ascending")]
OWN = ("concat", "reduce_sum")
"""Aggregators with custom functions: records that have left the group still affect their result."""
Row = dict[str, Any]
Arrived = tuple[int, Row]
"""The number of an operator's input, and a record of that input."""


@dataclass
class Logs:
    """The logs of a warehouse by asset and scenario (each scenario is a partition), and the commits."""

    made: Explained
    rows: dict[str, dict[int, list[Row]]] = field(default_factory=dict[str, dict[int, list[Row]]])
    commits: dict[str, list[Commit]] = field(default_factory=dict[str, list[Commit]])

    def __post_init__(self) -> None:
        for name in self.made.warehouse.nodes:
            found: dict[int, list[Row]] = defaultdict(list)
            for row in read(name, what="log", warehouse=self.path).sort_by(IN_ORDER).to_pylist():
                found[row["partition"]].append(row)
            self.rows[name] = found
            self.commits[name] = [*commits(f"{self.path}/{name}")]

    @property
    def path(self) -> str:
        return str(self.made.warehouse.path)


@dataclass
class Case:
    """A row of an operator's result, and the operator to run alone.

    Args:
        number: the scenario's number.
        step: the scenario's step that defines the operator.
    """

    logs: Logs
    node: Stream
    number: int
    step: Mapping[str, Any]
    row: Row

    @property
    def value(self) -> str | None:
        column = self.step["aggregate"] if self.step["op"] == "window" else "value"
        found = self.row[column]
        return None if self.row["is_tombstone"] or found is None else str(found)

    @property
    def wanted(self) -> tuple[str | None, int | None]:
        return self.value, millis(self.row["timestamp"])

    @property
    def is_merged(self) -> bool:
        """Whether the row is a session's tombstone; the merged session follows it."""
        return self.row["is_tombstone"] and self.step.get("window", {}).get("type") == "session"

    def commit(self) -> Commit:
        """Returns the commit that wrote the row."""
        every = self.logs.commits[self.node.name]
        return next(c for c in every if c.next_offset.get(self.number, 0) > self.row["offset"])

    def arrivals(self) -> list[Arrived]:
        """The records of the inputs in the order in which runs process them: in each run by the largest
        timestamp so far of their side, the left side first."""
        found: list[tuple[tuple[int, int, int, int], Arrived]] = []
        for side, up in enumerate(self.node.inputs):
            latest: dict[int, int] = {}
            for row in self.logs.rows[up.name][self.number]:
                run = self.taken(up, row)
                if run is None:
                    continue
                moment = millis(row["timestamp"])
                assert moment is not None
                latest[run] = max(latest.get(run, moment), moment)
                found.append(((run, latest[run], side, row["offset"]), (side, row)))
        return [one for _, one in sorted(found, key=lambda one: one[0])]

    @property
    def looked_into(self) -> list[Arrived]:
        """All records of the table, then all records of the stream."""
        stream, table = self.node.inputs
        sides = ((1, table), (0, stream))
        return [(side, row) for side, up in sides for row in self.logs.rows[up.name][self.number]]

    def taken(self, up: Stream, row: Row) -> int | None:
        """Returns the batch that processed a record of an input, or None."""
        return next(
            (
                commit.batch
                for commit in self.logs.commits[self.node.name]
                if commit.inputs.get(up.name, {}).get(self.number, 0) > row["offset"]
            ),
            None,
        )

    def run(self, records: Sequence[Arrived], grace: int | None = None) -> list[Row]:
        """Returns what the model emits for records, with this operator alone."""
        given = [
            {
                "input": f"in{side}",
                "key": row["key"],
                "value": None if row["is_tombstone"] or row["value"] is None else str(row["value"]),
                "timestamp": millis(row["timestamp"]),
            }
            for side, row in records
        ]
        if self.step["op"] == "window":
            about = {c: self.step[c] for c in ("window", "aggregate")}
            told = {"operator": "windowed_aggregate", "config": {**about, "suppress": None}}
            return complete({**told, "records": [{**r, "input": "stream"} for r in given]})["expected"]
        names = [name for name in ("left", "right", "from", "stream", "table") if name in self.step]
        inputs = [_input(f"in{side}", up) for side, up in enumerate(self.node.inputs)]
        result = {
            **self.step,
            "id": "out",
            **{n: f"in{i}" for i, n in enumerate(names)},
            "grace": grace,
        }
        config = {"steps": [*inputs, result], "output": "out"}
        done = complete({"operator": "chain", "config": config, "records": given})
        assert "expected_error" not in done, done
        return done["expected"]

    def last(self, emitted: Sequence[Row]) -> tuple[Any, Any] | None:
        """Returns the last result with the row's key (and window)."""
        mine = [e for e in emitted if e["key"] == self.row["key"] and self._of_window(e)]
        return (mine[-1]["value"], mine[-1]["timestamp"]) if mine else None

    def _of_window(self, entry: Row) -> bool:
        ends = ("window_start", "window_end")
        return all(entry[c] == millis(self.row[c]) for c in ends if c in entry)


def _input(name: str, node: Stream) -> dict[str, Any]:
    if not isinstance(node, Table):
        return {"id": name, "op": "stream", "input": name}
    versioned = {"versioned": True, "history_retention": AGES}
    table = versioned if isinstance(node, VersionedTable) else {"versioned": False}
    return {"id": name, "op": "table", "input": name, "table": table}


def named_records(case: Case, told: Explanation) -> list[Arrived]:
    """Returns the named records in order of arrival; of a stream-table join, the table's first."""
    sides = {up.name: side for side, up in enumerate(case.node.inputs)}
    places = {(sides[one.asset], one.record.offset) for one in told.made_of if one.record is not None}
    assert all(one.record is not None and one.record.partition == case.number for one in told.made_of)
    every = case.looked_into if case.step["op"] == "stream_table_join" else case.arrivals()
    return [(side, row) for side, row in every if (side, row["offset"]) in places]


def require_exact_explanation(case: Case, told: Explanation) -> None:
    """The named records give the row, and no record that is not named changes it."""
    parts, op = named_records(case, told), case.step["op"]
    assert parts, told
    if op in ("suppress", "to_stream"):
        assert [(r["key"], _told(r)) for _, r in parts][-1] == (case.row["key"], _told(case.row)), told
        return
    if case.step.get("aggregate") in OWN:
        assert any(note.startswith("functions of its own") for note in told.notes), told
        return
    if op == "stream_table_join":
        _check_as_of(case, parts, told)
        return
    if case.is_merged:
        assert case.wanted in [case.last(case.run(parts)), case.last(case.run(parts)[:-1])], told
        return
    assert case.last(case.run(parts)) == case.wanted, told
    every = case.arrivals()
    until = every[: every.index(parts[-1]) + 1]
    assert case.last(case.run(until)) == case.wanted, told


def _told(row: Row) -> tuple[Any, ...]:
    return row["is_tombstone"], row.get("value"), row["timestamp"]


def _check_as_of(case: Case, parts: Sequence[Arrived], told: Explanation) -> None:
    """The named version and the record give the row, and so does the record after all records that the
    table had then."""
    records = [one for one in parts if one[0] == 0]
    versions = [one for one in parts if one[0] == 1]
    assert case.wanted in [case.last(case.run([*versions, one])) for one in records], told
    table = case.node.inputs[1]
    batch, seen = case.commit(), case.logs.commits[table.name]
    known = [c for c in seen if c.recorded_at <= batch.recorded_at]
    end = known[-1].next_offset.get(case.number, 0) if known else 0
    every = [(1, r) for r in case.logs.rows[table.name][case.number] if r["offset"] < end]
    if {"horizon", "expired"} & set(told.rules):
        return  # the model's table never expires a version
    assert case.wanted in [case.last(case.run([*every, one])) for one in records], told


def cases(made: Explained, count: int) -> list[Case]:
    """Returns about ``count`` random rows: the same number of each kind of operator, or all it has."""
    logs, chance = Logs(made), random.Random(24)
    found: dict[str, list[Case]] = defaultdict(list)
    for number, each in enumerate(made.layouts):
        steps = {made.node(each, name).name: step for name, step in each.steps.items()}
        for name in list(steps):
            for up in made.warehouse.nodes[name].inputs:
                steps.setdefault(up.name, {"op": "to_stream"})
        for name, step in steps.items():
            node = made.warehouse.nodes[name]
            if node.operator is not None:
                mine = logs.rows[name][number]
                found[step["op"]] += [Case(logs, node, number, step, r) for r in mine]
    share = -(-count // len(found))
    return [one for mine in found.values() for one in chance.sample(mine, min(share, len(mine)))]


def failures(made: Explained, count: int, least: int) -> list[str]:
    """Checks ``count`` random rows (at least ``least`` must exist), and returns the failures."""
    explainer, found = Explainer(str(made.warehouse.path)), list[str]()
    every = cases(made, count)
    assert len(every) >= least
    for case in every:
        told = explainer.explain(case.node.name, offset=(case.number, case.row["offset"]))
        try:
            require_exact_explanation(case, told)
        except AssertionError as error:
            about = made.layouts[case.number].scenario.name, case.node.name, case.row["offset"]
            found.append(f"{about}: {error}")
    return found


@pytest.mark.endurance
@pytest.mark.timeout(3600)
def test_named_records_give_random_rows(spark: SparkSession, tmp_path: Path) -> None:
    made = run_chains(random_chains(SEEDS, WINDOWS), tmp_path, spark)
    assert failures(made, ROWS, least=500) == []
