"""Settings of Spark for a run that has few rows and meets few."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pyspark.sql import SparkSession

from vt_dagster.spark.scoped_settings import settings

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

_FEW_RECORDS, _FEW_READ = 30_000, 200_000
"""With more, compiled code and tasks beside each other are worth their price."""


def is_small(records: int, rows_read: int) -> bool:
    """Whether planning is most of the work.

    Args:
        records: that are new.
        rows_read: rows of tables and states that are read with them, more or less.
    """
    return records <= _FEW_RECORDS and rows_read <= _FEW_READ


def small_run(spark: SparkSession, small: bool = True) -> AbstractContextManager[None]:
    """Within it the session's queries are planned for a few rows. They would be right for many too."""
    return settings(spark, SETTINGS if small else {})
