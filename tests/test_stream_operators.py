"""``merge``, ``select_key``, ``flat_map_values`` and aggregates of streams without windows."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    DecimalType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from vt_dagster import (
    Materialized,
    SessionWindow,
    SlidingWindow,
    Stream,
    Table,
    TopologyError,
    TumblingWindow,
    VersionedTable,
)
from vt_dagster.errors import ContractError, NullArrayError
from vt_dagster.runs.pin import sum_too_large
from vt_dagster.testing import TopologyTestDriver
from vt_dagster.topology.windows import Window

SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("g", StringType()),
        StructField("n", LongType()),
        StructField("timestamp", TimestampType()),
    ]
)
OTHER = StructType([SCHEMA["k"], SCHEMA["g"], SCHEMA["timestamp"], StructField("n", StringType())])
ABOUT: dict[str, Any] = {"key": "k", "schema": SCHEMA, "tombstone": "n is null"}


def stream(name: str = "sales", **more: Any) -> Stream:
    return Stream(name, **{**ABOUT, "null_key": "keep", **more})


def row(k: str | None, g: str | None, n: int | None, at: int, **more: Any) -> dict[str, Any]:
    return {"k": k, "g": g, "n": n, "timestamp": at, **more}


def as_tuples(rows: list[dict[str, Any]], *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(r[c] for c in columns) for r in rows]


REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "merge with a table": (
        lambda: stream().merge(Table("rates", **ABOUT), name="all"),  # type: ignore[arg-type]
        ["all", "Table 'rates'", "to_stream"],
    ),
    "merge alone": (lambda: stream().merge(name="all"), ["all", "two streams or more"]),
    "merge with other columns": (
        lambda: stream().merge(stream("other", schema=OTHER), name="all"),
        ["all", "the same columns", "'other'"],
    ),
    "merge with another key": (
        lambda: stream().merge(stream("other", key="g"), name="all"),
        ["all", "keyed by ['k']", "keyed by ['g']"],
    ),
    "select no key": (lambda: stream().select_key(name="by"), ["by", "the new key, got none"]),
    "select a key that is not there": (
        lambda: stream().select_key("region", name="by"),
        ["by", "'sales' has no column 'region'"],
    ),
    "select a timestamp of one's own": (
        lambda: stream().select_key("now() as timestamp", name="by"),
        ["by", "'timestamp'", "the name of the record's own time", "rename"],
    ),
    "elements under a name that is taken": (
        lambda: stream().flat_map_values("array(n)", column="k", name="each"),
        ["each", "'k'", "choose another name"],
    ),
    "no array": (
        lambda: stream().flat_map_values("n", column="x", name="each"),
        ["each", "an expression of type array", "bigint"],
    ),
    "an aggregate that is none": (
        lambda: stream().group_by().aggregate({"half": "median(n)"}, name="totals"),
        ["totals", "median"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_when_declared(case: str) -> None:
    make, said = REFUSED[case]
    with pytest.raises(TopologyError) as caught:
        make()
    assert [words for words in said if words not in str(caught.value)] == []


def test_merge_of_streams_and_with_itself(spark: SparkSession) -> None:
    sales, returns = stream(), stream("returns")
    everything = sales.merge(returns, name="everything")
    doubled = sales.merge(sales, name="doubled")
    driver = TopologyTestDriver(everything, doubled, spark=spark)
    driver.run(
        {
            "sales": [row("a", "x", 1, 10), row(None, "x", 2, 30)],
            "returns": [row("a", "y", None, 20), row("b", "y", 3, 5)],
        }
    )
    rows = driver.read("everything")
    # The stream whose next record is older goes first: the record at 5 waits behind the one at 20.
    assert as_tuples(rows, "k", "n", "is_tombstone") == [
        ("a", 1, False),
        ("a", None, True),
        ("b", 3, False),
        (None, 2, False),
    ]
    assert [r["offset"] for r in rows] == [0, 1, 2, 3]
    assert as_tuples(driver.read("doubled"), "k", "n") == [("a", 1), ("a", 1), (None, 2), (None, 2)]


def test_merge_of_derived_streams(spark: SparkSession) -> None:
    sales, returns = stream(), stream("returns")
    again = sales.merge(returns, sales, name="again")
    # A key whose type only Spark knows, and a log with an extra column of the join.
    upper = returns.select_key("upper(k) as k", name="upper")
    prices = VersionedTable("prices", history_retention=timedelta(hours=2), **ABOUT)
    joined = sales.left_join(
        prices, name="joined", select=["left.*"], grace_period=timedelta(milliseconds=1)
    )
    every = returns.merge(upper, joined, name="every")
    turned = upper.merge(returns, name="turned")
    assert [node.schema["k"].dataType for node in (every, turned)] == [StringType()] * 2
    driver = TopologyTestDriver(again, every, turned, spark=spark)
    driver.run(
        {
            "sales": [row("a", "x", 1, 5), row("b", "x", 2, 5)],
            "returns": [row("c", "y", 3, 5), row("d", "y", 4, 5)],
        }
    )
    # Next records with equal timestamps: the left stream's goes first, to both of its places.
    assert "".join(r["k"] for r in driver.read("again")) == "aabbcd"
    assert "".join(r["k"] for r in driver.read("every")) == "cdCD"
    driver.pipe("sales", row("e", "x", 5, 6))
    assert "".join(r["k"] for r in driver.read("every")) == "ab"
    assert "".join(r["k"] for r in driver.read("turned")) == "CDcd"


def test_select_key_repartitions_records(spark: SparkSession) -> None:
    keyed = stream(partitions=3).select_key(
        "upper(g) as shop", name="by_shop", partitions=2, partition_by="if(shop = 'X', 1, 0)"
    )
    assert (keyed.key, keyed.schema.names) == (("shop",), ["shop", "k", "g", "n", "timestamp"])
    counts = keyed.group_by().count(name="counts")
    driver = TopologyTestDriver(counts, spark=spark)
    driver.pipe("sales", row("a", "x", 1, 30), row("b", "y", 2, 20), row("c", None, 3, 10))
    driver.pipe("sales", row("d", "x", None, 5), row(None, "x", 4, 5))
    rows = driver.read("by_shop")
    assert sorted(as_tuples(rows, "shop", "k", "partition"), key=str) == [
        ("X", "a", 1),
        ("X", "d", 1),
        ("X", None, 1),
        ("Y", "b", 0),
        (None, "c", 0),
    ]
    assert [(r["shop"], r["count"]) for r in driver.table("counts")] == [("X", 2), ("Y", 1)]
    # A record with a null new key is left out and not counted. A record without a value is dropped.
    assert driver.metrics("counts")["dropped"] == 1


def test_record_without_key_goes_to_first_partition(spark: SparkSession) -> None:
    sales = stream(partitions=2, partition_by="ascii(k) % 2")
    keyed = sales.select_key("g as h", name="keyed", partitions=2, partition_by="ascii(h) % 2")
    driver = TopologyTestDriver(keyed.group_by().count(name="counts"), spark=spark)
    driver.pipe("sales", row("a", "y", 1, 5), row(None, None, 2, 6))
    driver.pipe("sales", row(None, None, 3, 7), row("a", "y", 4, 8))
    columns = ("partition", "offset", "n")
    assert sorted(as_tuples(driver.read("sales"), *columns)) == [
        (0, 0, 2),
        (0, 1, 3),
        (1, 0, 1),
        (1, 1, 4),
    ]
    assert sorted(as_tuples(driver.read("keyed"), *columns)) == [
        (0, 0, 2),
        (0, 1, 3),
        (1, 0, 1),
        (1, 1, 4),
    ]
    assert as_tuples(driver.read("counts"), "h", "count") == [("y", 1), ("y", 2)]


def test_flat_map_values_emits_record_per_element(spark: SparkSession) -> None:
    words = stream().flat_map_values(
        "transform(split(g, ' '), w -> nullif(w, '~'))", column="word", keep=("n",), name="words"
    )
    driver = TopologyTestDriver(words, spark=spark)
    driver.pipe("sales", row("a", "x y", 1, 10), row("b", "~", 2, 5))
    rows = driver.read("words")
    columns = ("k", "word", "n", "is_tombstone", "offset")
    assert as_tuples(rows, *columns) == [
        ("a", "x", 1, False, 0),
        ("a", "y", 1, False, 1),
        ("b", None, 2, True, 2),
    ]
    sizes = stream(tombstone="n = 0").flat_map_values(
        "array(coalesce(g, '~'), cast(n as string))", column="x", keep=("n",), name="sizes"
    )
    other = TopologyTestDriver(sizes, spark=spark)
    other.pipe("sales", row("a", "x", 0, 10), row("b", "y", 1, 11))
    assert as_tuples(other.read("sizes"), "k", "x", "n", "is_tombstone") == [
        ("a", "~", None, False),  # the expression gets a null value, whatever the columns have
        ("a", None, None, True),
        ("b", "y", 1, False),
        ("b", "1", 1, False),
    ]
    with pytest.raises(NullArrayError, match=r"words: expected an array .* got null for 1: transform"):
        driver.pipe("sales", row("c", "z", 3, 20), row("d", None, 4, 20))
    assert driver.read("words") == [], "the whole run is rolled back"
    driver.pipe("sales", row("c", "z", 3, 20))
    assert as_tuples(driver.read("words"), "word", "offset") == [("z", 3)]


def test_min_and_max_of_key(spark: SparkSession) -> None:
    what = {"least": "min(n)", "most": "max(g)", "total": "sum(n)"}
    ends = stream().group_by().aggregate(what, name="ends")
    # A key with the name of a column does not hide that column from the aggregate.
    by_odd = stream().group_by("n % 2 as n")
    odd = by_odd.aggregate({"total": "sum(n)"}, name="odd")
    window = TumblingWindow(timedelta(hours=1))
    hourly = by_odd.windowed_by(window).aggregate({"total": "sum(n)"}, name="hourly")
    driver = TopologyTestDriver(ends, odd, hourly, spark=spark)
    driver.pipe("sales", row("a", "x", 5, 1), row("a", None, 3, 2), row("b", None, 8, 3))
    driver.pipe("sales", row("a", "w", 7, 4), row("a", "z", None, 5), row("b", "v", 9, 6))
    assert as_tuples(driver.read("ends"), "k", *what) == [
        ("a", 5, "x", 5),
        ("a", 3, "x", 8),
        ("b", 8, None, 8),
        ("a", 3, "x", 15),
        ("b", 8, "v", 17),
    ]
    sums = [(1, 5), (1, 8), (0, 8), (1, 15), (1, 24)]
    assert as_tuples(driver.read("odd"), "n", "total") == sums
    assert as_tuples(driver.read("hourly"), "n", "total") == sums


def test_unwindowed_aggregate_counts_records_of_any_time(spark: SparkSession) -> None:
    totals = stream().group_by().aggregate({"n": "count(*)", "mean": "avg(n)"}, name="totals")
    kept = (
        stream()
        .group_by("g")
        .aggregate(
            {"total": "sum(n)"},
            name="kept",
            materialized=Materialized(history_retention=timedelta(milliseconds=10)),
        )
    )
    assert isinstance(kept, VersionedTable)
    driver = TopologyTestDriver(totals, kept, spark=spark)
    driver.pipe("sales", row("a", "x", 2, 30), row("a", "x", 4, 10), row(None, "x", 1, 50))
    driver.pipe("sales", row("a", "y", None, 40), row("b", "y", 5, 45))
    assert as_tuples(driver.read("totals"), "k", "n", "mean") == [
        ("a", 1, 2.0),
        ("a", 2, 3.0),
        ("b", 1, 5.0),
    ]
    assert driver.metrics("totals") == {"applied": 3, "dropped": 2, "waiting": 0}
    assert [r["timestamp"].microsecond // 1000 for r in driver.table("totals")] == [30, 45]
    # The group x has the total 2, then 6 with the newest time of the group, then 7.
    assert as_tuples(driver.versions("kept"), "g", "total") == [("x", 6), ("x", 7), ("y", 5)]


DAY = timedelta(days=1)
BIG = {"n": 2**63 - 1, "d": Decimal(9) * 10**37, "timestamp": 1}
SUMMED = StructType([*SCHEMA, StructField("d", DecimalType(38, 0)), StructField("x", DoubleType())])


def summed(column: str, windows: Window | None) -> tuple[Stream, Table]:
    sales = stream(schema=SUMMED)
    by = sales.group_by()
    grouped = by if windows is None else by.windowed_by(windows)
    aggregates = {"many": "count(*)", "total": f"sum({column})", "mean": "avg(n)"}
    return sales, grouped.aggregate(aggregates, name="totals")


@pytest.mark.parametrize(
    ("windows", "column", "said", "wider"),
    [
        (None, "n", "total = sum(n) (bigint)", "DECIMAL(38, 0)"),
        (None, "n + 0", "total = sum(n + 0)", "DOUBLE"),
        (TumblingWindow(DAY), "d", "total = sum(d) (decimal(38,0))", "DOUBLE"),
        (SessionWindow(DAY), "n", "total = sum(n) (bigint)", "DECIMAL(38, 0)"),
        (SlidingWindow(DAY), "d", "total = sum(d) (decimal(38,0))", "DOUBLE"),
    ],
)
def test_sum_overflow_is_reported(
    spark: SparkSession, windows: Window | None, column: str, said: str, wider: str
) -> None:
    driver = TopologyTestDriver(*summed(column, windows), spark=spark)
    sales = [{"k": "a", "g": "x", **BIG}, {"k": "a", "g": "y", **BIG}]
    with pytest.raises(ContractError) as refused:
        driver.run({"sales": sales})
    assert str(refused.value).startswith("totals: expected sums that their types can hold, got")
    assert f"{said}; nothing was committed. Sum in a wider type" in str(refused.value)
    assert f"sum(CAST(x AS {wider}))" in str(refused.value)
    driver = TopologyTestDriver(*summed(f"CAST({column} AS {wider})", windows), spark=spark)
    driver.run({"sales": sales})
    assert driver.table("totals")[-1]["total"] > 2**63


def test_other_arithmetic_errors_are_no_sum_overflow() -> None:
    totals = summed("n", None)[1]
    assert sum_too_large(totals, Exception("[DIVIDE_BY_ZERO] Division by zero.")) is None
    overflow = Exception("[ARITHMETIC_OVERFLOW] overflow.")
    assert sum_too_large(totals, overflow) is not None
    assert sum_too_large(summed("x", None)[1], overflow) is None, "a sum of DOUBLE is infinite"
    assert sum_too_large(stream(), overflow) is None


@pytest.mark.parametrize(
    ("expression", "got"),
    [
        ("sum(n * 2)", "overflow. Use 'try_multiply' to tolerate overflow "),
        ("max(n + 1)", "overflow. Use 'try_add' to tolerate overflow and return NULL instead. "),
        ("min(cast(n AS int))", "The value 9223372036854775807L of the type "),
        (
            "max(1 / (n - 9223372036854775807))",
            "Division by zero. Use `try_divide` to tolerate divisor being 0 ",
        ),
        (
            "max(timestampadd(DAY, if(n = 1, 1, 2147483647), timestamp))",
            "Datetime operation overflow: ",
        ),
    ],
)
def test_failing_expression_is_reported(spark: SparkSession, expression: str, got: str) -> None:
    sales = stream(schema=SUMMED)
    totals = sales.group_by().aggregate({"m": expression, "total": "sum(n)"}, name="totals")
    driver = TopologyTestDriver(sales, totals, spark=spark)
    with pytest.raises(ContractError) as refused:
        driver.run({"sales": [{"k": "a", "g": "x", **BIG}]})
    said = str(refused.value)
    assert said.startswith("totals: expected values for which its expressions can be computed, got: ")
    assert got in said
    assert ". Nothing was committed. Compute in a wider type, or with try_add" in said
    assert "spark.sql" not in said
    driver.run({"sales": [{"k": "a", "g": "x", "n": 1, "timestamp": 1}]})


def test_expression_that_fails_before_the_first_step_is_reported(spark: SparkSession) -> None:
    """The pin computes the new key of a windowed aggregate, for its stream time."""
    grouped = stream(schema=SUMMED).group_by("1 div (n - 7) as g")
    window = TumblingWindow(DAY, grace=timedelta(0))
    driver = TopologyTestDriver(grouped.windowed_by(window).count(name="totals"), spark=spark)
    with pytest.raises(ContractError, match="totals: expected values for which its expressions can be"):
        driver.run({"sales": [{"k": "a", "g": "x", "n": 7, "timestamp": 1}]})


SALES = Table("sales", **{**ABOUT, "schema": SUMMED})
UNSOUND: dict[str, tuple[Stream, str]] = {
    "unknown column": (
        SALES.filter("nothing > 1", name="made"),
        "got 'nothing > 1', which Spark refuses: A column, variable, or function parameter with name "
        "`nothing` cannot be resolved. Nothing was committed; correct it",
    ),
    "syntax": (SALES.filter("n >", name="made"), "got 'n >', which Spark refuses: Syntax error"),
    "number": (
        SALES.filter("n > 99999999999999999999L", name="made"),
        "got 'n > 99999999999999999999L', which Spark refuses: ",
    ),
    "no condition": (SALES.filter("n", name="made"), 'Cannot resolve "(NOT n)" due to data type'),
    "select": (SALES.map_values("nothing * 2 as x", name="made"), "expected select to be SQL over"),
    "group": (
        SALES.group_by("upper(nothing) as g").count(name="made"),
        "got 'upper(nothing) as g', wh",
    ),
    "aggregate": (
        SALES.group_by("g").aggregate({"n": "sum(n + nothing)"}, name="made"),
        "got 'sum(n + nothing)', which Spark refuses: A column",
    ),
    "key": (
        Table("sales", **{**ABOUT, "partitions": 2, "partition_by": "abs(nothing)"}),
        "sales: expected partition_by to be SQL over the columns ['k', ",
    ),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_refused_expression_is_named(spark: SparkSession, name: str) -> None:
    """The message names the setting, without Spark's plan and its names of columns."""
    made, said = UNSOUND[name]
    driver = TopologyTestDriver(*({SALES.name: SALES, made.name: made}.values()), spark=spark)
    with pytest.raises(TopologyError) as refused:
        driver.run({"sales": [{"k": "a", "g": "x", "n": 1, "timestamp": 1}]})
    assert said in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("file", ["/home/me/shop/functions.py", "/home/me/vt_dagster/functions.py"])
def test_failing_udf_is_reported(spark: SparkSession, file: str) -> None:
    """The message names the function's error, whatever the directory of the function's code."""
    code = "def shop(number):\n    raise KeyError(f'shop {number}')\n"
    made: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, file, "exec"), made)
    spark.udf.register("shop_of", made["shop"], "long")
    totals = stream(schema=SUMMED).group_by().aggregate({"m": "max(shop_of(n))"}, name="totals")
    driver = TopologyTestDriver(totals, spark=spark)
    with pytest.raises(ContractError) as failed:
        driver.run({"sales": [{"k": "a", "g": "x", "n": 7, "timestamp": 1}]})
    assert str(failed.value) == (
        "totals: expected its Python functions to return values, got: KeyError: 'shop 7'; nothing was "
        "committed. Correct the functions, then run again"
    )
