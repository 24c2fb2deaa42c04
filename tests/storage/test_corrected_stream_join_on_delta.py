"""A corrected join of two streams on Delta: explained, restated, with an erased key, and redeclared."""

from __future__ import annotations

import json
import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

from tests.storage.test_erase import ERIN, files_with_key
from vt_dagster import FilesSource, Stream
from vt_dagster.errors import StorageError
from vt_dagster.provenance.explain import Explainer
from vt_dagster.runs.audit import audit
from vt_dagster.runs.erase import erase
from vt_dagster.runs.restate import restate
from vt_dagster.runs.run import run_once
from vt_dagster.storage.arrow_reader import look_up
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.commit_log import commits
from vt_dagster.topology.durations import in_utc

pytestmark = pytest.mark.usefixtures("few_rows")

EPOCH = datetime(2020, 1, 1, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)
SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("n", IntegerType()),
        StructField("timestamp", TimestampType()),
    ]
)


class Shop:
    """``orders`` and ``payments``, their join ``amended``, and its aggregation by key, ``sums``."""

    def __init__(self, root: Path) -> None:
        self.root, self.warehouse = root, str(root / "warehouse")
        self.orders, self.payments = (
            Stream(name, key="k", schema=SCHEMA, source=FilesSource(str(root / "landing" / name)))
            for name in ("orders", "payments")
        )
        self.amended = self.joined(corrected_for=10 * MINUTE)
        count = {"rows": "count(*)", "paid": "sum(coalesce(payment, 0))"}
        self.sums = self.amended.group_by("k").aggregate(count, name="sums")
        self.nodes: list[Stream] = [self.orders, self.payments, self.amended, self.sums]

    def joined(self, **more: Any) -> Stream:
        about: dict[str, Any] = {"name": "amended", "within": 2 * MINUTE, "grace": MINUTE, **more}
        select = ["left.n as number", "right.n as payment"]
        return self.orders.outer_join(self.payments, select=select, **about)

    def land(self, file: str, **records: list[tuple[str, int, float]]) -> None:
        for name, some in records.items():
            folder = self.root / "landing" / name
            folder.mkdir(parents=True, exist_ok=True)
            rows = [{"k": k, "n": n, "timestamp": str(EPOCH + at * MINUTE)} for k, n, at in some]
            (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, spark: SparkSession, *nodes: Stream) -> None:
        for node in nodes or self.nodes:
            run_once(node, stores_of(self.warehouse, spark))

    def rows(self, key: str | None = None) -> set[tuple[Any, ...]]:
        rows = look_up(self.warehouse, "amended").to_pylist()
        return {(r["k"], r["number"], r["payment"]) for r in rows if key in (None, r["k"])}

    def sum_of(self, key: str) -> list[tuple[int, int]]:
        rows = look_up(self.warehouse, "sums").to_pylist()
        return [(r["rows"], r["paid"]) for r in rows if r["k"] == key]

    def known(self) -> dict[str, list[str]]:
        """All rows that reads return for other keys, now and as known at each commit."""
        found: dict[str, list[str]] = {}
        for node in self.nodes:
            told = [c for c in commits(f"{self.warehouse}/{node.name}") if ":" not in (c.run_id or "")]
            for at in (None, *(in_utc(c.recorded_at) for c in told)):
                for what in ("log", "current") if node.is_table else ("log",):
                    rows = look_up(self.warehouse, node.name, what, as_known_at=at).to_pylist()
                    others = [
                        r for r in rows if (r["k"] or (r.get("old") or r)["k"]) not in (ERIN, None)
                    ]
                    found[f"{node.name} {what} {at}"] = sorted(map(repr, others))
        return found

    def findings(self, spark: SparkSession) -> list[Any]:
        stores = [AssetStore(self.warehouse, node, spark) for node in self.nodes]
        return [(store.node.name, f) for store in stores for f in audit(store) if not f.passed]


