"""Partial updates: a column that a record omits keeps the value that it had at the record's time.

A log contains whole rows: each record with the values of its row known at that point. A late record
changes the later versions that inherited a value from before them. The log repeats each of these
versions directly after the record, with ``propagated_from`` > 0, so a consumer or a fold of the log
needs no rule for partial updates. ``provided_columns`` lists the columns that the records of a row
provide (null = all), and thus how far the values of a late record propagate. A deletion sets all
columns to null.

The base of a record depends on the effect of all earlier records on its key's versions. For a key whose
records arrive in order this is one running maximum per column. Otherwise a Python kernel over row
numbers computes it, and only Arrow moves the values; the kernel holds the versions of one key
that a later record of the run may read, however many records or batches a key has.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy
import pyarrow  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.compute  # pyright: ignore[reportMissingTypeStubs]
from pyspark import cloudpickle
from pyspark.sql import DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, StructField, StructType

from vt_dagster.columns import (
    IS_TOMBSTONE,
    OUTCOME,
    PROPAGATED_FROM,
    PROVIDED_COLUMNS,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core.arrival_order import Outcome, gathered, union

np: Any = numpy
pa: Any = pyarrow
pc: Any = pyarrow.compute

# Pickle by value: Spark's workers need not have this package installed.
cast(Any, cloudpickle).register_pickle_by_value(sys.modules[__name__])

_KIND, _TIME, _FLOOR, _FIRST, _SINCE, _END = "_kind", "_time", "_floor", "_first", "_since", "_end"
_AT = "_at"
_HELPERS = (_KIND, _TIME, _AT, _FLOOR, _FIRST)
_VERSION, _RECORD, _OTHER = 0, 1, 2
_MANY = 10_000
"""Number of rows in one output table."""


def merge_forward(
    records: DataFrame,
    versions: DataFrame | None,
    *,
    key: Sequence[str],
    values: Sequence[str],
    parts: Mapping[str, Sequence[str]],
    order: Sequence[str],
) -> DataFrame:
    """Completes partial records to whole rows, and adds after each record the versions that it changes.

    Plan: one shuffle and sort by key, together with the versions; the kernel reads the sorted rows.

    Args:
        records: with their outcome; those that are not applied are passed through.
            ``provided_columns``: an array of names among ``parts``; null = all of them.
        versions: those that end after the oldest record of their key; None = none.
        values: the value columns; ``parts``: those that a record may omit, each with its earlier names,
            which ``provided_columns`` of versions may contain.
        order: the columns that define the order of a key's records.

    Returns:
        the records with ``propagated_from`` (INT, 0), and for each version that a record changes a row
        with the version's time and values and the record's position, with ``propagated_from`` = 1, 2, …
        by time.
    """
    kind = F.when(F.col(OUTCOME) == Outcome.APPLIED, _RECORD).otherwise(_OTHER)
    rows = records.withColumns({_KIND: kind, _END: F.lit(None).cast("timestamp")})
    if versions is not None:
        kept = [F.col(f"`{c}`") for c in (*key, *values, IS_TOMBSTONE, PROVIDED_COLUMNS)]
        times = [F.col(VALID_FROM).alias(TIMESTAMP), F.col(VALID_TO).alias(_END)]
        there = versions.select(*kept, *times).withColumn(_KIND, F.lit(_VERSION))
        rows = union(rows, there)
    is_record, is_version = F.col(_KIND) == _RECORD, F.col(_KIND) == _VERSION
    time = F.unix_micros(TIMESTAMP)
    # Columns, not expressions: otherwise each window would sort again.
    rows = rows.withColumns({_TIME: time, _AT: F.when(is_version, time)})
    in_order = [*[F.col(f"`{k}`") for k in key], _KIND, _AT, *order]
    by_key = W.partitionBy(*[F.col(f"`{k}`") for k in key]).orderBy(*in_order[len(key) :])
    whole = by_key.rowsBetween(W.unboundedPreceding, W.unboundedFollowing)
    record_time = F.when(is_record, F.col(_TIME))
    rows = gathered(rows, [f"`{k}`" for k in key]).withColumn(_SINCE, F.min(record_time).over(whole))
    met = F.unix_micros(_END).isNull() | (F.unix_micros(_END) > F.col(_SINCE))
    rows = rows.where(~is_version | (F.col(_SINCE).isNotNull() & met)).drop(_SINCE, _END)
    after = by_key.rowsBetween(1, W.unboundedFollowing)
    rows = rows.withColumns(
        {_FLOOR: F.min(record_time).over(after), _FIRST: F.row_number().over(by_key) == 1}
    )
    rows = rows.sortWithinPartitions(*in_order)
    fields = [f for f in rows.schema.fields if f.name not in _HELPERS]
    schema = StructType([*fields, StructField(PROPAGATED_FROM, IntegerType())])
    numbers = {name: n for n, (now, before) in enumerate(parts.items()) for name in (now, *before)}
    whose = _Columns(tuple(parts), numbers, tuple(c for c in values if c not in parts))

    def kernel(batches: Iterator[Any]) -> Iterator[Any]:
        return _merge_batches(batches, whose, schema.names)

    return cast(Any, rows).mapInArrow(kernel, schema)


class _Columns(NamedTuple):
    """The value columns: those that a record may omit (``parts``), the numbers of all their names, and
    those that belong to each version alone (``own``)."""

    parts: tuple[str, ...]
    numbers: Mapping[str, int]
    own: tuple[str, ...]


@dataclass
class _Version:
    """A version of a key, in terms of row numbers.

    Args:
        row: the row of its own columns.
        source: for each part the row of its value; -1 = null.
        given: the parts that its own records provide; None = all.
    """

    row: int
    source: list[int]
    given: frozenset[int] | None
    deleted: bool


class _Result(NamedTuple):
    """An output row: its record's row, the row and parts of the version that it shows, and its number
    among the rows of that record."""

    record: int
    row: int
    source: Sequence[int]
    given: frozenset[int] | None
    carried: int


class _Key:
    """The versions of one key that a later record may read, by time."""

    def __init__(self, columns: Sequence[Any]) -> None:
        self.columns = columns
        self.times: list[int] = []
        self.found: list[_Version] = []

    def put(self, at: int, version: _Version) -> int:
        """Stores a version, replaces one of the same time, and returns its index."""
        place = bisect_left(self.times, at)
        same = place < len(self.times) and self.times[place] == at
        self.times[place : place + same] = [at]
        self.found[place : place + same] = [version]
        return place

    def take(self, at: int, record: _Version) -> list[_Result]:
        """Applies one record; returns its whole row and the later versions that it changes."""
        row, provided, parts = record.row, record.given, range(len(self.columns))
        before = bisect_right(self.times, at) - 1
        base = self.found[before] if before >= 0 else None
        if provided is not None:
            kept = [-1] * len(parts) if base is None or base.deleted else base.source
            record.source = [row if c in provided else kept[c] for c in parts]
            if base is not None and self.times[before] == at:
                record.given = None if base.given is None else provided | base.given
        place = self.put(at, record)
        done = [_Result(row, row, record.source, record.given, 0)]
        values = [-1] * len(parts) if record.deleted else record.source
        left = set(parts) if provided is None else set(provided)
        for later in self.found[place + 1 :]:
            if later.given is None:
                # A whole row provides every column, so no value passes it.
                break
            left -= later.given
            # An equal value here is equal in all later versions that inherit it.
            left -= {c for c in left if self._same(c, later.source[c], values[c])}
            if not left:
                break
            later.source = [values[c] if c in left else s for c, s in enumerate(later.source)]
            done.append(_Result(row, later.row, later.source, later.given, len(done)))
        return done

    def without_before(self, floor: int) -> _Key:
        """Keeps the versions that a record of this time or later may read."""
        kept, old = _Key(self.columns), max(0, bisect_right(self.times, floor) - 1)
        kept.times, kept.found = self.times[old:], self.found[old:]
        return kept

    def _same(self, part: int, one: int, other: int) -> bool:
        if one == other or -1 in (one, other):
            return one == other or not self.columns[part][max(one, other)].is_valid
        return self.columns[part][one].equals(self.columns[part][other])


class _Batch:
    """Rows sorted by key, in terms of row numbers.

    Args:
        rows: the input rows of the kernel, see :func:`merge_forward`.
    """

    def __init__(self, rows: Any, whose: _Columns) -> None:
        self.rows, self.whose = rows, whose
        self.kinds = rows.column(_KIND).to_numpy()
        self.times = rows.column(_TIME).fill_null(0).to_numpy()
        self.deleted = rows.column(IS_TOMBSTONE).to_numpy()
        first = rows.column(_FIRST).to_numpy()
        self.group = np.cumsum(np.append(True, first[1:]))
        self.provided = self._provided()
        self.active = np.flatnonzero(self.kinds != _OTHER)

    def _provided(self) -> Any:
        """Returns a matrix, rows by parts: whether a row provides a part."""
        given = self.rows.column(PROVIDED_COLUMNS).combine_chunks()
        found = np.zeros((len(given), len(self.whose.parts)), bool)
        found[given.is_null().to_numpy(zero_copy_only=False)] = True
        numbers = self.whose.numbers
        parents = pc.list_parent_indices(given).to_numpy()
        names = given.flatten().to_pylist()
        for row, name in zip(parents.tolist(), names, strict=True):
            if name in numbers:
                found[row, numbers[name]] = True
        return found

    def out_of_order(self) -> Any:
        """Returns the keys with a row that is not later than its predecessor."""
        group, times = self.group[self.active], self.times[self.active]
        return np.unique(group[1:][(group[1:] == group[:-1]) & (times[1:] <= times[:-1])])

    def in_order(self, rows: Any) -> Any:
        """For keys in order: returns for each part the last row that provides its value."""
        place, (group, deleted) = np.arange(len(rows)), (a[rows] for a in (self.group, self.deleted))
        begins = np.append(True, group[1:] != group[:-1])[: len(rows)]
        gives = self.provided[rows] | (self.kinds[rows] == _VERSION)[:, None]
        stops = gives | (begins | deleted)[:, None]
        last = np.maximum.accumulate(np.where(stops, place[:, None], 0))
        there = np.take_along_axis(gives, last, 0) & ~(deleted[last] & (last != place[:, None]))
        return np.where(there, rows[last], -1)

    def versions(self, rows: Any, sources: Any) -> list[tuple[int, _Version]]:
        """Returns rows as versions, each with its time."""
        sets, kinds = np.unique(self.provided[rows], axis=0, return_inverse=True)
        given: list[frozenset[int] | None] = [
            None if one.all() else frozenset(np.flatnonzero(one).tolist()) for one in sets
        ]
        sources_of_cells = zip(rows.tolist(), sources.tolist(), kinds.ravel().tolist(), strict=True)
        versions = [
            _Version(r, s, given[int(k)], d)
            for (r, s, k), d in zip(sources_of_cells, self.deleted[rows].tolist(), strict=True)
        ]
        return list(zip(self.times[rows].tolist(), versions, strict=True))

    def passed(self, quick: Any, sources: Any, names: Sequence[str]) -> Any:
        """Returns the completed records of keys in order, and the rows that are passed through."""
        others, records = np.flatnonzero(self.kinds == _OTHER), self.kinds[quick] == _RECORD
        rows = np.concatenate([others, quick[records]])
        as_they_are = np.repeat(others[:, None], len(self.whose.parts), 1)
        source = np.concatenate([as_they_are, sources[records]])
        given = self.rows.column(PROVIDED_COLUMNS).take(pa.array(rows))
        return self._rows(rows, rows, source, given, np.zeros(len(rows), np.int32), names)

    def made(self, results: Sequence[_Result], names: Sequence[str]) -> Any:
        """Returns results as rows."""
        parts = self.whose.parts
        found = {r.given for r in results}
        named = {one: None if one is None else [parts[c] for c in sorted(one)] for one in found}
        given = [named[r.given] for r in results]
        sources = np.array([r.source for r in results], np.int64)
        return self._rows(
            np.array([r.record for r in results], np.int64),
            np.array([r.row for r in results], np.int64),
            sources.reshape(len(results), len(parts)),
            pa.array(given, self.rows.schema.field(PROVIDED_COLUMNS).type),
            np.array([r.carried for r in results], np.int32),
            names,
        )

    def _rows(
        self, record: Any, version: Any, source: Any, given: Any, carried: Any, names: Sequence[str]
    ) -> Any:
        """Builds rows from the record's row, the version's row and the rows of the parts."""
        own = {*self.whose.own, TIMESTAMP, _TIME, IS_TOMBSTONE}
        made = {PROVIDED_COLUMNS: given, PROPAGATED_FROM: pa.array(carried)}
        for place, part in enumerate(self.whose.parts):
            rows = source[:, place]
            made[part] = self.rows.column(part).take(pa.array(rows, mask=rows < 0))
        columns = [
            made[name]
            if name in made
            else self.rows.column(name).take(pa.array(version if name in own else record))
            for name in names
        ]
        return pa.table(columns, names=list(names))

    def left(self, kept: _Key) -> Any:
        """Returns a key's versions as rows that precede the next batch."""
        results = [_Result(one.row, one.row, one.source, one.given, 0) for one in kept.found]
        rows = self.made(results, self.rows.schema.names)
        for name, value in ((_KIND, _VERSION), (_FIRST, False)):
            place = rows.schema.get_field_index(name)
            same = pa.array([value] * len(results), rows.schema.field(name).type)
            rows = rows.set_column(place, name, same)
        return pa.Table.from_arrays(rows.columns, schema=self.rows.schema)


