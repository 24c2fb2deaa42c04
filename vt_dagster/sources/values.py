"""Values that reading would change without a word: text that is not UTF-8, and numbers with more
digits than their type has."""

from __future__ import annotations

from functools import reduce
from operator import or_

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    DecimalType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

_MOST_DIGITS = 38
_LOST_DIGITS = r"\.\d{6}\d*[1-9]"
"""Of a time's text: what is shorter than a microsecond."""
_WHOLE_DATE = r"^\s*[+-]?\d+(-\d{1,2}){0,2}\s*$"


def widened(kind: DataType) -> DataType:
    """A type with as many digits behind the point as a decimal can have, and the same before it.

    What holds a map stays as it is, since maps are not compared; and so does a decimal of 38 digits.
    """
    if _holds(kind, MapType):
        return kind
    if isinstance(kind, DecimalType):
        return DecimalType(_MOST_DIGITS, _MOST_DIGITS - kind.precision + kind.scale)
    if isinstance(kind, ArrayType):
        element = widened(kind.elementType)
        return kind if element == kind.elementType else ArrayType(element)
    if isinstance(kind, StructType):
        wide = [widened(f.dataType) for f in kind.fields]
        if wide != [f.dataType for f in kind.fields]:
            together = zip(kind.fields, wide, strict=True)
            return StructType([StructField(f.name, one) for f, one in together])
    return kind


def narrowed(row: Column, schema: StructType) -> tuple[Column, Column]:
    """A row that was read as ``widened`` columns: as the schema's, and whether digits were lost."""
    fields: list[Column] = []
    lost = F.lit(False)
    if all(widened(f.dataType) == f.dataType for f in schema.fields):
        return row, lost
    for f in schema.fields:
        value, wide = row[f.name], widened(f.dataType)
        if wide != f.dataType:
            exact = value.try_cast(_nullable(f.dataType))
            lost = lost | ~exact.try_cast(wide).eqNullSafe(value)
            value = exact
        fields.append(value.alias(f.name))
    return F.struct(*fields), lost


def wide_columns(schema: StructType) -> StructType:
    """The columns to read a row of a schema by, see :func:`narrowed`; each may be null."""
    return StructType([StructField(f.name, widened(f.dataType)) for f in schema.fields])


def exactly(text: Column, kind: DataType) -> Column:
    """A text as a value of a type; null where it is none, or the type would round it."""
    value = text.try_cast(kind)
    if isinstance(kind, DecimalType):
        wide = widened(kind)
        return F.when(value.cast(wide) == text.try_cast(wide), value)
    if isinstance(kind, TimestampType | TimestampNTZType):
        return F.when(~F.rlike(text, F.lit(_LOST_DIGITS)), value)
    if isinstance(kind, DateType):
        return F.when(F.rlike(text, F.lit(_WHOLE_DATE)), value)
    return value


def is_no_text(value: Column, kind: DataType) -> Column:
    """Whether a string in a value is not UTF-8; never null."""
    no = F.lit(False)
    if isinstance(kind, StringType):
        return F.coalesce(~F.is_valid_utf8(value), no)
    if not _holds(kind, StringType):
        return no
    if isinstance(kind, StructType):
        return reduce(or_, [is_no_text(value[f.name], f.dataType) for f in kind.fields])
    if isinstance(kind, MapType):
        keys = is_no_text(F.map_keys(value), ArrayType(kind.keyType))
        return keys | is_no_text(F.map_values(value), ArrayType(kind.valueType))
    assert isinstance(kind, ArrayType)
    element = kind.elementType
    return F.coalesce(F.exists(value, lambda one: is_no_text(one, element)), no)


def repeats_a_field(text: Column) -> Column:
    """Whether a JSON object has a field twice, of which Spark takes the last; not in nested objects."""

    def twice(names: Column) -> Column:
        return F.size(names) > F.size(F.array_distinct(names))

    # Inside of a function the names have one: Spark would read the text for each time they are named.
    return F.coalesce(F.exists(F.array(F.json_object_keys(text)), twice), F.lit(False))


def _nullable(kind: DataType) -> DataType:
    """A type whose parts may all be null, as those are that Spark has read from text."""
    if isinstance(kind, ArrayType):
        return ArrayType(_nullable(kind.elementType))
    if isinstance(kind, StructType):
        return StructType([StructField(f.name, _nullable(f.dataType)) for f in kind.fields])
    return kind


def _holds(kind: DataType, wanted: type[DataType]) -> bool:
    """Whether a type is of a kind, or one within it."""
    if isinstance(kind, wanted):
        return True
    if isinstance(kind, ArrayType):
        return _holds(kind.elementType, wanted)
    if isinstance(kind, MapType):
        return _holds(kind.keyType, wanted) or _holds(kind.valueType, wanted)
    return isinstance(kind, StructType) and any(_holds(f.dataType, wanted) for f in kind.fields)
