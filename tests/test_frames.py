"""DataFrames of every library as records: columns, types, order, and values that do not fit."""

from __future__ import annotations

import math
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyspark.sql.types as T
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from vt_dagster import Stream
from vt_dagster.core.source_records import REASON
from vt_dagster.errors import ContractError
from vt_dagster.sources.frame_sources import (
    Delivery,
    FunctionSource,
    Given,
    LocalFrame,
    frame_of,
    local_frame,
)

SCHEMA = T.StructType(
    [
        T.StructField("k", T.StringType()),
        T.StructField("n", T.IntegerType()),
        T.StructField("d", T.DecimalType(10, 2)),
        T.StructField("at", T.TimestampType()),
    ]
)
AT = datetime(2024, 1, 1, tzinfo=timezone.utc)
COLUMNS: dict[str, list[Any]] = {
    "k": ["late", "a", "b"],
    "n": [3, 1, None],
    "d": [Decimal("3.00"), Decimal("1.50"), Decimal("2.00")],
    "at": [AT + timedelta(hours=1), AT, AT],
}
ARROW = pa.table(COLUMNS)
PANDAS = pd.DataFrame(COLUMNS)


def frame_source(value: Any, *more: Any) -> Given:
    source = FunctionSource(function=lambda: None)
    node = Stream("made", key="k", schema=SCHEMA, timestamp="at", source=source)
    frames = [value, *more]
    deliveries = [Delivery(f"r{i}", "", lambda v=v: v) for i, v in enumerate(frames)]
    return Given(node, source, deliveries)


def records(spark: SparkSession, made: Given) -> list[tuple[Any, ...]]:
    rows = made.pin(None).read(spark, made.node).orderBy("_arrival").collect()
    made.release()
    return [(r["k"], r["n"], r["_reason"]) for r in rows]


@pytest.mark.parametrize(
    "value",
    [
        PANDAS,
        PANDAS.assign(k=PANDAS["k"].astype("category")),
        pl.DataFrame(COLUMNS),
        pl.LazyFrame(COLUMNS).filter(pl.col("k").is_not_null()),
        ARROW,
        ARROW.to_batches()[0],
        duckdb.sql("select * from ARROW"),
    ],
    ids=["pandas", "pandas_categories", "polars", "polars_lazy", "arrow", "arrow_batch", "duckdb"],
)
def test_local_frames(value: Any) -> None:
    found = local_frame("made", value, SCHEMA)
    assert found is not None
    rows = found.rows.to_pylist()
    assert [(r["k"], r["n"], r["d"], r["at"]) for r in rows] == list(
        zip(*COLUMNS.values(), strict=True)
    )
    assert {r["_reason"] for r in rows} == {None}


def test_record_order_of_frames(spark: SparkSession) -> None:
    """Records with equal times keep the order of a local DataFrame; those of a Spark DataFrame, which
    has no order, are sorted by key. Records of a later delivery come after those of an earlier one."""
    turned = PANDAS.iloc[[2, 1, 0]]
    assert [k for k, _, _ in records(spark, frame_source(turned))] == ["b", "a", "late"]
    rows = spark.createDataFrame(turned[["k", "at"]]).withColumns(
        {"n": F.lit(None), "d": F.lit(1).cast("decimal(3,0)")}
    )
    made = records(spark, frame_source(PANDAS, rows))
    assert [k for k, _, _ in made] == ["a", "b", "late", "a", "b", "late"]


def test_misfit_value_makes_one_bad_row(spark: SparkSession) -> None:
    wrong = PANDAS.assign(n=[2**40, 1, 1.5], d=[Decimal("1.001"), Decimal("2"), Decimal("2")])
    assert records(spark, frame_source(wrong)) == [
        ("a", 1, None),
        ("b", None, "unreadable"),
        ("late", None, "unreadable"),
    ]
    found = local_frame("made", wrong, SCHEMA)
    assert found is not None
    assert '"n": 1099511627776' in str(found.rows["_raw"][0])


def test_timestamps_and_dates_of_every_library() -> None:
    schema = T.StructType([T.StructField("at", T.TimestampType()), T.StructField("day", T.DateType())])
    naive, noon = datetime(2024, 1, 1), datetime(2024, 1, 1, 12)
    found = local_frame("made", pd.DataFrame({"at": [naive] * 2, "day": [naive, noon]}), schema)
    assert found is not None
    assert found.rows["at"].to_pylist() == [AT, AT]
    assert found.rows["day"].to_pylist() == [date(2024, 1, 1), None]
    assert found.rows["_reason"].to_pylist() == [None, "unreadable"]


