"""Schemas of Spark as schemas of Arrow and back, for each supported series of PySpark.

PySpark's own functions do it, whose arguments and defaults differ between the series.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, cast

from pyspark.sql.pandas import types
from pyspark.sql.types import StructType

_to_arrow, _from_arrow = cast(Any, types.to_arrow_schema), cast(Any, types.from_arrow_schema)  # pyright: ignore[reportUnknownMemberType]
_UTC = {"timezone": "UTC"} if "timezone" in signature(_to_arrow).parameters else {}
"""PySpark 4.2 asks for the time zone; it is UTC before."""


def arrow_schema(schema: StructType) -> Any:  # a pyarrow.Schema, which has no type stubs
    """Returns a schema of Spark as one of Arrow; timestamps are in microseconds, UTC."""
    return _to_arrow(schema, **_UTC)


def spark_schema(schema: Any) -> StructType:
    """Returns a schema of Arrow as one of Spark; timestamps without a zone are taken as UTC."""
    return _from_arrow(schema, prefer_timestamp_ntz=False)
