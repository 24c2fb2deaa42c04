"""The demo's corrections: late weather, and the erase of an aircraft."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pandas as pd
import pyarrow.compute as pc

from assets.answers import why
from assets.landing import LateWeather
from assets.topology import PUBLISHED, aircraft
from resources import spark, warehouse
from vt_dagster import read
from vt_dagster.columns import CAUSE, OFFSET, OLD, PARTITION, RECORDED_AT, REVISION, TIMESTAMP
from vt_dagster.orchestration.resources import session_of
from vt_dagster.runs.erase import erase

Say = Callable[[str], None]
FORGOTTEN = "N201AA"
"""A Cessna of 1959 with two seats: a private owner's."""
_KEY = ["carrier", "flight", "time_hour"]
_WEATHER = ["temp", "wind_speed", "visib"]
_ISO = "%Y-%m-%dT%H:%M:%SZ"


def late_weather(late: LateWeather, too_late: int, say: Say) -> None:
    """Shows the corrected rows, one flight as known before and now, and a comparison with pandas."""
    most = corrected(late, too_late, say)
    for command in asked(most):
        say(f"    {command}")
    expected = _by_pandas()
    say("  not as pandas joins all that has landed (merge_asof):")
    for name in ("flights_corrected", "flights_with_weather"):
        ours = _columns(name, [*_KEY, *_WEATHER, "weather_from"]).set_index(_KEY)
        theirs = expected.loc[ours.index, ours.columns]
        unlike = ((ours != theirs) & ~(ours.isna() & theirs.isna())).any(axis=1)
        said = "" if name == "flights_corrected" else "; a stream keeps the rows that it has emitted"
        say(f"    {unlike.sum():,} of {len(ours):,} rows of {name}{said}")
    why("A corrected row", "flights_corrected", most[PARTITION], most[OFFSET], say)


def corrected(late: LateWeather, too_late: int, say: Say) -> dict[str, Any]:
    """Shows the corrected rows, and the flight whose weather changed most, as known before and now;
    returns that flight."""
    rows = _read("flights_corrected", "log").filter(pc.field(REVISION) > 0).to_pylist()
    say(
        "\nWeather that came late (flights_corrected: a join that corrects its rows)\n"
        f"  {late.origin}'s weather of {late.start} to {late.end} landed with month {late.lands}, "
        "after its flights had been joined:\n"
        f"  {len(rows):,} flights were corrected, {too_late:,} were too old to be corrected"
    )
    most = max(rows, key=_change)
    before = _known_before(most)
    say(
        f"  {most['carrier']} {most['flight']} from {most['origin']} to {most['dest']} was due to "
        f"leave at {most[TIMESTAMP]:%Y-%m-%d %H:%M} UTC"
    )
    for when, at in ((f"as known at {before:%H:%M:%S}", before), ("as known now", None)):
        (found,) = _read("flights_corrected", None, [most[k] for k in _KEY], at).to_pylist()
        say(
            f"    {when:<20} {found['temp']} °F, wind {found['wind_speed']:.1f} mph, observed "
            f"{found['weather_from']:%m-%d %H:%M} (revision {found[REVISION]})"
        )
    return most


def asked(row: dict[str, Any]) -> list[str]:
    """Returns commands that get a corrected row, and its weather, as known before."""
    known = f"--as-known-at {_known_before(row):{_ISO}}"
    keys = (row["carrier"], row["flight"], f"{row['time_hour']:{_ISO}}")
    key = " ".join(f"--key {k}" for k in keys)
    at_departure = f"--key {row['origin']} --as-of {row[TIMESTAMP]:{_ISO}}"
    return [
        f".venv/bin/vt-dagster get {what} {known}"
        for what in (f"flights_corrected {key}", f"weather {at_departure}")
    ]


def forgotten_aircraft(say: Say) -> None:
    """Erases a key. This comes last, so that it changes nothing that was shown before."""
    versions = _read("airline_fleet", "versions", FORGOTTEN).num_rows
    why = "its owner asked for it"
    done = erase(
        warehouse.path, aircraft, session_of(spark), reason=why, key=[FORGOTTEN], among=PUBLISHED
    )
    rows = sum(one.erased for one in done.searched.values())
    left = _read("airline_fleet", "versions", FORGOTTEN).num_rows
    say(
        f"\nAn aircraft is erased (vt-dagster erase aircraft --key {FORGOTTEN} --reason …)\n"
        f"  {rows:,} rows erased in {len(done.searched)} tables of aircraft and what is made of it; "
        f"airline_fleet had {versions} of it, has {left}\n"
        f"  its certificate names {len(done.kept)} table that counted it, {len(done.elsewhere)} others "
        f"that still name it, and what no erase reaches:\n"
        f"  {done.path}"
    )


def _read(name: str, what: str | None = None, key: Any = None, as_known_at: Any = None) -> Any:
    return read(name, warehouse=warehouse.path, what=what, key=key, as_known_at=as_known_at)


def _columns(name: str, columns: list[str]) -> pd.DataFrame:
    """Returns the rows of a table, or the log of a stream."""
    return _read(name).select(columns).to_pandas()


def _change(row: dict[str, Any]) -> tuple[float, int]:
    before, now = row[OLD]["temp"], row["temp"]
    return (0 if before is None or now is None else abs(now - before), -row[OFFSET])


def _known_before(row: dict[str, Any]) -> datetime:
    """Returns the last full second before the observation arrived that corrected a row."""
    weather = _read("weather", "log")
    (observed,) = weather.filter(pc.field(OFFSET) == row[CAUSE][OFFSET]).to_pylist()
    return (observed[RECORDED_AT] - timedelta(microseconds=1)).replace(microsecond=0)


def _by_pandas() -> pd.DataFrame:
    """Joins each flight with its observation by pandas, from all landed files."""
    flights = _columns("flights", [*_KEY, "origin", TIMESTAMP])
    log = _read("weather", "log").select(["origin", *_WEATHER, TIMESTAMP, OFFSET])
    observed = log.to_pandas().sort_values(OFFSET).drop(columns=OFFSET)
    observed = observed.drop_duplicates(["origin", TIMESTAMP], keep="last")
    observed["weather_from"] = observed[TIMESTAMP]
    by_time = (rows.sort_values(TIMESTAMP, kind="stable") for rows in (flights, observed))
    return pd.merge_asof(*by_time, on=TIMESTAMP, by="origin").set_index(_KEY)
