"""Commits of a log: their documents, offsets and system times. No Spark.

The document of a commit has its batch, input offsets, stream time and the tables read.

**System time.** A log is append-only, so its state at a system time is the rows before the offsets of
the last commit until then, with the stream time of that commit. A binary search in Delta's log finds
the commit. Before maintenance removes commits, it copies their documents to ``commits/`` beside the
log.

**Truncation.** The commits record it (``Truncation``). For a table, its rows as of the truncation are
stored as a base, and readers fold the rest of the log into that base.
"""

from __future__ import annotations

import gzip
import json
import posixpath
import re
import time
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, Field

from vt_dagster.columns import (
    IS_LATE,
    IS_LATEST,
    IS_TOMBSTONE,
    OFFSET,
    OLD,
    PARTITION,
    RECORDED_AT,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.errors import ClockWarning, NeedsReplayError, StorageError
from vt_dagster.rules import WAITING
from vt_dagster.storage import delta
from vt_dagster.storage.delta import File, Wanted
from vt_dagster.topology.durations import Duration, in_utc, length_at, spoken
from vt_dagster.topology.specification import Length, OperatorSpec, in_words
from vt_dagster.topology.version_rules import EVER, VersionRules

# Commit log


Offsets = dict[int, int]
"""Partition -> offset."""
Ranges = dict[str, dict[int, tuple[int, int]]]
"""Input -> partition -> [start, end)."""

AHEAD = 60_000_000
"""Maximum clock difference without a warning, microseconds."""
_NOTED = 64
"""Maximum entries of ``Commit.disorder``."""


class Shape(BaseModel):
    """The declared kind, key and options of an asset, so that tools read its tables without the
    definitions."""

    kind: Literal["stream", "table", "versioned"]
    key: list[str]
    history_retention: int | dict[int, int] | None = None
    """Of a versioned table, microseconds; by partition if the partitions differ."""
    columns: list[str] | None = None
    """The user's columns as declared; the log may have more, from earlier declarations. None = unknown:
    the last commit is older than this field."""
    specification: OperatorSpec | None = None
    """The specification of the operator; None for a source, or if only the tables are known."""
    valid_until: str | None = None
    """Of a versioned table: the column with the end of a version."""
    new_version_on: list[str] | None = None
    """Of a versioned table: columns whose change starts a version; None = every record starts one."""

    unique_by: list[str] | None = None
    """Of a stream: the columns that identify a record; None = no record is a duplicate."""
    within: Length | None = None
    """Of a stream with ``unique_by``: how long a value is remembered, in stream time."""

    has_partial_updates: bool = False
    """Of a versioned table: whether a record may update only some columns of its row."""

    ordered_by_source: bool = False
    """Of a versioned table: whether the source's order takes precedence over timestamps, so that no
    record is late."""

    def definition(self) -> dict[str, Any]:
        """Returns the shape as JSON values, without the options of the operator that may change between
        runs."""
        operator = self.specification
        about = self.model_dump(mode="json", exclude={"specification"})
        return {**about, "specification": None if operator is None else operator.definition()}

    def changed_settings(self, then: Shape) -> list[str]:
        """Returns the settings, without columns, that differ from an earlier shape and may change in a
        live asset."""
        found: list[str] = []
        if self.history_retention != then.history_retention:
            lengths = in_words(then.retention()), in_words(self.retention())
            found.append(f"history_retention was {lengths[0]}, is {lengths[1]}")
        for name in ("valid_until", "new_version_on", "has_partial_updates", "ordered_by_source"):
            before, now = getattr(then, name), getattr(self, name)
            if before != now:
                found.append(f"{name} was {before!r}, is {now!r}")
        if self.specification is not None and then.specification is not None:
            found += self.specification.changed_settings(then.specification)
        return found

    def retention(self) -> Duration:
        """Returns the history retention; zero if the table is not versioned."""
        retention = self.history_retention or 0
        if isinstance(retention, int):
            return timedelta(microseconds=retention)
        return {partition: timedelta(microseconds=length) for partition, length in retention.items()}

    @property
    def version_rules(self) -> VersionRules | None:
        """The rules of its versions; None if the asset is not versioned."""
        if self.kind != "versioned":
            return None
        about = {"valid_until": self.valid_until, "new_version_on": self.new_version_on}
        return VersionRules(self.key, self.retention(), **about)


class Truncation(BaseModel):
    """The truncation of a log by ``log_retention``: all batches up to ``batch`` are removed."""

    batch: int
    """The last removed batch; ``recorded_at``, ``next_offset``, ``stream_time`` are of its commit."""
    recorded_at: int
    next_offset: Offsets = Field(default_factory=dict)
    """The first kept offset by partition."""
    stream_time: dict[int, int] = Field(default_factory=dict)
    """By partition: no removed record has a later timestamp. Epoch microseconds."""
    log_retention: int = 0
    """As declared, microseconds."""
    base: str = ""
    """Of a table: the directory in ``bases/`` with its rows as of that batch; the rest of the log is
    folded into them."""

    def description(self) -> str:
        """Returns the truncation as text, for messages."""
        kept = timedelta(microseconds=self.log_retention)
        return (
            f"its log was truncated at {in_utc(self.recorded_at)}, batch {self.batch}, by its "
            f"log_retention of {spoken(kept)}"
        )


class Erasure(BaseModel):
    """Decides which earlier reads of a versioned table may have seen erased rows. Contains no key."""

    batch: int
    """The batch of the erase; of several merged erases, the last one."""
    spans: list[tuple[int, int]] = Field(default_factory=list[tuple[int, int]])
    """Valid times of the erased versions: from (inclusive), to (exclusive), epoch microseconds."""
    first: int | None = None
    """The smallest timestamp of an erased row; None = the log had none."""
    last: Offsets = Field(default_factory=dict)
    """The largest offset of an erased row by partition."""

    def touched(self, moment: int, next_offset: Offsets) -> bool:
        """Returns whether an as-of read may have seen an erased row.

        Args:
            moment: time of the read, epoch microseconds.
            next_offset: end of the log at the read, exclusive. If it is before the last erased row, the
                read may have seen versions that a later record replaced. Then the result is true for
                every time from ``first`` (inclusive) on.
        """
        if any(next_offset.get(p, 0) <= offset for p, offset in self.last.items()):
            return self.first is None or moment >= self.first
        return any(start <= moment < end for start, end in self.spans)


class Step(BaseModel):
    """The state of a log at a system time within one commit; fields as in ``Commit``."""

    recorded_at: int
    next_offset: Offsets
    stream_time: dict[int, int]


class Started(BaseModel):
    """The snapshot that a table was loaded from."""

    what: str
    """The snapshot as text: the file, or the version of a Delta table."""
    batch: int
    """The batch that loaded it."""
    offsets: dict[int, tuple[int, int]] = Field(default_factory=dict)
    """The offsets of its rows in the log, by partition: [start, end)."""


class Consumed(BaseModel):
    """The last consumed commit of a log. After a log was restored from a backup, the same offsets and
    batch numbers may mean other records; the attempt detects this."""

    batch: int
    attempt: str


class Exported(BaseModel):
    """The declaration of an export, as its commits store it."""

    what: str
    columns: list[tuple[str, str | None]]
    """Name and Spark type of each column; None = not known without Spark."""
    as_of: int | None = None
    """The clock's time as of which it has the rows (inclusive), epoch microseconds; None = it has the
    latest rows."""
    valid_until: int | None = None
    """When these rows change if no record comes (exclusive), epoch microseconds; None = never."""


ERASE = "erase:"
"""How the ``run_id`` of an erase's commit begins."""


class Commit(BaseModel):
    """The document in each commit of a log: the authoritative progress of an asset.

    Every offset is the *next* one (end, exclusive). Times are epoch microseconds.
    """

    asset: str
    batch: int
    """1 for the first committed run, then incremented by each commit."""
    attempt: str
    """Id of the run that committed this batch, and name of the directory with its staged data."""
    shape: Shape
    log: str = ""
    """The id of this log: the attempt of its first commit. A log that replaces it under the same name
    (replay and swap) has another id, and its offsets mean other records."""
    logs: dict[str, str] = Field(default_factory=dict)
    """The id (``log``) of each consumed log."""
    consumed: dict[str, Consumed] = Field(default_factory=dict[str, Consumed])
    """The last commit of each consumed log. Logs consumed before this field existed are missing."""
    previous: str = ""
    """The attempt of the previous batch. Its directory is kept: if this commit is lost, the next run
    continues from there."""
    staged: dict[str, tuple[int, int]] = Field(default_factory=dict)
    """Contents of the attempt's directory by name: number of files, and their total bytes."""
    run_id: str | None = None
    recorded_at: int = 0
    """System time of the commit: the writer's clock when it began to write rows, and always after the
    previous commit. For commits older than this field, Delta's timestamp. If the source provides
    per-row system times, the last of them."""
    ahead: list[tuple[int, int]] = Field(default_factory=list[tuple[int, int]])
    """Intervals (from, to) in which commits got a later system time, because an earlier run's clock was
    ahead."""
    steps: list[Step] = Field(default_factory=list[Step])
    """With per-row system times: the state of the log at each earlier system time of this commit."""
    stepped: bool = False
    """Whether this or an earlier commit has ``steps``."""
    taken: Ranges = Field(default_factory=dict)
    """Offsets that this run consumed: ``{input: {partition: [start, end)}}``."""
    inputs: dict[str, Offsets] = Field(default_factory=dict)
    """Consumed offsets of each input after this run."""
    next_offset: Offsets = Field(default_factory=dict)
    """The first free offset of each partition of this log."""
    stream_time: dict[int, int] = Field(default_factory=dict)
    """Largest timestamp by partition; of a join with grace, that of its buffer; of a stream with
    ``unique_by``, also of duplicates."""
    emitted_up_to: dict[int, int] = Field(default_factory=dict)
    """Of a join: the largest timestamp by partition up to which every record has been joined."""
    watermarks: dict[str, dict[int, int]] = Field(default_factory=dict)
    """Of a stream-stream join, by name and partition: the largest timestamp of each side, and the time
    up to which unmatched records have been emitted. Of a windowed aggregate: the time up to which
    windows have closed."""
    strategy: str = ""
    """Of a join with a versioned table: the look-up strategy of this run, with its reason."""
    reads: dict[str, int] = Field(default_factory=dict)
    """Delta version of every table that was read: ``{'weather/view': 7}``."""
    read_logs: dict[str, str] = Field(default_factory=dict)
    """The id (``log``) of each log that was read, or whose view was: ``reads`` are versions of its
    tables. Commits older than this field have none."""
    counts: dict[str, int] = Field(default_factory=dict)
    """Of this run, by name: records in, applied, late, quarantined, and so on."""
    gauges: dict[str, float] = Field(default_factory=dict)
    """Of this run, values that cannot be summed: lateness, sizes of buffers."""
    totals: dict[str, int] = Field(default_factory=dict)
    """``counts`` summed over all runs."""
    totals_by_partition: dict[int, dict[str, int]] = Field(default_factory=dict)
    """Outcomes of records over all runs by partition: late, dropped, quarantined, and the number that
    is buffered now. Zeros are left out."""
    topics: dict[str, str] = Field(default_factory=dict)
    """Of each topic that was consumed: its id; a recreated topic has another id. Of a Delta table: its
    id and the time of the last consumed version, ``id@microseconds``."""
    disorder: dict[int, int] | None = None
    """How far back records out of order reach: by batch, the smallest timestamp of a record that was
    not its key's latest. Batches with a later batch of a smaller timestamp are left out. None =
    unknown: the log is older than this field."""
    gaps: Ranges = Field(default_factory=dict)
    """Of this run: offsets that were deleted before they could be consumed, ``[first, next)``; of a
    recreated topic, the consumed position of the old one. Only in runs with ``accept_gap``."""
    deliveries: dict[str, str] = Field(default_factory=dict)
    """Of a source of DataFrames: the runs, partitions or materializations that this run consumed, each
    with its version; if there are many, only some."""
    initial_load: dict[str, Offsets] | str | None = None
    """Of a table with ``ready="initial_load"``, or one that starts with a snapshot: the source's end
    position that the first run has pinned. None = nothing was pinned, also for runs before ``ready``
    was declared."""
    start: Started | None = None
    """Of a table that starts with a snapshot: the snapshot; None = not loaded yet."""
    ready_at: Offsets | None = None
    """End of this log when all its inputs became ready; None = not ready, or no readiness needed."""
    not_ready: list[str] = Field(default_factory=list)
    """Of this run: tables that were joined before they were ready, because the run allows that."""
    files: bool = False
    """Whether the attempt's directory holds the list of files, or of deliveries, consumed so far."""
    rejected: bool = False
    """Whether the attempt's directory holds records for the quarantine."""
    state: bool = False
    """Whether the attempt's directory holds the state of the operator, or of a stream with
    ``unique_by``."""
    erased: Offsets = Field(default_factory=dict)
    """Number of erased rows by partition: this many offsets of the log are missing."""
    erased_before: Offsets = Field(default_factory=dict)
    """By partition: all erased rows have smaller offsets than this."""
    erasures: list[Erasure] = Field(default_factory=list[Erasure])
    """Of a versioned table: the latest erases that removed rows; older ones are merged into one."""
    truncation: Truncation | None = None
    """The truncated part of the log. Its rows are in no other count of missing rows."""
    upkeep: bool = False
    """Whether this batch only truncated the log."""
    export: Exported | None = None
    """Of an exported table."""
    training_set: dict[str, Any] | None = None
    """Of a training set: its manifest."""

    def has_read(self, name: str, log: str) -> bool:
        """Returns whether ``reads`` are versions of the tables of this log, not of one that had the
        name before a replay and swap.

        Args:
            name: an input; ``log``: the id of the log that has its name now.
        """
        return self.read_logs.get(name, log) == log

    @property
    def erases(self) -> bool:
        """Whether an erase of a key made this commit."""
        return (self.run_id or "").startswith(ERASE)

    def kept_from(self, partition: int) -> int:
        """Returns the first offset of a partition that is not truncated."""
        return 0 if self.truncation is None else self.truncation.next_offset.get(partition, 0)

    @property
    def missing(self) -> dict[str, int]:
        """Number of removed log records by reason."""
        truncated = 0 if self.truncation is None else sum(self.truncation.next_offset.values())
        removed = {"rows_erased": sum(self.erased.values()), "rows_truncated": truncated}
        return {why: count for why, count in removed.items() if count}

    @property
    def total(self) -> int:
        """Number of records that the log has had up to this commit, removed ones included."""
        return sum(self.next_offset.values())

    def successor(self, attempt: str, run_id: str, **changes: Any) -> Commit:
        """Returns the commit of a batch that takes no records, for example of an erase: this commit's
        positions and state, with nothing consumed, rejected or counted. Buffered records stay buffered.

        Args:
            changes: other fields of the new commit.
        """
        waiting = self.counts.get(WAITING.name, 0)
        counts = dict.fromkeys(self.counts, 0) | ({WAITING.name: waiting} if waiting else {})
        own: dict[str, Any] = {
            "batch": self.batch + 1,
            "attempt": attempt,
            "previous": self.attempt,
            "run_id": run_id,
            "steps": [],
            "taken": {},
            "gaps": {},
            "rejected": False,
            "upkeep": False,
            "counts": counts,
        }
        return self.model_copy(update=own | changes)

    def earliest_since(self, batch: int) -> int | None:
        """Returns the smallest timestamp of a record that was not its key's latest, in the batches
        after ``batch``; None = no such record."""
        known = {self.batch: EVER} if self.disorder is None else self.disorder
        return min((moment for later, moment in known.items() if later > batch), default=None)

    def disorder_with(self, earliest: int | None) -> dict[int, int]:
        """Returns ``disorder`` after the next batch.

        Args:
            earliest: smallest timestamp of a record out of order in that batch; None = no such record.
        """
        known = self.disorder
        if known is None:
            known = {self.batch: EVER} if self.batch else {}
        if earliest is None:
            return known
        kept = {batch: moment for batch, moment in known.items() if moment < earliest}
        kept[self.batch + 1] = earliest
        while len(kept) > _NOTED:
            # Merges the two oldest batches under the earlier time, to bound the document's size.
            first, second = sorted(kept)[:2]
            kept[second] = kept.pop(first)
        return dict(sorted(kept.items()))


class Segments(BaseModel):
    """The segments of a view by ``valid_to``. A segment holds the versions from the end of the previous
    segment (inclusive) to its own end (exclusive). The first segment has no lower bound; the last one
    is open and has no upper bound."""

    first: int = 0
    """Number of the first segment that still exists."""
    ends: list[int] = Field(default_factory=list[int])
    """Ends of all segments but the last, epoch microseconds, ascending."""
    rows: int = 0
    """Upper bound of the versions in the last segment."""

    @property
    def last(self) -> int:
        """Number of the open segment."""
        return self.first + len(self.ends)

    def number(self, moment: int) -> int:
        """Returns the segment of versions that end at ``moment``."""
        return self.first + bisect_right(self.ends, moment)

    def ending_after(self, moment: int) -> Wanted:
        """Returns a filter for the files of all versions that end after ``moment``; they may also hold
        versions that end earlier."""
        first = self.number(moment)
        return lambda file: file.segment is None or file.segment >= first

    def without_expired(self, horizon: int) -> Segments:
        """Returns the segments without those in which every version ended before the horizon."""
        gone = bisect_right(self.ends, horizon)
        return Segments(first=self.first + gone, ends=self.ends[gone:], rows=self.rows)


class Checkpoint(BaseModel):
    """The document in each commit of a view or quarantine: the log's batch that it includes."""

    asset: str
    batch: int
    attempt: str
    next_offset: Offsets = Field(default_factory=dict)
    stream_time: dict[int, int] = Field(default_factory=dict)
    segments: Segments | None = None
    """Of a versioned table's view: segments for the next run."""
    history_retention: int | dict[int, int] | None = None
    """Of a versioned table's view: the retention at the time of the commit, microseconds. Versions that
    expired under it are missing."""
    new_version_on: list[str] | None = None
    """Of a versioned table's view: the option at the time of the commit (``core.versioned_table``)."""
    log_attempt: str = ""
    """Of a view: the attempt of the log's commit that it includes. Empty in older views."""
    written: int = 0
    """Time of the commit by the writer's clock, epoch microseconds."""
    erased: dict[str, int] = Field(default_factory=dict)
    """Of a quarantine: number of erased rows by reason."""

    @property
    def total(self) -> int:
        """Records of the log that are included."""
        return sum(self.next_offset.values())

    def lengthened(self, rules: VersionRules) -> list[int]:
        """Returns by how much the history retention has grown since the commit, by partition,
        microseconds. If it has grown, the view lacks expired versions that are needed again."""
        then = self.history_retention
        if then is None:
            return []
        lengths = {p: then if isinstance(then, int) else then.get(p, 0) for p in self.stream_time}
        return [rules.retention_micros(p) - length for p, length in lengths.items()]

    def suits(self, rules: VersionRules | None) -> bool:
        """Returns whether the stored rows are enough to answer by these rules; None = a plain table."""
        if rules is None:
            return True
        same = rules.same_versions(self.new_version_on)
        return same and max(self.lengthened(rules), default=0) <= 0


def require_within_retention(
    name: str, rules: VersionRules, stream_time: Mapping[int, int], moment: int
) -> None:
    """Checks that a time is within the history retention of a table.

    Args:
        stream_time: by partition, epoch microseconds.
        moment: as-of time, epoch microseconds.

    Raises:
        StorageError: the time is before the horizon of some partition.
    """
    horizon = rules.horizon(stream_time)
    if moment < horizon:
        raise StorageError(
            f"{name}: expected a time from {in_utc(horizon)} on, where its history begins (its newest "
            f"record is of {in_utc(max(stream_time.values()))}), got {in_utc(moment)}; use a later "
            "time, set a longer history_retention (reads by name know it after the next run that "
            'commits), or accept only the current versions ("vt_dagster/partial": True, --partial)'
        )


def choose(name: str, kind: str, what: str | None, as_of: str | None) -> str:
    """Returns what to read of an asset: ``current``, ``versions`` or ``log``.

    Args:
        kind: see ``Shape``.
        what: None = current of a table, log of a stream.
        as_of: as-of time; None = none.

    Raises:
        StorageError: the asset does not have ``what``, or ``as_of`` is set for an asset that is not a
            VersionedTable, or with another ``what`` than ``current``.
    """
    choices = {"stream": ["log"], "table": ["log", "current"]}.get(kind, ["log", "current", "versions"])
    what = what or choices[-1 if kind != "versioned" else 1]
    if what not in choices or (as_of is not None and kind != "versioned"):
        requested = what if as_of is None else f"{what} as of {as_of}"
        called = {"stream": "Stream", "table": "Table"}.get(kind, "VersionedTable")
        instead = "choose one of them"
        if kind == "stream":
            instead = (
                "read the log, with all records of a key (vt-dagster get and explain show the last)"
            )
        elif kind == "table" and (as_of is not None or what == "versions"):
            instead = "declare a VersionedTable to keep versions"
        raise StorageError(
            f"{name} is a {called}: expected one of {choices} to read"
            f"{' (as_of needs a VersionedTable)' if as_of else ''}, got {requested!r}; {instead}"
        )
    if as_of is not None and what != "current":
        raise StorageError(
            f"{name}: as_of={as_of!r} selects the current rows, but what is {what!r}, which has the "
            "rows of all times; remove one of the two"
        )
    return what


# Commit history


_KEPT = re.compile(r"(\d{20})-(\d{10})\.json\.gz")
"""A file of archived commits: system time of the first one, and batch of the last one."""


_NEWEST = 8
"""Number of newest commits that are read one by one before a binary search for a batch."""


def known_at(root: str, name: str, moment: int, truncation: Truncation | None) -> Commit:
    """Returns the last commit of an asset's log up to a system time, see :func:`last_known`, with the
    current truncation.

    Args:
        root, moment: see :func:`last_known`.
        name: the asset, for messages.
        truncation: truncation of the log by its last commit.

    Raises:
        StorageError: nothing was recorded by then, the commits of then were removed, or the log was
            truncated after that time.
    """
    last = delta.last_commit(posixpath.join(root, "log"))
    stepped = last is not None and bool(last.document.get("stepped"))
    found = last_known(root, moment, stepped)
    if truncation is not None and (found is None or found.batch < truncation.batch):
        raise StorageError(
            f"{name}: expected a time from {in_utc(truncation.recorded_at)} on, got "
            f"{in_utc(moment)} as "
            f"as_known_at: {truncation.description()}; use a later time"
        )
    warning = None
    if last is not None:
        warning = left_out_by_clock(name, moment, Commit.model_validate(last.document))
    if warning is not None:
        warnings.warn(warning, ClockWarning, stacklevel=2)
    if found is not None:
        return found.model_copy(update={"truncation": truncation})
    first = next(commits(root))
    since = in_utc((first.steps or [first])[0].recorded_at)
    why = "an earlier maintenance has removed the commits before it"
    if first.batch == 1:
        why = "no data existed before it"
    raise StorageError(
        f"{name}: expected as_known_at at or after the first known commit, got {in_utc(moment)}, but "
        f"that commit was recorded at {since}: {why}; use a later time"
    )


def left_out_by_clock(name: str, moment: int, last: Commit) -> str | None:
    """Returns the warning for a read with ``as_known_at`` that omits existing commits, because the
    clock of a run was ahead; None = no warning.

    Args:
        name: the asset.
        moment: system time, epoch microseconds.
        last: last commit of the log.
    """
    until = max((end for start, end in last.ahead if start <= moment < end), default=None)
    # A run cannot detect that its own clock is ahead; the next run records the interval in ``ahead``.
    noted = bool(last.ahead) and last.ahead[-1][1] >= last.recorded_at
    to_come = last.recorded_at - time.time_ns() // 1000 > AHEAD
    if until is None and not noted and to_come and last.recorded_at > moment:
        until = last.recorded_at
    if until is None:
        return None
    return (
        f"{name}: as_known_at {in_utc(moment)} omits runs that were committed by then: the clock of "
        f"one run was ahead, and later runs got system times up to {in_utc(until)}. To include them, "
        "read without as_known_at, or use that time"
    )


def last_known(root: str, moment: int, stepped: bool) -> Commit | None:
    """Returns the last commit of an asset's log up to a system time; None = none. If a commit has
    per-row system times and only some are in range, the result ends at those rows.

    Args:
        root: directory of the asset's tables.
        moment: system time, epoch microseconds, inclusive.
        stepped: see ``Commit``, of the last commit.
    """
    found = last_that(root, lambda commit: commit["recorded_at"] <= moment)
    return _with_part(root, found, moment) if stepped else found


def _with_part(root: str, found: Commit | None, moment: int) -> Commit | None:
    """Returns a commit, extended by the rows of the next commit that were recorded by ``moment``."""
    batch = 1 if found is None else found.batch + 1
    after = last_that(root, lambda commit: commit["batch"] <= batch)
    if after is None or after.batch != batch:
        return found
    early = [step for step in after.steps if step.recorded_at <= moment]
    if not early:
        return found
    fields = {n: getattr(early[-1], n) for n in ("recorded_at", "next_offset", "stream_time")}
    # The disorder of the whole commit is a safe bound for the part.
    update = {**fields, "batch": batch - 1, "disorder": after.disorder, "steps": []}
    return (found or after).model_copy(update=update)


def last_that(root: str, early: Callable[[dict[str, Any]], bool]) -> Commit | None:
    """Returns the last known commit of an asset's log whose document satisfies ``early``; None = none.

    Args:
        root: directory of the asset's tables.
        early: predicate on the document; must be monotone: true for a commit implies true for all
            earlier ones.
    """
    path = posixpath.join(root, "log")
    try:
        found = _bisected(path, delta.versions(path), early) or _last_archived(root, early)
    except FileNotFoundError:  # a concurrent maintenance has archived and removed the commit: try again
        return last_that(root, early)
    return None if found is None else Commit.model_validate(found)


def attempt_at(root: str, batch: int) -> str | None:
    """Returns the attempt that wrote a batch of an asset's log; None = no such batch, or its commit is
    no longer known."""
    for place, found in enumerate(delta.commits(posixpath.join(root, "log"))):
        if found.document["batch"] <= batch:
            return found.document["attempt"] if found.document["batch"] == batch else None
        if place == _NEWEST:
            break  # too far back to read commit by commit
    there = last_that(root, lambda commit: commit["batch"] <= batch)
    return there.attempt if there is not None and there.batch == batch else None


def is_of_log(root: str, then: Checkpoint, commit: Commit) -> bool:
    """Returns whether a view was made from the current log. It was not if the log was restored from a
    backup without the view, or if a commit that the view includes was removed.

    Args:
        then: checkpoint of the view.
        commit: a commit of the log; not necessarily its last.
    """
    if then.batch == commit.batch:
        return then.log_attempt in ("", commit.attempt)
    if then.batch < commit.batch and not then.log_attempt:
        return True
    there = attempt_at(root, then.batch)
    if there is None:
        return then.batch < commit.batch
    return then.log_attempt in ("", there)


def _bisected(
    path: str, versions: Sequence[int], early: Callable[[dict[str, Any]], bool]
) -> dict[str, Any] | None:
    """Returns the document of our newest commit among ``versions`` that is early enough."""

    @cache
    def ours(place: int) -> dict[str, Any] | None:
        """Returns the document of our newest commit up to a place; skips compactions and other
        writers."""
        while place >= 0:
            found = delta.our_commit(path, versions[place])
            if found is not None:
                return found.document
            place -= 1
        return None

    def is_late(place: int) -> bool:
        found = ours(place)
        return found is not None and not early(found)

    return ours(bisect_left(range(len(versions)), True, key=is_late) - 1)


# ------------------------------------------------------------------------------------ archived commits


def keep(root: str, versions: Sequence[int]) -> None:
    """Archives the documents of commits before they are removed from the log.

    Args:
        root: directory of the asset's tables.
        versions: Delta versions of the log, ascending.
    """
    path = posixpath.join(root, "log")
    found = [one.document for v in versions if (one := delta.our_commit(path, v)) is not None]
    if not found:
        return
    fs, folder = delta.filesystem(posixpath.join(root, "commits"))
    name = f"{found[0]['recorded_at']:020d}-{found[-1]['batch']:010d}.json.gz"
    fs.makedirs(folder, exist_ok=True)
    # Renamed when complete: readers never see a partial file.
    aside = posixpath.join(folder, f".{uuid4().hex}")
    fs.pipe_file(aside, gzip.compress(json.dumps(found).encode("utf-8")))
    fs.mv(aside, posixpath.join(folder, name))


def _last_archived(root: str, early: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    for name in reversed(_archive_files(root)):
        documents = _documents(root, name)
        if early(documents[0]):
            return [document for document in documents if early(document)][-1]
    return None


def _archive_files(root: str) -> list[str]:
    """Returns the names of the archive files, ordered by the system time of their first commit."""
    return sorted(filter(_KEPT.fullmatch, delta.names_in(posixpath.join(root, "commits"))))


def _documents(root: str, name: str) -> list[dict[str, Any]]:
    fs, folder = delta.filesystem(posixpath.join(root, "commits"))
    found = json.loads(gzip.decompress(fs.cat_file(posixpath.join(folder, name))))
    for document in found:
        delta.require_format(posixpath.join(root, "log"), document, f"the archived commits {name}")
    return found


def commits(root: str) -> Iterator[Commit]:
    """Yields the known commits of an asset's log, oldest first."""
    path, last = posixpath.join(root, "log"), 0
    kept = (document for name in _archive_files(root) for document in _documents(root, name))
    there = (
        one.document for v in delta.versions(path) if (one := delta.our_commit(path, v)) is not None
    )
    for documents in (kept, there):
        for document in documents:
            if document["batch"] > last:  # a commit may be in several files
                last = document["batch"]
                yield Commit.model_validate(document)


def commits_read(
    root: str, name: str, log: str, runs: Sequence[Commit]
) -> list[tuple[Commit | None, bool]]:
    """Returns a table's commit that each run of a join read (None = the run read none), and whether it
    is known from the Delta versions that the run read.

    If these are deleted, it is the last commit recorded at or before the run's.

    Args:
        root: directory of the table's tables.
        name: its name in the join's commits.
        log: the id of its log.
    """
    every = list(commits(root))
    by_batch, times = {one.batch: one for one in every}, [one.recorded_at for one in every]
    there = {  # newest first
        f"{name}/{part}": [
            (one.version, one.document["batch"]) for one in delta.commits(posixpath.join(root, part))
        ]
        for part in ("log", "view")
    }
    found: list[tuple[Commit | None, bool]] = []
    for run in runs:
        read = [part for part in there if part in run.reads]
        ours = read if run.has_read(name, log) else []
        batches = (b for part in ours for version, b in there[part] if version <= run.reads[part])
        then = by_batch.get(next(batches, -1))
        if read and then is None:
            place = bisect_right(times, run.recorded_at)
            found.append((every[place - 1] if place else None, False))
        else:
            found.append((then, True))
    return found


# Truncated and restored logs


def base_path(root: str, name: str) -> str:
    """Returns the directory of a table's rows as of the truncation of its log.

    Args:
        root: directory of the asset's tables.
        name: see ``Truncation.base``.
    """
    return posixpath.join(root, "bases", name)


def bases_of(root: str) -> list[str]:
    """Returns the directories of all truncation bases, unused ones included."""
    return [base_path(root, name) for name in delta.names_in(posixpath.join(root, "bases"))]


def base_of(name: str, root: str, truncation: Truncation) -> delta.Committed:
    """Returns the commit of a truncation base; its document is a ``Checkpoint``.

    Raises:
        StorageError: the base was removed.
    """
    path = base_path(root, truncation.base)
    found = delta.last_commit(path)
    if found is None:
        raise StorageError(
            f"{name}: expected its rows as of batch {truncation.batch}, where its log was truncated, "
            f"in {path}, but they were removed. Restore them from a backup, or rebuild the asset from "
            "its source (vt-dagster replay) and swap"
        )
    return found


def misses_truncated(then: Checkpoint, commit: Commit) -> bool:
    """Returns whether the view's tail includes truncated records."""
    return any(then.next_offset.get(p, 0) < commit.kept_from(p) for p in commit.next_offset)


def usable(
    root: str, then: Checkpoint, commit: Commit, rules: VersionRules | None, of_log: bool = True
) -> bool:
    """Returns whether the log's tail can be folded into a view, to answer as of a commit.

    Args:
        root: directory of the asset's tables.
        then: checkpoint of the view.
        commit: not before the checkpoint.
        rules: None = a plain table.
        of_log: whether to refuse a view that was made from another state of the log.
    """
    if misses_truncated(then, commit) or not then.suits(rules):
        return False
    return not of_log or is_of_log(root, then, commit)


def require_not_truncated(name: str, of: str, start: Offsets, commit: Commit) -> None:
    """Checks that a consumer does not start at truncated offsets, because it must read every record.

    Args:
        name: the consumer, for the message.
        of: the asset whose log is consumed.
        start: first offset to consume by partition; 0 for others.
        commit: last commit of the log.

    Raises:
        StorageError: the log was truncated after ``start``.
    """
    gone = {p: end for p in commit.next_offset if start.get(p, 0) < (end := commit.kept_from(p))}
    if gone and commit.truncation is not None:
        first = ", ".join(f"{p}:{end}" for p, end in sorted(gone.items())[:3])
        places = ", ".join(f"{p}:{start.get(p, 0)}" for p in sorted(gone)[:3])
        raise StorageError(
            f"{name}: expected the log of {of} from {places} on (partition:offset), but "
            f"{commit.truncation.description()}, and begins at {first}; nothing was consumed. Rebuild "
            f"{of} from its inputs to get a whole log (vt-dagster replay {of} --into …, swap), "
            "and run maintenance with the definitions of all consumers, so that it waits for them"
        )


def columns_to_compare(columns: Collection[str], commit: Commit | None) -> list[str]:
    """Returns the columns by which rows of two assets are compared: all but those for the place and the
    time at which a log recorded a row.

    Args:
        columns: of the rows that are read.
        commit: the asset's last commit; None = nothing was committed.
    """
    times = (TIMESTAMP, IS_TOMBSTONE, VALID_FROM, VALID_TO)
    recorded = (PARTITION, OFFSET, RECORDED_AT, IS_LATEST, IS_LATE, OLD)
    declared = () if commit is None else commit.shape.columns or columns
    return [c for c in columns if (c in declared or c in times) and c not in recorded]


def published(commit: Commit) -> list[str]:
    """Returns the topics of a publication's commit; empty for any other asset."""
    return [up.removeprefix("topic ") for up in commit.inputs if up.startswith("topic ")]


def require_whole_stream(name: str, commit: Commit) -> None:
    """Checks that a log to compare is not that of a truncated stream, whose removed records are
    unknown.

    Raises:
        StorageError: the stream's log was truncated.
    """
    if commit.truncation is not None and commit.shape.kind == "stream":
        raise StorageError(
            f"{name}: expected a stream with its whole log to compare, but "
            f"{commit.truncation.description()}; leave it out, and compare the assets derived "
            "from it"
        )


def consumed_commits(logs: Mapping[str, Commit]) -> dict[str, Consumed]:
    """Returns the consumed commits of logs in the form of ``Commit.consumed``."""
    return {n: Consumed(batch=one.batch, attempt=one.attempt) for n, one in logs.items()}


def require_same_log(
    name: str, of: str, before: Commit | None, commit: Commit, attempt_of: Callable[[int], str | None]
) -> None:
    """Checks that a log still contains what a consumer has consumed; every consumer calls this first.

    Args:
        name: the consumer, for the message.
        of: the asset whose log is consumed.
        before: the consumer's last commit; None = nothing consumed, no check.
        commit: last commit of the log.
        attempt_of: returns the attempt of a batch of the log; None = no longer known.

    Raises:
        StorageError: the log ends before the consumed offsets, or another run wrote the consumed batch:
            the log was restored from a backup, or a commit was removed.
    """
    if before is None or before.logs.get(of, commit.log) != commit.log:
        return  # the log was replaced under its name: the consumers handle this case themselves
    done, then = before.inputs.get(of, {}), before.consumed.get(of)
    behind = {p: end for p, end in done.items() if commit.next_offset.get(p, 0) < end}
    got = ""
    if then is not None and commit.batch < then.batch:
        got = f"its last batch is {commit.batch}"
    elif then is not None and (other := attempt_of(then.batch)) not in (None, then.attempt):
        got = f"that batch was written by another run, {other}"
    elif behind:
        partition, end = min(behind.items())
        there = commit.next_offset.get(partition, 0)
        got = f"partition {partition} ends at offset {there}, before the consumed offset {end}"
    if not got:
        return
    batch = "" if then is None else f" with batch {then.batch} of run {then.attempt}"
    raise StorageError(
        f"{name}: expected the log of {of}{batch}, which batch {before.batch} of {name} has consumed, "
        f"but {got}: the log was restored from a backup, or a commit was removed. Its offsets may now "
        f"mean other records, so nothing was consumed. Restore the lost commits of {of}; or restore "
        f"{name} and its consumers from the same backup; or rebuild {name}: an asset by vt-dagster "
        f"replay {name} --into a new name and swap, an export or a training set by removing its "
        "directory, a publication under a new name into another topic"
    )


def require_history(
    name: str,
    then: Checkpoint,
    rules: VersionRules | None,
    commit: Commit,
) -> None:
    """Checks that a truncation base has all versions that the declaration needs. The base lacks
    versions that had expired at the truncation, and was written with one ``new_version_on``.

    Args:
        then: checkpoint of the base.
        rules: the declared ones; None = a plain table, which needs no history.
        commit: the commit as of which the table is read.

    Raises:
        NeedsReplayError: the retention covers expired versions, or ``new_version_on`` has changed.
    """
    truncation = commit.truncation
    if rules is None or truncation is None:
        return
    if not rules.same_versions(then.new_version_on):
        now = rules.stored()["new_version_on"]
        raise NeedsReplayError(
            f"{name}: expected new_version_on={then.new_version_on} as before, got {now}: "
            f"{truncation.description()}, and its rows as of then were stored with the earlier value; "
            "declare that value, or rebuild the table from its source (vt-dagster replay) and swap"
        )
    begun, now = rules.horizons(then.stream_time), rules.horizons(commit.stream_time)
    for partition, longer in zip(then.stream_time, then.lengthened(rules), strict=False):
        since = begun[partition] + longer
        if longer > 0 and now.get(partition, since) < since:
            kept = length_at(rules.history_retention, partition)
            there = kept - timedelta(microseconds=since - now[partition])
            raise NeedsReplayError(
                f"{name}: expected a history_retention of at most {in_words(there)}, got "
                f"{in_words(kept)}: {truncation.description()}, and versions that "
                f"ended before {in_utc(since)} had expired by then; lengthen it as the history grows, "
                "or rebuild the table from its source (vt-dagster replay) and swap"
            )


# File offsets


def file_at_or_after(start: Offsets, ends: Offsets, consumed: int = 0) -> Wanted:
    """Returns a filter for log files that may have rows in ``[start, ends)``; files without statistics
    pass.

    Args:
        start, ends: by partition, the first offset to read and the first free one.
        consumed: a batch of the log with all rows before ``start``, and no other; 0 = not known. The
            batch is needed because statistics alone may let files of earlier batches pass, if the
            partitions end at different offsets.
    """
    first = {p: start.get(p, 0) for p, end in ends.items() if start.get(p, 0) < end}
    least = min(first.values(), default=None)

    def wanted(file: File) -> bool:
        if least is None:
            return False
        if file.batch is not None and file.batch <= consumed:
            return False
        if file.offsets is None or file.partitions is None:
            return True
        low, high = file.partitions
        last = file.offsets[1]
        if last < least:
            return False
        some = first if len(first) < high - low else range(low, high + 1)
        return any(low <= p <= high and first.get(p, last + 1) <= last for p in some)

    return wanted


def file_between(start: Offsets, ends: Offsets, consumed: int = 0) -> Wanted:
    """Returns a filter for log files that pass both :func:`file_at_or_after` and :func:`file_before`,
    of a version that also has later rows."""
    late, early = file_at_or_after(start, ends, consumed), file_before(ends)
    return lambda file: late(file) and early(file)


def file_before(ends: Offsets) -> Wanted:
    """Returns a filter for log files that may have rows before ``ends``; files without statistics pass.

    Args:
        ends: end offset (exclusive) by partition; partitions without an entry are not read.
    """

    def wanted(file: File) -> bool:
        if file.offsets is None or file.partitions is None:
            return True
        (low, high), first = file.partitions, file.offsets[0]
        return any(low <= p <= high and first < end for p, end in ends.items())

    return wanted
