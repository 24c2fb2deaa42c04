"""Encodes keys as numbers, for fast comparison across batches. No Spark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

pc: Any = pyarrow.compute
NONE = -1
"""Code of a key that contains a null, or that has no code."""
_WIDE = 1 << 31


class KeyCodes:
    """Assigns each key a number that is equal across batches. 0.0 equals -0.0, and NaN equals NaN.

    Args:
        columns: the number of columns of a key.
    """

    def __init__(self, columns: int) -> None:
        self._values: list[pa.Array | None] = [None] * columns
        self._pairs: list[dict[int, int]] = [{} for _ in range(columns)]

    def of(self, columns: Sequence[pa.ChunkedArray], new: bool = True) -> Any:
        """Returns the number of each row's key; ``NONE`` for a key that contains a null.

        Args:
            columns: the key's columns, in order.
            new: whether a key without a number gets one; else it is ``NONE``.
        """
        found: Any = None
        for place, column in enumerate(columns):
            codes = self._of_column(place, plain(column), new)
            found = codes if found is None else self._of_pairs(place, found, codes, new)
        return found

    def _of_column(self, place: int, values: Any, new: bool) -> Any:
        known = self._values[place]
        if new:
            fresh = pc.unique(values.drop_null())
            if known is not None:
                fresh = fresh.cast(known.type)
                fresh = fresh.filter(pc.is_null(pc.index_in(fresh, value_set=known)))
                fresh = pa.concat_arrays([known, fresh])
            self._values[place] = known = fresh
        if known is None:
            return np.full(len(values), NONE, np.int64)
        codes = pc.index_in(values.cast(known.type), value_set=known)
        return codes.cast(pa.int64()).fill_null(NONE).to_numpy(zero_copy_only=False)

    def _of_pairs(self, place: int, first: Any, second: Any, new: bool) -> Any:
        known, there = self._pairs[place], (first != NONE) & (second != NONE)
        both, where = np.unique(first[there] * _WIDE + second[there], return_inverse=True)
        if new:
            told = [known.setdefault(one, len(known)) for one in both.tolist()]
        else:
            told = [known.get(one, NONE) for one in both.tolist()]
        codes = np.full(len(first), NONE, np.int64)
        codes[there] = np.array(told, np.int64)[where]
        return codes


def plain(column: pa.ChunkedArray) -> Any:
    """Returns a column as one array that Arrow can compare: nested values as text, -0.0 as 0.0."""
    kind = column.type
    if pa.types.is_nested(kind):
        return pa.array([None if v is None else repr(v) for v in column.to_pylist()], pa.string())
    values = column.combine_chunks()
    values = values.chunk(0) if isinstance(values, pa.ChunkedArray) else values
    return pc.add(values, pa.scalar(0.0, kind)) if pa.types.is_floating(kind) else values
