"""A run with a wrong DataFrame, or with records that break a contract, fails before the commit."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pandera.pyspark as pa
import pyspark.sql.types as T
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.market import Market, messages, record
from vt_dagster import (
    FilesSource,
    Stream,
    Table,
    VersionedTable,
    build_asset,
    build_checks,
    explain,
    ops,
)
from vt_dagster.contracts import contract
from vt_dagster.errors import ContractError, TopologyError
from vt_dagster.runs.gate import contract_of, misfits, rule_of
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.schema_evolution import never_null
from vt_dagster.testing import TopologyTestDriver


def custom_asset(table: VersionedTable, change: Callable[[Any], Any], between: str) -> Any:
    """The graph asset of a table, with a user's op between two of its ops."""
    read, put, write = ops.read_op(table), ops.put_op(table), ops.write_op(table)

    @dg.op(out=dg.Out(io_manager_key=ops.OP_MEMORY))
    def mine(rows: Any) -> Any:
        return change(rows)

    @dg.graph_asset(name=table.name)
    def custom() -> Any:
        records, arrival = read()
        if between == "read and put":
            return write(put(mine(records), arrival), arrival)
        return write(mine(put(records, arrival)), arrival)

    return custom


def committed(market: Market) -> bool:
    return (market.warehouse / "prices" / "log").exists()


@pytest.mark.parametrize("between", ["read and put", "put and write"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows.drop("v"), "lacks v"),
        (lambda rows: rows.drop("_arrival"), "lacks _arrival"),
        (lambda rows: rows.withColumn("v", F.lit(1)), "v is int, expected string"),
        (lambda rows: rows.toPandas(), "got pandas.core.frame.DataFrame; return the Spark DataFrame"),
        (lambda rows: None, "got builtins.NoneType; return the Spark DataFrame"),
    ],
    ids=["no column", "no arrival", "wrong type", "pandas", "nothing"],
)
def test_invalid_frame_fails_before_commit(
    spark: SparkSession, tmp_path: Path, change: Any, said: str, between: str
) -> None:
    market = Market(tmp_path, spark)
    market.land("prices", "1.jsonl", record("a", "p1", "1 00:00"))
    result = market.run([], custom_asset(market.prices, change, between))
    assert not result.success
    text = messages(result)
    assert said in text
    assert "'prices'" in text
    assert "expected a Spark DataFrame" in text or "correct the op before" in text
    assert not committed(market)


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ("decimal(10,2)", "string"),
        ("array<string>", "string"),
        ("map<string,int>", "string"),
        ("struct<a:int>", "string"),
        ("timestamp", "timestamp_ntz"),
    ],
)
def test_wrong_type_is_named(spark: SparkSession, kind: str, other: str) -> None:
    wrong, right = (spark.createDataFrame([], f"v {one}") for one in (other, kind))
    assert misfits(wrong, right.schema) == [f"v is {other}, expected {kind}"]
    assert misfits(right, right.schema) == []
    assert misfits(wrong, T.StructType([T.StructField("v", T.NullType())])) == []


def test_op_between_may_change_values(spark: SparkSession, tmp_path: Path) -> None:
    def louder(rows: DataFrame) -> DataFrame:
        return rows.withColumn("v", F.upper("v"))

    market = Market(tmp_path, spark)
    market.land("prices", "1.jsonl", record("a", "p1", "1 00:00"))
    result = market.run([], custom_asset(market.prices, louder, "read and put"))
    assert result.success, messages(result)
    assert [r["v"] for r in market.store(market.prices).read().collect()] == ["P1"]


class Price(pa.DataFrameModel):
    k: T.StringType = pa.Field(isin={"allowed_values": ["a", "b"], "name": "known_shop"})
    v: T.StringType = pa.Field(str_startswith={"string": "p", "name": "is_a_price"})
    at: T.TimestampType

    @pa.dataframe_check(name="price_names_its_shop")
    def price_names_its_shop(cls, df: DataFrame) -> bool:
        return df.filter(~F.col("v").contains(F.col("k"))).limit(1).count() == 0


