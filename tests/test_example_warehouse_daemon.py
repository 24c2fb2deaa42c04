"""The warehouse example as a deployment: the daemon runs one week, and the test kills a step."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import dagster as dg
import polars as pl
import pytest

from examples.warehouse import world
from tests.test_example_warehouse import WAITING, prices_by_order, report
from vt_dagster import read
from vt_dagster.spark.jars import resolve_jars

ROOT, BIN = Path(__file__).parent.parent, Path(sys.executable).parent
MODULE = "examples.warehouse.definitions"
WEEK = [world.FIRST + timedelta(days=n) for n in range(world.DAYS)]
INSTANCE = """
telemetry: {enabled: false}
nux: {enabled: false}
run_retries: {enabled: true, max_retries: 2}
concurrency: {runs: {max_concurrent_runs: 2}}
"""
T = TypeVar("T")


class Deployment:
    """The example's code location with a separate Dagster instance and a separate Spark server."""

    def __init__(self, root: Path) -> None:
        self.data, home = root / "data", root / "home"
        home.mkdir(parents=True)
        (home / "dagster.yaml").write_text(INSTANCE)
        self.log = root / "daemon.log"
        self.instance = dg.DagsterInstance.from_config(str(home))
        self.environment = {
            **os.environ,
            "EXAMPLE_DATA": str(self.data),
            "DAGSTER_HOME": str(home),
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(root / "cache"),
            "VT_DAGSTER_JARS": str(resolve_jars()[0].parent),
            "VT_DAGSTER_SPARK": "server",
        }

    def types(self, *words: str) -> None:
        """Runs a command as a user of the deployment; the command must succeed."""
        done = subprocess.run(
            [str(BIN / words[0]), *words[1:]],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    @contextlib.contextmanager
    def spark(self) -> Iterator[None]:
        """Keeps a warm Spark server running until the block ends."""
        self.types("vt-dagster", "spark", "start")
        try:
            yield
        finally:
            self.types("vt-dagster", "spark", "stop")

    @contextlib.contextmanager
    def daemon(self) -> Iterator[None]:
        """Keeps the daemon running until the block ends, then ends it and all processes it started."""
        with self.log.open("w") as out:
            running = subprocess.Popen(
                [str(BIN / "dagster-daemon"), "run", "-m", MODULE],
                cwd=ROOT,
                env=self.environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            yield
        finally:
            os.killpg(running.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait(30)

    def turns_on(self, *sensors: str) -> None:
        for sensor in sensors:
            self.types("dagster", "sensor", "start", sensor, "-m", MODULE)

    def backfills(self, job: str) -> None:
        self.types("dagster", "job", "backfill", "-j", job, "--all", "all", "--noprompt", "-m", MODULE)

    def read(self, name: str, **how: Any) -> Any:
        return read(name, warehouse=str(self.data / "warehouse"), into="polars", **how)

    def runs(self, **tags: str) -> Sequence[dg.DagsterRun]:
        return self.instance.get_runs(dg.RunsFilter(tags=tags))

    def worker(self, step: str) -> tuple[str, int] | None:
        """Returns the run and the process ID of a step that runs now."""
        for run in self.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED])):
            for entry in self.instance.all_logs(run.run_id):
                event = entry.dagster_event
                if event is None or event.step_key != step:
                    continue
                if event.event_type == dg.DagsterEventType.STEP_WORKER_STARTED:
                    return run.run_id, int(str(event.engine_event_data.metadata["pid"].value))
        return None

    def settles(self) -> bool:
        """Returns whether all runs have finished."""
        return all(run.is_finished for run in self.instance.get_runs())


def wait_until(finds: Callable[[], T | None], what: str, seconds: int = 400) -> T:
    """Calls ``finds`` until it returns something true; an error (no table yet) counts as nothing."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(Exception):
            if found := finds():
                return found
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds} s: {what}")


@pytest.mark.endurance
@pytest.mark.timeout(1_800)
def test_daemon_runs_one_week(tmp_path: Path) -> None:
    shop = Deployment(tmp_path)
    for day in WEEK:
        world.deliver(shop.data / "landing", day)
    with shop.spark(), shop.daemon():
        shop.turns_on("automation", "customers_sensor")
        shop.backfills("week")
        wait_until(lambda: len(shop.read("rates", what="log")) == 2 * len(WEEK), "rates of a week")
        wait_until(lambda: len(shop.read("prices", what="log")) == 2 * len(WEEK), "prices of a week")
        shop.turns_on("orders_sensor")
        killed, pid = wait_until(lambda: shop.worker("priced_orders"), "a step of priced_orders")
        os.kill(pid, signal.SIGKILL)
        expected = prices_by_order(WEEK)
        wait_until(
            lambda: len(shop.read("priced_orders")) == len(expected) - WAITING, "orders of a week"
        )
        last = world.customers(WEEK[-1])

        def current() -> pl.DataFrame:
            there = pl.read_delta(str(shop.data / "bi" / "customers"))
            return (
                there.filter(pl.col("valid_to").is_null()).select("customer", "tier").sort("customer")
            )

        wait_until(lambda: current().equals(last), "the last dump in the export")
        shop.backfills("reports")
        made = shop.data / "reports"
        wait_until(lambda: len(list(made.glob("*.json"))) == len(WEEK), "reports of a week")
        wait_until(shop.settles, "the end of all runs")
    joined = dict(shop.read("priced_orders").select("order_id", "price").iter_rows())
    assert joined == {order: expected[order] for order in joined}
    for day in WEEK:
        (row,) = json.loads((made / f"{day}.json").read_text())
        assert row == report(day, WEEK), day
    (again,) = shop.runs(**{"dagster/parent_run_id": killed})
    assert again.status == dg.DagsterRunStatus.SUCCESS
    assert again.step_keys_to_execute == ["priced_orders", "check_priced_orders"]
    failed = dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE])
    assert [run.run_id for run in shop.instance.get_runs(failed)] == [killed]
