"""The warehouse example with a team's own assets next to the tables; each run is in this process."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Sequence
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
from pyspark.sql import SparkSession

from examples.warehouse import world
from tests.market import QUIET, messages
from vt_dagster import read

pytestmark = pytest.mark.usefixtures("few_rows")

DAYS = [world.FIRST + timedelta(days=n) for n in (0, 6)]
WAITING = 3
"""The number of orders that still wait: the grace period of three hours has not passed for them."""


def report(day: date, days: Sequence[date]) -> dict[str, Any]:
    """Returns the report at the end of ``day`` from the deliveries of ``days``, without vt_dagster."""
    there = world.customers(day)
    end = datetime(day.year, day.month, day.day, tzinfo=timezone.utc) + timedelta(days=1)
    current = {
        product: price
        for d in days
        for product, price, at in sorted(world.prices(d), key=lambda p: p[2])
        if at < end
    }
    return {
        "customers": len(there),
        **Counter(there["tier"]),
        "highest_price": max(current.values()),
        **dict(world.rates(day).select("currency", "rate").iter_rows()),
    }


def prices_by_order(days: Sequence[date]) -> dict[str, float | None]:
    """Returns, by order ID, the product's price at the time of the order."""
    rows = sorted((at, product, price) for d in days for product, price, at in world.prices(d))
    made: dict[str, float | None] = {}
    for order in (o for d in days for o in world.orders(d)):
        at, product = datetime.fromisoformat(order["ordered_at"]), order["product"]
        known = [price for since, what, price in rows if what == product and since <= at]
        made[order["order_id"]] = known[-1] if known else None
    return made


def test_deliveries_tables_reports_and_exports(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The team's deliveries are in the tables as of their time, in the reports and in the export."""
    monkeypatch.setenv("EXAMPLE_DATA", str(tmp_path))
    defs = importlib.import_module("examples.warehouse.definitions").defs

    def make(*names: str, day: date | None = None) -> None:
        done = dg.materialize(
            [asset for asset in defs.assets if isinstance(asset, dg.AssetsDefinition)],
            selection=list(names),
            resources=defs.resources,
            partition_key=None if day is None else day.isoformat(),
            run_config=QUIET,
            raise_on_error=False,
        )
        assert done.success, messages(done)

    for day in DAYS:
        world.deliver(tmp_path / "landing", day)
        make("raw_prices", "rates", day=day)
        make("prices", "customers")
    make("orders", "priced_orders", "customers_export")
    for day in DAYS:
        make("daily_report", day=day)
        (row,) = json.loads((tmp_path / "reports" / f"{day}.json").read_text())
        assert row == report(day, DAYS), day
    joined = read("priced_orders", warehouse=str(tmp_path / "warehouse"), into="polars")
    expected = prices_by_order(DAYS)
    assert len(joined) == len(expected) - WAITING
    got = dict(joined.select("order_id", "price").iter_rows())
    assert got == {order: expected[order] for order in got}
    exported = pl.read_delta(str(tmp_path / "bi" / "customers"))
    last = world.customers(DAYS[-1])
    current = exported.filter(pl.col("valid_to").is_null())
    assert current.select("customer", "tier").sort("customer").equals(last)
    left = set(world.customers(DAYS[0])["customer"]) - set(last["customer"])
    gone = exported.filter(pl.col("customer").is_in(left))
    assert {*gone["customer"]} == left
    assert gone["valid_to"].null_count() == 0
