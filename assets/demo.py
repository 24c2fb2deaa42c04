"""``make demo``: a year of flights lands month by month and is consumed in three runs."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
from pyspark.sql import Row
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table as TextTable

from assets import answers
from assets.landing import LateWeather, write_landing
from resources import DATA, LANDING, spark, warehouse
from vt_dagster.columns import IS_LATE, IS_TOMBSTONE, OFFSET, PARTITION, TIMESTAMP, VALID_FROM, VALID_TO
from vt_dagster.errors import VtDagsterError
from vt_dagster.orchestration.resource import session_of
from vt_dagster.storage.store import AssetStore

LANDINGS = ((1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12, 13))
"""Months that land before each run; 13 is January 2014, when the last flights of 2013 are known."""

LATE = LateWeather("JFK", "2013-08-08", "2013-08-15", month=8, lands=9)
"""A week whose flights have been joined when its weather lands, with the third run."""

console = Console(highlight=False, soft_wrap=True)


def run() -> None:
    """Starts from nothing, runs the main job three times, and shows what came out."""
    started = time.monotonic()
    home = DATA / "dagster_home"
    for old in (LANDING, DATA / "warehouse", home):
        shutil.rmtree(old, ignore_errors=True)
    home.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("dagster.yaml"), home)
    os.environ["DAGSTER_HOME"] = str(home)
    from assets import corrections
    from assets.definitions import defs

    @dg.success_hook
    def tell(context: dg.HookContext) -> None:
        """One line an asset, when it is done."""
        for metadata in context.op_output_metadata.values():
            if "records_in" in metadata:  # of a graph the last of its ops
                say(started, f"  {context.op.name.removeprefix('write_')}: {_counts(metadata)}")

    job = defs.resolve_job_def("main").with_hooks({tell})
    quiet = {"loggers": {"console": {"config": {"log_level": "WARNING"}}}}
    with dg.DagsterInstance.get() as instance:
        for number, months in enumerate(LANDINGS, 1):
            say(started, f"run {number} of {len(LANDINGS)}: months {months[0]} to {months[-1]} land")
            landed = write_landing(LANDING, months, LATE)
            rows = ", ".join(f"{sum(m.values()):,} {name}" for name, m in landed.items() if m)
            say(started, f"  landed {rows}; materializing")
            result = job.execute_in_process(instance=instance, run_config=quiet, raise_on_error=False)
            if not result.success:
                raise VtDagsterError("the run failed; its log above says why")
    _summary()
    _explain_late_record()
    _fleet()
    _hours()
    _bad_weather()
    _board()
    corrections.late_weather(LATE, _totals("flights_corrected")["corrections_too_late"], _plain)
    answers.what_else(_plain)
    corrections.forgotten_aircraft(_plain)
    say(started, "done")
    console.print(f"\nTables: {warehouse.path}/<asset>/log and /view (Delta Lake)")
    console.print("Look into one:   .venv/bin/vt-dagster history weather --key JFK --limit 5")
    console.print(
        "Ask for a moment: .venv/bin/vt-dagster get airline_fleet --key N990AT "
        "--as-of 2013-07-01T00:00:00Z"
    )
    console.print("Look around:     .venv/bin/vt-dagster explore   (then http://127.0.0.1:3001)")
    console.print("Open the UI:     make ui   (then http://localhost:3000)")


def say(started: float, text: str) -> None:
    console.print(f"[{time.monotonic() - started:6.1f} s] {text}", markup=False)


def _plain(text: str) -> None:
    console.print(text, markup=False)


def _counts(metadata: Mapping[str, dg.MetadataValue[Any]]) -> str:
    numbers = {k: v.value for k, v in metadata.items() if k.startswith("records_")}
    return ", ".join(f"{n:,} {k.removeprefix('records_')}" for k, n in numbers.items())


def _summary() -> None:
    table = TextTable(title="Flights joined with the weather as of their departure")
    table.add_column("count")
    table.add_column("records", justify="right")
    totals, of_weather = _totals("flights_with_weather"), _totals("weather")
    quarantined = _totals("flights")["quarantined"] + of_weather["quarantined"]
    kept = _store("weather").read("versions").count()
    for what, number in (
        ("flights in", totals["in"]),
        ("joined", totals["out"]),
        ("  of them without weather", totals["unmatched"]),
        ("  of them late (joined at once)", totals["late"]),
        ("waiting in the grace buffer", totals["waiting"]),
        ("lost", totals["in"] - totals["out"] - totals["waiting"]),
        ("weather observations in", of_weather["in"]),
        ("  of them late (refused)", of_weather["late"]),
        ("versions in the view", kept),
        ("versions expired", of_weather["applied"] - kept),
        ("quarantined", quarantined),
    ):
        table.add_row(what, f"{number:,}")
    console.print(table)


def _topology() -> Any:
    from assets import topology

    return topology


def _store(name: str) -> AssetStore:
    return AssetStore(warehouse.path, getattr(_topology(), name), session_of(spark))


def _totals(name: str) -> Mapping[str, int]:
    head = _store(name).head()
    assert head is not None
    return head.commit.totals


def _explain_late_record() -> None:
    """One flight whose data came long after its time, and what joining it by arrival would give."""
    joined, versions = _store("flights_with_weather").read("log"), _store("weather").read("versions")
    start = versions.agg(F.min(VALID_FROM)).collect()[0][0]
    late = joined.where(F.col(IS_LATE) & (F.col(TIMESTAMP) > F.lit(start)))
    flight = late.orderBy(F.unix_seconds(TIMESTAMP) - F.unix_seconds("known_at")).first()
    if flight is None:
        return

    def as_of(moment: Any) -> Row | None:
        when = F.lit(moment)
        here = versions.where(F.col("origin") == flight.origin)
        return here.where(
            (F.col(VALID_FROM) <= when) & (F.col(VALID_TO).isNull() | (when < F.col(VALID_TO)))
        ).first()

    then, later = as_of(flight.timestamp), as_of(flight.known_at)
    assert then is not None
    assert later is not None
    console.print(
        f"\nA late record, explained\n"
        f"  {flight.carrier} {flight.flight} from {flight.origin} to {flight.dest} was to leave at "
        f"{flight.timestamp:%Y-%m-%d %H:%M} UTC,\n"
        f"  but its data came at {flight.known_at:%Y-%m-%d %H:%M}, more than the grace period of "
        f"{_topology().flights_with_weather.operator.grace_period} later:\n"
        f"  it was late, so it was joined at once, still as of its own time:\n"
        f"    as of departure  {then.valid_from:%m-%d %H:%M} to {then.valid_to:%m-%d %H:%M}: "
        f"{then.temp} °F, wind {then.wind_speed:.1f} mph   <- joined\n"
        f"    when it arrived  {later.valid_from:%m-%d %H:%M} to "
        f"{later.valid_to.strftime('%m-%d %H:%M') if later.valid_to else 'now'}: "
        f"{later.temp} °F, wind {later.wind_speed:.1f} mph   <- what a join by arrival would take"
    )
    answers.why("A late record", "flights_with_weather", flight[PARTITION], flight[OFFSET], _plain)


def _fleet() -> None:
    """An aircraft that changes its carrier leaves one airline's count and enters another's."""
    of_key = W.partitionBy("tailnum")
    moved = (
        _store("airline_fleet")
        .read("versions")
        .where(~F.col(IS_TOMBSTONE))
        .withColumn("before", F.lag("airline").over(of_key.orderBy(VALID_FROM)))
        .where(F.col("before") != F.col("airline"))
    )
    sales = {
        (r.before, r.airline): r["count"] for r in moved.groupBy("before", "airline").count().collect()
    }
    last = moved.orderBy(F.desc(VALID_FROM), "tailnum").first()
    if last is None:
        return
    most = _store("fleet_sizes").read("log").groupBy("airline").agg(F.max("aircraft").alias("most"))
    sizes = {r.airline: r for r in _store("fleet_sizes").read().join(most, "airline").collect()}
    console.print(
        f"\nAn aircraft changes hands (fleet_sizes: an aggregate over a versioned table)\n"
        f"  {last.tailnum}, a {last.manufacturer} {last.model} with {last.seats} seats, flew for "
        f"{last.before},\n"
        f"  since {last.valid_from:%Y-%m-%d %H:%M} for {last.airline}: one less here, one more there"
    )
    for (seller, buyer), number in sorted(sales.items()):
        console.print(
            f"    {number:>3} aircraft from {seller} ({sizes[seller].most:,} at most, "
            f"{sizes[seller].aircraft:,} now) to {buyer} ({sizes[buyer].aircraft:,} now)"
        )


def _hours() -> None:
    """Final results only: no hour is told before its flights have landed, none is told twice."""
    hours = _store("hourly_departures").read("log")
    so_far = _totals("departures_so_far")
    busy = hours.where("departed >= 10").orderBy(F.desc("mean_delay"), "origin").first()
    if busy is None:
        return
    window = _topology().departures_so_far.operator.window
    told = _totals("hourly_departures")["out"]
    console.print(
        f"\nThe worst hour (hourly_departures: windows of {window.size}, closed {window.grace} after "
        f"their end)\n"
        f"  {busy.origin}, {busy.window_start:%Y-%m-%d %H:%M} to {busy.window_end:%H:%M} UTC: "
        f"{busy.departed} of {busy.scheduled} departed, {busy.mean_delay:.0f} minutes late on average, "
        f"{busy.worst_delay} at worst\n"
        f"  {told:,} hours, each told once; {so_far['dropped']:,} flights were known only when their "
        f"hour had closed"
    )
    answers.why("An aggregate's row", "hourly_departures", busy[PARTITION], busy[OFFSET], _plain)


def _bad_weather() -> None:
    """Few messages instead of many, and the events put together to spells."""
    storms = _store("storms").read()
    length = F.unix_seconds("window_end") - F.unix_seconds("window_start")
    longest = storms.orderBy(F.desc(length), "origin", "window_start").first()
    if longest is None:
        return
    alerts = _store("weather_alerts").head()
    held = alerts.commit.gauges["suppression_buffer_count_current"] if alerts else 0
    gust, period = longest.strongest_gust_kmh, _topology().weather_alerts.operator.until.duration
    console.print(
        f"\nThe longest storm (storms: sessions of bad weather)\n"
        f"  {longest.origin}, {longest.window_start:%Y-%m-%d %H:%M} to "
        f"{longest.window_end:%m-%d %H:%M}: {longest.bad_hours} bad hours, visibility down to "
        f"{longest.least_visib_km:.1f} km"
        f"{'' if gust is None else f', gusts up to {gust:.0f} km/h'}\n"
        f"  {_totals('weather')['applied']:,} observations, {_totals('bad_weather')['out']:,} changes "
        f"of bad weather, {storms.count():,} storms,\n"
        f"  {_totals('weather_alerts')['out']:,} alerts (weather_alerts: one in {period} for an "
        f"airport; {held:,.0f} held back until the next change)"
    )


def _board() -> None:
    """The newest departure by time, not the one whose data came last."""
    console.print("\nThe newest departures (departure_board: a stream as a versioned table)")
    for row in _store("departure_board").read().orderBy("origin").collect():
        console.print(
            f"  {row.origin} {row.timestamp:%Y-%m-%d %H:%M}  {row.carrier} {row.flight} to {row.dest}, "
            f"{row.temp} °F, wind {row.wind_speed:.1f} mph"
        )
