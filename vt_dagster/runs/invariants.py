"""Invariants of tables with validity intervals and of logs, each a check of a whole DataFrame.

A check is a function ``(frame, *, parameters) -> bool``, as pandera calls it; ``vt_dagster.contracts``
registers all of them with pandera. Gates and asset checks count the underlying conditions
(:class:`Violation`), many in one pass.

Intervals are half open: ``valid_from`` is inclusive, ``valid_to`` exclusive, and a null ``valid_to``
means that the version is current. Both may be TIMESTAMP, DATE or any other orderable type. All null
keys count as one key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeAlias
from zlib import crc32

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import (
    IS_LATE,
    OFFSET,
    PARTITION,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
    WINDOW_END,
    WINDOW_START,
)
from vt_dagster.core.arrival_order import by_partition, with_columns
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.topology.model import Stream, Table, VersionedTable

Names: TypeAlias = str | Sequence[str]


@dataclass(frozen=True)
class Violation:
    """The condition of rows that break an invariant.

    Args:
        where: true for an offending row; false or null for any other.
        columns: further columns that ``where`` needs, by name. Equal names stand for equal expressions,
            so that several violations share them.
    """

    where: Column
    columns: Mapping[str, Column] = field(default_factory=dict[str, Column])


def _none_in(frame: Any, violation: Violation) -> bool:
    rows = with_columns(frame, dict(violation.columns))
    return rows.where(violation.where).limit(1).count() == 0


def _names(key: Names) -> list[str]:
    return [key] if isinstance(key, str) else list(key)


def _column(name: str) -> Column:
    """Returns a column by name; a name with dots is a field of a struct."""
    return F.col(name) if "." in name else F.col(f"`{name}`")


def _helper(what: str, *parts: Any) -> str:
    """Returns one name per expression, so that two checks with the same parameters share a window."""
    return f"{what}#{crc32(repr(parts).encode()):08x}"


def shown_as(helper: str) -> str:
    """Returns the name under which samples show a column of ``Violation.columns``."""
    return helper.partition("#")[0]


def _following(key: Names, valid_from: str, valid_to: str) -> tuple[str, Column]:
    """Returns the ``valid_from`` of the key's next version, as a named window expression."""
    keys = _names(key)
    order = [_column(valid_from), _column(valid_to).asc_nulls_last()]
    following = F.lead(_column(valid_from)).over(W.partitionBy(*map(_column, keys)).orderBy(*order))
    return _helper("next_valid_from", keys, valid_from, valid_to), following


def overlaps(key: Names, valid_from: str, valid_to: str) -> Violation:
    """See :func:`versions_do_not_overlap`."""
    name, following = _following(key, valid_from, valid_to)
    start, end = _column(valid_from), _column(valid_to)
    where = (_column(name) > start) & (end.isNull() | (end > _column(name)))
    return Violation(where, {name: following})


def gaps(key: Names, valid_from: str, valid_to: str, last_is_current: bool) -> Violation:
    """See :func:`versions_are_contiguous`."""
    name, following = _following(key, valid_from, valid_to)
    end = _column(valid_to)
    ended = _column(name).isNull() & end.isNotNull() if last_is_current else F.lit(False)
    where = (end < _column(name)) | ended
    return Violation(where, {name: following})


def repeated_versions(key: Names, valid_from: str, valid_to: str) -> Violation:
    """See :func:`one_version_per_key_and_timestamp`."""
    name, following = _following(key, valid_from, valid_to)
    return Violation(_column(name) == _column(valid_from), {name: following})


def empty_intervals(valid_from: str, valid_to: str) -> Violation:
    """See :func:`valid_from_before_valid_to`."""
    return Violation(_column(valid_from).isNull() | (_column(valid_to) <= _column(valid_from)))


def second_current_versions(key: Names, valid_to: str) -> Violation:
    """See :func:`one_current_version_per_key`; counts all current versions of an offending key."""
    keys, is_current = _names(key), _column(valid_to).isNull()
    name = _helper("current_versions", keys, valid_to)
    current = F.count(F.when(is_current, 1)).over(W.partitionBy(*map(_column, keys)))
    return Violation(is_current & (_column(name) > 1), {name: current})


def expired(horizon: Column, valid_to: str) -> Violation:
    """See :func:`nothing_older_than_retention`.

    Args:
        horizon: start of the history; a version that ended at or before it has expired.
    """
    return Violation(_column(valid_to) <= horizon)


