"""``vt-dagster demo --all``: every result equals that of an independent computation. By default for
some days of a winter; in ``make endurance`` for the whole year, with more rows and one more run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from assets import demo as demo_of_winter
from assets import demo_all
from assets.corrections import FORGOTTEN
from assets.landing import DELIVERIES, LateWeather
from tests import demo_reference, demo_subset
from tests.demo_reference import WEATHER_VALUES, as_of_join
from vt_dagster import lateness, read
from vt_dagster.cli import app
from vt_dagster.storage.arrow_reader import head_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # the first test waits for the whole demo
]

REPOSITORY = Path(__file__).parents[1]


@dataclass(frozen=True)
class Part:
    """A part of the year, and its expected numbers.

    Args:
        runs: arguments of ``python`` that run it; empty = ``demo_subset.py``. Data lands ``landings``
            times.
        flights: number of flights; ``unnamed`` of them have no aircraft, ``forgotten`` have the one
            that the demo erases.
        late: the weather that lands late; it corrects ``corrected`` flights.
        aircraft: number of aircraft; ``moved`` of them change their airline, as ``sold`` matches in the
            demo's output.
        too_late: number of flights that arrive after their hour has closed.
        observed: an hour with weather; ``last`` is the last day with any.
    """

    runs: tuple[str, ...]
    landings: int
    flights: int
    unnamed: int
    forgotten: int
    late: LateWeather
    corrected: int
    aircraft: int
    moved: int
    sold: str
    too_late: int
    observed: str
    last: str


DAYS = Part(
    runs=(),
    landings=len(demo_of_winter.LANDINGS),
    flights=21_587,
    unnamed=135,
    forgotten=3,
    late=demo_of_winter.LATE,
    corrected=1_224,
    aircraft=3_115,
    moved=2,
    sold=r"2 aircraft from Endeavor Air Inc\. .* to ExpressJet Airlines Inc\.",
    too_late=8,
    observed="2013-03-05 12:00:00",
    last="2013-03-31",
)
YEAR = Part(
    runs=("-m", "vt_dagster.cli", "demo", "--all"),
    landings=len(demo_all.LANDINGS),
    flights=336_776,
    unnamed=2_512,
    forgotten=54,
    late=demo_all.LATE,
    corrected=2_275,
    aircraft=4_043,
    moved=17,
    sold=r"9 aircraft from AirTran Airways Corporation .* to Delta Air Lines Inc\.",
    too_late=213,
    observed="2013-11-05 12:00:00",
    last="2013-12-30",
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(DAYS, id="days"),
        pytest.param(YEAR, id="year", marks=pytest.mark.endurance),
    ],
)
def part(request: pytest.FixtureRequest) -> Part:
    return request.param


@pytest.fixture(scope="module")
def demo(part: Part, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory with the results of the demo, and its output."""
    if not part.runs:
        return demo_subset.demo_results(demo_subset.ALL, tmp_path_factory)
    data = tmp_path_factory.mktemp("demo")
    run = subprocess.run(
        [sys.executable, *part.runs],
        cwd=REPOSITORY,
        env={**os.environ, "VT_DAGSTER_DATA": str(data), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return data, run.stdout


def test_demo_all_covers_whole_year(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[Any, ...]] = []
    monkeypatch.setattr(demo_all, "run", lambda *given: taken.append(given))
    assert CliRunner().invoke(app, ["demo", "--all"]).exit_code == 0
    assert taken == [()]
    months = [month for landing in demo_all.LANDINGS for month in landing]
    assert months == list(DELIVERIES["flights"])


def _table(data: Path, asset: str, table: str) -> pd.DataFrame:
    """The rows of a table, read by DuckDB."""
    files = DeltaTable(data / "warehouse" / asset / table).file_uris()
    if not files:
        return _table(data, asset, "log").head(0)
    return duckdb.read_parquet(files, union_by_name=True).df()


def _view(data: Path, asset: str) -> pd.DataFrame:
    return _table(data, asset, "view")


def _assert_same(ours: pd.DataFrame, theirs: pd.DataFrame, order: list[str] | None = None) -> None:
    """Requires equal rows in the columns of ``theirs``, sorted by ``order`` (None = in the given
    order)."""

    def plain(rows: pd.DataFrame) -> pd.DataFrame:
        rows = pd.DataFrame(rows[theirs.columns])
        for column in rows.columns:
            if isinstance(rows[column].dtype, pd.DatetimeTZDtype):
                rows[column] = rows[column].astype(demo_reference.UTC)
            elif pd.api.types.is_numeric_dtype(rows[column].dtype):
                rows[column] = rows[column].astype(float)
        return (
            rows.reset_index(drop=True) if order is None else rows.sort_values(order, ignore_index=True)
        )

    pd.testing.assert_frame_equal(
        plain(ours).convert_dtypes(), plain(theirs).convert_dtypes(), rtol=1e-12, check_dtype=False
    )


def _number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return int(found[1].replace(",", ""))


def _utc(column: Any) -> Any:
    return pd.to_datetime(column, utc=True)


@pytest.fixture(scope="module")
def joined(demo: tuple[Path, str]) -> pd.DataFrame:
    return _table(demo[0], "flights_with_weather", "log")


def test_each_flight_is_logged_once(part: Part, demo: tuple[Path, str]) -> None:
    flights = _table(demo[0], "flights", "log")
    assert len(flights) == part.flights
    assert sorted(flights["offset"]) == list(range(part.flights))
    identity = ["time_hour", "minute", "carrier", "flight", "origin"]
    assert not flights.duplicated(identity).any()


def test_flights_are_joined_once_or_wait(
    part: Part, demo: tuple[Path, str], joined: pd.DataFrame
) -> None:
    waiting = _number(demo[1], r"waiting in the grace buffer\D+([\d,]+)")
    assert len(joined) + waiting == part.flights
    assert 0 < waiting < 1000
    assert sorted(joined["offset"]) == list(range(len(joined)))
    newest = _utc(_table(demo[0], "flights", "log")["timestamp"]).max()
    assert (_utc(joined["timestamp"]) <= newest - pd.Timedelta(hours=6)).all()


def test_joined_values_equal_independent_join(
    part: Part, demo: tuple[Path, str], joined: pd.DataFrame
) -> None:
    # Weather that came after its flights were joined is not in their rows.
    weather = _table(demo[0], "weather", "log")
    flights = joined.drop(columns=[*WEATHER_VALUES, "weather_from"])
    expected = as_of_join(flights, weather.loc[~_late(part, weather)])
    order = ["carrier", "flight", "origin", "timestamp"]
    ours = joined.sort_values(order, ignore_index=True)
    theirs = expected.sort_values(order, ignore_index=True)
    assert len(ours) == len(theirs)
    for column in WEATHER_VALUES:
        pd.testing.assert_series_equal(
            ours[column].astype(float), theirs[column].astype(float), check_names=False
        )
    matched = _utc(ours["weather_from"])
    assert (matched == _utc(theirs["valid_from"])).all()
    assert matched.notna().all()


def _late(part: Part, weather: pd.DataFrame) -> pd.Series:
    hours = _utc(weather["time_hour"])
    within = (hours >= _utc(part.late.start)) & (hours < _utc(part.late.end))
    return within & (weather["origin"] == part.late.origin)


def test_late_weather_corrects_flights(
    part: Part, demo: tuple[Path, str], joined: pd.DataFrame, landed: dict[str, pd.DataFrame]
) -> None:
    """In the end the corrected join equals DuckDB's join of all data. Only the flights whose match the
    late weather changes were corrected."""
    key, values = ["carrier", "flight", "time_hour"], ["temp", "wind_speed", "visib"]
    flights, weather = landed["flights"], landed["weather"]
    rows = _view(demo[0], "flights_corrected")
    ours = rows.astype({"flight": "int64", "time_hour": demo_reference.UTC}).set_index(key)
    assert sorted(rows["left_offset"]) == sorted(set(rows["left_offset"]))
    assert len(ours) == len(joined)  # the same number of flights waits as in the uncorrected join
    in_time, all_of_it = (
        as_of_join(flights, some)
        .set_index(key)
        .loc[ours.index]
        .rename(columns={"valid_from": "weather_from"})
        for some in (weather.loc[~_late(part, weather)], weather)
    )
    for column in values:
        pd.testing.assert_series_equal(
            ours[column].astype(float), all_of_it[column].astype(float), check_names=False
        )
    assert (_utc(ours["weather_from"]) == all_of_it["weather_from"]).all()
    changed = in_time["weather_from"] != all_of_it["weather_from"]
    assert ((ours["revision"] == 1) == changed).all()
    assert changed.sum() == part.corrected
    assert _number(demo[1], r"([\d,]+) flights were corrected, 0 were too old") == changed.sum()
    assert re.search(r"\b0 of [\d,]+ rows of flights_corrected", demo[1])
    assert _number(demo[1], r"([\d,]+) of [\d,]+ rows of flights_with_weather") == changed.sum()
    late = _table(demo[0], "weather", "log")
    offsets = late.loc[_late(part, late), "offset"]
    causes = rows.loc[rows["revision"] == 1, "cause"].map(lambda cause: cause["offset"])
    assert set(causes) <= set(offsets)


def test_flight_as_known_before_late_weather(
    part: Part, demo: tuple[Path, str], landed: dict[str, pd.DataFrame]
) -> None:
    asked = re.search(r"get flights_corrected (--key .+) --as-known-at (\S+)\n", demo[1])
    assert asked is not None
    carrier, flight, hour = re.findall(r"--key (\S+)", asked[1])
    about, warehouse = landed["flights"], str(demo[0] / "warehouse")
    about = about[(about["carrier"] == carrier) & (about["flight"] == int(flight))]
    about = about[about["time_hour"] == _utc(hour)]
    told: list[Any] = []
    for at, late in ((asked[2], False), (None, True)):
        weather = landed["weather"]
        (expected,) = as_of_join(
            about, weather if late else weather.loc[~_late(part, weather)]
        ).to_dict("records")
        (row,) = read(
            "flights_corrected", warehouse=warehouse, key=(carrier, flight, hour), as_known_at=at
        ).to_pylist()
        assert (row["revision"], row["temp"]) == (int(late), expected["temp"])
        assert row["weather_from"] == expected["valid_from"]
        at_departure = {"as_of": row["timestamp"], "as_known_at": at}
        (observed,) = read("weather", warehouse=warehouse, key="JFK", **at_departure).to_pylist()
        assert observed["valid_from"] == row["weather_from"]
        told.append(row["temp"])
    assert told[0] != told[1]
    lines = re.findall(r"as known (?:now|at [\d:]+) +([\d.]+) °F.*\(revision ([01])\)", demo[1])
    assert lines == [(str(told[0]), "0"), (str(told[1]), "1")]


def test_aircraft_is_erased(part: Part, demo: tuple[Path, str]) -> None:
    """An erased aircraft is neither in the log nor in the view of its table, nor of downstream tables
    where it is the key."""
    for asset in ("aircraft", "fleet", "airline_fleet"):
        for table in ("log", "view"):
            rows = _table(demo[0], asset, table)
            assert len(rows) >= part.aircraft - 1
            assert not (rows["tailnum"] == FORGOTTEN).any()
    (path,) = (demo[0] / "warehouse" / "erased.certificates").iterdir()
    assert str(path) in demo[1]
    text = path.read_text()
    assert FORGOTTEN not in text
    told = json.loads(text)
    assert told["finished"]
    assert list(told["kept"]) == ["fleet_sizes"]
    assert told["searched"]["airline_fleet/log"]["erased"] == 1
    assert "airline_fleet had 1 of it, has 0" in demo[1]


@pytest.fixture(scope="module")
def landed(demo: tuple[Path, str]) -> dict[str, pd.DataFrame]:
    """The records that each source delivered, in order of arrival."""
    sources = ("weather", "planes", "airlines", "aircraft", "flights")
    return {source: demo_reference.landed(demo[0] / "landing", source) for source in sources}


def test_aircraft_versions_equal_sql_join(
    part: Part, demo: tuple[Path, str], landed: dict[str, pd.DataFrame]
) -> None:
    """Every version of the table-table join and of the foreign-key join equals that of a SQL join."""
    expected = demo_reference.fleet_versions(landed["aircraft"], landed["planes"], landed["airlines"])
    assert expected["valid_to"].notna().sum() == part.moved
    assert len(expected) == part.aircraft + part.moved
    expected = expected[expected["tailnum"] != FORGOTTEN]
    order = ["tailnum", "valid_from"]
    _assert_same(_view(demo[0], "airline_fleet"), expected, order)
    _assert_same(_view(demo[0], "fleet"), expected.drop(columns="airline"), order)


def test_flight_carrier_equals_fleet_carrier(
    part: Part, demo: tuple[Path, str], landed: dict[str, pd.DataFrame]
) -> None:
    """As of the departure of every flight, the carrier of its aircraft is the carrier of the flight."""
    flights = landed["flights"].query("tailnum != @FORGOTTEN")
    carriers = demo_reference.query(
        """
        SELECT flights.carrier AS flown, fleet.carrier AS said
        FROM flights ASOF LEFT JOIN fleet
          ON flights.tailnum = fleet.tailnum AND flights.timestamp >= fleet.valid_from
        WHERE flights.tailnum IS NOT NULL
        """,
        flights=flights[["tailnum", "carrier", "timestamp"]],
        fleet=_view(demo[0], "fleet"),
    )
    assert len(carriers) == part.flights - part.unnamed - part.forgotten
    assert (carriers["flown"] == carriers["said"]).all()


def test_fleet_sizes_equal_newest_records(
    part: Part, demo: tuple[Path, str], landed: dict[str, pd.DataFrame]
) -> None:
    versions = demo_reference.fleet_versions(landed["aircraft"], landed["planes"], landed["airlines"])
    newest = versions[versions["valid_to"].isna()]
    expected = newest.groupby("airline", as_index=False).agg(
        aircraft=("tailnum", "size"), seats=("seats", "sum")
    )
    assert expected["aircraft"].sum() == part.aircraft
    _assert_same(_view(demo[0], "fleet_sizes"), expected, ["airline"])


def test_each_closed_hour_is_emitted_once(
    part: Part, demo: tuple[Path, str], landed: dict[str, pd.DataFrame]
) -> None:
    every, late = demo_reference.hours(landed["flights"], pd.Timedelta(hours=12))
    assert late == part.too_late
    assert _number(demo[1], r"([\d,]+) flights were known only when") == late
    order = ["origin", "window_start"]
    _assert_same(_view(demo[0], "departures_so_far"), every.drop(columns="closed"), order)
    final = every[every["closed"]].drop(columns="closed")
    assert 0 < len(every) - len(final) < 100
    told = _table(demo[0], "hourly_departures", "log")
    assert told["is_tombstone"].sum() == 0
    assert not told.duplicated(order).any()
    _assert_same(told, final, order)
    _assert_same(_view(demo[0], "hourly_departures"), final, order)


def test_bad_weather_is_emitted_in_metric_units(
    demo: tuple[Path, str], landed: dict[str, pd.DataFrame]
) -> None:
    """``map_values``, ``filter`` and ``to_stream`` emit every expected record, in order."""
    metric, bad = (
        demo_reference.metric(landed["weather"]),
        demo_reference.bad_weather(landed["weather"]),
    )
    _assert_same(_in_order(demo[0], "weather_metric"), metric)
    _assert_same(_view(demo[0], "weather_metric"), metric.groupby("origin").tail(1), ["origin"])
    for asset in ("bad_weather", "bad_weather_reports"):
        _assert_same(_in_order(demo[0], asset), bad)
    now = bad.groupby("origin").tail(1)
    _assert_same(_view(demo[0], "bad_weather"), now[~now["is_tombstone"]], ["origin"])


def test_alerts_are_rate_limited(demo: tuple[Path, str], landed: dict[str, pd.DataFrame]) -> None:
    bad = demo_reference.bad_weather(landed["weather"])
    expected = demo_reference.at_most_one_in(bad, pd.Timedelta(hours=3))
    assert 0 < len(expected) < len(bad) / 2
    _assert_same(_in_order(demo[0], "weather_alerts"), expected)
    assert _number(demo[1], r"([\d,]+) alerts") == len(expected)
    # an airport without an alert for its newest update has one held back: no update is lost
    last, told = (rows.groupby("origin")["timestamp"].max() for rows in (bad, expected))
    assert _number(demo[1], r"([\d,]+) held back") == (last != told.reindex(last.index)).sum()


def test_storms_are_session_windows(demo: tuple[Path, str], landed: dict[str, pd.DataFrame]) -> None:
    expected = demo_reference.storms(landed["weather"], gap="2 hours")
    _assert_same(_view(demo[0], "storms"), expected, ["origin", "window_start"])
    assert _number(demo[1], r"([\d,]+) storms") == len(expected)


def test_board_shows_newest_departures(demo: tuple[Path, str], landed: dict[str, pd.DataFrame]) -> None:
    newest = demo_reference.board(landed["flights"], pd.Timedelta(hours=6), pd.Timedelta(days=1))
    validity = newest[["valid_from", "valid_to"]]
    flights = newest.drop(columns=["position", "timestamp", *validity])
    weathered = as_of_join(flights, landed["weather"])
    expected = weathered.rename(columns={"valid_from": "weather_from"}).join(validity)
    board = _view(demo[0], "departure_board")  # expired versions remain with others of their segment
    horizon = _utc(board["timestamp"]).max() - pd.Timedelta(days=1)
    board = board[board["valid_to"].isna() | (_utc(board["valid_to"]) > horizon)]
    _assert_same(board, expected, ["origin", "valid_from"])
    assert board["valid_to"].isna().sum() == 3


def _in_order(data: Path, asset: str) -> pd.DataFrame:
    """The log of an asset with one partition, in order of offset."""
    return _table(data, asset, "log").sort_values("offset", ignore_index=True)


def test_demo_output_has_counts(part: Part, demo: tuple[Path, str]) -> None:
    text = demo[1]
    for line in (
        "flights in",
        "joined",
        "without weather",
        "late",
        "waiting",
        "expired",
        "quarantined",
    ):
        assert line in text
    assert re.search(rf"flights in\D+{part.flights:,}\b", text)
    assert re.search(r"lost\D+0\b", text)
    assert text.count("materializing") >= part.landings
    assert (
        len(re.findall(r"^\[ *[\d.]+ s\]   flights_with_weather: [\d,]+ in [+=] ", text, re.MULTILINE))
        == part.landings
    )
    for title in (
        "A late record, explained",
        "An aircraft changes hands",
        "The worst hour",
        "The longest storm",
        "The newest departures",
        "Weather that came late",
        "Why this result? A late record",
        "Why this result? A corrected row",
        "Why this result? An aggregate's row",
        "> at most 1 % wrong: the shortest grace is",
        "exit code 1: the step fails",
        "An aircraft is erased",
    ):
        assert title in text
    assert re.search(part.sold, text)
    assert str(demo[0] / "warehouse") in text
    assert "make ui" in text


def test_commands_read_demo_tables(part: Part, demo: tuple[Path, str], spark: SparkSession) -> None:
    about = {"VT_DAGSTER_WAREHOUSE": str(demo[0] / "warehouse"), "COLUMNS": "200"}
    half_past = f"{part.observed[:13].replace(' ', 'T')}:30:00Z"
    found = CliRunner().invoke(app, ["get", "weather", "--key", "JFK", "--as-of", half_past], env=about)
    assert found.exit_code == 0, found.output
    assert re.search(rf"valid_from +{part.observed}", found.stdout)
    timeline = CliRunner().invoke(
        app, ["history", "weather", "--key", "JFK", "--limit", "3"], env=about
    )
    assert timeline.exit_code == 0, timeline.output
    assert timeline.stdout.count(part.last) >= 5
    assert "now" in timeline.stdout
    nothing = CliRunner().invoke(app, ["get", "weather", "--key", "SFO"], env=about)
    assert nothing.exit_code == 1
    assert "no value for SFO" in nothing.stderr
    wrong = subprocess.run(  # a process, to see the exit code and stderr
        [sys.executable, "-m", "vt_dagster.cli", "get", "wether", "--key", "JFK"],
        env={**os.environ, **about},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: expected one of ['aircraft', 'airline_fleet',")


def test_lateness_equals_run_counts(part: Part, demo: tuple[Path, str], joined: pd.DataFrame) -> None:
    """``lateness`` reports the numbers of the runs for the declared grace. The command takes less than
    15 seconds of processor time."""
    before = os.times()
    told = subprocess.run(
        [
            *(sys.executable, "-m", "vt_dagster.cli", "lateness", "flights_with_weather"),
            *("--at-most", "0.1%", "--json", "--warehouse", str(demo[0] / "warehouse")),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used < 15  # processor time, since other processes run too
    assert told.returncode == 1, told.stderr  # with the declared grace, a larger share is wrong
    choices = {one["length"]: one for one in json.loads(told.stdout)["choices"]}
    declared = choices[timedelta(hours=6).total_seconds()]
    assert declared["declared"]
    assert declared["of"] == part.flights
    assert declared["waiting"] == part.flights - len(joined)
    assert declared["late"] == joined["is_late"].sum() > 0
    # This equals the number that the demo finds with pandas, which also joins the late weather.
    assert declared["wrong"] == _number(demo[1], r"([\d,]+) of [\d,]+ rows of flights_with_weather")
    hours = lateness("departures_so_far", grace=["12h"], warehouse=str(demo[0] / "warehouse"))
    dropped = hours.choices[0]
    _, commit = head_of(str(demo[0] / "warehouse"), "departures_so_far")
    assert dropped.late == commit.totals["late_records_dropped"]
    assert dropped.dropped == commit.totals["expired_window_records_dropped"]
