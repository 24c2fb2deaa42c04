"""Reads and prepares the records of a source for a run.

A source of full snapshots is read as changes against the table's current rows.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from pyspark.errors import AnalysisException, ParseException
from pyspark.logger import PySparkLogger
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from vt_dagster.columns import ARRIVAL, OUTCOME, RESERVED, TIMESTAMP
from vt_dagster.core import table_store as of_table
from vt_dagster.core.arrival_order import Outcome, by_partition, by_reference, with_columns
from vt_dagster.core.duplicates import remembered_of_log
from vt_dagster.core.log_columns import value_columns, view_schema
from vt_dagster.core.processor import RunContext
from vt_dagster.core.source_order import LAST, follows_source
from vt_dagster.core.source_records import (
    REASON,
    RECORD_TIME,
    SOURCE_RECORDED_AT,
    SOURCE_TIME,
    START,
    TRUNCATES,
    UNCHANGED,
    Reason,
    prepare,
)
from vt_dagster.core.table_store import needs_colliding_versions
from vt_dagster.core.versioned_table import FIRST
from vt_dagster.errors import TopologyError
from vt_dagster.runs.pin import Arrival, Store
from vt_dagster.sources.base import Comparing, Pinned, Whole
from vt_dagster.sources.frame_sources import PinnedFrames
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.options import set_options

# Snapshot read


def difference(
    source: Comparing, node: Stream, store: Store, held: list[DataFrame], of_nothing: bool = False
) -> DataFrame:
    """Returns the records of a run: the differences between a snapshot and the table's current rows.

    Args:
        held: collects the persisted rows, which the run unpersists at its end.
        of_nothing: compare with an empty table, so that all rows of the source are changes.
    """
    assert isinstance(node, Table)
    current = None if of_nothing else store.current()
    if current is None:
        current = store.spark.createDataFrame([], view_schema(node))

    def hold(rows: DataFrame) -> DataFrame:
        held.append(store.persist(rows))
        return held[-1]

    return source.difference(store.spark, node, of_table.rows_of(node, current), hold)


# Read source


_VALID_EXPRESSIONS = set[tuple[str, str, str]]()
"""Cache of valid expressions with their columns: analysis is slow for tests with one run per record."""
_GIVEN, _SINCE, _HELD = "_given", "_since", "_held"
_LAST = 1 << 52
"""Larger than any arrival number of a source, so that a snapshot sorts after all changes. Small enough
for a DOUBLE, with which chunks are computed, to represent it exactly."""
_NOW = "9999-01-01T00:00:00Z"
"""System time of the rows of a snapshot, later lowered to that of the run's commit."""
_ALIKE = 0.75
"""Similarity above which an unknown name counts as a misspelt column."""


def records_of(arrival: Arrival, source: Pinned, store: Store, latest: int | None) -> DataFrame:
    """Returns the prepared records of a source, followed by those of an initial snapshot.

    Args:
        arrival: collects persisted rows, which the run unpersists at its end.
        latest: the largest timestamp that a record may have, epoch seconds; None = any.

    Raises:
        TopologyError: an expression of the node is invalid, see :func:`as_read`.
    """
    node, held = arrival.node, arrival.persisted
    read = as_read(store.spark, node, alone=isinstance(source, Comparing | PinnedFrames))
    limit = None if latest is None else F.timestamp_seconds(by_reference(latest, TIMESTAMP))
    if isinstance(source, Comparing):
        return prepare(difference(source, node, store, held), node, limit)
    rows = prepare(source.read(store.spark, read), node, limit)
    more = [c for c in read.schema.names if c not in node.schema.names]
    rows = rows.drop(*more) if more else rows
    return rows if arrival.start is None else _with_start(rows, arrival.start, node, store, held, limit)


def _with_start(
    changes: DataFrame,
    start: Whole,
    node: Stream,
    store: Store,
    held: list[DataFrame],
    limit: Column | None,
) -> DataFrame:
    """Returns the changes followed by the rows of a snapshot, with ``_start``. The tombstone condition
    and partial updates apply only to changes. A row without a time gets the snapshot's time."""
    node = replace(node, tombstone=None)
    if isinstance(node, VersionedTable):
        node = replace(node, only_columns=None, ignore_null_updates=False)
    rows = difference(start, node, store, held, of_nothing=True).withColumn(START, F.lit(True))
    if (node.timestamp, "timestamp") in rows.dtypes:
        own = F.coalesce(F.col(f"`{node.timestamp}`"), F.col(RECORD_TIME))
        rows = rows.withColumn(node.timestamp, own)
    rows = prepare(rows, node, limit).withColumn(ARRIVAL, F.col(ARRIVAL) + _LAST)
    # The snapshot comes after the changes, and system times of a log never go back.
    if SOURCE_RECORDED_AT in changes.columns:
        rows = rows.withColumn(SOURCE_RECORDED_AT, F.lit(_NOW).cast("timestamp"))
    kinds = dict(changes.dtypes)
    others = {c: F.col(c).cast(kinds[c]) for c, k in rows.dtypes if kinds.get(c, k) != k}
    marked = changes.withColumn(START, F.lit(False))
    return marked.unionByName(with_columns(rows, others), allowMissingColumns=True)


