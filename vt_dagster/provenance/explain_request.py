"""The request to explain a result, and the explanation: records, their origins, the rules that decided.

The logs that an explanation reads: a few records by key, time and offset; files are skipped by their
statistics.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from functools import cached_property, reduce
from operator import and_
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vt_dagster.columns import (
    IS_LATE,
    IS_LATEST,
    IS_TOMBSTONE,
    OFFSET,
    OLD,
    PARTITION,
    RECORDED_AT,
    TIMESTAMP,
    VALID_TO,
)
from vt_dagster.rules import RULES, Rule
from vt_dagster.storage import delta
from vt_dagster.storage.arrow_reader import (
    asset_names,
    columns_of,
    head_of,
    micros,
    names_of,
    of_key,
    rows_between,
    rows_of,
)
from vt_dagster.storage.commit_log import (
    Commit,
    Offsets,
    base_of,
    base_path,
    file_between,
    known_at,
    last_that,
)
from vt_dagster.storage.values import texts
from vt_dagster.topology.durations import as_time, epoch_micros
from vt_dagster.topology.specification import OperatorSpec

SOURCE = "source"
"""The operator of an asset with a source."""


class Place(NamedTuple):
    """The place of a record in a log; as text ``0:17``."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"


@dataclass(frozen=True)
class Record:
    """A record of an asset's log.

    Args:
        asset: the asset's name, with its key prefix (``shop/prices``).
        partition, offset: the record's place in the log.
        timestamp: the event time, UTC.
        recorded_at: the system time, UTC; None = the log did not record it then.
        values: the user's columns, with the key; times as texts, UTC.
        is_latest: tables only: whether it was its key's latest by timestamp on arrival; else None.
        is_late: joins with grace only: whether it was late and joined at once; else None.
    """

    asset: str
    partition: int
    offset: int
    timestamp: datetime
    recorded_at: datetime | None
    is_tombstone: bool
    values: Mapping[str, Any]
    is_latest: bool | None = None
    is_late: bool | None = None

    @property
    def place(self) -> Place:
        """The record's partition and offset."""
        return Place(self.partition, self.offset)

    @property
    def micros(self) -> int:
        """The record's timestamp, epoch microseconds."""
        return epoch_micros(self.timestamp)

    def __str__(self) -> str:
        return f"{self.asset} {self.place}"


@dataclass(frozen=True)
class Decision:
    """A rule that decided the outcome of a record.

    Args:
        rule: the rule's name, one of ``vt_dagster.rules.RULES``.
        because: the facts of this case.
    """

    rule: str
    because: str

    @property
    def description(self) -> str:
        """The rule as a sentence."""
        return RULES[self.rule].description


@dataclass(frozen=True)
class Written:
    """The commit that wrote a record.

    Args:
        batch: the commit's number, from 1.
        run_id: the Dagster run; None = the run had no id.
        recorded_at: the commit's system time, UTC.
    """

    batch: int
    run_id: str | None
    recorded_at: datetime


@dataclass(frozen=True)
class Candidate:
    """A record that may be an input, with the rule that selected or excluded it.

    Args:
        valid_from: start of its validity (inclusive); None = it has no validity, as in a plain table.
        valid_to: end of its validity (exclusive) as of the run; None = current, or no validity.
        valid_to_now: end of its validity by current knowledge.
        known: whether the run read a log that contains it.
        chosen: whether it was joined.
        chosen_now: whether it would be joined by current knowledge.
        rule: the name of the rule that selected or excluded it.
    """

    record: Record
    valid_from: datetime | None
    valid_to: datetime | None
    valid_to_now: datetime | None
    known: bool
    chosen: bool
    chosen_now: bool
    rule: str

    @classmethod
    def left_out(cls, record: Record, rule: Rule, known: bool = True) -> Candidate:
        """Makes the candidate for a record that a rule excluded and that has no validity."""
        return cls(record, None, None, None, known, False, False, rule.name)


