"""The history of a key: its records, their versions, and the joins that looked it up."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from vt_dagster.columns import (
    IS_TOMBSTONE,
    OFFSET,
    PARTITION,
    RECORDED_AT,
    REVISION,
    TIMESTAMP,
    VALID_TO,
)
from vt_dagster.explore.record_search import RecordSearch, newest
from vt_dagster.explore.warehouse_overview import Files
from vt_dagster.provenance.explain_request import (
    Condition,
    Log,
    Record,
    Rejected,
    as_micros,
    between,
    both,
)
from vt_dagster.provenance.explain_sources import horizons_of, rejected
from vt_dagster.storage.arrow_reader import asset_names, fold, head_of, micros, of_key
from vt_dagster.storage.commit_log import Commit

LOOKUPS = 60
"""Maximum number of lookups drawn for each join."""
CORRECTED = "CorrectedJoin"
QUARANTINE = 1_000_000
"""A quarantine with more rows is not searched."""


@dataclass(frozen=True)
class Span:
    """A version, or the row of a plain table: from ``begin`` (inclusive) to ``end`` (exclusive; None =
    current), epoch microseconds."""

    record: Record
    begin: int
    end: int | None


@dataclass(frozen=True)
class Lookups:
    """Results of a join that looked up this key.

    Args:
        join: the asset's name.
        records: the newest results in the time that is shown.
        count: the number of all results in that time.
        revisions: how often each result was corrected; None = not a corrected join.
        note: the reason why there are no results; empty if there is none.
    """

    join: str
    records: Sequence[Record] = ()
    count: int = 0
    revisions: Sequence[int] | None = None
    note: str = ""


@dataclass(frozen=True)
class KeyHistory:
    """A key of an asset, by current knowledge and as known at a system time.

    Args:
        log: the asset's log.
        found: the key's records by current knowledge.
        around: the time around which ``found`` was selected; None = the newest records.
        revisions: corrected joins only: how often the row was corrected as of each record.
        known: the system time (inclusive), epoch microseconds; None = now.
        then: the table's commit as of ``known``.
        spans: the versions as known then.
        answer: the row that is valid at the requested time, as known then; None = none.
        horizon: versions that ended before it have expired, epoch microseconds; None = no expiry.
        lookups: the joins that looked up the key.
        rejected: rows in quarantine that mention the key.
        rejected_in_all: the number of all such rows.
    """

    log: Log
    found: RecordSearch
    around: int | None
    revisions: Sequence[int] | None
    known: int | None
    then: Commit
    spans: Sequence[Span]
    answer: Span | None
    horizon: int | None
    lookups: Sequence[Lookups]
    rejected: Sequence[Rejected]
    rejected_in_all: int

    def was_known(self, record: Record) -> bool:
        """Returns whether a record, or a result of a join, was in its log as of ``known``."""
        if record.asset == self.log.name:
            return record.offset < self.then.next_offset.get(record.partition, 0)
        recorded = record.recorded_at
        return self.known is None or recorded is None or as_micros(recorded) <= self.known


def key_history(
    warehouse: str,
    name: str,
    key: Sequence[str],
    as_of: int | None,
    known: int | None,
    around: int | None,
) -> KeyHistory:
    """Returns the history of a key.

    Args:
        as_of: event time, epoch microseconds, inclusive; None = the latest.
        known: system time, epoch microseconds, inclusive; None = now.
        around: selects the records around this time; None = the newest, or the records around ``as_of``
            if the newest do not reach it.
    """
    log = Log.open(warehouse, name)
    then = log if known is None else Log.open(warehouse, name, known)
    plain, condition = log.head.shape.kind == "table", log.of_key(key)
    as_of, around = (as_of, None if plain else around) if log.versioned else (None, around)
    found = newest(log, condition, around=around, by_arrival=plain)
    if as_of is not None and _outside(found, as_of):
        around, found = as_of, newest(log, condition, around=as_of)
    # Versions are made of the records known then. These are fewer, so the search reaches as far or
    # further back.
    mine = found if then is log else newest(then, condition, around=around, by_arrival=plain)
    spans = answering = _spans(then, mine, condition)
    if as_of is None and mine.later:  # the current version is not among the shown ones
        answering = _spans(then, newest(then, condition, most=1), condition)
    horizons = horizons_of(log, then.commit) if log.versioned else {}
    refused, count = list[Rejected](), 0
    if not log.meaning and Files.of(posixpath.join(log.root, "quarantine")).rows <= QUARANTINE:
        refused, count = rejected(log, key)
    corrects = log.meaning.get("operator") == CORRECTED
    return KeyHistory(
        log,
        found,
        around,
        _revisions(log, found.records) if corrects else None,
        known,
        then.commit,
        spans,
        _answer(answering, as_of, horizons),
        max(horizons.values(), default=None),
        _all_lookups(log, key, found, as_of),
        refused,
        count,
    )


def _outside(found: RecordSearch, moment: int) -> bool:
    """Returns whether a time is outside the shown records, where records were left out."""
    if not found.records:
        return False
    first, last = (as_micros(found.records[place].timestamp) for place in (0, -1))
    return (moment < first and found.earlier > 0) or (moment >= last and found.later > 0)


def _spans(log: Log, found: RecordSearch, condition: Condition) -> list[Span]:
    """Returns the versions that records of a key make, by the rules of the versioned table.

    Args:
        condition: the condition that a record has the key.
    """
    rows = found.rows
    if log.head.shape.kind == "stream" or not rows.num_rows:
        return []
    limits = horizons_of(log, log.commit) if log.versioned else None
    on = log.head.shape.new_version_on
    if on is not None:
        # A version may have begun before the records that are shown.
        only = dict.fromkeys([*log.key, TIMESTAMP, RECORDED_AT, IS_TOMBSTONE, *on])
        rows = log.rows(condition, only=list(only))
    folded = fold(None, rows, log.key, limits, on)
    begins = micros(folded, TIMESTAMP).tolist()
    ends: list[int | None] = [None] * folded.num_rows
    if log.versioned:
        open_ = folded.column(VALID_TO).is_null().to_pylist()
        ends = [None if n else int(m) for n, m in zip(open_, micros(folded, VALID_TO), strict=True)]
    by_place = {one.place: one for one in found.records}
    places = list(zip(*(folded.column(c).to_pylist() for c in (PARTITION, OFFSET)), strict=True))
    told = list(zip(places, begins, ends, strict=True))
    if on is not None:
        since = min(as_micros(one.timestamp) for one in found.records)
        asked = {p for p, _, end in told if end is None or end > since} - by_place.keys()
        by_place |= {one.place: one for one in log.at(asked)}
    spans = [Span(by_place[p], begin, end) for p, begin, end in told if p in by_place]
    if found.later and on is None:  # the record that ends the last version was left out
        spans = [one for one in spans if one.end is not None]
    return sorted(spans, key=lambda one: one.begin)


def _answer(spans: Sequence[Span], as_of: int | None, horizons: Mapping[int, int]) -> Span | None:
    """Returns the row as of a time; may be a tombstone. Before the horizon of its partition only a
    current version is returned."""
    for one in reversed(spans):
        if as_of is None:
            return one if one.end is None else None
        if one.begin <= as_of and (one.end is None or as_of < one.end):
            horizon = horizons.get(one.record.partition, as_of)
            return one if one.end is None or as_of >= horizon else None
    return None


# ------------------------------------------------------------------------------- lookups of the key


def _all_lookups(
    log: Log, key: Sequence[str], found: RecordSearch, around: int | None
) -> list[Lookups]:
    """Returns the lookups of a key by joins, in the time range of the shown records."""
    if log.head.shape.kind == "stream" or not found.records:
        return []
    base, told = posixpath.basename(log.name), list[Lookups]()
    low = as_micros(min(one.timestamp for one in found.records))
    newest_time = max(log.commit.stream_time.values(), default=low)
    last = as_micros(max(one.timestamp for one in found.records))
    high = last if found.later else max(newest_time, last)
    for name in asset_names(log.warehouse):
        _, head = head_of(log.warehouse, name)
        meaning = head.shape.meaning
        if meaning.get("right") != base or head.logs.get(base, log.head.log) != log.head.log:
            continue
        if meaning.get("operator") in ("StreamTableJoin", CORRECTED):
            shown = between(low, high)
            told.append(_lookups(Log.open(log.warehouse, name), key, meaning, shown, around))
    return told


def _lookups(
    join: Log,
    key: Sequence[str],
    meaning: Mapping[str, str],
    shown: Condition,
    around: int | None,
) -> Lookups:
    names: Sequence[str] = join.key
    corrects = meaning["operator"] == CORRECTED
    if corrects:
        stream = join.input(meaning["left"])
        names = () if stream is None else stream.key
    if len(names) != len(key) or not {*names} <= {*join.columns.names}:
        return Lookups(join.name, note="its rows do not have the key of its stream")
    same: Condition = lambda columns: of_key(join.path, columns, names, key)  # noqa: E731
    some = newest(join, both(same, shown), around=around, most=LOOKUPS)
    revisions = _revisions(join, some.records) if corrects else None
    return Lookups(join.name, some.records, some.count, revisions)


def _revisions(join: Log, records: Sequence[Record]) -> list[int]:
    """Returns how often each row was corrected as of its record."""
    places = {one.place for one in records}
    if not places:
        return []
    start, end = dict[int, int](), dict[int, int]()
    for partition, offset in places:
        start[partition] = min(offset, start.get(partition, offset))
        end[partition] = max(offset + 1, end.get(partition, 0))
    wanted = pa.array(sorted({offset for _, offset in places}), pa.int64())
    rows = join.rows(lambda _: pc.field(OFFSET).isin(wanted), start, end, [REVISION])
    found = dict(
        zip(
            zip(*(rows.column(c).to_pylist() for c in (PARTITION, OFFSET)), strict=True),
            rows.column(REVISION).to_pylist(),
            strict=True,
        )
    )
    return [found.get(one.place) or 0 for one in records]
