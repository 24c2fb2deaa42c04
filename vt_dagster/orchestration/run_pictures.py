"""Pictures in a materialization: what a run brought, for a few keys, and how late its records were.

They are drawn from a bounded sample of the files that the run wrote, read without Spark: a run is
neither slowed (some 50 ms) nor failed by them.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vt_dagster import rules
from vt_dagster.columns import (
    IS_LATE,
    IS_LATEST,
    IS_TOMBSTONE,
    OFFSET,
    PARTITION,
    PROPAGATED_FROM,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core.log_columns import partial_columns
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.drawing import BLUE, GREY, RED, WIDTH, image, svg, text
from vt_dagster.orchestration.text_timeline import (
    EDGES,
    LABELS,
    Lane,
    bucket_of,
    drawn_of,
    in_buckets,
    lateness_text,
    moment_of,
    sketch,
)
from vt_dagster.runs.pin import Arrival
from vt_dagster.runs.run import Receipt
from vt_dagster.storage import delta
from vt_dagster.storage.arrow_reader import look_up
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Commit
from vt_dagster.topology.model import Stream, VersionedTable

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
    looked_up = processor_of(node).looked_up
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
    if joined or isinstance(node, VersionedTable):
        lanes = _lanes(node, rows, joined)
        if isinstance(versions, VersionedTable):
            add = _add_bars if versions.new_version_on is None else _add_versions
            add(lanes, AssetStore(store.warehouse, versions), versions)
        lanes = {key: lane for key, lane in lanes.items() if lane.marks}
        if lanes:
            found |= _drawn_timeline(list(lanes.values()), joined, sample)
    if node.operator is None:
        retention = getattr(node, "history_retention", None)
        limits = {"history retention": retention} if isinstance(retention, timedelta) else {}
        lateness = _lateness(rows, arrival.before.stream_time)
        found |= _drawn_lateness(lateness, limits, sample.of)
    elif IS_LATE in rows.column_names:
        found |= _lateness_of_input(store, arrival)
    return found


def _drawn_timeline(lanes: list[Lane], joined: bool, sample: Sample) -> dict[str, Any]:
    odd = "late" if joined else "out of order"
    return {
        "at_a_glance_timeline": dg.MetadataValue.md(sketch(lanes, odd, sample.of)),
        "timeline": _as_image("timeline", timeline(lanes, odd, sample.of)),
    }


def _drawn_lateness(lateness: Sequence[float], limits: dict[str, timedelta], of: int) -> dict[str, Any]:
    return {
        "at_a_glance_lateness": lateness_text(lateness, limits, of),
        "lateness": _as_image("lateness", histogram(lateness, limits, of)),
    }


def _as_image(name: str, drawn: str) -> dg.MarkdownMetadataValue:
    return dg.MetadataValue.md(image(name, drawn))


def _lateness_of_input(store: AssetStore, arrival: Arrival) -> dict[str, Any]:
    """Returns the lateness of a source's records that a join with a grace period took."""
    (stream,) = processor_of(store.node).consumed
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
    for name, _size in _files(path, batch):
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


def _lanes(node: Stream, rows: pa.Table, join: bool) -> dict[tuple[Any, ...], Lane]:
    """Returns the keys with the most late records, then those with the most records."""
    keys = list(zip(*(rows.column(k).to_pylist() for k in node.key), strict=True))
    times = _micros(rows.column(TIMESTAMP))
    flag = IS_LATE if join else IS_LATEST
    told = rows.column(flag).to_pylist() if flag in rows.column_names else [not join] * len(keys)
    odd = [value is join for value in told]
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
    """Returns the time range of some records of the first key: the latest with the most late records.

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
        begins, ends = _micros(rows.column(VALID_FROM)), _micros(rows.column(VALID_TO))
        deleted = rows.column(IS_TOMBSTONE).to_pylist()
        lane.bars += zip(begins, ends, deleted, strict=True)


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
        ends = zip(
            _micros(rows.column(VALID_FROM)),
            _micros(rows.column(VALID_TO)),
            rows.column(IS_TOMBSTONE).to_pylist(),
            strict=True,
        )
        for key, (start, end, deleted) in zip(keys, ends, strict=True):
            if key in lanes and start is not None:
                lanes[key].bars.append((start, end, deleted))


def _lateness(rows: pa.Table, before: dict[int, int]) -> list[float]:
    """Returns how far each record of a sample was behind stream time on arrival, in seconds."""
    spots = zip(
        rows.column(PARTITION).to_pylist(),
        rows.column(OFFSET).to_pylist(),
        _micros(rows.column(TIMESTAMP)),
        strict=True,
    )
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
        odd: what a red dot stands for.
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
    for share in (0.0, 0.5, 1.0):
        moment = int(low + (high - low) * share)
        anchor = {0.0: "start", 0.5: "middle", 1.0: "end"}[share]
        drawn.append(text(x(moment), bottom, moment_of(moment), anchor))
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
    many = f"{len(lateness):,}" + (f" of {of:,}" if of > len(lateness) else "")
    drawn = [text(20, 12, f"lateness of {many} records: how far behind stream time they arrived")]
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
    return svg(top + height + 24, drawn)


def _position(seconds: float) -> float:
    """Returns the position of a duration on the axis of buckets."""
    bucket = bucket_of(seconds)
    if bucket == 0 or bucket >= len(EDGES):
        return float(bucket)
    low, high = EDGES[bucket - 1], EDGES[bucket]
    return bucket + (seconds - low) / (high - low)
