"""``vt-dagster demo``: its output is short and true, and the commands that it prints work. The tests
use the flights of eight days of each month, and all flights in ``make endurance``."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from assets.demo import LATE
from tests import demo_reference, demo_subset
from tests.demo_reference import as_of_join
from vt_dagster import read

pytestmark = [pytest.mark.slow, pytest.mark.jvm]

REPOSITORY = Path(__file__).parents[1]
KEY = ["carrier", "flight", "time_hour"]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="days"),
        pytest.param(True, id="winter", marks=pytest.mark.endurance),
    ],
)
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory that the demo filled, and its whole output."""
    if request.param:
        data = tmp_path_factory.mktemp("short_demo")
        run = subprocess.run(
            [sys.executable, "-m", "vt_dagster.cli", "demo"],
            cwd=REPOSITORY,
            env={**os.environ, "VT_DAGSTER_DATA": str(data), "COLUMNS": demo_subset.COLUMNS},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=800,
        )
        assert run.returncode == 0, run.stdout
        printed = run.stdout
    else:
        data, printed = demo_subset.demo_results(demo_subset.SHORT, tmp_path_factory)
    # Java prints that it uses the tests' options.
    return data, re.sub(r"^NOTE: Picked up JDK_JAVA_OPTIONS: .*\n", "", printed, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def landed(demo: tuple[Path, str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Flights and weather, in order of arrival."""
    flights, weather = (
        demo_reference.landed(demo[0] / "landing", name) for name in ("flights", "weather")
    )
    return flights, weather


def _number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return int(found[1].replace(",", ""))


def test_demo_output_is_short(demo: tuple[Path, str]) -> None:
    lines = demo[1].splitlines()
    assert len(lines) <= 60, demo[1]
    assert not [line for line in lines if "WARN" in line or "DEBUG" in line or "ERROR" in line]
    assert lines[0].startswith("[   0.")
    for name in ("flights", "weather", "flights_corrected"):
        assert (
            sum(bool(re.match(rf"\[ *[\d.]+ s\]   {name}: [\d,]+ in [+=] ", line)) for line in lines)
            == 2
        )


def test_demo_numbers_equal_independent_join(
    demo: tuple[Path, str], landed: tuple[pd.DataFrame, pd.DataFrame]
) -> None:
    (data, text), (flights, weather) = demo, landed
    assert _number(text, r"flights in +([\d,]+)") == len(flights)
    assert _number(text, r"weather observations in +([\d,]+)") == len(weather)
    assert _number(text, r"lost +([\d,]+)") == 0
    rows = read("flights_corrected", warehouse=str(data / "warehouse"), into="pandas")
    joined = _number(text, r" joined +([\d,]+)")
    assert joined == len(rows) == len(flights) - _number(text, r"waiting in the grace buffer +([\d,]+)")
    ours = rows.astype({"flight": "int64", "time_hour": demo_reference.UTC}).set_index(KEY)
    late = LATE.among(weather.assign(time_hour=weather["time_hour"].astype(str).str[:10]))
    in_time, all_of_it = (
        as_of_join(flights, some).set_index(KEY).loc[ours.index] for some in (weather[~late], weather)
    )
    for column in ("temp", "wind_speed", "visib"):
        pd.testing.assert_series_equal(
            ours[column].astype(float), all_of_it[column].astype(float), check_names=False
        )
    changed = in_time["valid_from"] != all_of_it["valid_from"]
    assert changed.sum() == (ours["revision"] == 1).sum() > 1_000
    assert _number(text, r"of them corrected since +([\d,]+)") == changed.sum()
    assert _number(text, r"([\d,]+) flights were corrected, 0 were too old") == changed.sum()


def test_demo_explains_corrected_row(
    demo: tuple[Path, str], landed: tuple[pd.DataFrame, pd.DataFrame]
) -> None:
    """The demo prints the weather of this flight as known before and now, and why it changed."""
    (_, text), (flights, weather) = demo, landed
    told = re.search(r"  (\w\w) (\d+) from JFK to \w+ was due to leave at (\S+ \S+) UTC", text)
    assert told is not None
    about = flights[(flights["carrier"] == told[1]) & (flights["flight"] == int(told[2]))]
    about = about[demo_reference.departure(about) == pd.Timestamp(told[3], tz="UTC")]
    late = LATE.among(weather.assign(time_hour=weather["time_hour"].astype(str).str[:10]))
    expected = [
        (str(as_of_join(about, some)["temp"].item()), revision)
        for some, revision in ((weather[~late], "0"), (weather, "1"))
    ]
    assert re.findall(r"as known .+? ([\d.]+) °F.*\(revision ([01])\)", text) == expected
    why = text[text.index("Why this result?") :]
    assert re.search(r"^  corrected: revision 1, by weather 0:\d+$", why, re.MULTILINE)
    assert re.search(r"^  as_of: weather 0:\d+, valid from ", why, re.MULTILINE)


def test_printed_commands_work(demo: tuple[Path, str]) -> None:
    data, text = demo
    last = text[text.index("\nNext: ") :]
    commands = re.findall(r"^  (\S+/vt-dagster .+)$", last, re.MULTILINE)
    assert len(commands) == 3
    said = [_typed(command, data) for command in commands]
    before = re.search(r"as known at \S+ +([\d.]+) °F", text)
    assert before is not None
    assert re.search(rf"^temp +{before[1]}$", said[0], re.MULTILINE)
    assert "made from" in said[1]
    assert "2013-03-31 2" in said[2]
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = re.findall(r"make ([a-z-]+)", last)
    assert targets == ["ui", "demo-all"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def _typed(command: str, data: Path) -> str:
    program, *arguments = shlex.split(command)
    assert program == ".venv/bin/vt-dagster"
    done = subprocess.run(
        [sys.executable, "-m", "vt_dagster.cli", *arguments],
        env={**os.environ, "VT_DAGSTER_WAREHOUSE": str(data / "warehouse"), "COLUMNS": "200"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
