"""Every recorded scenario is identical, and the runner reports the differences of a wrong one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from pyspark.sql import DataFrame, SparkSession
from typer import Typer
from typer.testing import CliRunner

from tests.core.random_scenarios import ALL, scenarios
from tests.core.reference_model import complete
from vt_dagster.conformance import conformance, run, runner
from vt_dagster.conformance.runner import side_by_side, split_into_runs
from vt_dagster.conformance.scenario import OPERATORS, Scenario, ScenarioOutcome, read_scenarios, settle
from vt_dagster.conformance.steps import Layout, layout, supported
from vt_dagster.core import arrival_order, processor, source_processor, stream_time
from vt_dagster.core.as_of_join import JoinStrategy, Tiles
from vt_dagster.core.stream_time import Bounds
from vt_dagster.errors import SourceError
from vt_dagster.runs import gate
from vt_dagster.runs import pin as arrivals
from vt_dagster.runs import run as run_module
from vt_dagster.runs.run import tiles_of
from vt_dagster.topology.model import Table

SCENARIOS = Path(__file__).parent / "conformance"


def scenario(name: str) -> dict[str, Any]:
    return json.loads((SCENARIOS / "worked" / f"{name}.json").read_text(encoding="utf-8"))


def write(path: Path, *scenarios: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(scenarios)), encoding="utf-8")
    return path


def limited_in_bytes() -> dict[str, Any]:
    path = SCENARIOS / "optional" / "sliding_and_bytes.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    return next(s for s in found if "max_bytes" in (s["config"]["suppress"] or {}))


def shortest_of_each_configuration(path: Path) -> list[dict[str, Any]]:
    """The shortest record sequence of each random configuration, since each record takes time."""
    found: dict[str, dict[str, Any]] = {}
    for each in json.loads(path.read_text(encoding="utf-8")):
        configuration = each["name"].rsplit("-", 1)[0]
        other = found.setdefault(configuration, each)
        if len(each["records"]) < len(other["records"]):
            found[configuration] = each
    return [s for s in found.values() if len(s["records"]) <= 6]


def first_records(scenario: dict[str, Any]) -> dict[str, Any]:
    """A scenario with the first records of another one. Its final store and number of dropped records
    are those of the reference model, if that has the operator."""
    first = truncated(scenario, informative_length(scenario))
    if first["operator"] not in ALL:
        return first
    left_out = ("expected", "expected_error", "final_store", "metrics", "by_design")
    whole = complete({name: value for name, value in first.items() if name not in left_out})
    assert whole["expected"] == first["expected"]
    return whole


def most_informative_start(path: Path) -> dict[str, Any]:
    """The first records of the random sequence whose first records have the most results."""
    every = json.loads(path.read_text(encoding="utf-8"))
    found = [s for s in every if not s.get("expected_error")]
    return first_records(max(found, key=lambda s: len(truncated(s, informative_length(s))["expected"])))


def informative_length(scenario: dict[str, Any]) -> int:
    """The number of first records to use; for a stream-table join one more, since one of its other side
    comes first."""
    return RECORDS + (scenario["operator"] == "stream_table_join")


RUNS = 2
"""If a scenario has more runs, only the records of these runs are used by default; ``SINGLE`` runs if
each record is a run."""
SINGLE = 5
"""Within so many records, each scenario whose records are runs emits a result, or fails."""
RECORDS = 2
"""By default so many of the first records of a random sequence are used: the second record meets the
state that the first one left."""
LOOKED_UP = ["stream_table_join", "chain"]
"""Operators whose scenarios also run with the other join strategies, if they have such a join."""
WAYS = {"broadcast": "inner", "tiled": "left"}
"""The other join strategies, each with the kind of join that tests it. The strategy is the same for
every kind."""
LARGE = [
    "versioned_store",
    "windowed_aggregate",
    "table_suppress",
    "table_filter",
    "table_map_values",
    "stream_select_key",
    "stream_stream_join",
]
"""Operators whose scenarios run with the plans of large runs. Those of ``LOOKED_UP`` do so too."""
SHOWN_BY = {
    "kip914-join-result-is-unversioned": "kip914-error-grace-on-join-result",
    "kip914-versioned-inherits-through-map-values": "kip914-grace-on-inherited-versioned",
    "kip914-versioned-lost-by-unversioned-store": "kip914-error-grace-on-unversioned-store-between",
}
"""Scenarios by name, each with one that shows the same rule in fewer runs."""
RECORD_BY_RECORD = [
    "stream_table_join",
    "table_aggregate",
    "table_suppress",
    "versioned_store",
    "windowed_aggregate",
]
"""Operators that by default also run once for each record; each call of a store has an answer. The
scenarios of other operators take several runs in any case, or an earlier run leaves only the table;
``storage/test_random_chains.py`` splits these into two runs."""
ALL_OF_THEM = [False, pytest.param(True, marks=pytest.mark.endurance)]
"""Whether all worked scenarios run, instead of only those that show a rule."""


@cache
def worked() -> list[Scenario]:
    """All scenarios except those of ``conformance/random``."""
    return [*read_scenarios(SCENARIOS / name for name in ("optional", "streams", "worked"))]


@cache
def rules() -> set[str]:
    """The scenarios that a rule of ``FORMAT.md`` names as its examples, without those of
    ``SHOWN_BY``."""
    text = (SCENARIOS / "FORMAT.md").read_text(encoding="utf-8")
    text = text.partition("\n## 4. ")[2].partition("\n## 5. ")[0]
    words = set(re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)+", text))
    found = {s.name for s in worked() if s.name in words}
    assert {*SHOWN_BY, *SHOWN_BY.values()} <= found
    return found - {*SHOWN_BY}


def runs_record_by_record(scenario: Scenario) -> bool:
    """Whether each record is a run, at any granularity."""
    return (
        supported(scenario) and scenario.operator != "versioned_store" and layout(scenario).one_by_one
    )


def truncated(scenario: dict[str, Any], end: int) -> dict[str, Any]:
    """A scenario with its first ``end`` records and their expected results. Its final store and metrics
    are not known."""
    whole = scenario | scenario.get("by_design", {})
    error = whole.get("expected_error")
    return whole | {
        "by_design": {},
        "records": whole["records"][:end],
        "expected": whole["expected"][:end]  # each call has an answer
        if whole["operator"] == "versioned_store"
        else [e for e in whole["expected"] if e["trigger"] < end],
        # No record triggers an error of the topology.
        "expected_error": error if error and (error["trigger"] or 0) < end else None,
        "final_store": None,
        "metrics": None,
    }


def end_of_runs(scenario: Scenario, runs: int) -> int | None:
    """The position of the first record after a scenario's first runs; None = it has no more runs."""
    if not supported(scenario) or scenario.operator == "versioned_store":
        return None
    found = split_into_runs(layout(scenario), "run")
    most = max(runs, SINGLE) if runs_record_by_record(scenario) else runs
    return found[most].start if len(found) > most else None