def with_contract(market: Market) -> VersionedTable:
    return VersionedTable(
        "prices",
        key="k",
        schema=Price,
        timestamp="at",
        tombstone="v is null",
        history_retention=market.prices.history_retention,
        source=FilesSource(str(market.root / "landing" / "prices")),
    )


def test_broken_contract_fails_before_commit(spark: SparkSession, tmp_path: Path) -> None:
    market = Market(tmp_path, spark)
    table = with_contract(market)
    market.land(
        "prices",
        "1.jsonl",
        record("a", "pa", "1 00:00"),
        record("c", "pc", "1 01:00"),
        record("d", "pd", "1 02:00"),
        record("b", "pa", "1 02:00"),
        record("a", None, "1 03:00"),
    )
    result = market.run([], build_asset(table))
    assert not result.success
    text = messages(result)
    assert 'known_shop: 2 records, for example {"k":"c","v":"pc"' in text
    assert 'price_names_its_shop: 1 record, for example {"k":"b","v":"pa"' in text
    assert "is_a_price" not in text
    assert "nothing was committed" in text
    assert "run again; on_contract_break='quarantine' commits the other records" in text
    assert not committed(market)
    market.land("prices", "1.jsonl", record("a", "pa", "1 00:00"), record("a", None, "1 03:00"))
    assert market.run([], build_asset(table)).success
    assert AssetStore(str(market.warehouse), table, spark).read("log").count() == 2


# -- on_contract_break="quarantine" --------------------------------------------------------------


class Wide(Price):
    """A price with a check of all rows, which fails if the rows have more than one key."""

    @pa.dataframe_check(name="one_shop")
    def one_shop(cls, df: DataFrame) -> bool:
        return df.agg(F.count_distinct("k")).collect()[0][0] <= 1


def with_quarantine(market: Market, **about: Any) -> VersionedTable:
    return replace(with_contract(market), on_contract_break="quarantine", **about)


def landing(market: Market, share: float) -> FilesSource:
    return FilesSource(str(market.root / "landing" / "prices"), max_bad_share=share)


def test_rows_failing_check_are_quarantined(spark: SparkSession, tmp_path: Path) -> None:
    market = Market(tmp_path, spark)
    table = with_quarantine(market, source=landing(market, 0.6))
    bad = [record("c", "pc", "1 01:00"), record("b", "xa", "9 00:00"), record("b", "pa", "1 02:00")]
    good = record("a", "pa", "1 00:00"), record("a", None, "1 03:00")
    market.land("prices", "1.jsonl", good[0], *bad, good[1])
    assert market.run([], build_asset(table)).success
    rejected = market.store(table).quarantine()
    assert rejected is not None
    rows = rejected.orderBy("position").collect()
    assert [(r["source"], r["position"], r["reason"]) for r in rows] == [
        ("1.jsonl", 2, "broken_contract: known_shop (k)"),
        ("1.jsonl", 3, "broken_contract: is_a_price (v), price_names_its_shop"),
        ("1.jsonl", 4, "broken_contract: price_names_its_shop"),
    ]
    assert [json.loads(r["raw"]) for r in rows] == bad
    head = market.store(table).snapshot().head
    assert head is not None
    counts = head.commit.counts
    assert (counts["in"], counts["applied"], counts["quarantined"], counts["late"]) == (5, 2, 3, 0)
    # The record of the 9th is not applied, so it does not advance stream time.
    market.land("prices", "2.jsonl", record("a", "pa2", "1 12:00"), record("b", "pb", "1 12:00"))
    result = market.run([], build_asset(table), build_checks(table))
    assert result.success, messages(result)
    rows = market.store(table).read().orderBy("timestamp", "k").collect()
    assert [(r["k"], r["v"]) for r in rows] == [("a", "pa2"), ("b", "pb")]
    (told,) = result.get_asset_check_evaluations()[:1]
    assert told.passed