@pytest.fixture(scope="module")
def shop_template(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    """Most of the first orders and payments have a row without a match; then a late payment lands."""
    shop = Shop(tmp_path_factory.mktemp("shop"))
    shop.land(
        "0",
        orders=[(ERIN, 1, 0), ("bob", 2, 1), (ERIN, 3, 2), ("cyd", 4, 10)],
        payments=[(ERIN, 21, 6), ("dan", 22, 5), ("cyd", 23, 9)],
    )
    shop.run(spark)
    shop.land("1", payments=[(ERIN, 24, 1)])
    return shop.root


@pytest.fixture
def shop(shop_template: Path, tmp_path: Path) -> Shop:
    shutil.copytree(shop_template, tmp_path, dirs_exist_ok=True)
    return Shop(tmp_path)


def require_explained(shop: Shop) -> None:
    """``explain`` names the records whose offsets a row's key has. For a row that was taken back, it
    also names the record that caused this, and this record matches the row."""
    logs = {
        name: look_up(shop.warehouse, name, "log").sort_by("offset").to_pylist()
        for name in ("amended", "orders", "payments")
    }
    explainer, seen = Explainer(shop.warehouse), set[str]()
    for row in logs["amended"]:
        told = explainer.explain("amended", offset=(0, row["offset"]))
        parts = {one.asset: one.record.offset for one in told.made_of if one.record is not None}
        own = {"orders": row["left_offset"], "payments": row["right_offset"]}
        own = {name: offset for name, offset in own.items() if offset >= 0}
        if row["cause"] is not None:
            own[row["cause"]["table"]] = row["cause"]["offset"]
            assert row["is_tombstone"]
        assert parts == own
        if len(parts) == 2:
            order, payment = logs["orders"][parts["orders"]], logs["payments"][parts["payments"]]
            assert order["k"] == payment["k"]
            assert abs(order["timestamp"] - payment["timestamp"]) <= 2 * MINUTE
        seen |= set(told.rules)
    assert seen - {"latest"} == {"matched", "no_match", "corrected", "late"}


def test_restate_and_erase_of_corrected_stream_join(shop: Shop, spark: SparkSession) -> None:
    rows, keys = shop.rows(), (ERIN, "dan", "bob", "cyd")
    assert rows == {
        *((ERIN, 1, None), (ERIN, 3, None), (ERIN, None, 21), ("bob", 2, None)),
        *(("dan", None, 22), ("cyd", 4, 23)),
    }
    sums = [shop.sum_of(k) for k in keys]
    assert sums == [[(3, 21)], [(1, 22)], [(1, 0)], [(1, 23)]]
    assert restate(shop.warehouse, shop.amended, "2020-01-01T00:05:00Z", spark, shop.nodes) == [
        "amended",
        "sums",
    ]
    assert shop.rows() == rows
    assert [shop.sum_of(k) for k in keys] == sums
    # Later runs still match the rows that have no match yet.
    shop.land("2", orders=[("dan", 6, 4)], payments=[("eve", 26, 11), ("fay", 27, 0.5)])
    shop.run(spark)
    head = AssetStore(shop.warehouse, shop.amended, spark).head()
    assert head is not None
    assert [head.commit.counts[n] for n in ("in", "corrected", "late", "out")] == [4, 3, 1, 7]
    others = {("cyd", 4, 23), ("dan", 6, 22), ("fay", None, 27)}
    hers = {(ERIN, 1, 24), (ERIN, 3, 24), (ERIN, None, 21)}
    assert shop.rows() == {*hers, ("bob", 2, None), *others}
    assert [shop.sum_of(k) for k in keys] == [[(3, 69)], [(1, 22)], [(1, 0)], [(1, 23)]]
    require_explained(shop)
    before = shop.known()
    about: dict[str, Any] = {"key": [ERIN], "reason": "asked to", "among": shop.nodes}
    erase(shop.warehouse, shop.orders, spark, **about)
    assert shop.rows(ERIN) == set()
    assert shop.known() == before
    # Her payment still exists, its row does not: an order that matches it takes no row back.
    shop.land("3", orders=[(ERIN, 5, 5)], payments=[("bob", 25, 2)])
    shop.run(spark)
    assert shop.rows() == {(ERIN, 5, 21), ("bob", 2, 25), *others}
    assert [shop.sum_of(k) for k in (ERIN, "bob")] == [[(1, 21)], [(1, 25)]]
    before = shop.known()
    erase(shop.warehouse, shop.payments, spark, **about)
    assert files_with_key(Path(shop.warehouse), "orders") == []
    assert shop.rows(ERIN) == set()
    assert shop.known() == before
    assert shop.findings(spark) == []


@pytest.mark.endurance  # core/test_corrected_stream_join.py changes corrected_for at random
def test_changed_corrected_for_applies_from_next_run(shop: Shop, spark: SparkSession) -> None:
    """A shorter ``corrected_for`` applies from its first run on; a longer one reopens no final rows."""
    with pytest.raises(
        StorageError, match=r"declared as stream keyed by .*'k'.*written as table keyed"
    ):
        shop.run(spark, shop.payments, shop.joined())
    store = AssetStore(shop.warehouse, shop.amended, spark)
    alone = shop.rows() - {("cyd", 4, 23)}
    assert alone == {
        (ERIN, 1, None),
        ("bob", 2, None),
        (ERIN, 3, None),
        (ERIN, None, 21),
        ("dan", None, 22),
    }
    shop.run(spark, shop.joined(corrected_for=MINUTE))
    assert alone < shop.rows()
    assert shop.rows() - alone == {("cyd", 4, 23), (ERIN, None, 24)}
    shop.land("2", orders=[("eve", 8, 12)], payments=[("bob", 25, 2), ("eve", 26, 10)])
    shop.run(spark, shop.orders, shop.payments, shop.joined(corrected_for=60 * MINUTE))
    # The payment of bob would be in time now, but the row of his order is already final.
    assert alone < shop.rows()
    assert shop.rows() - alone == {("cyd", 4, 23), (ERIN, None, 24), ("bob", None, 25), ("eve", 8, 26)}
    rows = look_up(shop.warehouse, "amended").to_pylist()
    final = {(r["k"], r["number"], r["payment"]) for r in rows if r["is_final"]}
    assert final == alone | {(ERIN, None, 24), ("bob", None, 25)}
    quarantine = store.quarantine()
    assert quarantine is not None
    listed = [(r["reason"], r["source"], r["position"]) for r in quarantine.collect()]
    assert sorted(listed) == [("too_late", "payments", 3), ("too_late", "payments", 4)]
    assert [f for f in audit(store) if not f.passed] == []
