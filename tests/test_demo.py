"""``vt-dagster demo`` on the whole year, held against an independent as-of join."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest

from tests.reference import WEATHER_VALUES, as_of_join

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]
FLIGHTS = 336_776


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory that the demo filled, and what it printed."""
    data = tmp_path_factory.mktemp("demo")
    run = subprocess.run(
        [sys.executable, "-m", "vt_dagster.cli", "demo"],
        cwd=REPOSITORY,
        env={**os.environ, "VT_DAGSTER_DATA": str(data), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return data, run.stdout


def _table(data: Path, asset: str, table: str) -> pd.DataFrame:
    """A log, all of whose files count, read without Spark."""
    files = data / "warehouse" / asset / table / "*.parquet"
    return duckdb.sql(f"select * from read_parquet('{files}', union_by_name=true)").df()


def _utc(column: Any) -> Any:
    return pd.to_datetime(column, utc=True)


@pytest.fixture(scope="module")
def joined(demo: tuple[Path, str]) -> pd.DataFrame:
    return _table(demo[0], "flights_with_weather", "log")


def test_every_flight_is_in_the_log_exactly_once(demo: tuple[Path, str]) -> None:
    flights = _table(demo[0], "flights", "log")
    assert len(flights) == FLIGHTS
    assert sorted(flights["offset"]) == list(range(FLIGHTS))
    identity = ["time_hour", "minute", "carrier", "flight", "origin"]
    assert not flights.duplicated(identity).any()


def test_flights_are_joined_once_or_wait(demo: tuple[Path, str], joined: pd.DataFrame) -> None:
    waiting = int(re.search(r"waiting in the grace buffer\D+([\d,]+)", demo[1])[1].replace(",", ""))  # type: ignore[index]
    assert len(joined) + waiting == FLIGHTS
    assert 0 < waiting < 1000
    assert sorted(joined["offset"]) == list(range(len(joined)))
    newest = _utc(_table(demo[0], "flights", "log")["timestamp"]).max()
    assert (_utc(joined["timestamp"]) <= newest - pd.Timedelta(hours=6)).all()


def test_every_joined_value_is_what_an_independent_join_gives(
    demo: tuple[Path, str], joined: pd.DataFrame
) -> None:
    weather = _table(demo[0], "weather", "log")
    flights = joined.drop(columns=[*WEATHER_VALUES, "weather_from"])
    expected = as_of_join(flights, weather)
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


def test_it_tells_what_happened(demo: tuple[Path, str]) -> None:
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
    assert re.search(r"flights in\D+336,776", text)
    assert re.search(r"lost\D+0\b", text)
    assert text.count("materializing") >= 3
    assert "A late record, explained" in text
    assert str(demo[0] / "warehouse") in text
    assert "make ui" in text


def test_the_command_line_looks_into_its_tables(demo: tuple[Path, str]) -> None:
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "vt_dagster.cli", *arguments],
            env={**os.environ, "VT_DAGSTER_WAREHOUSE": str(demo[0] / "warehouse"), "COLUMNS": "200"},
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=300,
        )

    found = call("get", "weather", "--key", "JFK", "--as-of", "2013-11-05T12:30:00Z")
    assert found.returncode == 0, found.stderr
    assert re.search(r"valid_from +2013-11-05 12:00:00", found.stdout)
    timeline = call("history", "weather", "--key", "JFK", "--limit", "3")
    assert timeline.returncode == 0, timeline.stderr
    assert timeline.stdout.count("2013-12-30") >= 5
    assert "now" in timeline.stdout
    wrong = call("get", "wether", "--key", "JFK")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: expected one of ['flights', 'flights_with_weather',")
    nothing = call("get", "weather", "--key", "SFO")
    assert nothing.returncode == 1
    assert "no value for SFO" in nothing.stderr