def test_too_many_rows_failing_check_fail_run(spark: SparkSession, tmp_path: Path) -> None:
    market = Market(tmp_path, spark)
    rows = [record("a", f"pa{i}", "1 00:00") for i in range(8)]
    market.land("prices", "1.jsonl", *rows, "{broken", record("c", "pc", "1 01:00"))
    table = with_quarantine(market, source=landing(market, 0.1))
    result = market.run([], build_asset(table))
    assert not result.success
    assert "2 of 10 records are bad (20.0%), expected at most 10.0%; nothing was" in messages(result)
    assert "1.jsonl row 10: broken_contract: known_shop (k): {" in messages(result)
    assert not committed(market)
    assert market.run([], build_asset(replace(table, source=landing(market, 0.2)))).success


def test_frame_level_check_fails_run(spark: SparkSession, tmp_path: Path) -> None:
    market = Market(tmp_path, spark)
    rows = record("a", "pa", "1 00:00"), record("c", "pc", "1 01:00")
    market.land("prices", "1.jsonl", *rows)
    table = with_quarantine(market, schema=Wide, contract=Wide, source=landing(market, 0.5))
    assert market.run([], build_asset(table)).success, "the check sees only the rows that are applied"
    market.land("prices", "2.jsonl", rows[0], record("b", "pb", "1 01:00"))
    result = market.run([], build_asset(table))
    assert not result.success
    assert "one_shop: some records" in messages(result)
    assert "commits the other records" not in messages(result)


class Unnamed(Price):
    """A price with a check that has no name: its column and its text are its name."""

    v: T.StringType = pa.Field(str_startswith="p")


def test_stream_quarantines_rows_failing_check(spark: SparkSession) -> None:
    stream = Stream("sales", key="k", schema=Unnamed, timestamp="at", on_contract_break="quarantine")
    driver = TopologyTestDriver(stream, spark=spark)
    driver.pipe("sales", {"k": "a", "v": "pa", "at": 1}, {"k": "c", "v": "pc", "at": 2})
    driver.pipe("sales", {"k": "b", "v": None, "at": 3}, {"k": "b", "v": "pb", "at": 4})
    driver.pipe("sales", {"k": "b", "v": "x", "at": 5})
    assert [row["v"] for row in driver.read("sales")] == ["pa", "pb"]
    found = driver.metrics("sales")
    reasons = {name: n for name, n in found.items() if "/" in name}
    assert reasons == {
        "quarantined/broken_contract: known_shop (k)": 1,
        "quarantined/broken_contract: v str_startswith('p'), price_names_its_shop": 1,
        "quarantined/broken_contract: v_not_null (v)": 1,
    }
    assert (found["applied"], found["quarantined"]) == (2, 3)


class Lenient(pa.DataFrameModel):
    k: T.StringType = pa.Field(isin={"allowed_values": ["a", "b"], "name": "known_shop"})
    v: T.StringType = pa.Field(str_startswith={"string": "p", "name": "is_a_price"}, raise_warning=True)
    at: T.TimestampType

    @pa.dataframe_check(name="one_shop", raise_warning=True)
    def one_shop(cls, df: DataFrame) -> bool:
        return df.agg(F.count_distinct("k")).collect()[0][0] <= 1


@pytest.mark.parametrize("on_contract_break", ["quarantine", "fail"])
def test_warning_only_check(spark: SparkSession, on_contract_break: Any) -> None:
    about: Any = {"timestamp": "at", "on_contract_break": on_contract_break}
    driver = TopologyTestDriver(Stream("sales", key="k", schema=Lenient, **about), spark=spark)
    said = r"sales: the check (is_a_price|one_shop), which holds no record back .* by (1|some) record"
    with pytest.warns(UserWarning, match=said) as told:
        driver.pipe("sales", {"k": "a", "v": "xa", "at": 1}, {"k": "b", "v": "pb", "at": 2})
    assert [row["v"] for row in driver.read("sales")] == ["xa", "pb"]
    found = [match.groups() for one in told if (match := re.match(said, str(one.message)))]
    assert found == [("is_a_price", "1"), ("one_shop", "some")]


