"""What choices of a length of time would have cost: the values of ``lateness``."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

_ONE = timedelta(microseconds=1)


@dataclass(frozen=True)
class Delay:
    """How much later results come than without a grace period.

    Args:
        p50, p99: of so many in a hundred results at most so much later.
    """

    p50: timedelta
    p99: timedelta

    @classmethod
    def of(cls, found: Counter[int]) -> Delay | None:
        """The same from how often each delay is there, in microseconds; None = of no result."""
        total, seen = found.total(), 0
        told: list[timedelta] = []
        for delay, times in sorted(found.items()):
            seen += times
            for share in (50, 99)[len(told) :]:
                if seen * 100 >= total * share:
                    told.append(delay * _ONE)
        return cls(*told) if told else None


@dataclass(frozen=True)
class Choice:
    """What one length would have cost.

    Args:
        length: the grace period, or history retention.
        of: how many results there are in the end: of a join its records with a value (and key, if an
            inner join), of windows the windows, of a table its records and those that it refused.
        wrong: how many of those are not what they should be: of a join not as by all that is known now,
            of windows without one of their records, of a table refused.
        late: records that came too late: of a join joined at once, of windows dropped from one window
            at least, of a table refused.
        dropped: of windows, closed windows that records would have updated.
        expired: of a join, so many of ``wrong`` since the table had forgotten their version.
        waiting: of a join, records that wait after the last run, ``waiting_most`` after any run, and
            ``waiting_average`` over its runs.
        later: of a join, how much later results were recorded, by the clock; ``later_in_stream_time``
            the same in stream time.
        declared: whether it is the one that is declared, or that the last run went by.
    """

    length: timedelta
    of: int
    wrong: int
    late: int
    dropped: int | None = None
    expired: int | None = None
    waiting: int | None = None
    waiting_average: float | None = None
    waiting_most: int | None = None
    later: Delay | None = None
    later_in_stream_time: Delay | None = None
    declared: bool = False

    @property
    def share(self) -> float:
        """Of the results those that are wrong, 0 to 1."""
        return self.wrong / self.of if self.of else 0.0


@dataclass(frozen=True)
class Lateness:
    """What choices of a length would have cost an asset, by what was recorded.

    Args:
        asset: its name; operator: what it is made by, or ``source``.
        what: which length it is: ``grace_period``, ``grace`` of windows or ``history_retention``.
        choices: from the shortest on.
        at_most: the share of wrong results that was asked for, 0 to 1.
        suggested: the shortest length by which there are at most so many; None where none was asked
            for, or no length does.
        notes: what else there is to know.
    """

    asset: str
    operator: str
    what: str
    choices: tuple[Choice, ...]
    at_most: float | None = None
    suggested: timedelta | None = None
    notes: tuple[str, ...] = ()

    @property
    def declared(self) -> Choice | None:
        """The choice that the last run went by; None where that is not known."""
        return next((one for one in self.choices if one.declared), None)

    @property
    def passed(self) -> bool:
        """Whether no more results are wrong than was asked for: by the declared length where that is
        known, else by any."""
        if self.at_most is None:
            return True
        if self.declared is None:
            return self.suggested is not None
        return self.declared.share <= self.at_most

    def of(self, length: timedelta) -> Choice:
        """The choice of a length."""
        return next(one for one in self.choices if one.length == length)

    def as_json(self) -> dict[str, Any]:
        """All of it; lengths in seconds."""
        told = asdict(self)
        for one, choice in zip(told["choices"], self.choices, strict=True):
            one["share"] = choice.share
        return _in_seconds(told)


def _in_seconds(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, dict):
        return {k: _in_seconds(v) for k, v in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_in_seconds(v) for v in value]  # pyright: ignore[reportUnknownVariableType]
    return value
