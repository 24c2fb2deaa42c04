"""The windows that a stream's records are cut into: tumbling, hopping, session (KIP-328's grace)."""

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

    def __post_init__(self) -> None:
        _check_lengths(self, "gap")

    @property
    def closes_after(self) -> Duration:
        """How long after its end a session is open, inclusive."""
        return plus(self.gap, self.grace)

    def describe(self) -> str:
        """The windows in a few words, for descriptions."""
        return f"sessions with a gap of {spoken(self.gap)}, grace {spoken(self.grace)}"


Window = TumblingWindow | HoppingWindow | SessionWindow


def _check_lengths(window: Window, first: str, *more: str) -> None:
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
    needed = plus(getattr(window, first), window.grace)
    for partition, (kept, least) in pairs(window.retention, needed):
        if kept < least:
            raise TopologyError(
                f"{kind}: the retention {kept}{partition} is shorter than {first} + grace = {least}, "
                "so windows would be forgotten while they are open: lengthen it, or leave it out"
            )