def test_explain_names_broken_checks(spark: SparkSession, tmp_path: Path) -> None:
    market = Market(tmp_path, spark)
    table = with_quarantine(market, source=landing(market, 0.5))
    market.land("prices", "1.jsonl", record("a", "pa", "1 00:00"), record("b", "pa", "1 00:00"))
    assert market.run([], build_asset(table)).success
    (rejected,) = explain("prices", key="b", warehouse=str(market.warehouse)).rejected
    assert rejected.description.startswith("the row breaks row-wise checks of its pandera model")
    assert rejected.description.endswith(": price_names_its_shop")


# -- contracts against pandera itself ------------------------------------------------------------


class Everything(pa.DataFrameModel):
    """Every built-in check that pandera has for PySpark, each on a separate column."""

    equal: T.IntegerType = pa.Field(eq={"value": 5, "name": "equal"})
    unequal: T.IntegerType = pa.Field(ne={"value": 5, "name": "unequal"})
    greater: T.IntegerType = pa.Field(gt={"min_value": 5, "name": "greater"})
    at_least: T.IntegerType = pa.Field(ge={"min_value": 5, "name": "at_least"})
    less: T.IntegerType = pa.Field(lt={"max_value": 5, "name": "less"})
    at_most: T.IntegerType = pa.Field(le={"max_value": 5, "name": "at_most"})
    between: T.IntegerType = pa.Field(in_range={"min_value": 1, "max_value": 5, "name": "between"})
    open_between: T.IntegerType = pa.Field(
        in_range={
            "min_value": 1,
            "max_value": 5,
            "include_min": False,
            "include_max": False,
            "name": "open_between",
        }
    )
    one_of: T.StringType = pa.Field(isin={"allowed_values": ["x", "y"], "name": "one_of"})
    none_of: T.StringType = pa.Field(notin={"forbidden_values": ["x", "y"], "name": "none_of"})
    contains: T.StringType = pa.Field(str_contains={"pattern": "ab", "name": "contains"})
    matches: T.StringType = pa.Field(str_matches={"pattern": "a+b", "name": "matches"})
    begins: T.StringType = pa.Field(str_startswith={"string": "ab", "name": "begins"})
    ends: T.StringType = pa.Field(str_endswith={"string": "ab", "name": "ends"})
    length: T.StringType = pa.Field(str_length={"min_value": 2, "max_value": 3, "name": "length"})
    all_of: T.StringType = pa.Field(unique_values_eq={"values": ["x"], "name": "all_of"})
    maybe: T.IntegerType = pa.Field(nullable=True, ge={"min_value": 5, "name": "maybe"})
    present: T.StringType

    @pa.dataframe_check(name="less_than_greater")
    def less_than_greater(cls, df: DataFrame) -> bool:
        return df.filter(F.col("less") >= F.col("greater")).limit(1).count() == 0

    @pa.dataframe_check(name="few_rows")
    def few_rows(cls, df: DataFrame) -> bool:
        return df.agg(F.max("less")).collect()[0][0] < 5


