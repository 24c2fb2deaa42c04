"""Conversion of nested values, with fields matched by name."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from vt_dagster.topology.schema import same


def by_name(value: Column, got: DataType, wanted: DataType) -> Column:
    """Converts a value to another type: fields match by name at any depth and are null if missing.

    Atomic values are cast.

    Args:
        got, wanted: types without ``topology.schema.differences``.
    """
    if same(got, wanted):
        return value
    if isinstance(got, StructType) and isinstance(wanted, StructType):
        there = {f.name: f.dataType for f in got.fields}
        fields = [
            by_name(value[f.name], there[f.name], f.dataType).alias(f.name)
            if f.name in there
            else F.lit(None).cast(f.dataType).alias(f.name)
            for f in wanted.fields
        ]
        return F.when(value.isNotNull(), F.struct(*fields))
    if isinstance(got, ArrayType) and isinstance(wanted, ArrayType):
        element, other = got.elementType, wanted.elementType
        return F.transform(value, lambda one: by_name(one, element, other))
    if isinstance(got, MapType) and isinstance(wanted, MapType):
        entries = F.transform(
            F.map_entries(value),
            lambda one: F.struct(
                by_name(one["key"], got.keyType, wanted.keyType).alias("key"),
                by_name(one["value"], got.valueType, wanted.valueType).alias("value"),
            ),
        )
        return F.map_from_entries(entries)
    return value.cast(wanted)
