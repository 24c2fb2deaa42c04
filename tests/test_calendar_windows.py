"""Windows by the calendar of a time zone: bounds, refusals, and runs against a model."""

from __future__ import annotations

import random
import time
import zoneinfo
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, timedelta, timezone
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import dagster as dg
import numpy as np
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType
from starlette.testclient import TestClient

from tests.market import lines, materialized, messages, run
from vt_dagster import (
    FilesSource,
    HoppingWindow,
    SessionWindow,
    SlidingWindow,
    Stream,
    Table,
    TumblingWindow,
    build_asset,
    explain,
    lateness,
)
from vt_dagster.core.windowed_aggregate import calendar_bounds
from vt_dagster.errors import TopologyError
from vt_dagster.explore.app import application
from vt_dagster.explore.key_history import key_history, timeline_of_key
from vt_dagster.explore.warehouse_overview import facts
from vt_dagster.testing import TopologyTestDriver
from vt_dagster.topology import durations
from vt_dagster.topology.durations import CALENDAR_SIZES, Calendar, CalendarSize, starts_near
from vt_dagster.topology.operators import UntilWindowCloses

UTC = timezone.utc
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND, MINUTE, HOUR, DAY = (
    timedelta(microseconds=1),
    timedelta(minutes=1),
    timedelta(hours=1),
    timedelta(days=1),
)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


CLOCKS = {
    "Europe/Berlin": ["2024-03-31 01:00", "2024-10-27 01:00"],  # a day of 23 and of 25 hours
    "America/Havana": ["2024-03-10 05:00", "2024-11-03 05:00"],  # no midnight; midnight twice
    "Africa/Cairo": ["2023-04-27 22:00", "2023-10-26 21:00"],  # no midnight; 23:00 again
    "America/Sao_Paulo": ["2017-10-15 03:00", "2018-02-18 02:00"],
    "America/St_Johns": ["2005-04-03 03:31", "2005-10-30 02:31"],  # from 00:01 back to 23:01
    "America/Nuuk": ["2024-03-31 01:00", "2024-10-27 01:00"],  # the hour before midnight
    "Asia/Kathmandu": ["2024-02-29 18:15"],  # always 5 hours 45 minutes ahead
    "Pacific/Chatham": ["2024-04-06 14:00", "2024-09-28 14:00"],
    "Australia/Lord_Howe": ["2024-04-06 15:00", "2024-10-05 15:30"],  # half an hour
    "Pacific/Apia": ["2011-12-30 10:00"],  # a day that did not exist
    "Pacific/Kwajalein": ["1993-08-21 12:00", "1969-09-30 13:00"],  # and one of 47 hours
    "UTC": ["1970-01-01 00:00", "2024-02-29 00:00", "9999-12-31 12:00", "0001-01-09 00:00"],
}
"""Times at which the clocks of a zone change, by zone."""


# The model


class Window(NamedTuple):
    start: datetime
    end: datetime


@cache
def first_minute(day: date, zone: str) -> datetime:
    """The first minute whose local date is this day or a later one."""
    clock, found = ZoneInfo(zone), datetime(day.year, day.month, day.day, tzinfo=UTC) - 15 * HOUR
    while found.astimezone(clock).date() < day:
        found += MINUTE
    return found


def first_day(day: date, size: str) -> date:
    if size == "1 month":
        return day.replace(day=1)
    return day - timedelta(days=day.weekday()) if size == "1 week" else day


def window_of(moment: datetime, size: str, zone: str) -> Window:
    """The window that contains ``moment``, from the first instants of the days around it."""
    local = moment.astimezone(ZoneInfo(zone)).date()
    firsts = {first_day(local + timedelta(days=n), size) for n in range(-35, 36)}
    starts = [first_minute(day, zone) for day in sorted(firsts)]
    return Window(max(s for s in starts if s <= moment), min(s for s in starts if s > moment))


# Bounds


