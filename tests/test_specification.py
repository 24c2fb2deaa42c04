"""The specification of each operator: what a commit stores of it, and which changes need no replay."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import partial
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from vt_dagster import (
    HoppingWindow,
    SessionWindow,
    SlidingWindow,
    Stream,
    Table,
    TumblingWindow,
    VersionedTable,
)
from vt_dagster.errors import TopologyError
from vt_dagster.provenance.explain import KINDS
from vt_dagster.storage.commit_log import Shape
from vt_dagster.storage.schema_evolution import shape_of
from vt_dagster.topology.durations import iso8601
from vt_dagster.topology.operators import Aggregator, UntilTimeLimit, UntilWindowCloses
from vt_dagster.topology.specification import (
    ColumnSpec,
    OperatorSpec,
    StreamStreamJoinSpec,
    SuppressSpec,
)

HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def columns(*names: str) -> StructType:
    kinds = {"n": LongType(), "m": LongType(), "at": TimestampType()}
    return StructType([StructField(name, kinds.get(name, StringType())) for name in names])


def stream(name: str = "orders", *more: str, **about: Any) -> Stream:
    return Stream(name, key="k", schema=columns("k", "n", *more, "at"), timestamp="at", **about)


def table(name: str = "limits", *more: str) -> Table:
    return Table(name, key="k", schema=columns("k", "n", *more, "at"), timestamp="at")


def prices(name: str = "prices", kept: Any = DAY) -> VersionedTable:
    schema = columns("k", "m", "at")
    return VersionedTable(name, key="k", schema=schema, timestamp="at", history_retention=kept)


def added(row: dict[str, Any], total: dict[str, Any]) -> dict[str, Any]:
    return {"n": total["n"] + row["n"]}


def removed(row: dict[str, Any], total: dict[str, Any]) -> dict[str, Any]:
    return {"n": total["n"] - row["n"]}


def every_operator() -> dict[str, Any]:
    """A node of each operator, and of some operators further nodes with other options."""
    orders, paid, limits, rates = stream(), stream("paid"), table(), prices()
    windows = [
        TumblingWindow(HOUR, HOUR),
        HoppingWindow(HOUR, HOUR / 2),
        SessionWindow(HOUR, retention=DAY),
        SlidingWindow(HOUR),
    ]
    counted = {
        type(one).__name__: orders.group_by("n as m")
        .windowed_by(one)
        .aggregate({"rows": "count(*)"}, name="counted")
        for one in windows
    }
    local = TumblingWindow("1 day", HOUR, zone="Europe/Berlin")
    counted["CalendarWindow"] = orders.group_by("n as m").windowed_by(local).count(name="counted")
    summed = Aggregator(added, removed, initializer=dict, schema=columns("n"))
    by_n = limits.group_by("n as number")
    return {
        **counted,
        "filter": limits.filter("n > 1", name="x"),
        "filter_not": limits.filter_not("n > 1", name="x"),
        "map_values": limits.map_values("*", "n + 1 as m", name="x"),
        "flat_map_values": orders.flat_map_values("split(k, '-')", column="part", name="x", keep=["n"]),
        "select_key": orders.select_key("n", "concat(k, '-') as id", name="x", partitions=3),
        "merge": orders.merge(paid, name="x"),
        "to_table": orders.to_table(name="x"),
        "to_stream": limits.to_stream(name="x"),
        "join": orders.left_join(rates, name="x", grace_period=HOUR, select=["left.*", "right.m"]),
        "as known": orders.join(rates, name="x", as_known=HOUR, max_age=DAY, at="before"),
        "ahead": orders.join(rates, name="x", at="nearest", max_age=HOUR, grace_period=HOUR),
        "first": orders.join(rates, name="x", before_first="first_version"),
        "corrected": orders.left_join(rates, name="x", select=["right.m"], corrected_for=HOUR),
        "corrected ahead": orders.left_join(
            rates, name="x", at="after", max_age=HOUR, corrected_for=DAY, select=["right.m"]
        ),
        "tables": limits.join(table("others", "o"), name="x", select=["left.*", "right.o as p"]),
        "foreign key": limits.join(rates, foreign_key="k", name="x", select=["left.*", "right.m"]),
        "history": rates.join(prices("costs"), name="x", select=["left.*"], history="complete"),
        "streams": orders.outer_join(paid, name="x", within=HOUR, before=-HOUR / 2, select=["left.n"]),
        "corrected streams": orders.left_join(
            paid, name="x", within=HOUR, grace=HOUR, corrected_for=DAY, select=["left.n"]
        ),
        "aggregate": orders.group_by().aggregate({"total": "sum(n)"}, name="x"),
        "of a table": by_n.aggregate({"rows": "count(*)"}, name="x"),
        "by functions": by_n.aggregate(summed, name="x", select=["n"]),
        "suppress": limits.suppress(UntilTimeLimit(HOUR, max_records=3), name="x"),
        "suppress windows": counted["TumblingWindow"].suppress(UntilWindowCloses(), name="x"),
    }


NODES = every_operator()
KINDS_OF_SPEC = get_args(get_args(OperatorSpec)[0])


def test_every_operator_has_specification_and_explanation() -> None:
    assert {type(node.operator.specification) for node in NODES.values()} == {*KINDS_OF_SPEC}
    assert {*KINDS} == {*KINDS_OF_SPEC}


@pytest.mark.parametrize("case", NODES)
def test_commit_stores_specification(case: str) -> None:
    shape = shape_of(NODES[case])
    stored = json.loads(json.dumps(shape.model_dump()))
    assert Shape.model_validate(stored) == shape
    assert stored["specification"] == shape.model_dump(mode="json")["specification"]
    assert NODES[case].changed_definition(Shape.model_validate(stored).specification) == []


def test_missing_setting_in_old_commit_has_default() -> None:
    """Commits of joins from before ``before_first`` existed lack it. Then its default counts."""
    stored = json.loads(shape_of(NODES["join"]).model_dump_json())
    del stored["specification"]["before_first"]
    assert NODES["join"].changed_definition(Shape.model_validate(stored).specification) == []


def test_stored_specification() -> None:
    said = json.loads(shape_of(NODES["join"]).model_dump_json())["specification"]
    assert said == {
        "operator": "stream_table_join",
        "left": "orders",
        "right": "prices",
        "kind": "left",
        "select": [["*", "left.*"], ["m", "right.m"]],
        "grace_period": "PT1H",
        "as_known": "now",
        "max_age": None,
        "at": "at_or_before",
        "before_first": None,
    }
    window = json.loads(shape_of(NODES["HoppingWindow"]).model_dump_json())["specification"]
    assert window["group_key"] == [["m", "n"]]
    assert window["aggregates"] == [["rows", "count(*)"]]
    assert window["window"] == {
        "kind": "hopping",
        "size": "PT1H",
        "advance": "PT30M",
        "grace": "PT0S",
        "retention": None,
    }
    window = json.loads(shape_of(NODES["CalendarWindow"]).model_dump_json())["specification"]["window"]
    assert window == {
        "kind": "calendar",
        "size": "1 day",
        "zone": "Europe/Berlin",
        "grace": "PT1H",
        "retention": None,
    }
    window = json.loads(shape_of(NODES["TumblingWindow"]).model_dump_json())["specification"]["window"]
    assert window == {"kind": "tumbling", "size": "PT1H", "grace": "PT1H", "retention": None}
    functions = NODES["by functions"].operator.specification.aggregates
    assert (functions.adder, functions.initializer) == ("added", "dict")


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (timedelta(0), "PT0S"),
        (timedelta(microseconds=1), "PT0.000001S"),
        (timedelta(days=400, hours=2, seconds=30, microseconds=500_000), "P400DT2H30.5S"),
        (timedelta(minutes=10, seconds=20), "PT10M20S"),
        (-timedelta(minutes=1), "-PT1M"),
        (timedelta(days=50_000_000), "P50000000D"),
    ],
)
def test_durations_as_iso_8601(length: timedelta, text: str) -> None:
    assert iso8601(length) == text
    assert TypeAdapter(timedelta).validate_python(text) == length


def test_lengths_per_partition() -> None:
    about = {"left": "a", "right": "b", "kind": "inner", "select": (), "after": HOUR}
    join = StreamStreamJoinSpec(**about, before={0: HOUR, 1: -HOUR})
    assert json.loads(join.model_dump_json())["before"] == {"0": "PT1H", "1": "-PT1H"}
    assert StreamStreamJoinSpec.model_validate_json(join.model_dump_json()) == join
    other = StreamStreamJoinSpec(**about, before={0: HOUR, 1: DAY})
    assert [*other.changes(join, [], {})] == [
        "before was 1 hour in partition 0, minus 1 hour in partition 1, is 1 hour in partition 0, "
        "1 day in partition 1"
    ]
    windows = [TumblingWindow({0: HOUR, 1: length}) for length in (HOUR, DAY)]
    one, two = (counted(window).operator.specification for window in windows)
    assert [*two.changes(one, [], {})] == [
        "window was tumbling windows of 1 hour in partition 0, 1 hour in partition 1, "
        "is tumbling windows of 1 hour in partition 0, 1 day in partition 1"
    ]
    kept = [shape_of(prices(kept={0: HOUR, 1: length})) for length in (HOUR, DAY)]
    assert kept[1].changed_settings(kept[0]) == [
        "history_retention was 1 hour in partition 0, 1 hour in partition 1, "
        "is 1 hour in partition 0, 1 day in partition 1"
    ]


def counted(window: Any, what: str = "count(*)", by: str = "k", name: str = "x", **more: Any) -> Any:
    return stream().group_by(by).windowed_by(window).aggregate({"rows": what}, name=name, **more)


CHANGES: dict[str, tuple[Any, Any, list[str]]] = {
    "another operator": (
        table().filter("n > 1", name="x"),
        table().map_values("n", name="x"),
        ["operator was 'filter', is 'map_values'"],
    ),
    "condition": (
        table().filter("n > 1", name="x"),
        table().filter_not("n > 2", name="x"),
        ["predicate was 'n > 1', is 'n > 2'", "negate was False, is True"],
    ),
    "spaces in a text": (
        table().filter("k = 'New  York'", name="x"),
        table().filter("k = 'New York'", name="x"),
        ["predicate was \"k = 'New  York'\", is \"k = 'New York'\""],
    ),
    "spaces in a text of double quotes": (
        table().filter(r'k = "\"  a"', name="x"),
        table().filter(r'k = "\" a"', name="x"),
        [r"""predicate was 'k = "\\"  a"', is 'k = "\\" a"'"""],
    ),
    "end of a comment": (
        table().filter("n > 1 -- at least\n + 1", name="x"),
        table().filter("n > 1 -- at least + 1", name="x"),
        [r"predicate was 'n > 1 -- at least\n + 1', is 'n > 1 -- at least + 1'"],
    ),
    "columns": (
        stream().join(prices(), name="x", select=["left.*"]),
        stream().join(prices(), name="x", select=["left.*", "right.m as price"], max_age=HOUR),
        [
            "select was 'left.*', is 'left.*, right.m as price'",
            "max_age was None, is 1 hour",
        ],
    ),
    "input": (
        stream().to_table(name="x"),
        stream("paid").to_table(name="x"),
        ["source was 'orders', is 'paid'"],
    ),
    "window": (
        counted(TumblingWindow(HOUR)),
        counted(TumblingWindow(DAY), "sum(n)", "n"),
        [
            "group_key was 'k', is 'n'",
            "aggregates was 'count(*) as rows', is 'sum(n) as rows'",
            "window was tumbling windows of 1 hour, is tumbling windows of 1 day",
        ],
    ),
    "kind of window": (
        counted(TumblingWindow(HOUR)),
        counted(SessionWindow(HOUR)),
        ["window was tumbling windows of 1 hour, is sessions with a gap of 1 hour"],
    ),
    "zone": (
        counted(TumblingWindow("1 day", zone="Europe/Berlin")),
        counted(TumblingWindow("1 day", zone="Europe/Paris")),
        [
            "window was tumbling windows of 1 day in Europe/Berlin, "
            "is tumbling windows of 1 day in Europe/Paris"
        ],
    ),
    "end of suppress": (
        counted(TumblingWindow(HOUR), name="rows").suppress(UntilTimeLimit(HOUR), name="x"),
        counted(TumblingWindow(HOUR), name="rows").suppress(UntilWindowCloses(), name="x"),
        ["until was a time limit, is the close of a window"],
    ),
    "length and calendar": (
        counted(TumblingWindow(DAY)),
        counted(TumblingWindow("1 day", zone="UTC")),
        ["window was tumbling windows of 1 day, is tumbling windows of 1 day in UTC"],
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changed_definition_is_described(case: str) -> None:
    before, after, told = CHANGES[case]
    assert after.changed_definition(before.operator.specification) == told
    assert shape_of(before).definition() != shape_of(after).definition()


GOES_ON: dict[str, tuple[Any, Any]] = {
    "grace of a join": (
        stream().join(prices(), name="x"),
        stream().join(prices(), name="x", grace_period=HOUR, description="Waits.", owners=["a@b.c"]),
    ),
    "grace and retention of windows": (
        counted(TumblingWindow(HOUR)),
        counted(TumblingWindow(HOUR, HOUR, DAY), emit="per_run"),
    ),
    "grace and retention of a calendar": (
        counted(TumblingWindow("1 month", zone="UTC")),
        counted(TumblingWindow("1 month", HOUR, 40 * DAY, zone="UTC")),
    ),
    "grace of streams": (
        stream().join(stream("paid"), name="x", within=HOUR),
        stream().join(stream("paid"), name="x", within=HOUR, grace=HOUR),
    ),
    "corrections": (
        stream().join(prices(), name="x", select=["right.m"], corrected_for=HOUR),
        stream().join(prices(), name="x", select=["right.m"], corrected_for=DAY),
    ),
    "suppress": (
        table().suppress(UntilTimeLimit(HOUR), name="x"),
        table().suppress(UntilTimeLimit(DAY, max_records=3), name="x"),
    ),
    "whitespace": (
        table().filter("n  >\n 1", name="x"),
        table().filter("n > 1", name="x"),
    ),
    "spaces around a symbol, and comments": (
        table().filter("n>1", name="x"),
        table().filter("n > /* more than */ 1 -- 'one", name="x"),
    ),
    "quotes of a column": (
        table().map_values("`n`", name="x"),
        table().map_values("n", name="x"),
    ),
    "a function of another process": (
        table().group_by("n").aggregate(Aggregator(partial(added), partial(removed)), name="x"),
        table().group_by("n").aggregate(Aggregator(partial(added), partial(removed)), name="x"),
    ),
}


@pytest.mark.parametrize("case", GOES_ON)
def test_changes_without_replay(case: str) -> None:
    before, after = GOES_ON[case]
    assert after.changed_definition(before.operator.specification) == []
    assert "0x" not in after.operator.specification.model_dump_json(), "an address in a process"


def test_columns_copied_from_side() -> None:
    """``right.*`` omits the columns that the left side has."""
    select = ["left.*", "right.*", "left.n as mine", "right.`m`", "right.m + 1 as next"]
    join = stream().join(stream("paid", "m"), name="x", within=HOUR, select=select[:3])
    assert join.operator is not None
    found = join.operator.specification.copied(["k", "n", "at"], ["k", "n", "m", "at"])
    assert found == [
        *[(c, "left", c) for c in ("k", "n", "at")],
        ("m", "right", "m"),
        ("mine", "left", "n"),
    ]
    join = stream().join(stream("paid", "m"), name="x", within=HOUR, select=select[3:])
    assert join.operator is not None
    assert join.operator.specification.copied(["k", "n"], ["k", "m"]) == [("m", "right", "m")]
    assert join.operator.specification.select[1] == ColumnSpec("next", "right.m + 1")


def test_lateness_option_per_operator() -> None:
    found = {case: node.operator.specification for case, node in NODES.items()}
    known = {case for case, one in found.items() if one.lateness_option is not None}
    assert known == {
        *("join", "as known", "ahead", "first"),
        *("TumblingWindow", "HoppingWindow", "SessionWindow", "SlidingWindow", "CalendarWindow"),
    }
    unsupported = {case: one.lateness_unsupported for case, one in found.items()}
    assert {case: one.settings for case, one in unsupported.items() if one is not None} == {
        "as known": ("as_known",),
        "ahead": ("grace_period", "max_age"),
        "first": ("grace_period", "before_first"),
        **dict.fromkeys(("corrected", "corrected ahead"), ("corrected_for", "grace_period")),
        "corrected streams": ("corrected_for", "grace"),
        "SessionWindow": ("window.grace",),
        "SlidingWindow": ("window.grace",),
    }
    assert tuple(found["join"].lateness_option) == ("grace_period", HOUR)


def test_until_window_closes_differs_from_time_limit() -> None:
    """A windowed table accepts both kinds of ``until``, and the specification says which it has."""
    kinds = list[str]()
    for until in (UntilTimeLimit(HOUR), UntilWindowCloses()):
        made = counted(TumblingWindow(HOUR)).suppress(until, name="final").operator.specification
        assert isinstance(made, SuppressSpec)
        kinds.append(made.until.kind)
    assert kinds == ["time_limit", "window_closes"]


def test_unknown_entry_is_refused() -> None:
    said = NODES["filter"].operator.specification.model_dump()
    with pytest.raises(ValueError, match="nothing"):
        Shape.model_validate({"kind": "table", "key": ["k"], "specification": {**said, "nothing": 1}})
    with pytest.raises(TopologyError, match="SQL condition"):
        table().filter(" ", name="x")
