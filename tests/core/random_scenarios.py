"""Random scenarios of each operator, as those in ``tests/conformance/random``: seeded, completed.

What they expect comes from the model in ``tests.core.reference_model``, so it is as good as that.
``python -m tests.core.random_scenarios SEED DIRECTORY`` writes a file for each operator.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.core.random_chains import DOUBTFUL, SHAPES, build
from tests.core.random_config import (
    Config,
    Feed,
    grace,
    materialize,
    predicate,
    suppress,
    table,
)
from tests.core.reference_model import complete

Scenario = dict[str, Any]
Made = tuple[Config, dict[str, Feed]]

ALPHABET = ("a", "b", "B", "aa", "c", "d")
DURATIONS = ("history_retention", "grace", "duration", "size", "advance", "gap", "retention")
REFUSED = 0.3  # the share of the configs refused at build that are kept


def scenarios(
    seed: int,
    operator: str,
    configs: int = 16,
    sequences: int = 5,
    doubtful: bool = False,
    sliding: bool = False,
    longest: int = 60,
) -> list[Scenario]:
    """Random scenarios of an operator: a number of configs, each with a number of record sequences.

    The same arguments give the same scenarios. Scenarios of one config follow each other.

    Args:
        doubtful: only chains of shapes whose results FORMAT.md leaves open.
        sliding: only sliding windows.
        longest: the most records of a sequence.
    """
    random = Random(f"{operator} {seed} {doubtful} {sliding}")
    shapes = sorted(DOUBTFUL if doubtful else SHAPES)
    random.shuffle(shapes)
    found: list[Scenario] = []
    for number in range(configs):
        shape = shapes[number % len(shapes)] if operator == "chain" else ""
        config, feeds, unit = _config(random, operator, shape, sliding)
        for sequence in range(sequences):
            sequence_random = Random(f"{operator} {seed} {number} {sequence}")
            found.append(
                complete(
                    {
                        "name": f"{operator.replace('_', '-')}-{seed}-{number:02d}-{sequence}",
                        "operator": operator,
                        "config": config,
                        "records": _records(sequence_random, config, feeds, unit, longest),
                    }
                )
            )
    return found


def _config(
    random: Random, operator: str, shape: str, sliding: bool
) -> tuple[Config, dict[str, Feed], int]:
    """A config that can be built or, now and then, one that is refused at build."""
    while True:
        unit = random.choice((1, 1, 1, 1000))
        if shape:
            config, feeds = build(random, unit, shape)
        elif operator == "windowed_aggregate":
            config, feeds = _windowed_aggregate(random, unit, sliding)
        else:
            config, feeds = OPERATORS[operator](random, unit)
        outcome = complete({"operator": operator, "config": config, "records": []})
        if "expected_error" not in outcome or random.random() < REFUSED:
            return config, feeds, unit


def _versioned_store(random: Random, unit: int) -> Made:
    made = table(random, unit, versioned=True)
    config = {"history_retention": made["history_retention"]}
    return config | {"segment_interval": made.get("segment_interval")}, {"calls": Feed("v")}


def _stream_table_join(random: Random, unit: int) -> Made:
    joined = table(random, unit, versioned=random.random() < 0.85)
    config = {"kind": random.choice(("inner", "left")), "table": joined}
    more = ("q",) if random.random() < 0.3 else ()
    feeds = {"table": Feed("t"), "stream": Feed("s", more=more, stream=True)}
    return config | {"grace": grace(random, unit, joined)}, feeds


def _table_table_join(random: Random, unit: int) -> Made:
    config = {"kind": random.choice(("inner", "left", "outer"))}
    return _sides(random, unit, config), {"left": Feed("l"), "right": Feed("r")}


def _foreign_key_join(random: Random, unit: int) -> Made:
    foreign = random.choice((("x",), ("x", "y"), ("x", "y"), ("x", "y", "xx")))
    config = _sides(random, unit, {"kind": random.choice(("inner", "left"))})
    return config, {"left": Feed("l", heads=foreign), "right": Feed("r", keys=foreign)}


def _sides(random: Random, unit: int, config: Config) -> Config:
    sides = {"left": table(random, unit), "right": table(random, unit)}
    return config | sides | materialize(random, unit, "materialize_result")


def _table_filter(random: Random, unit: int) -> Made:
    config = {"table": table(random, unit, unmaterialized=0.4), **predicate(random)}
    return config | materialize(random, unit, "materialize_result"), {"table": Feed("number")}


def _table_map_values(random: Random, unit: int) -> Made:
    mapper = random.choice(("upper", "append:x"))
    config = {"table": table(random, unit, unmaterialized=0.4), "mapper": mapper}
    return config | materialize(random, unit, "materialize_result"), {"table": Feed("v")}


def _table_aggregate(random: Random, unit: int) -> Made:
    aggregate = random.choice(("count", "sum", "reduce_sum", "concat"))
    config = {"table": table(random, unit), "group_by": "prefix", "aggregate": aggregate}
    if aggregate != "count":
        config |= materialize(random, unit, "materialize_result")
    return config, {"table": Feed("number", heads=("g", "h", "i")[: random.randint(1, 3)])}


def _table_suppress(random: Random, unit: int) -> Made:
    versioned = table(random, unit, versioned=random.random() < 0.05)
    return {"table": versioned, "suppress": suppress(random, unit)}, {"table": Feed("v")}


def _windowed_aggregate(random: Random, unit: int, sliding: bool) -> Made:
    kind = "sliding" if sliding else random.choice(("tumbling", "hopping", "session", "session"))
    window: Config = {"type": kind}
    size = random.choice((1, 2, 4, 5, 10, 20)) * unit
    window["gap" if kind == "session" else "size"] = size
    window["grace"] = random.choice((0, 0, 1, 3, 5, 10, 30)) * unit
    if kind == "hopping":
        window["advance"] = random.randint(max(1, size // unit // 5), size // unit) * unit
    if random.random() < 0.3:
        least = size * (2 if kind == "sliding" else 1) + window["grace"]
        window["retention"] = least + random.choice((-1, 0, 1, 10, 1000, 1000)) * unit
    config: Config = {"window": window, "aggregate": random.choice(("count", "sum"))}
    config["suppress"] = None
    if random.random() < 0.7:
        config["suppress"] = suppress(random, unit, final=random.random() < 0.5)
    return config, {"stream": Feed("number", stream=True)}


OPERATORS: dict[str, Callable[[Random, int], Made]] = {
    "versioned_store": _versioned_store,
    "stream_table_join": _stream_table_join,
    "table_table_join": _table_table_join,
    "foreign_key_join": _foreign_key_join,
    "table_filter": _table_filter,
    "table_map_values": _table_map_values,
    "table_aggregate": _table_aggregate,
    "table_suppress": _table_suppress,
}
ALL = (*OPERATORS, "windowed_aggregate", "chain")


class Clock:
    """Timestamps that increase, stay the same or come late, often by exactly one of the durations."""

    def __init__(self, random: Random, unit: int, durations: Sequence[int]) -> None:
        self.random, self.unit, self.durations = random, unit, durations or (5 * unit,)
        self.start = random.choice((0, 0, 0, 1000, 1_700_000_000_000))
        self.top = self.start + random.randint(0, 10) * random.choice((unit, unit, 0))
        self.late = random.choice((0, 0.3, 0.4, 0.5, 0.6))
        self.step = random.choice((3, 8))
        self.jump = random.choice((0, 0, 0.05))
        self.seen = [self.top]

    def next(self) -> int:
        random, unit = self.random, self.unit
        chance = random.random()
        if chance < 0.12:
            at = self.top
        elif chance < 0.12 + 0.88 * self.late:
            at = max(0, self.past())
        elif random.random() < self.jump:
            at = self.top + random.randint(40, 70) * unit
        elif random.random() < 0.08:
            at = self.top + self.near()
        else:
            at = self.top + random.randint(min(unit, 2), self.step * unit)
        self.top = max(self.top, at)
        self.seen.append(at)
        return at

    def near(self) -> int:
        """A duration, or one that is 1 ms longer or shorter."""
        return max(0, self.random.choice(self.durations) + self.random.choice((-1, 0, 0, 1)))

    def past(self) -> int:
        chance = self.random.random()
        if chance < 0.35:
            return self.top - self.near()
        if chance < 0.55:
            return self.random.choice(self.seen)
        if chance < 0.95:
            return self.top - self.random.randint(1, self.random.choice((3, 12, 60)) * self.unit)
        return self.start


class Values:
    """The values of an input: numbered; now and then an earlier one or null."""

    def __init__(self, random: Random, feed: Feed) -> None:
        self.random, self.feed = random, feed
        few = (0, 0.04, 0.1) if feed.stream else (0, 0.1, 0.15, 0.25)
        self.nulls = random.choice(few)
        self.made: list[str] = []
        self.number = 0

    def next(self) -> str | None:
        random, feed = self.random, self.feed
        self.number += 1
        if random.random() < self.nulls:
            return None
        if self.made and random.random() < 0.1:
            return random.choice(self.made)
        value = f"{feed.text}{self.number}"
        if feed.text == "number":
            value = str(random.randint(-3, 9) if feed.heads else random.randint(-5, 20))
        if feed.heads:
            value = "nobar" if random.random() < 0.04 else f"{random.choice(feed.heads)}|{value}"
        self.made.append(value)
        return value


class Keys:
    """The keys of an input: the first ones are more frequent, and null occurs now and then."""

    def __init__(self, random: Random, feed: Feed, common: Sequence[str]) -> None:
        self.random = random
        self.keys = [*(feed.keys or common), *feed.more]
        self.nulls = random.choice((0, 0, 0.03, 0.06))

    def next(self) -> str | None:
        if self.random.random() < self.nulls:
            return None
        return self.random.choices(self.keys, [1 / (i + 1) for i in range(len(self.keys))])[0]


def _records(
    random: Random, config: Config, feeds: dict[str, Feed], unit: int, longest: int
) -> list[Config]:
    count = random.randint(5, 15) if random.random() < 0.4 else random.randint(16, 60)
    count = min(count, longest)
    first = ("a", "b", "c", "aa")[: random.randint(1, 4)]
    common = first if random.random() < 0.7 else random.sample(ALPHABET, random.randint(2, 4))
    clock = Clock(random, unit, [d for d in _durations(config) if d < 10**12])
    if "calls" in feeds:
        return list(_calls(random, feeds["calls"], common, clock, count))
    names = list(feeds)
    weights = [random.choice((1, 1, 2, 4)) for _ in names]
    keys = {name: Keys(random, feed, common) for name, feed in feeds.items()}
    values = {name: Values(random, feed) for name, feed in feeds.items()}
    return [
        {
            "input": name,
            "key": keys[name].next(),
            "value": values[name].next(),
            "timestamp": clock.next(),
        }
        for name in random.choices(names, weights, k=count)
    ]


def _calls(
    random: Random, feed: Feed, common: Sequence[str], clock: Clock, count: int
) -> Iterator[Config]:
    values = Values(random, feed)
    for _ in range(count):
        key, chance = random.choice(common), random.random()
        if chance < 0.5:
            value = values.next()
            yield {"call": "put", "key": key, "value": value, "timestamp": clock.next()}
        elif chance < 0.62:
            yield {"call": "delete", "key": key, "timestamp": clock.next()}
        elif chance < 0.7:
            yield {"call": "get", "key": key}
        else:
            at = random.choice((random.choice(clock.seen), clock.past(), clock.top))
            yield {"call": "get", "key": key, "as_of": max(0, at + random.choice((-1, 0, 0, 1)))}


def _durations(config: Any) -> Iterator[int]:
    if isinstance(config, dict):
        for name, value in config.items():
            if name in DURATIONS and value is not None:
                yield value
            yield from _durations(value)
    elif isinstance(config, list):
        for value in config:
            yield from _durations(value)


def write(found: Sequence[Scenario], path: Path) -> None:
    """Writes scenarios in the layout of the files in ``tests/conformance/random``."""
    path.write_text("[\n" + ",\n".join(map(_text, found)) + "\n]\n", encoding="utf-8")


def _text(scenario: Scenario) -> str:
    def compact(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)

    def field(name: str, value: Any) -> str:
        if isinstance(value, list) and value:
            rows = ",\n".join(f"  {compact(row)}" for row in value)
            return f' "{name}": [\n{rows}\n ]'
        return f' "{name}": {compact(value)}'

    return "{\n" + ",\n".join(field(*item) for item in scenario.items()) + "\n}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="random_scenarios", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--operator", action="append", choices=ALL, help="all, if none is named")
    parser.add_argument("--configs", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=5)
    parser.add_argument("--longest", type=int, default=60, help="records of a sequence")
    parser.add_argument("--doubtful", action="store_true", help="only chains that are not settled")
    parser.add_argument("--sliding", action="store_true", help="only sliding windows")
    given = parser.parse_args(arguments)
    only = [
        name for name, on in (("chain", given.doubtful), ("windowed_aggregate", given.sliding)) if on
    ]
    given.directory.mkdir(parents=True, exist_ok=True)
    for operator in given.operator or only or ALL:
        found = scenarios(
            given.seed,
            operator,
            given.configs,
            given.sequences,
            doubtful=given.doubtful,
            sliding=given.sliding,
            longest=given.longest,
        )
        write(found, given.directory / f"{operator}.json")


if __name__ == "__main__":
    main()
