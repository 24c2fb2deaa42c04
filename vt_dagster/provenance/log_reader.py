"""Reads a few records of an asset's log by key, time and offset; skips files by their statistics."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import cached_property, reduce
from operator import and_
from typing import Any

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
)
from vt_dagster.provenance.explanation import Record, Written
from vt_dagster.storage import delta
from vt_dagster.storage.arrow_reader import (
    asset_names,
    columns_of,
    head_of,
    micros,
    names_of,
    of_key,
    rows_of,
    texts,
    values_by_partition,
)
from vt_dagster.storage.commit_log import (
    Commit,
    Offsets,
    file_at_or_after,
    file_before,
    known_at,
    last_that,
)
from vt_dagster.storage.log_truncation import base_of, base_path

_EPOCH, _MICROSECOND = datetime(1970, 1, 1, tzinfo=timezone.utc), timedelta(microseconds=1)
_OURS = (IS_LATE, IS_LATEST, IS_TOMBSTONE, OFFSET, OLD, PARTITION, RECORDED_AT)
Condition = Callable[[pa.Schema], Any]
Place = tuple[int, int]
"""A partition and an offset of a log."""


def as_time(micros: int) -> datetime:
    """Converts epoch microseconds to a datetime, UTC."""
    return _EPOCH + micros * _MICROSECOND


def as_micros(moment: datetime) -> int:
    """Converts a datetime to epoch microseconds."""
    return (moment - _EPOCH) // _MICROSECOND


@dataclass(frozen=True)
class Log:
    """A log as of one of its commits.

    Args:
        warehouse: the directory or URL of the tables.
        name: the asset's name, with its key prefix.
        version: a Delta version that contains the commit's rows.
        commit: the commit as of which the log is read.
        head: the last commit.
    """

    warehouse: str
    name: str
    version: int
    commit: Commit
    head: Commit

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
        return cls(str(warehouse), name, version, commit, head)

    def input(self, name: str) -> Log | None:
        """Returns the log of an input by its name without key prefix; None = it is not in the
        warehouse, or is not the log that was consumed."""
        beside = posixpath.join(posixpath.dirname(self.name), name)
        others = [one for one in asset_names(self.warehouse) if posixpath.basename(one) == name]
        for place in sorted(others, key=lambda one: one != beside):
            found = Log.open(self.warehouse, place)
            if self.head.logs.get(name, found.head.log) == found.head.log:
                return found
        return None

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
    def meaning(self) -> Mapping[str, str]:
        """The operator and its options, from the last commit; empty for a source."""
        return self.head.shape.meaning

    @property
    def limit(self) -> str:
        """The reason why a record may be missing, as text: the log was truncated; empty if not."""
        return "" if self.head.truncation is None else f": {self.head.truncation.description()}"

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

    @property
    def _without_old(self) -> list[str]:
        """All columns but the replaced row, which is as wide as all others together."""
        return [c for c in self.columns.names if c != OLD]

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
        return self.as_records(self.rows(condition, start, end, self._without_old))

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
        late, early = file_at_or_after(dict(first), ends), file_before(ends)
        wanted: delta.Wanted = lambda file: late(file) and early(file)  # noqa: E731
        columns = None if only is None else (*only, PARTITION, OFFSET)
        rows = rows_of(self.path, self.version, condition, wanted, only=columns, opened=self._table)
        rows = self._with_base(rows, condition)
        offsets = rows.column(OFFSET).to_numpy()
        since, until = values_by_partition(rows, first, 0), values_by_partition(rows, ends, 0)
        keep = (offsets >= since) & (offsets < until)
        return rows.filter(pa.array(keep)).sort_by([(PARTITION, "ascending"), (OFFSET, "ascending")])

    def _with_base(self, rows: pa.Table, condition: Condition) -> pa.Table:
        """Adds the table's rows as of the truncation of its log: each stands for a truncated record."""
        cut = self.head.truncation
        if cut is None or not cut.base:
            return rows
        found = base_of(self.name, self.root, cut)
        like = pa.schema([f for f in rows.schema if f.name not in (OLD, IS_LATEST)])
        base = rows_of(base_path(self.root, cut.base), found.version, condition, like=like)
        base = base.select([c for c in base.column_names if c in like.names])
        return pa.concat_tables([base, rows], promote_options="default")

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
        told = zip(
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
        return [Record(self.name, *one) for one in told]

    def of_key(self, key: Sequence[Any]) -> Condition:
        """Returns the condition that a record has a key; the key's values may be texts."""
        return lambda columns: of_key(self.path, columns, self.key, key)

    def same_key(self, values: Mapping[str, Any], names: Sequence[str] | None = None) -> Condition:
        """Returns the condition that a record has the key of another record.

        Args:
            values: the other record's values.
            names: the names of the key's columns there; None = the same as here.
        """
        given = [values[c] for c in (names or self.key)]

        def condition(columns: pa.Schema) -> Any:
            found: Any = None
            for column, value in zip(self.key, given, strict=True):
                if pa.types.is_nested(columns.field(column).type):
                    continue  # Arrow cannot compare nested values; the caller compares them
                if value is None:
                    nulls = [pc.field(name).is_null() for name in names_of(columns, column)]
                    one = reduce(and_, nulls)
                else:
                    one = of_key(self.path, columns, [column], [value])
                found = one if found is None else found & one
            return found

        return condition

    def one(self, partition: int, offset: int) -> Record | None:
        """Returns the record at an offset; None = there is none."""
        return next(iter(self.at([(partition, offset)])), None)

    def at(self, places: Collection[Place]) -> list[Record]:
        """Returns the existing records at some places, ordered by partition and offset."""
        if not places:
            return []
        offsets = pa.array(sorted({offset for _, offset in places}), pa.int64())
        start, end = dict[int, int](), dict[int, int]()
        for partition, offset in places:
            start[partition] = min(offset, start.get(partition, offset))
            end[partition] = max(offset + 1, end.get(partition, 0))
        found = self.records(lambda _: pc.field(OFFSET).isin(offsets), start, end)
        return [one for one in found if one.place in places]

    # -- commits -----------------------------------------------------------------------------------

    def commit_of(self, record: Record) -> Commit | None:
        """Returns the commit that wrote a record; None = the commit is gone."""
        place = str(record.partition)

        def before(commit: Mapping[str, Any]) -> bool:
            return commit.get("next_offset", {}).get(place, 0) <= record.offset

        return self._after(before)

    def taken_by(self, name: str, partition: int, offset: int) -> Commit | None:
        """Returns the commit that consumed a record of an input; None = not consumed yet."""
        place = str(partition)

        def before(commit: Mapping[str, Any]) -> bool:
            return commit.get("inputs", {}).get(name, {}).get(place, 0) <= offset

        if self.head.inputs.get(name, {}).get(partition, 0) <= offset:
            return None
        return self._after(before)

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


def written(commit: Commit | None) -> Written | None:
    """Returns a commit as a value of an explanation."""
    if commit is None:
        return None
    return Written(commit.batch, commit.run_id, as_time(commit.recorded_at))


def both(*conditions: Condition | None) -> Condition:
    """Returns the conjunction of conditions."""

    def condition(columns: pa.Schema) -> Any:
        found: Any = None
        for one in conditions:
            told = None if one is None else one(columns)
            if told is not None:
                found = told if found is None else found & told
        return found

    return condition


def at_time(moment: datetime) -> Condition:
    """Returns the condition that a record has a given timestamp."""

    return between(as_micros(moment), as_micros(moment))


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
