"""The worked example: flights from New York in 2013, the weather, and the aircraft that flew.

Each operator has one use: the history of aircraft (a versioned table), the size of each airline's fleet
(an aggregate of a table), flights with their weather (a join as of departure, and one that late weather
corrects), departures per hour, emitted once (windows with grace, then suppress), rate-limited alerts.
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
    # A run consumes the table's records before the stream's. So the history retention must be at least
    # the time that a run may span (four months, in the demo) plus the grace period.
    history_retention=timedelta(days=150),
    source=FilesSource(str(LANDING / "weather"), format="csv", pattern="*.csv"),
    description=(
        "The weather at New York's three airports: a row is what was observed at an airport (`origin`: "
        "EWR, JFK or LGA) in an hour. Its time is that hour, UTC."
    ),
    group="sources",
    owners=("team:weather",),
)

flights = Stream(
    "flights",
    key="origin",
    schema=Flights,
    timestamp="time_hour + make_dt_interval(0, 0, minute)",
    source=FilesSource(str(LANDING / "flights"), format="jsonl", pattern="*.jsonl"),
    description=(
        "Departures from New York in 2013. A row is a flight; the key is the airport that it leaves "
        "from (`origin`). Its time is the scheduled departure. It arrives when its final data is "
        "known, mostly after it has landed."
    ),
    group="sources",
    owners=("team:operations",),
)

planes = Table(
    "planes",
    key="tailnum",
    schema=Planes,
    timestamp="known_at",
    source=FilesSource(str(LANDING / "planes"), format="csv", pattern="*.csv"),
    description=(
        "The register of aircraft. A row is an aircraft with its make, model and seats; the key is its "
        "registration (`tailnum`). Its time is when this became known."
    ),
    group="sources",
    owners=("team:operations",),
)

airlines = Table(
    "airlines",
    key="carrier",
    schema=Airlines,
    timestamp="known_at",
    source=FilesSource(str(LANDING / "airlines"), format="csv", pattern="*.csv"),
    description=(
        "The airlines' names. A row is an airline; the key is its code of two letters (`carrier`). Its "
        "time is when the airline got this name."
    ),
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
    description=(
        "Who flies which aircraft. A row is an aircraft (`tailnum`) with the airline that flies it; "
        "there is a new version each time that it changes hands. Its time is the first scheduled "
        "departure for that airline."
    ),
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
    description=(
        "Every flight with the weather at its airport as of the scheduled departure. A row is a "
        "flight; the key is the airport (`origin`). The weather is null if there is no observation. "
        "Its time is the scheduled departure."
    ),
    group="joined",
    owners=("team:operations",),
)

flights_corrected = flights.left_join(
    weather,
    name="flights_corrected",
    grace_period=timedelta(hours=6),
    # For the same reason as the history retention: a run first consumes four months of weather.
    corrected_for=timedelta(days=150),
    key=("carrier", "flight", "time_hour"),
    select=[
        *("left.origin", "left.dest", "right.temp", "right.wind_speed", "right.visib"),
        "right.valid_from as weather_from",
    ],
    description=(
        "Every flight (`carrier`, `flight`, `time_hour`) with the weather at its airport as of the "
        "scheduled departure. If the weather arrives late, the row is corrected: it has the number of "
        "corrections (`revision`) and the observation (`cause`). Its time is the scheduled departure."
    ),
    group="joined",
    owners=("team:operations",),
)

departure_board = flights_with_weather.to_table(
    name="departure_board",
    materialized=Materialized(history_retention=timedelta(days=1)),
    description=(
        "The newest departure at each airport, with the weather. Each row (a version) is a flight, "
        "valid from its scheduled departure, which is its time, until the next one at the airport "
        "(`origin`). The history is one day."
    ),
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
    description=(
        "Every aircraft with its airline and model. A row is an aircraft (`tailnum`) with the "
        "airline's code and its entry in the register; there is a new version whenever either changes. "
        "Its time is that of the change."
    ),
    group="joined",
    owners=("team:operations",),
)

airline_fleet = fleet.left_join(
    airlines,
    name="airline_fleet",
    foreign_key="carrier",
    select=["left.*", "right.name as airline"],
    materialized=Materialized(history_retention=timedelta(days=366)),
    description=(
        "Every aircraft with the name of its airline, and its model. A row is an aircraft (`tailnum`); "
        "there is a new version whenever it changes hands, or its entry in the register or its "
        "airline's name changes. Its time is that of the change."
    ),
    group="joined",
    owners=("team:operations",),
)

fleet_sizes = airline_fleet.group_by("airline").aggregate(
    {"aircraft": "count(*)", "seats": "sum(seats)"},
    name="fleet_sizes",
    description=(
        "The size of each airline's fleet. A row is an airline (`airline`, its name) with the number "
        "of its aircraft and of their seats. Its time is that of the last change."
    ),
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
        description=(
            "Departures by the hour, as far as they are known. A row is an hour (`window_start`, "
            "inclusive, to `window_end`, exclusive, UTC) at an airport (`origin`), with the number of "
            "scheduled flights, the number that left, and their delays in minutes. It may change until "
            "12 hours after its end. Its time is that of its last flight."
        ),
        group="tables",
        owners=("team:operations",),
    )
)

hourly_departures = departures_so_far.suppress(
    UntilWindowCloses(),
    name="hourly_departures",
    description=(
        "Departures by the hour, once they are final. A row is an hour (`window_start`, inclusive, to "
        "`window_end`, exclusive, UTC) at an airport (`origin`), with the number of scheduled flights, "
        "the number that left, and their delays in minutes. It is emitted 12 hours after its end, when "
        "its flights have landed, and never changes. Its time is that of its last flight."
    ),
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
    # A plain table: later steps need only the current weather, and suppress takes no versioned one.
    materialized=Materialized(),
    description=(
        "The weather now, in metric units: a row is an airport (`origin`) with its newest observation. "
        "Its time is the hour of that observation, UTC."
    ),
    group="tables",
    owners=("team:weather",),
)

bad_weather = weather_metric.filter(
    "visib_km < 2 or gust_kmh > 60",
    name="bad_weather",
    description=(
        "Where the weather is bad now: a row is an airport (`origin`) with less than 2 km of "
        "visibility or gusts of more than 60 km/h; an airport with better weather has none. Its time "
        "is the hour of the observation, UTC."
    ),
    group="tables",
    owners=("team:weather",),
)

weather_alerts = bad_weather.suppress(
    UntilTimeLimit(timedelta(hours=3)),
    name="weather_alerts",
    description=(
        "Warnings of bad weather, at most one in 3 hours for an airport. A row is an airport "
        "(`origin`) with a current warning, and the observation that caused it; the all-clear removes "
        "it. Its time is the hour of that observation, UTC. Every warning is in the log."
    ),
    group="published",
    owners=("team:weather",),
)

bad_weather_reports = bad_weather.to_stream(
    name="bad_weather_reports",
    description=(
        "Hours of bad weather, as events: a row is an hour of bad weather at an airport (`origin`), or "
        "with `is_tombstone` the hour in which it was fine again. Its time is that hour, UTC."
    ),
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
        description=(
            "Spells of bad weather. A row is a spell at an airport (`origin`), from its first hour "
            "(`window_start`) to the hour in which the weather was good again (`window_end`), with its "
            "worst visibility and gust. Hours of bad weather up to 2 hours apart are one spell. Its "
            "time is that of its end."
        ),
        group="published",
        owners=("team:weather",),
    )
)

PUBLISHED = (departure_board, flights_corrected, fleet_sizes, hourly_departures, weather_alerts, storms)
"""The assets for consumers; all others are intermediate."""