def times_near_clock_changes(zone: str, seed: int) -> list[datetime]:
    """Times around the changes of a zone's clock, with window bounds and a microsecond before them."""
    chance, found = random.Random(seed), list[datetime]()
    for change in map(utc, CLOCKS[zone]):
        if not 1000 < change.year < 9000:
            continue
        for _ in range(30):
            found.append(change + chance.uniform(-3, 3) * DAY)
        for minutes in (
            -1500,
            -1441,
            -1440,
            -90,
            -61,
            -60,
            -59,
            -30,
            -1,
            0,
            1,
            29,
            30,
            59,
            60,
            90,
            1440,
        ):
            found += [change + minutes * MINUTE, change + minutes * MINUTE - MICROSECOND]
        for size in CALENDAR_SIZES:
            start, end = window_of(change, size, zone)
            found += [start - MICROSECOND, start, end - MICROSECOND, end]
    return found


def micros(moment: datetime) -> int:
    return (moment - EPOCH) // MICROSECOND


def bounds_without_spark(moment: int, size: CalendarSize, zone: str) -> tuple[int, int]:
    """The bounds that readers without Spark compute."""
    starts = starts_near([moment // 86_400_000_000], Calendar(size, zone))
    place = int(np.searchsorted(starts, moment, "right"))
    return starts[place - 1], starts[place]


@pytest.mark.parametrize("zone", CLOCKS)
def test_bounds_without_spark(zone: str) -> None:
    for moment in times_near_clock_changes(zone, 1):
        for size in CALENDAR_SIZES:
            expected = tuple(map(micros, window_of(moment, size, zone)))
            assert bounds_without_spark(micros(moment), size, zone) == expected, (moment, size)  # pyright: ignore


def lengths(zone: str, *days: str) -> list[float]:
    """The length in hours of the daily windows that contain local noon of the days."""
    clock = ZoneInfo(zone)
    noons = [datetime.fromisoformat(day).replace(hour=12, tzinfo=clock) for day in days]
    return [
        (e - s) / 3_600_000_000
        for s, e in (bounds_without_spark(micros(noon), "1 day", zone) for noon in noons)
    ]


def test_days_with_clock_change() -> None:
    berlin = lengths("Europe/Berlin", "2024-03-30", "2024-03-31", "2024-10-27", "2024-10-28")
    assert berlin == [24, 23, 25, 24]
    assert lengths("Africa/Cairo", "2023-04-28", "2023-10-26") == [23, 25]
    assert lengths("America/Havana", "2024-03-10", "2024-11-03") == [23, 25]
    assert lengths("Australia/Lord_Howe", "2024-04-07", "2024-10-06") == [24.5, 23.5]
    assert lengths("Pacific/Kwajalein", "1969-09-30") == [47]
    start, _ = bounds_without_spark(micros(utc("2023-04-28 09:00")), "1 day", "Africa/Cairo")
    assert (EPOCH + start * MICROSECOND).astimezone(ZoneInfo("Africa/Cairo")).hour == 1
    start, end = bounds_without_spark(micros(utc("2024-03-31 12:00")), "1 week", "Europe/Berlin")
    assert (end - start) // 3_600_000_000 == 7 * 24 - 1
    assert (EPOCH + start * MICROSECOND).astimezone(ZoneInfo("Europe/Berlin")).weekday() == 0
    start, end = bounds_without_spark(micros(utc("2024-02-10 12:00")), "1 month", "Asia/Kathmandu")
    assert (EPOCH + start * MICROSECOND, EPOCH + end * MICROSECOND) == (
        utc("2024-01-31 18:15"),
        utc("2024-02-29 18:15"),
    )


def test_bounds_at_first_and_last_year() -> None:
    for zone in ("Pacific/Apia", "America/Havana"):
        for size in CALENDAR_SIZES:
            for moment in (datetime.min, datetime.min + 40 * DAY, datetime.max):
                at = micros(moment.replace(tzinfo=UTC))
                start, end = bounds_without_spark(at, size, zone)
                assert start <= at < end
                assert end - start < 32 * 86_400_000_000


@pytest.fixture
def other_time_zones(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[SparkSession]:
    """A session; the time zones of the session, of the JVM and of Python differ, and none is UTC."""
    kinds: Any = spark._jvm.java.util.TimeZone  # pyright: ignore
    before, other = kinds.getDefault(), spark.newSession()
    other.conf.set("spark.sql.session.timeZone", "America/St_Johns")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    kinds.setDefault(kinds.getTimeZone("Africa/Cairo"))
    yield other
    kinds.setDefault(before)
    monkeypatch.undo()
    time.tzset()
    spark.createDataFrame([], "nothing int")  # makes it the active session again


def test_spark_bounds_ignore_session_and_jvm_zone(other_time_zones: SparkSession) -> None:
    far = [datetime.min, datetime.min + 40 * DAY, datetime.max]
    sizes: list[CalendarSize] = ["1 day", "1 week", "1 month"]
    for zone in CLOCKS:
        moments = [micros(one) for one in times_near_clock_changes(zone, 2)]
        moments += [micros(one.replace(tzinfo=UTC)) for one in far]
        rows = other_time_zones.createDataFrame([(one,) for one in moments], "at bigint")
        rows = rows.withColumn("timestamp", F.timestamp_micros("at"))
        bounds = [F.struct(*calendar_bounds(Calendar(size, zone))) for size in sizes]
        for at, *each in rows.select("at", *bounds).collect():
            for size, one in zip(sizes, each, strict=True):
                assert tuple(one) == bounds_without_spark(at, size, zone), (
                    zone,
                    size,
                    EPOCH + at * MICROSECOND,
                )


# Definitions


NO = "Europe/Berlin"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: TumblingWindow("1 day", zone="Europe/Berln"), ["did you mean 'Europe/Berlin'?"]),
        (lambda: TumblingWindow("1 day", zone="europe/berlin"), ["did you mean 'Europe/Berlin'?"]),
        (lambda: TumblingWindow("1 day", zone="CET"), ["area and place", "'CET'"]),
        (lambda: TumblingWindow("1 day", zone="+01:00"), ["area and place", "'+01:00'"]),
        (lambda: TumblingWindow("1 day", zone=1), ["area and place", "got 1"]),  # pyright: ignore
        (lambda: TumblingWindow("5 minutes", zone=NO), ["1 day, 1 week, 1 month", "'5 minutes'"]),  # pyright: ignore
        (lambda: TumblingWindow(5 * MINUTE, zone=NO), ["is the same in all time zones", "300"]),
        (lambda: TumblingWindow(DAY, zone=NO), ["as text", "days=1"]),
        (lambda: TumblingWindow({0: DAY}, zone=NO), ["as text", "{0: "]),
        (lambda: TumblingWindow("1 month"), ["'1 month' needs the time zone", "zone='UTC'"]),
        (lambda: TumblingWindow("5 minutes"), ["size must be a datetime.timedelta"]),  # pyright: ignore
        (lambda: TumblingWindow("1 day", -DAY, zone=NO), ["grace must be between 0"]),
        (
            lambda: TumblingWindow("1 day", HOUR, 2 * DAY, zone=NO),
            ["the retention 2 days", "size (at most 2 days) + grace = 2 days, 1:00:00"],
        ),
        (lambda: HoppingWindow(DAY, HOUR, zone=NO), ["HoppingWindow: expected no zone", "'1 day'"]),  # pyright: ignore
        (lambda: SessionWindow(DAY, zone=NO), ["SessionWindow: expected no zone"]),  # pyright: ignore
        (lambda: SlidingWindow(DAY, zone=NO), ["SlidingWindow: expected no zone"]),  # pyright: ignore
    ],
)
def test_refused_calendar_windows(make: Any, told: list[str]) -> None:
    with pytest.raises(TopologyError) as error:
        make()
    for one in told:
        assert one in str(error.value)