def first_changes_of(arrival: Arrival, store: Store) -> DataFrame | None:
    """Returns the first timestamp of each key in the log, if the run reads an initial snapshot."""
    if arrival.start is None or arrival.previous is None:
        return None
    of_key = store.log({}, arrival.previous).groupBy(*[F.col(f"`{k}`") for k in arrival.node.key])
    return of_key.agg(F.min(TIMESTAMP).alias(FIRST))


def state_of(arrival: Arrival, store: Store) -> DataFrame | None:
    """Returns the state that the processor stored in the last run; None = there is none.

    For a stream with ``unique_by`` the state is computed from the log if the last run stored no values
    of these columns, or stored them for a shorter time than ``within``. Stored values still count: a
    duplicate that has kept one is not in the log, and its record may be truncated."""
    node, at = arrival.node, arrival.previous
    if at is None or node.unique_by is None or node.within is None:
        return store.state(at)
    then = at.commit.shape
    now = {old: new for new, before in node.earlier.items() for old in before}
    same = [now.get(c, c) for c in then.unique_by or ()] == [*node.unique_by]
    stored = store.state(at) if same and then.within is not None else None
    if then.within is not None and stored is not None and node.within <= then.within:
        return stored
    return remembered_of_log(node, store.log({}, at), stored, by_partition(at.commit.stream_time))


def reads_twice(records: DataFrame, arrival: Arrival) -> bool:
    """Returns whether a run must compare source records with the table, see
    :func:`with_table_history`; it then reads them twice."""
    if {TRUNCATES, UNCHANGED} & {*records.columns}:
        return True
    node = arrival.node
    return arrival.previous is not None and (needs_colliding_versions(node) or follows_source(node))


def with_table_history(
    records: DataFrame, arrival: Arrival, store: Store, context: RunContext
) -> tuple[DataFrame, RunContext]:
    """Completes a source's records from the table's current rows, and adds the versions that they
    collide with to the context.

    Args:
        records: prepared and persisted.
    """
    node = arrival.node
    view = context.view if context.look_up is None else store.current()
    records = _without_truncations(records, arrival, view)
    records = _with_unchanged(records, arrival, view)
    if arrival.previous is not None and needs_colliding_versions(node):
        context = replace(context, colliding_versions=_colliding_versions_of(records, store))
    if arrival.previous is not None and follows_source(node):
        context = replace(context, last=_last_of(records, arrival, store))
    return records, context


def _without_truncations(records: DataFrame, arrival: Arrival, view: DataFrame | None) -> DataFrame:
    """Replaces each TRUNCATE record by tombstones of all keys that exist at that point, in the table or
    in earlier records.

    Plan: one job checks whether there is such a record; then one aggregate by key.

    Args:
        records: prepared; they are read twice.
        view: the current rows of the table before the run; None = none.
    """
    if TRUNCATES not in records.columns:
        return records
    events = records.where(F.col(TRUNCATES) & F.col(OUTCOME).isNull())
    rows = records.where(~F.col(TRUNCATES) | F.col(OUTCOME).isNotNull()).drop(TRUNCATES)
    node = arrival.node
    if not isinstance(node, Table) or events.isEmpty():
        return rows
    keys, since = [F.col(f"`{k}`") for k in node.key], F.col(ARRIVAL)
    if START in rows.columns:
        since = F.when(F.col(START), -1).otherwise(since)
    there = rows.where(F.col(OUTCOME).isNull()).select(*keys, since.alias(_SINCE))
    if view is not None:
        there = there.union(of_table.rows_of(node, view).select(*keys, F.lit(-1).cast("long")))
    there = there.groupBy(*keys).agg(F.min(_SINCE).alias(_SINCE))
    gone = events.drop(*node.key).crossJoin(there).where(F.col(ARRIVAL) > F.col(_SINCE))
    return rows.unionByName(gone.select(*[F.col(f"`{c}`") for c in rows.columns]))