@dataclass(frozen=True)
class Origin:
    """The origin of a source's record.

    Args:
        kind: ``files``, ``topic``, ``deliveries``, ``versions``, or ``snapshot`` (the table's initial
            snapshot).
        names: the files, topics or deliveries that the run consumed, at most 20.
        count: the number of all of them.
        start, end: the positions that the run consumed: inclusive, exclusive; None = not recorded.
        position: the record's own offset in the topic; None = not known exactly.
    """

    kind: str
    names: tuple[str, ...]
    count: int
    start: int | None = None
    end: int | None = None
    position: int | None = None


@dataclass(frozen=True)
class Rejected:
    """A row of a source that is in quarantine instead of the log.

    Args:
        reason: the name of the rule that rejected it.
        source: the file or topic.
        position: the line or the offset.
        raw: the row as read, at most 500 characters.
        batch: the number of the commit.
    """

    reason: str
    source: str | None
    position: int | None
    raw: str
    batch: int

    @property
    def description(self) -> str:
        """The reason as a sentence."""
        # The checks of a contract follow the rule's name.
        rule, _, more = self.reason.partition(": ")
        if rule not in RULES:
            return self.reason
        text = RULES[rule].description
        return f"{text}: {more}" if more else text


@dataclass(frozen=True)
class Explanation:
    """Why a row has its values, or does not exist.

    Args:
        asset: the asset's name.
        operator: the operator that makes the asset; ``source`` for an asset with a source.
        record: the row; None = there is no such row, ``decisions`` and ``notes`` give the reason.
        written: the commit that wrote the row.
        decisions: the rules that decided, in order.
        made_of: the row's input records, each explained; only the newest if there are many.
        made_of_in_all: the number of all input records.
        candidates: joins: rows of the other side around the record's time; windows: records that came
            too late; suppress: updates that a later one replaced.
        candidates_in_all: the number of all candidates.
        origin: sources only: the record's origin.
        rejected: sources only: rows in quarantine that mention the key.
        notes: further facts, and what is not known and why.
    """

    asset: str
    operator: str
    record: Record | None = None
    written: Written | None = None
    decisions: tuple[Decision, ...] = ()
    made_of: tuple[Explanation, ...] = ()
    made_of_in_all: int = 0
    candidates: tuple[Candidate, ...] = ()
    candidates_in_all: int = 0
    origin: Origin | None = None
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def more(self) -> int:
        """The number of input records that ``made_of`` leaves out."""
        return max(0, self.made_of_in_all - len(self.made_of))

    @property
    def rules(self) -> tuple[str, ...]:
        """The names of the rules that decided."""
        return tuple(one.rule for one in self.decisions)

    def walk(self) -> Iterator[Explanation]:
        """Yields this explanation and all those of its inputs, recursively."""
        yield self
        for one in self.made_of:
            yield from one.walk()

    def as_json(self) -> dict[str, Any]:
        """Returns all fields as plain values; times as ISO 8601."""
        found: Any = _plain(self)
        return found


@dataclass
class Reasoning:
    """Collects the decisions and notes of an explanation."""

    decisions: list[Decision] = field(default_factory=list[Decision])
    notes: list[str] = field(default_factory=list[str])

    def decide(self, rule: Any, because: str) -> None:
        """Adds a rule that decided, with the facts of this case."""
        self.decisions.append(Decision(str(rule), because))

    def note(self, text: str) -> None:
        """Adds a further fact, or what is not known and why."""
        self.notes.append(text)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in cast(list[Any], value)]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


# Log reader


_OURS = (IS_LATE, IS_LATEST, IS_TOMBSTONE, OFFSET, OLD, PARTITION, RECORDED_AT)
Condition = Callable[[pa.Schema], Any]
"""Makes an Arrow expression from the columns of a log; an expression of None = all records."""


def time_if_known(micros: int | None) -> str:
    """Returns epoch microseconds as a text for an explanation."""
    return "not known" if micros is None else str(as_time(micros))


def places_of(rows: pa.Table) -> list[Place]:
    """Returns the places of the rows of a log."""
    columns = (rows.column(c).to_pylist() for c in (PARTITION, OFFSET))
    return [Place(*one) for one in zip(*columns, strict=True)]


