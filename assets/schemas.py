"""The contracts of the landing files: one pandera model for each source.

A model is the source's contract. Files are read with its column types. Every batch must satisfy its
nullability and checks before it is committed.
"""

from __future__ import annotations

import pandera.pyspark as pa
import pyspark.sql.types as T
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

NYC_AIRPORTS = ["EWR", "JFK", "LGA"]


class Weather(pa.DataFrameModel):
    """Hourly observations at the three airports of New York; key ``origin``, time ``time_hour``.

    year, month, day and hour are local (America/New_York), time_hour is the same hour in UTC.
    Where daylight saving time ends, one local hour comes twice: time_hour tells them apart.
    """

    origin: T.StringType = pa.Field(
        isin={"allowed_values": NYC_AIRPORTS, "name": "origin_is_a_new_york_airport"}
    )
    year: T.IntegerType
    month: T.IntegerType
    day: T.IntegerType
    hour: T.IntegerType = pa.Field(
        in_range={"min_value": 0, "max_value": 23, "name": "hour_of_the_day"}
    )
    temp: T.DoubleType = pa.Field(
        nullable=True,
        in_range={"min_value": -40, "max_value": 130, "name": "temp_is_plausible"},
        description="Temperature, °F",
    )
    dewp: T.DoubleType = pa.Field(nullable=True, description="Dew point, °F")
    humid: T.DoubleType = pa.Field(
        nullable=True,
        in_range={"min_value": 0, "max_value": 100, "name": "humid_is_a_percentage"},
        description="Relative humidity, %",
    )
    wind_dir: T.IntegerType = pa.Field(
        nullable=True,
        in_range={"min_value": 0, "max_value": 360, "name": "wind_dir_is_in_degrees"},
        description="Wind direction, degrees",
    )
    wind_speed: T.DoubleType = pa.Field(
        nullable=True,
        # No upper bound: the source has one gross error, 1048 mph at EWR on 2013-02-12.
        ge={"min_value": 0, "name": "wind_speed_is_not_negative"},
        description="Wind speed, mph",
    )
    wind_gust: T.DoubleType = pa.Field(nullable=True, description="Wind gust speed, mph")
    precip: T.DoubleType = pa.Field(description="Precipitation, inches")
    pressure: T.DoubleType = pa.Field(nullable=True, description="Sea level pressure, millibars")
    visib: T.DoubleType = pa.Field(description="Visibility, miles")
    time_hour: T.TimestampType = pa.Field(description="Hour of the observation, UTC")


class Flights(pa.DataFrameModel):
    """Departures from New York in 2013; key ``origin``, time ``time_hour`` + ``minute``.

    Times like 517 are local clock times (5:17). A cancelled flight has no dep_time; one that
    did not land where it should has no air_time.
    """

    year: T.IntegerType
    month: T.IntegerType
    day: T.IntegerType
    dep_time: T.IntegerType = pa.Field(nullable=True, description="Actual departure, local HHMM")
    sched_dep_time: T.IntegerType = pa.Field(description="Scheduled departure, local HHMM")
    dep_delay: T.IntegerType = pa.Field(
        nullable=True, description="Minutes after schedule; negative: early"
    )
    arr_time: T.IntegerType = pa.Field(
        nullable=True, description="Actual arrival, HHMM at the destination"
    )
    sched_arr_time: T.IntegerType = pa.Field(description="Scheduled arrival, HHMM at the destination")
    arr_delay: T.IntegerType = pa.Field(
        nullable=True, description="Minutes after schedule; negative: early"
    )
    carrier: T.StringType = pa.Field(description="Airline, two letters")
    flight: T.IntegerType = pa.Field(description="Flight number")
    tailnum: T.StringType = pa.Field(nullable=True, description="The aircraft: key of planes")
    origin: T.StringType = pa.Field(
        isin={"allowed_values": NYC_AIRPORTS, "name": "origin_is_a_new_york_airport"}
    )
    dest: T.StringType
    air_time: T.IntegerType = pa.Field(
        nullable=True,
        gt={"min_value": 0, "name": "air_time_is_positive"},
        description="Minutes in the air",
    )
    distance: T.IntegerType = pa.Field(
        gt={"min_value": 0, "name": "distance_is_positive"}, description="Miles"
    )
    hour: T.IntegerType = pa.Field(description="Hour of the scheduled departure, local")
    minute: T.IntegerType = pa.Field(
        in_range={"min_value": 0, "max_value": 59, "name": "minute_of_the_hour"},
        description="Minute of the scheduled departure",
    )
    time_hour: T.TimestampType = pa.Field(description="Hour of the scheduled departure, UTC")
    known_at: T.TimestampType = pa.Field(
        description="When the flight's final data is known, UTC: the arrival order"
    )

    @pa.dataframe_check(name="known_at_is_not_before_the_scheduled_departure")
    def known_at_is_not_before_the_scheduled_departure(cls, df: DataFrame) -> bool:
        """A flight's final data is never known before its scheduled departure."""
        departure = F.col("time_hour") + F.make_dt_interval(mins=F.col("minute"))
        return df.filter(F.col("known_at") < departure).isEmpty()


class Planes(pa.DataFrameModel):
    """The aircraft register; key ``tailnum``, time ``known_at``."""

    tailnum: T.StringType
    year: T.IntegerType = pa.Field(nullable=True, description="Year of manufacture")
    type: T.StringType
    manufacturer: T.StringType
    model: T.StringType
    engines: T.IntegerType = pa.Field(
        in_range={"min_value": 1, "max_value": 4, "name": "engines_from_one_to_four"}
    )
    seats: T.IntegerType = pa.Field(gt={"min_value": 0, "name": "seats_are_positive"})
    speed: T.IntegerType = pa.Field(nullable=True, description="Average cruising speed, mph")
    engine: T.StringType = pa.Field(description="Kind of engine")
    known_at: T.TimestampType = pa.Field(description="Valid from, UTC")


class Airlines(pa.DataFrameModel):
    """The airlines' names; key ``carrier``, time ``known_at``."""

    carrier: T.StringType = pa.Field(description="Airline, two letters")
    name: T.StringType
    known_at: T.TimestampType = pa.Field(description="Valid from, UTC")


class Aircraft(pa.DataFrameModel):
    """Which carrier flies an aircraft; key ``tailnum``, time ``since``."""

    tailnum: T.StringType
    carrier: T.StringType = pa.Field(description="Airline, two letters")
    since: T.TimestampType = pa.Field(description="Its first scheduled departure for the carrier, UTC")
    known_at: T.TimestampType = pa.Field(
        description="When the data of that flight is known, UTC: the arrival order"
    )
