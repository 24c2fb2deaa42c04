"""Definitions that are refused on load: each message names the asset, the value, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pandera.pyspark as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    CharType,
    DayTimeIntervalType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
    VariantType,
    YearMonthIntervalType,
)

from vt_dagster import (
    FilesSource,
    Materialized,
    Stream,
    Table,
    VersionedTable,
    build_definitions,
)
from vt_dagster.errors import TopologyError
from vt_dagster.topology.model import topological

HOUR = timedelta(hours=1)


class Bounded(pa.DataFrameModel):
    k: StringType
    w: LongType = pa.Field(ge="zero")
    at: TimestampType


class Listed(pa.DataFrameModel):
    k: StringType
    w: LongType = pa.Field(isin=[1, None])
    at: TimestampType


class Unique(pa.DataFrameModel):
    k: StringType
    at: TimestampType

    class Config:
        unique = "k"


def schema(**more: Any) -> StructType:
    kinds = {"k": StringType(), "v": StringType(), "at": TimestampType(), **more}
    return StructType([StructField(name, kind) for name, kind in kinds.items() if kind])


def stream(name: str = "sales", **options: Any) -> Stream:
    return Stream(name, **{"key": "k", "schema": schema(), "timestamp": "at", **options})


def table(name: str = "rates", **options: Any) -> Table:
    return Table(name, **{"key": "k", "schema": schema(), "timestamp": "at", **options})


def versioned(name: str = "prices", **options: Any) -> VersionedTable:
    about = {"key": "k", "schema": schema(), "timestamp": "at", "history_retention": 24 * HOUR}
    return VersionedTable(name, **{**about, **options})


def join(left: Any = None, right: Any = None, kind: str = "left", **options: Any) -> Stream:
    about = {"select": ["left.*", "right.v as price"], "name": "priced", **options}
    left, right = left or stream(), right or versioned()
    return left.left_join(right, **about) if kind == "left" else left.join(right, **about)


REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "name": (lambda: stream("my sales"), ["'my sales'", "Stream", "letters, digits"]),
    "name with a digit first": (lambda: table("1st"), ["'1st'", "Table", "not starting with a digit"]),
    "no schema": (lambda: stream(schema=["k"]), ["sales", "pandera.pyspark", "['k']"]),
    "schema as a text": (
        lambda: stream(schema="k strin, at timestamp"),
        ["sales", "got 'k strin, at timestamp'; ", "StructType().add('product', 'string')", "session"],
    ),
    "column twice": (
        lambda: stream(schema=schema(K=StringType())),
        ["sales", "['k']", "more than once", "rename one"],
    ),
    "reserved column": (
        lambda: stream(schema=schema(offset=LongType())),
        ["sales", "['offset']", "names that vt_dagster reserves", "rename"],
    ),
    "reserved for the time of record": (
        lambda: table(schema=schema(Recorded_At=TimestampType())),
        ["rates", "['Recorded_At']", "names that vt_dagster reserves", "rename"],
    ),
    "column with an underscore": (
        lambda: stream(schema=schema(_x=LongType())),
        ["sales", "['_x']", "begin with an underscore"],
    ),
    "odd character": (
        lambda: stream(schema=schema(**{"a b": LongType()})),
        ["sales", "['a b']", "rename"],
    ),
    "star": (lambda: stream(schema=schema(**{"*": LongType()})), ["sales", "['*']", "rename"]),
    "empty column": (lambda: stream(schema=schema(**{"": LongType()})), ["sales", "['']", "rename"]),
    "control character": (
        lambda: stream(schema=schema(**{"a\r": LongType()})),
        ["sales", "['a\\r']", "rename"],
    ),
    "odd field": (
        lambda: stream(schema=schema(s=ArrayType(StructType().add("a b", LongType())))),
        ["sales", "['s/a b']", "rename"],
    ),
    "field twice": (
        lambda: stream(schema=schema(s=StructType().add("x", LongType()).add("X", LongType()))),
        ["sales", "['s/x']", "more than once in their struct"],
    ),
    "time as key": (
        lambda: table(key="timestamp", schema=schema(timestamp=TimestampType()), timestamp="timestamp"),
        ["rates", "a key without 'timestamp'", "another name"],
    ),
    "no timestamp": (lambda: stream(timestamp=""), ["sales", "timestamp column ''", "name one"]),
    "odd timestamp of another type": (
        lambda: stream(timestamp="at-ms", schema=schema(**{"at-ms": LongType()})),
        ["sales", "'at-ms'", "bigint", "timestamp_millis(`at-ms`)"],
    ),
    "second timestamp": (
        lambda: stream(schema=schema(timestamp=TimestampType())),
        ["sales", "'timestamp'", "'at'", "rename the column or declare"],
    ),
    "no key": (lambda: table(key=()), ["rates", "Table needs at least one key column"]),
    "key not there": (
        lambda: table(key=("k", "id")),
        ["rates", "['id']", "not in the schema", "'k', 'v', 'at'"],
    ),
    "map in a key": (
        lambda: table(key="m", schema=schema(m=ArrayType(MapType(StringType(), StringType())))),
        ["rates", "'m'", "array<map<string,string>>", "use its entries or a string"],
    ),
    "types that only some readers know": (
        lambda: stream(schema=schema(x=ArrayType(VariantType()), c=StringType("UTF8_LCASE"))),
        ["sales", "['x array<variant>', 'c string collate UTF8_LCASE']", "a variant as STRING"],
    ),
    "types that Delta does not have": (
        lambda: stream(
            schema=schema(
                n=NullType(),
                d=DayTimeIntervalType(),
                m=MapType(StringType(), YearMonthIntervalType()),
                s=StructType().add("inner", StructType()),
                l=ArrayType(NullType()),
            )
        ),
        [
            "'n void', 'd interval day to second'",
            "'m map<",
            "'s struct<inner:struct<>>', 'l array<void>'",
            "an interval as BIGINT",
            "CAST(NULL AS STRING)",
            "a struct with a field",
        ],
    ),
    "timestamp not there": (
        lambda: stream(timestamp="time"),
        ["sales", "'time'", "not in the schema", "'at'"],
    ),
    "timestamp of another type": (
        lambda: stream(timestamp="ms", schema=schema(ms=LongType())),
        ["sales", "'ms'", "bigint", "expected timestamp", "timestamp_millis(ms)"],
    ),
    "timestamp without a zone": (
        lambda: stream(timestamp="ms", schema=schema(ms=TimestampNTZType())),
        ["sales", "'ms'", "timestamp_ntz", "timestamp='cast(ms as timestamp)'"],
    ),
    "timestamp as a text": (
        lambda: stream(timestamp="ms", schema=schema(ms=StringType())),
        ["sales", "'ms'", "string", "timestamp='cast(ms as timestamp)'"],
    ),
    "renamed as a list": (
        lambda: stream(renamed=["w"]),
        ["sales", "{'before': 'now'}", "got ['w']", "correct or remove it"],
    ),
    "partitions": (lambda: stream(partitions=0), ["sales", "partitions must be 1 or more, got 0"]),
    "partitions as a boolean": (lambda: stream(partitions=True), ["must be 1 or more, got True"]),
    "null among values": (
        lambda: stream(schema=Listed),
        ["sales: expected isin of the column 'w' to compare with numbers, got None; correct it"],
    ),
    "bound of another type": (
        lambda: stream(schema=Bounded),
        ["sales: expected ge of the column 'w' to compare with numbers, got 'zero'; correct it"],
    ),
    "null key rule": (lambda: stream(null_key="drop"), ["sales", "'quarantine' or 'keep'", "'drop'"]),
    "contract break rule": (
        lambda: stream(on_contract_break="drop"),
        ["sales", "on_contract_break", "'fail' or 'quarantine'", "'drop'"],
    ),
    "unique in a model": (
        lambda: stream(schema=Unique),
        ["sales", "without unique in its Config, got ['k']", "remove it", "unique_by of a stream"],
    ),
    "contract break without checks": (
        lambda: stream(on_contract_break="quarantine"),
        ["sales", "needs a pandera model", "got a StructType", "remove on_contract_break"],
    ),
    "null key of a table": (
        lambda: table(null_key="keep"),
        ["rates", "a table cannot keep records without a key", "leave null_key out"],
    ),
    "retention as a number": (
        lambda: versioned(history_retention=30),
        ["prices", "history_retention", "timedelta", "got 30", "timedelta(days=30)"],
    ),
    "negative retention": (
        lambda: versioned(history_retention=-HOUR),
        ["prices", "history_retention must be between 0 and", "got -1 day, 23:00:00"],
    ),
    "endless retention": (
        lambda: versioned(history_retention=timedelta(days=999_999)),
        ["prices", "history_retention must be between 0 and"],
    ),
    "segment interval": (
        lambda: versioned(segment_interval=timedelta(0)),
        ["prices", "segment_interval must be longer than 0", "leave it out"],
    ),
    "stream on the right": (
        lambda: join(right=stream("other")),
        ["priced", "a join of two streams needs a time window", "set within=timedelta(hours=1)"],
    ),
    "table on the left": (
        lambda: join(left=table(), grace_period=HOUR),
        ["priced", "a grace period is only for a join of a stream", "'rates'", "remove grace_period"],
    ),
    "key types": (
        lambda: join(right=versioned(key="n", schema=schema(n=IntegerType()))),
        ["priced", "sales has (k string)", "prices has (n int)", "cast the key"],
    ),
    "number of keys": (
        lambda: join(left=stream(key=("k", "v"))),
        ["priced", "sales has (k string, v string)", "prices has (k string)"],
    ),
    "odd column of a side": (
        lambda: join(left=stream(schema=schema(**{"a-b": LongType()})), select=["left.a-b as x"]),
        ["priced", "'left.a-b'", "in backticks", "left.`a-b`"],
    ),
    "number of a side": (
        lambda: join(left=stream(schema=schema(**{"1": LongType()})), select=["left.1 + 1 as x"]),
        ["priced", "'left.1'", "left.`1`"],
    ),
    "grace with a plain table": (
        lambda: join(right=table(), grace_period=HOUR),
        [
            "priced",
            "'rates' is not versioned",
            "VersionedTable with a history_retention",
            "remove grace_period",
        ],
    ),
    "no grace at all with a plain table": (
        lambda: join(right=table(), grace_period=timedelta(0)),
        ["priced", "'rates' is not versioned"],
    ),
    "grace beyond retention": (
        lambda: join(grace_period=25 * HOUR),
        ["priced", "1 day, 1:00:00", "1 day, 0:00:00", "'prices'", "shorten grace_period or lengthen"],
    ),
    "grace as a number": (lambda: join(grace_period=3), ["priced", "grace_period", "got 3"]),
    "negative grace": (lambda: join(grace_period=-HOUR), ["priced", "grace_period must be between 0"]),
    "selected twice": (
        lambda: join(select=["left.v", "right.v"]),
        ["priced", "['v']", "more than once", "'right.v as prices_v'"],
    ),
    "selected unknown": (
        lambda: join(select=["right.cost"]),
        ["priced", "'right.cost'", "'prices' has no column 'cost'", "'v'"],
    ),
    "selected validity of a plain table": (
        lambda: join(right=table(), select=["right.valid_from"]),
        ["priced", "'rates' has no column 'valid_from'"],
    ),
    "selected without a name": (
        lambda: join(select=["upper(left.v)"]),
        ["priced", "'upper(left.v)'", "expression as name"],
    ),
    "selected without a side": (
        lambda: join(select=["v || 'x' as w"]),
        ["priced", "\"v || 'x' as w\"", "write 'left.v' or 'right.v'"],
    ),
    "another timestamp": (
        lambda: join(select=["left.v", "right.timestamp"]),
        ["priced", "own timestamp", "as seen_at"],
    ),
    "versions of a stream": (
        lambda: join(materialized=Materialized(24 * HOUR)),
        ["priced", "a stream_table_join has, got 'materialized'; remove it"],
    ),
    "foreign key of a stream": (
        lambda: join(foreign_key="v"),
        ["priced", "got 'foreign_key'; make it the key of the stream with select_key"],
    ),
    "another key of a result": (
        lambda: join(left=versioned("costs"), key="v"),
        ["priced", "a table_table_join has, got 'key'; remove it"],
    ),
    "retention of a result": (
        lambda: versioned().filter("v > 1", name="cheap", history_retention=HOUR),
        ["cheap", "got 'history_retention'; set materialized=Materialized(history_retention=...)"],
    ),
    "two of one name": (
        lambda: topological([stream(), stream(partitions=2)]),
        ["two different assets", "'sales'", "rename one"],
    ),
    "no nodes": (lambda: build_definitions(), ["at least one stream or table"]),
    "no source": (lambda: build_definitions(stream()), ["sales", "expected a source", "FilesSource("]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_definitions_load(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(TopologyError) as caught:
        make()
    for part in said:
        assert part in str(caught.value)


def test_key_and_schema_are_normalized() -> None:
    node = versioned()
    assert node.key == ("k",)
    assert node.key_types == (StringType(),)
    assert node.value_columns == ("v", "at")
    assert join(select="right.v as price").schema.names == ["k", "price"]
    assert node.inputs == ()
    assert node.versioned
    assert not table().versioned


def test_grace_period_may_equal_history_retention() -> None:
    result = join(grace_period=24 * HOUR)
    assert [n.name for n in result.inputs] == ["sales", "prices"]
    assert not isinstance(result, Table), "the result of a join is a stream"


def test_join_columns() -> None:
    result = join(
        select=[
            "right.valid_from as since",
            "left.v",
            "concat(left.v, right.v) as both",
            "right.v as p",
        ]
    )
    assert result.key == ("k",)
    assert {f.name: f.dataType.simpleString() for f in result.schema.fields} == {
        "k": "string",
        "since": "timestamp",
        "v": "string",
        "both": "void",  # Spark determines the type
        "p": "string",
    }


def test_composite_key_of_nested_type() -> None:
    both = schema(n=StructType([StructField("x", IntegerType())]))
    result = join(
        left=stream(key=("k", "n"), schema=both), right=versioned(key=("k", "n"), schema=both)
    )
    assert result.key == ("k", "n")


def test_topological_order_lists_inputs_first() -> None:
    priced, again = join(), join(name="again")
    assert [n.name for n in topological([priced, again, stream()])] == [
        "sales",
        "prices",
        "priced",
        "again",
    ]


def test_source_is_needed_only_by_definitions() -> None:
    source = FilesSource("nowhere")
    sales, prices = stream(source=source), versioned(source=source)
    assert build_definitions(join(left=sales, right=prices)) is not None


def test_varchar_and_char_become_string() -> None:
    kinds = schema(v=VarcharType(3), x=MapType(StringType(), StructType().add("c", CharType(2))))
    texts = schema(v=StringType(), x=MapType(StringType(), StructType().add("c", StringType())))
    assert stream(schema=kinds).schema == texts


def test_column_sides_in_join_expressions() -> None:
    dated = {"left": stream(schema=schema(v=StringType(), date=StringType()))}
    cases = {
        "concat('turn left.now', right.v)": ["v"],
        "left.v -- right.w": ["v"],
        "`left`.v || `right`.`v`": ["v", "v"],
        "date '2026-01-01'": [],
        "cast('2026-01-01' as date)": [],
    }
    for sql, columns in cases.items():
        operator = join(**dated, select=[f"{sql}\n as x"]).operator
        assert operator is not None
        assert [column for _, column in operator.lineage()["x"]] == columns, sql
