"""A corrected join on Delta: what a killed run leaves, and what its tables say without Spark."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.storage.topology import Topology
from vt_dagster.runs.audit import audit
from vt_dagster.runs.run import run_once
from vt_dagster.storage.lookup import look_up
from vt_dagster.storage.store import AssetStore, stores_of
from vt_dagster.storage.view import View


class KilledError(Exception):
    pass


def test_corrections_on_delta(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = Topology(tmp_path)
    joined = topology.orders.join(
        topology.rates,
        name="corrected",
        select=["right.n as rate", "left.n as number"],
        corrected_for=timedelta(minutes=5),
    )
    stores = stores_of(topology.warehouse, spark)
    topology.land("rates", "1.jsonl", [("a", 1, 0)])
    topology.land("orders", "1.jsonl", [("a", 1, 1), ("a", 2, 4), ("b", 3, 4), ("a", 4, 8)])
    for node in (topology.rates, topology.orders, joined):
        run_once(node, stores)
    topology.land("rates", "2.jsonl", [("a", 2, 0.5), ("a", 3, 3.5), ("b", 4, 4)])
    topology.land("orders", "2.jsonl", [("a", 5, 9)])
    for node in (topology.rates, topology.orders):
        run_once(node, stores)

    def killed(*_: object, **__: object) -> None:
        raise KilledError

    for step in ("commit", "update"):
        with monkeypatch.context() as patched:
            where = View if step == "update" else AssetStore
            patched.setattr(where, step, killed)
            with pytest.raises(KilledError):
                run_once(joined, stores)
    assert run_once(joined, stores).commit is None
    store = AssetStore(topology.warehouse, joined, spark)
    rows = {r["number"]: r for r in look_up(topology.warehouse, "corrected").to_pylist()}
    # The first order was final: stream time had been at 8.
    assert {n: (r["rate"], r["revision"]) for n, r in rows.items()} == {
        1: (1, 0),
        2: (3, 1),
        3: (4, 0),
        4: (3, 1),
        5: (3, 0),
    }
    assert [rows[n]["is_final"] for n in sorted(rows)] == [True, False, False, False, False]
    by_spark = {r["number"]: r["is_final"] for r in store.read().collect()}
    assert by_spark == {n: r["is_final"] for n, r in rows.items()}
    head = store.head()
    assert head is not None
    told = {n: head.commit.counts[n] for n in ("in", "changes", "corrected", "corrections_too_late")}
    assert told == {"in": 4, "changes": 3, "corrected": 3, "corrections_too_late": 1}
    assert [f.name for f in audit(store) if not f.passed] == []