# Runs


VISIT = StructType(
    [
        StructField("page", StringType()),
        StructField("n", LongType()),
        StructField("at", TimestampType()),
    ]
)
Record = dict[str, Any]


class Update(NamedTuple):
    page: str
    window: Window
    visits: int
    total: int
    newest: datetime


class Model:
    """Computes the windows of one partition record by record, with zoneinfo, without the library."""

    def __init__(self, size: str, zone: str, grace: timedelta) -> None:
        self.size, self.zone, self.grace = size, zone, grace
        self.now, self.late = datetime.min.replace(tzinfo=UTC), 0
        self.updates: list[Update] = []
        self.last: dict[tuple[str, Window], Update] = {}

    def take(self, records: Sequence[Record]) -> None:
        for record in records:
            self.now = max(self.now, record["at"])
            place = record["page"], window_of(record["at"], self.size, self.zone)
            if place[1].end + self.grace <= self.now:
                self.late += 1
                continue
            before = self.last.get(place)
            _, _, visits, total, newest = before or Update(*place, 0, 0, record["at"])
            one = Update(*place, visits + 1, total + record["n"], max(newest, record["at"]))
            self.last[place] = one
            self.updates.append(one)

    def closed(self) -> set[Update]:
        return {one for one in self.last.values() if one.window.end + self.grace <= self.now}


