"""Intermediate results of a run: judged records, results before the commit, and the receipt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster.columns import ARRIVAL, HOME, INPUT, OUTCOME, PARTITION, SEQUENCE, TIMESTAMP, TURN
from vt_dagster.core.arrival_order import Outcome
from vt_dagster.core.log_columns import log_schema
from vt_dagster.core.processor import RunContext
from vt_dagster.errors import ContractError
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.view import in_words
from vt_dagster.topology.model import Stream


@dataclass(frozen=True)
class Judged:
    """Counts of a run's records with their outcome, before the lookup in a table.

    Args:
        counts: number of records by outcome.
        by_partition: these counts per partition.
        span: smallest and largest timestamp of the records to look up; None = none, epoch microseconds.
        rows_read: approximate number of table rows that the run reads.
        strategy: the strategy of the lookup, with the reason.
    """

    counts: dict[str, int] = field(default_factory=dict[str, int])
    by_partition: dict[int, dict[str, int]] = field(default_factory=dict[int, dict[str, int]])
    span: tuple[int, int] | None = None
    rows_read: int = 0
    strategy: str = ""


@dataclass(frozen=True)
class Results:
    """The results of an operator before the commit: rows with their outcome, lazy."""

    rows: DataFrame
    context: RunContext
    judged: Judged = field(default_factory=Judged)


@dataclass(frozen=True)
class Receipt:
    """The outcome of a run: its commit, or None if there were no new records.

    Args:
        outcomes: number of records per outcome, by partition.
    """

    commit: Commit | None
    log_version: int | None
    view_version: int | None = None
    outcomes: Mapping[int, Mapping[str, int]] = field(default_factory=dict[int, dict[str, int]])


def nothing_of(node: Stream, spark: SparkSession) -> DataFrame:
    """Returns the empty results of a run without records."""
    places = {c: F.lit(0) for c in (ARRIVAL, INPUT, HOME, SEQUENCE, TURN)}
    empty = spark.createDataFrame([], log_schema(node))
    return empty.withColumns({**places, OUTCOME: F.lit(Outcome.APPLIED)})


def judge(records: DataFrame) -> Judged:
    """Counts records by outcome and partition, and finds the time span of those to look up."""
    found = (
        records.groupBy(PARTITION, OUTCOME)
        .agg(
            F.count(F.lit(1)).alias("records"),
            F.min(F.unix_micros(TIMESTAMP)).alias("oldest"),
            F.max(F.unix_micros(TIMESTAMP)).alias("newest"),
        )
        .collect()
    )
    counts, homes = dict[str, int](), dict[int, dict[str, int]]()
    for row in found:
        counts[row[OUTCOME]] = counts.get(row[OUTCOME], 0) + row["records"]
        homes.setdefault(row[PARTITION], {})[row[OUTCOME]] = row["records"]
    sought = [row for row in found if row[OUTCOME] in (Outcome.APPLIED, Outcome.LATE)]
    span = None
    if sought:
        span = min(row["oldest"] for row in sought), max(row["newest"] for row in sought)
    return Judged(counts, homes, span)


def require_same(node: Stream, given: Mapping[str, int], got: Mapping[str, int]) -> None:
    """Refuses records of a grace buffer if an op in between added, dropped or changed any.

    Args:
        given, got: number of records by outcome, from the buffer and at the join.

    Raises:
        ContractError: the counts differ.
    """
    if given != got:
        raise ContractError(
            f"{node.name}: expected the records of its grace buffer ({in_words(given)}), got "
            f"({in_words(got)}); give the join both outputs of the buffer as they are, and filter the "
            "stream before the buffer or the result after the join"
        )
