"""Turns a scenario's topology into steps, and builds one node for equal steps of many scenarios.

Steps that differ only in numbers and texts have the same *shape* and become one node, which has its
numbers per partition and looks up its texts by the ``scenario`` column. The stream operators of
FORMAT.md, "Streams", are steps too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pyspark.sql.types import StringType, StructField, StructType

from vt_dagster.conformance.scenario import Scenario, ms, source
from vt_dagster.topology.durations import Duration
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.operators import Aggregator, Materialized, UntilTimeLimit, UntilWindowCloses
from vt_dagster.topology.windows import (
    HoppingWindow,
    SessionWindow,
    SlidingWindow,
    TumblingWindow,
    Window,
)

Config = Mapping[str, Any]


def _side(side: str) -> str:
    return f"coalesce(cast({side}.value as string), 'null')"


JOINED = f"cast(concat('(', {_side('left')}, ',', {_side('right')}, ')') as string) as value"
"""The value of a join's result."""


Shape = tuple[Any, ...]
"""The operation of a node without its numbers and texts, and the shapes of its inputs."""
SourceMaker = Callable[..., Any]

_INPUTS = ("left", "right", "from", "stream", "table")


def supported(scenario: Scenario) -> bool:
    """Returns whether a scenario can run: it has no limit in bytes, which count Kafka's own objects."""
    return "max_bytes" not in (scenario.config.get("suppress") or {})


@dataclass(frozen=True)
class Layout:
    """A scenario as steps.

    Args:
        steps: by id, inputs first.
        shapes: the shape of each step.
        output: the step whose results are compared.
        stored: the step whose store is compared; None = there is none.
    """

    scenario: Scenario
    steps: Mapping[str, Config]
    shapes: Mapping[str, Shape]
    output: str
    stored: str | None

    @property
    def value(self) -> str:
        """The compared column of the output: ``value``, or the aggregate's name in a windowed
        aggregate."""
        windows = [s["aggregate"] for s in self.steps.values() if s["op"] == "window"]
        return windows[0] if windows else "value"

    @property
    def one_by_one(self) -> bool:
        """Whether each record needs its own run: if a buffer's limit applies after each record, if a
        failing record must not fail others, or if two paths of a record join again, which must not see
        later records."""
        limits = [(s.get("suppress") or {}).get("max_records") for s in self.steps.values()]
        fails = any(s.get("null_value") == "no_list" for s in self.steps.values())
        return fails or any(n is not None for n in limits) or self._has_paths_that_rejoin()

    def _has_paths_that_rejoin(self) -> bool:
        above: dict[str, set[str]] = {}
        for name, step in self.steps.items():
            inputs = [above[i] for i in inputs_of(step)]
            if len(inputs) == 2 and inputs[0] & inputs[1]:
                return True
            above[name] = set[str]().union(*inputs) if inputs else {step["input"]}
        return False


def inputs_of(step: Config) -> list[str]:
    """Returns the ids of a step's inputs."""
    if step["op"] in ("table", "stream", "global_table"):
        return []
    return [step[i] for i in _INPUTS if i in step]


def layout(scenario: Scenario) -> Layout:
    config = scenario.config
    chain = scenario.operator == "chain"
    steps = {s["id"]: s for s in (config["steps"] if chain else _steps_of(scenario.operator, config))}
    shapes: dict[str, Shape] = {}
    for name, step in steps.items():
        shapes[name] = (step["op"], *_kind(step), *[shapes[i] for i in inputs_of(step)])
    stored = [name for name, s in steps.items() if s.get("materialize")]
    if scenario.operator in ("stream_table_join", "global_table"):
        stored = ["table"]
    output = config["output"] if chain else next(reversed(steps))
    return Layout(scenario, steps, shapes, output, stored[-1] if stored else None)


def _steps_of_streams(operator: str, config: Config) -> Iterator[Config]:
    op = operator.removeprefix("stream_")
    two = op in ("merge", "stream_join")
    for name in ("left", "right") if two else ("stream",):
        yield {"id": name, "op": "stream", "input": name}
    sources = {"left": "left", "right": "right"} if two else {"from": "stream"}
    yield {"id": "result", "op": op, **config, **sources}
    if config.get("then") == "count":
        yield {"id": "count", "op": "count", "from": "result", "materialize": {"versioned": False}}