def places(records: Iterable[Record]) -> list[Place]:
    """Returns the places of records."""
    return [one.place for one in records]


@dataclass(frozen=True)
class Log:
    """A log as of one of its commits.

    Args:
        warehouse: the directory or URL of the tables.
        name: the asset's name, with its key prefix.
        version: a Delta version that contains the commit's rows.
        commit: the commit as of which the log is read.
        head: the last commit.
        known: the system time as of which the log is read, epoch microseconds; None = now.
    """

    warehouse: str
    name: str
    version: int
    commit: Commit
    head: Commit
    known: int | None = None

    @classmethod
    def open(cls, warehouse: str, name: str, known: int | None = None) -> Log:
        """Opens a log as of a system time (inclusive, epoch microseconds); None = now.

        Raises:
            StorageError: there is no such log, or it has no commit up to that time.
        """
        version, head = head_of(warehouse, name)
        commit = head
        if known is not None and known < head.recorded_at:
            root = posixpath.join(str(warehouse), name)
            commit = known_at(root, name, known, head.truncation)
        return cls(str(warehouse), name, version, commit, head, known)

    def input(self, name: str, known: int | None = None) -> Log | None:
        """Returns the log of an input by its name without key prefix; None = it is not in the
        warehouse, or is not the log that was consumed.

        Args:
            known: see :meth:`open`.
        """
        wanted, first = self.head.logs.get(name, self.head.read_logs.get(name)), None
        for place in inputs_named(self.warehouse, self.name, name):
            found = Log.open(self.warehouse, place, known)
            if wanted in (None, found.head.log):
                return found
            first = first or found
        # A table that is only looked up may have been replaced since.
        return None if name in self.head.logs else first

    @property
    def root(self) -> str:
        return posixpath.join(self.warehouse, self.name)

    @property
    def path(self) -> str:
        return posixpath.join(self.root, "log")

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(self.commit.shape.key)

    @property
    def specification(self) -> OperatorSpec | None:
        """The specification of the log's operator, from the last commit; None for a source."""
        return self.head.shape.specification

    @property
    def operator(self) -> str:
        """The name of its operator; ``source`` for an asset with a source."""
        return SOURCE if self.specification is None else self.specification.operator

    @property
    def limit(self) -> str:
        """The reason why a record may be missing, as text: the log was truncated; empty if not."""
        return "" if self.head.truncation is None else f": {self.head.truncation.description()}"

    def truncated(self, ranges: Mapping[int, tuple[int, int]], since: int | None = None) -> list[int]:
        """Returns the partitions of which truncation removed records between two offsets, [start, end).

        Args:
            since: only records of this time or later, epoch microseconds; None = any.
        """
        cut = self.head.truncation
        if cut is None:
            return []
        inside = [p for p, (start, end) in ranges.items() if start < min(end, self.head.kept_from(p))]
        return [p for p in inside if since is None or cut.stream_time.get(p, since) >= since]

    @property
    def ranges(self) -> dict[int, tuple[int, int]]:
        """The offsets of all its records by partition, [start, end), removed ones included."""
        return {p: (0, end) for p, end in self.commit.next_offset.items()}

    @property
    def versioned(self) -> bool:
        return self.head.shape.kind == "versioned"

    @cached_property
    def columns(self) -> pa.Schema:
        """All columns of the log."""
        return columns_of(self._table)

    @cached_property
    def _table(self) -> Any:
        """The Delta table, opened once: opening takes longer than reading a few rows."""
        return delta.require_table(self.path, self.version)

    # -- records -----------------------------------------------------------------------------------

    def records(
        self, condition: Condition, start: Offsets | None = None, end: Offsets | None = None
    ) -> list[Record]:
        """Returns records in order of arrival in each partition.

        Args:
            condition: returns an Arrow expression for the log's columns; None = all records.
            start: the first offset by partition (inclusive); 0 for missing partitions.
            end: the end offset by partition (exclusive); missing partitions are not read. None = the
                end as of ``commit``.
        """
        # The replaced row is as wide as all other columns together.
        only = [c for c in self.columns.names if c != OLD]
        return self.as_records(self.rows(condition, start, end, only))

    def rows(
        self,
        condition: Condition,
        start: Offsets | None = None,
        end: Offsets | None = None,
        only: Sequence[str] | None = None,
    ) -> pa.Table:
        """Returns records as an Arrow table, see :meth:`records`.

        Args:
            only: the columns to read, besides partition and offset; None = all.
        """
        ends, first = self.commit.next_offset if end is None else end, start or {}
        wanted = file_between(first, ends)
        columns = None if only is None else (*only, PARTITION, OFFSET)
        rows = rows_of(self.path, self.version, condition, wanted, only=columns, opened=self._table)
        found = rows_between(self._with_base(rows, condition), first, ends)
        return found.sort_by([(PARTITION, "ascending"), (OFFSET, "ascending")])

    def _with_base(self, rows: pa.Table, condition: Condition) -> pa.Table:
        """Adds the table's rows as of the truncation of its log: each stands for a truncated record."""
        truncation = self.head.truncation
        if truncation is None or not truncation.base:
            return rows
        found = base_of(self.name, self.root, truncation)
        # Of the log's columns, which have their earlier names: the base may be older than a new name.
        names = {*rows.column_names} - {OLD, IS_LATEST}
        like = pa.schema([f for f in self.columns if f.name in names])
        base = rows_of(base_path(self.root, truncation.base), found.version, condition, like=like)
        ours = base.select([c for c in base.column_names if c in like.names])
        if IS_LATEST in rows.column_names:
            # A key's latest row was so on arrival too; of its other versions this is no longer known.
            every = [True] * base.num_rows
            latest = base.column(VALID_TO).is_null().to_pylist() if self.versioned else every
            flags = pa.array([one or None for one in latest], pa.bool_())
            ours = ours.append_column(IS_LATEST, flags)
        return pa.concat_tables([ours, rows], promote_options="default")

    def as_records(self, rows: pa.Table) -> list[Record]:
        """Returns rows of the log, or of a table folded from it, as records."""
        declared = self.head.shape.columns
        own = [c for c in rows.column_names if c not in _OURS and (declared is None or c in declared)]
        values = texts(rows.select(own))

        def flags(column: str) -> list[Any]:
            there = column in rows.column_names
            return rows.column(column).to_pylist() if there else [None] * rows.num_rows

        recorded = flags(RECORDED_AT)
        moments = micros(rows, TIMESTAMP).tolist()
        each = zip(
            rows.column(PARTITION).to_pylist(),
            rows.column(OFFSET).to_pylist(),
            map(as_time, moments),
            recorded,
            rows.column(IS_TOMBSTONE).to_pylist(),
            values or [{}] * rows.num_rows,
            flags(IS_LATEST),
            flags(IS_LATE),
            strict=True,
        )
        return [Record(self.name, *one) for one in each]

    def of_key(self, key: Sequence[Any]) -> Condition:
        """Returns the condition that a record has a key; the key's values may be texts."""
        return lambda columns: of_key(self.path, columns, self.key, key)

    def same_key(self, values: Mapping[str, Any], names: Sequence[str] | None = None) -> Condition:
        """Returns the condition that a record has the key of another record.

        Args:
            values: the other record's values.
            names: the names of the key's columns there; None = the same as here.
        """

        def of(column: str, value: Any) -> Condition:
            def condition(columns: pa.Schema) -> Any:
                if pa.types.is_nested(columns.field(column).type):
                    return None  # Arrow cannot compare nested values; the caller compares them
                if value is None:
                    return reduce(and_, [pc.field(one).is_null() for one in names_of(columns, column)])
                return of_key(self.path, columns, [column], [value])

            return condition

        return both(*[of(c, values[n]) for c, n in zip(self.key, names or self.key, strict=True)])

    def one(self, partition: int, offset: int) -> Record | None:
        """Returns the record at an offset; None = there is none."""
        return next(iter(self.at([Place(partition, offset)])), None)

    def at(self, places: Collection[Place]) -> list[Record]:
        """Returns the existing records at some places, ordered by partition and offset."""
        if not places:
            return []
        return [one for one in self.records(*at_places(places)) if one.place in places]

    # -- commits -----------------------------------------------------------------------------------

    def commit_of(self, record: Record) -> Commit | None:
        """Returns the commit that wrote a record; None = the commit is gone."""
        place = str(record.partition)

        def before(commit: Mapping[str, Any]) -> bool:
            return commit.get("next_offset", {}).get(place, 0) <= record.offset

        return self._after(before)

    def taken_by(self, name: str, partition: int, offset: int) -> Commit | None:
        """Returns the commit that consumed a record of an input; None = not consumed by ``commit``."""
        place = str(partition)

        def before(commit: Mapping[str, Any]) -> bool:
            return commit.get("inputs", {}).get(name, {}).get(place, 0) <= offset

        if self.commit.inputs.get(name, {}).get(partition, 0) <= offset:
            return None
        return self._after(before)

    def has_consumed(self, name: str, record: Record) -> bool:
        """Returns whether a record of an input was consumed by ``commit`` or an earlier one."""
        return record.offset < self.commit.inputs.get(name, {}).get(record.partition, 0)

    def batch(self, number: int) -> Commit | None:
        """Returns the commit of a batch; None = there is none, or it is gone."""
        found = last_that(self.root, lambda commit: commit["batch"] <= number)
        return found if found is not None and found.batch == number else None

    def before(self, commit: Commit) -> Commit | None:
        """Returns the previous commit; None = there is none, or it is gone."""
        return None if commit.batch <= 1 else self.batch(commit.batch - 1)

    def _after(self, before: Callable[[Mapping[str, Any]], bool]) -> Commit | None:
        """Returns the first commit for which a condition is false that is true for all earlier ones."""
        last = last_that(self.root, before)
        return self.batch(1 if last is None else last.batch + 1)


