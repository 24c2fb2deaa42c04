"""An as-of join without Spark: the independent answer that the tests compare with."""

from __future__ import annotations

import duckdb
import pandas as pd

#: What a weather observation says, apart from where and when.
WEATHER_VALUES = [
    "temp",
    "dewp",
    "humid",
    "wind_dir",
    "wind_speed",
    "wind_gust",
    "precip",
    "pressure",
    "visib",
]


def departure(flights: pd.DataFrame) -> pd.Series:
    """The timestamp of a flight: its scheduled departure in UTC."""
    hour = pd.to_datetime(flights["time_hour"], utc=True)
    return hour + flights["minute"].astype("float64") * pd.Timedelta(minutes=1)


def as_of_join(flights: pd.DataFrame, weather: pd.DataFrame) -> pd.DataFrame:
    """Every flight with the latest observation at its origin that is not later than departure.

    Both frames are in arrival order: of several observations of one hour the last one counts.
    The result has the flights' rows, order, index and columns, then ``timestamp``, the
    WEATHER_VALUES and ``valid_from``, the matched ``time_hour``; null where nothing matched.
    Times are UTC, as text or as timestamps; those of the result carry their zone.
    """
    timestamp = departure(flights)
    valid_from = pd.to_datetime(weather["time_hour"], utc=True)
    left = pd.DataFrame(
        {
            "position": range(len(flights)),
            "origin": flights["origin"].astype(object).to_numpy(),
            "ts": timestamp.dt.tz_localize(None).to_numpy(),
        }
    )
    right = pd.DataFrame(
        {
            "position": range(len(weather)),
            "origin": weather["origin"].astype(object).to_numpy(),
            "ts": valid_from.dt.tz_localize(None).to_numpy(),
        }
    )
    with duckdb.connect() as connection:
        connection.register("flights", left)
        connection.register("weather", right)
        matches = connection.execute(
            """
            WITH latest AS (
                SELECT origin, ts, max(position) AS position FROM weather GROUP BY origin, ts
            )
            SELECT flights.position AS flight, latest.position AS observation
            FROM flights ASOF LEFT JOIN latest
              ON flights.origin = latest.origin AND flights.ts >= latest.ts
            ORDER BY flights.position
            """
        ).df()
    assert matches["flight"].tolist() == list(range(len(flights))), "one row for each flight"
    position = matches["observation"].astype("Int64")
    values = weather[WEATHER_VALUES].assign(valid_from=valid_from).reset_index(drop=True)
    # reindex, not take: a missing position gives a row of nulls
    values = values.reindex(position.fillna(-1).astype("int64")).set_axis(flights.index)
    return pd.concat([flights.assign(timestamp=timestamp), values], axis=1)
