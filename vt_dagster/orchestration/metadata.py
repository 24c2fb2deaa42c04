"""Metadata of assets and runs in Dagster: counts, texts, timelines and pictures.

Numbers have stable names, so that Dagster plots them. Only numbers worth a plot are entries of their
own. Numbers that only count runs are in one entry without a plot, ``versions``. Counts that have always
been zero are left out, unless zero is itself information (``_is_shown``).

**Text.** Dagster shows the summary of a run as text without a click; a picture needs one. Text is shown
on every page. Markdown of fewer than 1,000 characters is shown on an asset's pages, and as a link in
the log of a run; so a drawing must be small.

**Pictures.** They show what a run brought, for a few keys, and how late its records were. They are
drawn from a bounded sample of the files that the run wrote, read without Spark: a run is neither slowed
(some 50 ms) nor failed by them.
"""

from __future__ import annotations

import os
import posixpath
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.types import NullType, StructType

from vt_dagster import rules
from vt_dagster.columns import (
    CAUSE,
    IS_LATE,
    IS_LATEST,
    IS_TOMBSTONE,
    OFFSET,
    PARTITION,
    PROPAGATED_FROM,
    RECORDED_AT,
    REVISION,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core.arrival_order import REFUSED, Outcome
from vt_dagster.core.log_columns import log_columns, partial_columns
from vt_dagster.core.processor_registry import PROCESSORS, processor_of
from vt_dagster.core.stream_table_join import TOO_LATE
from vt_dagster.drawing import BLUE, GREY, RED, WIDTH, image, svg, text
from vt_dagster.errors import counted
from vt_dagster.rules import METRICS
from vt_dagster.runs.audit import checks_of
from vt_dagster.runs.pin import Arrival
from vt_dagster.runs.run import Receipt
from vt_dagster.sources.kafka_source import PinnedTopics
from vt_dagster.storage import delta, parquet
from vt_dagster.storage.arrow_reader import look_up
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.catalog import names_of
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.schema_evolution import never_null
from vt_dagster.topology.durations import as_time as utc_time
from vt_dagster.topology.durations import spoken
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.options import pandera_schema, set_options, shown_options

# Op names


KINDS = {
    word: tuple(kind.__name__ for kind in PROCESSORS if word in kind.words())
    for word in sorted({word for kind in PROCESSORS for word in kind.words()})
}
"""Op names of operators, each with the operator classes of that name."""


def steps_of(node: Stream) -> tuple[str, ...]:
    """Returns the ops that together do what the single op of ``build_asset`` does, in order."""
    if node.operator is None:
        return ("read_op", "put_op", "write_op")
    buffer = ("grace_buffer_op",) if processor_of(node).plan().has_grace_buffer else ()
    return ("read_logs_op", *buffer, f"{node.operator.word}_op", "write_op")


# Text timeline


SHOWN_AT_ONCE = 999
"""The maximal length (UTF-16 characters) of Markdown that Dagster shows without a click."""
EDGES = [0, 60, 600, 3_600, 21_600, 86_400, 604_800, 2_592_000]
"""Edges of the lateness buckets, in seconds; the first bucket holds records that are not late."""
LABELS = ["0", "< 1m", "< 10m", "< 1h", "< 6h", "< 1d", "< 7d", "< 30d", "more"]
_CELLS, _LABEL = 50, 8


@dataclass
class Lane:
    """One key: its versions (from, to, deleted), and its records (timestamp, out of order)."""

    key: str
    bars: list[tuple[int, int | None, bool]] = field(default_factory=list[tuple[int, int | None, bool]])
    marks: list[tuple[int, bool]] = field(default_factory=list[tuple[int, bool]])
    of: int = 0
    """How many records it has in the shown time range, if not all are drawn."""


_RECORDS, _ROWS = "records: ", "; rows now: "


def counts_text(records: str, rows: int | None, stream_time: int | None) -> str:
    """Returns the counts of a run in one line.

    Args:
        records: the sum of the run's records, see ``RunCounts.text``.
        rows: of the table after the run.
        stream_time: after the run, epoch µs.
    """
    text = f"{_RECORDS}{records}"
    if rows is not None:
        text += f"{_ROWS}{rows:,}"
    return text if stream_time is None else f"{text}; stream time: {moment_of(stream_time)} UTC"


def records_of(at_a_glance: str) -> str:
    """Returns the sum of the records in a line of :func:`counts_text`."""
    return at_a_glance.removeprefix(_RECORDS).partition(_ROWS)[0]


def lateness_text(lateness: Sequence[float], limits: Mapping[str, timedelta], of: int) -> str:
    """Returns how far behind stream time records arrived, in one line.

    Args:
        lateness: of a sample, in seconds.
        limits: the accepted lateness, by name.
        of: how many records the sample was drawn from.
    """
    counts = in_buckets(lateness)
    many = ", ".join(f"{LABELS[n]}: {count:,}" for n, count in enumerate(counts) if count)
    some = f"{len(lateness):,} of {of:,}" if of > len(lateness) else f"{of:,}"
    allowed = "".join(f"; {name} {spoken(limit)}" for name, limit in limits.items())
    return f"lateness of {some} record{'s' * (of != 1)} behind stream time: {many}{allowed}"


def sketch(lanes: Sequence[Lane], odd: str, of: int) -> str:
    """Returns the timeline as Markdown text: for each key a line of records and a line of versions.

    Drops keys from the end until the text is short enough to be shown without a click.

    Args:
        odd: the meaning of a cross, for the legend.
        of: how many records the run has; the legend shows how many are drawn.
    """
    made = ""
    for kept in range(len(lanes), 0, -1):
        made = _sketch(lanes[:kept], odd, of)
        if len(made.encode("utf-16-le")) // 2 <= SHOWN_AT_ONCE:
            break
    return made


def drawn_of(lanes: Sequence[Lane], of: int) -> str:
    """Returns how many records of a run are drawn: ``60 of 243 records of this run``."""
    return f"{sum(len(lane.marks) for lane in lanes):,} of {counted(of, 'record')} of this run"


def _sketch(lanes: Sequence[Lane], odd: str, of: int) -> str:
    times = [moment for lane in lanes for moment, _ in lane.marks]
    low, high = min(times), max(times)

    def cell(moment: int) -> int:
        return min(max(0, (moment - low) * (_CELLS - 1) // max(1, high - low)), _CELLS - 1)

    start, end = moment_of(low), moment_of(high)
    lines = [" " * (_LABEL + 1) + f"{start}{end:>{_CELLS - len(start)}}"]
    for lane in lanes:
        name = "".join(c if c.isprintable() and c != "`" else "?" for c in lane.key[:_LABEL])
        lines += [
            f"{name:<{_LABEL}} {_records(lane, cell)}",
            f"{'':<{_LABEL}} {_versions(lane, cell, low, high)}",
        ]
    legend = (
        f"{drawn_of(lanes, of)}. o: a record at its timestamp (UTC), X: {odd}. "
        "|: a version begins, -: it is valid, .: deleted."
    )
    return "\n".join(["```text", *(line.rstrip() for line in lines), "```", "", legend])


def _records(lane: Lane, cell: Callable[[int], int]) -> str:
    row = [" "] * _CELLS
    for moment, is_odd in sorted(lane.marks, key=lambda mark: mark[1]):
        row[cell(moment)] = "X" if is_odd else "o"
    return "".join(row)


def _versions(lane: Lane, cell: Callable[[int], int], low: int, high: int) -> str:
    row = [" "] * _CELLS
    for start, end, deleted in sorted(lane.bars, key=lambda bar: bar[0]):
        if start > high or (end is not None and end <= low):
            continue
        last = _CELLS - 1 if end is None or end > high else cell(end)
        for place in range(cell(start), last + 1):
            row[place] = "." if deleted else "-"
        if start >= low:
            row[cell(start)] = "." if deleted else "|"
    return "".join(row)


def in_buckets(lateness: Sequence[float]) -> list[int]:
    """Returns how many records are in each bucket of ``LABELS``."""
    counts = Counter(map(bucket_of, lateness))
    return [counts[bucket] for bucket in range(len(LABELS))]


def bucket_of(seconds: float) -> int:
    """Returns the bucket of a lateness in seconds."""
    return 0 if seconds <= 0 else sum(seconds >= edge for edge in EDGES)


def moment_of(micros: int) -> str:
    """Returns a time to the minute, or a text for times outside of Python's range."""
    moment = _time(micros)
    return moment if isinstance(moment, str) else f"{moment:%Y-%m-%d %H:%M}"


def _time(micros: int) -> datetime | str:
    try:
        return utc_time(micros)
    except OverflowError:
        return "before the year 1" if micros < 0 else "after the year 9999"


# Metadata


EXPLORE = "VT_DAGSTER_EXPLORE"
"""The address of a ``vt-dagster explore``, like http://127.0.0.1:3001: assets then link to it."""

_ADDED_COLUMNS = {
    TIMESTAMP: ("timestamp", "valid time of the record, UTC"),
    PARTITION: ("int", "partition of the record"),
    OFFSET: ("bigint", "gap-free position in the partition of the log"),
    IS_TOMBSTONE: ("boolean", "true: the record deletes its key's row"),
    RECORDED_AT: ("timestamp", "system time: when the record was committed, UTC"),
    IS_LATEST: ("boolean", "false: the record was out of order for its key when it arrived"),
    IS_LATE: ("boolean", "true: arrived later than the grace period allows, joined at once"),
    REVISION: ("int", "how often the row was corrected"),
    CAUSE: ("struct<table:string,partition:int,offset:bigint>", "the record that corrected it last"),
    VALID_FROM: ("timestamp", "start of the version, inclusive, UTC"),
    VALID_TO: ("timestamp", "end of the version, exclusive, UTC; null = current"),
}


def column_schema(node: Stream) -> dg.TableSchema:
    """Returns the columns that users query: of a table's view, of a stream's log. A column has its
    checks as constraints, and ``key`` if it is part of the key."""
    rules = _rules(node)
    own = [
        dg.TableColumn(
            f.name,
            "decided by Spark" if isinstance(f.dataType, NullType) else f.dataType.simpleString(),
            description=_description(node, f.name),
            constraints=rules.get(f.name),
        )
        for f in node.schema.fields
        if f.name != TIMESTAMP
    ]
    added = [c for c in log_columns(node) if c in _ADDED_COLUMNS and c != IS_LATEST]
    added.append(RECORDED_AT)
    if isinstance(node, VersionedTable):
        added += [VALID_FROM, VALID_TO]
    one = ", ".join([*node.key, *([VALID_FROM] if isinstance(node, VersionedTable) else [])])
    of_rows = [f"one row for each {one}"] if isinstance(node, Table) else []
    of_rows += [
        str(check.name or check.error) for check in getattr(pandera_schema(node.contract), "checks", [])
    ]
    return dg.TableSchema(
        columns=own
        + [dg.TableColumn(c, _ADDED_COLUMNS[c][0], description=_ADDED_COLUMNS[c][1]) for c in added],
        constraints=dg.TableConstraints(other=of_rows),
    )


def types_of(stored: StructType) -> dict[str, str]:
    """Returns the types of a stored table's columns as text."""
    return {f.name: f.dataType.simpleString() for f in stored.fields}


def with_types(columns: dg.TableSchema, types: Mapping[str, str]) -> dg.TableSchema:
    """Returns columns with the types of a stored table: before a run, only Spark knows some of them."""
    return dg.TableSchema(
        columns=[
            dg.TableColumn(c.name, types.get(c.name, c.type), c.description, c.constraints)
            for c in columns.columns
        ],
        constraints=columns.constraints,
    )


def comments_of(node: Stream) -> dict[str, str]:
    """Returns the descriptions of the columns of an asset's tables, by name."""
    comments = {name: about for name, (_, about) in _ADDED_COLUMNS.items()}
    return comments | {c.name: c.description for c in column_schema(node).columns if c.description}


def _rules(node: Stream) -> dict[str, dg.TableColumnConstraints]:
    """Returns the constraints of columns: part of the key, not null, and the checks of the contract."""
    contract, required = pandera_schema(node.contract), never_null(node)
    found: dict[str, dg.TableColumnConstraints] = {}
    for name in node.schema.names:
        of_column = getattr(contract, "columns", {}).get(name)
        checks = [str(check.error or check.name) for check in getattr(of_column, "checks", [])]
        other, optional = [*(["key"] if name in node.key else []), *checks], name not in required
        if other or not optional:
            found[name] = dg.TableColumnConstraints(nullable=optional, other=other)
    return found


def _description(node: Stream, column: str) -> str | None:
    """Returns a column's description in the contract; for a derived column, that of its one origin."""
    of_column = getattr(pandera_schema(node.contract), "columns", {}).get(column)
    description = getattr(of_column, "description", None)
    description = description or _ADDED_COLUMNS.get(column, (None, None))[1]
    made_of = node.operator.lineage().get(column, []) if node.operator is not None else []
    if description or len(made_of) != 1:
        return description
    asset, origin = made_of[0]
    up = next((n for n in node.inputs if n.name == asset), None)
    inherited = None if up is None else _description(up, origin)
    if inherited is None or " (from " in inherited:
        return inherited
    return f"{inherited} (from {asset}.{origin})"


def definition_metadata(node: Stream) -> dict[str, Any]:
    """Returns the metadata known before any run: columns, lineage, semantics."""
    metadata: dict[str, Any] = {
        "vt_dagster/about": dg.MetadataValue.md(describe(node)),
        "dagster/column_schema": column_schema(node),
        "dagster/storage_kind": "delta",
        "vt_dagster/kind": type(node).__name__,
        "vt_dagster/ops": " -> ".join(steps_of(node)),
    }
    metadata |= {f"vt_dagster/{name}": text for name, text in shown_options(node).items()}
    if node.operator is not None:
        metadata["vt_dagster/operator"] = type(node.operator).__name__
        metadata |= {f"vt_dagster/{name}": text for name, text in node.operator.settings.items()}
    metadata |= _column_lineage(node)
    unit = getattr(node.source, "timestamps", None)
    if unit is not None:
        text = unit if isinstance(unit, str) else ", ".join(f"{c}: {u}" for c, u in unit.items())
        metadata["vt_dagster/timestamps"] = text
    metadata["vt_dagster/numbers"] = dg.MetadataValue.md(_numbers(node))
    promises = "\n".join(f"- `{check.name}`: {check.promise}" for check in checks_of(node))
    metadata["vt_dagster/checks"] = dg.MetadataValue.md(promises)
    return metadata | _explore(node)


def _explore(node: Stream) -> dict[str, dg.MetadataValue[Any]]:
    """Returns the link to the node's page of ``vt-dagster explore``, if its address is set."""
    page = _page(node)
    return {} if page is None else {"vt_dagster/explore": dg.MetadataValue.url(page)}


def _page(node: Stream) -> str | None:
    address = os.environ.get(EXPLORE)
    return address and f"{address.rstrip('/')}/table/{quote('/'.join(node.path))}"


def _numbers(node: Stream) -> str:
    """Returns the rules behind the counts in a node's materializations, as a Markdown list."""
    plan = processor_of(node).plan()
    counted = {f"records_{name}" for name in plan.counts.shown}
    if plan.stream_time is not None and plan.stream_time.reports_lateness:
        closes = node.window is not None and all(up.window is None for up in node.inputs)
        counted |= {name for name in _KIP_328 if (name == _EMITTED) != closes}
    return "\n".join(
        f"- `{name}`: {rule.description}" for name, rule in METRICS.items() if name in counted
    )


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


def summary(node: Stream) -> str:
    """Returns the short description of an asset for lists such as ``dg list defs``: the declared
    ``description``, else one generated line. ``describe`` returns the long one."""
    if node.description:
        return node.description
    if node.operator is not None:
        return f"{node.operator.describe().partition(';')[0].removesuffix('.')}."
    key = ", ".join(node.key)
    if isinstance(node, VersionedTable):
        return f"Versions by {key}, kept {spoken(node.history_retention)}."
    return f"Latest rows by {key}." if isinstance(node, Table) else f"Records by {key}."


def describe(node: Stream) -> str:
    """Returns a description of a row, its key, its time and its history retention."""
    key = ", ".join(f"`{k}`" for k in node.key)
    if isinstance(node, VersionedTable):
        text = (
            f"A versioned table, one row for each version of a key ({key}), valid from `{VALID_FROM}` "
            f"to `{VALID_TO}`: it keeps the history of each key for "
            f"{spoken(node.history_retention)} of stream time."
        )
    elif isinstance(node, Table):
        text = f"A table, one row for each key ({key}): its latest record, by arrival."
    else:
        text = f"A stream, one row for each record; its key is {key}."
    if node.operator is not None:
        text = f"{node.operator.describe()} {text}"
    elif node.timestamp != TIMESTAMP:
        text = f"{text} Its time, `{TIMESTAMP}`, is `{node.timestamp}`."
    page = _page(node)
    return text if page is None else f"{text}\n\n[Explore its keys and rows]({page})"


def run_metadata(
    node: Stream,
    store: AssetStore,
    receipt: Receipt,
    seconds: float,
    shown: Mapping[str, Any],
    catalog: str | None = None,
) -> dict[str, Any]:
    """Returns the metadata of a run that committed, most important first: Dagster keeps the order.

    Args:
        shown: entries after the numbers: lag and pictures.
        catalog: the schema in which the tables are registered by name; None = they are not.
    """
    commit = receipt.commit
    assert commit is not None
    counting = processor_of(node).plan().counts
    counted = (*counting.shown, _LOST)
    counts = {n: commit.counts.get(n, 0) for n in counted if _is_shown(node, n, commit)}
    rows = store.stored_rows()
    newest = max(commit.stream_time.values()) if commit.stream_time else None
    summary = counts_text(counting.text(commit.counts), rows, newest)
    metadata: dict[str, Any] = {"at_a_glance": summary, **_explore(node)}
    metadata |= {f"records_{name}": number for name, number in counts.items()}
    for name in _KIP_328:
        if name in commit.counts and _is_shown(node, name, commit):
            metadata[name] = commit.counts.get(name, 0)
    for name, number in commit.gauges.items():
        metadata[_GAUGES.get(name, name)] = round(number, 6)
    metadata |= {"dagster/row_count": rows, "log_rows": commit.total}
    if newest is not None:
        metadata["stream_time"] = as_time(newest)
        if node.version_rules is not None:
            metadata["retention_horizon"] = as_time(node.version_rules.horizon(commit.stream_time))
    metadata |= {"seconds": round(seconds, 3), **shown}
    metadata |= _paths_and_inputs(node, store, receipt, commit)
    if catalog is not None:
        metadata["dagster/table_name"] = f"{catalog}.{next(iter(names_of(node).values()))}"
    return metadata


def _paths_and_inputs(
    node: Stream, store: AssetStore, receipt: Receipt, commit: Commit
) -> dict[str, Any]:
    """Returns the paths of a run's tables, and its inputs."""
    metadata: dict[str, Any] = {
        "dagster/uri": store.view_path if isinstance(node, Table) else store.log_path,
        "dagster/table_name": node.name,
        "dagster/column_schema": with_types(
            column_schema(node), types_of(parquet.schema(store.log_path))
        ),
        **_column_lineage(node),
        "versions": {"batch": commit.batch, "log": receipt.log_version},
    }
    if receipt.view_version is not None:
        metadata["versions"]["view"] = receipt.view_version
    base = store.snapshot().base
    if base is not None and base.checkpoint.batch != commit.batch:
        metadata["versions"]["view_of_batch"] = base.checkpoint.batch
    metadata["positions"] = positions_of(commit)
    metadata["taken"] = _ranges(commit.taken)
    metadata["read_versions"] = dict(commit.reads)
    if commit.strategy:
        metadata["join_strategy"] = commit.strategy
    if commit.gaps:
        metadata["accepted_gaps"] = _ranges(commit.gaps)
    if commit.truncation is not None:
        metadata["log_kept_since"] = as_time(commit.truncation.recorded_at)
    return metadata


def _ranges(ranges: Mapping[str, Mapping[int, tuple[int, int]]]) -> dict[str, dict[str, list[int]]]:
    return {name: {str(p): list(r) for p, r in some.items()} for name, some in ranges.items()}


def _is_shown(node: Stream, name: str, state: Commit) -> bool:
    """Whether a count is shown for each run: once it was above zero, so that its plot returns to zero;
    or if its zero is information by itself.

    An alert on ``records_quarantined`` or ``records_late`` must distinguish zero from a missing count.
    Late, refused and waiting records are shown only for nodes that can have them: for example, a plain
    table, and a stream without ``unique_by``, accept every record.
    """
    waits = bool(getattr(node.operator, "waits", False))
    if name == Outcome.LATE:
        promised = waits or isinstance(node, VersionedTable) or node.unique_by is not None
    elif name in REFUSED:
        promised = any(name in option.outcomes for option in set_options(node))
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
    lag: dict[str, Any] = {"lag_records": pinned.behind}
    oldest = pinned.source.cluster.oldest(waiting)
    if oldest is not None:  # else the broker is gone by now
        lag["lag_seconds"] = round(max(0.0, time.time() - oldest), 3)
    return lag


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
_EMITTED = "suppression_emit"
_KIP_328 = ("late_records_dropped", "expired_window_records_dropped", _EMITTED)
_GAUGES = {"lateness_avg": "record_lateness_avg_seconds", "lateness_max": "record_lateness_max_seconds"}


def as_time(micros: int) -> dg.MetadataValue[Any]:
    """Returns a time as metadata, or a text for times outside of Python's range."""
    moment, value = _time(micros), dg.MetadataValue
    return value.text(moment) if isinstance(moment, str) else value.timestamp(moment)


# Run pictures


SAMPLE = 20_000
"""The maximal number of rows of a run in a picture."""
_LOOKED_AT = 1_000_000
"""The maximal number of rows to read for the sample, in whole files."""
_LANES, _SHOWN, _MARKS, _BARS = 4, 30, 60, 80
_LARGEST_FILE = 64_000_000
_LEFT, _LANE = 110, 44
_BAND = "#7fa5f8"


def pictures(store: AssetStore, arrival: Arrival, receipt: Receipt, log: Any) -> dict[str, Any]:
    """Returns the pictures of a run as metadata, each after a text with the same content that Dagster
    shows without a click; none if the run committed nothing.

    Args:
        log: gets a warning if drawing fails; a picture never fails a run.
    """
    if receipt.commit is None:
        return {}
    try:
        return _draw(store, arrival, receipt.commit)
    except Exception as error:
        log.warning(f"{store.node.name}: no pictures of this run: {type(error).__name__}: {error}")
        return {}


def _draw(store: AssetStore, arrival: Arrival, commit: Commit) -> dict[str, Any]:
    node = store.node
    looked_up = processor_of(node).plan().looked_up
    versions = looked_up or node
    if node.operator is not None and looked_up is None and not isinstance(node, VersionedTable):
        return {}
    sample = _sample(store.log_path, commit.batch)
    if sample is None:
        return {}
    if partial_columns(node):
        records = sample.rows.filter(pc.field(PROPAGATED_FROM) == 0)
        sample = Sample(records, sample.of - commit.counts.get(rules.CARRIED.name, 0))
    rows = sample.rows
    found: dict[str, Any] = {}
    joined = looked_up is not None
    odd = "late" if joined else "out of order"
    if joined or isinstance(node, VersionedTable):
        own = node.key if node.operator is None else node.operator.key_of_lookup(node.key)
        key = node.key if own is None else own
        lanes = _lanes(key, rows, joined)
        if isinstance(versions, VersionedTable) and own is not None:
            add = _add_bars if versions.new_version_on is None else _add_versions
            add(lanes, AssetStore(store.warehouse, versions), versions)
        drawn = [lane for lane in lanes.values() if lane.marks]
        if drawn:
            found["at_a_glance_timeline"] = dg.MetadataValue.md(sketch(drawn, odd, sample.of))
            found["timeline"] = _as_image("timeline", timeline(drawn, odd, sample.of))
    if node.operator is None:
        retention = getattr(node, "history_retention", None)
        limits = {"history retention": retention} if isinstance(retention, timedelta) else {}
        lateness = _lateness(rows, arrival.before.stream_time)
        found |= _drawn_lateness(lateness, limits, sample.of)
    elif IS_LATE in rows.column_names:
        found |= _lateness_of_input(store, arrival)
    return found


def _drawn_lateness(lateness: Sequence[float], limits: dict[str, timedelta], of: int) -> dict[str, Any]:
    return {
        "at_a_glance_lateness": lateness_text(lateness, limits, of),
        "lateness": _as_image("lateness", histogram(lateness, limits, of)),
    }


def _as_image(name: str, drawn: str) -> dg.MarkdownMetadataValue:
    return dg.MetadataValue.md(image(name, drawn))


def _lateness_of_input(store: AssetStore, arrival: Arrival) -> dict[str, Any]:
    """Returns the lateness of a source's records that a join with a grace period took."""
    (stream,) = processor_of(store.node).plan().consumed
    grace = getattr(store.node.operator, "grace_period", None)
    if not isinstance(grace, timedelta) or stream.operator is not None:
        return {}
    log = AssetStore(store.warehouse, stream).log_path
    arrived = _sample(log, arrival.inputs[stream.name].commit.batch)
    if arrived is None:
        return {}
    late = _lateness(arrived.rows, arrival.before.stream_time)
    return _drawn_lateness(late, {"grace period": grace}, arrived.of)


# --------------------------------------------------------------------------------- what was written


def _files(path: str, batch: int) -> list[tuple[str, int]]:
    """Returns the data files that a batch added, with their sizes."""
    _, root = delta.filesystem(path)
    return [(posixpath.join(root, f.place), f.size) for f in delta.written_by(path, batch)]


@dataclass(frozen=True)
class Sample:
    """Rows of a commit, in the order written.

    Args:
        of: the number of rows written; if larger than ``rows``, these are an even sample.
    """

    rows: pa.Table
    of: int


def _sample(path: str, batch: int) -> Sample | None:
    """Returns a sample of the rows that a batch wrote; None if it wrote none."""
    fs, _ = delta.filesystem(path)
    found: list[pa.Table] = []
    seen = 0
    for name, _ in _files(path, batch):
        with fs.open(name, "rb") as opened:
            file = pq.ParquetFile(opened)
            flat = [f.name for f in file.schema_arrow if not pa.types.is_nested(f.type)]
            whole = file.metadata.num_rows
            seen += whole
            if seen <= _LOOKED_AT:
                found.append(file.read(columns=flat))
    rows = pa.concat_tables(found) if found else None
    if rows is None or rows.num_rows == 0:
        return None
    step = -(-rows.num_rows // SAMPLE)
    return Sample(rows.take(list(range(0, rows.num_rows, step))), seen)


def _micros(values: pa.ChunkedArray) -> list[Any]:
    return values.cast(pa.timestamp("us", values.type.tz)).cast(pa.int64()).to_pylist()


def _lanes(key: Sequence[str], rows: pa.Table, join: bool) -> dict[tuple[Any, ...], Lane]:
    """Returns the keys with the most late records, then those with the most records."""
    keys = list(zip(*(rows.column(k).to_pylist() for k in key), strict=True))
    times = _micros(rows.column(TIMESTAMP))
    flag = IS_LATE if join else IS_LATEST
    flags = rows.column(flag).to_pylist() if flag in rows.column_names else [not join] * len(keys)
    odd = [value is join for value in flags]
    late = Counter(key for key, is_odd in zip(keys, odd, strict=True) if is_odd)
    every = Counter(key for key in keys if None not in key)
    chosen = sorted(every, key=lambda key: (-late[key], -every[key], str(key)))[:_LANES]
    lanes = {key: Lane("/".join(str(k) for k in key)) for key in chosen}
    for key, moment, is_odd in zip(keys, times, odd, strict=True):
        if key in lanes and moment is not None:
            lanes[key].marks.append((moment, is_odd))
    window = _window([sorted(lane.marks) for lane in lanes.values()])
    for lane in lanes.values():
        every_one = [m for m in lane.marks if window[0] <= m[0] <= window[1]]
        lane.marks = _spread(sorted(set(every_one)))
        lane.of = len(every_one)
    return lanes


def _spread(marks: list[tuple[int, bool]]) -> list[tuple[int, bool]]:
    """Returns as many marks as are distinguishable: odd ones, then an even sample of the others."""
    if len(marks) <= _MARKS:
        return marks
    odd = [m for m in marks if m[1]][:_MARKS]
    rest, room = [m for m in marks if not m[1]], _MARKS - len(odd)
    step = len(rest) / room if room else 0
    return sorted(odd + [rest[int(n * step)] for n in range(min(room, len(rest)))])


def _window(lanes: list[list[tuple[int, bool]]]) -> tuple[int, int]:
    """Returns the time range to draw: of several ranges of the first key's records, the one with the
    most late records, and of equal ones the latest.

    If that key has few records, the range covers the records of all keys.
    """
    marks = lanes[0] if lanes and len(lanes[0]) >= _SHOWN else sorted(m for lane in lanes for m in lane)
    if not marks or len(marks) < _SHOWN:
        return (marks[0][0], marks[-1][0]) if marks else (0, 0)
    starts = range(len(marks) - _SHOWN + 1)
    best = max(starts, key=lambda start: (sum(odd for _, odd in marks[start : start + _SHOWN]), start))
    return marks[best][0], marks[best + _SHOWN - 1][0]


def _add_versions(lanes: dict[tuple[Any, ...], Lane], view: AssetStore, node: VersionedTable) -> None:
    """Adds the versions of a table whose view also has rows that make no version (new_version_on)."""
    if sum(file.size for file in delta.files(view.view_path)) > 2 * _LARGEST_FILE:
        return
    for key, lane in lanes.items():
        rows = look_up(view.warehouse, "/".join(node.path), "versions", key)
        lane.bars += _bars(rows)


def _bars(versions: pa.Table) -> list[tuple[Any, Any, bool]]:
    begins, ends = (_micros(versions.column(c)) for c in (VALID_FROM, VALID_TO))
    return list(zip(begins, ends, versions.column(IS_TOMBSTONE).to_pylist(), strict=True))


def _add_bars(lanes: dict[tuple[Any, ...], Lane], view: AssetStore, node: VersionedTable) -> None:
    found = delta.last_commit(view.view_path)
    fs, _ = delta.filesystem(view.view_path)
    files = [] if found is None else _files(view.view_path, found.document["batch"])
    first = {key[0] for key in lanes}
    for name, size in files:
        if size > _LARGEST_FILE or sum(size for _, size in files) > 2 * _LARGEST_FILE:
            continue
        with fs.open(name, "rb") as opened:
            there = set(pq.read_schema(opened).names)
            # A key may have been renamed since the view was written.
            known = [(k, *node.earlier.get(k, ())) for k in node.key]
            names = [next(n for n in some if n in there) for some in known]
            wanted = [*names, VALID_FROM, VALID_TO, IS_TOMBSTONE]
            rows = pq.read_table(opened, columns=wanted, filters=[(names[0], "in", first)])
        keys = zip(*(rows.column(k).to_pylist() for k in names), strict=True)
        for key, bar in zip(keys, _bars(rows), strict=True):
            if key in lanes and bar[0] is not None:
                lanes[key].bars.append(bar)


def _lateness(rows: pa.Table, before: dict[int, int]) -> list[float]:
    """Returns how far each record of a sample was behind stream time on arrival, in seconds."""
    places = (rows.column(c).to_pylist() for c in (PARTITION, OFFSET))
    spots = zip(*places, _micros(rows.column(TIMESTAMP)), strict=True)
    newest = dict(before)
    found: list[float] = []
    for partition, _, moment in sorted(s for s in spots if s[2] is not None):
        newest[partition] = max(newest.get(partition, moment), moment)
        found.append((newest[partition] - moment) / 1e6)
    return found


# -------------------------------------------------------------------------------------- the drawing


def timeline(lanes: Sequence[Lane], odd: str, of: int) -> str:
    """Returns a picture with a lane for each key: versions as bars, the run's records as dots.

    Args:
        odd: the meaning of a red dot, for the legend.
        of: how many records the run has; the legend shows how many are drawn.
    """
    times = [moment for lane in lanes for moment, _ in lane.marks]
    margin = (max(times) - min(times)) // 20 + 1
    low, high = min(times) - margin, max(times) + margin
    scale = (WIDTH - _LEFT - 20) / (high - low)

    def x(moment: int) -> float:
        return round(_LEFT + (min(max(moment, low), high) - low) * scale, 1)

    drawn: list[str] = []
    for number, lane in enumerate(lanes):
        y = 24 + number * _LANE
        drawn.append(text(4, y + 26, lane.key[:16]))
        if lane.of > len(lane.marks):
            drawn.append(text(4, y + 38, f"{len(lane.marks)} of {lane.of:,}"))
        seen = [b for b in sorted(lane.bars) if b[0] <= high and (b[1] is None or b[1] >= low)]
        for turn, (start, end, deleted) in enumerate(seen[-_BARS:]):
            width = max(1.0, round(x(high if end is None else end) - x(start) - 1, 1))
            band = f'fill="{_BAND}" fill-opacity="{0.6 if turn % 2 else 0.35}"'
            style = f'fill="none" stroke="{GREY}"' if deleted else band
            drawn.append(f'<rect x="{x(start)}" y="{y + 16}" width="{width}" height="12" {style}/>')
        for moment, is_odd in lane.marks:
            colour = RED if is_odd else BLUE
            drawn.append(
                f'<path d="M{x(moment)} {y + 8}V{y + 28}" stroke="{colour}"/>'
                f'<circle cx="{x(moment)}" cy="{y + 6}" r="3" fill="{colour}"/>'
            )
    bottom = 24 + len(lanes) * _LANE + 12
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        moment = int(low + (high - low) * share)
        drawn.append(text(x(moment), bottom, moment_of(moment), anchor))
    drawn.append(text(4, bottom, "timestamp, UTC"))
    bars = "bars: versions, light and dark in turn, empty: deleted"
    legend = text(4, 12, f"{bars}; dots: {drawn_of(lanes, of)}")
    legend += text(WIDTH - 20, 12, f"red: {odd}", "end", RED)
    return svg(bottom + 10, [legend, *drawn])


def histogram(lateness: Sequence[float], limits: dict[str, timedelta], of: int = 0) -> str:
    """Returns a histogram of how far behind stream time records arrived, with the accepted limits.

    Args:
        lateness: of a sample, in seconds.
        limits: durations by name, drawn as lines.
        of: how many records the sample was drawn from.
    """
    counts = in_buckets(lateness)
    step = (WIDTH - 40) / len(LABELS)
    top, height = 52, 90
    records = counted(max(of, len(lateness)), "record")
    many = f"{len(lateness):,} of {records}" if of > len(lateness) else records
    drawn = [text(20, 12, f"lateness of {many}: how far behind stream time they arrived")]
    axis = "behind stream time (m: minutes, h: hours, d: days); above each bar: records"
    drawn.append(text(WIDTH / 2, top + height + 32, axis, "middle"))
    for number, count in enumerate(counts):
        size = 0 if not count else max(2.0, round(height * count / max(counts), 1))
        left = round(20 + number * step, 1)
        drawn.append(
            f'<rect x="{left}" y="{top + height - size}" width="{round(step - 6, 1)}" height="{size}" '
            f'fill="{BLUE}" fill-opacity="0.7"/>'
        )
        middle = left + (step - 6) / 2
        if count:
            drawn.append(text(middle, top + height - size - 3, f"{count:,}", "middle"))
        drawn.append(text(middle, top + height + 14, LABELS[number], "middle"))
    for name, limit in limits.items():
        left = round(20 + _position(limit.total_seconds()) * step, 1)
        drawn.append(
            f'<path d="M{left} {top - 28}V{top + height}" stroke="{RED}" stroke-dasharray="4 3"/>'
            + text(left - 4, top - 20, f"{name} {limit}", "end", RED)
        )
    return svg(top + height + 42, drawn)


def _position(seconds: float) -> float:
    """Returns the position of a duration on the axis of buckets."""
    bucket = bucket_of(seconds)
    if bucket == 0 or bucket >= len(EDGES):
        return float(bucket)
    low, high = EDGES[bucket - 1], EDGES[bucket]
    return bucket + (seconds - low) / (high - low)