def inputs_named(warehouse: str, asset: str, name: str) -> list[str]:
    """Returns the assets with the given name, whatever their key prefix: one of them is the input of
    the asset. The one with the asset's own prefix comes first."""
    beside = posixpath.join(posixpath.dirname(asset), name)
    others = [one for one in asset_names(warehouse) if posixpath.basename(one) == name]
    return sorted(others, key=lambda one: one != beside)


def written(commit: Commit | None) -> Written | None:
    """Returns a commit as a value of an explanation."""
    if commit is None:
        return None
    return Written(commit.batch, commit.run_id, as_time(commit.recorded_at))


def both(*conditions: Condition | None) -> Condition:
    """Returns a condition that is true if all given conditions are."""

    def condition(columns: pa.Schema) -> Any:
        found = [one(columns) for one in conditions if one is not None]
        found = [one for one in found if one is not None]
        return reduce(and_, found) if found else None

    return condition


def at_places(places: Collection[Place]) -> tuple[Condition, Offsets, Offsets]:
    """Returns the condition and the start and end offsets for a read of some places. The read may also
    return records of other partitions with the same offsets."""
    offsets = pa.array(sorted({offset for _, offset in places}), pa.int64())
    start, end = Offsets(), Offsets()
    for partition, offset in places:
        start[partition] = min(offset, start.get(partition, offset))
        end[partition] = max(offset + 1, end.get(partition, 0))
    return lambda _: pc.field(OFFSET).isin(offsets), start, end


