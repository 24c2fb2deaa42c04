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

_KIND, _TIME, _FLOOR, _FIRST, _END = "_kind", "_time", "_floor", "_first", "_end"
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

    Plan: one shuffle by key, together with the versions, then a sort backwards and a sort forwards; the
    kernel reads the sorted rows.

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
    of_key, in_order = [F.col(f"`{k}`") for k in key], [F.col(f"`{c}`") for c in (_KIND, _AT, *order)]
    by_key = W.partitionBy(*of_key).orderBy(*in_order)
    # Backwards, since Spark computes a frame of all following rows anew for each row: quadratic in the
    # records of a key.
    backwards = W.partitionBy(*of_key).orderBy(*[c.desc() for c in in_order])
    after = backwards.rowsBetween(W.unboundedPreceding, -1)
    floor = F.min(F.when(is_record, F.col(_TIME))).over(after)
    rows = gathered(rows, [f"`{k}`" for k in key]).withColumn(_FLOOR, floor)
    # Versions precede the records of their key, so their floor is the time of its oldest record.
    ends = F.unix_micros(_END)
    met = F.col(_FLOOR).isNotNull() & (ends.isNull() | (ends > F.col(_FLOOR)))
    rows = rows.where(~is_version | met).drop(_END)
    rows = rows.withColumn(_FIRST, F.row_number().over(by_key) == 1)
    rows = rows.sortWithinPartitions(*of_key, *in_order)
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


class _Version(NamedTuple):
    """A version of a key, in terms of row numbers.

    Args:
        row: the row of its own columns.
        source: for each part the row of its value; -1 = null.
        given: the parts that its own records provide; None = all.
    """

    row: int
    source: Sequence[int]
    given: frozenset[int] | None
    deleted: bool


class _Results(NamedTuple):
    """Output rows: of each its record's row, the row and parts of the version that it shows, and its
    number among the rows of that record. Lists, since a key may have a million of them."""

    record: list[int]
    row: list[int]
    source: list[Sequence[int]]
    given: list[frozenset[int] | None]
    carried: list[int]

    @classmethod
    def none(cls) -> _Results:
        return cls([], [], [], [], [])

    def add(self, record: int, version: _Version, carried: int) -> None:
        self.record.append(record)
        self.row.append(version.row)
        self.source.append(version.source)
        self.given.append(version.given)
        self.carried.append(carried)


