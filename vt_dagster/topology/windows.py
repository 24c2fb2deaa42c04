"""The windows of a windowed aggregate: tumbling, hopping, session, sliding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import (
    CALENDAR_SIZES,
    LONGEST_UNIT,
    Calendar,
    CalendarSize,
    Duration,
    check_duration,
    check_zone,
    pairs,
    plus,
    spoken,
)
from vt_dagster.topology.specification import (
    CalendarWindowSpec,
    HoppingWindowSpec,
    SessionWindowSpec,
    SlidingWindowSpec,
    TumblingWindowSpec,
    WindowSpec,
)

_NONE = timedelta(0)
_K = TypeVar("_K", bound=type)


def _without_zone(kind: _K) -> _K:
    """Makes a window refuse ``zone=`` with the reason."""
    made = kind.__init__

    @wraps(made)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        if "zone" in given:
            raise TopologyError(
                f"{kind.__name__}: expected no zone, got {given['zone']!r}: its windows are bounded by "
                "lengths of time, which are the same in all time zones; for local days, weeks or "
                "months use TumblingWindow('1 day', zone=...)"
            )
        made(self, *args, **given)

    kind.__init__ = checked
    return kind


class _Windows(ABC):
    """The base of all kinds of windows."""

    grace: Duration
    end_inclusive: ClassVar[bool] = False
    """Whether a record exactly at the end of a window belongs to it."""
    open_when_due: ClassVar[bool] = False
    """Whether a window still accepts records when its final result is due; each emits it again."""

    @property
    def closes_after(self) -> Duration:
        """How long after its end a window closes; sessions and sliding windows stay open that long,
        inclusive."""
        return self.grace

    @property
    @abstractmethod
    def specification(self) -> WindowSpec:
        """The windows as commits store them."""

    def describe(self) -> str:
        """The windows in a few words, for descriptions."""
        return f"{self.specification}, grace {spoken(self.grace)}"


@dataclass(frozen=True)
class TumblingWindow(_Windows):
    """Adjacent windows of one size: start inclusive, end exclusive. A record belongs to one window.

    Starts are multiples of the size, counted from 1970-01-01 00:00 UTC. With ``zone``, a window is a
    local day, week or month of a time zone: it starts and ends at a local midnight. So a day of 23 or
    25 hours is one window, and a week begins on Monday. If the clock passes midnight twice, the day
    begins at the first; if it is put forward at midnight, at that moment. Kafka Streams has no such
    windows.

    Args:
        size: length of a window; with ``zone`` "1 day", "1 week" or "1 month".
        grace: how long after its end a window accepts records, in stream time: it closes when
            stream time >= end + grace.
        retention: how long Kafka's store keeps a window; at least size + grace, where a day counts as 2
            days, a week as 8 and a month as 32. It never changes a result.
        zone: the time zone of days, weeks and months, for example Europe/Berlin, or UTC.

    Raises:
        TopologyError: a negative length, a size of zero, a retention that is too short, an unknown
            zone, a zone with another size, a day, week or month without a zone.
    """

    size: Duration | CalendarSize
    grace: Duration = _NONE
    retention: Duration | None = None
    zone: str | None = None

    def __post_init__(self) -> None:
        if self.zone is None and self.size not in CALENDAR_SIZES:
            _check_lengths(self, "size")
            return
        _check_calendar(self.size, self.zone)
        check_duration("TumblingWindow", "grace", self.grace)
        longest = LONGEST_UNIT[cast(CalendarSize, self.size)]
        _check_retention(self, plus(longest, self.grace), f"size (at most {spoken(longest)})")

    @property
    def bounded_by(self) -> Calendar | timedelta | Mapping[int, timedelta]:
        """The calendar, or the one length of all windows."""
        if self.zone is not None:
            return Calendar(cast(CalendarSize, self.size), self.zone)
        return cast(Duration, self.size)

    @property
    def specification(self) -> TumblingWindowSpec | CalendarWindowSpec:
        waits: Any = {"grace": self.grace, "retention": self.retention}
        if isinstance(self.bounded_by, Calendar):
            return CalendarWindowSpec(**self.bounded_by._asdict(), **waits)
        return TumblingWindowSpec(size=self.bounded_by, **waits)


@_without_zone
@dataclass(frozen=True)
class HoppingWindow(_Windows):
    """Overlapping windows of one size, one every ``advance``: start inclusive, end exclusive.

    A record may belong to several windows. Starts are multiples of the advance, counted from 1970-01-01
    00:00 UTC. No window of a later record starts before that time.

    Args:
        size: length of a window.
        advance: time from the start of one window to the start of the next; at most the size.
        grace, retention: see :class:`TumblingWindow`.

    Raises:
        TopologyError: a negative length, a size or an advance of zero, an advance longer than the
            size, a retention that is too short.
    """

    size: Duration
    advance: Duration
    grace: Duration = _NONE
    retention: Duration | None = None

    def __post_init__(self) -> None:
        _check_lengths(self, "size", "advance")
        for partition, (advance, size) in pairs(self.advance, self.size):
            if advance > size:
                raise TopologyError(
                    f"HoppingWindow: the advance {advance}{partition} is longer than the size {size}, "
                    "so records between two windows would belong to no window: shorten the advance"
                )

    @property
    def specification(self) -> HoppingWindowSpec:
        return HoppingWindowSpec(**vars(self))


@_without_zone
@dataclass(frozen=True)
class SessionWindow(_Windows):
    """Windows of activity: records of a key at most ``gap`` apart share a session of any length.

    A session ranges from the timestamp of its first record to that of its last, both inclusive. A
    record within the gap of two sessions merges them.

    Args:
        gap: longest time between two consecutive records of a session, inclusive; with 0 a session has
            the records of one timestamp.
        grace: how much longer than the gap a session waits for records, in stream time: it closes when
            stream time > end + gap + grace.
        retention: how long Kafka's store keeps a session; at least gap + grace. It never changes a
            result.

    Raises:
        TopologyError: a negative length, a retention that is too short.
    """

    gap: Duration
    grace: Duration = _NONE
    retention: Duration | None = None
    end_inclusive = True

    def __post_init__(self) -> None:
        _check_lengths(self, "gap", may_be_zero=True)

    @property
    def closes_after(self) -> Duration:
        return plus(self.gap, self.grace)

    @property
    def specification(self) -> SessionWindowSpec:
        return SessionWindowSpec(**vars(self))


@_without_zone
@dataclass(frozen=True)
class SlidingWindow(_Windows):
    """Windows that move with the records: records at most ``time_difference`` apart share a window.

    A window ranges from end - time difference to end, both inclusive. One window ends at each record;
    another starts a millisecond after each record once it contains other records. No window starts
    before 1970-01-01 00:00 UTC: the first is [0, time difference]. Times are rounded down to
    milliseconds, as in Kafka. A record without a value is dropped.

    Args:
        time_difference: longest time between the first and the last record of a window.
        grace: how long after its end a window accepts records, in stream time: it closes when
            stream time > end + grace.
        retention: how long Kafka's store keeps a window after its start; at least twice the time
            difference + grace, which is the default. A late record does not see a window that starts
            this long or longer before the latest window of its partition. A retention of more than
            three times the time difference + grace hides no window, and saves each run a scan of all
            its records.

    Raises:
        TopologyError: a negative length, a time difference of zero, a retention that is too short.
    """

    time_difference: Duration
    grace: Duration = _NONE
    retention: Duration | None = None
    end_inclusive = False
    """False although the end of a sliding window is inclusive: its end is start + length, as in a
    hopping window."""
    open_when_due = True

    def __post_init__(self) -> None:
        _check_lengths(self, "time_difference", times=2)

    @property
    def remembers(self) -> Duration:
        """How long before the latest window a window may start, exclusive, to be visible to a late
        record."""
        least = _times(self.time_difference, 2, self.grace)
        return least if self.retention is None else self.retention

    @property
    def hides(self) -> bool:
        """Whether the retention can hide a window from a late record."""
        far = pairs(self.remembers, _times(self.time_difference, 3, self.grace))
        return any(kept <= most for _, (kept, most) in far)

    @property
    def specification(self) -> SlidingWindowSpec:
        return SlidingWindowSpec(**vars(self))


Window = TumblingWindow | HoppingWindow | SessionWindow | SlidingWindow


def _times(length: Duration, times: int, more: Duration) -> Duration:
    """Returns ``times * length + more``."""
    for _ in range(times):
        more = plus(more, length)
    return more


def _check_lengths(
    window: Window, first: str, *more: str, times: int = 1, may_be_zero: bool = False
) -> None:
    kind = type(window).__name__
    for what in (first, *more):
        length: Any = getattr(window, what)
        check_duration(kind, what, length)
        for partition, (one, _) in pairs(length, _NONE):
            if one == _NONE and not may_be_zero:
                raise TopologyError(f"{kind}: {what} must be longer than 0, got 0{partition}")
    check_duration(kind, "grace", window.grace)
    of = first if times == 1 else f"{times} * {first}"
    _check_retention(window, _times(getattr(window, first), times, window.grace), of)


def _check_retention(window: Window, needed: Duration, of: str) -> None:
    """Checks the retention; its least value is ``needed``, ``of`` + grace."""
    kind = type(window).__name__
    if window.retention is None:
        return
    check_duration(kind, "retention", window.retention)
    for partition, (kept, least) in pairs(window.retention, needed):
        if kept < least:
            raise TopologyError(
                f"{kind}: the retention {kept}{partition} is shorter than {of} + grace = {least}, "
                "so open windows would expire: lengthen it, or remove retention"
            )


def _check_calendar(size: Any, zone: Any) -> None:
    """Checks a size and a zone, of which at least one is of a calendar."""
    if size not in CALENDAR_SIZES:
        raise TopologyError(
            f"TumblingWindow: with zone={zone!r}, size must be one of {', '.join(CALENDAR_SIZES)} as "
            f"text, got {size!r}: a length of time is the same in all time zones; choose one of "
            "them, or remove the zone"
        )
    if zone is None:
        raise TopologyError(
            f"TumblingWindow: the size {size!r} needs the time zone in which it begins and ends; add "
            "zone='UTC' or, for example, zone='Europe/Berlin'"
        )
    check_zone("TumblingWindow", zone)