def at_time(moment: datetime) -> Condition:
    """Returns the condition that a record has a given timestamp."""
    return between(epoch_micros(moment), epoch_micros(moment))


def between(low: int, high: int, first: str = TIMESTAMP, last: str = TIMESTAMP) -> Condition:
    """Returns the condition that a record's time, or window, overlaps a span; both ends inclusive.

    Args:
        low, high: the span, epoch microseconds.
        first, last: the columns with the start and end of the record's time.
    """

    def condition(columns: pa.Schema) -> Any:
        ends = zip((last, first), (low, high), strict=True)
        since, until = (
            pa.scalar(moment, pa.int64()).cast(pa.timestamp("us", columns.field(column).type.tz))
            for column, moment in ends
        )
        return (pc.field(last) >= since) & (pc.field(first) <= until)

    return condition


# Explain request


S = TypeVar("S", covariant=True)
"""The specification of an operator."""


@dataclass(frozen=True)
class Derivation:
    """The inputs of a record.

    Args:
        parts: input records with their logs, in order of arrival; only the newest if there are many.
        count: the number of all input records; None = ``parts`` has all.
        candidates: other records, with the rule that selected or excluded each, see ``Explanation``.
        candidates_in_all: the number of all candidates.
    """

    parts: Sequence[tuple[Log, Record]] = ()
    count: int | None = None
    candidates: Sequence[Candidate] = ()
    candidates_in_all: int = 0