def _steps_of(operator: str, config: Config) -> Iterator[Config]:
    """Yields the steps of a chain that is equivalent to an operator."""
    if operator.startswith("stream_") and operator != "stream_table_join":
        yield from _steps_of_streams(operator, config)
        return
    result = {"id": "result", **config, "materialize": config.get("materialize_result")}
    if "left" in config:
        for side in ("left", "right"):
            yield {"id": side, "op": "table", "input": side, "table": config[side]}
        op = "foreign_key_join" if operator == "foreign_key_join" else "table_join"
        yield {**result, "op": op, "left": "left", "right": "right"}
    elif operator == "windowed_aggregate":
        yield {"id": "stream", "op": "stream", "input": "stream"}
        yield {**result, "id": "windows", "op": "window", "from": "stream"}
        if config["suppress"]:
            yield {"id": "result", "op": "suppress", "from": "windows", **config}
    elif operator == "global_table":
        yield {"id": "table", "op": "global_table", "input": "table", "table": config["table"]}
    else:
        yield {"id": "table", "op": "table", "input": "table", "table": config["table"]}
        if operator == "stream_table_join":
            yield {"id": "stream", "op": "stream", "input": "stream"}
            yield {**result, "op": operator, "stream": "stream", "table": "table"}
        else:
            del result["table"]
            yield {**result, "op": operator.removeprefix("table_"), "from": "table"}


def _kind(step: Config) -> Shape:
    """Returns the settings that distinguish nodes with the same ``op``."""
    op = step["op"]
    if op == "select_key":
        return (step["key_from"].split(":")[0],)
    if op == "stream_join":
        return (step["kind"],)
    if op in ("merge", "flat_map_values", "count"):
        return (step["null_value"],) if op == "flat_map_values" else ()
    materialize = step.get("materialize")
    stored = materialize and ("versioned" if materialize["versioned"] else "plain")
    if op not in ("filter", "map_values") and stored == "plain":
        stored = None  # the others have a store in any case
    if op in ("table", "global_table"):
        return (step["input"], step["table"]["versioned"])
    if op == "stream":
        return (step["input"],)
    if op == "filter":
        return (step["negate"], stored)
    if op in ("map_values", "to_table"):
        return (stored,)
    if op == "aggregate":
        return (step["aggregate"], stored)
    if op == "suppress":
        until = step["suppress"]
        return (until["until"], until["when_full"], until.get("duration") == 0)
    if op == "window":
        return (step["window"]["type"],)
    if op == "stream_table_join":
        grace = step["grace"]
        return (step["kind"], "none" if grace is None else "some" if grace else "zero")
    return (step["kind"], stored)


def nodes_of(layouts: Sequence[Layout], make: SourceMaker = source) -> dict[Shape, Stream]:
    """Returns the shared nodes of many scenarios, by shape. A scenario's number, and partition, is its
    index in ``layouts``.

    Args:
        make: makes a source from a class, a name and further arguments.

    Raises:
        TopologyError: an invalid topology.
    """
    members: dict[Shape, dict[int, Config]] = defaultdict(dict)
    for number, each in enumerate(layouts):
        for name, shape in each.shapes.items():
            members[shape][number] = each.steps[name]
    nodes: dict[Shape, Stream] = {}
    for i, (shape, steps) in enumerate(members.items()):
        inputs = [nodes[s] for s in shape if isinstance(s, tuple)]
        nodes[shape] = _Node(f"{shape[0]}_{i}", len(layouts), steps, make).made_of(*inputs)
    return nodes


