"""The worked example: flights from New York in 2013, the weather, and the aircraft that flew.

One use for each operator: what an aircraft was when (a versioned table), who flies how many (an
aggregate that aircraft move in), flights with their weather (a join as of departure), hours that are
reported once (windows with grace, then suppress), alerts that do not come too often.
"""

from __future__ import annotations

from datetime import timedelta

from assets.schemas import Aircraft, Airlines, Flights, Planes, Weather
from resources import LANDING
from vt_dagster import (
    FilesSource,
    Materialized,
    SessionWindow,
    Stream,
    Table,
    TumblingWindow,
    UntilTimeLimit,
    UntilWindowCloses,
    VersionedTable,
)

# --- sources --------------------------------------------------------------------------------

weather = VersionedTable(
    "weather",
    key="origin",
    schema=Weather,
    timestamp="time_hour",
    # A run takes a table's records before the stream's, so the table must remember at least as much
    # time as a run may span (four months, in the demo), and the grace period on top.
    history_retention=timedelta(days=150),
    source=FilesSource(str(LANDING / "weather"), format="csv", pattern="*.csv"),
    description="Hourly observations at the three airports of New York.",
    group="sources",
    owners=("team:weather",),
)

flights = Stream(
    "flights",
    key="origin",
    schema=Flights,
    timestamp="time_hour + make_dt_interval(0, 0, minute)",
    source=FilesSource(str(LANDING / "flights"), format="jsonl", pattern="*.jsonl"),
    description="Departures, by scheduled time; they arrive when their final data is known.",
    group="sources",
    owners=("team:operations",),
)

planes = Table(
    "planes",
    key="tailnum",
    schema=Planes,
    timestamp="known_at",
    source=FilesSource(str(LANDING / "planes"), format="csv", pattern="*.csv"),
    description="The register of aircraft.",
    group="sources",
    owners=("team:operations",),
)

airlines = Table(
    "airlines",
    key="carrier",
    schema=Airlines,
    timestamp="known_at",
    source=FilesSource(str(LANDING / "airlines"), format="csv", pattern="*.csv"),
    description="The airlines' names.",
    group="sources",
    owners=("team:operations",),
)

aircraft = VersionedTable(
    "aircraft",
    key="tailnum",
    schema=Aircraft,
    timestamp="since",
    history_retention=timedelta(days=366),
    source=FilesSource(str(LANDING / "aircraft"), format="csv", pattern="*.csv"),
    description="Which carrier flies an aircraft, and since when.",
    group="sources",
    owners=("team:operations",),
)

# --- flights with the weather ---------------------------------------------------------------

WEATHER_COLUMNS = (
    "temp",
    "dewp",
    "humid",
    "wind_dir",
    "wind_speed",
    "wind_gust",
    "precip",
    "pressure",
    "visib",
)

flights_with_weather = flights.left_join(
    weather,
    name="flights_with_weather",
    grace_period=timedelta(hours=6),
    select=["left.*", *[f"right.{c}" for c in WEATHER_COLUMNS], "right.valid_from as weather_from"],
    description="Every flight with the weather at its airport when it was to leave.",
    group="joined",
    owners=("team:operations",),
)

departure_board = flights_with_weather.to_table(
    name="departure_board",
    materialized=Materialized(history_retention=timedelta(days=1)),
    description="The newest departure at each airport, and those of the day before, with the weather.",
    group="published",
    owners=("team:operations",),
)

# --- the fleet ------------------------------------------------------------------------------

fleet = aircraft.left_join(
    planes,
    name="fleet",
    select=[
        "left.carrier",
        "left.since",
        "right.manufacturer",
        "right.model",
        "right.year as built",
        "right.seats",
    ],
    materialized=Materialized(history_retention=timedelta(days=366)),
    description="Every aircraft with its carrier and its entry in the register.",
    group="joined",
    owners=("team:operations",),
)

airline_fleet = fleet.left_join(
    airlines,
    name="airline_fleet",
    foreign_key="carrier",
    select=["left.*", "right.name as airline"],
    materialized=Materialized(history_retention=timedelta(days=366)),
    description="The fleet with its airlines' names; an aircraft that changes hands changes both.",
    group="joined",
    owners=("team:operations",),
)

fleet_sizes = airline_fleet.group_by("airline").aggregate(
    {"aircraft": "count(*)", "seats": "sum(seats)"},
    name="fleet_sizes",
    description="How many aircraft, and seats in them, each airline flies now.",
    group="published",
    owners=("team:operations",),
)

# --- departures by the hour -----------------------------------------------------------------

departures_so_far = (
    flights.group_by()
    .windowed_by(TumblingWindow(timedelta(hours=1), grace=timedelta(hours=12)))
    .aggregate(
        {
            "scheduled": "count(*)",
            "departed": "count(dep_time)",
            "mean_delay": "avg(dep_delay)",
            "worst_delay": "max(dep_delay)",
        },
        name="departures_so_far",
        emit="per_run",
        description="Departures of each hour at each airport, as far as they are known.",
        group="tables",
        owners=("team:operations",),
    )
)

hourly_departures = departures_so_far.suppress(
    UntilWindowCloses(),
    name="hourly_departures",
    description="The same, each hour once and for all: 12 hours later, when its flights have landed.",
    group="published",
    owners=("team:operations",),
)

# --- bad weather ----------------------------------------------------------------------------

weather_metric = weather.map_values(
    "cast((temp - 32) * 5 / 9 as double) as temp_c",
    "cast(wind_speed * 1.609344D as double) as wind_kmh",
    "cast(wind_gust * 1.609344D as double) as gust_kmh",
    "cast(visib * 1.609344D as double) as visib_km",
    "cast(precip * 25.4D as double) as precip_mm",
    name="weather_metric",
    # A plain table: what follows is about the weather now, and suppress takes no versions.
    materialized=Materialized(),
    description="The weather now, in metric units.",
    group="tables",
    owners=("team:weather",),
)

bad_weather = weather_metric.filter(
    "visib_km < 2 or gust_kmh > 60",
    name="bad_weather",
    description="The airports where the visibility is low or the wind strong; no row for the others.",
    group="tables",
    owners=("team:weather",),
)

weather_alerts = bad_weather.suppress(
    UntilTimeLimit(timedelta(hours=3)),
    name="weather_alerts",
    description="The same, at most one message for an airport in 3 hours; a deletion is the all-clear.",
    group="published",
    owners=("team:weather",),
)

bad_weather_reports = bad_weather.to_stream(
    name="bad_weather_reports",
    description="Every hour of bad weather as an event; a tombstone where it ends.",
    group="tables",
    owners=("team:weather",),
)

storms = (
    bad_weather_reports.group_by()
    .windowed_by(SessionWindow(gap=timedelta(hours=2)))
    .aggregate(
        {
            "bad_hours": "count(visib_km)",
            "least_visib_km": "min(visib_km)",
            "strongest_gust_kmh": "max(gust_kmh)",
        },
        name="storms",
        description="Spells of bad weather at an airport, up to the hour in which it was fine again.",
        group="published",
        owners=("team:weather",),
    )
)

PUBLISHED = (departure_board, fleet_sizes, hourly_departures, weather_alerts, storms)
"""What others use; all else is what it is made of."""