GOOD = (5, 4, 6, 5, 4, 5, 5, 4, "x", "z", "cabc", "aab", "abc", "cab", "abc", "x", None, "here")
BAD = (4, 5, 5, 4, 5, 6, 6, 5, "z", "x", "acb", "cab", "cab", "abc", "abcd", "y", 4, None)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([GOOD, GOOD], id="good", marks=pytest.mark.endurance),
        pytest.param([GOOD, BAD], id="one bad"),
        pytest.param([BAD, BAD], id="bad", marks=pytest.mark.endurance),
    ],
)
def test_gate_equals_pandera(spark: SparkSession, rows: list[Any]) -> None:
    table = Table("everything", key="present", schema=Everything, timestamp="timestamp '2026-01-01'")
    schema = T.StructType([T.StructField(f.name, f.dataType) for f in table.schema.fields])
    frame = spark.createDataFrame(rows, schema)
    validated = Everything.validate(frame)
    errors = validated.pandera.errors.get("DATA", {})
    said = str(dict(errors))
    checked = [*schema.names[:-1], "less_than_greater", "few_rows"]
    pandera_says = {name for name in checked if name in said}
    nulls = str(dict(validated.pandera.errors.get("SCHEMA", {})))
    rules, probes = contract_of(table)
    tested = frame.withColumn("is_tombstone", F.lit(False))
    counted = tested.agg(*[F.count_if(r.violated).alias(r.name) for r in rules]).collect()[0].asDict()
    ours = {name for name, count in counted.items() if count and not name.endswith("_not_null")}
    ours |= {p.name for p in probes if not p.holds(tested)}
    assert ours == pandera_says
    assert bool(counted["present_not_null"]) == ("present" in nulls and "null" in nulls.lower())
    bad = sum(row is BAD for row in rows)
    assert all(counted[name] in (0, bad) for name in counted)
    assert {p.name for p in probes} == {"few_rows", "all_of"}, "the others are counted in one pass"
    assert len(ours) == (0 if bad == 0 else 19)


def test_model_created_before_library_import(spark: SparkSession) -> None:
    """The checks of such a model copied pandera's registry before it had functions for PySpark. The
    check must work nevertheless."""

    class Early(pa.DataFrameModel):
        k: T.StringType
        n: T.IntegerType = pa.Field(ge=0)

    (check,) = Early.to_schema().columns["n"].checks
    known = check._check_fn._function_registry
    check._check_fn._function_registry = {Any: known[Any]}
    rules, probes = contract_of(
        Table("early", key="k", schema=Early, timestamp="timestamp '2026-01-01'")
    )
    assert probes == []
    (rule,) = (r for r in rules if not r.name.endswith("_not_null"))
    rows = spark.createDataFrame(
        [("a", 1, False), ("b", -1, False)], "k string, n int, is_tombstone boolean"
    )
    assert [row.k for row in rows.where(rule.violated).collect()] == ["b"]


def test_every_pandera_check_is_compared() -> None:
    from pandera.backends.pyspark import builtin_checks

    known = [f for f in vars(builtin_checks).values() if inspect.isfunction(f)]
    known = [f for f in known if f.__module__ == builtin_checks.__name__]
    used = {c.name for column in Everything.to_schema().columns.values() for c in column.checks}
    used -= {"maybe", "open_between"}
    assert len(known) == len(used), [f.__name__ for f in known]


def test_tombstones_skip_row_checks(spark: SparkSession, tmp_path: Path) -> None:
    table = with_contract(Market(tmp_path, spark))
    rules, probes = contract_of(table)
    rows = spark.createDataFrame(
        [("a", None, True), ("c", None, True), ("a", None, False), (None, None, True)],
        "k string, v string, is_tombstone boolean",
    ).withColumn("at", F.current_timestamp())
    counted = rows.agg(*[F.count_if(r.violated).alias(r.name) for r in rules]).collect()[0].asDict()
    assert probes == []
    assert counted == {
        "k_not_null": 1,  # a tombstone needs a key too
        "known_shop": 0,  # no other check applies to a tombstone
        "v_not_null": 1,
        "is_a_price": 0,
        "at_not_null": 0,
        "price_names_its_shop": 0,
    }


