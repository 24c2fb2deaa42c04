"""Nondeterministic expressions are refused when definitions load, in each place that takes an
expression. A user's own nondeterministic function is refused before the first run of an asset writes
anything."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    DateType,
    IntegerType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from vt_dagster import FilesSource, SnapshotSource, Stream, Table, TumblingWindow, VersionedTable
from vt_dagster.errors import TopologyError
from vt_dagster.runs.run import require_deterministic_functions
from vt_dagster.topology.expressions import require_deterministic, unknown_functions
from vt_dagster.topology.operators import Aggregator

SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("n", IntegerType()),
        StructField("at", TimestampType()),
        StructField("d", DateType()),
        StructField("s", StringType()),
        StructField("xs", ArrayType(IntegerType())),
        StructField("rand", IntegerType()),
        StructField("operator", StringType()),
        StructField("uuid", StringType()),
    ]
)

REFUSED = r"""
rand()
rand(42) < 0.5
RANDOM()
randn()
uniform(0, 10)
uniform(0, 10, 7)
randstr(5)
uuid()
shuffle(xs)
now()
now ( )
now/* a comment */()
current_timestamp
current_timestamp()
Current_Date
`current_date`
current_date()
curdate()
current_time
current_time()
current_time(3)
localtimestamp
localtimestamp()
unix_timestamp( )
monotonically_increasing_id()
spark_partition_id()
input_file_name()
input_file_block_start()
input_file_block_length()
current_user
current_user()
user
user()
session_user
session_user()
current_catalog()
current_database()
current_schema()
current_path()
current_timezone()
version()
reflect('java.util.UUID', 'randomUUID')
try_reflect('java.util.UUID', 'randomUUID')
java_method('java.util.UUID', 'randomUUID')
aes_encrypt(s, 'abcdefghijklmnop')
aes_encrypt(s, concat('abcdefghijklmnop', ''), 'GCM')
`rand`()
identifier('rand')()
timestamp 'now'
timestamp'NOW '
timestamp_ntz 'today'
date "tomorrow"
cast('today' as date)
try_cast('yesterday' as timestamp)
'now'::timestamp
timestamp('now')
date('today')
to_date('today')
to_timestamp('now')
timestamp 'today Europe/Berlin'
at > 'now'
'today' = d
at between '2020-01-01' and r'now'
coalesce(at, 'now')
date_add('today', 1)
datediff('today', d)
array_contains(array('now'), at)
transform(xs, x -> x + rand())
case when n > 1 then uuid() else s end
s = 'it''s' and rand() > 0
s = 'a\\' or rand() > 0 or s = ''
n /* /* nested */ */ + rand()
row_number() over (order by n)
first(s) ignore nulls over (partition by s)
n > (select avg(n) from delta.`/x`)
exists (select 1)
""".strip().split("\n")

TAKEN = r"""
n
rand
rand + 1
s = 'rand()'
s = "now()"
s = 'it''s rand()'
s = 'it\'s rand()'
s = r'\' and n > 0
`rand` > 0
n -- rand()
n /* rand() /* now() */ uuid() */ + 1
s = 'today'
s in ('now', 'today')
s like 'now' and at is not null
to_timestamp(s) > at
timestamp '2020-01-01'
cast('epoch' as timestamp)
unix_timestamp(s)
unix_timestamp(at) > 0
aes_encrypt(s, 'abcdefghijklmnop', 'ECB')
aes_encrypt(s, 'abcdefghijklmnop', 'GCM', 'DEFAULT', unhex('000000000000000000000000'))
transform(xs, user -> user + 1)
transform(xs, (user, i) -> user + i)
named_struct('user', n).user
operator
pmod(xxhash64(k), 100) < 50
uuid
snow(n)
extract(day from at)
""".strip().split("\n")


def refusal(expression: str, columns: StructType = SCHEMA) -> str | None:
    try:
        require_deterministic("t", "predicate", expression, columns.fields)
    except TopologyError as error:
        return str(error)
    return None


def test_refused_and_accepted_expressions() -> None:
    assert [e for e in REFUSED if refusal(e) is None] == []
    assert refusal("n > 0 -- a comment\n and rand() > 0") is not None
    assert {e: r for e in TAKEN if (r := refusal(e)) is not None} == {}
    assert refusal("n > rand()") == (
        "t: expected predicate to be deterministic, got 'n > rand()', "
        "where rand() returns another value at each evaluation: a repeated run, a replay "
        "or a restatement would give other rows; derive it from the row, for example "
        "pmod(xxhash64(id), 100) < 50"
    )


def test_row_generating_functions_are_refused() -> None:
    """Spark computes them in a projection, which then has more rows than its input, or fewer."""
    for call in (
        *("explode(xs)", "explode_outer(xs)", "posexplode(xs)", "inline(array(struct(n)))"),
        *("stack(2, n)", "json_tuple(s, 'a')", "window(at, '1 day')", "session_window(at, '1 day')"),
    ):
        assert f"to give one value for each row, got {call!r}" in (refusal(call) or "")
    assert refusal("window.start", StructType([StructField("window", SCHEMA)])) is None
    assert refusal("`explode` + stack", SCHEMA) is None
    for call in (
        "to_json(struct(*))",
        "hash(n, *)",
        "struct(left.*)",
        "named_struct('a', struct( * ))",
    ):
        assert "* as an argument stands for the columns that the library adds" in (refusal(call) or "")
    for product in ("*", "left.*", "n * 2", "(n) * n", "xs[0] * 2", "count(*)", "t.n * t.n", "2*-n"):
        assert refusal(product) is None
    assert refusal("explode(xs) > 0") == (
        "t: expected predicate to give one value for each row, got 'explode(xs) > 0', where explode() "
        "makes several rows of one row, or none; use flat_map_values for several rows of a record, "
        "windowed_by or date_trunc for windows"
    )


def test_columns_named_like_functions() -> None:
    """A name without parentheses is a column, if there is one of that name: the expression is
    accepted."""
    names = ["current_date", "current_timestamp", "user", "session_user", "current_user", "now", "uuid"]
    columns = StructType([StructField(n, StringType()) for n in [*names, "k"]])
    for name in names:
        for expression in (name, name.upper(), f"`{name}` = 'x'", f"left.{name}", f"upper({name})"):
            assert refusal(expression, columns) is None
        assert refusal(f"{name}()", columns)
        table = Table("t", key="k", schema=columns, timestamp="cast(k as timestamp)")
        assert table.filter(f"{name} = 'x'", name="f")
        # a column of the result is not a column of the input
        if name not in ("now", "uuid"):
            plain = Table("t", key="k", schema=SCHEMA, timestamp="at")
            with pytest.raises(TopologyError, match=f"where {name}, which is no column here"):
                plain.map_values(f"{name} as {name}", name="m")


def table(name: str = "t", **more: Any) -> VersionedTable:
    about = {"key": "k", "schema": SCHEMA, "timestamp": "at", "history_retention": timedelta(days=1)}
    return VersionedTable(name, **{**about, **more})


def stream(**more: Any) -> Stream:
    return Stream("s", **{"key": "k", "schema": SCHEMA, "timestamp": "at", **more})


PLACES: dict[str, Callable[[str], Any]] = {
    "timestamp": lambda e: stream(timestamp=f"timestamp_seconds({e})"),
    "tombstone": lambda e: stream(tombstone=f"{e} > 0"),
    "tombstone (deleted_when)": lambda e: table(deleted_when=f"{e} > 0"),
    "partition_by": lambda e: stream(partition_by=f"cast({e} as int)", partitions=2),
    "deleted_at": lambda e: table(deleted_at=f"timestamp_seconds({e})"),
    "only_columns": lambda e: table(only_columns=f"if({e} > 0, 's', null)"),
    "dump_time": lambda e: table(
        source=SnapshotSource("/x", "jsonl", pattern="*", dump_time=f"timestamp_seconds({e})")
    ),
    "predicate": lambda e: table().filter(f"{e} > 0", name="f"),
    "predicate (not)": lambda e: table().filter_not(f"{e} > 0", name="f"),
    "select": lambda e: table().map_values(f"{e} as r", name="m"),
    "expression": lambda e: stream().flat_map_values(f"array({e})", column="x", name="f"),
    "group_key (select_key)": lambda e: stream().select_key(f"cast({e} as int) as r", name="r"),
    "partition_by (select_key)": lambda e: stream().select_key("n", name="r", partition_by=f"int({e})"),
    "group_key": lambda e: table().group_by(f"cast({e} as int) as r").count(name="c"),
    "group_key (stream)": lambda e: stream().group_by(f"int({e}) as r").count(name="c"),
    "aggregates": lambda e: table().group_by("n").aggregate({"x": f"sum({e})"}, name="c"),
    "aggregates (stream)": lambda e: stream().group_by().aggregate({"x": f"max({e})"}, name="c"),
    "aggregates (windowed)": lambda e: (
        stream()
        .group_by()
        .windowed_by(TumblingWindow(timedelta(hours=1)))
        .aggregate({"x": f"avg({e})"}, name="c")
    ),
    "select (aggregator)": lambda e: (
        table().group_by("n").aggregate(Aggregator(max, min), select=("k", f"{e} as x"), name="c")
    ),
    "select (stream-table)": lambda e: stream().join(table(), name="j", select=["left.n", f"{e} as x"]),
    "select (corrected)": lambda e: stream().join(
        table(), name="j", select=["left.n", f"{e} as x"], corrected_for=timedelta(hours=1)
    ),
    "select (stream-stream)": lambda e: stream().join(
        Stream("o", key="k", schema=SCHEMA, timestamp="at"),
        name="j",
        within=timedelta(hours=1),
        grace=timedelta(0),
        select=["left.n", f"{e} as x"],
    ),
    "select (table-table)": lambda e: table().join(
        table("o"), name="j", select=["left.n", f"{e} as x"]
    ),
    "select (history)": lambda e: table().join(
        table("o"), name="j", select=["left.n", f"{e} as x"], history="complete"
    ),
    "foreign_key": lambda e: table().join(
        table("o"), name="j", foreign_key=f"cast({e} as string)", select=["left.n"]
    ),
    "select (foreign-key)": lambda e: table().join(
        table("o"), name="j", foreign_key="s", select=["left.n", f"{e} as x"]
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_every_option_refuses_nondeterministic_expressions(place: str) -> None:
    assert PLACES[place]("1") is not None
    for expression in ("rand()", "unix_seconds(now())", "monotonically_increasing_id()"):
        with pytest.raises(TopologyError, match=f"expected {place.split(' (')[0]} to be deterministic"):
            PLACES[place](expression)


@pytest.mark.parametrize("place", PLACES)
def test_every_option_refuses_row_generators(place: str) -> None:
    with pytest.raises(TopologyError, match=f"{place.split(' (')[0]} to give one value for each row"):
        PLACES[place]("explode(array(1, 2))")


def test_function_lists_match_spark(spark: SparkSession) -> None:
    """Each function that Spark reports as nondeterministic is refused, and all functions of Spark are
    known."""
    rows = spark.createDataFrame([], SCHEMA)
    names = [r[0] for r in spark.sql("SHOW SYSTEM FUNCTIONS").collect()]
    with pytest.raises(AnalysisException, match="NONDETERMINISTIC"):
        _ = rows.agg(F.count(F.expr("rand()"))).schema
    flagged = set[str]()
    for name in names:
        if not name.isidentifier() or refusal(f"{name}()") is not None or not _may_be_flagged(name):
            continue
        for arguments in ("", "n", "xs", "s", "s, s", "n, n"):
            try:
                _ = rows.agg(F.count(F.expr(f"{name}({arguments})"))).schema
            except Exception as error:
                if "NONDETERMINISTIC" in str(error):
                    flagged.add(name)
            else:
                break
    assert flagged == set()
    # no function of Spark counts as a user's own function
    odd = {"collations", "percentile_cont", "percentile_disc", "range", "sql_keywords"}
    odd |= {
        "variant_explode",
        "variant_explode_outer",
    }  # table functions and aggregates: they are no expressions of a row
    # such functions of Spark 4.1 and 4.2
    odd |= {"approx_top_k", "approx_top_k_accumulate", "approx_top_k_combine", "measure"}
    odd |= {"vector_sum", "vector_avg", "python_worker_logs"}
    assert {n for n in names if n.isidentifier() and unknown_functions(f"{n}(1)")} <= odd
    assert unknown_functions("my_own(n) + `other`(1) + abs(n)") == {"my_own", "other"}


def _may_be_flagged(name: str) -> bool:
    """Whether a function's name suggests a random value or one of the environment. To ask Spark about
    each other function would take a second."""
    return any(part in name for part in ("rand", "uuid", "current", "file", "id", "user", "uniform"))


def test_nondeterministic_udf_is_refused(spark: SparkSession) -> None:
    spark.udf.register("tossed", F.udf(lambda n: n, "int").asNondeterministic())
    spark.udf.register("kept", F.udf(lambda n: n, "int"))
    store: Any = SimpleNamespace(spark=spark)
    source = stream(source=FilesSource("/x", "jsonl"))
    other = table(source=FilesSource("/x", "jsonl"))
    for bad, good in [
        (other.filter("tossed(n) > 0", name="f"), other.filter("kept(n) > 0", name="f")),
        (
            source.join(other, name="j", select=["tossed(left.n) + right.n as x"]),
            source.join(other, name="j", select=["kept(left.n) + right.n as x"]),
        ),
        (
            source.group_by().aggregate({"x": "sum(tossed(n))"}, name="c"),
            source.group_by().aggregate({"x": "sum(kept(n))"}, name="c"),
        ),
        (
            stream(timestamp="timestamp_seconds(tossed(n))"),
            stream(timestamp="timestamp_seconds(kept(n))"),
        ),
    ]:
        first: Any = [SimpleNamespace(node=node, previous=None) for node in (good, bad)]
        require_deterministic_functions(first[0], store)
        with pytest.raises(TopologyError, match=r"Spark marks .'tossed'. as nondeterministic: a run"):
            require_deterministic_functions(first[1], store)
    # after a first commit, the functions are not checked again
    later: Any = SimpleNamespace(node=other.filter("tossed(n) > 0", name="f"), previous="some")
    require_deterministic_functions(later, store)
