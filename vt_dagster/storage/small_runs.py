"""Settings of Spark for a run that has few rows and meets few."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

from pyspark.sql import SparkSession

SETTINGS = {
    # Compiling, shuffling and re-planning cost more than computing.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.leafNodeDefaultParallelism": "1",
    # A broadcast is a Spark job of its own.
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    "spark.sql.optimizer.disableHints": "true",
    # Planning costs most: leave out what is of no use to a few rows.
    "spark.sql.constraintPropagation.enabled": "false",
    "spark.sql.optimizer.nestedSchemaPruning.enabled": "false",
    "spark.sql.optimizer.expression.nestedPruning.enabled": "false",
    "spark.sql.optimizer.dynamicPartitionPruning.enabled": "false",
    "spark.sql.optimizer.runtime.bloomFilter.enabled": "false",
    "spark.sql.subexpressionElimination.enabled": "false",
    "spark.sql.exchange.reuse": "false",
    # Nobody looks at the plans.
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.maxPlanStringLength": "100",
}

_FEW_RECORDS, _FEW_MET = 30_000, 200_000
"""With more, compiled code and tasks beside each other are worth their price."""

_lock = threading.Lock()
_inside: dict[int, tuple[int, dict[str, str | None]]] = {}
"""Of each session, how many are within ``small_run``, and what the settings were before the first."""


def is_small(records: int, met: int) -> bool:
    """Whether planning is most of the work.

    Args:
        records: that are new.
        met: rows of tables and states that are read with them, more or less.
    """
    return records <= _FEW_RECORDS and met <= _FEW_MET


@contextlib.contextmanager
def small_run(spark: SparkSession, small: bool = True) -> Generator[None]:
    """Within it the session's queries are planned for a few rows. They would be right for many too.

    Settings belong to a session: other threads that use it have them as well for that time.
    """
    if not small:
        yield
        return
    with _lock:
        count, before = _inside.get(id(spark), (0, {}))
        if not count:
            before = {key: spark.conf.get(key, None) for key in SETTINGS}
            for key, value in SETTINGS.items():
                spark.conf.set(key, value)
        _inside[id(spark)] = (count + 1, before)
    try:
        yield
    finally:
        with _lock:
            count, before = _inside.pop(id(spark))
            if count > 1:
                _inside[id(spark)] = (count - 1, before)
            else:
                for key, value in before.items():
                    if value is None:
                        spark.conf.unset(key)
                    else:
                        spark.conf.set(key, value)
