"""The operators agree with an independent model, and the model with the recorded scenarios."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from tests.core.reference_model import complete
from vt_dagster.conformance import run

SCENARIOS = Path(__file__).parents[1] / "conformance"
KEYS = st.sampled_from(["a", "aa", "b", "B"])
TIMES = st.integers(0, 40)


def recorded() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted(SCENARIOS.rglob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        found += content if isinstance(content, list) else [content]
    return [s | s.get("by_design", {}) for s in found]


@pytest.mark.parametrize("operator", ["versioned_store", "stream_table_join"])
def test_the_model_agrees_with_kafka_streams(operator: str) -> None:
    checked = 0
    for scenario in recorded():
        if scenario["operator"] == operator and not scenario.get("expected_error"):
            completed = complete(scenario)
            for field in scenario.keys() & {"expected", "final_store", "metrics"}:
                assert completed[field] == scenario[field], (scenario["name"], field)
            checked += 1
    assert checked > 80


def calls() -> st.SearchStrategy[dict[str, Any]]:
    key = {"key": KEYS}
    value = st.none() | st.sampled_from(["v1", "v2", "v3"])
    put = st.fixed_dictionaries({"call": st.just("put"), **key, "value": value, "timestamp": TIMES})
    delete = st.fixed_dictionaries({"call": st.just("delete"), **key, "timestamp": TIMES})
    get = st.fixed_dictionaries({"call": st.just("get"), **key}, optional={"as_of": TIMES})
    return st.one_of(put, put, delete, get)


def stores() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "operator": st.just("versioned_store"),
            "config": st.fixed_dictionaries({"history_retention": st.integers(0, 25)}),
            "records": st.lists(calls(), min_size=1, max_size=12),
        }
    )


@st.composite
def joins(draw: st.DrawFn) -> dict[str, Any]:
    versioned = draw(st.booleans())
    retention = draw(st.integers(0, 25))
    record = st.fixed_dictionaries(
        {
            "input": st.sampled_from(["table", "stream"]),
            "key": st.one_of(KEYS, KEYS, KEYS, st.none()),
            "value": st.one_of(st.sampled_from(["x", "y", "z"]), st.none()),
            "timestamp": TIMES,
        }
    )
    grace = st.none() | st.integers(0, retention) if versioned else st.none()
    return {
        "operator": "stream_table_join",
        "config": {
            "kind": draw(st.sampled_from(["inner", "left"])),
            "table": {"versioned": versioned, "history_retention": retention},
            "grace": draw(grace),
        },
        "records": draw(st.lists(record, min_size=1, max_size=12)),
    }


@pytest.mark.slow
@settings(
    max_examples=2,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(scenarios=st.lists(stores() | joins(), min_size=40, max_size=60))
def test_the_operators_agree_with_the_model(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, scenarios: list[dict[str, Any]]
) -> None:
    named = [complete(s | {"name": f"random-{i}"}) for i, s in enumerate(scenarios)]
    path = tmp_path_factory.mktemp("random") / "scenarios.json"
    path.write_text(json.dumps(named), encoding="utf-8")
    for granularity in ("record", "run"):
        lines: list[str] = []
        report = run([path], granularity=granularity, spark=spark, echo=lines.append)
        assert report.ok, "\n".join(lines)
