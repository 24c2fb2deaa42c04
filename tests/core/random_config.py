"""Random parts of configs (tables, grace periods, limits), and the kinds of records of an input."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

Config = dict[str, Any]

RETENTIONS = (0, 1, 5, 5, 10, 20, 50, 50, 200)
SEGMENTS = (1, 3, 10, 40)


@dataclass(frozen=True)
class Feed:
    """The kind of records that an input gets.

    Attributes:
        text: the beginning of each value, before its number; ``number``: the value is a small integer.
        heads: the texts before the bar of a value; none: values have no bar.
        keys: the input's keys; none: those that all inputs of a sequence have.
        more: additional keys.
        stream: whether the input is a stream, whose values are seldom null.
    """

    text: str
    heads: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    stream: bool = False


def table(
    random: Random, unit: int, versioned: bool | None = None, unmaterialized: float = 0
) -> Config:
    """A TABLE: mostly versioned, unless ``versioned`` decides."""
    if not (random.random() < 0.6 if versioned is None else versioned):
        plain = {"versioned": False}
        return plain | ({"materialized": False} if random.random() < unmaterialized else {})
    made = {"versioned": True, "history_retention": random.choice(RETENTIONS) * unit}
    if random.random() < 0.6:
        made["segment_interval"] = random.choice(SEGMENTS) * unit
    return made


def materialize(random: Random, unit: int, field: str = "materialize") -> Config:
    """A ``Materialized`` for a result, or none."""
    return {field: table(random, unit)} if random.random() < 0.45 else {}


def predicate(random: Random) -> Config:
    number = random.randint(3, 11)
    return {"predicate": {"op": "gt", "number": number}, "negate": random.random() < 0.4}


def grace(random: Random, unit: int, joined: Config | None = None) -> int | None:
    """A grace period, or none. Now and then it is exactly the table's history retention."""
    if random.random() < 0.35 or (joined and not joined["versioned"] and random.random() < 0.7):
        return None
    retention: int | None = joined.get("history_retention") if joined else None
    if retention is not None and random.random() < 0.2:
        return retention
    fitting = [g for g in (0, 1, 3, 5, 7, 13) if retention is None or g * unit <= retention]
    return random.choice(fitting if random.random() < 0.9 else (0, 1, 3, 5, 7, 13)) * unit


def suppress(random: Random, unit: int, final: bool = False) -> Config:
    """Limits of suppress. A time limit that is never reached occurs only with a limit of records."""
    most = random.choice((None, None, 1, 2, 3, 5))
    full = "unbounded"
    if most is not None:
        full = "shut_down" if final or random.random() < 0.3 else "emit_early"
    if full == "shut_down":
        most = random.choice((3, 4, 6, 11))
    if final:
        return {"until": "window_closes", "max_records": most, "when_full": full}
    waits = [n * unit for n in (0, 1, 2, 5, 5, 10, 20)] + ([] if most is None else [10**15])
    duration = random.choice(waits)
    return {"until": "time_limit", "duration": duration, "max_records": most, "when_full": full}
