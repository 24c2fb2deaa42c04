"""The model agrees with the recorded scenarios; ``test_conformance`` compares the operators with it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.core.random_chains import DOUBTFUL, SHAPES
from tests.core.random_scenarios import ALL, main, scenarios
from tests.core.reference_model import NotCovered, complete

SCENARIOS = Path(__file__).parents[1] / "conformance"
OPERATORS = (*ALL, "global_table")
OUTCOME = ("expected", "final_store_of", "final_store", "metrics")

# Limits in bytes: Kafka's own bookkeeping, which FORMAT.md leaves optional.
NOT_COVERED = "kip328-bytes-"


def recorded(*directories: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for directory in directories:
        for path in sorted((SCENARIOS / directory).rglob("*.json")):
            content = json.loads(path.read_text(encoding="utf-8"))
            found += content if isinstance(content, list) else [content]
    return [s | s.get("by_design", {}) for s in found]


def error_position(error: dict[str, Any] | None) -> tuple[Any, ...] | None:
    """When and at which record an error occurs, if there is one; its name and message may differ."""
    return (error["at"], error.get("trigger")) if error else None


def differences(found: Iterable[dict[str, Any]]) -> list[str]:
    told: list[str] = []
    for scenario in found:
        ours = complete(scenario)
        told += [
            f"{scenario['name']}: {field} {ours.get(field)}, recorded {scenario[field]}"
            for field in OUTCOME
            if field in scenario and ours.get(field) != scenario[field]
        ]
        failed, failing = (
            error_position(ours.get("expected_error")),
            error_position(scenario.get("expected_error")),
        )
        if failed != failing:
            told.append(f"{scenario['name']}: error {failed}, recorded {failing}")
    return told


@pytest.mark.parametrize("operator", OPERATORS)
def test_model_agrees_with_kafka_streams(operator: str) -> None:
    found = [s for s in recorded("worked", "random") if s["operator"] == operator]
    assert found
    assert differences(found) == []


def test_model_agrees_on_sliding_windows() -> None:
    found = [s for s in recorded("optional") if not s["name"].startswith(NOT_COVERED)]
    assert {s["config"]["window"]["type"] for s in found} == {"sliding"}
    assert differences(found) == []


def test_model_covers_all_but_byte_limits() -> None:
    for scenario in recorded("worked", "random", "optional"):
        if scenario["name"].startswith(NOT_COVERED):
            with pytest.raises(NotCovered):
                complete(scenario)
        assert scenario["operator"] in OPERATORS


def test_left_self_join_emits_deletes() -> None:
    """The expected records are those of the TopologyTestDriver of Kafka Streams 4.1.1."""
    source = {"id": "t", "op": "table", "input": "table", "table": {"versioned": False}}
    join = {"id": "j", "op": "table_join", "kind": "left", "left": "t", "right": "t"}
    values = ["1", "2", None, None]
    found = complete(
        {
            "operator": "chain",
            "config": {"steps": [source, join], "output": "j"},
            "records": [
                {"input": "table", "key": "a", "value": value, "timestamp": at}
                for at, value in enumerate(values)
            ],
        }
    )
    emitted = [(e["trigger"], e["value"]) for e in found["expected"]]
    assert emitted == [(0, "(1,1)"), (0, "(1,1)"), (1, "(2,2)"), (1, "(2,2)"), (2, None)]


def test_random_scenarios_are_reproducible_and_complete() -> None:
    for operator in ALL:
        found = scenarios(7, operator, configs=8, sequences=2)
        assert found == scenarios(7, operator, configs=8, sequences=2)
        assert found != scenarios(8, operator, configs=8, sequences=2)
        assert len({s["name"] for s in found}) == 16
        assert {s["operator"] for s in found} == {operator}
        for scenario in found:
            assert "expected_error" in scenario or "metrics" in scenario
            assert complete(json.loads(json.dumps(scenario))) == scenario


def test_random_scenarios_emit_drop_and_have_nulls() -> None:
    """Most scenarios emit records; enough of them drop some, have late records, or have null values."""
    for operator in ALL:
        found = scenarios(7, operator, configs=40, sequences=2)
        seen = Counter[str]()
        for scenario in found:
            seen["emitted"] += bool(scenario["expected"])
            seen["dropped"] += scenario.get("metrics", {}).get("dropped_records", 0) > 0
            times = [r["timestamp"] for r in scenario["records"] if "timestamp" in r]
            seen["late"] += times != sorted(times)
            seen["null"] += any(r.get("value", "") is None for r in scenario["records"])
        assert seen["emitted"] > len(found) * 0.75, (operator, seen)
        assert min(seen["dropped"], seen["late"], seen["null"]) > len(found) * 0.1, (operator, seen)


def test_random_chains_have_every_shape() -> None:
    for doubtful, shapes in ((False, SHAPES), (True, DOUBTFUL)):
        found = scenarios(7, "chain", configs=len(shapes), sequences=1, doubtful=doubtful)
        assert len({tuple(s["op"] for s in c["config"]["steps"]) for c in found}) > len(shapes) // 2


def test_random_scenarios_are_written_in_recorded_format(tmp_path: Path) -> None:
    main(["7", str(tmp_path), "--configs", "2", "--sequences", "2"])
    assert {p.stem for p in tmp_path.iterdir()} == set(ALL)
    for operator in ALL:
        written = json.loads((tmp_path / f"{operator}.json").read_text(encoding="utf-8"))
        assert written == scenarios(7, operator, configs=2, sequences=2)
