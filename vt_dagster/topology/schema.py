"""What the columns of a stream or table must be like."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

from pyspark.sql.types import (
    ArrayType,
    DataType,
    MapType,
    NullType,
    StructType,
    TimestampType,
)

from vt_dagster.columns import RESERVED, TIMESTAMP
from vt_dagster.errors import TopologyError

_ODD_CHARACTERS = re.compile(r"[ .,;{}()=`\t\n]")


def as_struct(schema: Any, name: str) -> StructType:
    """The Spark schema of a pandera model (``to_structtype``) or of a StructType itself."""
    if isinstance(schema, StructType):
        return schema
    convert = getattr(schema, "to_structtype", None)
    if convert is None:
        raise TopologyError(
            f"{name}: schema must be a pandera.pyspark DataFrameModel or a StructType, got {schema!r}"
        )
    return cast(StructType, convert())


def check_columns(name: str, kind: str, key: Sequence[str], schema: StructType, timestamp: str) -> None:
    """Refuses names that the tables cannot have, and keys that are no keys.

    Args:
        name, kind: of the stream or table, for messages.
        timestamp: what says when a record was true.
    """
    names = [f.name for f in schema.fields]
    lowered = [n.lower() for n in names]
    twice = sorted({n for n in lowered if lowered.count(n) > 1})
    if twice:
        raise TopologyError(
            f"{name}: columns {twice} stand more than once in the schema (Spark does not "
            "tell upper from lower case); rename one"
        )
    taken = [n for n in names if n.lower() in RESERVED or n.startswith("_")]
    if taken:
        raise TopologyError(
            f"{name}: columns {taken} have names that vt_dagster needs itself "
            f"({', '.join(sorted(RESERVED))}, and names that begin with an underscore); "
            "rename them in the schema"
        )
    odd = [n for n in names if _ODD_CHARACTERS.search(n)]
    if odd:
        raise TopologyError(
            f"{name}: columns {odd} have characters in their names that Delta Lake or Spark's "
            "SQL does not take (blank . , ; { } ( ) = ` tab, line end); rename them in the schema"
        )
    if TIMESTAMP in lowered and timestamp != TIMESTAMP:
        raise TopologyError(
            f"{name}: the schema has a column 'timestamp', but the record's timestamp is "
            f"declared as {timestamp!r}; the log can hold only one 'timestamp': rename the "
            "column or declare timestamp='timestamp'"
        )
    if not key:
        raise TopologyError(f"{name}: a {kind} needs at least one key column, got none; name one")
    missing = [k for k in key if k not in names]
    if missing:
        raise TopologyError(
            f"{name}: key columns {missing} are not in the schema, which has {names}; correct the key, "
            "or add them to the schema"
        )
    for k in key:
        if _holds_map(schema[k].dataType):
            raise TopologyError(
                f"{name}: key column {k!r} is {schema[k].dataType.simpleString()}; "
                "a map can be neither grouped nor joined: use its entries or a string"
            )


def check_timestamp(name: str, schema: StructType, timestamp: str) -> None:
    """Refuses a column that is not there or is no TIMESTAMP; an expression is left to Spark."""
    if timestamp.isidentifier():
        if timestamp not in schema.names:
            raise TopologyError(
                f"{name}: timestamp column {timestamp!r} is not in the schema, which has "
                f"{schema.names}; name one of them, or an expression over them"
            )
        if not isinstance(schema[timestamp].dataType, TimestampType):
            got = schema[timestamp].dataType.simpleString()
            raise TopologyError(
                f"{name}: timestamp column {timestamp!r} is {got}, expected timestamp; "
                f"convert it in an expression, for example "
                f"timestamp='timestamp_millis({timestamp})'"
            )


def same_types(ones: Sequence[DataType], others: Sequence[DataType]) -> bool:
    """Whether keys can be compared; a type that only Spark can tell is taken to fit."""
    if len(ones) != len(others):
        return False
    unknown = NullType()
    return all(unknown in (a, b) or a == b for a, b in zip(ones, others, strict=True))


def _holds_map(kind: DataType) -> bool:
    if isinstance(kind, MapType):
        return True
    if isinstance(kind, ArrayType):
        return _holds_map(kind.elementType)
    if isinstance(kind, StructType):
        return any(_holds_map(f.dataType) for f in kind.fields)
    return False
