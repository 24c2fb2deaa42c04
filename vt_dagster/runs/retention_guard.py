"""Refuses to recompute results from truncated logs or from times before a table's history."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pyspark.sql import functions as F

from vt_dagster.columns import TIMESTAMP
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.errors import StorageError
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Commit, horizons
from vt_dagster.storage.log_truncation import require_not_truncated
from vt_dagster.topology.durations import in_utc
from vt_dagster.topology.model import Stream, VersionedTable

Stores = Callable[[Stream], AssetStore]
"""Returns the store of a stream or table."""


def require_logs(node: Stream, ups: Iterable[Stream], stores: Stores, keep: Commit | None) -> None:
    """Requires that no log row to read again has been truncated.

    Args:
        ups: the consumed inputs that are not recomputed themselves.
        stores, keep: see :func:`require_history`.

    Raises:
        StorageError: a log has been truncated.
    """
    start = {} if keep is None else keep.inputs
    for up in ups:
        head = stores(up).head()
        if head is not None:
            require_not_truncated(node.name, up.name, start.get(up.name, {}), head.commit)


def require_history(node: Stream, stores: Stores, keep: Commit | None, instead: str) -> None:
    """Requires that no record to join again is from before the table's history.

    Args:
        stores: returns the tables to read.
        keep: the last commit whose results are kept; None = all results are recomputed.
        instead: the way out, a sentence without its full stop, for the message.

    Raises:
        StorageError: the table's history does not cover some records to join again.
    """
    processor = processor_of(node)
    table, up = processor.looked_up, processor.consumed[0]
    if not isinstance(table, VersionedTable):
        return
    head, last = stores(table).head(), stores(up).head()
    if head is None or last is None:
        return
    horizon = max(horizons(table.history_retention, head.commit.stream_time), default=None)
    if horizon is None:
        return
    start, waiting = {}, None
    if keep is not None:
        start = keep.inputs.get(up.name, {})
        waiting = processor.rescan_from(0, keep.stream_time, keep.emitted_up_to, keep.watermarks)
    rows = stores(up).log(start, last, waiting)
    oldest = rows.agg(F.min(F.unix_micros(TIMESTAMP))).collect()[0][0]
    if oldest is not None and oldest < horizon:
        raise StorageError(
            f"{node.name}: expected that the history of {table.name} covers all records to join again, "
            f"got records of {up.name} from {in_utc(oldest)} on, and a history from {in_utc(horizon)} "
            f"on: they would lose their matches. {instead}: its log has all versions"
        )
