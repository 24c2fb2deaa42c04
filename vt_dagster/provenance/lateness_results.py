"""The result of ``lateness``: the cost of each choice of a length."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

_ONE = timedelta(microseconds=1)


@dataclass(frozen=True)
class Delay:
    """The delay of results by the grace period.

    Args:
        p50, p99: percentiles of the delay.
    """

    p50: timedelta
    p99: timedelta

    @classmethod
    def of(cls, found: Counter[int]) -> Delay | None:
        """Returns the percentiles of a histogram of delays in microseconds; None = no results."""
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
    """The cost of one length.

    Args:
        length: the grace period or history retention.
        of: the total that ``wrong`` refers to. Join: records with a value (inner join: and a key).
            Windows: windows. Table: accepted and refused records.
        wrong: Join: results that differ from the join by current knowledge. Windows: windows that
            lack a record. Table: refused records.
        late: late records. Join: joined at once. Windows: dropped from at least one window. Table:
            refused.
        dropped: windows only: dropped updates, one for each record and closed window.
        expired: joins only: the part of ``wrong`` whose version had expired in the table.
        waiting: joins only: records in the buffer after the last run.
        waiting_average: their average over the runs.
        waiting_most: their maximum over the runs.
        later: joins only: the delay of results in system time.
        later_in_stream_time: the delay of results in stream time.
        declared: whether this is the declared length, or the length of the last run.
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
        """The share of wrong results, 0 to 1."""
        return self.wrong / self.of if self.of else 0.0


@dataclass(frozen=True)
class Lateness:
    """The cost of several lengths for one asset.

    Args:
        asset: the asset's name.
        operator: the operator that makes the asset, or ``source``.
        what: the option: ``grace_period``, ``grace`` (of windows) or ``history_retention``.
        choices: one for each length, shortest first.
        at_most: the requested maximum share of wrong results, 0 to 1.
        suggested: the shortest length that meets ``at_most``; None = no share was requested, or no
            length meets it.
        notes: limits of these numbers.
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
        """The choice of the declared length; None = that length is not known."""
        return next((one for one in self.choices if one.declared), None)

    @property
    def passed(self) -> bool:
        """Whether the share of wrong results is at most ``at_most``: with the declared length if it is
        known, else with any length."""
        if self.at_most is None:
            return True
        if self.declared is None:
            return self.suggested is not None
        return self.declared.share <= self.at_most

    def of(self, length: timedelta) -> Choice:
        """Returns the choice of a length."""
        return next(one for one in self.choices if one.length == length)

    def as_json(self) -> dict[str, Any]:
        """Returns all fields as plain values; lengths in seconds."""
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
