"""What a commit says: which batch, how far in each input, stream time, and what it read; and what
follows from that alone. No Spark."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from datetime import timedelta
from typing import Literal

from pydantic import BaseModel, Field

from vt_dagster.errors import StorageError
from vt_dagster.storage.delta import Wanted
from vt_dagster.topology.durations import Duration, in_utc, length_at, spoken

Offsets = dict[int, int]
"""Partition -> offset."""
Ranges = dict[str, dict[int, tuple[int, int]]]
"""Input -> partition -> [start, end)."""

AHEAD = 60_000_000
"""By so much clocks may differ without a warning: microseconds."""
EVER = -(2**63)
"""Before all times, epoch microseconds."""
_NOTED = 64
"""So many batches at most are told apart by what was out of order since."""


class Shape(BaseModel):
    """What a log is a log of, so that its tables can be read without the definitions."""

    kind: Literal["stream", "table", "versioned"]
    key: list[str]
    history_retention: int | dict[int, int] | None = None
    """Microseconds; of a versioned table. Of each partition, where they differ."""
    columns: list[str] | None = None
    """The user's columns as they were declared; the log may have more, of earlier declarations. None =
    not known, of logs whose last commit is older than this note."""
    meaning: dict[str, str] = Field(default_factory=dict)
    """What the operator computes, see ``Operator.meaning``; of a source, or where only the tables are
    known, empty."""

    valid_until: str | None = None
    """Of a versioned table: the column by which its versions end."""
    new_version_on: list[str] | None = None
    """Of a versioned table: the columns that make a version; None = every record does."""

    has_partial_updates: bool = False
    """Of a versioned table: whether a record may say a part of its row."""

    ordered_by_source: bool = False
    """Of a versioned table: whether the order of its source decides, so that no record is late."""

    def retention(self) -> Duration:
        """How far back the table answers; zero where it is not versioned."""
        told = self.history_retention or 0
        if isinstance(told, int):
            return timedelta(microseconds=told)
        return {partition: timedelta(microseconds=length) for partition, length in told.items()}


class Truncation(BaseModel):
    """What was cut off from a log: all its batches up to one, as ``log_retention`` says."""

    batch: int
    """The last of them; ``recorded_at``, ``next_offset`` and ``stream_time`` are of its commit."""
    recorded_at: int
    next_offset: Offsets = Field(default_factory=dict)
    """The first offset of each partition that is kept."""
    stream_time: dict[int, int] = Field(default_factory=dict)
    """No record that was cut off is later than this."""
    log_retention: int = 0
    """Microseconds, as it was declared."""
    base: str = ""
    """Of a table: the directory in ``bases/`` with its rows as of that batch, which the rest of the log
    is folded onto."""

    def description(self) -> str:
        """In words, what is kept."""
        kept = timedelta(microseconds=self.log_retention)
        return (
            f"its log was cut off at {in_utc(self.recorded_at)}, batch {self.batch}, by its "
            f"log_retention of {spoken(kept)}"
        )


class Erasure(BaseModel):
    """Which reads of a versioned table may have seen what was erased from it. Names no key."""

    batch: int
    """The erase's own, or of several the last one's."""
    spans: list[tuple[int, int]] = Field(default_factory=list[tuple[int, int]])
    """When something of it was valid, by all that the log had: from (inclusive), to (exclusive)."""
    first: int | None = None
    """The smallest timestamp of it; None = the log had no row of it."""
    last: Offsets = Field(default_factory=dict)
    """The largest offset of it in each partition."""

    def touched(self, moment: int, next_offset: Offsets) -> bool:
        """Whether a read as of a time may have seen something of it.

        Args:
            next_offset: where the log stood. What had not all of it may have seen what was replaced
                later, at any time from the first on.
        """
        if any(next_offset.get(p, 0) <= offset for p, offset in self.last.items()):
            return self.first is None or moment >= self.first
        return any(start <= moment < end for start, end in self.spans)


class Step(BaseModel):
    """How far a log came by a time of record within one commit; fields as of ``Commit``."""

    recorded_at: int
    next_offset: Offsets
    stream_time: dict[int, int]


class Started(BaseModel):
    """The snapshot that a table started with."""

    what: str
    """It, in words: the file, or the version of a Delta table."""
    batch: int
    """Whose run took it."""
    offsets: dict[int, tuple[int, int]] = Field(default_factory=dict)
    """The offsets of its rows in the log, by partition: [start, end)."""


class Consumed(BaseModel):
    """The commit of a log up to which it was consumed. A backup of the log that was put back may give
    the same offsets, and batches of the same numbers, to other records: the attempt tells."""

    batch: int
    attempt: str


class Commit(BaseModel):
    """The document in each commit of a log: the truth about how far an asset has come.

    Every offset is the *next* one: the end of what has been taken, exclusive. Times are epoch
    microseconds.
    """

    asset: str
    batch: int
    """1 for the first run that committed, then one more each time."""
    attempt: str
    """The run that won this batch; names the directory with what it prepared."""
    shape: Shape
    log: str = ""
    """The attempt that began this log: another log of the same name (a replay that was swapped in) has
    another one, and its offsets mean other records."""
    logs: dict[str, str] = Field(default_factory=dict)
    """The same of each log that was consumed."""
    consumed: dict[str, Consumed] = Field(default_factory=dict[str, Consumed])
    """Of each log that was consumed its last commit then. Not known of what was consumed before this
    was noted."""
    previous: str = ""
    """The attempt of the batch before, whose directory is kept too: should the commit be lost, the next
    run goes on from there."""
    staged: dict[str, tuple[int, int]] = Field(default_factory=dict)
    """What the attempt's directory holds, by name: number of files, and their bytes together."""
    run_id: str | None = None
    recorded_at: int = 0
    """When it was made: by the writer's clock, as it began to write its rows, but always after the
    commit before it. Of commits from before this was noted, what Delta says. Where the source tells
    its rows' times of record, the last of these."""
    ahead: list[tuple[int, int]] = Field(default_factory=list[tuple[int, int]])
    """Times in which runs counted as recorded later, as a clock before had been ahead: from, to."""
    steps: list[Step] = Field(default_factory=list[Step])
    """Of such a run: how far the log came by each of the earlier ones."""
    stepped: bool = False
    """Whether there are some in this or an earlier commit."""
    taken: Ranges = Field(default_factory=dict)
    """What this run took from each input: ``{input: {partition: [start, end)}}``."""
    inputs: dict[str, Offsets] = Field(default_factory=dict)
    """How far all runs together have come in each input."""
    next_offset: Offsets = Field(default_factory=dict)
    """The first free offset of each partition of this log."""
    stream_time: dict[int, int] = Field(default_factory=dict)
    """Largest timestamp of each partition; of a join with grace, the buffer's own."""
    emitted_up_to: dict[int, int] = Field(default_factory=dict)
    """Of a join: the largest timestamp up to which every record has been joined."""
    watermarks: dict[str, dict[int, int]] = Field(default_factory=dict)
    """Of a join of streams, by name and partition: the largest time of each side, and how far unmatched
    records have been let go."""
    strategy: str = ""
    """Of a join with a versioned table: how versions were looked for in this run, and why so."""
    reads: dict[str, int] = Field(default_factory=dict)
    """Delta version of every table that was read: ``{'weather/view': 7}``."""
    counts: dict[str, int] = Field(default_factory=dict)
    """Of this run: rows in, applied, late, quarantined, …"""
    gauges: dict[str, float] = Field(default_factory=dict)
    """Of this run, what cannot be added up: lateness, sizes of buffers."""
    totals: dict[str, int] = Field(default_factory=dict)
    """The same over all runs."""
    totals_by_partition: dict[int, dict[str, int]] = Field(default_factory=dict)
    """What became of records over all runs, by partition: late, dropped, quarantined, and how many are
    waiting now. Those of which there are none are left out."""
    topics: dict[str, str] = Field(default_factory=dict)
    """Of a Kafka source: the id of each topic; another topic of the same name has another one. Of a
    Delta table: its id and the time of the last version that was consumed, ``id@microseconds``."""
    disorder: dict[int, int] | None = None
    """How far back records out of order have reached: by batch the smallest timestamp of one that was
    not its key's latest, where no later batch has a smaller one. None = not known, of logs that
    were begun before it was noted."""
    gaps: Ranges = Field(default_factory=dict)
    """Of this run: offsets that were gone before they could be consumed, ``[first, next)``; of a topic
    that was created anew, where it stood. A run has them only where it was told to accept them."""
    deliveries: dict[str, str] = Field(default_factory=dict)
    """Of a source of DataFrames: which runs, partitions or materializations this run took, and what is
    remembered of each; of many, some."""
    initial_load: dict[str, Offsets] | str | None = None
    """Of a table whose ``ready`` is the end that its first run has pinned, or that starts with a
    snapshot: that end, as the source says it. None = there was none to note, also of runs before
    ``ready`` was declared."""
    start: Started | None = None
    """Of a table that starts with a snapshot: which one; None = none was taken yet."""
    ready_at: Offsets | None = None
    """Where this log stood when all that it is made of was ready; None = it is not, or need not be."""
    not_ready: list[str] = Field(default_factory=list)
    """Of this run: tables that were joined with before they were ready, as the run was told to."""
    files: bool = False
    """Whether the attempt's directory holds the list of files, or of deliveries, consumed so far."""
    rejected: bool = False
    """Whether the attempt's directory holds records to be put into quarantine."""
    state: bool = False
    """Whether the attempt's directory holds what an operator keeps from run to run."""
    erased: Offsets = Field(default_factory=dict)
    """How many rows of each partition have been erased: so many offsets of the log are missing."""
    erased_before: Offsets = Field(default_factory=dict)
    """All of those are before these offsets."""
    erasures: list[Erasure] = Field(default_factory=list[Erasure])
    """Of a versioned table: the last ones that took something out of it; earlier ones as one."""
    truncation: Truncation | None = None
    """What was cut off from the log. Its rows are in none of the other counts of what is missing."""
    upkeep: bool = False
    """Whether this batch cut the log off, and did nothing else."""

    def kept_from(self, partition: int) -> int:
        """The first offset of a partition that has not been cut off."""
        return 0 if self.truncation is None else self.truncation.next_offset.get(partition, 0)

    @property
    def missing(self) -> dict[str, int]:
        """How many records of the log are not there any more, by why."""
        cut = 0 if self.truncation is None else sum(self.truncation.next_offset.values())
        told = {"rows_erased": sum(self.erased.values()), "rows_cut_off": cut}
        return {why: count for why, count in told.items() if count}

    @property
    def total(self) -> int:
        """Records of the log so far."""
        return sum(self.next_offset.values())

    def earliest_since(self, batch: int) -> int | None:
        """The smallest timestamp of a record that was not its key's latest, in the batches after one;
        None = there is none."""
        known = {self.batch: EVER} if self.disorder is None else self.disorder
        return min((moment for later, moment in known.items() if later > batch), default=None)

    def disorder_with(self, earliest: int | None) -> dict[int, int]:
        """``disorder`` after one more batch.

        Args:
            earliest: in that batch.
        """
        known = self.disorder
        if known is None:
            known = {self.batch: EVER} if self.batch else {}
        if earliest is None:
            return known
        kept = {batch: moment for batch, moment in known.items() if moment < earliest}
        kept[self.batch + 1] = earliest
        while len(kept) > _NOTED:
            # Of the two oldest the earlier time, for both.
            first, second = sorted(kept)[:2]
            kept[second] = kept.pop(first)
        return dict(sorted(kept.items()))


