"""A text that is one JSON object, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import uuid4

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BooleanType, StringType, StructField, StructType

from vt_dagster.sources.values import narrowed, repeats_a_field, wide_columns

_CORRUPT = "_corrupt"
_ALL, _END = f"_all_{uuid4().hex}", f"_end_{uuid4().hex}"
"""Names that no text can know."""


def one_object(text: Column, wanted: StructType, options: Mapping[str, str]) -> Column:
    """A text parsed as one JSON object; :func:`read_object` says what it is.

    Spark reads the first value of a text and does not look at what stands behind it. So it gets the
    text as the first element of an array, which has a second one, and an end.

    Args:
        wanted: the fields.
        options: Spark's JSON options.
    """
    one = StructType([*wide_columns(wanted).fields, StructField(_END, BooleanType())])
    schema = StructType([StructField(_ALL, ArrayType(one)), StructField(_CORRUPT, StringType())])
    whole = F.concat(F.lit(f'{{"{_ALL}":['), text, F.lit(f',{{"{_END}":true}}]}}'))
    options = {**options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    return F.from_json(whole, schema, options)


def read_object(parsed: Column, text: Column, wanted: StructType) -> tuple[Column, Column]:
    """The fields of what :func:`one_object` has parsed, and whether it was no object, not one, or one
    that says something else: a field twice, a decimal with more digits than its type has."""
    found = parsed[_ALL]
    row, last = F.get(found, 0), F.get(found, 1)[_END]
    whole = parsed[_CORRUPT].isNull() & row.isNotNull() & last & (F.size(found) == 2)
    row, lost = narrowed(row, wanted)
    return row, ~F.coalesce(whole, F.lit(False)) | lost | repeats_a_field(text)
