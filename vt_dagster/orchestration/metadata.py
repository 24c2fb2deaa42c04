"""The metadata of a materialization: numbers under stable names, so that Dagster plots them.

Only numbers worth a plot are entries of their own. Numbers that only count runs are in one entry
without a plot, ``versions``. Counts that have always been zero are left out, unless zero is itself
information (``_told``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import quote

import dagster as dg
from pyspark.sql.types import NullType

from vt_dagster.columns import (
    CAUSE,
    IS_LATE,
    IS_LATEST,
    IS_TOMBSTONE,
    OFFSET,
    PARTITION,
    RECORDED_AT,
    REVISION,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core.arrival_order import Outcome
from vt_dagster.core.log_columns import log_columns
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.core.stream_table_join import TOO_LATE
from vt_dagster.core.table_store import tie_break_of
from vt_dagster.orchestration.op_names import steps_of
from vt_dagster.orchestration.text_timeline import counts_text
from vt_dagster.rules import METRICS
from vt_dagster.runs.run import Receipt
from vt_dagster.sources.kafka_source import PinnedTopics
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Commit
from vt_dagster.topology.durations import spoken
from vt_dagster.topology.model import Stream, Table, VersionedTable

EXPLORE = "VT_DAGSTER_EXPLORE"
"""The address of a ``vt-dagster explore``, like http://127.0.0.1:3001: assets then link to it."""

_ADDED_COLUMNS = {
    TIMESTAMP: ("timestamp", "valid time of the record, UTC"),
    PARTITION: ("int", "partition of the record"),
    OFFSET: ("bigint", "gap-free position in the partition of the log"),
    IS_TOMBSTONE: ("boolean", "the record's value is null: a deletion"),
    RECORDED_AT: ("timestamp", "system time: when the record was committed, UTC"),
    IS_LATEST: ("boolean", "false: out of order for its key on arrival"),
    IS_LATE: ("boolean", "arrived after its grace period, so joined at once"),
    REVISION: ("int", "how often the row was corrected"),
    CAUSE: ("struct<table:string,partition:int,offset:bigint>", "the record that corrected it"),
    VALID_FROM: ("timestamp", "start of the version, inclusive, UTC"),
    VALID_TO: ("timestamp", "end of the version, exclusive, UTC; null = current"),
}


def column_schema(node: Stream) -> dg.TableSchema:
    """Returns the columns that users query: of a table's view, of a stream's log."""
    own = [
        dg.TableColumn(
            f.name,
            "decided by Spark" if isinstance(f.dataType, NullType) else f.dataType.simpleString(),
            description=_description(node, f.name),
        )
        for f in node.schema.fields
        if f.name != TIMESTAMP
    ]
    added = [c for c in log_columns(node) if c in _ADDED_COLUMNS and c != IS_LATEST]
    added.append(RECORDED_AT)
    if isinstance(node, VersionedTable):
        added += [VALID_FROM, VALID_TO]
    return dg.TableSchema(
        columns=own
        + [dg.TableColumn(c, _ADDED_COLUMNS[c][0], description=_ADDED_COLUMNS[c][1]) for c in added]
    )


def _description(node: Stream, column: str) -> str | None:
    """Returns a column's description in the contract; for a derived column, that of its one origin."""
    contract = node.contract.to_schema().columns if hasattr(node.contract, "to_schema") else {}
    said = (
        getattr(contract.get(column), "description", None)
        or _ADDED_COLUMNS.get(column, (None, None))[1]
    )
    made_of = node.operator.lineage().get(column, []) if node.operator is not None else []
    if said or len(made_of) != 1:
        return said
    asset, origin = made_of[0]
    up = next((n for n in node.inputs if n.name == asset), None)
    told = None if up is None else _description(up, origin)
    return None if told is None else told if " (from " in told else f"{told} (from {asset}.{origin})"


