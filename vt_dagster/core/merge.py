"""merge: the records of several streams as one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import FATE, TURN
from vt_dagster.core.arrival import Fate
from vt_dagster.core.processor import Input, Known, Processor
from vt_dagster.topology.operators import Merge


class MergeProcessor(Processor[Merge]):
    """See :func:`merge`."""

    merges = True

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], known: Known) -> DataFrame:
        return merge(rows)


def merge(streams: Sequence[DataFrame]) -> DataFrame:
    """Every record with its own key, value, timestamp and partition; null keys and tombstones too.

    Plan: a union, no shuffle.

    Args:
        streams: log rows in order: ``ORDER`` tells how they follow each other.

    Source: FORMAT 4.12.1; merge-keeps-key-value-timestamp-and-arrival-order,
    merge-passes-null-keys-and-null-values.
    """
    rows = reduce(DataFrame.unionByName, streams)
    return rows.withColumns({FATE: F.lit(Fate.APPLIED), TURN: F.lit(0)})