class Segments(BaseModel):
    """The segments of a view. Each holds the versions whose ``valid_to`` is before its end (exclusive)
    and not before the end of the one before it; the first also takes what is older, and the last, which
    is open, what is younger."""

    first: int = 0
    """The number of the first segment that is still there."""
    ends: list[int] = Field(default_factory=list[int])
    """Epoch microseconds, ascending; of all but the last segment."""
    rows: int = 0
    """At most so many versions are in the last one."""

    @property
    def last(self) -> int:
        """The number of the segment that is open."""
        return self.first + len(self.ends)

    def number(self, moment: int) -> int:
        """The segment of the versions that end at a time."""
        return self.first + bisect_right(self.ends, moment)

    def ending_after(self, moment: int) -> Wanted:
        """The files with all versions that end after a time, and some that do not."""
        first = self.number(moment)
        return lambda file: file.segment is None or file.segment >= first

    def forgotten(self, horizon: int) -> Segments:
        """Without the segments in which every version ended before the horizon."""
        gone = bisect_right(self.ends, horizon)
        return Segments(first=self.first + gone, ends=self.ends[gone:], rows=self.rows)


class Checkpoint(BaseModel):
    """The document in each commit of a view or quarantine: the log's batch that it stands at."""

    asset: str
    batch: int
    attempt: str
    next_offset: Offsets = Field(default_factory=dict)
    stream_time: dict[int, int] = Field(default_factory=dict)
    segments: Segments | None = None
    """Of a versioned table's view: how its rows are laid out for the next run."""
    history_retention: int | dict[int, int] | None = None
    """Of a versioned table's view: with which it was written. What has expired is not there."""
    new_version_on: list[str] | None = None
    """Of a versioned table's view: with which it was written, see ``core.new_version_on``."""
    log_attempt: str = ""
    """Of a view: the attempt of the log's commit that it stands at. Not known of older ones."""
    written: int = 0
    """When it was committed: epoch microseconds of the writer's clock."""
    erased: dict[str, int] = Field(default_factory=dict)
    """Of a quarantine: how many rows of each reason have been erased."""

    @property
    def total(self) -> int:
        """Records of the log that it has."""
        return sum(self.next_offset.values())

    def lengthened(self, retention: Duration) -> list[int]:
        """By how much longer than when it was written the partitions of a versioned table are
        remembered now, microseconds; versions that it forgot are wanted again then."""
        then = self.history_retention
        if then is None:
            return []
        return [
            length_at(retention, p) // timedelta(microseconds=1)
            - (then if isinstance(then, int) else then.get(p, 0))
            for p in self.stream_time
        ]