def repeated_rows(key: Names) -> Violation:
    """See :func:`one_row_per_key`."""
    keys = _names(key)
    name = _helper("rows", keys)
    rows = F.count(F.lit(1)).over(W.partitionBy(*map(_column, keys)))
    return Violation(_column(name) > 1, {name: rows})


def decreasing(
    key: Names, timestamp: str, order: Sequence[str | Column], among: Column | None
) -> Violation:
    """See :func:`timestamps_do_not_decrease`; rows outside of ``among`` are left out."""
    keys = _names(key)
    counted = _column(timestamp) if among is None else F.when(among, _column(timestamp))
    columns = [_column(one) if isinstance(one, str) else one for one in order]
    earlier = W.partitionBy(*map(_column, keys)).orderBy(*columns)
    newest = F.max(counted).over(earlier.rowsBetween(W.unboundedPreceding, -1))
    name = _helper("newest_before", keys, timestamp, *map(str, columns), str(among))
    return Violation(counted < _column(name), {name: newest})


def repeated_results(key: Names, order: Sequence[str | Column]) -> Violation:
    """See :func:`one_result_per_window`."""
    keys = _names(key)
    columns = [_column(one) if isinstance(one, str) else one for one in order]
    name = _helper("release", keys, *map(str, columns))
    release = F.row_number().over(W.partitionBy(*map(_column, keys)).orderBy(*columns))
    return Violation(_column(name) > 1, {name: release})


# ---------------------------------------------------------------------------------------- checks


def versions_do_not_overlap(
    frame: DataFrame, *, key: Names, valid_from: str = VALID_FROM, valid_to: str = VALID_TO
) -> bool:
    """No version of a key ends after the key's next version begins.

    A current version ends after every other one. ``one_version_per_key_and_timestamp`` covers two
    versions with the same ``valid_from``.

    Args:
        key: one or more columns.
        valid_from: first moment of a version, inclusive.
        valid_to: end of a version, exclusive; null = current.
    """
    return _none_in(frame, overlaps(key, valid_from, valid_to))


def versions_are_contiguous(
    frame: DataFrame,
    *,
    key: Names,
    valid_from: str = VALID_FROM,
    valid_to: str = VALID_TO,
    last_is_current: bool = False,
) -> bool:
    """Every version of a key ends no earlier than the key's next version begins.

    Args:
        key, valid_from, valid_to: as for ``versions_do_not_overlap``.
        last_is_current: whether a key's last version must be current, too: set it for a table that
            stores tombstones as versions.
    """
    return _none_in(frame, gaps(key, valid_from, valid_to, last_is_current))


def one_version_per_key_and_timestamp(
    frame: DataFrame, *, key: Names, valid_from: str = VALID_FROM, valid_to: str = VALID_TO
) -> bool:
    """No key has two versions with the same ``valid_from``.

    Args:
        key, valid_from, valid_to: as for ``versions_do_not_overlap``.
    """
    return _none_in(frame, repeated_versions(key, valid_from, valid_to))


def valid_from_before_valid_to(
    frame: DataFrame, *, valid_from: str = VALID_FROM, valid_to: str = VALID_TO
) -> bool:
    """Every version has a ``valid_from`` and ends after it; a version of zero length is refused.

    Args:
        valid_from, valid_to: as for ``versions_do_not_overlap``.
    """
    return _none_in(frame, empty_intervals(valid_from, valid_to))


def one_current_version_per_key(frame: DataFrame, *, key: Names, valid_to: str = VALID_TO) -> bool:
    """No key has two versions without an end; a key may have no current version.

    Args:
        key, valid_to: as for ``versions_do_not_overlap``.
    """
    return _none_in(frame, second_current_versions(key, valid_to))


def nothing_older_than_retention(
    frame: DataFrame,
    *,
    retention: timedelta,
    valid_from: str = VALID_FROM,
    valid_to: str = VALID_TO,
    stream_time: datetime | None = None,
) -> bool:
    """No version ended before the history retention began: ``valid_to > stream time - retention``.

    A version that ended exactly at that bound has expired. Source: KIP-889, "history retention".

    Args:
        retention: length of the history.
        valid_from, valid_to: as for ``versions_do_not_overlap``; both TIMESTAMP.
        stream_time: end of the history; None = the largest ``valid_from``, per partition if the frame
            has a column ``partition``, which takes a Spark job of its own.
    """
    if stream_time is not None:
        horizon = F.lit(stream_time - retention).cast("timestamp")
        return _none_in(frame, expired(horizon, valid_to))
    newest = F.max(F.unix_micros(_column(valid_from).cast("timestamp"))).alias("newest")
    if PARTITION not in frame.columns:
        horizon = F.timestamp_micros(F.lit(frame.agg(newest).collect()[0]["newest"])) - F.lit(retention)
        return _none_in(frame, expired(horizon, valid_to))
    found = {row[PARTITION]: row["newest"] for row in frame.groupBy(PARTITION).agg(newest).collect()}
    return _none_in(frame, expired(by_partition(found) - F.lit(retention), valid_to))


