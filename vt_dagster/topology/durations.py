"""Durations and times: checks, parsing and formatting; the local days, weeks and months of a time zone.

Two modules compute where windows of a calendar start and end: ``core.windowed_aggregate`` with Spark
for a run, and this one for readers without Spark. Both define the start of a local day in the same way,
see :func:`start_of_day`.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Iterable, Mapping
from datetime import date, datetime, timedelta, timezone
from functools import cache
from typing import Any, Literal, NamedTuple, cast, get_args
from zoneinfo import ZoneInfo, available_timezones

from vt_dagster.errors import ContractError, TopologyError

Duration = timedelta | Mapping[int, timedelta]
"""A length of stream time. A mapping sets one per partition, for the conformance runner, which runs
scenarios with different settings side by side as partitions."""

_LONGEST = timedelta(days=365_000)
FOREVER = timedelta(days=50_000_000)
"""Longer than any stream of records; in microseconds it still fits a BIGINT."""
FIRST_TIME, LAST_TIME = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The years 1 to 9999 in epoch microseconds, both inclusive: Python has no other times."""

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_NAMES = {"w": "weeks", "d": "days", "h": "hours", "m": "minutes", "s": "seconds", "ms": "milliseconds"}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|[wdhms])\s*")


def check_duration(name: str, what: str, value: Any, longest: timedelta = _LONGEST) -> None:
    """Raises TopologyError for a value that is no duration, negative, or longer than ``longest``."""
    every: list[Any] = [value]
    if isinstance(value, Mapping) and value:
        every = list(cast(Mapping[int, Any], value).values())
    for one in every:
        if not isinstance(one, timedelta):
            raise TopologyError(
                f"{name}: {what} must be a datetime.timedelta, got {one!r}; "
                f"write for example {what}=timedelta(days=30)"
            )
        if not timedelta(0) <= one <= longest:
            raise TopologyError(
                f"{name}: {what} must be between 0 and {longest.days:,} days, got {one}"
            )


_UNITS = (
    ("day", timedelta(days=1)),
    ("hour", timedelta(hours=1)),
    ("minute", timedelta(minutes=1)),
    ("second", timedelta(seconds=1)),
    ("ms", timedelta(milliseconds=1)),
    ("µs", timedelta(microseconds=1)),
)


def spoken(value: Duration) -> str:
    """Formats a duration: ``1 day 6 hours``, ``minus 1 hour``; a mapping as a fixed text."""
    if not isinstance(value, timedelta):
        return "a length of each partition's own"
    if value < timedelta(0):
        return f"minus {spoken(-value)}"
    words: list[str] = []
    for name, unit in _UNITS:
        count, value = divmod(value, unit)
        if count:
            words.append(f"{count} {name}{'s' if count > 1 and not name.endswith('s') else ''}")
    return " ".join(words) or "0 seconds"


def iso8601(value: timedelta) -> str:
    """Formats a duration as ISO 8601: ``P1DT6H``, ``-PT0.5S``. The largest unit is the day: a month or
    a year is no fixed length."""
    if value < timedelta(0):
        return f"-{iso8601(-value)}"
    hours, rest = divmod(value.seconds, 3600)
    minutes, seconds = divmod(rest, 60)
    exact = f"{seconds}.{value.microseconds:06d}".rstrip("0").rstrip(".")
    days = f"{value.days}D" if value.days else ""
    parts = ((str(hours), "H"), (str(minutes), "M"), (exact, "S"))
    time = "".join(f"{amount}{unit}" for amount, unit in parts if amount != "0")
    return f"P{days}{f'T{time}' if time else ''}" if days or time else "PT0S"


