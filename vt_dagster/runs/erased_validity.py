"""Validity intervals of the versions that an erase removes, so that stale reads can be reported.

Only times are kept, of all keys together; no key is kept.
"""

from __future__ import annotations

from pyspark.sql import Window
from pyspark.sql import functions as F

from vt_dagster.columns import IS_TOMBSTONE, VALID_FROM, VALID_TO
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Commit, Erasure
from vt_dagster.storage.erase_files import Found, Marked
from vt_dagster.storage.spark_reader import Head
from vt_dagster.topology.model import VersionedTable

SPANS, ERASURES = 16, 64
"""Limits on intervals per erase and erases per log; beyond these, intervals and erases are merged."""
_EVER = 2**63 - 1


def erasures(store: AssetStore, head: Head, marked: Marked, found: Found) -> list[Erasure]:
    """Returns the earlier erases of a log and the new one, with the validity of its erased rows.

    Args:
        head: the log before the erase.
        found: the erased rows of the log.

    Plan: one pass over the view, and a window over the erased rows.
    """
    commit = head.commit
    if not isinstance(store.node, VersionedTable):
        return []
    spans = _spans(store, head, marked)
    if not spans and found.first is None:
        return commit.erasures
    own = Erasure(batch=commit.batch + 1, spans=spans, first=found.first, last=found.last)
    return _bounded([*commit.erasures, own], commit)


def _spans(store: AssetStore, head: Head, marked: Marked) -> list[tuple[int, int]]:
    """Returns when an erased key had a value: [from, to), epoch microseconds; adjacent ones merged."""
    at = store.snapshot()
    rows = marked(store.view_at(at)).where(F.col("_hit") & ~F.col(IS_TOMBSTONE))
    low = F.unix_micros(VALID_FROM)
    high = F.coalesce(F.unix_micros(VALID_TO), F.lit(_EVER))
    spans = rows.select(low.alias("low"), high.alias("high"))
    before = Window.orderBy("low", "high").rowsBetween(Window.unboundedPreceding, -1)
    begins = (F.col("low") > F.max("high").over(before)).cast("int")
    upto = Window.orderBy("low", "high").rowsBetween(Window.unboundedPreceding, 0)
    counted = spans.withColumn("begins", F.coalesce(begins, F.lit(1)))
    merged = counted.withColumn("span", F.sum("begins").over(upto)).groupBy("span")
    told = merged.agg(F.min("low").alias("low"), F.max("high").alias("high")).orderBy("low")
    # The last interval covers all that follow it, to bound their number.
    last = F.least(F.col("span"), F.lit(SPANS))
    few = told.groupBy(last.alias("place")).agg(F.min("low").alias("low"), F.max("high").alias("high"))
    return [(row["low"], row["high"]) for row in few.orderBy("low").collect()]


def _bounded(some: list[Erasure], commit: Commit) -> list[Erasure]:
    while len(some) > ERASURES:
        one, other, *rest = some
        ends = [end for found in (one, other) for span in found.spans for end in span]
        first = [found.first for found in (one, other) if found.first is not None]
        last = {p: max(one.last.get(p, -1), other.last.get(p, -1)) for p in commit.next_offset}
        both = Erasure(
            batch=other.batch,
            spans=[(min(ends), max(ends))] if ends else [],
            first=min(first, default=None),
            last={p: offset for p, offset in last.items() if offset >= 0},
        )
        some = [both, *rest]
    return some