def definition_metadata(node: Stream) -> dict[str, Any]:
    """Returns the metadata known before any run: columns, lineage, semantics."""
    metadata: dict[str, Any] = {
        "dagster/column_schema": column_schema(node),
        "dagster/storage_kind": "delta",
        "vt_dagster/kind": type(node).__name__,
        "vt_dagster/key": ", ".join(node.key),
        "vt_dagster/ops": " -> ".join(steps_of(node)),
    }
    if isinstance(node, VersionedTable):
        metadata["vt_dagster/history_retention"] = spoken(node.history_retention)
        if node.ready is not None:
            metadata["vt_dagster/ready"] = str(node.ready)
        if node.start is not None:
            metadata["vt_dagster/start"] = node.start.describe()
        if node.new_version_on is not None:
            metadata["vt_dagster/new_version_on"] = ", ".join(node.new_version_on)
        if node.only_columns is not None:
            only = node.only_columns
            metadata["vt_dagster/only_columns"] = only if isinstance(only, str) else ", ".join(only)
        if node.ignore_null_updates:
            nulls = node.ignore_null_updates
            metadata["vt_dagster/ignore_null_updates"] = "all" if nulls is True else ", ".join(nulls)
    if isinstance(node, Table) and node.deleted_at is not None:
        metadata["vt_dagster/deleted_at"] = node.deleted_at
    if node.log_retention is not None:
        metadata["vt_dagster/log_retention"] = spoken(node.log_retention)
    if node.operator is not None:
        metadata["vt_dagster/operator"] = type(node.operator).__name__
        metadata |= {f"vt_dagster/{name}": said for name, said in node.operator.settings.items()}
    metadata |= _column_lineage(node)
    if node.source is not None:
        metadata["vt_dagster/source"] = node.source.describe()
        unit = getattr(node.source, "timestamps", None)
        if unit is not None:
            said = unit if isinstance(unit, str) else ", ".join(f"{c}: {u}" for c, u in unit.items())
            metadata["vt_dagster/timestamps"] = said
    metadata["vt_dagster/numbers"] = dg.MetadataValue.md(_numbers(node))
    return metadata | _explore(node)


def _explore(node: Stream) -> dict[str, dg.MetadataValue[Any]]:
    """Returns the link to the node's page of ``vt-dagster explore``, if its address is set."""
    page = _page(node)
    return {} if page is None else {"vt_dagster/explore": dg.MetadataValue.url(page)}


def _page(node: Stream) -> str | None:
    address = os.environ.get(EXPLORE)
    return address and f"{address.rstrip('/')}/table/{quote('/'.join(node.path))}"


def _numbers(node: Stream) -> str:
    """Returns the rules behind the counts of its materializations, as a Markdown list."""
    processor = processor_of(node)
    told = {f"records_{name}" for name in processor.shown_counts}
    if processor.reports_lateness:
        closes = node.window is not None and all(up.window is None for up in node.inputs)
        told |= {name for name in _KIP_328 if (name == _EMITTED) != closes}
    return "\n".join(f"- `{name}`: {rule.says}" for name, rule in METRICS.items() if name in told)


def _column_lineage(node: Stream) -> dict[str, dg.TableColumnLineage]:
    """Returns the column lineage; Dagster+ draws it from a materialization."""
    if node.operator is None:
        return {}
    keys = {up.name: dg.AssetKey(up.path) for up in node.inputs}
    made_of = {
        name: [dg.TableColumnDep(keys[asset], column) for asset, column in deps]
        for name, deps in node.operator.lineage().items()
    }
    return {"dagster/column_lineage": dg.TableColumnLineage(made_of)}


def describe(node: Stream) -> str:
    """Returns a description of a row, its key, its time and its history retention."""
    key = ", ".join(f"`{k}`" for k in node.key)
    if isinstance(node, VersionedTable):
        said = (
            f"A versioned table, one row for each version of a key ({key}), valid from `{VALID_FROM}` "
            f"to `{VALID_TO}`: it keeps the history of each key for "
            f"{spoken(node.history_retention)} of stream time."
        )
    elif isinstance(node, Table):
        said = f"A table, one row for each key ({key}): its latest record, by arrival."
    else:
        said = f"A stream, one row for each record; its key is {key}."
    if node.operator is not None:
        said = f"{node.operator.describe()} {said}"
    elif node.timestamp != TIMESTAMP:
        said = f"{said} Its time, `{TIMESTAMP}`, is `{node.timestamp}`."
    page = _page(node)
    link = None if page is None else f"[Explore its keys and rows]({page})"
    return "\n\n".join(part for part in (node.description, said, link) if part)


