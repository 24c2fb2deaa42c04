"""Windows by the calendar of a time zone: the local days, weeks or months of a place.

Which instants bound them is computed twice: by Spark for a run (``core.windowed_aggregate``), and here
for readers without Spark. Both define the start of a local day alike, see :func:`start_of_day`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from datetime import date, datetime, timedelta
from functools import cache
from typing import Any, Literal, NamedTuple, get_args
from zoneinfo import ZoneInfo, available_timezones

from vt_dagster.errors import TopologyError

CalendarSize = Literal["1 day", "1 week", "1 month"]
CALENDAR_SIZES: tuple[str, ...] = get_args(CalendarSize)

LONGEST = {size: timedelta(days=days) for size, days in zip(CALENDAR_SIZES, (2, 8, 32), strict=True)}
"""No unit is longer, whatever the clock of a zone does: some days have had 47 hours."""

DAY = 86_400_000_000
"""The microseconds of a day of 24 hours."""
_EPOCH = date(1970, 1, 1).toordinal()
_CYCLE = 146_097
"""The days of 400 years, after which the calendar repeats."""


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
    there = min(max(day + _EPOCH, date.min.toordinal()), date.max.toordinal())
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
    first = {_first(day + near, calendar.size) for day in days for near in range(-2, 3)}
    every = first | {_next(day, calendar.size) for day in first}
    return sorted(start_of_day(day, zone) for day in every)


def _first(day: int, size: CalendarSize) -> int:
    """Returns the first day of the week or month of a day."""
    if size == "1 day":
        return day
    if size == "1 week":
        return day - (day + 3) % 7  # 1970-01-01 was a Thursday
    return day - date.fromordinal((day + _EPOCH - 1) % _CYCLE + 1).day + 1


def _next(first: int, size: CalendarSize) -> int:
    """Returns the first day of the next day, week or month."""
    if size == "1 month":
        return _first(first + 31, size)
    return first + (7 if size == "1 week" else 1)