@dataclass(frozen=True)
class _Node:
    """Makes one node.

    Args:
        every: the number of all scenarios.
        steps: the settings of the node in each scenario that has it, by number of the scenario.
    """

    name: str
    every: int
    steps: Mapping[int, Config]
    make: SourceMaker

    @property
    def _any(self) -> Config:
        return next(iter(self.steps.values()))

    def made_of(self, *inputs: Any) -> Stream:
        op, step, name = self._any["op"], self._any, self.name
        if op in ("table", "global_table"):
            return self._table(op == "global_table")
        if op == "stream":
            return self.make(Stream, name, null_key="keep")
        if op == "suppress":
            return inputs[0].suppress(self._until(), name=name)
        if op == "window":
            return self._windows(inputs[0])
        if op == "stream_table_join":
            return self._stream_join(*inputs)
        if op == "stream_join":
            return self._two_streams(*inputs)
        if op == "merge":
            return inputs[0].merge(inputs[1], name=name)
        if op == "count":
            return inputs[0].group_by().count(name=name, column="value")
        if op == "select_key":
            columns = ("scenario", f"cast({self._key()} as string) as key")
            return inputs[0].select_key(*columns, name=name, partition_by="scenario")
        if op == "flat_map_values":
            return inputs[0].flat_map_values(self._elements(), column="value", name=name)
        stored = self._materialized()
        if op == "filter":
            make = inputs[0].filter_not if step["negate"] else inputs[0].filter
            bound = self._by_scenario(lambda s: str(s["predicate"]["number"]))
            return make(f"{_number('value')} > cast({bound} as bigint)", name=name, materialized=stored)
        if op == "map_values":
            return inputs[0].map_values(f"{self._mapper()} as value", name=name, materialized=stored)
        if op == "to_table":
            stream = inputs[0]
            if isinstance(stream, Table):
                stream = stream.to_stream(name=f"{name}_stream")
            return stream.to_table(name=name, materialized=stored)
        if op == "aggregate":
            return self._aggregate(inputs[0], stored)
        left, right = inputs
        join = {"inner": left.join, "left": left.left_join, "outer": left.outer_join}[step["kind"]]
        more: dict[str, Any] = {}
        if op == "foreign_key_join":
            more["foreign_key"] = ("scenario", _HEAD)
        return join(
            right,
            name=name,
            select=(JOINED,),
            materialized=stored,
            monotone_timestamps=False,
            **more,
        )

    def _table(self, broadcast: bool) -> Table:
        table = self._any["table"]
        more: dict[str, Any] = {"broadcast": True} if broadcast else {}
        if not table["versioned"]:
            return self.make(Table, self.name, **more)
        if table.get("segment_interval") is not None:
            more["segment_interval"] = ms(table["segment_interval"])
        retention = self._lengths(lambda s: s["table"]["history_retention"])
        return self.make(VersionedTable, self.name, history_retention=retention, **more)

    def _stream_join(self, stream: Stream, table: Table) -> Stream:
        grace = self._any["grace"]
        period = self._lengths(lambda s: s["grace"]) if grace else None if grace is None else ms(0)
        join = stream.join if self._any["kind"] == "inner" else stream.left_join
        return join(table, name=self.name, select=(JOINED,), grace_period=period)

    def _two_streams(self, left: Stream, right: Stream) -> Stream:
        kind = {"inner": "join", "left": "left_join", "outer": "outer_join"}[self._any["kind"]]
        ends = {end: self._lengths(lambda s, end=end: s[end]) for end in ("before", "after", "grace")}
        return getattr(left, kind)(right, name=self.name, select=(JOINED,), **ends)

    def _key(self) -> str:
        how = self._any["key_from"].split(":")[0]
        if how == "characters":
            count = f"cast({self._by_scenario(lambda s: s['key_from'].split(':')[1])} as int)"
            return f"case when length(value) >= {count} then substring(value, 1, {count}) end"
        return {"head": _HEAD, "value": "value", "upper_key": "upper(key)"}[how]

    def _elements(self) -> str:
        # Escaped, not within \Q and \E: a separator may have \E.
        separator = self._by_scenario(lambda s: re.escape(s["separator"]))
        pieces = f"split(value, {separator})"
        of_null = {"none": "array()", "one_null": "array(null)", "no_list": "null"}
        # Records of other scenarios come along, and must not be refused.
        return (
            f"case when scenario not in ({', '.join(map(str, self.steps))}) "
            "then cast(array() as array<string>) "
            f"when value is null then cast({of_null[self._any['null_value']]} as array<string>) "
            "when value = '' then cast(array() as array<string>) "
            f"else transform({pieces}, p -> if(p = '~', null, p)) end"
        )

    def _aggregate(self, table: Table, stored: Materialized | None) -> Table:
        kind = self._any["aggregate"]
        grouped = table.group_by("scenario", f"{_HEAD} as key", partition_by="scenario")
        if kind in ("count", "sum"):
            of = {"value": "count(*)" if kind == "count" else f"sum({_number(_PAYLOAD)})"}
            return grouped.aggregate(of, name=self.name, materialized=stored)
        start = (lambda: {"value": ""}) if kind == "concat" else None
        adder, subtractor = (_append("+"), _append("-")) if kind == "concat" else (_add(1), _add(-1))
        return grouped.aggregate(
            Aggregator(adder, subtractor, start, _VALUE if start else None),
            name=self.name,
            select=(f"{_PAYLOAD} as value",),
            materialized=stored,
        )

    def _windows(self, stream: Stream) -> Table:
        of = {"count": "count(*)", "sum": f"sum({_number('value')})"}
        return stream.group_by().windowed_by(self._window()).aggregate(of, name=self.name)

    def _window(self) -> Window:
        window = self._any["window"]

        def length(of: str) -> Duration:
            return self._lengths(lambda s: s["window"][of], ms(1))

        grace = length("grace")
        if window["type"] == "sliding":
            kept = self._lengths(lambda s: _retention(s["window"]), ms(3))
            return SlidingWindow(length("size"), grace, kept)
        # The others' changes no result, so that of one scenario is as good as those of many.
        retention = length("retention") if self.every == 1 and "retention" in window else None
        if window["type"] == "session":
            return SessionWindow(length("gap"), grace, retention)
        if window["type"] == "tumbling":
            return TumblingWindow(length("size"), grace, retention)
        return HoppingWindow(length("size"), length("advance"), grace, retention)

    def _until(self) -> UntilTimeLimit | UntilWindowCloses:
        until = self._any["suppress"]
        limits = {n: s["suppress"].get("max_records") for n, s in self.steps.items()}
        most = limits[next(iter(limits))] if self.every == 1 else limits
        if all(n is None for n in limits.values()):
            most = None
        if until["until"] == "window_closes":
            return UntilWindowCloses(most, when_full=until["when_full"])
        period = ms(0)
        if until["duration"] != 0:
            period = self._lengths(lambda s: s["suppress"]["duration"])
        return UntilTimeLimit(period, most, when_full=until["when_full"])

    def _materialized(self) -> Materialized | None:
        table = self._any.get("materialize")
        if not table:
            return None
        if not table["versioned"]:
            return Materialized()
        return Materialized(self._lengths(lambda s: s["materialize"]["history_retention"]))

    def _mapper(self) -> str:
        def added(step: Config) -> str | None:
            how: str = step["mapper"]
            return None if how == "upper" else how.removeprefix("append:")

        added_text = self._by_scenario(added)
        return f"cast(coalesce(concat({_OWN}, {added_text}), upper({_OWN})) as string)"

    def _lengths(self, of: Callable[[Config], int], otherwise: timedelta = timedelta(0)) -> Duration:
        """Returns the duration of each partition; ``otherwise`` for scenarios without the node."""
        if self.every == 1:
            return ms(of(self._any))
        steps = self.steps
        return {n: ms(of(steps[n])) if n in steps else otherwise for n in range(self.every)}

    def _by_scenario(self, of: Callable[[Config], str | None]) -> str:
        """Returns a SQL expression for a text by scenario; null for scenarios without one."""
        texts = {n: of(step) for n, step in self.steps.items()}
        if len(set(texts.values())) == 1:
            return _quoted(next(iter(texts.values())))
        known = {str(n): text for n, text in texts.items() if text is not None}
        numbers, values = ("\x01".join(some) for some in (known, known.values()))
        found = f"map_from_arrays(split({_quoted(numbers)}, '\x01'), split({_quoted(values)}, '\x01'))"
        return f"try_element_at({found}, cast(scenario as string))"