def run_metadata(
    node: Stream, store: AssetStore, receipt: Receipt, seconds: float, shown: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the metadata of a run that committed, most important first: Dagster keeps the order.

    Args:
        shown: entries after the numbers: lag and pictures.
    """
    commit = receipt.commit
    assert commit is not None
    counted = (*processor_of(node).shown_counts, _LOST)
    counts = {n: commit.counts.get(n, 0) for n in counted if _told(node, n, commit)}
    rows = store.stored_rows()
    newest = max(commit.stream_time.values()) if commit.stream_time else None
    metadata: dict[str, Any] = {"at_a_glance": counts_text(counts, rows, newest), **_explore(node)}
    metadata |= {f"records_{name}": number for name, number in counts.items()}
    for name in _KIP_328:
        if name in commit.counts and _told(node, name, commit):
            metadata[name] = commit.counts.get(name, 0)
    for name, number in commit.gauges.items():
        metadata[_GAUGES.get(name, name)] = round(number, 6)
    metadata |= {"dagster/row_count": rows, "log_rows": commit.total}
    if newest is not None:
        metadata["stream_time"] = as_time(newest)
        retention = getattr(node, "history_retention", None)
        if isinstance(retention, timedelta):
            oldest = min(commit.stream_time.values())
            metadata["retention_horizon"] = as_time(oldest - retention // _MICROSECOND)
    metadata |= {"seconds": round(seconds, 3), **shown}
    return metadata | _where_from(node, store, receipt, commit)


def _where_from(node: Stream, store: AssetStore, receipt: Receipt, commit: Commit) -> dict[str, Any]:
    """Returns the paths of a run's tables, and its inputs."""
    metadata: dict[str, Any] = {
        "dagster/uri": store.view_path if isinstance(node, Table) else store.log_path,
        "dagster/table_name": node.name,
        **_column_lineage(node),
        "versions": {"batch": commit.batch, "log": receipt.log_version},
    }
    if receipt.view_version is not None:
        metadata["versions"]["view"] = receipt.view_version
    base = store.snapshot().base
    if base is not None and base.checkpoint.batch != commit.batch:
        metadata["versions"]["view_of_batch"] = base.checkpoint.batch
    metadata["positions"] = positions_of(commit)
    metadata["taken"] = {
        n: {str(p): list(r) for p, r in ranges.items()} for n, ranges in commit.taken.items()
    }
    metadata["read_versions"] = dict(commit.reads)
    if commit.strategy:
        metadata["join_strategy"] = commit.strategy
    if commit.gaps:
        metadata["accepted_gaps"] = {
            t: {str(p): list(r) for p, r in some.items()} for t, some in commit.gaps.items()
        }
    if commit.truncation is not None:
        metadata["log_kept_since"] = as_time(commit.truncation.recorded_at)
    return metadata


def _told(node: Stream, name: str, state: Commit) -> bool:
    """Whether a count is shown for each run: if it was ever above zero, so that its plot returns to
    zero, and if its zero is information by itself.

    The latter are quarantined and late records: an alert on ``records_quarantined`` or ``records_late``
    must tell zero from a missing count. Only where the count is possible: a plain table and a stream
    accept every record, whatever its time.
    """
    waits = bool(getattr(node.operator, "waits", False))
    if name == Outcome.LATE:
        promised = waits or isinstance(node, VersionedTable)
    elif name == Outcome.LOST_TIE:
        promised = tie_break_of(node) is not None
    elif name == Outcome.WAITING:
        promised = waits
    else:
        always = ("in", "out", Outcome.APPLIED, Outcome.QUARANTINED, "late_records_dropped", TOO_LATE)
        promised = name in always
    return promised or state.totals.get(name, 0) > 0


def lag_metadata(pinned: PinnedTopics) -> dict[str, Any]:
    """Returns how far behind its topics a run was at its start: offsets, age of the oldest record."""
    waiting = pinned.waiting
    if not waiting:
        return {"lag_records": 0, "lag_seconds": 0.0}
    oldest = pinned.source.cluster.oldest(waiting)
    if oldest is None:  # the broker is gone by now
        return {"lag_records": pinned.behind}
    return {
        "lag_records": pinned.behind,
        "lag_seconds": round(max(0.0, time.time() - oldest), 3),
    }


def publication_metadata(commit: Commit, seconds: float) -> dict[str, Any]:
    """Returns the metadata of a publication's run that sent records."""
    return {
        "seconds": round(seconds, 3),
        "records_in": commit.counts["in"],
        "records_published": commit.counts["published"],
        "versions": {"batch": commit.batch},
        "positions": positions_of(commit),
    }


def positions_of(commit: Commit) -> dict[str, dict[str, int]]:
    """Returns the consumed position in each input, as Dagster metadata."""
    return {
        name: {str(p): offset for p, offset in ends.items()} for name, ends in commit.inputs.items()
    }


_LOST = "lost"
"""Records of topics that retention deleted before they were consumed, in a run with accept_gap."""
_EPOCH, _MICROSECOND = datetime(1970, 1, 1, tzinfo=timezone.utc), timedelta(microseconds=1)
_EMITTED = "suppression_emit"
_KIP_328 = ("late_records_dropped", "expired_window_records_dropped", _EMITTED)
_GAUGES = {
    "lateness_avg": "record_lateness_avg_seconds",
    "lateness_max": "record_lateness_max_seconds",
}


def as_time(micros: int) -> dg.MetadataValue[Any]:
    """Returns a time as metadata, or a text for times outside of Python's range."""
    try:
        return dg.MetadataValue.timestamp(_EPOCH + micros * _MICROSECOND)
    except OverflowError:
        return dg.MetadataValue.text("before the year 1" if micros < 0 else "after the year 9999")