@dataclass(frozen=True)
class ExplainRequest(Generic[S]):
    """A record of an operator's result, to find its inputs.

    Args:
        log: the result's log.
        record: the record.
        commit: the commit that wrote the record.
        reasoning: collects the rules that decided.
        inputs: the logs of the operator's inputs, by their names in commits.
        most: maximum number of inputs, and of candidates.
    """

    log: Log
    record: Record
    commit: Commit
    reasoning: Reasoning
    inputs: Mapping[str, Log]
    most: int

    @property
    def specification(self) -> S:
        """The specification of the operator, with the current names of columns."""
        return cast(S, self.log.specification)

    @property
    def of_run(self) -> S:
        """The specification as of the record's run, with the options at that time."""
        return cast(S, self.commit.shape.specification)

    @property
    def decide(self) -> Callable[[Any, str], None]:
        """Adds a rule that decided, see :class:`Reasoning`."""
        return self.reasoning.decide

    @property
    def note(self) -> Callable[[str], None]:
        """Adds a further fact, see :class:`Reasoning`."""
        return self.reasoning.note

    @property
    def source(self) -> Log:
        """The log of the only input."""
        (found,) = self.inputs.values()
        return found

    @cached_property
    def before(self) -> Commit | None:
        """The commit before the record's; None = the record is from the first commit."""
        return self.log.before(self.commit)

    def start(self, name: str) -> Offsets:
        """Returns the run's start offsets in an input (inclusive)."""
        return {} if self.before is None else self.before.inputs.get(name, {})

    def end(self, name: str) -> Offsets:
        """Returns the run's end offsets in an input (exclusive)."""
        return self.commit.inputs.get(name, {})

    def here(self, offsets: Offsets) -> Offsets:
        """Returns the offset of the record's partition alone; 0 if there is none."""
        return {self.record.partition: offsets.get(self.record.partition, 0)}

    def same_key(self, log: Log) -> Condition:
        """Returns the condition that a record of an input has the key of the explained one."""
        return log.same_key(self.record.values, self.log.key)

    def is_new(self, name: str, record: Record) -> bool:
        """Returns whether this run consumed a record of an input, not an earlier or later run."""
        return self.turn(name, record) == 1

    def turn(self, name: str, record: Record) -> int:
        """Returns which run consumed a record of an input: 0 = an earlier run, 1 = this run, 2 = a
        later run, or none yet."""
        place = record.partition
        if record.offset < self.start(name).get(place, 0):
            return 0
        return 1 if record.offset < self.end(name).get(place, 0) else 2

    def misses(self, name: str, since: int | None = None, here: bool = False) -> bool:
        """Returns whether truncation removed records of an input that the run consumed, or rows that a
        table had then, and notes that: which of them made a result is then not known.

        Args:
            since: only records of this time or later matter, epoch microseconds; None = all.
            here: only records of the result's partition matter.
        """
        log, start = self.inputs[name], self.start(name)
        ranges = {p: (start.get(p, 0), end) for p, end in self.end(name).items()}
        if log.head.shape.kind == "stream":
            return self._note_gone(name, "that its run consumed ", ranges, since, here)
        # A row that was replaced before the truncation is gone too.
        ranges = {p: (first, max(end, log.head.kept_from(p))) for p, (first, end) in ranges.items()}
        return self._note_gone(name, "as of its run ", ranges, since, here)

    def misses_any(self, since: int | None = None, here: bool = False) -> bool:
        """Returns whether :meth:`misses` is true for an input."""
        gone = [self.misses(name, since, here) for name in self.inputs]
        return any(gone)

    def misses_earlier(self, name: str, since: int | None = None, here: bool = False) -> bool:
        """Returns whether truncation removed records of an input that earlier runs consumed, and notes
        that, see :meth:`misses`."""
        ranges = {p: (0, end) for p, end in self.start(name).items()}
        return self._note_gone(name, "that earlier runs consumed ", ranges, since, here)

    def misses_erased(self, name: str) -> bool:
        """Returns whether an erase removed records of an input that the run consumed, and notes that.
        Only a group by another key than the input's may lack some of its records."""
        log, start = self.inputs[name], self.start(name)
        first, ends = dict[int, int](), dict[int, int]()
        for p, end in self.end(name).items():
            since = max(start.get(p, 0), log.head.kept_from(p))
            if log.head.erased.get(p) and since < min(end, log.head.erased_before.get(p, 0)):
                first[p], ends[p] = since, end
        if not ends:
            return False
        there = log.rows(both(), first, ends, []).num_rows
        if there == sum(end - first[p] for p, end in ends.items()):
            return False
        self.note(
            f"records of {name} that its run consumed were erased: which one triggered it is not known"
        )
        return True

    def misses_earlier_erased(self, name: str) -> bool:
        """Returns whether an erase may have removed records of an input that earlier runs consumed."""
        head, start = self.inputs[name].head, self.start(name)
        return any(count and start.get(p, 0) > head.kept_from(p) for p, count in head.erased.items())

    def _note_gone(
        self,
        name: str,
        which: str,
        ranges: Mapping[int, tuple[int, int]],
        since: int | None,
        here: bool,
    ) -> bool:
        log, place = self.inputs[name], self.record.partition
        if here:
            ranges = {p: r for p, r in ranges.items() if p == place}
        if not log.truncated(ranges, since):
            return False
        told = f"records of {name} {which}are gone{log.limit}"
        if told not in self.reasoning.notes:
            self.note(told)
        return True

    @property
    def first_result(self) -> int:
        """The offset from which on the record's partition has the results of the run."""
        return 0 if self.before is None else self.before.next_offset.get(self.record.partition, 0)

    @property
    def misses_results(self) -> bool:
        """Whether results of the run are gone: of a key in a table, only the last one may be left."""
        return self.log.head.kept_from(self.record.partition) > self.first_result

    def results(self, at: bool = False, every: bool = False) -> list[Record]:
        """Returns the run's results of the record's key and partition, in order.

        Args:
            at: only results with the record's timestamp.
            every: also results of earlier runs.
        """
        first = {} if every or self.before is None else self.before.next_offset
        same = both(self.same_key(self.log), at_time(self.record.timestamp) if at else None)
        return self.log.records(same, self.here(first), self.here(self.commit.next_offset))

    @cached_property
    def run_results(self) -> list[Record]:
        """All results of the run of the record's key and partition, in order."""
        return self.results()

    @cached_property
    def newest_before(self) -> int | None:
        """The largest timestamp of the key's results before the run, epoch microseconds; None = there
        are none."""
        if self.before is None:
            return None
        end = self.here(self.before.next_offset)
        rows = self.log.rows(self.same_key(self.log), end=end, only=[TIMESTAMP])
        return int(micros(rows, TIMESTAMP).max()) if rows.num_rows else None


