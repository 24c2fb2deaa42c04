"""``make demo-all``: a year of flights lands month by month and all assets consume it in three runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pyspark.sql import Row
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from rich.table import Table as TextTable

from assets import answers, corrections
from assets.demo import console, fresh_instance, land, materialize, plain, say, totals_of
from assets.landing import LateWeather
from resources import spark, warehouse
from vt_dagster.columns import IS_LATE, IS_TOMBSTONE, OFFSET, PARTITION, TIMESTAMP, VALID_FROM, VALID_TO
from vt_dagster.orchestration.resources import session_of
from vt_dagster.storage.asset_store import AssetStore

LANDINGS = ((1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12, 13))
"""Months that land before each run; 13 is January 2014, when the last flights of 2013 are known."""

LATE = LateWeather("JFK", "2013-08-08", "2013-08-15", month=8, lands=9)
"""A week whose weather lands before the third run, after its flights were joined."""


def run(landings: Sequence[Sequence[int]] = LANDINGS, late: LateWeather = LATE) -> None:
    """Starts empty, runs the main job once for each landing, and shows the results.

    Args:
        landings: the months that land before each run, from January 2013 on, without gaps.
        late: the weather that lands later than its month.
    """
    started = time.monotonic()
    with fresh_instance() as instance:
        for number, months in enumerate(landings, 1):
            say(started, f"run {number} of {len(landings)}: months {months[0]} to {months[-1]} land")
            land(started, months, late)
            materialize(started, instance)
    _summary()
    _explain_late_record()
    _fleet()
    _hours()
    _bad_weather()
    _board()
    corrections.late_weather(late, totals_of("flights_corrected")["corrections_too_late"], plain)
    answers.what_else(plain)
    corrections.forgotten_aircraft(plain)
    say(started, "done")
    console.print(f"\nTables: {warehouse.path}/<asset>/log and /view (Delta Lake)")
    console.print("Look into one:   .venv/bin/vt-dagster history weather --key JFK --limit 5")
    console.print(
        "Ask for a moment: .venv/bin/vt-dagster get airline_fleet --key N990AT "
        "--as-of 2013-07-01T00:00:00Z"
    )
    console.print("Look around:     .venv/bin/vt-dagster explore   (then http://127.0.0.1:3001)")
    console.print("Open the UI:     make ui   (then http://localhost:3000)")


def _summary() -> None:
    table = TextTable(title="Flights joined with the weather as of their departure")
    table.add_column("count")
    table.add_column("records", justify="right")
    totals, of_weather = totals_of("flights_with_weather"), totals_of("weather")
    quarantined = totals_of("flights")["quarantined"] + of_weather["quarantined"]
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


def _explain_late_record() -> None:
    """Shows a flight whose data came late, and the result that a join by arrival would give."""
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
        f"  {flight.carrier} {flight.flight} from {flight.origin} to {flight.dest} was due to leave at "
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
    answers.why("A late record", "flights_with_weather", flight[PARTITION], flight[OFFSET], plain)


def _fleet() -> None:
    """Shows an aircraft that changes its carrier: it leaves one airline's count and enters
    another's."""
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
    """Shows final results: an hour is emitted once, after its flights have landed."""
    hours = _store("hourly_departures").read("log")
    so_far = totals_of("departures_so_far")
    busy = hours.where("departed >= 10").orderBy(F.desc("mean_delay"), "origin").first()
    if busy is None:
        return
    window = _topology().departures_so_far.operator.window
    told = totals_of("hourly_departures")["out"]
    console.print(
        f"\nThe worst hour (hourly_departures: windows of {window.size}, closed {window.grace} after "
        f"their end)\n"
        f"  {busy.origin}, {busy.window_start:%Y-%m-%d %H:%M} to {busy.window_end:%H:%M} UTC: "
        f"{busy.departed} of {busy.scheduled} departed, {busy.mean_delay:.0f} minutes late on average, "
        f"{busy.worst_delay} at worst\n"
        f"  {told:,} hours, each told once; {so_far['dropped']:,} flights were known only when their "
        f"hour had closed"
    )
    answers.why("An aggregate's row", "hourly_departures", busy[PARTITION], busy[OFFSET], plain)


def _bad_weather() -> None:
    """Shows how suppress reduces the alerts, and how sessions merge events."""
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
        f"  {totals_of('weather')['applied']:,} observations, {totals_of('bad_weather')['out']:,} "
        f"changes of bad weather, {storms.count():,} storms,\n"
        f"  {totals_of('weather_alerts')['out']:,} alerts (weather_alerts: one in {period} for an "
        f"airport; {held:,.0f} held back until the next change)"
    )


def _board() -> None:
    """Shows the newest departures by time, not those whose data came last."""
    console.print("\nThe newest departures (departure_board: a stream as a versioned table)")
    for row in _store("departure_board").read().orderBy("origin").collect():
        console.print(
            f"  {row.origin} {row.timestamp:%Y-%m-%d %H:%M}  {row.carrier} {row.flight} to {row.dest}, "
            f"{row.temp} °F, wind {row.wind_speed:.1f} mph"
        )