def visits(changes: Sequence[str], days: float, number: int, seed: int) -> list[Record]:
    """Visits within ``days`` of each change of a clock. Some are out of order, by up to 15 hours
    for each of the ``days``."""
    chance, found = random.Random(seed), list[Record]()
    for change in sorted(map(utc, changes)):
        for i in range(number):
            at = change + days * DAY * (2 * i / number - 1)
            at -= chance.choice([0, 0, 0.5, 3, 20, 30]) * chance.random() * HOUR * (days / 2)
            at = at.replace(second=0, microsecond=0) if chance.random() < 0.5 else at
            found.append({"page": chance.choice("ab"), "n": chance.randrange(100), "at": at})
    return found


def as_update(row: Mapping[str, Any]) -> Update:
    window = Window(row["window_start"], row["window_end"])
    return Update(row["page"], window, row["visits"], row["total"], row["timestamp"])


def stream(**more: Any) -> Stream:
    return Stream("visits", key="page", schema=VISIT, timestamp="at", partitions=1, **more)


def windowed(source: Stream, window: TumblingWindow, name: str, **more: Any) -> Table:
    sums = {"visits": "count(*)", "total": "sum(n)"}
    return source.group_by().windowed_by(window).aggregate(sums, name=name, **more)


# A run computes bounds by the function that the tests above check for each size and zone.
CASES = [
    (1, "1 day", ["Europe/Berlin", "America/Havana", "Pacific/Chatham"]),
    *(
        pytest.param(*one, marks=pytest.mark.endurance)
        for one in (
            (2, "1 day", ["Africa/Cairo", "America/St_Johns", "Pacific/Apia"]),
            (3, "1 week", ["America/Sao_Paulo", "Asia/Kathmandu"]),
            (4, "1 month", ["America/Nuuk", "Pacific/Kwajalein"]),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "size", "zones"), CASES)
def test_calendar_windows_equal_model_for_any_split(
    spark: SparkSession, seed: int, size: CalendarSize, zones: list[str]
) -> None:
    grace, source = timedelta(hours=5 * (seed % 3)), stream()
    nodes = [
        windowed(source, TumblingWindow(size, grace, zone=z), f"w{i}") for i, z in enumerate(zones)
    ]
    last = windowed(source, TumblingWindow(size, grace, zone=zones[0]), "last", emit="per_run")
    held = (nodes[0], last)
    finals = [one.suppress(UntilWindowCloses(), name=f"final_{one.name}") for one in held]
    driver = TopologyTestDriver(*nodes, *finals, spark=spark)
    models = {zone: Model(size, zone, grace) for zone in zones}
    changes = [one for zone in zones for one in CLOCKS[zone]]
    spread = {"1 day": 2, "1 week": 10, "1 month": 40}[size]
    records = visits(changes, spread, 20, seed)
    chance = random.Random(seed)
    cuts = [0, *sorted(chance.sample(range(1, len(records)), 1)), len(records)]
    read = {one.name: list[Update]() for one in (*nodes, *finals)}
    for low, high in pairwise(cuts):
        driver.pipe("visits", *records[low:high])
        before = len(models[zones[0]].updates)
        for zone in zones:
            models[zone].take(records[low:high])
        for name, found in read.items():
            found += [as_update(row) for row in driver.read(name)]
        run_of = {(u.page, u.window): u for u in models[zones[0]].updates[before:]}
        assert Counter(map(as_update, driver.read("last"))) == Counter(run_of.values())
    late = 0
    for i, zone in enumerate(zones):
        model = models[zone]
        assert read[f"w{i}"] == model.updates, zone
        assert driver.metrics(f"w{i}").get("dropped", 0) == model.late
        assert len({one.window for one in model.closed()}) > 1
        late += model.late
    assert late > 0
    assert Counter(read["final_w0"]) == Counter(models[zones[0]].closed())
    assert read["final_last"] == read["final_w0"]


def land(where: Path, name: str, records: Sequence[Record]) -> None:
    where.mkdir(parents=True, exist_ok=True)
    told = [one | {"at": one["at"].isoformat()} for one in records]
    (where / f"{name}.jsonl").write_text(lines(*told), encoding="utf-8")


@pytest.fixture
def newer_zone(tmp_path: Path) -> Iterator[str]:
    """A time zone that Python knows and Java does not, because Python's data is newer."""
    zone, where = "Europe/Newtown", tmp_path / "zoneinfo"
    data = (resources.files("tzdata.zoneinfo") / "Europe" / "Berlin").read_bytes()
    (where / "Europe").mkdir(parents=True)
    (where / zone).write_bytes(data)
    zoneinfo.reset_tzpath([str(where), *zoneinfo.TZPATH])
    durations._zones.cache_clear()  # pyright: ignore[reportPrivateUsage]
    yield zone
    zoneinfo.reset_tzpath()
    durations._zones.cache_clear()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.usefixtures("spark", "few_rows")
def test_zone_unknown_to_java_is_named(tmp_path: Path, newer_zone: str) -> None:
    land(tmp_path / "landing", "1", visits(CLOCKS["Europe/Berlin"][:1], 3, 8, 7))
    source = stream(source=FilesSource(str(tmp_path / "landing")))
    daily = windowed(source, TumblingWindow("1 day", zone=newer_zone), "daily")
    done = run([build_asset(source), build_asset(daily)], tmp_path / "warehouse")
    assert not done.success
    said = messages(done)
    assert "daily: expected Spark to know the time zone 'Europe/Newtown' of its windows" in said
    assert "Use a newer Java" in said


@pytest.mark.usefixtures("few_rows")
def test_calendar_windows_in_dagster(tmp_path: Path, spark: SparkSession) -> None:
    zone, grace, where = "America/Sao_Paulo", timedelta(hours=3), tmp_path / "landing"
    source = stream(source=FilesSource(str(where), pattern="*.jsonl"))
    daily = windowed(source, TumblingWindow("1 day", grace, zone=zone), "daily")
    final = daily.suppress(UntilWindowCloses(), name="final")
    assets, warehouse = [build_asset(one) for one in (source, daily, final)], tmp_path / "warehouse"
    assert f"tumbling windows of 1 day in {zone}, grace 3 hours" in str(
        next(iter(assets[1].specs)).description
    )
    records, model = visits(CLOCKS[zone][:1], 3, 80, 7), Model("1 day", zone, grace)
    instance = dg.DagsterInstance.ephemeral()
    land(where, "1", records[:50])
    first = run(assets, warehouse, instance=instance)
    assert first.success, messages(first)
    land(where, "2", records[50:])
    second = run(assets, warehouse, instance=instance)
    assert second.success, messages(second)
    model.take(records[:50])
    late = model.late
    model.take(records[50:])
    told = materialized(second, "daily")
    assert told["late_records_dropped"] == model.late - late
    logs = {
        name: spark.read.format("delta").load(str(warehouse / name / "log")).orderBy("offset")
        for name in ("daily", "final")
    }
    rows = {name: log.toArrow().to_pylist() for name, log in logs.items()}
    assert [as_update(row) for row in rows["daily"]] == model.updates
    assert Counter(map(as_update, rows["final"])) == Counter(model.closed())
    # The day begins at 01:00, when the clock is put forward.
    short = next(r for r in rows["final"] if r["window_start"] == utc("2017-10-15 03:00"))
    assert short["window_end"] - short["window_start"] == 23 * HOUR

    for row in rows["daily"][-3:]:
        told = explain("daily", offset=(0, row["offset"]), warehouse=str(warehouse), most=100)
        times = [one.record.timestamp for one in told.made_of if one.record is not None]
        assert told.made_of_in_all == len(times) == row["visits"]
        assert all(row["window_start"] <= one < row["window_end"] for one in times)
    # The explorer draws the window from its start to its end, not from the last record's time to now.
    key = [
        short["page"],
        *(f"{short[name]:%Y-%m-%d %H:%M:%S}" for name in ("window_start", "window_end")),
    ]
    history = key_history(str(warehouse), "final", key, None, None, None)
    drawn = timeline_of_key(history, None)
    assert drawn is not None
    (bar,) = drawn.lanes[0].bars
    bounds = [drawn.low + share * (drawn.high - drawn.low) for share in (bar.begin, bar.end)]
    window = [micros(short[name]) for name in ("window_start", "window_end")]
    assert bounds == pytest.approx(window, abs=1_000_000)
    assert bar.look == "answer"
    assert f"window from {key[1]} to {key[2]}: " in bar.title
    pages = TestClient(application(str(warehouse)), base_url="http://127.0.0.1:3001")
    page = pages.get("/key/final", params={"key": key}).text
    assert f"The window from {key[1]} to {key[2]}," in page
    last = {"offset": f"0:{rows['final'][-1]['offset']}"}
    page = pages.get("/row/final", params=last).text
    assert f"its window ended at {rows['final'][-1]['window_end']:%Y-%m-%d %H:%M:%S};" in page
    assert "+00:00" not in page
    assert facts(str(warehouse), "daily").late == model.late > 0

    graces = [0 * HOUR, HOUR, 3 * HOUR, 30 * HOUR]
    costs = lateness("daily", grace=graces, warehouse=str(warehouse))
    for choice, one in zip(costs.choices, graces, strict=True):
        again = Model("1 day", zone, one)
        again.take(records)
        assert (choice.length, choice.late, choice.declared) == (one, again.late, one == grace)
    assert costs.choices[0].late > costs.choices[-1].late

    elsewhere = windowed(source, TumblingWindow("1 day", grace, zone="America/Santiago"), "daily")
    land(where, "3", records[:1])
    refused = run([assets[0], build_asset(elsewhere)], warehouse)
    assert not refused.success
    assert (
        f"window was tumbling windows of 1 day in {zone}, is tumbling windows of 1 day in "
        "America/Santiago" in messages(refused)
    )
    longer = windowed(source, TumblingWindow("1 day", 2 * grace, zone=zone), "daily")
    assert run([assets[0], build_asset(longer)], warehouse).success