@dataclass(frozen=True)
class Update:
    """The result of one input record in a run.

    Args:
        log: the log of the trigger.
        trigger: the input record.
        time: the result's timestamp, epoch microseconds.
        other: joins only: the other side's row; None = no match.
        made_of: the inputs besides the trigger.
    """

    log: Log
    trigger: Record
    time: int
    is_tombstone: bool
    other: Record | None
    made_of: Sequence[tuple[Log, Record]]


def triggering_update(request: ExplainRequest[Any], times: Sequence[tuple[int, bool]]) -> int | None:
    """Returns the index of the update that became the record; None = it is ambiguous.

    Each update of a key is a result, with two exceptions: a versioned table refuses updates older than
    its retention, and with ``emit="per_run"`` only the last update of a run is a result.

    Args:
        times: the run's updates of the key in the record's partition, in order: timestamp (epoch
            microseconds) and whether it is a tombstone.
    """
    results = request.run_results
    place = [one.offset for one in results].index(request.record.offset)
    if len(results) == len(times):
        return place
    if len(results) > len(times):
        request.note("input records of its run are gone: the one that triggered it is not known")
        return None
    if request.misses_results:
        request.note(f"other results of its run are gone{request.log.limit}")
    elif not request.log.versioned:
        request.note(f"its run had {len(times)} updates of its key; only the last one is a result")
    if not request.log.versioned:
        return len(times) - 1 if len(results) == 1 else None
    if request.misses_results:
        return None
    found, rest = -1, enumerate(times)
    for one in results[: place + 1]:
        dead, last = one.is_tombstone, one.micros
        found = next((i for i, (time, is_dead) in rest if is_dead == dead and time <= last), None)
        if found is None:
            return None
    return found


