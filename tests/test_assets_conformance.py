"""Real assets emit what Kafka Streams emitted in the worked scenarios. By default scenarios of some
operators run; the other ones run with the marker ``endurance``.

``tests/asset_scenarios.py`` runs the scenarios. ``side_by_side`` compares the records that each run
emits, in order, the final store, and the numbers of dropped and waiting records.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.asset_scenarios import StoreThroughAssets, ThroughAssets, leave_views_behind, runs_of
from tests.storage.test_random_chains import OF_CHAINS
from vt_dagster.conformance.runner import split_into_runs, store_of
from vt_dagster.conformance.scenario import Scenario, read_scenarios
from vt_dagster.conformance.steps import layout, nodes_of, supported
from vt_dagster.errors import TopologyError
from vt_dagster.runs.audit import audit

SCENARIOS = Path(__file__).parent / "conformance"
COUNTS_BY_PARTITION = True
"""Whether commits count dropped records by partition: then these are compared for each scenario."""
RANDOM = [
    "stream-table-join-1-00-2",  # inner, retention 1
    "stream-table-join-1-04-1",  # inner, retention 50
    "stream-table-join-1-12-1",  # left, grace 5, retention 20
    "stream-table-join-1-12-4",
]
FAILING = "kip328-shut-down-keys"
"""A scenario whose suppression buffer stops the run of its fourth record."""
RUNS = 2
"""If a scenario needs more runs than these, only the records of these runs are used by default. The
whole scenario runs in memory (``test_conformance.py``), and here with the marker ``endurance``."""


def chosen() -> list[Scenario]:
    drawn = read_scenarios([SCENARIOS / "random" / "stream_table_join.json"])
    return [*read_scenarios([SCENARIOS / "worked"]), *(s for s in drawn if s.name in RANDOM)]


def split_scenario(scenario: Scenario) -> list[range]:
    """Splits a scenario into as few runs as keep its order. A single run of a single input is split
    into halves. The scenario ``FAILING`` has a run that fills its buffer, then one run for each
    record."""
    runs = split_into_runs(layout(scenario), "run")
    count = len(scenario.records)
    if scenario.name == FAILING:
        return [range(3), *(range(i, i + 1) for i in range(3, count))]
    if len(runs) == 1 and count > 1 and len({r["input"] for r in scenario.records}) == 1:
        return [range(count // 2), range(count // 2, count)]
    return runs


def first_runs(scenario: Scenario) -> Scenario:
    """The first ``RUNS`` runs of a scenario with more runs. Its store and dropped records at their end
    are not known."""
    runs = split_scenario(scenario)
    if len(runs) <= RUNS:
        return scenario
    end = runs[RUNS].start
    expected = [e for e in scenario.expected if e["trigger"] < end]
    records = scenario.records[:end]
    return replace(scenario, records=records, expected=expected, final_store=None, dropped=None)


def is_refused(scenario: Scenario) -> bool:
    """Whether the scenario's topology is refused when it is built."""
    try:
        store_of(scenario) if scenario.operator == "versioned_store" else nodes_of([layout(scenario)])
    except TopologyError:
        return True
    return False


SHOWN = ("windowed_aggregate", "stream_table_join", "table_table_join")
"""Operators of which one scenario runs by default. All operators of tables also run in random chains,
which are compared with the reference model: ``storage/test_random_chains.py``."""
STORE, SEVERAL = "store", "several runs"
ENDURING = "when asked for: "


def groups() -> dict[str, list[Scenario]]:
    """The scenarios that run together, without those whose topology Kafka Streams refused."""
    every = [s for s in chosen() if s.error is None or s.error["at"] != "build"]
    others = [s for s in every if s.operator != "versioned_store"]
    return {
        STORE: [s for s in every if s.operator == "versioned_store"],
        SEVERAL: [first_runs(s) for s in representative_scenarios(others)],
        **{ENDURING + run_count_text(group): group for group in ThroughAssets.groups(others)},
    }


def representative_scenarios(scenarios: list[Scenario]) -> list[Scenario]:
    """The scenario that fails, and one scenario of each operator of ``SHOWN``: preferably with several
    runs, then with a versioned table, then with the most emitted records. The other ones run in memory,
    and here with the marker ``endurance``: an asset's run takes seconds, with the same operators."""
    found = [s for s in scenarios if s.name == FAILING]
    others = [s for s in scenarios if s.operator in SHOWN]

    def how_telling(scenario: Scenario) -> tuple[bool, bool, int]:
        versioned = '"versioned": true' in json.dumps(scenario.config)
        return len(split_scenario(scenario)) > 1, versioned, len(scenario.expected)

    for operator in {s.operator: None for s in others}:
        found.append(max((s for s in others if s.operator == operator), key=how_telling))
    return found


def run_count_text(group: list[Scenario]) -> str:
    """The largest number of runs of a group's scenarios, in words."""
    return f"up to {max(runs_of(s) for s in group)} runs"


GROUPS = groups()


def test_every_scenario_is_in_a_group() -> None:
    scenarios = chosen()
    assert all(map(supported, scenarios))
    refused = [s for s in scenarios if is_refused(s)]
    assert refused == [s for s in scenarios if s.error is not None and s.error["at"] == "build"]
    assert len(refused) == 11, "scenarios whose topology is refused when it is built"
    enduring = [s for name, group in GROUPS.items() if name.startswith(ENDURING) for s in group]
    assert len(GROUPS[STORE]) + len(enduring) == 162 + len(RANDOM) - len(refused)
    assert [len(group) for group in GROUPS.values()] == [12, 4, 90, 41, 12]
    (failing,) = (s for s in GROUPS[SEVERAL] if s.name == FAILING)
    assert failing.error is not None
    assert failing.error["trigger"] == split_scenario(failing)[RUNS - 1].start
    in_several = {s.operator for s in GROUPS[SEVERAL] if len(split_scenario(s)) > 1}
    others = {s.operator for s in enduring} - in_several - {"chain"}
    assert {operator.removeprefix("table_") for operator in others} <= OF_CHAINS, "or runs there"


@pytest.mark.usefixtures("few_rows")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "group",
    [pytest.param(g, marks=pytest.mark.endurance if g.startswith(ENDURING) else ()) for g in GROUPS],
)
def test_assets_equal_kafka_streams(
    group: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_views_behind(monkeypatch, many_rows=group.startswith(ENDURING))
    found = GROUPS[group]
    scenarios = (
        StoreThroughAssets(found, tmp_path, spark)
        if group == STORE
        else ThroughAssets(
            found, tmp_path, spark, [*map(split_scenario, found)] if group == SEVERAL else None
        )
    )
    scenarios.run()
    differences = scenarios.differences(COUNTS_BY_PARTITION)
    assert [line for name, lines in differences.items() if lines for line in (f"{name}:", *lines)] == []
    assert len(differences) == len(found)
    nodes = scenarios.warehouse.nodes.values()
    for node in (n for n in nodes if n.operator is None and n.versioned):
        findings = audit(scenarios.warehouse.store(node.name))
        assert [one for one in findings if not one.passed] == [], node.name
