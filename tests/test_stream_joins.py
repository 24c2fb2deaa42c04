"""Joins of two streams: refused declarations, descriptions for users, and runs of real assets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from tests.asset_scenarios import ThroughAssets
from vt_dagster import Stream, Table, TopologyError
from vt_dagster.components.topology_component import CONCEPTS
from vt_dagster.conformance.scenario import read_scenarios
from vt_dagster.errors import StorageError
from vt_dagster.runs.run import run_once
from vt_dagster.storage.asset_store import stores_of
from vt_dagster.testing import TopologyTestDriver

pytestmark = pytest.mark.usefixtures("few_rows")

SCENARIOS = Path(__file__).parent / "conformance" / "streams"
HOUR, MS = timedelta(hours=1), timedelta(milliseconds=1)


def columns(key: str, value: str, kind: Any = None) -> StructType:
    return StructType(
        [
            StructField(key, kind or StringType()),
            StructField(value, LongType()),
            StructField("timestamp", TimestampType()),
        ]
    )


def orders(**more: Any) -> Stream:
    about = {"key": "k", "schema": columns("k", "n"), "tombstone": "n is null", "null_key": "keep"}
    return Stream("orders", **{**about, **more})


def payments(**more: Any) -> Stream:
    about = {"key": "of", "schema": columns("of", "amount"), "null_key": "keep"}
    return Stream("payments", **{**about, **more})


def rates() -> Table:
    return Table("rates", key="k", schema=columns("k", "rate"))


REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "no window": (
        lambda: orders().join(payments(), name="x"),
        ["x", "needs a time window, got none", "within="],
    ),
    "a window that ends before it starts": (
        lambda: orders().left_join(payments(), name="x", before=MS, after=-2 * MS),
        ["x", "before + after of 0 or more", "lengthen before or after"],
    ),
    "a negative grace": (
        lambda: orders().join(payments(), name="x", within=HOUR, grace=-MS),
        ["x", "grace must be between 0"],
    ),
    "no duration": (
        lambda: orders().join(payments(), name="x", within=5),  # type: ignore[arg-type]
        ["x", "before must be a datetime.timedelta, got 5"],
    ),
    "a grace period for a stream": (
        lambda: orders().left_join(payments(), name="x", within=HOUR, grace_period=HOUR),  # type: ignore[call-overload]
        ["x", "grace_period is only", "'payments' is a stream: remove it", "set grace"],
    ),
    "a window for a table": (
        lambda: orders().join(rates(), name="x", within=HOUR, grace=HOUR),  # type: ignore[call-overload]
        ["x", "within and grace", "'rates' is a Table", "remove it"],
    ),
    "an outer join with a table": (
        lambda: orders().outer_join(rates(), name="x"),
        ["x", "a stream-table join is one of inner, left, got 'outer'"],
    ),
    "a table with a stream": (
        lambda: rates().outer_join(orders(), name="x"),  # type: ignore[arg-type]
        ["x", "the right side of a table-table join", "the Stream 'orders'"],
    ),
    "neither": (
        lambda: orders().join("payments", name="x"),  # type: ignore[call-overload]
        ["x", "a stream or a table to join 'orders' with, got 'payments'"],
    ),
    "keys of other types": (
        lambda: orders().join(
            payments(schema=columns("of", "amount", LongType())), name="x", within=HOUR
        ),
        ["x", "the same types", "k string", "of bigint"],
    ),
    "nothing to take back": (
        lambda: orders().join(payments(), name="x", within=HOUR, corrected_for=HOUR),  # type: ignore[call-overload]
        ["x", "an inner join of streams has none", "left_join or outer_join"],
    ),
    "a promise within the grace period": (
        lambda: orders().left_join(
            payments(), name="x", within=HOUR, grace=HOUR, corrected_for=HOUR / 2
        ),
        [
            "x",
            "corrected_for of at least the grace period 1:00:00",
            "got 0:30:00",
            "lengthen corrected_for",
        ],
    ),
    "a key of a corrected join of streams": (
        lambda: orders().left_join(payments(), name="x", within=HOUR, corrected_for=HOUR, key="k"),  # type: ignore[call-overload]
        ["x", "'payments' is a stream", "remove key="],
    ),
    "a name that corrections have": (
        lambda: orders().left_join(
            payments(), name="x", within=HOUR, corrected_for=HOUR, select=["left.n as cause"]
        ),
        ["x", "no selected columns named ['cause']", "'left.cause as own_cause'"],
    ),
    "a name that reads of corrections add": (
        lambda: orders().left_join(
            payments(), name="x", within=HOUR, corrected_for=HOUR, select=["left.n as is_final"]
        ),
        ["x", "no selected columns named ['is_final']"],
    ),
    "an unknown column": (
        lambda: orders().join(payments(), name="x", within=HOUR, select=["right.total"]),
        ["x", "'payments' has no column 'total'"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_when_declared(case: str) -> None:
    make, said = REFUSED[case]
    with pytest.raises(TopologyError) as caught:
        make()
    assert [words for words in said if words not in str(caught.value)] == []


def test_before_and_after_bounds() -> None:
    both = orders().join(payments(), name="x", within=HOUR, before=-MS, grace=MS).operator
    one = orders().left_join(payments(), name="x", after=HOUR).operator
    assert both is not None
    assert one is not None
    assert both.settings == {"before": "minus 1 ms", "after": "1 hour", "grace": "1 ms"}
    assert one.settings == {"before": "0 seconds", "after": "1 hour", "grace": "0 seconds"}
    assert "from minus 1 ms before it to 1 hour after it; late after 1 ms" in both.describe()
    changes = [*both.specification.changes(one.specification, [], {})]
    assert changes == ["kind was 'left', is 'inner'", "before was 0 seconds, is minus 1 ms"]


def test_stream_join_in_yaml() -> None:
    concept = CONCEPTS["outer_join"]
    given = {"left": "orders", "right": "payments", "before": "-5m", "after": "1h30m", "grace": "10m"}
    part = concept.yaml(**given)
    values = {n: v for n, v in part.values().items() if n not in concept.inputs}
    made = concept.make("x", values, {"left": orders(), "right": payments()}, {"group": "g"})
    said = orders().outer_join(
        payments(), name="x", before=-5 * 60_000 * MS, after=1.5 * HOUR, grace=HOUR / 6, group="g"
    )
    assert made == said
    longer = {**values, "corrected_for": HOUR}
    amended = concept.make("x", longer, {"left": orders(), "right": payments()}, {})
    assert amended.is_table
    with pytest.raises(TopologyError, match="outer_join of a Table, here 'rates', has no before"):
        concept.make("x", values, {"left": rates(), "right": rates()}, {})


@pytest.mark.endurance  # also in the worked scenarios, and at random in core/test_stream_stream_join.py
def test_outer_join_over_several_runs(spark: SparkSession) -> None:
    select = ["left.n", "right.amount", "right.timestamp as paid_at"]
    joined = orders().outer_join(payments(), name="x", within=10 * MS, grace=5 * MS, select=select)
    assert (joined.key, joined.schema["n"].nullable) == (("k",), True)
    driver = TopologyTestDriver(joined, spark=spark)

    def pipe(*rows: tuple[str, str | None, int | None, int]) -> list[tuple[Any, ...]]:
        inputs: dict[str, list[dict[str, Any]]] = {"orders": [], "payments": []}
        for side, key, value, at in rows:
            named = ("k", "n") if side == "orders" else ("of", "amount")
            inputs[side].append({**dict(zip(named, (key, value), strict=True)), "timestamp": at})
        driver.run(inputs)
        return [
            (r["k"], r["n"], r["amount"], r["timestamp"].microsecond // 1000, r["is_late"])
            for r in driver.read("x")
        ]

    assert pipe(("orders", "a", 1, 10), ("orders", None, 2, 11), ("orders", "b", None, 12)) == [
        (None, 2, None, 11, False)
    ]
    # Only the right side has new records: the waiting left records are read from the log.
    assert pipe(("payments", "a", 100, 15), ("payments", "c", 300, 16)) == [("a", 1, 100, 15, False)]
    assert [(r["k"], r["side"]) for r in driver.waiting("x")] == [("c", "right")]
    assert driver.metrics("x") == {"applied": 2, "dropped": 1, "waiting": 1}
    # The window of c ends after 26, its grace period after 31.
    assert pipe(("orders", "z", 7, 31), ("payments", "z", 700, 32)) == [
        ("c", None, 300, 16, False),
        ("z", 7, 700, 32, False),
    ]
    # Late records join at once with payments that are still kept.
    assert pipe(("orders", "c", 3, 12), ("orders", "a", 4, 9)) == [
        ("c", 3, 300, 16, True),
        ("a", 4, 100, 15, True),
    ]
    assert driver.metrics("x") == {"applied": 6, "late": 2, "dropped": 1, "waiting": 0}


@pytest.mark.parametrize("corrected", [False, True])
def test_waiting_late_record_has_late_result(spark: SparkSession, corrected: bool) -> None:
    """The result of a late record that waits is late, however records are split into runs. With ``cut``
    2 the last record, which ends the wait, comes in a separate run."""
    about: Any = {"corrected_for": 1 * MS} if corrected else {"grace": 1 * MS}
    joined = orders().left_join(payments(), name="x", after=10 * MS, select=["left.n"], **about)
    records = [
        {"k": k, "n": n, "timestamp": at} for k, n, at in (("a", 1, 8), ("b", 2, 3), ("c", 3, 30))
    ]
    found: list[list[tuple[int, bool]]] = []
    for cut in (3, 2):
        driver = TopologyTestDriver(joined, spark=spark)
        for some in (records[:cut], records[cut:]):
            driver.pipe("orders", *some)
        found.append(sorted((r["n"], r["is_late"]) for r in driver.read("x") if r["n"] < 3))
    assert found == [[(1, False), (2, True)]] * 2


@pytest.mark.parametrize("corrected", [False, True])
def test_waiting_record_is_no_row_yet(spark: SparkSession, corrected: bool) -> None:
    """The expressions of a join are for its rows. A record that waits for its match has none."""
    about: Any = {"corrected_for": 1 * MS} if corrected else {"grace": 1 * MS}
    amount = "if(right.amount is null, raise_error('alone'), right.amount) as amount"
    joined = orders().left_join(payments(), name="x", after=10 * MS, select=["left.n", amount], **about)
    driver = TopologyTestDriver(joined, spark=spark)
    driver.pipe("orders", {"k": "a", "n": 1, "timestamp": 5})
    assert [(r["k"], r["side"]) for r in driver.waiting("x")] == [("a", "left")]
    driver.pipe("payments", {"of": "a", "amount": 7, "timestamp": 6})
    assert [(r["n"], r["amount"]) for r in driver.read("x")] == [(1, 7)]


def test_late_match_retracts_unmatched_row(spark: SparkSession) -> None:
    """A late match retracts the row without a match. A downstream table takes it out of its sums."""
    select = ["left.n", "right.amount", "coalesce(right.amount, 0) as paid"]
    rows = orders().left_join(
        payments(), name="x", after=10 * MS, grace=5 * MS, corrected_for=50 * MS, select=select
    )
    assert rows.key == ("left_partition", "left_offset", "right_partition", "right_offset")
    assert rows.operator is not None
    assert "is retracted by a match within 50 ms of stream time" in rows.operator.describe()
    sums = rows.group_by("k").aggregate({"rows": "count(*)", "paid": "sum(paid)"}, name="sums")
    driver = TopologyTestDriver(sums, spark=spark)
    for some in ([("a", 1, 0), ("b", 2, 1)], [("c", 3, 40)]):
        driver.pipe("orders", *({"k": k, "n": n, "timestamp": at} for k, n, at in some))
    assert [(r["k"], r["amount"], r["revision"]) for r in driver.read("x")] == [
        ("a", None, 0),
        ("b", None, 0),
    ]
    # Two payments match order a: the first one retracts the row. The payment for b comes too late.
    paid = [("a", 7, 3), ("a", 8, 2), ("c", 9, 100), ("b", 5, 4)]
    driver.pipe("payments", *({"of": k, "amount": n, "timestamp": at} for k, n, at in paid))
    told = driver.read("x")
    (gone,) = [r for r in told if r["is_tombstone"]]
    new = [r for r in told if not r["is_tombstone"]]
    assert (gone["is_tombstone"], gone["revision"], gone["old"]["n"], gone["n"]) == (True, 1, 1, None)
    assert gone["cause"] == {"table": "payments", "partition": 0, "offset": 0}
    assert [(r["k"], r["amount"], r["revision"], r["is_late"]) for r in new] == [
        ("a", 7, 0, False),
        ("a", 8, 0, False),
        ("c", None, 0, False),
    ]
    assert [(r["k"], r["rows"], r["paid"]) for r in driver.table("sums")] == [
        ("a", 2, 15),
        ("b", 1, 0),
        ("c", 1, 0),
    ]
    assert [(r["k"], r["is_final"]) for r in driver.table("x")] == [
        ("a", True),
        ("a", True),
        ("b", True),
        ("c", False),
    ]
    head = driver._stores["x"].head()  # pyright: ignore[reportPrivateUsage]
    assert head is not None
    assert {n: head.commit.counts[n] for n in ("corrected", "late", "unmatched", "waiting")} == {
        "corrected": 1,
        "late": 1,
        "unmatched": 1,
        "waiting": 0,
    }


def test_stream_self_join(spark: SparkSession) -> None:
    near = orders().left_join(
        orders(), name="near", before=-1 * MS, after=5 * MS, select=["left.n", "right.n as next"]
    )
    driver = TopologyTestDriver(near, spark=spark)
    for some in ([("a", 1, 10), ("a", 2, 12)], [("a", 3, 14), ("a", 4, 40)]):
        driver.pipe("orders", *({"k": k, "n": n, "timestamp": at} for k, n, at in some))
    found = [(r["n"], r["next"]) for r in driver.read("near")]
    assert sorted(found, key=str) == [(1, 2), (1, 3), (2, 3), (3, None)]


@pytest.mark.endurance  # test_explain_operators.py runs one; test_before_and_after_bounds: definitions
def test_left_and_outer_joins_as_assets(spark: SparkSession, tmp_path: Path) -> None:
    """Left and outer joins over a few runs. Each run makes a separate commit."""
    scenarios = read_scenarios([SCENARIOS / "worked.json"])
    names = ("stream-join-unmatched-late-is-immediate", "stream-join-dropped-records-move-time")
    through = ThroughAssets([s for s in scenarios if s.name in names], tmp_path, spark)
    through.run()
    assert through.differences(True) == {name: [] for name in names}
    node = through.node(through.layouts[0], "result")
    commit = through.warehouse.commit(node.name)
    assert commit is not None
    assert set(commit.watermarks) == {"left", "right", "look", "open"}
    assert node.operator is not None
    wider = replace(node, operator=replace(node.operator, before=HOUR))
    with pytest.raises(StorageError, match=r"before was .*, is 1 hour\. .* rebuild it .*replay"):
        run_once(wider, stores_of(str(tmp_path / "warehouse"), spark))
