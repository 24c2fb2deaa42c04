"""Temporary settings of a Spark session, and those of runs with few new and few matching rows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.utils import is_remote
from pyspark.traceback_utils import SCCallSiteSync

# Scoped settings


_lock = threading.Lock()
_active: dict[int, list[Mapping[str, str]]] = {}
"""By session: the settings of each active context, the last one last."""
_own: dict[int, dict[str, str | None]] = {}
"""By session: the values that active contexts replace."""


@contextlib.contextmanager
def settings(spark: SparkSession, values: Mapping[str, str]) -> Generator[None]:
    """Sets settings of a session, and restores the earlier values at the end.

    The settings apply to the whole session, so also to other threads that use it. Of several active
    contexts, the last one decides about a setting. They may end in any order.
    """
    values = dict(values)  # an object of its own, by which the end finds it
    with _lock:
        active = _active.setdefault(id(spark), [])
        own = _own.setdefault(id(spark), {})
        own.update(_get(spark, [key for key in values if key not in own]))
        _set(spark, {k: value for k, value in values.items() if _in_force(active, own, k) != value})
        active.append(values)
    try:
        yield
    finally:
        with _lock:
            before = {key: _in_force(active, own, key) for key in values}
            active[:] = [other for other in active if other is not values]
            now = {key: _in_force(active, own, key) for key in values}
            _set(spark, {key: value for key, value in now.items() if value != before[key]})
            for key in values:
                if not any(key in other for other in active):
                    del own[key]


def _in_force(
    active: Sequence[Mapping[str, str]], own: Mapping[str, str | None], key: str
) -> str | None:
    return next((values[key] for values in reversed(active) if key in values), own[key])


def _get(spark: SparkSession, keys: Sequence[str]) -> dict[str, str | None]:
    """Returns the values of settings, None = not set. On Spark Connect: one request for all of them; a
    small run changes its 16 settings five times, and a request takes more than a millisecond."""
    if not keys or not is_remote():
        return {key: spark.conf.get(key, None) for key in keys}
    found = spark.client.get_config_with_defaults(*((key, None) for key in keys))
    return dict(zip(keys, found, strict=True))


def _set(spark: SparkSession, values: Mapping[str, str | None]) -> None:
    """Sets settings, and unsets those whose value is None. On Spark Connect: one request for all."""
    gone = [key for key, value in values.items() if value is None]
    there = {key: value for key, value in values.items() if value is not None}
    if not is_remote():
        for key, value in there.items():
            spark.conf.set(key, value)
        for key in gone:
            spark.conf.unset(key)
        return
    from pyspark.sql.connect import proto

    change = proto.ConfigRequest.Operation
    pairs = [proto.KeyValue(key=key, value=value) for key, value in there.items()]
    if pairs:
        spark.client.config(change(set=proto.ConfigRequest.Set(pairs=pairs)))
    if gone:
        spark.client.config(change(unset=proto.ConfigRequest.Unset(keys=gone)))


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
    # Without it Spark reads the bytecode of a class for each operator of a plan, to clean a closure.
    "spark.sql.execution.usePartitionEvaluator": "true",
    # Formatting plans for the UI takes time, and nobody reads the plans of these runs.
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.maxPlanStringLength": "100",
}

_LOOK_UP = {
    # For scans of many rows that are joined with few broadcast keys: generated code pays off.
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.codegen.factoryMode": "FALLBACK",
    "spark.sql.optimizer.disableHints": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
}

_PLAIN_CACHE = {"spark.sql.inMemoryColumnarStorage.compressed": "false"}
_CACHED_PLAIN = 1_000_000
"""Up to this number of records, persisted rows are not compressed: choosing a compression for each
column takes a tenth of a run's processor time, and so few rows need little memory."""

_FEW_RECORDS, _FEW_READ = 30_000, 200_000
"""Above these limits, generated code and parallel tasks pay off."""
_INTERPRETED = 2_000
"""Up to this number of records, compiling the expressions of a run takes longer than interpreting them.
Spark 4.2 interprets more slowly than earlier series, because it looks up a setting for each value."""
_FEW_FILES, _SMALL = 16, 1 << 20
"""Up to this number of files and bytes, one task reads about as fast as several."""


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
        small: whether queries are planned for few rows; if not, only the storage of persisted rows
            changes.
        records: about how many records the queries compute with all their expressions; 0 = unknown.
    """
    if not small:
        with settings(spark, _PLAIN_CACHE if 0 < records <= _CACHED_PLAIN else {}):
            yield
        return
    compiled = {"spark.sql.codegen.factoryMode": "FALLBACK"} if records > _INTERPRETED else {}
    with settings(spark, SETTINGS | compiled), _one_call_site(spark):
        yield


def look_up_of_few(spark: SparkSession) -> AbstractContextManager[None]:
    """Returns a context in which queries are planned for many rows, of which a join with broadcast keys
    keeps few."""
    return settings(spark, _LOOK_UP)


_named = threading.local()


@contextlib.contextmanager
def _one_call_site(spark: SparkSession) -> Generator[None]:
    """Gives all jobs of this thread one name for Spark's UI. Otherwise Spark searches the call stack
    for a name each time it makes an RDD, which takes longer than making the RDD."""
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