def one_row_per_key(frame: DataFrame, *, key: Names) -> bool:
    """No key has two rows.

    Args:
        key: one or more columns.
    """
    return _none_in(frame, repeated_rows(key))


def timestamps_do_not_decrease(
    frame: DataFrame,
    *,
    key: Names,
    timestamp: str = TIMESTAMP,
    order: Names | None = None,
    late: str = IS_LATE,
) -> bool:
    """No row is older than an earlier row of its key, in write order.

    Tombstones are compared as well. Late rows are excluded on both sides.

    Args:
        key: one or more columns. A log is ordered within its partitions, so rows of two partitions are
            compared only if ``order`` is given.
        timestamp: event time of a row.
        order: the columns that give the write order; None = ``offset`` within ``partition``.
        late: a BOOLEAN column that is true for late rows; without such a column no row is late.
    """
    keys = _names(key)
    if order is None:
        keys, order = ([PARTITION, *keys] if PARTITION in frame.columns else keys), [OFFSET]
    among = ~F.coalesce(_column(late), F.lit(False)) if late in frame.columns else None
    return _none_in(frame, decreasing(keys, timestamp, _names(order), among))


def one_result_per_window(frame: DataFrame, *, key: Names, order: Names | None = None) -> bool:
    """No window of a key has two results: results are final.

    Args:
        key: the key columns. The window columns ``window_start`` and ``window_end`` belong to the key,
            and are added if the frame has them.
        order: the columns that give the write order, which separates the first result from later ones;
            None = ``partition, offset`` if the frame has them.
    """
    keys = _names(key)
    keys += [c for c in (WINDOW_START, WINDOW_END) if c in frame.columns and c not in keys]
    if order is None:
        order = [c for c in (PARTITION, OFFSET) if c in frame.columns] or keys
    return _none_in(frame, repeated_results(keys, _names(order)))


CHECKS: dict[str, Callable[..., bool]] = {
    check.__name__: check
    for check in (
        versions_do_not_overlap,
        versions_are_contiguous,
        one_version_per_key_and_timestamp,
        valid_from_before_valid_to,
        one_current_version_per_key,
        nothing_older_than_retention,
        one_row_per_key,
        timestamps_do_not_decrease,
        one_result_per_window,
    )
}
"""The checks by their names in pandera."""


# ------------------------------------------------------------------------------ invariants of a node

PROMISES = {
    "versions_do_not_overlap": "no version ends after the next one begins",
    "versions_are_contiguous": "every version ends where the next one begins",
    "one_version_per_key_and_timestamp": "no key has two versions that begin at the same time",
    "valid_from_before_valid_to": "every version begins before it ends",
    "one_current_version_per_key": "no key has two current versions",
    "nothing_older_than_retention": "no version ended before the history retention began",
    "one_row_per_key": "no key has two current rows",
    "timestamps_do_not_decrease": "per key, no result is older than an earlier one, unless it was late",
    "one_result_per_window": "no window has two results: results are final",
}
"""The promise of each invariant, in a sentence."""


def invariants_of_view(node: Stream) -> dict[str, dict[str, Any]]:
    """Returns the invariants of a table's view by name, with check parameters; a stream has none."""
    key = {"key": [*node.key]}
    if isinstance(node, VersionedTable):
        return {
            "versions_do_not_overlap": key,
            "versions_are_contiguous": {**key, "last_is_current": True},
            "one_version_per_key_and_timestamp": key,
            "valid_from_before_valid_to": {},
            "one_current_version_per_key": key,
            "nothing_older_than_retention": {"retention": node.history_retention},
        }
    return {"one_row_per_key": key} if isinstance(node, Table) else {}


def invariants_of_log(node: Stream) -> dict[str, dict[str, Any]]:
    """Returns the invariants of a log by name: the order of results that the operator promises."""
    processor, key = processor_of(node), {"key": [*node.key]}
    found: dict[str, dict[str, Any]] = {}
    if processor.monotonic:
        found["timestamps_do_not_decrease"] = key
    if processor.emits_once:
        found["one_result_per_window"] = key
    return found
