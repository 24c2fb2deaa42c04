"""The worked example between a team's own assets: by hand in this process, and as a deployment runs it,
by the daemon, with a run's step killed."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from vt_dagster.spark.jars import resolve_jars

ROOT, BIN = Path(__file__).parent.parent, Path(sys.executable).parent
WEEK = [world.FIRST + timedelta(days=n) for n in range(world.DAYS)]
WAITING = 3
"""So many orders are less than the grace period of three hours older than the last one."""
DUMPS = [WEEK[0], WEEK[3], WEEK[6]]
INSTANCE = """
telemetry: {enabled: false}
nux: {enabled: false}
run_retries: {enabled: true, max_retries: 2}
concurrency: {runs: {max_concurrent_runs: 2}}
"""


def report(day: date, days: Sequence[date]) -> dict[str, Any]:
    """What was true at the end of a day, without any of this library."""
    dump = max(d for d in DUMPS if d <= day)
    there = world.customers(dump)
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


def priced(days: Sequence[date]) -> dict[str, float | None]:
    """The price of each order's time, by order."""
    rows = sorted((at, product, price) for d in days for product, price, at in world.prices(d))
    made: dict[str, float | None] = {}
    for order in (o for d in days for o in world.orders(d)):
        at, product = datetime.fromisoformat(order["ordered_at"]), order["product"]
        known = [price for since, what, price in rows if what == product and since <= at]
        made[order["order_id"]] = known[-1] if known else None
    return made


class Deployment:
    """The example's code location with an instance and a Spark server of its own."""

    def __init__(self, root: Path) -> None:
        self.data, self.home = root / "data", root / "home"
        self.home.mkdir(parents=True)
        (self.home / "dagster.yaml").write_text(INSTANCE)
        self.environment = {
            **os.environ,
            "EXAMPLE_DATA": str(self.data),
            "DAGSTER_HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(root / "cache"),
            "VT_DAGSTER_JARS": str(resolve_jars()[0].parent),
            "VT_DAGSTER_SPARK": "server",
        }

    def types(self, *words: str) -> str:
        done = subprocess.run(
            [str(BIN / words[0]), *words[1:]],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    @contextlib.contextmanager
    def daemon(self) -> Iterator[None]:
        log = self.home / "daemon.log"
        with log.open("w") as out:
            running = subprocess.Popen(
                [str(BIN / "dagster-daemon"), "run", "-m", "examples.warehouse.definitions"],
                cwd=ROOT,
                env=self.environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            yield
        except BaseException:
            print(log.read_text()[-6000:])
            raise
        finally:
            os.killpg(running.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait(30)

    def backfill(self, job: str) -> None:
        module = ("-m", "examples.warehouse.definitions")
        self.types("dagster", "job", "backfill", "-j", job, "--all", "all", "--noprompt", *module)

    def read(self, name: str, **how: Any) -> Any:
        return read(name, warehouse=str(self.data / "warehouse"), into="polars", **how)


def until(holds: Callable[[], bool], what: str, seconds: int = 600) -> None:
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(Exception):  # a table that is not there yet
            if holds():
                return
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.5)


def kill_a_step(home: Path) -> None:
    """Ends the process of the first step that is seen to run, without a word to it."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (place / "cmdline").read_bytes()
                mine = str(home).encode() in (place / "environ").read_bytes()
                if mine and b"spawn_main" in command:
                    os.kill(int(place.name), signal.SIGKILL)
                    return
        time.sleep(0.02)
    raise AssertionError("no step was seen")


def test_three_days_by_hand(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the team writes is in the tables as of its time, in its report, and in the export."""
    monkeypatch.setenv("EXAMPLE_DATA", str(tmp_path))
    defs = importlib.import_module("examples.warehouse.definitions").defs
    days = [WEEK[0], WEEK[3], WEEK[6]]

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

    for day in days:
        world.deliver(tmp_path / "landing", day)
        make("raw_prices", "rates", day=day)
        make("prices", "customers")
    make("orders", "priced_orders", "customers_export")
    for day in days:
        make("daily_report", day=day)
        (row,) = json.loads((tmp_path / "reports" / f"{day}.json").read_text())
        assert row == report(day, days), day
    joined = read("priced_orders", warehouse=str(tmp_path / "warehouse"), into="polars")
    expected = priced(days)
    assert len(joined) == len(expected) - WAITING
    assert all(
        expected[order] == price for order, price in joined.select("order_id", "price").iter_rows()
    )
    exported = pl.read_delta(str(tmp_path / "bi" / "customers"))
    last = world.customers(days[-1])
    assert (
        exported.filter(pl.col("valid_to").is_null())
        .select("customer", "tier")
        .sort("customer")
        .equals(last)
    )
    left = set(world.customers(days[0])["customer"]) - set(last["customer"])
    assert exported.filter(pl.col("customer").is_in(left))["valid_to"].null_count() == 0


@pytest.mark.endurance
@pytest.mark.timeout(1_800)
def test_a_week_of_a_deployment(tmp_path: Path) -> None:
    """Everything by the daemon: a backfill, sensors, automation, and a step that is killed."""
    shop = Deployment(tmp_path)
    for day in WEEK:
        world.deliver(shop.data / "landing", day)
    for day in set(WEEK) - set(DUMPS):
        (shop.data / "landing" / "customers" / f"customers_{day}.parquet").unlink()
    shop.types("vt-dagster", "spark", "start")
    try:
        with shop.daemon():
            module = ("-m", "examples.warehouse.definitions")
            for sensor in ("automation", "customers_sensor"):
                shop.types("dagster", "sensor", "start", sensor, *module)
            shop.backfill("week")
            until(lambda: len(shop.read("rates", what="log")) == 2 * len(WEEK), "rates of a week")
            until(lambda: len(shop.read("prices", what="log")) == 2 * len(WEEK), "prices of a week")
            shop.types("dagster", "sensor", "start", "orders_sensor", *module)
            expected = priced(WEEK)
            until(lambda: len(shop.read("orders")) == len(expected), "orders of a week")
            until(lambda: shop.read("customers")["tier"].to_list() != [], "customers")
            last = world.customers(DUMPS[-1])
            until(lambda: shop.read("customers")["customer"].sort().equals(last["customer"]), "dumps")
            exported = shop.data / "bi" / "customers"
            current = pl.col("valid_to").is_null()
            until(
                lambda: (
                    pl.read_delta(str(exported))
                    .filter(current)["customer"]
                    .sort()
                    .equals(last["customer"])
                ),
                "the export",
            )
            shop.backfill("reports")
            kill_a_step(shop.home)
            made = shop.data / "reports"
            until(lambda: len(list(made.glob("*.json"))) == len(WEEK), "reports of a week")
        # Results wait for what may still come within the grace period; those that are there are right.
        joined = dict(shop.read("priced_orders").select("order_id", "price").iter_rows())
        assert len(joined) >= len(expected) - WAITING
        assert joined == {order: expected[order] for order in joined}
        for day in WEEK:
            (row,) = json.loads((made / f"{day}.json").read_text())
            assert row == report(day, WEEK), day
        runs = shop.types("dagster", "run", "list", "--limit", "200")
        assert "is_resume_retry" in runs or "FAILURE" in runs
    finally:
        shop.types("vt-dagster", "spark", "stop")