def in_micros(value: Duration) -> int | dict[int, int]:
    """Returns a duration in microseconds, as stored in commits."""
    one = timedelta(microseconds=1)
    if isinstance(value, timedelta):
        return value // one
    return {partition: length // one for partition, length in value.items()}


def length_at(value: Duration, partition: int) -> timedelta:
    """Returns the duration of a partition.

    Raises:
        ContractError: a mapping that lacks this partition.
    """
    if isinstance(value, timedelta):
        return value
    if partition not in value:
        raise ContractError(
            f"expected a duration for partition {partition}, got only {sorted(value)}; add it"
        )
    return value[partition]


def longest(value: Duration) -> timedelta:
    """Returns the longest duration of all partitions."""
    return value if isinstance(value, timedelta) else max(value.values(), default=timedelta(0))


def pairs(one: Duration, other: Duration) -> list[tuple[str, tuple[timedelta, timedelta]]]:
    """Pairs two durations: once, or once per partition if either is a mapping."""
    if isinstance(one, timedelta) and isinstance(other, timedelta):
        return [("", (one, other))]
    of_each = ((p, length_at(one, p), length_at(other, p)) for p in _partitions(one, other))
    return [(f" of partition {p}", (first, second)) for p, first, second in of_each]


def plus(one: Duration, other: Duration) -> Duration:
    """Adds two durations, per partition if either is a mapping."""
    if isinstance(one, timedelta) and isinstance(other, timedelta):
        return one + other
    return {p: length_at(one, p) + length_at(other, p) for p in _partitions(one, other)}


def _partitions(*lengths: Duration) -> list[int]:
    return sorted({p for length in lengths if isinstance(length, Mapping) for p in length})


def parse_length(text: str) -> timedelta:
    """Parses a duration: ``7d``, ``1h30m``, ``250ms``.

    Raises:
        ContractError: another text, or a length that no timedelta has.
    """
    amounts = list(_AMOUNT.finditer(text.strip()))
    if not amounts or "".join(a.group() for a in amounts) != text.strip():
        raise ContractError(
            f"expected a length of time like 7d, 1h30m or 250ms (units: {', '.join(_NAMES)}), got "
            f"{text!r}"
        )
    units = [_NAMES[a.group(2)] for a in amounts]
    if len(set(units)) < len(units):
        raise ContractError(f"expected each unit once, got {text!r}")
    try:
        return timedelta(**{u: float(a.group(1)) for u, a in zip(units, amounts, strict=True)})
    except OverflowError:
        raise ContractError(
            f"expected a length of at most {timedelta.max.days:,} days, got {text!r}; shorten it"
        ) from None


def parse_time(text: str) -> int:
    """Parses an ISO 8601 time to epoch microseconds; UTC if it has no offset.

    Raises:
        ContractError: another text.
    """
    try:
        moment = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    except ValueError:
        raise ContractError(f"expected a time like 2013-07-01T12:00:00Z, got {text!r}") from None
    return epoch_micros(moment)


def as_time(micros: int) -> datetime:
    """Returns epoch microseconds as a datetime, UTC."""
    return _EPOCH + micros * timedelta(microseconds=1)


def epoch_micros(moment: datetime) -> int:
    """Returns a time in epoch microseconds; UTC if it has no zone."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
    return (aware - _EPOCH) // timedelta(microseconds=1)


NOW = "now"
"""As an as-of time: the clock's time when a read or run starts."""


def clock() -> int:
    """Returns the time of this machine's clock, epoch microseconds."""
    return time.time_ns() // 1000


def at_clock(moment: str | None) -> str | None:
    """Returns an as-of time unchanged, but ``now`` as the time of this machine's clock. A read calls it
    once, so that all its parts are as of one instant."""
    return in_utc(clock()) if moment == NOW else moment


def in_utc(moment: int) -> str:
    """Formats epoch microseconds for :func:`parse_time`; only the year if Python has no such date."""
    try:
        # %Y has no leading zeros on Linux, without which Python does not read the years before 1000.
        return as_time(moment).isoformat().replace("+00:00", "Z")
    except OverflowError:
        return f"the year {1970 + moment // 31_556_952_000_000}"


# Calendar


CalendarSize = Literal["1 day", "1 week", "1 month"]
CALENDAR_SIZES: tuple[str, ...] = get_args(CalendarSize)

LONGEST_UNIT = {
    size: timedelta(days=days) for size, days in zip(CALENDAR_SIZES, (2, 8, 32), strict=True)
}
"""Upper bound of the length of any unit, whatever the clock of a zone does: some days have had 47
hours."""

DAY = 86_400_000_000
"""A day of 24 hours in microseconds."""
_FIRST_DAY = date(1970, 1, 1).toordinal()
_CYCLE = 146_097
"""Number of days in 400 years, after which the calendar repeats."""


class Calendar(NamedTuple):
    """The calendar that bounds windows.

    Args:
        size: the unit that is one window; a week begins on Monday (ISO 8601).
        zone: the time zone whose local midnights count.
    """

    size: CalendarSize
    zone: str


@cache
def _zones() -> frozenset[str]:
    # Not ``EST`` or ``CET``: some are fixed offsets in Java and places with a history in Python.
    return frozenset(one for one in available_timezones() if "/" in one or one == "UTC")


def check_zone(name: str, zone: Any) -> None:
    """Raises TopologyError for a value that is no time zone of a place, nor UTC."""
    if isinstance(zone, str) and zone in _zones():
        return
    near = difflib.get_close_matches(str(zone), sorted(_zones()), 1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise TopologyError(
        f"{name}: zone must be 'UTC' or a time zone like 'Europe/Berlin', named by area and place, got "
        f"{zone!r}{meant}"
    )


def start_of_day(day: int, zone: ZoneInfo) -> int:
    """Returns when a local day begins, in epoch microseconds: at its midnight.

    If the clock passes midnight twice, at the first; if it is put forward at midnight, at that moment.

    Args:
        day: the date, in days since 1970-01-01.
    """
    # Python's dates end with the year 9999, in which a window can begin that ends after it.
    there = min(max(day + _FIRST_DAY, date.min.toordinal()), date.max.toordinal())
    ahead = datetime.fromordinal(there).replace(tzinfo=zone).utcoffset()
    assert ahead is not None
    return day * DAY - ahead // timedelta(microseconds=1)


def starts_near(days: Iterable[int], calendar: Calendar) -> list[int]:
    """Returns the starts of all windows that contain a time of some days, and the next start of each.

    Args:
        days: UTC days, in days since 1970-01-01.

    Returns:
        epoch microseconds, ascending: the window of a time of these days starts at the last one that is
        not after it (inclusive) and ends at the next one (exclusive).
    """
    zone = ZoneInfo(calendar.zone)
    # A local date differs from the UTC date by a day at most, and the clock may have been put back over
    # a midnight since.
    first = {_first_day(day + near, calendar.size) for day in days for near in range(-2, 3)}
    every = first | {_next_day(day, calendar.size) for day in first}
    return sorted(start_of_day(day, zone) for day in every)


def _first_day(day: int, size: CalendarSize) -> int:
    """Returns the first day of the week or month of a day."""
    if size == "1 day":
        return day
    if size == "1 week":
        return day - (day + 3) % 7  # 1970-01-01 was a Thursday
    return day - date.fromordinal((day + _FIRST_DAY - 1) % _CYCLE + 1).day + 1


def _next_day(first: int, size: CalendarSize) -> int:
    """Returns the first day of the next day, week or month."""
    if size == "1 month":
        return _first_day(first + 31, size)
    return first + (7 if size == "1 week" else 1)
