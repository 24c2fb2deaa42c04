"""Folds the log's tail into a view with Arrow only, by the rules of ``core.versioned_table`` and
``core.plain_table``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vt_dagster.columns import (
    IS_FINAL,
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


def fold(
    base: pa.Table | None,
    tail: pa.Table | None,
    key: Sequence[str],
    limits: Mapping[int, int] | None,
    new_version_on: Sequence[str] | None = None,
) -> pa.Table:
    """Returns a table's rows with the log's tail folded in, see ``core.table_store.fold``.

    Args:
        base: rows of the view; None = none.
        tail: log rows after the view; None = none.
        limits: expiry horizon by partition, epoch microseconds; None = a plain table.
        new_version_on: columns whose change starts a version; repeats are collapsed as for readers, see
            ``core.versioned_table.collapse_repeats``. None = every record starts a version.

    Source: FORMAT 4.1.3, 4.2.1, 4.2.3, section 7; kip889-validity-interval.
    """
    if tail is None:
        there: Any = base
        if limits is None:
            return there
        there = there if new_version_on is None else _collapsed(there, key, new_version_on)
        return there.filter(pa.array(~_expired(there, limits)))
    fresh = tail.drop_columns([c for c in (IS_LATEST, OLD) if c in tail.column_names])
    if limits is not None:
        moments = fresh.column(TIMESTAMP)
        fresh = fresh.append_column(VALID_FROM, moments)
        fresh = fresh.append_column(VALID_TO, pa.nulls(fresh.num_rows, moments.type))
    rows = fresh if base is None else pa.concat_tables([base, fresh], promote_options="default")
    codes = [codes_of(rows.column(k)) for k in key]
    order = arrival_order(rows)
    if limits is not None:
        order.append(micros(rows, VALID_FROM))
    rank = np.lexsort((*order, *reversed(codes)))
    rows, codes = rows.take(pa.array(rank)), [code[rank] for code in codes]
    follows = np.zeros(rows.num_rows, bool)
    if rows.num_rows:
        follows[:-1] = np.logical_and.reduce([code[:-1] == code[1:] for code in codes])
    if limits is None:
        deleted = rows.column(IS_TOMBSTONE).to_numpy()
        return rows.filter(pa.array(~follows & ~deleted))
    start = micros(rows, VALID_FROM)
    ends = np.zeros_like(start)
    ends[:-1] = start[1:]
    kind = rows.schema.field(VALID_TO).type
    place = rows.schema.get_field_index(VALID_TO)
    rows = rows.set_column(
        place, VALID_TO, pa.array(ends, mask=~follows).cast(pa.timestamp("us")).cast(kind)
    )
    if OLD in rows.column_names:
        rows = _with_old_of_peers(rows, codes, start)
    replaced = follows & (ends <= start)
    if new_version_on is None:
        return rows.filter(pa.array(~replaced & ~_expired(rows, limits)))
    # Collapse before expiry: a live version may begin with a record that has expired.
    rows = _collapsed(rows.filter(pa.array(~replaced)), key, new_version_on)
    return rows.filter(pa.array(~_expired(rows, limits)))


def _collapsed(rows: pa.Table, key: Sequence[str], new_version_on: Sequence[str]) -> pa.Table:
    """See ``core.versioned_table.collapse_repeats``.

    Args:
        rows: need no ``old`` column if they include every record of their keys.
    """
    codes = [codes_of(rows.column(k)) for k in key]
    rank = np.lexsort((micros(rows, VALID_FROM), *reversed(codes)))
    rows, codes = rows.take(pa.array(rank)), [code[rank] for code in codes]
    lives = ~rows.column(IS_TOMBSTONE).to_numpy()
    first = np.ones(rows.num_rows, bool)
    first[1:] = ~np.logical_and.reduce([code[1:] == code[:-1] for code in codes])
    same = np.zeros(rows.num_rows, bool)
    values = [null_codes(rows.column(c)) for c in new_version_on]
    same[1:] = lives[:-1] & np.logical_and.reduce([code[1:] == code[:-1] for code in values])
    old = rows.column(OLD).combine_chunks() if OLD in rows.column_names else None
    fields = {} if old is None else dict(zip([f.name for f in old.type], old.flatten(), strict=True))
    if old is not None:
        as_old = old.is_valid().to_numpy(zero_copy_only=False)
        for c in new_version_on:
            both = pa.chunked_array([*rows.column(c).chunks, fields[c].cast(rows.column(c).type)])
            both_codes = null_codes(both)
            as_old = as_old & (both_codes[: len(rows)] == both_codes[len(rows) :])
        same = np.where(first, as_old, same)
    else:
        same &= ~first
    repeats = lives & same
    opens = np.flatnonzero(~repeats | first)
    last = np.append(opens[1:], rows.num_rows)[: len(opens)] - 1
    place = rows.schema.get_field_index(VALID_TO)
    ends = rows.column(VALID_TO).take(pa.array(last))
    begun, told = rows.take(pa.array(opens)), pa.array(repeats[opens])
    begun = begun.set_column(place, VALID_TO, ends)
    if old is None:
        return begun
    for name in begun.column_names:
        field = fields.get(TIMESTAMP if name == VALID_FROM else name)
        if field is not None:
            place, now = begun.schema.get_field_index(name), begun.column(name)
            then = field.take(pa.array(opens)).cast(now.type)
            begun = begun.set_column(place, name, pc.call_function("if_else", [told, then, now]))
    return begun.drop_columns([OLD])


def _with_old_of_peers(rows: pa.Table, codes: Sequence[Any], start: Any) -> pa.Table:
    """Returns sorted rows; rows of one key and timestamp share the ``old`` of the row that has it."""
    place = rows.schema.get_field_index(OLD)
    index, there = np.arange(rows.num_rows), rows.column(OLD).is_valid().to_numpy()
    peers = np.logical_and.reduce([code[1:] == code[:-1] for code in (*codes, start)])
    for i in np.flatnonzero(peers & ~there[1:]) + 1:
        index[i] = index[i - 1]
    return rows.set_column(place, OLD, rows.column(OLD).take(pa.array(index)))


def clip_at_valid_until(rows: pa.Table, valid_until: str | None) -> pa.Table:
    """See ``core.versioned_table.clip_at_valid_until``."""
    if valid_until is None:
        return rows
    ends = rows.column(VALID_TO)
    own = rows.column(valid_until).cast(ends.type)
    place = rows.schema.get_field_index(VALID_TO)
    earlier = own.is_valid().to_numpy() & (ends.is_null().to_numpy() | _before(own, ends))
    return rows.set_column(place, VALID_TO, pc.call_function("if_else", [pa.array(earlier), own, ends]))


def _before(ones: Any, others: Any) -> Any:
    return pc.call_function("less", [ones, others]).fill_null(False).to_numpy()


def _expired(rows: pa.Table, limits: Mapping[int, int]) -> Any:
    """See ``core.versioned_table.drop_expired``."""
    limit = values_by_partition(rows, limits, np.iinfo(np.int64).min)
    ended = ~rows.column(VALID_TO).is_null().to_numpy() & (micros(rows, VALID_TO) <= limit)
    return ended | (rows.column(IS_TOMBSTONE).to_numpy() & (micros(rows, VALID_FROM) < limit))


def with_finality(rows: pa.Table, ends: Mapping[int, int]) -> pa.Table:
    """See ``core.stream_table_join.with_finality``.

    Args:
        ends: by partition, epoch microseconds.
    """
    homes, moments = rows.column(PARTITION).to_pylist(), micros(rows, TIMESTAMP)
    final = [bool(t < ends.get(p, t)) for p, t in zip(homes, moments, strict=True)]
    return rows.append_column(IS_FINAL, pa.array(final, pa.bool_()))


def values_by_partition(rows: pa.Table, values: Mapping[int, int], otherwise: int) -> Any:
    partitions = rows.column(PARTITION).to_numpy()
    found = np.full(len(partitions), otherwise, np.int64)
    for partition, value in values.items():
        found[partitions == partition] = value
    return found


def arrival_order(rows: pa.Table) -> list[Any]:
    """Returns sort keys for ``np.lexsort`` (the primary key last) that give the order of
    ``core.arrival_order``."""
    order = [rows.column(c).to_numpy() for c in (PARTITION, OFFSET)]
    return [*order, *([micros(rows, RECORDED_AT)] if RECORDED_AT in rows.column_names else [])]


def micros(rows: pa.Table, column: str) -> Any:
    """Returns times as epoch microseconds; null becomes 0."""
    times = rows.column(column)
    whole = times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64())
    return whole.fill_null(0).to_numpy()


def codes_of(column: pa.ChunkedArray) -> Any:
    """Returns one integer code per distinct value; all NaN are equal, and -0.0 equals 0.0."""
    kind = column.type
    if pa.types.is_floating(kind):
        return np.unique(column.to_numpy() + 0.0, return_inverse=True)[1]
    if pa.types.is_nested(kind):
        return np.unique([repr(value) for value in column.to_pylist()], return_inverse=True)[1]
    return column.combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)


def null_codes(column: pa.ChunkedArray) -> Any:
    """Returns the codes of :func:`codes_of`, with -1 for null."""
    there = column.is_valid().to_numpy()
    found = np.full(len(column), -1, np.int64)
    if there.any():
        found[there] = codes_of(column.filter(pa.array(there)))
    return found
