"""Columns in YAML: Spark types as texts, and pandera checks by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Annotated, Any

import pandera.pyspark as pa
import pyspark.sql.types as T
from pydantic import BeforeValidator, Field, create_model

from vt_dagster.components.yaml_models import Part, optional
from vt_dagster.errors import TopologyError

_TYPES: dict[str, type[T.DataType]] = {
    "string": T.StringType,
    "boolean": T.BooleanType,
    "byte": T.ByteType,
    "tinyint": T.ByteType,
    "short": T.ShortType,
    "smallint": T.ShortType,
    "int": T.IntegerType,
    "integer": T.IntegerType,
    "long": T.LongType,
    "bigint": T.LongType,
    "float": T.FloatType,
    "double": T.DoubleType,
    "date": T.DateType,
    "timestamp": T.TimestampType,
    "binary": T.BinaryType,
}
_DECIMAL = re.compile(r"decimal\(\s*(\d+)\s*,\s*(\d+)\s*\)")
_ARRAY = re.compile(r"array<(.+)>")

CHECKS = (
    *("eq", "ne", "gt", "ge", "lt", "le", "in_range", "isin", "notin"),
    *("str_contains", "str_startswith", "str_endswith"),
)
"""The pandera checks for PySpark, by their names in ``pandera.pyspark.Field``."""


def _fields() -> dict[str, Any]:
    kinds = {n: p.annotation for n, p in inspect.signature(pa.Field).parameters.items()}
    lists = {"in_range", "isin", "notin"}
    return {
        "type": (
            str,
            Field(description="A Spark type: " + ", ".join(_TYPES) + ", decimal(p,s), array<…>"),
        ),
        "nullable": (bool, Field(default=False, description="Whether the column may be null.")),
        "description": (optional(str), Field(default=None, description="Shown in Dagster.")),
        **{c: (optional(list[Any]) if c in lists else Any, None) for c in CHECKS if c in kinds},
    }


def _typed(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


_Settings = create_model(
    "Column",
    __base__=Part,
    __doc__="A column: its type as text, or its type and checks of its values.",
    **_fields(),
)
Column = Annotated[_Settings, BeforeValidator(_typed, json_schema_input_type=str | _Settings)]


def spark_type(name: str, column: str, text: str) -> T.DataType:
    """Parses a Spark type without a Spark session.

    Raises:
        TopologyError: an unknown type.
    """
    plain = text.strip().lower()
    if plain in _TYPES:
        return _TYPES[plain]()
    if found := _DECIMAL.fullmatch(plain):
        return T.DecimalType(int(found[1]), int(found[2]))
    if found := _ARRAY.fullmatch(plain):
        return T.ArrayType(spark_type(name, column, found[1]))
    raise TopologyError(
        f"{name}: column {column!r} has the type {text!r}; expected {', '.join(_TYPES)}, decimal(p,s) "
        "or array<type>; for structs and maps write a pandera model and set schema to its Python path"
    )


def contract(name: str, columns: Mapping[str, Part]) -> type[pa.DataFrameModel]:
    """Makes a pandera model of columns, as a Python user would write it.

    Args:
        columns: a ``Column`` for each name.
    """
    annotations: dict[str, Any] = {}
    members: dict[str, Any] = {"__annotations__": annotations, "__module__": __name__}
    for number, (column, about) in enumerate(columns.items()):
        given = about.values()
        kind = spark_type(name, column, given.pop("type"))
        given |= {check: list(given[check]) for check in ("isin", "notin") if check in given}
        plain = type(kind) in _TYPES.values()
        annotations[f"column_{number}"] = type(kind) if plain else kind
        members[f"column_{number}"] = pa.Field(alias=column, **given)
    return type(name, (pa.DataFrameModel,), members)
