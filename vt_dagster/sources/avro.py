"""Avro records as columns: each by the schema that it was written with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BooleanType,
    ByteType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from vt_dagster.errors import SourceError
from vt_dagster.topology.renames import was

READ = "_vt_read"
"""Of a row: whether the message could be read."""
_PLAIN = (
    StringType,
    BooleanType,
    ByteType,
    ShortType,
    IntegerType,
    LongType,
    FloatType,
    DoubleType,
)
"""Types of which JSON writes a value as Avro's schemas do."""


def read_avro(message: Column, schema: str, wanted: StructType) -> Column:
    """An Avro message with all its fields, and one more that says whether it could be read.

    Spark gives an unreadable message as a row of nulls, which a readable one may be too: a field that
    only the reader has, with a default, tells them apart.
    """
    from pyspark.sql.avro.functions import from_avro

    declared = json.loads(schema)
    if not _is_record(declared):
        if len(wanted.fields) != 1:
            raise SourceError(
                f"Avro: the schema is {schema}, expected a record with the fields {wanted.names}; "
                "give another schema, or a single column for such a value"
            )
        return from_avro(message, schema, {"mode": "PERMISSIVE"})
    marked = {"name": READ, "type": ["boolean", "null"], "default": True}
    reader = {**declared, "fields": [*declared["fields"], marked]}
    return from_avro(message, schema, {"mode": "PERMISSIVE", "avroSchema": json.dumps(reader)})


def row_of(value: Column, schema: str, wanted: StructType, newest: str = "null") -> Column:
    """The wanted fields of what ``read_avro`` made, and whether it could be read.

    Args:
        newest: has defaults of fields that the schema lacks, and aliases of those that it has by
            another name.
    """
    declared = json.loads(schema)
    if not _is_record(declared):
        only = value.cast(wanted.fields[0].dataType)
        return F.struct(only.alias(wanted.names[0]), value.isNotNull().alias(READ))
    names = {one["name"] for one in declared["fields"]}
    groups = [*_aliases(declared), *_aliases(json.loads(newest))]
    written = [_written_as(f.name, names, groups) for f in wanted.fields]
    asked = StructType(
        [StructField(n, f.dataType) for n, f in zip(written, wanted.fields, strict=True)]
    )
    defaults = _defaults(newest)
    columns, lost = list[Column](), [F.lit(False)]
    fields = _projected(value, declared, asked, {}, lost)
    for f, name, column in zip(wanted.fields, written, fields, strict=True):
        there = name in names or names & {*was(f)}
        if not there and f.name in defaults and isinstance(f.dataType, _PLAIN):
            column = F.lit(defaults[f.name]).cast(f.dataType)
        columns.append(column.alias(f.name))
    return F.struct(*columns, F.when(~reduce(or_, lost), value[READ]).alias(READ))


def _aliases(declared: Any) -> list[set[str]]:
    """The names of each field of a record that has others besides."""
    fields = declared["fields"] if _is_record(declared) else []
    return [{one["name"], *one["aliases"]} for one in fields if one.get("aliases")]


def _written_as(column: str, names: set[str], groups: Sequence[set[str]]) -> str:
    """The name by which a record's schema has a column: its own, or one of it by an alias."""
    if column in names:
        return column
    found = {n for group in groups if column in group for n in group & names}
    return min(found, default=column)


def _defaults(schema: str) -> dict[str, Any]:
    """The defaults of a record's fields that JSON and Spark say alike."""
    declared = json.loads(schema)
    fields = declared["fields"] if _is_record(declared) else []
    return {one["name"]: d for one in fields if isinstance(d := one.get("default"), str | int | float)}


def _is_record(kind: Any) -> bool:
    return isinstance(kind, dict) and kind.get("type") == "record"


def _projected(
    row: Column,
    record: Mapping[str, Any],
    wanted: StructType,
    known: dict[str, Any],
    lost: list[Column],
) -> list[Column]:
    """The wanted fields of an Avro record by name, whatever their order and further fields.

    Args:
        lost: takes whether a field has a value that its column cannot have.
    """
    kinds: dict[str, Any] = {}
    known[record["name"]] = record
    known[f"{record.get('namespace', '')}.{record['name']}"] = record
    for one in record["fields"]:
        parts = one["type"] if isinstance(one["type"], list) else [one["type"]]
        for part in parts:
            kind = known.get(part) if isinstance(part, str) else part
            if isinstance(kind, dict) and _is_record(kind):
                known[kind["name"]] = kinds[one["name"]] = kind
                known[f"{record.get('namespace', '')}.{kind['name']}"] = kind
    names = {one["name"] for one in record["fields"]}
    return [_cast(row, f, names, kinds, known, lost).alias(f.name) for f in wanted.fields]


def _cast(
    row: Column,
    wanted: StructField,
    names: set[str],
    records: Mapping[str, Any],
    known: dict[str, Any],
    lost: list[Column],
) -> Column:
    if wanted.name not in names:
        return F.lit(None).cast(wanted.dataType)
    value = row[wanted.name]
    if wanted.name in records and isinstance(wanted.dataType, StructType):
        inner = _projected(value, records[wanted.name], wanted.dataType, known, lost)
        return F.when(value.isNotNull(), F.struct(*inner))
    found = value.try_cast(wanted.dataType)
    lost.append(value.isNotNull() & found.isNull())
    return found