def _retention(window: Config) -> int:
    """Returns the retention of the store of sliding windows, in milliseconds."""
    given = window.get("retention")
    return 2 * window["size"] + window["grace"] if given is None else given


def _number(expression: str) -> str:
    """Returns a SQL expression for the number at the start of a value; null = none."""
    return f"try_cast(regexp_extract(cast({expression} as string), '^-?[0-9]+', 0) as bigint)"


def _quoted(value: str | None) -> str:
    if value is None:
        return "cast(NULL as string)"
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


# Casts say what an expression's type is.
_OWN = "cast(value as string)"
_BAR = f"instr({_OWN}, '|')"
_HEAD = f"cast(case when {_BAR} > 0 then substring({_OWN}, 1, {_BAR} - 1) end as string)"
_PAYLOAD = f"cast(substring({_OWN}, {_BAR} + 1) as string)"
_VALUE = StructType([StructField("value", StringType())])


# The functions of an aggregator go to Spark's workers, with what they refer to but without this module.
def _append(sign: str) -> Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]:
    def appended(row: dict[str, Any], aggregate: dict[str, Any]) -> dict[str, Any]:
        return {"value": f"{aggregate['value']}{sign}{row['value']}"}

    return appended


def _add(sign: int) -> Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]:
    def added(row: dict[str, Any], aggregate: dict[str, Any]) -> dict[str, Any]:
        def number(value: str) -> int:
            found = re.match("-?[0-9]+", value)
            return int(found.group()) if found else 0

        return {"value": str(number(aggregate["value"]) + sign * number(row["value"]))}

    return added
