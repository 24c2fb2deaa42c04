"""Scenarios of stream operators (FORMAT.md, "Streams") as steps, and the node of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from vt_dagster.topology.durations import Duration

Config = Mapping[str, Any]
OPS = ("merge", "select_key", "flat_map_values", "count", "stream_join")


def _side(side: str) -> str:
    return f"coalesce(cast({side}.value as string), 'null')"


JOINED = f"cast(concat('(', {_side('left')}, ',', {_side('right')}, ')') as string) as value"
"""The value of a join's result."""


def steps_of(operator: str, config: Config) -> Iterator[Config]:
    """The steps of a chain that does what an operator does."""
    op = operator.removeprefix("stream_")
    two = op in ("merge", "stream_join")
    inputs = ("left", "right") if two else ("stream",)
    for name in inputs:
        yield {"id": name, "op": "stream", "input": name}
    sources = {"left": "left", "right": "right"} if two else {"from": "stream"}
    yield {"id": "result", "op": op, **config, **sources}
    if config.get("then") == "count":
        yield {"id": "count", "op": "count", "from": "result", "materialize": {"versioned": False}}


def kind_of(step: Config) -> tuple[Any, ...]:
    """What makes a step another node than a step of the same ``op``."""
    if step["op"] == "select_key":
        return (step["key_from"].split(":")[0],)
    if step["op"] == "stream_join":
        return (step["kind"],)
    return (step["null_value"],) if step["op"] == "flat_map_values" else ()


def node_of(
    step: Config,
    name: str,
    inputs: tuple[Any, ...],
    scenarios: Iterable[int],
    by_scenario: Callable[[Callable[[Config], str]], str],
    lengths: Callable[[Callable[[Config], int]], Duration],
) -> Any:
    """Makes the node of a step.

    Args:
        scenarios: those that have it; records of others come along, and must not be refused.
        by_scenario: SQL for the text that each scenario has.
        lengths: a length in milliseconds of each scenario.
    """
    if step["op"] == "stream_join":
        kind = {"inner": "join", "left": "left_join", "outer": "outer_join"}[step["kind"]]
        return getattr(inputs[0], kind)(
            inputs[1],
            name=name,
            select=(JOINED,),
            before=lengths(lambda s: s["before"]),
            after=lengths(lambda s: s["after"]),
            grace=lengths(lambda s: s["grace"]),
        )
    if step["op"] == "merge":
        return inputs[0].merge(inputs[1], name=name)
    if step["op"] == "count":
        return inputs[0].group_by().count(name=name, column="value")
    if step["op"] == "select_key":
        key = _key(step["key_from"].split(":")[0], by_scenario)
        return inputs[0].select_key(
            "scenario", f"cast({key} as string) as key", name=name, partition_by="scenario"
        )
    separator = by_scenario(lambda s: s["separator"])
    pieces = f"split(value, concat('\\\\Q', {separator}, '\\\\E'))"
    of_null = {"none": "array()", "one_null": "array(null)", "no_list": "null"}[step["null_value"]]
    expression = (
        f"case when scenario not in ({', '.join(map(str, scenarios))}) "
        "then cast(array() as array<string>) "
        f"when value is null then cast({of_null} as array<string>) "
        "when value = '' then cast(array() as array<string>) "
        f"else transform({pieces}, p -> if(p = '~', null, p)) end"
    )
    return inputs[0].flat_map_values(expression, column="value", name=name)


def _key(how: str, by_scenario: Callable[[Callable[[Config], str]], str]) -> str:
    if how == "characters":
        count = f"cast({by_scenario(lambda s: s['key_from'].split(':')[1])} as int)"
        return f"case when length(value) >= {count} then substring(value, 1, {count}) end"
    bar = "instr(value, '|')"
    head = f"case when {bar} > 0 then substring(value, 1, {bar} - 1) end"
    return {"head": head, "value": "value", "upper_key": "upper(key)"}[how]
