"""Checks that user-defined functions are deterministic, before a first run writes anything.

Spark's own nondeterministic functions are refused when definitions load, see
``vt_dagster.topology.expressions``. Only Spark knows how a registered function was declared.
"""

from __future__ import annotations

import re
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType, TimestampType

from vt_dagster.columns import TIMESTAMP, VALID_FROM, VALID_TO
from vt_dagster.errors import TopologyError
from vt_dagster.runs.arrival import Arrival
from vt_dagster.runs.read_source import without_spark_logs
from vt_dagster.runs.store_protocol import Store
from vt_dagster.topology.expressions import Expression, expressions_of, unknown_functions
from vt_dagster.topology.model import Stream

_REFUSED = "AGGREGATE_FUNCTION_WITH_NONDETERMINISTIC_EXPRESSION"
_ALIAS = re.compile(r"\s+as\s+(?:\w+|`[^`]+`)\s*", re.IGNORECASE)
_CALL = re.compile(r"\s*(?:count|sum|min|max|avg|mean)\s*\((.*)\)\s*", re.IGNORECASE | re.DOTALL)


def require_deterministic_functions(arrival: Arrival, store: Store) -> None:
    """Refuses an asset's first run if an expression calls functions nondeterministic for Spark.
    Analyses only expressions with functions that are not Spark's own; runs no job.

    Raises:
        TopologyError: names the expression and the functions.
    """
    node = arrival.node
    if arrival.previous is not None:
        return
    for one in expressions_of(node):
        called = unknown_functions(one.text)
        if called and not _deterministic(_columns(node, store.spark, one), one):
            raise TopologyError(
                f"{node.name}: expected {one.setting} to give the same value whenever a row is "
                f"computed, got {one.text!r}, where Spark takes {sorted(called)} for not "
                "deterministic: a run that is repeated, a replay or a restatement would give other "
                "rows; nothing was written. Register the function without asNondeterministic() if it "
                "gives the same value for the same arguments"
            )


def _columns(node: Stream, spark: SparkSession, one: Expression) -> DataFrame:
    """Returns an empty DataFrame with the columns that an expression may name."""
    operator: Any = node.operator
    if not one.of_inputs:
        return _empty(node, spark)
    if hasattr(operator, "left") and one.setting == "select":
        left, right = _empty(operator.left, spark), _empty(operator.right, spark)
        return left.alias("left").crossJoin(right.alias("right"))
    return _empty(node.inputs[0], spark)


def _empty(node: Stream, spark: SparkSession) -> DataFrame:
    there = {name.lower() for name in node.schema.names}
    times = [n for n in (TIMESTAMP, VALID_FROM, VALID_TO) if n not in there]
    fields = [*node.schema.fields, *(StructField(n, TimestampType()) for n in times)]
    return spark.createDataFrame([], StructType(fields))


def _deterministic(rows: DataFrame, one: Expression) -> bool:
    """Returns whether Spark accepts the expression inside an aggregate, which must be deterministic.
    Any other error of the expression is left to the run that computes it."""
    text = one.text
    aggregate = _CALL.fullmatch(text) if one.setting == "aggregates" else None
    alias = next((m for m in _ALIAS.finditer(text) if m.end() == len(text)), None)
    expression = aggregate[1] if aggregate else text[: alias.start()] if alias else text
    try:
        with without_spark_logs():
            _ = rows.agg(F.count(F.expr(expression))).schema
    except AnalysisException as error:
        return error.getCondition() != _REFUSED
    return True
