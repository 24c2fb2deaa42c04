"""Valid times at which two logs of a versioned table give different rows. No Spark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from vt_dagster.columns import (
    IS_LATE,
    IS_LATEST,
    IS_TOMBSTONE,
    OFFSET,
    PARTITION,
    RECORDED_AT,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.storage import delta
from vt_dagster.storage.arrow_fold import (
    clip_at_valid_until,
    codes_of,
    micros,
    null_codes,
    values_by_partition,
)
from vt_dagster.storage.arrow_reader import AssetRows, columns_of, rows_of
from vt_dagster.storage.commit_log import Commit

MOST = 5_000_000
"""Maximum rows of both logs together: the comparison is in memory."""
_OPEN = np.iinfo(np.int64).max
_OF_THE_LOG = (PARTITION, OFFSET, RECORDED_AT, IS_LATEST, IS_LATE, TIMESTAMP, VALID_TO, IS_TOMBSTONE)
"""Columns that are ignored: they may differ between equal versions."""


def changed_answers(
    old: tuple[str, int, Commit], new: tuple[str, int, Commit], times: Any
) -> np.ndarray | None:
    """Returns for each time whether an as-of read differs between two logs in keys, values or
    ``valid_from``. Offsets and system times are ignored.

    Args:
        old, new: a table's directory, the version of its log and its last commit.
        times: ascending, epoch microseconds.

    Returns:
        booleans by time; None if the logs have more than ``MOST`` rows, or columns that cannot be
        compared.
    """
    like = columns_of(delta.require_table(f"{new[0]}/log", new[1]))
    sides = [
        _Side(root, commit, version, commit.shape, None, False, like)
        for root, version, commit in (old, new)
    ]
    if sum(side.size for side in sides) > MOST:
        return None
    first = int(times[0])
    (ours, *span), (theirs, *their_span) = (side.valid(first) for side in sides)
    count = ours.num_rows
    try:
        both = pa.concat_tables([ours, theirs], promote_options="permissive")
    except pa.ArrowTypeError:
        return None
    codes = _codes(both)
    most = int(codes.max(initial=-1)) + 1
    start, end = (_by_code(codes[:count], one, most) for one in span)
    their_start, their_end = (_by_code(codes[count:], one, most) for one in their_span)
    here, there = start < end, their_start < their_end
    found = np.zeros(len(times) + 1, np.int64)
    for low, high in (
        (
            np.where(here, start, their_start)[here ^ there],
            np.where(here, end, their_end)[here ^ there],
        ),
        *_edges(start, their_start, here & there),
        *_edges(end, their_end, here & there),
    ):
        np.add.at(found, np.searchsorted(times, low), 1)
        np.add.at(found, np.searchsorted(times, high), -1)
    return np.cumsum(found)[:-1] > 0


def _edges(one: Any, other: Any, where: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the intervals between differing bounds of equal rows."""
    some = where & (one != other)
    yield np.minimum(one, other)[some], np.maximum(one, other)[some]


def _by_code(codes: Any, times: Any, most: int) -> Any:
    """Returns the time of each row by its code; codes without a row get the largest time."""
    found = np.full(most, _OPEN)
    found[codes] = times
    return found


def _codes(rows: pa.Table) -> Any:
    """Returns one integer code per distinct row."""
    codes = np.zeros(rows.num_rows, np.int64)
    for name in rows.column_names:
        own = null_codes(rows.column(name)) + 1
        pairs = pa.chunked_array([pa.array(codes * (own.max(initial=0) + 1) + own)])
        codes = codes_of(pairs).astype(np.int64)
    return codes


@dataclass(frozen=True)
class _Side(AssetRows):
    """The rows of one log.

    Args:
        like: columns of the new log.
    """

    like: pa.Schema

    @property
    def size(self) -> int:
        """Approximate number of rows to read."""
        there = delta.exists(self.view_path)
        return sum(f.rows for f in delta.files(self.view_path)) if there else self.commit.total

    def valid(self, since: int) -> tuple[pa.Table, Any, Any]:
        """Returns the versions that are valid after a time, and the as-of times that return each:
        from (inclusive), to (exclusive)."""
        rows = self._folded("current", since)
        limits = values_by_partition(rows, self._limits or {}, -_OPEN)
        rows = clip_at_valid_until(rows, self.shape.valid_until)
        open_, start = rows.column(VALID_TO).is_null().to_numpy(), micros(rows, VALID_FROM)
        end = np.where(open_, _OPEN, micros(rows, VALID_TO))
        start = np.where(open_, start, np.maximum(start, limits))
        there = ~rows.column(IS_TOMBSTONE).to_numpy() & (start < end) & (end > since)
        names = [name for name in rows.column_names if name not in _OF_THE_LOG]
        return rows.select(names).filter(pa.array(there)), start[there], end[there]

    def _rows(
        self,
        path: str,
        version: int,
        wanted: delta.Wanted = delta.everything,
        like: pa.Schema | None = None,
    ) -> pa.Table:
        return rows_of(path, version, lambda _: None, wanted, self.like)
