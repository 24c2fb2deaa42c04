"""Finds the origin of a source's record, and rejected rows in its quarantine."""

from __future__ import annotations

import gzip
import json
import posixpath
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from vt_dagster import rules
from vt_dagster.columns import PARTITION
from vt_dagster.provenance.explanation import Origin, Record, Rejected
from vt_dagster.provenance.log_reader import Log
from vt_dagster.rules import NOTHING_NEW
from vt_dagster.storage import delta
from vt_dagster.storage.arrow_reader import rows_of
from vt_dagster.storage.commit_log import Commit

NAMED = 20
"""Maximum number of named files, or rejected rows."""
_RAW = 500
_FILES, _DELIVERIES = "files", "deliveries"


def origin(log: Log, record: Record, commit: Commit) -> Origin | None:
    """Returns the origin of a source's record; None = not recorded.

    Args:
        commit: the commit that wrote the record.
    """
    taken = commit.taken
    if _of_start(commit, record):
        assert commit.start is not None
        return Origin("snapshot", (commit.start.what,), 1)
    if commit.topics and len(taken) == 1:
        return _of_topic(log, record, commit)
    start, end = None, None
    if len(taken) == 1:
        ((start, end),) = next(iter(taken.values())).values() if _one(taken) else [(None, None)]
    if commit.deliveries:
        names = sorted(commit.deliveries)
        return Origin(_DELIVERIES, tuple(names[:NAMED]), len(names), start, end)
    if _FILES in taken:
        names = _files(log, commit.batch)
        return Origin(_FILES, tuple(names[:NAMED]), len(names), start, end)
    if not taken:
        return None
    return Origin("versions", tuple(sorted(taken))[:NAMED], len(taken), start, end)


def _of_start(commit: Commit, record: Record) -> bool:
    """Returns whether a record is from the table's initial snapshot, consumed by this commit's run."""
    start = commit.start
    if start is None or start.batch != commit.batch:
        return False
    first, end = start.offsets.get(record.partition, (0, 0))
    return first <= record.offset < end


def _one(taken: Any) -> bool:
    return len(next(iter(taken.values()))) == 1


def _files(log: Log, batch: int) -> list[str]:
    """Returns the files that a run consumed; empty = not recorded any more."""
    path = posixpath.join(log.root, "attempts", log.head.attempt, "files.json.gz")
    fs, local = delta.filesystem(path)
    try:
        known = json.loads(gzip.decompress(fs.cat_file(local)))
    except OSError:
        return []
    return sorted(n for n, one in known.items() if isinstance(one, list) and one[-1] == batch)


def _of_topic(log: Log, record: Record, commit: Commit) -> Origin:
    """Returns the topic of a record, with its partition's range of offsets. The record's own offset is
    known only if all missing offsets of the run are in quarantine."""
    ((topic, ranges),) = commit.taken.items()
    if record.partition not in ranges:
        return Origin("topic", (topic,), 1)
    start, end = ranges[record.partition]
    before = log.before(commit)
    first = 0 if before is None else before.next_offset.get(record.partition, 0)
    applied = commit.next_offset.get(record.partition, 0) - first
    if commit.start is not None and commit.start.batch == commit.batch:
        begin, end_ = commit.start.offsets.get(record.partition, (0, 0))
        applied -= end_ - begin
    if commit.counts.get(rules.CARRIED.name) or commit.counts.get(NOTHING_NEW.name):
        return Origin("topic", (topic,), 1, start, end)
    gone = set(_rejected_offsets(log, commit.batch, record.partition))
    there = [offset for offset in range(start, end) if offset not in gone]
    place = there[record.offset - first] if len(there) == applied else None
    return Origin("topic", (topic,), 1, start, end, place)


def _rejected_offsets(log: Log, batch: int, partition: int) -> list[int]:
    same = (pc.field("batch") == batch) & (pc.field(PARTITION) == partition)
    rows = quarantine(log, same)
    return [] if rows is None else [p for p in rows.column("position").to_pylist() if p is not None]


def quarantine(log: Log, condition: Any) -> pa.Table | None:
    """Returns the rows of an asset's quarantine that meet a condition; None = it has no quarantine."""
    path = posixpath.join(log.root, "quarantine")
    found = delta.last_commit(path)
    return None if found is None else rows_of(path, found.version, lambda _: condition)


def rejected(log: Log, key: Sequence[Any]) -> tuple[list[Rejected], int]:
    """Returns rows of an asset's quarantine that mention a key, newest first, and the number of all.

    Args:
        key: the key's values; a row mentions the key if its raw text contains all of them.
    """
    rows = quarantine(log, None)
    if rows is None:
        return [], 0
    for value in key:
        text = value if isinstance(value, bytes) else str(value)
        raw = rows.column("raw")
        if pa.types.is_binary(raw.type) or pa.types.is_large_binary(raw.type):
            text = text.encode() if isinstance(text, str) else text
        options = pc.MatchSubstringOptions(text)
        mentions = pc.call_function("match_substring", [raw], options)
        rows = rows.filter(mentions)  # a null raw text does not match
    rows = rows.sort_by([("batch", "descending")])
    names = ["reason", "source", "position", "raw", "batch"]
    told = rows.slice(0, NAMED).select(names).to_pylist()
    return [_as_rejected(one) for one in told], rows.num_rows


def _as_rejected(row: dict[str, Any]) -> Rejected:
    raw = row["raw"]
    text = raw.decode("utf-8", "backslashreplace") if isinstance(raw, bytes) else str(raw)
    return Rejected(row["reason"], row["source"], row["position"], text[:_RAW], row["batch"])
