"""Durations and times: checks, parsing and formatting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any, cast

from vt_dagster.errors import ContractError, TopologyError

Duration = timedelta | Mapping[int, timedelta]
"""A length of stream time. A mapping sets one per partition, for the conformance runner, which runs
scenarios with different settings side by side as partitions."""

_LONGEST = timedelta(days=365_000)
FOREVER = timedelta(days=50_000_000)
"""Longer than any stream of records; in microseconds it still fits a BIGINT."""

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_NAMES = {"w": "weeks", "d": "days", "h": "hours", "m": "minutes", "s": "seconds", "ms": "milliseconds"}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|[wdhms])\s*")


def check_duration(name: str, what: str, value: Any, longest: timedelta = _LONGEST) -> None:
    """Raises TopologyError for a value that is no duration, negative, or longer than ``longest``."""
    every: list[Any] = [value]
    if isinstance(value, Mapping):
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
    partitions = sorted(
        {*(one if isinstance(one, Mapping) else ())} | {*(other if isinstance(other, Mapping) else ())}
    )
    if not partitions:
        return [("", (cast(timedelta, one), cast(timedelta, other)))]
    return [(f" of partition {p}", (length_at(one, p), length_at(other, p))) for p in partitions]


def plus(one: Duration, other: Duration) -> Duration:
    """Adds two durations, per partition if either is a mapping."""
    if isinstance(one, timedelta) and isinstance(other, timedelta):
        return one + other
    partitions = {*(one if isinstance(one, Mapping) else ())} | {
        *(other if isinstance(other, Mapping) else ())
    }
    return {p: length_at(one, p) + length_at(other, p) for p in sorted(partitions)}


def parse_length(text: str) -> timedelta:
    """Parses a duration: ``7d``, ``1h30m``, ``250ms``.

    Raises:
        ContractError: another text.
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
    return timedelta(**{u: float(a.group(1)) for u, a in zip(units, amounts, strict=True)})


def parse_time(text: str) -> int:
    """Parses an ISO 8601 time to epoch microseconds; UTC if it has no offset.

    Raises:
        ContractError: another text.
    """
    try:
        moment = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    except ValueError:
        raise ContractError(f"expected a time like 2013-07-01T12:00:00Z, got {text!r}") from None
    aware = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
    return (aware - _EPOCH) // timedelta(microseconds=1)


def in_utc(moment: int) -> str:
    """Formats epoch microseconds for :func:`parse_time`; only the year if Python has no such date."""
    try:
        return f"{_EPOCH + timedelta(microseconds=moment):%Y-%m-%dT%H:%M:%S.%fZ}".replace(".000000", "")
    except OverflowError:
        return f"the year {1970 + moment // 31_556_952_000_000}"
