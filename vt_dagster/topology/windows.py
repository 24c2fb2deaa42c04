"""The windows of a windowed aggregate: tumbling, hopping, session, sliding."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import Duration, check_duration, pairs, plus, spoken
from vt_dagster.topology.specification import (
    HoppingWindowSpec,
    SessionWindowSpec,
    SlidingWindowSpec,
    TumblingWindowSpec,
)

_NONE = timedelta(0)


@dataclass(frozen=True)
class TumblingWindow:
    """Adjacent windows of one size: start inclusive, end exclusive.

    Starts are multiples of the size, counted from 1970-01-01 00:00 UTC. A record belongs to one window.

    Args:
        size: length of a window.
        grace: how long after its end a window accepts records, in stream time: it closes when
            stream time >= end + grace.
        retention: how long Kafka's store keeps a window; at least size + grace. It never changes
            a result.

    Raises:
        TopologyError: a negative length, a size of zero, a retention that is too short.
    """

    size: Duration
    grace: Duration = _NONE
    retention: Duration | None = None
    end_inclusive: ClassVar[bool] = False
    """Whether a record exactly at the end of a window belongs to it."""
    open_when_due: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_lengths(self, "size")

    @property
    def advance(self) -> Duration:
        """Time from the start of one window to the start of the next."""
        return self.size

    @property
    def closes_after(self) -> Duration:
        """How long after its end a window closes."""
        return self.grace

    @property
    def specification(self) -> TumblingWindowSpec:
        """The windows as commits store them."""
        return TumblingWindowSpec(size=self.size, grace=self.grace, retention=self.retention)

    def describe(self) -> str:
        """The windows in a few words, for descriptions."""
        return f"tumbling windows of {spoken(self.size)}, grace {spoken(self.grace)}"


@dataclass(frozen=True)
class HoppingWindow:
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
    end_inclusive: ClassVar[bool] = False
    """Whether a record exactly at the end of a window belongs to it."""
    open_when_due: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_lengths(self, "size", "advance")
        for partition, (advance, size) in pairs(self.advance, self.size):
            if advance > size:
                raise TopologyError(
                    f"HoppingWindow: the advance {advance}{partition} is longer than the size {size}, "
                    "so records between two windows would belong to no window: shorten the advance"
                )

    @property
    def closes_after(self) -> Duration:
        """How long after its end a window closes."""
        return self.grace

    @property
    def specification(self) -> HoppingWindowSpec:
        """The windows as commits store them."""
        return HoppingWindowSpec(
            size=self.size, advance=self.advance, grace=self.grace, retention=self.retention
        )

    def describe(self) -> str:
        """The windows in a few words, for descriptions."""
        return (
            f"hopping windows of {spoken(self.size)} every {spoken(self.advance)}, "
            f"grace {spoken(self.grace)}"
        )


@dataclass(frozen=True)
class SessionWindow:
    """Windows of activity: records of a key at most ``gap`` apart share a session of any length.

    A session ranges from the timestamp of its first record to that of its last, both inclusive. A
    record within the gap of two sessions merges them.

    Args:
        gap: longest time between two consecutive records of a session, inclusive.
        grace: how much longer than the gap a session waits for records, in stream time: it closes when
            stream time > end + gap + grace.
        retention: how long Kafka's store keeps a session; at least gap + grace. It never changes a
            result.

    Raises:
        TopologyError: a negative length, a gap of zero, a retention that is too short.
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
        """How long after its end a session stays open, inclusive."""
        return plus(self.gap, self.grace)

    @property
    def specification(self) -> SessionWindowSpec:
        """The windows as commits store them."""
        return SessionWindowSpec(gap=self.gap, grace=self.grace, retention=self.retention)

    def describe(self) -> str:
        """The windows in a few words, for descriptions."""
        return f"sessions with a gap of {spoken(self.gap)}, grace {spoken(self.grace)}"


@dataclass(frozen=True)
class SlidingWindow:
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
    end_inclusive: ClassVar[bool] = False
    """False although the end is inclusive: start + length gives the end, as in a hopping window."""
    open_when_due: ClassVar[bool] = True
    """Whether a window still accepts records when its final result is due; each emits it again."""

    def __post_init__(self) -> None:
        _check_lengths(self, "time_difference", times=2)

    @property
    def closes_after(self) -> Duration:
        """How long after its end a window stays open, inclusive."""
        return self.grace

    @property
    def remembers(self) -> Duration:
        """A window that starts this long before the latest window is no longer seen."""
        return self._lookback(2) if self.retention is None else self.retention

    @property
    def hides(self) -> bool:
        """Whether the retention can hide a window from a late record."""
        far = pairs(self.remembers, self._lookback(3))
        return any(kept <= most for _, (kept, most) in far)

    def _lookback(self, times: int) -> Duration:
        return _times(self.time_difference, times, self.grace)

    @property
    def specification(self) -> SlidingWindowSpec:
        """The windows as commits store them."""
        return SlidingWindowSpec(
            time_difference=self.time_difference, grace=self.grace, retention=self.retention
        )

    def describe(self) -> str:
        """The windows in a few words, for descriptions."""
        return f"sliding windows of {spoken(self.time_difference)}, grace {spoken(self.grace)}"


Window = TumblingWindow | HoppingWindow | SessionWindow | SlidingWindow


def _times(length: Duration, times: int, more: Duration) -> Duration:
    """Returns ``times * length + more``."""
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
                "so open windows would expire: lengthen it, or remove retention"
            )
