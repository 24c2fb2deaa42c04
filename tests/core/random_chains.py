"""Random chains: shapes of a few steps, with random kinds, materializations and grace periods.

A shape adds its steps with the methods of :class:`Chain` and returns the id of the step whose results
are emitted. FORMAT.md defines the results of ``SHAPES``. The results of ``DOUBTFUL`` shapes depend on
what FORMAT.md leaves open:

- which of a record's two paths runs first before they join (``diamond``);
- which old value suppress forwards and which timestamp its rows have (``after_suppress``): here its
  rows are those that it has emitted;
- which timestamp another join finds in the rows of a left or outer join without ``Materialized``
  (``outer_inside``): here it is the largest of the joined rows; a deleted row has none.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tests.core.random_config import Config, Feed, grace, materialize, predicate, suppress, table

GROUPS = ("g", "h", "i")
FOREIGN = ("x", "y", "xx")
NUMBERED = ("3", "6", "9", "12")


class Chain:
    """A chain under construction: its steps, and what records its inputs get."""

    def __init__(self, random: Random, unit: int) -> None:
        self.random, self.unit = random, unit
        self.steps: list[Config] = []
        self.feeds: dict[str, Feed] = {}

    def add(self, op: str, **fields: object) -> str:
        name = f"{op[0]}{len(self.steps)}"
        self.steps.append({"id": name, "op": op, **fields})
        return name

    def maybe(self) -> Config:
        return materialize(self.random, self.unit)

    def table(
        self,
        topic: str,
        text: str,
        heads: tuple[str, ...] = (),
        keys: tuple[str, ...] = (),
        versioned: bool | None = None,
    ) -> str:
        self.feeds[topic] = Feed(text, heads=heads, keys=keys)
        made = table(self.random, self.unit, versioned)
        return self.add("table", input=topic, table=made)

    def filter(self, of: str) -> str:
        return self.add("filter", **{"from": of}, **predicate(self.random), **self.maybe())

    def map(self, of: str) -> str:
        mapper = self.random.choice(("append:x", "append:!", "append:0", "upper"))
        return self.add("map_values", **{"from": of}, mapper=mapper, **self.maybe())

    def to_table(self, of: str) -> str:
        return self.add("to_table", **{"from": of}, **self.maybe())

    def aggregate(self, of: str, kind: str | None = None) -> str:
        kind = kind or self.random.choice(("sum", "count", "reduce_sum", "concat"))
        more = {} if kind == "count" else self.maybe()
        return self.add("aggregate", **{"from": of}, aggregate=kind, **more)

    def suppress(self, of: str) -> str:
        return self.add("suppress", **{"from": of}, suppress=suppress(self.random, self.unit))

    def join(self, left: str, right: str, kinds: tuple[str, ...] = (), **more: object) -> str:
        kind = self.random.choice(kinds or ("inner", "left", "outer"))
        fields = {"kind": kind, "left": left, "right": right, **(more or self.maybe())}
        return self.add("table_join", **fields)

    def foreign(self, left: str, right: str) -> str:
        kind = self.random.choice(("inner", "left"))
        fields = {"kind": kind, "left": left, "right": right, **self.maybe()}
        return self.add("foreign_key_join", **fields)

    def stream(self, of: str, keys: tuple[str, ...] = (), more: tuple[str, ...] = ()) -> str:
        """Joins a stream with a table."""
        self.feeds["stream"] = Feed("s", keys=keys, more=more, stream=True)
        stream = self.add("stream", input="stream")
        return self.add_join(stream, of)

    def add_join(self, stream: str, of: str) -> str:
        kind = self.random.choice(("inner", "left"))
        wait = grace(self.random, self.unit)
        return self.add("stream_table_join", kind=kind, stream=stream, table=of, grace=wait)

    def some(self, of: str, most: int = 2) -> str:
        """Adds at most this number of filter, mapValues and toTable steps."""
        for _ in range(self.random.randint(0, most)):
            of = self.random.choice((self.filter, self.map, self.map, self.to_table))(of)
        return of

    def both(self, text: str = "number") -> tuple[str, str]:
        return self.table("left", text), self.table("right", "r")


def aggregate_stream(c: Chain) -> str:
    return c.stream(c.aggregate(c.table("table", "number", GROUPS[:2])), keys=GROUPS[:2])


def to_table_stream(c: Chain) -> str:
    return c.stream(c.to_table(c.table("table", "t")))


def filter_stream(c: Chain) -> str:
    return c.stream(c.filter(c.table("table", "number")))


def map_stream(c: Chain) -> str:
    return c.stream(c.map(c.table("table", "t")))


def foreign_key_stream(c: Chain) -> str:
    left, right = c.table("left", "l", FOREIGN[:2]), c.table("right", "r", keys=FOREIGN[:2])
    return c.stream(c.foreign(left, right))


def join_stream(c: Chain) -> str:
    return c.stream(c.join(*c.both("l")))


def join_map(c: Chain) -> str:
    return c.map(c.join(*c.both("l")))


def join_join(c: Chain) -> str:
    first = c.join(*c.both("l"), kinds=("inner",))
    return c.join(*c.random.sample((first, c.table("third", "v")), 2))


def join_join_materialized(c: Chain) -> str:
    first = c.join(*c.both("l"), materialize=table(c.random, c.unit))
    return c.join(*c.random.sample((first, c.table("third", "v")), 2))


def map_foreign_key(c: Chain) -> str:
    left = c.map(c.table("left", "l", FOREIGN))
    return c.foreign(left, c.table("right", "r", keys=FOREIGN))


def map_aggregate(c: Chain) -> str:
    return c.aggregate(c.map(c.table("table", "number", GROUPS)))


def filter_filter(c: Chain) -> str:
    return c.filter(c.filter(c.table("table", "number")))


def filter_suppress(c: Chain) -> str:
    return c.suppress(c.filter(c.table("table", "number", versioned=c.random.random() < 0.3)))


def filter_join(c: Chain) -> str:
    left, right = c.both()
    return c.join(*c.random.sample((c.filter(left), right), 2))


def filter_aggregate_stream(c: Chain) -> str:
    counted = c.aggregate(c.filter(c.table("table", "number", NUMBERED)))
    return c.stream(counted, keys=NUMBERED)


def aggregate_filter_suppress(c: Chain) -> str:
    summed = c.aggregate(c.table("table", "number", GROUPS), "sum")
    return c.suppress(c.filter(summed))


def aggregate_join(c: Chain) -> str:
    left = c.aggregate(c.table("left", "number", GROUPS[:2]))
    right = c.table("right", "r", keys=GROUPS[:2])
    return c.some(c.join(*c.random.sample((left, right), 2)))


def aggregates_joined(c: Chain) -> str:
    left = c.aggregate(c.table("left", "number", GROUPS[:2]))
    right = c.aggregate(c.some(c.table("right", "number", GROUPS)))
    return c.join(left, right)


def aggregate_foreign_key(c: Chain) -> str:
    """The right side of a foreign-key join is an aggregate, whose rows move between groups."""
    right = c.aggregate(c.table("right", "number", FOREIGN[:2]))
    return c.foreign(c.table("left", "l", FOREIGN), right)


def foreign_key_aggregate(c: Chain) -> str:
    right = c.table("right", "r", keys=FOREIGN)
    return c.aggregate(c.foreign(c.table("left", "number", FOREIGN), right))


def foreign_key_filter(c: Chain) -> str:
    right = c.table("right", "r", keys=FOREIGN[:2])
    return c.filter(c.map(c.foreign(c.table("left", "l", FOREIGN[:2]), right)))


def foreign_key_join(c: Chain) -> str:
    right = c.table("right", "r", keys=FOREIGN[:2])
    joined = c.foreign(c.table("left", "l", FOREIGN[:2]), right)
    return c.join(*c.random.sample((joined, c.table("third", "v")), 2))


def foreign_key_suppress(c: Chain) -> str:
    right = c.table("right", "r", keys=FOREIGN[:2])
    return c.suppress(c.foreign(c.table("left", "l", FOREIGN[:2]), right))


def join_aggregate(c: Chain) -> str:
    return c.aggregate(c.join(c.table("left", "number", GROUPS[:2]), c.table("right", "r")))


def join_foreign_key(c: Chain) -> str:
    """The left side is a join, so its values and foreign keys begin with a parenthesis."""
    left = c.join(c.table("left", "l", FOREIGN[:2]), c.table("third", "v"))
    return c.foreign(left, c.table("right", "r", keys=("(x", "(y")))


def join_suppress(c: Chain) -> str:
    return c.suppress(c.join(*c.both("l")))


def some_join_some(c: Chain) -> str:
    left = c.some(c.table("left", "number"))
    return c.some(c.join(left, c.some(c.table("right", "number"))))


def some_stream(c: Chain) -> str:
    return c.stream(c.some(c.table("table", "number"), 4), more=("q",))


def some_steps(c: Chain) -> str:
    return c.some(c.table("table", "number"), 5)


def some_aggregate_some(c: Chain) -> str:
    return c.some(c.aggregate(c.some(c.table("table", "number", NUMBERED))), 3)


def suppress_stream(c: Chain) -> str:
    return c.stream(c.suppress(c.table("table", "t", versioned=False)))


def suppress_to_table_join(c: Chain) -> str:
    left = c.to_table(c.suppress(c.table("left", "l", versioned=False)))
    return c.join(left, c.table("right", "r"))


def stream_stream(c: Chain) -> str:
    """A stream that joins one table and then another one."""
    first = c.stream(c.some(c.table("table", "number"), 1))
    return c.add_join(first, c.table("third", "v"))


def after_suppress(c: Chain) -> str:
    let_out = c.suppress(c.table("left", "number", NUMBERED, versioned=False))
    after = c.random.choice(("filter", "aggregate", "join"))
    if after == "join":
        return c.join(let_out, c.table("right", "r"))
    return c.filter(let_out) if after == "filter" else c.aggregate(let_out)


def outer_inside(c: Chain) -> str:
    left, right = c.both("l")
    kind = c.random.choice(("left", "outer"))
    inside = c.add("table_join", kind=kind, left=left, right=right)
    return c.join(*c.random.sample((inside, c.table("third", "v")), 2))


def diamond(c: Chain) -> str:
    source = c.table("table", "number", NUMBERED)
    left, right = c.some(source), c.some(source)
    return c.join(left, right)


def foreign_key_diamond(c: Chain) -> str:
    source = c.table("table", "number", NUMBERED)
    return c.foreign(source, c.aggregate(source))


Shape = Callable[[Chain], str]


def _named(*shapes: Shape) -> dict[str, Shape]:
    return {s.__name__: s for s in shapes}


SHAPES = _named(
    # the shapes of tests/conformance/random/chain.json
    aggregate_stream,
    to_table_stream,
    filter_stream,
    foreign_key_stream,
    join_stream,
    join_map,
    join_join,
    map_foreign_key,
    map_aggregate,
    filter_filter,
    filter_suppress,
    filter_join,
    # others
    aggregate_filter_suppress,
    aggregate_foreign_key,
    aggregate_join,
    aggregates_joined,
    filter_aggregate_stream,
    foreign_key_aggregate,
    foreign_key_filter,
    foreign_key_join,
    foreign_key_suppress,
    join_aggregate,
    join_foreign_key,
    join_join_materialized,
    join_suppress,
    map_stream,
    some_aggregate_some,
    some_join_some,
    some_steps,
    some_stream,
    stream_stream,
    suppress_stream,
    suppress_to_table_join,
)
DOUBTFUL = _named(after_suppress, diamond, foreign_key_diamond, outer_inside)


def build(random: Random, unit: int, shape: str) -> tuple[Config, dict[str, Feed]]:
    """The config of a random chain of a shape, and the feed of each input."""
    chain = Chain(random, unit)
    output = (SHAPES | DOUBTFUL)[shape](chain)
    return {"steps": chain.steps, "output": output}, chain.feeds
