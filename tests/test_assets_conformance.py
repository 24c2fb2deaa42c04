"""Every worked scenario through real assets, compared with what Kafka Streams emitted.

See ``tests/through_assets.py`` for how they run, and ``side_by_side`` for what is compared: what each
run emits, in order, or as a set where results are held back; the final store; what was dropped, waits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.through_assets import StoreThroughAssets, ThroughAssets, leave_views_behind, runs_of
from vt_dagster.conformance.runner import split_into_runs, store_of
from vt_dagster.conformance.scenario import Scenario, read_scenarios
from vt_dagster.conformance.steps import layout, nodes_of, supported
from vt_dagster.errors import TopologyError
from vt_dagster.runs.audit import audit

SCENARIOS = Path(__file__).parent / "conformance"
COUNTS_BY_PARTITION = True
"""Whether commits say by partition what became of records: then it is compared by scenario."""
RANDOM = [
    "stream-table-join-1-00-2",  # inner, retention 1
    "stream-table-join-1-04-1",  # inner, retention 50
    "stream-table-join-1-12-1",  # left, grace 5, retention 20
    "stream-table-join-1-12-4",
]
RUNS = 4
"""Of a scenario that needs more runs, only the records of these are taken for every change: its other
ones run in memory (``test_conformance.py``), and here when asked for."""
OF_EACH = 6
"""So many scenarios of an operator and a group run for every change; the others in memory, and here
when asked for."""


def chosen() -> list[Scenario]:
    drawn = read_scenarios([SCENARIOS / "random" / "stream_table_join.json"])
    return [*read_scenarios([SCENARIOS / "worked"]), *(s for s in drawn if s.name in RANDOM)]


def beginning(scenario: Scenario) -> Scenario:
    """A scenario's first runs, if it has many; what is left at its end is then not known."""
    runs = split_into_runs(layout(scenario), "run")
    if len(runs) <= RUNS:
        return scenario
    end = runs[RUNS].start
    expected = [e for e in scenario.expected if e["trigger"] < end]
    records = scenario.records[:end]
    return replace(scenario, records=records, expected=expected, final_store=None, dropped=None)


def is_refused(scenario: Scenario) -> bool:
    """Whether its topology cannot be built."""
    try:
        store_of(scenario) if scenario.operator == "versioned_store" else nodes_of([layout(scenario)])
    except TopologyError:
        return True
    return False


STORE = "store"
ENDURING = "when asked for: "


def groups() -> dict[str, list[Scenario]]:
    """Scenarios that run together; those whose topology is refused are left out."""
    every = [s for s in chosen() if not is_refused(s)]
    others = [s for s in every if s.operator != "versioned_store"]
    long = [s for s in others if runs_of(s) > RUNS and s.name not in RANDOM]
    found = {STORE: [s for s in every if s.operator == "versioned_store"]}
    for group in ThroughAssets.groups([beginning(s) for s in others]):
        now = spread(group)
        found[about_runs(group)] = now
        found[ENDURING + about_runs(group)] = [s for s in group if s not in now]
    return {**found, ENDURING + about_runs(long): long}


def spread(group: list[Scenario]) -> list[Scenario]:
    """Some of each operator, from the first to the last, and the random ones."""
    found = []
    for operator in {s.operator: None for s in group}:
        of_it = [s for s in group if s.operator == operator]
        places = {round(i * (len(of_it) - 1) / (OF_EACH - 1)) for i in range(OF_EACH)}
        found += [s for place, s in enumerate(of_it) if place in places or s.name in RANDOM]
    return found


def about_runs(group: list[Scenario]) -> str:
    """How many runs a group's scenarios take, in words."""
    return f"up to {max(runs_of(s) for s in group)} runs"


GROUPS = groups()


def test_every_scenario_is_in_a_group() -> None:
    scenarios = chosen()
    assert all(map(supported, scenarios))
    refused = [s for s in scenarios if is_refused(s)]
    assert refused == [s for s in scenarios if s.error is not None and s.error["at"] == "build"]
    assert len(refused) == 11, "scenarios whose topology is refused when it is built"
    *short, long = GROUPS.values()
    assert sum(map(len, short)) == 157 + len(RANDOM) - len(refused)
    assert [len(group) for group in short] == [12, 45, 40, 29, 24]
    assert len(long) == 11, "scenarios of which only the first runs are taken for every change"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "group",
    [pytest.param(g, marks=pytest.mark.endurance if g.startswith(ENDURING) else ()) for g in GROUPS],
)
def test_assets_give_what_kafka_streams_gave(
    group: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_views_behind(monkeypatch)
    kind = StoreThroughAssets if group == STORE else ThroughAssets
    scenarios = kind(GROUPS[group], tmp_path, spark)
    scenarios.run()
    found = scenarios.differences(COUNTS_BY_PARTITION)
    assert [line for name, lines in found.items() if lines for line in (f"{name}:", *lines)] == []
    assert len(found) == len(GROUPS[group])
    nodes = scenarios.warehouse.nodes.values()
    for node in (n for n in nodes if n.operator is None and n.versioned):
        findings = audit(scenarios.warehouse.store(node.name))
        assert [one for one in findings if not one.passed] == [], node.name