def _with_unchanged(records: DataFrame, arrival: Arrival, view: DataFrame | None) -> DataFrame:
    """Fills each column that the source has not sent from the key's previous record, in source order.
    Without a previous record the value is unknown, and the record counts as unreadable.

    Plan: one job checks whether there is such a record; then a join with the current rows and one
    window by key.

    Args:
        records, view: as for :func:`_without_truncations`.
    """
    if UNCHANGED not in records.columns:
        return records
    node, good = arrival.node, F.col(OUTCOME).isNull()
    if not isinstance(node, Table) or records.where(good & F.col(UNCHANGED).isNotNull()).isEmpty():
        return records.drop(UNCHANGED)
    key, values = [F.col(f"`{k}`") for k in node.key], value_columns(node)
    rows = records.withColumn(_HELD, F.lit(None))
    if view is not None:
        current = of_table.rows_of(node, view)
        held = F.struct(*[F.col(f"`{c}`") for c in values]).alias(_HELD)
        rows = records.join(current.select(*key, held), list(node.key), "left")
    until = W.partitionBy(*key).orderBy(ARRIVAL).rowsBetween(W.unboundedPreceding, W.currentRow)
    filled, unknown = dict[str, Column](), F.lit(False)
    for name in values:
        own, absent = F.col(f"`{name}`"), F.coalesce(F.array_contains(UNCHANGED, name), F.lit(False))
        before = F.last(F.when(good & ~absent, F.struct(own.alias("value"))), ignorenulls=True)
        found = before.over(until)
        if view is not None:
            of_view = F.struct(F.col(_HELD)[name].alias("value"))
            found = F.coalesce(found, F.when(F.col(_HELD).isNotNull(), of_view))
        unknown = unknown | (good & absent & found.isNull())
        filled[name] = F.when(absent, found["value"]).otherwise(own)
    lost = {
        OUTCOME: F.when(unknown, Outcome.QUARANTINED).otherwise(F.col(OUTCOME)),
        REASON: F.when(unknown, Reason.UNREADABLE).otherwise(F.col(REASON)),
    }
    return with_columns(rows, {**filled, **lost}).drop(UNCHANGED, _HELD)


def _last_of(records: DataFrame, arrival: Arrival, store: Store) -> DataFrame | None:
    """Returns the largest time in the log for the keys of records that are older than the history
    retention, in a table that follows the order of its source; None = there is no such record.

    The view no longer has old deletions. In source order such a record comes after them, so their times
    are read from the log.

    Plan: a job that checks whether there is such a record; then one scan of the log's keys.
    """
    at, rules = arrival.previous, store.node.version_rules
    if at is None or rules is None:
        return None
    old = F.unix_micros(TIMESTAMP) < by_partition(rules.horizons(at.commit.stream_time), "long")
    late = records.where(F.col(OUTCOME).isNull() & old)
    # The log is scanned only if there is a record that is older than what the view keeps.
    if late.isEmpty():
        return None
    key = [F.col(f"`{k}`") for k in arrival.node.key]
    rows = store.log({}, at).join(late.select(*key).distinct(), list(arrival.node.key), "left_semi")
    return rows.groupBy(*key).agg(F.max(TIMESTAMP).alias(LAST))


def _colliding_versions_of(records: DataFrame, store: Store) -> DataFrame | None:
    """Returns the table's versions that end after the oldest record; None = none. Versions before the
    retention are not needed, because older records are refused.

    Plan: one job finds the oldest record.
    """
    oldest = records.agg(F.min(F.unix_micros(TIMESTAMP))).collect()[0][0]
    at, rules = store.snapshot(), store.node.version_rules
    if oldest is None or at.head is None or rules is None:
        return None
    since = min(rules.horizons(at.stream_time).values(), default=oldest)
    return store.view_at(at, max(oldest, since))


