"""Temporary settings of a Spark session, and those of runs with few new and few matching rows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.utils import is_remote
from pyspark.traceback_utils import SCCallSiteSync

# Scoped settings


_lock = threading.Lock()
_inside: dict[tuple[int, frozenset[str]], tuple[int, dict[str, str | None]]] = {}
"""By session and group of settings: number of active contexts, and the values before the first one."""


@contextlib.contextmanager
def settings(spark: SparkSession, values: Mapping[str, str]) -> Generator[None]:
    """Sets settings of a session, and restores the earlier values at the end.

    The settings apply to the whole session, so also to other threads that use it. Concurrent contexts
    must set either the same settings to the same values, or disjoint settings.
    """
    group = (id(spark), frozenset(values))
    with _lock:
        count, before = _inside.get(group, (0, {}))
        if not count:
            before = {key: spark.conf.get(key, None) for key in values}
            for key, value in values.items():
                spark.conf.set(key, value)
        _inside[group] = (count + 1, before)
    try:
        yield
    finally:
        with _lock:
            count, before = _inside.pop(group)
            if count > 1:
                _inside[group] = (count - 1, before)
            else:
                for key, value in before.items():
                    if value is None:
                        spark.conf.unset(key)
                    else:
                        spark.conf.set(key, value)


# Small run settings


SETTINGS = {
    # For few rows, code generation, shuffles and re-planning cost more than the computation.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.leafNodeDefaultParallelism": "1",
    # A broadcast is a Spark job of its own.
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    "spark.sql.optimizer.disableHints": "true",
    # Planning costs most: skip optimizer rules that do not pay off for few rows.
    "spark.sql.constraintPropagation.enabled": "false",
    "spark.sql.optimizer.nestedSchemaPruning.enabled": "false",
    "spark.sql.optimizer.expression.nestedPruning.enabled": "false",
    "spark.sql.optimizer.dynamicPartitionPruning.enabled": "false",
    "spark.sql.optimizer.runtime.bloomFilter.enabled": "false",
    "spark.sql.subexpressionElimination.enabled": "false",
    "spark.sql.exchange.reuse": "false",
    # Formatting plans for the UI takes time, and nobody reads the plans of these runs.
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.maxPlanStringLength": "100",
}

_FEW_RECORDS, _FEW_READ = 30_000, 200_000
"""Above these limits, generated code and parallel tasks pay off."""
_INTERPRETED = 2_000
"""To compile the expressions of a run takes longer than to interpret them for so many records. Spark
4.2 interprets more slowly than before: it looks up a setting for each value."""
_FEW_FILES, _SMALL = 16, 1 << 20
"""One task reads so few files, of so few bytes, about as fast as several."""


def is_small(records: int, rows_read: int) -> bool:
    """Returns whether planning dominates the cost of a run.

    Args:
        records: number of new records.
        rows_read: approximate number of rows that are read from tables and state.
    """
    return records <= _FEW_RECORDS and rows_read <= _FEW_READ


def in_one_task(rows: DataFrame, files: Sequence[int]) -> DataFrame:
    """Returns rows of files, in one task if these are few and small: what one task reads is not
    shuffled, and each shuffle of few rows costs more than their computation.

    Args:
        files: their sizes, bytes.
    """
    return rows.coalesce(1) if len(files) <= _FEW_FILES and sum(files) <= _SMALL else rows


@contextlib.contextmanager
def small_run(spark: SparkSession, small: bool = True, records: int = 0) -> Generator[None]:
    """Returns a context in which queries are planned for few rows; correct for any number of rows.

    Args:
        records: about how many records the queries compute with all their expressions.
    """
    if not small:
        yield
        return
    compiled = {"spark.sql.codegen.factoryMode": "FALLBACK"} if records > _INTERPRETED else {}
    with settings(spark, SETTINGS | compiled), _one_call_site(spark):
        yield


_named = threading.local()


@contextlib.contextmanager
def _one_call_site(spark: SparkSession) -> Generator[None]:
    """Gives all jobs of this thread one name for Spark's UI. Else Spark searches its call stack for a
    name whenever it makes an RDD, which takes longer than the RDD."""
    # With Spark Connect, the call stack is the server's.
    if is_remote() or getattr(_named, "inside", False):
        yield
        return
    context = spark.sparkContext
    # PySpark names each action, and removes the name after it, but not inside of another name.
    with SCCallSiteSync(context):
        for form in ("short", "long"):
            context.setLocalProperty(f"callSite.{form}", "vt_dagster, few rows")
        _named.inside = True
        try:
            yield
        finally:
            _named.inside = False
            context.setLocalProperty("callSite.long", cast(Any, None))
