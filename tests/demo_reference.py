"""The expected results of the demo, computed without Spark and without our operators."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pandas as pd

UTC = "datetime64[us, UTC]"

#: The columns of a weather observation, apart from its place and time.
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
    WEATHER_VALUES and ``valid_from``, the matched ``time_hour``. These are null for a flight without
    a match. Times are UTC, as text or as timestamps; those of the result carry their zone.
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


# --- the demo's other expected results, from the landing files in order of arrival -------------


def landed(landing: Path, source: str) -> pd.DataFrame:
    """All records that a source delivered, in order of arrival; ``position`` counts from 0.

    Flights have their ``timestamp``; times are UTC and carry their zone.
    """
    frames: list[pd.DataFrame] = []
    for file in sorted((landing / source).iterdir()):
        if file.suffix == ".csv":
            frames.append(pd.read_csv(file))
        else:
            frames.append(pd.read_json(file, lines=True, convert_dates=False))
    rows = pd.concat(frames, ignore_index=True)
    for column in {"time_hour", "known_at", "since"} & set(rows.columns):
        rows[column] = pd.to_datetime(rows[column], utc=True).astype(UTC)
    if source == "flights":
        rows["timestamp"] = departure(rows).astype(UTC)
    return rows.assign(position=range(len(rows)))


def query(sql: str, **frames: pd.DataFrame) -> pd.DataFrame:
    """Runs a query over frames in DuckDB; times are UTC."""
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        for name, frame in frames.items():
            connection.register(name, frame)
        return connection.execute(sql).df()


def fleet_versions(
    aircraft: pd.DataFrame, planes: pd.DataFrame, airlines: pd.DataFrame
) -> pd.DataFrame:
    """All versions of every aircraft, with its register entry and its airline's name."""
    return query(
        """
        WITH one AS (  -- of several records of one time the last counts
            SELECT tailnum, since, max_by(carrier, position) AS carrier
            FROM aircraft GROUP BY tailnum, since
        )
        SELECT tailnum, carrier, since, manufacturer, model, year AS built, seats, name AS airline,
               since AS valid_from,
               lead(since) OVER (PARTITION BY tailnum ORDER BY since) AS valid_to
        FROM one LEFT JOIN planes USING (tailnum) LEFT JOIN airlines USING (carrier)
        """,
        aircraft=aircraft,
        planes=planes,
        airlines=airlines,
    )


def hours(flights: pd.DataFrame, grace: pd.Timedelta) -> tuple[pd.DataFrame, int]:
    """Departures by airport and hour, without the flights that arrived after their hour had closed.

    Returns:
        the hours, with a column ``closed``, and the number of flights that came too late.
    """
    flights = flights.assign(
        window_start=flights["timestamp"].dt.floor("h"), stream_time=flights["timestamp"].cummax()
    )
    flights["window_end"] = flights["window_start"] + pd.Timedelta(hours=1)
    in_time = flights.loc[flights["stream_time"] < flights["window_end"] + grace]
    found = in_time.groupby(["origin", "window_start", "window_end"], as_index=False).agg(
        scheduled=("flight", "size"),
        departed=("dep_time", "count"),
        mean_delay=("dep_delay", "mean"),
        worst_delay=("dep_delay", "max"),
    )
    newest = flights["timestamp"].max()
    return found.assign(closed=found["window_end"] + grace <= newest), len(flights) - len(in_time)


def metric(weather: pd.DataFrame) -> pd.DataFrame:
    """The observations in metric units, in order of arrival."""
    return pd.DataFrame(
        {
            "origin": weather["origin"],
            "timestamp": weather["time_hour"],
            "temp_c": (weather["temp"] - 32) * 5 / 9,
            "wind_kmh": weather["wind_speed"] * 1.609344,
            "gust_kmh": weather["wind_gust"] * 1.609344,
            "visib_km": weather["visib"] * 1.609344,
            "precip_mm": weather["precip"] * 25.4,
        }
    )


def bad_weather(weather: pd.DataFrame) -> pd.DataFrame:
    """The hours of bad weather, and as a tombstone with nulls the first good hour after them."""
    rows = metric(weather)
    bad = (rows["visib_km"] < 2) | (rows["gust_kmh"] > 60)
    before = bad.groupby(rows["origin"]).shift(fill_value=False)
    rows = rows.assign(is_tombstone=~bad).loc[bad | before]
    values = [c for c in rows if c not in ("origin", "timestamp", "is_tombstone")]
    rows.loc[rows["is_tombstone"], values] = None
    return rows.reset_index(drop=True)


def at_most_one_in(updates: pd.DataFrame, period: pd.Timedelta) -> pd.DataFrame:
    """The updates of ``origin`` that KIP-328's time limit emits, in the order of emission."""
    held: dict[str, tuple[pd.Timestamp, int]] = {}
    out: list[int] = []
    stream_time = updates["timestamp"].min()
    for i, (origin, time) in enumerate(zip(updates["origin"], updates["timestamp"], strict=True)):
        stream_time = max(stream_time, time)
        first, _ = held.get(origin, (time, i))
        held[origin] = (first, i)
        for first, key in sorted((first, key) for key, (first, _) in held.items()):
            if first + period <= stream_time:
                out.append(held.pop(key)[1])
    return updates.iloc[out].reset_index(drop=True)


def storms(weather: pd.DataFrame, gap: str) -> pd.DataFrame:
    """Sessions of bad weather: events at most ``gap`` apart are in one session (gaps and islands).
    Events more than ``gap`` behind stream time are left out."""
    events = bad_weather(weather)
    events = events.loc[events["timestamp"].cummax() - events["timestamp"] <= pd.Timedelta(gap)]
    return query(
        f"""
        WITH steps AS (
            SELECT *, timestamp - lag(timestamp) OVER airport > INTERVAL '{gap}' AS apart
            FROM events WINDOW airport AS (PARTITION BY origin ORDER BY timestamp)
        ), islands AS (
            SELECT *, count(*) FILTER (apart) OVER (PARTITION BY origin ORDER BY timestamp) AS island
            FROM steps
        )
        SELECT origin, min(timestamp) AS window_start, max(timestamp) AS window_end,
               count(*) FILTER (NOT is_tombstone) AS bad_hours,
               min(visib_km) AS least_visib_km, max(gust_kmh) AS strongest_gust_kmh
        FROM islands GROUP BY origin, island
        """,
        events=events,
    )


def board(flights: pd.DataFrame, grace: pd.Timedelta, retention: pd.Timedelta) -> pd.DataFrame:
    """The departures of each airport whose grace period has passed, as versions not yet expired."""
    done = flights.loc[flights["timestamp"] + grace <= flights["timestamp"].max()]
    horizon = done["timestamp"].max() - retention
    found = query(
        """
        WITH one AS (  -- of several departures of one time the last to arrive counts
            SELECT * FROM done
            QUALIFY row_number() OVER (PARTITION BY origin, timestamp ORDER BY position DESC) = 1
        )
        SELECT *, timestamp AS valid_from,
               lead(timestamp) OVER (PARTITION BY origin ORDER BY timestamp) AS valid_to
        FROM one
        """,
        done=done,
    )
    return found.loc[found["valid_to"].isna() | (found["valid_to"] > horizon)]