def test_tombstones_skip_frame_level_checks(spark: SparkSession) -> None:
    """A run with tombstones alone has no row to check, and a check never sees a tombstone's null."""

    class Prices(pa.DataFrameModel):
        k: T.StringType
        n: T.IntegerType = pa.Field(unique_values_eq={"values": [1, 2], "name": "one_and_two"})
        at: T.TimestampType

        @pa.dataframe_check
        def below_five(cls, df: DataFrame) -> bool:
            return df.agg(F.max("n")).collect()[0][0] < 5

    prices = Table("prices", key="k", schema=Prices, timestamp="at", tombstone="n is null")
    driver = TopologyTestDriver(prices, spark=spark)
    driver.pipe("prices", {"k": "a", "at": 1}, {"k": "b", "at": 1})
    both = {"k": "a", "n": 1, "at": 2}, {"k": "b", "n": 2, "at": 2}
    driver.pipe("prices", *both, {"k": "c", "at": 2})
    assert [(r["k"], r["n"]) for r in driver.table("prices")] == [("a", 1), ("b", 2)]
    with pytest.raises(ContractError, match="one_and_two: some record"):
        driver.pipe("prices", {"k": "a", "n": 1, "at": 3})
    columns = "k string, n int, at timestamp, is_tombstone boolean"
    now = datetime(2026, 1, 1)
    for numbers, broken in (([1, 2], False), ([1, 1], True)):
        rows = [(k, n, now, n is None) for k, n in zip("abc", [*numbers, None], strict=True)]
        validated = contract(prices).validate(spark.createDataFrame(rows, columns))
        assert bool(validated.pandera.errors) == broken


def checked_by(check: Callable[[DataFrame], Any]) -> Table:
    """A table whose model has one check of the whole DataFrame."""

    class Prices(pa.DataFrameModel):
        k: T.StringType
        n: T.IntegerType
        at: T.TimestampType

        @pa.dataframe_check
        def own_check(cls, df: DataFrame) -> Any:
            return check(df)

    return Table("prices", key="k", schema=Prices, timestamp="at")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda df: 1 // (df.count() - df.count()), "ZeroDivisionError: "),
        (lambda df: df.where("n < 0"), "DataFrame["),
        (lambda df: df.where("n < 0").count(), "0;"),
        (lambda df: F.col("n") > 0, "Column<"),
    ],
)
def test_check_must_return_bool(spark: SparkSession, made: Any, said: str) -> None:
    """A check must return True or False. A DataFrame counts as true, so it would always pass."""
    driver = TopologyTestDriver(checked_by(made), spark=spark)
    with pytest.raises(ContractError) as refused:
        driver.pipe("prices", {"k": "a", "n": 1, "at": 1})
    assert str(refused.value).startswith(
        f"prices: expected the check own_check of its schema to return True or False, got {said}"
    )
    assert str(refused.value).endswith("; nothing was committed. Correct the check, then run again")


def test_frame_level_check_sees_model_columns(spark: SparkSession) -> None:
    """The check does not see a record's place, raw text and the like, which make each row distinct."""

    def no_pair(df: DataFrame) -> bool:
        return df.dropDuplicates().count() == df.count()

    def filled(df: DataFrame) -> bool:
        return df.filter(" or ".join(f"{c} is null" for c in df.columns)).isEmpty()

    prices = checked_by(no_pair)
    driver = TopologyTestDriver(prices, spark=spark)
    driver.pipe("prices", {"k": "a", "n": 1, "at": 1}, {"k": "a", "n": 1, "at": 2})
    with pytest.raises(ContractError, match="own_check: some record"):
        driver.pipe("prices", {"k": "a", "n": 1, "at": 3}, {"k": "a", "n": 1, "at": 3})
    now = datetime(2026, 1, 1)
    rows = spark.createDataFrame(
        [("a", 1, now, now, i) for i in (0, 1)],
        "k string, n int, at timestamp, timestamp timestamp, offset long",
    )
    assert len(contract(prices).validate(rows).pandera.errors) > 0
    TopologyTestDriver(checked_by(filled), spark=spark).pipe("prices", {"k": "a", "n": 1, "at": 1})