def copy_scenarios(
    directory: Path, wanted: Callable[[Scenario], bool], every: bool = False, runs: int = 1_000
) -> Path:
    """Copies the first runs of the wanted worked scenarios.

    Args:
        every: all wanted scenarios; otherwise only those that show a rule.
    """
    for path, found in groupby(worked(), lambda s: s.path):
        ends = {
            s.name: end_of_runs(s, runs) for s in found if wanted(s) and (every or s.name in rules())
        }
        whole = json.loads(path.read_text(encoding="utf-8"))
        whole = whole if isinstance(whole, list) else [whole]
        kept = [s for s in whole if s["name"] in ends]
        cut = [s if (end := ends[s["name"]]) is None else truncated(s, end) for s in kept]
        write(directory / path.relative_to(SCENARIOS), *cut)
    return directory


def join_kinds(scenario: Scenario) -> set[str]:
    """The kinds of the scenario's stream-table joins."""
    if scenario.operator not in LOOKED_UP:
        return set()
    steps = layout(scenario).steps.values()
    return {step["kind"] for step in steps if step["op"] == "stream_table_join"}


def runs_alone_here(scenario: Scenario) -> bool:
    """Whether no other test of this file runs the scenario."""
    return not join_kinds(scenario) and (
        scenario.operator not in LARGE or runs_record_by_record(scenario)
    )