def horizons(retention: Duration, stream_time: Mapping[int, int]) -> list[int]:
    """Of each partition: what ended before it has expired. Epoch microseconds."""
    one = timedelta(microseconds=1)
    return [now - length_at(retention, p) // one for p, now in stream_time.items()]


def require_remembered(
    name: str, retention: Duration, stream_time: Mapping[int, int], moment: int
) -> None:
    """A table answers for times within its history retention only.

    Args:
        stream_time: by partition, epoch microseconds.
        moment: the time that is asked for.

    Raises:
        StorageError: it lies before that, in some partition.
    """
    horizon = max(horizons(retention, stream_time), default=moment)
    if moment < horizon:
        raise StorageError(
            f"{name}: expected a time from {in_utc(horizon)} on, since when it remembers what was "
            f"true, got {in_utc(moment)}; ask for a later one, keep a longer history_retention, or say "
            'that the rows that are left will do ("vt_dagster/partial": True, --partial)'
        )


def choose(name: str, kind: str, what: str | None, as_of: str | None) -> str:
    """What is read of an asset: ``current``, ``versions`` or ``log``.

    Args:
        kind: see ``Shape``.
        what: None = current of a table, log of a stream.
        as_of: the time that is asked for; None = none.

    Raises:
        StorageError: the asset has no such thing.
    """
    choices = {"stream": ["log"], "table": ["log", "current"]}.get(kind, ["log", "current", "versions"])
    what = what or choices[-1 if kind != "versioned" else 1]
    if what not in choices or (as_of is not None and kind != "versioned"):
        asked = what if as_of is None else f"{what} as of {as_of}"
        called = {"stream": "Stream", "table": "Table"}.get(kind, "VersionedTable")
        raise StorageError(
            f"{name} is a {called}: expected one of {choices} to read"
            f"{', and as_of only of a VersionedTable' if as_of else ''}, got {asked!r}"
        )
    return what