class _Key:
    """The versions of one key that a later record may read, by time."""

    def __init__(self, columns: Sequence[Any]) -> None:
        self.columns = columns
        self.times: list[int] = []
        self.found: list[_Version] = []

    def put(self, at: int, version: _Version) -> int:
        """Stores a version, replaces one of the same time, and returns its index."""
        if not self.times or at > self.times[-1]:
            self.times.append(at)
            self.found.append(version)
            return len(self.times) - 1
        place = bisect_left(self.times, at)
        same = self.times[place] == at
        self.times[place : place + same] = [at]
        self.found[place : place + same] = [version]
        return place

    def take(self, at: int, record: _Version, results: _Results) -> None:
        """Applies one record; its whole row and the later versions that it changes are results."""
        row, provided = record.row, record.given
        if provided is not None:
            before = len(self.times) - 1
            if before >= 0 and self.times[before] > at:
                before = bisect_right(self.times, at) - 1
            base = self.found[before] if before >= 0 else None
            kept = [-1] * len(self.columns) if base is None or base.deleted else [*base.source]
            for part in provided:
                kept[part] = row
            given = provided
            if base is not None and self.times[before] == at:
                given = None if base.given is None else provided | base.given
            record = _Version(row, kept, given, record.deleted)
        place = self.put(at, record)
        results.add(row, record, 0)
        if place < len(self.found) - 1:
            self._propagate(place, record, provided, results)

    def _propagate(
        self, place: int, record: _Version, provided: frozenset[int] | None, results: _Results
    ) -> None:
        values = [-1] * len(self.columns) if record.deleted else record.source
        left = set(range(len(self.columns))) if provided is None else set(provided)
        for number, later in enumerate(self.found[place + 1 :], 1):
            if later.given is None:
                # A whole row provides every column, so no value passes it.
                break
            left -= later.given
            # An equal value here is equal in all later versions that inherit it.
            left -= {c for c in left if self._same(c, later.source[c], values[c])}
            if not left:
                break
            source = [values[c] if c in left else s for c, s in enumerate(later.source)]
            self.found[place + number] = changed = later._replace(source=source)
            results.add(record.row, changed, number)

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
        self._sets: tuple[list[frozenset[int] | None], Any] | None = None

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

    def _given(self) -> tuple[list[frozenset[int] | None], Any]:
        """Returns the distinct sets of parts that rows provide (None = all), and that of each row."""
        if self._sets is None:
            sets, numbers = np.unique(self.provided, axis=0, return_inverse=True)
            given = [None if one.all() else frozenset(np.flatnonzero(one).tolist()) for one in sets]
            self._sets = given, numbers.ravel()
        return self._sets

    def versions(self, rows: Any, sources: Any) -> Iterator[tuple[int, _Version]]:
        """Returns rows as versions, each with its time."""
        given, numbers = self._given()
        of_rows = map(given.__getitem__, numbers[rows].tolist())
        versions = map(_Version, rows.tolist(), sources.tolist(), of_rows, self.deleted[rows].tolist())
        return zip(self.times[rows].tolist(), versions, strict=True)

    def passed(self, quick: Any, sources: Any, names: Sequence[str]) -> Any:
        """Returns the completed records of keys in order, and the rows that are passed through."""
        others, records = np.flatnonzero(self.kinds == _OTHER), self.kinds[quick] == _RECORD
        rows = np.concatenate([others, quick[records]])
        as_they_are = np.repeat(others[:, None], len(self.whose.parts), 1)
        source = np.concatenate([as_they_are, sources[records]])
        given = self.rows.column(PROVIDED_COLUMNS).take(pa.array(rows))
        return self._rows(rows, rows, source, given, np.zeros(len(rows), np.int32), names)

    def made(self, results: _Results, names: Sequence[str]) -> Any:
        """Returns results as rows."""
        parts, many = self.whose.parts, len(results.row)
        numbers = {one: number for number, one in enumerate(dict.fromkeys(results.given))}
        sets = [None if one is None else [parts[c] for c in sorted(one)] for one in numbers]
        given = pa.array(sets, self.rows.schema.field(PROVIDED_COLUMNS).type)
        return self._rows(
            np.array(results.record, np.int64),
            np.array(results.row, np.int64),
            np.array(results.source, np.int64).reshape(many, len(parts)),
            given.take(pa.array(list(map(numbers.__getitem__, results.given)), pa.int64())),
            np.array(results.carried, np.int32),
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
        results = _Results.none()
        for version in kept.found:
            results.add(version.row, version, 0)
        rows = self.made(results, self.rows.schema.names)
        for name, value in ((_KIND, _VERSION), (_FIRST, False)):
            place = rows.schema.get_field_index(name)
            same = pa.array([value] * len(kept.found), rows.schema.field(name).type)
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
    kept, results = _Key(columns), _Results.none()
    # Only keys with a record out of order go through Python, record by record; numpy completes the
    # others.
    active = batch.group[batch.active]
    for number in slow:
        kept = _Key(columns)
        low, high = np.searchsorted(active, [number, number + 1])
        rows = batch.active[low:high]
        versions = batch.versions(rows, np.repeat(rows[:, None], len(parts), 1))
        for kind, (at, version) in zip(batch.kinds[rows].tolist(), versions, strict=True):
            if kind == _VERSION:
                kept.put(at, version)
            else:
                kept.take(at, version, results)
            if len(results.row) >= _MANY:
                yield from batch.made(results, names).to_batches()
                results = _Results.none()
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
