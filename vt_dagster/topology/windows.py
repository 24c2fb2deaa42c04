"""The windows that a stream's records are cut into: tumbling, hopping, session, sliding."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import Duration, check_duration, pairs, plus, spoken

_NONE = timedelta(0)


@dataclass(frozen=True)
class TumblingWindow:
    """Windows of one size, side by side: [start, start + size), starts are multiples of the size.

    Starts count from 1970-01-01 00:00 UTC. A record belongs to one window.

    Args:
        size: length of a window.
        grace: how long after its end a window still takes records: it is closed as soon as
            stream time >= end + grace.
        retention: how long Kafka's store keeps a window; at least size + grace. It never changes
            a result.

    Raises:
        TopologyError: a length below zero, a size of zero, a retention that is too short.
    """

    size: Duration
    grace: Duration = _NONE
    retention: Duration | None = None
    end_inclusive: ClassVar[bool] = False
    open_when_due: ClassVar[bool] = False
    """Whether a record at the very end of a window belongs to it."""

    def __post_init__(self) -> None:
        _check_lengths(self, "size")

    @property
    def advance(self) -> Duration:
        """From the start of one window to the start of the next."""
        return self.size

    @property
    def closes_after(self) -> Duration:
        """How long after its end a window closes."""
        return self.grace

    def describe(self) -> str:
        """The windows in a few words, for descriptions."""
        return f"tumbling windows of {spoken(self.size)}, grace {spoken(self.grace)}"


@dataclass(frozen=True)
class HoppingWindow:
    """Windows of one size, one every ``advance``: they overlap, and a record belongs to several.

    A window is [start, start + size), starts are multiples of the advance, counted from 1970-01-01
    00:00 UTC. No window that a later record belongs to starts before that.

    Args:
        size: length of a window.
        advance: from the start of one window to the start of the next; at most the size.
        grace, retention: see :class:`TumblingWindow`.

    Raises:
        TopologyError: a length below zero, a size or an advance of zero, an advance longer than the
            size, a retention that is too short.
    """

    size: Duration
    advance: Duration
    grace: Duration = _NONE
    retention: Duration | None = None
    end_inclusive: ClassVar[bool] = False
    open_when_due: ClassVar[bool] = False
    """Whether a record at the very end of a window belongs to it."""

    def __post_init__(self) -> None:
        _check_lengths(self, "size", "advance")
        for partition, (advance, size) in pairs(self.advance, self.size):
            if advance > size:
                raise TopologyError(
                    f"HoppingWindow: the advance {advance}{partition} is longer than the size {size}, "
                    "so records between two windows would belong to none: shorten the advance"
                )

    @property
    def closes_after(self) -> Duration:
        """How long after its end a window closes."""
        return self.grace

    def describe(self) -> str:
        """The windows in a few words, for descriptions."""
        return (
            f"hopping windows of {spoken(self.size)} every {spoken(self.advance)}, "
            f"grace {spoken(self.grace)}"
        )


@dataclass(frozen=True)
class SessionWindow:
    """Windows of activity: records of a key at most ``gap`` apart share one, however long it gets.

    A session is [timestamp of its first record, timestamp of its last], both inclusive. A record
    that lies between two sessions merges them.

    Args:
        gap: the longest silence within a session, inclusive.
        grace: how much longer than the gap a session waits for records: it is closed as soon as
            stream time > end + gap + grace.
        retention: how long Kafka's store keeps a session; at least gap + grace. It never changes a
            result.

    Raises:
        TopologyError: a length below zero, a gap of zero, a retention that is too short.
    """

    gap: Duration
    grace: Duration = _NONE
    retention: Duration | None = None
    end_inclusive: ClassVar[bool] = True
    open_when_due: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_lengths(self, "gap")

    @property
    def closes_after(self) -> Duration:
        """How long after its end a session is open, inclusive."""
        return plus(self.gap, self.grace)

    def describe(self) -> str:
        """The windows in a few words, for descriptions."""
        return f"sessions with a gap of {spoken(self.gap)}, grace {spoken(self.grace)}"


@dataclass(frozen=True)
class SlidingWindow:
    """Windows that move with the records: all that lie at most ``time_difference`` apart share one.

    A window is [end - time difference, end], both inclusive. There is one that ends at each record, and
    one that starts a millisecond after each record, as soon as others are in it; but none starts
    before 1970-01-01 00:00 UTC, so that the first one is [0, time difference]. Times are rounded down
    to milliseconds, as Kafka's are. A record without a value is dropped.

    Args:
        time_difference: how far apart the first and the last record of a window may lie.
        grace: how long after its end a window still takes records: it is closed as soon as
            stream time > end + grace.
        retention: how long Kafka's store keeps a window, after its start; None = twice the time
            difference + grace, and at least that. A late record does not see a window that starts
            that long or longer before the latest window of its partition. More than three times the
            time difference + grace hides none, and spares each run a look at all its records.

    Raises:
        TopologyError: a length below zero, a time difference of zero, a retention that is too short.
    """

    time_difference: Duration
    grace: Duration = _NONE
    retention: Duration | None = None
    end_inclusive: ClassVar[bool] = False
    """Their end is, but it is a length after the start, as that of a hopping window."""
    open_when_due: ClassVar[bool] = True
    """Whether a window still takes records when its final result is due, which then comes again."""

    def __post_init__(self) -> None:
        _check_lengths(self, "time_difference", times=2)

    @property
    def closes_after(self) -> Duration:
        """How long after its end a window is open, inclusive."""
        return self.grace

    @property
    def remembers(self) -> Duration:
        """How long before the latest window's start a window's start must not lie to be seen."""
        return self._lookback(2) if self.retention is None else self.retention

    @property
    def hides(self) -> bool:
        """Whether a late record can look so far back that the retention hides a window from it."""
        far = pairs(self.remembers, self._lookback(3))
        return any(kept <= most for _, (kept, most) in far)

    def _lookback(self, times: int) -> Duration:
        return _times(self.time_difference, times, self.grace)

    def describe(self) -> str:
        """The windows in a few words, for descriptions."""
        return f"sliding windows of {spoken(self.time_difference)}, grace {spoken(self.grace)}"


Window = TumblingWindow | HoppingWindow | SessionWindow | SlidingWindow


def _times(length: Duration, times: int, more: Duration) -> Duration:
    """A length a number of times, and another one."""
    for _ in range(times):
        more = plus(more, length)
    return more


def _check_lengths(window: Window, first: str, *more: str, times: int = 1) -> None:
    kind = type(window).__name__
    for what in (first, *more):
        length: Any = getattr(window, what)
        check_duration(kind, what, length)
        for partition, (one, _) in pairs(length, _NONE):
            if one == _NONE:
                raise TopologyError(f"{kind}: {what} must be longer than 0, got 0{partition}")
    check_duration(kind, "grace", window.grace)
    if window.retention is None:
        return
    check_duration(kind, "retention", window.retention)
    needed = _times(getattr(window, first), times, window.grace)
    of = first if times == 1 else f"{times} * {first}"
    for partition, (kept, least) in pairs(window.retention, needed):
        if kept < least:
            raise TopologyError(
                f"{kind}: the retention {kept}{partition} is shorter than {of} + grace = {least}, "
                "so windows would be forgotten while they are open: lengthen it, or leave it out"
            )