def as_read(spark: SparkSession, node: Stream, alone: bool = False) -> Stream:
    """Returns the node with the columns to read from its source: its own, and those that only
    ``tombstone``, ``deleted_at`` or ``only_columns`` name. The latter are read as STRING.

    Args:
        alone: whether the source has only the columns of the schema: a full snapshot, which is compared
            with the table, or a DataFrame.

    Raises:
        TopologyError: an expression has the wrong type, or names an unknown column.
    """
    settings = _sql_settings(node)
    if not settings:
        return node
    own, found = list[StructField](node.schema.fields), list[StructField]()
    timed = TIMESTAMP in {c.lower() for c in node.schema.names}
    own += [] if timed else [StructField(TIMESTAMP, TimestampType())]
    sourced = getattr(node.source, "gives_timestamp", False) and SOURCE_TIME not in node.schema.names
    for setting in settings:
        more = (
            [StructField(SOURCE_TIME, TimestampType())]
            if setting.name == "deleted_at" and sourced
            else []
        )
        while (name := _unknown(spark, node, setting, StructType([*own, *more, *found]))) is not None:
            _require_other(node, setting, name, alone)
            found.append(StructField(name, StringType()))
    return replace(node, schema=StructType([*node.schema.fields, *found])) if found else node


class _Setting(NamedTuple):
    """A SQL expression of a node about its records.

    Args:
        what: the expected expression, in words.
        kinds: the allowed types, see ``Sql``.
    """

    name: str
    expression: str
    what: str
    kinds: tuple[str, ...]


def _sql_settings(node: Stream) -> list[_Setting]:
    found = [(o.name, getattr(node, o.name), o.sql) for o in set_options(node) if o.sql is not None]
    names = {"tombstone": "deleted_when (tombstone)"}
    return [
        _Setting(names.get(name, name), text, *sql)
        for name, text, sql in found
        if isinstance(text, str) and sql.types
    ]


def _unknown(spark: SparkSession, node: Stream, setting: _Setting, columns: StructType) -> str | None:
    """Returns the first unknown column that an expression names; None = all are known."""
    known = (setting.name, setting.expression, columns.json())
    if known in _VALID_EXPRESSIONS:
        return None
    try:
        with without_spark_logs():
            # Reading the schema forces the analysis, which Spark Connect otherwise defers.
            empty = spark.createDataFrame([], columns)
            given = empty.withColumn(_GIVEN, F.expr(setting.expression)).schema[_GIVEN].dataType
    except (AnalysisException, ParseException) as error:
        kind: Any = error.getCondition() or ""
        name = (error.getMessageParameters() or {}).get("objectName", "").strip("`")
        if kind.startswith("UNRESOLVED_COLUMN") and "`" not in name and name not in columns.names:
            return name
        fault = f"which Spark refuses: {sentence_of(error)}"
    else:
        if given.simpleString() in setting.kinds:
            _VALID_EXPRESSIONS.add(known)
            return None
        fault = f"which is {given.simpleString()}"
    raise TopologyError(
        f"{node.name}: expected {setting.name} to be {setting.what} over the columns {columns.names}, "
        f"got {setting.expression!r}, {fault}; correct it"
    ) from None


_BESIDE_SENTENCE = re.compile(r"^\[[\w.]+\] |\.?(?: Did you mean .*)?(?: SQLSTATE: .*)?$")


def sentence_of(error: AnalysisException) -> str:
    """Returns the first sentence of Spark's error about an expression, without codes and advice. A
    syntax error begins with an empty line."""
    return _BESIDE_SENTENCE.sub("", next(line for line in str(error).splitlines() if line))


@contextmanager
def without_spark_logs() -> Generator[None]:
    """Silences PySpark's log of errors that are raised as well: a failed analysis is expected here."""
    # Must be a PySparkLogger: a plain logger fails on PySpark's keyword arguments.
    logger = PySparkLogger.getLogger("SQLQueryContextLogger")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _require_other(node: Stream, setting: _Setting, name: str, alone: bool) -> None:
    """Refuses an unknown name that looks like a misspelt or renamed column, or that no source has."""
    text = f"{node.name}: {setting.name}, {setting.expression!r}, names {name!r}"
    if name in node.renamed:
        raise TopologyError(
            f"{text}, which was renamed to {node.renamed[name]!r}: expected the new name, which also "
            "reads the old one; correct it"
        )
    if name.lower() in RESERVED or name.startswith("_"):
        raise TopologyError(
            f"{text}, a name that vt_dagster reserves: expected a column of the source with another "
            "name, which does not begin with an underscore; rename it in the source"
        )
    alike = get_close_matches(name.lower(), [c.lower() for c in node.schema.names], 1, _ALIKE)
    if alike:
        raise TopologyError(
            f"{text}, which is no column of the table, but similar to {alike[0]!r}: expected a column "
            "of the table, or a column of the source with a clearly different name; correct it, or add "
            "it to the schema"
        )
    if alone:
        raise TopologyError(
            f"{text}, which is no column of the table: expected one of {node.schema.names}, because "
            "only these are read from a snapshot or a DataFrame; add it to the schema"
        )