def test_midnight_timestamps_are_dates() -> None:
    schema = T.StructType([T.StructField("day", T.DateType())])
    values = [date(2024, 1, 1), pd.Timestamp(2024, 1, 1), pd.NaT, None]
    found = local_frame("made", pd.DataFrame({"day": pd.Series(values, dtype=object)}), schema)
    assert found is not None
    assert found.rows["day"].to_pylist() == [date(2024, 1, 1)] * 2 + [None] * 2


YEAR_20000 = pa.scalar(568_971_820_800_000, pa.timestamp("ms", "UTC"))
LABELLED = T.StructType([T.StructField("a", T.FloatType()), T.StructField("b", T.StringType())])
WORDS = pa.dictionary(pa.int32(), pa.string())
COUNTS = pa.map_(pa.string(), pa.int64())


@pytest.mark.parametrize(
    ("kind", "values", "right"),
    [
        # As for text, the nearest FLOAT is correct, except for whole numbers.
        (T.FloatType(), [0.1, 1e300, 1e-300, 16777217.0, -math.inf], [0.1, *[None] * 3, -math.inf]),
        (T.ArrayType(T.FloatType()), [[0.1, None], [1e300]], [[0.1, None], None]),
        (LABELLED, [{"b": "B", "a": 1e300}, {"b": "B", "a": 1.5}], [None, {"a": 1.5, "b": "B"}]),
        (T.TimestampType(), pa.array([0, YEAR_20000.value], YEAR_20000.type), [0, None]),
        (
            T.ArrayType(T.TimestampType()),
            pa.array([[0], [YEAR_20000]], pa.list_(YEAR_20000.type)),
            [[0], None],
        ),
        (T.DateType(), pa.array([0, 6_585_300], pa.date32()), [0, None]),
        (
            T.ArrayType(T.DateType()),
            [[datetime(2024, 1, 1), None], [datetime(2024, 1, 1, 12)]],
            [[AT, None], None],
        ),
        (T.ArrayType(T.IntegerType()), [[1.0, None], [1.5]], [[1, None], None]),
        # 2⁵³ may have been 2⁵³ + 1, which pandas stores as this float if the column has a null.
        (T.LongType(), [2.0**53 - 1, 2.0**53, -(2.0**53)], [2**53 - 1, None, None]),
        (T.LongType(), pa.array([1.0, 2048.0], pa.float16()), [1, None]),
        (T.ArrayType(T.LongType()), pa.array([[2.0**24]], pa.list_(pa.float32())), [None]),
        (T.ArrayType(T.StringType()), pa.array([["a"]], pa.list_(WORDS)), [["a"]]),
        (
            T.MapType(T.StringType(), T.LongType()),
            pa.array([[("a", 1), ("b", 2)], [("a", 1), ("a", 2)]], COUNTS),
            [[("a", 1), ("b", 2)], None],
        ),
    ],
)
def test_value_is_exact_or_row_is_bad(kind: T.DataType, values: Any, right: list[Any]) -> None:
    schema = T.StructType([T.StructField("k", T.StringType()), T.StructField("v", kind)])
    found = local_frame("made", pa.table({"k": ["x"] * len(right), "v": values}), schema)
    assert found is not None
    reasons = [None if one is not None else "unreadable" for one in right]
    assert found.rows["_reason"].to_pylist() == reasons
    assert found.rows["v"].to_pylist() == pa.array(right, found.rows["v"].type).to_pylist()
    assert found.digest()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (ARROW.drop_columns(["n"]), "made: expected a DataFrame with the columns"),
        (PANDAS.assign(n="1"), "column 'n' is string, expected int32; convert it before it is"),
        (PANDAS.assign(n=True), "column 'n' is bool, expected int32"),
        (PANDAS.assign(d=1.5), r"column 'd' is double, expected decimal128(10, 2)"),
        (PANDAS.assign(n=[1, "x", None]), "a type of Arrow, got: "),
        (PANDAS.assign(k="\ud83d"), "a type of Arrow, got: 'utf-8' codec can't encode"),
        (
            PANDAS.assign(at=[AT.date(), datetime(2024, 1, 1, 12), pd.NaT]),
            "a type of Arrow, got: dates and times in the column 'at'",
        ),
        (PANDAS.assign(x=[[AT.date(), datetime(2024, 1, 1, 12)]] * 3), "times in the column 'x'"),
        (PANDAS.assign(x=[{"d": AT.date()}, {"d": datetime(2024, 1, 1, 12)}, None]), "the column 'x'"),
        (PANDAS.assign(n=[2**70, 1, 1]), "a type of Arrow, got: Python int too large"),
        (
            pl.DataFrame(COLUMNS).cast({"n": pl.Int128}),
            "polars columns that convert to a type of Arrow",
        ),
        (PANDAS.assign(n=pd.arrays.SparseArray([1, 0, 0])), "a type of Arrow, got: Sparse"),
        (PANDAS.assign(k=AT), "column 'k' is timestamp[us, tz=UTC], expected string"),
        (pd.concat([PANDAS, PANDAS[["k"]]], axis=1), "got the columns ['k'] more than once"),
        (ARROW.append_column("k", ARROW["k"]), "got the columns ['k'] more than once"),
        ({"k": ["a"]}, "expected a DataFrame of Spark, pandas, Polars, Arrow or DuckDB, or None, got "),
        (pl.Series([1]), "or None, got polars."),
    ],
)
def test_refused_frames(value: Any, said: str) -> None:
    with pytest.raises(ContractError) as raised:
        frame_of(frame_source(None).node, value)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("column", "kind", "said"),
    [("n", "bigint", "'n' is bigint, expected int"), ("d", "decimal(9,0)", "'d' is decimal(9,0)")],
)
def test_spark_column_is_never_narrowed(spark: SparkSession, column: str, kind: str, said: str) -> None:
    rows = spark.createDataFrame([], SCHEMA).withColumn(column, F.lit(1).cast(kind))
    with pytest.raises(ContractError) as raised:
        frame_of(frame_source(None).node, rows)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (LABELLED, [{"A": 1.5, "b": "B"}]),
        (T.ArrayType(LABELLED), [[{"B": "B", "a": 1.5}]]),
        (LABELLED, [{"z": 1.5}]),
        (T.TimestampNTZType(), pa.array([0], pa.timestamp("us", "Europe/Berlin"))),
        # Arrow converts all of these without an error.
        (T.ArrayType(T.TimestampType()), [[1704448800]]),
        (T.ArrayType(T.BooleanType()), [["true"]]),
        (T.ArrayType(T.IntegerType()), [[True]]),
        (T.ArrayType(T.DecimalType(10, 2)), [[1.005]]),
        (T.ArrayType(T.StringType()), [[AT]]),
        (LABELLED, [{"a": 1.5, "b": 2}]),
        (
            T.MapType(T.StringType(), T.LongType()),
            pa.array([[(1, 2)]], pa.map_(pa.int64(), pa.int64())),
        ),
    ],
)
def test_local_column_of_other_type_is_refused(kind: T.DataType, values: Any) -> None:
    """A field whose name differs in case would be read as null, and a zoned time as UTC."""
    schema = T.StructType([T.StructField("k", T.StringType()), T.StructField("v", kind)])
    with pytest.raises(ContractError, match=r"column 'v' is .*, expected .*; convert it"):
        local_frame("made", pa.table({"k": ["x"], "v": values}), schema)


