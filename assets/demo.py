"""``make demo``: flights of a winter, each with the weather as of its departure, in two runs."""

from __future__ import annotations

import calendar
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table as TextTable

import vt_dagster
from assets import corrections
from assets.landing import LateWeather, write_landing
from resources import DATA, LANDING, spark, warehouse
from vt_dagster.cli.run import errors_of, execute
from vt_dagster.columns import OFFSET, PARTITION
from vt_dagster.errors import VtDagsterError
from vt_dagster.spark.session import FEW_QUERIES, build_session
from vt_dagster.storage.arrow_reader import head_of

LANDINGS = ((1, 2), (3,))
"""Months of 2013 that land before each run."""
LATE = LateWeather("JFK", "2013-02-04", "2013-02-11", month=2, lands=3)
"""A week with a blizzard: its weather lands before the second run, after its flights were joined."""
ASSETS = ("flights", "flights_corrected", "weather")

console = Console(highlight=False, soft_wrap=True)


def run() -> None:
    """Starts empty, runs the main job twice for three assets, and shows the results."""
    started = time.monotonic()
    say(started, "flights from New York, winter of 2013, each with the weather as of its departure")
    with ThreadPoolExecutor(1) as beside:
        # Spark's JVM starts while the files of the first months are written.
        session = beside.submit(build_session, master=spark.master, conf=FEW_QUERIES)
        with fresh_instance() as instance:
            for number, months in enumerate(LANDINGS, 1):
                say(started, f"run {number} of {len(LANDINGS)}: {_landing(months)}")
                land(started, months, LATE)
                session.result()
                materialize(started, instance, ASSETS)
    _summary()
    row = corrections.corrected(LATE, totals_of("flights_corrected")["corrections_too_late"], plain)
    at = f"{row[PARTITION]}:{row[OFFSET]}"
    _why(at)
    say(started, "done")
    plain(
        "\nNext: the flight's weather as known before, the records that its row was made from, and a "
        "table's history"
    )
    _, before = corrections.asked(row)
    explain = f".venv/bin/vt-dagster explain flights_corrected --offset {at}"
    for command in (before, explain, ".venv/bin/vt-dagster history weather --key JFK --limit 5"):
        plain(f"  {command}")
    plain(
        "make ui opens Dagster with these assets; make demo-all runs the whole year through all "
        "operators (some 6 minutes)"
    )


def _why(at: str) -> None:
    """Prints the rules that decided the row."""
    plain("\nWhy this result?")
    for one in vt_dagster.explain("flights_corrected", offset=at, warehouse=warehouse.path).decisions:
        plain(f"  {one.rule}: {one.because}")


def _landing(months: tuple[int, ...]) -> str:
    names = " and ".join(calendar.month_name[month] for month in months)
    week = f"{LATE.origin}'s weather of {LATE.start} to {LATE.end}"
    if LATE.month in months:
        return f"{names} land, without {week}"
    return f"{names} lands, and with it {week}"


def say(started: float, text: str) -> None:
    console.print(f"[{time.monotonic() - started:6.1f} s] {text}", markup=False)


def plain(text: str) -> None:
    console.print(text, markup=False)


@contextmanager
def fresh_instance() -> Iterator[dg.DagsterInstance]:
    """An empty Dagster instance, without landed files and materialized tables."""
    home = DATA / "dagster_home"
    for old in (LANDING, DATA / "warehouse", home):
        shutil.rmtree(old, ignore_errors=True)
    home.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("dagster.yaml"), home)
    os.environ["DAGSTER_HOME"] = str(home)
    with dg.DagsterInstance.get() as instance:
        yield instance


def land(started: float, months: Sequence[int], late: LateWeather) -> None:
    """Delivers the files of some months into the landing directory."""
    landed = write_landing(LANDING, months, late)
    rows = ", ".join(f"{sum(m.values()):,} {name}" for name, m in landed.items() if m)
    say(started, f"  landed {rows}; materializing")


def materialize(started: float, instance: dg.DagsterInstance, names: Sequence[str] = ()) -> None:
    """Runs the main job on the landed files, for all assets or some.

    Raises:
        VtDagsterError: it failed.
    """
    from assets.definitions import defs

    keys = [dg.AssetKey(name) for name in names] or None
    job = defs.resolve_job_def("main")
    result = execute(job, instance, lambda text: say(started, f"  {text}"), keys)
    if not result.success:
        raise VtDagsterError("; ".join(f"{step}: {error}" for step, error in errors_of(result)))


def totals_of(name: str) -> Mapping[str, int]:
    """Returns an asset's counts of records by outcome, over all runs."""
    return head_of(warehouse.path, name)[1].totals


def _summary() -> None:
    flights, joined, weather = map(totals_of, ASSETS)
    table = TextTable(title="Flights, each with the weather as of its departure", box=SIMPLE)
    table.add_column("count")
    table.add_column("records", justify="right")
    for what, number in (
        ("flights in", flights["in"]),
        ("joined", joined["out"] - joined["corrected"]),
        ("  of them late (joined at once)", joined["late"]),
        ("  of them without weather", joined["unmatched"]),
        ("  of them corrected since", joined["corrected"]),
        ("waiting in the grace buffer", joined["waiting"]),
        ("lost", flights["in"] + joined["corrected"] - joined["out"] - joined["waiting"]),
        ("weather observations in", weather["in"]),
    ):
        table.add_row(what, f"{number:,}")
    console.print(table)
