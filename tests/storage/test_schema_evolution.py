"""Changes of a live table's columns: which it follows, and the message of each refusal. No Spark."""

from __future__ import annotations

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from vt_dagster.errors import StorageError
from vt_dagster.storage.schema_evolution import evolve, evolved, widens


def columns(**kinds: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


KINDS: list[DataType] = [
    *(ByteType(), ShortType(), IntegerType(), LongType(), FloatType(), DoubleType()),
    *(DecimalType(5, 2), DecimalType(12, 2), DecimalType(12, 4), DecimalType(12, 0)),
    *(StringType(), BinaryType(), BooleanType(), DateType(), TimestampType()),
    *(ArrayType(IntegerType()), ArrayType(LongType()), columns(a=IntegerType())),
    *(columns(a=LongType()), columns(a=IntegerType(), b=IntegerType())),
    *(MapType(StringType(), IntegerType()), MapType(StringType(), LongType())),
]
LONGER = {
    *(("tinyint", "smallint"), ("tinyint", "int"), ("tinyint", "bigint")),
    *(("smallint", "int"), ("smallint", "bigint"), ("int", "bigint")),
    *(("float", "double"), ("decimal(5,2)", "decimal(12,2)")),
}


def test_type_widening_pairs() -> None:
    """Of all pairs of types, only those in ``LONGER`` are widened."""
    found = {(a.simpleString(), b.simpleString()) for a in KINDS for b in KINDS if widens(a, b)}
    assert found == LONGER


def test_supported_schema_changes() -> None:
    old = columns(n=IntegerType(), gone=StringType(), timestamp=TimestampType())
    then = columns(k=StringType(), n=IntegerType(), gone=StringType(), odd=IntegerType(), old=old)
    old = columns(note=DateType(), n=LongType(), timestamp=TimestampType())
    now = columns(note=DateType(), n=LongType(), k=StringType(), odd=NullType(), old=old)
    found = evolve(then, now, fixed={"k"}, required={"k"}, declared=["k", "n", "gone", "odd"])
    assert not found.refused
    assert found.columns.simpleString() == (
        "struct<k:string,n:bigint,gone:string,odd:int,"
        "old:struct<n:bigint,gone:string,timestamp:timestamp,note:date>,note:date>"
    )
    assert found.summary == (
        "columns change: new, null in old rows: note; wider type: n: int -> bigint; "
        "null from now on: gone"
    )


def test_reordered_or_nullable_columns_are_no_change() -> None:
    """Another order of columns or another nullability is no change, also within an array."""
    then = columns(a=ArrayType(StringType()), n=IntegerType())
    now = StructType([StructField("n", IntegerType(), False)])
    now = now.add("a", ArrayType(StringType(), containsNull=False), False)
    found = evolve(then, now, required={"a", "n"})
    assert found.columns == then
    assert not found.summary
    assert not found.refused


def test_returning_column_must_have_its_old_type() -> None:
    """A column that is left out is not reported twice. If it comes back, it must have its old type."""
    then = columns(k=StringType(), gone=IntegerType())
    assert not evolve(then, columns(k=StringType()), declared=["k"]).summary
    assert not evolve(then, then, declared=["k"]).summary
    wrong = columns(k=StringType(), gone=StringType())
    assert evolve(then, wrong, declared=["k"]).refused == ("gone: int -> string",)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (
            columns(k=LongType(), n=LongType()),
            "k: int -> bigint, which is part of the key or the partitioning",
        ),
        (columns(k=IntegerType(), n=IntegerType()), "n: bigint -> int"),
        (columns(k=IntegerType(), n=DoubleType()), "n: bigint -> double"),
        (columns(k=IntegerType(), n=StringType()), "n: bigint -> string"),
        (columns(k=IntegerType(), N=LongType()), "n is now declared as N"),
        (columns(k=IntegerType(), n=LongType(), must=DateType()), "must is new and must not be null"),
        (columns(k=IntegerType(), m=LongType()), "n is missing and m is new: if it is one column"),
    ],
)
def test_refused_schema_changes(now: StructType, said: str) -> None:
    then = columns(k=IntegerType(), n=LongType())
    with pytest.raises(StorageError) as raised:
        evolved("prices", then, now, fixed={"k"}, required={"k", "must"})
    text = str(raised.value)
    assert text.startswith(
        "prices: expected columns that the stored rows can be read with, got incompatible ones"
    )
    assert said in text
    assert "vt-dagster replay" in text


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (DecimalType(10, 2), DecimalType(8, 2)),
        (DecimalType(10, 2), DecimalType(20, 4)),
        (ArrayType(IntegerType()), ArrayType(LongType())),
        (columns(a=IntegerType()), columns(a=IntegerType(), b=IntegerType())),
        (DateType(), TimestampType()),
        (IntegerType(), DecimalType(20, 0)),
    ],
    ids=lambda kind: kind.simpleString(),
)
def test_incompatible_type_is_refused(then: DataType, now: DataType) -> None:
    found = evolve(columns(x=then), columns(x=now))
    assert found.refused == (f"x: {then.simpleString()} -> {now.simpleString()}",)


def test_refused_column_of_old_row_is_named_once() -> None:
    """``old`` has the same columns as the row, so a refused column is named once."""
    then = columns(n=LongType(), old=columns(n=LongType()))
    now = columns(n=IntegerType(), old=columns(n=IntegerType()))
    assert evolve(then, now).refused == ("n: bigint -> int",)


def test_simultaneous_input_changes_are_no_rename() -> None:
    """A consumer may see two changes of its input at once: one column is missing, another is new."""
    then, now = columns(k=StringType(), a=DateType()), columns(k=StringType(), b=DateType())
    assert evolve(then, now).refused
    assert not evolve(then, now, derived=True).refused


def test_drop_and_add_of_different_types_are_no_rename() -> None:
    """A missing and a new column of different types are one dropped and one added column."""
    found = evolve(columns(k=StringType(), n=IntegerType()), columns(k=StringType(), s=BooleanType()))
    assert not found.refused
    assert (found.dropped, found.added) == (("n",), ("s",))