def _merge_batches(batches: Iterator[Any], whose: _Columns, names: Sequence[str]) -> Iterator[Any]:
    left: list[Any] = []
    for some in batches:
        if some.num_rows:
            rows = pa.concat_tables([*left, pa.Table.from_batches([some])])
            left = yield from _merge_batch(_Batch(rows.combine_chunks(), whose), names)


def _merge_batch(batch: _Batch, names: Sequence[str]) -> Generator[Any, None, list[Any]]:
    """Yields the rows of a batch; returns the versions of its last key that the next batch needs."""
    slow, parts = batch.out_of_order(), batch.whose.parts
    quick = batch.active[~np.isin(batch.group[batch.active], slow)]
    sources = batch.in_order(quick)
    yield from batch.passed(quick, sources, names).to_batches()
    columns = [batch.rows.column(c).combine_chunks() for c in parts]
    kept, results = _Key(columns), list[_Result]()
    # Only keys with a record out of order go through Python, record by record; numpy completes the
    # others.
    for number in slow:
        kept = _Key(columns)
        low, high = np.searchsorted(batch.group[batch.active], [number, number + 1])
        rows = batch.active[low:high]
        for at, version in batch.versions(rows, np.repeat(rows[:, None], len(parts), 1)):
            if batch.kinds[version.row] == _VERSION:
                kept.put(at, version)
            else:
                results += kept.take(at, version)
            if len(results) >= _MANY:
                yield from batch.made(results, names).to_batches()
                results = []
    yield from batch.made(results, names).to_batches()
    floor = batch.rows.column(_FLOOR)[-1].as_py()
    if floor is None:
        return []
    if batch.group[-1] not in slow:
        kept = _Key(columns)
        mine = np.flatnonzero(batch.group[quick] == batch.group[-1])
        mine = mine[max(0, np.searchsorted(batch.times[quick[mine]], floor, "right") - 1) :]
        for at, version in batch.versions(quick[mine], sources[mine]):
            kept.put(at, version)
    return [batch.left(kept.without_before(floor))]
