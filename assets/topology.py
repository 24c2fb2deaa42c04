"""The worked example: flights from New York in 2013, each with the weather as of its departure."""

from __future__ import annotations

from datetime import timedelta

from assets.schemas import Flights, Planes, Weather
from resources import LANDING
from vt_dagster import FilesSource, Stream, Table, VersionedTable

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
