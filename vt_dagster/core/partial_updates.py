"""Partial updates: a column that a record omits keeps the value that it had at the record's time.

A log contains whole rows: each record with the values of its row known at that point. A late record
changes the later versions that inherited a value from before them. The log repeats each of these
versions directly after the record, with ``propagated_from`` > 0, so a consumer or a fold of the log
needs no rule for partial updates. ``provided_columns`` lists the columns that the records of a row
provide (null = all), and thus how far the values of a late record propagate. A deletion sets all
columns to null.

The base of a record depends on the effect of all earlier records on its key's versions: of each column,
the last row in the order of time that provides it, of those that arrived before. A kernel over row
numbers finds it for a batch of rows at once: by running maxima for records in order, and by a tree of
minima of arrival for late ones. Only Arrow moves the values. The kernel holds the versions of one key
that a later record of the run may read, however many records or batches a key has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy
import pyarrow  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.compute  # pyright: ignore[reportMissingTypeStubs]
from pyspark import cloudpickle
from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, MapType, StructField, StructType

from vt_dagster.columns import (
    IS_TOMBSTONE,
    OUTCOME,
    PROPAGATED_FROM,
    PROVIDED_COLUMNS,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core.arrival_order import Outcome, repartitioned, union, with_columns

np: Any = numpy
pa: Any = pyarrow
pc: Any = pyarrow.compute

# Pickle by value: Spark's workers need not have this package installed.
cast(Any, cloudpickle).register_pickle_by_value(sys.modules[__name__])

_KIND, _TIME, _FLOOR, _AT, _END = "_kind", "_time", "_floor", "_at", "_end"
_HELPERS = (_KIND, _TIME, _FLOOR)
_HELD, _WON = "_held", "_won"
_VERSION, _RECORD, _OTHER = 0, 1, 2
_MANY = 10_000
"""Number of rows in one output batch."""
_MOST = 100_000
"""Number of changed versions, of more than one record, that are computed at once."""


def with_always(versions: DataFrame, always: Sequence[str]) -> DataFrame:
    """Adds the columns that each record provides to the ``provided_columns`` of versions. Versions from
    before the table had ``tie_break`` do not list these columns."""
    given = F.array_union(PROVIDED_COLUMNS, F.array(*map(F.lit, always)))
    return versions.withColumn(PROVIDED_COLUMNS, given)


def without_lost_columns(
    records: DataFrame,
    versions: DataFrame | None,
    *,
    key: Sequence[str],
    order: Sequence[str],
    tie_break: str,
    parts: Mapping[str, Sequence[str]],
    ties: StructField,
) -> DataFrame:
    """Keeps only the columns of each record that win against other records of its key and timestamp.

    A record loses a column against an earlier arrival that provides it with a larger value of
    ``tie_break``; with an equal value it wins. A record that loses all columns is ``lost_tie``. So for
    each column, ``tie_break`` never decreases among the accepted records of a key and timestamp. A
    deletion that loses some columns is an update that sets the others to null, since the row exists.

    Plan: as ``versioned_table.without_lost_ties``, with a maximum for each part in the same window.

    Args:
        records: with their outcome and ``provided_columns``; ``versions``: those that may have their
            keys and timestamps; None = none.
        tie_break: one of the parts, which each record provides.
        parts: see :func:`merge_forward`.
        ties: the column ``*_by_column``.

    Returns:
        the records with the columns that they win as ``provided_columns``, and with ``ties`` of the
        version after them.
    """
    kind = cast(MapType, ties.dataType).valueType
    place, value = [*key, TIMESTAMP], F.struct(F.col(f"`{tie_break}`").cast(kind).alias("value"))
    if versions is not None:
        keys = [F.col(f"`{k}`") for k in key]
        held = F.struct(value.alias("largest"), PROVIDED_COLUMNS, F.col(f"`{ties.name}`").alias("ties"))
        there = versions.select(*keys, F.col(VALID_FROM).alias(TIMESTAMP), held.alias(_HELD))
        records = records.join(there, place, "left")
    before = W.partitionBy(*place).orderBy(*order).rowsBetween(W.unboundedPreceding, -1)
    applied = F.col(OUTCOME) == Outcome.APPLIED
    gives, best = dict[str, Column](), dict[str, Column]()
    for part, earlier in parts.items():
        said = F.array_contains(PROVIDED_COLUMNS, part)
        gives[part] = applied & F.coalesce(said, F.lit(True))
        best[part] = F.max(F.when(gives[part], value)).over(before)
        if versions is not None:
            # Of equal values, such as 0.0 and -0.0, the first to arrive, as within a run.
            best[part] = F.greatest(_held_tie((part, *earlier)), best[part])
    # Columns of their own: Spark computes a window once per mention in an expression.
    names = {part: f"_best{n}" for n, part in enumerate(parts)}
    rows = with_columns(records, {names[part]: one for part, one in best.items()}).drop(_HELD)
    wins, after = dict[str, Column](), dict[str, Column]()
    for part, name in names.items():
        wins[part] = gives[part] & F.coalesce(F.col(name) <= value, F.lit(True))
        after[part] = F.greatest(F.col(name), F.when(gives[part], value))
    won = F.array_compact(F.array(*[F.when(won, F.lit(part)) for part, won in wins.items()]))
    smaller = [
        F.when(tie < after[tie_break], F.struct(F.lit(part).alias("key"), tie["value"].alias("value")))
        for part, tie in after.items()
    ]
    entries = F.array_compact(F.array(*smaller))
    rows = rows.withColumns(
        {_WON: won, ties.name: F.when(F.size(entries) > 0, F.map_from_entries(entries))}
    )
    lost = applied & (F.size(_WON) == 0)
    remains = applied & ~lost & F.col(IS_TOMBSTONE) & (F.size(_WON) < len(parts))
    nulls = {part: F.when(remains, None).otherwise(F.col(f"`{part}`")) for part in parts}
    given = F.when(F.size(_WON) < len(parts), F.col(_WON))
    marked = rows.withColumns(
        {
            **nulls,
            IS_TOMBSTONE: F.col(IS_TOMBSTONE) & ~remains,
            PROVIDED_COLUMNS: F.when(applied, given).otherwise(F.col(PROVIDED_COLUMNS)),
            OUTCOME: F.when(lost, Outcome.LOST_TIE).otherwise(F.col(OUTCOME)),
        }
    )
    return marked.drop(_WON, *names.values())


def _held_tie(names: Sequence[str]) -> Column:
    """Returns the value of ``tie_break`` of the record that provides a column of the version in
    ``_held``; null = none does.

    Args:
        names: the names of the column.
    """
    held, ties = F.col(_HELD), F.col(_HELD)["ties"]
    given = F.coalesce(
        F.arrays_overlap(held[PROVIDED_COLUMNS], F.array(*map(F.lit, names))), F.lit(True)
    )
    own = [F.when(F.map_contains_key(ties, n), F.struct(ties[n].alias("value"))) for n in names]
    return F.when(held.isNotNull() & given, F.coalesce(*own, held["largest"]))


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
    # Backwards, since Spark computes a frame of all following rows anew for each row: quadratic in the
    # records of a key.
    backwards = W.partitionBy(*of_key).orderBy(*[c.desc() for c in in_order])
    after = backwards.rowsBetween(W.unboundedPreceding, -1)
    floor = F.min(F.when(is_record, F.col(_TIME))).over(after)
    rows = repartitioned(rows, [f"`{k}`" for k in key]).withColumn(_FLOOR, floor)
    # Versions precede the records of their key, so their floor is the time of its oldest record.
    ends = F.unix_micros(_END)
    met = F.col(_FLOOR).isNotNull() & (ends.isNull() | (ends > F.col(_FLOOR)))
    rows = rows.where(~is_version | met).drop(_END)
    rows = rows.sortWithinPartitions(*of_key, *in_order).drop(_AT)
    fields = [f for f in rows.schema.fields if f.name not in _HELPERS]
    schema = StructType([*fields, StructField(PROPAGATED_FROM, IntegerType())])
    numbers = {name: n for n, (now, before) in enumerate(parts.items()) for name in (now, *before)}
    whose = _Columns(tuple(parts), numbers, tuple(c for c in values if c not in parts))

    def kernel(batches: Iterator[Any]) -> Iterator[Any]:
        return _merge_batches(batches, whose, schema.names)

    return cast(Any, rows).mapInArrow(kernel, schema)


class _Columns(NamedTuple):
    """The value columns: those that a record may omit (``parts``), the part that each of their names
    belongs to, and the columns that each version has alone (``own``)."""

    parts: tuple[str, ...]
    numbers: Mapping[str, int]
    own: tuple[str, ...]


class _Minima:
    """Finds places with a value below a bound by the minima of blocks of 1, 2, 4, … values.

    Args:
        values: smaller than ``none``, which stands for a place that is never found.
    """

    def __init__(self, values: Any, none: int) -> None:
        places = np.arange(len(values))
        self.latest = np.maximum.accumulate(np.where(values < none, places, -1))
        self.levels = [values]
        while len(values) > 1:
            if len(values) % 2:
                self.levels[-1] = values = np.append(values, none)
            values = np.minimum(values[::2], values[1::2])
            self.levels.append(values)

    def last(self, end: Any, bound: Any) -> Any:
        """Returns for each end (exclusive) the last place before it with a value below its bound, or
        -1."""
        found = np.where(end > 0, self.latest[end - 1], -1)
        # Mostly the last value before the end is below the bound.
        which = np.flatnonzero((found >= 0) & (self.levels[0][found] >= bound))
        end, bound = found[which], bound[which]
        found[which] = -1
        rising, at, heights, blocks = (
            np.arange(len(which)),
            end,
            np.zeros_like(end),
            np.full_like(end, -1),
        )
        for height, minima in enumerate(self.levels):
            hit = (at % 2 == 1) & (minima[at - 1] < bound[rising])
            heights[rising[hit]], blocks[rising[hit]] = height, at[hit] - 1
            left = ~hit & (at > 1)
            rising, at = rising[left], at[left] // 2
        for height in range(len(self.levels) - 2, -1, -1):
            falling = np.flatnonzero(heights > height)
            right = 2 * blocks[falling] + 1
            blocks[falling] = right - (self.levels[height][right] >= bound[falling])
        found[which] = blocks
        return found

    def within(self, begin: Any, end: Any, bound: Any) -> Iterator[tuple[Any, Any]]:
        """Yields all places from each begin (inclusive) to its end (exclusive) with a value below its
        bound: the numbers of the ranges and the places, both ascending."""
        yield from self._within(np.arange(len(begin)), begin, end, bound)

    def _within(self, ranges: Any, begin: Any, end: Any, bound: Any) -> Iterator[tuple[Any, Any]]:
        which, blocks = ranges, np.zeros_like(ranges)
        for height in range(len(self.levels) - 1, -1, -1):
            minima, size = self.levels[height], 1 << height
            there = (blocks * size < end[which]) & ((blocks + 1) * size > begin[which])
            there &= minima[np.minimum(blocks, len(minima) - 1)] < bound[which]
            which, blocks = which[there], blocks[there]
            if len(which) > _MOST and len(ranges) > 1:
                for half in np.array_split(ranges, 2):
                    yield from self._within(half, begin, end, bound)
                return
            if height:
                which, blocks = np.repeat(which, 2), np.repeat(2 * blocks, 2)
                blocks[1::2] += 1
        yield which, blocks


class _Part:
    """The rows that provide a part, by place in the order of time."""

    def __init__(self, gives: Any, by_time: Any) -> None:
        none = len(by_time)
        arrived = np.where(gives[by_time], by_time, none)
        self.back, self.forth = _Minima(arrived, none), _Minima(arrived[::-1], none)

    def next(self, begin: Any, bound: Any) -> Any:
        """Returns for each begin (inclusive) the next place of a row that arrived before the bound; the
        number of rows if there is none."""
        many = len(self.back.latest)
        return many - 1 - self.forth.last(many - begin, bound)


def _numpy(column: Any) -> Any:
    return column.to_numpy(zero_copy_only=False)


class _Batch:
    """Rows sorted by key, in terms of their numbers.

    The versions and applied records have a number in the order of key and arrival, and a place in the
    order of key, time and arrival.

    Args:
        rows: the input rows of the kernel, see :func:`merge_forward`.
    """

    def __init__(self, rows: Any, whose: _Columns) -> None:
        self.rows, self.whose = rows, whose
        kinds, floor = _numpy(rows.column(_KIND)), rows.column(_FLOOR)
        self.others, self.active = np.flatnonzero(kinds == _OTHER), np.flatnonzero(kinds != _OTHER)
        self.numbers = np.arange(len(self.active))
        # Only the last record of a key has no floor.
        ends = _numpy(floor.is_null())[self.active]
        self.group = np.cumsum(np.append(False, ends[:-1]))[: len(ends)]
        self.floor = floor[-1].as_py()
        self.is_record = kinds[self.active] == _RECORD
        self.deleted = _numpy(rows.column(IS_TOMBSTONE))[self.active]
        self.gives = self._provided()[self.active] | self.deleted[:, None]
        times = _numpy(rows.column(_TIME).fill_null(0))[self.active]
        self.by_time = np.lexsort((times, self.group))
        self.place = np.empty_like(self.by_time)
        self.place[self.by_time] = self.numbers
        # By place: the time, the first place of its version and of the next key.
        self.times, of_key = times[self.by_time], self.group
        is_first = np.append(True, (of_key[1:] != of_key[:-1]) | (self.times[1:] != self.times[:-1]))
        self.begin = np.maximum.accumulate(np.where(is_first[: len(times)], self.numbers, 0))
        self.end = np.searchsorted(of_key, of_key, "right")
        self.held = self._within(self._latest(~self.is_record), self.numbers)

    def _provided(self) -> Any:
        """Returns a matrix, rows by parts: whether a row provides a part."""
        given = self.rows.column(PROVIDED_COLUMNS)
        found = np.zeros((len(given), len(self.whose.parts)), bool)
        found[_numpy(given.is_null())] = True
        names = given.flatten().dictionary_encode()
        known = [self.whose.numbers.get(name, -1) for name in names.dictionary.to_pylist()]
        parts = np.array(known, np.int64)[_numpy(names.indices)]
        parents = _numpy(pc.list_parent_indices(given))
        found[parents[parts >= 0], parts[parts >= 0]] = True
        return found

    def _latest(self, which: Any) -> Any:
        """Returns for each place the last place up to it that has a row of ``which``; -1 = none."""
        return np.maximum.accumulate(np.where(which[self.by_time], self.numbers, -1))

    def _within(self, found: Any, places: Any) -> Any:
        """Returns the rows at the places ``found``, if they have the key of ``places``; else -1."""
        there = (found >= 0) & (self.group[found] == self.group[places])
        return np.where(there, self.by_time[found], -1)

    def _source(self, found: Any, places: Any) -> Any:
        """Returns the row of a part's value in the versions at these places; -1 = null.

        Args:
            found: the place of the last row up to there that provides the part; -1 = none.
        """
        giver = self._within(found, places)
        # A stored version has all values, also those that it does not provide.
        source = np.where((giver >= 0) & self.is_record[giver], giver, self.held[places])
        return np.where((source >= 0) & self.deleted[source], -1, source)

    def merged(self, names: Sequence[str]) -> Iterator[Any]:
        """Yields the completed records, each with the versions that it changes, and the rows that are
        passed through."""
        records = self.numbers[self.is_record]
        late = records[(self.place < np.maximum.accumulate(self.place))[records]]
        parts = [_Part(gives, self.by_time) for gives in self.gives.T] if len(late) else []
        source = np.empty((len(self.numbers), len(self.whose.parts)), np.int64)
        for number, gives in enumerate(self.gives.T):
            so_far = np.maximum.accumulate(np.where(gives, self.place, -1))
            if len(late):
                so_far[late] = parts[number].back.last(self.place[late] + 1, late + 1)
            source[:, number] = np.where(gives, self.numbers, self._source(so_far, self.place))
        places = self.place[records]
        own = _Versions(records, places, source[records], np.zeros(len(records), np.int32))
        if not len(late):
            yield self._rows(own, self.others, names)
            return
        others = self.others
        for changed in self._changed(late, parts):
            yield self._rows(
                _Versions(*map(np.concatenate, zip(own, changed, strict=True))), others, names
            )
            own, others = _Versions(*[column[:0] for column in own]), others[:0]

    def _changed(self, late: Any, parts: Sequence[_Part]) -> Iterator[_Versions]:
        """Yields the later versions that late records change."""
        everything = _Part(np.ones(len(self.numbers), bool), self.by_time)
        begin = everything.next(self.place[late] + 1, late)
        value = np.where(self.deleted[late], -1, late)
        # By late record and part: the place (exclusive) up to which versions inherit its value: that of
        # the next version that provides the part, or of the next key; 0 = none does.
        ends = np.zeros((len(late), len(parts)), np.int64)
        for number, part in enumerate(parts):
            which = np.flatnonzero(self.gives[late, number])
            first, bound = begin[which], late[which]
            stop = part.next(self.place[bound] + 1, bound)
            none = stop == len(self.numbers)
            end = np.where(none, self.end[first], self.begin[np.where(none, 0, stop)])
            inherited = end > first
            which, first, end, bound = (
                which[inherited],
                first[inherited],
                end[inherited],
                bound[inherited],
            )
            before = self._source(part.back.last(first + 1, bound), first)
            # An equal value here is equal in all later versions that inherit it.
            ends[which, number] = np.where(self._same(number, value[which], before), 0, end)
        changes = np.flatnonzero(ends.any(axis=1))
        late, begin, value, ends = late[changes], begin[changes], value[changes], ends[changes]
        for which, places in everything.back.within(begin, ends.max(axis=1, initial=0), late):
            # A version may have several records: take the last one that arrived before the late record.
            last = np.append((which[1:] != which[:-1]) | (np.diff(self.begin[places]) > 0), True)
            which, places = which[last[: len(which)]], places[last[: len(which)]]
            source = np.empty((len(which), len(parts)), np.int64)
            for number, part in enumerate(parts):
                found = part.back.last(places + 1, late[which])
                kept = self._source(found, places)
                source[:, number] = np.where(places < ends[which, number], value[which], kept)
            carried = np.arange(1, len(which) + 1) - np.searchsorted(which, which)
            yield _Versions(late[which], places, source, carried.astype(np.int32))

    def _same(self, number: int, one: Any, other: Any) -> Any:
        """Returns whether values of a part are equal; -1 = null.

        0.0 and -0.0 are not equal: later records inherit the exact value, in this run and in later
        ones.
        """
        column = self.rows.column(self.whose.parts[number])
        left, right = (column.take(pa.array(self.active[rows], mask=rows < 0)) for rows in (one, other))
        kind = column.type
        try:
            equal = pc.equal(left, right)
            if pa.types.is_floating(kind):
                bits = f"int{kind.bit_width}"
                equal = pc.and_(equal, pc.equal(left.view(bits), right.view(bits)))
            equal = equal.fill_null(False)
        except pa.ArrowNotImplementedError:
            # Arrow cannot compare lists, maps and structs.
            signed = "double" in str(kind) or "float" in str(kind)
            equal = pa.array(
                [
                    a.equals(b) and (not signed or str(a) == str(b))
                    for a, b in zip(left, right, strict=True)
                ],
                pa.bool_(),
            )
        both = pc.and_(left.is_null(), right.is_null())
        return _numpy(pc.or_(equal, both))

    def left(self) -> list[Any]:
        """Returns the last key's versions that a later record may read, as rows that precede the next
        batch."""
        if self.floor is None:
            return []
        first = int(np.searchsorted(self.group, self.group[-1]))
        places = self.numbers[first:]
        places = places[np.append(np.diff(self.begin[first:]) > 0, True)]
        old = int(np.searchsorted(self.times[places], self.floor, "right")) - 1
        places = places[max(0, old) :]
        columns = [self._source(self._latest(gives)[places], places) for gives in self.gives.T]
        source = np.stack(columns, axis=1)
        versions = _Versions(self.by_time[places], places, source, np.zeros(len(places), np.int32))
        schema = self.rows.schema
        rows = self._rows(versions, self.others[:0], schema.names)
        kind = pa.array(np.full(len(places), _VERSION), schema.field(_KIND).type)
        rows = rows.set_column(schema.get_field_index(_KIND), _KIND, kind)
        return pa.table(rows.columns, schema=schema).to_batches()

    def _given(self, versions: _Versions, others: Any) -> Any:
        """Returns the provided columns of versions and of rows that are passed through."""
        given = self.rows.column(PROVIDED_COLUMNS)
        places, rows = versions.place, self.active[self.by_time[versions.place]]
        # Records of one time are one version and provide what any of them does. A stored version may
        # have earlier names.
        anew = np.flatnonzero((places > self.begin[places]) | ~self.is_record[self.by_time[places]])
        rows = np.concatenate([rows, others])
        if len(anew):
            places, names = places[anew], self.whose.parts
            gives = np.stack(
                [self._latest(g)[places] >= self.begin[places] for g in self.gives.T], axis=1
            )
            sets, which = np.unique(gives, axis=0, return_inverse=True)
            lists: list[list[str] | None] = [
                None if one.all() else [names[n] for n in np.flatnonzero(one)] for one in sets
            ]
            rows[anew] = len(given) + which.ravel()
            given = pa.concat_arrays([given, pa.array(lists, given.type)])
        return given.take(pa.array(rows))

    def _rows(self, versions: _Versions, others: Any, names: Sequence[str]) -> Any:
        """Builds rows of versions and of rows that are passed through, by their records."""
        record = np.concatenate([self.active[versions.record], others])
        version = np.concatenate([self.active[self.by_time[versions.place]], others])
        as_they_are = np.zeros(len(others), np.int32)
        carried = np.concatenate([versions.carried, as_they_are])
        # In order, so that Spark has little to sort.
        order = np.argsort(record, kind="stable")
        own = {*self.whose.own, TIMESTAMP, _TIME, IS_TOMBSTONE}
        made = {
            PROVIDED_COLUMNS: self._given(versions, others).take(pa.array(order)),
            PROPAGATED_FROM: pa.array(carried[order]),
        }
        for number, part in enumerate(self.whose.parts):
            source = versions.source[:, number]
            source = np.where(source < 0, -1, self.active[source])
            source = np.concatenate([source, others])[order]
            made[part] = self.rows.column(part).take(pa.array(source, mask=source < 0))
        record, version = pa.array(record[order]), pa.array(version[order])
        columns = [
            made[name]
            if name in made
            else self.rows.column(name).take(version if name in own else record)
            for name in names
        ]
        return pa.table(columns, names=list(names))


class _Versions(NamedTuple):
    """Versions to output.

    Args:
        record: the record that makes or changes each version.
        place: the place of each version; the row there has the columns that the version has alone.
        source: the row that has the value of each part; -1 = null.
        carried: ``propagated_from``: 0 for a record, then 1, 2, … among the rows of one record.
    """

    record: Any
    place: Any
    source: Any
    carried: Any


def _merge_batches(batches: Iterator[Any], whose: _Columns, names: Sequence[str]) -> Iterator[Any]:
    held: list[Any] = []
    new: list[Any] = []
    for some in chain(batches, [None]):
        if some is not None:
            new.append(some)
        # At least as many new rows as are held: otherwise a key of which all is held takes quadratic
        # time.
        if _length(new) > (0 if some is None else _length(held)):
            (rows,) = pa.Table.from_batches([*held, *new]).combine_chunks().to_batches()
            batch = _Batch(rows, whose)
            for merged in batch.merged(names):
                yield from merged.to_batches(max_chunksize=_MANY)
            held, new = batch.left(), []


def _length(batches: Sequence[Any]) -> int:
    return sum(batch.num_rows for batch in batches)