def test_checks_with_same_name(spark: SparkSession) -> None:
    """Each of several checks with the same name applies and is counted."""

    class Prices(pa.DataFrameModel):
        k: T.StringType
        n: T.IntegerType
        at: T.TimestampType

        @pa.check("n", name="small")
        def small(cls, n: Any) -> bool:
            return n.dataframe.filter("n > 9").limit(1).count() == 0

        @pa.check("k", name="small")
        def short(cls, k: Any) -> bool:
            return k.dataframe.filter("length(k) > 9").limit(1).count() == 0

        @pa.dataframe_check(name="small")
        def both(cls, df: DataFrame) -> bool:
            return df.filter("n + length(k) > 9").limit(1).count() == 0

        @pa.dataframe_check(name="small")
        def again(cls, df: DataFrame) -> bool:
            return df.filter("n < -9").limit(1).count() == 0

    table = Table("prices", key="k", schema=Prices, timestamp="at")
    rules, _ = contract_of(table)
    names = [r.name for r in rules if not r.name.endswith("_not_null")]
    assert names == ["small", "n small", "small (2)", "small (3)"]
    driver = TopologyTestDriver(table, spark=spark)
    for k, n in (("a", 10), ("aaaaaaaaaa", -5), ("aaaaaa", 6), ("a", -10)):
        with pytest.raises(ContractError, match=r"small[ ()\d]*: 1 record"):
            driver.pipe("prices", {"k": k, "n": n, "at": 1})


def test_pandera_schema_object_as_contract(spark: SparkSession) -> None:
    schema = pa.DataFrameSchema(
        {
            "k": pa.Column(T.StringType()),
            "n": pa.Column(T.IntegerType(), pa.Check.gt(0), nullable=True),
            "at": pa.Column(T.TimestampType()),
        }
    )
    table = Table("prices", key="k", schema=schema, timestamp="at", on_contract_break="fail")
    assert never_null(table) == {"k", "at"}
    driver = TopologyTestDriver(table, spark=spark)
    driver.pipe("prices", {"k": "a", "n": 1, "at": 1}, {"k": "b", "at": 1})
    with pytest.raises(ContractError, match=r"n greater_than\(0\): 1 record"):
        driver.pipe("prices", {"k": "a", "n": 0, "at": 1})
    unique = pa.DataFrameSchema({"k": pa.Column(T.StringType())}, unique=["k"])
    with pytest.raises(TopologyError, match="a pandera model without unique"):
        Table("prices", key="k", schema=unique)


SHARES: list[Callable[[DataFrame], bool]] = [
    lambda df: df.filter("n < 0").count() <= df.count() * 0.5,
    lambda df: df.filter("n < 0").count() / max(df.count(), 1) <= 0.5,
    lambda df: df.where("n < 0").isEmpty() or df.where("n < -1").isEmpty(),
    lambda df: df.where("n < 0").where("n < -1").count() == 0,
]


@pytest.mark.parametrize("holds", SHARES)
def test_share_check_is_not_row_check(spark: SparkSession, holds: Any) -> None:
    """Such a check depends on the number of all rows or on another filter: no single row breaks it."""
    driver = TopologyTestDriver(checked_by(holds), spark=spark)
    rows = [{"k": k, "n": n, "at": 1} for k, n in (("a", -1), ("b", 1), ("c", 2))]
    driver.pipe("prices", *rows)
    assert len(driver.read("prices")) == 3
    with pytest.raises(ContractError, match="own_check: some record"):
        driver.pipe("prices", {"k": "a", "n": -2, "at": 2})


def test_limited_check_is_not_row_check() -> None:
    assert rule_of("some", lambda df: df.limit(9).where("n < 0").count() == 0, ["n"]) is None