def test_each_operator_has_rule_scenarios() -> None:
    assert {s.operator for s in worked() if s.name in rules()} == set(OPERATORS)
    assert len(rules()) > 120


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("every", ALL_OF_THEM)
def test_worked_scenarios_are_identical_in_long_runs(
    spark: SparkSession, tmp_path: Path, every: bool
) -> None:
    """Scenarios that the tests below run with other plans run here only with the marker ``endurance``.
    With ``REFUSED_BETWEEN``, records that tables reject must not count when a scenario is split."""
    copy_scenarios(tmp_path, lambda s: every or runs_alone_here(s), every, 1_000 if every else RUNS)
    write(tmp_path / "refused.json", *scenarios_with_refused_records())
    lines: list[str] = []
    report = run([tmp_path], granularity="run", spark=spark, echo=lines.append)
    optional = "optional, not counted: 19 identical, 0 different, 8 not supported"
    assert lines == [
        *([optional] if every else []),
        f"{report.identical} identical, 0 different, 0 not supported",
    ]
    assert report.identical >= (250 if every else 40)
    assert report.ok


@pytest.fixture
def large_runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Uses the plans of large runs: chunks of three records, bounds of stream time for two records
    each, offsets in place. Returns a list; each use of bounds appends whether a chunk was left
    undecided."""
    exact: list[bool] = []
    only = Bounds.only

    def noted(bounds: Bounds, found: Any) -> Bounds:
        exact.append(only(bounds, found).near)
        return only(bounds, found)

    monkeypatch.setattr(Bounds, "only", noted)
    for module, name, value in (
        (arrival_order, "CHUNK", 3),
        (arrival_order, "FINE", 2),
        (processor, "FINE", 2),
        (source_processor, "FINE", 2),
        (stream_time, "FINE", 2),
        (arrivals, "CHUNK", -1),
        (gate, "CHUNK", -1),
        (arrival_order, "HOUR", 5_000),
        (arrival_order, "SHORTEST", 12),
        (arrival_order, "_ROWS_OF_A_CHUNK", 1),
    ):
        monkeypatch.setattr(module, name, value)
    return exact


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("every", ALL_OF_THEM)
@pytest.mark.parametrize("way", WAYS)
def test_large_run_join_strategies_are_identical(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    large_runs: list[bool],
    way: Literal["broadcast", "tiled"],
    every: bool,
) -> None:
    """The join strategies of large runs give identical results with the few records of the scenarios:
    tiles for versioned tables (other tables are sorted), and broadcast for all tables."""
    asked: list[JoinStrategy] = []

    def way_of(
        table: Table, view: DataFrame, few: bool, versions: int, due: Any
    ) -> tuple[JoinStrategy, str]:
        tiled = way == "tiled" and table.versioned
        first, last = due
        rest = "sorted" if way == "tiled" else "broadcast"
        chosen = tiles_of(view, key=table.key, first=first, last=last)[0] if tiled else rest
        asked.append(chosen)
        return chosen, "forced"

    monkeypatch.setattr(run_module, "join_strategy", way_of)
    copy_scenarios(tmp_path, lambda s: WAYS[way] in join_kinds(s), every, 1_000 if every else RUNS)
    lines: list[str] = []
    report = run([tmp_path], granularity="run", spark=spark, echo=lines.append)
    assert lines == [f"{report.identical} identical, 0 different, 0 not supported"]
    assert {type(one) for one in asked} == ({Tiles, str} if way == "tiled" else {str})
    # A record that a grace period emits on arrival has a place by its exact stream time.
    assert set(large_runs) == {True}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("every", ALL_OF_THEM)
def test_large_run_plans_are_identical(
    spark: SparkSession, tmp_path: Path, large_runs: list[bool], every: bool
) -> None:
    copy_scenarios(
        tmp_path,
        lambda s: s.operator in LARGE and not runs_record_by_record(s),
        every,
        1_000 if every else RUNS,
    )
    lines: list[str] = []
    report = run([tmp_path], granularity="run", spark=spark, echo=lines.append)
    optional = "10 identical, 0 different, 8" if every else "4 identical, 0 different, 1"
    assert lines == [
        f"optional, not counted: {optional} not supported",
        f"{report.identical} identical, 0 different, 0 not supported",
    ]
    assert report.identical > (100 if every else 50)
    assert set(large_runs) == {True}  # always an undecided chunk


def tables(kind: str, left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "left": left, "right": right}


PLAIN = {"versioned": False}
KEPT = {"versioned": True, "history_retention": 50}
# A record without a key, or one that is too old, lies between other records. One run of all records
# would take the last one first, since the table's log lacks the rejected record, whose time counts in
# Kafka Streams.
REFUSED_BETWEEN: dict[str, tuple[str, dict[str, Any], list[tuple[Any, ...]]]] = {
    "join": (
        "table_table_join",
        tables("outer", {"versioned": True, "history_retention": 5}, {**KEPT, "history_retention": 10}),
        [
            ("right", "a", "r1", 57),
            ("left", None, "l1", 62),
            ("left", "a", "l2", 57),
            ("left", "a", "l3", 40),
            ("right", "a", "r2", 30),
            ("right", "a", "r3", 58),
        ],
    ),
    "foreign-key": (
        "foreign_key_join",
        {**tables("left", KEPT, PLAIN), "materialize_result": KEPT},
        [
            ("left", "a", "y|l1", 52),
            ("right", None, "r1", 130),
            ("right", "y", "r2", 15),
            ("left", "a", "y|l2", 1),
            ("left", "a", "y|l3", 60),
        ],
    ),
    "chain": (
        "chain",
        {
            "steps": [
                {"id": "l", "op": "table", "input": "left", "table": KEPT},
                {"id": "r", "op": "table", "input": "right", "table": KEPT},
                {"id": "j", "op": "table_join", "left": "l", "right": "r", "kind": "left"},
                {"id": "t", "op": "to_table", "from": "j", "materialize": KEPT},
            ],
            "output": "t",
        },
        [("left", "a", "l1", 5), ("right", None, None, 10), ("right", "a", "r1", 0)],
    ),
}


def scenarios_with_refused_records() -> list[dict[str, Any]]:
    names = ("input", "key", "value", "timestamp")
    found = [
        complete(
            {
                "name": f"refused-between-{name}",
                "operator": operator,
                "config": config,
                "records": [dict(zip(names, record, strict=True)) for record in records],
            }
        )
        for name, (operator, config, records) in REFUSED_BETWEEN.items()
    ]
    assert all(s["metrics"]["dropped_records"] for s in found)
    return found


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("enough", [1, pytest.param(100, marks=pytest.mark.endurance)])
def test_random_sequences_are_identical_record_by_record(
    spark: SparkSession, tmp_path: Path, enough: int
) -> None:
    """For each operator, ``enough`` short random sequences with different configurations are identical:
    recorded ones first, then new ones, whose expected results the reference model computes. Sliding
    windows are among them."""
    recorded = sorted(SCENARIOS.glob("**/random/*.json"))
    if enough == 1:
        paths = [path for path in recorded if path.stem in RECORD_BY_RECORD]
        shares = {path.stem: [most_informative_start(path)] for path in paths}
        assert all(len(s["expected"]) >= 2 for found in shares.values() for s in found)
    else:
        shares = {path.stem: shortest_of_each_configuration(path)[:enough] for path in recorded}
    assert sum(map(len, shares.values())) >= (len(RECORD_BY_RECORD) if enough == 1 else 40)
    few = [o for o in ALL if len(shares.get(o, ())) < enough and enough > 1]
    assert enough == 1 or {"table_filter", "windowed_aggregate"} <= {*few}
    drawn = {f"new_{o}": scenarios(1, o, configs=2, sequences=2, longest=6) for o in few}
    more = {"configs": enough, "sequences": 3, "longest": RECORDS if enough == 1 else 8}
    drawn["new_sliding"] = scenarios(4, "windowed_aggregate", sliding=True, **more)
    assert all(s["expected"] for s in drawn["new_sliding"][:3])
    path = SCENARIOS / "optional" / "sliding_and_bytes.json"
    sliding = [s for s in json.loads(path.read_text(encoding="utf-8")) if "-sliding" in s["name"]]
    assert len(sliding) >= 5
    sliding = [*map(first_records, sliding)] if enough == 1 else sliding
    every = {**shares, **drawn, "sliding": sliding}
    for name, found in every.items():
        write(tmp_path / f"{name}.json", *found)
    lines: list[str] = []
    run([tmp_path], spark=spark, echo=lines.append)
    count = sum(map(len, every.values()))
    assert lines == [f"{count} identical, 0 different, 0 not supported"]


@pytest.mark.parametrize("granularity", ["run", pytest.param("record", marks=pytest.mark.endurance)])
def test_changed_expectation_is_different(
    spark: SparkSession, tmp_path: Path, granularity: Any
) -> None:
    value = scenario("kip923-dequeue-boundary")
    value["expected"][0] |= {"value": "(wrong,t)"}
    order = scenario("kip914-expired-lookup-left")
    order["expected"][:2] = reversed(order["expected"][:2])
    store = scenario("kip889-put-return-codes")
    store["final_store"][0]["valid_from"] += 1
    answer = scenario("kip889-expired-get")
    answer["expected"][-1] = {"value": "wrong", "timestamp": 1, "valid_to": None}
    metric = scenario("kip889-grace-rejects-old-writes")
    metric["metrics"]["dropped_records"] += 7
    broken = [value, order, store, answer, metric]
    if granularity == "record":
        broken = [value, order]  # calls of the store take longest, and are compared in the same way
    good = scenario("kip889-retention-zero")
    lines: list[str] = []
    report = run(
        [write(tmp_path / "broken.json", *broken, good)],
        granularity=granularity,
        json_file=tmp_path / "report.json",
        spark=spark,
        echo=lines.append,
    )
    assert lines[-1] == f"1 identical, {len(broken)} different, 0 not supported"
    assert not report.ok
    said = "\n".join(lines)
    for each in broken:
        assert each["name"] in said
    assert '"(wrong,t)"' in said
    assert any("expected" in line and "/ got" in line for line in lines)
    written = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert (written["different"], written["ok"]) == (len(broken), False)
    assert len([s for s in written["scenarios"] if s["differences"]]) == len(broken)


def test_missing_entry_or_error_is_different(spark: SparkSession, tmp_path: Path) -> None:
    missing = scenario("kip889-motivation-versioned")
    missing["expected"].append(dict(missing["expected"][-1]))
    refused = scenario("kip923-error-grace-unversioned")
    del refused["expected_error"]
    accepted = scenario("kip923-grace-zero")
    accepted["expected_error"] = {"type": "X", "at": "build", "trigger": None, "message": "no"}
    late = scenario("kip889-probe-null-key")
    late["expected_error"]["trigger"] = 0
    lines: list[str] = []
    path = write(tmp_path / "errors.json", missing, refused, accepted, late)
    report = run([path], spark=spark, echo=lines.append)
    assert report.different == 4
    said = "\n".join(lines)
    assert "/ got nothing" in said
    assert "topology: expected none / got the error" in said
    assert "topology: expected an error (no) / got none" in said
    assert "error: expected one at record 0 / got one at record 1" in said


@pytest.mark.parametrize("error", [SourceError("out of memory"), RuntimeError("out of memory")])
def test_unexpected_error_is_attributed_to_its_scenario(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """An unexpected error counts as a difference of the scenario that causes it, not of others in its
    group. No known scenario fails in Spark, so the test replaces the run of a group by one that
    fails."""
    worked = read_scenarios([SCENARIOS / "worked"])
    found = [one for one in worked if one.operator == "table_filter" and one.error is None][:3]

    class Fails:
        def __init__(self, group: list[Layout], *_: Any) -> None:
            self.group = group

        def run(self, results: dict[Scenario, ScenarioOutcome]) -> None:
            if found[1] in [each.scenario for each in self.group]:
                raise error
            for each in self.group:
                settle(results[each.scenario], [])

    monkeypatch.setattr(runner, "_Group", Fails)
    results = {s: ScenarioOutcome(s, "not supported") for s in found}
    for job in side_by_side(found, "run", results):
        job.run(cast(Any, None))
    assert [results[s].result for s in found] == ["identical", "different", "identical"]
    assert f"{type(error).__name__}: out of memory" in results[found[1]].differences[0]


def at_two_times(path: Path, steps: list[dict[str, Any]], *records: tuple[str, str, str]) -> Path:
    """Writes a chain's scenario at time 1000, and another one at time 10, for which the stream time of
    the first is too late. The last step keeps a history of 1."""
    steps[-1]["materialize"] = {**KEPT, "history_retention": 1}
    found = [
        {
            "name": f"by-{time}",
            "operator": "chain",
            "config": {"steps": steps, "output": steps[-1]["id"]},
            "records": [
                {"input": name, "key": key, "value": value, "timestamp": time}
                for name, key, value in records
            ],
        }
        for time in (1000, 10)
    ]
    return write(path, *map(complete, found))


def test_foreign_key_join_has_left_partitions(spark: SparkSession, tmp_path: Path) -> None:
    """The result has the partitions of the left side, whatever those of the right side are. Otherwise
    the stream time of another scenario would drop results."""
    steps: list[dict[str, Any]] = [
        {"id": "r", "op": "table", "input": "right", "table": PLAIN},
        {"id": "a", "op": "aggregate", "from": "r", "aggregate": "count"},
        {"id": "l", "op": "table", "input": "left", "table": PLAIN},
        {"id": "f", "op": "foreign_key_join", "kind": "left", "left": "l", "right": "a"},
    ]
    records = [("left", key, f"y|{n}") for n, key in enumerate("abc", 1)]
    path = at_two_times(tmp_path / "moved.json", steps, *records)
    report = run([path], granularity="record", spark=spark, echo=[].append)
    assert report.ok
    assert report.identical == 2


def test_join_with_regrouped_table_keeps_scenarios_apart(spark: SparkSession, tmp_path: Path) -> None:
    """A grouped table and a source have equal partitions, so a join of both has them too. Otherwise the
    stream time of another scenario would drop results."""
    steps: list[dict[str, Any]] = [
        {"id": "l", "op": "table", "input": "left", "table": PLAIN},
        {"id": "a", "op": "aggregate", "from": "l", "aggregate": "count"},
        {"id": "r", "op": "table", "input": "right", "table": PLAIN},
        {"id": "j", "op": "table_join", "kind": "outer", "left": "r", "right": "a"},
    ]
    records = [("left", "a", "y|1"), ("right", "y", "r1"), ("left", "b", "y|2")]
    path = at_two_times(tmp_path / "apart.json", steps, *records)
    lines: list[str] = []
    report = run([path], granularity="run", spark=spark, echo=lines.append)
    assert lines == ["2 identical, 0 different, 0 not supported"]
    assert report.ok


def test_optional_scenarios_are_reported_separately(spark: SparkSession, tmp_path: Path) -> None:
    broken = scenario("kip889-put-return-codes")
    broken["final_store"] = []
    write(tmp_path / "optional" / "one.json", broken)
    write(tmp_path / "worked" / "two.json", scenario("kip889-retention-zero"))
    lines: list[str] = []
    report = run([tmp_path], granularity="run", spark=spark, echo=lines.append)
    assert report.ok
    assert lines[-2:] == [
        "optional, not counted: 0 identical, 1 different, 0 not supported",
        "1 identical, 0 different, 0 not supported",
    ]


def test_byte_limits_are_unsupported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "other.json", limited_in_bytes())
    assert not run([path]).ok
    assert capsys.readouterr().out == "0 identical, 0 different, 1 not supported\n"
    with pytest.raises(SourceError, match="found none"):
        run([path], ["versioned_store"])


def test_command_reports_invalid_input(tmp_path: Path) -> None:
    app = Typer()
    app.command()(conformance)
    path = write(tmp_path / "other.json", limited_in_bytes())
    broken = tmp_path / "broken.json"
    broken.write_text("[{]", encoding="utf-8")
    runner = CliRunner()
    unsupported = runner.invoke(app, [str(path)])
    assert unsupported.exit_code == 1
    assert unsupported.output.endswith("0 identical, 0 different, 1 not supported\n")
    for words, said in (
        ([str(broken)], "expected scenarios as FORMAT.md describes them"),
        ([str(path), "--operator", "nothing"], "expected operators among"),
        ([str(path), "--granularity", "day"], "expected the granularity 'record' or 'run', got 'day'"),
        ([str(tmp_path / "nowhere.json")], "does not exist"),
    ):
        refused = runner.invoke(app, words)
        assert refused.exit_code == 2
        assert said in " ".join(refused.output.split())