def test_empty_frame_is_no_new_input(spark: SparkSession) -> None:
    empty = [None, PANDAS.iloc[:0], pl.DataFrame(COLUMNS).clear(), spark.createDataFrame([], SCHEMA)]
    of_no_records = [pd.DataFrame([]), pl.DataFrame([]), pa.table({})]
    assert frame_source(*empty, *of_no_records).pin(None).empty


def test_digest_ignores_row_order(spark: SparkSession) -> None:
    node = frame_source(None).node

    def digest(value: Any) -> str:
        found = frame_of(node, value)
        assert found is not None
        told = found.digest()
        found.release()
        return told

    turned, other = PANDAS.iloc[[2, 0, 1]], PANDAS.assign(n=[3, 1, 1])
    assert digest(PANDAS) == digest(turned) == digest(pl.DataFrame(COLUMNS))
    assert digest(PANDAS) != digest(other)
    assert digest(pd.concat([PANDAS, PANDAS])) not in (digest(PANDAS), digest(pd.concat([other] * 2)))
    rows = spark.createDataFrame(ARROW, SCHEMA)
    assert digest(rows) == digest(rows.orderBy("k"))
    assert digest(rows) != digest(rows.withColumn("n", F.lit(1)))


def test_column_without_values_fits_any_type(spark: SparkSession) -> None:
    """pandas gives a column without values the type float."""
    none = pd.DataFrame({name: [float("nan")] * 2 for name in SCHEMA.names})
    found = frame_of(frame_source(None).node, none)
    assert isinstance(found, LocalFrame)
    assert found.rows.column(REASON).null_count == found.count == 2
    assert frame_of(frame_source(None).node, none.iloc[:0]) is None


def test_extra_column_is_reported(spark: SparkSession) -> None:
    pinned = frame_source(PANDAS.assign(note="x")).pin(None)
    assert pinned.describe(SCHEMA)[1] == "!left out columns that the schema lacks: note"
    found = frame_of(frame_source(None).node, PANDAS)
    assert isinstance(found, LocalFrame)
    assert "note" not in found.rows.column_names
