"""Tumbling and hopping windows: assigns records to windows, and computes when a window closes."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import TIMESTAMP, WINDOW_END, WINDOW_START
from vt_dagster.core.arrival_order import has_key, micros, with_columns
from vt_dagster.topology.windows import HoppingWindow, TumblingWindow


def placed(fresh: DataFrame, key: Sequence[str], window: TumblingWindow | HoppingWindow) -> DataFrame:
    """Returns each record once per window that contains it, with the window's start and end.

    A record without a key, which is dropped, gives one row without a window. Kafka has no windows that
    start before 1970; here such windows contain records from before 1970 only.
    """
    first, last = starts(window)
    if isinstance(window, TumblingWindow):
        rows = fresh.withColumn(WINDOW_START, first)
    else:
        first = F.when(has_key(key), first).otherwise(last)
        every = F.sequence(first, last, micros(window.advance))
        rows = fresh.withColumn(WINDOW_START, F.explode(every))
    rows = rows.withColumn(WINDOW_END, F.col(WINDOW_START) + micros(window.size))
    return with_columns(rows, dict(zip((WINDOW_START, WINDOW_END), ends(key), strict=True)))


def starts(window: TumblingWindow | HoppingWindow) -> tuple[Column, Column]:
    """Returns the starts of a record's first and last window, in epoch microseconds."""
    size, advance, at = micros(window.size), micros(window.advance), F.unix_micros(TIMESTAMP)
    last = at - F.pmod(at, advance)
    if isinstance(window, TumblingWindow):
        return last, last
    least = at - size + advance
    first = least - F.pmod(least, advance)
    return F.when(at >= 0, F.greatest(first, F.lit(0))).otherwise(first), last


def closes_at(window: TumblingWindow | HoppingWindow, start: Column) -> Column:
    """Returns the stream time (epoch microseconds, inclusive) from which on a window is closed."""
    return F.try_add(start + micros(window.size), micros(window.grace))


def ends(key: Sequence[str]) -> list[Column]:
    """Returns the start and end of a row's window as timestamps; null without a key."""
    ends = (WINDOW_START, WINDOW_END)
    return [F.when(has_key(key), F.timestamp_micros(c)).alias(c) for c in ends]
