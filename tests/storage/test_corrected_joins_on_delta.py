"""Corrected joins on Delta: recovery after a killed run, and reads of their tables without Spark."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from tests.market import checks, materialized, run
from tests.storage.topology import Topology
from vt_dagster import build_asset, build_checks
from vt_dagster.runs.audit import audit
from vt_dagster.runs.replay import replay
from vt_dagster.runs.restate import restate
from vt_dagster.runs.run import run_once
from vt_dagster.runs.what_if import what_if
from vt_dagster.storage.arrow_reader import look_up
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.view import View

pytestmark = pytest.mark.usefixtures("few_rows")


class KilledError(Exception):
    pass


@pytest.mark.endurance  # test_crash.py kills such runs, the test through Dagster has such rows
def test_corrected_join_on_delta(
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


@pytest.mark.endurance  # test_corrected_joins.py has such rows, the test below restates and replays
def test_keyed_inner_rows_appear_and_vanish_on_delta(tmp_path: Path, spark: SparkSession) -> None:
    """An inner join with ``key``: a rate comes after its order, is deleted, and comes back. A restate,
    a replay and a what-if agree with the live rows, whatever the number of corrections per row."""
    topology = Topology(tmp_path)
    about: dict[str, Any] = {"corrected_for": timedelta(minutes=10), "key": "n"}
    select = ["left.k", "left.n", "right.n as rate"]
    joined = topology.orders.join(topology.rates, name="corrected", select=select, **about)
    nodes, stores = (topology.rates, topology.orders, joined), stores_of(topology.warehouse, spark)
    rates = [[("b", 1, 0)], [("a", 2, 1)], [("a", None, 1.5)], [("a", 4, 1.5), ("b", None, 2)]]
    orders = [[("a", 1, 2), ("b", 2, 3)], [("c", 3, 3)], [], [("b", 4, 1)]]
    for i, (some, others) in enumerate(zip(rates, orders, strict=True)):
        topology.land("rates", f"{i}.jsonl", some)
        if others:
            topology.land("orders", f"{i}.jsonl", others)
        for node in nodes:
            run_once(node, stores)
    # The number of corrections of a row depends on the runs; the current rows do not.
    expected = {1: (4, 2), 4: (1, 0)}
    assert _rates(topology, spark, "corrected") == expected
    store = stores(joined)
    log = [
        (r["n"], r["rate"], r["revision"], r["is_tombstone"])
        for r in store.read("log").orderBy("partition", "offset").collect()
    ]
    assert log == [
        (2, 1, 0, False),
        (1, 2, 0, False),
        (1, None, 1, True),
        (1, 4, 2, False),
        (2, None, 1, True),
        (4, 1, 0, False),
    ]
    assert [f.name for f in audit(store) if not f.passed] == []
    assert restate(topology.warehouse, joined, "2020-01-01T00:00:00Z", spark, nodes) == ["corrected"]
    assert {n: rate for n, (rate, _) in _rates(topology, spark, "corrected").items()} == {1: 4, 4: 1}
    replay(topology.warehouse, joined, "anew", spark)
    assert _rates(topology, spark, "anew") == {1: (4, 0), 4: (1, 0)}
    doubled = [*select[:2], "right.n * 2 as rate"]
    other = topology.orders.join(topology.rates, name="corrected", select=doubled, **about)
    changes = what_if(topology.warehouse, other, spark)
    assert (changes.added, changes.removed, changes.changed) == (0, 0, 2)


@pytest.mark.endurance  # each rule: test_corrected_stream_join_on_delta.py, test_crash.py
def test_corrected_stream_join_on_delta(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = Topology(tmp_path)
    amended = topology.orders.outer_join(
        topology.payments,
        name="amended",
        select=["left.n as number", "right.n as payment"],
        within=timedelta(minutes=2),
        corrected_for=timedelta(minutes=10),
    )
    stores = stores_of(topology.warehouse, spark)
    topology.land("orders", "1.jsonl", [("a", 1, 0), ("b", 2, 1), ("c", 3, 8)])
    topology.land("payments", "1.jsonl", [("d", 11, 2)])
    for node in (topology.orders, topology.payments, amended):
        run_once(node, stores)
    topology.land("payments", "2.jsonl", [("a", 12, 1), ("c", 13, 20), ("b", 14, 2)])
    run_once(topology.payments, stores)

    def killed(*_: object, **__: object) -> None:
        raise KilledError

    for step in ("commit", "update"):
        with monkeypatch.context() as patched:
            patched.setattr(View if step == "update" else AssetStore, step, killed)
            with pytest.raises(KilledError):
                run_once(amended, stores)
    assert run_once(amended, stores).commit is None
    store = AssetStore(topology.warehouse, amended, spark)
    told = look_up(topology.warehouse, "amended").to_pylist()
    rows = {(r["number"], r["payment"]): r["is_final"] for r in told}
    # The payment of b was too late, after one of minute 20: both keep their rows without a match.
    assert rows == {
        (1, 12): True,
        (2, None): True,
        (3, None): False,
        (None, 11): True,
        (None, 14): True,
    }
    assert {(r["number"], r["payment"]): r["is_final"] for r in store.read().collect()} == rows
    gone = store.read("log").where("is_tombstone").collect()
    assert [(r["revision"], r["old"]["number"], r["cause"]["offset"]) for r in gone] == [(1, 1, 1)]
    quarantine = store.quarantine()
    assert quarantine is not None
    assert [(r["reason"], r["source"], r["position"]) for r in quarantine.collect()] == [
        ("too_late", "payments", 3)
    ]
    assert [f.name for f in audit(store) if not f.passed] == []
    replay(topology.warehouse, amended, "anew", spark)
    anew = AssetStore.open(topology.warehouse, "anew", spark).read().collect()
    assert {(r["number"], r["payment"]) for r in anew} == {*rows}


def test_corrected_join_in_dagster_equals_replay(tmp_path: Path, spark: SparkSession) -> None:
    topology = Topology(tmp_path)
    nodes, warehouse = (topology.rates, topology.orders, topology.corrected), topology.warehouse
    assets = [*map(build_asset, nodes), *map(build_checks, nodes)]
    topology.land("rates", "1.jsonl", [("a", 1, 0)])
    topology.land("orders", "1.jsonl", [("a", 1, 1), ("a", 2, 4), ("b", 3, 4), ("a", 4, 8)])
    first: Commit | None = None
    for node in nodes:
        first = run_once(node, stores_of(warehouse, spark)).commit
    assert first is not None
    assert first.counts["corrections_too_late"] == 0
    # The rate of minute 3.5 comes in time for the orders it covers, that of 3.2 after corrected_for.
    topology.land("rates", "2.jsonl", [("a", 3, 3.5), ("b", 4, 10), ("a", 7, 3.2), ("a", 8, 4)])
    topology.land("orders", "2.jsonl", [("a", 5, 9)])
    with dg.DagsterInstance.ephemeral() as instance:
        second = run(assets, warehouse, instance=instance)
    told = materialized(second, "corrected")
    names = ("corrected", "corrections_too_late", "in", "out")
    assert [told[f"records_{n}"] for n in names] == [2, 1, 5, 3]
    assert all(one.passed for one in checks(second).values())
    rows = _rates(topology, spark, "corrected")
    # Order 2 has the rate that came in time, not the one of its own minute, which came too late.
    assert rows == {1: (1, 0), 2: (3, 1), 3: (None, 0), 4: (8, 1), 5: (8, 0)}
    store = AssetStore(warehouse, topology.corrected, spark)
    listed = _listed(store)
    assert listed == [("too_late", "orders", 1, {"table": "rates", "partition": 0, "offset": 4})]
    # A restate, in place: the quarantine keeps the rejections of the batches before its start.
    made = restate(warehouse, topology.corrected, "2020-01-01T00:09:00Z", spark, nodes)
    assert made == ["corrected"]
    assert _rates(topology, spark, "corrected") == rows
    assert _listed(AssetStore(warehouse, topology.corrected, spark)) == listed
    # A replay: an order whose row was final gets the rate that the table has now.
    replay(warehouse, topology.corrected, "anew", spark)
    assert _rates(topology, spark, "anew") == {
        n: (8 if n == 2 else rate, 0) for n, (rate, _) in rows.items()
    }


def _rates(topology: Topology, spark: SparkSession, name: str) -> dict[int, tuple[int | None, int]]:
    rows = AssetStore.open(topology.warehouse, name, spark).read().collect()
    return {r["n"]: (r["rate"], r["revision"]) for r in rows}


def _listed(store: AssetStore) -> list[tuple[Any, ...]]:
    rows = store.quarantine()
    assert rows is not None
    return [(r["reason"], r["source"], r["position"], r["cause"].asDict()) for r in rows.collect()]
