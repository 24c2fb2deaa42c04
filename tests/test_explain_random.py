"""Random rows of random chains of all operators: what explanations name gives the row, and nothing else
changes it.

By the model of ``tests.core.reference``: an operator alone, once fed with what an explanation names,
once with all that its input has up to the last of that. In ``make endurance`` alone: ``test_explain``
and ``test_explain_operators`` explain rows of each operator for every change.
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
from tests.random_explained import Explained, drawn, explained
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
"""Chains of 18 shapes that share nodes, as those of ``test_random_chains``: 522 rows in all."""
AGES = 10**12
"""Milliseconds that no history is as long as."""
IN_ORDER = [("partition", "ascending"), ("offset", "ascending")]
OWN = ("concat", "reduce_sum")
"""Aggregators with functions of their own: what has left the group shows in what they have made."""
Row = dict[str, Any]
Arrived = tuple[int, Row]
"""A record of an operator's input, and which of its inputs that is."""


@dataclass
class Logs:
    """The logs of a warehouse by asset and scenario, which is the partition, and the commits."""

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
    """A row of an operator's result, and the operator alone.

    Args:
        number: of the scenario.
        step: what the scenario says of the operator.
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
        """Whether it is a session's tombstone: after it comes the session that it became a part of."""
        return self.row["is_tombstone"] and self.step.get("window", {}).get("type") == "session"

    def commit(self) -> Commit:
        """That the row came by."""
        every = self.logs.commits[self.node.name]
        return next(c for c in every if c.next_offset.get(self.number, 0) > self.row["offset"])

    def arrivals(self) -> list[Arrived]:
        """The records of its inputs in the order in which runs took them: each run by the largest
        timestamp so far of either side, the left one's first."""
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
        """The table's records, and then the stream's."""
        stream, table = self.node.inputs
        sides = ((1, table), (0, stream))
        return [(side, row) for side, up in sides for row in self.logs.rows[up.name][self.number]]

    def taken(self, up: Stream, row: Row) -> int | None:
        """The batch by which a record of an input was taken."""
        return next(
            (
                commit.batch
                for commit in self.logs.commits[self.node.name]
                if commit.inputs.get(up.name, {}).get(self.number, 0) > row["offset"]
            ),
            None,
        )

    def run(self, records: Sequence[Arrived], grace: int | None = None) -> list[Row]:
        """What the operator alone emits for records, in the model."""
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
        """The last result of the row's key (and window)."""
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


def named(case: Case, told: Explanation) -> list[Arrived]:
    """What an explanation names, in order of arrival; of a table that is looked into in its own."""
    sides = {up.name: side for side, up in enumerate(case.node.inputs)}
    places = {(sides[one.asset], one.record.offset) for one in told.made_of if one.record is not None}
    assert all(one.record is not None and one.record.partition == case.number for one in told.made_of)
    every = case.looked_into if case.step["op"] == "stream_table_join" else case.arrivals()
    return [(side, row) for side, row in every if (side, row["offset"]) in places]


def check(case: Case, told: Explanation) -> None:
    """What it names gives the row, and nothing that it leaves out changes it."""
    parts, op = named(case, told), case.step["op"]
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
    """The version and the record alone; and the record after all that the table had then."""
    records = [one for one in parts if one[0] == 0]
    versions = [one for one in parts if one[0] == 1]
    assert case.wanted in [case.last(case.run([*versions, one])) for one in records], told
    table = case.node.inputs[1]
    batch, seen = case.commit(), case.logs.commits[table.name]
    known = [c for c in seen if c.recorded_at <= batch.recorded_at]
    end = known[-1].next_offset.get(case.number, 0) if known else 0
    every = [(1, r) for r in case.logs.rows[table.name][case.number] if r["offset"] < end]
    if {"horizon", "expired"} & set(told.rules):
        return  # the model's table, alone, remembers all
    assert case.wanted in [case.last(case.run([*every, one])) for one in records], told


def cases(made: Explained, count: int) -> list[Case]:
    """Random rows, as many of each kind of operator as there are, or as are asked for."""
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
    """What does not hold, of so many rows."""
    explainer, found = Explainer(str(made.warehouse.path)), list[str]()
    every = cases(made, count)
    assert len(every) >= least
    for case in every:
        told = explainer.explain(case.node.name, offset=(case.number, case.row["offset"]))
        try:
            check(case, told)
        except AssertionError as error:
            about = made.layouts[case.number].scenario.name, case.node.name, case.row["offset"]
            found.append(f"{about}: {error}")
    return found


@pytest.mark.endurance
@pytest.mark.timeout(3600)
def test_many_random_rows_of_random_chains(spark: SparkSession, tmp_path: Path) -> None:
    made = explained(drawn(SEEDS, WINDOWS), tmp_path, spark)
    assert failures(made, ROWS, least=500) == []