class Arrivals:
    """The order in which a run consumes the records of its inputs, see ``Processor.in_order``.

    Args:
        names: the names of the inputs, from left to right; a name may be there twice.
        merges: whether a run merges partitions by time; else each partition keeps its offset order.
    """

    def __init__(self, request: ExplainRequest[Any], names: Sequence[str], merges: bool = True) -> None:
        self._request, self._names, self._merges = request, names, merges
        self._times: dict[tuple[str, int], tuple[Any, Any]] = {}

    def sorted(self, found: Sequence[tuple[int, Record]]) -> list[tuple[int, Record]]:
        """Returns records, each with the index of its input, in the order in which they were consumed.

        Records of earlier runs come first and those of later runs last; both are ordered by system
        time, and within a partition by offset.
        """
        runs: tuple[list[tuple[int, Record]], ...] = ([], [], [])
        for place, record in found:
            runs[self._request.turn(self._names[place], record)].append((place, record))
        earlier, new, later = runs
        alone = len({(self._names[place], record.partition) for place, record in new}) < 2
        new.sort(key=lambda one: (one[1].offset, one[0]) if alone else self._order(*one))
        for some in (earlier, later):
            some.sort(key=lambda one: (_recorded(one[1]), one[1].offset, one[0], one[1].partition))
        return [*earlier, *new, *later]

    def _order(self, place: int, record: Record) -> tuple[int, ...]:
        names = self._names
        name = names[place]
        twice = names.count(name) > 1
        sequence = record.offset * len(names) + place if twice else record.offset
        moment = self._stream_time(name, record) if self._merges else record.offset
        return moment, names.index(name), record.partition, sequence

    def _stream_time(self, name: str, record: Record) -> int:
        """Returns stream time as of a record: the largest timestamp of its partition, from the run's
        start offset up to the record."""
        key = name, record.partition
        if key not in self._times:
            place = record.partition
            start = {place: self._request.start(name).get(place, 0)}
            end = {place: self._request.end(name).get(place, 0)}
            rows = self._request.inputs[name].rows(both(), start, end, [TIMESTAMP])
            newest = np.maximum.accumulate(micros(rows, TIMESTAMP))
            self._times[key] = rows.column(OFFSET).to_numpy(), newest
        offsets, newest = self._times[key]
        return int(newest[np.searchsorted(offsets, record.offset)])


def _recorded(record: Record) -> int:
    return 0 if record.recorded_at is None else epoch_micros(record.recorded_at)
