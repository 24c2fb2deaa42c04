"""A table's store (Kafka's word): puts records into a table, and folds its log into rows.

A table is versioned or plain; only this module chooses between ``versioned_table`` and ``plain_table``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import VALID_TO
from vt_dagster.core import plain_table, versioned_table
from vt_dagster.core.arrival_order import by_partition, union
from vt_dagster.core.log_columns import partial_columns, ties_by_column, value_columns
from vt_dagster.core.source_order import SourceOrder
from vt_dagster.core.stream_time import Bounds
from vt_dagster.topology.model import Stream, Table, VersionedTable

PersistRows = Callable[[DataFrame], DataFrame]
"""Persists rows that are read several times."""
LookUp = Callable[[DataFrame], tuple[DataFrame, DataFrame]]
"""Looks up records in a table with many more keys: returns the records and the rows of their keys."""


def put(
    node: Table,
    records: DataFrame,
    view: DataFrame | None,
    *,
    stream_time: Column,
    order: Sequence[str],
    chunk: Column | None,
    persist_rows: PersistRows | None = None,
    look_up: LookUp | None = None,
    bounds: Bounds | None = None,
    of_rejected: Sequence[str] = (),
    colliding_versions: DataFrame | None = None,
    first_changes: DataFrame | None = None,
    last: DataFrame | None = None,
    risen: str | None = None,
) -> DataFrame:
    """Puts records into a table's store: see ``versioned_table.put`` and ``plain_table.put``.

    Args:
        persist_rows: persists the records if they have few of the view's many keys: then only the
            view's rows of these keys are shuffled.
        look_up: returns the rows of the view if ``view`` is None.
        bounds: of a versioned table's stream time, see ``passed``.
        of_rejected: columns that are null in applied records.
        colliding_versions, first_changes, last: see ``RunContext``.
        risen: of a plain table, see ``plain_table.put``.

    Source: KIP-889, FORMAT 4.1 and 4.2.3.
    """
    values = value_columns(node)
    if look_up is not None:
        records, view = look_up(records)
    elif persist_rows is not None and view is not None:
        records = persist_rows(records)
        keys = F.broadcast(records.select(*[F.col(f"`{k}`") for k in node.key]).distinct())
        view = view.join(keys, list(node.key), "left_semi")
        colliding_versions = (
            None
            if colliding_versions is None
            else colliding_versions.join(keys, list(node.key), "left_semi")
        )
    if isinstance(node, VersionedTable):
        return versioned_table.put(
            records,
            view,
            rules=node.version_rules,
            values=values,
            order=order,
            stream_time=stream_time,
            chunk=chunk,
            bounds=bounds,
            of_rejected=of_rejected,
            colliding_versions=colliding_versions,
            first_changes=first_changes,
            parts=partial_columns(node),
            ties=ties_by_column(node),
            by_source=SourceOrder.of(node, last),
        )
    about: dict[str, Any] = {"order": order, "of_rejected": of_rejected, "risen": risen}
    return plain_table.put(records, view, key=node.key, values=values, **about)


def fold(
    node: Table,
    view: DataFrame | None,
    log: DataFrame,
    stream_time: Column,
    few_keys: bool = False,
) -> DataFrame:
    """Returns a table's rows after more of its log: see ``versioned_table.fold`` and
    ``plain_table.fold``.

    Args:
        view: the rows before; None = none.
        stream_time: of a row's partition, after the log's rows.
        few_keys: of a plain table, see ``plain_table.fold``.

    Source: FORMAT 4.1, 4.2.3; kip889-motivation-versioned, kip889-motivation-unversioned.
    """
    if isinstance(node, VersionedTable):
        horizon, on = horizon_of(node, stream_time), node.new_version_on
        return versioned_table.fold(view, log, key=node.key, horizon=horizon, new_version_on=on)
    return plain_table.fold(view, log, key=node.key, few_keys=few_keys)


def fold_few(node: Table, view: DataFrame, log: DataFrame, stream_time: Column) -> DataFrame:
    """Returns the rows of :func:`fold`, for a log with few of the view's many keys.

    Plan: two scans of the view, neither shuffled: the keys of the log are broadcast.
    """
    keys = F.broadcast(log.select(*[F.col(f"`{k}`") for k in node.key]).distinct())
    met, others = (view.join(keys, list(node.key), how) for how in ("left_semi", "left_anti"))
    if isinstance(node, VersionedTable):
        others = versioned_table.drop_expired(others, horizon_of(node, stream_time))
    # A view from before a column was added to the log lacks that column.
    return union(others, fold(node, met, log, stream_time))


def current(node: Table, view: DataFrame) -> DataFrame:
    """Returns a view's entry of each key without history: its row, for a versioned table also a
    tombstone.

    Source: FORMAT 4.1.3, 4.6.
    """
    return versioned_table.latest(view) if isinstance(node, VersionedTable) else view


def rows_of(node: Table, current: DataFrame) -> DataFrame:
    """Returns the rows, without tombstones, of the result of :func:`current`.

    Source: FORMAT 4.1.4, 4.6; kip889-tombstone-is-null.
    """
    return versioned_table.get(current) if isinstance(node, VersionedTable) else current


def as_read(node: Stream, view: DataFrame) -> DataFrame:
    """Returns a view's rows as a reader sees them.

    With ``new_version_on`` rows that repeat a version are removed; with ``valid_until`` a version ends
    at that time too. The stored view has a row per record, which ends only at the next one, so that a
    record in between inherits nothing.
    """
    if not isinstance(node, VersionedTable):
        return view
    if node.new_version_on is not None:
        view = versioned_table.collapse_repeats(view, node.key, node.new_version_on)
    return (
        view
        if node.valid_until is None
        else versioned_table.clip_at_valid_until(view, node.valid_until)
    )


def rows_now(node: Table, current: DataFrame, stream_time: Mapping[int, int]) -> DataFrame:
    """Returns the rows of :func:`current` as a reader sees them: see :func:`as_read`.

    Args:
        stream_time: by partition, epoch microseconds: a row that ends at or before it is omitted.
    """
    rows = rows_of(node, current)
    if isinstance(node, VersionedTable) and node.new_version_on is not None:
        rows = versioned_table.with_version_start(rows, node.new_version_on)
    if not isinstance(node, VersionedTable) or node.valid_until is None:
        return rows
    rows = versioned_table.clip_at_valid_until(rows, node.valid_until)
    return rows.where(F.col(VALID_TO).isNull() | (F.col(VALID_TO) > by_partition(stream_time)))


def horizon_of(node: VersionedTable, stream_time: Column) -> Column:
    """Returns the start of the table's history (inclusive) at a stream time, see
    ``versioned_table.horizon_of``."""
    return versioned_table.horizon_of(node.version_rules, stream_time)


def needs_colliding_versions(node: Stream) -> bool:
    """Returns whether records are compared with, or completed from, the versions at their time."""
    ties = node.version_rules is not None and node.version_rules.tie_break is not None
    return ties or bool(partial_columns(node))


def start_of(node: Stream) -> Any:
    """Returns the source of a table's initial snapshot; None = there is none."""
    return node.start if isinstance(node, VersionedTable) else None
